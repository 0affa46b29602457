"""Output to files: plain printing and rich give the same characters."""

from __future__ import annotations

import io
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings, strategies as st

from autopar.command import console as module
from autopar.command.console import Console, Table, escape
from autopar.command.show import make_table

TEXTS = st.one_of(
    st.text(st.sampled_from(" ab,-:[]\\█░é中\n\t\x1b…(/)1_"), max_size=30),
    st.text(st.sampled_from("ab  "), min_size=90, max_size=110),
    st.text(st.sampled_from("abcdef  \n"), min_size=100, max_size=400),
    st.lists(st.integers(1, 104).map("a".__mul__), max_size=9).map(" ".join),
    st.sampled_from((":key: x", "[b]x", "[/]", "x\\", " x ", "", "  ", "a\n\nb", "x\n", "\u2028")),
)
CELLS = st.one_of(
    st.text(st.sampled_from(" ab,-:[\\█é中\n1"), max_size=12),
    st.text(st.sampled_from("abc "), min_size=10, max_size=60),
    st.sampled_from(("", " ", "12.5 ms", "  ████", "[x]", ":key:")),
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Return a table of any form."""
    names = draw(st.lists(CELLS, min_size=1, max_size=5))
    table = make_table(
        *names,
        left=draw(st.integers(0, 3)),
        words_last=draw(st.booleans()),
        spaced=draw(st.booleans()),
    )
    width = len(names)
    for row in draw(st.lists(st.lists(CELLS, min_size=width, max_size=width), max_size=4)):
        table.add_row(*map(escape, row), style=draw(st.sampled_from((None, "bold red"))))
    return table


def printed(what: object, *, by_rich: bool, soft_wrap: bool = False) -> str:
    """Return the output of a console to a file, by its own choice or always by rich."""
    stream = io.StringIO()
    console = Console(stream)
    with patch.object(module, "_is_plain", (lambda text: False) if by_rich else module._is_plain):
        console.print(what, style="bold", soft_wrap=soft_wrap)
    return stream.getvalue()


@given(TEXTS, st.booleans())
@example("a" * 100, False)
@example("a" * 101, False)
@settings(deadline=None, max_examples=300)
def test_texts_are_the_same_by_hand(text: str, soft_wrap: bool) -> None:
    """Plain text, and text that only rich can render."""
    what = escape(text)
    by_hand = printed(what, by_rich=False, soft_wrap=soft_wrap)
    assert by_hand == printed(what, by_rich=True, soft_wrap=soft_wrap)


@pytest.mark.whole
@given(tables())
@settings(deadline=None, max_examples=300)
def test_tables_are_the_same_by_hand(table: Table) -> None:
    """Tables that fit and tables that do not."""
    assert printed(table, by_rich=False) == printed(table, by_rich=True)
