"""FLOP of steps against published logs and other counts, and the units of logs made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.rates.model import head_dim, layer_flop
from autopar.records import replace
from autopar.run.job import Job, adapter_parameters, blocks_of
from autopar.run.model import LayerSpec
from autopar.training.adapters import Adapters
from autopar.training.throughput import (
    Throughput,
    hardware_flop,
    least_step_s,
    model_flop,
    spec_flop,
    throughput_entry,
)
from benchmarks.ledger_rows import UnusableError, run_of
from tests.data import read
from tests.shipped import PROFILED


def job_of(name: str, **more: object) -> Job:
    """Return a job of a shipped model, whose vocabulary is not padded."""
    spec = load_spec(name)
    made = Job(
        name=name,
        blocks=blocks_of(spec),
        vocab=spec.vocab_size or 0,
        seq=spec.layers[0].seq_length,
        micro_batch=1,
        global_batch=4,
        mtp=spec.mtp_layers,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def test_a_sample_of_llama_2_by_hand() -> None:
    """Three times two FLOP for every weight of products and token, and half the square of scores.

    Checkpoints of all layers do their forward once more, of the head they do not.
    """
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    scores = 32 * 4 * 4096**2 * 4096 / 2
    layers, head = 2 * 4096 * 32 * layer + scores, 2 * 4096 * 32000 * 4096

    spec = load_spec("llama2-7b")
    assert spec_flop(spec) == 3 * (layers + head)
    assert spec_flop(spec, [True] * 32) == 4 * layers + 3 * head
    assert spec_flop(spec, [True] + [False] * 31) == pytest.approx(
        3 * (layers + head) + layers / 32, rel=1e-12
    )
    job = job_of("llama2-7b")
    assert model_flop(job) == pytest.approx(4 * 3 * (layers + head), rel=1e-12)
    again = replace(job, recompute="full")
    assert hardware_flop(again) == pytest.approx(4 * (4 * layers + 3 * head), rel=1e-12)
    assert hardware_flop(job) == model_flop(job) == model_flop(again)
    core = replace(job, recompute=frozenset({"core_attn"}))
    assert hardware_flop(core) - model_flop(core) == pytest.approx(4 * scores, rel=1e-9)
    norms = replace(job, recompute=frozenset({"layernorm"}))
    assert hardware_flop(norms) == model_flop(norms)


def _corners(layer: LayerSpec) -> float:
    """Return the FLOP of the keys that engines count for the first queries of each window."""
    seq, window = layer.seq_length, layer.window or layer.seq_length
    if window >= seq or not layer.causal:
        return 0.0
    whole = layer.num_layers // layer.whole_every if layer.whole_every else 0
    counted, seen = min(seq / 2, window) * seq, min(window * (seq - window / 2), seq * seq / 2)
    width = (layer.num_heads or 0) * head_dim(layer)
    return 4.0 * width * (layer.num_layers - whole) * (counted - seen)


@pytest.mark.parametrize("name", sorted(PROFILED))
def test_every_shipped_model_is_counted_as_its_layers_are_timed(name: str) -> None:
    """Another count, that of estimated times: it has routers, and no corners of windows."""
    spec = load_spec(name)
    lengths = [layer.seq_length for layer in spec.layers]
    forward = sum(
        layer.num_layers * layer_flop(layer, layer.seq_length, lengths[0]) for layer in spec.layers
    )
    forward += 2.0 * lengths[-1] * spec.layers[-1].hidden_size * (spec.vocab_size or 0)
    forward += sum(map(_corners, spec.layers))
    assert spec_flop(replace(spec, mtp_layers=0)) == pytest.approx(3 * forward, rel=5e-3)
    with pytest.raises(InputError, match="the vocabulary is unknown"):
        spec_flop(replace(spec, vocab_size=None))


_LOGGED = {
    # rows of a model that publish both rates, and how far counts may differ: of odd vocabularies
    "DeepSeekV3": (9, 5e-4),
    "DeepSeekV3 (w/o MTP)": (2, 1e-3),
    "LLAMA3.1_405B": (17, 2e-3),
    "LLAMA3_70B": (18, 2e-3),
    "Qwen3_235B_a22B": (19, 2e-3),
    "Qwen3_30B_a3B": (14, 2e-3),
    "Nemotron_3_Super": (15, 7e-3),
}


@pytest.mark.parametrize("name", _LOGGED)
def test_tokens_and_flop_of_published_logs_agree(name: str, data_dir: Path) -> None:
    """Megatron-Bridge publishes tokens/s and TFLOP/s of a GPU: their ratio is its count."""
    ratios = []
    for row in read.read_csv(data_dir, "published_runs"):
        if row["model"] != name or not (row["tokens_s_gpu"] and row["tflops_per_gpu"]):
            continue
        try:
            job = run_of(row, {}).job
        except UnusableError:
            continue
        each = model_flop(job) / (job.global_batch * job.seq)
        ratios.append(each * float(row["tokens_s_gpu"]) / (float(row["tflops_per_gpu"]) * 1e12))
    number, tolerance = _LOGGED[name]
    assert len(ratios) == number
    assert sorted(ratios)[number // 2] == pytest.approx(1.0, abs=tolerance)


def test_frozen_weights_have_no_gradients() -> None:
    """Adapters have six FLOP a weight and token, what they stand beside has four."""
    job = job_of("llama2-7b")
    adapters = Adapters(rank=16, base="16 bits", fused=False)
    tuned = replace(job, adapters=adapters)
    tokens = job.global_batch * job.seq
    scores = tokens * 32 * 3 * 4 * 4096 * 2048
    products = model_flop(job) - scores
    own = tokens * 6 * sum(b.number * adapter_parameters(tuned, b)[1] for b in tuned.blocks)
    assert own > 0
    assert model_flop(tuned) == pytest.approx(products * 2 / 3 + scores + own, rel=1e-12)


@given(
    step=st.floats(1e-3, 1e3),
    low=st.floats(0.5, 1.0),
    high=st.floats(1.0, 2.0),
    gpus=st.integers(1, 10_000),
    tokens=st.floats(1.0, 1e9),
    price=st.floats(0.1, 100.0),
)
def test_rates_and_costs_are_of_one_step(
    step: float, low: float, high: float, gpus: int, tokens: float, price: float
) -> None:
    """Each end of an interval is what the step at that end would have."""

    def of(step_s: float, interval: tuple[float, float] | None = None) -> Throughput:
        return Throughput(
            step_s=step_s,
            interval_s=interval,
            gpus=gpus,
            tokens=tokens,
            model_flop=3e9 * tokens,
            hardware_flop=4e9 * tokens,
            peak_flop_per_s=1e22,
        )

    found = of(step, (low * step, high * step))
    entry = throughput_entry(found, price)
    slow, fast = throughput_entry(of(high * step), price), throughput_entry(of(low * step), price)
    for name, value in throughput_entry(of(step), price).items():
        if name.endswith("_interval"):
            assert value is None
            continue
        assert entry[name] == value
        ends = entry[f"{name}_interval"]
        assert isinstance(ends, list)
        dear = name.startswith(("gpu_hours", "cost"))
        wanted = [fast[name], slow[name]] if dear else [slow[name], fast[name]]
        assert ends == pytest.approx(wanted, rel=1e-9)
    # a GPU-hour at its rate is its share of a billion tokens
    assert found.gpu_hours * 3600 * found.tokens_per_s == pytest.approx(1e9, rel=1e-9)
    assert found.cost(price) == pytest.approx(found.gpu_hours * price, rel=1e-12)
    assert found.hfu == pytest.approx(4 / 3 * (found.mfu or 0.0), rel=1e-12)


@pytest.mark.parametrize(("step", "interval"), [(0.99, None), (1.5, (0.99, 2.0))])
def test_no_step_is_faster_than_the_peak(step: float, interval: tuple[float, float] | None) -> None:
    """By hand: 4e15 FLOP on 4 GPUs of 1e15 FLOP/s take a second, whatever was measured."""
    sizes: dict[str, Any] = {"gpus": 4, "tokens": 8.0, "model_flop": 3e15, "hardware_flop": 4e15}
    assert least_step_s(4e15, 4, 1e15) == pytest.approx(1.0)
    assert least_step_s(None, 4, 1e15) == least_step_s(4e15, 4, None) == 0.0
    with pytest.raises(InputError, match="faster than the peak of the GPU in fp8"):
        Throughput(
            step_s=step, interval_s=interval, peak_flop_per_s=1e15, peak_precision="fp8", **sizes
        )
    found = Throughput(step_s=1.0, interval_s=(1.0, 2.0), peak_flop_per_s=1e15, **sizes)
    assert (found.mfu, found.hfu) == (0.75, 1.0)


def test_what_is_unknown_is_null() -> None:
    """Sizes that no file says have no FLOP, and measured clusters no peak."""
    found = Throughput(
        step_s=2.0,
        interval_s=None,
        gpus=4,
        tokens=8000.0,
        model_flop=None,
        hardware_flop=None,
        peak_flop_per_s=None,
    )
    entry = throughput_entry(found)
    assert entry["tokens_per_s_per_gpu"] == 1000.0
    assert entry["gpu_hours_per_billion_tokens"] == pytest.approx(1e9 / 3.6e6)
    assert {key for key, value in entry.items() if value is not None} == {
        "tokens_per_s_per_gpu",
        "gpu_hours_per_billion_tokens",
    }
    assert throughput_entry(None) == {}
