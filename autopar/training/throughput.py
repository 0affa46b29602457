"""Throughput of a step in the units of training logs, and its FLOP.

Tokens/s and TFLOP/s per GPU, MFU, HFU, GPU-hours and cost per billion tokens, each with the ends of
the 90 % interval. FLOP are counted only here, as in Megatron-LM (`num_floating_point_operations` of
its `training.py`). A forward counts 2 per GEMM weight and token, a backward twice that. Causal
attention counts half the sequence. The head counts, the embedding does not, and of the experts
those that a token visits. Steps are timed elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.errors import InputError
from autopar.records import Record
from autopar.run.architecture import Attention, Experts, Indexer
from autopar.run.job import (
    Block,
    Job,
    Recomputation,
    adapter_parameters,
    attention_matrices,
    indexer_matrices,
    layer_blocks,
    mtp_blocks,
)
from autopar.run.model import ModelSpec

BILLION = 1e9
"""Number of tokens that GPU-hours and cost refer to."""
_HOUR_S = 3600.0


class Throughput(Record):
    """Throughput of a step per GPU, computed from its time, tokens, FLOP and number of GPUs."""

    step_s: float
    interval_s: tuple[float, float] | None
    """90 % interval of the step time in seconds; None if unknown."""
    gpus: int
    tokens: float
    """Tokens per step, over all GPUs."""
    model_flop: float | None
    """Model FLOP per step over all GPUs, without recomputation; None if sizes are unknown."""
    hardware_flop: float | None
    """Model FLOP with recomputation, per step over all GPUs."""
    peak_flop_per_s: float | None
    """Dense peak of one GPU in the precision of its GEMMs, FLOP/s; None if the device has no
    datasheet."""
    peak_precision: str = "bf16"
    """Precision of the peak; the fastest one if several are mixed."""

    def __post_init__(self) -> None:
        """Raise InputError for a step that is faster than its FLOP at the peak."""
        first_s = self.step_s if self.interval_s is None else min(self.step_s, self.interval_s[0])
        least_s = least_step_s(self.hardware_flop, self.gpus, self.peak_flop_per_s)
        # Rates are divided and multiplied again, so that the last digit may differ.
        if first_s < least_s * (1.0 - 1e-9):
            raise InputError(
                f"a step of {first_s:.4g} s is faster than the peak of the GPU in "
                f"{self.peak_precision}, at which its FLOP take {least_s:.4g} s",
                remedy="Check the measured times, the model, and the peaks of the card",
            )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / (self.step_s * self.gpus)

    @property
    def flop_per_s(self) -> float | None:
        """Model FLOP per second and GPU, which engines log as throughput; None if unknown."""
        return None if self.model_flop is None else self.model_flop / (self.step_s * self.gpus)

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation of the peak, 0 to 1 (arXiv 2204.02311, appendix B)."""
        return self._share(self.model_flop)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOP utilisation of the peak: MFU with recomputation, 0 to 1."""
        return self._share(self.hardware_flop)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours per billion tokens."""
        return BILLION / (self.tokens_per_s * _HOUR_S)

    def cost(self, price: float) -> float:
        """Return the cost of a billion tokens.

        price : price of a GPU-hour.
        """
        return self.gpu_hours * price

    @property
    def ends(self) -> tuple[float, float] | None:
        """Rate factors at the slow and fast ends of the interval; None without an interval."""
        if self.interval_s is None:
            return None
        fast_s, slow_s = self.interval_s
        return self.step_s / slow_s, self.step_s / fast_s

    @property
    def computes_again(self) -> bool:
        """True if recomputation makes HFU differ from MFU."""
        return self.hardware_flop != self.model_flop

    def _share(self, flop: float | None) -> float | None:
        if flop is None or self.peak_flop_per_s is None:
            return None
        return flop / (self.step_s * self.gpus * self.peak_flop_per_s)


def least_step_s(flop: float | None, gpus: int, peak_flop_per_s: float | None) -> float:
    """Return the seconds of a step at the peak of all GPUs: no step, and no interval, is shorter.

    flop : FLOP of a step over all GPUs. The result is 0 if FLOP or peak are unknown.
    """
    return 0.0 if flop is None or peak_flop_per_s is None else flop / (gpus * peak_flop_per_s)


def throughput_entry(
    found: Throughput | None, price: float | None = None
) -> dict[str, float | list[float] | None]:
    """Return the fields of a throughput in documents, in base units; null if unknown.

    Intervals of rates are (slow, fast), those of GPU-hours and cost (low, high). Without a
    throughput the result is empty.

    price : price of a GPU-hour; None omits the cost.
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
    """FLOP of one token's forward in one layer."""

    of_weights: Mapping[str, float]
    """FLOP of GEMMs by module that can be recomputed separately."""
    of_scores: float
    """FLOP of attention scores and of the weighted values, which have no weights."""

    @property
    def forward(self) -> float:
        return sum(self.of_weights.values()) + self.of_scores


def model_flop(job: Job) -> float:
    """Return the model FLOP of a step over all GPUs, without recomputation, as engines count."""
    tokens = float(job.global_batch * job.seq)
    # frozen weights have no weight gradients but input gradients
    each = 2.0 if _is_frozen(job) else 3.0
    flop = 0.0
    for block in (*job.blocks, *_further(job)):
        found = _layer_flop(block, _attended(job))
        flop += block.number * (each * sum(found.of_weights.values()) + 3.0 * found.of_scores)
        if job.adapters is not None:
            experts, dense = adapter_parameters(job, block)
            flop += 6.0 * block.number * (experts * _visited(block) + dense)
    hidden = job.blocks[0].hidden
    flop += each * 2.0 * hidden * (job.vocab * (1 + job.mtp) + 2 * hidden * job.mtp)
    return tokens * flop


def hardware_flop(job: Job) -> float:
    """Return the model FLOP of a step with the recomputed forwards.

    Recomputation inside fused kernels, such as that of scores, is not counted, as in logs.
    """
    again = 0.0
    for block in (*job.blocks, *_further(job)):
        recompute = job.recompute if block.recompute is None else block.recompute
        again += block.number * _again(_layer_flop(block, _attended(job)), recompute)
    return model_flop(job) + job.global_batch * job.seq * again


def spec_flop(spec: ModelSpec, again: Sequence[bool] = ()) -> float:
    """Return the FLOP of a training step per sample, recomputation included.

    Layer types may have different sequence lengths; the head uses that of the last one.

    again : True for each layer whose forward is recomputed; empty: no recomputation.

    Raises InputError if the vocabulary size is unknown.
    """
    flop = 0.0
    for index, (kind, block) in enumerate(zip(spec.layer_types, layer_blocks(spec), strict=True)):
        seq = spec.layers[kind].seq_length
        times = 4.0 if again and again[index] else 3.0
        flop += times * seq * _layer_flop(block, seq).forward
    last = spec.layers[-1]
    hidden, vocab = last.hidden_size, spec.vocab_size
    if vocab is None:
        raise InputError("the vocabulary is unknown", remedy="Add --vocab-size")
    head = 6.0 * last.seq_length * hidden * vocab * (1 + spec.mtp_layers)
    modules = spec.mtp_layers * last.seq_length * (12.0 * hidden * hidden)
    if spec.mtp_layers:
        modules += 3.0 * spec.mtp_layers * last.seq_length * _layer_flop(block, seq).forward
    return flop + head + modules


def _further(job: Job) -> tuple[Block, ...]:
    """Return the transformer layers of all MTP layers."""
    return mtp_blocks(job) * job.mtp if job.mtp else ()


def _attended(job: Job) -> float:
    """Return the length of the documents that attention does not cross, tokens."""
    return job.seq if job.attended is None else job.attended


def _is_frozen(job: Job) -> bool:
    return job.frozen or job.adapters is not None


def _visited(block: Block) -> float:
    """Return the share of a layer's experts that a token visits."""
    mlp = block.mlp
    return mlp.per_token / mlp.number if isinstance(mlp, Experts) else 0.0


def _layer_flop(block: Block, seq: float) -> _Flop:
    """Return the FLOP of a token's forward in one layer, with sequences of `seq` tokens."""
    weights: dict[str, float] = {}
    for module, number in _products(block, seq):
        weights[module] = weights.get(module, 0.0) + 2.0 * number
    scores, attention = 0.0, block.attention
    if attention is not None and attention.indexer is not None:
        scores = _sparse_flop(block.hidden, attention, attention.indexer, seq)
    elif attention is not None:
        seen = _seen(attention, seq) + (block.cross_tokens or 0)
        scores = 2.0 * (attention.query + attention.value) * seen
    return _Flop(weights, scores)


def _sparse_flop(hidden: int, attention: Attention, indexer: Indexer, seq: float) -> float:
    """Return a third of a token's FLOP in sparse attention and its indexer, forward and backward.

    Megatron-Bridge counts them so (067f987, training/utils/flop_utils.py): the indexer passes no
    gradients to its inputs, scores all pairs, and has gradients of the chosen pairs alone.
    """
    latent = attention.latent
    assert latent is not None, "only latent attention is sparse"
    narrow, keys = latent.kv_rank + latent.rotary_width, indexer.chosen(seq)
    flop = 6.0 * keys * attention.heads * (narrow + latent.kv_rank)
    if not indexer.reused:
        matrices = sum(rows * columns for rows, columns in indexer_matrices(hidden, attention))
        pair = 2.0 * indexer.heads * (indexer.width + 1)
        flop += 2.0 * matrices + pair * (seq + 1) / 2
        if indexer.trained:
            flop += 2.0 * matrices + 2 * pair * keys + 2.0 * keys * attention.heads * narrow
    return flop / 3


def _seen(attention: Attention, seq: float) -> float:
    """Return the mean number of keys per query over a sequence, as engines count it."""
    if not attention.causal:
        return min(seq, 2 * (attention.window or seq))
    return min(seq / 2, attention.window or seq)


def _products(block: Block, seq: float) -> Iterator[tuple[str, float]]:
    """Yield (module, number of weights) of the GEMMs that a token passes in one layer."""
    h, attention = block.hidden, block.attention
    if attention is not None:
        for index, (outputs, inputs) in enumerate(attention_matrices(h, attention)):
            latent = attention.latent is not None and index
            yield "mla_up_proj" if latent else "attention", float(outputs * inputs)
        yield "attention", float(attention.value * h)
        if block.cross_tokens is not None:
            yield "attention", float((attention.query + attention.value) * h)
            # keys and values are computed from the tokens of the other sequence
            yield "attention", attention.key_value * h * block.cross_tokens / seq
    if block.recurrent is not None:
        mixer = block.recurrent
        yield "mixer", float(h * (mixer.projected + mixer.inner))
    mlp = block.mlp
    if mlp is None:
        return
    matrices = 3 if mlp.gated else 2
    if not isinstance(mlp, Experts):
        yield "mlp", float(matrices * h * mlp.width)
        return
    width = mlp.latent or h
    # engines do not count the router's GEMM
    yield "moe", float(mlp.per_token * matrices * width * mlp.width)
    if mlp.latent:
        yield "moe", float(2 * h * mlp.latent)
    yield "shared_experts", float(matrices * h * mlp.shared_width)


def _again(found: _Flop, recompute: Recomputation) -> float:
    """Return the FLOP per token that recomputation adds to a layer."""
    if recompute == "full":
        return found.forward
    wanted: set[str] = {*recompute}
    if "per_op" in wanted:
        # every other GEMM
        return 0.5 * sum(found.of_weights.values())
    if "moe" in wanted:
        wanted.add("shared_experts")
    again = sum(value for module, value in found.of_weights.items() if module in wanted)
    return again + (found.of_scores if "core_attn" in wanted else 0.0)
