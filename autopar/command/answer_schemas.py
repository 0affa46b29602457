"""Schema of `--json` answers: a common head, then the document of the command.

Unknown keys are errors in launch and plan files, so the keys that only answers contain, such as
those of the search, are defined here and not in the schemas of the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import field

from autopar.documents.checks import published
from autopar.documents.json import record_schema
from autopar.documents.plan import (
    BrokenRuleEntry,
    EngineEntry,
    FrontierEntry,
    ResultDocument,
)
from autopar.documents.strategy import Strategy
from autopar.exploration import ExplorationDocument
from autopar.records import Entry, Record, whole_number
from autopar.run.plan import Infeasibility
from autopar.training.launch_file import DegreesEntry, LaunchDocument, LaunchEntry


class AnswerErrorEntry(Entry):
    """Reason why a command has no answer."""

    kind: Literal[
        "option",
        "document",
        "input",
        "infeasible",
        "installation",
        "failure",
        "interrupted",
        "internal",
    ]
    message: str
    """Sentence printed on stderr."""
    file: str | None = None
    """Path of the document with the error; absent for other kinds."""
    key: str | None = None
    """Key in the document; absent for other kinds."""
    remedy: str | None = None
    """Suggested remedy for an error of a document."""
    rules: list[BrokenRuleEntry] | None = None
    """Rules of a run that the input breaks."""


_ANSWER_EXAMPLE: dict[str, Any] = {
    "schema": "autopar/answer/1",
    "command": "autopar-search",
    "release": "0.1.0",
    "exit_code": 2,
    "question": {"model": "llama3-8b", "hardware": "h100"},
    "notices": [],
    "error": {"kind": "option", "message": "--hardware h100: expected CARD:NODESxGPUS"},
}


@published("answer", example=_ANSWER_EXAMPLE)
class AnswerDocument(Entry, forbid_unknown_fields=False):
    """Output of `--json` of every command: these keys, then `error` or the keys of the command.

    The other keys depend on the command (`allOf`): `LaunchAnswer` or `PlanAnswer` of autopar-search
    and autopar-explain, an `exploration` of autopar-explore;
    docs/reference/json.md lists the others.
    """

    schema_: Literal["autopar/answer/1"] = field(name="schema")
    command: str
    release: str
    """Release of autopar."""
    exit_code: Annotated[int, whole_number(0)]
    """Exit code of the command; docs/reference/json.md has the table."""
    question: dict[str, Any]
    """Options as given, without those that name output files."""
    notices: list[str]
    """Sentences that the command prints before its answer."""
    error: AnswerErrorEntry | None = None


class EffortEntry(Record):
    """Effort of a search over the uniform plans of one engine."""

    degrees: int
    """Number of combinations of degrees whose lower bounds were computed."""
    launches: int
    """Number of candidate plans covered by the search."""
    complete: bool
    """False if the time limit ended the search."""
    gap: float | str | None
    """Upper bound of the gain of any other plan, as a fraction; `Infinity` if none was found in
    time."""
    timed: int
    """Number of candidates whose step time was estimated."""
    counted: int
    """Number of candidates whose memory was counted."""


class SearchedEntry(EngineEntry):
    """Result of one engine; with `launches` and `search` if its uniform plans were searched."""

    stack: str | None = None
    """Name of the software stack of the estimate."""
    launches: list[LaunchEntry] = field(default_factory=list)
    """The fastest plan, then plans with other degrees."""
    avoided: list[str] = field(default_factory=list)
    """Traits of the first of `launches` that the chosen plan avoids: `OOM probability` above 0.1 %,
    `activation offload`, `recomputation of several modules`, `context ranks`, `TP overlap`. Empty
    if the first is the chosen one."""
    safer: LaunchEntry | None = None
    """The fastest plan with an OOM probability of at most 0.1 %, if it is at most 3 % slower."""
    search: EffortEntry | None = None


class RemedyEntry(Record):
    """Suggested change of options with which a plan fits, and the fastest plan under it."""

    options: str
    """Options of the suggestion, as typed."""
    engine: str
    degrees: DegreesEntry
    tokens_per_s_per_gpu: float
    peak_bytes: int
    host_bytes: int
    """Host memory per GPU, bytes."""


class ClusterResult(Record):
    """Part of the cluster searched for `--goal` or `--use`, with its fastest uniform plan."""

    hardware: str
    gpus: int
    tokens_per_s: float | None
    """Throughput of the fastest plan, tokens/s over all GPUs; null if no plan fits or is legal, or
    if a bound excludes a better one than on another part."""
    reason: str
    """Why there is no throughput."""


class PartEntry(Record):
    """Part of the cluster that the plan uses, chosen by `--goal` or `--use`."""

    hardware: str
    """The part as value of `--hardware`."""
    gpus: int
    free_gpus: int
    """GPUs of the cluster that the plan does not use."""
    tokens_per_s: float
    """Throughput of the plan, tokens/s over all its GPUs."""
    whole_tokens_per_s: float | None
    """Throughput of the fastest plan on all GPUs; null without one, or if it was not searched."""
    proven: bool
    """False if the time limit ended the search of a part."""


class WhyNotPlanEntry(Record):
    """Another plan compared with the explained one, or the reason why there is none."""

    launch: LaunchEntry | None
    reason: str | None
    rules: list[BrokenRuleEntry] | None = None
    """Rules that exclude all plans."""
    gain: float | None
    """Relative gain in samples/s over the explained plan, as a fraction."""
    terms_s_per_sample: dict[str, float]
    """Seconds per sample by term in excess of the explained plan."""


class WhyNotEntry(WhyNotPlanEntry):
    """The fastest plan under a constraint."""

    rule: str


class BatchingEntry(Record):
    """Throughput and memory of a plan with one way to batch samples of different lengths."""

    batching: str
    """Value of `--batching`."""
    steps: int
    """Steps of the run: `--steps`, or one epoch of the samples."""
    row_tokens: float
    """Mean computed tokens of a sequence of a micro-batch, padding included."""
    real_share: float
    """Share of the computed tokens that is no padding."""
    step_time_s: float
    """Mean step time, that of the slowest data-parallel rank."""
    step_time_interval_s: list[float]
    """90 % interval of the step time."""
    real_tokens_per_s_per_gpu: float
    """Tokens without padding."""
    imbalance: float
    """Step time of the slowest data-parallel rank over the mean."""
    peak_bytes: dict[str, int]
    """Peak memory that 50, 90 and 99 % of the steps do not exceed (`p50`, `p90`, `p99`), and that
    of the longest row of the run (`max`)."""
    oom_probability: float
    """Probability that the run is out of memory in any of its steps."""
    steps_above_memory: float
    """Share of the steps whose peak exceeds the memory of the GPU without 1 GiB for CUDA."""


class LengthsEntry(Record):
    """Plan with the lengths of its samples (`--lengths`)."""

    samples: int
    mean_tokens: float
    cut: float
    """Share of the samples that are longer than the sequence length."""
    batchings: list[BatchingEntry]
    """The asked way to batch, then the others, the fastest first."""


class LaunchAnswer(LaunchDocument):
    """Answer of a search for uniform plans, or of `autopar-explain` for one, after the head."""

    engines: list[SearchedEntry] = field(default_factory=list)  # type: ignore[assignment]
    remedies: list[RemedyEntry] = field(default_factory=list)
    """Suggestions if no plan fits, smallest change of the training first."""
    part: PartEntry | None = None
    clusters_tried: list[ClusterResult] = field(default_factory=list)
    """Parts of the cluster searched with `part`."""
    frontier: list[FrontierEntry] = field(default_factory=list)
    """Best plans by memory budget, with `--frontier`."""
    lengths: LengthsEntry | None = None
    """The best plan with the samples of `--lengths`."""
    best: WhyNotPlanEntry | None = None
    """For `explain`: the fastest plan of its engine."""
    one_more_gib: WhyNotPlanEntry | None = None
    """For `explain`: the fastest plan if every GPU had one GiB more."""
    why_not: list[WhyNotEntry] = field(default_factory=list)


class FoundEntry(Record):
    """A plan that a search found, or the reason why there is none."""

    status: str
    plan: Strategy | None = None
    step_time_s: float | None = None
    samples_per_s: float | None = None
    infeasible: Infeasibility | None = None


class RuleEntry(FoundEntry):
    """The best plan under a constraint."""

    rule: str
    reason: str | None
    left_out: list[str]
    """Options that contradict the constraint and were ignored."""
    terms_s_per_sample: dict[str, float]


class PlanAnswer(ResultDocument):
    """Answer of a search for per-layer plans, or of `autopar-explain` for one."""

    best: FoundEntry | None = None
    """For `explain`: the best plan of the search space."""
    what_more_would_bring: list[dict[str, Any]] = field(default_factory=list)
    """For `explain`: effect of one more GiB or GB/s."""
    why_not: list[RuleEntry] = field(default_factory=list)
    part: PartEntry | None = None
    clusters_tried: list[ClusterResult] = field(default_factory=list)


_FORMS = (
    (("autopar-search", "autopar-explain"), (LaunchAnswer, PlanAnswer)),
    (("autopar-explore",), (ExplorationDocument,)),
)
"""(commands, record types of their documents); other commands have no schema after the head."""


def with_forms(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of answers: the head, then the document of each command.

    answer : schema of the head. Answers with the key `error` contain no document.
    """
    definitions = dict(answer["$defs"])
    rules = []
    for commands, models in _FORMS:
        for model in models:
            form = record_schema(model)
            definitions |= form.pop("$defs", {})
            form.pop("examples", None)
            form["properties"] = {**dict.fromkeys(answer["properties"], True), **form["properties"]}
            definitions[model.__name__] = form
        forms: list[dict[str, Any]] = [{"$ref": f"#/$defs/{model.__name__}"} for model in models]
        if ExplorationDocument in models:
            # Closed-form models print keys of the programs that they reproduce.
            forms.append({"not": {"required": ["format"]}})
        asked = {
            "properties": {"command": {"enum": list(commands)}},
            "not": {"required": ["error"]},
        }
        rules.append({"if": asked, "then": {"anyOf": forms}})
    return {**answer, "$defs": dict(sorted(definitions.items())), "allOf": rules}
