"""The comparison of estimated with counted memory, whose figures the documentation gives."""

from __future__ import annotations

import math
import sys

import pytest

from autopar.documents.spec import load_spec
from autopar.run.model import LayerSpec
from benchmarks import estimate_vs_exact
from tests.shipped import PROFILED


@pytest.mark.parametrize("name", PROFILED)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_fused_estimates_of_layers_are_counts(name: str, sequence_parallel: bool) -> None:
    """All exactly, but for experts whose visits do not come out even."""
    found = list(estimate_vs_exact.ratios(name, "fused", sequence_parallel=sequence_parallel))
    layers = load_spec(name).layers

    exact = [(where, what, v) for where, what, v in found if "layer" in where or what == "states"]
    assert len(exact) >= 6
    for where, what, values in exact:
        assert values
        experts = what == "activations" and "layer" in where
        for degree, value in values.items():
            split = degree if sequence_parallel else 1
            empty = _empty_places(layers[int(where.split()[-1])], split) if experts else 1.0
            # counts hold places of experts that stay empty, estimates only tokens
            assert 1.0 / empty - 6e-5 <= value <= 1.0 + 6e-5
            assert empty == 1.0 or value < 1.0


def _empty_places(layer: LayerSpec, split: int) -> float:
    """Return the places of all experts over the visits of a rank's tokens: 1 where even."""
    if layer.num_experts is None:
        return 1.0
    visits = layer.seq_length // split * (layer.experts_per_token or layer.num_experts)
    return math.ceil(visits / layer.num_experts) * layer.num_experts / visits


def test_documented_ratios(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the table in docs/concepts/estimates.md, as the command prints them."""
    monkeypatch.setattr(sys, "argv", ["estimate_vs_exact.py", "llama2-7b", "mixtral-8x7b"])
    estimate_vs_exact.main()
    rows = {line[:36].strip(): line[36:].split() for line in capsys.readouterr().out.splitlines()}

    assert rows["llama2-7b layer 0, activations"] == ["1.373"] * 6
    last = rows["llama2-7b last, activations"]
    assert last[:6] == ["1.386", "1.385", "1.380", "1.369", "1.319", "0.828"]
    assert rows["mixtral-8x7b layer 0, activations"][0] == "1.214"
    assert rows["mixtral-8x7b layer 0, activations"][-1] == "1.088"
