"""What a profiling run leaves on disk, however it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from autopar import statistics as stats
from autopar.documents.model import read_model_profile
from autopar.documents.sidecar import Sidecar, read_sidecar, sidecar_path
from autopar.errors import InputError
from profiler.model.cells import plan_cells
from profiler.model.run import measure_cells
from tests.unit.profile_model_support import (
    LLAMA,
    T5,
    MadeUp,
    make_options,
    measured_dir,
    opened,
    put_all,
)

COMPUTATION = "computation_profiling_bf16_hidden_64_head_4.json"
MEMORY = "memory_profiling_bf16_hidden_64_head_4.json"


def sidecar(path: Path) -> Sidecar:
    """Return the sidecar of a document, which must have one."""
    found = read_sidecar(path)
    assert found is not None
    return found


def load(path: Path) -> dict[str, Any]:
    """Return the content of a file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("spec", [LLAMA, T5], ids=lambda spec: spec.name)
def test_a_whole_run_can_be_read_back(spec: Any, tmp_path: Path) -> None:
    """Both files, each with its sidecar, become a profile with and without `_sp`."""
    measured_dir(tmp_path, spec, bsz="2")

    files = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert files == {n for name in (COMPUTATION, MEMORY) for n in (name, f"{name}.meta.json")}
    for sequence_parallel in (True, False):
        profile = read_model_profile(
            computation=tmp_path,
            memory=tmp_path,
            spec=spec,
            sequence_parallel=sequence_parallel,
            precision="bf16",
        )
        assert len(profile.layers) == len(spec.layers)
        assert not profile.estimated
        assert all(layer.sharded_times for layer in profile.layers)


def test_sidecars_say_what_the_files_cannot(tmp_path: Path) -> None:
    """Cells with raw samples and bytes, units, origin, circumstances of the run."""
    measured_dir(tmp_path, bsz="2")
    times, tables = sidecar(tmp_path / COMPUTATION), sidecar(tmp_path / MEMORY)

    assert (times.document, times.unit, times.name) == ("computation", "ms", "tiny-llama")
    assert times.source == "measured by `profile-model --model tiny-llama` on Some GPU"
    assert times.memory_bytes == 80e9
    assert (tables.document, tables.unit, tables.parameter_bytes) == ("memory", "MiB", 4)
    assert tables.source.startswith("counted exactly by `profile-model")
    assert times.runs[0].id == tables.runs[0].id
    assert times.runs[0].metadata["model"] == tables.runs[0].metadata["model"]
    cells = times.runs[0].model_measurements
    assert {m.quantity for m in cells} == {"time"}
    assert all(len(m.samples_s["forward"]) == 7 for m in cells)
    assert all(m.bytes["activation"] > 0 for m in tables.runs[0].model_measurements)


def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Documents are the same bytes, after any number of cells; kept cells are as they were."""
    whole = tmp_path / "whole"
    options = measured_dir(whole, bsz="2")
    expected = {name: (whole / name).read_bytes() for name in (COMPUTATION, MEMORY)}
    for most in range(1, len(plan_cells(LLAMA, options)), 3):
        out = tmp_path / str(most)
        with opened(out, options) as record:
            put_all(record, options, most=most)
        kept = [
            to_builtins(m)
            for name in (COMPUTATION, MEMORY)
            if (out / name).exists()
            for m in sidecar(out / name).runs[0].model_measurements
        ]
        again = make_options(bsz="2", resume=True)
        with opened(out, again, command="profile-model --resume") as record:
            assert (
                len(record.missing(plan_cells(LLAMA, again)))
                == len(plan_cells(LLAMA, again)) - most
            )
            put_all(record, again)
        assert {name: (out / name).read_bytes() for name in expected} == expected
        now = [
            to_builtins(m)
            for name in (COMPUTATION, MEMORY)
            for m in sidecar(out / name).runs[0].model_measurements
        ]
        assert [m for m in now if m in kept] == kept


def test_failed_cells_are_measured_again(tmp_path: Path) -> None:
    """A cell that failed is missing, and its success replaces it."""
    options = make_options(bsz="2", profile_type="computation")
    cells = plan_cells(LLAMA, options)
    with opened(tmp_path, options) as record:
        measurer = MadeUp(failing=[cells[0].key])
        for cell in cells:
            record.put(measurer.measure(cell))
        assert record.counts(cells).failed == 1
    assert "layertype_0_bsz2_seq128" not in load(tmp_path / COMPUTATION)
    again = make_options(bsz="2", profile_type="computation", resume=True)
    with opened(tmp_path, again) as record:
        assert [cell.key for cell in record.missing(cells)] == [cells[0].key]
        put_all(record, again)
        assert record.counts(cells).ok == len(cells)
    assert load(tmp_path / COMPUTATION)["layertype_0_bsz2_seq128"] > 0.0


def test_modes_add_up_in_one_file(tmp_path: Path) -> None:
    """Batch mode, then sequence mode with --resume: the file holds the cells of both."""
    measured_dir(tmp_path, mode="batch", bsz="1:8")
    options = make_options(mode="sequence", seq="32:128:x2", resume=True)
    with opened(tmp_path, options) as record:
        put_all(record, options)

    found = load(tmp_path / COMPUTATION)
    assert {"layertype_0_bsz8_seq128", "layertype_0_bsz1_seq32"} <= set(found)


def test_a_further_cell_costs_no_statistics_of_the_others(tmp_path: Path) -> None:
    """Files are written after every cell; the samples of earlier ones are not looked at again."""
    options = make_options(mode="batch", bsz="1:8", profile_type="computation", tp="1")
    cells = plan_cells(LLAMA, options)
    measurer = MadeUp()
    found = [measurer.measure(cell) for cell in cells]
    series = sum(len(m.samples_s) for m in found)
    before = stats._summary.cache_info().misses
    with opened(tmp_path, options) as record:
        for m in found:
            record.put(m)

    assert stats._summary.cache_info().misses - before <= series


def test_other_modes_are_one_line(tmp_path: Path) -> None:
    """Warnings are those of the cells that a command asked for; the rest is counted."""
    batch = make_options(mode="batch", bsz="1:8", profile_type="computation", tp="1")
    failing = ["time_layernum[2]_bsz3_seq128", "time_layernum[4]_bsz2_seq128"]
    with opened(tmp_path, batch) as record:
        measure_cells(plan_cells(LLAMA, batch), MadeUp(failing=failing), record)
        said = record.warnings(plan_cells(LLAMA, batch))
        assert [text.split()[0] for text in said] == [failing[0]]
        assert "and 1 more failed: made up" in said[0]
    sequence = make_options(
        mode="sequence", seq="32:128:x2", profile_type="computation", tp="1", resume=True
    )
    with opened(tmp_path, sequence) as record:
        cells = plan_cells(LLAMA, sequence)
        failing = ["time_layertype_0_bsz1_seq32"]
        measure_cells(record.missing(cells), MadeUp(failing=failing), record)
        own, rest = record.warnings(cells)
    assert own == f"{failing[0]} failed: made up"
    assert rest.startswith("1 more warning is about cells of earlier runs")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "Another GPU"}, "device of every rank (device): Some GPU and Another GPU"),
        ({"model": "other (12345678)"}, "the model (model): tiny-llama"),
        ({"torch": "2.9.0"}, "version of torch (torch): 2.11.0 and 2.9.0"),
    ],
)
def test_what_is_not_comparable_is_not_continued(
    changes: dict[str, str], said: str, tmp_path: Path
) -> None:
    """Cells of another machine, model or torch never stand beside these."""
    measured_dir(tmp_path, bsz="2")

    with pytest.raises(InputError) as caught:
        opened(tmp_path, make_options(bsz="2", resume=True), **changes)

    assert said in str(caught.value)


def test_exact_memory_does_not_depend_on_the_machine(tmp_path: Path) -> None:
    """A memory file that was begun on a laptop is continued on a server."""
    measured_dir(tmp_path, profile_type="memory")

    options = make_options(profile_type="memory", resume=True)
    with opened(tmp_path, options, device="Another GPU") as record:
        assert record.missing(plan_cells(LLAMA, options)) == []
    with pytest.raises(InputError, match="implementation of tensor parallelism"):
        opened(tmp_path, options, tp_impl="dtensor")


def test_force_begins_anew_and_keeps_history(tmp_path: Path) -> None:
    """Earlier cells no longer count, their samples stay; a foreign file is kept under a name."""
    measured_dir(tmp_path, mode="batch", bsz="1:8")
    options = make_options(bsz="2", force=True)
    with opened(tmp_path, options, device="Another GPU") as record:
        put_all(record, options)

    assert "layertype_0_bsz8_seq128" not in load(tmp_path / COMPUTATION)
    runs = sidecar(tmp_path / COMPUTATION).runs
    assert [len(run.model_measurements) > 0 for run in runs] == [True, True]
    resumed = make_options(bsz="2", resume=True)
    with opened(tmp_path, resumed, device="Another GPU") as record:  # the old device is no matter
        assert record.missing(plan_cells(LLAMA, resumed)) == []


def test_damage_is_moved_aside_and_repaired(tmp_path: Path) -> None:
    """A half-written sidecar costs its cells, a damaged document nothing."""
    measured_dir(tmp_path, bsz="2")
    expected = (tmp_path / MEMORY).read_bytes()
    (tmp_path / MEMORY).write_text("{", encoding="utf-8")
    sidecar_path(tmp_path / COMPUTATION).write_text('{"version": 2,', encoding="utf-8")

    options = make_options(bsz="2", resume=True)
    with opened(tmp_path, options) as record:
        missing = record.missing(plan_cells(LLAMA, options))
        notes = " ".join(record.notes)
    assert {cell.quantity for cell in missing} == {"time"}
    assert (tmp_path / MEMORY).read_bytes() == expected
    assert "was damaged and was derived again" in notes
    assert ".damaged" in notes
    assert list(tmp_path.glob("computation*.damaged"))
