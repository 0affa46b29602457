"""From a configuration to a plan with nothing estimated: two profilers, a search, an explanation.

Real processes on this machine's CPU throughout. What is asserted holds on a busy machine too: that
every figure was measured, where it comes from and that it is used, never how large it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.hardware import hardware_file_name
from autopar.documents.sidecar import DocumentKind
from autopar.rates.stack import DEFAULT_STACK
from autopar.sources import NAMED_BY_FILES, STACK_ROLE
from tests import warm
from tests.e2e.launching import TWO_RANKS, Finished, measured
from tests.e2e.profiling import COMPUTATION, CONFIG, MEMORY, SHORT, measured_cells, profiled

pytestmark = pytest.mark.whole

pytest.importorskip("torch", reason="torch is not installed")
HARDWARE: tuple[DocumentKind, ...] = ("allreduce", "p2p", "overlap", "sp_time")
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": CONFIG,
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 4,
        "n_positions": 128,
        "vocab_size": 1000,
    },
    "t5": {
        "model_type": "t5",
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 16,
        "num_heads": 4,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "n_positions": 128,
        "vocab_size": 1000,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Inputs:
    """Files of one model and one machine, all measured."""

    config: Path
    profiles: Path
    hardware: Path
    num_ranks: int

    def documents(self) -> dict[str, Path]:
        """Return the documents and sidecars that a search must read, by role."""
        found = {
            kind: self.hardware / hardware_file_name(kind, 1, self.num_ranks) for kind in HARDWARE
        }
        found |= {"computation": self.profiles / COMPUTATION, "memory": self.profiles / MEMORY}
        sidecars = {f"{role} sidecar": Path(f"{path}.meta.json") for role, path in found.items()}
        return {**found, **sidecars}


def profile(name: str, folder: Path) -> tuple[Path, Path]:
    """Measure a model in batch mode, add sequence mode; return its configuration and the files."""
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    options = ("--model", "config.json", "--tp", "1,2", *SHORT, "--out", "profiles")
    profiled(model, *options, "--mode", "batch", "--bsz", "1,2")
    profiled(model, *options, "--mode", "sequence", "--seq", "32:128:x2", "--resume")
    return model / "config.json", model / "profiles"


@pytest.fixture(scope="module")
def hardware(two: tuple[Path, Finished]) -> Path:
    """Return the folder that two ranks measured into."""
    return two[0]


@pytest.fixture(scope="module")
def llama(hardware: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Return the files of a tiny llama on two ranks."""
    return Inputs(*profile("llama", tmp_path_factory.mktemp("model")), hardware, 2)


def command(name: str, folder: Path, *arguments: str) -> str:
    """Run one of the planner's commands in a folder; return its report, which estimates nothing."""
    done = warm.command(name, *arguments, cwd=folder).completed()
    assert done.returncode == 0, done.stderr
    # the heading of the figures apart, nothing is an estimate
    report = (done.stdout + done.stderr).replace("estimate   90 % interval", "")
    assert "estimate" not in report.lower()
    return done.stdout


def check_plan(inputs: Inputs, folder: Path, mode: str, *options: str) -> None:
    """Search with these files alone, and check what the plan says of its origin and spread."""
    report = command(
        "autopar-search",
        folder,
        *("--model", str(inputs.config), "--hardware", str(inputs.hardware)),
        *("--memory-profiling-path", str(inputs.profiles)),
        *("--time-profiling-path", str(inputs.profiles)),
        *("--mixed-precision", "fp32", "--time-profile-mode", mode),
        *("--output-config-path", "strategy.json", "--verbose", *options),
    )
    plan = json.loads((folder / "autopar_plan_strategy.json").read_text(encoding="utf-8"))

    assert (plan["status"], plan["legal"], plan["fits"]) == ("optimal", True, True)
    assert not plan["estimated"]
    assert not plan["synthetic"]
    (software,) = (entry for entry in plan["inputs"] if entry["role"] == STACK_ROLE)
    # reference layers are PyTorch's own operations, as those of the stack
    assert (software["path"], software["notes"]) == (DEFAULT_STACK, [NAMED_BY_FILES])
    files = [entry for entry in plan["inputs"] if entry is not software]
    assert {entry["role"]: Path(entry["path"]) for entry in files} == inputs.documents()
    for entry in files:
        assert not entry["estimated"]
        assert not entry["synthetic"]
        assert entry["sha256"] == hashlib.sha256(Path(entry["path"]).read_bytes()).hexdigest()
        assert entry["path"] in report
    used = " ".join(plan["defaults_used"])
    for what in ("backward", "recomputation"):
        assert re.search(rf"{what} of [^;]*layer type 0[^;]* is measured", used)

    prediction = plan["prediction"]
    low_s, high_s = prediction["step_time_interval_s"]
    assert 0.0 < low_s < plan["step_time_s"] < high_s
    assert prediction["interval_of"] == ["communication", "computation"]
    said = "measured spread of communication and computation"
    assert said in " ".join(report.split())
    assert plan["alternatives"]
    assert all(0.0 <= found["probability_faster"] <= 1.0 for found in plan["alternatives"])

    check_cell_to_measure_again(inputs, prediction["widest_cell"]["name"])
    explained = command("autopar-explain", folder, "autopar_plan_strategy.json")
    _, _, again = " ".join(explained.split()).partition("Largest source of uncertainty ")
    assert again.startswith(prediction["widest_cell"]["name"])


def check_cell_to_measure_again(inputs: Inputs, name: str) -> None:
    """Check that a cell that a report names is one that was measured, and can be again."""
    match = re.fullmatch(
        r"(forward|backward|recompute)(?: at (?:tp|ulysses)=(?P<degree>\d+))? of "
        r"(?:layer type (?P<kind>\d)|embedding and head), "
        r"batch (?P<batch>\d+), sequence length (?P<lengths>[\d,]+)",
        name,
    )
    assert match, name
    lengths = [int(word) for word in match["lengths"].split(",")]
    found = [
        cell
        for cell in measured_cells(inputs.profiles).values()
        if (cell.quantity, cell.batch, cell.seq_lengths) == ("time", int(match["batch"]), lengths)
        and cell.degree == int(match["degree"] or 1)
        and cell.layer_type == (int(match["kind"]) if match["kind"] else None)
    ]
    assert any(len(cell.samples_s.get(match[1], ())) >= 3 for cell in found), name


def test_a_plan_from_only_measured_files(llama: Inputs, tmp_path: Path) -> None:
    """Batch mode plans the length that it was measured at, with Ulysses as well."""
    check_plan(llama, tmp_path, "batch", "--sp-space", "tp+sp")


def test_a_plan_at_a_length_that_was_not_measured(llama: Inputs, tmp_path: Path) -> None:
    """Sequence mode plans between the measured lengths, from measured files all the same."""
    options = ("--memory-profile-mode", "sequence", "--seq-length", "96")
    check_plan(llama, tmp_path, "sequence", *options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_other_architectures(name: str, hardware: Path, tmp_path: Path) -> None:
    """Learned positions and tied tables, and an encoder beside a decoder, in both modes."""
    inputs = Inputs(*profile(name, tmp_path), hardware, 2)
    check_plan(inputs, tmp_path, "batch", "--sp-space", "tp+sp")
    check_plan(inputs, tmp_path, "sequence")


@pytest.mark.slow
def test_four_ranks(llama: Inputs, tmp_path: Path) -> None:
    """Strided groups and longer pipelines come from measurements too."""
    out = tmp_path / "four"
    measured(4, out, *TWO_RANKS)
    inputs = Inputs(llama.config, llama.profiles, out, 4)
    check_plan(inputs, tmp_path, "batch", "--sp-space", "tp+sp", "--strided-tp")
