"""For any content of a model file, `profile-model` counts its memory or prints one sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

pytest.importorskip("torch", reason="the profilers need torch")

from profiler.model import command as model_cli
from tests.e2e.bad_models_table import FAMILIES

# few: each example counts a whole model, in a third of a second
EXAMPLES = pytest.mark.parametrize("examples", [4, pytest.param(10, marks=pytest.mark.slow)])
SLOW_TO_MAKE = [HealthCheck.too_slow]
OWN = {
    "format": "autopar-model",
    "version": 1,
    "name": "small",
    "layers": [
        {"num_layers": 2, "seq_length": 32, "hidden_size": 64, "num_heads": 8,
         "num_kv_heads": 4, "ffn_hidden_size": 96, "gated_mlp": True}
    ],
    "vocab_size": 100,
    "tied_embeddings": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "own": OWN,
    "two types": {**OWN, "layers": [OWN["layers"][0], {**OWN["layers"][0], "causal": False}]},
    **{family: {**values, "model_type": family} for family, values in FAMILIES.items()},
}
KEYS = st.sampled_from(
    ["num_experts", "num_local_experts", "num_experts_per_tok", "experts_per_token", "head_dim",
     "biases", "cross_attention", "learned_positions", "attention_bias", "mlp_bias",
     "tie_word_embeddings", "make_vocab_size_divisible_by", "extra_head_parameters", "rotary_base",
     "rotary_scaling_factor", "rope_theta", "rope_scaling", "rope_parameters", "x", ""]
)  # fmt: skip
# small or impossible values: those between are legal, and slow to count in numbers
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from([10**30, -(10**30), 0.5, 1e308, float("nan"), float("inf"), "8", "llama"]),
    st.text(max_size=6),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(0, 3), max_size=2),
)


def mutate(data: st.DataObject, model: dict[str, Any]) -> dict[str, Any]:
    """Return the model after one to three changes, of the file or of one of its layers."""
    result = copy.deepcopy(model)
    for _ in range(data.draw(st.integers(1, 3))):
        layers = result.get("layers")
        inner = [x for x in layers if isinstance(x, dict)] if isinstance(layers, list) else []
        node = data.draw(st.sampled_from([result, *inner]))
        key = data.draw(st.one_of(st.sampled_from(sorted(node) or ["x"]), KEYS))
        if data.draw(st.booleans()) and key in node:
            del node[key]
        else:
            node[key] = data.draw(VALUES)
    return result


def counts_or_says(folder: Path, raw: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command on a file; any end but an answer or one sentence fails the test."""
    path = folder / "model.json"
    path.write_bytes(raw)
    capsys.readouterr()
    # one length and degree, because the count itself is not tested
    arguments = ["--model", str(path), "--source", "exact", "--tp", "1", "--seq", "8", "--force"]
    code = model_cli.run([*arguments, "--device", "cpu", "--out", str(folder / "out")])
    err = capsys.readouterr().err
    assert code in (0, 2), err
    assert "internal error" not in err
    assert "Traceback" not in err
    if code == 2:
        lines = [line for line in err.splitlines() if not line.startswith("hint: ")]
        assert len(lines) == 1, err
        assert lines[0].startswith("profile-model: ")


@pytest.mark.whole
@pytest.mark.parametrize("kind", MODELS)
@EXAMPLES
def test_changed_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, examples: int
) -> None:
    """Keys dropped and added, values replaced by small, impossible and nonsensical ones."""

    @settings(max_examples=examples, suppress_health_check=SLOW_TO_MAKE)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        raw = json.dumps(mutate(data, MODELS[kind])).encode()
        counts_or_says(tmp_path, raw, capsys)

    check()


def test_no_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any bytes, and any JSON, instead of a model."""
    documents = st.recursive(VALUES, st.lists).map(lambda value: json.dumps(value).encode())

    @settings(max_examples=10, suppress_health_check=SLOW_TO_MAKE)
    @given(raw=st.binary(max_size=30) | documents)
    def check(raw: bytes) -> None:
        counts_or_says(tmp_path, raw, capsys)

    check()
