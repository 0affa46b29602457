"""Which cluster hardware files are read as: what their names say, and the sizes that are given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from autopar.documents.hardware import hardware_file_name, hardware_shapes, write_hardware
from autopar.documents.spec import load_spec
from autopar.errors import DocumentError, InputError, OptionError
from autopar.rates.card import estimate_hardware
from autopar.records import replace
from autopar.run.rules import RuleError
from autopar.sources import STACK_ROLE
from search.commands import search as cli
from search.planning.choose import route_of
from search.planning.session import open_session
from search.request.options import SearchOptions
from search.request.request import InputSpec, build_request, load_inputs

Shape = tuple[int, int]


def folder_of(path: Path, *shapes: Shape) -> Path:
    """Write the hardware files of these clusters."""
    for nodes, gpus in shapes:
        write_hardware(estimate_hardware("a100-80gb", num_nodes=nodes, gpus_per_node=gpus), path)
    return path


@pytest.fixture
def profile(root: Path) -> dict[str, str]:
    """Return the shipped profile of llama2-7b as inputs."""
    folder = str(root / "models" / "llama2-7b" / "configs")
    return {"time_profiling_path": folder, "memory_profiling_path": folder, "model": "llama2-7b"}


def shape_of(inputs: InputSpec) -> Shape:
    """Return (nodes, GPUs per node) of the hardware that is read."""
    _, _, hardware = load_inputs(inputs, SearchOptions(time_profile_mode="batch"))
    return hardware.num_nodes, hardware.gpus_per_node


@pytest.mark.parametrize(
    ("shapes", "given", "expected"),
    [
        (((1, 4),), {}, (1, 4)),  # files of one cluster say which it is
        (((2, 4),), {"num_nodes": 2}, (2, 4)),  # and what is not given of it
        (((2, 4),), {"num_gpus_per_node": 4}, (2, 4)),
        (((4, 2),), {"world_size": 8}, (4, 2)),
        (((1, 4), (2, 4)), {"num_nodes": 2}, (2, 4)),  # one of several is left
        (((1, 2), (1, 8)), {}, (1, 8)),  # several: the default
        (((1, 2), (1, 8)), {"num_nodes": 1, "num_gpus_per_node": 2}, (1, 2)),
        (((1, 4), (2, 2), (4, 1)), {"world_size": 4, "num_nodes": 2}, (2, 2)),
        (((1, 8), (2, 4)), {"world_size": 8}, (1, 8)),  # several are left: as without files
    ],
)
def test_files_say_their_cluster(
    tmp_path: Path,
    profile: dict[str, str],
    shapes: tuple[Shape, ...],
    given: dict[str, int],
    expected: Shape,
) -> None:
    """The one shape of the folder that the given sizes allow; else the sizes and 1 x 8."""
    folder = folder_of(tmp_path, *shapes)

    assert hardware_shapes(folder) == tuple(sorted(shapes))
    named = InputSpec(hardware=str(folder), **profile, **given)  # type: ignore[arg-type]
    assert shape_of(named) == expected


def test_a_named_file_says_its_cluster(tmp_path: Path, profile: dict[str, str]) -> None:
    """Whatever lies beside it; a file with another name says none, and neither do its siblings."""
    folder = folder_of(tmp_path, (1, 2), (2, 2))
    documented = folder / hardware_file_name("allreduce", 2, 2)
    paths = {"p2p_bandwidth_config_path": str(folder), "overlap_coe_path": str(folder)}

    named = InputSpec(allreduce_bandwidth_config_path=str(documented), **profile, **paths)  # type: ignore[arg-type]
    assert shape_of(named) == (2, 2)

    own = folder_of(tmp_path / "own", (1, 2)) / "mine.json"
    (folder / hardware_file_name("allreduce", 1, 2)).rename(own)
    renamed = replace(named, allreduce_bandwidth_config_path=str(own))
    with pytest.raises(InputError, match="1nodes_8gpus_per_node\\.json"):
        shape_of(renamed)
    assert shape_of(replace(renamed, num_gpus_per_node=2)) == (1, 2)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"num_nodes": 2}, "2nodes_8gpus"),
        ({"num_gpus_per_node": 8}, "1nodes_8gpus"),
        ({"world_size": 16}, "2nodes_8gpus"),
    ],
)
def test_sizes_that_contradict_the_folder_name_what_is_there(
    tmp_path: Path, profile: dict[str, str], given: dict[str, int], wanted: str
) -> None:
    """The sizes win, and the file that they need is missing."""
    folder = folder_of(tmp_path, (1, 4))
    named = InputSpec(hardware=str(folder), **profile, **given)  # type: ignore[arg-type]

    with pytest.raises(InputError) as caught:
        shape_of(named)

    sentence = str(caught.value)
    assert f"allreduce_bandwidth_{wanted}_per_node.json: this file does not exist" in sentence
    assert "(present: allreduce_bandwidth_1nodes_4gpus_per_node.json)" in sentence


def test_two_sizes_that_contradict_each_other_are_refused(
    tmp_path: Path, profile: dict[str, str]
) -> None:
    """The arithmetic is shown, also where the folder has one shape."""
    folder = folder_of(tmp_path, (1, 4))
    named = InputSpec(hardware=str(folder), world_size=4, num_nodes=3, **profile)  # type: ignore[arg-type]

    with pytest.raises(InputError, match=r"--nodes\(3\) \* --gpus-per-node\(1\) = 3 != 4"):
        shape_of(named)


def test_a_folder_of_four_gpus_is_planned_without_sizes(
    tmp_path: Path, profile: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--hardware DIR` alone."""
    folder = folder_of(tmp_path / "hardware", (1, 4))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in profile.items()]

    assert cli.run(["--hardware", str(folder), *options, "--output-config-path", "none"]) == 0

    assert "1 x 4 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layers", "collectives", "refused"),
    [(2, 1, True), (1, 4, True), (1, 1, False), (2, None, False), (None, 1, False)],
)
def test_profiles_of_other_threads_are_not_mixed(
    tmp_path: Path,
    profile: dict[str, str],
    layers: int | None,
    collectives: int | None,
    refused: bool,
) -> None:
    """Times of a CPU depend on the threads of a rank, which sidecars record."""
    hardware = folder_of(tmp_path / "hardware", (1, 8))
    model = Path(shutil.copytree(profile["time_profiling_path"], tmp_path / "model"))
    files = dict.fromkeys(model.glob("computation*.meta.json"), layers)
    files |= dict.fromkeys(hardware.glob("*.meta.json"), collectives)
    assert len(files) >= 5
    # memory is counted, with any number of threads
    files |= dict.fromkeys(model.glob("memory*.meta.json"), 7)
    for path, threads in files.items():
        content = json.loads(path.read_text("utf-8"))
        content["runs"] = [{"id": "1-a", "metadata": {"threads": threads}}]
        path.write_text(json.dumps(content), encoding="utf-8")
    own = dict.fromkeys(("time_profiling_path", "memory_profiling_path"), str(model))
    inputs = InputSpec(**{**profile, **own}, hardware=str(hardware))
    options = SearchOptions(time_profile_mode="batch")
    if not refused:
        session = open_session(inputs, options, ())
        assert (session.profile.threads, session.hardware.threads) == (layers, collectives)
        return
    with pytest.raises(RuleError) as caught:
        open_session(inputs, options, ())
    assert caught.value.ids == ("profiles.threads",)
    assert caught.value.broken[0].values == {"layers": layers, "collectives": collectives}
    assert "OMP_NUM_THREADS" in caught.value.broken[0].remedy


def config(path: Path, **changes: object) -> Path:
    """Write the config.json of a small model under any name."""
    keys: dict[str, object] = {
        "model_type": "llama",
        "vocab_size": 32000,
        "num_hidden_layers": 2,
        "max_position_embeddings": 32768,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 512,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**keys, **changes}), encoding="utf-8")
    return path


def test_the_longest_length_of_a_config_is_said(tmp_path: Path) -> None:
    """A length of 131072 tokens was taken from max_position_embeddings without a word."""
    path = str(config(tmp_path / "config.json"))
    said = "--seq-length not given; using the 32768 tokens of max_position_embeddings"

    def notices(**inputs: object) -> tuple[str, ...]:
        spec = InputSpec(hardware="h100:1x8", **inputs)
        return open_session(spec, SearchOptions(settle_bsz=8), {"global-batch-size"}).notices

    assert said in notices(model=path)
    assert all("--seq-length" not in line for line in notices(model=path, seq_length=(2048,)))
    assert all("--seq-length" not in line for line in notices(model="llama3-8b"))


def test_options_without_effect_are_said() -> None:
    """What is given for files that are not read changes nothing."""
    spec = InputSpec(hardware="h100:1x8", parameter_bytes=4, bandwidth_unit="MiB/ms")
    found = open_session(spec, SearchOptions(settle_bsz=8), {"global-batch-size"}).notices
    assert "--parameter-bytes has no effect without --memory-profiling-path" in found
    assert any(line.startswith("--bandwidth-unit has no effect: h100") for line in found)


def test_two_models_of_a_folder_have_two_names(tmp_path: Path) -> None:
    """Both were called like the folder, and the plan of one replaced that of the other."""
    folder = tmp_path / "small"
    assert load_spec(str(config(folder / "config.json"))).name == "small"
    assert load_spec(str(config(folder / "a.json"))).name == "a"
    assert load_spec(str(config(folder / "b.v2.json"))).name == "b.v2"
    with pytest.raises(DocumentError, match="_name_or_path"):
        load_spec(str(config(folder / "e.json", _name_or_path=True)))
    named = config(folder / "c.json", _name_or_path="org/llama-x/")
    assert load_spec(str(named)).name == "llama-x"
    assert load_spec(str(config(folder / "d.json", _name_or_path="./"))).name == "d"


def test_every_file_is_read_once(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is judged, parsed and hashed in several readings could change between them."""
    monkeypatch.chdir(tmp_path)
    opened: list[Path] = []
    read_bytes = Path.read_bytes

    def reading(path: Path) -> bytes:
        opened.append(path.resolve())
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", reading)
    session = open_session(InputSpec(), SearchOptions())

    files = [source for source in session.sources if source.role != STACK_ROLE]
    assert len(set(opened)) >= len(files) > 6
    assert {path.name for path in opened if opened.count(path) > 1} == set()


def test_selective_recomputation_is_that_of_each_engine() -> None:
    """Attention of Megatron-LM (its default), or the operations of torchtitan."""
    request = build_request({"recompute": "selective"})
    assert request.degrees.recompute == ("core_attn", "op")


def test_typed_names_are_shipped_names() -> None:
    request = build_request({"model": "Qwen/Qwen3-32B", "hardware": "8xh100"})
    assert (request.inputs.model, request.inputs.hardware) == ("qwen3-32b", "h100:1x8")


@pytest.mark.parametrize(
    ("words", "layers", "lengths"),
    [
        ({"num-encoder-layers": "12", "num-decoder-layers": "6"}, (12, 6), None),
        ({"encoder-seq-length": "256"}, None, (256, 256)),
        ({"encoder-seq-length": "256", "seq-length": "128"}, None, (256, 128)),
    ],
)
def test_sizes_of_encoder_and_decoder(
    words: dict[str, str], layers: tuple[int, ...] | None, lengths: tuple[int, ...] | None
) -> None:
    """Options of Galvatron's T5; a plan file has them as the lists of all commands."""
    request = build_request({"model": "t5-3B", **words})
    assert (request.inputs.num_layers, request.inputs.seq_length) == (layers, lengths)
    assert not {name for name in request.given if name.endswith("coder-layers")}
    again = build_request(dict(request.given))
    assert again.inputs == request.inputs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"num-encoder-layers": "12"}, "--num-encoder-layers needs --num-decoder-layers"),
        ({"num-decoder-layers": "12"}, "--num-decoder-layers needs --num-encoder-layers"),
        (
            {"num-encoder-layers": "1", "num-decoder-layers": "1", "num-layers": "1,1"},
            "--num-layers and --num-encoder-layers",
        ),
        ({"encoder-seq-length": "8", "seq-length": "8,8"}, "--encoder-seq-length"),
        ({"num-encoder-layers": "x", "num-decoder-layers": "1"}, "--num-layers"),
    ],
)
def test_sizes_of_one_stack_that_cannot_be(words: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        build_request({"model": "t5-3b", **words})


def test_a_quantised_base_alone_has_the_rank_of_trl() -> None:
    """`--qlora` without `--lora` trains adapters of rank 16, which the defaults name."""
    raw = {"model": "llama3-8b", "hardware": "h100:1x1", "lora-base": "nf4"}
    question = route_of(build_request(raw)).launches
    assert question is not None
    assert question.job.training.lora_rank == 16
    assert [one for one in question.assumed if one.startswith("--lora ")] == [
        "--lora 16 (the default of TRL)"
    ]
    other = route_of(build_request({**raw, "lora": "8"})).launches
    assert other is not None
    assert other.job.training.lora_rank == 8
    assert not any(one.startswith("--lora ") for one in other.assumed)


def test_a_long_default_length_is_said(tmp_path: Path) -> None:
    """A length above usual samples is that of the model, which the row of defaults says."""
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
              "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
              "vocab_size": 1000, "max_position_embeddings": 131072}  # fmt: skip
    path = tmp_path / "long" / "config.json"
    path.parent.mkdir()
    for length, more in ((131072, ": the longest of long"), (4096, "")):
        path.write_text(json.dumps({**config, "max_position_embeddings": length}))
        question = route_of(build_request({"model": str(path), "hardware": "h100:1x8"})).launches
        assert question is not None
        (text,) = (one for one in question.assumed if one.startswith("--seq-length"))
        assert text.partition(" (")[0] == f"--seq-length {length}{more}"


@pytest.mark.parametrize(
    ("program", "engine"),
    [("ms-swift", "accelerate"), ("verl", "accelerate"), ("trl", "accelerate"),
     ("megatron-bridge", "megatron")],
)  # fmt: skip
def test_programs_that_train_other_plans_are_named(program: str, engine: str) -> None:
    """`--engine` of a program says whose plans it trains."""
    with pytest.raises(OptionError) as error:
        build_request({"model": "llama3-8b", "hardware": "h100:1x8", "engine": program})
    assert f"--engine {engine}" in error.value.remedy
