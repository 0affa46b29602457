"""Plan file, format `autopar-run`: the run that a search answers with, its question and figures.

Uniform and per-layer plans have the same keys. Readers of per-layer plans get the document as a
`PlanDocument`, whatever file it is; `search.planning.uniform.files` reads uniform plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import to_builtins

from autopar.documents.checks import check_version, published
from autopar.documents.json import load_object, read_record, rows_text
from autopar.documents.plan import RUN_FORMAT, OptionsEntry, PlanDocument, PlanFigures
from autopar.documents.strategy import strategy_document
from autopar.errors import DocumentError, InputError
from autopar.records import KeyFault, Positive, Record, whole_number
from autopar.run.architecture import Model
from autopar.run.of_plan import plan_of_run
from autopar.run.run import Run, Word
from autopar.run.runtime import Runtime
from autopar.run.strategy import Strategy

RUN_VERSION: Final = 2
"""Version 1 were two formats, `autopar-launch` and `autopar-plan`."""
AGAIN: Final = "write the plan again with autopar-search"
_Number = Annotated[int, whole_number(1, 1 << 28)]


class HardwareEntry(Record):
    """The cluster."""

    card: str
    """Name of the device's datasheet, or of a measured cluster."""
    num_nodes: _Number
    """Number of nodes."""
    num_gpus_per_node: _Number
    """GPUs per node."""


# A file must contain these keys; a document made in Python has them by default.
@published(
    "run",
    required=(
        *("format", "version", "model", "strategy", "runtime", "seq_length", "gpu", "hardware"),
    ),
)
class RunDocument(PlanFigures):
    """autopar's plan file: a run, the question that it answers, and its predicted figures."""

    format: Literal["autopar-run"] = RUN_FORMAT
    version: Literal[2] = RUN_VERSION
    name: str = ""
    model: Model
    strategy: Strategy
    runtime: Runtime
    seq_length: Positive
    """Sequence length, tokens."""
    gpu: str
    """Name of the device, which determines default kernels."""
    steps: Positive | None = None
    """Number of steps; null for thousands."""
    unread: tuple[Word, ...] = ()
    """Arguments of a launch script that no key here holds."""
    hardware: HardwareEntry
    price: dict[str, Any] | None = None
    """Figures of a uniform plan, in the format of `autopar check --json`; null for a per-layer
    plan, whose figures are `prediction`."""

    def __post_init__(self) -> None:
        """Raise KeyFault for stages or splits of other layers than those of the model."""
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
            path, data, RUN_FORMAT, RUN_VERSION, give="give a plan file", again="search again"
        )
        return read_record(cls, path, data, remedy=AGAIN)

    @property
    def run(self) -> Run:
        """The run."""
        return Run(**{name: getattr(self, name) for name in Run.__struct_fields__})

    @property
    def is_uniform(self) -> bool:
        """True if the search of uniform plans priced the run."""
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
        """Return the document as that of a per-layer plan.

        Raises DocumentError for properties of the run that such a plan cannot hold.
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
            raise DocumentError(path, str(error), key="strategy") from None
        return PlanDocument(plan=strategy_document(plan), **same)


_FIGURES = frozenset(PlanFigures.__struct_fields__)
