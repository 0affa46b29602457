"""Settings of a run as words, for the report of `autopar check`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.pipeline.schedules import SCHEDULES
from autopar.price.states import layout_of_run
from autopar.records import replace
from autopar.run.architecture import TORCH_MIXERS, DeltaNet, Mamba, Mlp, Model
from autopar.units import format_count

if TYPE_CHECKING:
    from autopar.run.run import Run
    from autopar.run.strategy import Recomputed


def settings_on_screen(run: Run) -> Iterator[tuple[str, str]]:
    """Yield label and text of the settings on the first screen."""
    strategy = run.strategy
    recompute = recompute_words(strategy.recomputed, torch=run.kernels.torch_layers)
    yield (
        "Plan",
        (
            f"{degrees_line(run)}, mbs {strategy.micro_batch} x {strategy.micro_batches}, "
            f"{'no recompute' if recompute == 'none' else f'recompute {recompute}'}"
            f"{', sync_each_batch' if run.syncs_each_batch else ''}"
        ),
    )
    yield "Model", ", ".join((*_architecture(run), *_experts(run)))
    yield (
        "Batch",
        (
            f"{strategy.global_batch:,} x {run.seq_length:,} tokens, {_precision(run)}, "
            f"{run.kernels.attention} attention"
        ),
    )


def _architecture(run: Run) -> Iterator[str]:
    """Yield the sizes of the layers without their experts."""
    model = run.model
    attention = model.attention
    yield f"{model.num_layers} layers{_kinds(model)}"
    yield f"hidden {model.hidden:,}"
    heads = f"{attention.heads} heads"
    if attention.latent is not None:
        heads += " (MLA)"
    elif attention.kv_heads != attention.heads:
        heads += f" ({attention.kv_heads} KV)"
    yield heads
    if any(isinstance(layer.mlp, Mlp) for layer in model.kinds):
        gated = any(layer.gates > 1 for layer in model.kinds)
        yield f"MLP {model.dense_width:,}{' gated' if gated else ''}"


def _kinds(model: Model) -> str:
    """Return the numbers of layers by part, in brackets; empty for attention with MLPs."""
    if model.is_conventional:
        return ""
    number = {
        "Mamba-2": sum(isinstance(layer.recurrent, Mamba) for layer in model.each_layer),
        "gated delta net": sum(isinstance(layer.recurrent, DeltaNet) for layer in model.each_layer),
        **{
            name: sum(isinstance(layer.recurrent, kind) for layer in model.each_layer)
            for kind, name in TORCH_MIXERS.items()
        },
        "sparse attention" if model.first_sparse else "attention": sum(
            layer.attention is not None for layer in model.each_layer
        ),
        "MLP": sum(isinstance(layer.mlp, Mlp) for layer in model.each_layer),
        "MoE": sum(model.mixtures),
    }
    return f" ({', '.join(f'{many} {kind}' for kind, many in number.items() if many)})"


def _experts(run: Run) -> Iterator[str]:
    """Yield number and width of the experts, and the number of experts per token; none if dense."""
    experts = run.model.experts
    if experts is None:
        return
    yield f"{experts.number} experts of {experts.width:,}"
    yield f"top {experts.per_token}"
    if experts.shared_width:
        yield f"shared {experts.shared_width:,}"
    number = sum(run.model.mixtures)
    if number < run.model.num_layers:
        yield f"in {format_count(number, 'layer')}"


def _precision(run: Run) -> str:
    precision = run.runtime.precision
    low = f" with fp8 GEMMs ({precision.fp8_recipe})" if precision.fp8 else ""
    low = " with nvfp4 GEMMs" if precision.fp4 else low
    return f"{precision.kind}{low}, {_gradients(run)}"


def _gradients(run: Run) -> str:
    """Return the precision in which gradients are accumulated."""
    num_bytes: float = run.runtime.precision.gradient_bytes
    if run.kernels.torch_layers:
        # With optimizer offload only a part of them is on the device.
        optimizer = replace(run.runtime.optimizer, offload=0.0)
        on_device = replace(run, runtime=replace(run.runtime, optimizer=optimizer))
        num_bytes = layout_of_run(on_device).gradients.each_bytes
    kind = "fp32" if num_bytes == 4 else run.runtime.precision.kind
    return f"{kind} gradients"


def all_settings(run: Run) -> Iterator[tuple[str, str]]:
    """Yield key and text of all settings that were read."""
    model, strategy = run.model, run.strategy
    vocabulary = f"{'tied ' if model.tied else ''}vocabulary {model.vocab:,}"
    yield "model", ", ".join((*_architecture(run), vocabulary))
    if model.experts is not None:
        yield "experts", ", ".join((*_experts(run), f"{run.runtime.experts.dispatcher} dispatcher"))
    yield "degrees", degrees_line(run)
    yield (
        "batch",
        (
            f"{strategy.global_batch:,} sequences of {run.seq_length:,} tokens, "
            f"{format_count(strategy.micro_batches, 'micro-batch', 'micro-batches')} of "
            f"{strategy.micro_batch}"
        ),
    )
    yield "recomputes", recompute_words(strategy.recomputed, torch=run.kernels.torch_layers)
    yield "precision", _precision(run)
    yield "attention", run.kernels.attention


LABELS = {"recomputes": "Recompute"}
"""Printed labels of settings; the default is the capitalized key."""


def recompute_words(recomputed: Recomputed, *, torch: bool) -> str:
    """Return the recomputed parts of layers, as a part of a sentence."""
    number = recomputed.number
    return {
        "none": "none",
        "modules": " ".join(sorted(recomputed.modules)),
        "op": "op (all but attention and every other GEMM)",
        "full": "full" if torch or number == 1 else f"full, {number} layers per unit",
        "block": f"full in {format_count(number, 'layer')} of each chunk",
        "every": f"full in every {number}. layer",
    }[recomputed.kind]


def degrees_line(run: Run) -> str:
    """Return the parallel degrees of a run in one line, such as `tp8 pp2 dp4 vp5, ZeRO-1`."""
    strategy, split = run.strategy, run.split
    parts = [" ".join(_degrees(run))]
    if split.splits_sequence:
        parts.append("sequence parallel")
    # The default schedules are not printed.
    if strategy.pp > 1 and strategy.schedule not in ("1f1b", "interleaved"):
        parts.append(SCHEDULES[strategy.schedule].title)
    return ", ".join([*parts, sharding_words(run)])


def _degrees(run: Run) -> list[str]:
    """Return the parallel degrees above 1, and the data-parallel degree."""
    strategy, split = run.strategy, run.split
    experts = run.model.experts is not None
    named = {
        "tp": split.tp,
        "cp": split.cp,
        "pp": strategy.pp,
        "ep": split.ep if experts else 1,
        "etp": split.etp if experts else 1,
    }
    found = [f"{name}{number}" for name, number in named.items() if number > 1]
    found.append(f"dp{strategy.dp}")
    return found + ([f"vp{strategy.vpp}"] if strategy.vpp > 1 else [])


def sharding_words(run: Run) -> str:
    """Return the sharding of model states, such as `ZeRO-1` or `DDP`."""
    zero, replicas = run.split.zero, run.split.replicas
    if not zero:
        return "DDP"
    return f"ZeRO-{zero}" + (f" in {replicas} replicas" if replicas > 1 else "")


def new_settings(before: Run, after: Run) -> Iterator[str]:
    """Yield the settings of `after` that differ from `before`, such as `tp8` or `mbs 2`."""
    was = dict(_named_settings(before))
    for name, text in _named_settings(after):
        if was.get(name) != text:
            yield text


def _named_settings(run: Run) -> Iterator[tuple[str, str]]:
    """Yield name and text of the settings that a suggestion may change."""
    strategy, split, overlap = run.strategy, run.split, run.runtime.overlap
    recompute = recompute_words(strategy.recomputed, torch=run.kernels.torch_layers)
    yield "tp", f"tp{split.tp}"
    yield "cp", f"cp{split.cp}"
    yield "pp", f"pp{strategy.pp}"
    yield "vp", f"vp{strategy.vpp}"
    yield "ep", f"ep{split.ep}"
    yield "etp", f"etp{split.etp}"
    yield "zero", sharding_words(run)
    yield "mbs", f"mbs {strategy.micro_batch}"
    yield "sync", "sync_each_batch" if run.syncs_each_batch else "no sync_each_batch"
    yield "tp overlap", "TP overlap" if overlap.tensor else "no TP overlap"
    yield "dp overlap", "DP overlap" if overlap.gradients else "no DP overlap"
    yield "recompute", "no recompute" if recompute == "none" else f"recompute {recompute}"
