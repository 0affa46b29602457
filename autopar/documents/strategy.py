"""Strategy files of Galvatron (`galvatron_config_*.json`) and PaddleNLP.

Galvatron's launchers read the file. It is also the value of `plan` in autopar's plan file, with
additional keys for properties that no release of Galvatron supports. Each format is a class of this
module with its keys, their valid values and their constraints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from msgspec import Meta
from msgspec.structs import fields

from autopar.documents.json import read_record, record_schema, value_reader
from autopar.errors import DocumentError, InputError, nearest
from autopar.output import safe_name
from autopar.records import Entry, KeyFault, replace, shorten
from autopar.run.plan import (
    LayerStrategy,
    Module,
    PipelineType,
    Plan,
    VocabStrategy,
    ZeroDefault,
    refinements,
)
from autopar.units import format_count

_MAX_DEGREE = 1 << 24
_T = TypeVar("_T")


# --- values ----------------------------------------------------------------------------------


def _integer(value: object, *, low: int, high: int, expected: str) -> int:
    number: int | None = None
    if isinstance(value, bool):
        # true is allowed for yes or no, but not for a degree.
        number = int(value) if (low, high) == (0, 1) else None
    elif isinstance(value, int):
        number = value
    elif isinstance(value, float):
        number = int(value) if math.isfinite(value) and value.is_integer() else None
    elif isinstance(value, str) and value.isascii() and value.isdigit():
        # Checked before int(), which refuses thousands of digits.
        number = int(value) if len(value) <= 12 else None
    if number is None or not low <= number <= high:
        raise KeyFault("", f"expected {expected}, got {shorten(value)}")
    return number


def _integers(value: object, *, low: int, high: int, expected: str) -> tuple[int, ...]:
    """Return the integers in a comma list, a list or a single number; raises KeyFault."""
    items: Sequence[object] = value if isinstance(value, list) else [value]
    if isinstance(value, str):
        items = [part.strip() for part in value.strip().strip(",").split(",")]
    return tuple(
        _integer(
            item, low=low, high=high, expected=f"{expected} as entry {position} of a comma list"
        )
        for position, item in enumerate(items)
    )


def _modules(value: object) -> tuple[tuple[Module, ...], ...]:
    """Return the modules of every layer from `core_attn+moe_act,none,...`."""
    known: tuple[Module, ...] = get_args(Module)
    parts = value.split(",") if isinstance(value, str) else [value]
    found = []
    for position, part in enumerate(parts):
        names = part.strip().split("+") if isinstance(part, str) else [part]
        chosen = tuple(sorted(name for name in known if name in names))
        if names != ["none"] and len(chosen) != len(names):
            raise KeyFault(
                "",
                f"expected none or modules of {', '.join(known)} joined by + as entry {position} "
                f"of a comma list, got {shorten(part)}",
            )
        found.append(chosen)
    return tuple(found)


def _choice(names: Mapping[str, _T]) -> Callable[[object], _T]:
    def read(value: object) -> _T:
        if not isinstance(value, str) or value not in names:
            expected = " or ".join(repr(name) for name in names)
            raise KeyFault("", f"expected {expected}, got {shorten(value)}")
        return names[value]

    return read


_DEGREE: dict[str, Any] = {"low": 1, "high": _MAX_DEGREE, "expected": "a positive integer"}
_SWITCH: dict[str, Any] = {"low": 0, "high": 1, "expected": "0 or 1"}
_PIPELINE_NAMES: dict[str, PipelineType] = {
    "pipedream_flush": "1f1b",
    "1f1b": "1f1b",
    "gpipe": "gpipe",
}
_OWN_PIPELINES = {**_PIPELINE_NAMES, **{kind: kind for kind in get_args(PipelineType)}}
_DP_NAMES: dict[str, ZeroDefault] = {"ddp": "ddp", "zero1": "zero1", "zero2": "zero2"}
_STAGES: dict[ZeroDefault, int] = {"ddp": 0, "zero1": 1, "zero2": 2}
_List = str | list[Any] | int
_Switch = Annotated[int | bool | str, Meta(description="0 or 1.")]


def _flag(value: object) -> bool:
    return bool(_integer(value, **_SWITCH))


def _degrees(high: int, expected: str, low: int = 0) -> Meta:
    read = partial(_integers, low=low, high=high, expected=expected)
    return value_reader(read, expected, _List)


_Count = Annotated[int, value_reader(partial(_integer, **_DEGREE), "a positive integer", int | str)]
_Flag = Annotated[bool, value_reader(_flag, "0 or 1", _Switch)]
_Degrees = Annotated[tuple[int, ...], _degrees(_MAX_DEGREE, "a positive integer", low=1)]
_Flags = Annotated[tuple[int, ...], _degrees(1, "0 or 1")]
_Chunks = Annotated[tuple[int, ...], _degrees(_MAX_DEGREE, "a number of layers")]
_Stages = Annotated[tuple[int, ...], _degrees(_MAX_DEGREE - 1, "a stage index below pp_size")]
_Sharding = Annotated[tuple[int, ...], _degrees(3, "0, 2 or 3")]


def _word(names: Mapping[str, Any]) -> Meta:
    expected = " or ".join(repr(name) for name in names)
    return value_reader(_choice(names), expected, Literal[tuple(names)])


_Pipeline = Annotated[PipelineType, _word(_PIPELINE_NAMES)]
_OwnPipeline = Annotated[PipelineType, _word(_OWN_PIPELINES)]
_Default = Annotated[ZeroDefault, _word(_DP_NAMES)]
_Modules = Annotated[tuple[tuple[Module, ...], ...], value_reader(_modules, "modules", str)]


# --- formats ---------------------------------------------------------------------------------

_EXPERTS = ("ep_sizes_enc", "tp_of_ep_sizes_enc")


class _File(Entry, forbid_unknown_fields=False):
    """Base class of the file formats; a list that the file does not contain is empty."""

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check the keys; raises KeyFault for an unknown or a missing one."""
        known = [one.name for one in fields(cls)]
        if not data.keys() & {*known}:
            what = f"this file has no key of a plan or strategy file, such as {known[0]!r}"
            raise KeyFault("", what)
        for key, value in data.items():
            if key not in known and not key.startswith("_"):
                near = nearest(key, known)
                hint = f"Did you mean {near!r}?" if near else "Remove it"
                raise KeyFault(key, f"unknown key with value {shorten(value)}. {hint}")
        for one in fields(cls):
            if one.required and one.name not in data:
                raise KeyFault(one.name, "this key is missing. Add it to the strategy")
        return data

    def check(self, data: Mapping[str, Any]) -> None:
        """Raise KeyFault for contradicting values or values that no plan supports.

        data : object of the file.
        """
        raise NotImplementedError

    def check_lengths(self, num_layers: int, *lists: str) -> None:
        """Raise KeyFault for a list that does not have one entry per layer."""
        for key in lists:
            if key in self.given and len(getattr(self, key)) != num_layers:
                has = format_count(len(getattr(self, key)), "entry", "entries")
                raise KeyFault(key, f"the list has {has} for {num_layers} layers")


class _GalvatronFile(_File):
    """Galvatron's formats, v2.0 to newest and runtime, which differ in optional keys only."""

    pp_deg: _Count
    tp_sizes_enc: _Degrees
    tp_consecutive_flags: _Flags = ()
    dp_types_enc: _Flags
    use_sp: _Flags = ()
    cp_sizes_enc: _Degrees = ()
    checkpoint: _Flags = ()
    world_size: _Count = 0
    """0 if the file does not contain it."""
    global_bsz: _Count
    chunks: _Count = 1
    pp_division: _Degrees = ()
    # Defaults of the runtimes for files without these keys.
    pipeline_type: _OwnPipeline = "gpipe"
    default_dp_type: _Default = "ddp"
    vtp: _Count = 1
    vsp: _Flag = False
    vcp: _Count = 1
    """Context degree of embedding, head and loss."""
    embed_sdp: _Flag = False
    vocab_sdp: _Flag = False
    ep_sizes_enc: _Degrees = ()
    """Expert-parallel degrees; 1 by default."""
    tp_of_ep_sizes_enc: _Degrees = ()
    """Expert tensor degrees; by default those of `tp_sizes_enc` where the expert degree is 1, else
    1."""
    recompute_modules: _Modules = ()
    """Recomputed modules of every layer, joined by +, or none."""
    vpp_deg: _Count = 1
    """Virtual pipeline size: model chunks per stage."""
    vpp_division: _Chunks = ()
    """Layers per model chunk in the order in which the chunks run; evenly divided by default."""

    def check(self, data: Mapping[str, Any]) -> None:
        lists = ("dp_types_enc", "tp_consecutive_flags", "use_sp", "cp_sizes_enc", "checkpoint")
        self.check_lengths(len(self.tp_sizes_enc), *_EXPERTS, *lists, "recompute_modules")
        if {"embed_sdp", "vocab_sdp"} <= self.given and self.embed_sdp != self.vocab_sdp:
            raise KeyFault(
                "vocab_sdp",
                f"the value is {int(self.vocab_sdp)}, but 'embed_sdp' is "
                f"{int(self.embed_sdp)}. Both set the same option; use one value",
            )
        stages, num_layers = self.pp_deg, len(self.tp_sizes_enc)
        if "pp_division" not in self.given:
            if stages > num_layers:
                raise KeyFault(
                    "pp_deg",
                    f"expected at most {num_layers} stages for as many layers, got {stages}",
                )
            return
        sizes = self.pp_division
        if len(sizes) != stages:
            has = format_count(len(sizes), "entry", "entries")
            raise KeyFault("pp_division", f"the list has {has}, but pp_deg is {stages}")
        if sum(sizes) != num_layers:
            shown = " + ".join(map(str, sizes)) if len(sizes) <= 16 else "the sum"
            raise KeyFault(
                "pp_division", f"{shown} = {sum(sizes)} != {num_layers} layers of tp_sizes_enc"
            )

    def plan(self, path: Path | str, world_size: int | None, num_layers: int | None) -> Plan:
        """Return the plan; raises DocumentError if the number of GPUs is unknown.

        world_size : number of GPUs for files without it.
        """
        world = self.world_size or world_size
        if not world:
            raise DocumentError(
                path,
                "this key is missing, as in files of earlier releases",
                key="world_size",
                remedy="Add --nodes and --gpus-per-node",
            )
        # The oldest files divide evenly, with the remainder on the last stage.
        each, rest = divmod(len(self.tp_sizes_enc), self.pp_deg)
        return _plan(
            world_size=world,
            stage_sizes=self.pp_division or (each,) * (self.pp_deg - 1) + (each + rest,),
            tp=self.tp_sizes_enc,
            cp=self.cp_sizes_enc,
            consecutive=self.tp_consecutive_flags,
            ulysses=self.use_sp,
            zero3=self.dp_types_enc,
            checkpoint=self.checkpoint,
            vocab=VocabStrategy(
                tp=self.vtp,
                ulysses=self.vsp,
                zero3=self.embed_sdp or self.vocab_sdp,
                cp=self.vcp,
            ),
            global_batch=self.global_bsz,
            num_microbatches=self.chunks,
            pipeline_type=self.pipeline_type,
            default_dp_type=self.default_dp_type,
            ep=self.ep_sizes_enc,
            etp=self.tp_of_ep_sizes_enc,
            recompute=self.recompute_modules,
            num_chunks=self.vpp_deg,
            chunk_sizes=self.vpp_division,
        )


class _PaddleFile(_File):
    """PaddleNLP's fine_grained_config.json, with one ZeRO stage per layer."""

    tp_size_list: _Degrees
    pp_size: _Count
    dp_size_list: _Degrees
    pp_stage_idx_list: _Stages
    global_batch_size: _Count
    gradient_accumulation_steps: _Count
    sharding_stage_list: _Sharding = ()
    usp_flag_list: _Flags = ()
    recompute_list: _Flags = ()
    vtp: _Count = 1
    vsp_flag: _Flag = False
    embed_sdp: _Flag = False
    world_size: _Count = 0
    """0 if the file does not contain it."""
    pipeline_type: _Pipeline = "1f1b"
    default_dp_type: _Default = "ddp"
    """By default it follows from `sharding_stage_list`."""

    def check(self, data: Mapping[str, Any]) -> None:
        for position, stage in enumerate(self.pp_stage_idx_list):
            if stage >= self.pp_size:
                where = f"as entry {position} of a comma list"
                problem = f"expected a stage index below pp_size {where}, got {stage}"
                raise KeyFault("pp_stage_idx_list", problem)
        lists = ("dp_size_list", "sharding_stage_list", "usp_flag_list", "recompute_list")
        self.check_lengths(len(self.tp_size_list), *lists, "pp_stage_idx_list")
        worlds = sorted({self.pp_size * t * d for t, d in self.degrees})
        if len(worlds) > 1:
            raise KeyFault(
                "dp_size_list",
                "tp * dp * pp differs between layers "
                f"({', '.join(map(str, worlds))}). Every layer must use all "
                "GPUs of its stage",
            )
        kinds = set(self.sharding_stage_list) - {3}
        if len(kinds) > 1:
            stages = ", ".join(map(str, sorted(set(self.sharding_stage_list))))
            raise KeyFault(
                "sharding_stage_list",
                f"the list has the ZeRO stages {stages}; apart from 3, all layers need "
                "one of 0 (ddp), 1 (zero1) and 2 (zero2)",
            )
        index = list(self.pp_stage_idx_list)
        if index != sorted(index) or set(index) != set(range(self.pp_size)):
            raise KeyFault(
                "pp_stage_idx_list",
                f"expected 0 to {self.pp_size - 1} in order and every stage "
                f"used, got {shorten(index)}",
            )

    @property
    def degrees(self) -> list[tuple[int, int]]:
        """(Tensor degree, data degree) of every layer."""
        return list(zip(self.tp_size_list, self.dp_size_list, strict=True))

    def plan(self, path: Path | str, world_size: int | None, num_layers: int | None) -> Plan:
        """Return the plan; its number of GPUs follows from the degrees."""
        (tp, dp), *_ = self.degrees
        world, given = tp * dp * self.pp_size, self.world_size or world_size
        if given and given != world:
            raise DocumentError(
                path,
                f"tp({tp}) * dp({dp}) * pp({self.pp_size}) = {world} != world_size({given})",
                key="dp_size_list",
            )
        default: ZeroDefault = "ddp"
        for kind, stage in _STAGES.items():
            if stage in self.sharding_stage_list:
                default = kind
        if "default_dp_type" in self.given:
            default = self.default_dp_type
        return _plan(
            world_size=world,
            stage_sizes=tuple(map(self.pp_stage_idx_list.count, range(self.pp_size))),
            tp=self.tp_size_list,
            ulysses=self.usp_flag_list,
            zero3=[int(stage == 3) for stage in self.sharding_stage_list],
            checkpoint=self.recompute_list,
            vocab=VocabStrategy(tp=self.vtp, ulysses=self.vsp_flag, zero3=self.embed_sdp),
            global_batch=self.global_batch_size,
            num_microbatches=self.gradient_accumulation_steps,
            pipeline_type=self.pipeline_type,
            default_dp_type=default,
        )


_COARSE = re.compile(r"pp([0-9]{1,8})_tp([0-9]{1,8})_dp([0-9]{1,8})_stage([0-3])_recompute([01])")
"""Format of `Strategy.serialize` in PaddleNLP's Galvatron."""


def _coarse(value: object) -> tuple[int, ...]:
    match = _COARSE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise KeyFault(
            "", f"expected a name such as pp1_tp2_dp4_stage3_recompute0, got {shorten(value)}"
        )
    return tuple(map(int, match.groups()))


class _CoarseFile(_File):
    """PaddleNLP's optimal_solution.json: one strategy for all layers, without their number."""

    bsz: _Count
    accumulation_steps: _Count
    strategy: Annotated[tuple[int, ...], value_reader(_coarse, "a strategy", str)]
    memory_cost: Any = None
    time_cost: Any = None
    throughput: Any = None

    def check(self, data: Mapping[str, Any]) -> None:
        stages, tp, dp, sharding, _ = self.strategy
        if 0 in (stages, tp, dp):
            raise KeyFault("strategy", f"a degree of {shorten(data['strategy'])} is 0")
        # Stage 1 shards only the optimizer, which no plan here supports.
        if sharding == 1:
            raise KeyFault("strategy", "the value has sharding stage 1, expected 0, 2 or 3")

    def plan(self, path: Path | str, world_size: int | None, num_layers: int | None) -> Plan:
        """Return the plan of a model with `num_layers` layers.

        Raises DocumentError without `num_layers` or if `world_size` contradicts the degrees.
        """
        stages, tp, dp, sharding, recompute = self.strategy
        world = stages * tp * dp
        if world_size and world_size != world:
            raise DocumentError(
                path,
                f"tp({tp}) * dp({dp}) * pp({stages}) = {world} != world_size({world_size})",
                key="strategy",
            )
        if not num_layers:
            raise DocumentError(
                path,
                "the value contains the strategy of every layer, but not the number of layers",
                key="strategy",
                remedy="Add --model or --num-layers",
            )
        if stages > num_layers:
            raise DocumentError(
                path, f"the value has {stages} stages for {num_layers} layers", key="strategy"
            )
        # As in `generate_meshs_coarse_grained`: the remainder goes to the last stage, and embedding
        # and head have the strategy of the layers.
        each, rest = divmod(num_layers, stages)
        return _plan(
            world_size=world,
            stage_sizes=(each,) * (stages - 1) + (each + rest,),
            tp=(tp,) * num_layers,
            ulysses=(),
            zero3=(int(sharding == 3),) * num_layers,
            checkpoint=(recompute,) * num_layers,
            vocab=VocabStrategy(tp=tp, zero3=sharding == 3),
            global_batch=self.bsz,
            num_microbatches=self.accumulation_steps,
            pipeline_type="1f1b",
            default_dp_type="zero2" if sharding == 2 else "ddp",
        )


def _plan(
    *,
    tp: Sequence[int],
    cp: Sequence[int] = (),
    consecutive: Sequence[int] = (),
    ulysses: Sequence[int],
    zero3: Sequence[int],
    checkpoint: Sequence[int],
    world_size: int,
    stage_sizes: tuple[int, ...],
    vocab: VocabStrategy,
    global_batch: int,
    num_microbatches: int,
    pipeline_type: PipelineType,
    default_dp_type: ZeroDefault,
    ep: Sequence[int] = (),
    etp: Sequence[int] = (),
    recompute: Sequence[tuple[Module, ...]] = (),
    num_chunks: int = 1,
    chunk_sizes: tuple[int, ...] = (),
) -> Plan:
    """Return the plan in canonical form, so that equivalent files give equal plans.

    Sequences have one entry per layer, or none for the default. A group of one rank is neither
    Ulysses nor strided. A group
    of all ranks of a stage is consecutive, regardless of the flag. An expert tensor degree that
    equals its default becomes None.
    """
    ones, zeros = (1,) * len(tp), (0,) * len(tp)
    ranks = world_size // len(stage_sizes)
    layers = tuple(
        LayerStrategy(
            tp=t,
            ulysses=bool(u) and t > 1,
            cp=c,
            zero3=bool(z),
            checkpoint=bool(k),
            strided=not consec and 1 < t < ranks,
            ep=e,
            etp=None if expert_tp == (t if e == 1 and not u else 1) else expert_tp,
            recompute=modules,
        )
        for t, c, consec, u, z, k, e, expert_tp, modules in zip(
            tp,
            cp or ones,
            consecutive or ones,
            ulysses or zeros,
            zero3 or zeros,
            checkpoint or zeros,
            ep or ones,
            etp or (None,) * len(tp),
            recompute or ((),) * len(tp),
            strict=True,
        )
    )
    return Plan(
        world_size=world_size,
        num_stages=len(stage_sizes),
        stage_sizes=stage_sizes,
        layers=layers,
        vocab=replace(vocab, ulysses=vocab.ulysses and vocab.tp > 1),
        global_batch=global_batch,
        num_microbatches=num_microbatches,
        pipeline_type=pipeline_type,
        default_dp_type=default_dp_type,
        num_chunks=num_chunks,
        chunk_sizes=chunk_sizes,
    )


# --- reading and writing ---------------------------------------------------------------------


def _schema() -> dict[str, Any]:
    """Return the JSON Schema of strategy files as they are written."""
    known = record_schema(_GalvatronFile)["properties"]
    layers = {"description": "Layers of every stage."}
    return {
        "type": "object",
        "description": (
            "The strategy file of a plan: comma lists have an entry per layer. Keys "
            "that add nothing to the others are absent."
        ),
        "properties": {
            key: {k: v for k, v in known[key].items() if k not in ("title", "default")}
            | (layers if key == "pp_division" else {})
            for key in known
        },
    }


class _Strategy:
    """Type whose JSON Schema is that of the written strategy file."""

    @staticmethod
    def json_schema() -> dict[str, Any]:
        return _schema()


def _strategy(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise KeyFault("", f"the value is {shorten(value)}, expected an object")
    return value


Strategy = Annotated[dict[str, Any], value_reader(_strategy, "an object", _Strategy)]
"""Object of a strategy file as written; `parse_strategy` validates it."""


def parse_strategy(
    values: Mapping[str, Any],
    path: Path | str,
    world_size: int | None = None,
    num_layers: int | None = None,
) -> Plan:
    """Return the plan in the content of a strategy file of any format.

    path : origin of the content, for errors.
    world_size, num_layers : GPUs, and layers of the model, for files without them.

    Raises DocumentError on any unusable value, with the key, the value and the expected values.
    """
    spelling: type[_GalvatronFile | _PaddleFile | _CoarseFile] = _GalvatronFile
    if "tp_size_list" in values or "pp_size" in values:
        spelling = _PaddleFile
    elif "bsz" in values or "strategy" in values:
        spelling = _CoarseFile
    file = read_record(spelling, path, values)
    try:
        file.check(values)
    except KeyFault as fault:
        raise DocumentError(path, str(fault), key=fault.key or None) from None
    return file.plan(path, world_size, num_layers)


def paddle_document(plan: Plan) -> dict[str, object]:
    """Return PaddleNLP's fine_grained_config.json of a plan without context or strided groups.

    Keys are in the order of PaddleNLP's search engine. Two keys are added if the others are
    ambiguous: the schedule if it is GPipe, and the ZeRO stage of layers without ZeRO-3 if there are
    no such layers. PaddleNLP's runtime reads keys by name.

    Raises InputError if the format cannot express the plan.
    """

    def joined(values: Iterable[int]) -> str:
        return ",".join(str(int(value)) for value in values)

    layers = plan.layers
    assert not any(s.strided or s.cp > 1 for s in layers)
    # Its stage 1 is ZeRO-1.
    said = replace(plan, default_dp_type="ddp")
    _check_said(plan, refinements(said), "PaddleNLP's strategy file")
    other = _STAGES[plan.default_dp_type]
    sharding = [3 if s.zero3 else other for s in layers]
    document: dict[str, object] = {
        "pp_size": plan.num_stages,
        "vtp": plan.vocab.tp,
        "vsp_flag": int(plan.vocab.ulysses),
        "embed_sdp": int(plan.vocab.zero3),
        "global_batch_size": plan.global_batch,
        "gradient_accumulation_steps": plan.num_microbatches,
        "dp_size_list": joined(plan.data_degree(i) for i in range(len(layers))),
        "sharding_stage_list": joined(sharding),
        "tp_size_list": joined(s.tp for s in layers),
        "usp_flag_list": joined(s.ulysses for s in layers),
        "recompute_list": joined(s.checkpoint for s in layers),
        "pp_stage_idx_list": joined(plan.stage_of_layer()),
    }
    if plan.pipeline_type == "gpipe":
        document["pipeline_type"] = "gpipe"
    if other and other not in sharding:
        document["default_dp_type"] = plan.default_dp_type
    return document


def _check_said(plan: Plan, lost: Sequence[str], file: str) -> None:
    """Raise InputError if a file format cannot express properties of a plan.

    lost : these properties in words.
    file : file format in words.
    """
    if lost:
        raise InputError(
            f"{file} cannot contain {', '.join(lost)} of this plan",
            remedy="Use the plan file (autopar_plan_*)",
        )


def has_context_degrees(plan: Plan) -> bool:
    """Return True if a part of the plan has a context degree, which Galvatron v2.4 ignores."""
    return plan.vocab.cp > 1 or any(layer.cp > 1 for layer in plan.layers)


def unsaid_by_galvatron(plan: Plan) -> tuple[str, ...]:
    """Return the properties of a plan, in words, that no release of Galvatron's file supports."""
    # The newest release has keys for expert degrees and for the vocabulary's context degree.
    said = replace(
        plan,
        layers=tuple(replace(s, ep=1, etp=None) for s in plan.layers),
        vocab=replace(plan.vocab, cp=1),
    )
    return refinements(said)


def galvatron_document(plan: Plan) -> dict[str, object]:
    """Return the strategy file of a plan in Galvatron's format.

    Raises InputError: the plan has properties that no release of the format supports; the error
    names them.
    """
    _check_said(plan, unsaid_by_galvatron(plan), "Galvatron's strategy file")
    return strategy_document(plan)


def strategy_document(plan: Plan) -> dict[str, object]:
    """Return the value of `plan` in autopar's plan file: Galvatron's keys and additional ones.

    Context and expert degrees and autopar's additional keys are written only if they differ from
    their defaults. ZeRO-3 of the embedding is written under both names used by Galvatron's
    releases.
    """

    def joined(values: Iterable[int]) -> str:
        return ",".join(str(int(value)) for value in values)

    layers = plan.layers
    document: dict[str, object] = {
        "pp_deg": plan.num_stages,
        "tp_sizes_enc": joined(s.tp for s in layers),
        "tp_consecutive_flags": joined(not s.strided for s in layers),
        "dp_types_enc": joined(s.zero3 for s in layers),
        "use_sp": joined(s.ulysses for s in layers),
    }
    if any(s.cp > 1 for s in layers):
        document["cp_sizes_enc"] = joined(s.cp for s in layers)
    document |= {
        "checkpoint": joined(s.checkpoint for s in layers),
        "world_size": plan.world_size,
        "global_bsz": plan.global_batch,
        "chunks": plan.num_microbatches,
        "pp_division": joined(plan.stage_sizes),
        "pipeline_type": "pipedream_flush" if plan.pipeline_type == "1f1b" else plan.pipeline_type,
        "default_dp_type": plan.default_dp_type,
        "vtp": plan.vocab.tp,
        "vsp": int(plan.vocab.ulysses),
        "embed_sdp": int(plan.vocab.zero3),
        "vocab_sdp": int(plan.vocab.zero3),
    }
    if plan.vocab.cp > 1:
        document["vcp"] = plan.vocab.cp
    if any(s.ep > 1 or s.etp is not None for s in layers):
        document["ep_sizes_enc"] = joined(s.ep for s in layers)
        document["tp_of_ep_sizes_enc"] = joined(s.expert_tp for s in layers)
    if any(s.recompute for s in layers):
        document["recompute_modules"] = ",".join("+".join(s.recompute) or "none" for s in layers)
    if plan.num_chunks > 1:
        document["vpp_deg"] = plan.num_chunks
    if plan.chunk_sizes:
        document["vpp_division"] = joined(plan.chunk_sizes)
    return document


def strategy_file_name(
    *,
    model_name: str,
    num_nodes: int,
    gpus_per_node: int,
    memory_gib: float,
    precision: str,
    hardware_name: str,
    seq_lengths: Sequence[int],
    settle_bsz: int | None = None,
    engine: str | None = None,
    disabled: Sequence[str] = (),
    digest: str = "",
) -> str:
    """Return the name of a strategy file: Galvatron's name with other settings of the search.

    seq_lengths : sequence lengths of the layer types.
    engine : engine whose plans were searched; None without one.
    disabled : names of dimensions such as `tp`, `ckpt`.
    digest : digest of all other options, empty without any.
    """
    lengths = "-".join(map(str, dict.fromkeys(seq_lengths)))
    parts = [
        safe_name(model_name, most=56),
        f"{num_nodes}nodes_{gpus_per_node}gpus_per_node_{round(memory_gib, 2):g}GB_{precision}",
        *([f"bsz{settle_bsz}"] if settle_bsz else []),
        # Galvatron puts these in brackets, which are patterns to a shell.
        *(["_".join((*disabled, "off"))] if disabled else []),
        safe_name(hardware_name, most=32),
        f"seq{safe_name(lengths, most=24)}",
        *([engine] if engine else []),
        *([digest] if digest else []),
    ]
    return f"galvatron_config_{'_'.join(parts)}.json"
