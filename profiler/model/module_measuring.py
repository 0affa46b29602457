"""Measures the cells of a module that somebody else wrote.

Its layers are measured as the model itself calls them. What surrounds the layers is what a whole
model has beyond its layers; which of it belongs to the first stage and which to the last is
decided by class, since a module does not say it.
"""

from __future__ import annotations

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
    """Measures layers and whole forwards of a module, unsharded."""

    def __init__(self, source: ModuleSource, options: ModelOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._source = source
        self._counted: dict[tuple[int, ...], tuple[ExactMemory, list[ExactMemory]]] = {}

    def _time(self, cell: ModelCell) -> ModelMeasurement:
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
            layer = self._source.layer_calls(built, cell.batch, seq)[kind]
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
            optimizer=backward,
        )

    def _memory(self, cell: ModelCell) -> ModelMeasurement:
        whole, layers = self._count(cell)
        if cell.layer_type is not None:
            found = layers[cell.layer_type]
            if cell.checkpoint == "full":
                found = replace(found, activation_bytes=self._input_bytes[cell.layer_type])
        else:
            found = self._outer(cell, whole, layers)
        found = replace(
            found,
            part=cell.part,
            batch=cell.batch,
            seq_lengths=cell.seq_lengths,
            checkpoint=cell.checkpoint,
        )
        return found.measurement(key=cell.key, layer_type=cell.layer_type)

    def _outer(self, cell: ModelCell, whole: ExactMemory, layers: list[ExactMemory]) -> ExactMemory:
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

    def _count(self, cell: ModelCell) -> tuple[ExactMemory, list[ExactMemory]]:
        """Return the memory of a model with one layer of each type, and of each layer in it."""
        seq = max(cell.seq_lengths)
        key = (seq, cell.batch)
        if key not in self._counted:
            # shapes that depend on values need values
            mode: AbstractContextManager[Any] = (
                FakeTensorMode() if self._source.fakeable else nullcontext()
            )
            with mode:
                built = self._source.build(1, seq_length=seq, dtype=self.options.dtype)
                calls = self._source.layer_calls(built, cell.batch, seq)
                layers = [count_memory(one.module, one.inputs) for one in calls]
                self._input_bytes = [one.inputs[0].nbytes for one in calls]
                whole = count_memory(_Whole(built, cell.batch, seq, self._source.text), ())
                self._split(built)
            self._counted[key] = (whole, layers)
        return self._counted[key]

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
