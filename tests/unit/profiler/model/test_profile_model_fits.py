"""Fits of a made-up model in its sidecar: what they say, who agrees, how they are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.documents.model import read_model_profile
from autopar.documents.sidecar import ModelMeasurement, Sidecar, TimeFit, read_sidecar, sidecar_path
from autopar.records import replace
from profiler.model.cells import plan_cells
from profiler.model.documents import (
    ModelDocument,
    bad_fits,
    derive_computation,
    fit_cells,
    fit_name,
    largest_cell,
    main_fits,
)
from profiler.show import command as show_cli
from profiler.show.tables import show_fits
from search.planning.cost.fits import fit_computation, fit_other_time
from search.request.options import ProfileMode, SearchOptions
from tests.unit.profile_model_support import (
    LLAMA,
    OTHER_S,
    SAMPLE_S,
    T5,
    MadeUp,
    make_options,
    measured_dir,
    opened,
    put_all,
)
from tests.unit.show_folders import printed

COMPUTATION = "computation_profiling_bf16_hidden_64_head_4.json"
GRID = {"mode": "batch", "bsz": "1,2,4", "seq": "64:256:x2"}


def cells_of(**changes: str) -> dict[str, ModelMeasurement]:
    """Return the cells of a run, measured."""
    measurer = MadeUp()
    return {cell.key: measurer.measure(cell) for cell in plan_cells(LLAMA, make_options(**changes))}


def slower(
    cells: dict[str, ModelMeasurement], key: str, factor: float
) -> dict[str, ModelMeasurement]:
    """Return the cells with the passes of one of them so many times as long."""
    samples = {name: [factor * s for s in values] for name, values in cells[key].samples_s.items()}
    return {**cells, key: replace(cells[key], samples_s=samples)}


def one(fits: list[TimeFit], name: str, form: str) -> TimeFit:
    """Return the first fit of this name and form."""
    return next(fit for fit in fits if (fit_name(fit), fit.form) == (name, form))


def sidecar(folder: Path) -> Sidecar:
    """Return the sidecar of the computation file in a folder, which must have one."""
    found = read_sidecar(folder / COMPUTATION)
    assert found is not None
    return found


def test_a_joint_fit_says_everything_of_itself() -> None:
    """Coefficients with units, intervals, residuals of every cell, and where it may be used."""
    fit = one(fit_cells(cells_of(**GRID).values()), "layer type 0, forward", "sequence")

    assert fit.coefficients.launch_s == pytest.approx(0.0, abs=1e-12)
    assert fit.coefficients.s_per_sample is None
    assert fit.coefficients.s_per_token == pytest.approx(SAMPLE_S / 128)
    assert fit.low is not None
    assert fit.high is not None
    low, high = fit.low.s_per_token, fit.high.s_per_token
    assert low is not None
    assert high is not None
    assert 0.97 * SAMPLE_S / 128 < low < high < 1.03 * SAMPLE_S / 128
    assert (fit.batches, fit.tokens) == ([1, 4], [64, 256])
    assert (fit.usable_batch, fit.usable_tokens) == (8, 512)
    assert [(c.seq_lengths, c.batch) for c in fit.cells] == [
        ([s], b) for s in (64, 128, 256) for b in (1, 2, 4)
    ]
    for cell in fit.cells:
        assert cell.measured_s == pytest.approx(SAMPLE_S * cell.batch * cell.seq_lengths[0] / 128)
        assert abs(cell.relative) < 1e-9
        assert cell.fitted_low_s is not None
        assert cell.fitted_high_s is not None
        assert cell.fitted_low_s < cell.fitted_s < cell.fitted_high_s
    assert abs(fit.worst_relative) == max(abs(c.relative) for c in fit.cells)
    assert largest_cell(fit) is fit.cells[-1]


def test_every_time_has_the_fits_that_its_cells_can_carry() -> None:
    """Joint over lengths, with a launch cost per length of several batches, else proportional."""
    found = fit_cells(cells_of(**GRID).values())
    forms: dict[str, list[str]] = {}
    for fit in found:
        forms.setdefault(fit_name(fit), []).append(fit.form)

    each = ["sequence", "batch", "batch", "batch"]
    assert forms == {
        f"layer type 0, {time}{at}": each
        for at in ("", " at tp=2")
        for time in ("forward", "backward", "recompute")
    } | {f"embedding and head, {time}": each for time in ("forward", "backward")}
    (static, *_) = fit_cells(cells_of(bsz="2").values())
    assert (static.form, static.batches, static.tokens) == ("static", [2, 2], [128, 128])
    assert (static.usable_batch, static.usable_tokens) == (4, 128)
    assert [fit_name(fit) for fit in main_fits(found, "sequence")] == [
        "layer type 0, forward",
        "layer type 0, backward",
        "embedding and head, forward",
        "embedding and head, backward",
    ]
    assert {fit.form for fit in main_fits(found, "sequence")} == {"sequence"}


def test_a_run_shows_the_fits_of_its_mode() -> None:
    """Batch mode one for every length, where there are joint ones too; else what there is."""
    grid, line = (fit_cells(cells_of(**changes).values()) for changes in (GRID, {"bsz": "2"}))

    shown = [(fit.form, fit.tokens) for fit in main_fits(grid, "batch")]
    assert shown == [("batch", [s, s]) for s in (64, 128, 256)] * 4
    assert {fit.form for fit in main_fits(grid, "static")} == {"sequence"}
    assert {fit.form for fit in main_fits(line, "batch")} == {"static"}


@pytest.mark.parametrize("mode", ["batch", "sequence"])
def test_the_planner_fits_the_same(mode: ProfileMode, tmp_path: Path) -> None:
    """What the sidecar says of a fit is what a search prices with, also where it is bad."""
    options = make_options(profile_type="computation", **GRID)
    with opened(tmp_path, options) as record:
        cells = slower(cells_of(**GRID), "time_layertype_0_bsz1_seq128", 1.7)
        for cell in plan_cells(LLAMA, options):
            if cell.num_layers is None:
                record.put(cells[cell.key])
    with opened(tmp_path, make_options(profile_type="memory")) as record:
        put_all(record, make_options(profile_type="memory"))
    profile = read_model_profile(
        computation=tmp_path, memory=tmp_path, spec=LLAMA, sequence_parallel=True, precision="bf16"
    )
    asked, notes = SearchOptions(time_profile_mode=mode), list[str]()
    fits = fit_computation(0, profile.layers[0], 128, asked, notes.append)
    by_name = {
        fit_name(fit): fit
        for fit in sidecar(tmp_path).fits
        if fit.form == mode and (mode == "sequence" or fit.tokens == [128, 128])
    }

    for (what, ulysses, degree), ours in fits.measured.items():
        at = "" if degree == 1 else f" at tp={degree}"
        if not ulysses:
            check(by_name[f"layer type 0, {what}{at}"], ours.launch_s, ours.sample_s)
    check(by_name["layer type 0, forward"], fits.whole.launch_s, fits.whole.sample_s)
    other = fit_other_time(profile, (128,), asked, notes.append)
    check(by_name["embedding and head, forward"], other.launch_s, other.sample_s)
    worst = by_name["layer type 0, forward"]
    assert abs(worst.worst_relative) > 0.1
    assert f"layer type 0 in mode {mode} is off by {100 * worst.worst_relative:+.3g} %" in notes[0]


def check(fit: TimeFit, launch_s: float, sample_s: float) -> None:
    """Compare a fit of a sidecar with one of the planner, at 128 tokens."""
    known = fit.coefficients
    ours = (known.s_per_sample or 0.0) + 128 * (known.s_per_token or 0.0)
    assert known.launch_s == pytest.approx(launch_s, rel=1e-9, abs=1e-15)
    assert ours + 128**2 * (known.s_per_token_squared or 0.0) == pytest.approx(sample_s, rel=1e-9)


def test_a_bad_fit_is_one_sentence() -> None:
    """It names the fit, the cell, by how much, and what to do; 10 % and less is no matter."""
    cells = cells_of(**GRID)
    (said,) = bad_fits(fit_cells(slower(cells, "time_layertype_0_bsz1_seq64", 1.6).values()))

    assert bad_fits(fit_cells(cells.values())) == []
    assert bad_fits(fit_cells(slower(cells, "time_layertype_0_bsz1_seq64", 1.05).values())) == []
    assert "fits are more than 10 % off a time, most layer type 0, " in said
    assert "% at batch 1, sequence length 64, the worst of 9 times. Measure again with" in said


def test_a_run_ends_with_the_bad_fit(tmp_path: Path) -> None:
    """The record says it with the other warnings."""
    options = make_options(profile_type="computation", **GRID)
    cells = slower(cells_of(**GRID), "time_layertype_0_bsz1_seq64", 1.6)
    with opened(tmp_path, options) as record:
        for cell in plan_cells(LLAMA, options):
            if cell.num_layers is None and cell.degree == 1:
                record.put(cells[cell.key])
        warnings = record.warnings(plan_cells(LLAMA, options))
        assert any("fits are more than 10 % off" in said for said in warnings)
        assert record.fits() == sidecar(tmp_path).fits


def test_one_cell_is_one() -> None:
    """Sentences on one cell, one layer and one fit are in the singular."""
    cells = cells_of(bsz="1", tp="1")
    key = "time_layertype_0_bsz1_seq128"
    scattered = [SAMPLE_S * x for x in (1.0, 1.9, 0.6, 1.5, 1.0, 0.5)]
    cells[key] = replace(cells[key], samples_s={"forward": scattered})
    said = derive_computation(cells, LLAMA, "batch").warnings

    assert said[0].startswith("1 batch size was measured at sequence length 128, ")
    assert said[1].startswith(f"1 layer time is unsteady; {key}: the samples scatter")
    two = cells_of(bsz="1,2,4", tp="1", mode="batch")
    (fit,) = (f for f in fit_cells(two.values()) if fit_name(f) == "layer type 0, forward")
    bad = replace(fit, worst_relative=0.5)
    assert bad_fits([bad])[0].startswith("1 of 1 fit is more than 10 % off a time")


def test_one_sample_leaves_no_interval() -> None:
    """What was taken once has a fit and a residual, and nothing is said of its scatter."""
    cells = cells_of(bsz="1,2", mode="batch")
    key = "time_layertype_0_bsz1_seq128"
    cells[key] = replace(cells[key], samples_s={"forward": [SAMPLE_S]})
    fit = one(fit_cells(cells.values()), "layer type 0, forward", "batch")

    assert (fit.low, fit.high) == (None, None)
    assert all(cell.fitted_low_s is None for cell in fit.cells)
    assert fit.cells[0].measured_s == SAMPLE_S


def derived(cells: dict[str, ModelMeasurement]) -> ModelDocument:
    """Return the computation file of cells."""
    return derive_computation(cells, LLAMA, "static")


def test_what_surrounds_layers_has_times_of_its_own() -> None:
    """Backward apart from forward, each with its percentiles, like recomputation of layers."""
    found = derived(cells_of(bsz="2"))
    (other,) = found.other_times

    assert (other.batch, other.seq_lengths) == (2, (128,))
    assert other.forward_s == pytest.approx(2 * OTHER_S)
    assert other.backward_s == pytest.approx(4 * OTHER_S)
    assert other.forward_low_s is not None
    assert other.backward_high_s is not None
    assert other.forward_low_s < other.forward_s
    assert other.backward_high_s > 4 * OTHER_S
    whole = found.layer_times[0]
    assert whole.recompute_low_s is not None
    assert whole.recompute_high_s is not None
    assert whole.recompute_low_s < 2 * SAMPLE_S < whole.recompute_high_s


def test_the_rest_of_a_module_has_a_forward_alone() -> None:
    """A difference of whole forwards has neither backward nor scatter; nothing left is no entry."""
    cells = {key: m for key, m in cells_of(bsz="1,2", mode="batch").items() if "_other_" not in key}
    found = derived(cells)

    assert [(t.batch, t.backward_s, t.forward_low_s) for t in found.other_times] == [
        (1, None, None),
        (2, None, None),
    ]
    assert found.other_times[1].forward_s == pytest.approx(2 * OTHER_S)
    fit = one(found.fits, "embedding and head, forward", "batch")
    assert fit.low is None
    assert fit.coefficients.s_per_sample == pytest.approx(OTHER_S)
    for key in ("time_layertype_0_bsz1_seq128", "time_layertype_0_bsz2_seq128"):
        cells = slower(cells, key, 2.0)
    none_left = derived(cells)
    assert none_left.other_times == []
    assert none_left.data["layertype_other_bsz2_seq128"] == 0.0
    fit = one(none_left.fits, "embedding and head, forward", "batch")
    assert [cell.measured_s for cell in fit.cells] == [0.0, 0.0]


def test_a_resumed_run_has_the_same_fits(tmp_path: Path) -> None:
    """To the byte, wherever it was interrupted and whichever types of layers there are."""
    options = make_options(profile_type="computation", bsz="1,2", mode="batch")
    again = make_options(profile_type="computation", bsz="1,2", mode="batch", resume=True)
    for most in (2, 7):
        for name, first in (("whole", 10**9), ("parts", most)):
            with opened(tmp_path / f"{name}{most}", options, T5) as record:
                put_all(record, options, T5, most=first)
        with opened(tmp_path / f"parts{most}", again, T5) as record:
            put_all(record, again, T5)
        one_go, parts = (
            json.loads(sidecar_path(tmp_path / f"{name}{most}" / COMPUTATION).read_bytes())
            for name in ("whole", "parts")
        )
        assert one_go["fits"]
        for key in ("layer_times", "other_times", "fits"):
            assert json.dumps(parts[key]) == json.dumps(one_go[key])


@pytest.mark.parametrize("version", [1, 2])
def test_sidecars_of_earlier_versions(
    version: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are read and shown as they are; --resume adds what they lack and measures nothing."""
    options = make_options(bsz="2")
    measured_dir(tmp_path, bsz="2")
    path = sidecar_path(tmp_path / COMPUTATION)
    full = json.loads(path.read_text(encoding="utf-8"))
    old = {key: value for key, value in full.items() if key not in ("fits", "other_times")}
    path.write_text(json.dumps({**old, "version": version}), encoding="utf-8")

    assert sidecar(tmp_path).fits == []
    assert show_cli.run([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    again = make_options(bsz="2", resume=True)
    with opened(tmp_path, again) as record:
        assert record.missing(plan_cells(LLAMA, options)) == []
        assert any("lacked fits, which were added" in note for note in record.notes)
    new = json.loads(path.read_text(encoding="utf-8"))
    assert (new["fits"], new["other_times"]) == (full["fits"], full["other_times"])
    assert show_cli.run([str(tmp_path)]) == 0
    assert shown == capsys.readouterr().out.replace("--resume ", "")


def test_table_of_fits() -> None:
    """A row per fit: its largest cell, ms per sample with an interval, launch, worst residual."""
    cells = slower(cells_of(bsz="1,2,4", mode="batch"), "time_layertype_0_bsz1_seq128", 1.6)
    fits = fit_cells(cells.values())
    text = printed(show_fits, fits, columns=100)
    rows = {tuple(line.split()[:5]): line.split()[5:] for line in text.splitlines()}
    fit = one(fits, "layer type 0, forward", "batch")
    cell = fit.cells[-1]
    assert cell.fitted_low_s is not None
    assert cell.fitted_high_s is not None
    assert fit.coefficients.launch_s is not None
    low, middle, high = (
        f"{t / 4e-3:.4g}" for t in (cell.fitted_low_s, cell.fitted_s, cell.fitted_high_s)
    )
    launch = f"{float(f'{1e6 * fit.coefficients.launch_s:.3g}'):.4g}"

    assert rows["layer", "type", "0", "forward", "batch"] == (
        f"4 x 128 {middle} {low}-{high} {launch} us {100 * fit.worst_relative:+.1f} %".split()
    )
    assert abs(fit.worst_relative) > 0.1
    assert rows["layer", "type", "0", "forward", "sp"][-1] == "exact"
    assert max(map(len, text.splitlines())) <= 100
    assert printed(show_fits, []) == ""


def test_an_interval_wider_than_its_time_is_none() -> None:
    """A busy machine leaves no usable interval, and is not given one in thousands of per cent."""
    (fit,) = (
        f for f in fit_cells(cells_of(bsz="2").values()) if fit_name(f) == "layer type 0, forward"
    )
    cell = fit.cells[0]
    for ends, usable in (((0.8, 1.7), True), ((0.2, 20.0), False), ((0.5, 1.6), False)):
        low, high = (end * cell.fitted_s for end in ends)
        wide = replace(cell, fitted_low_s=low, fitted_high_s=high)
        text = printed(show_fits, [replace(fit, cells=[wide])], columns=100)
        row = next(line for line in text.splitlines() if line.startswith("layer type 0"))
        assert (" none " in row) == (not usable), row


def test_profile_show_shows_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times with their origin and fits; memory has none and is named; damage is a sentence."""
    measured_dir(tmp_path, bsz="1,2", mode="batch")
    assert show_cli.run([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "Layer times of tiny-llama" in out
    assert "measured by `profile-model --model tiny-llama` on Some GPU" in out
    assert "Fitted times" in out
    assert "profiles of models are not printed: memory_profiling" in err
    assert show_cli.run([str(tmp_path / COMPUTATION)]) == 0
    assert "Fitted times" in capsys.readouterr().out

    sidecar_path(tmp_path / COMPUTATION).write_text('{"version": 3,', encoding="utf-8")
    assert show_cli.run([str(tmp_path)]) == 2
    assert "not valid JSON" in capsys.readouterr().err
