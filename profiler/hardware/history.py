"""What earlier runs left in a directory: their sidecars, joined by run, and damaged files.

A consecutive all-reduce stands in two sidecars, and a run that was killed may have written only
one of them; joining the runs of all files by their id makes both whole again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import DocumentError
from autopar.hardware_files import hardware_file_name
from autopar.measurements import Measurement
from autopar.sidecar import DocumentKind, Run, Sidecar, read_sidecar, sidecar_path
from profiler.hardware.cells import Cluster
from profiler.hardware.options import HardwareOptions
from profiler.hardware.routing import KINDS, kinds_of, newest_measurements
from profiler.hardware.storage import DAMAGED, refuse_earlier
from profiler.metadata import Metadata, comparable

__all__ = [
    "History",
    "check_present",
    "differences",
    "document_paths",
    "is_damage",
    "is_ours",
    "next_run_id",
    "read_history",
]


@dataclass(frozen=True, kw_only=True)
class History:
    """The runs of the four sidecars of a cluster."""

    runs: tuple[Run, ...]
    """Every run that has an id, with its measurements in all files, oldest first."""
    present: Mapping[DocumentKind, frozenset[str]]
    """Ids of the runs that a sidecar names."""
    unnamed: Mapping[DocumentKind, tuple[Run, ...]]
    """Runs without an id, which another program wrote; kept as they are."""
    sidecars: Mapping[DocumentKind, Sidecar]
    damaged: Mapping[DocumentKind, DocumentError]
    """Why a sidecar cannot be read."""


def document_paths(out: Path, cluster: Cluster) -> dict[DocumentKind, Path]:
    """Return the documented files of a cluster in a directory."""
    shape = (cluster.num_nodes, cluster.gpus_per_node)
    return {kind: out / hardware_file_name(kind, *shape) for kind in KINDS}


def read_history(paths: Mapping[DocumentKind, Path]) -> History:
    """Return what the sidecars of these documents hold.

    Raises
    ------
    DocumentError: a sidecar was written by a newer version, or the system refuses to read it.
    """
    sidecars: dict[DocumentKind, Sidecar] = {}
    damaged: dict[DocumentKind, DocumentError] = {}
    for kind, path in paths.items():
        try:
            sidecar = read_sidecar(path, kind)
        except DocumentError as error:
            if not is_damage(error):
                raise
            damaged[kind] = error
        else:
            if sidecar is not None:
                sidecars[kind] = sidecar
    return History(
        runs=_joined(run for sidecar in sidecars.values() for run in sidecar.runs),
        present={
            kind: frozenset(run.id for run in sidecar.runs if run.id is not None)
            for kind, sidecar in sidecars.items()
        },
        unnamed={
            kind: tuple(run for run in sidecar.runs if run.id is None)
            for kind, sidecar in sidecars.items()
        },
        sidecars=sidecars,
        damaged=damaged,
    )


def is_damage(error: DocumentError) -> bool:
    """Return whether the content is at fault, and not its age or the rights of the reader."""
    if error.key == "version" and error.remedy is not None:
        return False  # a newer version wrote it
    try:
        Path(error.path).read_bytes()
    except OSError:
        return False
    return True


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return every run once, with the cells of all its copies, in the order of their numbers."""
    metadata: dict[str, Run] = {}
    cells: dict[str, dict[str, Measurement]] = {}
    for run in runs:
        if run.id is None:
            continue
        metadata.setdefault(run.id, run)
        found = cells.setdefault(run.id, {})
        for measurement in run.measurements:
            earlier = found.get(measurement.key)
            if earlier is None or earlier.status != "ok":
                found[measurement.key] = measurement
    return tuple(
        run.model_copy(update={"measurements": list(cells[name].values())})
        for name, run in sorted(metadata.items(), key=lambda item: _number(item[0]))
    )


def _number(run_id: str) -> int:
    head = run_id.split("-", 1)[0]
    return int(head) if head.isdecimal() and len(head) < 10 else 0


def next_run_id(runs: Iterable[Run], token: str) -> str:
    """Return an id behind those of earlier runs: the number of the run and a random token.

    Numbers and not times, since the clocks of two machines that share a directory may differ.
    """
    return f"{1 + max((_number(run.id) for run in runs if run.id is not None), default=0)}-{token}"


def is_ours(path: Path, kind: DocumentKind, history: History) -> bool:
    """Return whether a document, or its sidecar, is the work of an earlier run of this command."""
    if kind in history.damaged or any(path.parent.glob(sidecar_path(path).name + DAMAGED + "*")):
        return True
    return bool(history.present.get(kind))


def check_present(
    paths: Mapping[DocumentKind, Path],
    kinds: Set[DocumentKind],
    history: History,
    options: HardwareOptions,
) -> None:
    """Check that the options allow to touch what there is of these documents.

    Raises
    ------
    InputError: an earlier run wrote a file, or something else did.
    """
    if options.force:
        return
    for kind in KINDS:
        document = paths[kind]
        there = [path for path in (document, sidecar_path(document)) if path.exists()]
        if kind not in kinds or not there:
            continue
        ours = is_ours(document, kind, history)
        refuse_earlier(there[0], ours=ours, resume=options.resume)


def differences(
    history: History,
    kinds: Set[DocumentKind],
    metadata: Metadata,
    synthetic: bool,
) -> list[str]:
    """Return what differs between now and the earlier runs that these documents rest on."""
    active = newest_measurements(history.runs)
    found: list[str] = []
    for run in history.runs:
        cells = [m for m in run.measurements if active.get(m.key) is m and m.status == "ok"]
        rest_on_it = kinds & {kind for m in cells for kind in kinds_of(m)}
        if rest_on_it:
            found += comparable(run.metadata, metadata, resume=True)
        for kind in rest_on_it:
            sidecar = history.sidecars.get(kind)
            if sidecar is not None and sidecar.synthetic != synthetic:
                was, now = (("real", "synthetic"), ("synthetic", "real"))[sidecar.synthetic]
                found.append(f"what the times are: {was} and {now}")
    return list(dict.fromkeys(found))
