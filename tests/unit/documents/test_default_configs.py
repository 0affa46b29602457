"""Default configurations of transformers: counted exactly, or refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.errors import DocumentError
from autopar.families.config import parse_hugging_face
from autopar.run.model import model_parameter_count
from tests.data.defaults import TABLE
from tests.data.read import table

MODELS: dict[str, Any] = {
    row["family"]: row for row in table(TABLE.parent, TABLE.name.split(".")[0], "models")
}


def count(name: str) -> int | str:
    """Return the parameters that are read from a default, or the reason why it is not read."""
    path = Path(name) / "config.json"
    try:
        spec = parse_hugging_face(path, MODELS[name]["config"])
    except DocumentError as error:
        return str(error)
    return model_parameter_count(spec, mtp=False)


@pytest.mark.parametrize("name", MODELS)
def test_a_default_is_counted_exactly_or_refused(name: str) -> None:
    """Never another number; a refusal names the key."""
    found = count(name)
    if isinstance(found, int):
        assert found == MODELS[name]["parameters"]
    else:
        assert "key '" in found
        assert len(found) < 3000


def test_most_decoders_of_today_are_read() -> None:
    """Of 162 defaults, encoders and translators among them."""
    read = [name for name in MODELS if isinstance(count(name), int)]
    assert len(read) >= 70
    assert {
        "bamba", "deepseek_v32", "falcon_h1", "glm_moe_dsa", "granitemoehybrid", "lfm2", "minimax",
        "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    } <= {*read}  # fmt: skip
