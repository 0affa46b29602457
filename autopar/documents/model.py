"""Reader and writer of model profiles: a computation and a memory file form a ModelProfile."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar

from autopar.documents import catalog
from autopar.documents.catalog import Content, locate, model_file_name
from autopar.documents.json import (
    JsonDocument,
    load_object,
    read_record,
    write_json,
)
from autopar.documents.memory import (
    MAKE_MEMORY,
    POSITIONS,
    is_of_paddle,
    memory_content,
    read_cells,
    read_memory,
)
from autopar.documents.schemas import ComputationDocument, MemoryDocument
from autopar.documents.sidecar import (
    SIDECAR_VERSION,
    LoadedFile,
    Sidecar,
    load_with_sidecar,
    sidecar_path,
    write_sidecar,
)
from autopar.documents.spec import load_spec
from autopar.documents.times import (
    MAKE_COMPUTATION,
    computation_content,
    computation_keys,
    layer_times_of,
    other_times_of,
    read_layer_times,
    read_other_times,
    read_times,
    seqs_text,
)
from autopar.errors import DocumentError, InputError
from autopar.records import Record, replace, typed
from autopar.run.model import (
    LayerMemory,
    LayerProfile,
    LayerSpec,
    ModelProfile,
    ModelSpec,
    OtherMemory,
)
from autopar.sources import Source, stacks_of
from autopar.units import MIB

_Document = TypeVar("_Document")


class ModelMemory(Record):
    """Content of one memory file, in bytes."""

    layers: tuple[Mapping[int, LayerMemory], ...]
    """Memory of every layer type, by sequence length."""
    other: Mapping[str, Mapping[tuple[int, ...], OtherMemory]]
    """Memory of embedding, head and loss, in the format of `ModelProfile.other_memory`."""
    logits_peak_bytes_per_sample: float
    """Additional memory per sample while the loss runs; 0 if unknown."""
    estimated: bool
    synthetic: bool
    sources: tuple[Source, ...]
    notes: tuple[str, ...]


@typed
def read_model_profile(
    *,
    computation: Path,
    memory: Path,
    spec: ModelSpec,
    sequence_parallel: bool,
    precision: str,
    parameter_bytes: Literal[2, 4] | None = None,
) -> ModelProfile:
    """Return the profile of a model in a computation and a memory file, in base units.

    Each path is a file, or a directory that is searched by `autopar.documents.catalog.locate`.

    sequence_parallel : True to read memory with Megatron sequence parallelism.
    precision : precision of the run, a part of file names.
    parameter_bytes : bytes per parameter in `parameter_size`; None: the value of the sidecar, else
        2 for files with PaddleNLP's raw keys and 4 for others.

    Raises VariantError: the memory file contains only the variant with (without) sequence
    parallelism. Raises DocumentError: a file is missing or unusable, a directory contains two files
    of equal priority, or the memory file contradicts `parameter_bytes`.
    """
    times_file, file_notes = _load(
        "computation", Path(computation), ComputationDocument, precision, spec
    )
    layer_times, other_times, time_notes = read_times(times_file.path, times_file.document, spec)
    layer_times, sharded_times, sidecar_notes = read_layer_times(
        times_file.path, times_file.sidecar, spec, layer_times
    )
    other_times, other_notes = read_other_times(
        times_file.path, times_file.sidecar, spec, other_times
    )
    kept = read_model_memory(
        memory,
        spec=spec,
        sequence_parallel=sequence_parallel,
        precision=precision,
        parameter_bytes=parameter_bytes,
    )
    sidecar = times_file.sidecar
    return ModelProfile(
        layers=tuple(
            LayerProfile(times=times, memory=table, sharded_times=sharded)
            for times, table, sharded in zip(layer_times, kept.layers, sharded_times, strict=True)
        ),
        other_times=other_times,
        other_memory=kept.other,
        sequence_parallel=sequence_parallel,
        precision=precision,
        estimated=kept.estimated or (sidecar is not None and sidecar.estimated),
        synthetic=kept.synthetic or (sidecar is not None and sidecar.synthetic),
        logits_peak_bytes_per_sample=kept.logits_peak_bytes_per_sample,
        threads=sidecar.threads if sidecar is not None else None,
        sources=tuple(dict.fromkeys((*times_file.sources, *kept.sources))),
        notes=(
            *file_notes,
            *time_notes,
            *sidecar_notes,
            *other_notes,
            *kept.notes,
        ),
    )


def read_model_memory(
    memory: Path,
    *,
    spec: ModelSpec,
    sequence_parallel: bool,
    precision: str,
    parameter_bytes: Literal[2, 4] | None = None,
) -> ModelMemory:
    """Return the content of a memory file, or of the memory file in a directory, in bytes.

    Parameters and errors are those of `read_model_profile`.
    """
    memory_file, file_notes = _load("memory", Path(memory), MemoryDocument, precision, spec)
    layer_memory, other_memory, memory_notes = read_memory(
        memory_file.path,
        memory_file.document,
        spec,
        sequence_parallel=sequence_parallel,
        parameter_bytes=_parameter_bytes(memory_file, parameter_bytes),
    )
    layer_memory, cell_notes = read_cells(
        memory_file.path,
        memory_file.sidecar,
        layer_memory,
        sequence_parallel=sequence_parallel,
    )
    sidecar = memory_file.sidecar
    peak = sidecar.logits_peak_bytes_per_sample if sidecar is not None else None
    return ModelMemory(
        layers=layer_memory,
        other=other_memory,
        logits_peak_bytes_per_sample=peak or 0.0,
        estimated=sidecar is not None and sidecar.estimated,
        synthetic=sidecar is not None and sidecar.synthetic,
        sources=memory_file.sources,
        notes=(*file_notes, *memory_notes, *cell_notes),
    )


def _load(
    kind: Literal["computation", "memory"],
    path: Path,
    model: type[_Document],
    precision: str,
    spec: ModelSpec,
) -> tuple[LoadedFile[_Document], tuple[str, ...]]:
    """Return the profile file of a model, and notes on its selection.

    path : the file, or a directory that contains it.
    """
    remedy = MAKE_COMPUTATION if kind == "computation" else MAKE_MEMORY
    notes: tuple[str, ...] = ()
    read: dict[Path, tuple[JsonDocument, _Document]] = {}

    def content(path: Path) -> Content:
        file = load_object(path)
        read[path] = file, read_record(model, path, file.data)
        return _CONTENT[kind](read[path][1])

    if path.is_dir():
        path, notes = locate(path, kind, precision, spec, content, remedy)
    else:
        expected = model_file_name(kind, precision, spec)
        remedy = f"{remedy} (documented name {expected})"
        notes = _precision_note(path, precision)
    return load_with_sidecar(kind, path, model, remedy=remedy, read=read.get(path)), notes


def is_file_of_paddle(path: Path) -> bool:
    """Return True for a memory file with PaddleNLP's raw keys, or a folder of such files only.

    False for files that cannot be read.
    """
    paths = sorted(path.glob("memory_profiling_*.json")) if path.is_dir() else [path]
    paths = [one for one in paths if not one.name.endswith(".meta.json")]
    try:
        found = [read_record(MemoryDocument, one, load_object(one).data) for one in paths]
    except DocumentError:
        return False
    return bool(found) and all(map(is_of_paddle, found))


_CONTENT: dict[str, Callable[[Any], Content]] = {
    "computation": computation_content,
    "memory": memory_content,
}


def _precision_note(path: Path, precision: str) -> tuple[str, ...]:
    named = [p for p in ("bf16", "fp16", "fp32") if f"_profiling_{p}_" in path.name]
    if named and named[0] != precision:
        return (f"{path.name} is named {named[0]} and was read as {precision}",)
    return ()


def _parameter_bytes(
    file: LoadedFile[MemoryDocument], option: Literal[2, 4] | None
) -> Literal[2, 4] | None:
    """Return the bytes per parameter from the sidecar or --parameter-bytes, None without either.

    Raises DocumentError if the file or its sidecar contradicts the option.
    """
    recorded = file.sidecar.parameter_bytes if file.sidecar is not None else None
    if recorded is not None and option is not None and recorded != option:
        raise DocumentError(
            sidecar_path(file.path),
            f"the value is {recorded}, but --parameter-bytes is {option}",
            key="parameter_bytes",
            remedy="Remove --parameter-bytes",
        )
    if recorded is None and option == 4 and is_of_paddle(file.document):
        raise DocumentError(
            file.path,
            "raw keys of PaddleNLP mean 2 bytes per parameter, but --parameter-bytes is 4",
            key="parameter_size",
            remedy="Remove --parameter-bytes",
        )
    return recorded or option


def write_model_profile(
    profile: ModelProfile,
    spec: ModelSpec,
    out_dir: Path | str,
    *,
    other_variant: ModelProfile | None = None,
) -> list[Path]:
    """Write the computation and memory file of a profile and their sidecars, and return the paths.

    Ulysses activations are not written; they are only in the raw cells of a measuring run.

    other_variant : profile with the opposite `sequence_parallel`, whose memory tables are added to
        the memory file.

    Raises InputError: the number of heads, a part of the file names, is unknown; or both variants
    have the same `sequence_parallel`.
    """
    if spec.layers[0].num_heads is None:
        raise InputError(
            f"model {spec.name!r} has no number of heads, which the documented file names contain",
            remedy="Give num_heads in model.json",
        )
    if other_variant is not None and other_variant.sequence_parallel == profile.sequence_parallel:
        raise InputError(
            "both memory variants have sequence_parallel = "
            f"{profile.sequence_parallel}, expected one with and one without"
        )
    out = Path(out_dir)
    tables: dict[str, Any] = memory_keys(profile)
    if other_variant is not None:
        # Keys of the two variants differ by their suffix, so that one file can contain both.
        tables |= memory_keys(other_variant)
    documents: tuple[tuple[Literal["computation", "memory"], dict[str, Any]], ...] = (
        ("computation", computation_keys(profile)),
        ("memory", tables),
    )
    paths = []
    for kind, data in documents:
        path = out / model_file_name(kind, profile.precision, spec)
        write_json(path, data)
        paths += [path, write_sidecar(path, _sidecar(kind, profile, spec))]
    return paths


def _sidecar(
    kind: Literal["computation", "memory"], profile: ModelProfile, spec: ModelSpec
) -> Sidecar:
    common = Sidecar(
        version=SIDECAR_VERSION,
        document=kind,
        unit="ms" if kind == "computation" else "MiB",
        source="estimated from a device card and a model spec" if profile.estimated else "measured",
        estimated=profile.estimated,
        synthetic=profile.synthetic,
        name=spec.name,
        stack=next(iter(stacks_of(profile.sources)), None),
    )
    if kind == "computation":
        return replace(
            common,
            layer_times=layer_times_of(profile.layers),
            other_times=other_times_of(profile.other_times),
        )
    return replace(
        common,
        parameter_bytes=4,
        logits_peak_bytes_per_sample=profile.logits_peak_bytes_per_sample or None,
    )


# --------------------------------------------------------------------------------------------------
# Counted memory of shipped models, used instead of an estimate.
#
# A shipped file contains one sequence length of the layers, whose memory is proportional to the
# tokens. It contains several lengths of embedding and head, whose peak is a maximum of several
# linear functions. Linear interpolation between two lengths is an upper bound of it.


SHIPPED_PRECISION: Literal["bf16"] = "bf16"
"""Precision of the shipped memory files, which apply to all precisions with equal element size."""
_PRECISIONS = (SHIPPED_PRECISION, "fp16")


def memory_keys(profile: ModelProfile) -> dict[str, Any]:
    """Return the documented keys of a profile's memory: MiB, 4 bytes per parameter."""
    suffix = "_sp" if profile.sequence_parallel else ""
    result: dict[str, Any] = {}
    for kind, layer in enumerate(profile.layers):
        result[f"layertype_{kind}{suffix}"] = {
            str(seq): _layer_entry(memory) for seq, memory in sorted(layer.memory.items())
        }
    for part, name in POSITIONS.items():
        if name in profile.other_memory:
            result[f"other_memory_pp_{part}{suffix}"] = {
                seqs_text(seqs): {
                    "model_states": _mib(memory.model_state_bytes),
                    "activation": _mib(memory.activation_bytes_per_sample),
                }
                for seqs, memory in sorted(profile.other_memory[name].items())
            }
    return result


def _layer_entry(memory: LayerMemory) -> dict[str, Any]:
    activations = _mib(memory.activation_bytes_per_sample)
    if memory.checkpoint_bytes_per_sample is not None:
        activations["checkpoint"] = memory.checkpoint_bytes_per_sample / MIB
    return {
        # The documented size is that of fp32 weights for any precision.
        "parameter_size": memory.parameter_count * 4 / MIB,
        "tp_activation_per_bsz_dict": activations,
    }


def _mib(table: Mapping[int, float]) -> dict[str, float]:
    return {str(degree): value / MIB for degree, value in sorted(table.items())}


def with_shipped_memory(profile: ModelProfile, spec: ModelSpec, name: str) -> ModelProfile:
    """Return an estimated profile with its memory replaced by the counts of a shipped model.

    Counts of the shipped model `name` are used, or those of a shipped model with equal layers. The
    number of layers and the sequence lengths may differ from the shipped ones. Otherwise memory
    stays estimated, with a note on the reason.

    spec : spec of the planned model.
    """
    folder = catalog.find_configs(name)
    if folder is None:
        alike = _shipped_alike(spec)
        if alike is None:
            return _with_note(profile, f"{spec.name} is not a shipped model")
        name, folder = alike
    # A shipped model has its own sequence length.
    published = catalog.published_name(name)
    shipped = load_spec(name if published is None else published[0])
    file = folder / model_file_name("memory", SHIPPED_PRECISION, shipped)
    obstacle = _obstacle(profile, spec, shipped, file)
    if obstacle is not None:
        return _with_note(profile, obstacle)
    memory = read_model_memory(
        file,
        spec=shipped,
        sequence_parallel=profile.sequence_parallel,
        precision=SHIPPED_PRECISION,
    )
    # _obstacle has rejected several length factors.
    factor = _factor(spec, shipped) or Fraction(1)
    notes = [*profile.notes, *memory.notes]
    if factor != 1:
        own, lengths = (
            ", ".join(str(layer.seq_length) for layer in layers)
            for layers in (shipped.layers, spec.layers)
        )
        notes.append(
            f"scaled: memory of layers linearly from sequence length {own} to {lengths}, which is "
            "exact; embedding and head between counted lengths"
        )
    return replace(
        profile,
        layers=tuple(
            replace(
                layer, memory={new.seq_length: _scaled_layer(table[old.seq_length], float(factor))}
            )
            for layer, table, old, new in zip(
                profile.layers, memory.layers, shipped.layers, spec.layers, strict=True
            )
        ),
        other_memory={
            position: {
                tuple(layer.seq_length for layer in spec.layers): _other_at(table, shipped, factor)
            }
            for position, table in memory.other.items()
        },
        logits_peak_bytes_per_sample=memory.logits_peak_bytes_per_sample,
        sources=(*profile.sources, *memory.sources),
        notes=tuple(notes),
    )


def _with_note(profile: ModelProfile, why: str) -> ModelProfile:
    note = f"memory is estimated: {why}"
    return replace(profile, notes=(*profile.notes, note))


def _obstacle(profile: ModelProfile, spec: ModelSpec, shipped: ModelSpec, file: Path) -> str | None:
    """Return the reason why shipped memory does not apply to a model, None if it applies."""
    if not file.is_file():
        return f"no counted memory of {shipped.name} is shipped"
    if profile.precision not in _PRECISIONS:
        return f"the shipped file is of {SHIPPED_PRECISION}, not {profile.precision}"
    for key, there, asked in _differences(spec, shipped):
        # The first difference is reason enough.
        return f"the shipped file is of {key} {there}, not {asked}"
    if _factor(spec, shipped) is None:
        own, lengths = (
            ", ".join(str(layer.seq_length) for layer in layers)
            for layers in (shipped.layers, spec.layers)
        )
        return (
            f"the shipped file is for sequence lengths {own}, and {lengths} are not "
            "proportional to them"
        )
    return None


def _differences(spec: ModelSpec, shipped: ModelSpec) -> list[tuple[str, Any, Any]]:
    """Return (field, shipped value, given value) of differences that change memory.

    Sequence lengths and numbers of layers are not compared.
    """
    if len(spec.layers) != len(shipped.layers):
        return [("layer types", len(shipped.layers), len(spec.layers))]
    pairs: list[tuple[ModelSpec | LayerSpec, ModelSpec | LayerSpec]] = [(spec, shipped)]
    pairs += zip(map(_said, spec.layers), map(_said, shipped.layers), strict=True)
    return [
        (name, getattr(old, name), getattr(new, name))
        for new, old in pairs
        for name in new.__struct_fields__
        if name not in _NO_BYTES and getattr(old, name) != getattr(new, name)
    ]


_NO_BYTES = frozenset(
    # Angles are computed for any base.
    {"name", "layers", "num_layers", "seq_length"}
    | {"rotary_base", "rotary_scaling_factor", "rotary_share"}
)
"""Fields of a spec that do not affect the memory of one layer at one length."""


def _said(layer: LayerSpec) -> LayerSpec:
    """Return the layer with key-value heads and head width filled in if they were omitted."""
    if layer.num_heads is None:
        return layer
    return replace(
        layer,
        num_kv_heads=layer.num_kv_heads or layer.num_heads,
        head_dim=layer.head_dim or layer.hidden_size // layer.num_heads,
    )


def _shipped_alike(spec: ModelSpec) -> tuple[str, Path] | None:
    """Return (name, folder) of the shipped model with equal memory, None if there is none."""
    for name in catalog.model_names():
        folder = catalog.find_configs(name)
        if folder is not None and not _differences(spec, load_spec(name)):
            return name, folder
    return None


def _factor(spec: ModelSpec, shipped: ModelSpec) -> Fraction | None:
    """Return planned / shipped sequence length; None if the ratio differs by layer type."""
    # Exact fractions, so that equal proportions compare equal.
    factors = {
        Fraction(new.seq_length, old.seq_length)
        for new, old in zip(spec.layers, shipped.layers, strict=True)
    }
    return factors.pop() if len(factors) == 1 else None


def _scaled_layer(memory: LayerMemory, factor: float) -> LayerMemory:
    saved = memory.checkpoint_bytes_per_sample
    return LayerMemory(
        parameter_count=memory.parameter_count,
        activation_bytes_per_sample=_times(memory.activation_bytes_per_sample, factor),
        checkpoint_bytes_per_sample=None if saved is None else saved * factor,
        ulysses_activation_bytes_per_sample=_times(
            memory.ulysses_activation_bytes_per_sample, factor
        ),
        backward_bytes_per_sample=_times(memory.backward_bytes_per_sample, factor),
        ulysses_backward_bytes_per_sample=_times(memory.ulysses_backward_bytes_per_sample, factor),
    )


def _times(values: Mapping[int, float], factor: float) -> dict[int, float]:
    return {degree: value * factor for degree, value in values.items()}


def _other_at(
    table: Mapping[tuple[int, ...], OtherMemory], shipped: ModelSpec, factor: Fraction
) -> OtherMemory:
    """Return the memory of embedding and head at `factor` times the shipped lengths."""
    own = tuple(layer.seq_length for layer in shipped.layers)
    states: dict[int, float] = {}
    points: dict[int, list[tuple[float, float]]] = {}
    for lengths, memory in sorted(table.items()):
        states |= memory.model_state_bytes  # equal at every length
        # All types are scaled by one factor, so that the first length gives it.
        for degree, value in memory.activation_bytes_per_sample.items():
            points.setdefault(degree, []).append((lengths[0] / own[0], value))
    return OtherMemory(
        model_state_bytes=dict(sorted(states.items())),
        activation_bytes_per_sample={
            degree: _on_line(points[degree], float(factor)) for degree in sorted(points)
        },
    )


def _on_line(points: list[tuple[float, float]], at: float) -> float:
    """Return the value at `at` by linear interpolation between sorted points.

    Before the first point, the line through the first two is used. After the last point the value
    is proportional to `at`: an upper bound, because the constant part of a peak does not grow. With
    a single point it is proportional everywhere, and below that point it is a lower bound.
    """
    places = [place for place, _ in points]
    if at >= places[-1] or len(points) == 1:
        return points[-1][1] * (at / places[-1])
    # At least 1: values before the first point are on the first line.
    right = max(1, bisect_left(places, at))
    (x0, y0), (x1, y1) = points[right - 1 : right + 1]
    return y0 + (y1 - y0) * ((at - x0) / (x1 - x0))
