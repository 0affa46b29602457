"""Count the memory files of the models that are part of the package, for `make models`.

The cells include those of `profile-model --source exact` at the model's default length.
In addition, layers are counted at every tensor-parallel degree that the heads allow. Embedding and
head are counted at every vocabulary-parallel degree that a cluster may use, and at shorter lengths.
The sidecar contains only the cells that the planner reads and no data about the machine, so all
machines write identical bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.command.run import say
from autopar.documents import catalog
from autopar.documents.catalog import model_file_name
from autopar.documents.json import write_json, written
from autopar.documents.model import SHIPPED_PRECISION
from autopar.documents.sidecar import (
    SIDECAR_VERSION,
    ModelMeasurement,
    Run,
    Sidecar,
    TensorKind,
    describe_model,
    read_sidecar,
    sidecar_path,
)
from autopar.documents.spec import load_spec
from autopar.errors import AutoparError, DocumentError, InputError
from autopar.rates.model import VOCAB_DEGREES
from autopar.records import Record, replace
from autopar.run.model import ModelSpec
from autopar.run.plan import tensor_degrees
from profiler.environment import Metadata, require_torch
from profiler.model.cells import ModelCell, plan_cells
from profiler.model.documents import derive_memory
from profiler.model.options import ModelOptions
from profiler.model.record import model_differences
from profiler.record import read_document

# --------------------------------------------------------------------------------------------------
# Check whether a shipped memory file already contains the results that a run would count.
#
# Counting is exact: the same model, precision, torch version and tensor-parallel implementation
# give the same bytes. Such a file need not be counted again or replaced.


def is_counted(
    path: Path,
    cells: Sequence[ModelCell],
    spec: ModelSpec,
    *,
    metadata: Metadata,
    kinds: tuple[TensorKind, TensorKind],
) -> bool:
    """Return True if a shipped memory file already contains the results of these memory cells.

    False for files of `profile-model`, which `--resume` continues, and for unreadable files.

    path : the memory file.
    cells : cells of the run; time cells are ignored.
    kinds : as in `derive_memory`.
    """
    try:
        sidecar = read_sidecar(path, "memory")
    except DocumentError:  # the code that writes the file reports the problem
        return False
    there = read_document(path)
    if sidecar is None or sidecar.estimated or not sidecar.runs or there is None:
        return False
    # counts are equal for all builds of one torch release (CPU, CUDA)
    now = {**metadata, "torch": _release(metadata)}
    for run in sidecar.runs:
        earlier = {**run.metadata, "torch": _release(run.metadata)}
        if run.id is not None or model_differences("memory", earlier, now):
            return False
    # only the keys are compared, so the values are placeholders
    made_up = {
        cell.key: replace(cell.filled(), bytes={"activation": 1.0, "peak": 1.0}, num_parameters=1)
        for cell in cells
        if cell.quantity == "memory"
    }
    return bool(made_up) and _has_keys(there, derive_memory(made_up, spec, kinds).data)


def _release(metadata: Mapping[str, object]) -> str:
    """Return the torch version without its build suffix (such as `+cpu`)."""
    return str(metadata.get("torch")).split("+")[0]


def _has_keys(there: object, wanted: object) -> bool:
    """Return True if nested tables `there` contain every key of `wanted`."""
    if not isinstance(wanted, Mapping):
        return not isinstance(there, Mapping)
    return isinstance(there, Mapping) and all(
        key in there and _has_keys(there[key], value) for key, value in wanted.items()
    )


# --------------------------------------------------------------------------------------------------
# Counting the files to ship.


_KINDS: tuple[TensorKind, TensorKind] = ("sp", "tp")
"""Sharding kinds of the tables with and without `_sp`."""
_SHARES = ((1, 16), (1, 4), (3, 4), (1, 1))
"""Sequence lengths at which embedding and head are counted, as fractions of the model's length.
Several are needed because their peak is not exactly proportional to the tokens. Three quarters
gives a length that is divisible by 3, which clusters of 24 GPUs need."""


class ShippedMemory(Record):
    """Memory file of a model of the package, and its sidecar."""

    file_name: str
    data: dict[str, Any]
    """Keys and values of the memory file, in MiB."""
    sidecar: Sidecar


def shipped_cells(spec: ModelSpec) -> tuple[ModelCell, ...]:
    """Return all cells that are counted for the shipped file of a model."""
    own = tuple(layer.seq_length for layer in spec.layers)
    cases = tuple(
        tuple(length * part // whole for length in own)
        for part, whole in _SHARES
        if all(length * part >= whole for length in own)
    )
    options = _options(spec)
    planned = plan_cells(spec, replace(options, seq_lengths=cases))
    found: dict[str, ModelCell] = {}
    for cell in planned:
        if cell.part != "layer" or cell.layer_type is None:
            sharded = _sharded_vocab(spec, cell)
        elif cell.seq_lengths == (own[cell.layer_type],):
            sharded = _sharded_layer(spec, cell)
        else:  # shorter layers are exactly proportional to the tokens
            continue
        found |= {one.key: one for one in (cell, *sharded)}
    return tuple(found.values())


def count_shipped(spec: ModelSpec) -> ShippedMemory:
    """Count a model on the CPU and return its memory file and sidecar.


    Raises InputError: a cell cannot be counted.
    """
    import torch

    from profiler.model.measuring import SpecMeasurer

    measurer = SpecMeasurer(spec, _options(spec), torch.device("cpu"))
    found: dict[str, ModelMeasurement] = {}
    for cell in shipped_cells(spec):
        counted = measurer.measure(cell)
        if counted.status != "ok":
            raise InputError(f"model {spec.name!r}: {cell.key} was not counted: {counted.reason}")
        # durations would differ between machines
        found[cell.key] = replace(counted, elapsed_s=0.0)
    document = derive_memory(dict(sorted(found.items())), spec, _KINDS)
    layers = [found[key] for key in sorted(found) if found[key].part == "layer"]
    metadata: dict[str, str | int | float | bool | None] = {
        "torch": str(torch.__version__).split("+")[0],
        "dtype": SHIPPED_PRECISION,
        "model": describe_model(spec),
        "unit": "all",
        "tp_impl": "megatron",
    }
    return ShippedMemory(
        file_name=model_file_name("memory", SHIPPED_PRECISION, spec),
        data=dict(document.data),
        sidecar=Sidecar(
            version=SIDECAR_VERSION,
            document="memory",
            unit="MiB",
            source="counted exactly by `python -m profiler.model.shipped`, megatron tensor "
            "parallelism; single cells are those of layers",
            name=spec.name,
            parameter_bytes=4,
            runs=[Run(metadata=metadata, model_measurements=layers)],
        ),
    )


def write_shipped(name: str) -> Path:
    """Count a shipped model, write its memory file and sidecar, and return the file's path."""
    counted = count_shipped(load_spec(name))
    path = catalog.find_model(name).parent / "configs" / counted.file_name
    sidecar = written(counted.sidecar, defaults=False)
    # default values are omitted, except `tool`, the name of the program
    write_json(sidecar_path(path), {**sidecar, "tool": counted.sidecar.tool}, number_rows=True)
    write_json(path, counted.data)
    return path


def _options(spec: ModelSpec) -> ModelOptions:
    return ModelOptions(
        model=spec.name,
        profile_types=("memory",),
        source="exact",
        device="cpu",
        dtype=SHIPPED_PRECISION,
        degrees=(1,),
    )


def _sharded_layer(spec: ModelSpec, cell: ModelCell) -> Iterator[ModelCell]:
    layer = spec.layers[cell.layer_type or 0]
    if cell.checkpoint != "none":  # sharded checkpoints follow from the unsharded one
        return
    kinds: tuple[TensorKind, ...] = (*_KINDS, "ulysses")
    for degree in tensor_degrees(layer)[1:]:
        for kind in kinds:
            sharded = replace(cell, degree=degree, kind=kind)
            try:
                sharded.sharding.check(layer)
            except InputError:  # also illegal for the planner
                continue
            yield sharded


def _sharded_vocab(spec: ModelSpec, cell: ModelCell) -> Iterator[ModelCell]:
    own = {degree for layer in spec.layers for degree in tensor_degrees(layer)}
    for degree in sorted({*own, *VOCAB_DEGREES} - {1}):
        for kind in _KINDS:
            # degrees must divide the lengths only with sequence parallelism
            if kind == "tp" or all(length % degree == 0 for length in cell.seq_lengths):
                yield replace(cell, degree=degree, kind=kind)


def main(names: Sequence[str] = ()) -> int:
    """Write the memory files of the named shipped models (default: all); return the exit code."""
    try:
        require_torch()
        for name in names or catalog.model_names():
            sys.stdout.write(f"{write_shipped(name)}\n")
            sys.stdout.flush()
    except AutoparError as error:
        say(f"profiler.model.shipped: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
