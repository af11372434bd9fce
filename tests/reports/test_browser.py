"""The report in a real browser: no errors, no requests, nothing wider than the window."""

import json
import shutil
import subprocess

import pytest

from dpsur.cli import main

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PROBE = """<script>
window.errors = [];
addEventListener("error", e => window.errors.push(e.message));
addEventListener("load", () => { document.title = JSON.stringify({
  errors: window.errors, wide: document.documentElement.scrollWidth > innerWidth,
  requests: performance.getEntriesByType("resource")
    .filter(r => !r.name.startsWith("data:")).length,
  charts: document.querySelectorAll("svg").length,
  drawn: [...document.querySelectorAll("svg .curve")].every(c => c.getTotalLength() > 50),
  dark: getComputedStyle(document.body).backgroundColor}) })
</script></head>"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.mark.parametrize(("width", "private"), [(1280, False), (500, True)])
def test_the_page_in_a_browser(trained, tmp_path, width, private):
    out = tmp_path / "report.html"
    options = ["--private"] if private else []
    assert main(["report", str(trained), "--quiet", "--out", str(out), *options]) == 0
    out.write_text(out.read_text().replace("</head>", PROBE))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},1200", "--dump-dom", out.as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    title = page.split("<title>")[1].split("</title>")[0].replace("&quot;", '"')
    found = json.loads(title)
    assert found["errors"] == []
    assert found["requests"] == 0
    assert not found["wide"]
    assert found["charts"] >= (5 if private else 3)
    assert found["drawn"]
