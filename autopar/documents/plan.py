"""Reads and writes plans: the documented strategy file in all its spellings.

The strategy file (`galvatron_config_*.json`) is what launchers read. Our own plan file holds the
same keys under `plan` (`plan_documents` has the rest of it). Both are accepted wherever a plan is
read. Writing is atomic and depends on the content only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import ConfigDict, Field

from autopar.documents.checks import validate_document
from autopar.documents.json import load_object, shorten, write_text
from autopar.documents.plan_entries import (
    AlternativeEntry,
    Amount,
    Entry,
    Flag,
    FrontierEntry,
    InfeasibilityEntry,
    InputEntry,
    Interval,
    MemoryEntry,
    Number,
    OptionsEntry,
    PredictionEntry,
    StageEntry,
    StatisticsEntry,
    Strategy,
    Text,
    Typed,
    VersionsEntry,
    WidestCellEntry,
)
from autopar.errors import DocumentError, nearest
from autopar.plans import LayerStrategy, PipelineType, Plan, VocabStrategy, ZeroDefault
from autopar.units import format_count

__all__ = [
    "PLAN_FILE_FORMAT",
    "PLAN_FILE_VERSION",
    "PeakSource",
    "PlanDocument",
    "ResultDocument",
    "read_strategy",
    "strategy_document",
    "strategy_file_name",
    "write_document",
    "write_strategy",
]


# --------------------------------------------------------------------------------------------------
# The documents that hold a plan and what was predicted of it: our own plan file, and the object
# that `autopar-search --json` prints.
#
# Each is a class here, with its keys in the order in which they are written. Whoever reads a plan
# calls `PlanDocument.read`, which takes either of them, or anyone's strategy file, and returns a
# `PlanDocument`; nothing else knows their keys. How a strategy is spelt, which stands under `plan`,
# is the matter of `plan_files`.


PLAN_FILE_FORMAT: Final = "autopar-plan"
# History of the format; `PlanDocument.parse` is the one place that brings older ones up to date.
#   1  first version
PLAN_FILE_VERSION: Final = 1
PeakSource = Literal["allocated", "counted"]
"""Who says the most memory of a step: torch's CUDA allocator, or a count of the model's tensors."""

_REMEDY = "write the plan again with autopar-search"


# --- the documents ---------------------------------------------------------------------------


class _Answer(Entry):
    """What both documents begin with."""

    status: Text | None = None
    """`optimal`, `time_limit`, `infeasible`, or `evaluated`: a plan that was priced."""
    legal: Flag | None = None
    fits: Flag | None = None
    step_time_s: Amount | None = None
    replay_s: Amount | None = None
    """The step time of a simulation of the schedule."""
    samples_per_s: Amount | None = None
    bound_samples_per_s: Amount | None = None
    """No plan is faster."""
    gap: Number | None = None
    """(bound - found) / found; 0 when optimal."""


class PlanDocument(_Answer):
    """Our own plan file (`autopar_plan_*.json`): a plan, its prediction and what both rest on."""

    # without them a file is not ours; a document made in Python has them from here
    model_config = ConfigDict(json_schema_extra={"required": ["format", "version"]})

    format: Literal["autopar-plan"] = PLAN_FILE_FORMAT
    version: Literal[1] = PLAN_FILE_VERSION
    plan: Strategy | None = None
    """Null where the search found none."""
    prediction: PredictionEntry | None = None
    alternatives: list[AlternativeEntry] = Field(default_factory=list)
    infeasibility: InfeasibilityEntry | None = None
    defaults_used: list[Text] = Field(default_factory=list)
    notes: list[Text] = Field(default_factory=list)
    """Derived, extrapolated or estimated inputs, in plain words."""
    estimated: Flag = False
    """The numbers rest on datasheets."""
    synthetic: Flag = False
    """Some input exercises the code and describes no machine."""
    inputs: list[InputEntry] = Field(default_factory=list)
    options: OptionsEntry = Field(default_factory=OptionsEntry)
    request: dict[str, Typed] = Field(default_factory=dict)
    """The options as typed, by name without hyphens in front."""
    versions: VersionsEntry | None = None

    @classmethod
    def read(cls, path: Path | str) -> PlanDocument:
        """Return what a plan file, anyone's strategy file or a printed result says.

        Raises
        ------
        DocumentError
            When it is missing, is not JSON, was written by a newer version or holds an unusable
            value. What is wrong with the strategy itself, `plan_files.read_strategy` says.
        """
        loaded = load_object(path, remedy="autopar-search writes such a file")
        return cls.parse(loaded.data, path)

    @classmethod
    def parse(cls, data: Mapping[str, Any], path: Path | str = "plan") -> PlanDocument:
        """Return what an object says, as `read` does; `path` is for errors."""
        if "format" in data:
            _check_version(path, data)
            return validate_document(cls, path, data, remedy=_REMEDY)
        if "status" in data or isinstance(data.get("plan"), Mapping):
            read = {key: value for key, value in data.items() if key in _READ_OF_RESULTS}
            return validate_document(ResultDocument, path, read, remedy=_REMEDY).as_plan_document()
        # a strategy file is the plan alone
        return cls(plan=dict(data))

    def write(self, path: Path | str) -> None:
        """Write the plan file atomically, byte for byte reproducibly; raises DocumentError."""
        write_document(path, self.content())

    def content(self) -> dict[str, Any]:
        """Return the object of the file: what it is, the plan, and then the figures."""
        content = {"format": self.format, "version": self.version, "plan": self.plan}
        return content | super().content()

    @property
    def is_strategy(self) -> bool:
        """True for a strategy file, which holds a plan and says nothing else."""
        return self.model_fields_set == {"plan"}

    @property
    def stages(self) -> list[StageEntry]:
        """The predicted stages; empty where there are none."""
        return [] if self.prediction is None else self.prediction.stages

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """The step time within the spread of its measurements; None where none was measured."""
        ends = self.prediction.step_time_interval_s if self.prediction is not None else None
        low, high = ends or (None, None)
        return None if low is None or high is None else (low, high)

    @property
    def basis(self) -> str | None:
        """What the figures rest on where it is no measurement; None where it is, or unknown."""
        if self.synthetic:
            return "numbers that only exercise the code"
        if self.estimated:
            return "estimates from datasheets, not on measurements of this machine"
        return None

    def peak_bytes(self, source: PeakSource) -> list[int | None]:
        """Return by stage what is predicted of a peak that somebody measured, in bytes.

        source : `allocated` by torch's CUDA allocator, or `counted` tensors of the model.
        """
        if self.holds_buffers(source):
            return [stage.allocated_bytes for stage in self.stages]
        return [stage.tensor_bytes for stage in self.stages]

    def holds_buffers(self, source: PeakSource) -> bool:
        """Return whether a measured peak holds what is predicted as `fixed`.

        The allocator gives out the receive buffers of pipelines, a count has the tensors of the
        model alone. Neither has the communicators, which are predicted in one figure with those
        buffers where the figures rest on estimates.
        """
        return source == "allocated" and self.basis is None


class ResultDocument(_Answer):
    """The object that `autopar-search --json` prints; some keys are there only where they apply."""

    memory: list[MemoryEntry] = Field(default_factory=list)
    plan: Strategy | None = None
    alternatives: list[AlternativeEntry] = Field(default_factory=list)
    defaults_used: list[Text] = Field(default_factory=list)
    search: StatisticsEntry | None = None
    problems: list[Text] = Field(default_factory=list)
    """Of a plan that was priced: why it is illegal or does not fit."""
    prediction: PredictionEntry | None = None
    estimated: Flag = False
    options: OptionsEntry = Field(default_factory=OptionsEntry)
    request: dict[str, Typed] = Field(default_factory=dict)
    step_time_interval_s: Interval | None = None
    interval_of: list[Text] = Field(default_factory=list)
    widest_cell: WidestCellEntry | None = None
    synthetic: Flag = False
    infeasible: InfeasibilityEntry | None = None
    frontier: list[FrontierEntry] = Field(default_factory=list)

    def as_plan_document(self) -> PlanDocument:
        """Return the plan file that says the same; a search prints memory and no times."""
        prediction = self.prediction
        if prediction is None and (self.memory or self.step_time_interval_s is not None):
            prediction = PredictionEntry(
                step_time_interval_s=self.step_time_interval_s,
                stages=[StageEntry(**row.model_dump()) for row in self.memory],
            )
        same = {key: getattr(self, key) for key in self.model_fields_set & _SAME}
        return PlanDocument(**same, prediction=prediction)


_SAME = frozenset(PlanDocument.model_fields) & frozenset(ResultDocument.model_fields) - {
    "prediction"
}
_READ_OF_RESULTS = _SAME | {"prediction", "memory", "step_time_interval_s"}
"""Exports print their plans likewise, with other things under other keys."""


def write_document(path: Path | str, document: Mapping[str, object]) -> None:
    """Write a JSON document atomically, keys in the given order.

    Raises
    ------
    DocumentError
        When the file cannot be written.
    """
    target = Path(path)
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        write_text(target, text)
    except OSError as error:
        raise DocumentError(
            target,
            f"cannot be written ({error.strerror or error})",
            remedy="choose another --output-config-path",
        ) from None


def _check_version(path: Path | str, document: Mapping[str, Any]) -> None:
    """Raise a DocumentError unless a document is a plan file that this release reads."""
    if document.get("format") != PLAN_FILE_FORMAT:
        raise DocumentError(
            path,
            f"expected {PLAN_FILE_FORMAT!r}, got {shorten(document.get('format'))}",
            key="format",
            remedy="give a plan or strategy file",
        )
    version = document.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise DocumentError(
            path, f"expected a positive integer, got {shorten(version)}", key="version"
        )
    if version > PLAN_FILE_VERSION:
        raise DocumentError(
            path,
            f"is {version} and this release reads up to {PLAN_FILE_VERSION}",
            key="version",
            remedy="update autopar or search again",
        )


# --------------------------------------------------------------------------------------------------
# The documented strategy file: all spellings are read, the documented one is written.


_PIPELINE_NAMES: dict[str, PipelineType] = {
    "pipedream_flush": "1f1b",
    "1f1b": "1f1b",
    "gpipe": "gpipe",
}
_DP_NAMES: dict[str, ZeroDefault] = {"ddp": "ddp", "zero2": "zero2"}

# Every key that some release of the strategy file has, with the one of `_Reader` it means.
_GALVATRON_KEYS = (
    "pp_deg",
    "tp_sizes_enc",
    "tp_consecutive_flags",
    "dp_types_enc",
    "use_sp",
    "cp_sizes_enc",
    "checkpoint",
    "world_size",
    "global_bsz",
    "chunks",
    "pp_division",
    "pipeline_type",
    "default_dp_type",
    "vtp",
    "vsp",
    "vcp",
    "embed_sdp",
    "vocab_sdp",
    "ep_sizes_enc",
    "tp_of_ep_sizes_enc",
)
_PADDLE_KEYS = (
    "pp_size",
    "vtp",
    "vsp_flag",
    "embed_sdp",
    "global_batch_size",
    "gradient_accumulation_steps",
    "dp_size_list",
    "sharding_stage_list",
    "tp_size_list",
    "usp_flag_list",
    "recompute_list",
    "pp_stage_idx_list",
    "world_size",
    "pipeline_type",
    "default_dp_type",
)
_MAX_DEGREE = 1 << 24
_T = TypeVar("_T")


def strategy_document(plan: Plan) -> dict[str, object]:
    """Return the strategy file of a plan: the documented keys in the documented order.

    `cp_sizes_enc` is present only when some layer has a context degree above 1; the ZeRO-3
    decision of the embedding is written under both names that readers look for.
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
        "pipeline_type": "gpipe" if plan.pipeline_type == "gpipe" else "pipedream_flush",
        "default_dp_type": plan.default_dp_type,
        "vtp": plan.vocab.tp,
        "vsp": int(plan.vocab.ulysses),
        "embed_sdp": int(plan.vocab.zero3),
        "vocab_sdp": int(plan.vocab.zero3),
    }
    return document


def strategy_file_name(
    *,
    model_name: str,
    num_nodes: int,
    gpus_per_node: int,
    memory_gib: float,
    precision: str,
    settle_bsz: int | None = None,
    disabled: Sequence[str] = (),
) -> str:
    """Return the documented file name; `disabled` are dimension names such as `tp`, `ckpt`."""
    # a name may be a path, or hold blanks
    safe_name = "".join(c if c.isalnum() or c in "-_.[]" else "_" for c in model_name) or "model"
    batch = f"_bsz{settle_bsz}" if settle_bsz else ""
    off = f"_[{'_'.join((*disabled, 'off'))}]" if disabled else ""
    return (
        f"galvatron_config_{safe_name}_{num_nodes}nodes_{gpus_per_node}gpus_per_node_"
        f"{round(memory_gib, 2):g}GB_{precision}{batch}{off}.json"
    )


def write_strategy(plan: Plan, path: Path | str) -> None:
    """Write the strategy file of a plan, atomically."""
    write_document(path, strategy_document(plan))


def read_strategy(
    source: Path | str | Mapping[str, object] | PlanDocument,
    *,
    world_size: int | None = None,
    path: Path | str = "plan",
) -> Plan:
    """Return the plan in a strategy file, a plan file or the content of either.

    Parameters
    ----------
    world_size : number of GPUs for files that do not say it; when both are known the file wins.
    path : where a content comes from, for errors.

    Raises
    ------
    DocumentError
        On any unusable value, naming the key, the value and what was expected.
    """
    if isinstance(source, PlanDocument):
        document = source
    elif isinstance(source, Mapping):
        document = PlanDocument.parse(source, path)
    else:
        path, document = source, PlanDocument.read(source)
    if document.plan is None:
        raise DocumentError(
            path,
            "holds no plan, because the search found none that fits",
            key="plan",
            remedy="search again with a larger --memory-constraint",
        )
    reader = _Reader(path, document.plan)
    if "tp_size_list" in document.plan or "pp_size" in document.plan:
        return _read_paddle(reader, world_size)
    return _read_galvatron(reader, world_size)


class _Reader:
    """Takes typed values out of one strategy object; every failure is one DocumentError."""

    def __init__(self, path: Path | str, values: Mapping[str, object]) -> None:
        self.path = path
        self.values = values

    def fail(self, key: str, problem: str, remedy: str | None = None) -> DocumentError:
        return DocumentError(self.path, problem, key=key, remedy=remedy)

    def check_keys(self, known: Sequence[str]) -> None:
        for key in self.values:
            if key not in known and not key.startswith("_"):
                near = nearest(key, known, 0.5)
                hint = f"did you mean {near!r}?" if near else "remove it"
                raise self.fail(key, f"unknown key with value {shorten(self.values[key])}", hint)

    def _integer(self, key: str, value: object, low: int, high: int, expected: str) -> int:
        number: int | None = None
        # true is an answer to yes or no, and no degree
        if isinstance(value, bool) and (low, high) == (0, 1):
            number = int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, float) and math.isfinite(value) and value.is_integer():
            number = int(value)
        elif isinstance(value, str):
            number = int(value) if _is_digits(value) else None
        if number is None or not low <= number <= high:
            raise self.fail(key, f"expected {expected}, got {shorten(value)}")
        return number

    def count(self, key: str, default: int | None = None) -> int:
        if key not in self.values:
            if default is None:
                raise self.fail(key, "is missing", "add it to the strategy")
            return default
        return self._integer(key, self.values[key], 1, _MAX_DEGREE, "a positive integer")

    def flag(self, key: str, default: bool = False) -> bool:
        if key not in self.values:
            return default
        return bool(self._integer(key, self.values[key], 0, 1, "0 or 1"))

    def choice(self, key: str, names: Mapping[str, _T], default: _T) -> _T:
        if key not in self.values:
            return default
        value = self.values[key]
        if not isinstance(value, str) or value not in names:
            expected = " or ".join(repr(name) for name in names)
            raise self.fail(key, f"expected {expected}, got {shorten(value)}")
        return names[value]

    def numbers(
        self, key: str, low: int, high: int, expected: str, length: int | None = None
    ) -> tuple[int, ...] | None:
        if key not in self.values:
            return None
        value = self.values[key]
        items: Sequence[object]
        if isinstance(value, str):
            items = [part.strip() for part in value.strip().strip(",").split(",")]
        elif isinstance(value, list):
            items = value
        else:
            items = [value]
        numbers = []
        for position, item in enumerate(items):
            text = f"{expected} as entry {position} of a comma list"
            numbers.append(self._integer(key, item, low, high, text))
        if length is not None and len(numbers) != length:
            has = format_count(len(numbers), "entry", "entries")
            raise self.fail(key, f"has {has} where {length} layers are described")
        return tuple(numbers)

    def degrees(self, key: str, length: int | None = None) -> tuple[int, ...] | None:
        return self.numbers(key, 1, _MAX_DEGREE, "a positive integer", length)

    def flags(self, key: str, length: int) -> tuple[int, ...] | None:
        return self.numbers(key, 0, 1, "0 or 1", length)

    def required_degrees(self, key: str, length: int | None = None) -> tuple[int, ...]:
        values = self.degrees(key, length)
        if values is None:
            raise self.fail(key, "is missing", "add it to the strategy")
        return values

    def world_size(self, given: int | None) -> int:
        if "world_size" in self.values:
            return self.count("world_size")
        if given is None:
            raise self.fail(
                "world_size",
                "is missing, as in files of older releases",
                "give --num-nodes and --num-gpus-per-node",
            )
        return given


def _read_galvatron(reader: _Reader, world_size: int | None) -> Plan:
    """Read the spellings v2.0 to newest and the runtime's, which differ in optional keys only."""
    reader.check_keys(_GALVATRON_KEYS)
    tp = reader.required_degrees("tp_sizes_enc")
    n = len(tp)
    zeros = (0,) * n
    if "dp_types_enc" not in reader.values:
        raise reader.fail("dp_types_enc", "is missing", "add it to the strategy")
    stages = reader.count("pp_deg")
    for key in ("ep_sizes_enc", "tp_of_ep_sizes_enc"):
        if any(value != 1 for value in reader.degrees(key, n) or ()):
            raise reader.fail(
                key, f"holds {shorten(reader.values[key])}", "only expert degree 1 is supported"
            )
    if reader.count("vcp", 1) != 1:
        raise reader.fail(
            "vcp",
            f"expected 1, got {shorten(reader.values['vcp'])}",
            "a context degree of the vocabulary layers is not supported",
        )
    if "embed_sdp" in reader.values and "vocab_sdp" in reader.values:
        both = (reader.flag("embed_sdp"), reader.flag("vocab_sdp"))
        if both[0] != both[1]:
            raise reader.fail(
                "vocab_sdp",
                f"is {int(both[1])} while 'embed_sdp' is {int(both[0])}",
                "they name one decision; make them equal",
            )
    world = reader.world_size(world_size)
    return _plan(
        world_size=world,
        stage_sizes=_stage_sizes(reader, stages, n),
        num_stages=stages,
        tp=tp,
        cp=reader.degrees("cp_sizes_enc", n) or (1,) * n,
        consecutive=reader.flags("tp_consecutive_flags", n) or (1,) * n,
        ulysses=reader.flags("use_sp", n) or zeros,
        zero3=reader.flags("dp_types_enc", n) or zeros,
        checkpoint=reader.flags("checkpoint", n) or zeros,
        vocab=VocabStrategy(
            tp=reader.count("vtp", 1),
            ulysses=reader.flag("vsp"),
            zero3=reader.flag("embed_sdp") or reader.flag("vocab_sdp"),
        ),
        global_batch=reader.count("global_bsz"),
        num_microbatches=reader.count("chunks", 1),
        # What the runtimes assume of files that do not say it.
        pipeline_type=reader.choice("pipeline_type", _PIPELINE_NAMES, "gpipe"),
        default_dp_type=reader.choice("default_dp_type", _DP_NAMES, "ddp"),
    )


def _stage_sizes(reader: _Reader, stages: int, num_layers: int) -> tuple[int, ...]:
    sizes = reader.degrees("pp_division")
    if sizes is None:  # oldest files: even, the remainder on the last stage
        each, rest = divmod(num_layers, stages)
        if each == 0:
            raise reader.fail(
                "pp_deg", f"expected at most {num_layers} stages for as many layers, got {stages}"
            )
        return (each,) * (stages - 1) + (each + rest,)
    if len(sizes) != stages:
        has = format_count(len(sizes), "entry", "entries")
        raise reader.fail("pp_division", f"has {has} where pp_deg is {stages}")
    if sum(sizes) != num_layers:
        shown = " + ".join(map(str, sizes)) if len(sizes) <= 16 else "the sum"
        raise reader.fail(
            "pp_division", f"{shown} = {sum(sizes)} != {num_layers} layers of tp_sizes_enc"
        )
    return sizes


def _read_paddle(reader: _Reader, world_size: int | None) -> Plan:
    """Read PaddleNLP's fine_grained_config.json, whose ZeRO stage is given per layer."""
    reader.check_keys(_PADDLE_KEYS)
    tp = reader.required_degrees("tp_size_list")
    n = len(tp)
    stages = reader.count("pp_size")
    dp = reader.required_degrees("dp_size_list", n)
    worlds = {stages * t * d for t, d in zip(tp, dp, strict=True)}
    if len(worlds) > 1:
        raise reader.fail(
            "dp_size_list",
            f"tp * dp * pp differs between layers ({', '.join(map(str, sorted(worlds)[:4]))})",
            "every layer must use all GPUs of its stage",
        )
    world = worlds.pop()
    for given in (world_size if "world_size" not in reader.values else reader.count("world_size"),):
        if given is not None and given != world:
            raise reader.fail(
                "dp_size_list",
                f"tp({tp[0]}) * dp({dp[0]}) * pp({stages}) = {world} != world_size({given})",
            )
    sharding = reader.numbers("sharding_stage_list", 0, 3, "0, 2 or 3", n) or (0,) * n
    kinds = {stage for stage in sharding if stage != 3}
    # stage 1 shards the optimizer alone, which no plan says
    if 1 in kinds or len(kinds) > 1:
        raise reader.fail(
            "sharding_stage_list",
            f"holds the stages {', '.join(map(str, sorted(set(sharding))))}",
            "besides 3 a plan has one of 0 (ddp) and 2 (zero2) for all layers",
        )
    default: ZeroDefault = "zero2" if kinds == {2} else "ddp"
    index = reader.numbers("pp_stage_idx_list", 0, stages - 1, "a stage index below pp_size", n)
    if index is None:
        raise reader.fail("pp_stage_idx_list", "is missing", "add it to the strategy")
    if list(index) != sorted(index) or set(index) != set(range(stages)):
        raise reader.fail(
            "pp_stage_idx_list",
            f"expected 0 to {stages - 1} in order with no stage empty, got {shorten(list(index))}",
        )
    return _plan(
        world_size=world,
        stage_sizes=tuple(index.count(stage) for stage in range(stages)),
        num_stages=stages,
        tp=tp,
        cp=(1,) * n,
        consecutive=(1,) * n,
        ulysses=reader.flags("usp_flag_list", n) or (0,) * n,
        zero3=tuple(int(stage == 3) for stage in sharding),
        checkpoint=reader.flags("recompute_list", n) or (0,) * n,
        vocab=VocabStrategy(
            tp=reader.count("vtp", 1),
            ulysses=reader.flag("vsp_flag"),
            zero3=reader.flag("embed_sdp"),
        ),
        global_batch=reader.count("global_batch_size"),
        num_microbatches=reader.count("gradient_accumulation_steps"),
        pipeline_type=reader.choice("pipeline_type", _PIPELINE_NAMES, "1f1b"),
        default_dp_type=reader.choice("default_dp_type", _DP_NAMES, default),
    )


def _plan(
    *,
    tp: Sequence[int],
    cp: Sequence[int],
    consecutive: Sequence[int],
    ulysses: Sequence[int],
    zero3: Sequence[int],
    checkpoint: Sequence[int],
    world_size: int,
    num_stages: int,
    stage_sizes: tuple[int, ...],
    vocab: VocabStrategy,
    global_batch: int,
    num_microbatches: int,
    pipeline_type: PipelineType,
    default_dp_type: ZeroDefault,
) -> Plan:
    """Build the plan with one spelling of what has no meaning.

    A group of one rank is neither Ulysses nor strided, and a group of all ranks of a stage is
    consecutive whatever the flag says.
    """
    ranks = world_size // num_stages
    layers = tuple(
        LayerStrategy(
            tp=t,
            ulysses=bool(u) and t > 1,
            cp=c,
            zero3=bool(z),
            checkpoint=bool(k),
            strided=not consec and 1 < t < ranks,
        )
        for t, c, consec, u, z, k in zip(
            tp, cp, consecutive, ulysses, zero3, checkpoint, strict=True
        )
    )
    vocab = VocabStrategy(tp=vocab.tp, ulysses=vocab.ulysses and vocab.tp > 1, zero3=vocab.zero3)
    return Plan(
        world_size=world_size,
        num_stages=num_stages,
        stage_sizes=stage_sizes,
        layers=layers,
        vocab=vocab,
        global_batch=global_batch,
        num_microbatches=num_microbatches,
        pipeline_type=pipeline_type,
        default_dp_type=default_dp_type,
    )


def _is_digits(text: str) -> bool:
    # a limit before int(), which refuses thousands of digits
    return text.isascii() and text.isdigit() and len(text) <= 12
