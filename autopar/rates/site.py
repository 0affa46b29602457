"""Site: what one cluster reaches of what its card says, and how that follows from measurements.

Two clusters of one card differ: in the clock that their GPUs sustain, and in what links and
adapters reach. A site file holds these figures with their quality and, where `autopar profile
site` wrote it, the measurements that they are made of. All but its name is optional: what is
missing is as the card says. How anything is measured is not here.
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
"""Value of `format` that tells a site from other documents."""

_Text = Annotated[str, some_text()]
_FLOP_PER_S = quantity(
    what="a rate of matrix products",
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
# far wider than machines differ: of a card of another device a CPU reaches next to nothing
_FACTOR = quantity(
    what="a factor on what the card says",
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
    """A figure, how good it is, and where it is from."""

    quality: Literal["measured", "derived", "nominal"]
    """Measured there; fitted to runs there; or assumed."""
    source: _Text | None = None
    basis: _Text | None = None
    """Why it is assumed."""
    spread: Annotated[float, _SPREAD] | None = None
    """Nine of ten values differ by at most this share."""

    def __post_init__(self) -> None:
        if self.source is None and self.basis is None:
            raise KeyFault("source", "this key is missing, expected where the figure is from")


class _Factor(_Entry):
    value: Annotated[float, _FACTOR]


class _FlopRate(_Entry):
    value: Annotated[float, _FLOP_PER_S]


class _ByteRate(_Entry):
    value: Annotated[float, _BYTES_PER_S]


class _Time(_Entry):
    value: Annotated[float, _SECONDS]


class _Gemm(Record):
    """Products of square matrices, back to back until the clock has settled, on all GPUs."""

    flop_per_s: _FlopRate
    """Sustained rate of one GPU, the slowest of all."""
    first_flop_per_s: _FlopRate | None = None
    """Rate of its first second."""
    size: Annotated[int, whole_number(1, 10**6)]
    """Rows and columns of every matrix."""
    dtype: Literal["bf16", "fp16", "fp32"]


class _Host(Record):
    """Time of the host for a layer so small that the device waits for it."""

    forward_s: _Time
    backward_s: _Time
    torch: _Text | None = None
    """Version of torch."""


class CollectiveTime(Record):
    """Median time of one collective, all groups of the kind at once."""

    operation: Literal["allreduce", "allgather", "reducescatter", "all2all"]
    ranks: Annotated[int, _RANKS]
    nodes: Annotated[int, _RANKS]
    """Nodes that a group is on, with as many ranks on each."""
    size_bytes: Annotated[float, _SIZE]
    """As nccl-tests count it: the whole tensor; of an all-to-all that of one rank."""
    time_s: Annotated[float, _SECONDS]


@published("site")
class SiteDocument(Record):
    """What one cluster reaches of what its card says, and the measurements behind it."""

    format: Literal["autopar-site"]
    version: Literal[1]
    name: _Text | None = None
    """The name of the file without."""
    description: _Text | None = None
    card: _Text | None = None
    """Name of the card that the factors are over; without one there are absolute figures only."""
    device: _Text | None = None
    """What the GPUs call themselves, or `cpu`."""
    gpus_per_node: Annotated[int, whole_number(1, 4096)] | None = None
    num_nodes: Annotated[int, _RANKS] | None = None
    """Nodes that were measured, which may be a few of many."""
    gemm: _Gemm | None = None
    clock: _Factor | None = None
    """Sustained rate of matrix products over what the card says of a short benchmark."""
    copy_bytes_per_s: _ByteRate | None = None
    """Bytes read and written by a copy in the device's memory."""
    memory_share: _Factor | None = None
    """Rate of a copy, or of the kernels that `source` names, over the datasheet's."""
    elementwise_share: _Factor | None = None
    """Of the datasheet's HBM rate, what chains of memory-bound kernels reach in training."""
    in_node: _Factor | None = None
    """Bandwidth of collectives in a node over what the card says."""
    cross_node: _Factor | None = None
    """The same across nodes, over the card's adapters or `adapter_bytes_per_s`."""
    adapter_bytes_per_s: _ByteRate | None = None
    """Nominal network rate of one GPU and direction, where it is not the card's."""
    host: _Host | None = None
    collectives: list[CollectiveTime] = field(default_factory=list)

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Refuse a document of another kind."""
        return headed(data, FORMAT, "a site")

    def __post_init__(self) -> None:
        factors = ("clock", "memory_share", "elementwise_share", "in_node", "cross_node")
        there = [key for key in factors if getattr(self, key) is not None]
        if self.card is None and there:
            problem = f"this key is missing, and {there[0]!r} is over what the card says"
            raise KeyFault("card", problem)
        for place, row in enumerate(self.collectives):
            if row.ranks < 2:
                problem = f"the value is {row.ranks}, expected a group of at least 2"
                raise KeyFault(f"collectives[{place}].ranks", problem)
            if row.ranks % row.nodes:
                problem = f"the value is {row.nodes}, expected a divisor of the {row.ranks} ranks"
                raise KeyFault(f"collectives[{place}].nodes", problem)


# --------------------------------------------------------------------------------------------------
# What a reader gets.


PARTS = ("clock", "memory_share", "in_node", "cross_node", "adapter_bytes_per_s", "host")
"""What can be known of a site; the names that `Site.known` has."""


class Site(Record):
    """One cluster, in base units; None is what nobody measured."""

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
    """As `Kernels.clock`: what a run sustains of the rate of a short benchmark."""
    copy_bytes_per_s: float | None
    memory_share: float | None
    """Of the datasheet's rate what a copy reaches, or kernels do where a site was fitted to runs;
    `kernels.memory` of a card has chains of kernels, which reach less than a copy."""
    elementwise_share: float | None
    """What chains of memory-bound kernels reach, where runs told; the card's figure else."""
    in_node: float | None
    cross_node: float | None
    adapter_bytes_per_s: float | None
    host_forward_s: float | None
    host_backward_s: float | None
    torch: str | None
    collectives: tuple[CollectiveTime, ...]
    quality: Mapping[str, Quality]
    """By figure: the names of the fields above that are numbers."""
    spread: Mapping[str, float]
    """Share by which nine of ten values differ at most, of the figures that say it."""
    path: Path
    source: Source

    @property
    def factors(self) -> SiteFactors:
        """What links and adapters reach over the card's, 1 where it is unknown."""
        return SiteFactors(
            in_node=1.0 if self.in_node is None else self.in_node,
            cross_node=1.0 if self.cross_node is None else self.cross_node,
        )

    @property
    def known(self) -> frozenset[str]:
        """The `PARTS` that were measured there or fitted to runs there, not assumed."""
        figures = dict.fromkeys(PARTS) | {"host": "host_forward_s"}
        return frozenset(
            part
            for part, figure in figures.items()
            if self.quality.get(figure or part, "nominal") != "nominal"
        )

    def require_card(self, card: Card) -> None:
        """Raise DocumentError where this is a cluster of other devices than the card's.

        Its factors are over that card's figures. A document that names no card is of any.
        """
        if self.card is None or self.card == card.name:
            return
        try:
            if catalog.find_card(self.card).stem == card.name:  # an alias
                return
        except InputError:
            pass  # the name of a card of one's own
        raise DocumentError(
            self.source.path,
            f"the site is of {self.card} and the hardware is {card.name}",
            key="card",
            remedy="take a site of that card or none; its factors do not hold for other devices",
        )

    def network(self, network: Network) -> Network:
        """Return a card's network with this site's adapters; `factors` are apart."""
        return _with_adapters(network, self.adapter_bytes_per_s)


def _with_adapters(network: Network, adapter_bytes_per_s: float | None) -> Network:
    if adapter_bytes_per_s is None:
        return network
    return replace(network, adapter_bytes_per_s=adapter_bytes_per_s)


def load_site(name: str) -> Site:
    """Return a site by name or path; raises InputError naming file, key and value."""
    return read_site(load_object(catalog.find_site(name)))


def read_site(document: JsonDocument) -> Site:
    """Return the site of a document; raises DocumentError naming file, key and value."""
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
            # folder and name only: the same site must give the same document wherever it lies
            path=f"{path.parent.name}/{path.name}",
            sha256=document.sha256,
        ),
        **values,
    )
    # adapters by their nominal rate say nothing of what is reached
    return site if site.known else replace(site, source=replace(site.source, estimated=True))


# --------------------------------------------------------------------------------------------------
# Factors from measurements.


LARGE_BYTES = 16 * MIB
"""Collectives of this size and larger make the factors: smaller ones are latency."""
_LEAST, _MOST = 1e-6, 10.0
"""Factors that a document takes."""
_STEPS = 60
"""Halvings of that range, in logarithms: more than its digits."""


class Fitted(NamedTuple):
    """A factor on what a card says, and how well it fits."""

    value: float
    spread: float
    """Of ten measured collectives nine differ by at most this share from their price with it."""


def gemm_flop(size: int) -> float:
    """Return the FLOP of a product of two square matrices, 2 size^3."""
    return 2.0 * float(size) ** 3


def relative_gemm_rate(card: Card, flop_per_s: float, size: int, dtype: str) -> float:
    """Return a rate of square matrix products over the card's of a short benchmark.

    The card's is 2 size^3 over `kernels.gemm_s` at clock 1, so that `gemm_s` at the returned clock
    has the measured rate as far as products are bound by the multiprocessors. Raises InputError
    where the card has no kernels, or none of this precision.
    """
    said_s = float(gemm_s(kernels_of(card), size, size, size, dtype=dtype))
    return flop_per_s * said_s / gemm_flop(size)


def fit_factors(
    card: Card,
    measured: Iterable[CollectiveTime],
    *,
    gpus_per_node: int,
    adapter_bytes_per_s: float | None = None,
) -> tuple[Fitted | None, Fitted | None]:
    """Return the factors of collectives in a domain and across domains; None without a large one.

    Each is the factor with which `collective_time_s` gives as many seconds for all large messages
    together as they took: long ones weigh most. That across domains takes the other one for given.
    `adapter_bytes_per_s` stands in for the card's adapters.
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
    """Return what the card says that a measured collective takes, seconds; arguments as above."""
    network = _with_adapters(card.network, adapter_bytes_per_s)
    return collective_time_s(
        network, row.operation, row.size_bytes, _shape(card, row, gpus_per_node)
    )


def _shape(card: Card, row: CollectiveTime, gpus_per_node: int) -> GroupShape:
    """Return how the ranks of a measured group lie on the card's NVLink domains.

    A domain is a node of the site, whatever nodes the card has, or a rack of so many such nodes.
    """
    hosts = 1 if card.domain_gpus is None else max(1, card.domain_gpus // gpus_per_node)
    per_domain = row.ranks // row.nodes * min(hosts, row.nodes)
    return GroupShape.even(ranks=row.ranks, per_node=per_domain)


def _fitted(
    network: Network,
    rows: Sequence[tuple[CollectiveTime, GroupShape]],
    site: Callable[[float], SiteFactors],
) -> Fitted | None:
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

    # where other limits than this factor's hold, the least factor that reaches them
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
    return Fitted(value=factor, spread=min(_MOST, float(np.quantile(apart, 0.9))))


# --------------------------------------------------------------------------------------------------
# A training step from the absolute figures: coarse, and the only answer where there is no card.


class StepWork(Record):
    """What one rank does in a training step."""

    flop: float
    """Of matrix products."""
    moved_bytes: float
    """Read and written by all other kernels."""
    num_layers: int
    """Layers whose kernels the host starts, forward and backward; others count as such."""
    collectives: tuple[tuple[str, int, int, float], ...]
    """Operation, ranks and nodes of a group, bytes; one after the other."""


class StepTime(NamedTuple):
    """Seconds of a training step by what they are for; they add up to `total_s`."""

    products_s: float
    memory_s: float
    host_s: float
    """On a GPU, what the host takes longer than the device."""
    collectives_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(self)


def step_time_s(site: Site, work: StepWork) -> StepTime | None:
    """Return the seconds of a training step from a site's absolute figures, nothing overlapped.

    FLOP / sustained rate + bytes / rate of a copy + measured collectives + what the host takes: a
    CPU is its own host, and a GPU works while the host does. None where one of these figures was
    not measured.
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
    """Return the time of a collective by a power law between measured sizes, None without any.

    Below the smallest it is that one's, above the largest in proportion.
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


# Passes over a tensor of tokens x width by kernels that are not fused, forward and backward: a
# norm and a residual before attention and MLP each, rotary positions and layout copies of
# queries, keys, values; an activation and its product; softmax and loss of the logits.
_HIDDEN_PASSES, _HEAD_PASSES, _MLP_PASSES, _LOGIT_PASSES = 24, 12, 10, 10
_OPTIMIZER_BYTES = 28.0
"""AdamW in fp32: weight and two moments read and written, gradient read."""


def data_parallel_work(
    spec: ModelSpec, *, batch: int, ranks: int, nodes: int, element_bytes: float
) -> StepWork:
    """Return what a rank does in a step of a dense model that every rank has whole.

    batch : sequences of a rank. 6 FLOP per weight of a product and token, 2 of them forward
    (Narayanan et al. 2021, section 5.1), attention's 12 per pair of tokens and width of the heads,
    half of the pairs where it is causal; gradients are summed in fp32 once. Raises InputError for
    an architecture that is not known in full.
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
    """Return the weights of a layer that a token is multiplied with."""
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
