"""`profile-model` as a command, on this machine's CPU: real files, and plans made from them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from autopar.documents.model import read_model_profile
from autopar.documents.sidecar import read_sidecar
from autopar.documents.spec import load_spec
from tests.command_lines import last_said
from tests.e2e.profiling import (
    COMPUTATION,
    LLAMA,
    MEMORY,
    SHORT,
    T5,
    measured_cells,
    own_module,
    profiled,
    started,
    visible_names,
    wait_for,
    write_model,
)
from tests.warm import command

pytestmark = pytest.mark.whole

pytest.importorskip("torch", reason="torch is not installed")


def check_search(model: Path, files: Path, mode: str, *options: str) -> None:
    """Check that the planner takes the two files, each with its sidecar."""
    done = command(
        "autopar-search",
        *("--model", str(model), "--hardware", "a100:1x4", "--mixed-precision", "fp32"),
        *("--memory-profiling-path", str(files), "--time-profiling-path", str(files)),
        *("--time-profile-mode", mode, "--output-config-path", "none", "--verbose", *options),
    ).completed()
    assert done.returncode == 0, done.stderr
    for name in (COMPUTATION, MEMORY):
        assert f"{files / name}\n" in done.stdout
        assert f"{files / name}.meta.json\n" in done.stdout


def check_files(files: Path, model: Path) -> None:
    """Check that all four files are there and that every cell was measured."""
    assert visible_names(files) == {
        n for name in (COMPUTATION, MEMORY) for n in (name, f"{name}.meta.json")
    }
    for name in (COMPUTATION, MEMORY):
        sidecar = read_sidecar(files / name)
        assert sidecar is not None
        assert sidecar.runs
        assert not sidecar.estimated
        for run in sidecar.runs:
            assert run.metadata["device"].startswith("cpu (")  # type: ignore[union-attr]
            assert all(m.status == "ok" for m in run.model_measurements)
    spec = load_spec(str(model))
    for sequence_parallel in (True, False):
        read_model_profile(
            computation=files,
            memory=files,
            spec=spec,
            sequence_parallel=sequence_parallel,
            precision="fp32",
        )


def check_run(folder: Path, mode: str, *sizes: str) -> Path:
    """Profile the tiny llama in a mode; return the folder of its files, which are all there."""
    model = write_model(folder, LLAMA)
    options = ("--model", model.name, "--mode", mode, *sizes, "--tp", "1,2", *SHORT)
    out, err = profiled(folder, *options, "--out", "profiles")

    assert out.splitlines() == [
        f"profiles/{n}" for name in (COMPUTATION, MEMORY) for n in (name, f"{name}.meta.json")
    ]
    assert err.splitlines()[-1].endswith(" cells measured, 0 failed, 0 skipped")
    check_files(folder / "profiles", model)
    return folder / "profiles"


BATCHES = ("--bsz", "1:3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in batch mode that nobody disturbed, below the model's file."""
    return check_run(tmp_path_factory.mktemp("whole"), "batch", *BATCHES)


def test_a_tiny_llama_is_profiled_and_planned(whole: Path) -> None:
    """All documented files, and a plan from them."""
    check_search(whole.parent / "tiny-llama.json", whole, "batch")


@pytest.mark.parametrize(
    ("mode", "sizes", "options"),
    [
        ("static", ("--bsz", "2"), ()),
        (
            "sequence",
            ("--seq", "32:128:x2"),
            ("--seq-length", "96", "--memory-profile-mode", "sequence"),
        ),
    ],
)
def test_other_modes(
    mode: str, sizes: tuple[str, ...], options: tuple[str, ...], tmp_path: Path
) -> None:
    """The same; sequence mode is planned at a new length."""
    files = check_run(tmp_path, mode, *sizes)
    check_search(tmp_path / "tiny-llama.json", files, mode, *options)


def test_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    """Two layer types with lengths of their own; files where the model's and the device's lie."""
    model = write_model(tmp_path, T5)
    profiled(tmp_path, "--model", model.name, "--bsz", "2", "--tp", "1,2", *SHORT)

    configs = tmp_path / "models" / "tiny-t5" / "configs"
    times = json.loads((configs / "cpu" / COMPUTATION).read_text(encoding="utf-8"))
    assert set(times) == {
        "layertype_0_bsz2_seq64",
        "layertype_1_bsz2_seq32",
        "layertype_other_bsz2_seq[64,32]",
        "layernum[2,2]_bsz2_seq[64,32]",
        "layernum[4,2]_bsz2_seq[64,32]",
        "layernum[2,4]_bsz2_seq[64,32]",
    }
    together = tmp_path / "together"
    together.mkdir()
    for path in (*configs.glob("memory*"), *(configs / "cpu").glob("computation*")):
        (together / path.name).write_bytes(path.read_bytes())
    check_files(together, model)
    check_search(model, together, "static")


RESUMED = ("--mode", "batch", *BATCHES, "--tp", "1,2", *SHORT)


@pytest.mark.parametrize(
    ("number", "cell"),
    [
        (signal.SIGINT, "time_layertype_0_bsz3_seq128"),
        pytest.param(signal.SIGKILL, "time_layertype_0_bsz2_seq128", marks=pytest.mark.slow),
        (signal.SIGKILL, "memory_layertype_0_bsz1_seq128_tp2_sp"),
    ],
)
def test_interrupted_and_resumed(
    number: signal.Signals, cell: str, whole: Path, tmp_path: Path
) -> None:
    """A run that is ended, politely or not, keeps every cell it reported; --resume adds the rest.

    Times differ from run to run by nature: of them keys are compared, and the samples of kept
    cells. Memory is counted: its documents are the same bytes.
    """
    model = write_model(tmp_path, LLAMA)
    options = ("--model", model.name, *RESUMED, "--out", "broken")
    with started(tmp_path, *options) as process:
        lines = wait_for(process, f"] {cell} ")
        process.send_signal(number)
        assert process.stderr is not None
        rest = process.stderr.read().splitlines()
        code = process.wait(timeout=60)
    if number == signal.SIGINT:
        assert code == 130
        assert rest.pop() == "profile-model: interrupted; resume with the same command and --resume"
    else:
        assert code == -signal.SIGKILL
    reported = {line.split()[2 if line[1] == " " else 1] for line in lines + rest}
    kept = measured_cells(tmp_path / "broken")
    # a cell is written before it is reported
    assert reported <= set(kept)
    assert len(kept) - len(reported) <= (number == signal.SIGKILL)
    missing = set(measured_cells(whole)) - set(kept)
    assert missing

    out, err = profiled(tmp_path, *options, "--resume")
    assert len(out.splitlines()) == 4
    assert f"{len(missing)}/{len(missing)}] " in err
    check_files(tmp_path / "broken", model)
    now, expected = measured_cells(tmp_path / "broken"), measured_cells(whole)
    assert set(now) == set(expected)
    assert {key: now[key] for key in kept} == kept
    for key, found in now.items():
        assert set(found.samples_s) == set(expected[key].samples_s)
        assert all(found.samples_s.values())
        assert found.bytes == expected[key].bytes
    documents = [folder / MEMORY for folder in (tmp_path / "broken", whole)]
    assert documents[0].read_bytes() == documents[1].read_bytes()
    times = [
        json.loads((folder / COMPUTATION).read_text(encoding="utf-8"))
        for folder in (tmp_path / "broken", whole)
    ]
    assert list(times[0]) == list(times[1])
    assert all(value > 0.0 for value in times[0].values())


def test_exact_memory_killed_and_resumed(whole: Path, tmp_path: Path) -> None:
    """Memory alone, killed twice: the document is that of one run, byte for byte."""
    model = write_model(tmp_path, LLAMA)
    options = ("--model", model.name, "--source", "exact", "--dtype", "fp32", "--tp", "1,2")
    for resume, cell in (((), "tp2_sp"), (("--resume",), "memory_other_first_bsz8_seq128")):
        with started(tmp_path, *options, "--out", "broken", *resume) as process:
            wait_for(process, f"{cell} ")
            process.kill()
            process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
    profiled(tmp_path, *options, "--out", "broken", "--resume")

    runs = read_sidecar(tmp_path / "broken" / MEMORY)
    assert runs is not None
    assert len(runs.runs) == 3
    assert (tmp_path / "broken" / MEMORY).read_bytes() == (whole / MEMORY).read_bytes()
    found, expected = measured_cells(tmp_path / "broken"), measured_cells(whole)
    assert set(found) == {key for key in expected if key.startswith("memory_")}
    assert all(found[key].bytes == expected[key].bytes for key in found)


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    """A factory in the working directory: layers as the model calls them, the rest derived."""
    (tmp_path / "own_model.py").write_text(own_module(64), encoding="utf-8")
    name = ("--model", "py:own_model:build", "--seq", "32", "--bsz", "2")
    profiled(tmp_path, *name, *SHORT, "--out", "profiles")

    times = json.loads((tmp_path / "profiles" / COMPUTATION).read_text(encoding="utf-8"))
    assert {"layertype_0_bsz2_seq32", "layertype_other_bsz2_seq32"} <= set(times)
    tables = json.loads((tmp_path / "profiles" / MEMORY).read_text(encoding="utf-8"))
    parameters = 2 * 64 + 64 * 128 + 128 + 128 * 64 + 64
    assert tables["layertype_0"]["32"]["parameter_size"] == parameters * 4 / 2**20
    states = tables["other_memory_pp_off"]["32"]["model_states"]["1"]
    assert states == (100 * 64 + 64 * 100 + 100) * 16 / 2**20


def test_dry_run_and_half_a_layer(tmp_path: Path) -> None:
    """A dry run writes nothing; halves add up to the layer, in files of their own names."""
    model = write_model(tmp_path, LLAMA)
    options = ("--model", model.name, "--out", "profiles", "--bsz", "2", "--tp", "1,2", *SHORT)
    out, _ = profiled(tmp_path, *options, "--dry-run")
    assert not (tmp_path / "profiles").exists()
    assert "time_layernum[4]_bsz2_seq128" in out
    assert "nothing was written" in out

    sizes = {}
    memory = ("--profile-type", "memory", "--tp", "1")
    for unit in ("all", "attention", "mlp"):
        profiled(tmp_path, *last_said([*options, *memory, "--profile-unit", unit]))
        name = MEMORY if unit == "all" else f"{MEMORY.removesuffix('.json')}_{unit}.json"
        tables = json.loads((tmp_path / "profiles" / name).read_text(encoding="utf-8"))
        sizes[unit] = tables["layertype_0"]["128"]["parameter_size"]
    assert sizes["attention"] + sizes["mlp"] == pytest.approx(sizes["all"])


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """Times are taken on the GPU, and its memory stands beside the exact counts."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = write_model(tmp_path, LLAMA)
    options = ("--model", model.name, "--bsz", "2", "--tp", "1,2", "--source", "device")
    profiled(tmp_path, *options, "--max-seconds", "0.2", "--out", "profiles")

    name = MEMORY.replace("fp32", "bf16")
    sidecar = read_sidecar(tmp_path / "profiles" / name)
    assert sidecar is not None
    cells = {m.key: m for m in sidecar.runs[-1].model_measurements}
    whole = cells["memory_layertype_0_bsz1_seq128"].bytes
    assert whole["device_activation"] == pytest.approx(whole["activation"], rel=0.05)
