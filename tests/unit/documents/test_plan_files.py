"""Strategy and plan files: every spelling in, the documented one out, errors in a sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, strategies as st

from autopar.documents.plan import read_strategy, write_strategy
from autopar.documents.strategy import (
    galvatron_document,
    paddle_document,
    strategy_document,
    strategy_file_name,
)
from autopar.errors import DocumentError, InputError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Module, PipelineType, Plan, VocabStrategy
from tests.data.read import galvatron_answers
from tests.often import often
from tests.unit.cli_results import PLAN

NEWEST_KEYS = [
    "pp_deg",
    "tp_sizes_enc",
    "tp_consecutive_flags",
    "dp_types_enc",
    "use_sp",
    "checkpoint",
    "world_size",
    "global_bsz",
    "chunks",
    "pp_division",
    "pipeline_type",
    "default_dp_type",
    "vtp",
    "vsp",
    "embed_sdp",
    "vocab_sdp",
]
PADDLE = {
    "pp_size": 2,
    "vtp": 2,
    "vsp_flag": 0,
    "embed_sdp": 1,
    "global_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "dp_size_list": "2,2,4,4",
    "sharding_stage_list": "3,2,2,2",
    "tp_size_list": "2,2,1,1",
    "usp_flag_list": "0,1,0,0",
    "recompute_list": "1,0,0,0",
    "pp_stage_idx_list": "0,0,1,1",
}


def test_document_has_exactly_the_documented_keys() -> None:
    """Keys, order and spelling are those of the newest release plus the runtime's vocab_sdp."""
    document = strategy_document(PLAN)

    assert list(document) == NEWEST_KEYS
    assert document["tp_sizes_enc"] == "2,2,2,2"
    assert document["dp_types_enc"] == "1,0,0,0"
    assert document["checkpoint"] == "1,0,0,0"
    assert document["pp_division"] == "2,2"
    assert document["pipeline_type"] == "pipedream_flush"
    assert document["embed_sdp"] == document["vocab_sdp"] == 1


def test_context_degrees_are_written_only_where_there_are_some() -> None:
    """`cp_sizes_enc` appears with the first layer whose context degree exceeds 1."""
    layers = (LayerStrategy(tp=1, cp=2), *PLAN.layers[1:])
    document = strategy_document(replace(PLAN, layers=layers))

    assert document["cp_sizes_enc"] == "2,1,1,1"
    assert "cp_sizes_enc" not in strategy_document(PLAN)


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"recompute": ("core_attn", "mlp")}, "recomputation of core_attn, mlp"),
        ({"pipeline_type": "interleaved", "num_chunks": 2}, "interleaved, 2 chunks a stage"),
    ],
)
def test_what_the_strategy_file_cannot_say_is_named(changes: dict[str, Any], lost: str) -> None:
    """Our own file says it; nothing is left out of a launcher's file without a word."""
    plan = changed(**changes)

    assert read_strategy(strategy_document(plan)) == plan
    with pytest.raises(InputError, match=f"Galvatron's strategy file cannot contain .*{lost}"):
        galvatron_document(plan)


def test_degrees_of_experts_are_in_the_newest_strategy_file() -> None:
    """Galvatron has keys for them, and for the vocabulary's context degree; PaddleNLP has none."""
    plan = replace(changed(ep=4), vocab=VocabStrategy(cp=2))

    document = galvatron_document(plan)
    assert document["ep_sizes_enc"] == "4,4,4,4"
    assert document["tp_of_ep_sizes_enc"] == "1,1,1,1"
    assert document["vcp"] == 2
    assert read_strategy(document) == plan
    with pytest.raises(InputError, match="expert degree 4, context degree 2 of embedding"):
        paddle_document(plan)


def test_expert_degrees_that_follow_from_others_are_not_given() -> None:
    """Experts of a tensor group are divided as its other weights where nothing else is said."""
    document = strategy_document(PLAN) | {"ep_sizes_enc": "1,1,1,1"}

    assert read_strategy(document | {"tp_of_ep_sizes_enc": "2,2,2,2"}) == PLAN
    assert read_strategy(document | {"tp_of_ep_sizes_enc": "1,1,1,1"}) == changed(etp=1)


def changed(**fields: Any) -> Plan:
    """Return the plan with some fields of it, or of all its layers, changed."""
    ours = {key: fields.pop(key) for key in ("pipeline_type", "num_chunks") if key in fields}
    layers = tuple(replace(layer, **fields) for layer in PLAN.layers)
    return replace(PLAN, layers=layers, **ours)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw plans, legal or not, in their canonical spelling."""
    p = draw(st.integers(1, 3))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=p, max_size=p)))
    ranks = draw(st.integers(2, 12))
    layers = []
    for _ in range(sum(sizes)):
        tp = draw(st.integers(1, 8))
        layers.append(
            LayerStrategy(
                tp=tp,
                ulysses=tp > 1 and draw(st.booleans()),
                cp=draw(st.integers(1, 3)),
                zero3=draw(st.booleans()),
                checkpoint=draw(st.booleans()),
                strided=1 < tp < ranks and draw(st.booleans()),
            )
        )
        if draw(st.booleans()):
            modules = draw(st.sets(st.sampled_from(get_args(Module))))
            ep, etp = draw(st.integers(1, 4)), draw(st.none() | st.integers(1, 2))
            refined = replace(layers[-1], ep=ep, recompute=tuple(sorted(modules)))
            # a degree that follows from the others is not given
            given = None if etp == refined.expert_tp else etp
            layers[-1] = replace(refined, etp=given)
    vtp = draw(st.integers(1, 8))
    v = draw(st.integers(1, 2))
    chunks = draw(st.lists(st.integers(0, 4), min_size=p * v, max_size=p * v) | st.just([]))
    return Plan(
        world_size=ranks * p,
        num_stages=p,
        stage_sizes=sizes,
        layers=tuple(layers),
        vocab=VocabStrategy(
            tp=vtp,
            ulysses=vtp > 1 and draw(st.booleans()),
            zero3=draw(st.booleans()),
            cp=draw(st.integers(1, 2)),
        ),
        global_batch=draw(st.integers(1, 512)),
        num_microbatches=draw(st.integers(1, 64)),
        pipeline_type=draw(st.sampled_from(get_args(PipelineType))),
        default_dp_type=draw(st.sampled_from(["ddp", "zero2"])),
        num_chunks=v,
        chunk_sizes=tuple(chunks),
    )


@given(plan=plans())
def test_reading_back_returns_the_plan(plan: Plan) -> None:
    """A strategy document holds everything a plan says."""
    assert read_strategy(strategy_document(plan)) == plan


def test_files_are_read_and_written_byte_for_byte_alike(tmp_path: Path) -> None:
    """Writing twice gives the same bytes, and no temporary file stays."""
    write_strategy(PLAN, tmp_path / "deep" / "a.json")
    write_strategy(PLAN, tmp_path / "deep" / "b.json")

    a, b = (tmp_path / "deep" / name for name in ("a.json", "b.json"))
    assert a.read_bytes() == b.read_bytes()
    assert read_strategy(a) == PLAN
    assert sorted(path.name for path in a.parent.iterdir()) == ["a.json", "b.json"]


def test_unwritable_target_is_one_sentence(tmp_path: Path) -> None:
    """A path below a file cannot be made."""
    (tmp_path / "file").write_text("")

    with pytest.raises(DocumentError, match=r"cannot be written.*--output-config-path"):
        write_strategy(PLAN, tmp_path / "file" / "a.json")


def test_older_releases_lack_keys() -> None:
    """v2.4 has no world_size; v2.0 no vocabulary keys and no division either."""
    document = strategy_document(PLAN)
    v24 = {k: v for k, v in document.items() if k not in ("world_size", "vocab_sdp")}
    oldest = {k: v for k, v in v24.items() if k not in ("use_sp", "vtp", "vsp", "embed_sdp")}
    del oldest["pp_division"]

    assert read_strategy(v24, world_size=8) == PLAN
    assert read_strategy(oldest, world_size=8) == replace(PLAN, vocab=VocabStrategy())
    with pytest.raises(DocumentError, match=r"'world_size'.*--nodes"):
        read_strategy(v24)


def test_oldest_files_divide_evenly_with_the_rest_last() -> None:
    """Without pp_division the remainder goes to the last stage."""
    document = strategy_document(PLAN) | {"pp_deg": 3}
    del document["pp_division"]

    assert read_strategy(document).stage_sizes == (1, 1, 2)


def test_flags_without_a_meaning_are_dropped() -> None:
    """One rank is neither Ulysses nor strided; a group of the whole stage is consecutive."""
    document = strategy_document(PLAN) | {
        "tp_sizes_enc": "1,2,4,2",
        "tp_consecutive_flags": "0,0,0,1",
        "use_sp": "1,1,0,0",
    }

    layers = read_strategy(document).layers

    assert [s.strided for s in layers] == [False, True, False, False]
    assert [s.ulysses for s in layers] == [False, True, False, False]


def test_paddle_file_is_read() -> None:
    """PaddleNLP's fine-grained file names the ZeRO stage of every layer and no world size."""
    plan = read_strategy(PADDLE)

    assert plan.world_size == 8
    assert plan.default_dp_type == "zero2"
    assert plan.stage_sizes == (2, 2)
    assert plan.layers[0] == LayerStrategy(tp=2, zero3=True, checkpoint=True)
    assert plan.layers[1] == LayerStrategy(tp=2, ulysses=True)
    assert plan.vocab == VocabStrategy(tp=2, zero3=True)
    assert (plan.global_batch, plan.num_microbatches) == (16, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp_size_list": "2,2,2,4"}, "differs between layers"),
        ({"sharding_stage_list": "0,2,3,3"}, "stages 0, 2, 3.*one of 0"),
        ({"sharding_stage_list": "1,1,2,3"}, "stages 1, 2, 3.*one of 0"),
        ({"pp_stage_idx_list": "0,1,0,1"}, "in order"),
        ({"pp_stage_idx_list": "0,0,0,0"}, "every stage used"),
        ({"world_size": 16}, r"tp\(2\) \* dp\(2\) \* pp\(2\) = 8 != world_size\(16\)"),
    ],
)
def test_bad_paddle_file(changes: dict[str, object], message: str) -> None:
    """What a plan cannot express or what contradicts itself is refused with the arithmetic."""
    with pytest.raises(DocumentError, match=message):
        read_strategy({**PADDLE, **changes})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pp_deg", 3, "pp_deg"),
        ("tp_sizes_enc", "2,x,2,2", "'tp_sizes_enc'.*entry 1.*got 'x'"),
        ("tp_sizes_enc", "2,-2,2,2", "'tp_sizes_enc'.*entry 1"),
        ("tp_sizes_enc", "", "'tp_sizes_enc'.*got ''"),
        ("tp_sizes_enc", {}, "'tp_sizes_enc'"),
        ("dp_types_enc", "1,0,0,2", "'dp_types_enc'.*0 or 1.*entry 3.*'2'"),
        ("default_dp_type", 1, "'ddp' or 'zero1' or 'zero2', got 1"),
        ("vsp", 2, "'vsp'.*0 or 1, got 2"),
        ("vcp", 0, "'vcp'.*positive integer, got 0"),
        ("ep_sizes_enc", "1,1,2", "3 entries for 4 layers"),
        (
            "recompute_modules",
            "none,none,mlp,attn",
            "none or modules of core_attn.*entry 3.*'attn'",
        ),
        ("recompute_modules", "mlp", "1 entry for 4 layers"),
        ("vpp_division", "1,-1", "'vpp_division'.*a number of layers as entry 1"),
        ("global_bsz", 10**40, "'global_bsz'"),
    ],
)
def test_bad_value_is_one_sentence(key: str, value: object, message: str) -> None:
    """Key, value and what was expected; `tests/e2e/bad_input_table.py` has further ones."""
    with pytest.raises(DocumentError, match=message) as caught:
        read_strategy(strategy_document(PLAN) | {key: value})

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "autopar-plan",}', "Remove the comma before }"),
        ('{"format": "other", "version": 1}', "'format'.*expected 'autopar-plan'"),
        ('{"format": "autopar-plan", "version": 2}', "'version'.*reads up to 1"),
        ('{"format": "autopar-plan", "version": "1"}', "'version'.*positive integer"),
        ('{"format": "autopar-plan", "version": 1, "plan": null}', "no plan is given"),
        ('{"format": "autopar-plan", "version": 1, "plan": 3}', "'plan'.*expected an object"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, message: str) -> None:
    """Unusable files are refused before their content is looked at."""
    path = tmp_path / "plan.json"
    path.write_text(text)

    with pytest.raises(DocumentError, match=message):
        read_strategy(path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@often(
    25,
    100,
    base=st.sampled_from([strategy_document(PLAN), PADDLE]),
    changes=st.dictionaries(
        st.sampled_from([*NEWEST_KEYS, *PADDLE, "format", "version", "plan"]), JSON_VALUES
    ),
    dropped=st.sets(st.sampled_from(NEWEST_KEYS), max_size=3),
)
def test_no_document_raises_anything_but_a_document_error(
    base: dict[str, object], changes: dict[str, object], dropped: set[str]
) -> None:
    """Whatever a file holds, the reader answers with a plan or with one sentence."""
    document = {k: v for k, v in {**base, **changes}.items() if k not in dropped}
    try:
        plan = read_strategy(document, world_size=8)
    except DocumentError as error:
        message = str(error)
    else:
        message = ""
        assert sum(plan.stage_sizes) == len(plan.layers)

    assert "\n" not in message


@pytest.mark.parametrize(
    ("settle_bsz", "disabled", "expected"),
    [
        (None, (), "24GB_bf16_box_seq512-128.json"),
        (64, (), "24GB_bf16_bsz64_box_seq512-128.json"),
        (64, ("tp", "ckpt"), "24GB_bf16_bsz64_tp_ckpt_off_box_seq512-128.json"),
    ],
)
def test_file_name(settle_bsz: int | None, disabled: tuple[str, ...], expected: str) -> None:
    """It begins as the documented one, and goes on with what else makes a plan another one."""
    name = strategy_file_name(
        model_name="toy",
        num_nodes=1,
        gpus_per_node=8,
        memory_gib=24.0,
        precision="bf16",
        settle_bsz=settle_bsz,
        disabled=disabled,
        hardware_name="box",
        seq_lengths=(512, 128, 512),
    )

    assert name == f"galvatron_config_toy_1nodes_8gpus_per_node_{expected}"


def test_a_file_name_means_nothing_to_a_shell_and_is_short() -> None:
    """Models are called by people, devices by their makers."""
    name = strategy_file_name(
        model_name="org/It's $(a) *model?; " + 300 * "x",
        num_nodes=1,
        gpus_per_node=8,
        memory_gib=79.647,
        precision="bf16",
        settle_bsz=64,
        disabled=["dp", "tp", "pp", "sdp", "ckpt", "tpconsec"],
        hardware_name="NVIDIA H100 80GB HBM3 [MIG] & more " + 100 * "y",
        seq_lengths=range(4096, 4296),
        engine="paddlenlp",
        digest="0123abcd",
    )
    assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
    assert len(name) < 255 - len("autopar_plan_.bak-100")
    assert name.endswith("_paddlenlp_0123abcd.json")


def test_published_strategies_survive_a_round_trip(data_dir: Path) -> None:
    """Every strategy that the peer answered is written back with the same values."""
    answers = galvatron_answers(data_dir)
    files = [answer["strategy_file"] for answer in answers if answer["strategy_file"]]

    assert len(files) == 14
    for original in files:
        written = strategy_document(read_strategy(original, world_size=8))
        assert {key: written[key] for key in original} == original
