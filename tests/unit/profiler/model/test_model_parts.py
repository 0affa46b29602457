"""What a device would hold is what was counted: parts of real tensors, counted on this host."""

from __future__ import annotations

import pytest

from autopar.records import replace
from autopar.run.model import ModelSpec
from tests.unit.profile_model_support import LLAMA, T5

pytest.importorskip("torch", reason="torch is not installed")

from profiler.model.cells import ModelCell, plan_cells
from profiler.model.counting import count_memory
from profiler.model.measuring import SpecMeasurer, cell_part
from profiler.model.options import ModelOptions, TensorImplementation, Unit


def memory_cells(spec: ModelSpec, options: ModelOptions) -> list[ModelCell]:
    """Return the memory cells of a run."""
    return [cell for cell in plan_cells(spec, options) if cell.quantity == "memory"]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("spec", "implementation", "unit"),
    [
        (LLAMA, "megatron", "all"),
        (LLAMA, "dtensor", "all"),
        (LLAMA, "megatron", "attention"),
        (LLAMA, "megatron", "mlp"),
        (T5, "megatron", "all"),
    ],
)
def test_a_part_keeps_what_was_counted(
    spec: ModelSpec, implementation: TensorImplementation, unit: Unit
) -> None:
    """Every memory cell of a run, built of real tensors: to the byte, at every degree and kind."""
    import torch

    options = ModelOptions(
        model="own", tp_impl=implementation, unit=unit, degrees=(1, 2), dtype="bf16"
    )
    measurer = SpecMeasurer(spec, options, torch.device("cpu"))
    cells = memory_cells(spec, options)
    for cell in cells:
        part = cell_part(spec, cell, unit=unit, dtype="bf16", device="cpu")
        inputs = part.make_inputs()
        found = count_memory(part.build(), inputs, shared=inputs[part.num_own :])
        expected = measurer.measure(cell).bytes

        assert float(found.activation_bytes) == expected["activation"], cell.key
        assert float(found.peak_bytes) == expected["peak"], cell.key
    assert {cell.degree for cell in cells} == {1, 2}


def test_a_part_of_a_group_has_its_shard() -> None:
    """At degree 2 a rank of a sequence parallel layer holds half of the weights' rows."""
    cell = next(c for c in memory_cells(LLAMA, ModelOptions(model="own")) if c.degree == 2)
    whole = replace(cell, degree=1)
    sizes = [
        sum(
            p.numel()
            for p in cell_part(LLAMA, c, unit="all", dtype="fp32", device="cpu")
            .build()
            .parameters()
        )
        for c in (whole, cell)
    ]
    assert sizes[1] < 0.6 * sizes[0]
