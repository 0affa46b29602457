"""The files of one profiling run, written after every cell, so that nothing measured is lost.

As for hardware, sidecars are the truth and documented files are derived from them; the sidecar is
written first. A cell stands in one file only, so every file continues on its own.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

from autopar.documents.json import write_json
from autopar.documents.sidecar import (
    REPLACES,
    SIDECAR_VERSION,
    ModelMeasurement,
    Run,
    Sidecar,
    TensorKind,
    TimeFit,
    newest_cells,
    read_sidecar,
    sidecar_path,
)
from autopar.errors import DocumentError, InputError
from autopar.model import ModelSpec
from autopar.units import format_count
from profiler.environment import Metadata, RankInfo, comparable, machine_metadata
from profiler.hardware.record import is_damage, next_run_id
from profiler.model.cells import ModelCell
from profiler.model.documents import ModelDocument, derive_computation, derive_memory
from profiler.model.options import Mode, ModelOptions
from profiler.storage import (
    DAMAGED,
    Lock,
    keep_copy,
    move_aside,
    probe,
    read_document,
    refuse_earlier,
    remove_leftovers,
    sentences,
)

__all__ = [
    "Kind",
    "ModelRecord",
    "describe_model",
    "model_differences",
    "model_metadata",
]


# --------------------------------------------------------------------------------------------------
# The circumstances of a profiling run, and which of them forbid to continue an earlier one.


_MODEL_ROWS = {
    "model": "the model",
    "unit": "the part of a layer",
}
"""Keys of the metadata beside those of `profiler.environment`, and their meaning; equal in all runs
of a file."""
_TIME_ROWS = {**_MODEL_ROWS, "threads": "the threads of a CPU"}
_MEMORY_ROWS = {**_MODEL_ROWS, "tp_impl": "the implementation of tensor parallelism"}
_EXACT_KEYS = ("dtype", "torch")
"""What exact counting depends on besides the model; no machine takes part in it."""


def describe_model(spec: ModelSpec) -> str:
    """Return the name of an architecture and a digest of it, whatever its depth and lengths."""
    fields = asdict(spec)
    # neither a name nor a base of rotary positions changes what is measured
    for key in ("name", "rotary_base", "rotary_scaling_factor"):
        fields.pop(key)
    for layer in fields["layers"]:
        layer.pop("num_layers")
        # cells have lengths of their own, and depth changes no layer
        layer.pop("seq_length")
    text = json.dumps(fields, sort_keys=True)
    return f"{spec.name} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def model_metadata(
    info: RankInfo, argv: Sequence[str], options: ModelOptions, spec: ModelSpec
) -> Metadata:
    """Return the circumstances of a run of this process."""
    import torch

    return {
        **machine_metadata([info], shlex.join(["profile-model", *argv])),
        "dtype": options.dtype,
        "model": describe_model(spec),
        "unit": options.unit,
        "tp_impl": options.tp_impl,
        "mode": options.mode,
        "threads": torch.get_num_threads() if info.device_uuid is None else None,
    }


def model_differences(
    kind: Literal["computation", "memory"],
    earlier: Mapping[str, object],
    now: Mapping[str, object],
) -> list[str]:
    """Return why cells of two runs may not stand in one file, one clause each."""
    if kind == "memory":
        rows = _MEMORY_ROWS
        found = comparable(_only_exact(earlier), _only_exact(now), resume=True)
    else:
        rows = _TIME_ROWS
        found = comparable(earlier, now, resume=True)
    return [
        f"{meaning} ({key}): {earlier.get(key)} and {now.get(key)}"
        for key, meaning in rows.items()
        if earlier.get(key) != now.get(key)
    ] + found


def _only_exact(metadata: Mapping[str, object]) -> dict[str, object]:
    return {key: metadata.get(key) for key in _EXACT_KEYS}


# --------------------------------------------------------------------------------------------------
# The record of a run: cells as they come, files after each.


Kind = Literal["computation", "memory"]
_KIND_OF: dict[str, Kind] = {"time": "computation", "memory": "memory"}


@dataclass
class _File:
    """One documented file with its sidecar: what earlier runs left, and what this one adds."""

    kind: Kind
    path: Path
    earlier: list[Run] = field(default_factory=list)
    damage: DocumentError | None = None
    exists: bool = False
    complete: bool = True
    """Whether its sidecar has all that this version derives; earlier ones knew less."""
    own: dict[str, ModelMeasurement] = field(default_factory=dict)
    written: Mapping[str, object] | None = None
    to_keep: list[Path] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        """Return whether the file is the work of an earlier run of this command."""
        moved = any(self.path.parent.glob(sidecar_path(self.path).name + DAMAGED + "*"))
        return self.damage is not None or moved or any(run.id is not None for run in self.earlier)


class ModelRecord:
    """The measurements of one model; made by `open`."""

    def __init__(
        self,
        files: Mapping[Kind, _File],
        spec: ModelSpec,
        options: ModelOptions,
        *,
        metadata: Metadata,
        kinds: tuple[TensorKind, TensorKind],
        memory_bytes: float | None,
        locks: ExitStack,
    ) -> None:
        self.notes: list[str] = []
        """Sentences on what was found and done with files of earlier runs."""
        self._files = dict(files)
        self._spec = spec
        self._options = options
        self._kinds = kinds
        self._memory_bytes = memory_bytes
        self._locks = locks
        # one number for both files, behind those of either
        runs = [run for file in files.values() for run in file.earlier]
        self._run = Run(id=next_run_id(runs, secrets.token_hex(4)), metadata=metadata)

    @classmethod
    def open(
        cls,
        paths: Mapping[Kind, Path],
        spec: ModelSpec,
        options: ModelOptions,
        *,
        metadata: Metadata,
        kinds: tuple[TensorKind, TensorKind],
        memory_bytes: float | None = None,
    ) -> Self:
        """Return the record of these documented files, which from now on belong to this process.

        kinds : of the cells that the memory tables with and without `_sp` are made of.

        Raises
        ------
        InputError: a folder cannot be written, another run writes there, there are files that
            neither `--resume` nor `--force` allows to touch, or earlier runs are not comparable.
        """
        with ExitStack() as stack:
            notes = []
            # both files may be in one folder, which can be locked once
            for folder in dict.fromkeys(path.parent for path in paths.values()):
                probe(folder)
                lock = Lock(folder)
                stack.callback(lock.release)
                notes += [lock.note] if lock.note is not None else []
            files = {kind: _read(kind, path) for kind, path in paths.items()}
            described = dict(metadata)
            for file in files.values():
                _check_present(file, options)
                _check_comparable(file, metadata, options)
                if options.force and file.earlier:
                    described[REPLACES] = True
            record = cls(
                files,
                spec,
                options,
                metadata=described,
                kinds=kinds,
                memory_bytes=memory_bytes,
                # from here on the record releases them; before, an error does
                locks=stack.pop_all(),
            )
        record.notes += notes
        record._prepare()
        return record

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs write to the folders; the end of the process does so too."""
        self._locks.close()

    def missing(self, cells: Sequence[ModelCell]) -> list[ModelCell]:
        """Return the cells that have no usable measurement yet, in their order."""
        ok = {
            key
            for file in self._files.values()
            for key, m in self._found(file).items()
            if m.status == "ok"
        }
        return [cell for cell in cells if cell.key not in ok]

    def put(self, measurement: ModelMeasurement) -> None:
        """Add a measurement and write the file that rests on it, its sidecar first.

        Raises
        ------
        InputError: a file cannot be written; its old content is intact.
        """
        file = self._files[_KIND_OF[measurement.quantity]]
        file.own[measurement.key] = measurement
        self._write(file)

    def paths(self) -> list[Path]:
        """Return the files that there are: documents and their sidecars."""
        pairs = ((file.path, sidecar_path(file.path)) for file in self._files.values())
        return [path for pair in pairs for path in pair if path.exists()]

    def statuses(self, cells: Iterable[ModelCell]) -> list[str]:
        """Return how these cells ended, in this run or an earlier one."""
        found = {k: m for file in self._files.values() for k, m in self._found(file).items()}
        return [found[cell.key].status for cell in cells if cell.key in found]

    def warnings(self, cells: Iterable[ModelCell]) -> list[str]:
        """Return sentences on what these cells lack and what looks wrong in them.

        What there is to say of the other cells of the files is one sentence with a count.
        """
        own = {cell.key for cell in cells}
        found: list[str] = []
        num_others = 0
        for file in self._files.values():
            others = self._found(file).keys() - own
            found += self._derive(file, own, mode=self._options.mode).warnings
            num_others += len(self._derive(file, others).warnings)
        if num_others:
            more = format_count(num_others, "more warning is", "more warnings are")
            found.append(
                f"{more} about cells of earlier runs that this command did not ask for; the "
                "commands that measured them say which, with --resume"
            )
        return found

    def fits(self) -> list[TimeFit]:
        """Return the fits of the times that count now."""
        return [fit for file in self._files.values() for fit in self._derive(file).fits]

    def _found(self, file: _File) -> dict[str, ModelMeasurement]:
        """Return the measurements that count now, by cell: the newest ok one, else the newest."""
        return newest_cells((*file.earlier, self._own_run(file)))

    def _own_run(self, file: _File) -> Run:
        return self._run.model_copy(update={"model_measurements": list(file.own.values())})

    def _derive(
        self, file: _File, about: Container[str] = (), *, mode: Mode | None = None
    ) -> ModelDocument:
        """Return a file; its warnings are on the cells with these keys, none unless asked for."""
        # in the order of the keys, so that it does not matter which run measured what
        found = dict(sorted(self._found(file).items()))
        if file.kind == "memory":
            return derive_memory(found, self._spec, self._kinds, about)
        return derive_computation(found, self._spec, mode, about)

    def _prepare(self) -> None:
        """Move damaged sidecars aside, and derive again what an earlier run left behind."""
        for file in self._files.values():
            if file.damage is not None:
                with sentences():
                    target = move_aside(sidecar_path(file.path))
                self.notes.append(
                    f"{file.damage}; it is kept as {target.name} and its cells are measured again"
                )
            if not self._options.resume or not file.earlier:
                continue
            data = self._derive(file).data
            present = read_document(file.path)
            if data and present != dict(data):
                state = "did not have the values of its samples" if file.exists else "was missing"
                if file.exists and present is None:
                    state = "was damaged"
                self._write(file)
                self.notes.append(f"{file.path} {state} and was derived again")
            elif data:
                file.written = data
                if not file.complete:
                    self._write(file)
                    self.notes.append(f"{sidecar_path(file.path)} lacked fits, which were added")

    def _write(self, file: _File) -> None:
        document = self._derive(file)
        while file.to_keep:
            old = file.to_keep[0]
            with sentences(old):
                self.notes.append(f"{old} was kept as {keep_copy(old).name}")
            # after the copy, so that one that failed is tried again
            del file.to_keep[0]
        sidecar = self._sidecar(file, document).model_dump(exclude_none=True)
        with sentences(sidecar_path(file.path)):
            write_json(sidecar_path(file.path), sidecar, number_rows=True)
        # a document whose values stay the same is not replaced after every cell
        if document.data and file.written != document.data:
            with sentences(file.path):
                write_json(file.path, dict(document.data))
                file.written = document.data

    def _sidecar(self, file: _File, document: ModelDocument) -> Sidecar:
        metadata = self._run.metadata
        command = metadata.get("command", "profile-model")
        source = f"measured by `{command}` on {metadata.get('device')}"
        if file.kind == "memory":
            source = f"counted exactly by `{command}`, {self._options.tp_impl} tensor parallelism"
        return Sidecar(
            version=SIDECAR_VERSION,
            document=file.kind,
            unit="MiB" if file.kind == "memory" else "ms",
            source=source,
            name=self._spec.name,
            # documented parameter sizes are those of fp32, whatever was counted
            parameter_bytes=4 if file.kind == "memory" else None,
            memory_bytes=self._memory_bytes if file.kind == "computation" else None,
            layer_times=document.layer_times,
            other_times=document.other_times,
            fits=document.fits,
            runs=[*file.earlier, self._own_run(file)],
        )


def _read(kind: Kind, path: Path) -> _File:
    """Return what there is of a file.

    Raises
    ------
    DocumentError: a sidecar was written by a newer version, or the system refuses to read it.
    """
    with suppress(OSError):
        remove_leftovers((path, sidecar_path(path)))
    file = _File(kind=kind, path=path, exists=path.exists())
    try:
        sidecar = read_sidecar(path, kind)
    except DocumentError as error:
        if not is_damage(error):
            raise
        file.damage = error
    else:
        file.earlier = [] if sidecar is None else list(sidecar.runs)
        file.complete = sidecar is None or kind == "memory" or bool(sidecar.fits)
    if not file.ours:
        file.to_keep = [p for p in (path, sidecar_path(path)) if p.exists()]
    return file


def _check_present(file: _File, options: ModelOptions) -> None:
    there = [path for path in (file.path, sidecar_path(file.path)) if path.exists()]
    if there and not options.force:
        refuse_earlier(there[0], ours=file.ours, resume=options.resume)


def _check_comparable(file: _File, metadata: Metadata, options: ModelOptions) -> None:
    if options.force:
        return
    found: dict[str, None] = {}
    # runs before the last that replaced them count no more
    replacing = [n for n, run in enumerate(file.earlier) if run.metadata.get(REPLACES)]
    for run in file.earlier[replacing[-1] if replacing else 0 :]:
        if any(m.status == "ok" for m in run.model_measurements):
            found |= dict.fromkeys(model_differences(file.kind, run.metadata, metadata))
    if found:
        raise InputError(
            f"{file.path}: the earlier run cannot be continued, since it differs in "
            f"{'; '.join(found)}; --force measures again and keeps the earlier samples as "
            "history, or choose another --out"
        )
