"""profile-show on made-up profiles: what is shown, drawn and refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.json import write_json
from autopar.errors import InputError, OptionError
from autopar.units import GB, MIB
from profiler.show.checks import validate
from profiler.show.pictures import ASCII, UNICODE, check_suffix, draw, plots, save_picture
from profiler.show.read import load_folder, series_of
from profiler.show.tables import show_folder
from tests.unit.show_folders import (
    P2P,
    REFERENCE_BYTES,
    SP_TIME,
    Cells,
    changed,
    curve,
    measured,
    one,
    printed,
    rewrite,
    samples,
    troubled,
    write_folder,
)

Golden = Callable[[str, str], None]


def test_measured_profile(folder: Path, golden: Golden) -> None:
    """Head, tables, curves and troubles of a profile with samples."""
    write_folder(folder / "box", troubled())

    text = printed(show_folder, load_folder(Path("box")), "time")

    golden("profile_show_measured.txt", text)
    assert max(len(line) for line in text.splitlines()) <= 100


def test_bandwidth_curves_without_unicode(folder: Path, golden: Golden) -> None:
    """Where the output is not UTF-8 everything is ASCII."""
    write_folder(folder / "box")

    text = printed(show_folder, load_folder(Path("box")), "bandwidth", encoding="ascii")

    golden("profile_show_ascii.txt", text)


def test_estimated_profile(root: Path) -> None:
    """The shipped estimates say that they are estimates, and have nothing to find fault with."""
    folder = load_folder(root / "hardware_configs" / "a100-80gb_1x8")
    text = printed(show_folder, folder, None)

    assert "ESTIMATED from datasheets, not measured" in text
    assert "1 node x 8 GPUs" in text
    assert "80 GiB" in text
    assert validate(folder) == []


def test_published_profiles(cases_dir: Path) -> None:
    """A folder of several shapes without sidecars is shown, in the unit that is asked for."""
    path = cases_dir / "galvatron" / "hardware"
    folder = load_folder(path, "MiB/ms")

    assert [profile.shape for profile in folder.profiles] == [(1, 4), (1, 8), (2, 8)]
    entries = {entry.key: entry for file in folder.profiles[2].files for entry in file.entries}
    entry = entries["allreduce_size_16_consec_1"]
    assert entry.value == pytest.approx(entry.written * MIB / 1e-3)
    text = printed(show_folder, folder, None)
    assert text.count("unknown: no sidecar files; unit of bandwidths") == 3
    assert [f for f in validate(folder) if f.severity == "error"] == []


def test_stamps(tmp_path: Path) -> None:
    """Synthetic and emulated numbers are marked in the head."""
    key = f"overlap_allreduce_size_4_consec_1_{64 * MIB}B"
    write_folder(tmp_path, changed(measured(), key, emulated=True), synthetic=True)

    text = printed(show_folder, load_folder(tmp_path), None)

    assert "SYNTHETIC" in text
    assert "EMULATED" in text
    assert "80 %  " in text  # (5 + 5 - 6) / 5 of the shorter one is hidden


def test_newest_measurement_counts(tmp_path: Path) -> None:
    """A cell that was measured again replaces the old one, a failed attempt does not."""
    key = f"p2p_stages_2_{REFERENCE_BYTES}B"
    write_folder(tmp_path)
    write_folder(tmp_path, changed(measured(), key, samples_s={"time": samples(2e-3)}))
    assert one(tmp_path).cells[key].samples_s["time"] == samples(2e-3)

    failed = changed(measured(), key, samples_s={}, status="failed", reason="gone")
    write_folder(tmp_path, {**failed, "sp_time": []})

    assert one(tmp_path).cells[key].status == "ok"


def test_series_prefer_samples(tmp_path: Path) -> None:
    """Points come from samples, then curves of sidecars, then documented times."""
    cells = {**measured(), "sp_time": []}
    extra = curve("all2all", 2, low_s=[0.9e-3, 1.8e-3], high_s=[1.1e-3, 2.2e-3])
    write_folder(tmp_path, cells, curves=[extra])
    rewrite(tmp_path / SP_TIME, all2all_size_2_2MB_time=7.0, all2all_size_2_4MB_time=4.0)

    found = series_of(one(tmp_path))

    points = [(p.size_bytes / MIB, p.time_s, p.low_s) for p in found["all2all", 2, True].points]
    assert points == [(1, 1e-3, 0.9e-3), (2, 2e-3, 1.8e-3), (4, 4e-3, None)]
    assert found["allreduce", 2, True].points[0].num_samples == 11
    latency_s, per_byte = found["allreduce", 2, True].fit or (0.0, 0.0)
    assert latency_s == pytest.approx(20e-6)
    assert 1.0 / per_byte == pytest.approx(150 * GB)


def test_single_file_is_known_by_its_keys(tmp_path: Path) -> None:
    """A file of any name is recognised by its keys, and one of another kind is refused."""
    write_json(tmp_path / "mine.json", {"pp_size_2": 10.0})
    (profile,) = load_folder(tmp_path / "mine.json").profiles
    assert profile.shape is None
    assert "10" in printed(show_folder, load_folder(tmp_path / "mine.json"), None)

    write_json(tmp_path / "other.json", {"key": 1})
    with pytest.raises(InputError, match="neither the name nor the keys"):
        load_folder(tmp_path / "other.json")


@pytest.mark.parametrize("marks", [UNICODE, ASCII])
@pytest.mark.parametrize("quantity", ["time", "bandwidth"])
def test_plots_fit_in_80_columns(tmp_path: Path, marks: Any, quantity: Any) -> None:
    """Every line of every plot is at most 80 columns wide and shows every series."""
    write_folder(tmp_path)

    for found in plots(series_of(one(tmp_path))).values():
        lines = [line.plain for line in draw(found, quantity, marks)]
        assert max(map(len, lines)) <= 80
        for index in range(len(found)):
            assert sum(marks.points[index] in line for line in lines) >= 2


def test_points_lie_where_the_axis_says(tmp_path: Path) -> None:
    """A point of 10 ms stands in the row that is labelled 10 ms."""
    times = {f"allreduce_size_2_{n}MB_time": float(n) for n in (1, 10, 100)}
    write_json(tmp_path / SP_TIME, times)
    (series,) = series_of(one(tmp_path)).values()

    lines = [line.plain for line in draw([series], "time", UNICODE)]

    for label in ("1 ms", "10 ms", "100 ms"):
        (line,) = [line for line in lines if line.strip().startswith(label + " ")]
        assert "●" in line


@pytest.mark.whole
def test_picture_is_the_same_every_time(tmp_path: Path) -> None:
    """PNG and SVG are written, an SVG of the same profile twice the same."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    cells: Cells = {"p2p": [], "sp_time": [], "overlap": [], "allreduce": measured()["allreduce"]}
    folder = load_folder(write_folder(tmp_path / "box", cells))

    save_picture(folder, tmp_path / "a.png")
    save_picture(folder, tmp_path / "a.svg")
    save_picture(folder, tmp_path / "sub" / "b.svg")

    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "box: 2 nodes x 2 GPUs, Example GPU" in text
    assert "strided groups" in text
    assert (tmp_path / "sub" / "b.svg").read_text(encoding="utf-8") == text


@pytest.mark.whole
def test_picture_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    """Another suffix, a folder without curves and an unwritable place are one sentence each."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    with pytest.raises(OptionError, match=r"ends in \.png or \.svg"):
        check_suffix(Path("curves.pdf"))
    write_json(tmp_path / "few" / P2P, {"pp_size_2": 1.0})
    with pytest.raises(InputError, match="no curve to draw"):
        save_picture(load_folder(tmp_path / "few"), tmp_path / "a.png")
    (tmp_path / "file").touch()
    folder = load_folder(write_folder(tmp_path / "box"))
    with pytest.raises(OptionError, match="cannot be written"):
        save_picture(folder, tmp_path / "file" / "a.png")


def test_model_files_are_told_apart(cases_dir: Path) -> None:
    """Profiles of models are known by name and not taken for hardware."""
    folder = load_folder(cases_dir / "galvatron" / "model")

    assert folder.profiles == ()
    assert folder.model_files
