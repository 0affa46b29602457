"""Options that fix degrees: `--tp 2 --cp 8 --ep 8 --vpp 2 --zero 1 --recompute mlp`.

Each option has one or several allowed values; the search returns the fastest plan among them. The
search for uniform plans (`search.planning.uniform`) supports all of these options. For per-layer
plans, a single value becomes a rule, as with `--pin`, if such plans support the option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from autopar.command.fields import option, rows_of, validate
from autopar.errors import OptionError, did_you_mean
from autopar.pipeline.schedules import SCHEDULES, SHORT_NAMES, TORCH_NAMES, Schedule, schedule_named
from autopar.run.plan import ZERO_DEFAULTS
from autopar.run.strategy import OFFLOADED
from search.engines.candidate import (
    FULL,
    MODULES,
    NONE,
    PRECISIONS,
    BaseName,
    Constraints,
    Precision,
    TrainingSettings,
)
from search.engines.huggingface.named_optimizers import OptimizerName

_DEGREES = "Degrees"
_TRAINING = "Fine-tuning"
_MOST = 1 << 24


def _words(name: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated words of `known`; `any` means all of them.

    The parser raises OptionError, which names the option `name`, for another word.
    """

    def read(text: str) -> tuple[str, ...]:
        found = [word.strip().lower() for word in text.split(",")]
        for word in found:
            if word not in (*known, "any"):
                hint = did_you_mean(word, (*known, "any"))
                raise OptionError(
                    f"--{name}: expected any or some of {', '.join(known)}, got {word!r:.60}",
                    remedy=hint,
                )
        return tuple(known) if "any" in found else tuple(dict.fromkeys(found))

    return read


def _schedules(text: str) -> tuple[Schedule, ...]:
    """Return the schedules of a list of short or torchtitan names; raises OptionError."""
    found: list[Schedule] = []
    for item in text.split(","):
        word = item.strip().lower()
        if word == "any":
            return tuple(SCHEDULES)
        schedule = _SCHEDULES.get(word) or schedule_named(word)
        if schedule is None:
            hint = did_you_mean(word, (*_SCHEDULES, *TORCH_NAMES.values()))
            raise OptionError(
                f"--schedule: expected any or some of {', '.join(_SCHEDULES)}, or torchtitan's "
                f"names of them, got {item.strip()!r:.60}",
                remedy=hint,
            )
        found.append(schedule)
    return tuple(dict.fromkeys(found))


_SCHEDULES = {short: name for name, short in SHORT_NAMES.items()}


def _recomputations(text: str) -> tuple[str, ...]:
    """Return the recomputations of a list such as `none,core_attn+mlp,block 4`.

    Raises OptionError.
    """
    found = []
    for item in text.split(","):
        words = " ".join(item.strip().lower().replace("-", "_").split())
        kind, _, number = words.partition(" ")
        modules = words.split("+")
        if words == "selective":
            # the default module of Megatron-LM, and the only list of operations of torchtitan
            found += ["core_attn", "op"]
        elif words in (NONE, FULL, "op") or set(modules) <= set(MODULES):
            found.append("+".join(sorted(modules)))
        elif kind == "block" and number.isascii() and number.isdigit() and 0 < int(number) < _MOST:
            found.append(f"block {int(number)}")
        else:
            hint = did_you_mean(words, (NONE, FULL, "op", *MODULES))
            raise OptionError(
                f"--recompute: expected none, full, selective, op, block N, or modules joined by + "
                f"({', '.join(MODULES)}), got {item!r:.60}",
                remedy=hint,
            )
    return tuple(dict.fromkeys(found))


def _offloads(text: str) -> tuple[str, ...]:
    """Return the activation offloads of a list such as `none,core_attn+moe_act`.

    The word `any` returns an empty tuple, which means no constraint. Raises OptionError.
    """
    found = []
    for item in text.split(","):
        words = "".join(item.strip().lower().replace("-", "_").split())
        modules = words.split("+")
        if words == "any":
            return ()
        if words != NONE and not set(modules) <= set(OFFLOADED):
            hint = did_you_mean(words, (NONE, "any", *OFFLOADED))
            raise OptionError(
                f"--offload-activations: expected none, any, or modules joined by + "
                f"({', '.join(OFFLOADED)}), got {item!r:.60}",
                remedy=hint,
            )
        if "attn_proj" in modules and "core_attn" not in modules:
            raise OptionError(
                "--offload-activations attn_proj needs core_attn",
                remedy=f"Use {'+'.join(sorted({*modules, 'core_attn'}))}",
            )
        found.append("+".join(sorted({*modules})))
    return tuple(dict.fromkeys(found))


def _degree(help: str, **how: Any) -> Any:
    return option(None, help=help, panel=_DEGREES, low=1, high=_MOST, **how)


@dataclass(frozen=True, kw_only=True)
class DegreeOptions:
    """Constraints on degrees and settings of plans; None allows any value."""

    tp: tuple[int, ...] | None = _degree(
        "tensor degree, or several to choose from: 2,4",
        brief="set a degree, or several: 2,4; others: --help degrees",
        most_used=True,
    )
    cp: tuple[int, ...] | None = _degree("context degree")
    ep: tuple[int, ...] | None = _degree("expert degree")
    etp: tuple[int, ...] | None = _degree("tensor degree of experts")
    pp: tuple[int, ...] | None = _degree("pipeline stages")
    vpp: tuple[int, ...] | None = _degree("virtual pipeline size: chunks per pipeline stage")
    schedule: tuple[str, ...] | None = option(
        None,
        help=(f"pipeline schedule: {', '.join(SHORT_NAMES.values())}, or torchtitan's names"),
        panel=_DEGREES,
        shown="any",
        parse=_schedules,
    )
    dp: tuple[int, ...] | None = _degree("data degree")
    zero: tuple[int, ...] | None = option(
        None, help="ZeRO stage, 0 to 3", panel=_DEGREES, low=0, high=3
    )
    dp_replicate: tuple[int, ...] | None = _degree(
        "number of HSDP replicas, or of distributed-optimizer instances"
    )
    micro_batch_size: tuple[int, ...] | None = _degree(
        "micro-batch size in sequences, per data-parallel rank"
    )
    recompute: tuple[str, ...] | None = option(
        None,
        help="none, full, op, block N, or modules: core_attn+mlp",
        brief="none, full, or parts: core_attn+mlp",
        panel=_DEGREES,
        most_used=True,
        parse=_recomputations,
    )
    offload_activations: tuple[str, ...] | None = option(
        None,
        help="activation offload: none, modules such as core_attn+moe_act, or any",
        panel=_DEGREES,
        shown="any",
        parse=_offloads,
    )
    precision: tuple[str, ...] | None = option(
        None,
        brief="bf16, fp8, fp8-blockwise, mxfp8, nvfp4, fp16, any",
        help="precision of GEMMs: bf16, fp8, fp8-blockwise, mxfp8, nvfp4, any; or fp16, fp32",
        panel=_DEGREES,
        most_used=True,
        shown="bf16",
        parse=_words("precision", PRECISIONS),
    )
    dispatcher: tuple[str, ...] | None = option(
        None,
        help="token dispatcher: alltoall, flex (DeepEP), or any",
        panel=_DEGREES,
        shown="any",
        parse=_words("dispatcher", ("alltoall", "flex")),
    )
    compile: bool | None = option(
        None,
        help="torch.compile for each layer (torchtitan)",
        panel=_DEGREES,
        shown="the faster one",
    )
    moe_overlap: bool | None = option(
        None,
        help="overlap dispatch and combine with another micro-batch",
        panel=_DEGREES,
        shown="either",
    )
    moe_skew: float | None = option(
        None,
        help="tokens of the busiest expert rank over the mean",
        panel=_DEGREES,
        shown="1, even routing",
        low=1.0,
        high=1000.0,
    )

    sft: bool | None = option(
        None,
        help="fine-tune all weights: TRL's script, or a recipe of Megatron-Bridge",
        panel=_TRAINING,
        shown="the script of the user, or --lora",
    )
    lora: int | None = option(
        None,
        help="LoRA rank; all other weights are frozen",
        panel=_TRAINING,
        low=1,
        high=1 << 16,
        shown="all weights are trained",
    )
    lora_base: BaseName | None = option(
        None, help="precision of frozen weights; nf4 is QLoRA", panel=_TRAINING, shown="bf16"
    )
    optimizer: OptimizerName | None = option(
        None,
        help="optimizer; adam-bf16 and adam8bit are Adam with small moments",
        panel=_TRAINING,
        shown="adam",
    )
    pure_bf16: bool | None = option(
        None,
        help="train all weights in bf16, without an fp32 copy (torchtitan, accelerate)",
        panel=_TRAINING,
        shown="fp32 weights",
    )
    offload_optimizer: float | None = option(
        None,
        help="share of the optimizer states in host memory, 0 to 1",
        panel=_TRAINING,
        low=0.0,
        high=1.0,
        shown="0",
    )

    def __post_init__(self) -> None:
        validate(self)

    @property
    def any_given(self) -> bool:
        """True if the user passed at least one of these options."""
        return any(getattr(self, row.field) is not None for row in rows_of(type(self)))


def fixed_of(options: DegreeOptions) -> Constraints:
    """Return the constraints of the search for uniform plans."""
    return Constraints(
        tp=options.tp,
        cp=options.cp,
        ep=options.ep,
        etp=options.etp,
        pp=options.pp,
        vpp=options.vpp,
        schedule=cast(Any, options.schedule),
        dp=options.dp,
        zero=options.zero,
        dp_replicate=options.dp_replicate,
        micro_batch=options.micro_batch_size,
        recompute=options.recompute,
        offload=options.offload_activations or None,
        precision=cast(tuple[Precision, ...], options.precision or ("bf16",)),
        compiled=options.compile,
        dispatcher=cast(Any, options.dispatcher),
        overlap_experts=options.moe_overlap,
    )


DEFAULT_RANK = 16
"""LoRA rank of `--lora-base` without `--lora`: `lora_r` of TRL 1.16 (trainer/model_config.py)."""


def training_of(options: DegreeOptions) -> TrainingSettings:
    """Return the trained parameters (all or LoRA) and the optimizer settings."""
    usual = None if options.lora_base is None else DEFAULT_RANK
    return TrainingSettings(
        sft=bool(options.sft),
        lora_rank=options.lora or usual,
        lora_base=options.lora_base or "bf16",
        optimizer=options.optimizer or "adam",
        pure_bf16=bool(options.pure_bf16),
        offload=options.offload_optimizer or 0.0,
    )


def rules_of(options: DegreeOptions, why: str = "") -> Mapping[str, object]:
    """Return the fields of `SearchOptions` that set these constraints in per-layer plans.

    why : option or property of the model that requires per-layer plans, for errors; empty for none

    Raises OptionError for options that per-layer plans do not support.
    """
    remedy = "Use --engine megatron, torchtitan, deepspeed or accelerate, with a model and a card"
    if why:
        # a reason that is not an option comes from the model, which the user cannot omit
        remedy = "Remove one of them" if why.startswith("--") else "Remove --{}"
    lone: dict[str, Any] = {}
    for row in rows_of(DegreeOptions):
        value = getattr(options, row.field)
        if value is None:
            continue
        if isinstance(value, tuple):
            if len(value) > 1:
                raise OptionError(
                    f"--{row.name}: per-layer plans need one value{_beside(why)}",
                    remedy=remedy.format(row.name),
                )
            lone[row.name] = value[0]
        else:
            lone[row.name] = value
    rules: list[str] = []
    changes: dict[str, object] = {}
    for name in ("tp", "pp"):
        if name in lone:
            rules.append(f"{name}={lone.pop(name)}")
    if "cp" in lone:
        degree = lone.pop("cp")
        rules.append(f"cp={degree}")
        changes["max_cp_deg"] = degree
    if lone.get("recompute") in (NONE, FULL):
        rules.append(f"ckpt={int(lone.pop('recompute') == FULL)}")
    if "zero" in lone:
        zero = lone.pop("zero")
        rules.append(f"zero3={int(zero == 3)}")
        if zero < 3:
            changes["default_dp_type"] = ZERO_DEFAULTS[zero]
    # these values are the only ones that per-layer plans support, so they need no rule
    for name, plain in (
        ("ep", 1),
        ("vpp", 1),
        ("dp-replicate", 1),
        ("offload-activations", NONE),
        ("precision", "bf16"),
        ("optimizer", "adam"),
    ):
        if lone.get(name) == plain:
            del lone[name]
    if lone:
        name, value = next(iter(lone.items()))
        typed = f"--{name}" if value is True else f"--{name} {value}"
        raise OptionError(
            f"{typed}: an option of uniform plans, not of per-layer plans{_beside(why)}",
            remedy=remedy.format(name),
        )
    if rules:
        changes["pin"] = (",".join(rules),)
    return changes


def _beside(why: str) -> str:
    return f", and {why}" if why else ""


_OF_TRAINING = ("fp16", "fp32")
"""Training precisions; the other values of `--precision` apply to GEMMs of 16-bit weights only."""


def with_training_precision(raw: Mapping[str, object]) -> Mapping[str, object]:
    """Return the options with `--precision fp16` or `fp32` replaced by `--mixed-precision`.

    Raises OptionError if both are given and differ.
    """
    asked = raw.get("precision")
    if not isinstance(asked, str) or asked.lower() not in _OF_TRAINING:
        return raw
    known = raw.get("mixed-precision", asked)
    if known != asked:
        raise OptionError(
            f"--precision: {asked} contradicts --mixed-precision {known}",
            remedy="Remove one of them",
        )
    return {
        "mixed-precision" if name == "precision" else name: value for name, value in raw.items()
    }
