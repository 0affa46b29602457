"""Command lines in every spelling, and what is said about those that cannot be read."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, strategies as st

from autopar.command.aliases import alias_tables
from autopar.command.dialect import normalise
from autopar.command.fields import convert
from autopar.command.options import Command
from autopar.errors import OptionError
from autopar.units import GIB
from search.commands.search import COMMAND
from search.request.options import OutputSpec, SearchOptions, Shorthands, StackSizes
from search.request.request import InputSpec, Request, build_request

ROWS = {row.name: row for row in COMMAND.rows}
FAMILY = alias_tables().families["search"]


def request(*arguments: str) -> Request:
    """Return the request of a command line."""
    raw = COMMAND.read(arguments, lambda _: None)
    assert raw is not None
    return build_request(raw)


def test_every_field_is_an_option() -> None:
    """No field is out of reach of the command line, but for what is read from a file."""
    for cls in (SearchOptions, InputSpec, OutputSpec, Shorthands, StackSizes):
        fields = {field.name for field in dataclasses.fields(cls)}
        known = {row.field for row in Command(name="", intro="", fills=(cls,)).rows}
        assert fields - known == ({"calibration"} if cls is SearchOptions else set())


def test_defaults_are_those_of_search_options() -> None:
    """An empty command line is the documented default."""
    found = request()

    assert found.options == SearchOptions()
    assert found.inputs == InputSpec()
    assert found.given == {}
    assert found.output.config_path == "configs"


@pytest.mark.parametrize(
    ("arguments", "field", "expected"),
    [
        (["--memory-constraint", "40"], "memory_constraint_bytes", 40 * GIB),
        (["--memory_upper_limit", "40"], "memory_constraint_bytes", 40 * GIB),
        (
            ["++search_engine.hardware_info.memory_constraint=40"],
            "memory_constraint_bytes",
            40 * GIB,
        ),
        (["--max_tp_size", "4"], "max_tp_deg", 4),
        (["--max_pp_size", "4"], "max_pp_deg", 4),
        (["--bsz_step", "16"], "bsz_scale", 16),
        (["--search_granularity", "coarse-grained"], "fine_grained_mode", False),
        (["fine_grained_mode=0"], "fine_grained_mode", False),
        (["--disable_fsdp", "1"], "disable_sdp", True),
        (["--mixed_precision_type", "fp16"], "mixed_precision", "fp16"),
        (["--pipeline_type", "pipedream_flush"], "pipeline_type", "1f1b"),
        (["--pipeline_type", "gpipe"], "pipeline_type", "gpipe"),
        (["--profile_mode", "sequence"], "time_profile_mode", "sequence"),
        (["--profile_mode", "sequence"], "memory_profile_mode", "sequence"),
        (["--profile_mode", "batch"], "memory_profile_mode", "static"),
        (["--memory_profile_mode", "hybrid"], "memory_profile_mode", "sequence"),
        (
            ["--profile-mode", "batch", "--time-profile-mode", "static"],
            "time_profile_mode",
            "static",
        ),
        (["--no_global_memory_buffer"], "global_memory_buffer", False),
        (["--no-async-grad-reduce"], "async_grad_reduce", False),
        (["--no-sequence-parallel"], "sequence_parallel", False),
        (["--no-tp-overlap"], "tp_overlap", False),
        (["--settle_bsz", "-1"], "settle_bsz", None),
        (["--min-bsz", "64"], "max_bsz", 64),
        (["--max-bsz", "4"], "min_bsz", 4),
        (["--pp-division", "9,7,8,8"], "pp_division", (9, 7, 8, 8)),
        (["--pin", "tp=2", "--pin", "pp=4"], "pin", ("tp=2", "pp=4")),
        (["--reserve", "0"], "reserve_fraction", 0.0),
        (["--context-gib", "0.5"], "context_bytes", GIB / 2),
        (["--time-limit", "2.5"], "time_limit_s", 2.5),
    ],
)
def test_spelling_reaches_its_field(arguments: list[str], field: str, expected: object) -> None:
    """Kebab case, underscores, overrides and names of peers mean the same."""
    assert getattr(request(*arguments).options, field) == expected


@pytest.mark.parametrize(
    ("arguments", "field", "expected"),
    [
        (["--layernum_list", "24,24"], "num_layers", (24, 24)),
        (["--layer_num_list", "24", "24"], "num_layers", (24, 24)),
        (["--layernum", "16"], "num_layers", (16,)),
        (["--hidden_size_list", "4096"], "hidden_size", (4096,)),
        (["--seqlen_list", "[512,512]"], "seq_length", (512, 512)),
        (["--num_gpus_per_node", "4"], "num_gpus_per_node", 4),
        (["--nproc-per-node", "4"], "num_gpus_per_node", 4),
        (["--num_nodes", "2"], "num_nodes", 2),
        (["--gpus", "64"], "world_size", 64),
        (["--allreduce_coe_path", "a.json"], "allreduce_bandwidth_config_path", "a.json"),
        (["--p2p_coe_path", "a.json"], "p2p_bandwidth_config_path", "a.json"),
        (["--time_profile_data_path", "a.json"], "time_profiling_path", "a.json"),
        (["--memory_profile_data_path", "a.json"], "memory_profiling_path", "a.json"),
        (["--parameter-bytes", "2"], "parameter_bytes", 2),
        (["--bandwidth-unit", "MiB/ms"], "bandwidth_unit", "MiB/ms"),
    ],
)
def test_spelling_reaches_the_inputs(arguments: list[str], field: str, expected: object) -> None:
    """PaddleNLP's lists and paths too."""
    assert getattr(request(*arguments).inputs, field) == expected


@pytest.mark.parametrize("name", sorted(FAMILY.planned))
def test_options_for_what_is_searched_name_options_that_work(name: str) -> None:
    """The remedy is a command line that is read, with the number given."""
    with pytest.raises(OptionError) as caught:
        normalise([f"--{name}", "4"], COMMAND.rows, FAMILY)

    remedy = caught.value.remedy or ""
    if name.startswith(("data-", "sharding-")):  # no number of theirs can be fixed
        assert "--zero 3" in remedy
        return
    if name.startswith(("num-layers-", "local-")):  # with another number
        assert remedy.startswith("Use --")
        return
    found = request(*remedy.removeprefix("Use ").split()).options
    assert [rule.partition("=")[2] for rule in found.pin] == ["4"]


@pytest.mark.parametrize("name", sorted(FAMILY.ignored))
def test_options_without_a_meaning_are_accepted_with_a_notice(name: str) -> None:
    """One line each, and their value is not taken for something else."""
    written = name.replace("-", "_")
    normal, notices = normalise([f"--{written}", "1", "--min-bsz", "16"], COMMAND.rows, FAMILY)

    assert normal == ["--min-bsz", "16"]
    assert notices == [f"--{written} is ignored: {FAMILY.ignored[name]}"]


def test_only_what_shapes_the_result_is_kept() -> None:
    """Time limits and output paths do not reach the plan file."""
    found = request(
        "--time-limit",
        "2",
        "--json",
        "-",
        "--output-config-path",
        "x",
        "--min-bsz",
        "16",
        "--pin",
        "tp=2",
    )

    assert found.given == {"min-bsz": "16", "pin": ["tp=2"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fine_grained_mode", "-1"], "--fine_grained_mode: expected 0 or 1, got '-1'"),
        (["--search_granularity", "3"], "--search_granularity: expected 0 or 1, got '3'"),
        (["--tensor_parallel_degree", "four"], "--tp: expected an integer of at least 1"),
        (["--pipeline-parallel-degree"], "--pipeline-parallel-degree"),
        (["--vocab_tp", "four"], "--pin"),
        (["--model="], "--model: expected a text, got ''"),
    ],
)
def test_words_of_peers_are_refused_as_they_were_typed(arguments: list[str], message: str) -> None:
    """What other options say of bad values is in tests/golden/bad_input.md."""
    with pytest.raises(OptionError, match=message):
        request(*arguments)


@given(row=st.sampled_from(COMMAND.rows), text=st.text(max_size=12))
def test_any_value_converts_or_is_one_sentence(row, text: str) -> None:
    """No text makes a conversion fail in another way."""
    try:
        convert(row, text)
    except OptionError as error:
        message = str(error)
    else:
        message = ""

    assert "\n" not in message


@given(st.lists(st.text(alphabet="-abcdeinmpstxz_=01. ", max_size=12), max_size=4))
def test_any_command_line_is_read_or_one_sentence(arguments: list[str]) -> None:
    """The same for whole command lines."""
    try:
        normalise(arguments, COMMAND.rows, FAMILY)
    except OptionError as error:
        message = str(error)
    else:
        message = ""

    assert "\n" not in message
