"""Written files of fine-tuning, read by the parser of the program that they start.

The programs are no dependency of any group; a Python that has them is named by
AUTOPAR_EXPORTS_PYTHON. Weights are not loaded.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from autopar.run.run import Run
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.huggingface.named_optimizers import is_adam_of_torch, word_of
from search.engines.huggingface.transformers import trains_narrow_weights
from search.engines.table import as_trained
from tests.e2e.test_export_packages import has, loaded
from tests.run_cases import some, torch_runs

pytestmark = pytest.mark.slow


def folders_of(runs: list[Run], engine: str, folder: Path) -> list[Path]:
    """Write the files of every run into a separate folder; return the folders."""
    found = []
    for number, run in enumerate(runs):
        place = ExportTarget(num_nodes=1, gpus_per_node=run.strategy.gpus)
        own = folder / str(number)
        for name, text in written(run, engine=engine, place=place).files.items():
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            (own / name).write_text(text)
        found.append(own)
    return found


@pytest.mark.parametrize("keeper", ["accelerate", "deepspeed"])
@pytest.mark.skipif(not has("trl", "1.16.0"), reason="needs trl 1.16.0, with transformers and peft")
def test_trl_takes_its_configuration(
    keeper: Literal["accelerate", "deepspeed"], tmp_path: Path
) -> None:
    """`TrlParser` knows every key of sft.yaml, and trains with the settings of the run."""
    runs = some(torch_runs(keeper=keeper, trl=True), 25)
    folders = folders_of(runs, keeper, tmp_path)

    results: Any = loaded("load_trl.py", [str(folder) for folder in folders], tmp_path)

    for run, result in zip(runs, results, strict=True):
        adapters, strategy = run.runtime.adapters, run.strategy
        assert result["model"] == "model"
        assert result["data"] == "data"
        assert result["length"] == run.seq_length
        assert result["packing"] is (run.split.cp == 1)
        assert result["micro_batch"] == strategy.micro_batch
        assert result["accumulation"] == strategy.micro_batches
        pure = trains_narrow_weights(run) and keeper == "accelerate"
        assert result["bf16"] is (run.runtime.precision.kind == "bf16" and not pure)
        assert result["optim"] == word_of(run.runtime.optimizer)
        assert result["synced"] is run.syncs_each_batch
        # FSDP recomputes layers itself
        by_script = keeper == "deepspeed" or run.split.zero == 0
        recomputes = strategy.recomputed.kind == "full"
        assert result["checkpointing"] is (by_script and recomputes)
        narrow = adapters is not None or keeper == "deepspeed" or pure
        types = {"bf16": "bfloat16", "fp16": "float16"}
        kind = types[run.runtime.precision.kind]
        assert result["dtype"] == (kind if narrow else "float32")
        assert result["rank"] == (adapters and adapters.rank)
        assert result["four_bits"] == (
            "nf4" if adapters is not None and adapters.base == "nf4" else False
        )
        modules = {"query": 1, "value": 1, "projection": 1, "fc1": 2, "fc2": 1}
        if adapters is not None:
            assert len(result["targets"]) == sum(modules[one] for one in adapters.targets)


@pytest.mark.skipif(
    not has("llamafactory", "0.9.5"), reason="needs llamafactory 0.9.5, with its dependencies"
)
def test_llamafactory_takes_its_configuration(tmp_path: Path) -> None:
    """Its parser knows every key of train.yaml, and trains with the settings of the run."""
    drawn = torch_runs(keeper="accelerate", trl=True) | torch_runs(keeper="deepspeed", trl=True)
    runs = [as_trained("llamafactory", run) for run in some(drawn, 40) if run.split.cp == 1]
    folders = folders_of(runs, "llamafactory", tmp_path)

    results: Any = loaded("load_llamafactory.py", [str(folder) for folder in folders], tmp_path)

    for run, result in zip(runs, results, strict=True):
        adapters, strategy = run.runtime.adapters, run.strategy
        assert result["data"] == ["data"]
        # its collator pads packed sequences by one token
        assert result["length"] == run.seq_length - 1
        assert result["packing"] is True
        assert result["micro_batch"] == strategy.micro_batch
        assert result["accumulation"] == strategy.micro_batches
        pure = trains_narrow_weights(run)
        assert result["bf16"] is (run.runtime.precision.kind == "bf16" and not pure)
        assert result["synced"] is run.syncs_each_batch
        sharded = run.runtime.states.keeper == "accelerate" and run.split.zero > 0
        assert result["checkpointing"] is (strategy.recomputed.kind == "full" and not sharded)
        assert result["attention"] == ("sdpa" if run.kernels.repeated_heads else "fa2")
        assert result["kind"] == ("full" if adapters is None else "lora")
        if adapters is not None:
            assert result["rank"] == adapters.rank
            assert result["bits"] == (4 if adapters.base == "nf4" else None)
            assert result["double"] is True


@pytest.mark.skipif(not has("axolotl", "0.19.0"), reason="needs axolotl 0.19.0")
def test_axolotl_has_the_keys(tmp_path: Path) -> None:
    """Every written key is one of its classes, for FSDP one of that section's."""
    drawn = torch_runs(keeper="accelerate", trl=True) | torch_runs(keeper="deepspeed", trl=True)
    runs = [
        as_trained("axolotl", run)
        for run in some(drawn, 40)
        if run.split.cp * run.split.replicas == 1
        and (run.split.zero or run.runtime.adapters or run.runtime.states.keeper == "deepspeed")
    ]
    folders = folders_of(runs, "axolotl", tmp_path)

    keys: Any = loaded("load_axolotl.py", [], tmp_path)

    known = {key for name, own in keys.items() for key in own if name != "FSDPConfig"}
    for folder in folders:
        document = yaml.safe_load((folder / "axolotl.yaml").read_text())
        assert {*document} - known == set()
        assert {*document.get("fsdp_config", {})} - {*keys["FSDPConfig"]} == set()


@pytest.mark.skipif(not has("ms_swift", "4.6.0"), reason="needs ms-swift 4.6.0")
def test_ms_swift_takes_its_configuration(tmp_path: Path) -> None:
    """Its parser knows every key of swift.yaml, and trains with the settings of the run."""
    drawn = torch_runs(keeper="accelerate", trl=True) | torch_runs(keeper="deepspeed", trl=True)
    runs = [
        as_trained("ms-swift", run)
        for run in some(drawn, 60)
        if run.split.cp * run.split.replicas == 1
    ]
    folders = folders_of(runs, "ms-swift", tmp_path)

    results: Any = loaded("load_swift.py", [str(folder) for folder in folders], tmp_path)

    for run, result in zip(runs, results, strict=True):
        adapters, strategy = run.runtime.adapters, run.strategy
        assert result["data"] == ["data"]
        assert result["length"] == run.seq_length
        # it refuses packing without flash attention
        assert result["packing"] is result["attention"].startswith("flash")
        assert result["attention"] == (
            "sdpa" if run.kernels.repeated_heads else "flash_attention_2"
        )
        assert result["micro_batch"] == strategy.micro_batch
        assert result["accumulation"] == strategy.micro_batches
        assert result["optim"] == word_of(run.runtime.optimizer)
        assert result["kind"] == ("full" if adapters is None else "lora")
        assert not (result["bf16"] and result["fp16"])
        sharded = run.runtime.states.keeper == "accelerate" and run.split.zero > 0
        assert result["checkpointing"] is (strategy.recomputed.kind == "full" and not sharded)
        assert (result["fsdp"] is not None) is sharded
        if sharded:
            assert result["fsdp"]["reshard_after_forward"] is (run.split.zero == 3)
            assert result["fsdp"]["fsdp_version"] == 2
        if adapters is not None:
            assert result["rank"] == adapters.rank
            assert result["four_bits"] is (adapters.base == "nf4")
            modules = {"query": 1, "value": 1, "projection": 1, "fc1": 2, "fc2": 1}
            assert len(result["targets"]) == sum(modules[one] for one in adapters.targets)


def shards(run: Run) -> bool:
    """Return True for a run in bf16 with Adam of torch, without context ranks or 4-bit base."""
    adapters, precision = run.runtime.adapters, run.runtime.precision.kind
    plain = adapters is None or adapters.base == "16 bits"
    plain &= is_adam_of_torch(run.runtime.optimizer)
    return plain and run.split.cp == 1 and precision == "bf16"


@pytest.mark.skipif(not has("nemo_automodel", "0.7.0"), reason="needs nemo_automodel 0.7.0")
def test_automodel_takes_its_recipe(tmp_path: Path) -> None:
    """Its parser knows every key of automodel.yaml, and trains with the settings of the run."""
    drawn = some(torch_runs(keeper="accelerate", trl=True), 120)
    runs = [as_trained("automodel", run) for run in drawn if shards(run)]
    folders = folders_of(runs, "automodel", tmp_path)

    results: Any = loaded("load_automodel.py", [str(folder) for folder in folders], tmp_path)

    assert len(runs) > 20
    for run, result in zip(runs, results, strict=True):
        adapters, strategy, sharded = run.runtime.adapters, run.strategy, run.split.zero > 0
        narrow = run.runtime.optimizer.master_bytes == 0
        flash = not run.kernels.repeated_heads
        assert result["recipe"] == "TrainFinetuneRecipeForNextTokenPrediction"
        assert (result["unknown"], result["data"]) == ([], "data")
        assert result["length"] == run.seq_length
        assert result["packing"] == (run.seq_length if flash else None)
        assert result["padding"] == ("do_not_pad" if flash else "max_length")
        assert (result["batch"], result["micro_batch"]) == (
            strategy.global_batch,
            strategy.micro_batch,
        )
        assert result["strategy"] == ("FSDP2Config" if sharded else "DDPConfig")
        assert result["checkpointing"] is (strategy.recomputed.kind == "full")
        assert result["loss"] == "MaskedCrossEntropy"
        assert result["fused"] is run.runtime.optimizer.fused
        assert result["optimizer"] == "AdamW"
        assert result["model"]["torch_dtype"] == ("bfloat16" if narrow else "float32")
        assert result["rank"] == (None if adapters is None else adapters.rank)
        if sharded:
            assert result["reduced"] == "torch.float32"
            assert result["reshards"] is (run.split.zero == 3)
            assert result["replicas"] == run.split.replicas
            assert result["host"] is run.runtime.optimizer.offload_weights
            assert result["defers"] is not run.syncs_each_batch
        else:
            assert result["autocast"] == ("None" if narrow else "torch.bfloat16")


@pytest.mark.skipif(not has("verl", "0.9.1"), reason="needs verl 0.9.1, with hydra-core")
def test_verl_takes_its_words(tmp_path: Path) -> None:
    """Its configuration has every key of the command, and trains with the settings of the run."""
    drawn = some(torch_runs(keeper="accelerate", trl=True), 200)
    runs = [as_trained("verl", run) for run in drawn if shards(run) and run.split.zero]
    folders = []
    for number, run in enumerate(runs):
        place = ExportTarget(num_nodes=1, gpus_per_node=run.strategy.gpus)
        words = shlex.split(written(run, engine="verl", place=place).launch, comments=True)
        own = tmp_path / str(number)
        own.mkdir()
        given = [
            word.partition("${")[0] or word for word in words if "=" in word.partition("${")[0]
        ]
        (own / "words.json").write_text(json.dumps(given))
        folders.append(str(own))

    results: Any = loaded("load_verl.py", folders, tmp_path)

    assert len(runs) > 20
    for run, result in zip(runs, results, strict=True):
        data, engine, strategy = result["data"], result["engine"], run.strategy
        narrow = run.runtime.optimizer.master_bytes == 0
        assert data["train_batch_size"] == strategy.global_batch
        assert data["micro_batch_size_per_gpu"] == strategy.micro_batch
        assert (data["max_length"], data["use_dynamic_bsz"]) == (run.seq_length, False)
        assert (engine["strategy"], engine["reshard_after_forward"]) == (
            "fsdp2",
            run.split.zero == 3,
        )
        assert engine["model_dtype"] == ("bf16" if narrow else "fp32")
        shard = strategy.gpus // run.split.replicas
        assert engine["fsdp_size"] in ((-1, shard) if run.split.replicas == 1 else (shard,))
        assert engine["offload_policy"] is run.runtime.optimizer.offload_weights
        assert engine["use_no_sync_for_gradient_accumulation"] is not run.syncs_each_batch
        assert result["model"]["use_remove_padding"] is True
        again = result["model"]["enable_gradient_checkpointing"]
        assert again is (strategy.recomputed.kind == "full")
        adapters = run.runtime.adapters
        assert result["model"]["lora_rank"] == (0 if adapters is None else adapters.rank)
        fused = (result["optim"]["override_optimizer_config"] or {}).get("fused", False)
        assert fused is run.runtime.optimizer.fused
