"""Ranges of what-if questions, and the documents that they make."""

from __future__ import annotations

import pytest

from autopar.documents.checks import load_document
from autopar.errors import DocumentError, OptionError
from autopar.records import replace
from search.closed_form import MOST_SEARCHES as MOST
from search.closed_form.calculon import Application, System
from search.closed_form.questions import Axis, parse_axis, variants
from tests.parity.test_calculon_engine import APPLICATION, SYSTEM

DOCUMENTS = {
    "system": load_document(System, SYSTEM),
    "application": load_document(Application, APPLICATION),
}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("300:900:x1.5", (300, 450, 675)),
        ("100:800:x2", (100, 200, 400, 800)),
        ("800:100:x0.5", (800, 400, 200, 100)),
        ("1:5:2", (1, 3, 5)),
        ("1:4:2", (1, 3)),
        ("5:1:-2", (5, 3, 1)),
        ("0:1:0.1", (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)),
        ("300, 450,300", (300, 450)),
        ("1e-5", (1e-5,)),
        ("7:7:1", (7,)),
    ],
)
def test_ranges(text: str, values: tuple[float, ...]) -> None:
    """Lists, steps and factors, both ends included where they are met."""
    axis = parse_axis(f" system.mem1.GiB = {text} ")

    assert axis == Axis(path="system.mem1.GiB", values=values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("system.mem1.GiB", "expected PATH=RANGE"),
        ("=1,2", "expected PATH=RANGE"),
        ("a=1:2:3:4", "expected PATH=RANGE"),
        ("a=1,nan", "'nan'"),
        ("a=1,inf", "'inf'"),
        ("a=1:2:x", "'' of"),
        ("a=1:2:-1", "up to 2"),
        ("a=2:1:1", "down to 1"),
        ("a=1:2:0", "does not end"),
        ("a=1:2:x0.5", "does not end"),
        ("a=-1:2:x2", "does not end"),
        ("a=0:1:1e-9", f"expected {MOST} at most"),
    ],
)
def test_what_is_no_range(text: str, said: str) -> None:
    """Each is one sentence that shows what was written."""
    with pytest.raises(OptionError, match=r"^--sweep: ") as caught:
        parse_axis(text)
    assert said in str(caught.value)


def test_every_combination_once_and_the_rest_as_it_was() -> None:
    """The last axis runs fastest; counts stay counts, and the documents given are left alone."""
    axes = (
        parse_axis("system.networks.1.size=64,128"),
        parse_axis("application.attn_kv_heads=4,8"),
        parse_axis("system.matrix.float16.gflops_efficiency.0.1=0.5"),
    )
    found = list(variants(DOCUMENTS, axes))

    assert [values for values, _ in found] == [
        (64, 4, 0.5),
        (64, 8, 0.5),
        (128, 4, 0.5),
        (128, 8, 0.5),
    ]
    system, application = found[-1][1]["system"], found[-1][1]["application"]
    assert system.networks[1].size == 128
    assert system.matrix["float16"].gflops_efficiency[0] == [100, 0.5]
    assert application == replace(DOCUMENTS["application"], attn_kv_heads=8)
    assert DOCUMENTS["system"] == load_document(System, SYSTEM)


def test_without_axes_the_documents_themselves() -> None:
    """One setting, of nothing."""
    assert list(variants(DOCUMENTS, ())) == [((), DOCUMENTS)]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["system.networks=1"], "Did you mean"),
        (["system.networks.0.must_be_filled=1"], "Did you mean"),
        (["model.hidden=1"], "application.hidden"),
        (["system.mem1.GiB=1:200:1", "system.mem2.GiB=1:200:1"], "40000 combinations"),
    ],
)
def test_wrong_paths(texts: list[str], said: str) -> None:
    """A path that leads to no number names the nearest one that does."""
    with pytest.raises(OptionError) as caught:
        list(variants(DOCUMENTS, [parse_axis(text) for text in texts]))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "system.networks.0.efficiency=0.5,1.5",
        "system.networks.0.size=2.5",
        "system.mem1.GBps=0",
        "application.hidden=-1",
    ],
)
def test_values_that_a_document_cannot_have(text: str) -> None:
    """The reader of the document says so, with the key."""
    with pytest.raises(DocumentError, match=r"^--sweep: (system|application): key '") as caught:
        list(variants(DOCUMENTS, [parse_axis(text)]))
    path = text.split(".", 1)[1].split("=")[0]
    assert caught.value.key == path.replace(".0.", "[0].")
