"""Parameters of published architectures as transformers itself makes the modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the modules are torch's")
transformers = pytest.importorskip("transformers", reason="it counts with transformers' modules")
pytestmark = pytest.mark.slow

DATA = Path(__file__).resolve().parents[1] / "data"
FILES = json.loads((DATA / "published_configs.json").read_text(encoding="utf-8"))
_LATER = {"kimi_k2": "deepseek_v3"}
"""Families whose own code lies beside their weights, and whose modules theirs are."""


def counted(config: dict[str, Any]) -> int:
    """Return the parameters of the text part, tied ones once, on the device `meta`."""
    values = dict(config.get("text_config", config))
    family = values.pop("model_type")
    said = {k: v for k, v in values.items() if v is not None or k == "q_lora_rank"}
    made = transformers.AutoConfig.for_model(_LATER.get(family, family), **said)
    kind: Any = transformers.AutoModelForCausalLM
    if family in ("t5", "mt5"):
        kind = transformers.AutoModelForSeq2SeqLM
    elif family in ("bert", "xlm-roberta"):
        kind = transformers.AutoModelForMaskedLM
    with torch.device("meta"):
        model = kind.from_config(made)
    model.tie_weights()
    return sum({id(p): p.numel() for p in model.parameters()}.values())


@pytest.mark.parametrize("name", FILES)
def test_a_published_model_has_as_many_parameters(name: str) -> None:
    """Families that an installed release does not know are left out."""
    family = FILES[name]["config"].get("text_config", FILES[name]["config"])["model_type"]
    if _LATER.get(family, family) not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    assert counted(FILES[name]["config"]) == FILES[name]["parameters"]
