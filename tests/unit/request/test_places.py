"""Measured files of default folders: taken together or left alone, and never without a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from autopar.documents.catalog import find_configs, model_folder, model_folders
from autopar.documents.sidecar import SIDECAR_VERSION, describe_model
from autopar.documents.spec import load_spec
from autopar.errors import OptionError
from profiler.model.options import ModelOptions
from profiler.model.run import profile_paths
from search.planning.choose import with_site
from search.planning.uniform.answer import open_launches
from search.request.interface import open_documents
from search.request.options import SearchOptions
from search.request.profiles import DiscoveredProfiles
from search.request.request import InputSpec, Request, build_request, with_places

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}
FILE = "profiling_bf16_hidden_64_head_4.json"
OWN, CPU = Path("models/tiny/configs"), Path("models/tiny/configs/cpu")
ALLREDUCE = "allreduce_bandwidth_1nodes_2gpus_per_node.json"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder with the config.json of a small model."""
    monkeypatch.chdir(tmp_path)
    _write(Path("tiny/config.json"), CONFIG)
    return tmp_path


def _write(path: Path, content: object = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content or {}), encoding="utf-8")


def _times(folder: Path = CPU, file: str = FILE) -> None:
    _write(folder / f"computation_{file}")


def _memory() -> None:
    _write(OWN / f"memory_{FILE}")


def _hardware(folder: str = "hardware") -> None:
    _write(Path(folder) / ALLREDUCE)


def _found(precision: str = "bf16", **inputs: object) -> DiscoveredProfiles:
    named = InputSpec(**{"model": "tiny/config.json", **inputs})  # type: ignore[arg-type]
    return with_places(named, SearchOptions(mixed_precision=precision))[1]  # type: ignore[arg-type]


def test_nothing_is_there() -> None:
    assert _found() == DiscoveredProfiles()


@pytest.mark.parametrize("where", ["hardware", "profile_hardware/hardware_configs"])
def test_everything_is_there(where: str) -> None:
    _times()
    _memory()
    _hardware(where)
    found = _found()
    assert found.named == {
        "hardware": where,
        "time-profiling-path": str(CPU),
        "memory-profiling-path": str(OWN),
    }
    assert "using the hardware of " in found.notices[0]
    assert f"times of {CPU} and memory of {OWN}" in found.notices[1]
    assert [line.split()[0] for line in found.defaults] == ["--hardware", "--time-profiling-path"]


def test_one_folder_is_said_once() -> None:
    _times(OWN)
    _memory()
    _hardware()
    assert f"times and memory of {OWN}" in _found().notices[1]


def test_the_writer_and_the_reader_mean_the_same_folders() -> None:
    spec = load_spec("tiny/config.json")
    paths = profile_paths(spec, ModelOptions(model="tiny/config.json"), "NVIDIA H200 NVL")
    for path in paths.values():
        _write(path)
    assert model_folders("computation", "bf16", spec) == (paths["computation"].parent,)
    assert model_folders("memory", "bf16", spec) == (paths["memory"].parent,)
    assert paths["computation"].parent == model_folder("tiny", "h200-nvl")


def test_a_measured_model_without_a_cluster_is_refused() -> None:
    _times()
    _memory()
    with pytest.raises(OptionError, match="--hardware"):
        _found()


def test_a_cluster_without_a_measured_model_is_said() -> None:
    _hardware()
    (line,) = _found().notices
    assert line.startswith("hardware of hardware not used: ")
    # a shape of it is asked for: no card may stand in
    assert _found(num_gpus_per_node=2).hardware == "hardware"


def test_a_card_is_estimated_and_what_was_measured_is_said() -> None:
    _times()
    _memory()
    _hardware()
    found = _found(hardware="h100:1x8")
    assert found.named == {}
    (line,) = found.notices
    assert line.startswith(f"times of {CPU} not used: --hardware h100:1x8")


def test_named_hardware_takes_the_measured_model() -> None:
    _times()
    _memory()
    _hardware("hw")
    assert set(_found(hardware="hw").named) == {"time-profiling-path", "memory-profiling-path"}


def test_named_times_take_the_measured_cluster() -> None:
    _hardware()
    assert _found(time_profiling_path="t", memory_profiling_path="m").named == {
        "hardware": "hardware"
    }


def test_another_precision_is_said() -> None:
    _times(file=FILE.replace("bf16", "fp32"))
    _memory()
    said = _found().notices
    assert f"times of {CPU} are not used: they are in fp32, and --mixed-precision is bf16" in said
    _hardware()
    _write(OWN / f"memory_{FILE.replace('bf16', 'fp32')}")
    assert _found("fp32").times == str(CPU)


def test_times_without_memory_are_refused() -> None:
    _times()
    _hardware()
    with pytest.raises(OptionError, match="--memory-profiling-path"):
        _found()


def test_memory_without_times_is_said() -> None:
    _memory()
    (line,) = _found().notices
    assert line.startswith(f"memory of {OWN} not used: it has no times of tiny")


@pytest.mark.parametrize("what", ["times", "hardware"])
def test_two_of_a_kind_are_refused(what: str) -> None:
    _times()
    _memory()
    _hardware()
    if what == "times":
        _times(OWN / "h200")
    else:
        _hardware("profile_hardware/hardware_configs")
    with pytest.raises(OptionError, match=r"is missing: .* are in .* and .*Add one of them"):
        _found()


def test_estimates_that_are_shipped_are_no_measured_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a clone `models/NAME/configs` is the shipped folder, whose times were never measured."""
    shipped = find_configs("llama2-7b")
    assert shipped is not None
    monkeypatch.chdir(shipped.parent.parent.parent)
    assert any(shipped.glob("computation_*.json"))
    assert model_folders("computation", "bf16", load_spec("llama2-7b")) == ()
    assert with_places(InputSpec(), SearchOptions())[1] == DiscoveredProfiles()


def test_the_default_model_is_named_beside_its_times() -> None:
    folder = model_folder("llama2-7b", "cpu")
    shipped = find_configs("llama2-7b")
    assert shipped is not None
    name = "profiling_bf16_hidden_4096_head_32.json"
    _times(folder, name)
    shutil.copy(shipped / f"memory_{name}", folder.parent)
    _hardware()
    inputs, places = with_places(InputSpec(), SearchOptions())
    assert (inputs.model, places.times) == ("llama2-7b", str(folder))


def test_files_of_other_sizes_are_left_alone_and_said() -> None:
    """A file is named by hidden size and heads: its sidecar says what else the model was."""
    _times()
    _memory()
    _hardware()
    said = describe_model(load_spec("tiny/config.json"))
    sidecar = {
        "version": SIDECAR_VERSION,
        "document": "computation",
        "unit": "ms",
        "source": "measured",
        "runs": [{"metadata": {"model": said}}],
    }
    _write(CPU / f"computation_{FILE}.meta.json", sidecar)
    assert _found().times == str(CPU)
    assert _found(num_layers=(2,), seq_length=(64,)).times == str(CPU)
    other = _found(ffn_hidden_size=96)
    assert other.named == {}
    # a model of other widths has a name, and so a folder, of its own
    assert other.notices[0].startswith("hardware of hardware not used: ")
    other = _found(vocab_size=96)
    assert other.notices[0] == (f"profile of {CPU} not used: tiny was measured with other sizes")


def test_python_is_told_what_a_card_was_preferred_to() -> None:
    _times()
    _, profile, _, _ = open_documents("tiny/config.json", "h100:1x8", {"settle_bsz": 8})
    assert profile.notes[-1].startswith(f"times of {CPU} not used: --hardware h100:1x8")


def test_documents_of_a_model_are_planned_on_a_folder() -> None:
    """The files of a cluster need no model that is found elsewhere."""
    spec, profile, card, _ = open_documents("llama2-7b", "h100:1x8", {})
    found = open_documents((spec, profile), "a100-80gb_1x8", {})
    assert found[:2] == (spec, profile)
    assert (found[2].name, card.name) == ("a100-80gb_1x8", "h100-80gb_1x8")


def _measured_on(path: Path, document: str, unit: str, device: str) -> None:
    """Write a sidecar that says on which device its file was measured."""
    runs = [{"metadata": {"device": device}}]
    said = {"version": SIDECAR_VERSION, "document": document, "unit": unit, "source": "measured"}
    _write(path, {**said, "runs": runs})


def test_of_several_devices_that_of_the_cluster_is_taken() -> None:
    """Times of a laptop lie beside those of the cluster; alone they are refused."""
    h200 = OWN / "h200"
    _times()
    _memory()
    _hardware()
    _measured_on(CPU / f"computation_{FILE}.meta.json", "computation", "ms", "cpu (Xeon)")
    sidecar = Path("hardware") / f"{ALLREDUCE}.meta.json"
    _measured_on(sidecar, "allreduce", "GB/s", "NVIDIA H200")
    with pytest.raises(OptionError, match=r"measured on cpu \(Xeon\), .* on NVIDIA H200"):
        _found()
    _times(h200)
    _measured_on(h200 / f"computation_{FILE}.meta.json", "computation", "ms", "NVIDIA H200")
    assert _found().times == str(h200)


# --- sites ------------------------------------------------------------------------------------


def _site(name: str, *, shape: tuple[int, int] = (1, 8), **changes: object) -> Path:
    """Write a site of the default folder and return it."""
    path = Path("sites") / f"site_{name}.json"
    clock = {"value": 0.9, "quality": "measured", "source": "a test"}
    document = {"format": "autopar-site", "version": 1, "name": name, "card": "h100-80gb"}
    document |= {"num_nodes": shape[0], "gpus_per_node": shape[1], "clock": clock}
    _write(path, {**document, **changes})
    return path


def _sited(*words: tuple[str, str]) -> tuple[Request, tuple[str, ...]]:
    raw = {"model": "llama2-7b", "hardware": "h100:1x8"} | dict(words)
    return with_site(build_request(raw))


def test_the_site_of_the_cluster_is_taken_as_if_it_were_typed() -> None:
    path = _site("mine")
    request, says = _sited()
    assert request.inputs.site == request.given["site"] == str(path)
    (said,) = says
    assert said.startswith("--site not given; using ")
    assert said.endswith("Use --site none to ignore it")
    (line,) = request.found
    assert line.startswith(f"--site {path} (")
    assert open_launches(request).assumed[0] == line
    # h100 is another name of the card
    assert _sited(("hardware", "h100-80gb:1x8"))[0].inputs.site == str(path)


@pytest.mark.parametrize(
    "words",
    [
        (("site", "none"),),
        (("hardware", "a100-80gb:1x8"),),
        # it is estimated of nobody's choice, and shipped
        (("hardware", "a100-80gb_1x8"),),
    ],
)
def test_no_word_of_a_site_that_is_not_asked_for(words: tuple[tuple[str, str], ...]) -> None:
    _site("mine")
    request, says = _sited(*words)
    assert (request.inputs.site, request.found, says) == (None, (), ())


@pytest.mark.parametrize(
    ("shape", "changes", "said"),
    [
        ((2, 8), {}, "it was measured on 2 x 8 GPUs. Use --site sites/site_a.json"),
        ((1, 4), {}, "it was measured on 1 x 4 GPUs"),
        (
            (1, 8),
            {"clock": {"value": 0.9, "quality": "nominal", "source": "several ranks on a GPU"}},
            "it is synthetic",
        ),
        ((1, 8), {"version": 7}, "sites/site_a.json"),
    ],
)
def test_a_site_of_something_else_is_said_and_left_alone(
    shape: tuple[int, int], changes: dict[str, object], said: str
) -> None:
    _site("a", shape=shape, **changes)
    request, says = _sited()
    assert request.inputs.site is None
    assert request.found == ()
    (line,) = says
    assert said in line


def test_two_sites_of_one_cluster_are_refused() -> None:
    _site("a")
    _site("b")
    with pytest.raises(OptionError, match=r"--site.*sites/site_a.json"):
        _sited()
    assert _sited(("site", "sites/site_b.json"))[0].inputs.site == "sites/site_b.json"
