"""Which pictures a command line asks for, and their files: `--html` and `--trace`.

Pages and traces are made here from whatever answers: a search over launches, a checked launch, a
plan of layers. Commands write them with their other files. What draws is imported where it draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autopar.errors import OptionError

if TYPE_CHECKING:
    from autopar.run.plan import Plan, Prediction
    from search.check.assessment import Assessment, Target
    from search.planning.layered.prediction import SearchResult
    from search.planning.question import Session
    from search.planning.uniform.answer import Answer


class Pictures(NamedTuple):
    """Files that are asked for; None is not."""

    html: Path | None
    trace: Path | None

    @property
    def any(self) -> bool:
        """Whether one is."""
        return self.html is not None or self.trace is not None

    @property
    def outputs(self) -> dict[str, Path | None]:
        """By option, for what refuses two outputs of one name."""
        return {"--html": self.html, "--trace": self.trace}

    def refusal(self, otherwise: Callable[[OSError], Exception]) -> Callable[[OSError], Exception]:
        """Return what says that a file cannot be written: of these by their option."""

        def said(error: OSError) -> Exception:
            for option, path in self.outputs.items():
                if path is not None and error.filename == str(path):
                    why = error.strerror or str(error)
                    return OptionError(
                        f"{option} {path}: cannot be written ({why}); choose another path"
                    )
            return otherwise(error)

        return said

    def of_answer(self, answer: Answer, *, curves: bool) -> dict[Path, str]:
        """Return the files of the best launch of an answer, empty where there is none.

        curves : the page also has other batches and clusters, which are searched for it.
        """
        best = answer.best
        if not self.any or best is None or best.best is None:
            return {}
        from search.show.pictures.launches import answer_page
        from search.show.pictures.page import page_text

        found = {}
        if self.html is not None:
            found[self.html] = page_text(answer_page(answer, curves=curves))
        title = answer.question.title
        return found | self._launch_trace(best.best.assessment, best.target, title)

    def of_launch(
        self, assessment: Assessment, target: Target, *, title: str, line: str
    ) -> dict[Path, str]:
        """Return the files of a launch that was read; raises InputError for one without a step."""
        found = {}
        if self.html is not None:
            from search.show.pictures.launches import checked_page
            from search.show.pictures.page import page_text

            page = checked_page(assessment, target, title=title, line=line)
            found[self.html] = page_text(page)
        return found | self._launch_trace(assessment, target, title)

    def _launch_trace(self, assessment: Assessment, target: Target, title: str) -> dict[Path, str]:
        if self.trace is None:
            return {}
        from search.show.pictures.timeline import launch_timeline
        from search.show.pictures.trace import names_of, trace_text

        names = names_of(assessment.launch, target.machine.card.name)
        return {self.trace: trace_text(launch_timeline(assessment, target), names, title)}

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
        """Return the files of a plan; raises InputError for one that cannot run."""
        found = {}
        if self.html is not None:
            from search.show.pictures.page import page_text
            from search.show.pictures.plans import plan_page

            page = plan_page(
                session, plan, prediction, state=state, result=result, frontier=frontier
            )
            found[self.html] = page_text(page)
        if self.trace is not None:
            from search.show.pictures.timeline import plan_timeline
            from search.show.pictures.trace import TraceNames, trace_text

            names = TraceNames(
                dialect="torch",
                device=session.hardware.name,
                gradient="f32" if session.options.fp32_gradients else "bf16",
                scattered=session.options.sequence_parallel,
                stages=plan.num_stages,
            )
            timeline = plan_timeline(plan, prediction)
            found[self.trace] = trace_text(timeline, names, session.title)
        return found


def pictures_of(html: str | None, trace: str | None) -> Pictures:
    """Return what `--html` and `--trace` ask for; raises OptionError for what is no file."""
    for option, path in (("--html", html), ("--trace", trace)):
        if path in ("-", ""):
            raise OptionError(f"{option}: {path!r} is no file; give its name")
    return Pictures(Path(html) if html else None, Path(trace) if trace else None)
