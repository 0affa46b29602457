"""What trainers refuse, or run as another launch, and a search therefore does not have.

Each row is a rule of the trainer's own source; a launch beside it that keeps the rule is there.
"""

from __future__ import annotations

import re
import time

import pytest

from autopar.errors import InputError
from autopar.run.rules import RuleError
from search.commands import search as search_command
from search.engines.candidate import Candidate, Constraints
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.table import writer_of
from search.planning.uniform.answer import answer, open_launches, target_of
from search.planning.uniform.best_first import UniformSearch
from search.request.request import build_request

pytestmark = pytest.mark.whole

_SMALL = {"num-layers": "4", "global-batch-size": "64", "seq-length": "4096"}
_DENSE = {"model": "llama3-8b", **_SMALL}
_MIXTURE = {"model": "mixtral-8x7b", **_SMALL}
_WHOLE = {"num-layers": "32"}
"""All layers: job files of torchtitan name its own models."""


def _best(**given: str) -> Candidate:
    words = {key.replace("_", "-"): value for key, value in given.items()}
    best = answer(open_launches(build_request({**words, "top": "0"}))).best
    assert best is not None
    assert best.best is not None
    return best.best.choice


@pytest.mark.parametrize(
    ("given", "said"),
    [
        # runtime/engine.py of DeepSpeed: the compatibility has not been validated
        (
            {**_DENSE, "engine": "deepspeed", "hardware": "h100:1x8", "tp": "2", "zero": "3"},
            "--zero 0",
        ),
        # maybe_enable_amp of torchtitan: without sharded weights there is no mixed precision
        (
            {**_DENSE, **_WHOLE, "engine": "torchtitan", "hardware": "h100:1x8", "tp": "8"},
            "--tp 2",
        ),
        (
            {**_DENSE, **_WHOLE, "engine": "torchtitan", "hardware": "h100:1x4", "pp": "4"},
            "--pp 1",
        ),
        # kernels that write into the memory of neighbours
        (
            {**_DENSE, "engine": "megatron", "hardware": "h100:2x8", "tp": "16", "tp-overlap": "1"},
            "--no-tp-overlap",
        ),
        (
            {**_DENSE, "engine": "megatron", "hardware": "h100:2x6", "tp": "4", "tp-overlap": "1"},
            "--no-tp-overlap",
        ),
        (
            {**_DENSE, "engine": "megatron", "hardware": "mi300x:1x8", "tp": "2"}
            | {"tp-overlap": "1"},
            "--no-tp-overlap",
        ),
        (
            {**_MIXTURE, "engine": "megatron", "hardware": "mi300x:1x8", "ep": "8"}
            | {"dispatcher": "flex"},
            "--dispatcher",
        ),
        (
            {**_MIXTURE, "engine": "megatron", "hardware": "h100-pcie:1x8", "ep": "8"}
            | {"dispatcher": "flex"},
            "h100-pcie",
        ),
    ],
)
def test_what_a_trainer_refuses_is_an_input_error(
    given: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    assert search_command.run([*words, "--output-config-path", "none"]) == 2
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))


def test_tensor_ranks_of_deepspeed_have_the_other_stages() -> None:
    given = {**_DENSE, "engine": "deepspeed", "hardware": "h100:1x8"}
    assert _best(**given, tp="2").zero in (0, 1, 2)
    assert _best(**given, zero="3").tp == 1


def test_torchtitan_shards_over_context_ranks_beside_tensor_ranks_alone() -> None:
    given = {**_DENSE, "num-layers": "32", "engine": "torchtitan"}
    choice = _best(**given, hardware="h100:1x8", tp="4", cp="2")
    assert (choice.cp, choice.zero) == (2, 2)


@pytest.mark.parametrize(
    ("hardware", "tp", "beside"),
    [("gb200:4x4", "16", True), ("h100:4x4", "8", False), ("h100:1x8", "8", True)],
)
def test_products_run_beside_transfers_where_links_join_the_ranks(
    hardware: str, tp: str, beside: bool
) -> None:
    choice = _best(**_DENSE, engine="megatron", hardware=hardware, tp=tp, micro_batch_size="1")
    assert choice.tp_overlap is beside


def test_kernels_of_a_dispatcher_are_chosen_where_the_device_has_them() -> None:
    given = {**_MIXTURE, "engine": "megatron", "ep": "8"}
    assert _best(**given, hardware="h100:1x8").dispatcher == "flex"
    assert _best(**given, hardware="mi300x:1x8").dispatcher == "alltoall"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        # heads in groups of windows leave no context ranks, whatever else of 1,024 GPUs is tried
        (
            {"model": "gpt-oss-120b", "hardware": "h200:128x8", "engine": "megatron"}
            | {"global-batch-size": "8", "pp": "2,4", "precision": "any", "lora": "16"},
            (
                r"global batch\(8\) % \(micro batch\(1\) \* dp\(\d+\)\) = 8 != 0, .*"
                # ranks of adapters leave 16 tensor ranks at most
                r"[.] Use --global-batch-size 64 or 128"
            ),
        ),
        # what the remedy is of is said, not what another number of stages would break
        (
            {"model": "llama3-8b", "hardware": "b200:3x8", "engine": "torchtitan"}
            | {"global-batch-size": "1024", "pp": "1"},
            (
                r"global batch\(1024\) % \(micro batch\(1\) \* dp\(24\)\) = 16 != 0, .*"
                r"[.] Use --pp 3 or 6"
            ),
        ),
    ],
)
def test_the_rule_that_a_remedy_keeps_is_found_at_once(
    given: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    began = time.process_time()
    assert search_command.run([*words, "--seq-length", "4096", "--output-config-path", "none"]) == 2
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"engine": "torchtitan", "lora": "16", "lora-base": "nf4", **_WHOLE},
            "torchtitan 0.3 has no base weights in nf4",
        ),
        ({"engine": "torchtitan", "optimizer": "adam8bit", **_WHOLE}, "8-bit Adam"),
        ({"engine": "torchtitan", "optimizer": "lion", **_WHOLE}, "--engine deepspeed"),
        ({"engine": "megatron", "optimizer": "adafactor"}, "--engine deepspeed"),
        ({"engine": "megatron", "optimizer": "sgd"}, "not counted"),
        ({"engine": "accelerate", "optimizer": "galore"}, "time of galore is not known"),
        ({"engine": "accelerate", "optimizer": "lion", "zero": "3"}, "--zero 0"),
        ({"engine": "accelerate", "optimizer": "paged-adam8bit", "tp": "2"}, "--tp 1"),
        ({"engine": "deepspeed", "optimizer": "lion", "offload-optimizer": "1"}, "no price"),
        ({"engine": "deepspeed", "pure-bf16": ""}, "--engine torchtitan or accelerate"),
        ({"engine": "accelerate", "pure-bf16": "", "lora": "16"}, "Remove --pure-bf16"),
        ({"engine": "torchtitan", "optimizer": "adam-bf16", **_WHOLE}, "Megatron-Core"),
        ({"engine": "accelerate", "optimizer": "adam-bf16"}, "Megatron-Core"),
        ({"engine": "deepspeed", "optimizer": "adam-bf16"}, "Megatron-Core"),
        (
            {"engine": "deepspeed", "offload-optimizer": "0.5", "zero": "1"},
            "--zero 3",
        ),
        (
            {"engine": "megatron", "optimizer": "adam-bf16", "zero": "0"},
            "--zero 1",
        ),
    ],
)
def test_what_a_trainer_does_not_train_is_an_input_error(
    given: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {**_DENSE, "hardware": "h100:1x8", **given, "output-config-path": "none"}
    words = [word for key, value in asked.items() for word in (f"--{key}", value) if word]
    assert search_command.run(words) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    "given",
    [
        {"engine": "megatron", "optimizer": "adam-bf16"},
        {"engine": "megatron", "offload-optimizer": "0.5"},
        {"engine": "megatron", "optimizer": "adam-bf16", "offload-optimizer": "1"},
        {"engine": "torchtitan", "offload-optimizer": "1"},
        {"engine": "deepspeed", "optimizer": "adam8bit"},
        {"engine": "deepspeed", "offload-optimizer": "0.5"},
        {"engine": "accelerate", "offload-optimizer": "1"},
        {"engine": "accelerate", "lora": "16"},
        {"engine": "torchtitan", "lora": "16"},
        {"engine": "torchtitan", "lora": "16", "hardware": "h100:1x1"},
        {"engine": "torchtitan", "lora": "16", "tp": "8", "offload-optimizer": "1"},
        {"engine": "accelerate", "sft": True},
        {"engine": "deepspeed", "sft": True, "optimizer": "adam8bit"},
        {"engine": "deepspeed", "sft": True, "optimizer": "adafactor"},
        {"engine": "deepspeed", "sft": True, "optimizer": "paged-lion8bit"},
        {"engine": "accelerate", "optimizer": "adam8bit"},
        {"engine": "accelerate", "sft": True, "pure-bf16": True, "optimizer": "paged-adam8bit"},
        {"engine": "accelerate", "sft": True, "pure-bf16": True, "optimizer": "sgd"},
        {"engine": "accelerate", "sft": True, "pure-bf16": True, "optimizer": "adafactor"},
        {"engine": "torchtitan", "pure-bf16": True},
        {"engine": "megatron", "sft": True},
        {"engine": "megatron", "sft": True, "optimizer": "adam-bf16", "tp": "2", "pp": "2"},
    ],
)
def test_what_is_trained_is_what_the_files_say(given: dict[str, object]) -> None:
    """Nothing is lost, and nothing is refused when the files are read."""
    asked = {**_SMALL, "model": "qwen3-8b", "num-layers": "36", "hardware": "h100:1x8", **given}
    question = open_launches(build_request({**asked, "top": "0"}))
    found = answer(question).best
    assert found is not None
    assert found.best is not None
    gpus = found.best.run.strategy.gpus
    place = ExportTarget(num_nodes=1, gpus_per_node=gpus, model="qwen3-8b")
    engine = writer_of(found.engine.name, found.best.run)
    files = written(found.best.run, engine=engine, place=place)  # type: ignore[arg-type]
    assert [one for one in files.losses if "vocab" not in one.what] == []


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"engine": "megatron", "lora-base": "nf4"}, "megatron.adapters.base"),
        ({"engine": "megatron", "model": "llama2-7b"}, "megatron.adapters.recipe"),
        ({"engine": "megatron", "tp": "8", "lora": "4"}, "megatron.adapters.rank"),
        ({"engine": "megatron", "model": "qwen3-30b-a3b", "etp": "4", "tp": "1", "lora": "2"}
         | {"num-layers": "48"}, "megatron.adapters.expert-rank"),
        ({"engine": "megatron", "zero": "3"}, "megatron.adapters.fsdp"),
        ({"engine": "megatron", "sft": True, "zero": "3", "lora": None}, "megatron.sft.fsdp"),
        ({"engine": "megatron", "sft": True, "lora": None, "model": "gpt-6.7b"},
         "megatron.sft.recipe"),
        ({"engine": "megatron", "sft": True, "lora": None, "tp": "2", "tp-overlap": True},
         "megatron.sft.tp-overlap"),
        ({"engine": "megatron", "tp": "2", "tp-overlap": True}, "megatron.adapters.tp-overlap"),
        ({"engine": "deepspeed", "tp": "2"}, "deepspeed.adapters-tensor"),
        ({"engine": "deepspeed", "zero": "3", "lora-base": "int8"}, "deepspeed.base-int8"),
        ({"engine": "accelerate", "zero": "3", "lora-base": "int8"}, "accelerate.base-int8"),
        ({"engine": "accelerate", "tp": "2", "lora-base": "nf4"}, "transformers.base-tensor"),
        ({"engine": "accelerate", "model": "mixtral-8x7b", "lora-base": "int8"},
         "transformers.base-experts"),
        ({"engine": "accelerate", "tp": "2"}, "transformers.trl-tensor"),
        ({"engine": "accelerate", "model": "gpt-6.7b"}, "transformers.model"),
        ({"engine": "accelerate", "zero": "0", "cp": "2"}, "accelerate.context-shards"),
        ({"engine": "torchtitan", "lora-base": "int8"}, "torchtitan.adapters.base"),
        ({"engine": "torchtitan", "precision": "fp8"}, "torchtitan.adapters.fp8"),
        ({"engine": "torchtitan", "model": "deepseek-v2-lite", "num-layers": "27"},
         "torchtitan.adapters.latent"),
        ({"engine": "torchtitan", "zero": "0"}, "torchtitan.recipe.ddp"),
        ({"engine": "torchtitan", "zero": "2", "tp": "8"}, "torchtitan.recipe.copies"),
        ({"engine": "torchtitan", "seq-length": "1020"}, "torchtitan.recipe.chunks"),
        ({"engine": "torchtitan", "model": "qwen3-30b-a3b", "num-layers": "48", "tp": "2"}
         | {"ep": "4", "etp": "2"}, "torchtitan.recipe.etp"),
    ],
)  # fmt: skip
def test_adapters_are_what_files_of_the_trainer_can_say(
    given: dict[str, object], rule: str
) -> None:
    """What a file cannot say is dropped before plans are ranked."""
    asked = {**_DENSE, **_WHOLE, "hardware": "h100:1x8", "lora": "16", "top": "0", **given}
    asked = {name: value for name, value in asked.items() if value is not None}
    with pytest.raises(RuleError) as found:
        answer(open_launches(build_request(asked)))
    assert rule in found.value.ids


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"engine": "accelerate", "tp": "2"}, "transformers.trl-tensor"),
        ({"engine": "torchtitan"}, "engine.training"),
    ],
)
def test_all_weights_by_the_script_of_trl(given: dict[str, object], rule: str) -> None:
    """TRL's script starts DeepSpeed and accelerate, without tensor ranks."""
    asked = {**_DENSE, **_WHOLE, "hardware": "h100:1x8", "sft": True, "top": "0", **given}
    with pytest.raises(RuleError) as found:
        answer(open_launches(build_request(asked)))
    assert rule in found.value.ids


def test_models_that_job_files_cannot_name_are_dropped() -> None:
    asked = {**_DENSE, "hardware": "h100:1x8", "engine": "torchtitan", "top": "0"}
    with pytest.raises(RuleError) as found:
        answer(open_launches(build_request(asked)))
    assert found.value.ids == ("torchtitan.flavour",)


def test_adapters_are_no_loss_beside_others() -> None:
    """Megatron-LM would train all weights, in several times the memory."""
    asked = {**_SMALL, "model": "llama3-8b", "num-layers": "32", "hardware": "h100:1x8"}
    asked |= {"engine": "megatron", "lora": "16", "top": "0"}
    found = answer(open_launches(build_request(asked))).best
    assert found is not None
    assert found.best is not None
    place = ExportTarget(num_nodes=1, gpus_per_node=8, model="llama3-8b")
    with pytest.raises(InputError, match="Use --to megatron-bridge"):
        written(found.best.run, engine="megatron", place=place)
    assert writer_of("megatron", found.best.run) == "megatron-bridge"
    files = written(found.best.run, engine="megatron-bridge", place=place)
    assert "--recipe llama3_8b_peft_config" in files.files["bridge_overrides.sh"]
    assert (files.losses, files.runs.runtime.adapters) == ((), found.best.run.runtime.adapters)


def test_exchanges_beside_compute_have_several_queues_of_the_device() -> None:
    """Behind one queue, which tensor ranks have, they would wait for the products."""
    asked = {**_SMALL, "model": "mixtral-8x7b", "num-layers": "32", "hardware": "h100:2x8"}
    asked |= {"engine": "megatron", "tp": "2", "pp": "1", "ep": "8", "zero": "1", "top": "0"}
    for beside, queues in (("--moe-overlap", "32"), ("--no-moe-overlap", "1")):
        overlap = {"moe-overlap": beside == "--moe-overlap"}
        found = answer(open_launches(build_request({**asked, **overlap}))).best
        assert found is not None
        assert found.best is not None
        place = ExportTarget(num_nodes=2, gpus_per_node=8, model="mixtral-8x7b")
        files = written(found.best.run, engine="megatron", place=place).files
        script = files["megatron_args.sh"]
        assert f"export CUDA_DEVICE_MAX_CONNECTIONS={queues}\n" in script
        assert ("--overlap-moe-expert-parallel-comm" in script) is overlap["moe-overlap"]


def test_modules_on_the_host_leave_weights_on_the_device() -> None:
    """Transformer Engine from 2.10 on offloads these too, unless its first path is asked for."""
    asked = {**_SMALL, "model": "llama3-8b", "num-layers": "32", "hardware": "h100:1x8"}
    asked |= {"engine": "megatron", "offload-activations": "core_attn", "top": "0"}
    found = answer(open_launches(build_request(asked))).best
    assert found is not None
    assert found.best is not None
    place = ExportTarget(num_nodes=1, gpus_per_node=8, model="llama3-8b")
    script = written(found.best.run, engine="megatron", place=place).files["megatron_args.sh"]
    assert "export NVTE_CPU_OFFLOAD_V1=1\n" in script


def test_constraints_that_come_later_extend_the_degrees() -> None:
    """A search that was asked before finds the same degrees as a new one."""
    given = {**_DENSE, "global-batch-size": "192", "engine": "megatron", "hardware": "h100:1x8"}
    asked = open_launches(build_request(given))
    (engine,) = asked.engines
    fresh, used = (
        UniformSearch(engine, asked.job, target_of(asked, engine)).space for _ in range(2)
    )
    three = Constraints(micro_batch=(3,))
    used.degrees(Constraints())
    found = used.degrees(three)
    assert len(found.seconds) > 0
    assert found.seconds.tolist() == fresh.degrees(three).seconds.tolist()
