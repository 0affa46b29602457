"""Paths in plan and launch files: those written from one folder are found from every other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from autopar.documents.catalog import (
    located_options,
    portable_options,
    portable_path,
    require_inputs,
)
from autopar.errors import DocumentError

FOLDERS = st.sampled_from([".", "a", "a/b", "c", "c/d/e", "link"])
"""`link` leads to c/d, so that its parent is not the folder that contains it."""
INPUTS = st.sampled_from(["m.json", "a/m.json", "a/b/hw", "c/d/m.json", "llama2-7b/model.json"])


@contextmanager
def tree() -> Iterator[Path]:
    """Yield a folder with folders, inputs and a link; the working folder is restored."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        for folder in ("a/b/hw", "c/d/e", "llama2-7b"):
            (root / folder).mkdir(parents=True)
        for file in ("m.json", "a/m.json", "c/d/m.json", "llama2-7b/model.json"):
            (root / file).write_text(file, encoding="utf-8")
        (root / "link").symlink_to("c/d")
        try:
            yield root
        finally:
            os.chdir(before)


@given(at=FOLDERS, wanted=INPUTS, file=FOLDERS, reader=FOLDERS)
def test_what_was_typed_is_found_from_everywhere(
    at: str, wanted: str, file: str, reader: str
) -> None:
    """Also through links, and never the file of the same name in the working folder."""
    with tree() as root:
        os.chdir(root / at)
        typed = os.path.relpath(root / wanted, (root / at).resolve())
        stored = portable_options({"model": typed}, root / file / "plan.json")
        (root / file / "plan.json").touch()
        os.chdir(root / reader)
        shown = os.path.relpath(root / file / "plan.json", (root / reader).resolve())
        found, notes = located_options(stored, shown)
        assert Path(str(found["model"])).resolve() == root / wanted
        assert notes == []
        require_inputs(found, shown)


@given(at=FOLDERS, file=FOLDERS)
def test_names_and_absolute_paths_stay(at: str, file: str) -> None:
    with tree() as root:
        os.chdir(root / at)
        asked = {
            "model": "llama-7b",
            "hardware": "h100:4x8",
            "stack": "megatron-core",
            "calibration": str(root / "a" / "m.json"),
            "settle-bsz": "8",
        }
        path = root / file / "plan.json"
        assert portable_options(asked, path) == asked
        assert located_options(asked, path) == (asked, [])


def test_a_folder_that_is_called_like_a_shipped_model_stays_a_folder() -> None:
    """Its `model.json` was the meaning of the name."""
    with tree() as root:
        os.chdir(root)
        stored = portable_options({"model": "llama2-7b"}, "plan.json")
        assert stored == {"model": "./llama2-7b"}
        os.chdir(root / "a")
        assert located_options(stored, "../plan.json")[0] == {"model": "../llama2-7b"}


def test_a_file_in_a_clone_is_a_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path to a shipped file was typed as a path; sources of a plan are stored by name."""
    monkeypatch.chdir(root)
    typed = "models/llama2-7b/model.json"
    with tree() as elsewhere:
        stored = portable_options({"model": typed}, elsewhere / "plan.json")
        os.chdir(elsewhere)
        found, _ = located_options(stored, "plan.json")
        assert Path(str(found["model"])).resolve() == (root / typed).resolve()
        assert portable_path(root / typed, "plan.json") == typed
        # software may be given by name only
        assert portable_path("megatron-core", elsewhere / "a" / "plan.json") == "megatron-core"


def test_a_card_of_ones_own_keeps_its_shape() -> None:
    with tree() as root:
        os.chdir(root / "a")
        stored = portable_options({"hardware": "m.json:2x8"}, "../c/plan.json")
        assert stored == {"hardware": "../a/m.json:2x8"}
        os.chdir(root)
        assert located_options(stored, "c/plan.json")[0] == {"hardware": "a/m.json:2x8"}


def test_what_did_not_come_along_is_named() -> None:
    """All missing files are named, with a remedy; typed paths are not missing."""
    stored = {"model": "../x/m.json", "hardware": "../x/card.json:2x8", "stack": "megatron-core"}
    with tree() as root:
        os.chdir(root)
        with pytest.raises(DocumentError) as error:
            require_inputs(stored, "plan.json")
        assert str(error.value) == (
            "plan.json: key 'request.model': --model ../x/m.json and --hardware "
            "../x/card.json:2x8 not found, relative to this file. Copy it there, or give --model"
        )
        require_inputs(stored, "plan.json", {"model", "hardware"})
