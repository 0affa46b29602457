"""Record of a model's measurements in two files, and the check that runs are comparable.

Each cell belongs to one of the two files, computation or memory, so each file can be resumed
separately.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from autopar.documents.sidecar import (
    SIDECAR_VERSION,
    DocumentKind,
    ModelMeasurement,
    Run,
    Sidecar,
    TensorKind,
    TimeFit,
    describe_model,
    documented_unit,
    newest_cells,
    sidecar_path,
)
from autopar.rates.stack import DEFAULT_STACK
from autopar.records import replace
from autopar.run.model import ModelSpec
from autopar.units import format_count
from profiler.environment import Metadata, RankInfo, comparable, machine_metadata
from profiler.model.cells import ModelCell
from profiler.model.documents import ModelDocument, derive_computation, derive_memory
from profiler.model.options import Mode, ModelOptions
from profiler.record import Content, DocumentFile, Record

# --------------------------------------------------------------------------------------------------
# The metadata of a profiling run, and the differences that prevent resuming an earlier run.


_MODEL_ROWS = {
    "model": "the model",
    "unit": "the part of a layer",
}
"""Descriptions of metadata that must be equal in all runs of a file, by key. These keys are in
addition to those of `profiler.environment`."""
_MEMORY_ROWS = {**_MODEL_ROWS, "tp_impl": "the implementation of tensor parallelism"}
_EXACT_KEYS = ("dtype", "torch")
"""Metadata keys that exact counts depend on, in addition to those of the model. They do not depend
on the machine."""


def model_metadata(
    info: RankInfo, argv: Sequence[str], options: ModelOptions, spec: ModelSpec
) -> Metadata:
    """Return the metadata of the run of this process: machine, command, options and model."""
    return {
        **machine_metadata(
            [info],
            ["profile-model", *argv],
            folder=None if options.host_names else options.out or spec.name,
        ),
        "dtype": options.dtype,
        "model": describe_model(spec),
        "unit": options.unit,
        "tp_impl": options.tp_impl,
        "mode": options.mode,
    }


def model_differences(
    kind: DocumentKind,
    earlier: Mapping[str, object],
    now: Mapping[str, object],
) -> list[str]:
    """Return the differences that prevent two runs from sharing a file; empty if there are none.

    earlier, now : metadata of the two runs. Each difference is one clause of a sentence.
    """
    if kind != "memory":
        return comparable(earlier, now, resume=True, own=_MODEL_ROWS)
    keys = (*_EXACT_KEYS, *_MEMORY_ROWS)
    exact = ({key: metadata.get(key) for key in keys} for metadata in (earlier, now))
    return comparable(*exact, resume=True, own=_MEMORY_ROWS)


# --------------------------------------------------------------------------------------------------
# The record of a run: cells as they are measured, files rewritten after each.


_KIND_OF: dict[str, DocumentKind] = {"time": "computation", "memory": "memory"}


class ModelRecord(Record[ModelMeasurement]):
    """Measurements of one model; each cell belongs to one of the two files."""

    def __init__(
        self,
        paths: Mapping[DocumentKind, Path],
        spec: ModelSpec,
        options: ModelOptions,
        *,
        metadata: Metadata,
        kinds: tuple[TensorKind, TensorKind],
        memory_bytes: float | None = None,
    ) -> None:
        """Read the files at `paths`, if they exist, and start a run; raises the errors of `Record`.

        kinds : sharding kinds of the memory tables with and without `_sp`.
        memory_bytes : device memory, written to the sidecar of the computation file; None if
            unknown.
        """
        self._spec = spec
        self._options = options
        self._reference = not options.model.startswith(("hf:", "py:"))
        self._kinds = kinds
        self._memory_bytes = memory_bytes
        super().__init__(
            paths, metadata, asked=paths.keys(), resume=options.resume, force=options.force
        )

    def _cells(self, run: Run) -> Sequence[ModelMeasurement]:
        return run.model_measurements

    def _differences(self, kind: DocumentKind, earlier: Metadata, now: Metadata) -> list[str]:
        return model_differences(kind, earlier, now)

    @property
    def measurements(self) -> dict[str, ModelMeasurement]:
        """Current measurements by cell key, including those of earlier runs."""
        return {key: m for file in self._asked for key, m in self._found(file).items()}

    def warnings(self, cells: Iterable[ModelCell]) -> list[str]:
        """Return warnings about missing or suspicious results of these cells.

        Warnings about other cells in the files are replaced by one sentence with their number.
        """
        own = {cell.key for cell in cells}
        found: list[str] = []
        num_others = 0
        for file in self._asked:
            others = self._found(file).keys() - own
            found += self._derive(file, own, mode=self._options.mode).warnings
            num_others += len(self._derive(file, others).warnings)
        if num_others:
            more = format_count(num_others, "more warning is", "more warnings are")
            found.append(
                f"{more} about cells of earlier runs that are not in this "
                "command; repeat their commands with --resume to list them"
            )
        return found

    def fits(self) -> list[TimeFit]:
        """Return the fits of all current times in the files of this run."""
        return [fit for file in self._asked for fit in self._derive(file).fits]

    def _found(self, file: DocumentFile) -> dict[str, ModelMeasurement]:
        """Return one measurement per cell key: the newest with status ok, else the newest."""
        return newest_cells((*file.earlier, self._own_run(file)))

    def _own_run(self, file: DocumentFile) -> Run:
        own = [m for m in self._own.values() if _KIND_OF[m.quantity] == file.kind]
        return replace(self._run, model_measurements=own)

    def _derive(
        self, file: DocumentFile, about: Container[str] = (), *, mode: Mode | None = None
    ) -> ModelDocument:
        """Return the contents of a file, with warnings about the cells with keys in `about`."""
        # sorted by key, so that the result does not depend on the order of the runs
        found = dict(sorted(self._found(file).items()))
        if file.kind == "memory":
            return derive_memory(found, self._spec, self._kinds, about)
        return derive_computation(found, self._spec, mode, about)

    def _contents(self, measurement: ModelMeasurement | None = None) -> Iterator[Content]:
        one = None if measurement is None else self._files[_KIND_OF[measurement.quantity]]
        for file in self._asked if one is None else [one]:
            yield self._content(file)

    def _lacking(self, file: DocumentFile) -> str | None:
        # earlier versions wrote no fits
        if file.kind == "memory" or file.sidecar is None or file.sidecar.fits:
            return None
        return f"{sidecar_path(file.path)} lacked fits, which were added"

    def _content(self, file: DocumentFile) -> Content:
        document = self._derive(file)
        metadata = self._run.metadata
        command = metadata.get("command", "profile-model")
        source = f"measured by `{command}` on {metadata.get('device')}"
        if file.kind == "memory":
            source = f"counted exactly by `{command}`, {self._options.tp_impl} tensor parallelism"
        sidecar = Sidecar(
            version=SIDECAR_VERSION,
            document=file.kind,
            unit=documented_unit(file.kind),
            source=source,
            name=self._spec.name,
            # reference layers are PyTorch operations, which the default stack describes;
            # the stack of a custom module is unknown
            stack=DEFAULT_STACK if file.kind == "computation" and self._reference else None,
            # parameter sizes in Galvatron's memory file are those of fp32 for every precision
            parameter_bytes=4 if file.kind == "memory" else None,
            memory_bytes=self._memory_bytes if file.kind == "computation" else None,
            layer_times=document.layer_times,
            other_times=document.other_times,
            fits=document.fits,
            runs=[*file.earlier, self._own_run(file)],
        )
        return Content(file, document.data or None, sidecar)
