"""Launch scripts: the words that the reader finds are those that bash starts, or it refuses."""

from __future__ import annotations

import re

import pytest

from tests.oracles import bash, bash_scripts
from tests.oracles.bash import (
    LAUNCH,
    Outcome,
    bash_launches,
    bash_version,
    manual_scripts,
    outcomes,
    sections,
    shown,
)
from tests.oracles.bash_scripts import minimised, random_script

pytestmark = pytest.mark.skipif(bash_version() < 4, reason="needs bash 4 or later")

STUB = tuple(LAUNCH.split())


def silent(found: list[Outcome]) -> str:
    """Return the scripts with other words than those of bash, without an error."""
    return "\n".join(shown(outcome) for outcome in found if outcome.kind == "silent")


def test_one_construct() -> None:
    """Each construct of bash's manual is read as bash reads it, or refused."""
    found = outcomes([script for _, script in manual_scripts()])
    assert silent(found) == ""
    assert sum(outcome.kind == "equal" for outcome in found) > len(found) / 2


@pytest.mark.parametrize("scripts", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_scripts(scripts: int) -> None:
    """Scripts of many constructs are read as bash reads them, or refused."""
    for start in range(1, scripts, 200):
        texts = [random_script(n).text for n in range(start, min(start + 200, scripts + 1))]
        found = outcomes(texts)
        assert silent(found) == ""
        assert sum(outcome.kind == "equal" for outcome in found) > len(found) / 4


def test_bash_is_asked() -> None:
    """The words are those of the last launch, whatever happens around it."""
    scripts = {
        f"{LAUNCH} a 'b c' ''\n": (*STUB, "a", "b c", ""),
        f"{LAUNCH} a; {LAUNCH} b\n": (*STUB, "b"),
        f"{LAUNCH} a; python other.py --x\n": (*STUB, "a"),
        "python other.py --x $(date)\n": ("python", "other.py", "--x", "Qqrstu"),
        f"cd .. && exit 1\n{LAUNCH}\n": None,
        f"while :; do :; done & {LAUNCH} $RUN_ID; kill $!\n": (*STUB, "Qqrstu"),
        f"if; then\n{LAUNCH}\n": None,
    }
    assert bash_launches([*scripts]) == [*scripts.values()]


def test_scripts_do_not_see_each_other() -> None:
    """Each has an own folder, own variables and an input of one line."""
    first = "export A=1; echo x > file; cd ..\n"
    second = f'read B; {LAUNCH} "[$A$B]" *\n'
    assert bash_launches([first, second, second])[1:] == [(*STUB, "[Qqrstu]", "*")] * 2


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("x", "x", True),
        ("x", "y", False),
        ("$RUN_ID-x", "Qqrstu-x", True),
        ("${RUN_ID%/}-x", "Qqrstu-y", False),
        ("$A", "Qqrstu", False),
        ("$RUN_IDs", "Qqrstus", True),
        ("$RUN_IDs ", "Qqrstu", False),
        ("${#RUN_ID}", "2", True),
        ("a$(date)", "a", False),
        ("a$(date)b`date`", "aQqrstubQqrstu", True),
        ("~/x", "a/home/x", True),
        ("$(date)", "", False),
    ],
)
def test_words_of_run_time(ours: str, theirs: str, same: bool) -> None:
    """A value known only at run time equals any text that is not empty."""
    assert bash.same_word(ours, theirs, ["$RUN_ID", "$(date)", "`date`"]) is same


def test_a_difference_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes an array for its first word is silent; other lines are removed."""

    def wrong(scripts: list[str]) -> list[Outcome]:
        found = []
        for script, theirs in zip(scripts, bash_launches(scripts), strict=True):
            ours = theirs and tuple(word for word in theirs if word != "c")
            found.append(Outcome(script, "equal" if ours == theirs else "silent", ours, theirs))
        return found

    monkeypatch.setattr(bash_scripts, "outcomes", wrong)
    script = f"A=1\nif true; then\nP=(a b)\nP+=(c d)\nfi\n{LAUNCH} $A ${{P[@]}} x\n"
    (outcome,) = wrong([script])
    assert minimised(outcome).script == f"P=(a b)\nP+=(c d)\n{LAUNCH} ${{P[@]}}\n"


def test_grammar_is_whole() -> None:
    """Every symbol is defined and used, and a seed gives one script."""
    forms = dict(sections("bash_grammar.bash"))
    used = set(re.findall(r"<([a-z]+)>", "\n".join("\n".join(one) for one in forms.values())))
    assert used - {"nl"} == {name for name in forms if name != "script" and "set " not in name}
    assert random_script(1) == random_script(1) != random_script(2)
