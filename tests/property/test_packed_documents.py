"""Lists of documents packed at once, and one by one: the same rows, or the same refusal."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st

from autopar.documents.checks import load_document
from autopar.errors import InputError
from search.closed_form import native
from search.closed_form.calculon import Execution
from search.closed_form.calculon.documents import CHOICES
from search.closed_form.calculon.engine import pack_executions
from search.closed_form.tensor2d.engine import pack_candidates
from tests.often import often
from tests.unit.explore_documents import EXECUTION

PLAIN = EXECUTION | {
    "num_procs": 64,
    "tensor_par": 8,
    "pipeline_par": 4,
    "data_par": 2,
    "batch_size": 128,
    "fused_activation": True,
    "activation_recompute": "full",
    "data_par_overlap": 0,
    "weight_offload": 1,
    "training": True,
    "structure_type": "llama",
}
COLUMNS = {
    "1d": ("dp", "tp", "pp", "mbs", "nv_tp", "nv_dp", "nv_pp"),
    "2d": ("dp", "tp1", "tp2", "pp", "mbs", "nb", "nv_tp1", "nv_tp2", "nv_dp", "nv_pp"),
    "2d-seqp": ("dp", "tp1", "tp2", "pp", "mbs", "nv_tp1", "nv_tp2", "nv_dp", "nv_pp"),
}
ODD: st.SearchStrategy[Any] = st.sampled_from(
    (
        *(0, 1, 7, -1, 2**31 - 1, 2**31, 2**70, True, False, 1.0, float("nan")),
        *(None, "float16", "x", "8", []),
        *(np.int64(3), np.float32(2), np.str_("float16")),
    )
)


def packed(pack: Callable[[], Any]) -> Any:
    """Return the packed rows, or the message and the kind of the refusal."""
    try:
        return pack().tolist()
    except (InputError, OverflowError, TypeError, ValueError) as error:
        return type(error), str(error)


def one_by_one(pack: Callable[[], Any]) -> Any:
    """Return the same result without the compiled columns."""
    columns = mock.Mock(return_value=None)
    with (
        mock.patch("search.closed_form.calculon.engine.plain_columns", columns),
        mock.patch("search.closed_form.tensor2d.engine.plain_columns", columns),
    ):
        found = packed(pack)
    assert columns.called
    return found


@st.composite
def executions(draw: st.DrawFn) -> list[Any]:
    """A few executions, most of them plain, some with an invalid key or value."""
    documents: list[Any] = []
    for _ in range(draw(st.integers(0, 4))):
        document: dict[Any, Any] = dict(PLAIN)
        for name, words in CHOICES.items():
            document[name] = draw(st.sampled_from(words))
        for name in draw(st.lists(st.sampled_from(sorted(PLAIN)), max_size=2)):
            document[name] = draw(ODD)
        for name in draw(st.lists(st.sampled_from(sorted(PLAIN)), max_size=1)):
            del document[name]
        if draw(st.integers(0, 9)) == 0:
            document[draw(st.sampled_from(["unknown", "_note"]))] = 1
        kind = draw(st.sampled_from(["dict"] * 6 + ["mapping", "document"]))
        if kind == "mapping":
            documents.append(MappingProxyType(document))
        elif kind == "document":
            documents.append(load_document(Execution, PLAIN))
        else:
            documents.append(document)
    return documents


@often(120, 500, documents=executions())
def test_executions_are_packed_as_one_by_one(documents: list[Any]) -> None:
    """For any values, and whichever document is invalid first."""
    assert repr(packed(lambda: pack_executions(documents))) == repr(
        one_by_one(lambda: pack_executions(documents))
    )


@often(120, 500, data=st.data(), strategy=st.sampled_from(sorted(COLUMNS)))
def test_candidates_are_packed_as_one_by_one(data: st.DataObject, strategy: Any) -> None:
    """With and without the product that two axes have, in some of them or in all."""
    rows: list[Any] = []
    for _ in range(data.draw(st.integers(0, 4))):
        row: dict[str, Any] = {name: data.draw(st.integers(0, 9)) for name in COLUMNS[strategy]}
        for name in data.draw(st.lists(st.sampled_from(COLUMNS[strategy]), max_size=1)):
            row[name] = data.draw(ODD)
        if (
            data.draw(st.integers(0, 3)) == 0
            and type(row.get("tp1")) is type(row.get("tp2")) is int
        ):
            row["tp"] = row["tp1"] * row["tp2"]
        if data.draw(st.integers(0, 9)) == 0:
            row[data.draw(st.sampled_from(["tp", "nb", "unknown"]))] = data.draw(ODD)
        if data.draw(st.integers(0, 9)) == 0:
            row.pop(data.draw(st.sampled_from(COLUMNS[strategy])), None)
        rows.append(row)
    assert repr(packed(lambda: pack_candidates(strategy, rows))) == repr(
        one_by_one(lambda: pack_candidates(strategy, rows))
    )


def test_plain_documents_are_not_checked_one_by_one() -> None:
    """Dictionaries and documents that were read go the fast way, also without processors."""
    short = {name: value for name, value in PLAIN.items() if name != "num_procs"}
    documents = [PLAIN, short, load_document(Execution, PLAIN)] * 3
    with mock.patch("search.closed_form.calculon.engine.load_document", side_effect=AssertionError):
        rows = pack_executions(documents)

    assert rows.size == 9
    assert (rows["num_procs"] == 64).all()
    assert (rows == rows[0]).all()


@pytest.mark.parametrize("length", [0, 1, 40_000])
def test_columns_have_a_value_for_every_document(length: int) -> None:
    """In their order; a key that may be absent has its default."""
    documents = [{"a": n, **({"b": True} if n % 2 else {})} for n in range(length)]
    fields = {
        "a": native.DocumentField(largest=native.LARGEST),
        "b": native.DocumentField(largest=1, flag=True, default=native.ABSENT),
    }
    columns = native.plain_columns(documents, fields)

    assert columns is not None
    assert columns["a"].tolist() == list(range(length))
    assert columns["b"].tolist() == [1 if n % 2 else native.ABSENT for n in range(length)]
