"""A run of cells: what happens between them, what is said, where files go."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec.structs import asdict

from autopar.documents.sidecar import ModelMeasurement
from autopar.errors import InputError
from autopar.records import replace
from profiler.measure import Policy
from profiler.model.cells import ModelCell, plan_cells
from profiler.model.measuring import is_out_of_memory, needed_bytes
from profiler.model.run import (
    describe,
    forecast,
    measure_cells,
    profile_paths,
    work,
)
from tests.unit.profile_model_support import LLAMA, T5, MadeUp, make_options, opened


def test_larger_batches_than_fit_are_left_out(tmp_path: Path) -> None:
    """After a batch that ran out of memory the larger ones of the same part are not tried."""
    options = make_options(mode="batch", bsz="1:4", profile_type="computation", tp="1")
    cells = plan_cells(LLAMA, options)
    measurer = MadeUp(limit=2)
    with opened(tmp_path, options) as record:
        measure_cells(cells, measurer, record)
        counts = record.counts(cells)
        warnings = record.warnings(cells)

    assert counts == (8, 4, 4)
    assert "time_layertype_0_bsz3_seq128" in measurer.measured
    assert "time_layertype_0_bsz4_seq128" not in measurer.measured
    assert any("time_layertype_0_bsz3_seq128 already ran out of memory" in w for w in warnings)


def test_failures_do_not_end_a_run(tmp_path: Path) -> None:
    """The rest is measured, and the failed cell has its reason."""
    options = make_options(bsz="2")
    cells = plan_cells(LLAMA, options)
    with opened(tmp_path, options) as record:
        measure_cells(cells, MadeUp(failing=[cells[0].key]), record)
        assert record.counts(cells).ok == len(cells) - 1


def test_an_interrupt_while_writing_loses_nothing(tmp_path: Path) -> None:
    """Ctrl-C that comes while a cell is kept ends the run after it, not in the middle."""
    options = make_options(bsz="2")
    cells = plan_cells(LLAMA, options)

    class Interrupted(MadeUp):
        """Interrupts the third cell."""

        def measure(self, cell: ModelCell) -> ModelMeasurement:
            """Return a measurement that interrupts while it is written."""
            found = super().measure(cell)
            if len(self.measured) == 3:
                return _Signalling(**asdict(found))
            return found

    with opened(tmp_path, options) as record:
        with pytest.raises(KeyboardInterrupt):
            measure_cells(cells, Interrupted(), record)
        assert record.counts(cells) == (3, 0, 0)


class _Signalling(ModelMeasurement):
    """Sends Ctrl-C to this process when the record first asks which file it belongs to."""

    asked: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> object:
        if name == "quantity" and not _Signalling.asked:
            _Signalling.asked.append(name)
            os.kill(os.getpid(), signal.SIGINT)
        return super().__getattribute__(name)


def test_paths_by_device() -> None:
    """Memory belongs to the model, times to the device; --out is for all, halves have a suffix."""
    options = make_options()
    found = profile_paths(LLAMA, options, "NVIDIA H200 141GB")

    folder = Path("models/tiny-llama/configs")
    assert found["memory"] == folder / "memory_profiling_bf16_hidden_64_head_4.json"
    name = "computation_profiling_bf16_hidden_64_head_4.json"
    assert found["computation"] == folder / "h200-141gb" / name
    assert profile_paths(LLAMA, options, "cpu")["computation"] == folder / "cpu" / name
    out = replace(options, out=Path("x"), unit="mlp", profile_types=("memory",))
    assert profile_paths(LLAMA, out, "cpu") == {
        "memory": Path("x/memory_profiling_bf16_hidden_64_head_4_mlp.json")
    }


def test_paths_of_odd_names() -> None:
    """A name of the hub or with spaces is one folder; unknown heads are a sentence."""
    odd = replace(LLAMA, name="../org/some model")
    path = profile_paths(odd, make_options(), "cpu")["memory"]
    assert path.parts[:2] == ("models", "org-some-model")
    unknown = replace(LLAMA, layers=(replace(LLAMA.layers[0], num_heads=None),))
    with pytest.raises(InputError, match="has no number of heads"):
        profile_paths(unknown, make_options(), "cpu")


def test_lines_of_progress() -> None:
    """A line says what a cell gave, or why it gave nothing."""
    measurer = MadeUp(failing=["time_layertype_0_bsz8_seq128"])
    lines = {}
    for cell in plan_cells(LLAMA, make_options(tp="1")):
        lines[cell.key] = describe(measurer.measure(cell))

    assert "keeps    1.00 MiB, peak    0.50 MiB more" in lines["memory_layertype_0_bsz1_seq128"]
    assert "forward 4 ms, backward 8 ms" in lines["time_other_bsz8_seq128"]
    assert lines["time_layertype_0_bsz8_seq128"].endswith("failed: made up")


def test_a_forecast_names_every_cell() -> None:
    """Larger cells take longer, memory cells what one took, and the total is their sum."""
    cells = plan_cells(LLAMA, make_options(mode="batch", bsz="1,64", tp="1", max_seconds=1e4))

    class Policied(MadeUp):
        """Has the policy that a forecast changes for its probes."""

        def __init__(self) -> None:
            super().__init__()
            self.policy = Policy(max_seconds=1e4)

    measurer = Policied()
    found = forecast(cells, LLAMA, measurer)  # type: ignore[arg-type]
    seconds = {part.name.rstrip(): part.seconds for part in found.parts}
    text = found.describe()

    assert measurer.policy.max_seconds == 1e4
    assert len(measurer.measured) < len(cells)
    one, many = (seconds[f"time_layertype_0_bsz{b}_seq128"] for b in (1, 64))
    assert 20.0 < many / one < 100.0
    assert found.seconds == pytest.approx(sum(seconds.values()))
    assert all(cell.key in text for cell in cells)
    assert "nothing was written" in text


def test_work_adds_up() -> None:
    """Two more layers of a type are twice its layer; a shard is its part."""
    cells = {c.key: c for c in plan_cells(T5, make_options(bsz="2"))}
    layer = work(T5, cells["time_layertype_0_bsz2_seq64"])
    two, four = (work(T5, cells[f"time_layernum[{n},2]_bsz2_seq[64,32]"]) for n in (2, 4))

    assert four - two == pytest.approx(2 * layer)
    assert work(T5, cells["time_layertype_0_bsz2_seq64_tp2_sp"]) == pytest.approx(layer / 2)


def test_memory_that_a_cell_needs() -> None:
    """Weights, gradients and optimizer, what the batch keeps, and the logits of a whole forward."""
    cells = {c.key: c for c in plan_cells(LLAMA, make_options(bsz="2"))}
    options = make_options()
    layer = needed_bytes(LLAMA, cells["time_layertype_0_bsz2_seq128"], options)
    two, four = (
        needed_bytes(LLAMA, cells[f"time_layernum[{n}]_bsz2_seq128"], options) for n in (2, 4)
    )

    parameters = 64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert layer > parameters * (2 + 2 + 16)
    assert two > 12 * 2 * 128 * 1024 + 2 * parameters * 4
    assert 0 < four - two < 2 * layer


def test_out_of_memory_is_known_by_its_reason() -> None:
    """Other failures do not make larger batches be left out."""
    cell = plan_cells(LLAMA, make_options())[0]

    assert is_out_of_memory(cell.filled(status="failed", reason="out of memory at batch 8"))
    assert not is_out_of_memory(cell.filled(status="failed", reason="not finite"))
    assert not is_out_of_memory(cell.filled())
