"""The comparison of device and count: its tables from cells of this CPU, its words without GPU."""

from __future__ import annotations

import re
from statistics import median

import pytest

from autopar.documents.sidecar import ModelMeasurement
from autopar.records import replace
from autopar.run.model import ModelSpec
from benchmarks.device_vs_exact import chosen_cells, layer_row, main, memory_row, print_tables
from profiler.model.documents import ON_DEVICE
from profiler.model.options import ModelOptions, ProfileType
from tests.unit.profile_model_support import LLAMA, T5

pytest.importorskip("torch", reason="torch is not installed")

from profiler.model.cells import plan_cells
from profiler.model.measuring import SpecMeasurer


@pytest.fixture(scope="module")
def cells() -> list[ModelMeasurement]:
    """Return what the cells of a tiny model gave on this CPU."""
    return measured(LLAMA, (1, 2), ("computation", "memory"))


def measured(
    spec: ModelSpec, degrees: tuple[int, ...], types: tuple[ProfileType, ...]
) -> list[ModelMeasurement]:
    """Return what the chosen cells of a model gave on this CPU."""
    import torch

    options = ModelOptions(
        model=spec.name,
        profile_types=types,
        batches=(2,),
        degrees=degrees,
        dtype="fp32",
        iters=2,
        warmup=1,
        max_seconds=0.02,
    )
    measurer = SpecMeasurer(spec, options, torch.device("cpu"))
    return [measurer.measure(cell) for cell in chosen_cells(plan_cells(spec, options))]


def on_device(cell: ModelMeasurement, ratio: float, notes: tuple[str, ...]) -> ModelMeasurement:
    """Return a memory cell of which a device keeps so much more."""
    figures = {"device_activation": cell.bytes["activation"] * ratio, "device_peak": 1024.0}
    return replace(cell, bytes={**cell.bytes, **figures}, notes=list(notes))


def test_a_memory_row_says_ratio_and_cause(cells: list[ModelMeasurement]) -> None:
    """Both figures, how far they are apart, and why; without a figure what is missing."""
    cell = next(c for c in cells if c.quantity == "memory")
    line, apart = memory_row(on_device(cell, 1.05, (f"+5.0 {ON_DEVICE}a mask",)))

    assert apart == pytest.approx(0.05)
    assert line.endswith("a mask")
    assert "+5.000 %" in line
    assert memory_row(cell) == (f"  {cell.key:<52s} no figure of the device", None)
    short = replace(cell, notes=["not measured on the device: out of memory"])
    assert memory_row(short)[0].endswith("not measured on the device: out of memory")


def test_a_layer_row_takes_the_difference(cells: list[ModelMeasurement]) -> None:
    """Two whole forwards and the layers between them; a cell that failed says why."""
    alone = next(c for c in cells if c.key == "time_layertype_0_bsz2_seq128")
    few, many = (c for c in cells if c.num_layers is not None)
    _, apart = layer_row(alone, few, many)
    medians = [median(c.samples_s["forward"]) for c in (alone, few, many)]

    assert apart == pytest.approx((medians[2] - medians[1]) / 2 / medians[0] - 1)
    failed = replace(few, status="failed", reason="out of memory")
    line, apart = layer_row(alone, failed, many)
    assert (line.split(maxsplit=1)[1], apart) == ("out of memory", None)


def test_every_cell_is_in_a_table(
    cells: list[ModelMeasurement], capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory, differences and the passes of shards too; a summary alone prints none of them."""
    device = [on_device(c, 1.0, ()) if c.quantity == "memory" else c for c in cells]
    apart = print_tables([("one", device)])
    out = capsys.readouterr().out

    memory = [c for c in cells if c.quantity == "memory"]
    assert apart["memory"] == [0.0] * len(memory)
    assert len(apart["time"]) == 1
    for cell in cells:
        if cell.quantity == "memory" or (cell.part == "layer" and cell.num_layers is None):
            assert cell.key in out
    assert len(memory) > 8
    ratios = re.findall(r"^  time_layertype_\S+ +[\d.]+ +([\d.]+) +[\d.]+ +[\d.]+$", out, re.M)
    assert len(ratios) == 2
    assert all(float(ratio) > 0 for ratio in ratios)
    assert print_tables([("one", device)], summary=True) == apart
    assert capsys.readouterr().out == ""


def test_every_layer_type_has_a_difference() -> None:
    """Of an encoder-decoder each type has its own, from a forward with more of that type."""
    found = measured(T5, (1,), ("computation",))

    assert len(print_tables([("t5", found)])["time"]) == 2


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one sentence; an unknown model is one as well."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
    assert main(["--models", "no-such-model"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
