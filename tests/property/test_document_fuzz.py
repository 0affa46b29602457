"""For any content of a document, a reader returns a profile or raises a DocumentError."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from autopar.documents.sidecar import sidecar_path
from autopar.errors import DocumentError
from autopar.rates.measured import HardwareProfile
from autopar.run.model import ModelProfile
from tests.unit.documents_support import DOCUMENTS, SIDECAR, read, write_all

KINDS = (*DOCUMENTS, "sidecar")
EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(100, marks=pytest.mark.slow)])

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**300, max_value=10**320),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([0, -1, 1e-320, 1e308, float("nan"), float("-inf"), "1", "2048"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=4,
)
PARTS = st.sampled_from(
    ["_", "0", "1", "9999999999", "bsz", "seq", "[", "]", ",", "_sp", "size", "[2,2]", "²", "-1"]
)


def document(kind: str) -> dict[str, Any]:
    """Return a copy of the valid document."""
    return copy.deepcopy(SIDECAR if kind == "sidecar" else DOCUMENTS[kind])


def objects_in(node: Any) -> list[dict[str, Any]]:
    """Return every object inside a document, itself included."""
    if isinstance(node, dict):
        return [node, *(o for value in node.values() for o in objects_in(value))]
    return [o for value in node for o in objects_in(value)] if isinstance(node, list) else []


def mutate(data: st.DataObject, kind: str) -> dict[str, Any]:
    """Return the document after one to three changes of keys or values at any depth."""
    result = document(kind)
    for _ in range(data.draw(st.integers(1, 3))):
        filled = [node for node in objects_in(result) if node]
        if not filled:
            break
        node = data.draw(st.sampled_from(filled))
        key = data.draw(st.sampled_from(sorted(node)))
        action = data.draw(st.sampled_from(["set", "drop", "rename", "add", "nest"]))
        if action == "set":
            node[key] = data.draw(VALUES)
        elif action == "drop":
            del node[key]
        elif action == "rename":
            cut = data.draw(st.integers(0, len(key)))
            end = data.draw(st.integers(cut, len(key)))
            node[key[:cut] + data.draw(PARTS) + key[end:]] = node.pop(key)
        elif action == "add":
            node[data.draw(st.text(max_size=12))] = data.draw(VALUES)
        else:
            node[key] = {key: node[key]}
    return result


def read_or_document_error(folder: Path, kind: str, raw: bytes) -> None:
    """Read the file; anything but a profile or a one-line DocumentError fails the test."""
    paths = {name: folder / f"{name}.json" for name in DOCUMENTS}
    paths["sidecar"] = sidecar_path(paths["sp_time"])
    if not paths["overlap"].exists():
        write_all(folder)  # once: examples change one file only
    paths[kind].write_bytes(raw)
    try:
        profile = read(paths, kind)
    except DocumentError as error:
        text = str(error)
        assert len(text.splitlines()) == 1
        assert text.startswith(str(folder))
        text.encode("utf-8")  # can be printed
    else:
        assert isinstance(profile, HardwareProfile | ModelProfile)


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
def test_changed_structure(tmp_path: Path, kind: str, examples: int) -> None:
    """Keys dropped, renamed and added, values replaced, at any depth."""

    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        raw = json.dumps(mutate(data, kind)).encode()
        read_or_document_error(tmp_path, kind, raw)

    check()


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
def test_changed_text(tmp_path: Path, kind: str, examples: int) -> None:
    """Bytes cut out, inserted and overwritten."""
    raw = json.dumps(document(kind)).encode()
    inserts = st.binary(max_size=6) | st.sampled_from([b"NaN", b"1e999", b"{", b'"'])

    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(raw)))
        end = data.draw(st.integers(start, min(len(raw), start + 20)))
        read_or_document_error(tmp_path, kind, raw[:start] + data.draw(inserts) + raw[end:])

    check()
