"""Try an installed dpsur as a stranger would: `python tests/release_check.py README.md`.

Run by `make release-check` with the Python of an environment that holds the built package only.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path


def main(readme: Path) -> None:
    """Run the commands of a new user, then the code blocks of the README."""
    import dpsur

    home = Path(dpsur.__file__).resolve()
    assert "site-packages" in home.parts, f"dpsur is imported from {home}, not from the package"
    command = Path(sys.executable).with_name("dpsur")
    with tempfile.TemporaryDirectory() as folder:
        for line in (
            "--version",
            "--help",
            "doctor",
            "proof --path",
            "train --task mnist-5k --epsilon 3 --out run --quiet",
            "evaluate run",
            "verify run",
            "report run",
        ):
            print(f"$ dpsur {line}", flush=True)
            subprocess.run([command, *line.split()], cwd=folder, check=True)
        for code in re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL):
            print("$ python  # a block of the README", flush=True)
            subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    print(f"dpsur {dpsur.__version__}: installed package works")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
