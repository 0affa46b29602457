"""What a trainer's software hides of an estimate's traffic, and how files and reports name it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.hardware import read_hardware_dir
from autopar.documents.spec import load_spec
from autopar.errors import DocumentError, OptionError
from autopar.rates import command as estimate_command
from autopar.rates.accuracy import class_of_sources, load_accuracy
from autopar.rates.card import estimate_hardware
from autopar.rates.measured import HardwareProfile, host_calls
from autopar.rates.model import estimate_model
from autopar.rates.stack import load_stack
from autopar.records import replace
from autopar.run.model import ModelProfile
from autopar.run.plan import PUBLISHED_RUNS, LayerStrategy, Plan, VocabStrategy
from autopar.sources import NAMED_BY_FILES, NAMED_BY_OPTION, Source, stack_source, stacks_of
from search.planning.cost.overlap import without_host
from search.planning.layered.planner import Planner
from search.request.options import SearchOptions
from search.request.request import InputSpec, load_inputs

STACK = load_stack("megatron-core")
SPEC = load_spec("llama2-7b")
OPTIONS = SearchOptions(time_profile_mode="batch")
PLAN = Plan(
    world_size=8,
    num_stages=1,
    stage_sizes=(32,),
    layers=(LayerStrategy(tp=8),) * 32,
    vocab=VocabStrategy(tp=8),
    global_batch=8,
    num_microbatches=8,
)


@pytest.fixture(scope="module")
def documents() -> tuple[ModelProfile, HardwareProfile]:
    """Return estimates of llama2-7b on eight A100 as Megatron-Core trains it."""
    return (
        estimate_model(SPEC, "a100-80gb", stack=STACK.name),
        estimate_hardware("a100-80gb", num_nodes=1, gpus_per_node=8, stack=STACK),
    )


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a folder with the same as files."""
    arguments = ["--model", "llama2-7b", "--hardware", "a100-80gb:1x8", "--stack", STACK.name]
    assert estimate_command.run([*arguments, "--out", str(tmp_path / "files")]) == 0
    return tmp_path / "files"


def inputs(folder: Path, **more: Any) -> InputSpec:
    """Return the inputs of a folder of files."""
    path = str(folder)
    return InputSpec(
        model="llama2-7b",
        hardware=path,
        time_profiling_path=path,
        memory_profiling_path=path,
        **more,
    )


def change(folder: Path, pattern: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the sidecars that a pattern finds."""
    for path in folder.glob(pattern):
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content))


def test_files_say_what_the_estimate_says(
    documents: tuple[ModelProfile, HardwareProfile], files: Path
) -> None:
    """Read back, they price a plan as the estimate does, and name the software once."""
    spec, profile, hardware = load_inputs(inputs(files), OPTIONS)
    assert hardware.hiding == documents[1].hiding == STACK.hiding
    named = stack_source((*profile.sources, *hardware.sources))
    assert named is not None
    assert (named.path, named.notes, named.estimated) == (STACK.name, (NAMED_BY_FILES,), True)
    assert [s.role for s in hardware.sources].count(named.role) == 1

    read = Planner.from_documents(spec, profile, hardware, OPTIONS).evaluate(PLAN)
    made = Planner.from_documents(SPEC, *documents, OPTIONS).evaluate(PLAN)
    assert read.step_time_s == pytest.approx(made.step_time_s, rel=1e-12)
    assert read.step_time_interval_s == pytest.approx(made.step_time_interval_s, rel=1e-12)


def test_only_estimates_hide_by_a_stack(documents: tuple[ModelProfile, HardwareProfile]) -> None:
    """Measured times on the same cluster are priced as if it knew no software."""
    profile, hardware = documents
    measured = replace(profile, estimated=False)

    def step_s(model: ModelProfile, cluster: HardwareProfile) -> float:
        return Planner.from_documents(SPEC, model, cluster, OPTIONS).evaluate(PLAN).step_time_s

    plain = replace(hardware, hiding=None)
    assert step_s(measured, hardware) == step_s(measured, plain) == step_s(profile, plain)
    assert step_s(profile, hardware) < 0.9 * step_s(profile, plain)


def test_host_code_is_taken_out_of_times(
    documents: tuple[ModelProfile, HardwareProfile],
) -> None:
    """What is left is what devices take without it, also where the host took most of the time."""
    found = without_host(documents[0], SPEC, STACK.hiding)
    for cell, device in zip(
        documents[0].layers[0].sharded_times, found.layers[0].sharded_times, strict=True
    ):
        calls = host_calls(cell.kind).forward if cell.degree > 1 else 0
        host = STACK.hiding.host_forward_s + calls * STACK.hiding.host_collective_s
        assert (device.forward_s**3 + host**3) ** (1 / 3) == pytest.approx(cell.forward_s, rel=1e-9)
        assert 0 < device.forward_s < cell.forward_s


@pytest.mark.parametrize(
    ("key", "value"), [("tensor", 1.5), ("regather", 0.5), ("host_forward_s", -1.0)]
)
def test_shares_that_are_none_are_refused(files: Path, key: str, value: float) -> None:
    """By file, key and value."""
    change(files, "overlap*.meta.json", lambda content: content["hiding"].update({key: value}))
    with pytest.raises(DocumentError, match=key):
        read_hardware_dir(files, num_nodes=1, gpus_per_node=8)


def _unnamed(content: dict[str, Any]) -> None:
    content.pop("stack", None)


def _measured(content: dict[str, Any]) -> None:
    _unnamed(content)
    content.pop("hiding", None)
    content["estimated"] = False


def test_an_option_names_the_software_of_files(files: Path) -> None:
    """Of which the interval is then; the price is that of the files."""
    change(files, "*.meta.json", _unnamed)
    found = {}
    for stack in (None, STACK.name, "composer-fsdp"):
        spec, profile, hardware = load_inputs(inputs(files, stack=stack), OPTIONS)
        found[stack] = Planner.from_documents(spec, profile, hardware, OPTIONS).evaluate(PLAN)
    assert len({prediction.step_time_s for prediction in found.values()}) == 1
    widths = {}
    for stack, prediction in found.items():
        low, high = prediction.step_time_interval_s or (0.0, 0.0)
        widths[stack] = high / low
        if stack is not None:
            runs = load_accuracy().of(stack, experts=False, site_known=False)
            assert (low, high) == pytest.approx(runs.interval_s(prediction.step_time_s))
    # of no software is what may be of any: as wide as the widest
    assert widths[None] == max(widths.values()) > min(widths.values())
    named = stack_source(load_inputs(inputs(files, stack=STACK.name), OPTIONS)[1].sources)
    assert named is not None
    assert named.notes == (NAMED_BY_OPTION,)


def test_an_option_that_contradicts_files_is_refused(files: Path) -> None:
    """They know whose they are."""
    with pytest.raises(OptionError, match=r"composer-fsdp contradicts .* megatron-core"):
        load_inputs(inputs(files, stack="composer-fsdp"), OPTIONS)


@pytest.mark.parametrize("stack", [None, STACK.name])
def test_measured_files_have_no_interval_of_estimates(files: Path, stack: str | None) -> None:
    """Whoever names their software: published runs say how far estimates are off."""
    change(files, "*.meta.json", _measured)
    spec, profile, hardware = load_inputs(inputs(files, stack=stack), OPTIONS)
    assert not profile.estimated
    assert stacks_of(profile.sources) == ([] if stack is None else [stack])
    found = Planner.from_documents(spec, profile, hardware, OPTIONS).evaluate(PLAN)
    assert (found.step_time_interval_s, found.interval_of) == (None, ())


@pytest.mark.parametrize("stack", [None, STACK.name])
def test_measured_times_on_an_estimated_cluster(files: Path, stack: str | None) -> None:
    """Have the interval of estimates of their software, if it is known."""
    change(files, "*.meta.json", _measured)
    mixed = replace(inputs(files, stack=stack), hardware="a100-80gb:1x8")
    spec, profile, hardware = load_inputs(mixed, OPTIONS)
    found = Planner.from_documents(spec, profile, hardware, OPTIONS).evaluate(PLAN)
    if stack is None:
        assert found.step_time_interval_s is None
        return
    assert found.interval_of == (PUBLISHED_RUNS,)
    assert hardware.overlap_coefficient == STACK.overlap_coefficient


def test_a_cluster_is_of_the_software_that_times_name(files: Path) -> None:
    """Where it is estimated beside them, and nobody says another."""
    hardware = load_inputs(replace(inputs(files), hardware="a100-80gb:1x8"), OPTIONS)[2]
    assert hardware.hiding == STACK.hiding


def test_files_of_two_trainers_are_of_neither() -> None:
    """Their estimates have the widest interval."""
    two = [Source(role="software stack", path=name) for name in ("megatron-core", "composer-fsdp")]
    widest = load_accuracy().of("", experts=False, site_known=False)
    assert class_of_sources(two, experts=False) == widest
    assert class_of_sources(two[:1], experts=False).stack == "megatron-core"
