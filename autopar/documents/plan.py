"""Reader and writer of plans: autopar's plan file, the output of `--json`, and strategy files.

The plan file (`RunDocument`) contains a run, its predicted figures and the options of the search,
for uniform and per-layer plans. `read_strategy` and `PlanDocument.read` read per-layer plans in all
formats; `search.planning.uniform.files` reads uniform plans. The strategy under the key `plan` is
defined in `autopar.documents.strategy`. Files are written atomically and reproducibly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from msgspec import Meta, Struct, field, to_builtins
from msgspec.structs import asdict

from autopar.documents.catalog import located_options
from autopar.documents.checks import STRATEGY, check_kind, check_version, published
from autopar.documents.json import load_object, read_record, rows_text
from autopar.documents.strategy import (
    Strategy,
    galvatron_document,
    parse_strategy,
    strategy_document,
)
from autopar.errors import DocumentError, InputError
from autopar.output import write_text
from autopar.records import Entry, KeyFault, Positive, Record, typed
from autopar.run.architecture import Model
from autopar.run.of_plan import plan_of_run
from autopar.run.plan import PUBLISHED_RUNS, Infeasibility, Plan, Prediction, StagePrediction
from autopar.run.run import Run, Word
from autopar.run.runtime import Runtime
from autopar.run.strategy import Strategy as RunStrategy
from autopar.sources import Source

# --- values ----------------------------------------------------------------------------------


# Values are written as they were read: an integer does not become a float.
_Number = Annotated[float, Meta(extra={"expected": "a number", "as_written": True})]
_Amount = Annotated[
    float, Meta(ge=0, extra={"expected": "a number of at least 0", "as_written": True})
]
"""Seconds, bytes or samples per second."""
_Count = Annotated[int, Meta(ge=0, extra={"expected": "a whole number of at least 0"})]
_Flag = bool
_Text = str
_Interval = Annotated[
    list[_Amount | None],
    Meta(min_length=2, max_length=2, extra={"expected": "two numbers of at least 0"}),
]
_Pair = Annotated[list[_Count], Meta(min_length=2, max_length=2)]
TypedOption = Annotated[
    bool | str | list[str], Meta(extra={"expected": "a text, true, false or a list of texts"})
]
"""Option of a command line as typed."""


class _Entry(Entry):
    """Object in a plan document; unknown and non-finite values are null."""


# --- predictions -----------------------------------------------------------------------------


class LayerRunEntry(_Entry):
    """Consecutive layers of a stage with equal type and strategy."""

    first_layer: _Count
    num_layers: _Count
    layer_type: _Count
    label: _Text
    """Short name of the strategy, e.g. `tp4-dp2-zero3-ckpt`."""
    time_s: dict[str, _Number | None]
    """Seconds by category, summed over these layers: per micro-batch, `tail` and `optimizer` per
    step."""
    memory_bytes: dict[str, _Number | None]
    """Memory of these layers on the stage, by category."""


class StageEntry(_Entry):
    """Prediction of a pipeline stage; all of its ranks are equal."""

    ranks: _Pair | None = None
    """First and last rank."""
    memory_interval_bytes: _Pair | None = None
    """Allocated and reserved bytes."""
    stage: _Count | None = None
    forward_s: _Amount | None = None
    """Forward of one micro-batch, without transfers."""
    backward_s: _Amount | None = None
    send_s: _Amount | None = None
    """Transfer of one micro-batch's activation to the next stage."""
    tail_s: _Amount | None = None
    """Exposed gradient synchronisation, parameter gathering and optimizer, once per step."""
    allocated_bytes: _Count | None = None
    reserved_bytes: _Count | None = None
    budget_bytes: _Count | None = None
    odds_of_oom: _Amount | None = None
    """OOM probability of a device with the budget, 0 to 1."""
    in_flight: _Count | None = None
    """Number of micro-batches whose activations are saved at once."""
    memory_bytes: dict[str, _Count] = field(default_factory=dict)
    """Allocated bytes by category; sums to `allocated_bytes`."""
    time_s: dict[str, _Number | None] = field(default_factory=dict)
    """Seconds of one micro-batch by category."""
    runs: list[LayerRunEntry] = field(default_factory=list)

    @classmethod
    def of(cls, stage: StagePrediction, ranks: int) -> Self:
        """Return the entry of a stage of `ranks` ranks."""
        # Ranks of a stage are consecutive.
        first = stage.stage * ranks
        content = plain(stage)
        content["runs"] = [LayerRunEntry(**run) for run in content["runs"]]
        interval = [content["allocated_bytes"], content["reserved_bytes"]]
        return cls(ranks=[first, first + ranks - 1], memory_interval_bytes=interval, **content)

    @property
    def tensor_bytes(self) -> int | None:
        """Tensor bytes within `allocated_bytes`, without communicator buffers; None if unknown."""
        if self.allocated_bytes is None:
            return None
        return self.allocated_bytes - self.memory_bytes.get("fixed", 0)

    def step_times(self, num_microbatches: int) -> dict[str, float] | None:
        """Return seconds per step of all forwards, of all backwards, and of the tail.

        None if the document contains only memory.
        """
        if self.forward_s is None or self.backward_s is None:
            return None
        return {
            "forward_s": num_microbatches * self.forward_s,
            "backward_s": num_microbatches * self.backward_s,
            "tail_s": self.tail_s or 0.0,
        }


class WidestCellEntry(_Entry):
    """Measured time whose spread moves the step time most."""

    name: _Text
    share: _Number | None
    """Contribution to the step-time variance that the spread of computation causes, 0 to 1."""


class ThroughputEntry(_Entry):
    """Step in the units of training logs, per GPU; intervals are null if unknown."""

    tokens_per_s_per_gpu: _Amount
    tokens_per_s_per_gpu_interval: _Interval | None = None
    """Slow and fast end, like all rate intervals here."""
    flop_per_s_per_gpu: _Amount | None = None
    """Model FLOP as counted by Megatron-LM, without recomputation; null: unknown sizes."""
    flop_per_s_per_gpu_interval: _Interval | None = None
    mfu: _Amount | None = None
    """Model FLOP utilisation: `flop_per_s_per_gpu` over the card's dense peak in the precision of
    the GEMMs, 0 to 1."""
    mfu_interval: _Interval | None = None
    hfu: _Amount | None = None
    """Hardware FLOP utilisation: like `mfu`, with recomputation."""
    hfu_interval: _Interval | None = None
    gpu_hours_per_billion_tokens: _Amount
    gpu_hours_per_billion_tokens_interval: _Interval | None = None
    """Low and high end."""
    cost_per_billion_tokens: _Amount | None = None
    """Cost at the given price of a GPU-hour; null without a price."""
    cost_per_billion_tokens_interval: _Interval | None = None


class PredictionEntry(_Entry):
    """Prediction of the plan, without step time and throughput, which are keys of the document."""

    step_time_interval_s: _Interval | None = None
    """Fast and slow end; null if no spread was measured."""
    interval_of: list[_Text] = field(default_factory=list)
    """Sources of the interval; empty unless it includes `computation` or published runs."""
    widest_cell: WidestCellEntry | None = None
    """Measured time of computation that widens the interval most."""
    waterfall_s: dict[str, _Number | None] = field(default_factory=dict)
    """Terms of the step time, in seconds."""
    problems: list[_Text] = field(default_factory=list)
    """Reasons why the plan is illegal or does not fit, each with its arithmetic."""
    stages: list[StageEntry] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Plan, prediction: Prediction) -> Self:
        """Return the entry of a prediction."""
        ranks = plan.world_size // plan.num_stages
        return cls(
            step_time_interval_s=plain(prediction.step_time_interval_s),
            **spread_of(prediction),
            waterfall_s=plain(prediction.waterfall_s),
            problems=list(prediction.problems),
            stages=[StageEntry.of(stage, ranks) for stage in prediction.stages],
        )


def spread_of(prediction: Prediction) -> dict[str, Any]:
    """Return the keys `interval_of` and `widest_cell` of a prediction, as far as known."""
    if PUBLISHED_RUNS in prediction.interval_of:
        return {"interval_of": list(prediction.interval_of)}
    if "computation" not in prediction.interval_of:
        return {}
    widest = prediction.widest_cell
    return {
        "interval_of": list(prediction.interval_of),
        "widest_cell": None if widest is None else WidestCellEntry(**plain(widest)),
    }


# --- further results -------------------------------------------------------------------------


class AlternativeEntry(_Entry):
    """Best plan that differs in kind from all better plans; see `differs_by`."""

    differs_by: _Text
    step_time_s: _Amount | None
    samples_per_s: _Amount | None
    bound_samples_per_s: _Amount | None
    probability_faster: _Number | None = None
    """Probability of being faster than the plan; absent without spread.

    It is the fraction of resampled measurements of computation with which this plan is faster. For
    estimates it is based on the spread of published runs.
    """
    plan: Strategy


class OptionsEntry(Entry, forbid_unknown_fields=False):
    """Options that determine the result, in base units; other keys are preserved."""

    mixed_precision: _Text | None = None
    sequence_parallel: _Flag | None = None
    """True if tensor-parallel layers use Megatron sequence parallelism."""
    async_grad_reduce: _Flag | None = None
    """True if gradients are reduced once per step, False for every micro-batch."""
    fp32_gradients: _Flag | None = None
    """True if gradients of a bf16 run have 4 bytes, False for 2."""
    engine: _Text | None = None
    """Engine whose plans were searched; absent if not given."""
    threads: _Count | None = None
    """Threads of one operation on a CPU that the inputs were measured with; absent otherwise."""

    def content(self) -> dict[str, Any]:
        """Return the given options by name."""
        return dict(sorted(super().content().items()))


class VersionsEntry(_Entry):
    """Versions that computed the plan."""

    autopar: _Text
    """Release of autopar."""
    core_interface: _Count | None = None
    """Interface version of the compiled core."""


class MemoryEntry(_Entry):
    """Memory per rank of one stage."""

    stage: _Count | None = None
    allocated_bytes: _Count | None = None
    reserved_bytes: _Count | None = None
    budget_bytes: _Count | None = None
    odds_of_oom: _Amount | None = None
    """OOM probability of a device with the budget, 0 to 1."""


class StatisticsEntry(_Entry):
    """Effort of a search."""

    states: _Count
    cpu_s: _Amount
    wall_s: _Amount


class BrokenRuleEntry(_Entry):
    """Broken rule of a run."""

    id: _Text
    """Stable name, such as `grid.dense`; docs/reference/rules.md lists all."""
    values: dict[str, Any]
    """Values that the rule reads, by name."""
    text: _Text


class EngineEntry(_Entry):
    """Fastest plan that one engine can run unchanged, or the reason why there is none."""

    engine: _Text
    samples_per_s: _Amount | None = None
    plan: Strategy | None = None
    """Per-layer plan; null if a uniform plan was searched."""
    launch: dict[str, Any] | None = None
    """All degrees of a uniform plan, in the format of `launch.degrees`."""
    options: _Text | None = None
    """Options of this search in addition to those given by the user."""
    reason: _Text | None = None
    rules: list[BrokenRuleEntry] | None = None
    """Rules that exclude all uniform plans; if there is a plan, the rules on adapters that exclude
    some of the others."""


class FrontierEntry(_Entry):
    """Best plan under one memory constraint."""

    memory_constraint_bytes: _Amount | None
    samples_per_s: _Amount | None
    step_time_s: _Amount | None
    plan: Strategy | None
    """Per-layer plan; null for a uniform plan."""
    engine: _Text | None = None
    """Engine of a uniform plan."""
    launch: dict[str, Any] | None = None
    """All degrees of a uniform plan, in the format of `launch.degrees`."""


# --- conversion to JSON ----------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a JSON value: objects for records, null for numbers that are not finite."""
    if isinstance(value, Struct):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    # bool first: it is an int in Python.
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return finite(value)
    if hasattr(value, "item"):  # numpy scalars
        return plain(value.item())
    return str(value)


def finite(value: float) -> float | None:
    """Return a finite number or None: JSON has neither NaN nor infinity."""
    return float(value) if math.isfinite(value) else None


# --- the documents ---------------------------------------------------------------------------

PLAN_FILE_FORMAT: Final = "autopar-plan"
PLAN_FILE_VERSION: Final = 1
RUN_FORMAT: Final = "autopar-run"
RUN_VERSION: Final = 2
"""Version of the plan file; its predecessors are `autopar-launch` and `autopar-plan`."""
PeakSource = Literal["allocated", "counted"]
"""Source of a measured peak: PyTorch's CUDA allocator, or a count of the model's tensors."""

AGAIN: Final = "Write the plan again with autopar-search"


class _Answer(_Entry):
    """First keys of the plan file and of the `--json` result: status, step time, throughput."""

    status: _Text | None = None
    """`optimal`, `within_gap`, `time_limit`, `infeasible`, or `evaluated` for a given plan."""
    legal: _Flag | None = None
    fits: _Flag | None = None
    step_time_s: _Amount | None = None
    replay_s: _Amount | None = None
    """Step time by simulation of the schedule."""
    samples_per_s: _Amount | None = None
    bound_samples_per_s: _Amount | None = None
    """Upper bound: no plan is faster."""
    gap: _Number | None = None
    """(bound - found) / found; 0 if optimal."""
    throughput: ThroughputEntry | None = None
    """Throughput in the units of training logs; absent without a step time."""


class PlanFigures(_Answer):
    """Keys of a plan file except for the plan: prediction, options and inputs."""

    prediction: PredictionEntry | None = None
    alternatives: list[AlternativeEntry] = field(default_factory=list)
    infeasibility: Infeasibility | None = None
    defaults_used: list[_Text] = field(default_factory=list)
    notes: list[_Text] = field(default_factory=list)
    """Derived, extrapolated or estimated inputs, as sentences."""
    estimated: _Flag = False
    """True if the numbers are based on datasheets."""
    synthetic: _Flag = False
    """True if an input only exercises the code and describes no real machine."""
    inputs: list[Source] = field(default_factory=list)
    options: OptionsEntry = field(default_factory=OptionsEntry)
    request: dict[str, TypedOption] = field(default_factory=dict)
    """Options as typed, by name without leading hyphens."""
    engines: list[EngineEntry] = field(default_factory=list)
    """Best plan of each engine, fastest first, if several were searched."""
    versions: VersionsEntry | None = None


# A file must contain these keys; a document made in Python has them by default.
@published("plan", required=("format", "version"))
class PlanDocument(PlanFigures):
    """Per-layer plan of a model with unknown sizes, with prediction and inputs.

    Earlier releases wrote it for all per-layer plans. The reader converts `autopar-run` files to
    this document.
    """

    format: Literal["autopar-plan"] = PLAN_FILE_FORMAT
    version: Literal[1] = PLAN_FILE_VERSION
    plan: Strategy | None = None
    """Null if the search found no plan."""

    @classmethod
    def read(cls, path: Path | str) -> PlanDocument:
        """Return the document of a plan file, a strategy file or printed JSON output.

        Raises DocumentError when the file is missing, is not JSON, was written by a newer version
        or contains an unusable value. Errors of the strategy itself are raised by `read_strategy`.
        """
        loaded = load_object(path, remedy="Write it with autopar-search")
        return cls.parse(loaded.data, path)

    @classmethod
    def parse(cls, data: Mapping[str, Any], path: Path | str = "plan") -> PlanDocument:
        """Return the document in a JSON object; raises DocumentError like `read`.

        path : origin of the object, for errors.
        """
        if data.get("format") == RUN_FORMAT:
            return RunDocument.parse(data, path).as_plan_document(path)
        if "format" in data:
            check_version(
                path,
                data,
                PLAN_FILE_FORMAT,
                PLAN_FILE_VERSION,
                give="Use the file of a per-layer plan, or a strategy file",
                again="search again",
            )
            return read_record(cls, path, data, remedy=AGAIN)
        if "status" in data or isinstance(data.get("plan"), Mapping):
            read = {key: value for key, value in data.items() if key in _READ_OF_RESULTS}
            return read_record(ResultDocument, path, read, remedy=AGAIN).as_plan_document()
        check_kind(path, data, STRATEGY, remedy="Use a plan or strategy file")
        # A strategy file contains only the plan.
        return cls(plan=dict(data))

    def write(self, path: Path | str) -> None:
        """Write the plan file atomically, byte for byte reproducibly; raises DocumentError."""
        write_document(path, self.content())

    def content(self) -> dict[str, Any]:
        """Return the object of the file: format, version, plan, then the figures."""
        content = {"format": self.format, "version": self.version, "plan": self.plan}
        return content | super().content()

    def located_request(
        self, path: Path | str, typed: Collection[str] = ()
    ) -> tuple[dict[str, bool | str | list[str]], list[str]]:
        """Return (request, notes) with input paths relative to the current folder.

        path : the plan file.
        typed : options given on the command line, which override those of the file.
        """
        return located_options(self.request, path, typed)

    @property
    def is_strategy(self) -> bool:
        """True for a strategy file, which contains a plan and nothing else."""
        return self.given == {"plan"}

    @property
    def stages(self) -> list[StageEntry]:
        """Predicted stages; empty without a prediction."""
        return [] if self.prediction is None else self.prediction.stages

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Step-time interval (low, high) from the spread of measurements; None without one."""
        ends = self.prediction.step_time_interval_s if self.prediction is not None else None
        low, high = ends or (None, None)
        return None if low is None or high is None else (low, high)

    @property
    def basis(self) -> str | None:
        """Basis of figures that are not measured, in words; None if measured or unknown."""
        if self.synthetic:
            return "numbers that only exercise the code"
        if self.estimated:
            return "estimates from datasheets, not on measurements of this machine"
        return None

    def changed_inputs(self, sources: Sequence[Source]) -> list[str]:
        """Return the file names of inputs that changed since the plan was written.

        sources : current inputs, compared by role and SHA-256.
        """
        digests = {item.role: item.sha256 for item in self.inputs}
        changed = []
        for source in sources:
            old = digests.get(source.role)
            # Estimates and older files have no digest to compare.
            if old and source.sha256 and old != source.sha256:
                changed.append(Path(source.path).name)
        return list(dict.fromkeys(changed))  # a card is read for times and for bandwidths

    def peak_bytes(self, source: PeakSource) -> list[int | None]:
        """Return the predicted bytes of each stage that a measured peak is compared with.

        source : origin of the measured peak, `allocated` by PyTorch's CUDA allocator, or `counted`
            tensors of the model.
        """
        if self.holds_buffers(source):
            return [stage.allocated_bytes for stage in self.stages]
        return [stage.tensor_bytes for stage in self.stages]

    def holds_buffers(self, source: PeakSource) -> bool:
        """Return True if a measured peak includes the memory predicted as `fixed`.

        The allocator includes the receive buffers of pipelines; a count contains only tensors of
        the model. Neither includes the communicators. Estimated figures predict communicators and
        receive buffers together.
        """
        return source == "allocated" and self.basis is None


class HardwareEntry(Record):
    """Cluster of a run."""

    card: str
    """Name of the device's datasheet, or of a measured cluster."""
    num_nodes: Positive
    """Number of nodes."""
    num_gpus_per_node: Positive
    """GPUs per node."""


# A file must contain these keys; a document made in Python has them by default.
@published(
    "run",
    required=(
        *("format", "version", "model", "strategy", "runtime", "seq_length", "gpu", "hardware"),
    ),
)
class RunDocument(PlanFigures):
    """autopar's plan file: a run, the options of its search, and its predicted figures."""

    format: Literal["autopar-run"] = RUN_FORMAT
    version: Literal[2] = RUN_VERSION
    name: str = ""
    model: Model
    strategy: RunStrategy
    runtime: Runtime
    seq_length: Positive
    """Sequence length, tokens."""
    gpu: str
    """Name of the device, which determines default kernels."""
    steps: Positive | None = None
    """Number of steps; null stands for thousands of steps."""
    unread: tuple[Word, ...] = ()
    """Arguments of a launch script that no other key contains."""
    hardware: HardwareEntry
    price: dict[str, Any] | None = None
    """Figures of a uniform plan, in the format of `autopar check --json`; null for a per-layer
    plan, whose figures are `prediction`."""

    def __post_init__(self) -> None:
        """Raise KeyFault unless stages and splits cover each layer of the model once."""
        strategy, number = self.strategy, self.model.num_layers
        if len({len(stage) for stage in strategy.stages}) > 1:
            raise KeyFault("strategy.stages", "the stages have different numbers of chunks")
        chunks = [chunk for stage in strategy.stages for chunk in stage]
        placed = sorted(layer for chunk in chunks for layer in chunk.layers)
        if len(placed) != number or placed != [*range(number)]:
            raise KeyFault(
                "strategy.stages", f"the stages do not hold each of {number} layers once"
            )
        if strategy.num_layers != number:
            raise KeyFault(
                "strategy.layers",
                f"the splits are of {strategy.num_layers} layers, the model has {number}",
            )

    @classmethod
    def of(cls, run: Run, hardware: HardwareEntry, figures: Mapping[str, Any]) -> RunDocument:
        """Return the document of a run; figures : values of the other keys."""
        own = {name: getattr(run, name) for name in Run.__struct_fields__}
        return cls(**figures, format=RUN_FORMAT, version=RUN_VERSION, **own, hardware=hardware)

    @classmethod
    def read(cls, path: Path | str) -> RunDocument:
        """Return the document of a file; raises DocumentError if it is unusable."""
        return cls.parse(load_object(path).data, path)

    @classmethod
    def parse(cls, data: Mapping[str, Any], path: Path | str = "plan") -> RunDocument:
        """Return the document of a parsed JSON object, as `read` does; `path` is for errors."""
        check_version(
            path, data, RUN_FORMAT, RUN_VERSION, give="Use a plan file", again="search again"
        )
        return read_record(cls, path, data, remedy=AGAIN)

    @property
    def run(self) -> Run:
        """Run of the document."""
        return Run(**{name: getattr(self, name) for name in Run.__struct_fields__})

    @property
    def is_uniform(self) -> bool:
        """True if the figures are those of a uniform plan."""
        return self.price is not None

    def content(self) -> dict[str, Any]:
        """Return the object of the file: format, version, the run, then the figures."""
        run = to_builtins(self.run, order="deterministic")
        figures = {name: one for name, one in super().content().items() if name not in run}
        return {"format": self.format, "version": self.version, **run, **figures}

    def text(self) -> str:
        """Return the text of the file, with numbers of a list in rows."""
        return rows_text(self.content())

    def as_plan_document(self, path: Path | str) -> PlanDocument:
        """Return the equivalent document of a per-layer plan.

        path : origin of the document, for errors.

        Raises DocumentError for properties of the run that a per-layer plan cannot express.
        """
        same = {key: getattr(self, key) for key in self.given & _FIGURES}
        runtime = self.runtime
        if self.is_uniform:
            same["options"] = OptionsEntry(
                mixed_precision=runtime.precision.kind,
                sequence_parallel=self.run.split.sequence_parallel,
                async_grad_reduce=not runtime.states.each_micro_batch,
                engine=runtime.engine,
            )
        try:
            plan = plan_of_run(self.run)
        except InputError as error:
            raise DocumentError(path, error.problem, key="strategy", remedy=error.remedy) from None
        return PlanDocument(plan=strategy_document(plan), **same)


@published("result")
class ResultDocument(_Answer):
    """Object printed by `autopar-search --json`; some keys are present only where they apply."""

    memory: list[MemoryEntry] = field(default_factory=list)
    plan: Strategy | None = None
    alternatives: list[AlternativeEntry] = field(default_factory=list)
    defaults_used: list[_Text] = field(default_factory=list)
    search: StatisticsEntry | None = None
    problems: list[_Text] = field(default_factory=list)
    """Reasons why an evaluated plan is illegal or does not fit."""
    prediction: PredictionEntry | None = None
    estimated: _Flag = False
    options: OptionsEntry = field(default_factory=OptionsEntry)
    request: dict[str, TypedOption] = field(default_factory=dict)
    step_time_interval_s: _Interval | None = None
    interval_of: list[_Text] = field(default_factory=list)
    widest_cell: WidestCellEntry | None = None
    synthetic: _Flag = False
    infeasible: Infeasibility | None = None
    frontier: list[FrontierEntry] = field(default_factory=list)
    engines: list[EngineEntry] = field(default_factory=list)
    """Best plans of all engines, fastest first, if all were searched."""

    def as_plan_document(self) -> PlanDocument:
        """Return the equal plan document; without a prediction its stages contain only memory."""
        prediction = self.prediction
        if prediction is None and (self.memory or self.step_time_interval_s is not None):
            prediction = PredictionEntry(
                step_time_interval_s=self.step_time_interval_s,
                stages=[StageEntry(**asdict(row)) for row in self.memory],
            )
        same = {key: getattr(self, key) for key in self.given & _SAME}
        return PlanDocument(**same, prediction=prediction)


_FIELDS = frozenset(PlanDocument.__struct_fields__)
_FIGURES = frozenset(PlanFigures.__struct_fields__)
_SAME = _FIELDS & frozenset(ResultDocument.__struct_fields__) - {"prediction"}
_READ_OF_RESULTS = _SAME | {"prediction", "memory", "step_time_interval_s"}
"""Keys read from printed output; exports print plans too, with other contents under other keys."""


def document_text(document: Mapping[str, object]) -> str:
    """Return the text of a JSON document, keys in the given order."""
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def write_document(path: Path | str, document: Mapping[str, object]) -> None:
    """Write a JSON document atomically, keys in the given order.

    Raises DocumentError when the file cannot be written.
    """
    target = Path(path)
    try:
        write_text(target, document_text(document))
    except OSError as error:
        raise DocumentError(
            target,
            f"cannot be written ({error.strerror or error})",
            remedy="Use another --output-config-path",
        ) from None


# --- strategies as files ---------------------------------------------------------------------


def write_strategy(plan: Plan, path: Path | str) -> None:
    """Write the strategy file of a plan in Galvatron's format, atomically.

    Raises InputError if the format cannot express the plan, DocumentError if writing fails.
    """
    write_document(path, galvatron_document(plan))


@typed
def read_strategy(
    source: Path | str | Mapping[str, object] | PlanDocument,
    *,
    world_size: Positive | None = None,
    num_layers: Positive | None = None,
    path: Path | str = "plan",
) -> Plan:
    """Return the plan in a strategy file, a plan file, or the parsed content of either.

    world_size : number of GPUs for files without it; a number in the file has priority.
    num_layers : layers of the model, for files without their number.
    path : origin of a content, for errors.

    Raises DocumentError on any unusable value, with the key, the value and the expected values.
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
            "no plan is given, because the search found none that fits",
            key="plan",
            remedy="Search again with a larger --memory-constraint",
        )
    return parse_strategy(document.plan, path, world_size, num_layers)
