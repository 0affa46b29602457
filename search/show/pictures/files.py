"""Files of the options `--html` and `--trace`.

Pages and traces are built from the result of a uniform search, a checked run or a per-layer plan.
Commands write them with their other files. Drawing code is imported only when a file is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autopar.errors import OptionError

if TYPE_CHECKING:
    from autopar.price.assessment import Assessment, Target
    from autopar.run.plan import Plan, Prediction
    from search.planning.layered.prediction import SearchResult
    from search.planning.session import Session
    from search.planning.uniform.answer import UniformResult
    from search.show.pictures.page import Page


class Pictures(NamedTuple):
    """Paths of the requested HTML page and trace file; None if not requested."""

    html: Path | None
    trace: Path | None

    @property
    def any(self) -> bool:
        """True if a page or a trace is requested."""
        return self.html is not None or self.trace is not None

    @property
    def outputs(self) -> dict[str, Path | None]:
        """Paths by option, for the check that no two outputs have the same path."""
        return {"--html": self.html, "--trace": self.trace}

    def refusal(self, otherwise: Callable[[OSError], Exception]) -> Callable[[OSError], Exception]:
        """Return a function that converts an OSError of a write to an error with its option.

        otherwise : conversion of errors of other files.
        """

        def said(error: OSError) -> Exception:
            for option, path in self.outputs.items():
                if path is not None and error.filename == str(path):
                    why = error.strerror or str(error)
                    return OptionError(
                        f"{option} {path}: cannot be written ({why})", remedy="Choose another path"
                    )
            return otherwise(error)

        return said

    def of_answer(
        self, answer: UniformResult, *, curves: bool, frontier: Sequence[SearchResult] = ()
    ) -> dict[Path, str]:
        """Return the file contents for the best uniform plan of an answer; empty without a plan.

        curves : True to add plans for other batches and clusters to the page, by more searches.
        frontier : best plans by memory budget.
        """
        best, one = answer.chosen, answer.best
        if not self.any or best is None or one is None:
            return {}
        from search.show.pictures.answers import answer_page

        return self._files(
            lambda: answer_page(answer, curves=curves, frontier=frontier),
            lambda: _launch_trace(best.assessment, one.target, answer.question.title),
        )

    def of_launch(
        self, assessment: Assessment, target: Target, *, title: str, line: str
    ) -> dict[Path, str]:
        """Return the file contents for a checked run.

        Raises InputError for a run without a step time.
        """
        from search.show.pictures.answers import checked_page

        return self._files(
            lambda: checked_page(assessment, target, title=title, line=line),
            lambda: _launch_trace(assessment, target, title),
        )

    def of_plan(
        self,
        session: Session,
        plan: Plan,
        prediction: Prediction,
        *,
        state: str,
        result: SearchResult | None = None,
        frontier: Sequence[SearchResult] = (),
    ) -> dict[Path, str]:
        """Return the file contents for a per-layer plan; raises InputError if it cannot run."""
        if not self.any:
            return {}
        from search.show.pictures.answers import plan_page

        return self._files(
            lambda: plan_page(
                session, plan, prediction, state=state, result=result, frontier=frontier
            ),
            lambda: _plan_trace(session, plan, prediction),
        )

    def _files(self, page: Callable[[], Page], trace: Callable[[], str]) -> dict[Path, str]:
        found = {}
        if self.html is not None:
            from search.show.pictures.page import page_text

            found[self.html] = page_text(page())
        if self.trace is not None:
            found[self.trace] = trace()
        return found


def _launch_trace(assessment: Assessment, target: Target, title: str) -> str:
    from search.show.pictures.timeline import launch_timeline
    from search.show.pictures.trace import names_of, trace_text

    names = names_of(assessment.run, target.machine.card.name)
    return trace_text(launch_timeline(assessment, target), names, title)


def _plan_trace(session: Session, plan: Plan, prediction: Prediction) -> str:
    from search.show.pictures.timeline import plan_timeline
    from search.show.pictures.trace import TraceNames, trace_text

    names = TraceNames(
        dialect="torch",
        device=session.hardware.name,
        gradient="f32" if session.options.fp32_gradients else "bf16",
        scattered=session.options.sequence_parallel,
        stages=plan.num_stages,
    )
    return trace_text(plan_timeline(plan, prediction), names, session.title)


def pictures_of(html: str | None, trace: str | None) -> Pictures:
    """Return the files of `--html` and `--trace`; raises OptionError for `-` or an empty name."""
    for option, path in (("--html", html), ("--trace", trace)):
        if path in ("-", ""):
            raise OptionError(
                f"{option}: {path!r} is not a file name", remedy="Use the path of a file"
            )
    return Pictures(Path(html) if html else None, Path(trace) if trace else None)
