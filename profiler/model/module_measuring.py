"""Measures the cells of a module that somebody else wrote.

Its layers are measured as the model itself calls them. What surrounds the layers is what a whole
model has beyond its layers; which of it belongs to the first stage and which to the last is
decided by class, since a module does not say it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.errors import AutoparError
from autopar.model_measurements import ModelMeasurement
from profiler.model.cells import ModelCell
from profiler.model.counting import ExactMemory, count_memory
from profiler.model.device_memory import device_memory, explain_difference
from profiler.model.fakes import fake_tensors
from profiler.model.measuring import ADAM_BYTES, Measurer, filled_with, shortage
from profiler.model.module_source import ModuleSource, rehearse
from profiler.model.modules import Built, blamed, call, first_line, main_output
from profiler.model.options import ModelOptions
from profiler.model.passes import out_of_memory
from profiler.model.timing import time_module

if TYPE_CHECKING:
    from profiler.model.timing import Timed

__all__ = ["ModuleMeasurer"]

_TOKEN_BYTES = 8
_SPLIT = "embeddings were taken as the first stage's and all else but layers as the last one's"


class ModuleMeasurer(Measurer):
    """Measures layers, whole or as the module's own plan divides them, and whole forwards."""

    def __init__(self, source: ModuleSource, options: ModelOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._source = source
        self._counted: dict[tuple[object, ...], ExactMemory] = {}

    def rehearse(self, cells: Sequence[ModelCell]) -> None:
        """Run the smallest layers that will be timed; raises InputError, one sentence."""
        timed = [cell for cell in cells if cell.quantity == "time" and cell.layer_type is not None]
        if not timed:
            return
        smallest = min(timed, key=lambda cell: (cell.batch, cell.seq_lengths))
        if self._shortage(smallest) is None:
            lengths = [max(cell.seq_lengths) for cell in timed]
            try:
                rehearse(self._source, lengths, self.options.dtype, self.device)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):  # a cell of that size will say it
                    raise

    def _time(self, cell: ModelCell) -> ModelMeasurement:
        with warnings.catch_warnings():
            # of random operators on a mesh, which are initialisations here
            warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
            timed: Timed = blamed(self._source.text, lambda: self._timed(cell))
        return filled_with(cell, timed)

    def _timed(self, cell: ModelCell) -> Timed:
        seq, kind = max(cell.seq_lengths), cell.layer_type
        backward = self.options.backward and kind is not None
        made: dict[str, Any] = {}

        def build() -> nn.Module:
            count = max(cell.num_layers or (self._source.num_typical,))
            built = self._source.build(
                count, seq_length=seq, dtype=self.options.dtype, device=self.device
            )
            if kind is None:
                made["inputs"] = ()
                return _Whole(built, cell.batch, seq, self._source.text)
            layer = self._source.layer_calls(built, cell.batch, seq, degree=cell.degree)[kind]
            made["inputs"] = layer.inputs
            return layer.module

        return time_module(
            build,
            lambda: made["inputs"],
            self.policy,
            self.device,
            where=f"batch {cell.batch}, sequence {seq}",
            backward=backward,
            checkpoint=backward,
            optimizer=backward and cell.degree == 1,  # an optimizer cannot step a plan's shards
        )

    def _shortage(self, cell: ModelCell) -> str | None:
        # the allocator of a CPU promises what it does not have, and then the process is killed
        if cell.quantity != "time" or self.device.type != "cpu" or not self._source.fakeable:
            return None
        try:
            return shortage(self._needed_bytes(cell))
        except (AutoparError, RuntimeError):
            return None  # the cell says it better

    def _needed_bytes(self, cell: ModelCell) -> float:
        """Return roughly the bytes that timing a cell takes, from a count of one sample."""
        size = (cell.layer_type, cell.seq_lengths, cell.num_layers)
        if size not in self._counted:
            one, kind = replace(cell, batch=1, degree=1, checkpoint="none"), cell.layer_type
            self._counted[size] = blamed(
                self._source.text,
                lambda: self._whole(one) if kind is None else self._layers(one)[kind],
            )
        counted = self._counted[size]
        per_sample = counted.activation_bytes + counted.peak_bytes
        states = 2.0 * counted.parameter_bytes
        if cell.layer_type is not None:
            states += ADAM_BYTES * counted.num_parameters
        return (states + cell.batch * per_sample) / cell.degree

    def _memory(self, cell: ModelCell) -> ModelMeasurement:
        kind = cell.layer_type
        found: ExactMemory = blamed(
            self._source.text,
            lambda: self._outer(cell) if kind is None else self._layers(cell)[kind],
        )
        found = replace(
            found,
            part=cell.part,
            batch=cell.batch,
            seq_lengths=cell.seq_lengths,
            degree=cell.degree,
            kind=cell.kind,
            checkpoint=cell.checkpoint,
        )
        measurement = found.measurement(key=cell.key, layer_type=cell.layer_type)
        if self.options.source == "device":
            try:
                self._add_device_memory(cell, measurement)
            except (AutoparError, RuntimeError, MemoryError) as error:
                # the exact figures stand for themselves
                measurement.notes.append(f"not measured on the device: {first_line(error)}")
        return measurement

    def _add_device_memory(self, cell: ModelCell, measurement: ModelMeasurement) -> None:
        """Put what the device's allocator says beside the exact figures, where it tells them."""
        if cell.part == "first":
            return  # what it keeps are tokens, which no forward of its own tells
        if cell.layer_type is not None:
            figures = self._on_device(cell, cell.layer_type)
        else:
            layers = range(len(self._source.sizes.layers))
            figures = self._on_device(cell, None)
            kept = sum(self._on_device(cell, kind)["device_activation"] for kind in layers)
            figures["device_activation"] -= kept * self._source.num_typical
        measurement.bytes.update(figures)
        said = explain_difference(measurement.bytes["activation"], figures["device_activation"])
        if said is not None:
            measurement.notes.append(said)

    def _on_device(self, cell: ModelCell, kind: int | None) -> dict[str, float]:
        """Return the device's figures of a layer type, or of a model with few layers."""
        made: dict[str, Any] = {"inputs": ()}

        def build() -> nn.Module:
            built = self._built(cell, self.device)
            if kind is None:
                return _Whole(built, cell.batch, max(cell.seq_lengths), self._source.text)
            seq = max(cell.seq_lengths)
            layer = self._source.layer_calls(built, cell.batch, seq, degree=cell.degree)[kind]
            made["inputs"] = layer.inputs
            return _Recomputed(layer.module) if cell.checkpoint == "full" else layer.module

        return device_memory(build, lambda: made["inputs"], self.device)

    def _outer(self, cell: ModelCell) -> ExactMemory:
        # what an untypical first layer has beyond the others counts as not of the layers
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
        rest = parameters - share + self._tied_parameters
        return replace(
            found,
            num_parameters=rest,
            parameter_bytes=rest * element,
            activation_bytes=max(0, kept - tokens),
            notes=notes,
        )

    def _layers(self, cell: ModelCell) -> list[ExactMemory]:
        """Return the memory of one layer of each type."""
        with self._mode():
            built = self._built(cell)
            found = []
            for one in self._source.layer_calls(
                built, cell.batch, max(cell.seq_lengths), degree=cell.degree
            ):
                counted = count_memory(one.module, one.inputs, shared=one.shared)
                if cell.checkpoint == "full":  # the input stays, the rest is made once more
                    kept = one.inputs[0].nbytes
                    more = counted.activation_bytes - kept
                    counted = replace(
                        counted, activation_bytes=kept, peak_bytes=counted.peak_bytes + more
                    )
                found.append(counted)
        return found

    def _whole(self, cell: ModelCell) -> ExactMemory:
        """Return the memory of a model with as few layers of each type as are typical."""
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
        # shapes that depend on values need values
        return fake_tensors() if self._source.fakeable else nullcontext()

    def _split(self, built: Built) -> None:
        """Remember how many parameters embeddings have, and how many of them the head shares."""
        of_layers = {id(p) for of_type in built.layers for m in of_type for p in m.parameters()}
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
    """A layer that keeps its inputs alone and runs again in its backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the layer's output."""
        return checkpoint(self.layer, *inputs, use_reentrant=False, preserve_rng_state=False)


class _Whole(nn.Module):
    """A model with its batch bound to it; returns its logits or loss."""

    def __init__(self, built: Built, batch: int, seq_length: int, where: str) -> None:
        super().__init__()
        self.model = built.module
        self.__class__ = type(type(built.module).__name__, (_Whole,), {})  # for messages
        self._data = built.make_batch(batch, seq_length)
        self._where = where

    def forward(self) -> torch.Tensor:
        """Return what a backward starts from."""
        return main_output(call(self.model, self._data), self._where)
