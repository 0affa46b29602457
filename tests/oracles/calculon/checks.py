"""Constraints on an execution, checked before pricing in a fixed order."""

from __future__ import annotations

from msgspec import structs

from autopar.errors import InfeasibleExecution
from autopar.records import replace
from search.closed_form.calculon.documents import (
    CHOICES,
    DATATYPE_BYTES,
    Application,
    Execution,
    System,
)
from search.closed_form.calculon.engine import Quirks
from tests.oracles.calculon.shape import Shape


def check_execution(application: Application, x: Execution, system: System, quirks: Quirks) -> None:
    """Raise InfeasibleExecution where an execution contradicts itself or does not fit a network."""
    for name in ("num_procs", "tensor_par", "pipeline_par", "data_par"):
        if getattr(x, name) <= 0:
            raise _contradiction(f"{name}: the value is {getattr(x, name)}, expected at least 1")
    if x.tensor_par * x.pipeline_par * x.data_par != x.num_procs:
        raise _contradiction(
            "tensor * pipeline * data parallelism != num_procs: "
            f"{x.tensor_par} * {x.pipeline_par} * {x.data_par} != {x.num_procs}"
        )
    for name in ("batch_size", "microbatch_size"):
        if getattr(x, name) <= 0:
            raise _contradiction(f"{name}: the value is {getattr(x, name)}, expected at least 1")
    if x.batch_size % x.data_par or x.batch_size // x.data_par % x.microbatch_size:
        raise _contradiction(
            f"batch_size: {x.batch_size} is not a multiple of data_par * microbatch_size = "
            f"{x.data_par} * {x.microbatch_size}"
        )
    for name in ("attention_type", "activation_recompute"):
        _check_choice(x, name)
    if x.activation_recompute != "none" and not x.training:
        raise _contradiction("We only perform recompute during training")
    if x.pipeline_interleaving <= 0:
        raise _contradiction(f"Bad pipeline interleaving of {x.pipeline_interleaving}")
    if x.pipeline_par == 1 and x.pipeline_interleaving != 1:
        raise _contradiction(f"Bad pipeline interleaving of {x.pipeline_interleaving} with PP=1")
    if x.optimizer_sharding and x.data_par == 1:
        raise _contradiction("We perform optimizer sharding with DP > 1")
    for name in ("tensor_par_comm_type", "tensor_par_overlap", "structure_type"):
        _check_choice(x, name)
    for wrong, reason in (
        (
            x.tensor_par_overlap != "none" and x.tensor_par == 1,
            "We perform TP comm overlap with TP > 1",
        ),
        (x.seq_par_ag_redo and x.tensor_par_comm_type != "rs_ag", "We only redo AG comm"),
        (
            x.seq_par_ag_redo and x.activation_recompute == "full",
            "We assume no extra AG with full recompute",
        ),
        (
            x.data_par_overlap and not x.training,
            "We only perform DP comm overlap during training",
        ),
        (x.data_par_overlap and x.data_par == 1, "We perform DP comm overlap with DP > 1"),
        (
            x.optimizer_offload and not x.training,
            "We only perform optimizer offloading during training",
        ),
    ):
        if wrong:
            raise _contradiction(reason)
    for name in ("tensor_par_net", "pipeline_par_net", "data_par_net"):
        if getattr(x, name) >= len(system.networks):
            raise _contradiction(
                f"{name}: the value is {getattr(x, name)}, but the system has "
                f"{len(system.networks)} network tier{'s' * (len(system.networks) != 1)}, "
                "numbered from 0"
            )
    _check_tiers(x, system, quirks)


def check_shape(application: Application, x: Execution, shape: Shape, system: System) -> None:
    """Raise InfeasibleExecution where blocks, sequence or heads do not divide."""
    if x.pipeline_interleaving > shape.blocks:
        raise InfeasibleExecution(
            "Pipeline interleaving must be less than or equal to the number of blocks per processor"
        )
    if shape.blocks % x.pipeline_interleaving:
        raise InfeasibleExecution(
            "Pipeline interleaving must be a factor value of the number of blocks per processor"
        )
    if (x.weight_offload or x.activations_offload or x.optimizer_offload) and shape.blocks <= 2:
        raise InfeasibleExecution("Offloading requires each processor to handle at least 3 blocks")
    t = x.tensor_par
    if x.tensor_par_comm_type != "ar" and shape.tokens % t:
        raise _contradiction(
            f"We should split batch_seq={shape.tokens} between {t} TP partitions evenly"
        )
    for name in ("hidden", "feedforward"):
        if getattr(application, name) % t:
            raise _contradiction(
                f"We should split {name}={getattr(application, name)} between {t} TP partitions "
                "evenly"
            )
    if application.attn_heads % t:
        raise _contradiction(
            f"We should split {application.attn_heads} attn_heads between {t} TP partitions evenly"
        )
    if application.attn_heads % shape.kv_heads:
        raise _contradiction(
            f"attn_kv_heads: the value is {shape.kv_heads}, expected a divisor of "
            f"attn_heads = {application.attn_heads}"
        )
    if shape.kv_heads % t and t % shape.kv_heads:
        raise InfeasibleExecution(
            f"We should split {shape.kv_heads} attn_kv_heads between {t} TP partitions evenly"
        )


def check_datatype(x: Execution, system: System, quirks: Quirks) -> None:
    """Raise InfeasibleExecution where the system lacks the datatype."""
    if x.datatype not in DATATYPE_BYTES:
        raise InfeasibleExecution(f"Unsupported data type: {x.datatype}", "input")
    for engine in ("vector", "matrix"):
        if x.datatype not in getattr(system, engine):
            ends = quirks.unknown_datatype_ends_search
            raise InfeasibleExecution(
                f"Unsupported type: {x.datatype}", "input" if ends else "infeasible"
            )


def check_memory(tier: int, needed_bytes: float, capacity_bytes: float) -> None:
    """Raise InfeasibleExecution where a memory is too small."""
    if needed_bytes > capacity_bytes:
        raise InfeasibleExecution(
            f"Mem tier{tier} needs {_size(needed_bytes)} but only has {_size(capacity_bytes)}"
        )


def check_published(x: Execution) -> None:
    """Raise InfeasibleExecution where an execution uses options that the published model lacks."""
    for name, unknown in (("attention_type", "flash"), ("structure_type", "llama")):
        if getattr(x, name) == unknown:
            raise _contradiction(
                f"{name}: {unknown!r} is not in the published model. Remove compat"
            )


def published_application(application: Application) -> Application:
    """Return an application without the fields that the published model lacks."""
    fields = ("attn_kv_heads", "vocab_size", "tied_embeddings", "causal")
    return replace(
        application,
        **{one.name: one.default for one in structs.fields(Application) if one.name in fields},
    )


def _check_tiers(x: Execution, system: System, quirks: Quirks) -> None:
    used: dict[int, int] = {}
    for size, tier in (
        (x.tensor_par, x.tensor_par_net),
        (x.pipeline_par, x.pipeline_par_net),
        (x.data_par, x.data_par_net),
    ):
        if size > 1:
            used[tier] = used.get(tier, 1) * size
    for tier in sorted(used):
        network = system.networks[tier]
        if used[tier] > network.size:
            raise InfeasibleExecution(f"Network tier{tier} isn't big enough")
        # several groups may fill a domain together if processors make up whole domains
        full = network.size % used[tier] == 0 and (
            quirks.divisor_fills_tier or x.num_procs % network.size == 0
        )
        if network.must_be_filled and not full:
            raise InfeasibleExecution(f"Network tier{tier} isn't fully used")


def _check_choice(x: Execution, name: str) -> None:
    if getattr(x, name) not in CHOICES[name]:
        raise _contradiction(
            f"{name}: the value is {getattr(x, name)!r}, expected one of {', '.join(CHOICES[name])}"
        )


def _contradiction(reason: str) -> InfeasibleExecution:
    return InfeasibleExecution(reason, "input")


def _size(size_bytes: float) -> str:
    units = ("iB", "kiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    power = 0
    while size_bytes >= 1024 and power < len(units) - 1:
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:.3f} {units[power]}"
