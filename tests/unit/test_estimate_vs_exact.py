"""The comparison of estimated with counted memory, whose figures the documentation gives."""

from __future__ import annotations

import sys

import pytest

from autopar.documents import catalog
from benchmarks import estimate_vs_exact


@pytest.mark.parametrize("name", catalog.model_names())
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_fused_estimates_of_layers_are_counts(name: str, sequence_parallel: bool) -> None:
    """Parameters, states and checkpoints exactly; activations but for a mixture's router."""
    found = list(estimate_vs_exact.ratios(name, "fused", sequence_parallel=sequence_parallel))

    exact = [v for where, what, v in found if "layer" in where or what == "states"]
    assert len(exact) >= 6
    for values in exact:
        assert values
        assert all(value == pytest.approx(1.0, abs=6e-5) for value in values.values())


def test_documented_ratios(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the table in docs/estimates.md, as the command prints them."""
    monkeypatch.setattr(sys, "argv", ["estimate_vs_exact.py", "llama2-7b", "mixtral-8x7b"])
    estimate_vs_exact.main()
    rows = {line[:36].strip(): line[36:].split() for line in capsys.readouterr().out.splitlines()}

    assert rows["llama2-7b layer 0, activations"] == ["1.373"] * 6
    last = rows["llama2-7b last, activations"]
    assert last[:6] == ["1.386", "1.385", "1.380", "1.369", "1.319", "0.828"]
    assert rows["mixtral-8x7b layer 0, activations"][0] == "1.214"
    assert rows["mixtral-8x7b layer 0, activations"][-1] == "1.088"
