"""Probability of running out of memory, from the predicted peak of a run.

The prediction itself is in `autopar.price.account`. Reserved memory at the peak differs from it for
two reasons. The prediction has an error, estimated by kind of run from measured runs
(docs/concepts/memory.md). The allocator has an overhead, estimated from published pairs of
allocated and reserved memory. Both factors are independent. The logarithm of the error follows
Student's t distribution with two degrees of freedom; for mixtures of experts and Muon it is normal,
as is the logarithm of the overhead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from statistics import NormalDist
from typing import Literal

from autopar.price.activations import offloaded_bytes
from autopar.price.allocator import RESERVED_RATIOS
from autopar.price.sharded_peak import sharded_parts
from autopar.price.torch_layers import LOGIT_BYTES
from autopar.records import replace
from autopar.run.architecture import Attention, Model
from autopar.run.run import Run

LaunchKind = Literal[
    "dense",
    "experts",
    "gathered experts",
    "Muon",
    "few runs",
    "offloaded",
    "torch layers",
    "graphs",
    "graphs of attention",
    "other mixers",
]

CONTEXT_BYTES = 1 << 30
"""CUDA context and NCCL buffers, bytes outside of the allocator; also the planner's default."""
SAFE_RISK = 0.001
"""OOM probability of a plan that answers call safe."""

PEAK_RATIOS: Mapping[LaunchKind, tuple[float, float]] = {
    "dense": (0.985, 1.04),
    "experts": (0.96, 1.078),
    "gathered experts": (0.97, 1.06),
    "Muon": (0.95, 1.1),
    "few runs": (0.975, 1.045),
}
"""90 % interval of measured over predicted peaks, by kind of run, from errors on runs that were not
used while the count was written. The count has used the shipped runs. Their errors are smaller and
would make probabilities of OOM too low (docs/concepts/memory.md, held-out runs). Runs of `experts`
exchange tokens by all-to-all or a fused dispatcher, and natural routing decides how many a rank
receives; `gathered experts` gather all tokens."""
_NORMAL_ERRORS = frozenset({"experts", "gathered experts", "Muon", "other mixers"})
"""Kinds whose interval is the spread of all of their runs. Of the others most are almost exact, and
few are far off."""
_TORCH_RATIOS = (1.07, 1.23)
"""90 % interval of reserved bytes over the predicted peak for engines with torch layers, allocator
blocks included. From twenty peaks in torchtitan's tables (docs/concepts/memory.md)."""
_HOSTED_SHARE = 1.25
"""Possible peak of FSDP1 with weights on the host, over the counted one. Six published runs need 16
to 29 % more, for a reason that is not known (docs/concepts/memory.md)."""
_OFFLOADED_RATIOS = (0.94, 1.03)
"""90 % interval of measured over predicted peaks for Megatron-LM with activation offload. One
configuration is measured: its two peaks are 0.958 and 0.962 of the predicted ones."""

_GRAPHED_RATIOS: Mapping[LaunchKind, tuple[float, float]] = {
    "graphs": (0.96, 1.08),
    "graphs of attention": (0.75, 1.08),
}
"""90 % interval of measured over predicted peaks with CUDA graphs, whose memory is not counted.
Five peaks of one model are measured with graphs of parts of layers (1.006 to 1.040 times the
predicted ones), and one peak with graphs of attention alone (0.79); none with whole steps."""


MIXER_RATIOS: Mapping[LaunchKind, tuple[float, float]] = {"other mixers": (0.85, 1.19)}
"""90 % interval of measured over predicted peaks of layers whose saved tensors are counted from
source. With gated delta nets one peak is measured, of Qwen3.8 27B on 16 GB200. It is 1.12 times the
predicted one with the native loss, 1.18 times with that of Transformer Engine; the log does not
name it, and the vision tower is not counted. With sparse attention no peak of a step is measured;
GLM-5.2 on 416 H100 has 1.36 times the predicted one, but after loading a checkpoint."""


def _attentions(run: Run) -> Iterator[Attention]:
    """Yield the attention of each distinct layer with attention."""
    return (one.attention for one in run.model.kinds if one.attention is not None)


_FEW_RUNS: Mapping[str, Callable[[Run], bool]] = {
    "Muon": lambda run: run.runtime.optimizer.kind == "muon",
    "sharded gradients or weights": lambda run: run.split.zero > 1,
    "several instances of the optimizer": lambda run: run.split.replicas > 1,
    "fp16 or fp32": lambda run: run.runtime.precision.kind != "bf16",
    "8-bit products": lambda run: run.runtime.precision.fp8,
    "4-bit products": lambda run: run.runtime.precision.fp4,
    "adapters": lambda run: run.runtime.adapters is not None,
    "states on the host": lambda run: run.runtime.optimizer.offload > 0,
    "recomputation": lambda run: any(group.split.recompute for group in run.strategy.layers),
    "activations on the host": lambda run: run.offloads_activations,
    "overlapped tensor-parallel transfers": lambda run: run.runtime.overlap.tensor,
    "deferred gradients of the head": lambda run: run.kernels.deferred_head is not None,
    "latent attention without experts": lambda run: (
        any(one.latent is not None for one in _attentions(run)) and run.model.experts is None
    ),
    "norms of queries and keys": lambda run: any(
        one.head_norms != "none" and one.latent is None for one in _attentions(run)
    ),
    "Mamba-2 layers": lambda run: run.model.first_mamba is not None,
    "gated delta nets": lambda run: run.model.first_delta is not None,
    "sparse attention": lambda run: run.model.first_sparse is not None,
    "gates of attention's output": lambda run: any(one.gated for one in _attentions(run)),
    "the flex dispatcher": lambda run: (
        run.model.experts is not None and run.runtime.experts.dispatcher == "flex"
    ),
}
"""Features that fewer than five measured configurations use; a test checks this against the shipped
runs."""

_NORMAL = NormalDist()
_TAIL = _NORMAL.inv_cdf(0.95)
"""Standard deviations from the median of a normal distribution to either end of its 90 %
interval."""
_FREEDOM = 2
_STUDENT_TAIL = 2.919985580353726
"""Scale units from the median of Student's t to either end of its 90 % interval, two degrees of
freedom. Its heavy tails fit held-out measured peaks better than a normal error: nine of ten are
almost exact, and the tenth misses a tensor."""


def _scales() -> Iterator[tuple[float, float]]:
    """Yield (weight, squared scale) of normal distributions whose mixture is Student's t.

    t = N sqrt(k / q), where N is standard normal and q chi-squared with k = 2 degrees of freedom.
    The density over ln q is q^(k/2) exp(-q/2) up to a factor. A sum over equal steps of ln q is
    exact to 1e-8.
    """
    steps = [math.exp(-20.0 + 0.5 * step) for step in range(49)]
    weights = [q ** (_FREEDOM / 2) * math.exp(-q / 2) for q in steps]
    total = math.fsum(weights)
    for q, weight in zip(steps, weights, strict=True):
        yield weight / total, _FREEDOM / q


_SCALES = tuple(_scales())


def rarely_validated(run: Run) -> tuple[str, ...]:
    """Return the names of this run's features that fewer than five measured configurations use.

    Empty for engines with torch layers, whose error interval is not divided by feature.
    """
    if run.kernels.torch_layers:
        return ()  # errors of torch layers are known from runs of a single engine
    return tuple(name for name, has in _FEW_RUNS.items() if has(run))


def kind_of_model(model: Model) -> LaunchKind | None:
    """Return the kind of all runs of a model; None if it depends on the run."""
    return "other mixers" if model.first_delta or model.first_sparse else None


def few_runs(model: Model) -> str:
    """Return a phrase that names layers with few published runs; empty without such layers."""
    if model.torch_mixers:
        return f"none with {model.torch_mixers}"
    if model.has_patches:
        return "none of images"
    if model.first_delta is not None:
        return "few with gated delta nets"
    return "none tuned with sparse attention" if model.first_sparse is not None else ""


def kind_of(run: Run) -> LaunchKind:
    """Return the kind of a run, which selects the interval of its prediction error."""
    if run.kernels.torch_layers:
        return "torch layers"
    if (own := kind_of_model(run.model)) is not None:
        return own
    if run.offloads_activations and _leaves(run):
        return "offloaded"
    if run.kernels.graphs != "none":
        return "graphs of attention" if run.kernels.graphs == "attention" else "graphs"
    if run.runtime.optimizer.kind == "muon":
        return "Muon"
    if run.model.experts is not None:
        return "gathered experts" if run.runtime.experts.dispatcher == "allgather" else "experts"
    return "few runs" if rarely_validated(run) else "dense"


def _leaves(run: Run) -> bool:
    """Return True if at least one activation of a layer is large enough to be offloaded."""
    return any(offloaded_bytes(at) > 0 for at in {*run.rank_layers})


def probability_of_ratio(
    ratio: float,
    ends: tuple[float, float],
    reserve: tuple[float, float, float] | None = RESERVED_RATIOS,
    *,
    normal: bool = False,
) -> float:
    """Return the probability that reserved over predicted bytes exceeds `ratio`.

    P = sum_i w_i (1 - Phi((ln ratio - mu) / sqrt(sigma^2 + s^2 g_i))). Here mu adds the
    medians of error and reserve, sigma is the standard deviation of the normal reserve, and s is
    the scale of the Student's t error. That error is a mixture of normal errors with weights w_i
    and squared scales g_i; a normal error has one.

    ends : 90 % interval of measured over predicted peaks.
    normal : True for a normal error instead of Student's t.
    reserve : low, median and high of reserved over allocated bytes, low and high as the 5th and
        95th percentile; None: allocated instead of reserved bytes.
    """
    low, high = map(math.log, ends)
    tail, scales = (_TAIL, ((1.0, 1.0),)) if normal else (_STUDENT_TAIL, _SCALES)
    middle, scale = (low + high) / 2.0, (high - low) / (2.0 * tail)
    deviation = 0.0
    if reserve is not None:
        least, median, most = map(math.log, reserve)
        middle += median
        deviation = (most - least) / (2.0 * _TAIL)
    distance = math.log(ratio) - middle
    return math.fsum(
        weight * 0.5 * math.erfc(distance / math.sqrt(2.0 * (deviation**2 + scale**2 * square)))
        for weight, square in scales
    )


def _errors(
    kind: LaunchKind,
) -> tuple[tuple[float, float], tuple[float, float, float] | None]:
    """Return (interval of errors, reserve ratios) of a kind; None if errors include the reserve."""
    if kind == "torch layers":
        return _TORCH_RATIOS, None
    if kind == "offloaded":
        return _OFFLOADED_RATIOS, RESERVED_RATIOS
    return {**PEAK_RATIOS, **_GRAPHED_RATIOS, **MIXER_RATIOS}[kind], RESERVED_RATIOS


def reserved_interval(run: Run, peak_bytes: float) -> tuple[float, float]:
    """Return the 90 % interval of reserved bytes.

    peak_bytes : predicted peak of allocated memory.
    """
    kind, peaks = kind_of(run), _possible_peaks(run, peak_bytes)
    return min(peaks) * _ratio_of(0.95, kind), max(peaks) * _ratio_of(0.05, kind)


def reserved_range(run: Run, peak_bytes: float) -> tuple[float, float]:
    """Return the interval that answers show: no more is allocated than is reserved, bytes."""
    low, high = reserved_interval(run, peak_bytes)
    return max(low, peak_bytes), max(high, peak_bytes)


def _possible_peaks(run: Run, peak_bytes: float) -> tuple[float, ...]:
    """Return the peaks that a run may have, from the predicted one.

    There are several where logits are unknown, or weights of FSDP1 on the host.
    """
    kernels = run.kernels
    peaks: tuple[float, ...] = (peak_bytes,)
    if not kernels.torch_layers:
        return peaks
    if kernels.quirks.logit_bytes is None:
        predicted = _peak_bytes(run)
        others = []
        for each in LOGIT_BYTES:
            own = replace(kernels, quirks=replace(kernels.quirks, logit_bytes=each))
            other = replace(run, runtime=replace(run.runtime, kernels=own))
            others.append(peak_bytes + _peak_bytes(other) - predicted)
        peaks = (others[0], peak_bytes, others[1])
    if run.runtime.states.flat and run.runtime.optimizer.offload_weights:
        peaks += tuple(peak * _HOSTED_SHARE for peak in peaks)
    return peaks


@lru_cache(maxsize=256)
def _peak_bytes(run: Run) -> int:
    return sum(part.num_bytes for part in sharded_parts(run, run.strategy.pp - 1)[1])


@cache
def _ratio_of(odds: float, kind: LaunchKind) -> float:
    """Return the ratio of reserved to predicted bytes that is exceeded with a given probability.

    It is found by bisection of its logarithm.
    """
    low, high = -2.0, 2.0
    for _ in range(50):
        middle = (low + high) / 2.0
        above = _probability(math.exp(middle), kind) > odds
        low, high = (middle, high) if above else (low, middle)
    return math.exp((low + high) / 2.0)


def oom_probability_at(run: Run, peak_bytes: float, capacity_bytes: float) -> float:
    """Return the probability that a device of `capacity_bytes` is too small for a predicted peak.

    The CUDA context is subtracted first; the probability is 1 if no memory is left. It is the mean
    of those of all possible peaks.
    """
    kind, left = kind_of(run), capacity_bytes - CONTEXT_BYTES
    peaks = _possible_peaks(run, peak_bytes)
    return math.fsum(oom_probability_of_kind(kind, peak, left) for peak in peaks) / len(peaks)


def oom_probability_of_kind(kind: LaunchKind, peak_bytes: float, left_bytes: float) -> float:
    """Return the OOM probability of a kind of run, 0 to 1.

    peak_bytes : predicted peak of allocated memory.
    left_bytes : device memory without the CUDA context and NCCL buffers.
    """
    if left_bytes <= 0:
        return 1.0
    if peak_bytes <= 0:
        return 0.0
    return _probability(left_bytes / peak_bytes, kind)


def _probability(ratio: float, kind: LaunchKind) -> float:
    return probability_of_ratio(ratio, *_errors(kind), normal=kind in _NORMAL_ERRORS)


def reserve_share(kind: LaunchKind, odds: float) -> float:
    """Return the memory to keep free, as a share of the predicted peak, for an OOM probability.

    It inverts `oom_probability_of_kind`. The probability is above 0 and below 1.
    """
    return _ratio_of(odds, kind) - 1.0


def oom_probability_any_stage(
    run: Run, peaks_bytes: Iterable[float], capacity_bytes: float
) -> float:
    """Return the probability that at least one stage with these predicted peaks runs out of memory.

    Stages share their error (one allocator, one engine), so the peak stage decides. Raises
    ValueError without a stage.
    """
    return oom_probability_at(run, max(peaks_bytes), capacity_bytes)
