"""Every command without torch that the documentation shows runs as it is printed there."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar
from autopar.rates import command as estimate_cli
from docs.make_answers import sections, shows_answers
from profiler.plan import command as plan_cli
from profiler.show import command as show_cli
from profiler.verify import command as verify_cli
from search.commands import (
    estimate as cli_estimate,
    explain as explain_cli,
    explore as cli_explore,
    export as export_cli,
    search as cli,
)

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (
    "docs/guides/quickstart.md",
    "docs/guides/measure-cluster.md",
    "docs/guides/measure-model.md",
    "docs/concepts/estimates.md",
    "docs/concepts/closed-form.md",
    "docs/guides/other-gpus.md",
    "docs/guides/pictures.md",
    "docs/guides/check-a-plan.md",
    "docs/guides/export.md",
    "docs/guides/launch.md",
)
RUN = {
    "autopar-search": cli.run,
    "autopar-explain": explain_cli.run,
    "autopar-estimate": cli_estimate.run,
    "autopar-explore": cli_explore.run,
    "autopar-profile-estimate": estimate_cli.run,
    "profile-show": show_cli.run,
    "profile-plan": plan_cli.run,
    "autopar-export": export_cli.run,
    "autopar-verify": verify_cli.run,
}
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def plain_blocks(text: str) -> list[str]:
    """Return the code blocks without a language; those with one may need what is not here.

    Sections whose answers `make gallery` writes are excluded: it runs their commands in a shell.
    """
    kept = "".join(part for part in sections(text) if not shows_answers(part))
    return [block for _, language, block in BLOCK.findall(kept) if not language]


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of every command in the code blocks of a page."""
    for block in plain_blocks((ROOT / page).read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] in RUN:
                yield words


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with measured files where the pages have them, as working directory."""
    shutil.copytree(ROOT / "hardware_configs" / "a100-80gb_1x8", tmp_path / "hardware")
    shutil.copytree(ROOT / "models" / "llama2-7b" / "configs", tmp_path / "profiles")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def takes_long(words: list[str]) -> bool:
    """Return whether a command takes seconds: one that writes every execution to a file does."""
    return "--all" in words


@pytest.mark.parametrize(
    ("page", "long"),
    [(page, False) for page in PAGES if list(commands(page))]
    + [
        pytest.param(page, True, marks=pytest.mark.slow)
        for page in PAGES
        if any(map(takes_long, commands(page)))
    ],
)
def test_commands_run_as_printed(
    page: str, long: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page, after `make search`, which all pages begin with."""
    assert cli.run([]) == 0
    for words in commands(page):
        if takes_long(words) and not long:
            continue
        capsys.readouterr()
        code = RUN[words[0]](words[1:])
        assert code == 0, f"{shlex.join(words)}: {capsys.readouterr().err}"


def test_python_examples_run(folder: Path) -> None:
    """docs/guides/python.md shows every name of the interface; its examples run in their order."""
    page = (ROOT / "docs" / "guides" / "python.md").read_text(encoding="utf-8")
    code = "".join(block for _, language, block in BLOCK.findall(page) if language == "python")

    exec(compile(code, "docs/guides/python.md", "exec"), {})
    shown = set(re.findall(r"autopar\.(\w+)", code))
    assert set(autopar.__all__) - shown == set()
    assert shown - set(autopar.__all__) <= {"documents"}, "no name of the interface"


def test_documentation_shows_commands() -> None:
    """The pattern above finds what it must."""
    found = [words for page in PAGES for words in commands(page)]

    assert {words[0] for words in found} == set(RUN)
    assert len(found) >= 10


def test_golden_exploration_shows_what_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """The exploration on docs/concepts/closed-form.md is that of the current code."""
    path = ROOT / "docs" / "concepts" / "closed-form.md"
    end = "--top 2\n"
    text = path.read_text(encoding="utf-8")
    blocks = plain_blocks(text)
    place = next(n for n, block in enumerate(blocks) if block.endswith(end))
    assert cli_explore.run(shlex.split(blocks[place].replace("\\\n", " "))[1:]) == 0
    report = capsys.readouterr().out
    if request.config.getoption("--update-golden"):
        old, new = (f"{end}```\n\n```\n{shown}```" for shown in (blocks[place + 1], report))
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return
    assert blocks[place + 1] == report, "the page shows another answer; run `make golden`"


def test_golden_comparison_shows_what_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """The plans of docs/concepts/closed-form.md in four models are those of the current code."""
    path = ROOT / "docs" / "concepts" / "closed-form.md"
    text = path.read_text(encoding="utf-8")
    blocks = plain_blocks(text)
    for place, block in enumerate(blocks):
        if "autopar-estimate --plan" not in block:
            continue
        report = ""
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            capsys.readouterr()
            assert RUN[words[0]](words[1:]) == 0, line
            report = capsys.readouterr().out
        if request.config.getoption("--update-golden"):
            old, new = (f"{block}```\n\n```\n{shown}```" for shown in (blocks[place + 1], report))
            text = text.replace(old, new, 1)
            path.write_text(text, encoding="utf-8")
        else:
            assert blocks[place + 1] == report, "the page shows other steps; run `make golden`"
