"""What stands behind the head of an answer, by command: keys that files of plans do not have.

A file of a launch or a plan is read strictly, so its schema has nothing of a search beside it. The
schema of answers is put together here of the head and these forms, whole in one file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import field

from autopar.documents.json import record_schema
from autopar.documents.plan import (
    BrokenRuleEntry,
    EngineEntry,
    ResultDocument,
)
from autopar.documents.strategy import Strategy
from autopar.exploration import ExplorationDocument
from autopar.records import Record
from autopar.run.plan import Infeasibility
from autopar.training.launch_file import DegreesEntry, LaunchDocument, LaunchEntry


class EffortEntry(Record):
    """What a search over the launches of one trainer did."""

    degrees: int
    """Combinations of degrees that were bounded."""
    launches: int
    """Launches among which the best is the fastest."""
    complete: bool
    """False where the time limit ended it."""
    gap: float | str | None
    """By how much another may be faster, as a share; `Infinity`: nothing was found in time."""
    timed: int
    """Launches whose step was priced."""
    counted: int
    """Launches whose memory was counted."""


class SearchedEntry(EngineEntry):
    """An engine's line, and of a trainer whose launches were searched all that was found."""

    stack: str | None = None
    """Software that its kernels are of."""
    launches: list[LaunchEntry] = field(default_factory=list)
    """The fastest, then those of other degrees."""
    search: EffortEntry | None = None


class RemedyEntry(Record):
    """What makes a launch fit where none does."""

    options: str
    """That say it, as typed."""
    engine: str
    degrees: DegreesEntry
    tokens_per_s_per_gpu: float
    peak_bytes: int
    host_bytes: int
    """On the host, for each GPU."""


class Tried(Record):
    """A part of the cluster that a goal was looked for in, and its fastest plan."""

    hardware: str
    gpus: int
    tokens_per_s: float | None
    """Of all its GPUs; null: nothing fits, or is legal."""
    reason: str


class AgainstEntry(Record):
    """Another launch beside the one that is explained, or why there is none."""

    launch: LaunchEntry | None
    reason: str | None
    rules: list[BrokenRuleEntry] | None = None
    """Rules that leave none."""
    gain: float | None
    """Its samples/s over those of the one that is explained, less 1."""
    terms_s_per_sample: dict[str, float]
    """By how much each term is longer."""


class WhyNotEntry(AgainstEntry):
    """The fastest launch under a rule."""

    rule: str


class LaunchAnswer(LaunchDocument):
    """What a search over launches answers, or `autopar-explain` of one, behind the head."""

    engines: list[SearchedEntry] = field(default_factory=list)  # type: ignore[assignment]
    remedies: list[RemedyEntry] = field(default_factory=list)
    """Where nothing fits: what would, what changes the training least first."""
    clusters_tried: list[Tried] = field(default_factory=list)
    """With `--goal cost` and `fewest-gpus`."""
    best: AgainstEntry | None = None
    """Of `explain`: the fastest launch of its trainer."""
    one_more_gib: AgainstEntry | None = None
    """Of `explain`: the fastest where every GPU has one GiB more."""
    why_not: list[WhyNotEntry] = field(default_factory=list)


class FoundEntry(Record):
    """A plan that a search found, or what is missing."""

    status: str
    plan: Strategy | None = None
    step_time_s: float | None = None
    samples_per_s: float | None = None
    infeasible: Infeasibility | None = None


class RuleEntry(FoundEntry):
    """The best plan under a rule."""

    rule: str
    reason: str | None
    left_out: list[str]
    """Options that exclude the rule, and were left away."""
    terms_s_per_sample: dict[str, float]


class PlanAnswer(ResultDocument):
    """What a search over plans whose layers may differ answers, or `autopar-explain` of one."""

    best: FoundEntry | None = None
    """Of `explain`: the best plan of the search space."""
    what_more_would_bring: list[dict[str, Any]] = field(default_factory=list)
    """Of `explain`: another GiB, another GB/s."""
    why_not: list[RuleEntry] = field(default_factory=list)
    clusters_tried: list[Tried] = field(default_factory=list)


_FORMS = (
    (("autopar-search", "autopar-explain"), (LaunchAnswer, PlanAnswer)),
    (("autopar-explore",), (ExplorationDocument,)),
)
"""Commands, and the documents that stand behind the head of their answers."""


def with_forms(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of answers with what stands behind the head, of all commands in one file.

    answer : the schema of the head. An error has no form: it ends the object.
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
            # closed forms print what their peers publish
            forms.append({"not": {"required": ["format"]}})
        asked = {
            "properties": {"command": {"enum": list(commands)}},
            "not": {"required": ["error"]},
        }
        rules.append({"if": asked, "then": {"anyOf": forms}})
    return {**answer, "$defs": dict(sorted(definitions.items())), "allOf": rules}
