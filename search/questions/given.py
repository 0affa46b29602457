"""Time and memory of given plans, read from a plan, strategy or answer file or a launch script.

`autopar-search --evaluate`, `autopar-explain` and `autopar-compare` print them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from autopar.answer import Answer
from autopar.documents.plan import PlanDocument
from autopar.records import (
    Record,
    content_of,
    replace,
)
from search.request.request import Request

if TYPE_CHECKING:
    from autopar.run.plan import Plan, Prediction
    from search.planning.session import Session
    from search.planning.uniform.answer import EngineResult, UniformResult as Launches
    from search.show.pictures.files import Pictures

_PRICING_DEFAULTS = (
    *("--hardware", "--time-profiling-path", "--memory-constraint", "--time-profile-mode"),
    *("--sequence-parallel", "--no-sequence-parallel"),
)
"""Options whose defaults affect the estimate of a plan; the plan sets others, such as the batch."""


class GivenLaunch(Record):
    """A uniform plan of a file, with its time and memory."""

    found: Launches
    request: Mapping[str, object]
    """Options that reproduce the plan."""

    @property
    def one(self) -> EngineResult:
        """Result of the engine, with this plan as its only solution."""
        return self.found.engines[0]

    @property
    def answer(self) -> Answer:
        """Answer record for reports."""
        from search.planning.uniform.summary import summary_of

        return summary_of(self.found)

    @property
    def subject(self) -> tuple[str, str, int]:
        """Model, cluster and sequence length in tokens."""
        question = self.found.question
        cluster = f"{question.card.name}_{question.num_nodes}x{question.gpus_per_node}"
        return question.spec.name, cluster, question.job.seq

    @property
    def degrees(self) -> dict[str, Any]:
        """Engine and parallel degrees by name."""
        from search.planning.uniform.files import degrees_entry

        assert self.one.best is not None, "it was priced"
        entry = degrees_entry(self.one.best.choice, self.found.question.job.world)
        return {"engine": self.one.engine.name, **asdict(entry)}

    def draw(self, pictures: Pictures) -> Mapping[Path, str]:
        """Return the pictures of the step, as file contents by path."""
        return pictures.of_answer(self.found, curves=False)

    def document(self, asked: Mapping[str, object]) -> dict[str, Any]:
        """Return the object of `--json`.

        asked : options to store: `request` with paths relative to the JSON file
        """
        from search.show.uniform_files import launch_document

        document = content_of(launch_document(self.found, asked), whole=True)
        return {**document, "status": "evaluated"}


def given_launch(
    path: str,
    typed: Mapping[str, object],
    notice: Callable[[str], None],
    gpu_hour_price: float | None = None,
) -> GivenLaunch:
    """Return the uniform plan of a file, with its time and memory; raises InputError.

    typed : options given by the user, which override those of the file
    notice : receives messages about the inputs
    gpu_hour_price : price of a GPU-hour; None for no cost
    """
    from search.engines.table import engine_space
    from search.planning.uniform.answer import UniformResult as Launches, evaluated
    from search.planning.uniform.imports import launch_in

    own = launch_in(path, typed, notice)
    engine = engine_space(own.engine)
    question = replace(own.question, engines=(engine,), top=0, within=0.0, price=gpu_hour_price)
    one = evaluated(question, engine, own.choice, own.run)
    return GivenLaunch(found=Launches(question=question, engines=(one,)), request=own.request)


class GivenPlan(Record, eq=False):
    """A per-layer plan of a file, with its time and memory."""

    path: str
    session: Session
    plan: Plan
    prediction: Prediction
    request: Mapping[str, object]
    """Options that reproduce the plan."""
    gpu_hour_price: float | None

    @property
    def assumed(self) -> tuple[str, ...]:
        """Defaults and calibrations that the estimate is based on, one line each."""
        own = [line for line in self.session.defaults if line.startswith(_PRICING_DEFAULTS)]
        return (*own, *self.session.calibrated)

    @property
    def answer(self) -> Answer:
        """Answer record for reports."""
        return self.session.summary(self.plan, self.prediction, self.assumed, self.gpu_hour_price)

    @property
    def subject(self) -> tuple[str, str, int]:
        """Model, cluster and sequence length in tokens."""
        spec = self.session.spec
        return spec.name, self.session.hardware.name, spec.layers[0].seq_length

    @property
    def degrees(self) -> dict[str, Any]:
        """Parallel degrees by name; if layers differ, each value with its number of layers."""
        plan = self.plan
        names = ("tp", "cp", "ep", "zero3", "checkpoint")
        return {name: _only([getattr(layer, name) for layer in plan.layers]) for name in names} | {
            "pp": plan.num_stages,
            "global_batch_size": plan.global_batch,
            "num_microbatches": plan.num_microbatches,
        }

    def draw(self, pictures: Pictures) -> Mapping[Path, str]:
        """Return the pictures of the step, as file contents by path."""
        return pictures.of_plan(
            self.session, self.plan, self.prediction, state=f"given plan: {self.path}"
        )

    def document(self, asked: Mapping[str, object]) -> dict[str, Any]:
        """Return the object of `--json`.

        asked : options to store: `request` with paths relative to the JSON file
        """
        from search.request.options import option_record
        from search.show.files import evaluation_document

        session = self.session
        return evaluation_document(
            self.plan,
            self.prediction,
            defaults=self.assumed,
            synthetic=session.synthetic,
            estimated=session.estimated,
            options=option_record(
                session.options,
                session.options.memory_constraint_bytes,
                session.hardware.threads,
            ),
            request=asked,
            throughput=session.throughput(self.plan, self.prediction),
            price=self.gpu_hour_price,
        ).content()


def given_plan(
    path: str, request: Request, notice: Callable[[str], None], document: PlanDocument
) -> GivenPlan:
    """Return the per-layer plan of a file, with its time and memory.

    document : content of the file
    notice : receives messages about assumptions and changed inputs
    """
    from search.planning.session import evaluate_file, open_session

    session = open_session(request.inputs, request.options, request.given, has_plan=True)
    session = replace(session, defaults=(*request.found, *session.defaults))
    for text in session.notices:
        notice(text)
    for name in document.changed_inputs(session.sources):
        notice(f"{name} has changed since the plan was made")
    plan, prediction = evaluate_file(document, session, path=path)
    return GivenPlan(
        path=path,
        session=session,
        plan=plan,
        prediction=prediction,
        request={**session.named, **request.given},
        gpu_hour_price=request.output.price,
    )


def _only(values: Sequence[Any]) -> Any:
    """Return the common value of all layers, or every value with its number of layers."""
    kinds = dict.fromkeys(values)
    if len(kinds) == 1:
        return values[0]
    return ", ".join(f"{kind} in {values.count(kind)}" for kind in kinds)
