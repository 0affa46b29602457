"""The model documents: units, spellings, choice in a directory, derivation, round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from autopar.documents.model import is_file_of_paddle, read_model_profile, write_model_profile
from autopar.documents.sidecar import sidecar_path
from autopar.documents.spec import bare_spec
from autopar.errors import DocumentError, InputError, VariantError
from autopar.records import replace
from autopar.run.model import (
    LayerMemory,
    LayerProfile,
    LayerSpec,
    ModelProfile,
    ModelSpec,
    OtherMemory,
    OtherTime,
    TimePoint,
)
from tests.unit.documents_support import (
    DOCUMENTS,
    SPEC,
    T5,
    assert_same,
    other,
    read_dir,
    write,
)

MIB = 2**20
COMPUTATION, MEMORY = DOCUMENTS["computation"], DOCUMENTS["memory"]
PROCESSED = {k: v for k, v in MEMORY.items() if not k[0].isdigit()}


def load(
    folder: Path,
    computation: dict[str, Any] = COMPUTATION,
    memory: dict[str, Any] = MEMORY,
    spec: ModelSpec = SPEC,
    **options: Any,
) -> ModelProfile:
    """Read a profile from two files with this content."""
    return read_model_profile(
        computation=write(folder / "computation.json", computation),
        memory=write(folder / "memory.json", memory),
        spec=spec,
        **{"sequence_parallel": True, "precision": "bf16", **options},
    )


def test_units(tmp_path: Path) -> None:
    """ms per layer and sample become seconds per batch; MiB become bytes and parameters."""
    profile = load(tmp_path)
    assert profile.layers[0].times == (
        TimePoint(batch=1, seq_length=2048, forward_s=4.0e-3),
        TimePoint(batch=8, seq_length=2048, forward_s=3.5 * 8 * 1e-3),
    )
    assert profile.other_times[1] == OtherTime(batch=8, seq_lengths=(2048,), forward_s=20e-3)
    assert profile.layers[0].memory == {
        2048: LayerMemory(
            parameter_count=48 * MIB / 4,
            activation_bytes_per_sample={1: 80.0 * MIB, 2: 40.0 * MIB},
            checkpoint_bytes_per_sample=4.0 * MIB,
        )
    }
    assert profile.other_memory["only"][(2048,)].model_state_bytes == {1: 400 * MIB, 2: 200 * MIB}
    assert set(profile.other_memory) == {"only", "first", "last"}
    assert profile.notes == ()
    assert all(len(source.sha256) == 64 for source in profile.sources)


def test_sequence_lengths_are_whole_numbers_not_prefixes(tmp_path: Path) -> None:
    """seq2048 and seq20480 are different points."""
    more = {"layertype_0_bsz1_seq20480": 40.0, "layertype_other_bsz1_seq20480": 9.0}
    profile = load(tmp_path, {**COMPUTATION, **more})
    assert [(p.batch, p.seq_length) for p in profile.layers[0].times] == [
        (1, 2048),
        (1, 20480),
        (8, 2048),
    ]


@pytest.mark.parametrize(
    ("computation", "batches"),
    [
        ({"layertype_0": 4.0, "layertype_other": 5.0}, [1]),
        ({"layertype_0_bsz4": 4.0, "layertype_other_0_bsz4": 5.0}, [4]),
        ({"layertype_0_bsz4_seq2048": 4.0, "layertype_other_0_bsz4_seq2048": 5.0}, [4]),
    ],
)
def test_old_spellings(tmp_path: Path, computation: dict[str, float], batches: list[int]) -> None:
    """Keys without bsz or seq take batch 1 and the model's sequence length, and a note says so."""
    profile = load(tmp_path, computation)
    assert [p.batch for p in profile.layers[0].times] == batches
    assert profile.layers[0].times[0].forward_s == pytest.approx(4e-3 * batches[0])
    assert profile.other_times[0].seq_lengths == (2048,)
    noted = " ".join(profile.notes)
    assert ("without bsz" in noted) == ("layertype_0" in computation)
    assert ("without seq" in noted) == ("layertype_0_bsz4_seq2048" not in computation)


def test_two_spellings_of_one_point_must_agree(tmp_path: Path) -> None:
    """The same point with different values is refused, with equal values accepted."""
    with pytest.raises(DocumentError, match="another spelling"):
        load(tmp_path, {**COMPUTATION, "layertype_0_bsz1": 4.1})
    load(tmp_path, {**COMPUTATION, "layertype_0_bsz1": 4.0})


T5_TIMES = {
    "layertype_0_bsz1_seq512": 2.0,
    "layertype_1_bsz1_seq512": 3.0,
    "layertype_other_bsz1_seq[512,512]": 5.0,
}


def t5_memory() -> dict[str, Any]:
    """Return a memory document with two layer types."""
    layer = MEMORY["layertype_0_sp"]["2048"]
    entry = other()["2048"]
    return {
        "layertype_0_sp": {"512": layer},
        "layertype_1_sp": {"512": {**layer, "parameter_size": 96.0}},
        **{f"other_memory_pp_{p}_sp": {"[512,512]": entry} for p in ("off", "on_first", "on_last")},
    }


def test_several_layer_types(tmp_path: Path) -> None:
    """T5: encoder and decoder layers with their own tables; the rest by both lengths."""
    profile = load(tmp_path, T5_TIMES, t5_memory(), T5)
    assert [layer.times[0].forward_s for layer in profile.layers] == [2e-3, 3e-3]
    assert profile.layers[1].memory[512].parameter_count == 96 * MIB / 4
    assert profile.other_times[0].seq_lengths == (512, 512)
    assert (512, 512) in profile.other_memory["first"]


@pytest.mark.parametrize(
    "spell", ["layernum[{},{}]_bsz2_seq[512,512]", "layernum{}_{}_bsz2_seq512_512"]
)
def test_raw_times_of_several_types(tmp_path: Path, spell: str) -> None:
    """Raw passes in both spellings give each type by varying its layers alone."""
    layer, cross, rest = 2.0, 3.0, 5.0
    raw = {
        spell.format(a, b): 2 * (a * layer + b * cross + rest) for a, b in ((1, 1), (2, 1), (1, 2))
    }
    profile = load(tmp_path, raw, t5_memory(), T5)
    assert profile.layers[0].times[0].forward_s == pytest.approx(2 * layer * 1e-3)
    assert profile.layers[1].times[0].forward_s == pytest.approx(2 * cross * 1e-3)
    assert profile.other_times[0].forward_s == pytest.approx(2 * rest * 1e-3)
    assert any("derived" in note for note in profile.notes)


@pytest.mark.parametrize(
    ("computation", "message"),
    [
        ({"layernum[2]_bsz1_seq2048": 9.0}, "key 'layertype_0_bsz1_seq2048': this key is missing"),
        (
            {"layernum[2]_bsz1_seq2048": 9.0, "layernum[4]_bsz1_seq2048": 8.0},
            "expected more than 9 of 'layernum[2]_bsz1_seq2048'",
        ),
        ({"layertype_0_bsz1_seq2048": 9.0}, "key 'layertype_other_bsz1_seq2048'"),
        ({**COMPUTATION, "layertype_1_bsz1_seq2048": 9.0}, "has layer type 1"),
        ({**COMPUTATION, "layertype_other_bsz1_seq[512,512]": 9.0}, "names 2 sequence lengths"),
    ],
)
def test_times_that_do_not_suffice(
    tmp_path: Path, computation: dict[str, Any], message: str
) -> None:
    """What is missing is named, with the command that makes it."""
    with pytest.raises(DocumentError) as error:
        load(tmp_path, computation)
    assert message in str(error.value)


def test_tables_without_sequence_level(tmp_path: Path) -> None:
    """Releases 2.1 to 2.3: no sequence level, scalars in the rest."""
    memory = {
        "layertype_0": MEMORY["layertype_0_sp"]["2048"],
        **{
            f"other_memory_pp_{p}": {"model_states": 4258.0, "activation": 572.5}
            for p in ("off", "on_first", "on_last")
        },
    }
    profile = load(tmp_path, memory=memory, sequence_parallel=False)
    assert list(profile.layers[0].memory) == [2048]
    assert profile.other_memory["only"][(2048,)] == OtherMemory(
        model_state_bytes={1: 4258.0 * MIB}, activation_bytes_per_sample={1: 572.5 * MIB}
    )
    assert any("without a sequence length" in note for note in profile.notes)


@pytest.mark.parametrize("kind", ["model_states", "activation"])
def test_a_vocabulary_without_any_degree(tmp_path: Path, kind: str) -> None:
    """The key names the table that is empty."""
    memory = json.loads(json.dumps(PROCESSED))
    memory["other_memory_pp_off_sp"]["2048"][kind] = {}

    with pytest.raises(DocumentError) as error:
        load(tmp_path, memory=memory)

    assert f"other_memory_pp_off_sp.2048.{kind}': no vocabulary degree" in str(error.value)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_other_variant_is_not_taken_in_silence(tmp_path: Path, sequence_parallel: bool) -> None:
    """With only the other variant there, the message says which option fits the file."""
    memory = PROCESSED
    if sequence_parallel:
        memory = {key.removesuffix("_sp"): value for key, value in PROCESSED.items()}
    with pytest.raises(DocumentError) as error:
        load(tmp_path, memory=memory, sequence_parallel=sequence_parallel)
    option = "--no-sequence-parallel" if sequence_parallel else "Search with --sequence-parallel"
    assert option in str(error.value)


def test_a_file_with_both_variants_lacks_a_key_and_is_of_none(tmp_path: Path) -> None:
    """Only a file without any table of a variant was measured without it."""
    plain = {key.removesuffix("_sp"): value for key, value in PROCESSED.items()}
    with pytest.raises(VariantError):
        load(tmp_path, memory=plain)
    both = PROCESSED | plain
    del both["other_memory_pp_off_sp"]
    with pytest.raises(DocumentError, match="'other_memory_pp_off_sp': this key is miss") as error:
        load(tmp_path, memory=both)
    assert not isinstance(error.value, VariantError)


def test_both_variants_in_one_file(tmp_path: Path) -> None:
    """Each variant is read iff it is asked for."""
    plain = json.loads(json.dumps(PROCESSED["layertype_0_sp"]).replace("80.0", "99.0"))
    memory = PROCESSED | {k.removesuffix("_sp"): v for k, v in PROCESSED.items()}
    memory["layertype_0"] = plain
    for sequence_parallel, expected in ((True, 80.0), (False, 99.0)):
        profile = load(tmp_path, memory=memory, sequence_parallel=sequence_parallel)
        table = profile.layers[0].memory[2048].activation_bytes_per_sample
        assert table[1] == expected * MIB
        assert profile.sequence_parallel == sequence_parallel


@pytest.mark.parametrize("by_option", [True, False])
def test_two_bytes_per_parameter(tmp_path: Path, by_option: bool) -> None:
    """PaddleNLP counts 2 bytes, and 18 of states; its raw keys say so where the option does not."""
    memory = {k.removesuffix("_sp"): v for k, v in PROCESSED.items()}
    if not by_option:
        memory["1_1_8_False"] = {"layernum[2]_bsz8_seq2048_first_ms": 10.0}
    profile = load(
        tmp_path,
        memory=memory,
        sequence_parallel=False,
        parameter_bytes=2 if by_option else None,
    )
    assert profile.layers[0].memory[2048].parameter_count == 48 * MIB / 2
    states = profile.other_memory["only"][(2048,)].model_state_bytes
    assert states[1] == pytest.approx(400 * MIB * 16 / 18)
    assert any("2 bytes" in note for note in profile.notes) != by_option


def test_parameter_bytes_that_raw_keys_contradict_are_refused(tmp_path: Path) -> None:
    """The option was ignored where the file is recognised as PaddleNLP's."""
    memory = {k.removesuffix("_sp"): v for k, v in PROCESSED.items()}
    memory["1_1_8_False"] = {"layernum[2]_bsz8_seq2048_first_ms": 10.0}
    with pytest.raises(DocumentError, match="--parameter-bytes"):
        load(tmp_path, memory=memory, sequence_parallel=False, parameter_bytes=4)
    two = load(tmp_path, memory=memory, sequence_parallel=False, parameter_bytes=2)
    assert two.layers[0].memory[2048].parameter_count == 48 * MIB / 2


def test_tables_of_paddlenlp_are_with_sequence_parallelism(tmp_path: Path) -> None:
    """Its keys do not contain it, and its trainer always uses it; Galvatron's keys do."""
    memory = {k.removesuffix("_sp"): v for k, v in PROCESSED.items()}
    with pytest.raises(VariantError):
        load(tmp_path, memory=memory, sequence_parallel=True)
    raw = {"1_1_8_False": {"layernum[2]_bsz8_seq2048_first_ms": 10.0}}
    on, off = (
        load(tmp_path, memory=memory | raw, sequence_parallel=value) for value in (True, False)
    )
    assert (on.sequence_parallel, off.sequence_parallel) == (True, False)
    assert on.layers[0].memory == off.layers[0].memory
    assert any("those of sequence parallelism" in note for note in on.notes)
    own, other = tmp_path / "memory_profiling_bf16_own.json", tmp_path / "other.json"
    write(own, memory | raw)
    write(other, memory)
    assert [is_file_of_paddle(path) for path in (own, other, tmp_path / "none.json")] == [
        True,
        False,
        False,
    ]


def directory(folder: Path, **files: dict[str, Any]) -> Path:
    """Write `<kind>_profiling_bf16_<rest>.json` files; keys are `kind__rest`."""
    for name, data in files.items():
        kind, rest = name.split("__", 1)
        write(folder / f"{kind}_profiling_bf16_{rest.replace('__', '-')}.json", data)
    return folder


NAMES = ["hidden_1024_head_16", "tiny_all", "tiny", "hidden1024_head16_seqlen2048", "other_all"]


@pytest.mark.parametrize("first", [0, 1, 2, 4])
def test_order_of_names_in_a_directory(tmp_path: Path, first: int) -> None:
    """Documented, newest release, v2.4, then names that do not name the model."""
    names = NAMES[first:]
    if "tiny" in names:  # the third and the fourth are equally good
        names.remove("hidden1024_head16_seqlen2048")
    for rank, name in enumerate(names):
        times = {"layertype_0_bsz1_seq2048": 1.0 + rank, "layertype_other_bsz1_seq2048": 1.0}
        directory(tmp_path, **{f"computation__{name}": times, f"memory__{name}": MEMORY})
    profile = read_dir(tmp_path)
    assert profile.layers[0].times[0].forward_s == pytest.approx(1e-3)
    assert Path(profile.sources[0].path).name == f"computation_profiling_bf16_{names[0]}.json"
    assert any("does not name model" in note for note in profile.notes) == (first == 4)


def test_equal_candidates_are_listed(tmp_path: Path) -> None:
    """Two equally good files are a question to the user."""
    directory(tmp_path, computation__a_all=COMPUTATION, computation__b_all=COMPUTATION)
    with pytest.raises(DocumentError) as error:
        read_dir(tmp_path)
    for part in ("_a_all.json", "_b_all.json", "Give the file"):
        assert part in str(error.value)


def test_files_without_processed_keys_are_skipped(tmp_path: Path) -> None:
    """A better name without content loses, and a note says so; names of others do not count."""
    directory(
        tmp_path,
        computation__hidden_1024_head_16={"layernum[2]_bsz1_seq2048": 1.0},
        computation__tiny=COMPUTATION,
        computation__tiny_seqlen4096=COMPUTATION,
        computation__hidden2048_head16_all=COMPUTATION,
        memory__tiny_all=MEMORY,
    )
    profile = read_dir(tmp_path)
    assert Path(profile.sources[0].path).name == "computation_profiling_bf16_tiny.json"
    assert profile.notes == (
        "computation_profiling_bf16_hidden_1024_head_16.json was skipped: it has no processed keys",
    )


def test_an_empty_directory_names_the_expected_file(tmp_path: Path) -> None:
    """The message has the documented name and the command."""
    with pytest.raises(
        DocumentError, match=r"computation_profiling_bf16_hidden_1024_head_16\.json"
    ):
        read_dir(tmp_path)


PROFILE = ModelProfile(
    layers=tuple(
        LayerProfile(
            times=(
                TimePoint(batch=1, seq_length=512, forward_s=1.1e-3 * k),
                TimePoint(batch=3, seq_length=512, forward_s=2.3e-3 * k),
            ),
            memory={
                512: LayerMemory(
                    parameter_count=1e7 * k,
                    activation_bytes_per_sample={1: 1e8 / 3, 2: 5e7, 6: 1e7},
                    checkpoint_bytes_per_sample=None if k == 1 else 1e6,
                )
            },
        )
        for k in (1, 2)
    ),
    other_times=(OtherTime(batch=3, seq_lengths=(512, 512), forward_s=0.0),),
    other_memory={
        position: {
            (512, 512): OtherMemory(
                model_state_bytes={1: 1e9 / 7, 3: 1e8}, activation_bytes_per_sample={1: 0.0, 3: 1.5}
            )
        }
        for position in ("only", "first", "last")
    },
    sequence_parallel=True,
    estimated=True,
    logits_peak_bytes_per_sample=12345.0,
)


def test_round_trip(tmp_path: Path) -> None:
    """read(write(profile)) is the profile to 1e-12, both variants in one file."""
    plain = replace(PROFILE, sequence_parallel=False)
    paths = write_model_profile(PROFILE, T5, tmp_path, other_variant=plain)
    assert [path.name for path in paths] == [
        "computation_profiling_bf16_hidden_1024_head_16.json",
        "computation_profiling_bf16_hidden_1024_head_16.json.meta.json",
        "memory_profiling_bf16_hidden_1024_head_16.json",
        "memory_profiling_bf16_hidden_1024_head_16.json.meta.json",
    ]
    assert_same(read_dir(tmp_path, T5), PROFILE)
    back = read_model_profile(
        computation=tmp_path, memory=tmp_path, spec=T5, sequence_parallel=False, precision="bf16"
    )
    assert_same(back, plain)
    assert back.layers[0].memory[512].checkpoint_bytes_per_sample is None


@settings(max_examples=30)
@given(
    seconds=st.floats(min_value=1e-9, max_value=100.0),
    count=st.floats(min_value=1.0, max_value=1e11),
    size=st.floats(min_value=1.0, max_value=1e12),
    batch=st.integers(min_value=1, max_value=10**6),
    sequence_parallel=st.booleans(),
)
def test_round_trip_of_any_number(
    tmp_path_factory: pytest.TempPathFactory,
    seconds: float,
    count: float,
    size: float,
    batch: int,
    sequence_parallel: bool,
) -> None:
    """No unit conversion loses more than 1e-12."""
    memory = LayerMemory(
        parameter_count=count,
        activation_bytes_per_sample={1: size},
        checkpoint_bytes_per_sample=size,
    )
    rest = OtherMemory(model_state_bytes={1: size}, activation_bytes_per_sample={1: size})
    profile = ModelProfile(
        layers=(
            LayerProfile(
                times=(TimePoint(batch=batch, seq_length=128, forward_s=seconds),),
                memory={128: memory},
            ),
        ),
        other_times=(OtherTime(batch=batch, seq_lengths=(128,), forward_s=seconds),),
        other_memory={p: {(128,): rest} for p in ("only", "first", "last")},
        sequence_parallel=sequence_parallel,
    )
    out = tmp_path_factory.mktemp("round_trip")
    write_model_profile(profile, SPEC, out)
    back = read_model_profile(
        computation=out,
        memory=out,
        spec=SPEC,
        sequence_parallel=sequence_parallel,
        precision="bf16",
    )
    assert_same(back, profile)
    assert back.layers[0].times[0].forward_s == pytest.approx(seconds, rel=1e-12)
    assert back.layers[0].memory[128].parameter_count == pytest.approx(count, rel=1e-12)


def test_names_need_the_heads(tmp_path: Path) -> None:
    """Without a number of heads there is no documented name to write to."""
    layer = LayerSpec(num_layers=1, seq_length=512, hidden_size=64)
    spec = ModelSpec(name="x", layers=(layer, layer))
    with pytest.raises(InputError, match="no number of heads"):
        write_model_profile(PROFILE, spec, tmp_path)
    with pytest.raises(InputError, match="both memory variants"):
        write_model_profile(PROFILE, T5, tmp_path, other_variant=PROFILE)


def test_parameter_bytes_of_a_sidecar_win(tmp_path: Path) -> None:
    """What the file records is not overridden by an option."""
    write_model_profile(PROFILE, T5, tmp_path)
    with pytest.raises(DocumentError, match="key 'parameter_bytes'"):
        read_model_profile(
            computation=tmp_path,
            memory=tmp_path,
            spec=T5,
            sequence_parallel=True,
            precision="bf16",
            parameter_bytes=2,
        )


def test_the_precision_in_a_name_is_noted(tmp_path: Path) -> None:
    """A file named for another precision is read as asked, with a note."""
    path = write(tmp_path / "computation_profiling_fp32_x.json", COMPUTATION)
    profile = read_model_profile(
        computation=path,
        memory=write(tmp_path / "memory.json", MEMORY),
        spec=SPEC,
        sequence_parallel=True,
        precision="bf16",
    )
    assert profile.notes == (f"{path.name} is named fp32 and was read as bf16",)


def test_sidecars_reach_the_profile(tmp_path: Path) -> None:
    """An estimate says so, and carries the peak of the logits."""
    write_model_profile(PROFILE, T5, tmp_path)
    meta = json.loads(
        sidecar_path(tmp_path / "memory_profiling_bf16_hidden_1024_head_16.json").read_text()
    )
    assert (meta["estimated"], meta["unit"], meta["parameter_bytes"]) == (True, "MiB", 4)
    profile = read_dir(tmp_path, T5)
    assert profile.estimated
    assert profile.logits_peak_bytes_per_sample == 12345.0
    assert [s.role for s in profile.sources] == [
        "computation",
        "computation sidecar",
        "memory",
        "memory sidecar",
    ]


def test_sidecars_are_never_taken_for_documents(tmp_path: Path) -> None:
    """With unknown heads the documented name is a pattern, which a sidecar's name fits too."""
    profile = replace(load(tmp_path), estimated=True)
    folder = tmp_path / "written"
    folder.mkdir()
    write_model_profile(profile, SPEC, folder)
    assert list(folder.glob("*.meta.json"))
    layer = SPEC.layers[0]
    bare = bare_spec(
        num_layers=[layer.num_layers],
        seq_length=[layer.seq_length],
        hidden_size=[layer.hidden_size],
    )

    assert_same(read_dir(folder, bare), profile)
    elsewhere = bare_spec(num_layers=[2], seq_length=[64], hidden_size=[32])
    with pytest.raises(DocumentError) as caught:
        read_dir(folder, elsewhere)
    assert "present: computation_profiling" in str(caught.value)
    assert ".meta.json" not in str(caught.value)


def test_estimated_files_are_read_back_without_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes and the documented path options are enough; heads may stay unknown."""
    from autopar.documents.hardware import write_hardware
    from autopar.documents.spec import load_spec
    from autopar.rates.card import estimate_hardware
    from autopar.rates.model import estimate_model
    from search.commands import search as cli

    spec = load_spec("llama2-7b")
    write_model_profile(estimate_model(spec, "h100"), spec, folder)
    write_hardware(estimate_hardware("h100", num_nodes=1, gpus_per_node=8), folder)
    paths = ("allreduce-bandwidth-config", "p2p-bandwidth-config", "overlap-coe", "sp-time")
    options = [
        *(word for name in paths for word in (f"--{name}-path", str(folder))),
        *("--time-profiling-path", str(folder), "--memory-profiling-path", str(folder)),
        *("--num-layers", "32", "--seq-length", "4096", "--hidden-size", "4096"),
        *("--num-nodes", "1", "--num-gpus-per-node", "8", "--global-batch-size", "16"),
        *("--memory-constraint", "80"),
    ]

    assert cli.run(options) == 0, capsys.readouterr().err
