"""Search space of an engine with one set of degrees, and conversion of candidates to runs.

The space of an engine is in `space.py` of its folder, its constraints are in `rules.py`. This
module contains the types and functions common to all engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, cast

from autopar.pipeline.schedules import Schedule
from autopar.rates.devices import architecture_of, lacks_precision
from autopar.records import Record, replace
from autopar.run.architecture import WIDEST_FLASH, KimiDelta, Model
from autopar.run.rules import (
    NO_HYBRID,
    NO_WIDE_NORMS,
    WHOLE_KEYS,
    Notice,
    Rule,
    broken,
    holds_all,
    refuse,
)
from autopar.run.run import Run, legal, mixer_values
from autopar.run.runtime import (
    BLACKWELL,
    ExpertKernels,
    HostAdam,
    Kernels,
    Optimizer,
    Overlap,
    Precision as RunPrecision,
    Runtime,
    States,
    Zero,
)
from autopar.run.strategy import ContextKind, Split, Strategy, uniform_layers
from search.engines.candidate import (
    BASES,
    FULL,
    NONE,
    BaseName,
    Candidate,
    Dispatcher,
    Precision,
    TrainingSettings,
    offload_of,
    offload_words,
    recompute_words,
    unsharded,
    with_recompute,
    with_training,
)


class EngineContext(Record, dict=True):
    """Model, batch and cluster of a search, independent of the plan."""

    name: str
    model: Model
    seq: int
    global_batches: tuple[int, ...]
    world: int
    gpu: str
    """GPU model: the name of its card."""
    domain: int | None = None
    """Number of GPUs of an NVLink domain; None: all GPUs of the cluster."""
    skew: float | None = None
    """Tokens of the busiest expert-parallel rank over the mean, for step times; None: balanced."""
    attended: float | None = None
    """Length of the documents in packed sequences, for step times (`Job.attended`)."""
    training: TrainingSettings = TrainingSettings()

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Values that rules read and that do not depend on the candidate."""
        return job_values(self)

    @cached_property
    def _of_engines(self) -> dict[str, Mapping[str, Any]]:
        return {}

    def known(self, engine: EngineSpace) -> Mapping[str, Any]:
        """Return the values of rules of an engine that do not depend on the candidate."""
        if engine.name not in self._of_engines:
            self._of_engines[engine.name] = {**self.values, **engine.said(self)}
        return self._of_engines[engine.name]


_UNLINKED = re.compile(r"MI[0-9]|RTX|L4|L40|T4|V100|A(2|10|16|30|40)([^0-9]|$)|.*PCIE")
"""Pattern of GPU models without NVLink or without the NVIDIA kernels that use it. Custom cards are
assumed to have both."""


def nvlinked(gpu: str) -> bool:
    """Return True if a GPU model has NVLink and the NVIDIA kernels that use it, such as DeepEP."""
    return _UNLINKED.match(gpu.upper()) is None


def needs_one_queue(gpu: str) -> bool:
    """Return True if a GPU model is older than Blackwell and needs one launch queue for TP overlap.

    Such a device cannot combine TP overlap with overlapped expert communication. TP overlap needs
    CUDA_DEVICE_MAX_CONNECTIONS=1, so that a transfer starts before its GEMM; overlapped expert
    communication needs 32. Sources: `PerfEnvPlugin` of Megatron-Bridge's
    scripts/performance, `validate_args` of Megatron-LM.
    """
    return not gpu.upper().startswith(BLACKWELL)


class EngineSpace(Record):
    """Search space of one engine variant: supported values of the fields of `Candidate`."""

    name: str
    title: str
    stack: str
    """Software stack for step-time estimates."""
    schedules: tuple[Schedule, ...]
    """Pipeline schedules, preferred first among equally fast plans; empty: no pipeline."""
    context: tuple[ContextKind, ...]
    """Types of context parallelism; empty: no context parallelism."""
    experts: bool
    """True if the engine has expert parallelism."""
    expert_tensor: Callable[[int], tuple[int, ...]] | None
    """Function (tensor degree) -> expert tensor degrees; None: any degree that divides the expert
    width."""
    zero: tuple[int, ...]
    zero_with_stages: tuple[int, ...]
    replicated: tuple[int, ...]
    """ZeRO stages that support HSDP replicas."""
    recompute: Callable[[Model], tuple[str, ...]]
    """Function (model) -> recomputation options of its layers."""
    blocks: bool
    """True if the engine can recompute the first N layers of each model chunk only (`block N`)."""
    offload: Callable[[Model], tuple[str, ...]]
    """Function (model) -> activation offload options of its layers, `none` first."""
    precisions: Callable[[str], tuple[Precision, ...]]
    """Function (GPU model) -> supported precisions."""
    dispatchers: Callable[[str], tuple[Dispatcher, ...]]
    """Function (GPU model) -> supported token dispatchers, `alltoall` first."""
    compiled: bool = False
    """True for the variant of an engine with layers compiled by torch.compile."""
    overlaps_experts: bool
    overlaps_tensor: Callable[[EngineContext, int], bool]
    """Function (context, tensor degree) -> True if TP communication can overlap with GEMMs."""
    any_layout: bool
    """True if any layer partition over stages is possible."""
    launch: Callable[[EngineContext, Candidate], Run]
    """Function (context, candidate) -> run; raises RuleError for an illegal one."""
    rules: tuple[Rule, ...]
    """Constraints of the engine, except divisibility of degrees, over the values of `values_of`."""
    writable: tuple[Rule, ...] = ()
    """Rules on runs that files of the engine's release can describe, over the values of `said`.
    Runs that were read from files are exempt."""
    said: Callable[[EngineContext], Mapping[str, Any]] = lambda job: {}
    """Function (context) -> values by name that only rules of this engine read."""
    left_out: tuple[str, ...]
    """Features of the engine that are not searched, with the option that uses them, if any."""


_FIELDS = (
    *("tp", "tp_overlap", "cp", "cp_kind", "pp", "vpp", "ep", "etp", "zero", "dp_replicate"),
    *("recompute", "offload", "overlap_experts", "precision"),
)
"""Fields of `Candidate` that rules read."""
fields_of: Callable[[Candidate], tuple[Any, ...]] = attrgetter(*_FIELDS)
"""Function (candidate) -> values of its fields that rules read."""


def run_of(engine: EngineSpace, job: EngineContext, choice: Candidate) -> Run:
    """Return the run of a candidate; raises RuleError with the constraints that it violates."""
    refuse(engine.rules, values_of(engine, job, choice))
    return engine.launch(job, choice)


def values_of(engine: EngineSpace, job: EngineContext, choice: Candidate) -> dict[str, Any]:
    """Return the values that rules of an engine read, by name, for a candidate."""
    given = dict(zip(_FIELDS, fields_of(choice), strict=True))
    return {**job.known(engine), **with_words(given)}


def beyond_search(engine: EngineSpace | None, run: Run, domain: int) -> frozenset[str]:
    """Return the ids of the rules of an engine's search that a run breaks; empty for none.

    A search returns no such run, so advice must not lead to one, even if the engine runs it.

    engine : search space of the engine; None if it has none
    domain : GPUs of an NVLink domain
    """
    busy = keeps_stages_busy(run.strategy.micro_batches, run.strategy.pp)
    found = set() if busy else {"busy-stages"}
    if engine is None:
        return frozenset(found)
    strategy, split, overlap = run.strategy, run.split, run.runtime.overlap
    job = EngineContext(
        name=run.name,
        model=run.model,
        seq=run.seq_length,
        global_batches=(strategy.global_batch,),
        world=strategy.gpus,
        gpu=run.gpu,
        domain=domain,
    )
    given = {
        **{name: getattr(split, name) for name in ("tp", "cp", "cp_kind", "ep", "etp", "zero")},
        "tp_overlap": overlap.tensor,
        "pp": strategy.pp,
        "vpp": strategy.vpp,
        "dp_replicate": split.replicas,
        "recompute": recompute_words(strategy.recomputed),
        "offload": offload_words(split),
        "overlap_experts": overlap.experts,
        "fp8": run.runtime.precision.fp8,
    }
    found |= {one.id for one in broken(engine.rules, {**job.known(engine), **with_words(given)})}
    # without expert ranks a search has one dispatcher
    flex = run.model.experts is not None and run.runtime.experts.dispatcher == "flex"
    if flex and (split.ep == 1 or "flex" not in engine.dispatchers(run.gpu)):
        found.add("dispatcher")
    return frozenset(found)


def runs(engine: EngineSpace, job: EngineContext, choice: Candidate) -> bool:
    """Return True if a candidate meets `engine.rules`; its degrees must divide the GPUs."""
    return bool(holds_all(engine.rules, values_of(engine, job, choice)))


def job_values(job: EngineContext) -> dict[str, Any]:
    """Return the values that rules read and that depend only on the search context, by name."""
    model, experts = job.model, job.model.experts
    latent = model.attention.latent is not None
    return {
        "world": job.world,
        "domain": job.domain or job.world,
        "seq_length": job.seq,
        "sequence_parallel": True,
        "ulysses": 1,
        "heads": model.attention.heads,
        **mixer_values(model),
        **layer_values(model),
        "query_groups": model.attention.kv_heads,
        # Latent attention has no key-value heads.
        "kv_heads": None if latent else model.attention.kv_heads,
        # sparse attention has compressed keys alone, in any sharding
        "latent": latent and model.first_sparse is None,
        "positions": model.positions,
        "window": _has_window(model),
        "ffn_hidden_size": model.dense_width,
        "layers": model.num_layers,
        "hybrid": model.is_hybrid,
        "experts": 0 if experts is None else experts.number,
        "expert_width": None if experts is None else experts.width,
        "biases": model.last.biases,
        "tied": model.tied,
        "mtp": model.mtp,
        "gpu": job.gpu,
        "nvlinked": nvlinked(job.gpu),
        "one_queue": needs_one_queue(job.gpu),
        "model_name": job.name,
        "fine_tunes": job.training.fine_tunes,
        "sft": job.training.sft and job.training.lora_rank is None,
        "unsharded_optimizer": unsharded(job.training.optimizer),
        **adapter_values(job.training.lora_rank or 0, job.training.lora_base),
    }


def adapter_values(rank: int, base: BaseName) -> dict[str, Any]:
    """Return the values that rules on adapters read; rank : 0 without adapters."""
    return {"lora_rank": rank, "lora_base": base}


def layer_values(model: Model) -> dict[str, Any]:
    """Return the values that rules on the layers of a model read."""
    return {
        "needs_megatron": model.needs_megatron,
        "wide_norms": model.has_wide_norms,
        "other_norms": model.has_other_norms,
        "extra_embedding": model.extra_embedding,
        "patches": model.has_patches,
        "kimi_delta": any(isinstance(one.recurrent, KimiDelta) for one in model.kinds),
    }


def refuse_unsupported(rules: Sequence[Rule], run: Run) -> Run:
    """Return a run of a file; raises RuleError with rules on layers and adapters that it breaks.

    rules : all rules of its engine; those on layers and adapters are evaluated.
    """
    adapters, split = run.runtime.adapters, run.split
    rank = 0 if adapters is None else adapters.rank
    layers = {**layer_values(run.model), "tp": split.tp, "cp": split.cp, "lora_rank": rank}
    refuse([one for one in rules if {*one.over} & {*layer_values(run.model)}], layers)
    experts = run.model.experts
    if adapters is None:
        return run
    words = {kind: word for word, kind in BASES.items()}
    values = {
        **adapter_values(adapters.rank, words[adapters.base]),
        **mixer_values(run.model),
        "tp": split.tp,
        "cp": split.cp,
        "etp": split.etp,
        "zero": split.zero,
        "experts": 0 if experts is None else experts.number,
        "tp_overlap": run.runtime.overlap.tensor,
    }
    refuse([rule for rule in _of_adapters(rules) if rule.level == "illegal"], values)
    return run


def adapter_limits(engine: EngineSpace, job: EngineContext) -> tuple[Notice, ...]:
    """Return the rules on adapters that exclude candidates of a job, each with an example."""
    if job.training.lora_rank is None:
        return ()
    most = {
        "tp": job.world,
        "cp": 2 if engine.context else 1,
        "etp": job.world if engine.experts else 1,
        "zero": max(engine.zero),
        "tp_overlap": engine.overlaps_tensor(job, 2),
    }
    return broken(_of_adapters(engine.rules), {**job.known(engine), **most})


def _of_adapters(rules: Iterable[Rule]) -> list[Rule]:
    return [rule for rule in rules if {*rule.over} & {*adapter_values(0, "bf16")}]


def _has_window(model: Model) -> bool:
    attentions = (layer.attention for layer in model.kinds)
    return any(one is not None and one.window is not None for one in attentions)


def with_words(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of a candidate by name, with those derived from recomputation and precision."""
    found, word, precision = {**values}, values.get("recompute"), values.get("precision")
    if word is not None:
        whole = word == FULL or word.startswith("block ")
        experts = whole or "moe" in word.split("+")
        found |= {"whole_layers": whole, "recomputed_experts": experts}
    if precision is not None:
        found.setdefault("fp8", precision in FP8_RECIPES)
    return found


def strategy_of(
    job: EngineContext, choice: Candidate, *, zero: Zero, sequence_parallel: bool = True
) -> Strategy:
    """Return the strategy of a candidate, with equal splits in all layers."""
    mixed = job.model.experts is not None
    split = Split(
        tp=choice.tp,
        sequence_parallel=sequence_parallel and choice.tp > 1,
        cp=choice.cp,
        cp_kind=choice.cp_kind if choice.cp > 1 else "ring",
        ep=choice.ep,
        etp=choice.etp if mixed else 1,
        zero=zero,
        replicas=choice.dp_replicate,
        offload=offload_of(choice.offload),
    )
    layers, ends = uniform_layers(job.model.num_layers, split)
    strategy = Strategy(
        gpus=job.world,
        layers=layers,
        ends=ends,
        stages=choice.chunks,
        schedule=choice.schedule,
        micro_batch=choice.micro_batch,
        global_batch=choice.global_batch,
    )
    return with_recompute(strategy, choice.recompute)


FP8_RECIPES: Mapping[str, Literal["tensorwise", "blockwise", "mxfp8"]] = {
    "fp8": "tensorwise",
    "fp8-blockwise": "blockwise",
    "mxfp8": "mxfp8",
}
"""Precision of a candidate -> recipe of its 8-bit GEMMs."""


def run_precision(choice: Candidate) -> RunPrecision:
    """Return the precision settings of a candidate."""
    if choice.precision == "bf16":
        return RunPrecision()
    if choice.precision == "nvfp4":
        return RunPrecision(fp4=True)
    return RunPrecision(fp8=True, fp8_recipe=FP8_RECIPES[choice.precision])


def device_precisions(gpu: str) -> tuple[Precision, ...]:
    """Return the GEMM precisions that a GPU model supports."""
    low: Mapping[Precision, str] = {
        "fp8": "fp8",
        "fp8-blockwise": "fp8_block",
        "mxfp8": "mxfp8",
        "nvfp4": "nvfp4",
    }
    known = architecture_of(gpu) is not None
    has = [one for one, name in low.items() if known and not lacks_precision(gpu, name)]
    # Transformer Engine emulates blocks of fp8 where it has MXFP8.
    return ("bf16", *(one for one in has if one != "fp8-blockwise" or "mxfp8" not in has))


def plain_dispatcher(gpu: str) -> tuple[Dispatcher, ...]:
    return ("alltoall",)


def never(job: EngineContext, tp: int) -> bool:
    return False


def no_offload(model: Model) -> tuple[str, ...]:
    return (NONE,)


# --------------------------------------------------------------------------------------------------
# Engines with PyTorch layers.


def torch_run(
    job: EngineContext,
    choice: Candidate,
    engine: str,
    *,
    states: States,
    kernels: Kernels,
    sequence_parallel: bool = True,
    host_adam: HostAdam = "torch",
) -> Run:
    """Return the run of a candidate in an engine with PyTorch layers.

    Raises RuleError for an illegal run.
    """
    if job.model.has_patches or job.model.widest_head > WIDEST_FLASH:
        # scripts of diffusers, and wide heads, use the attention of PyTorch
        kernels = replace(kernels, repeated_heads=True)
    run = Run(
        name=job.name,
        # Only Megatron-LM pads the vocabulary, to shard it over tensor ranks.
        model=replace(job.model, vocab_divisor=1),
        strategy=strategy_of(
            job, choice, zero=cast(Zero, choice.zero), sequence_parallel=sequence_parallel
        ),
        runtime=Runtime(
            engine=engine,
            precision=run_precision(choice),
            optimizer=Optimizer(host_adam=host_adam),
            states=states,
            kernels=kernels,
            experts=TORCH_EXPERTS if job.model.experts is not None else ExpertKernels(),
            overlap=Overlap(gradients=True, experts=choice.overlap_experts),
        ),
        seq_length=job.seq,
        gpu=job.gpu,
    )
    return legal(with_training(run, job.training, engine))


TORCH_EXPERTS = ExpertKernels(dispatcher="alltoall", grouped=True)
"""Expert kernels of torchtitan and transformers: one grouped GEMM, all-to-all dispatcher."""


PLAIN_RULES = (
    WHOLE_KEYS,
    NO_HYBRID,
    NO_WIDE_NORMS,
    *(Rule(f"patches.{name}", ("patches", degree), lambda patches, number: patches * (number > 1),
           f"{name} ranks of models of images and videos are not priced, got "
           f"{degree}({{{degree}}})", f"Use --{degree} 1", level="unpriced")
      for name, degree in (("tensor", "tp"), ("context", "cp"))),
    Rule("patches.adapters", ("patches", "lora_rank"), lambda patches, rank: patches * (rank > 0),
         "adapters of models of images and videos are not priced", level="unpriced"),
    Rule("patches.fine-tuning", ("patches", "fine_tunes"), lambda patches, tunes: patches * tunes,
         "TRL fine-tunes language models alone", "Remove --sft"),
    Rule("transformers.latent", ("latent", "positions"), lambda latent, positions:
         latent * (positions != "none"),
         "activations of transformers with latent attention and positions are not counted"),
    Rule("kimi-delta.adapters", ("kimi_delta", "lora_rank"), lambda kimi, rank: kimi * (rank > 0),
         "adapters of Kimi delta attention are not counted", "Remove --lora", level="unpriced"),
    Rule("transformers.etp", ("experts", "etp", "tp"), lambda experts, etp, tp:
         (experts > 0) * (etp != tp),
         "etp({etp}) must be tp({tp}): no separate expert tensor degree"),
    # `Params4bit` and `Int8Params` of bitsandbytes pack a matrix with its scales.
    Rule("transformers.base-tensor", ("lora_base", "tp"), lambda base, tp:
         (base != "bf16") * (tp > 1), "tensor ranks cannot split weights in {lora_base}"),
    # transformers 5 has the experts of a layer in one tensor, and bitsandbytes replaces
    # `nn.Linear` alone (bitsandbytes-foundation/bitsandbytes#1849).
    Rule("transformers.base-experts", ("lora_base", "experts"), lambda base, experts:
         (base != "bf16") * (experts > 0), "bitsandbytes keeps experts in 16 bits, not in "
         "{lora_base}", level="unpriced"),
)  # fmt: skip
"""Rules of engines that train models of Hugging Face transformers."""
TRL_TENSOR = Rule(
    "transformers.trl-tensor", ("fine_tunes", "tp"),
    lambda trl, tp: trl * (tp > 1),
    "no argument of TRL's script sets tensor ranks, got tp({tp})",
)  # fmt: skip
"""Rule of searched candidates that exports train with TRL's script."""


CONFIGURED = (
    Rule("transformers.model", ("model_name", "unwritable"), lambda name, parts: parts != "",
         "no config.json can be written for {model_name}: it has {unwritable}",
         "Use the Hugging Face name of the model, with its owner"),
)  # fmt: skip
"""Rule that a `config.json` of Hugging Face can describe the model."""
TRANSFORMERS = Kernels(attention="flash", module="transformers", loss="whole", loss_parallel=False)
"""Kernels of Hugging Face transformers layers, for accelerate and DeepSpeed."""


def transformers_space(**own: Any) -> EngineSpace:
    """Return the space of an engine that trains models of Hugging Face transformers.

    own : fields of `EngineSpace` in which such engines differ.
    """
    return EngineSpace(
        stack="torchtitan-eager",
        schedules=(),
        experts=False,
        expert_tensor=lambda tp: (tp,),
        zero_with_stages=(),
        recompute=lambda model: (NONE, FULL),
        blocks=False,
        offload=no_offload,
        precisions=lambda gpu: ("bf16",),
        dispatchers=plain_dispatcher,
        overlaps_experts=False,
        overlaps_tensor=never,
        any_layout=False,
        **own,
    )


def keeps_stages_busy(micro_batches: int, pp: int) -> bool:
    """Return whether a pipeline has a micro-batch for each stage.

    Some engines run fewer, but then stages are never all busy. Searches and the alternatives of
    `autopar check` leave such pipelines out.
    """
    return micro_batches >= pp


LAYOUTS = "uneven pipeline chunks other than the balanced ones"
FEW = "fewer micro-batches than stages"
BY_LAYER = "degrees that differ by layer (--engine galvatron)"
