"""A page of HTML in a browser without a window."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TELL = """
const tell = value => {
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(value);
  document.body.append(result);
};
"""


def driven(page: str, script: str, folder: Path) -> Any:
    """Returns what ``script``, a module that runs after the page's own, gives to its function ``tell``; skips the test
    where there is no browser."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    path = folder / "page.html"
    path.write_text(f'{page}<script type="module">{TELL}{script}</script>')
    options = "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--virtual-time-budget=5000"
    command = [CHROMIUM, *options, f"--user-data-dir={folder}/profile", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    assert result, done.stderr[-2000:]
    return json.loads(html.unescape(result[1]))
