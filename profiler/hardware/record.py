"""Record of a cluster's measurements in four files with sidecars.

A consecutive all-reduce is stored in two sidecars, and a killed run may have written only one of
them. Reading therefore merges the runs of all sidecars by their id.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path

from autopar.documents.hardware import hardware_file_name
from autopar.documents.sidecar import (
    SIDECAR_VERSION,
    DocumentKind,
    Measurement,
    Run,
    Sidecar,
    documented_unit,
)
from autopar.records import replace
from profiler.environment import Metadata, RankInfo, comparable, host_labels, machine_metadata
from profiler.hardware.documents import (
    KINDS,
    MEASURED_FOR,
    REPLACES,
    Documents,
    derive,
    kinds_of,
    newest_measurements,
    requested_kinds,
)
from profiler.hardware.options import Cluster, HardwareOptions
from profiler.options import RankOptions
from profiler.record import Content, DocumentFile, Keyed, Record, incomparable, run_number


def hardware_metadata(
    infos: Sequence[RankInfo],
    argv: Sequence[str],
    backend: str,
    options: HardwareOptions,
    *,
    dtype: str | None = None,
) -> Metadata:
    """Return the metadata of a run: machine, command and options; called on rank 0.


    argv : arguments of the command.
    backend, dtype : values in use, after `auto` is resolved.
    """
    command = ["torchrun", "...", "-m", "profiler.hardware", *argv]
    return {
        **machine_metadata(infos, command, folder=None if options.host_names else options.out),
        "backend": backend,
        "dtype": dtype or options.dtype,
        "isolated": options.isolated,
        "cuda_graph": options.cuda_graph,
        "reference_bytes": options.reference_bytes,
    }


class ClusterRecord(Record[Measurement]):
    """Base class of records of a cluster's measurements; exists on rank 0 only."""

    def __init__(
        self,
        out: Path,
        paths: Mapping[DocumentKind, Path],
        metadata: Metadata,
        *,
        cluster: Cluster,
        options: RankOptions,
        asked: Collection[DocumentKind],
    ) -> None:
        """Read the files at `paths`, if they exist, and start a run; raises the errors of `Record`.

        out : output folder.
        asked : kinds of files that this run writes.
        """
        self.out = out
        self._cluster = cluster
        self._labels = {} if options.host_names else host_labels(cluster.hosts, out)
        super().__init__(paths, metadata, asked=asked, resume=options.resume, force=options.force)

    def put(self, measurement: Measurement) -> None:
        """Add a measurement and write files, with host names replaced by labels if configured."""
        super().put(relabelled(measurement, self._labels))

    def _cells(self, run: Run) -> Sequence[Measurement]:
        return run.measurements

    @property
    def _own_run(self) -> Run:
        return replace(self._run, measurements=list(self._own.values()))


class HardwareRecord(ClusterRecord):
    """Record of a run of `profiler.hardware` in one output folder."""

    def __init__(
        self,
        out: Path,
        *,
        cluster: Cluster,
        options: HardwareOptions,
        metadata: Metadata,
        memory_bytes: float | None,
        synthetic: bool,
        name: str,
    ) -> None:
        """Read the files in `out`, if any, and start a run; raises the errors of `Record`.

        memory_bytes : smallest device memory of any rank; None if unknown.
        synthetic : True if several ranks share one device, so that times describe no machine.
        name : name of the hardware.
        """
        self._options = options
        self._memory_bytes = memory_bytes
        self._synthetic = synthetic
        self._name = name
        self._kinds = requested_kinds(options, cluster)
        shape = (cluster.num_nodes, cluster.gpus_per_node)
        super().__init__(
            out,
            {kind: out / hardware_file_name(kind, *shape) for kind in KINDS},
            metadata,
            cluster=cluster,
            options=options,
            asked=self._kinds,
        )

    @cached_property
    def _earlier(self) -> tuple[Run, ...]:
        """Earlier runs with an id, each with its measurements from all files."""
        return _joined(run for file in self._files.values() for run in file.earlier)

    def _continued(self, metadata: Metadata, *, force: bool) -> Metadata:
        found = self._differing(self._kinds, metadata)
        if found and not force:
            raise incomparable(self.out, found)
        for kind, file in self._files.items():
            others = [] if kind in self._kinds else self._differing({kind}, metadata)
            if others:
                self.notes.append(f"{file.path} is from a run that differs in {'; '.join(others)}")
        if not (force and self._earlier):
            return metadata
        replaced = set(self._options.operations)
        if found:  # samples of different machines must not be mixed
            replaced.update(name for kind in self._kinds for name in MEASURED_FOR[kind])
        return {**metadata, REPLACES: ",".join(sorted(replaced))}

    def _differing(self, kinds: Set[DocumentKind], metadata: Metadata) -> list[str]:
        """Return the differences between this run and earlier runs with current cells of
        `kinds`."""
        active = newest_measurements(self._earlier)
        found: list[str] = []
        for run in self._earlier:
            # Only current cells tie a document to their run.
            cells = [m for m in run.measurements if active.get(m.key) is m and m.status == "ok"]
            rest_on_it = kinds & {kind for m in cells for kind in kinds_of(m)}
            if rest_on_it:
                found += comparable(run.metadata, metadata, resume=True)
            for kind in rest_on_it:
                sidecar = self._files[kind].sidecar
                if sidecar is not None and sidecar.synthetic != self._synthetic:
                    was, now = (("real", "synthetic"), ("synthetic", "real"))[sidecar.synthetic]
                    found.append(f"meaning of the times: {was} and {now}")
        return list(dict.fromkeys(found))

    @property
    def measurements(self) -> dict[str, Measurement]:
        """Current measurements of the requested files by cell key, including earlier runs."""
        # Ignore measurements that only belong to documents of other commands.
        found = newest_measurements(self._runs())
        return {key: m for key, m in found.items() if self._kinds & set(kinds_of(m))}

    def conclude(
        self, sentences: Iterable[str], cells: Iterable[Keyed] | None = None, *, more: str = ""
    ) -> int:
        """Print as `Record.conclude`; return 1 only if a file lacks a value because cells failed.

        The overlap file has one value: overlap cells may fail if another was measured.
        """
        code = super().conclude(sentences, cells, more=more)
        failed = [m for m in self.measurements.values() if m.status == "failed"]
        lost = [m for m in failed if not m.operation.startswith("overlap_")]
        return code if lost or self._derive().data["overlap"] is None else 0

    def warnings(self) -> list[str]:
        """Return warnings about missing values, and about files with values that were not
        updated."""
        documents = self._derive()
        return documents.warnings + [
            f"{file.path} still has the values of before: nothing was measured in their place"
            for file in self._asked
            if documents.data[file.kind] is None and file.path.exists()
        ]

    def _runs(self) -> tuple[Run, ...]:
        return (*self._earlier, self._own_run)

    def _derive(self) -> Documents:
        return derive(self.measurements, self._cluster, self._options.reference_bytes)

    def _contents(self, measurement: Measurement | None = None) -> Iterator[Content]:
        wanted = self._kinds if measurement is None else set(kinds_of(measurement))
        assert wanted <= self._kinds, f"{measurement} was not asked for"
        documents = self._derive()
        for file in self._asked:
            data = documents.data[file.kind]
            # A document without keys depends on no measurement.
            if file.kind in wanted or (data == {} and file.written is None):
                yield Content(file, data, self._sidecar(file, documents))

    def _lacking(self, file: DocumentFile) -> str | None:
        if file.sidecar is not None:
            return None
        return f"{file.path} had no samples and was derived again"

    def _sidecar(self, file: DocumentFile, documents: Documents) -> Sidecar:
        metadata, kind = self._run.metadata, file.kind
        names = dict.fromkeys(self._labels.get(host, host) for host in self._cluster.hosts)
        hosts = metadata.get("hosts") or ",".join(names)
        source = (
            f"measured by `{metadata.get('command', 'torchrun -m profiler.hardware')}` on {hosts}"
        )
        if self._synthetic:
            source = (
                "synthetic: several ranks share one GPU, so times are not those of "
                f"a machine; {source}"
            )
        unnamed = [run for run in file.earlier if run.id is None]
        return Sidecar(
            version=SIDECAR_VERSION,
            document=kind,
            unit=documented_unit(kind),
            source=source,
            synthetic=self._synthetic,
            name=self._name,
            memory_bytes=self._memory_bytes,
            memory_bytes_per_s=documents.memory_bytes_per_s if kind == "overlap" else None,
            curves=documents.curves[kind],
            # Runs written by another program are kept unchanged.
            runs=[*unnamed, *self._runs_of(file)],
        )

    def _runs_of(self, file: DocumentFile) -> list[Run]:
        """Return the runs for a sidecar, each with the measurements that its file depends on."""
        named = {self._run.id, *(run.id for run in file.earlier)}
        found = []
        for run in self._runs():
            cells = [m for m in run.measurements if file.kind in kinds_of(m)]
            # The current run is listed even without a cell: it may replace earlier runs.
            if cells or run.id in named:
                found.append(replace(run, measurements=cells))
        return found


def relabelled(measurement: Measurement, labels: Mapping[str, str]) -> Measurement:
    """Return a measurement with host names replaced by labels, also in its messages."""
    reason = measurement.reason
    for host, label in labels.items():
        # Messages about ranks contain host names, and failed cells store the message. A short name
        # may also be an ordinary word of it, so it is replaced only after "host".
        before = r"(?<![\w.-])" if len(host) > 3 else "(?<=host )"
        reason = reason and re.sub(rf"{before}{re.escape(host)}(?![\w-])", label, reason)
    stragglers = [
        replace(found, host=labels.get(found.host, found.host)) for found in measurement.stragglers
    ]
    return replace(measurement, reason=reason, stragglers=stragglers)


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Merge runs with equal ids and their cells; return them in the order of run numbers.

    Runs without an id are omitted.
    """
    metadata: dict[str, Run] = {}
    cells: dict[str, dict[str, Measurement]] = {}
    for run in runs:
        if run.id is None:
            continue
        metadata.setdefault(run.id, run)
        found = cells.setdefault(run.id, {})
        for measurement in run.measurements:
            earlier = found.get(measurement.key)
            # Of two copies, the successfully measured one counts.
            if earlier is None or earlier.status != "ok":
                found[measurement.key] = measurement
    return tuple(
        replace(run, measurements=list(cells[name].values()))
        for name, run in sorted(metadata.items(), key=lambda item: run_number(item[0]))
    )
