"""The object that `autopar-explore --json` prints for its combinations, and its parts.

What a combination is and how it is searched is `search.questions.explore`; a single plan's
documents are in `autopar.documents.plan`.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from autopar.documents.checks import published
from autopar.records import Entry
from autopar.training.launch_file import DegreesEntry

_EXAMPLE: dict[str, Any] = {
    "format": "autopar-exploration",
    "version": 1,
    "by": "tokens",
    "complete": True,
    "choices": {"model": ["llama3-8b"], "hardware": ["h100:1x8"], "global-batch-size": ["64"]},
    "request": {"mixed-precision": "bf16"},
    "groups": [
        {
            "trained": {"model": "llama3-8b"},
            "answers": [
                {
                    "choice": {
                        "model": "llama3-8b",
                        "hardware": "h100:1x8",
                        "global-batch-size": "64",
                    },
                    "status": "found",
                    "rank": 1,
                    "step_time_s": 6.25,
                    "step_time_interval_s": [6.25, 8.5],
                }
            ],
        }
    ],
    "effects": [],
}


class _Entry(Entry):
    """An object of the document; what is unknown is absent or null."""


class ChoiceEntry(_Entry):
    """One combination, and the plan that its search found."""

    choice: dict[str, str]
    """Option without hyphens in front -> what was typed."""
    status: Literal["found", "no plan", "not tried"]
    reason: str = ""
    """Why there is no plan; of a search that was stopped early, how far it may be from the best."""
    rank: int | None = None
    """In its group, from 1."""
    engine: str | None = None
    """Whose launch or plan it is; null: whatever runs it."""
    num_gpus: int | None = None
    global_batch: int | None = None
    tokens_per_sample: int | None = None
    step_time_s: float | None = None
    step_time_interval_s: list[float] | None = None
    """The two ends of 90 %; null where nothing is known of the error."""
    tokens_per_s_per_gpu: float | None = None
    interval_tokens_per_s_per_gpu: list[float] | None = None
    """The same ends, the slow one first."""
    mfu: float | None = None
    """FLOP/s of the model over the peak of the card, 0 to 1."""
    reserved_bytes: int | None = None
    budget_bytes: int | None = None
    """Of the fullest stage."""
    cost_per_mtoken: float | None = None
    """Of a million tokens, in the currency of the prices."""
    summary: str | None = None
    """The plan in a line."""
    degrees: DegreesEntry | None = None
    """Of a launch, as a launch file has them."""
    plan: dict[str, Any] | None = None
    """Of a plan whose layers may differ: its strategy, as a strategy file has it."""
    plan_file: str | None = None
    """Where `--output-config-path` put it."""
    estimated: bool | None = None
    """Some input was not measured."""
    defaults_used: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class LeadEntry(_Entry):
    """How far the first answer of a group is ahead of another: the second, the first elsewhere."""

    over: int
    """Rank of the other."""
    ratio: float
    """Value of the other over that of the first, 1 and more."""
    intervals_overlap: bool | None = None
    """Of their 90 %; null where the next one says more, or an interval is not known."""
    probability_faster: float | None = None
    """Of two plans of one cluster and trainer, whose errors they share."""


class GroupEntry(_Entry):
    """The answers for one model at one length."""

    trained: dict[str, str]
    leads: list[LeadEntry] = field(default_factory=list)
    answers: list[ChoiceEntry]
    """In their order, those without a plan last."""


class EffectEntry(_Entry):
    """What an option is worth: the best over the worst of its values, all else equal."""

    option: str
    ratio: float
    """Geometric mean of the comparisons."""
    comparisons: int
    best: str
    """The value that is most often the best, `wins` times."""
    wins: int


@published("exploration", example=_EXAMPLE)
class ExplorationDocument(_Entry):
    """The answers of `autopar-explore` by what is trained, each group in its order."""

    format: Literal["autopar-exploration"]
    version: Literal[1]
    by: Literal["tokens", "step", "cost"]
    """What the order is by."""
    complete: bool
    """False after Ctrl-C: what was searched until then."""
    choices: dict[str, list[str]]
    """Option -> its values as typed."""
    request: dict[str, bool | str | list[str]]
    """The options that all combinations share, as typed."""
    groups: list[GroupEntry]
    effects: list[EffectEntry]
