"""Measurement of single cells of reference layers and custom modules, including failed cells."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autopar.documents.sidecar import ModelMeasurement
from autopar.documents.times import seqs_text
from autopar.errors import AutoparError
from autopar.rates.model import activation_bytes
from autopar.records import Record, replace
from autopar.run.model import LayerSpec, ModelSpec, padded_vocab_size, parameter_count
from autopar.units import format_bytes
from profiler.measure import Policy, Timer, out_of_memory, policy_of, torch_dtype
from profiler.model.cells import ModelCell, with_seq_lengths
from profiler.model.counting import ExactMemory, count_memory, layer_memory, vocab_memory
from profiler.model.layers.blocks import build_layer, layer_inputs
from profiler.model.layers.parallel import sole_group, timed_group
from profiler.model.layers.sharding import Sharding
from profiler.model.layers.vocab import build_stack, build_vocab, vocab_inputs
from profiler.model.modules import Built, blamed, call, fake_tensors, first_line, main_output
from profiler.model.options import ModelOptions, Unit
from profiler.model.sources import ModuleSource, rehearse
from profiler.model.timing import (
    DEVICE_SAMPLE_S,
    Timed,
    allocated_by,
    explain_difference,
    figures_of,
    time_module,
)
from profiler.options import Precision
from profiler.processes import available_bytes

# --------------------------------------------------------------------------------------------------
# One half of a layer, attention or MLP, with its norm and residual connection.


def build_half(
    spec: LayerSpec,
    sharding: Sharding,
    *,
    unit: Unit,
    group: Any,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Module:
    """Return the attention or MLP half of a layer on one rank, with norm and residual connection.

    The call signature is that of `build_layer`'s module. Cross-attention belongs to the attention
    half. Parameters and activations of the two halves add up to those of the layer.
    """
    return _Half(build_layer(spec, sharding, group=group, dtype=dtype, device=device), unit)


class _Half(nn.Module):
    def __init__(self, layer: Any, unit: Unit) -> None:
        super().__init__()
        names = ("attention_norm", "attention", "cross_norm", "cross_attention")
        for name in names if unit == "attention" else ("mlp_norm", "mlp"):
            setattr(self, name, getattr(layer, name))
        self.unit = unit

    def forward(self, x: Any, context: Any = None) -> Any:
        if self.unit == "mlp":
            return x + self.mlp(self.mlp_norm(x))
        x = x + self.attention(self.attention_norm(x))
        if self.cross_attention is not None:
            x = x + self.cross_attention(self.cross_norm(x), context)
        return x


# --------------------------------------------------------------------------------------------------
# The reference module of a cell, for timing, counting, and comparison with the device.
#
# Collectives of `SoleRank` allocate the buffers of a real group without exchanging data; those of
# `timed_group` take no time.


class CellPart(Record):
    """Functions that create the module and the inputs of one part of a model at one size."""

    build: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[torch.Tensor, ...]]
    num_own: int
    """Number of leading inputs that count for the part; the others are shared by all layers."""


def cell_part(
    spec: ModelSpec,
    cell: ModelCell,
    *,
    unit: Unit,
    dtype: Precision,
    device: torch.device | str,
    group_of: Callable[[int], Any] = sole_group,
) -> CellPart:
    """Return the part of a cell; its `build` raises InputError for an unsupported sharding.

    unit : all of a layer, or its attention or MLP half.
    group_of : function from a tensor-parallel degree to a simulated group.
    """
    on: dict[str, Any] = {"dtype": torch_dtype(dtype), "device": device}
    if cell.part == "layer":
        layer = replace(spec.layers[cell.layer_type or 0], seq_length=cell.seq_lengths[0])
        build = build_layer if unit == "all" else partial(build_half, unit=unit)
        return CellPart(
            build=lambda: build(layer, cell.sharding, group=group_of(cell.degree), **on),
            make_inputs=lambda: layer_inputs(
                layer,
                cell.sharding,
                batch=cell.batch,
                encoder_seq_length=cell.encoder_seq_length,
                **on,
            ),
            # the second input, if any, is the encoder's output, which all layers share
            num_own=1,
        )
    sized, part = with_seq_lengths(spec, cell.seq_lengths), cell.part
    how: dict[str, Any] = {"degree": cell.degree, "kind": cell.kind, **on}

    def build_rest() -> nn.Module:
        if cell.num_layers is None:
            return build_vocab(sized, part, group=group_of(cell.degree), **how)
        layers = (
            replace(layer, num_layers=count)
            for layer, count in zip(sized.layers, cell.num_layers, strict=True)
        )
        return build_stack(replace(sized, layers=tuple(layers)), **on).module

    return CellPart(
        build=build_rest,
        make_inputs=lambda: vocab_inputs(sized, part, batch=cell.batch, **how),
        num_own=len(sized.layers) + 1,
    )


def time_cell(
    spec: ModelSpec,
    cell: ModelCell,
    *,
    unit: Unit = "all",
    dtype: Precision,
    device: torch.device,
    policy: Policy,
    backward: bool = True,
    more: bool = True,
    timer: Timer | None = None,
) -> Timed:
    """Return the times of a cell's part, in seconds, on one rank of its tensor-parallel group.

    The computation of the rank runs on `device`; collectives take no time (see `LocalGroup`). For
    a cell with checkpointing, the backward includes the recomputation. Forward passes of several
    layers (`layernum[...]` in Galvatron's files) run without backward, but with autograd on.

    more : True to also time, for a layer with `backward`, recomputation and the optimizer step.


    Raises InputError: the part cannot have this sharding.
    """
    part = cell_part(spec, cell, unit=unit, dtype=dtype, device=device, group_of=timed_group)
    where = f"batch {cell.batch}, sequence {seqs_text(cell.seq_lengths)}"
    if cell.num_layers is not None:
        where += f", {seqs_text(cell.num_layers)} layers"
        backward = False
    # Embedding and head are never recomputed. Their optimizer step is that of the vocabulary
    # tables, which the step of a layer does not represent.
    more = more and backward and cell.part == "layer"
    return time_module(
        part.build,
        part.make_inputs,
        policy,
        device,
        where=where,
        backward=backward,
        checkpoint=more and unit == "all" and cell.checkpoint == "none",
        optimizer=more,
        timer=timer,
    )


# --------------------------------------------------------------------------------------------------
# Measurement of the cells of a model spec.


OUT_OF_MEMORY = "out of memory"
"""Prefix of the reason of a cell that ran out of memory."""
_SAMPLE_S = {"cuda": DEVICE_SAMPLE_S, "cpu": 4e-3}
"""Shortest repetition by device type, seconds, so that the timer's overhead is negligible."""
ADAM_BYTES = 16
"""Bytes per parameter for AdamW: fp32 copy, fp32 gradient and two moments."""
_LOGIT_BYTES = 12
"""Bytes per logit: the logit, its fp32 copy and its gradient."""


class Measurer(ABC):
    """Base class that measures the cells of one model on one device."""

    def __init__(self, options: ModelOptions, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.policy = policy_of(options, _SAMPLE_S[device.type])

    def rehearse(self, cells: Sequence[ModelCell]) -> None:
        """Raise InputError if a trial of the model fails; does nothing for reference layers."""
        return

    def measure(self, cell: ModelCell) -> ModelMeasurement:
        """Return the measurement of a cell; if it fails, status and reason contain the error."""
        began_s = time.perf_counter()
        short = self._shortage(cell)
        if short is not None:
            found = cell.filled(status="failed", reason=short)
        else:
            try:
                found = self._time(cell) if cell.quantity == "time" else self._memory(cell)
            except (AutoparError, RuntimeError, MemoryError, TypeError, ValueError) as error:
                found = cell.filled(status="failed", reason=_reason(error))
        return replace(found, elapsed_s=time.perf_counter() - began_s)

    @abstractmethod
    def _time(self, cell: ModelCell) -> ModelMeasurement: ...

    def _memory(self, cell: ModelCell) -> ModelMeasurement:
        measurement = counted_as(cell, self._counted(cell))
        if self.options.source == "device":
            try:
                self._add_device_memory(cell, measurement)
            except (AutoparError, RuntimeError, MemoryError) as error:
                # the exact results are valid without the device's
                measurement.notes.append(f"not measured on the device: {_reason(error)}")
        return measurement

    @abstractmethod
    def _counted(self, cell: ModelCell) -> ExactMemory:
        """Return the exact memory of a memory cell."""

    @abstractmethod
    def _add_device_memory(self, cell: ModelCell, measurement: ModelMeasurement) -> None:
        """Add the bytes that the device's allocator reports to `measurement`, if available."""

    def _shortage(self, cell: ModelCell) -> str | None:
        """Return the reason to skip a time cell that exceeds the free memory of a CPU, or None."""
        # a CPU allocator overcommits, and the kernel then kills the process
        if cell.quantity != "time" or self.device.type != "cpu":
            return None
        needed, there = self._needed_bytes(cell), available_bytes()
        if needed <= there:
            return None
        return (
            f"{OUT_OF_MEMORY}: about {format_bytes(needed)} are needed and "
            f"{format_bytes(there)} are free"
        )

    @abstractmethod
    def _needed_bytes(self, cell: ModelCell) -> float:
        """Return the approximate bytes that timing a cell needs; 0 if unknown."""


class SpecMeasurer(Measurer):
    """Measurer of the reference layers, embedding and head of a model spec."""

    def __init__(self, spec: ModelSpec, options: ModelOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self.spec = spec

    def _time(self, cell: ModelCell) -> ModelMeasurement:
        timed = time_cell(
            self.spec,
            cell,
            unit=self.options.unit,
            dtype=self.options.dtype,
            device=self.device,
            policy=self.policy,
            backward=self.options.backward,
        )
        return filled_with(cell, timed)

    def _counted(self, cell: ModelCell) -> ExactMemory:
        dtype = self.options.dtype
        if cell.part != "layer":
            return vocab_memory(
                with_seq_lengths(self.spec, cell.seq_lengths),
                cell.part,
                degree=cell.degree,
                kind=cell.kind,
                batch=cell.batch,
                dtype=dtype,
            )
        if self.options.unit == "all":
            layer = self.spec.layers[cell.layer_type or 0]
            return layer_memory(
                replace(layer, seq_length=cell.seq_lengths[0]),
                cell.sharding,
                batch=cell.batch,
                dtype=dtype,
                encoder_seq_length=cell.encoder_seq_length,
            )
        with FakeTensorMode():
            part = cell_part(self.spec, cell, unit=self.options.unit, dtype=dtype, device="cpu")
            inputs = part.make_inputs()
            return count_memory(part.build(), inputs, shared=inputs[part.num_own :])

    def _add_device_memory(self, cell: ModelCell, measurement: ModelMeasurement) -> None:
        part = cell_part(
            self.spec, cell, unit=self.options.unit, dtype=self.options.dtype, device=self.device
        )
        found = allocated_by(part.build, part.make_inputs, self.device, shared=part.num_own)
        measurement.bytes.update(figures_of(found))
        said = explain_difference(
            measurement.bytes["activation"], found.kept_bytes, found.requested_bytes
        )
        if said is not None:
            measurement.notes.append(said)

    def _needed_bytes(self, cell: ModelCell) -> float:
        return needed_bytes(self.spec, cell, self.options)


def is_out_of_memory(measurement: ModelMeasurement) -> bool:
    """Return True if a cell failed because it ran out of memory."""
    return measurement.status == "failed" and (measurement.reason or "").startswith(OUT_OF_MEMORY)


def needed_bytes(spec: ModelSpec, cell: ModelCell, options: ModelOptions) -> float:
    """Return the approximate bytes of memory that timing a cell of a model spec needs."""
    element = torch_dtype(options.dtype).itemsize
    types = range(len(spec.layers)) if cell.layer_type is None else (cell.layer_type,)
    counts = cell.num_layers or tuple(int(cell.part == "layer") for _ in spec.layers)
    total = 0.0
    for kind, seq in zip(types, cell.seq_lengths, strict=True):
        layer = replace(spec.layers[kind], seq_length=seq)
        # weight, gradient and AdamW's tensors; embedding and head are timed without a step
        per_parameter = 2 * element + (ADAM_BYTES if cell.part == "layer" else 0)
        states = parameter_count(layer) * per_parameter
        kept = cell.batch * activation_bytes(layer, seq, 1, element_bytes=element)
        count = counts[0] if cell.part == "layer" else counts[kind]
        total += count * (states + kept) / cell.degree
    if cell.part != "layer":
        vocab = padded_vocab_size(spec)
        # tied embedding and head share one table
        tables = 1 if spec.tied_embeddings else 2
        total += 2 * element * tables * vocab * spec.layers[-1].hidden_size
        # the logits of all tokens are the largest tensors of a head
        total += float(_LOGIT_BYTES) * cell.batch * cell.seq_lengths[-1] * vocab
    return total


def filled_with(cell: ModelCell, timed: Timed) -> ModelMeasurement:
    """Return the measurement of a cell with the samples, or the failure, of `timed`."""
    if timed.reason is not None:
        found = cell.filled(status="failed", reason=timed.reason)
    else:
        found = cell.filled()
    samples = {name: list(values) for name, values in timed.samples_s.items()}
    return replace(found, samples_s=samples, notes=list(timed.notes))


def counted_as(cell: ModelCell, found: ExactMemory) -> ModelMeasurement:
    """Return the measurement of a cell with the bytes of `found`."""
    sizes = {
        "parameters": float(found.parameter_bytes),
        "activation": float(found.activation_bytes),
        "peak": float(found.peak_bytes),
    }
    filled = cell.filled(source="exact")
    return replace(
        filled, bytes=sizes, num_parameters=found.num_parameters, notes=list(found.notes)
    )


def _reason(error: BaseException) -> str:
    """Return an exception's message: complete for errors of autopar, else its first line."""
    return str(error) if isinstance(error, AutoparError) else first_line(error)


# --------------------------------------------------------------------------------------------------
# Measurement of the cells of a custom module.
#
# Its layers are measured with the arguments that the model passes to them. Embedding and head are
# the difference between a complete model and its layers. A module does not define pipeline stages,
# so nn.Embedding counts for the first stage, and all other modules outside layers for the last.


# tokens are int64
_TOKEN_BYTES = 8
_SPLIT = "embeddings were taken as the first stage's and all else but layers as the last one's"


class ModuleMeasurer(Measurer):
    """Measurer of a custom module: forward passes of the model, and its layers.

    Layers are unsharded, or sharded by the module's `parallelize_plan`.
    """

    def __init__(self, source: ModuleSource, options: ModelOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._source = source
        self._samples: dict[tuple[object, ...], ExactMemory] = {}
        """Memory of one sample, by (layer type, sequence lengths, layer counts)."""

    def rehearse(self, cells: Sequence[ModelCell]) -> None:
        """Run the smallest timed layers as a trial; raise InputError (one sentence) on failure."""
        timed = [cell for cell in cells if cell.quantity == "time" and cell.layer_type is not None]
        if not timed:
            return
        smallest = min(timed, key=lambda cell: (cell.batch, cell.seq_lengths))
        if self._shortage(smallest) is None:
            lengths = [max(cell.seq_lengths) for cell in timed]
            try:
                rehearse(self._source, lengths, self.options.dtype, self.device)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):  # the cell of that size will report it
                    raise

    def _time(self, cell: ModelCell) -> ModelMeasurement:
        with warnings.catch_warnings():
            # torch warns about random operators on a mesh; here they are initialisations
            warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
            timed: Timed = blamed(self._source.text, lambda: self._timed(cell))
        return filled_with(cell, timed)

    def _timed(self, cell: ModelCell) -> Timed:
        kind = cell.layer_type
        backward = self.options.backward and kind is not None
        made: dict[str, Any] = {}

        def build() -> nn.Module:
            module, made["inputs"] = self._part(cell, kind)
            return module

        return time_module(
            build,
            lambda: made["inputs"],
            self.policy,
            self.device,
            where=f"batch {cell.batch}, sequence {max(cell.seq_lengths)}",
            backward=backward,
            checkpoint=backward,
            optimizer=backward and cell.degree == 1,  # an optimizer cannot step a plan's shards
        )

    def _needed_bytes(self, cell: ModelCell) -> float:
        if not self._source.fakeable:
            return 0.0
        size = (cell.layer_type, cell.seq_lengths, cell.num_layers)
        if size not in self._samples:
            # one unsharded sample; batch and degree scale it below
            one, kind = replace(cell, batch=1, degree=1, checkpoint="none"), cell.layer_type
            try:
                self._samples[size] = blamed(
                    self._source.text,
                    lambda: self._whole(one) if kind is None else self._layers(one)[kind],
                )
            except (AutoparError, RuntimeError):
                return 0.0  # measuring the cell gives a better message
        counted = self._samples[size]
        per_sample = counted.activation_bytes + counted.peak_bytes
        # weights and gradients
        states = 2.0 * counted.parameter_bytes
        # whole models run without backward and optimizer
        if cell.layer_type is not None:
            states += ADAM_BYTES * counted.num_parameters
        return (states + cell.batch * per_sample) / cell.degree

    def _counted(self, cell: ModelCell) -> ExactMemory:
        kind = cell.layer_type
        found: ExactMemory = blamed(
            self._source.text,
            lambda: self._vocab(cell) if kind is None else self._layers(cell)[kind],
        )
        return found

    def _add_device_memory(self, cell: ModelCell, measurement: ModelMeasurement) -> None:
        if cell.part == "first":
            return  # its saved activations are tokens, which no forward measures separately
        if cell.layer_type is not None:
            figures = self._on_device(cell, cell.layer_type)
        else:
            layers = range(len(self._source.sizes.layers))
            figures = self._on_device(cell, None)
            # the whole forward has `num_typical` layers of each type: subtract their activations
            kept = sum(self._on_device(cell, kind)["device_activation"] for kind in layers)
            figures["device_activation"] -= kept * self._source.num_typical
        measurement.bytes.update(figures)
        said = explain_difference(measurement.bytes["activation"], figures["device_activation"])
        if said is not None:
            measurement.notes.append(said)

    def _on_device(self, cell: ModelCell, kind: int | None) -> dict[str, float]:
        """Return the device memory of a layer type (None: of the model), in bytes by name."""
        made: dict[str, Any] = {}

        def build() -> nn.Module:
            module, made["inputs"] = self._part(cell, kind)
            return _Recomputed(module) if kind is not None and cell.checkpoint == "full" else module

        return figures_of(allocated_by(build, lambda: made["inputs"], self.device))

    def _part(self, cell: ModelCell, kind: int | None) -> tuple[nn.Module, tuple[Any, ...]]:
        """Return (module, inputs) on the device, for a layer type or (None) the complete model.

        The complete model has its batch bound, so its inputs are empty.
        """
        built, seq = self._built(cell, self.device), max(cell.seq_lengths)
        if kind is None:
            return _Whole(built, cell.batch, seq, self._source.text), ()
        layer = self._source.layer_calls(built, cell.batch, seq, degree=cell.degree)[kind]
        return layer.module, layer.inputs

    def _vocab(self, cell: ModelCell) -> ExactMemory:
        # additional memory of an untypical first layer counts as outside the layers
        layers, whole = self._layers(cell) * self._source.num_typical, self._whole(cell)
        parameters = whole.num_parameters - sum(layer.num_parameters for layer in layers)
        kept = max(0, whole.activation_bytes - sum(layer.activation_bytes for layer in layers))
        found = replace(
            whole,
            num_parameters=parameters,
            parameter_bytes=whole.parameter_bytes - sum(x.parameter_bytes for x in layers),
            activation_bytes=kept,
        )
        if cell.part == "only":
            return found
        share, notes = self._embedding_parameters, (_SPLIT,)
        # mean element size, since parts of a module may differ in dtype
        element = max(1, found.parameter_bytes // max(1, parameters))
        tokens = cell.batch * sum(cell.seq_lengths) * _TOKEN_BYTES
        if cell.part == "first":
            return replace(
                found,
                num_parameters=share,
                parameter_bytes=share * element,
                activation_bytes=tokens,
                peak_bytes=0,
                notes=notes,
            )
        # a tied table is on the first stage and, as a copy, on the last
        rest = parameters - share + self._tied_parameters
        return replace(
            found,
            num_parameters=rest,
            parameter_bytes=rest * element,
            activation_bytes=max(0, kept - tokens),
            notes=notes,
        )

    def _layers(self, cell: ModelCell) -> list[ExactMemory]:
        """Return the memory of one layer of each type, with the checkpointing of the cell."""
        with self._mode():
            built = self._built(cell)
            found = []
            for one in self._source.layer_calls(
                built, cell.batch, max(cell.seq_lengths), degree=cell.degree
            ):
                counted = count_memory(one.module, one.inputs, shared=one.shared)
                if cell.checkpoint == "full":  # the input is kept, the rest is recomputed
                    kept = one.inputs[0].nbytes
                    more = counted.activation_bytes - kept
                    counted = replace(
                        counted, activation_bytes=kept, peak_bytes=counted.peak_bytes + more
                    )
                found.append(counted)
        return found

    def _whole(self, cell: ModelCell) -> ExactMemory:
        """Return the memory of a complete model with `num_typical` layers of each type."""
        with self._mode():
            built = self._built(cell)
            self._split(built)
            whole = _Whole(built, cell.batch, max(cell.seq_lengths), self._source.text)
            return count_memory(whole, ())

    def _built(self, cell: ModelCell, device: torch.device | str = "cpu") -> Built:
        return self._source.build(
            max(cell.num_layers or (self._source.num_typical,)),
            seq_length=max(cell.seq_lengths),
            dtype=self.options.dtype,
            device=device,
        )

    def _mode(self) -> AbstractContextManager[Any]:
        # shapes that depend on values need real tensors
        return fake_tensors() if self._source.fakeable else nullcontext()

    def _split(self, built: Built) -> None:
        """Set the number of embedding parameters, and the number of those tied to the head."""
        of_layers = {id(p) for of_type in built.layers for m in of_type for p in m.parameters()}
        # modules that hold parameters directly, not only in submodules
        outer = [m for m in built.module.modules() if next(m.parameters(False), None) is not None]
        tables = {
            id(p): p.numel()
            for m in outer
            if isinstance(m, nn.Embedding)
            for p in m.parameters(False)
            if id(p) not in of_layers
        }
        heads = {
            id(p) for m in outer if not isinstance(m, nn.Embedding) for p in m.parameters(False)
        }
        self._embedding_parameters = sum(tables.values())
        self._tied_parameters = sum(count for one, count in tables.items() if one in heads)


class _Recomputed(nn.Module):
    """Layer that saves only its inputs and is recomputed in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the layer's output."""
        return checkpoint(self.layer, *inputs, use_reentrant=False, preserve_rng_state=False)


class _Whole(nn.Module):
    """Model with its batch bound to it; returns its logits or loss."""

    def __init__(self, built: Built, batch: int, seq_length: int, where: str) -> None:
        super().__init__()
        self.model = built.module
        self.__class__ = type(type(built.module).__name__, (_Whole,), {})  # for messages
        self._data = built.make_batch(batch, seq_length)
        self._where = where

    def forward(self) -> torch.Tensor:
        """Return the tensor that the backward starts from."""
        return main_output(call(self.model, self._data), self._where)
