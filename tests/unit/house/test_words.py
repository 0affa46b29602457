"""The counter of awkward wording: it finds each kind, and no plain sentence."""

from __future__ import annotations

import json

import pytest

from docs import words

PLAIN = '''"""Step time and memory of a plan."""

LIMIT_S = 2.0
"""Seconds until a search stops; None: never."""


def peak_bytes(stage: int) -> int:
    """Return the peak allocated bytes of a stage."""
    # The allocator rounds every block up to 512 bytes.
    return 512 * stage
'''


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("somebody", "a file that somebody wrote"),
        ("program-says", "the answer says it"),
        ("beside", "a copy beside the compute"),
        ("what-has", "Return what a layer saves."),
        ("stands", "it stands in the table"),
        ("rests-on", "the price rests on datasheets"),
        ("left-out", "options that are left out"),
        ("so-many", "so many ranks"),
        ("of-which", "the layers of which it is made"),
        ("one-s-own", "a card of one's own"),
        ("long-sentence", "word " * 36),
    ],
)
def test_each_kind_of_prose_is_found_where_it_is(kind: str, text: str) -> None:
    """The hit has the number of its line, in Markdown, in comments and in C++."""
    for name, source in (
        ("a.md", f"# Title\n\n{text}\n"),
        ("a.py", f"X = 1\n\n# {text}\n"),
        ("a.cpp", f"int x;\n\n// {text}\n"),
    ):
        assert (kind, 3) in {(hit.kind, hit.where) for hit in words.hits_of_file(name, source)}


def test_docstrings_and_notes_are_found_by_their_beginning() -> None:
    """A relative clause or an adverb is no beginning of a docstring or of a note."""
    source = f'"""Of a step."""\nX = 1\n"""Whose it is."""\n\n\ndef f():\n    """{"a" * 101}."""\n'
    found = sorted(words.hits_of_file("a.py", source), key=lambda hit: hit.where)
    assert [hit[:2] for hit in found] == [
        ("doc-opening", 1),
        ("note-opening", 3),
        ("doc-first-long", 7),
    ]


def test_plain_prose_has_no_hits() -> None:
    """Code blocks and code spans are not prose."""
    assert words.hits_of_file("a.py", PLAIN) == []
    assert words.hits_of_file("a.md", "Use it.\n\n```\nsomebody says\n```\n") == []


def test_commits_are_checked_for_subject_and_body() -> None:
    """A long subject, one without an area, and a large change without a body."""
    log = "".join(
        f"\x1e{name}\x1f{subject}\x1f{body}\x1f\n 3 files changed, {lines} insertions(+)\n"
        for name, subject, body, lines in (
            ("a1", "search: count candidates once", "", 9),
            ("b2", f"search: {'x' * 80}", "why", 90),
            ("c3", "Fixed it", "", 90),
        )
    )
    found = [(hit.kind, hit.where) for hit in words.hits_of_commits(log)]
    assert found == [("subject-long", "b2"), ("subject-form", "c3"), ("no-body", "c3")]


def test_a_count_that_rises_is_an_error_and_one_that_falls_is_none() -> None:
    """The line names the kind, both counts and what to write."""
    (line,) = words.risen({"beside": 3, "odds": 1}, {"beside": 2, "odds": 4})
    assert line.startswith("beside: 3 places, 2 allowed")
    assert words.KINDS["beside"].remedy in line


def test_the_table_of_counts_has_known_kinds() -> None:
    """docs/words.json is written by `python docs/words.py --write`."""
    table = json.loads(words.TABLE.read_text(encoding="utf-8"))
    assert table.keys() <= words.KINDS.keys()
    assert all(isinstance(number, int) and number >= 0 for number in table.values())
