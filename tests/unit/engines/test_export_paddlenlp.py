"""PaddleNLP: its strategy file and launch from a plan, and its two result files as plans."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from autopar.documents.plan import read_strategy
from autopar.documents.spec import load_spec
from autopar.errors import DocumentError, InputError, UnsupportedError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from search.engines.paddlenlp.plan import import_paddlenlp, lower
from search.engines.text import Configuration, read_configuration
from tests.export_cases import HETEROGENEOUS, SMALL, job, legal_plans
from tests.often import often

KEPT = replace(HETEROGENEOUS, layers=tuple(replace(s, strided=False) for s in HETEROGENEOUS.layers))
LISTS = {
    "dp_size_list": "4,4,2,2,4,4,8,8",
    "sharding_stage_list": "2,2,2,3,2,2,3,2",
    "tp_size_list": "2,2,4,4,2,2,1,1",
    "usp_flag_list": "0,0,0,0,1,1,0,0",
    "recompute_list": "0,0,1,0,0,1,0,0",
    "pp_stage_idx_list": "0,0,0,1,1,1,1,1",
}


def exported(plan: Plan) -> dict[str, object]:
    """Return the strategy file of a plan that loses nothing."""
    lowered = lower(job(plan))
    assert lowered.losses == ()
    assert lowered.plan == plan
    document: dict[str, object] = json.loads(lowered.files["fine_grained_config.json"])
    return document


def flags(plan: Plan, **fields: object) -> dict[str, str]:
    """Return the flags of a launch with their words."""
    text = lower(job(plan, **fields)).launch.replace("\\\n", "")
    return {
        name: words.strip() for name, words in re.findall(r"--(\w+) ([^-][^\n]*?) +(?=--)", text)
    }


def test_a_plan_is_what_its_runtime_reads() -> None:
    """Texts of comma lists by layer, as `generate_meshs_fine_grained` splits them."""
    assert exported(KEPT) == {
        "pp_size": 2,
        "vtp": 4,
        "vsp_flag": 0,
        "embed_sdp": 1,
        "global_batch_size": 64,
        "gradient_accumulation_steps": 4,
        **LISTS,
    }


def test_the_launch_says_the_rest() -> None:
    """Samples come in by the embedding's mesh: micro-batch and degrees are those of it."""
    found = flags(KEPT)
    assert found["per_device_train_batch_size"] == "8"  # 64 / 4 micro-batches / 2 data ranks
    assert found["sharding_parallel_degree"] == "2"
    assert (found["tensor_parallel_degree"], found["pipeline_parallel_degree"]) == ("4", "2")
    assert (found["sharding"], found["recompute"]) == ("stage2", "true")
    assert found["fine_grained_config_path"] == "fine_grained_config.json"
    assert found["num_key_value_heads"] == "4"
    assert "gradient_sync_after_accumulate" in found["data_parallel_config"]
    each = flags(KEPT, async_grad_reduce=False, precision="fp16")
    assert "gradient_sync_after_accumulate" not in each["data_parallel_config"]
    assert (each["amp_master_grad"], each["fp16"]) == ("true", "true")
    assert flags(KEPT, fp32_gradients=False)["amp_master_grad"] == "false"
    assert flags(KEPT, precision="fp32")["amp_master_grad"] == "false"  # nothing is mixed
    ddp = replace(KEPT, layers=(LayerStrategy(),) * 8, vocab=VocabStrategy(), default_dp_type="ddp")
    assert "sharding" not in flags(ddp)
    ulysses = replace(KEPT, vocab=VocabStrategy(tp=4, ulysses=True))
    assert (found["usp_flag"], flags(ulysses)["usp_flag"]) == ("0", "1")
    assert flags(replace(ddp, pipeline_type="gpipe"))["pipeline_schedule_mode"] == "FThenB"


def test_the_launch_is_a_command(tmp_path: Path) -> None:
    """A shell takes it; what is not set ends it, and a folder of weights is one word."""
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    text = lower(job(KEPT)).launch
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NODE_RANK": "1", "MASTER_ADDR": "a"}
    run = ["bash", "-c", f"set -euo pipefail\n{text}"]
    failed = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert "set PADDLENLP_PATH" in failed.stderr
    environment |= {"PADDLENLP_PATH": "/p", "DATA_DIR": "/d", "LOAD": "/my weights"}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[words.index("--resume_from_checkpoint") + 1] == "/my weights"
    assert words[words.index("--rank") + 1] == "1"


@often(40, 400, legal_plans())
def test_what_it_can_say_comes_back(plan: Plan) -> None:
    """Any legal plan is lowered to a legal one, whose file is read as that plan again."""
    try:
        lowered = lower(job(plan))
    except InputError:
        # sequences that tensor groups of its blocks do not divide
        assert violations(plan, SMALL, sequence_parallel=True) or any(x.cp > 1 for x in plan.layers)
        return
    assert not violations(lowered.plan, SMALL, sequence_parallel=True)
    assert (lowered.losses == ()) == (lowered.plan == plan)
    document = json.loads(lowered.files["fine_grained_config.json"])
    source = Configuration(path=Path("f.json"), flags=None, document=document)
    assert import_paddlenlp(source).plan == lowered.plan


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": HETEROGENEOUS.layers}, "tp_consecutive_flags"),
        ({"layers": (LayerStrategy(cp=2),) * 8, "vocab": VocabStrategy()}, "cp_sizes_enc"),
        ({"default_dp_type": "ddp"}, "default_dp_type"),
    ],
)
def test_what_it_cannot_say_is_said(change: dict[str, object], field: str) -> None:
    """One loss each, with the key of the documented file."""
    lowered = lower(job(replace(KEPT, **change)))  # type: ignore[arg-type]
    assert [loss.field for loss in lowered.losses] == [field]
    assert lowered.search


def test_the_launch_is_read_with_its_file(tmp_path: Path) -> None:
    """A script names the strategy file and says the schedule."""
    plan = replace(KEPT, pipeline_type="gpipe")
    lowered = lower(job(plan))
    document = json.loads(lowered.files["fine_grained_config.json"])
    del document["pipeline_type"]  # as its own search writes the file
    (tmp_path / "fine_grained_config.json").write_text(json.dumps(document), encoding="utf-8")
    script = "python train.py --fine_grained_config_path fine_grained_config.json"
    for mode, kind in (("FThenB", "gpipe"), ("1F1B", "1f1b")):
        (tmp_path / "t.sh").write_text(f"{script} --pipeline_schedule_mode {mode}\n", "utf-8")
        found = import_paddlenlp(read_configuration(tmp_path / "t.sh")).plan
        assert found == replace(plan, pipeline_type=kind)
    (tmp_path / "launch.sh").write_text(lowered.launch, encoding="utf-8")
    assert import_paddlenlp(read_configuration(tmp_path / "launch.sh")).plan == plan
    (tmp_path / "t.sh").write_text(f"{script} --pipeline_schedule_mode VPP\n", "utf-8")
    with pytest.raises(DocumentError, match="plans have 1F1B or FThenB"):
        import_paddlenlp(read_configuration(tmp_path / "t.sh"))
    bare = import_paddlenlp(read_configuration(tmp_path / "fine_grained_config.json"))
    assert "the schedule" in bare.notes[0]


COARSE = {
    "bsz": 32,
    "accumulation_steps": 4,
    "strategy": "pp2_tp2_dp2_stage3_recompute1",
    "memory_cost": [1000.0, 900.0],
    "time_cost": 1.25,
    "throughput": 25.6,
}


def test_the_coarse_result_is_a_plan() -> None:
    """One strategy for as many layers as the model has; the rest of them on the last stage."""
    plan = read_strategy(COARSE, num_layers=5)
    assert plan.layers == (LayerStrategy(tp=2, zero3=True, checkpoint=True),) * 5
    assert (plan.stage_sizes, plan.world_size, plan.num_microbatches) == ((2, 3), 8, 4)
    assert plan.vocab == VocabStrategy(tp=2, zero3=True)
    zero2 = read_strategy(COARSE | {"strategy": "pp1_tp1_dp8_stage2_recompute0"}, num_layers=2)
    assert (zero2.default_dp_type, zero2.layers) == ("zero2", (LayerStrategy(),) * 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strategy": "pp2"}, "pp1_tp2_dp4_stage3_recompute0"),
        ({"strategy": "pp0_tp2_dp2_stage0_recompute0"}, "is 0"),
        ({"strategy": "pp1_tp2_dp4_stage1_recompute0"}, "sharding stage 1"),
        ({"strategy": "pp8_tp1_dp1_stage0_recompute0"}, "has 8 stages for 5 layers"),
        ({"bsz": -1}, "key 'bsz': expected a positive integer"),
        ({"speed": 1}, "unknown key"),
    ],
)
def test_an_unusable_coarse_result_is_refused(change: dict[str, object], said: str) -> None:
    """By its key."""
    with pytest.raises(DocumentError, match=re.escape(said)):
        read_strategy(COARSE | change, num_layers=5)


def test_a_coarse_result_needs_layers_and_its_gpus() -> None:
    """What it leaves out is asked for, what contradicts it is refused."""
    with pytest.raises(DocumentError, match=r"--model.*--num-layers"):
        read_strategy(COARSE)
    with pytest.raises(DocumentError, match=re.escape("= 8 != world_size(16)")):
        read_strategy(COARSE, num_layers=5, world_size=16)


@pytest.mark.parametrize("name", ["gpt2-xl", "bert-large", "t5-3b", "mixtral-8x7b"])
def test_other_blocks_are_refused(name: str) -> None:
    """The trainer builds Llama's blocks alone."""
    spec = load_spec(name)
    layers = (LayerStrategy(),) * spec.num_layers
    plan = replace(KEPT, layers=layers, stage_sizes=(spec.num_layers // 2,) * 2)
    with pytest.raises(UnsupportedError, match=f"Llama blocks, but {name} has "):
        lower(job(plan, spec))


def test_what_its_llama_has_not_is_said() -> None:
    """Sizes alone make the model: what is beside them in ours is a note; unknown ones are asked."""
    for name, number, said in (("llama2-7b", 32, ""), ("qwen2.5-7b", 28, "biases of the QKV")):
        spec = load_spec(name)
        layers = (LayerStrategy(),) * number
        plan = replace(KEPT, layers=layers, stage_sizes=(number // 2,) * 2)
        lowered = lower(job(plan, spec))
        assert "--num_hidden_layers" in lowered.launch
        lacking = [note for note in lowered.notes if "lacks" in note]
        assert any(said in note for note in lacking) if said else not lacking
        bare = lower(job(plan, replace(spec, vocab_size=None)))
        assert "${MODEL_ARGS:?" in bare.launch
