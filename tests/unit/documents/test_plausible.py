"""What is said of profiles whose cells contradict each other: nothing of real ones, else the cell.

Cells of real files, shipped and published, are multiplied one at a time; nearly all that change a
value five times and more are found, and no file is accused as it is.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.hardware import read_hardware
from autopar.documents.json import read_record
from autopar.documents.model import read_model_memory, read_model_profile
from autopar.documents.schemas import ComputationDocument
from autopar.documents.spec import load_spec
from autopar.documents.times import computation_doubts
from autopar.errors import DocumentError
from autopar.rates.card import estimate_hardware
from autopar.rates.model import check_rates
from autopar.records import replace
from autopar.run.model import LayerProfile, ModelProfile, ModelSpec, TimePoint
from autopar.sanity_checks import (
    CurvePoint,
    GrowthLaw,
    contradictions,
    doubtful_bandwidths,
    doubtful_link,
    doubtful_parameters,
    notes_of,
)
from autopar.sources import Source
from tests.unit.documents_support import write

ROOT = Path(__file__).resolve().parents[3]
SHIPPED_MODELS = sorted((ROOT / "models").glob("*/configs"))
SHIPPED_HARDWARE = ROOT / "hardware_configs" / "a100-80gb_1x8"
OTHER_MEMORY = {"model_states": {"1": 400.0}, "activation": {"1": 60.0}}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One file and how it is read."""

    name: str
    data: dict[str, Any]
    notes: Callable[[Path, Any], tuple[str, ...]]
    """Of the file with this content, written into a folder."""


def model_notes(spec: ModelSpec, memory: Path) -> Callable[[Path, Any], tuple[str, ...]]:
    """Return the reader of a computation file beside a memory file."""

    def notes(folder: Path, data: Any) -> tuple[str, ...]:
        return read_model_profile(
            computation=write(folder / "computation.json", data),
            memory=memory,
            spec=spec,
            sequence_parallel=True,
            precision="bf16",
        ).notes

    return notes


def memory_notes(spec: ModelSpec, sp: bool) -> Callable[[Path, Any], tuple[str, ...]]:
    """Return the reader of a memory file."""

    def notes(folder: Path, data: Any) -> tuple[str, ...]:
        path = write(folder / "memory.json", data)
        return read_model_memory(path, spec=spec, sequence_parallel=sp, precision="bf16").notes

    return notes


def hardware_notes(folder: Path, shape: tuple[int, int], which: str) -> Any:
    """Return the reader of a hardware file beside the others of its folder."""

    def notes(target: Path, data: Any) -> tuple[str, ...]:
        name = f"{shape[0]}nodes_{shape[1]}gpus_per_node.json"
        files = {
            "allreduce": folder / f"allreduce_bandwidth_{name}",
            "p2p": folder / f"p2p_bandwidth_{name}",
            "overlap": folder / "overlap_coefficient.json",
            "sp_time": folder / f"sp_time_{name}",
        }
        files[which] = write(target / f"{which}.json", data)
        times = files.pop("sp_time")
        profile = read_hardware(
            num_nodes=shape[0],
            gpus_per_node=shape[1],
            **files,
            sp_time=times if times.exists() else None,
        )
        return profile.notes

    return notes


def load(path: Path) -> Any:
    """Return the content of a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def shipped() -> Iterator[Profile]:
    """Yield the files that are shipped, which are exact counts and estimates."""
    for configs in SHIPPED_MODELS:
        spec = load_spec(configs.parent.name)
        (memory,) = (p for p in configs.glob("memory_*.json") if ".meta" not in p.name)
        for sp in (True, False):
            suffix = "_sp" if sp else ""
            data = {key: value for key, value in load(memory).items() if key.endswith("_sp") == sp}
            yield Profile(
                name=f"{configs.parent.name} memory{suffix}",
                data=data,
                notes=memory_notes(spec, sp),
            )
        for path in configs.glob("computation_*.json"):
            if ".meta" not in path.name:
                notes = model_notes(spec, memory)
                yield Profile(name=f"{configs.parent.name} times", data=load(path), notes=notes)
    yield from hardware(SHIPPED_HARDWARE, (1, 8))


def hardware(folder: Path, shape: tuple[int, int]) -> Iterator[Profile]:
    """Yield the hardware files of one shape."""
    for which, stem in (
        ("allreduce", "allreduce_bandwidth"),
        ("p2p", "p2p_bandwidth"),
        ("sp_time", "sp_time"),
    ):
        path = folder / f"{stem}_{shape[0]}nodes_{shape[1]}gpus_per_node.json"
        if path.exists():
            notes = hardware_notes(folder, shape, which)
            yield Profile(name=f"{shape[0]}x{shape[1]} {which}", data=load(path), notes=notes)
    path = folder / "overlap_coefficient.json"
    notes = hardware_notes(folder, shape, "overlap")
    yield Profile(name=f"{shape[0]}x{shape[1]} overlap", data=load(path), notes=notes)


def published(cases: Path) -> Iterator[Profile]:
    """Yield the measured files of another project: llama2-7b, gpt-6.7b and a 7b of width 3584."""
    llama, gpt = load_spec("llama2-7b", seq_length=[2048]), load_spec("gpt-6.7b")
    long = load_spec("llama2-7b", seq_length=[4096])
    # the same widths with as many key-value heads as heads, by its number of parameters
    qwen = load_spec("qwen2.5-7b", seq_length=[4096], num_kv_heads=28)
    folder = cases / "galvatron"
    tests = folder / "engine_test_inputs"
    old = folder / "model_v24"
    memory = {
        "llama": (llama, old / "memory_profiling_bf16_llama2-7b.json", True),
        "gpt": (gpt, old / "memory_profiling_bf16_gpt-6.7b.json", True),
        "long": (long, tests / "static_memory_config.json", False),
        "long sp": (long, tests / "static_memory_config_sp.json", True),
        "lengths": (qwen, tests / "sequence_memory_config_sp.json", True),
    }
    for name, (spec, path, sp) in memory.items():
        data = {k: v for k, v in load(path).items() if not re.match(r"[0-9]", k)}
        yield Profile(name=f"{name} memory", data=data, notes=memory_notes(spec, sp))
    times = {
        "llama": (llama, old / "computation_profiling_bf16_llama2-7b.json", "llama"),
        "gpt": (gpt, old / "computation_profiling_bf16_gpt-6.7b.json", "gpt"),
        "batches": (long, tests / "batch_time_config.json", "long sp"),
        "lengths": (long, tests / "sequence_time_config.json", "long sp"),
    }
    for name, (spec, path, beside) in times.items():
        data = {k: v for k, v in load(path).items() if k.startswith("layertype")}
        yield Profile(name=f"{name} times", data=data, notes=model_notes(spec, memory[beside][1]))
    for shape in ((1, 8), (2, 8)):
        yield from hardware(folder / "hardware", shape)


def suspicious(profile: Profile, folder: Path, data: Any) -> tuple[str, ...]:
    """Return what is said of a file that could be about its numbers, the error included."""
    try:
        notes = profile.notes(folder, data)
    except DocumentError as error:
        return (str(error),)
    return tuple(note for note in notes if "suspicious: " in note or "contradiction: " in note)


def cells(data: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield where numbers other than 0 stand in a document."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from cells(value, (*path, key))
        elif value:
            yield (*path, key)


def changed(data: dict[str, Any], path: tuple[str, ...], factor: float) -> dict[str, Any]:
    """Return a document with one number multiplied."""
    result: dict[str, Any] = json.loads(json.dumps(data))
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] *= factor
    return result


@pytest.mark.parametrize("profile", list(shipped()), ids=lambda profile: profile.name)
def test_nothing_is_said_of_shipped_files(profile: Profile, tmp_path: Path) -> None:
    """They are estimated and counted without noise."""
    assert suspicious(profile, tmp_path, profile.data) == ()


def test_nothing_is_said_of_measured_files(cases_dir: Path, tmp_path: Path) -> None:
    """The published files of another project have noise, and no false alarm."""
    for profile in published(cases_dir):
        said = [
            note for note in suspicious(profile, tmp_path, profile.data) if "suspicious" in note
        ]
        assert said == [], profile.name


@dataclass(frozen=True, kw_only=True)
class Caught:
    """How many of some wrong cells were found, and how many of those were named."""

    made: int
    found: int
    named: int


def caught(profiles: list[Profile], folder: Path, low: float, high: float) -> Caught:
    """Return what is said of 500 single cells that are multiplied or divided by low to high."""
    draw = random.Random(7)
    found = named = 0
    for _ in range(500):
        profile = draw.choice(profiles)
        path = draw.choice(list(cells(profile.data)))
        factor = math.exp(draw.uniform(math.log(low), math.log(high)))
        wrong = changed(profile.data, path, factor if draw.random() < 0.5 else 1.0 / factor)
        said = suspicious(profile, folder, wrong)
        found += bool(said)
        key = ".".join(path)
        # accused, and not only one of the neighbours that accuse
        named += any(f"key '{key}'" in one or f" {key} is " in one for one in said)
    return Caught(made=500, found=found, named=named)


@pytest.mark.whole
def test_wrong_cells_of_measured_files_are_found(cases_dir: Path, tmp_path: Path) -> None:
    """Of 500 by 5 to 30 at least 95 % are, nearly all by name; of 500 by 3 to 5 most."""
    profiles = list(published(cases_dir))
    far, near = caught(profiles, tmp_path, 5, 30), caught(profiles, tmp_path, 3, 5)
    assert far.found >= 0.97 * far.made, far
    assert far.named >= 0.90 * far.made, far
    assert near.found >= 0.85 * near.made, near


@pytest.mark.whole
def test_wrong_cells_of_shipped_files_are_found(tmp_path: Path) -> None:
    """The same of estimates and counts."""
    profiles = list(shipped())
    far, near = caught(profiles, tmp_path, 5, 30), caught(profiles, tmp_path, 3, 5)
    assert far.found >= 0.97 * far.made, far
    assert far.named >= 0.90 * far.made, far
    assert near.found >= 0.85 * near.made, near


TIMES = {
    **{f"layertype_0_bsz{b}_seq2048": 9.0 + 0.4 / b for b in range(1, 9)},
    **{f"layertype_other_bsz{b}_seq2048": 6.4 for b in range(1, 9)},
}


def read_times(tmp_path: Path, **changes: float) -> tuple[str, ...]:
    """Return the notes on TIMES with some of them changed."""
    spec = load_spec("llama2-7b", seq_length=[2048])
    table = {"2048": OTHER_MEMORY}
    positions = {f"other_memory_pp_{part}_sp": table for part in ("off", "on_first", "on_last")}
    layer = {"parameter_size": 772.0, "tp_activation_per_bsz_dict": {"1": 300.0, "checkpoint": 16}}
    memory = write(tmp_path / "memory.json", {"layertype_0_sp": {"2048": layer}, **positions})
    return model_notes(spec, memory)(tmp_path, {**TIMES, **changes})


def test_one_time_far_too_small_is_refused(tmp_path: Path) -> None:
    """A single cell an order of magnitude off decided the plan without a word."""
    assert read_times(tmp_path) == ()
    key = "layertype_0_bsz8_seq2048"
    with pytest.raises(DocumentError) as caught:
        read_times(tmp_path, **{key: TIMES[key] / 18})
    assert f"computation.json: key '{key}': the value is 0.5028 ms per sample" in str(caught.value)
    assert "layertype_0_bsz6_seq2048 and layertype_0_bsz7_seq2048 suggest about" in str(
        caught.value
    )
    assert "Measure it again, or remove the key" in str(caught.value)


def test_one_time_that_is_several_times_too_large_is_said_once(tmp_path: Path) -> None:
    """Files with one odd cell are planned from, with a note that names it."""
    key = "layertype_0_bsz3_seq2048"
    (note,) = read_times(tmp_path, **{key: TIMES[key] * 4})
    assert note.startswith(f"suspicious: in computation.json {key} is 36.53 ms per sample, ")
    assert "layertype_0_bsz2_seq2048 and layertype_0_bsz4_seq2048 suggest about 9.1" in note


def test_of_two_cells_that_contradict_each_other_the_pair_is_said(tmp_path: Path) -> None:
    """Nobody knows which of the two is the wrong one."""
    rest = {f"layertype_other_bsz{b}_seq2048": 6.4 for b in (1, 8)}
    path = write(tmp_path / "x.json", {"layertype_0_bsz1_seq2048": 9.0, **rest})
    document = json.loads(path.read_text()) | {"layertype_0_bsz8_seq2048": 0.4}
    found = computation_doubts(path, read_record(ComputationDocument, path, document))
    (doubt,) = found
    assert doubt.problem.endswith(" (one of the two is wrong)")
    assert not doubt.impossible


def test_nothing_computes_faster_than_twice_the_peak(tmp_path: Path) -> None:
    """A file of one cell has no neighbours, and a device has a peak."""
    spec = load_spec("llama2-7b", seq_length=[2048])
    layer = LayerProfile(times=(TimePoint(batch=1, seq_length=2048, forward_s=1e-3),), memory={})
    path = str(tmp_path / "computation.json")
    profile = ModelProfile(
        layers=(layer,),
        other_times=(),
        other_memory={},
        sequence_parallel=True,
        sources=(Source(role="computation", path=path),),
    )
    hardware = estimate_hardware("a100-80gb", num_nodes=1, gpus_per_node=8)
    with pytest.raises(DocumentError, match=r"863.*312 of a100-80gb"):
        check_rates(profile, spec, hardware)
    # measured hardware has no name of a card: no device is as fast
    unknown = replace(hardware, name="measured")
    assert check_rates(profile, spec, unknown) == ()
    # fp32 has an eighth of this rate in its own units, and half of that of bf16 in TF32
    slow = replace(layer, times=(replace(layer.times[0], forward_s=6e-3),))
    assert check_rates(replace(profile, layers=(slow,), precision="fp32"), spec, hardware) == ()
    layer = replace(layer, times=(replace(layer.times[0], forward_s=2e-3),))
    (note,) = check_rates(replace(profile, layers=(layer,)), spec, hardware)
    assert note.startswith("suspicious: in computation.json layertype_0_bsz1_seq2048 is 2 ms")


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (0.5, "Use --parameter-bytes 2, as in this file"),
        (4.0, "Write the file with 4 bytes per parameter instead of 16"),
        (1.2, "Check --model and its sizes, or measure it again"),
    ],
)
def test_parameters_that_are_not_those_of_the_model(
    ratio: float, said: str, tmp_path: Path
) -> None:
    """Half and double are another number of bytes per parameter."""
    doubt = doubtful_parameters("layertype_0.parameter_size", 772.03 * ratio, 772.03)
    assert doubt is not None
    (note,) = notes_of(tmp_path / "memory.json", [doubt])
    assert note.endswith(said)
    assert doubtful_parameters("layertype_0.parameter_size", 778.2, 772.03) is None


def test_pairs_with_a_bridge_are_not_accused() -> None:
    """On PCIe machines pairs are an order of magnitude faster, and that is no mistake."""

    def group(size: int, bytes_per_s: float) -> CurvePoint:
        return CurvePoint(
            key=f"size {size}", x=size, y=bytes_per_s, written=bytes_per_s / 1e9, unit=""
        )

    bridged = [group(2, 200e9), group(4, 18e9), group(8, 16e9)]
    assert list(doubtful_bandwidths(bridged, pairs_may_be_faster=True)) == []
    (doubt,) = doubtful_bandwidths(bridged)
    assert doubt.key == "size 2"
    assert doubtful_link(group(8, 450e9), None) is None
    too_fast = doubtful_link(group(8, 5e12), None)
    assert too_fast is not None
    assert "more than any link (2000 GB/s)" in too_fast.problem


def test_a_denormal_time_is_compared() -> None:
    """Its ratio to another time is 0 as a number."""

    def point(x: float, y: float) -> CurvePoint:
        return CurvePoint(key=str(x), x=x, y=y, written=y, unit="s")

    law = GrowthLaw(least=0.5, most=1.5, slack=2.0)
    cells = [point(1.0, 1e-3), point(2.0, 5e-324), point(4.0, 4e-3)]
    assert [one.key for one in contradictions(cells, law)] == ["2.0"]
