"""Site: the fractions of its card's rates that one cluster reaches, and how to fit them.

Two clusters with the same card differ in the sustained clock of their GPUs and in the bandwidth
that links and adapters reach. A site file contains these figures with their quality and, if
`autopar profile site` wrote it, the measurements behind them. Everything except its name is
optional: the card's figure is used for a missing one. The benchmarks are in `profiler.site`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import field

from autopar.documents import catalog
from autopar.documents.checks import published
from autopar.documents.json import (
    JsonDocument,
    headed,
    load_object,
    read_record,
)
from autopar.errors import DocumentError, InputError
from autopar.rates.card import Card
from autopar.rates.collectives import GroupShape, Network, SiteFactors, collective_time_s
from autopar.rates.constants import Quality, kernels_of
from autopar.rates.kernels import gemm_s
from autopar.records import KeyFault, Record, quantity, replace, some_text, whole_number
from autopar.run.model import LayerSpec, ModelSpec, head_dim, padded_vocab_size, parameter_count
from autopar.sources import Source
from autopar.units import MIB

# --------------------------------------------------------------------------------------------------
# The document.


FORMAT = "autopar-site"
"""Value of `format` that identifies a site."""

_Text = Annotated[str, some_text()]
_FLOP_PER_S = quantity(
    what="a GEMM rate",
    unit="FLOP/s",
    minimum=1e6,
    maximum=1e17,
    too_large="is beyond any device",
    too_small="looks like GFLOP/s or TFLOP/s",
)
_BYTES_PER_S = quantity(
    what="a bandwidth",
    unit="bytes/s",
    minimum=1e6,
    maximum=1e15,
    too_large="is beyond any device",
    too_small="looks like MB/s or GB/s",
)
# The range is far wider than machines differ: a CPU reaches almost nothing of a GPU card's rates.
_FACTOR = quantity(
    what="a factor on the value of the card",
    unit="",
    minimum=1e-9,
    maximum=10.0,
    too_large="looks like a percentage",
)
_SECONDS = quantity(
    what="a time", unit="s", maximum=1e4, too_large="looks like microseconds or milliseconds"
)
_SIZE = quantity(what="a size", unit="bytes", maximum=1e15, too_large="is beyond any device")
_SPREAD = quantity(
    what="a share",
    unit="",
    maximum=10.0,
    exclusive=False,
    too_large="looks like a percentage",
)
_RANKS = whole_number(1, 10**7)


class _Entry(Record):
    """A figure with its quality and its source."""

    quality: Literal["measured", "derived", "nominal"]
    """Measured on the site, fitted to runs on the site, or assumed."""
    source: _Text | None = None
    basis: _Text | None = None
    """Reason for an assumed value."""
    spread: Annotated[float, _SPREAD] | None = None
    """Relative deviation that 9 of 10 values do not exceed."""

    def __post_init__(self) -> None:
        if self.source is None and self.basis is None:
            raise KeyFault("source", "this key is missing, expected the source of the value")


class _Factor(_Entry):
    value: Annotated[float, _FACTOR]


class _FlopRate(_Entry):
    value: Annotated[float, _FLOP_PER_S]


class _ByteRate(_Entry):
    value: Annotated[float, _BYTES_PER_S]


class _Time(_Entry):
    value: Annotated[float, _SECONDS]


class _Gemm(Record):
    """GEMMs of square matrices on all GPUs, back to back until the clock has settled."""

    flop_per_s: _FlopRate
    """Sustained rate of the slowest GPU."""
    first_flop_per_s: _FlopRate | None = None
    """Rate of that GPU in its first second."""
    size: Annotated[int, whole_number(1, 10**6)]
    """Rows and columns of every matrix."""
    dtype: Literal["bf16", "fp16", "fp32"]


class _Host(Record):
    """Host time of a layer so small that the device waits for the host."""

    forward_s: _Time
    backward_s: _Time
    torch: _Text | None = None
    """PyTorch version."""


class CollectiveTime(Record):
    """Median time of one collective, with all groups of the kind running at once."""

    operation: Literal["allreduce", "allgather", "reducescatter", "all2all"]
    ranks: Annotated[int, _RANKS]
    nodes: Annotated[int, _RANKS]
    """Number of nodes of a group, with equally many ranks on each."""
    size_bytes: Annotated[float, _SIZE]
    """Message size as in nccl-tests: the whole tensor; for an all-to-all, the tensor of one rank.
    """
    time_s: Annotated[float, _SECONDS]


@published("site")
class SiteDocument(Record):
    """Fractions of a card's rates that one cluster reaches, and the measurements of them."""

    format: Literal["autopar-site"]
    version: Literal[1]
    name: _Text | None = None
    """Name of the site; the file name without suffix by default."""
    description: _Text | None = None
    card: _Text | None = None
    """Name of the card that the factors refer to; without one only absolute figures are allowed."""
    device: _Text | None = None
    """Device name reported by the GPUs, or `cpu`."""
    gpus_per_node: Annotated[int, whole_number(1, 4096)] | None = None
    num_nodes: Annotated[int, _RANKS] | None = None
    """Number of nodes measured, which may be a part of the cluster."""
    gemm: _Gemm | None = None
    clock: _Factor | None = None
    """Sustained GEMM rate over the card's rate in a short benchmark."""
    copy_bytes_per_s: _ByteRate | None = None
    """Bytes read and written per second by a copy in device memory."""
    memory_share: _Factor | None = None
    """Memory rate of a copy, or of the kernels named in `source`, over the datasheet's."""
    elementwise_share: _Factor | None = None
    """Fraction of the datasheet's HBM rate that chains of memory-bound kernels reach in training.
    """
    in_node: _Factor | None = None
    """Bandwidth of collectives inside a node over the card's."""
    cross_node: _Factor | None = None
    """Bandwidth of collectives across nodes over that of the card's adapters, or of
    `adapter_bytes_per_s` if given."""
    adapter_bytes_per_s: _ByteRate | None = None
    """Nominal network rate of one GPU and direction, where it differs from the card's."""
    host: _Host | None = None
    collectives: list[CollectiveTime] = field(default_factory=list)

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `data` after a check of its header; raises an error for another document type."""
        return headed(data, FORMAT, "a site")

    def __post_init__(self) -> None:
        factors = ("clock", "memory_share", "elementwise_share", "in_node", "cross_node")
        there = [key for key in factors if getattr(self, key) is not None]
        if self.card is None and there:
            problem = f"this key is missing, but {there[0]!r} is above the card's value"
            raise KeyFault("card", problem)
        for place, row in enumerate(self.collectives):
            if row.ranks < 2:
                problem = f"the value is {row.ranks}, expected a group of at least 2"
                raise KeyFault(f"collectives[{place}].ranks", problem)
            if row.ranks % row.nodes:
                problem = f"the value is {row.nodes}, expected a divisor of the {row.ranks} ranks"
                raise KeyFault(f"collectives[{place}].nodes", problem)


# --------------------------------------------------------------------------------------------------
# Site in base units.


PARTS = ("clock", "memory_share", "in_node", "cross_node", "adapter_bytes_per_s", "host")
"""Groups of figures that a site can define; the possible members of `Site.known`."""


class Site(Record):
    """One cluster, in base units; None for figures that were not measured."""

    name: str
    description: str
    card: str | None
    device: str | None
    gpus_per_node: int | None
    num_nodes: int | None
    gemm_flop_per_s: float | None
    gemm_size: int | None
    gemm_dtype: str | None
    clock: float | None
    """Sustained rate of GEMMs in 16 bits over that of a short benchmark."""
    copy_bytes_per_s: float | None
    memory_share: float | None
    """Memory rate over the datasheet's: of a copy, or of kernels if the site was fitted to runs.

    `kernels.memory` of a card describes chains of kernels, which are slower than a copy.
    """
    elementwise_share: float | None
    """Memory rate of chains of memory-bound kernels over the datasheet's, fitted to runs.

    None: the card's figure is used.
    """
    in_node: float | None
    cross_node: float | None
    adapter_bytes_per_s: float | None
    host_forward_s: float | None
    host_backward_s: float | None
    torch: str | None
    collectives: tuple[CollectiveTime, ...]
    quality: Mapping[str, Quality]
    """Quality by figure; keys are names of the numeric fields above."""
    spread: Mapping[str, float]
    """Relative deviation that 9 of 10 values do not exceed, by figure; only figures that give it.
    """
    path: Path
    source: Source

    @property
    def factors(self) -> SiteFactors:
        """Measured over nominal bandwidth of links and adapters; 1 where unknown."""
        return SiteFactors(
            in_node=1.0 if self.in_node is None else self.in_node,
            cross_node=1.0 if self.cross_node is None else self.cross_node,
        )

    @property
    def known(self) -> frozenset[str]:
        """Members of `PARTS` that were measured on the site or fitted to its runs, not assumed."""
        figures = dict.fromkeys(PARTS) | {"host": "host_forward_s"}
        return frozenset(
            part
            for part, figure in figures.items()
            if self.quality.get(figure or part, "nominal") != "nominal"
        )

    def require_card(self, card: Card) -> None:
        """Raise DocumentError if the cluster's devices are not those of `card`.

        The factors of a site are relative to its card. A site without a card can be used with any.
        """
        if self.card is None or self.card == card.name:
            return
        try:
            if catalog.find_card(self.card).stem == card.name:  # an alias
                return
        except InputError:
            pass  # the name may be that of a custom card
        raise DocumentError(
            self.source.path,
            f"the site was measured on {self.card}, but --hardware is {card.name}",
            key="card",
            remedy=f"Use a site of {card.name} or --site none",
        )

    def network(self, network: Network) -> Network:
        """Return a card's network with this site's adapters; `factors` are not applied."""
        return _with_adapters(network, self.adapter_bytes_per_s)


def _with_adapters(network: Network, adapter_bytes_per_s: float | None) -> Network:
    if adapter_bytes_per_s is None:
        return network
    return replace(network, adapter_bytes_per_s=adapter_bytes_per_s)


def load_site(name: str) -> Site:
    """Return a site by name or path; raises InputError if it is unknown or invalid."""
    return read_site(load_object(catalog.find_site(name)))


def read_site(document: JsonDocument) -> Site:
    """Return the site of a document; raises DocumentError if a key is missing or invalid."""
    path = document.path
    found = read_record(SiteDocument, path, document.data)
    gemm, host = found.gemm, found.host
    entries: dict[str, _FlopRate | _ByteRate | _Factor | _Time | None] = {
        "gemm_flop_per_s": None if gemm is None else gemm.flop_per_s,
        "clock": found.clock,
        "copy_bytes_per_s": found.copy_bytes_per_s,
        "memory_share": found.memory_share,
        "elementwise_share": found.elementwise_share,
        "in_node": found.in_node,
        "cross_node": found.cross_node,
        "adapter_bytes_per_s": found.adapter_bytes_per_s,
        "host_forward_s": None if host is None else host.forward_s,
        "host_backward_s": None if host is None else host.backward_s,
    }
    there = {name: entry for name, entry in entries.items() if entry is not None}
    values: dict[str, Any] = dict.fromkeys(entries)
    values |= {name: entry.value for name, entry in there.items()}
    site = Site(
        name=path.stem if found.name is None else found.name,
        description=found.description or "",
        card=found.card,
        device=found.device,
        gpus_per_node=found.gpus_per_node,
        num_nodes=found.num_nodes,
        gemm_size=None if gemm is None else gemm.size,
        gemm_dtype=None if gemm is None else gemm.dtype,
        torch=None if host is None else host.torch,
        collectives=tuple(found.collectives),
        quality={name: entry.quality for name, entry in there.items()},
        spread={name: entry.spread for name, entry in there.items() if entry.spread is not None},
        path=path,
        source=Source(
            role="site",
            # Folder and name only: the same site must give the same document wherever it is stored.
            path=f"{path.parent.name}/{path.name}",
            sha256=document.sha256,
        ),
        **values,
    )
    # The nominal rate of the adapters does not tell which bandwidth is reached.
    return site if site.known else replace(site, source=replace(site.source, estimated=True))


# --------------------------------------------------------------------------------------------------
# Factors from measurements.


LARGE_BYTES = 16 * MIB
"""Smallest collectives used to fit the factors: latency dominates smaller ones."""
_LEAST, _MOST = 1e-6, 10.0
"""Range of factors that a document may contain."""
_STEPS = 60
"""Bisection steps of the logarithm of that range, more than the digits of a factor."""


class FittedFactor(NamedTuple):
    """A fitted factor over the card's figure, with its error."""

    value: float
    spread: float
    """Relative error that 9 of 10 measured collectives do not exceed at this factor."""


def gemm_flop(size: int) -> float:
    """Return the FLOP of a GEMM of two square matrices, 2 size^3."""
    return 2.0 * float(size) ** 3


def relative_gemm_rate(card: Card, flop_per_s: float, size: int, dtype: str) -> float:
    """Return a measured rate of square GEMMs over the card's rate in a short benchmark.

    The card's rate is 2 size^3 over `kernels.gemm_s` at clock 1. With the returned value as clock,
    `gemm_s` gives the measured rate, as far as multiprocessors are the limit. Raises InputError if
    the card has no kernels or none of this precision.
    """
    said_s = float(gemm_s(kernels_of(card), size, size, size, dtype=dtype))
    return flop_per_s * said_s / gemm_flop(size)


def fit_factors(
    card: Card,
    measured: Iterable[CollectiveTime],
    *,
    gpus_per_node: int,
    adapter_bytes_per_s: float | None = None,
) -> tuple[FittedFactor | None, FittedFactor | None]:
    """Return the bandwidth factors inside and across domains; None without a large message.

    Each factor makes `collective_time_s` equal to the measured time, summed over all large
    messages, so that long messages weigh most. The factor inside domains is fitted first and fixed
    for the other. `adapter_bytes_per_s` replaces the rate of the card's adapters.
    """
    network = _with_adapters(card.network, adapter_bytes_per_s)
    large = [row for row in measured if row.size_bytes >= LARGE_BYTES]
    shapes = [_shape(card, row, gpus_per_node) for row in large]
    inside = [(row, shape) for row, shape in zip(large, shapes, strict=True) if shape.nodes == 1]
    across = [(row, shape) for row, shape in zip(large, shapes, strict=True) if shape.nodes > 1]
    in_node = _fitted(network, inside, lambda factor: SiteFactors(in_node=factor))
    given = 1.0 if in_node is None else in_node.value
    cross_node = _fitted(
        network, across, lambda factor: SiteFactors(in_node=given, cross_node=factor)
    )
    return in_node, cross_node


def collective_s(
    card: Card, row: CollectiveTime, gpus_per_node: int, adapter_bytes_per_s: float | None = None
) -> float:
    """Return the seconds that a card predicts for a measured collective; see `fit_factors`."""
    network = _with_adapters(card.network, adapter_bytes_per_s)
    return collective_time_s(
        network, row.operation, row.size_bytes, _shape(card, row, gpus_per_node)
    )


def _shape(card: Card, row: CollectiveTime, gpus_per_node: int) -> GroupShape:
    """Return the placement of the ranks of a measured group on the card's NVLink domains.

    A domain is a node of the site, or a rack of as many such nodes as the card joins. The node size
    of the card is not used.
    """
    hosts = 1 if card.domain_gpus is None else max(1, card.domain_gpus // gpus_per_node)
    per_domain = row.ranks // row.nodes * min(hosts, row.nodes)
    return GroupShape.even(ranks=row.ranks, per_node=per_domain)


def _fitted(
    network: Network,
    rows: Sequence[tuple[CollectiveTime, GroupShape]],
    site: Callable[[float], SiteFactors],
) -> FittedFactor | None:
    if not rows:
        return None
    took = np.array([row.time_s for row, _ in rows])

    def prices(factor: float) -> Any:
        factors = site(factor)
        return np.array(
            [
                collective_time_s(network, row.operation, row.size_bytes, shape, factors)
                for row, shape in rows
            ]
        )

    # If other limits dominate, larger factors change nothing: the smallest that reaches them is
    # used.
    wanted = max(float(took.sum()), 1.001 * float(prices(_MOST).sum()))
    low, high = math.log(_LEAST), math.log(_MOST)
    for _ in range(_STEPS):  # prices fall with the factor
        middle = (low + high) / 2
        if float(prices(math.exp(middle)).sum()) > wanted:
            low = middle
        else:
            high = middle
    factor = min(_MOST, math.exp(high))
    apart = np.abs(prices(factor) / took - 1.0)
    return FittedFactor(value=factor, spread=min(_MOST, float(np.quantile(apart, 0.9))))


# --------------------------------------------------------------------------------------------------
# A training step from absolute figures: coarse, but the only estimate without a card.


class StepWork(Record):
    """Work of one rank in a training step."""

    flop: float
    """FLOP of GEMMs."""
    moved_bytes: float
    """Bytes read and written by all other kernels."""
    num_layers: int
    """Layers whose kernels the host launches, forward and backward; the head counts as one."""
    collectives: tuple[tuple[str, int, int, float], ...]
    """(Operation, ranks of a group, nodes of a group, bytes) of collectives that run in sequence.
    """


class StepTime(NamedTuple):
    """Seconds of a training step by term; the sum is `total_s`."""

    products_s: float
    memory_s: float
    host_s: float
    """Host overhead; on a GPU only the time by which the host exceeds the device."""
    collectives_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(self)


def step_time_s(site: Site, work: StepWork) -> StepTime | None:
    """Return the seconds of a training step from a site's absolute figures, without overlap.

    FLOP / sustained rate + bytes / copy rate + measured collectives + host overhead. Host
    overhead is concurrent with the kernels of a GPU, but not with those of a CPU. None if one of
    these figures was not measured.
    """
    rate, copied = site.gemm_flop_per_s, site.copy_bytes_per_s
    forward_s, backward_s = site.host_forward_s, site.host_backward_s
    if rate is None or copied is None or forward_s is None or backward_s is None:
        return None
    collectives_s = 0.0
    for operation, ranks, nodes, size_bytes in work.collectives:
        took = _interpolated_s(site, operation, ranks, nodes, size_bytes)
        if took is None:
            return None
        collectives_s += took
    products_s, memory_s = work.flop / rate, work.moved_bytes / copied
    host_s = work.num_layers * (forward_s + backward_s)
    if site.device != "cpu":
        host_s = max(0.0, host_s - products_s - memory_s)
    return StepTime(products_s, memory_s, host_s, collectives_s)


def _interpolated_s(
    site: Site, operation: str, ranks: int, nodes: int, size_bytes: float
) -> float | None:
    """Return the time of a collective by power-law interpolation of measured sizes, or None.

    Below the smallest size the time is constant; above the largest it grows in proportion.
    """
    rows = sorted(
        (row.size_bytes, row.time_s)
        for row in site.collectives
        if (row.operation, row.ranks, row.nodes) == (operation, ranks, nodes)
    )
    if not rows:
        return None
    sizes, times = np.log(np.array(rows)).T
    above = max(1.0, size_bytes / rows[-1][0])
    return above * float(np.exp(np.interp(math.log(size_bytes), sizes, times)))


# Passes over a tensor of tokens x width by unfused kernels, forward and backward.
#
# Hidden: one norm and one residual before each of attention and MLP. Heads: rotary positions and
# layout copies of queries, keys and values. MLP: activation and gating. Logits: softmax and loss.
_HIDDEN_PASSES, _HEAD_PASSES, _MLP_PASSES, _LOGIT_PASSES = 24, 12, 10, 10
_OPTIMIZER_BYTES = 28.0
"""Bytes per parameter of AdamW in fp32: weight and two moments read and written, gradient read."""


def data_parallel_work(
    spec: ModelSpec, *, batch: int, ranks: int, nodes: int, element_bytes: float
) -> StepWork:
    """Return the work of one rank in a step of a dense model that is replicated on every rank.

    batch : sequences per rank.

    6 FLOP per GEMM weight and token, 2 of them forward (Narayanan et al. 2021, section 5.1).
    Attention: 12 FLOP per pair of tokens and per element of all heads' width; causal attention has
    half of the pairs. Gradients are summed in fp32 once. Raises InputError for an incomplete
    architecture.
    """
    vocab = padded_vocab_size(spec)
    flop = moved = weights = 0.0
    for layer in spec.layers:
        tokens = batch * layer.seq_length
        heads = (layer.num_heads or 0) * head_dim(layer)
        pairs = batch * layer.seq_length**2 * (0.5 if layer.causal else 1.0)
        flop += layer.num_layers * (6.0 * _visited(layer) * tokens + 12.0 * pairs * heads)
        moved += layer.num_layers * tokens * element_bytes * _moved_per_token(layer)
        weights += layer.num_layers * parameter_count(layer)
    last = spec.layers[-1]
    tokens = batch * last.seq_length
    flop += 6.0 * vocab * last.hidden_size * tokens
    moved += tokens * vocab * element_bytes * _LOGIT_PASSES
    weights += vocab * last.hidden_size * (1 if spec.tied_embeddings else 2)
    moved += weights * _OPTIMIZER_BYTES
    gradients = (("allreduce", ranks, nodes, 4.0 * weights),) if ranks > 1 else ()
    return StepWork(
        flop=flop, moved_bytes=moved, num_layers=spec.num_layers + 1, collectives=gradients
    )


def _visited(layer: LayerSpec) -> float:
    """Return the number of weights of a layer that a token is multiplied with."""
    if layer.num_experts is None:
        return float(parameter_count(layer))
    return float(parameter_count(replace(layer, num_experts=layer.experts_per_token or 1)))


def _moved_per_token(layer: LayerSpec) -> float:
    heads = (layer.num_heads or 0) * head_dim(layer)
    visited = layer.experts_per_token or 1
    return (
        _HIDDEN_PASSES * layer.hidden_size
        + _HEAD_PASSES * heads
        + _MLP_PASSES * visited * (layer.ffn_hidden_size or 0)
    )
