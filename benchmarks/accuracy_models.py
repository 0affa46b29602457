"""Prices a published run with each model: Calculon's and the two-dimensional one, both as corrected
and as published, and the planner on estimated profiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from msgspec import to_builtins

from autopar.documents.checks import load_document
from autopar.errors import InfeasibleExecution, InputError
from autopar.rates.card import estimate_hardware
from autopar.rates.measured import HardwareProfile
from autopar.rates.model import estimate_model
from autopar.rates.site import load_site
from autopar.rates.stack import load_stack
from autopar.run.model import LayerSpec, ModelSpec
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, ZeroDefault
from autopar.units import GIB
from benchmarks.accuracy_rows import Run, UnusableError
from search.closed_form.calculon import Application, Execution, System as CalculonSystem, evaluate
from search.closed_form.files import calculon_system, tensor2d_system
from search.closed_form.tensor2d import Model, evaluate as evaluate_tensor2d
from search.planning.layered.planner import Planner
from search.request.options import LARGEST_MEMORY_GIB, SearchOptions

__all__ = ["MODELS", "Answer"]

_ROOM_GIB = 1e6
"""Memory of the priced machine, GiB: large, because a run that was measured fitted."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of a model for one run, base units."""

    time_s: float
    memory_bytes: float
    interval_s: tuple[float, float] | None = None
    """Ends of the 90 % interval of the step time, seconds; None if the model has no interval."""


def calculon(run: Run, *, compat: bool = False) -> Answer:
    """Return the answer of Calculon's model."""
    if run.zero == 3:
        raise UnusableError("ZeRO-3, which the model does not have")
    if compat and (run.flash or run.gated):
        raise UnusableError(
            "flash attention or a gated MLP, which the published model does not have"
        )
    application = Application(
        hidden=run.hidden,
        feedforward=run.ffn,
        seq_size=run.seq,
        attn_heads=run.heads,
        attn_size=run.hidden // run.heads,
        num_blocks=run.layers,
        attn_kv_heads=run.kv_heads,
        vocab_size=run.vocab,
        tied_embeddings=run.tied,
    )
    execution = Execution(
        num_procs=run.num_gpus,
        tensor_par=run.tp,
        pipeline_par=run.pp,
        data_par=run.dp,
        # neighbours are tensor groups, then data groups, then stages
        tensor_par_net=int(run.tp > run.gpus_per_node),
        data_par_net=int(run.tp * run.dp > run.gpus_per_node),
        pipeline_par_net=int(run.num_gpus > run.gpus_per_node),
        batch_size=run.global_batch,
        microbatch_size=run.micro_batch,
        datatype=run.datatype,
        fused_activation=False,
        attention_type="flash" if run.flash else "multihead",
        activation_recompute={"selective": "attn_only"}.get(run.recompute, run.recompute),
        pipeline_interleaving=run.vpp,
        optimizer_sharding=run.zero > 0 and run.dp > 1,
        tensor_par_comm_type="rs_ag" if run.sequence_parallel and run.tp > 1 else "ar",
        tensor_par_overlap="none",
        seq_par_ag_redo=run.sequence_parallel and run.tp > 1 and run.recompute != "full",
        data_par_overlap=run.data_overlap and run.dp > 1,
        weight_offload=False,
        activations_offload=False,
        optimizer_offload=False,
        structure_type="llama" if run.gated else "gpt",
    )
    try:
        found = evaluate(application, execution, _calculon_machine(run), compat=compat)
    except InfeasibleExecution as error:
        raise UnusableError(f"refused: {error}") from None
    return Answer(time_s=found["total_time"], memory_bytes=found["proc_mem_tier1_cap_req"])


def tensor2d(run: Run, *, compat: bool = False) -> Answer:
    """Return the answer of the two-dimensional model, with heads divided and nothing else."""
    if run.zero == 3 or run.vpp > 1:
        raise UnusableError("ZeRO-3 or interleaving, which the model does not have")
    if run.recompute == "full" or (run.recompute == "none" and not run.flash):
        raise UnusableError(
            "recomputation other than that of attention, which the model does not have"
        )
    if run.tp > 1 and not run.sequence_parallel:
        raise UnusableError("tensor parallelism without sequence parallelism")
    if compat and run.gated:
        raise UnusableError("a gated MLP, which the published model does not have")
    model = Model(
        l=run.seq,
        e=run.hidden,
        h=run.heads,
        depth=run.layers,
        f=run.ffn,
        kv_heads=run.kv_heads,
        causal=run.flash,
        structure="llama" if run.gated else "gpt",
        vocab=run.vocab,
        tied=run.tied,
        gradient_bytes=4,
    )
    inside = [1, 1, 1]
    room = run.gpus_per_node
    for i, degree in enumerate((run.tp, run.dp, run.pp)):
        inside[i] = max(k for k in range(1, min(degree, room) + 1) if degree % k == 0)
        room //= inside[i]
    system = tensor2d_system(_system(run))
    if run.inter_node_bytes_per_s is not None:
        keys = to_builtins(system) | {"ib_bandwidth": run.inter_node_bytes_per_s / 1e9}
        system = load_document(type(system), keys)
    try:
        found = evaluate_tensor2d(
            "1d",
            model,
            {"dp": run.dp, "tp": run.tp, "pp": run.pp, "mbs": run.micro_batch},
            {"nv_tp": inside[0], "nv_dp": inside[1], "nv_pp": inside[2]},
            run.num_gpus,
            run.global_batch,
            system,
            compat=compat,
        )
    except InfeasibleExecution as error:
        raise UnusableError(f"refused: {error}") from None
    return Answer(time_s=found["t"], memory_bytes=found["mem"] * 1e9)


def planner(run: Run) -> Answer:
    """Return the planner's prediction of the same plan, from profiles estimated for the card."""
    if not run.flash:
        raise UnusableError("attention that keeps its scores, which estimated profiles do not have")
    if run.recompute == "selective" or run.vpp > 1:
        raise UnusableError(
            "selective recomputation or interleaving, which the planner does not have"
        )
    if run.inter_node_bytes_per_s is not None and run.num_nodes > 1:
        raise UnusableError("a network that is not the card's")
    layer = LayerSpec(
        num_layers=run.layers,
        seq_length=run.seq,
        hidden_size=run.hidden,
        num_heads=run.heads,
        num_kv_heads=run.kv_heads,
        ffn_hidden_size=run.ffn,
        gated_mlp=run.gated,
    )
    spec = ModelSpec(
        name=run.model, layers=(layer,), vocab_size=run.vocab, tied_embeddings=run.tied
    )
    shards: ZeroDefault = "zero2" if run.zero in (1, 2) else "ddp"
    options = SearchOptions(
        memory_constraint_bytes=LARGEST_MEMORY_GIB * GIB,
        time_profile_mode="batch",
        sequence_parallel=run.sequence_parallel or run.tp == 1,
        default_dp_type=shards,
        max_tp_deg=run.tp,
        tp_overlap=run.tensor_overlap,
        fp32_gradients=run.fp32_gradients,
    )
    size, rest = divmod(run.layers, run.pp)
    batches = tuple(sorted({1, 2, 4, run.micro_batch}))
    strategy = LayerStrategy(
        tp=run.tp, zero3=run.zero == 3 and run.dp > 1, checkpoint=run.recompute == "full"
    )
    plan = Plan(
        world_size=run.num_gpus,
        num_stages=run.pp,
        stage_sizes=tuple(size + (stage < rest) for stage in range(run.pp)),
        layers=(strategy,) * run.layers,
        vocab=VocabStrategy(tp=run.tp, zero3=strategy.zero3),
        global_batch=run.global_batch,
        num_microbatches=run.global_batch // (run.dp * run.micro_batch),
        default_dp_type=shards,
    )
    try:
        site = None if run.site is None else load_site(run.site)
        profile = estimate_model(spec, run.system, batches=batches, stack=run.stack, site=site)
        hardware = _hardware(run.system, run.num_nodes, _used(run), run.stack, run.site)
        found = Planner.from_documents(spec, profile, hardware, options).evaluate(plan)
    except InputError as error:
        raise UnusableError(f"refused: {error}") from None
    if not found.stages:
        raise UnusableError(f"refused: {found.problems[0]}")
    return Answer(
        time_s=found.step_time_s,
        memory_bytes=float(max(stage.allocated_bytes for stage in found.stages)),
        interval_s=found.step_time_interval_s,
    )


MODELS: dict[str, Callable[[Run], Answer]] = {
    "calculon": calculon,
    "calculon --compat": lambda run: calculon(run, compat=True),
    "tensor2d": tensor2d,
    "tensor2d --compat": lambda run: tensor2d(run, compat=True),
    "planner": planner,
}


def _used(run: Run) -> int:
    return min(run.num_gpus, run.gpus_per_node)


def _system(run: Run) -> str:
    if run.system == "a100-40gb":
        raise UnusableError("no system is shipped for its GPU (A100 40 GB)")
    return run.system


def _calculon_machine(run: Run) -> CalculonSystem:
    keys = to_builtins(calculon_system(_system(run)))
    keys["mem1"]["GiB"] = _ROOM_GIB
    if run.inter_node_bytes_per_s is not None:
        keys["networks"][1]["bandwidth"] = run.inter_node_bytes_per_s / 1e9
    return load_document(CalculonSystem, keys)


@cache
def _hardware(
    card: str, num_nodes: int, gpus_per_node: int, stack: str, site: str | None
) -> HardwareProfile:
    return estimate_hardware(
        card,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        stack=load_stack(stack),
        site=None if site is None else load_site(site),
    )
