"""Every row of the table of bad input: exit 2 or 3 and one message on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

import pytest

from autopar.rates import command as estimate_cli
from profiler.model import command as model_cli
from profiler.plan import command as plan_cli
from profiler.verify import command as verify_cli
from search.commands import (
    estimate as cli_estimate,
    explain as explain_cli,
    explore as cli_explore,
    export as export_cli,
    search as cli,
)
from tests.command_lines import last_said
from tests.e2e import (
    bad_estimates_table,
    bad_explore_table,
    bad_export_table,
    bad_models_table,
    bad_plan_table,
    bad_verify_table,
)
from tests.e2e.bad_input_table import COMMANDS, Case, cases, prepare
from tests.warm import new_interpreter

pytest.importorskip("torch", reason="the profilers need torch")

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "tests" / "golden" / "bad_input.md"
RUN = {
    COMMANDS[0]: cli.run,
    COMMANDS[1]: explain_cli.run,
    COMMANDS[2]: estimate_cli.run,
    bad_models_table.COMMAND: model_cli.run,
    bad_estimates_table.COMMAND: cli_estimate.run,
    bad_explore_table.COMMAND: cli_explore.run,
    bad_export_table.COMMAND: export_cli.run,
    bad_plan_table.COMMAND: plan_cli.run,
    bad_verify_table.COMMAND: verify_cli.run,
}
CASES = (
    *cases(),
    *bad_models_table.cases(),
    *bad_estimates_table.cases(),
    *bad_explore_table.cases(),
    *bad_export_table.cases(),
    *bad_plan_table.cases(),
    *bad_verify_table.cases(),
)
Answer = tuple[int, str, str]
HEAD = """# Bad input

What the commands answer to input that cannot be used; this page is written from the runs of
`tests/e2e/bad_input_table.py` by `make golden`.
Exit code 2: an input or an option is unusable. 3: the question is valid and no plan exists.
"""


def name(case: Case) -> str:
    """Return the row's name for test reports."""
    return f"{case.section}: {case.what}".replace(" ", "-")


def with_outputs(case: Case) -> list[str]:
    """Return the arguments of a row, writing no files unless the row is about that."""
    # what a row says stands for what its base says, but where the row is about that
    twice = case.what.startswith("an option twice")
    arguments = list(case.arguments) if twice else last_said(case.arguments, case.command)
    if case.command != COMMANDS[0] or "--output-config-path" in case.arguments:
        return arguments
    # First, so that a row whose last option lacks its value stays one.
    return ["--output-config-path", "none", *arguments]


def fill(folder: Path, case: Case) -> None:
    """Put good files into a folder and spoil them as a row says."""
    prepare(folder, ROOT)
    if case.command == bad_models_table.COMMAND:
        bad_models_table.prepare_models(folder)
    if case.command == bad_estimates_table.COMMAND:
        bad_estimates_table.prepare_estimates(folder, ROOT)
    if case.command == bad_explore_table.COMMAND:
        bad_explore_table.prepare_explore(folder, ROOT)
    if case.command == bad_export_table.COMMAND:
        bad_export_table.prepare_exports(folder)
    if case.command == bad_plan_table.COMMAND:
        bad_plan_table.prepare_plans(folder)
    if case.edit is not None:
        case.edit(folder)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Answer]:
    """Run every row once, in process.

    Rows that spoil or write a file have a folder of their own, the others one for each command.
    """
    found = {}
    start, path = Path.cwd(), list(sys.path)
    good: dict[str, Path] = {}
    for case in CASES:
        folder = good.get(case.command) if case.edit is None else None
        if folder is None:
            # answers name it: its number would be that of those that wrote something before
            folder = tmp_path_factory.mktemp("row") / "case"
            folder.mkdir()
            fill(folder, case)
        before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
        out, err = io.StringIO(), io.StringIO()
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = RUN[case.command](with_outputs(case))
        finally:
            os.chdir(start)
            sys.path[:] = path  # a module of one's own is imported from the working directory
        found[case] = (code, out.getvalue(), err.getvalue())
        if case.edit is None:
            after = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
            good.pop(case.command, None)
            if after == before:
                good[case.command] = folder
    return found


def wrong(case: Case, code: int, out: str, err: str) -> list[str]:
    """Return what is wrong with an answer: one line from the command, no traceback, no address.

    A long remedy has a second line.
    """
    words = ["Traceback", "internal error", "<class", "  "]
    if case.section != "module of your own":  # which raises and returns what it likes
        words += ["Error:", "None"]
    found = {
        "exit code": code != case.code,
        "stdout": bool(out) != case.prints,
        "lines": err.replace("\nhint: ", " ").count("\n") != 1,
        "period": err.endswith(".\n"),
        "name": not err.startswith(f"{case.command}: "),
        "length": len(err) >= 600,
        "address": re.search(r"\b0x[0-9a-f]{6,}", err) is not None,
        **{word: word in err for word in words},
    }
    return [what for what, is_wrong in found.items() if is_wrong]


@pytest.mark.whole
def test_bad_input_is_one_sentence(answers: dict[Case, Answer]) -> None:
    """Exit code and message of every row, in one test, because one process runs all rows."""
    found = {name(case): (wrong(case, *answer), answer) for case, answer in answers.items()}
    assert {row: why for row, why in found.items() if why[0]} == {}


@pytest.mark.whole
def test_good_files_are_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows fail for what was spoilt: the folder they start from works."""
    prepare(tmp_path, ROOT)
    monkeypatch.chdir(tmp_path)
    documents = {case.arguments: case for case in cases() if case.edit is not None}

    for arguments, case in documents.items():
        if "--why-not" not in arguments and "--sp-space" not in arguments:
            assert RUN[case.command](with_outputs(case)) == 0, arguments


GOOD = {
    bad_models_table.COMMAND: (bad_models_table.GOOD, " 0 failed, 0 skipped"),
    bad_estimates_table.COMMAND: (bad_estimates_table.GOOD, ""),
    bad_explore_table.COMMAND: (bad_explore_table.GOOD, ""),
    bad_export_table.COMMAND: (bad_export_table.GOOD, None),
    bad_plan_table.COMMAND: (bad_plan_table.GOOD, ""),
}
"""By command what its rows start from, and what is said of it; None: not a word."""


@pytest.mark.whole
@pytest.mark.parametrize("command", GOOD)
def test_what_the_rows_of_a_command_start_from_is_good(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They, too, fail for what was spoilt."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    lines, said = GOOD[command]
    for number, arguments in enumerate(lines):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        fill(folder, Case(section="", what="", arguments=(), command=command))
        monkeypatch.chdir(folder)
        assert RUN[command](list(arguments)) == 0, arguments
        err = capsys.readouterr().err
        assert err == "" if said is None else said in err, arguments


@pytest.mark.whole
@pytest.mark.parametrize("case", [CASES[0], CASES[-1], *CASES[60:120:30]], ids=name)
def test_installed_command_answers_the_same(
    answers: dict[Case, Answer], case: Case, tmp_path: Path
) -> None:
    """A few rows through the entry point of a new process."""
    fill(tmp_path, case)
    module = RUN[case.command].__module__
    code = f"import sys; from {module} import run; sys.exit(run(sys.argv[1:]))"
    done = new_interpreter(code, *with_outputs(case), cwd=tmp_path)

    assert (done.returncode, done.stderr) == (answers[case][0], answers[case][2])


def test_golden_page_is_current(
    answers: dict[Case, Answer], request: pytest.FixtureRequest
) -> None:
    """tests/golden/bad_input.md shows what the commands answer today."""
    lines = [HEAD]
    for section in dict.fromkeys(case.section for case in CASES):
        lines += [f"## {section[0].upper()}{section[1:]}", "", "| what | exit | answer |"]
        lines.append("|---|---|---|")
        for case in CASES:
            if case.section == section:
                code, _, err = answers[case]
                text = err.strip().replace("|", "\\|").replace("\n", "<br>")
                lines.append(f"| {case.what} | {code} | {text} |")
        lines.append("")
    page = "\n".join(lines)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.is_file(), "the golden page does not exist; `make golden` writes it"
    assert PAGE.read_text(encoding="utf-8") == page, "the golden page differs; run `make golden`"
