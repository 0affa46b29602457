"""profile-show on made-up profiles: what is compared and what is found wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.json import write_json
from autopar.documents.sidecar import Sidecar, sidecar_path, write_sidecar
from autopar.run.model import ShardedTime
from autopar.units import GB, MIB
from profiler.show.checks import Change, compare, obstacles, pairs, validate
from profiler.show.read import load_folder
from profiler.show.tables import show_comparison, show_findings
from tests.unit.show_folders import (
    ALLREDUCE,
    METADATA,
    P2P,
    REFERENCE_BYTES,
    SP_TIME,
    changed,
    measured,
    one,
    printed,
    rewrite,
    samples,
    troubled,
    write_folder,
)

Golden = Callable[[str, str], None]


def sentences(path: Path) -> list[str]:
    """Return the findings of a folder, severity first, paths without their folder."""
    found = validate(load_folder(path))
    return [f"{f.severity}: {f.sentence}".replace(f"{path}/", "") for f in found]


def differences(old: Path, new: Path, threshold: float = 0.05) -> dict[str, Change]:
    """Return the changes between two folders by key."""
    found = compare(one(old), one(new), threshold)
    return {change.key: change for change in found.changes}


def test_diff_finds_what_exceeds_threshold_and_spread(tmp_path: Path) -> None:
    """A change counts when it is above 5 % and above the scatter of both samples."""
    key = f"p2p_stages_2_{REFERENCE_BYTES}B"
    base = 50e-6 + REFERENCE_BYTES / (9.0 * GB)
    old = write_folder(tmp_path / "old")

    for name, factor, step, verdict in (
        ("slower", 1.2, 0.004, "regression"),
        ("faster", 0.8, 0.004, "improvement"),
        ("noisy", 1.2, 0.09, "within the spread"),
        ("close", 1.04, 0.0, "unchanged"),
    ):
        update = {"samples_s": {"time": samples(base * factor, step)}}
        new = write_folder(tmp_path / name, changed(measured(), key, **update))
        found = differences(old, new)
        assert found["pp_size_2"].verdict == verdict
        assert found["pp_size_2"].ratio == pytest.approx(1 / factor)
        assert found[key].verdict == verdict  # the same point of the curve
        assert found[key].ratio == pytest.approx(factor)
        others = {change.verdict for k, change in found.items() if k not in (key, "pp_size_2")}
        assert others == {"unchanged"}

    assert differences(old, tmp_path / "slower", threshold=0.25)[key].verdict == "unchanged"


def test_diff_table(tmp_path: Path, golden: Golden) -> None:
    """Documented bandwidths are always listed, times where they changed, then what is alone."""
    old = write_folder(tmp_path / "old")
    cells = changed(
        measured(),
        f"allreduce_size_2_consec_1_{REFERENCE_BYTES}B",
        samples_s={"time": samples(1e-3)},
    )
    new = write_folder(tmp_path / "new", {**cells, "p2p": cells["p2p"][:-1]})
    rewrite(new / P2P, pp_size_4=None, pp_size_8=20.0)
    found = compare(one(old), one(new), 0.05)

    text = printed(
        show_comparison, found, title="new against old", threshold=0.05, circumstances=["driver"]
    )

    golden("profile_show_diff.txt", text)


@pytest.mark.parametrize(
    ("metadata", "more", "reason"),
    [
        ({"device": "Other GPU"}, {}, "Example GPU and Other GPU"),
        ({"reference_bytes": 2 * REFERENCE_BYTES}, {}, "documented bandwidths are of"),
        ({}, {"estimated": True}, "the old one is measured, the new one estimated"),
        ({}, {"synthetic": True}, "the new one synthetic"),
    ],
)
def test_diff_refuses_what_is_not_comparable(
    tmp_path: Path, metadata: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    """Other devices, reference sizes and kinds of numbers cannot be compared."""
    old = one(write_folder(tmp_path / "old"))
    new = one(write_folder(tmp_path / "new", metadata={**METADATA, **metadata}, **more))

    assert obstacles(old, old) == []
    assert any(reason in text for text in obstacles(old, new)), obstacles(old, new)


def test_diff_refuses_a_side_without_sidecars(tmp_path: Path) -> None:
    """Where one side has no sidecars its unit is unknown."""
    old, new = write_folder(tmp_path / "old"), write_folder(tmp_path / "new")
    for path in new.glob("*.meta.json"):
        path.unlink()

    (reason,) = obstacles(one(old), one(new))

    assert "the new one has no sidecars" in reason


def test_diff_pairs_shapes(tmp_path: Path) -> None:
    """Profiles are compared by shape, others only when asked for."""
    old = write_folder(tmp_path / "old")
    write_json(tmp_path / "new" / "p2p_bandwidth_1nodes_4gpus_per_node.json", {"pp_size_2": 1.0})
    a, b = load_folder(old), load_folder(tmp_path / "new")

    assert pairs(a, b, anyway=False) == []
    assert pairs(a, b, anyway=True) == [(a.profiles[0], b.profiles[0])]


def test_validate_accepts_what_is_right(tmp_path: Path) -> None:
    """A clean profile has no findings."""
    folder = load_folder(write_folder(tmp_path))

    assert validate(folder) == []
    assert printed(show_findings, [], 4) == "4 files: no findings\n"


def test_validate_lists_everything(folder: Path, golden: Golden) -> None:
    """Every check at once: each finding one line with file, key, value and remedy."""
    box = write_folder(folder / "box", troubled())
    rewrite(box / ALLREDUCE, allreduce_size_2_consec_0=None, allreduce_size_2_consec_1=9.0)
    rewrite(box / P2P, pp_size_4=9000.0)
    rewrite(box / SP_TIME, **{f"all2all_size_2_{1 << i}MB_time": None for i in range(5)})
    rewrite(box / "overlap_coefficient.json", overlap_coe=0.9)

    text = printed(show_findings, validate(load_folder(Path("box"))), 4)

    golden("profile_show_validate.txt", text)


def test_validate_collects_schema_errors(tmp_path: Path) -> None:
    """All wrong keys of document and sidecar are found, not only the first."""
    write_folder(tmp_path)
    rewrite(tmp_path / ALLREDUCE, allreduce_size_2_consec_1="fast", allreduce_size_3_x=1.0)
    rewrite(sidecar_path(tmp_path / P2P), unit="GB", bogus=1)
    (tmp_path / SP_TIME).write_text('{"allreduce_size_2_1MB_time": 1.0', encoding="utf-8")

    found = sentences(tmp_path)

    for expected in (
        f"error: {ALLREDUCE}: key 'allreduce_size_2_consec_1': the value is 'fast', expected",
        f"error: {ALLREDUCE}: key 'allreduce_size_3_x': this key is unknown",
        f"error: {P2P}.meta.json: key 'unit': the value is 'GB'",
        f"error: {P2P}.meta.json: key 'bogus': this key is unknown",
        f"error: {SP_TIME}: not valid JSON",
    ):
        assert [text for text in found if text.startswith(expected)], (expected, found)


def findings_of(path: Path, word: str) -> list[str]:
    """Return the findings that contain a word."""
    return [text for text in sentences(path) if word in text]


def test_validate_missing_files(tmp_path: Path) -> None:
    """A missing document is an error, missing times are a warning."""
    write_json(tmp_path / P2P, {"pp_size_2": 8.0, "pp_size_4": 8.0})

    found = [text.split(":")[:2] for text in findings_of(tmp_path, "does not exist")]

    assert [severity for severity, _ in found] == ["error", "error", "warning"]


def test_validate_hints_at_swapped_groups_and_units(tmp_path: Path) -> None:
    """Neighbours slower than distant ranks, Gbit/s, seconds for ms, and impossible groups."""
    write_folder(tmp_path)
    for path in tmp_path.glob("*.meta.json"):
        if "overlap" not in path.name:
            path.unlink()
    rewrite(tmp_path / ALLREDUCE, allreduce_size_2_consec_1=9.0, allreduce_size_2_consec_0=130.0)
    assert findings_of(tmp_path, "they may be swapped")
    rewrite(tmp_path / ALLREDUCE, allreduce_size_4_consec_1=8 * 19.5)
    assert findings_of(tmp_path, "the times of the same group reach")
    rewrite(tmp_path / P2P, pp_size_2=4000.0)
    assert findings_of(tmp_path, "more than any link (2000 GB/s)")
    rewrite(tmp_path / SP_TIME, all2all_size_2_1024MB_time=3.6e-6)
    assert findings_of(tmp_path, "probably in seconds")
    rewrite(tmp_path / P2P, pp_size_64=5.0)
    assert findings_of(tmp_path, "a group of 64 does not exist on 2 nodes x 2 GPUs")


def test_validate_times_may_scatter(tmp_path: Path) -> None:
    """A larger message that takes less time is found unless the spread explains it."""
    key = f"allgather_size_2_consec_1_{4 * MIB}B"
    quiet = changed(measured(), key, samples_s={"time": samples(60e-6)})
    noisy = changed(measured(), key, samples_s={"time": samples(60e-6, 0.12)})

    quiet_box = write_folder(tmp_path / "quiet", quiet)
    noisy_box = write_folder(tmp_path / "noisy", noisy)

    assert findings_of(
        quiet_box,
        f"{SP_TIME}.meta.json: key 'allgather_size_2_consec_1_{8 * MIB}B': the time is 47.96 us",
    )
    assert not findings_of(noisy_box, "larger messages take longer")


def test_files_of_models_are_validated_by_the_rules_of_their_reader(tmp_path: Path) -> None:
    """Times and memory: what is impossible is an error, what is suspicious a warning."""
    times = {f"layertype_0_bsz{b}_seq512": 4.0 for b in (1, 2, 4, 8)}
    times |= {f"layertype_other_bsz{b}_seq512": 2.0 for b in (1, 2, 4, 8)}
    layer = {"parameter_size": 48.0, "tp_activation_per_bsz_dict": {"1": 80, "2": 40, "4": 20}}
    write_json(tmp_path / "computation_profiling_bf16_hidden_64_head_4.json", times)
    write_json(
        tmp_path / "memory_profiling_bf16_hidden_64_head_4.json", {"layertype_0": {"512": layer}}
    )
    assert sentences(tmp_path) == []

    times["layertype_0_bsz4_seq512"] = 0.1
    layer["tp_activation_per_bsz_dict"] = {"1": 80, "2": 130, "4": 20}
    write_json(tmp_path / "computation_profiling_bf16_hidden_64_head_4.json", times)
    write_json(
        tmp_path / "memory_profiling_bf16_hidden_64_head_4.json", {"layertype_0": {"512": layer}}
    )
    error, warning = sentences(tmp_path)
    assert error.startswith(
        "error: computation_profiling_bf16_hidden_64_head_4.json: key 'layertype_0_bsz4_seq512': "
        "the value is 0.1 ms per sample, layertype_0_bsz2_seq512 and layertype_0_bsz8_seq512 "
        "suggest about 4"
    )
    assert "layertype_0.512.tp_activation_per_bsz_dict.2': the value is 130 MiB" in warning

    write_json(tmp_path / "computation_profiling_bf16_hidden_64_head_4.json", {"layertype_0": -1})
    assert "expected a time per sample, a number above 0 in ms" in sentences(tmp_path)[0]


def test_a_bandwidth_far_from_its_neighbours_is_found(tmp_path: Path) -> None:
    """Where there are no samples, the other groups say that one is wrong."""
    folder = write_folder(tmp_path)
    for path in folder.glob("*.meta.json"):
        path.unlink()
    path = folder / "p2p_bandwidth_2nodes_2gpus_per_node.json"
    rewrite(path, pp_size_4=900.0)
    (found,) = sentences(tmp_path)
    assert found.startswith(f"warning: {path.name}: key 'pp_size_2': the value is 8.881 GB/s, ")
    assert "(one of the two is wrong). Measure it again" in found


def test_times_beside_a_file_of_a_model_are_validated(tmp_path: Path) -> None:
    """Sharded layers and backwards decide plans as forwards do."""
    path = tmp_path / "computation_profiling_bf16_hidden_64_head_4.json"
    write_json(path, {"layertype_0_bsz1_seq512": 4.0, "layertype_other_bsz1_seq512": 2.0})
    times = [
        ShardedTime(
            layer_type=0,
            batch=batch,
            seq_length=512,
            forward_s=4e-3 * batch,
            backward_s=8e-3 * batch / (15 if batch == 4 else 1),
        )
        for batch in (1, 2, 4, 8)
    ]
    sidecar = Sidecar(
        version=3, document="computation", unit="ms", source="a test", layer_times=times
    )
    write_sidecar(path, sidecar)
    (error,) = sentences(tmp_path)
    assert error.startswith(f"error: {path.name}.meta.json: key 'layer_times.backward_s of layer")
    assert "batch 4" in error
