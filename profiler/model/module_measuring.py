"""Measures the cells of a module that somebody else wrote.

Its layers are measured as the model itself calls them. What surrounds the layers is what a whole
model has beyond its layers; which of it belongs to the first stage and which to the last is
decided by class, since a module does not say it.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.model_measurements import ModelMeasurement
from profiler.model.cells import ModelCell
from profiler.model.counting import ExactMemory, count_memory
from profiler.model.measuring import Measurer, filled_with
from profiler.model.module_source import ModuleSource
from profiler.model.modules import Built, call, main_output
from profiler.model.options import ModelOptions
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

    def _time(self, cell: ModelCell) -> ModelMeasurement:
        with warnings.catch_warnings():
            # of random operators on a mesh, which are initialisations here
            warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
            return filled_with(cell, self._timed(cell))

    def _timed(self, cell: ModelCell) -> Timed:
        seq, kind = max(cell.seq_lengths), cell.layer_type
        backward = self.options.backward and kind is not None
        made: dict[str, Any] = {}

        def build() -> nn.Module:
            count = 1 if kind is not None else max(cell.num_layers or (1,))
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

    def _memory(self, cell: ModelCell) -> ModelMeasurement:
        if cell.layer_type is not None:
            found = self._layers(cell)[cell.layer_type]
        else:
            found = self._outer(cell)
        found = replace(
            found,
            part=cell.part,
            batch=cell.batch,
            seq_lengths=cell.seq_lengths,
            degree=cell.degree,
            kind=cell.kind,
            checkpoint=cell.checkpoint,
        )
        return found.measurement(key=cell.key, layer_type=cell.layer_type)

    def _outer(self, cell: ModelCell) -> ExactMemory:
        layers, whole = self._layers(cell), self._whole(cell)
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
        if cell.part == "first":
            return replace(
                found,
                num_parameters=share,
                parameter_bytes=share * element,
                activation_bytes=cell.batch * sum(cell.seq_lengths) * _TOKEN_BYTES,
                peak_bytes=0,
                notes=notes,
            )
        rest = parameters - share + self._tied_parameters
        return replace(found, num_parameters=rest, parameter_bytes=rest * element, notes=notes)

    def _layers(self, cell: ModelCell) -> list[ExactMemory]:
        """Return the memory of one layer of each type."""
        with self._mode():
            built = self._built(cell)
            found = []
            for one in self._source.layer_calls(
                built, cell.batch, max(cell.seq_lengths), degree=cell.degree
            ):
                counted = count_memory(one.module, one.inputs)
                if cell.checkpoint == "full":  # the input stays, the rest is made once more
                    kept = one.inputs[0].nbytes
                    more = counted.activation_bytes - kept
                    counted = replace(
                        counted, activation_bytes=kept, peak_bytes=counted.peak_bytes + more
                    )
                found.append(counted)
        return found

    def _whole(self, cell: ModelCell) -> ExactMemory:
        """Return the memory of a model with one layer of each type."""
        with self._mode():
            built = self._built(cell)
            self._split(built)
            whole = _Whole(built, cell.batch, max(cell.seq_lengths), self._source.text)
            return count_memory(whole, ())

    def _built(self, cell: ModelCell) -> Built:
        return self._source.build(1, seq_length=max(cell.seq_lengths), dtype=self.options.dtype)

    def _mode(self) -> AbstractContextManager[Any]:
        # shapes that depend on values need values
        return FakeTensorMode() if self._source.fakeable else nullcontext()

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


class _Whole(nn.Module):
    """A model with its batch bound to it; returns its logits or loss."""

    def __init__(self, built: Built, batch: int, seq_length: int, where: str) -> None:
        super().__init__()
        self.model = built.module
        self._data = built.make_batch(batch, seq_length)
        self._where = where

    def forward(self) -> torch.Tensor:
        """Return what a backward starts from."""
        return main_output(call(self.model, self._data), self._where)
