"""Rows of published training runs as jobs on machines, with assumed values for missing settings.

Missing settings are never guessed silently. `_SOURCES` defines the common settings of a source (its
software, its network), a run lists the assumed ones, and a row that lacks more is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, cast

from msgspec import field

from autopar.documents.catalog import shipped_model
from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.pipeline.placement import spread_count
from autopar.price.job import job_of_run
from autopar.rates.card import Card, load_card
from autopar.rates.parts.operations import Machine, machine_of
from autopar.rates.site import Site, load_site
from autopar.rates.stack import Stack, load_stack
from autopar.records import Record, replace
from autopar.run.architecture import Attention, Mlp, Model
from autopar.run.job import Block, Job
from autopar.run.of_plan import model_of_spec
from autopar.run.plan import Module
from autopar.run.run import Run as TrainingRun
from autopar.run.runtime import (
    Dispatcher,
    ExpertKernels,
    Kernels,
    LayerModule,
    Optimizer,
    Overlap,
    Precision,
    PrecisionKind,
    Runtime,
    States,
    Zero,
)
from autopar.run.strategy import (
    Chunk,
    Recomputation,
    Split,
    SplitGroup,
    Strategy,
    chunks_of_sizes,
    recomputing,
    uniform_layers,
)
from autopar.training.adapters import Adapters
from autopar.training.mixtures import NATURAL_SKEW
from autopar.training.throughput import model_flop
from benchmarks.ledger_models import decoder, known_architecture
from benchmarks.ledger_recipes import cells_of_recipe, has_fp8_head, recipe_parts

__all__ = ["Run", "UnusableError", "run_of"]


class UnusableError(Exception):
    """A row lacks a setting that its price needs; the message is the reason."""


class Run(Record):
    """One published run: model and settings, machine, and measured step time."""

    source: str
    run: TrainingRun
    job: Job
    """The run as the step estimate prices it, with figures of the source's software."""
    machine: Machine
    measured_s: float
    site_known: bool
    """True if the machine includes measured figures of the cluster."""
    taken: tuple[str, ...]


class _Source(Record):
    """Settings that the rows of a source share and do not state."""

    stack: str
    zero: Zero = 0
    sequence_parallel: bool = False
    overlap_tensor: bool = True
    """False if tensor ranks wait for their collectives."""
    dispatcher: Dispatcher = "alltoall"
    job: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Job` that no run holds: bytes that its software moves."""
    module: LayerModule = "te"
    """Implementation of the layers."""
    fused_rotary: bool = True
    """True if rotary positions are applied by one kernel."""
    taken: Mapping[str, str] = field(default_factory=dict)
    """Values of cells that rows leave empty."""
    site: Mapping[str, str] = field(default_factory=dict)
    """Names of its clusters' documents by card."""
    masked_counted: bool = False
    """True if its FLOP include scores that a causal mask skips."""
    ring_kernels: Mapping[str, str] = field(default_factory=dict)
    """Attention kernel by card for ranks that share a sequence, if it differs."""


_MEGATRON: Mapping[str, Any] = {"zero": 1, "sequence_parallel": True}
"""Defaults of its recipes, unless a row gives others."""
_TITAN: Mapping[str, Any] = {"zero": 3, "module": "torchtitan"}
_SOURCES: Mapping[str, _Source] = {  # by the start of a source's name
    "Korthikanti": _Source(
        stack="megatron-2021", job={"accumulation_bytes": 0.0}, taken={"vocab": "51200"}
    ),
    "Narayanan": _Source(
        stack="megatron-2021",
        job={"accumulation_bytes": 6.0},
        taken={"micro_batch": "1", "vpp": "1"},
    ),
    "BigScience": _Source(stack="megatron-2021", zero=1, site={"a100-80gb": "jean-zay-a100"}),
    "vTrain": _Source(
        site={"a100-80gb": "vtrain-a100", "a100-40gb": "vtrain-a100"},
        stack="megatron-2021",
        taken={"sharded_optimizer": "0", "vpp": "1"},
    ),
    "MosaicML": _Source(
        stack="composer-fsdp", module="torchtitan", site={"h100-80gb": "mosaicml-h100"}
    ),
    "SimuMax": _Source(
        stack="megatron-core",
        sequence_parallel=True,
        zero=1,
        overlap_tensor=False,
        job={"accumulation_bytes": 10.0, "gradient_bytes": 4.0, "optimizer_bytes": 86.0},
        site={"b200": "simumax-b200"},
        fused_rotary=False,
        taken={"vpp": "1"},
    ),
    # FSDP1: gradients are reduced in 16 bits, and nothing is copied (foundation-model-stack)
    "torchtitan-like": _Source(
        stack="torchtitan-eager",
        job={"gradient_bytes": 2.0},
        site={"a100-80gb": "ibm-a100", "h100-80gb": "ibm-h100"},
        **_TITAN,
    ),
    "torchtitan": _Source(
        stack="torchtitan-eager",
        taken={"micro_batch": "1"},
        site={"h100-80gb": "meta-h100", "b200": "torchao-b200"},
        **_TITAN,
    ),
    "Megatron-Core r0.8": _Source(
        stack="megatron-core",
        **_MEGATRON,
        taken={"micro_batch": "1", "recompute": "none"},
    ),
    "NVIDIA NeMo perf": _Source(
        stack="megatron-core",
        **_MEGATRON,
        taken={"recompute": "none"},
    ),
    "NVIDIA NeMo-Framework": _Source(
        stack="megatron-core",
        **_MEGATRON,
        taken={"recompute": "none"},
    ),
    "NVIDIA NeMo long": _Source(
        stack="megatron-core",
        **_MEGATRON,
        taken={"recompute": "none", "micro_batch": "1", "vpp": "1"},
        # Its makers' tables of those releases list tokens/s and FLOP/s: 57.9 GFLOP a token of
        # LLAMA3-8B and 481 of LLAMA3-70B, which includes the whole square of scores. Counted by
        # halves, B200 would compute attention at 1.9 PFLOP/s in 16 bits: no kernel does.
        masked_counted=True,
        # With cuDNN's rate the three rows with cp are 26 to 40 % too fast, the one without 3 % too
        # slow; with FlashAttention-2's all are within 6 %, from 32 Ki to 1 Mi tokens.
        ring_kernels={"h100-80gb": "flash2"},
    ),
    "NVIDIA NeMo AutoModel": _Source(
        stack="torchtitan-compiled",
        dispatcher="flex",
        **_TITAN,
        taken={"recompute": "none"},
    ),
    "NVIDIA Megatron-Bridge": _Source(
        stack="megatron-core",
        **_MEGATRON,
        site={"b300": "nvidia-b300"},
        taken={"recompute": "none"},
    ),
    "Megatron-LM examples": _Source(
        stack="megatron-core",
        **_MEGATRON,
        taken={"recompute": "none"},
    ),
    "Megatron-MoE-ModelZoo": _Source(
        stack="megatron-core",
        **_MEGATRON,
        taken={"recompute": "none"},
    ),
    "UCCL": _Source(
        stack="megatron-core",
        **_MEGATRON,
        taken={"recompute": "none", "vpp": "1"},
    ),
    "cuDNN frontend": _Source(
        # transformers has torchtitan's eager kernels; the loop has no optimizer
        stack="torchtitan-eager",
        module="transformers",
        taken={"precision": "BF16", "recompute": "none", "vpp": "1"},
    ),
    "Llama 3 405B": _Source(
        stack="megatron-core",
        zero=2,
        sequence_parallel=True,
        overlap_tensor=False,
        taken={"recompute": "none", "micro_batch": "1", "vpp": "8"},
    ),
}
_CARDS: Mapping[str, str] = {
    "a100-sxm": "a100-80gb",
    "h100-sxm": "h100-80gb",
    "h100": "h100-80gb",
    "h200": "h200",
    "b200": "b200",
    "b300": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "mi350x": "mi350x",
}
_PRECISIONS: Mapping[str, str] = {
    # a scale of each tensor, delayed or current (`-cs`), where none of rows or blocks is named
    "float16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "amp_bf16": "bf16",
    "amp_fp8": "fp8",
    "fp8": "fp8",
    "fp8-cs": "fp8",
    "fp8-mx": "mxfp8",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    # tensorwise: `llama3_405b.toml` of torchtitan, Trainy's command
    "float8+bf16": "fp8",
    "float8 tensorwise": "fp8",
    "float8 rowwise": "fp8",
    "bf16+fp8 hybrid": "fp8",
}
_VPP: Mapping[str, str] = {
    "gpt3175b": "6",
    "llama370b": "5",
    "llama270b": "20",
    "nemotron22b": "10",
}
"""Chunks per stage of NeMo's own launcher recipes, for tables without them."""
_VOCABS: Mapping[str, str] = {"gpt3": "51200", "nemotron": "256000"}


_MOST = 10**8
"""Largest count in a row."""


def run_of(row: Mapping[str, str], settings: Mapping[str, Any], *, use_site: bool = True) -> Run:
    """Return the run of a row; raises UnusableError with the reason if settings are missing.

    `use_site` false: as if only the card of the cluster were known.
    """
    name = row["source"]
    cells, taken = dict(row), list[str]()
    source = _source_of(name, taken)
    for key, value in cells_of_recipe(cells):
        cells[key] = value
        taken.append(f"{key}={value}")
    for key, value in [*source.taken.items(), *_by_model(cells)]:
        if not cells[key]:
            cells[key] = value
            taken.append(f"{key}={value}")
    if not (cells["iter_time_s"] or cells["tokens_s_gpu"] or cells["tflops_per_gpu"]):
        raise UnusableError("no time" if not cells["peak_mem_gb"] else "memory only")
    run, own = _run(cells, source, settings)
    job = replace(job_of_run(run), **own)
    if job.zero == 3 and source.stack == "megatron-2021":
        job = replace(job, gradient_bytes=2.0)  # DeepSpeed reduces in the precision of the layers
    card, stack = _card(cells), _stack(cells, source)
    if job.cp > 1 and job.attention_kernel is None and card.name in source.ring_kernels:
        job = replace(job, attention_kernel=source.ring_kernels[card.name])
        taken.append(f"attention={job.attention_kernel}")
    if job.global_batch != _count(cells, "global_batch"):
        taken.append(f"global_batch={job.global_batch}")
    named = source.site.get(card.name)
    site = _site_named(named) if named is not None and use_site else None
    machine = machine_of(card, stack, site, gpus=job.gpus)
    # nominal rates of adapters do not show the achieved ones
    known = site is not None and bool(site.known)
    return Run(
        source=name,
        run=run,
        job=job,
        machine=machine,
        measured_s=_measured_s(cells, job, source),
        site_known=known,
        taken=tuple(taken),
    )


_SOFTWARE: Mapping[str, str] = {  # word of a source's name -> known source of that software
    "torchtitan": "torchtitan",
    "automodel": "NVIDIA NeMo AutoModel",
    "bridge": "NVIDIA Megatron-Bridge",
    "nemo": "NVIDIA NeMo perf",
    "megatron": "NVIDIA Megatron-Bridge",
    "llm-foundry": "MosaicML",
    "transformers": "cuDNN frontend",
    "fsdp": "torchtitan",
}
_UNPRICED = ("Colossal-AI",)
"""Software without a stack."""


def _source_of(name: str, taken: list[str]) -> _Source:
    """Return the common settings of a source; of an unknown one those of its software.

    A name without a word of any software is taken for Megatron-Core. Raises UnusableError for
    software without a stack.
    """
    known = next((s for start, s in _SOURCES.items() if name.startswith(start)), None)
    if known is not None:
        return known
    if name.startswith(_UNPRICED):
        raise UnusableError("the software that ran it is not known")
    words = name.lower()
    like = next((s for word, s in _SOFTWARE.items() if word in words), "NVIDIA Megatron-Bridge")
    taken.append(f"software as of {like}")
    # the cluster is not known
    return replace(_SOURCES[like], site={})


def _by_model(cells: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    name = re.sub(r"[^a-z0-9]", "", cells["model"].lower())
    yield from (("vpp", v) for key, v in _VPP.items() if key == name and _count(cells, "pp") > 1)
    yield "vpp", "1"
    yield from (("vocab", v) for key, v in _VOCABS.items() if name.startswith(key))
    if not cells["kv_heads"]:
        yield "kv_heads", cells["heads"]


def _count(cells: Mapping[str, str], key: str, default: int | None = None) -> int:
    if not cells[key]:
        if default is None:
            raise UnusableError(f"{key} is not given")
        return default
    found = _positive(cells, key)
    if not found.is_integer() or found > _MOST:
        raise UnusableError(f"{key} is {cells[key]}, no whole number from 1 to {_MOST}")
    return int(found)


def _positive(cells: Mapping[str, str], key: str) -> float:
    try:
        found = float(cells[key])
    except ValueError:
        raise UnusableError(f"{key} is {cells[key]}, no number") from None
    if not 0.0 < found < math.inf:
        raise UnusableError(f"{key} is {cells[key]}, no number above 0")
    return found


def _model(cells: Mapping[str, str]) -> Model:
    known = known_architecture(cells["model"])
    if not cells["hidden"] or not cells["heads"] or cells["arch"].startswith("moe"):
        if known is None:
            known = _shipped(cells["model"])
        if known is None:
            raise UnusableError(f"sizes of {cells['model']} are not given")
        model = _cut(known, _count(cells, "layers", 0))
        # AutoModel's DeepSeek-V3 ends with its head (components/models/deepseek_v3/model.py)
        bare = "w/o MTP" in cells["model"] or "AutoModel" in cells["source"]
        return replace(model, mtp=0) if bare else model
    gated = cells["arch"].startswith("llama") or bool(_GATED.search(cells["model"].lower()))
    hidden, heads = _count(cells, "hidden"), _count(cells, "heads")
    if hidden < heads:
        raise UnusableError(f"hidden {hidden} is less than the {heads} heads")
    rotary = gated or cells["model"].startswith("Nemotron")
    attention = Attention(
        heads=heads,
        kv_heads=_count(cells, "kv_heads", heads),
        width=hidden // heads,
        value_width=hidden // heads,
        rotary_share=1.0 if rotary else 0.0,
    )
    return decoder(
        attention,
        (_count(cells, "layers"), Mlp(width=_count(cells, "ffn"), gated=gated)),
        hidden=hidden,
        vocab=_count(cells, "vocab"),
        tied=not gated and not cells["model"].startswith("Nemotron"),
    )


def _shipped(name: str) -> Model | None:
    """Return the shipped model of a name as people write it, or None."""
    try:
        return model_of_spec(load_spec(shipped_model(name)))
    except InputError:
        return None


_GATED = re.compile("llama|qwen|mistral")
"""Families of models whose MLPs are gated, whatever kind of architecture a table prints."""


def _cut(model: Model, layers: int) -> Model:
    """Return a model with only some of its layers: 1 dense layer, and mixtures of experts."""
    if not layers or layers == model.num_layers:
        return model
    groups = model.layers
    if len(groups) == 1:
        return replace(model, layers=(replace(groups[0], count=layers),))
    cut = (replace(groups[0], count=1), replace(groups[-1], count=layers - 1))
    return replace(model, layers=cut, repeat=1, mtp=0)


_FP8: Mapping[str, Literal["tensorwise", "blockwise", "mxfp8"]] = {
    "fp8": "tensorwise",
    "fp8_block": "blockwise",
    "mxfp8": "mxfp8",
}


def _precision(name: str, source: _Source, cells: Mapping[str, str]) -> Precision:
    """Return the types of a run by the name of its GEMMs' precision."""
    kind = cast(PrecisionKind, name if name in ("bf16", "fp16", "fp32") else "bf16")
    return Precision(
        kind=kind,
        fp8=name in _FP8,
        fp8_recipe=_FP8.get(name, "delayed"),
        fp4=name == "nvfp4",
        # recipes sum in 16 bits, and software of 2021 in 32
        gradients_bf16=kind == "bf16" and source.stack != "megatron-2021",
        gradients_fp32=kind == "fp16" and "BigScience" not in cells["source"],
        row_scales="rowwise" in cells["precision"],
    )


def _run(
    cells: Mapping[str, str], source: _Source, settings: Mapping[str, Any]
) -> tuple[TrainingRun, dict[str, Any]]:
    """Return the training run of a row, and the fields of its `Job` that no run holds."""
    model = _model(cells)
    gpus = _count(cells, "num_gpus")
    tp, cp, pp = (_count(cells, key, 1) for key in ("tp", "cp", "pp"))
    dp = _count(cells, "dp", max(1, gpus // (tp * cp * pp)))
    text = cells["precision"].lower().partition(" (")[0]
    if text not in _PRECISIONS:
        raise UnusableError("no precision" if not text else f"precision {cells['precision']}")
    zero, own = _zero(cells, source)
    scattered = source.sequence_parallel
    if cells["sequence_parallel"]:
        scattered = cells["sequence_parallel"] == "1"
    mixed, torch = model.experts is not None, source.module in ("torchtitan", "transformers")
    said = _said(cells, settings, source)
    if said.attention is not None:
        own["attention_kernel"] = said.attention
    if torch:
        # gradients as the stack reduces them; llm-foundry's layers are fused
        own = {"gradient_bytes": None, "torch_layers": source.stack != "composer-fsdp", **own}
        if cells["source"].startswith("torchtitan"):
            own |= _torchtitan(cells, zero)
        elif "AutoModel" in cells["source"] and "FlexAttn" in cells["notes"]:
            own["attention_kernel"] = "flash2"  # a compiled kernel; others are Transformer Engine's
    if "accumulation_bytes" not in own and _PRECISIONS[text] == "bf16":
        own |= {"accumulation_bytes": 10.0} if source.stack == "megatron-2021" else {}
    if pp > model.num_layers:
        raise UnusableError(f"pp {pp} is more than the {model.num_layers} layers")
    layers, ends = uniform_layers(
        model.num_layers,
        Split(
            tp=tp,
            sequence_parallel=scattered and tp > 1,
            cp=cp,
            ep=_count(cells, "ep", 1),
            zero=zero,
        ),
    )
    strategy = Strategy(
        # some tables print other degrees than their GPUs: figures are per GPU, so the degrees count
        gpus=tp * cp * pp * dp,
        layers=_in_low_precision(layers, cells),
        ends=ends,
        stages=_stages(cells, settings, model, pp),
        schedule="1f1b" if _count(cells, "vpp", 1) == 1 or pp == 1 else "interleaved",
        micro_batch=_count(cells, "micro_batch"),
        global_batch=_whole_batch(cells, dp),
    )
    overlap_tensor = source.overlap_tensor and not mixed
    run = TrainingRun(
        name=cells["model"],
        model=model,
        strategy=recomputing(strategy, said.recompute),
        runtime=Runtime(
            engine="torchtitan" if torch else "megatron",
            precision=replace(
                _precision(_PRECISIONS[text], source, cells),
                fp8_attention=said.fp8_attention,
                fp8_head=said.fp8_head,
            ),
            optimizer=Optimizer(kind="none" if source.module == "transformers" else "adam"),
            adapters=said.adapters,
            states=States(keeper="torchtitan" if torch else "megatron"),
            kernels=Kernels(
                attention="fused",
                module=source.module,
                graphs=said.graphs,
                loss="native",
                fused_rotary=source.fused_rotary,
            ),
            experts=ExpertKernels(
                dispatcher="flex" if said.fused_dispatcher else source.dispatcher,
                capacity=1.0 if said.drops else None,
                padded=said.drops,
                grouped=True,
                fused_permutation=not said.plain_permutation,
                fused_mlp=said.fused_experts,
                skew=NATURAL_SKEW if said.natural else 1.0,
            )
            if mixed
            else ExpertKernels(),
            overlap=Overlap(
                tensor=overlap_tensor if said.async_tp is None else said.async_tp,
                gradients=True,
                experts=said.overlap_experts,
            ),
        ),
        seq_length=_count(cells, "seq"),
        gpu=_card(cells).name,
    )
    return run, own


def _in_low_precision(
    layers: tuple[SplitGroup, ...], cells: Mapping[str, str]
) -> tuple[SplitGroup, ...]:
    """Return layers of which the last ones stay in 16 bits, as torchtitan's NVFP4 runs do."""
    if "in bf16" not in cells["notes"] or not cells["source"].startswith("torchtitan"):
        return layers
    (group,) = layers
    plain = round(0.15 * group.count)
    last = SplitGroup(count=plain, split=replace(group.split, low_precision=False))
    return (replace(group, count=group.count - plain), last)


def _torchtitan(cells: Mapping[str, str], zero: Zero) -> dict[str, Any]:
    """Return the fields of `Job` that the kernels of a torchtitan run set."""
    own: dict[str, Any] = {}
    source, precision = cells["source"], cells["precision"].lower()
    tensorwise = precision in ("float8+bf16", "float8 tensorwise")
    if tensorwise and zero and "nocompile" not in source:
        own["gathered_bytes"] = 1.0  # enable_fsdp_float8_all_gather of its configurations
    # cuDNN is preferred on Blackwell since 3b85aa31f, 14 May 2025, and later on all cards
    recent = cells["gpu_type"].startswith(("B", "GB"))
    own["attention_kernel"] = "cudnn" if recent else "flash2"
    if "Table" in source or "2024" in source:
        own["optimizer_bytes"] = 84.0  # AdamW was not fused before 24 February 2025
    return own


def _zero(cells: Mapping[str, str], source: _Source) -> tuple[Zero, dict[str, Any]]:
    """Return the ZeRO stage of a row, and the fields of `Job` of its source."""
    stages: Mapping[str, Zero] = {
        "": source.zero, "2/3 (FSDP)": 2, "0": 0, "1": 1, "2": 2, "3": 3,
    }  # fmt: skip
    if cells["zero_stage"] not in stages:
        raise UnusableError(f"zero_stage is {cells['zero_stage']}, not 0, 1, 2 or 3")
    zero = stages[cells["zero_stage"]]
    if cells["source"].startswith("torchtitan") and _count(cells, "pp", 1) > 1:
        # weights stay gathered, and gradients are reduced after the last micro-batch (`apply_fsdp`)
        zero = 2
    if cells["sharded_optimizer"] == "1":
        zero = max(zero, 1)
    if cells["source"].startswith("MosaicML") and zero == 2:
        # SHARD_GRAD_OP: weights are sharded as well, but stay whole until the backward
        return 3, {**source.job, "reshard": False}
    return zero, {**source.job}


def _stages(
    cells: Mapping[str, str], settings: Mapping[str, Any], model: Model, pp: int
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage: those of a recipe, or an even partition."""
    layers, vpp = model.num_layers, _count(cells, "vpp", 1) if pp > 1 else 1
    if cells["source"].startswith("NVIDIA Megatron-Bridge"):
        given = settings.get("pp_layout")
        parts = recipe_parts(cells["model"], pp, vpp, mtp=model.mtp, given=given)
        if parts is not None and sum(part.count("t") for part in parts) == layers:
            sizes = [part.count("t") for part in parts]
            return chunks_of_sizes(sizes, pp, mtp=[part.count("m") for part in parts])
    counts = [layers // pp] * pp
    # middle stages first; then the last and the first
    for stage in [*range(1, pp - 1), 0, pp - 1][: layers % pp]:
        counts[stage] += 1
    spread = [spread_count("interleaved", stage, counts[stage], vpp) for stage in range(pp)]
    return chunks_of_sizes(
        [spread[stage][chunk] for chunk in range(vpp) for stage in range(pp)], pp, mtp=model.mtp
    )


_GRAPHS: Mapping[str, Literal["none", "partial"]] = {
    "none": "none", "local": "partial", "transformer_engine": "partial",
}  # fmt: skip


class _Said(Record):
    """Settings derived from a row's remarks and its recipe."""

    recompute: Recomputation = frozenset()
    graphs: Literal["none", "partial", "full"] = "none"
    fused_dispatcher: bool = False
    fused_experts: bool = False
    plain_permutation: bool = False
    """True without the fused kernel that permutes tokens."""
    overlap_experts: bool = False
    fp8_attention: bool = False
    fp8_head: bool = False
    adapters: Adapters | None = None
    attention: str | None = None
    """Name of the card's kernel."""
    natural: bool = False
    """True if the router decides the routing of tokens."""
    drops: bool = False
    """True if experts drop tokens beyond their capacity."""
    async_tp: bool | None = None
    """True if torchtitan overlaps tensor-parallel collectives; None for other engines."""


def _said(cells: Mapping[str, str], settings: Mapping[str, Any], source: _Source) -> _Said:
    notes, titan = cells["notes"], cells["source"].startswith("torchtitan")
    kernel = re.search(r"attention (CUDNN|FLASH)", notes)
    if kernel is None and "EFFICIENT_ATTENTION" in notes:
        raise UnusableError("no card has times of memory-efficient attention")
    zoo = cells["source"].startswith("Megatron-MoE-ModelZoo") and cells["gpu_type"].startswith("GB")
    backend = settings.get("moe_flex_dispatcher_backend")
    named = re.search("DeepEP|HybridEP", notes) or "EP" in notes.split(",")[0]
    tuned = "LoRA" in cells["source"] or notes.startswith("LoRA")
    asynchronous = re.search("async ?tp", notes, re.IGNORECASE) and "vanilla" not in notes
    return _Said(
        recompute=_recomputed(cells, settings),
        # commands of the zoo (best_practice/qwen3/readme.md): graphs but for long contexts, and
        # exchanges overlapped where activations are offloaded
        graphs=("partial" if cells["seq"] == "4096" else "none") if zoo else _graphs(settings),
        overlap_experts="offloading" in notes if zoo else bool(settings.get("moe_a2a_overlap")),
        fused_dispatcher=bool(backend or named),
        fused_experts=bool(settings.get("cutedsl_fused_grouped_mlp")),
        plain_permutation="no permute fusion" in notes,
        fp8_attention=bool(settings.get("fp8_dot_product_attention")),
        fp8_head=has_fp8_head(cells),
        adapters=_adapters(cells["source"]) if tuned else None,
        attention=None if kernel is None else {"CUDNN": "cudnn", "FLASH": "flash2"}[kernel[1]],
        natural="real routing" in notes,
        drops="tokendrop" in cells["model"],
        async_tp=bool(asynchronous) if titan else None,
    )


def _graphs(settings: Mapping[str, Any]) -> Literal["none", "partial", "full"]:
    impl, scope = settings.get("cuda_graph_impl"), settings.get("cuda_graph_scope") or ()
    # recipes before 26.08 write one word, and a scope counts with its own implementation alone
    # (train.py of Megatron-Bridge v0.2 to v0.4)
    scopes = scope.split() if isinstance(scope, str) else scope
    if impl == "full_iteration" or (impl == "local" and "full_iteration" in scopes):
        return "full"
    return "none" if impl is None else _GRAPHS[impl]


def _recomputed(cells: Mapping[str, str], settings: Mapping[str, Any]) -> Recomputation:
    """Return the recomputation of layers: by the recipe if given, else by the row."""
    if settings.get("recompute_modules"):
        return frozenset(settings["recompute_modules"])
    text = cells["recompute"]
    if text == "full":
        return "full"
    if text == "selective":
        return "op" if cells["source"].startswith("torchtitan") else frozenset({"core_attn"})
    names = {"norm": "layernorm", "act": "moe_act"}
    parts = re.split(r"[ ,]+", text) if text not in ("", "none") else ()
    return frozenset(cast(Module, names.get(part, part)) for part in parts)


def _adapters(source: str) -> Adapters:
    """Return the adapters of a published run, as in its recipe.

    Both have rank 16. Automodel adapts all projections (examples/llm_benchmark, `*_proj`);
    Megatron-Bridge only queries, keys and values (recipes/llama, `linear_qkv`).
    """
    if "AutoModel" in source:
        return Adapters(rank=16)
    return Adapters(rank=16, targets=frozenset({"query", "key", "value"}), fused=True)


@cache
def _card_named(name: str) -> Card:
    return load_card(name)


@cache
def _stack_named(name: str) -> Stack:
    return load_stack(name)


@cache
def _site_named(name: str) -> Site:
    return load_site(name)


def _card(cells: Mapping[str, str]) -> Card:
    kind = cells["gpu_type"].lower().partition(" ")[0]
    if kind not in _CARDS:
        raise UnusableError(f"no card of {cells['gpu_type']}")
    name = _CARDS[kind]
    if name == "a100-80gb" and cells["gpu_mem_gb"] == "40":
        name = "a100-40gb"
    return _card_named(name)


def _stack(cells: Mapping[str, str], source: _Source) -> Stack:
    compiled = source.stack == "torchtitan-eager" and (
        "compile" in cells["notes"] or "float8" in cells["precision"]
    )
    stack = _stack_named("torchtitan-compiled" if compiled else source.stack)
    if compiled and ("Table" in cells["source"] or "2024" in cells["source"]):
        # the loss was not compiled before 2 April 2025
        eager = _stack_named("torchtitan-eager").figures.bytes_per_element.cross_entropy
        moved = replace(stack.figures.bytes_per_element, cross_entropy=eager)
        stack = replace(stack, figures=replace(stack.figures, bytes_per_element=moved))
    if "fms-fsdp" in cells["source"]:
        stack = replace(stack, figures=replace(stack.figures, copies=None))
    return stack


def _whole_batch(cells: Mapping[str, str], dp: int) -> int:
    """Return the sequences of a step in whole micro-batches, as near as possible to the row's."""
    unit = _count(cells, "micro_batch") * dp
    return max(1, round(_count(cells, "global_batch") / unit)) * unit


def _measured_s(cells: Mapping[str, str], job: Job, source: _Source) -> float:
    if cells["iter_time_s"]:
        # scaled to the number of priced sequences
        share = job.global_batch / _count(cells, "global_batch")
        return _positive(cells, "iter_time_s") * share
    tokens = job.global_batch * job.seq
    if cells["tokens_s_gpu"]:
        return tokens / (_positive(cells, "tokens_s_gpu") * job.gpus)
    counted = job
    if source.masked_counted:
        counted = replace(job, blocks=tuple(map(_unmasked, job.blocks)))
    return model_flop(counted) / (_positive(cells, "tflops_per_gpu") * 1e12 * job.gpus)


def _unmasked(block: Block) -> Block:
    if block.attention is None:
        return block
    return replace(block, attention=replace(block.attention, causal=False))
