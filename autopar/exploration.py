"""Schema of the object that `autopar-explore --json` prints for its combinations.

`search.questions.explore` defines the combinations and searches them; documents of a single plan
are in `autopar.documents.plan`.
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
    """An object of the document; unknown values are absent or null."""


class ChoiceEntry(_Entry):
    """One combination of options, and the best plan for it."""

    choice: dict[str, str]
    """Option without its hyphens -> typed value."""
    status: Literal["found", "no plan", "not tried"]
    reason: str = ""
    """Reason why there is no plan, or distance to the best for a search that was stopped early."""
    rank: int | None = None
    """Rank in its group, from 1."""
    engine: str | None = None
    """Engine of the plan; null for a plan that is independent of the engine."""
    num_gpus: int | None = None
    global_batch: int | None = None
    tokens_per_sample: int | None = None
    step_time_s: float | None = None
    step_time_interval_s: list[float] | None = None
    """90 % interval of the step time, seconds; null if the error is unknown."""
    tokens_per_s_per_gpu: float | None = None
    interval_tokens_per_s_per_gpu: list[float] | None = None
    """90 % interval of the tokens/s/GPU, the slower end first."""
    mfu: float | None = None
    """Model FLOP/s over the peak of the card, 0 to 1."""
    reserved_bytes: int | None = None
    budget_bytes: int | None = None
    """Memory budget of the peak stage, bytes."""
    cost_per_mtoken: float | None = None
    """Cost of a million tokens, in the currency of the prices."""
    summary: str | None = None
    """The plan in one line."""
    degrees: DegreesEntry | None = None
    """Degrees of a uniform plan, as in `--json` of a search."""
    plan: dict[str, Any] | None = None
    """Strategy of a per-layer plan, as in a strategy file."""
    plan_file: str | None = None
    """Path of the plan file below `--output-config-path`."""
    estimated: bool | None = None
    """True if some input was not measured."""
    defaults_used: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class LeadEntry(_Entry):
    """Lead of the best answer of a group over the second, or over the best on other hardware."""

    over: int
    """Rank of the other answer."""
    ratio: float
    """Value of the other answer over that of the first, at least 1."""
    intervals_overlap: bool | None = None
    """True if the 90 % intervals overlap; null if unknown or if `probability_faster` is given."""
    probability_faster: float | None = None
    """Probability that the best answer is faster; null unless both have one cluster and engine, so
    that the errors of the estimates are correlated."""


class GroupEntry(_Entry):
    """Answers for one model at one sequence length."""

    trained: dict[str, str]
    leads: list[LeadEntry] = field(default_factory=list)
    answers: list[ChoiceEntry]
    """Answers in order, those without a plan last."""


class EffectEntry(_Entry):
    """Effect of an option: best over worst of its values, all else equal."""

    option: str
    ratio: float
    """Geometric mean of the comparisons."""
    comparisons: int
    best: str
    """The value that is the best most often, `wins` times."""
    wins: int


@published("exploration", example=_EXAMPLE)
class ExplorationDocument(_Entry):
    """Answers of `autopar-explore`, grouped by model and sequence length, best first in a group."""

    format: Literal["autopar-exploration"]
    version: Literal[1]
    by: Literal["tokens", "step", "cost"]
    """Criterion of the order."""
    complete: bool
    """False after Ctrl-C, when only part of the combinations was searched."""
    choices: dict[str, list[str]]
    """Option -> its values as typed."""
    request: dict[str, bool | str | list[str]]
    """Options common to all combinations, as typed."""
    groups: list[GroupEntry]
    effects: list[EffectEntry]
