"""Numbers are written with 0 to 9: digits of other scripts look like others, and are none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autopar.documents.checks import DOCUMENTS, PatternDocument
from autopar.documents.json import read_record
from autopar.documents.spec import load_spec
from autopar.errors import AutoparError, DocumentError, OptionError
from autopar.rates.card import parse_hardware
from search.request.request import build_request
from tests.unit.documents_support import DOCUMENTS as VALID

ROOT = Path(__file__).resolve().parents[3]
ARABIC = {ord("0") + n: chr(0x0660 + n) for n in range(10)}
WIDE = {ord("0") + n: chr(0xFF10 + n) for n in range(10)}


def test_no_pattern_reads_digits_of_every_script() -> None:
    """In Python the class of digits without the flag ASCII has 760 of them."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in ("autopar", "search", "profiler")
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\\[d]", line)
    ]
    assert found == []


@pytest.mark.parametrize("kind", [k for k, v in DOCUMENTS.items() if hasattr(v, "rules")])
@pytest.mark.parametrize("script", [ARABIC, WIDE])
def test_keys_of_documents(kind: str, script: dict[int, int]) -> None:
    """A key with such a digit is unknown."""
    model = DOCUMENTS[kind]
    assert issubclass(model, PatternDocument)
    key = next(key for key in VALID[kind] if re.search("[0-9]", key))
    read_record(model, "f.json", {key: VALID[kind][key]})
    with pytest.raises(DocumentError, match="unknown"):
        read_record(model, "f.json", {key.translate(script): VALID[kind][key]})


@pytest.mark.parametrize("script", [ARABIC, WIDE])
def test_options(script: dict[int, int]) -> None:
    """Neither shapes, rules nor plain numbers."""
    with pytest.raises(AutoparError):
        parse_hardware("a100-80gb:" + "1x8".translate(script))
    for option, text in (
        ("pin", "tp={}"),
        ("pin", "layers {}:tp=2"),
        ("seq-length", "{}"),
        ("max-bsz", "{}"),
    ):
        word = text.format("4".translate(script))
        with pytest.raises(OptionError):
            build_request({option: [word] if option == "pin" else word})
        typed = text.format("4")
        build_request({option: [typed] if option == "pin" else typed})


def test_the_format_of_a_spec_is_known(tmp_path: Path) -> None:
    """A document of another format that has a model_type was read as a config.json."""
    config = {
        "format": "autopar-modle",
        "model_type": "llama",
        "vocab_size": 32000,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 512,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(DocumentError, match=r"'format': .*'autopar-modle', expected 'autopar-mo"):
        load_spec(str(path))
    del config["format"]
    path.write_text(json.dumps(config), encoding="utf-8")
    assert load_spec(str(path)).layers[0].hidden_size == 256
