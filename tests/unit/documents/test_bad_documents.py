"""Bad input in every document is one sentence: file, key, value, remedy.

Classes that every document shares are rows of `tests/e2e/bad_input_table.py`, answered by commands.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.json import read_record
from autopar.documents.sidecar import Sidecar
from autopar.errors import DocumentError
from tests.unit.documents_support import DOCUMENTS, SIDECAR, read, write_all

KEYS: dict[str, tuple[str, ...]] = {
    "allreduce": ("allreduce_size_2_consec_1",),
    "p2p": ("pp_size_2",),
    "overlap": ("overlap_coe",),
    "sp_time": ("all2all_size_2_64MB_time",),
    "computation": ("layertype_0_bsz1_seq2048",),
    "memory": ("layertype_0_sp", "2048", "parameter_size"),
    "sidecar": ("memory_bytes",),
}
"""A number in every document."""


def content(kind: str) -> dict[str, Any]:
    """Return a copy of the valid document."""
    return copy.deepcopy(SIDECAR if kind == "sidecar" else DOCUMENTS[kind])


def overflowing(kind: str) -> str:
    """Return the document with its number replaced by one beyond float64."""
    data = content(kind)
    *parents, last = KEYS[kind]
    node = data
    for key in parents:
        node = node[key]
    node[last] = 12345.5
    return json.dumps(data).replace("12345.5", "1e999")


def one_sentence(error: DocumentError) -> str:
    """Return the message, which must be one printable line without a traceback."""
    text = str(error)
    assert "\n" not in text
    assert "Traceback" not in text
    assert len(text) < 600
    assert error.exit_code == 2
    return text


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: " \n", "the file is empty"),
        (lambda _: '{"a":' * 100_000, "brackets nest deeper than 64"),
        (lambda _: '{"a": ' + "9" * 5000 + "}", "has an integer of 5,000 digits"),
        (overflowing, "the value is inf, expected"),
    ],
    ids=["blank", "deep", "long number", "overflow"],
)
def test_bad_content(make: Callable[[str], str], said: str, kind: str, tmp_path: Path) -> None:
    """What the table of bad input does not have."""
    paths = write_all(tmp_path)
    paths[kind].write_text(make(kind), encoding="utf-8")
    with pytest.raises(DocumentError) as error:
        read(paths, kind)
    text = one_sentence(error.value)
    assert text.startswith(f"{paths[kind]}: ")
    assert said in text
    if make is overflowing:
        assert f"key {'.'.join(KEYS[kind])!r}" in text


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_device_is_no_file(tmp_path: Path, kind: str) -> None:
    """Reading it could wait forever."""
    paths = write_all(tmp_path) | {kind: Path("/dev/null")}
    with pytest.raises(DocumentError, match="not a regular file"):
        read(paths, kind)


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_comments_are_ignored(tmp_path: Path, kind: str) -> None:
    """Keys beginning with an underscore are the user's own."""
    paths = write_all(tmp_path)
    paths[kind].write_text(json.dumps({**content(kind), "_note": ["x", None]}), encoding="utf-8")
    read(paths, kind)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"parameter_size": 1.0}, "layertype_0_sp.2048.tp_activation_per_bsz_dict"),
        (
            {"parameter_size": 1.0, "tp_activation_per_bsz_dict": {"0": 1.0}},
            "layertype_0_sp.2048.tp_activation_per_bsz_dict.0",
        ),
        (
            {"parameter_size": 1.0, "tp_activation_per_bsz_dict": {"checkpoint": 1.0}},
            "layertype_0_sp.2048.tp_activation_per_bsz_dict",
        ),
        (
            {"parameter_sizes": 1.0, "tp_activation_per_bsz_dict": {"1": 1.0}},
            "layertype_0_sp.2048.parameter_sizes",
        ),
        ([1.0], "layertype_0_sp.2048"),
    ],
)
def test_bad_layer_tables(tmp_path: Path, table: object, key: str) -> None:
    """Inside the memory tables: missing fields, illegal degrees, misspelt fields."""
    paths = write_all(tmp_path)
    data = {**content("memory"), "layertype_0_sp": {"2048": table}}
    paths["memory"].write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(DocumentError) as error:
        read(paths, "memory")
    assert f"key {key!r}: " in one_sentence(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"document": "p2p", "unit": "GB/s"},
            "key 'document': the value is 'p2p', expected 'sp_time'",
        ),
        ({"document": "other"}, "key 'document'"),
        ({"unit": "s"}, "key 'unit': the value is 's', expected ms"),
        ({"version": 99}, "key 'version': the value is 99, expected 1 to 3"),
        ({"version": "1"}, "key 'version'"),
        ({"estimated": "yes"}, "key 'estimated'"),
        ({"curves": [{}]}, "key 'curves[0].operation'"),
        ({"runs": {}}, "key 'runs'"),
        ({"curves": [{**SIDECAR["curves"][0], "times_s": [1.0]}]}, "1 times for 2 sizes"),
        ({"curves": [{**SIDECAR["curves"][0], "sizes_bytes": [2.0, 1.0]}]}, "not increasing"),
        ({"curves": [{**SIDECAR["curves"][0], "group_size": 64}]}, "a group of 64"),
        ({"curves": [{**SIDECAR["curves"][0], "group_size": 1}]}, "group of at least 2"),
    ],
)
def test_bad_sidecars(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A sidecar that is damaged or of another file is not ignored."""
    paths = write_all(tmp_path)
    paths["sidecar"].write_text(json.dumps({**SIDECAR, **change}), encoding="utf-8")
    with pytest.raises(DocumentError) as error:
        read(paths, "sidecar")
    text = one_sentence(error.value)
    assert text.startswith(str(paths["sidecar"]))
    assert message in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({1: 2}, "a key is 1, expected a string"),
        ({None: 2}, "a key is null, expected a string"),
        ({"runs": [{(1, 2): 3}]}, "key 'runs[0]': a key is (1, 2), expected a string"),
    ],
)
def test_keys_that_are_no_text_are_refused(change: dict[Any, Any], sentence: str) -> None:
    """Dictionaries of Python may have any keys, files of JSON have none but text."""
    with pytest.raises(DocumentError) as caught:
        read_record(Sidecar, "sidecar", {**content("sidecar"), **change})

    assert str(caught.value) == f"sidecar: {sentence}"
