"""Run the commands shown on pages, write their output below them, and draw the pictures.

A block of code without a language contains commands as typed. A `text` block directly after it is
their output, which this script writes: stdout, then stderr; only stdout if the block cuts an answer
short (`| head`). A block with a `title` is a file of that name, created before the commands. The
blocks of a section run one after the other in one empty folder. A section without such output is
not run. Pictures are those of `docs/make_pictures.py`.

    python -m docs.make_answers [PAGE or PICTURE...] [--check]
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import autopar
from docs.make_pictures import PICTURES

DOCS = Path(__file__).resolve().parent
PAGES = (
    "../README.md",
    "index.md",
    "concepts/how-it-works.md",
    *(f"guides/{path.name}" for path in sorted((DOCS / "guides").glob("*.md"))),
)
_BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^## .*$", re.MULTILINE)
_SHELL = ""
_ANSWER = "text"
_PROGRESS = re.compile(r"^autopar-explore: \d+ of \d+ combinations searched\n", re.MULTILINE)
_CLOCK = re.compile(r"\b\d[\d.]*(?= s of CPU\b)|(?<=: )[\d,]+(?= tokens/s per GPU with )")
"""Figures that differ in every run: CPU seconds, and suggestions limited by them."""
_CUT = re.compile(r" (?:\||>) ")
_ROWS = re.compile(r"(<!-- accuracy: [^\n]*-->\n).*?(<!-- end of accuracy -->)", re.DOTALL)
_SOURCES = {
    "Megatron-Bridge dense": "dense models, Megatron-Bridge",
    "Megatron-Bridge mixtures": "mixtures of experts, Megatron-Bridge",
    "MPT A100": "MPT with Composer on A100",
    "torchtitan": "torchtitan, mostly on H100 limited to 500 W",
    "BLOOM": "BLOOM, on a slow network",
}
"""Left-out sources of docs/concepts/accuracy.md that the README shows, and their names there."""
_VERSION = re.compile(r"(?<=of autopar )[\w.]+")


class FailedError(Exception):
    """A command of a page ended with an exit code that the page does not expect."""


def sections(text: str) -> list[str]:
    """Return the sections of a page that run separately: each second-level heading begins one."""
    starts = [found.start() for found in _SECTION.finditer(text)]
    return [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]


def shows_answers(section: str) -> bool:
    """Return whether this script writes the output of commands in a section."""
    blocks = list(_BLOCK.finditer(section))
    return any(
        (one[1], two[1]) == (_SHELL, _ANSWER) and not section[one.end() : two.start()].strip()
        for one, two in itertools.pairwise(blocks)
    )


def answered(section: str) -> str:
    """Return a section with the current output of its commands.

    Raises
    ------
    FailedError: a command ends with an error that no page shows.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"  # names of models may come from it
        folder.mkdir()
        return "".join(_pieces(section, folder))


def _pieces(section: str, folder: Path) -> Iterator[str]:
    end, printed = 0, None
    for block in _BLOCK.finditer(section):
        language, title, body = block.groups()
        between, end = section[end : block.start()], block.end()
        shown = language == _ANSWER and printed is not None
        if shown and not between.strip():
            yield f"{between}```{_ANSWER}\n{printed}```"
            printed = None
            continue
        yield between + block[0]
        if title:
            path = folder / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body, encoding="utf-8")
        elif language == _SHELL:
            printed = _printed(body, folder)
    yield section[end:]


def _printed(commands: str, folder: Path) -> str:
    """Return the output of commands on a terminal of 100 columns."""
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "HOME": str(folder),
    }
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=False,
    )
    # 2 and 3 are answers as well: errors of the input, or the reason why nothing fits
    if done.returncode not in (0, 2, 3) or "internal error" in done.stderr:
        raise FailedError(f"{commands}exit code {done.returncode}\n{done.stderr[-2000:]}")
    said = "" if _CUT.search(commands) else done.stderr
    # errors come first, as on a screen; notes on an answer follow it
    text = said + done.stdout if done.returncode else done.stdout + said
    text = _PROGRESS.sub("", _CLOCK.sub("...", text))
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def accuracy_table(page: str) -> str:
    """Return the held-out errors of some sources; page : docs/concepts/accuracy.md."""
    table = page.partition("<!-- left-out:")[2].partition("<!-- end of left-out -->")[0]
    rows = {cells[0]: cells for cells in (line.split(" | ") for line in table.splitlines())}
    lines = ["| source | runs | median error | inside the 90 % interval |", "|---|---|---|---|"]
    for source, name in _SOURCES.items():
        _, runs, _, median, _, _, inside, *_ = rows[f"| {source}"]
        lines.append(f"| {name} | {runs} | {median} % | {inside} % |")
    return "\n".join(lines) + "\n"


def page_of_today(name: str) -> str:
    """Return a page with the current output of its commands, or a picture of current figures."""
    if name in PICTURES:
        return PICTURES[name]()
    text = (DOCS / name).read_text(encoding="utf-8")
    if _ROWS.search(text):
        rows = accuracy_table((DOCS / "concepts" / "accuracy.md").read_text(encoding="utf-8"))
        text = _ROWS.sub(lambda found: f"{found[1]}{rows}{found[2]}", text)
    return _VERSION.sub(
        autopar.__version__,
        "".join(
            answered(section) if shows_answers(section) else section for section in sections(text)
        ),
    )


def main(arguments: list[str]) -> int:
    """Write the pages and pictures, or with `--check` list those that are out of date."""
    names = [name for name in arguments if name != "--check"] or (*PAGES, *PICTURES)
    stale = []
    for name in names:
        text, path = page_of_today(name), DOCS / name
        if path.is_file() and text == path.read_text(encoding="utf-8"):
            continue
        stale.append(name)
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    sys.stdout.writelines(f"docs/{name}\n" for name in stale)
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
