"""Throughput: what a step is in the units of training logs, and the FLOP that these are made of.

Tokens/s and TFLOP/s of a GPU, MFU, HFU, GPU-hours and money for a billion tokens, each with the
ends of the step's interval. The FLOP are counted here alone, as Megatron-LM counts them
(`num_floating_point_operations` of its `training.py`): 2 per weight of a product and token in the
forward, twice that in the backward, scores and values of causal attention over half the sequence,
the head but no embedding, of experts those that a token visits. No step is timed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.errors import InputError
from autopar.records import Record
from autopar.run.architecture import Attention, Experts
from autopar.run.job import (
    Block,
    Job,
    Recomputation,
    adapter_parameters,
    attention_matrices,
    layer_blocks,
    mamba_inputs,
    mtp_blocks,
)
from autopar.run.model import ModelSpec

BILLION = 1e9
"""Tokens that GPU-hours and money are of."""
_HOUR_S = 3600.0


class Throughput(Record):
    """A step, what is computed in it and on what; rates are those of one GPU."""

    step_s: float
    interval_s: tuple[float, float] | None
    """Between which 9 of 10 steps lie; None: nobody knows."""
    gpus: int
    tokens: float
    """Of a step, over all GPUs."""
    model_flop: float | None
    """Of a step, over all GPUs, nothing computed twice; None: sizes are unknown."""
    hardware_flop: float | None
    """With what is computed again."""
    peak_flop_per_s: float | None
    """Dense, of 16-bit products; None: it is no card that runs."""

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.tokens / (self.step_s * self.gpus)

    @property
    def flop_per_s(self) -> float | None:
        """The model's, of one GPU: what trainers log as throughput."""
        return None if self.model_flop is None else self.model_flop / (self.step_s * self.gpus)

    @property
    def mfu(self) -> float | None:
        """The model's FLOP/s as a share of the peak (arXiv 2204.02311, appendix B)."""
        return self._share(self.model_flop)

    @property
    def hfu(self) -> float | None:
        """The same with what is computed again: what the device really does."""
        return self._share(self.hardware_flop)

    @property
    def gpu_hours(self) -> float:
        """Of a billion tokens."""
        return BILLION / (self.tokens_per_s * _HOUR_S)

    def cost(self, price: float) -> float:
        """Return the money for a billion tokens at a price of a GPU-hour."""
        return self.gpu_hours * price

    @property
    def ends(self) -> tuple[float, float] | None:
        """Factors of a rate at the slow and at the fast end of the interval."""
        if self.interval_s is None:
            return None
        fast_s, slow_s = self.interval_s
        return self.step_s / slow_s, self.step_s / fast_s

    @property
    def computes_again(self) -> bool:
        """Whether MFU and HFU are two numbers."""
        return self.hardware_flop != self.model_flop

    def _share(self, flop: float | None) -> float | None:
        if flop is None or self.peak_flop_per_s is None:
            return None
        return flop / (self.step_s * self.gpus * self.peak_flop_per_s)


def throughput_entry(
    found: Throughput | None, price: float | None = None
) -> dict[str, float | list[float] | None]:
    """Return what documents say of a throughput, in base units; null is what is unknown.

    Intervals have the slow end first, those of hours and money the cheap one. price : of a GPU-hour
    """
    if found is None:
        return {}
    entry: dict[str, float | list[float] | None] = {}
    ends = found.ends
    for name, value in (
        ("tokens_per_s_per_gpu", found.tokens_per_s),
        ("flop_per_s_per_gpu", found.flop_per_s),
        ("mfu", found.mfu),
        ("hfu", found.hfu),
    ):
        entry[name] = value
        known = ends is not None and value is not None
        entry[f"{name}_interval"] = [value * end for end in ends] if known else None  # type: ignore[operator, union-attr]
    spent = {"gpu_hours_per_billion_tokens": found.gpu_hours}
    if price is not None:
        spent["cost_per_billion_tokens"] = found.cost(price)
    for name, value in spent.items():
        entry[name] = value
        entry[f"{name}_interval"] = None if ends is None else [value / end for end in ends[::-1]]
    return entry


# --------------------------------------------------------------------------------------------------
# FLOP


class _Flop(NamedTuple):
    """FLOP of a token's forward in one layer."""

    of_weights: Mapping[str, float]
    """By the module that can be computed again apart."""
    of_scores: float
    """Of queries with keys, and of what they weigh: neither has weights."""

    @property
    def forward(self) -> float:
        return sum(self.of_weights.values()) + self.of_scores


def model_flop(job: Job) -> float:
    """Return the FLOP of a step that trainers count, over all GPUs; nothing is counted twice."""
    tokens = float(job.global_batch * job.seq)
    # frozen weights have no gradients, their inputs have
    each = 2.0 if _is_frozen(job) else 3.0
    flop = 0.0
    for block in (*job.blocks, *_further(job)):
        found = _layer_flop(block, job.seq)
        flop += block.number * (each * sum(found.of_weights.values()) + 3.0 * found.of_scores)
        if job.adapters is not None:
            experts, dense = adapter_parameters(job, block)
            flop += 6.0 * block.number * (experts * _visited(block) + dense)
    hidden = job.blocks[0].hidden
    flop += each * 2.0 * hidden * (job.vocab * (1 + job.mtp) + 2 * hidden * job.mtp)
    return tokens * flop


def hardware_flop(job: Job) -> float:
    """Return the same with the forwards that the backward does again.

    What a fused kernel computes again of itself, such as scores, is its own matter, as in logs.
    """
    again = 0.0
    for block in (*job.blocks, *_further(job)):
        recompute = job.recompute if block.recompute is None else block.recompute
        again += block.number * _again(_layer_flop(block, job.seq), recompute)
    return model_flop(job) + job.global_batch * job.seq * again


def spec_flop(spec: ModelSpec, again: Sequence[bool] = ()) -> float:
    """Return the FLOP of one sample's step; raises InputError where sizes are unknown.

    again : for each layer whether its forward is done twice; none is by default. Layer types may
    see sequences of other lengths, and the head works on that of the last one.
    """
    flop = 0.0
    for index, (kind, block) in enumerate(zip(spec.layer_types, layer_blocks(spec), strict=True)):
        seq = spec.layers[kind].seq_length
        times = 4.0 if again and again[index] else 3.0
        flop += times * seq * _layer_flop(block, seq).forward
    last = spec.layers[-1]
    hidden, vocab = last.hidden_size, spec.vocab_size
    if vocab is None:
        raise InputError("the vocabulary is unknown; give --vocab-size")
    head = 6.0 * last.seq_length * hidden * vocab * (1 + spec.mtp_layers)
    modules = spec.mtp_layers * last.seq_length * (12.0 * hidden * hidden)
    if spec.mtp_layers:
        modules += 3.0 * spec.mtp_layers * last.seq_length * _layer_flop(block, seq).forward
    return flop + head + modules


def _further(job: Job) -> tuple[Block, ...]:
    """Return the layers of all modules of further tokens."""
    return mtp_blocks(job) * job.mtp if job.mtp else ()


def _is_frozen(job: Job) -> bool:
    return job.frozen or job.adapters is not None


def _visited(block: Block) -> float:
    """Return the share of a layer's experts that a token visits."""
    mlp = block.mlp
    return mlp.per_token / mlp.number if isinstance(mlp, Experts) else 0.0


def _layer_flop(block: Block, seq: int) -> _Flop:
    """Return the FLOP of a token's forward in one layer of a block, at so many tokens."""
    weights: dict[str, float] = {}
    for module, number in _products(block, seq):
        weights[module] = weights.get(module, 0.0) + 2.0 * number
    scores, attention = 0.0, block.attention
    if attention is not None:
        seen = _seen(attention, seq) + (block.cross_tokens or 0)
        scores = 2.0 * (attention.query + attention.value) * seen
    return _Flop(weights, scores)


def _seen(attention: Attention, seq: int) -> float:
    """Return the keys that a query sees, the mean over a sequence as trainers have it."""
    if not attention.causal:
        return min(seq, 2 * (attention.window or seq))
    return min(seq / 2, attention.window or seq)


def _products(block: Block, seq: int) -> Iterator[tuple[str, float]]:
    """Yield (module, weights) that a token meets in one layer."""
    h, attention = block.hidden, block.attention
    if attention is not None:
        for index, (outputs, inputs) in enumerate(attention_matrices(h, attention)):
            latent = attention.latent is not None and index
            yield "mla_up_proj" if latent else "attention", float(outputs * inputs)
        yield "attention", float(attention.value * h)
        if block.cross_tokens is not None:
            yield "attention", float((attention.query + attention.value) * h)
            # keys and values are made of the other sequence's tokens
            yield "attention", attention.key_value * h * block.cross_tokens / seq
    if block.mamba is not None:
        mamba = block.mamba
        yield "mamba", float(h * mamba_inputs(mamba) + mamba.inner * h)
    mlp = block.mlp
    if mlp is None:
        return
    matrices = 3 if mlp.gated else 2
    if not isinstance(mlp, Experts):
        yield "mlp", float(matrices * h * mlp.width)
        return
    width = mlp.latent or h
    # the router's product is in nobody's count
    yield "moe", float(mlp.per_token * matrices * width * mlp.width)
    if mlp.latent:
        yield "moe", float(2 * h * mlp.latent)
    yield "shared_experts", float(matrices * h * mlp.shared_width)


def _again(found: _Flop, recompute: Recomputation) -> float:
    """Return what is computed again of a layer's forward, as `autopar.price.step` times it."""
    if recompute == "full":
        return found.forward
    wanted: set[str] = {*recompute}
    if "per_op" in wanted:
        # every other product
        return 0.5 * sum(found.of_weights.values())
    if "moe" in wanted:
        wanted.add("shared_experts")
    again = sum(value for module, value in found.of_weights.items() if module in wanted)
    return again + (found.of_scores if "core_attn" in wanted else 0.0)
