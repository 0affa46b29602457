"""The held-out check of fits: what it predicts, what it must not see, and one whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.documents.model import read_model_profile
from autopar.records import replace
from autopar.run.model import ModelProfile
from benchmarks.held_out_fit import FITS, held_out, main
from tests.unit.profile_model_support import LLAMA, measured_dir

pytest.importorskip("torch", reason="torch is not installed")

LENGTHS = (16, 32, 64)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> ModelProfile:
    """Return a profile whose times are proportional to tokens: 24 lies inside, 128 outside."""
    out = tmp_path_factory.mktemp("profile")
    measured_dir(out, mode="sequence", seq="16,24,32,64,128", bsz="1,3", tp="1")
    return read_model_profile(
        computation=out, memory=out, spec=LLAMA, sequence_parallel=True, precision="bf16"
    )


def test_what_follows_the_form_is_predicted(profile: ModelProfile) -> None:
    """Every unseen size of layers, in both directions, and of the rest is met without error."""
    cells = held_out(profile, LENGTHS)

    assert {cell.name for cell in cells} == {
        (part, 0, seq_length, batch)
        for part in ("forward", "backward", "other")
        for seq_length in (24, 128)
        for batch in (1, 3)
    }
    for cell in cells:
        assert cell.inside == (cell.seq_length == 24)
        for fit in FITS:
            assert cell.error(fit) == pytest.approx(0.0, abs=1e-6), (cell, fit)


def test_unseen_times_are_not_fitted(profile: ModelProfile) -> None:
    """Twice the time at unseen lengths changes no prediction, so that every error is -50 %."""
    (layer,) = profile.layers
    slower = replace(
        profile,
        layers=(
            replace(
                layer,
                times=tuple(
                    p if p.seq_length in LENGTHS else replace(p, forward_s=2.0 * p.forward_s)
                    for p in layer.times
                ),
                sharded_times=tuple(
                    p
                    if p.seq_length in LENGTHS or p.backward_s is None
                    else replace(p, forward_s=2.0 * p.forward_s, backward_s=2.0 * p.backward_s)
                    for p in layer.sharded_times
                ),
            ),
        ),
        other_times=tuple(
            p if p.seq_lengths[0] in LENGTHS else replace(p, forward_s=2.0 * p.forward_s)
            for p in profile.other_times
        ),
    )
    for cell in held_out(slower, LENGTHS):
        for fit in FITS:
            assert cell.error(fit) == pytest.approx(-0.5, abs=1e-6), (cell, fit)


@pytest.mark.parametrize("clock", [pytest.param("wall", marks=pytest.mark.slow), "cpu"])
def test_a_whole_run(clock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command profiles a tiny model, prints every unseen cell and keeps the raw figures."""
    layer = {"num_layers": 2, "seq_length": 128, "hidden_size": 64, "num_heads": 4}
    model = {
        "format": "autopar-model",
        "version": 1,
        "name": "tiny",
        "layers": [{**layer, "ffn_hidden_size": 128}],
        "vocab_size": 500,
    }
    path, ledger = tmp_path / "tiny.json", tmp_path / "ledger.json"
    path.write_text(json.dumps(model), encoding="utf-8")
    sizes = ("--seq", "16,32,64", "--unseen", "24,128", "--bsz", "1", "--repeats", "1")
    short = ("--iters", "3", "--max-seconds", "0.02", "--clock", clock)
    code = main(["--model", str(path), *sizes, *short, "--json", str(ledger)])

    said = capsys.readouterr()
    assert code == (1 if "missed: " in said.err else 0)
    rows = [line for line in said.out.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 2 * 3
    assert sum("(outside)" in row for row in rows) == 3
    (entry,) = map(json.loads, ledger.read_text(encoding="utf-8").splitlines())
    assert entry["benchmark"] == "held_out_fit"
    assert entry["metadata"]["processor"]
    (cells,) = entry["repeats"]
    assert len(cells) == len(rows)
    assert all(cell["measured_s"] > 0.0 and set(cell["fitted_s"]) == set(FITS) for cell in cells)


def test_a_length_cannot_be_both(capsys: pytest.CaptureFixture[str]) -> None:
    """What is fitted is not unseen: one sentence, exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main(["--seq", "128,256,512", "--unseen", "256"])

    assert caught.value.code == 2
    assert "a length of --seq is not unseen" in capsys.readouterr().err
