"""Galvatron: bytes of the strategy file, the GLOBAL mode's keys, the model's configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autopar.documents.plan import read_strategy
from autopar.documents.spec import load_spec
from autopar.records import replace
from autopar.run.plan import Plan
from search.engines.galvatron.plan import import_galvatron, lower, strategy_text
from search.engines.text import Configuration, load_yaml
from tests.export_cases import HETEROGENEOUS, job, legal_plans
from tests.often import often


@often(25, 100, legal_plans())
def test_strategy_files_keep_their_bytes(plan: Plan) -> None:
    """Read and written again, a file has the same bytes, and no plan loses anything."""
    lowered = lower(job(plan))
    text = lowered.files["galvatron_config.json"]

    assert (lowered.plan, lowered.losses) == (plan, ())
    assert strategy_text(read_strategy(json.loads(text))) == text
    assert read_strategy(json.loads(text)) == plan


@often(25, 100, legal_plans(uniform=True))
def test_global_keys_say_the_same(plan: Plan) -> None:
    """What the note names is, read as a GLOBAL configuration, the plan."""
    notes = [note for note in lower(job(plan)).notes if "GLOBAL mode" in note]
    if not notes:
        return
    found = dict(re.findall(r"runtime\.parallel\.(\w+)=(\S+)", notes[0]))
    parallel = {key: int(value) if value.isdigit() else value for key, value in found.items()}
    document = {
        "runtime": {
            "parallel": parallel,
            "model": {"num_layers": 8},
            "train": {"global_batch_size": plan.global_batch, "chunks": plan.num_microbatches},
        }
    }
    source = Configuration(path=Path("x.yaml"), flags=None, document=document)

    assert import_galvatron(source, world_size=plan.world_size).plan == plan


@pytest.mark.parametrize(
    ("values", "is_said"),
    [
        ({}, True),
        ({"reduce_in_fp32": False}, True),
        ({"reduce_in_fp32": 0}, True),
        ({"reduce_in_fp32": True}, False),
        ({"reduce_in_fp32": "1"}, False),
        ({"mixed_precision": "fp32"}, False),
    ],
)
def test_sums_in_the_precision_of_the_model_are_said(
    tmp_path: Path, values: dict[str, object], is_said: bool
) -> None:
    """Its default differs from what a search assumes, in both modes of its runtime."""
    said = ("no reduce_in_fp32: price it with --no-fp32-gradients",) if is_said else ()
    parallel = {"pp_deg": 1, "global_tp_deg": 2, **values}
    train = {"global_batch_size": 8, "chunks": 1}
    document = {"runtime": {"parallel": parallel, "model": {"num_layers": 8}, "train": train}}
    source = Configuration(path=tmp_path / "x.yaml", flags=None, document=document)
    assert import_galvatron(source, world_size=8).notes == said

    (tmp_path / "plan.json").write_text(strategy_text(HETEROGENEOUS), encoding="utf-8")
    named = {"runtime": {"parallel": {"galvatron_config_path": "plan.json", **values}}}
    source = Configuration(path=tmp_path / "x.yaml", flags=None, document=named)
    assert import_galvatron(source, world_size=16).notes == said


def test_plans_of_several_strategies_have_no_global_keys() -> None:
    """Nor have stages that the GLOBAL mode would divide otherwise."""
    uniform = replace(HETEROGENEOUS, layers=HETEROGENEOUS.layers[:1] * 8)

    for plan, named in (
        (HETEROGENEOUS, False),
        (uniform, False),
        (replace(uniform, stage_sizes=(4, 4)), True),
    ):
        assert any("GLOBAL mode" in note for note in lower(job(plan)).notes) == named


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama2-7b", {"rotary_base": 10000, "position_embedding_type": "rope"}),
        ("llama3-8b", {"rotary_base": 500000, "num_query_groups": 8}),
        ("llama3-8b", {"num_query_groups": 8, "gated_linear_unit": True, "add_qkv_bias": False}),
        ("qwen2.5-7b", {"add_bias_linear": False, "add_qkv_bias": True}),
        ("gpt2-xl", {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"}),
        ("mixtral-8x7b", {"num_moe_experts": 8, "moe_router_topk": 2}),
    ],
)
def test_model_configuration(name: str, expected: dict[str, object]) -> None:
    """The architecture in the names of GalvatronModelArgs."""
    spec = load_spec(name)
    plan = replace(
        HETEROGENEOUS,
        stage_sizes=(spec.num_layers // 2,) * 2,
        layers=HETEROGENEOUS.layers[:1] * spec.num_layers,
    )
    model = load_yaml(lower(job(plan, spec, model=name)).files["model_config.yaml"], "x")

    assert expected.items() <= model.items()
    assert model["num_layers"] == spec.num_layers


def test_other_architectures_keep_their_strategy() -> None:
    """For T5 the strategy file is written, and the model's is left to the user."""
    spec = load_spec("t5-3b")
    layers = HETEROGENEOUS.layers[:1] * spec.num_layers
    sizes = (spec.num_layers // 2,) * 2
    lowered = lower(job(replace(HETEROGENEOUS, layers=layers, stage_sizes=sizes), spec))

    assert "model_config.yaml" not in lowered.files
    assert any("model_config.yaml" in note for note in lowered.notes)


def test_an_unknown_rotary_base_is_asked_for() -> None:
    """The runtime skips a null and keeps its 10000, so the key comes from the environment."""
    lowered = lower(job(HETEROGENEOUS))

    assert "rotary_base" not in lowered.files["model_config.yaml"]
    assert "rotary_base: ${oc.env:ROTARY_BASE}\n" in lowered.files["train_dist.yaml"]
    assert "${ROTARY_BASE:?set ROTARY_BASE to the base" in lowered.launch
    assert any("ROTARY_BASE" in note for note in lowered.notes)


def test_scaled_frequencies_are_a_note() -> None:
    """Llama 3.1's are none of Galvatron's keys."""
    spec = load_spec("llama3-405b")
    layers = HETEROGENEOUS.layers[:1] * spec.num_layers
    lowered = lower(job(replace(HETEROGENEOUS, layers=layers, stage_sizes=(63, 63)), spec))

    assert any("no scaled rotary frequencies" in note for note in lowered.notes)


def test_a_rounded_base_is_a_note() -> None:
    """What the file says differs from the model, so it is said."""
    asked = job(HETEROGENEOUS)
    lowered = lower(replace(asked, spec=replace(asked.spec, rotary_base=10000.6)))

    assert "rotary_base: 10001\n" in lowered.files["model_config.yaml"]
    assert any("10001 instead of 10000.6" in note for note in lowered.notes)


@pytest.mark.parametrize("where", ["layer", "vocabulary"])
def test_context_degrees_have_no_script_of_the_old_release(where: str) -> None:
    """v2.4 ignores them and would run another plan, which the title of the export says."""
    first, *others = HETEROGENEOUS.layers
    plan = HETEROGENEOUS
    if where == "layer":
        plan = replace(plan, layers=(replace(first, tp=1, cp=2), *others))
    else:
        plan = replace(plan, vocab=replace(plan.vocab, tp=1, cp=2))
    plain, lowered = lower(job(HETEROGENEOUS)), lower(job(plan))
    assert "train_dist_v2.4.sh" in plain.files
    assert set(plain.files) - set(lowered.files) == {"train_dist_v2.4.sh"}
    assert "v2.4" in lowered.engine_version
    assert lowered.engine_version != plain.engine_version
    assert not any("v2.4 has no model" in note for note in lowered.notes)


def test_names_are_quoted() -> None:
    """A model's name is in one message of the shell script and one comment of the YAML."""
    asked = job(HETEROGENEOUS)
    lowered = lower(replace(asked, spec=replace(asked.spec, name="my\nmodel; ls")))
    script = lowered.files["train_dist_v2.4.sh"]
    assert "--model_size" in script
    assert lowered.files["model_config.yaml"].startswith("# my model; ls\n")


@pytest.mark.parametrize(
    ("name", "size", "where"),
    [
        ("llama2-7b", "llama-7b", "llama_hf"),
        ("llama2-13b", "llama-13b", "llama_hf"),
        ("llama2-70b", "llama2-70b", "llama_hf"),
        ("qwen2.5-7b", None, "the folder of the model"),  # its file has 28 KV heads
        ("qwen2.5-72b", "qwen2.5-72b", "llama_hf"),
        ("llama-30b", None, "the folder of the model"),  # its llama-30b has 48 layers of 8,192
        ("gpt-6.7b", "gpt-6.7b", "gpt_hf"),
        ("gpt-2.7b", "gpt-2.7b", "gpt_hf"),
        ("t5-3b", "t5-3B", "T5"),
        ("llama3-8b", None, "the folder of the model"),
        ("gpt2-xl", None, "the folder of the model"),
        ("bert-large", None, "the folder of the model"),
        ("mixtral-8x7b", None, "the folder of the model"),
    ],
)
def test_the_old_launch_names_a_model_that_it_has(name: str, size: str | None, where: str) -> None:
    """By sizes, not by our name; what it does not have is asked for, as other files are."""
    spec = load_spec(name)
    layers = HETEROGENEOUS.layers[:1] * spec.num_layers
    sizes = (spec.num_layers // 2,) * 2
    lowered = lower(job(replace(HETEROGENEOUS, layers=layers, stage_sizes=sizes), spec))
    script = lowered.files["train_dist_v2.4.sh"]
    assert f"from {where if size is None else 'galvatron/models/' + where} there" in script
    if size is None:
        assert '--model_size "${MODEL_SIZE:?' in script
        assert any("MODEL_SIZE" in note for note in lowered.notes)
        assert "--set_layernum_manually 1" in script
    else:
        assert f"--model_size {size} " in script
        assert "--set_layernum_manually 0" in script
        assert "layers " not in script


def test_another_number_of_layers_is_said() -> None:
    """Of each side where there are two."""
    for name, counts, flags in (
        ("llama2-7b", (16,), "--num_hidden_layers 16"),
        ("t5-3b", (12, 6), "--num_encoder_layers 12 --num_decoder_layers 6"),
    ):
        spec = load_spec(name, num_layers=counts)
        total = sum(counts)
        layers = HETEROGENEOUS.layers[:1] * total
        plan = replace(HETEROGENEOUS, layers=layers, stage_sizes=(total - 8, 8))
        script = lower(job(plan, spec)).files["train_dist_v2.4.sh"]
        words = " ".join(script.replace("\\\n", "").split())
        assert f"--set_layernum_manually 1 {flags} --set_seqlen_manually 1" in words


def test_no_launch_names_a_file_that_is_not_written() -> None:
    """Where the model's file is left to the user, the launch asks for it."""
    spec = load_spec("t5-3b")
    layers = HETEROGENEOUS.layers[:1] * spec.num_layers
    sizes = (spec.num_layers // 2,) * 2
    lowered = lower(job(replace(HETEROGENEOUS, layers=layers, stage_sizes=sizes), spec))
    assert "${MODEL_CONFIG:?" in lowered.launch
    assert "model_config_path: ${oc.env:MODEL_CONFIG}\n" in lowered.files["train_dist.yaml"]
    own = lower(job(HETEROGENEOUS))
    assert "${MODEL_CONFIG:?" not in own.launch
    assert 'MODEL_CONFIG="$PWD/model_config.yaml"' in own.launch
