"""Records are read from files strictly, and every fault of a file has its sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from msgspec import Meta, field

from autopar.documents.checks import DOCUMENTS
from autopar.documents.json import faults, is_plain, read_record, record_schema
from autopar.documents.schemas import json_schemas
from autopar.errors import DocumentError
from autopar.records import KeyFault, Record, number, whole_number


class _Item(Record):
    """An item."""

    low: Annotated[float, number(0.0, 1e12)]
    high: Annotated[float, number(0.0, 1e12)] = 5.0
    count: Annotated[int, whole_number(1)] | None = None
    few: Annotated[int, whole_number(0, 9)] = 0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise KeyFault("low", f"is {self.low:g}, above {self.high:g}")


class _File(Record):
    """A file."""

    format: Literal["a", "b"]
    items: Annotated[tuple[_Item, ...], Meta(min_length=1)]
    named: dict[str, _Item] = field(default_factory=dict)
    flag: bool = False


GOOD: dict[str, Any] = {
    "format": "a",
    "items": [{"low": 1, "count": 2}, {"low": 0.5, "high": 0.5}],
    "named": {"x": {"low": 2}},
}


def changed(key: str, value: object) -> dict[str, Any]:
    """Return the good file with another first item."""
    return {**GOOD, "items": [{**GOOD["items"][0], key: value}]}


def test_what_is_right_is_read() -> None:
    commented = {"_about": 1, **changed("_unit", "s")}
    read = read_record(_File, "f.json", commented)
    assert read == _File(format="a", items=(_Item(low=1.0, count=2),), named={"x": _Item(low=2.0)})
    assert isinstance(read.items[0].low, float)
    assert list(faults(_File, GOOD)) == []


@pytest.mark.parametrize(
    ("data", "key", "words"),
    [
        ({**GOOD, "format": "c"}, "format", ["'c'", "'a' or 'b'"]),
        ({**GOOD, "flag": 1}, "flag", ["1", "true or false"]),
        ({**GOOD, "items": []}, "items", ["[]", "a list of at least 1 item"]),
        ({**GOOD, "items": {}}, "items", ["{}", "a list"]),
        ({**GOOD, "items": [3]}, "items[0]", ["3", "an object"]),
        ({**GOOD, "named": {"x": {}}}, "named.x.low", ["missing", "a number from 0 to 1e12"]),
        ({"items": GOOD["items"]}, "format", ["missing"]),
        (changed("low", math.nan), "items[0].low", ["nan", "a number from 0 to 1e12"]),
        (changed("low", math.inf), "items[0].low", ["inf"]),
        (changed("low", 10**400), "items[0].low", ["a number from 0 to 1e12"]),
        (changed("low", True), "items[0].low", ["true"]),
        (changed("low", "1"), "items[0].low", ["'1'"]),
        (changed("low", 6), "items[0].low", ["is 6, above 5"]),
        (changed("count", 2.0), "items[0].count", ["2.0", "a whole number from 1"]),
        (changed("count", 0), "items[0].count", ["0"]),
        (changed("few", 10**30), "items[0].few", ["1000000", "a whole number from 0 to 9"]),
        (changed("cuont", 1), "items[0].cuont", ["unknown", "'count'"]),
    ],
)
def test_one_fault(data: dict[str, Any], key: str, words: list[str]) -> None:
    ((found, problem),) = faults(_File, data)
    assert found == key
    assert all(word in problem for word in words), problem
    with pytest.raises(DocumentError) as caught:
        read_record(_File, Path("f.json"), data)
    assert (caught.value.key, caught.value.problem) == (key, problem)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_all_faults_of_a_file() -> None:
    data = {
        "items": [{"low": "x", "high": -1}, {"lwo": 1}],
        "named": {"a": {"low": 7, "count": 0}, "b": 3},
        "flag": "yes",
    }
    keys = ["items[0].low", "items[0].high", "items[1].lwo", "items[1].low"]
    keys += ["named.a.low", "named.a.count", "named.b", "flag"]
    assert sorted(key for key, _ in faults(_File, data)) == sorted(["format", *keys])
    # what is wrong before what is missing
    with pytest.raises(DocumentError, match=r"items\[0\]\.low"):
        read_record(_File, "f.json", data)


def test_the_schema_is_as_strict() -> None:
    schema = record_schema(_File)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    assert validator.is_valid(GOOD)
    for wrong in ({**GOOD, "unknown": 1}, changed("low", -1), changed("count", 1.5), {}, []):
        assert not validator.is_valid(wrong), wrong
    assert schema["description"] == "A file."


def _numbers(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "number":
            yield schema
        for value in schema.values():
            yield from _numbers(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _numbers(value)


def test_numbers_of_files_have_bounds() -> None:
    """NaN is in no range, and nothing else refuses it in what is read at once."""
    json_schemas()  # imports the modules of all documents
    plain = {role: kind for role, kind in DOCUMENTS.items() if is_plain(kind)}
    # the largest files are sidecars
    assert {"accuracy", "calibration", "model", "overlap", "sidecar"} <= plain.keys()
    for kind in plain.values():
        for found in _numbers(record_schema(kind)):
            assert {"minimum", "exclusiveMinimum"} & found.keys(), kind
            assert "maximum" in found, kind


def test_half_of_a_surrogate_pair_is_no_number(tmp_path: Path) -> None:
    """JSON can say it, and no kind but text takes it."""

    class Sized(Record):
        size: int

    with pytest.raises(DocumentError, match="expected"):
        read_record(Sized, tmp_path / "file.json", {"size": "\ud800"})
