"""Measures one cell: which function of the library does it, and what becomes of its failures."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError
from autopar.estimate.memory import activation_bytes
from autopar.model import LayerSpec, ModelSpec
from autopar.model_measurements import ModelMeasurement
from autopar.specs import padded_vocab_size, parameter_count
from autopar.units import format_bytes
from profiler.hardware.session import available_bytes
from profiler.measure import Policy
from profiler.model.cells import ModelCell
from profiler.model.options import ModelOptions
from profiler.model.sizes import seqs_text, with_seq_lengths
from profiler.model.timing import DEVICE_SAMPLE_S

if TYPE_CHECKING:
    import torch

    from profiler.model.timing import Timed

__all__ = [
    "ADAM_BYTES",
    "OUT_OF_MEMORY",
    "Measurer",
    "SpecMeasurer",
    "filled_with",
    "is_out_of_memory",
    "make_policy",
    "needed_bytes",
    "shortage",
]

OUT_OF_MEMORY = "out of memory"
"""How the reason of a cell begins for which there was no memory."""
_SAMPLE_S = {"cuda": DEVICE_SAMPLE_S, "cpu": 4e-3}
"""A repetition lasts at least so long, so that starting and stopping it does not count."""
_MAX_LOOPS = 64
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ADAM_BYTES = 16
"""Of a parameter: its copy in fp32, the gradient of that and two moments."""
_LOGIT_BYTES = 12
"""Of a logit: itself, its wide copy and its gradient."""


class Measurer(ABC):
    """Measures the cells of one model on one device."""

    def __init__(self, options: ModelOptions, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.policy = make_policy(options, device.type)

    def rehearse(self, cells: Sequence[ModelCell]) -> None:
        """Raise InputError where the model cannot be measured; reference blocks always can."""
        return

    def measure(self, cell: ModelCell) -> ModelMeasurement:
        """Return the figures of a cell; what goes wrong becomes its reason."""
        began_s = time.perf_counter()
        short = self._shortage(cell)
        if short is not None:
            found = cell.filled(status="failed", reason=short)
        else:
            try:
                found = self._time(cell) if cell.quantity == "time" else self._memory(cell)
            except (AutoparError, RuntimeError, MemoryError, TypeError, ValueError) as error:
                found = cell.filled(status="failed", reason=_reason(error))
        return found.model_copy(update={"elapsed_s": time.perf_counter() - began_s})

    @abstractmethod
    def _time(self, cell: ModelCell) -> ModelMeasurement: ...

    @abstractmethod
    def _memory(self, cell: ModelCell) -> ModelMeasurement: ...

    def _shortage(self, cell: ModelCell) -> str | None:
        """Return why a cell cannot fit, where its device would not say so in time."""
        return None


class SpecMeasurer(Measurer):
    """Measures reference blocks of a spec."""

    def __init__(self, spec: ModelSpec, options: ModelOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self.spec = spec

    def _time(self, cell: ModelCell) -> ModelMeasurement:
        from profiler.model.timing import time_layer

        if cell.part != "layer":
            return filled_with(cell, self._time_whole(cell))
        layer = self._layer(cell)
        if self.options.unit != "all":
            return filled_with(cell, self._time_half(cell, layer))
        return filled_with(
            cell,
            time_layer(
                layer,
                cell.sharding,
                batch=cell.batch,
                dtype=self.options.dtype,
                device=self.device,
                policy=self.policy,
                encoder_seq_length=cell.encoder_seq_length,
                backward=self.options.backward,
                checkpoint=self.options.backward,
                optimizer=self.options.backward,
            ),
        )

    def _time_whole(self, cell: ModelCell) -> Timed:
        """Return the times of what surrounds the layers, or of a whole forward."""
        from profiler.model.whole import time_outer, time_stack

        if cell.num_layers is None:
            # its optimizer step is the tables', which are not what a layer's step tells
            return time_outer(
                self.spec,
                batch=cell.batch,
                seq_lengths=cell.seq_lengths,
                dtype=self.options.dtype,
                device=self.device,
                policy=self.policy,
                backward=self.options.backward,
                optimizer=False,
            )
        return time_stack(
            self.spec,
            cell.num_layers,
            batch=cell.batch,
            seq_lengths=cell.seq_lengths,
            dtype=self.options.dtype,
            device=self.device,
            policy=self.policy,
        )

    def _time_half(self, cell: ModelCell, layer: LayerSpec) -> Timed:
        from profiler.model.blocks import layer_inputs
        from profiler.model.halves import build_half
        from profiler.model.local_group import timed_group
        from profiler.model.timing import time_module, torch_dtype

        on: dict[str, Any] = {"dtype": torch_dtype(self.options.dtype), "device": self.device}
        return time_module(
            lambda: build_half(
                layer,
                cell.sharding,
                self.options.unit,
                group=timed_group(cell.degree),
                **on,
            ),
            lambda: layer_inputs(
                layer,
                cell.sharding,
                batch=cell.batch,
                encoder_seq_length=cell.encoder_seq_length,
                **on,
            ),
            self.policy,
            self.device,
            where=_where(cell),
            backward=self.options.backward,
            checkpoint=False,
            optimizer=self.options.backward,
        )

    def _memory(self, cell: ModelCell) -> ModelMeasurement:
        measurement = self._counted(cell)
        if self.options.source == "device":
            try:
                self._add_device_memory(cell, measurement)
            except (RuntimeError, MemoryError) as error:  # the exact figures stand for themselves
                measurement.notes.append(f"not measured on the device: {_reason(error)}")
        return measurement

    def _counted(self, cell: ModelCell) -> ModelMeasurement:
        """Return the exact figures of a memory cell."""
        from profiler.model.exact import layer_memory, outer_memory

        dtype = self.options.dtype
        if cell.part == "layer":
            if self.options.unit != "all":
                from profiler.model.halves import half_memory

                return half_memory(self._layer(cell), cell, self.options.unit, dtype)
            found = layer_memory(
                self._layer(cell),
                cell.sharding,
                batch=cell.batch,
                dtype=dtype,
                encoder_seq_length=cell.encoder_seq_length,
            )
        else:
            found = outer_memory(
                with_seq_lengths(self.spec, cell.seq_lengths),
                cell.part,
                degree=cell.degree,
                kind=cell.kind,
                batch=cell.batch,
                dtype=dtype,
            )
        return found.measurement(key=cell.key, layer_type=cell.layer_type)

    def _add_device_memory(self, cell: ModelCell, measurement: ModelMeasurement) -> None:
        """Put what the device's allocator says beside the exact figures."""
        from profiler.model.device_memory import allocated_by, explain_difference, figures_of
        from profiler.model.parts import cell_part

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

    def _layer(self, cell: ModelCell) -> LayerSpec:
        layer = self.spec.layers[cell.layer_type or 0]
        return replace(layer, seq_length=cell.seq_lengths[0])

    def _shortage(self, cell: ModelCell) -> str | None:
        # the allocator of a CPU promises what it does not have, and then the process is killed
        if cell.quantity != "time" or self.device.type != "cpu":
            return None
        return shortage(needed_bytes(self.spec, cell, self.options))


def make_policy(options: ModelOptions, device_type: str) -> Policy:
    """Return when the samples of a cell are enough."""
    return Policy(
        iters=options.iters,
        warmup=options.warmup,
        max_seconds=options.max_seconds,
        sample_s=_SAMPLE_S[device_type],
        max_loops=_MAX_LOOPS,
    )


def is_out_of_memory(measurement: ModelMeasurement) -> bool:
    """Return whether a cell failed because memory was short."""
    return measurement.status == "failed" and (measurement.reason or "").startswith(OUT_OF_MEMORY)


def shortage(needed: float) -> str | None:
    """Return the reason of a cell whose bytes this host does not have, None where it has them."""
    there = available_bytes()
    if needed <= there:
        return None
    return (
        f"{OUT_OF_MEMORY}: about {format_bytes(needed)} are needed and "
        f"{format_bytes(there)} are free"
    )


def needed_bytes(spec: ModelSpec, cell: ModelCell, options: ModelOptions) -> float:
    """Return roughly the bytes that timing a cell of a spec takes, in unsharded layers."""
    element = _ELEMENT_BYTES[options.dtype]
    types = range(len(spec.layers)) if cell.layer_type is None else (cell.layer_type,)
    counts = cell.num_layers or tuple(int(cell.part == "layer") for _ in spec.layers)
    total = 0.0
    for kind, seq in zip(types, cell.seq_lengths, strict=True):
        layer = replace(spec.layers[kind], seq_length=seq)
        per_parameter = 2 * element + (ADAM_BYTES if cell.part == "layer" else 0)
        states = parameter_count(layer) * per_parameter
        kept = cell.batch * activation_bytes(layer, seq, 1, element_bytes=element)
        count = counts[0] if cell.part == "layer" else counts[kind]
        total += count * (states + kept) / cell.degree
    if cell.part != "layer":
        vocab = padded_vocab_size(spec)
        tables = 1 if spec.tied_embeddings else 2
        total += 2 * element * tables * vocab * spec.layers[-1].hidden_size
        total += float(_LOGIT_BYTES) * cell.batch * cell.seq_lengths[-1] * vocab
    return total


def filled_with(cell: ModelCell, timed: Timed) -> ModelMeasurement:
    """Return the measurement of a cell that was timed."""
    if timed.reason is not None:
        found = cell.filled(status="failed", reason=timed.reason)
    else:
        found = cell.filled()
    samples = {name: list(values) for name, values in timed.samples_s.items()}
    return found.model_copy(update={"samples_s": samples, "notes": list(timed.notes)})


def _where(cell: ModelCell) -> str:
    return f"batch {cell.batch}, sequence {seqs_text(cell.seq_lengths)}"


def _reason(error: BaseException) -> str:
    """Return the first line of what an exception says."""
    if isinstance(error, AutoparError):
        return str(error)
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return said[:300].rstrip(".")
