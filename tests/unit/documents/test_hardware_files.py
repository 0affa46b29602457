"""The hardware documents: units, spellings, aliases, sidecars, round trip, published files."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autopar.documents.catalog import find_card, find_site
from autopar.documents.checks import DOCUMENTS as MODELS
from autopar.documents.hardware import (
    BandwidthUnit,
    hardware_file_name,
    read_hardware,
    read_hardware_dir,
    write_hardware,
)
from autopar.documents.json import read_record
from autopar.documents.schemas import json_schemas
from autopar.documents.sidecar import (
    DocumentKind,
    Run,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)
from autopar.errors import DocumentError
from autopar.rates.measured import Curve, HardwareProfile
from autopar.records import replace
from tests.unit.documents_support import DOCUMENTS, SIDECAR


def write_dir(folder: Path, nodes: int = 2, gpus: int = 2, **changed: Any) -> Path:
    """Write the four hardware files under their documented names."""
    kinds: tuple[DocumentKind, ...] = ("allreduce", "p2p", "overlap", "sp_time")
    for kind in kinds:
        path = folder / hardware_file_name(kind, nodes, gpus)
        path.write_text(json.dumps(changed.get(kind, DOCUMENTS[kind])), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("unit", "factor"), [(None, 1e9), ("GB/s", 1e9), ("MiB/ms", 1048576e3)])
def test_bandwidths_are_converted_once(
    tmp_path: Path, unit: BandwidthUnit | None, factor: float
) -> None:
    """GB/s is 1e9 bytes/s unless the option says MiB/ms; times are ms of MiB messages."""
    profile = read_hardware_dir(
        write_dir(tmp_path), num_nodes=2, gpus_per_node=2, bandwidth_unit=unit
    )
    assert profile.allreduce_bytes_per_s == pytest.approx(
        {
            (4, True): 150.5 * factor,
            (4, False): 150.5 * factor,
            (2, True): 140.25 * factor,
            (2, False): 20 * factor,
        },
        rel=1e-15,
    )
    assert profile.p2p_bytes_per_s == pytest.approx({2: 20.5 * factor, 4: 19 * factor}, rel=1e-15)
    curve = profile.sequence_curves[4]
    assert curve.sizes_bytes.tolist() == [2.0**20, 64 * 2.0**20]
    assert curve.times_s.tolist() == pytest.approx([8e-5, 6e-4], rel=1e-15)
    assert profile.overlap_coefficient == 1.125
    assert not profile.estimated


def test_every_source_has_the_hash_of_its_bytes(tmp_path: Path) -> None:
    """A plan can say which bytes it rests on."""
    profile = read_hardware_dir(write_dir(tmp_path), num_nodes=2, gpus_per_node=2)
    assert [s.role for s in profile.sources] == ["allreduce", "p2p", "overlap", "sp_time"]
    for source in profile.sources:
        assert source.sha256 == hashlib.sha256(Path(source.path).read_bytes()).hexdigest()


def test_keys_without_consec_are_neighbouring_groups(tmp_path: Path) -> None:
    """PaddleNLP's spelling names no consec; strided groups stay unknown, which is noted."""
    folder = write_dir(tmp_path, allreduce={"allreduce_size_4": 100.0, "allreduce_size_2": 200.0})
    profile = read_hardware_dir(folder, num_nodes=2, gpus_per_node=2)
    assert profile.allreduce_bytes_per_s == {(4, True): 1e11, (4, False): 1e11, (2, True): 2e11}
    assert "without consec" in profile.sources[0].notes[0]


def test_two_spellings_of_one_group_must_agree(tmp_path: Path) -> None:
    """The same group twice with different values is refused."""
    bad = {"allreduce_size_4": 100.0, "allreduce_size_4_consec_1": 101.0}
    with pytest.raises(DocumentError, match="'allreduce_size_4_consec_1'"):
        read_hardware_dir(write_dir(tmp_path, allreduce=bad), num_nodes=2, gpus_per_node=2)


def test_sp_time_may_be_absent(tmp_path: Path) -> None:
    """Without the file there are no curves, and nothing else changes."""
    folder = write_dir(tmp_path)
    (folder / hardware_file_name("sp_time", 2, 2)).unlink()
    assert read_hardware_dir(folder, num_nodes=2, gpus_per_node=2).curves == {}


def test_a_coefficient_below_one_is_read_as_one(tmp_path: Path) -> None:
    """Overlap cannot make kernels faster; PaddleNLP does not clamp, we do and say so."""
    folder = write_dir(tmp_path, overlap={"overlap_coe": 0.97})
    profile = read_hardware_dir(folder, num_nodes=2, gpus_per_node=2)
    assert profile.overlap_coefficient == 1.0
    assert "0.97" in profile.sources[2].notes[0]


def test_one_gpu_needs_no_measurement(tmp_path: Path) -> None:
    """There is nobody to talk to on one GPU."""
    folder = write_dir(tmp_path, 1, 1, allreduce={}, p2p={}, sp_time={})
    profile = read_hardware_dir(folder, num_nodes=1, gpus_per_node=1)
    assert profile.allreduce_bytes_per_s == {}
    assert profile.world_size == 1


def test_a_missing_file_names_the_file_and_its_command(tmp_path: Path) -> None:
    """The message says which name was expected, what is there, and what makes it."""
    folder = write_dir(tmp_path)
    with pytest.raises(DocumentError) as error:
        read_hardware_dir(folder, num_nodes=1, gpus_per_node=4)
    for part in (
        "allreduce_bandwidth_1nodes_4gpus_per_node.json",
        "allreduce_bandwidth_2nodes_2gpus_per_node.json",
        "torchrun -m profiler.hardware",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("allreduce", "allreduce_size_8_consec_1"),
        ("p2p", "pp_size_8"),
        ("sp_time", "all2all_size_8_1MB_time"),
    ],
)
def test_groups_beyond_the_cluster_are_refused(
    tmp_path: Path, kind: DocumentKind, key: str
) -> None:
    """A file of a larger cluster is not this cluster's."""
    folder = write_dir(tmp_path)
    path = folder / hardware_file_name(kind, 2, 2)
    path.write_text(json.dumps({**DOCUMENTS[kind], key: 1.0}))
    with pytest.raises(DocumentError, match=rf"'{key}': a group of 8 GPUs .* = 4"):
        read_hardware_dir(folder, num_nodes=2, gpus_per_node=2)


def test_the_world_group_is_required(tmp_path: Path) -> None:
    """A file of a smaller cluster is not this cluster's either."""
    folder = write_dir(tmp_path, allreduce={"allreduce_size_2_consec_1": 1.0})
    with pytest.raises(DocumentError, match="'allreduce_size_4_consec_1': this key is missing"):
        read_hardware_dir(folder, num_nodes=2, gpus_per_node=2)


def test_seconds_in_place_of_milliseconds_are_noticed(tmp_path: Path) -> None:
    """64 MiB in 0.6 us would be 112 TB/s: the value is in seconds."""
    folder = write_dir(tmp_path, sp_time={"allreduce_size_4_64MB_time": 0.0006})
    with pytest.raises(DocumentError, match="probably in seconds"):
        read_hardware_dir(folder, num_nodes=2, gpus_per_node=2)


def test_a_sidecar_adds_what_keys_cannot_say(tmp_path: Path) -> None:
    """Memory of the device, curves of other collectives, and that numbers are estimates."""
    folder = write_dir(tmp_path)
    meta = sidecar_path(folder / hardware_file_name("sp_time", 2, 2))
    meta.write_text(json.dumps({**SIDECAR, "estimated": True, "memory_bytes_per_s": 2e12}))
    profile = read_hardware_dir(folder, num_nodes=2, gpus_per_node=2)
    assert (profile.memory_bytes, profile.memory_bytes_per_s) == (8e10, 2e12)
    assert profile.curves["allgather", 4].times_s.tolist() == [1e-5, 1e-4]
    assert profile.estimated
    assert [s.estimated for s in profile.sources] == [False, False, False, True, True]
    assert profile.sources[-1].role == "sp_time sidecar"


def bandwidth_sidecar(unit: str) -> str:
    """Return a sidecar of an all-reduce file."""
    return json.dumps({"version": 1, "document": "allreduce", "unit": unit, "source": "test"})


def test_the_unit_of_a_sidecar_wins(tmp_path: Path) -> None:
    """A file that says its unit needs no option, and an option that disagrees is an error."""
    folder = write_dir(tmp_path)
    meta = sidecar_path(folder / hardware_file_name("allreduce", 2, 2))
    meta.write_text(bandwidth_sidecar("MiB/ms"))
    profile = read_hardware_dir(folder, num_nodes=2, gpus_per_node=2)
    assert profile.allreduce_bytes_per_s[2, False] == pytest.approx(20 * 1048576e3)
    assert profile.p2p_bytes_per_s[2] == pytest.approx(20.5e9)
    with pytest.raises(DocumentError, match=r"'MiB/ms'.*--bandwidth-unit.*'GB/s'"):
        read_hardware_dir(folder, num_nodes=2, gpus_per_node=2, bandwidth_unit="GB/s")
    meta.write_text(bandwidth_sidecar("MB/s"))
    with pytest.raises(DocumentError, match=r"key 'unit'.*expected GB/s or MiB/ms"):
        read_hardware_dir(folder, num_nodes=2, gpus_per_node=2)


def test_sidecars_of_different_devices_are_refused(tmp_path: Path) -> None:
    """Two files cannot say two memory sizes of one device."""
    folder = write_dir(tmp_path)
    sidecar_path(folder / hardware_file_name("sp_time", 2, 2)).write_text(json.dumps(SIDECAR))
    other = json.loads(bandwidth_sidecar("GB/s")) | {"memory_bytes": 4e10}
    sidecar_path(folder / hardware_file_name("allreduce", 2, 2)).write_text(json.dumps(other))
    with pytest.raises(DocumentError, match="same device"):
        read_hardware_dir(folder, num_nodes=2, gpus_per_node=2)


def test_runs_of_a_sidecar_are_append_only(tmp_path: Path) -> None:
    """Writing a document again keeps the raw samples that it had."""
    profile = read_hardware_dir(write_dir(tmp_path), num_nodes=2, gpus_per_node=2)
    out = tmp_path / "out"
    path = write_hardware(profile, out)[0]
    samples = {"allreduce_size_2_consec_1": [1.0, 2.0]}
    for run in (Run(metadata={"host": "a"}, samples=samples), Run(metadata={"host": "b"})):
        sidecar = read_sidecar(path)
        assert sidecar is not None
        write_sidecar(path, replace(sidecar, runs=[run]))
        write_hardware(profile, out)
    sidecar = read_sidecar(path)
    assert sidecar is not None
    assert [run.metadata["host"] for run in sidecar.runs] == ["a", "b"]
    assert sidecar.runs[0].samples == {"allreduce_size_2_consec_1": [1.0, 2.0]}


def test_a_newer_sidecar_is_refused(tmp_path: Path) -> None:
    """An unknown version is not guessed at."""
    path = tmp_path / "x.json"
    sidecar_path(path).write_text(json.dumps({**SIDECAR, "version": 99}))
    with pytest.raises(DocumentError, match="the value is 99, expected 1 to 3"):
        read_sidecar(path)
    assert read_sidecar(tmp_path / "y.json") is None


POSITIVE = st.floats(min_value=2e5, max_value=9e13)


@settings(max_examples=30)
@given(
    bandwidths=st.lists(POSITIVE, min_size=4, max_size=4),
    times=st.lists(st.floats(min_value=1e-4, max_value=50.0), min_size=3, max_size=3),
    odd=st.booleans(),
    memory=st.none() | st.floats(min_value=2e6, max_value=1e12),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    bandwidths: list[float],
    times: list[float],
    odd: bool,
    memory: float | None,
) -> None:
    """read(write(profile)) is the profile to 1e-12, whole-MiB sizes or not."""
    sizes = np.array([1.0, 4.0, 1024.0]) * 2**20 + (0.5 if odd else 0.0)
    # larger messages take longer, and at most in proportion: anything else is refused
    times = [times[0], min(max(times[:2]), 4 * times[0]), min(max(times), 256 * times[0])]
    curve = Curve(sizes_bytes=sizes, times_s=np.array(times))
    # one run: the bandwidth of the group that has times follows from them
    a, (b, c, d, e) = float(1.5 * sizes[-1] / times[-1]), bandwidths
    profile = HardwareProfile(
        num_nodes=1,
        gpus_per_node=4,
        allreduce_bytes_per_s={(4, True): a, (4, False): a, (2, True): b, (2, False): c},
        p2p_bytes_per_s={2: d, 4: e},
        overlap_coefficient=1.0 + times[0] / 10,
        curves={("allreduce", 4): curve, ("all2all", 2): curve, ("reducescatter", 2): curve},
        memory_bytes=memory,
        memory_bytes_per_s=memory,
        name="cluster",
        estimated=odd,
    )
    out = tmp_path_factory.mktemp("round_trip")
    paths = write_hardware(profile, out)
    assert len(paths) == 8
    back = read_hardware_dir(out, num_nodes=1, gpus_per_node=4)
    assert back.allreduce_bytes_per_s == pytest.approx(profile.allreduce_bytes_per_s, rel=1e-12)
    assert back.p2p_bytes_per_s == pytest.approx(profile.p2p_bytes_per_s, rel=1e-12)
    assert back.overlap_coefficient == pytest.approx(profile.overlap_coefficient, rel=1e-12)
    assert back.curves.keys() == profile.curves.keys()
    for group, expected in profile.curves.items():
        np.testing.assert_allclose(back.curves[group].sizes_bytes, expected.sizes_bytes, rtol=0)
        np.testing.assert_allclose(back.curves[group].times_s, expected.times_s, rtol=1e-12)
    assert (back.memory_bytes, back.memory_bytes_per_s) == (memory, memory)
    assert (back.name, back.estimated) == ("cluster", odd)


def test_nothing_is_left_beside_a_written_file(tmp_path: Path) -> None:
    """Files appear whole: no temporary file stays, and they are readable by others."""
    profile = read_hardware_dir(write_dir(tmp_path), num_nodes=2, gpus_per_node=2)
    paths = write_hardware(profile, tmp_path / "out")
    assert sorted((tmp_path / "out").iterdir()) == sorted(paths)


def examples(schema: dict[str, Any]) -> list[Any]:
    """Return the examples that a schema carries; a document that files.md shows needs none."""
    found: list[Any] = schema.get("examples", [])
    return found


@pytest.mark.whole
def test_schemas_accept_valid_documents_and_refuse_others(root: Path) -> None:
    """The schemas for other tools say the same as the readers."""
    jsonschema = pytest.importorskip("jsonschema")
    schemas = json_schemas()
    text = (root / "models" / "t5-3b" / "model.json").read_text(encoding="utf-8")
    card = json.loads(find_card("h100").read_text(encoding="utf-8"))
    documents = {role: example for role, schema in schemas.items() for example in examples(schema)}
    documents |= {**DOCUMENTS, "sidecar": SIDECAR, "card": card, "model": json.loads(text)}
    documents["site"] = json.loads(find_site("jean-zay-a100").read_text(encoding="utf-8"))
    for role, path in (
        ("plan", "tests/data/plan_v1.json"),
        ("run", "tests/data/run_v2.json"),
        ("result", "tests/data/result_v1.json"),
        ("stack", "hardware_configs/stacks/megatron-core.json"),
        ("accuracy", "hardware_configs/accuracy/published.json"),
    ):
        documents[role] = json.loads((root / path).read_text(encoding="utf-8"))
    assert schemas.keys() == MODELS.keys()
    for role, schema in schemas.items():
        validator = jsonschema.Draft202012Validator(schema)
        validator.check_schema(schema)
        valid = documents[role]
        assert validator.is_valid(valid), role
        # an answer begins the documents of all commands, whose keys are theirs
        assert validator.is_valid({**valid, "no_such_key": 1}) == (role == "answer"), role
        assert not validator.is_valid([valid]), role
    negative = {"allreduce_size_2_consec_1": -1.0}
    assert not jsonschema.Draft202012Validator(schemas["allreduce"]).is_valid(negative)


def test_every_document_has_an_example(root: Path) -> None:
    """docs/reference/files.md shows one of each that it names, in order; others carry their own."""
    text = (root / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^The documents are named (.*)\.$", text, flags=re.MULTILINE)
    named = re.findall(r"`(\w+)`", line)
    shown = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    for role, example in zip(named, shown, strict=True):
        read_record(MODELS[role], Path("docs/reference/files.md"), json.loads(example))
    for role, schema in json_schemas().items():
        assert role in named or examples(schema), role
        for example in examples(schema):
            read_record(MODELS[role], Path(role), example)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (2, 8), (1, 4)])
def test_published_files_are_read(cases_dir: Path, nodes: int, gpus: int) -> None:
    """Galvatron's and PaddleNLP's measurements, which are in MiB/ms."""
    folder = cases_dir / "galvatron" / "hardware"
    profile = read_hardware_dir(
        folder, num_nodes=nodes, gpus_per_node=gpus, bandwidth_unit="MiB/ms"
    )
    world = nodes * gpus
    raw = json.loads(
        (folder / f"allreduce_bandwidth_{nodes}nodes_{gpus}gpus_per_node.json").read_text()
    )
    assert len(profile.allreduce_bytes_per_s) == len(raw) + 1
    assert profile.allreduce_bytes_per_s[world, False] == pytest.approx(
        raw[f"allreduce_size_{world}_consec_1"] * 2**20 * 1e3
    )
    assert set(profile.p2p_bytes_per_s) == {p for p in (2, 4, 8, 16) if p <= world}
    assert len(profile.curves) == len(profile.sequence_curves) == {4: 0, 8: 3, 16: 4}[world]
    curves = [*profile.curves.values(), *profile.sequence_curves.values()]
    assert all(len(curve.sizes_bytes) == 11 for curve in curves)


def test_published_engine_test_input_is_read(cases_dir: Path, tmp_path: Path) -> None:
    """One published file holds the four documents as objects; split, they are read as files."""
    parts = json.loads(
        (cases_dir / "galvatron" / "engine_test_inputs" / "hardware_configs.json").read_text()
    )
    paths = {name: tmp_path / f"{name}.json" for name in parts}
    for name, path in paths.items():
        path.write_text(json.dumps(parts[name]), encoding="utf-8")
    profile = read_hardware(
        num_nodes=1,
        gpus_per_node=8,
        allreduce=paths["allreduce"],
        p2p=paths["p2p"],
        overlap=paths["overlap"],
        sp_time=paths["sp"],
        bandwidth_unit="MiB/ms",
    )
    assert profile.overlap_coefficient == 1.1534195950157762
    assert profile.curves["all2all", 8].times_s[0] == pytest.approx(1.124e-4)
