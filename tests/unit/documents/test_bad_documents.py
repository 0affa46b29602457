"""Every class of bad input in every document is one sentence: file, key, value, remedy."""

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
KINDS = tuple(KEYS)

TYPO = {
    "allreduce": ("allreduce_size_2_concec_1", "allreduce_size_2_consec_1"),
    "p2p": ("pp_siz_2", "pp_size_2"),
    "overlap": ("overlap_coef", "overlap_coe"),
    "sp_time": ("all2all_size_2_64_time", "all2all_size_2_64MB_time"),
    "computation": ("layertype_0_bz1_seq2048", "layertype_0_bsz1_seq2048"),
    "memory": ("other_memory_pp_of_sp", "other_memory_pp_off_sp"),
    "sidecar": ("memory_byte", "memory_bytes"),
}
TOO_LARGE = {  # value, the unit that the message suspects
    "allreduce": (160445.0, "MB/s"),
    "p2p": (20.5e9, "bytes/s"),
    "overlap": (112.5, "percentage"),
    "sp_time": (4e5, "microseconds"),
    "computation": (4e9, "nanoseconds"),
    "memory": (48.0 * 2**20, "bytes"),
    "sidecar": (8e19, "device"),
}
REQUIRED = {
    "allreduce": "allreduce_size_4_consec_1",
    "p2p": "pp_size_4",
    "overlap": "overlap_coe",
    "computation": "layertype_other_bsz1_seq2048",
    "memory": "other_memory_pp_on_last_sp",
    "sidecar": "unit",
}


def content(kind: str) -> dict[str, Any]:
    """Return a copy of the valid document."""
    return copy.deepcopy(SIDECAR if kind == "sidecar" else DOCUMENTS[kind])


def with_value(kind: str, value: object) -> str:
    """Return the document with its number replaced."""
    data = content(kind)
    *parents, last = KEYS[kind]
    node = data
    for key in parents:
        node = node[key]
    node[last] = value
    return json.dumps(data)


def with_typo(kind: str) -> str:
    """Return the document with one more, misspelt, key."""
    return json.dumps({**content(kind), TYPO[kind][0]: 1.0})


def duplicated(kind: str) -> str:
    """Return the document with its first key written twice."""
    text = json.dumps(content(kind))
    first = json.dumps(next(iter(content(kind))))
    return text.replace(first, f"{first}: 1, {first}", 1)


def key_of(kind: str) -> str:
    """Return the key as messages write it."""
    return ".".join(KEYS[kind])


VALUE = "the value is "
CLASSES: dict[str, tuple[Callable[[str], str | bytes], Callable[[str], tuple[str, ...]]]] = {
    "empty": (lambda k: "", lambda k: ("the file is empty",)),
    "blank": (lambda k: " \n", lambda k: ("the file is empty",)),
    "truncated": (
        lambda k: json.dumps(content(k))[:-8],
        lambda k: ("not valid JSON at line 1",),
    ),
    "no json": (lambda k: "pp_size_2 = 3", lambda k: ("this is not a JSON file",)),
    "not utf-8": (lambda k: b'{"a\xff": 1}', lambda k: ("byte 3 is not UTF-8",)),
    "list": (lambda k: "[1, 2]", lambda k: ("the top level is [1, 2], expected an object",)),
    "null": (lambda k: "null", lambda k: ("the top level is null",)),
    "duplicate": (
        duplicated,
        lambda k: (f"key {next(iter(content(k)))!r}", "appears twice"),
    ),
    "deep": (lambda k: '{"a":' * 100_000, lambda k: ("brackets nest deeper than 64",)),
    "long number": (
        lambda k: '{"a": ' + "9" * 5000 + "}",
        lambda k: ("has an integer of 5,000 digits",),
    ),
    "string": (lambda k: with_value(k, "12"), lambda k: (VALUE + "'12', expected",)),
    "boolean": (lambda k: with_value(k, True), lambda k: (VALUE + "true, expected",)),
    "null value": (lambda k: with_value(k, None), lambda k: (VALUE + "null",)),
    "object": (lambda k: with_value(k, {"a": 1}), lambda k: (VALUE + "{'a': 1}, expected",)),
    "nan": (lambda k: with_value(k, float("nan")), lambda k: (VALUE + "nan, expected",)),
    "infinity": (lambda k: with_value(k, float("inf")), lambda k: (VALUE + "inf, expected",)),
    "overflow": (
        lambda k: with_value(k, 12345.5).replace("12345.5", "1e999"),
        lambda k: (VALUE + "inf, expected",),
    ),
    "negative": (lambda k: with_value(k, -3), lambda k: (VALUE + "-3, expected",)),
    "zero": (lambda k: with_value(k, 0), lambda k: (VALUE + "0, expected",)),
    "unit": (
        lambda k: with_value(k, TOO_LARGE[k][0]),
        lambda k: (VALUE, "at most", TOO_LARGE[k][1]),
    ),
    "unknown key": (
        with_typo,
        lambda k: (
            f"key {TYPO[k][0]!r}: this key is unknown",
            f"Did you mean {TYPO[k][1]!r}?",
        ),
    ),
}
NAMES_THE_KEY = {
    "string",
    "boolean",
    "null value",
    "object",
    "nan",
    "infinity",
    "overflow",
    "negative",
    "zero",
    "unit",
}


def one_sentence(error: DocumentError) -> str:
    """Return the message, which must be one printable line without a traceback."""
    text = str(error)
    assert "\n" not in text
    assert "Traceback" not in text
    assert len(text) < 600
    assert error.exit_code == 2
    return text


@pytest.mark.parametrize(
    ("name", "kind"),
    [  # null is what an absent optional value of a sidecar is
        (name, kind)
        for name in CLASSES
        for kind in KINDS
        if (name, kind) != ("null value", "sidecar")
    ],
)
def test_bad_content(tmp_path: Path, name: str, kind: str) -> None:
    """Class of bad input x document."""
    paths = write_all(tmp_path)
    make, expected = CLASSES[name]
    bad = make(kind)
    paths[kind].write_bytes(bad if isinstance(bad, bytes) else bad.encode())
    with pytest.raises(DocumentError) as error:
        read(paths, kind)
    text = one_sentence(error.value)
    assert text.startswith(f"{paths[kind]}: ")
    for part in expected(kind):
        assert part in text
    if name in NAMES_THE_KEY:
        assert f"key {key_of(kind)!r}" in text


@pytest.mark.parametrize("kind", REQUIRED)
def test_missing_key(tmp_path: Path, kind: str) -> None:
    """A required key that is absent is named."""
    paths = write_all(tmp_path)
    data = content(kind)
    keep = "pp_size" if kind == "p2p" else REQUIRED[kind].split("_bsz")[0]
    data = {k: v for k, v in data.items() if not k.startswith(keep) and "layernum" not in k}
    paths[kind].write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(DocumentError) as error:
        read(paths, kind)
    text = one_sentence(error.value)
    assert f"key {REQUIRED[kind]!r}: this key is missing" in text


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "sidecar"])
@pytest.mark.parametrize("what", ["missing", "directory without the file", "device"])
def test_bad_path(tmp_path: Path, kind: str, what: str) -> None:
    """No file, a directory that lacks it, and something that is not a file."""
    paths = write_all(tmp_path)
    paths[kind].unlink()
    if what == "directory without the file":
        paths[kind].mkdir()
    if what == "device":
        paths[kind] = Path("/dev/null")
    with pytest.raises(DocumentError) as error:
        read(paths, kind)
    text = one_sentence(error.value)
    if what == "device":
        assert "not a regular file" in text
        return
    assert ".json" in text
    made_by = (
        "profile-model" if kind in ("computation", "memory") else "torchrun -m profiler.hardware"
    )
    assert made_by in text
    if what == "missing":
        assert text.startswith(f"{paths[kind]}: this file does not exist")


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "sidecar"])
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
