"""For any input, a command answers: no traceback, no hang, no file changed, no silence.

A run is a seed of `tests.property.hostile`; `hostile_runs` classifies its end. Valid but
implausible input is in `suspicious`, and the notes about it in `tests/golden/suspicious_input.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autopar.cli import SUBCOMMANDS
from tests.property.hostile import KINDS, Run, prepare_good
from tests.property.hostile_runs import BAD, Done, Ended, Runner, classify, runner
from tests.property.hostile_shapes import ignored, judged
from tests.property.suspicious import SUSPICIOUS, Suspicion, news

pytestmark = pytest.mark.whole

pytest.importorskip("torch", reason="processes are copies of one that has torch imported")

HEAD = """Input that can be read and is hardly meant, one thing at a time; this page is written from
the runs of `tests/property/suspicious.py` by `make golden`. What is said is what the same command
does not say of good input; a sentence after exit code 2 or 3 refuses it."""
FEW, MANY, PART = 120, 5_000, 500


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Yield the runner of seeds; its processes end with the module."""
    with runner(tmp_path_factory.mktemp("hostile")) as one:
        yield one


def report(found: list[Done]) -> str:
    """Return the table of counts by class, and every run with a forbidden end."""
    counts = Counter(done.outcome for done in found)
    cpu_s = sum(done.ended.cpu_s for done in found)
    wall_s = max(done.ended.wall_s for done in found)
    peak_gib = max(done.ended.peak_bytes for done in found) / 2**30
    worst = f"longest {wall_s:.1f} s, most memory {peak_gib:.2f} GiB"
    lines = [f"{len(found)} runs, {cpu_s:.1f} CPU s, {worst}"]
    lines += [f"  {name:<12}{counts[name]:>6}" for name in sorted({*counts, *BAD})]
    for done in found:
        if done.outcome in BAD:
            lines += [
                f"{done.outcome}: {done.detail!a:.400}",
                f"  {SUBCOMMANDS[done.run.name][0]}, {done.run.kind}: {done.run.what!a:.200}",
                f"  repeat it with: {done.command()}",
            ]
    return "\n".join(lines)


def judge(found: list[Done]) -> None:
    """Print the table and fail if a run has a forbidden end."""
    text = report(found)
    print(text)
    assert not any(done.outcome in BAD for done in found), text


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_input_is_answered(runs: Runner, kind: str) -> None:
    """Some runs of every kind; `make test-slow` has thousands."""
    first = 1_000_000 * (KINDS.index(kind) + 1)
    judge([runs.run(first + seed, kind=kind) for seed in range(FEW // len(KINDS))])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, MANY, PART))
def test_much_hostile_input_is_answered(runs: Runner, first: int) -> None:
    """Thousands of runs; the seed selects the damage."""
    judge([runs.run(seed) for seed in range(first, first + PART)])


def test_hostile_files_are_answered(runs: Runner) -> None:
    """Some files of every kind, with sizes and types that no run has."""
    judge([judged(runs, seed) for seed in range(FEW // 2)])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 3 * MANY, PART))
def test_many_hostile_files_are_answered(runs: Runner, first: int) -> None:
    """Like `python -m benchmarks.hostile_runs --runs 15000`."""
    judge([judged(runs, seed) for seed in range(first, first + PART)])


def test_a_value_that_is_passed_over_is_recognised() -> None:
    """The answer is that without the value, and another one with the right value."""

    def done(out: str, what: str) -> Done:
        run = Run(seed=0, name="check", kind="shapes", what=what, arguments=())
        ended = Ended(code=0, peak_bytes=0, wall_s=0.0, cpu_s=0.0, out=out.encode(), err=b"")
        return Done(run=run, ended=ended, outcome="ok", detail="", folder="")

    answers = {"good": done("12 s", "good"), "without": done("15 s", "good")}
    wrong = "a.json: bf16.enabled = 7"
    assert ignored(lambda kind: answers[kind], done("15 s", wrong))
    assert not ignored(lambda kind: answers[kind], done("20 s", wrong))
    assert not ignored(lambda kind: answers[kind], done("12 s", wrong))
    assert not ignored(lambda kind: answers[kind], done("15 s", "a.json: lr = 10"))
    category = "a.json: traceEvents.1.cat = "
    assert ignored(lambda kind: answers[kind], done("15 s", category + "7"))
    assert not ignored(lambda kind: answers[kind], done("15 s", category + "'x'"))


@pytest.mark.parametrize(
    ("outcome", "code", "out", "err", "touched"),
    [
        ("ok", 0, "result info /nan/x", "", []),
        ("refused", 2, "", "autopar: a.json: is empty\n", []),
        ("infeasible", 3, "", "autopar: no plan fits\n", []),
        ("HANG", None, "", "", []),
        ("MEMORY", 1, "", "MemoryError\n", []),
        ("SPECIAL", 0, "", "", ["fifo"]),
        ("CRASH", -11, "", "", []),
        ("CRASH", 120, "", "", []),
        ("TRACEBACK", 1, "", "Traceback (most recent call last):\n", []),
        ("INTERNAL", 1, "", "x: internal error, please report it\n", []),
        ("WARNING", 0, "", "/a/b.py:3: RuntimeWarning: overflow\n", []),
        ("CONTROL", 0, "a\x1b]0;t\x07", "", []),
        ("CONTROL", 2, "", "x: \x9b31m\n", []),
        ("LONG", 2, "", "x" * 300 + "\n", []),
        ("SENTENCES", 2, "", "", []),
        ("SENTENCES", 1, "", "x: failed\n", []),
        ("NONSENSE", 0, "step  nan s", "", []),
        ("NONSENSE", 0, "capacity   inf GiB", "", []),
    ],
)
def test_what_must_not_happen_is_recognised(
    outcome: str, code: int | None, out: str, err: str, touched: list[str]
) -> None:
    """Each class has an example, so that a series of only good runs is meaningful."""
    run = Run(seed=0, name="search", kind="words", what="", arguments=())
    ended = Ended(
        code=code, peak_bytes=0, wall_s=0.0, cpu_s=0.0, out=out.encode(), err=err.encode()
    )
    assert classify(run, ended, touched)[0] == outcome


@pytest.fixture(scope="module")
def answers(runs: Runner) -> dict[Suspicion, tuple[Done, list[str]]]:
    """Return the results of every row and of its run for comparison."""
    said: dict[tuple[str, tuple[str, ...]], str] = {}
    found = {}
    for place, row in enumerate(SUSPICIOUS):
        key = (row.name, row.good)
        if key not in said:
            said[key] = text(runs, row.run(good=True), f"good{place}", None)[1]
        done, words = text(runs, row.run(), f"odd{place}", row.edit)
        found[row] = done, news(said[key], words)
    return found


def text(
    runs: Runner, run: Run, name: str, edit: Callable[[Path], None] | None
) -> tuple[Done, str]:
    """Return the result of a run and its whole output."""
    folder = runs.folder / name / "here"
    folder.mkdir(parents=True)
    prepare_good(folder)
    if edit is not None:
        edit(folder)
    done = runs.start(run, folder)
    return done, (done.ended.err + b"\n" + done.ended.out).decode()


def test_suspicious_input_is_spoken_of(
    answers: dict[Suspicion, tuple[Done, list[str]]], golden: Callable[[str, str], None]
) -> None:
    """The page lists accepted input and the notes about it."""
    lines = ["# Suspicious input", "", HEAD, "", "| what | command | exit | what is said |"]
    lines += ["|---|---|---|---|"]
    for row, (done, said) in answers.items():
        assert done.outcome not in BAD, (row.what, done.detail)
        words = " / ".join(said)[:600].replace("|", "\\|") or "**nothing**"
        name = SUBCOMMANDS[row.name][0]
        lines.append(f"| {row.what} | {name} | {done.ended.code} | {words} |")
    golden("suspicious_input.md", "\n".join(lines) + "\n")
