"""A page of pictures in a real browser, where one is installed: it draws, and asks for nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from search.commands import search

_BROWSER = next(
    (found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))),
    None,
)
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-quic"),
    # the log of a page's script, errors included
    *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=2000", "--dump-dom"),
)

pytestmark = pytest.mark.skipif(_BROWSER is None, reason="no Chromium is installed")


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_is_drawn(width: int, folder: Path) -> None:
    words = "--model llama3-8b --hardware h100:1x8 --seq-length 4096 --settle-bsz 32 --tp 2 --pp 2"
    assert search.run([*words.split(), "--engine", "megatron", "--html", "page.html"]) == 0
    assert _BROWSER is not None
    # a window is never as narrow as a phone, but a frame is; what is in it is written beside it
    frame = folder / "frame.html"
    frame.write_text(
        f'<iframe src="page.html" width="{width}" height="900" style="border:0"></iframe><script>'
        "const frame = document.querySelector('iframe');"
        "frame.onload = () => setTimeout(() => {"
        "const page = frame.contentDocument, root = page.documentElement;"
        "document.body.dataset.seen = [frame.contentWindow.innerWidth, root.scrollWidth];"
        "document.body.append(page.body);"
        "}, 500);</script>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            *(_BROWSER, *_OPTIONS, "--allow-file-access-from-files", "--window-size=1400,1000"),
            *(f"--user-data-dir={folder / 'profile'}", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    seen = re.search(r'data-seen="(\d+),(\d+)"', done.stdout)
    assert seen is not None
    inner, needed = map(int, seen.groups())
    assert inner == width
    # nothing but tables and the timeline, which say so, goes on to the side
    assert needed <= inner
    # errors of a script, and what the page's own rules forbid, are on the console
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    # what the script fills: the stages to choose from, and legends of the first
    assert len(re.findall(r"<option value=", done.stdout)) == 2
    legend = re.search(r'<ul class="legend" id="terms".*?</ul>', done.stdout, re.DOTALL)
    assert legend is not None
    assert legend[0].count("<li>") >= 4
    assert re.search(r'<canvas id="timeline"[^>]*height="[1-9]\d+"', done.stdout)
