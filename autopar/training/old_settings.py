"""Settings in plan files of earlier releases, with the field names of those releases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autopar.records import replace
from autopar.run.architecture import LayerGroup
from autopar.run.run import Run
from autopar.run.strategy import recomputing


def _moved(before: str, after: str, names: str) -> Iterable[tuple[str, str]]:
    """Yield (old name, new name) of fields that moved to another record."""
    return ((f"{before}.{name}", f"{after}.{name}") for name in names.split())


RENAMED: Mapping[str, str] = {
    "seq": "seq_length",
    "loss_fusion": "runtime.kernels.loss",
    "attention_masks": "runtime.masks",
    "tensor_overlap": "runtime.overlap.tensor",
    "graphs": "runtime.kernels.graphs",
    "deferred_head": "runtime.kernels.deferred_head",
    "adapters": "runtime.adapters",
    "model.hidden_dropout": "model.dropout",
    "model.mtp_repeated": "model.mtp_shared",
    "model.experts.padded_capacity": "runtime.experts.padded",
    "degrees.overlap_experts": "runtime.overlap.experts",
    "optimizer.overlap_gradients": "runtime.overlap.gradients",
    "optimizer.overlap_offload": "runtime.overlap.optimizer_host",
    "software.gpu": "gpu",
    "software.cublas_config": "runtime.allocator.cublas",
    "software.expandable_segments": "runtime.allocator.expandable",
    "trainer.stage_outputs": "runtime.kernels.quirks.stage_outputs",
    **dict(_moved("model", "runtime.kernels", "fused_gate fused_rotary")),
    **dict(_moved("degrees", "strategy", "group schedule")),
    **dict(_moved("offload", "runtime.offload", "fraction layers least_elements")),
    **dict(_moved("optimizer", "runtime.states", "bucket padded_buckets")),
    **dict(_moved("software", "runtime.kernels", "attention fused_accumulation")),
    **dict(
        _moved(
            "model.experts",
            "runtime.experts",
            "dispatcher capacity router_fp32 grouped fused_permutation fused_weighting fused_mlp "
            "skew",
        )
    ),
    **dict(
        _moved(
            "optimizer",
            "runtime.optimizer",
            "kind moments_bytes master_bytes offload offload_master offload_weights",
        )
    ),
    **dict(
        _moved(
            "precision",
            "runtime.precision",
            "kind fp8 fp8_weights fp8_recipe fp8_attention fp4 fp4_weights gradients_bf16 "
            "gradients_fp32",
        )
    ),
    **dict(
        _moved(
            "software",
            "runtime.kernels.quirks",
            "kept_dummies grouped_workspaces expert_workspace saved_expert_output compiled_experts "
            "unfused_backward_copies fused_loss_copies regathered_experts",
        )
    ),
    **dict(
        _moved(
            "trainer",
            "runtime.kernels",
            "compiled fused_norms repeated_heads loss loss_chunks loss_parallel",
        )
    ),
    **dict(
        _moved(
            "trainer",
            "runtime.states",
            "keeper wide_gradients each_micro_batch buckets one_root gathered_fp8",
        )
    ),
}
"""Old field name -> current field name."""


def _dropout(run: Run, value: Any) -> Run:
    groups = []
    for group in run.model.layers:
        mixers = tuple(replace(one, dropout=value) for one in group.layer.mixers)
        groups.append(LayerGroup(count=group.count, layer=replace(group.layer, mixers=mixers)))
    return replace(run, model=replace(run.model, layers=tuple(groups)))


def _recomputed(run: Run, value: Any) -> Run:
    return replace(run, strategy=recomputing(run.strategy, frozenset(value)))


def _every(run: Run, value: Any) -> Run:
    return replace(run, strategy=recomputing(run.strategy, "full", every=value))


OF_LAYERS: Mapping[str, Callable[[Run, Any], Run]] = {
    "model.attention.dropout": _dropout,
    "recompute.modules": _recomputed,
    "trainer.every": _every,
}
"""Old names of fields that are now per layer -> function that sets the value in a run."""
