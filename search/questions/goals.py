"""Choice of a cluster for a goal: the cheapest per token or the smallest part of a cluster.

`--hardware CARD:NODESxGPUS` names the largest cluster. Its parts have a number of nodes that
divides NODES, or one node with a number of GPUs that divides GPUS; other sizes have few possible
degrees. Every part is searched as a separate cluster, so the choice among them is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.command.answer_schemas import ClusterResult
from autopar.errors import InfeasibleError, InputError, OptionError
from autopar.records import Record
from autopar.run.model import ModelSpec, model_parameter_count
from autopar.units import divisors, format_bytes
from search.engines.candidate import TrainingSettings
from search.planning.choose import chosen, route_of
from search.planning.uniform.answer import UniformRequest
from search.request.profiles import card_shape
from search.request.request import BATCH_OPTIONS, Request, build_request

_STATES_BYTES = 12
"""Lower bound of bytes per parameter over all GPUs with Adam: two fp32 moments, an fp32 weight."""


class GoalResult(Record):
    """The cluster chosen for a goal and the clusters that were searched."""

    options: Mapping[str, object]
    """Options of the search on the chosen cluster, as typed."""
    words: str
    """Sentence with the goal and the throughput of every searched cluster."""
    tried: tuple[ClusterResult, ...]


def clusters_of(nodes: int, per_node: int) -> tuple[tuple[int, int], ...]:
    """Return (nodes, GPUs per node) of a cluster and its even divisions, smallest first."""
    parts = [(1, gpus) for gpus in divisors(per_node) if gpus < per_node]
    return (*parts, *((number, per_node) for number in divisors(nodes)))


def too_small(question: UniformRequest, spec: ModelSpec) -> str:
    """Return why no run of any engine fits on a cluster; empty if one may fit.

    The lower bound is the memory of weights and Adam moments, sharded over all GPUs. It is not
    applied to fine-tuning, offload or low-precision moments.
    """
    if question.job.training != TrainingSettings():
        return ""
    least = _STATES_BYTES * model_parameter_count(spec) / question.job.world
    if least <= question.card.memory_bytes:
        return ""
    return f"weights and moments alone need {format_bytes(least)} per GPU"


def chosen_cluster(raw: Mapping[str, object], request: Request) -> GoalResult:
    """Return the cluster that reaches the goal of a request.

    If nothing fits on any part, return the largest cluster, whose search reports suggestions.
    Raises InputError, such as OptionError if the request has no uniform plans. Raises
    InfeasibleError if plans fit but none reaches `--tokens-per-s`.
    """
    goal, wanted = request.output.goal, request.output.tokens_per_s
    question = route_of(request).launches
    if question is None:
        raise OptionError(
            f"--goal {goal} needs --model NAME and --hardware CARD:NODESxGPUS, without "
            "measured files or options of per-layer plans",
            remedy="Remove --goal",
        )
    card, nodes, per_node = card_shape(
        str(request.inputs.hardware),
        request.inputs.num_nodes,
        request.inputs.num_gpus_per_node,
        request.inputs.world_size,
    )
    clusters = clusters_of(nodes, per_node)
    common = {key: value for key, value in raw.items() if key not in _OF_ONE}
    if not BATCH_OPTIONS & request.given.keys():
        # All parts train with the global batch of the largest cluster.
        common["settle-bsz"] = str(question.job.global_batches[0])
    if request.options.time_limit_s is not None:
        common["time-limit"] = str(request.options.time_limit_s / len(clusters))
    tried: list[ClusterResult] = []
    for number, gpus in clusters:
        tried.append(_tried({**common, "hardware": f"{card}:{number}x{gpus}"}, question.spec))
        if goal == "fewest-gpus" and _reaches(tried[-1], wanted):
            break
    good = [one for one in tried if _reaches(one, wanted)]
    if good:
        best = good[0]
        if goal == "cost":
            best = max(good, key=lambda one: (one.tokens_per_s or 0.0) / one.gpus)
        hardware = best.hardware
    else:
        _refuse_rate(tried, wanted)
        hardware = tried[-1].hardware
    options = {**common, "hardware": hardware}
    if "time-limit" in raw:
        options["time-limit"] = raw["time-limit"]
    return GoalResult(options=options, words=_words(goal, wanted, tried), tried=tuple(tried))


_OF_ONE = frozenset({"num-nodes", "num-gpus-per-node", "world-size", "goal", "tokens-per-s"})
"""Options of a single cluster, or of the choice among several."""


def _tried(options: Mapping[str, object], spec: ModelSpec) -> ClusterResult:
    request = build_request(options)
    hardware, gpus, reason = str(options["hardware"]), 0, ""
    try:
        route = route_of(request)
        assert route.launches is not None, "its largest cluster has launches"
        gpus = route.launches.job.world
        reason = too_small(route.launches, spec)
        if not reason:
            found = chosen(request, route)
            rates = [line.samples_per_s or 0.0 for line in found.lines]
            best = None if found.launches is None else found.launches.fastest
            if best is not None:
                rates.append(best.samples_per_s)
            if any(rates):
                rate = max(rates) * route.launches.job.seq
                return ClusterResult(hardware=hardware, gpus=gpus, tokens_per_s=rate, reason="")
            reason = "nothing fits"
    except InputError as error:  # for example degrees that need more GPUs
        reason = str(error)
    return ClusterResult(hardware=hardware, gpus=gpus, tokens_per_s=None, reason=reason)


def _reaches(one: ClusterResult, wanted: float | None) -> bool:
    return one.tokens_per_s is not None and one.tokens_per_s >= (wanted or 0.0)


def _refuse_rate(tried: Sequence[ClusterResult], wanted: float | None) -> None:
    """Raise InfeasibleError if plans fit but none reaches the wanted throughput, tokens/s."""
    fast = max(tried, key=lambda one: one.tokens_per_s or 0.0)
    if fast.tokens_per_s is not None:
        raise InfeasibleError(
            f"--tokens-per-s {wanted:,.0f}: no part of {tried[-1].hardware} reaches it",
            remedy=f"Use more nodes: {fast.hardware} reaches {fast.tokens_per_s:,.0f}",
        )


def _words(goal: str, wanted: float | None, tried: Sequence[ClusterResult]) -> str:
    """Return a sentence with the goal and the tokens/s/GPU of every searched cluster."""
    what = "cheapest per token" if goal == "cost" else "fewest GPUs"
    reached = f" with {wanted:,.0f} tokens/s" if wanted is not None else ""
    shapes = ", ".join(
        one.hardware.rpartition(":")[2]
        + (f" {one.tokens_per_s / one.gpus:,.0f}" if one.tokens_per_s is not None else " none")
        for one in tried
    )
    return f"{what}{reached}; tokens/s/GPU of the tried clusters: {shapes}"
