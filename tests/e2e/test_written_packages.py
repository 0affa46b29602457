"""Files of written launches, read by the packages they are for.

The packages are the dependency group `launches` (`pip install --group launches`), which has the
last torchtitan with job files in the place of 0.3; a Python that has them elsewhere is named by
AUTOPAR_EXPORTS_PYTHON. Megatron-Bridge is in no wheel that installs without a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.pipeline.schedules import TORCH_NAMES
from autopar.run.launch import Launch
from search.engines.files import written
from search.engines.megatron.names import harmless
from search.engines.megatron.stages import parts_in_order
from search.engines.place import Place
from search.engines.text import flags_of, script_command
from search.engines.torchtitan import write as torchtitan
from tests.e2e.test_export_packages import has, loaded
from tests.launch_cases import megatron_launches, some, titan_launches, torch_launches

WHERE = ": pip install --group launches"
OF_SCRIPT = frozenset({
    "accumulate-allreduce-grads-in-fp32", "ckpt-format", "data-path", "fp8-param-gather",
    "global-batch-size", "grad-reduce-in-bf16", "group-query-attention", "lr-decay-style",
    "make-vocab-size-divisible-by", "max-position-embeddings", "micro-batch-size",
    "no-create-attention-mask-in-dataloader", "num-virtual-stages-per-pipeline-rank",
    "position-embedding-type", "rotary-percent", "seq-length", "squared-relu", "swiglu",
    "tokenizer-type", "train-iters", "untie-embeddings-and-output-weights", "vocab-size",
    # newer than the wheel of 0.16.1
    "activation-offload-fraction", "use-transformer-engine-op-fuser",
})  # fmt: skip
"""Arguments that are the training script's, and no field of Megatron-Core's configurations."""


def files_of(launches: list[Launch], engine: str, folder: Path) -> list[Path]:
    """Write the files of every launch into a folder of its own; return the folders."""
    folders = []
    for number, launch in enumerate(launches):
        place = Place(num_nodes=1, gpus_per_node=launch.degrees.world)
        found = written(launch, engine=engine, place=place)
        assert found.losses == ()
        own = folder / str(number)
        for name, text in found.files.items():
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            (own / name).write_text(text)
        folders.append(own)
    return folders


@pytest.mark.skipif(
    not has("megatron-core"), reason="needs megatron-core: pip install --group launches"
)
def test_megatron_core_takes_the_arguments(tmp_path: Path) -> None:
    """Its configurations refuse no launch, and know every argument that is not the script's."""
    launches = some(megatron_launches(), 60)
    paths = []
    for folder in files_of(launches, "megatron", tmp_path):
        text = (folder / "megatron_args.sh").read_text()
        paths.append(folder / "flags.json")
        paths[-1].write_text(json.dumps(flags_of(script_command(text, "x").arguments)))

    results = loaded("load_megatron_core.py", [str(path) for path in paths], tmp_path)

    assert isinstance(results, list)
    assert [one["refused"] for one in results if "refused" in one] == []
    for launch, path, result in zip(launches, paths, results, strict=True):
        degrees = launch.degrees
        assert result["degrees"] == [degrees.tp, degrees.pp, degrees.cp]
        assert result["layers"] == launch.model.num_layers
        assert result["experts"] == (launch.model.experts and launch.model.experts.number)
        assert result["sharded"] is (launch.optimizer.sharding != "none")
        if result["layout"] is not None:
            counts = [[part.count("decoder") for part in stage] for stage in result["layout"]]
            assert counts == [[len(chunk[1]) for chunk in stage] for stage in degrees.chunks]
        flags = {*json.loads(path.read_text())} - {*result["taken"]}
        unknown = {flag for flag in flags if not harmless(flag)} - OF_SCRIPT
        assert unknown == set()


@pytest.mark.skipif(
    not (has("torchtitan", torchtitan.VERSION) and has("triton")),
    reason=f"needs torchtitan {torchtitan.VERSION}, triton: pip install --group launches",
)
def test_torchtitan_parses_the_job_files(tmp_path: Path) -> None:
    """Its parser takes every key, its mesh every degree, and its flavours have the sizes."""
    launches = some(titan_launches(), 60)
    folders = files_of(launches, "torchtitan", tmp_path)
    arguments = [
        f"{folder / 'autopar_torchtitan.toml'}:{launch.degrees.world}"
        for folder, launch in zip(folders, launches, strict=True)
    ]

    results = loaded("load_titan_job.py", arguments, tmp_path)

    assert isinstance(results, list)
    for launch, result in zip(launches, results, strict=True):
        degrees, trainer = launch.degrees, launch.trainer
        assert trainer is not None
        copies = trainer.replicas if trainer.zero else degrees.dp
        assert result["degrees"] == {
            "dp_replicate": copies,
            "dp_shard": degrees.dp // copies,
            "cp": degrees.cp,
            "tp": degrees.tp,
            "pp": degrees.pp,
        }
        if degrees.ep > 1:
            assert result["experts"] == [degrees.ep, degrees.etp]
        model = launch.model
        assert result["model"] == [model.num_layers, model.hidden, model.vocab]
        assert result["global_batch"] == launch.global_batch
        assert result["seq_len"] == launch.seq
        assert bool(result["converters"]) is launch.precision.fp8
        assert result["gathered"] is trainer.gathered_fp8
        assert ("model" in result["compiled"]) is trainer.compiled
        if degrees.pp > 1:
            assert result["micro_batch"] == launch.micro_batch
            assert result["local_batch"] == launch.micro_batch * launch.micro_batches
            counts = [sum(name.startswith("layers.") for name in part) for part in result["stages"]]
            assert counts == [len(chunk[1]) for chunk in parts_in_order(degrees)]
            assert result["schedule"] == TORCH_NAMES[degrees.pipeline]


@pytest.mark.skipif(not has("deepspeed"), reason="needs deepspeed: pip install --group launches")
def test_deepspeed_loads_the_configurations(tmp_path: Path) -> None:
    """DeepSpeedConfig agrees on batch, stage and degrees at the world of each launch."""
    launches = some(torch_launches(keeper="deepspeed"), 40)
    folders = files_of(launches, "deepspeed", tmp_path)
    arguments = [
        f"{folder / 'autopar_deepspeed.json'}:{launch.degrees.world}"
        for folder, launch in zip(folders, launches, strict=True)
    ]

    results = loaded("load_deepspeed.py", arguments, tmp_path)

    assert isinstance(results, list)
    for launch, result in zip(launches, results, strict=True):
        trainer, degrees = launch.trainer, launch.degrees
        assert trainer is not None
        assert "refused" not in result, result
        assert result["stage"] == trainer.zero
        assert result["micro_batch"] == launch.micro_batch
        assert result["accumulation"] == launch.micro_batches
        assert result["tensor"] == (degrees.tp if degrees.tp > 1 else 0)
        assert result["bf16"] is (launch.precision.kind == "bf16")
        assert result["batch"] == launch.global_batch * degrees.tp


@pytest.mark.skipif(
    not (has("accelerate") and has("transformers") and has("deepspeed")),
    reason="needs accelerate, transformers and deepspeed: pip install --group launches",
)
def test_accelerate_loads_the_configurations(tmp_path: Path) -> None:
    """`accelerate launch` takes every file, and its processes would see the launch's degrees."""
    cases = torch_launches(keeper="accelerate") | torch_launches(keeper="deepspeed")
    launches = some(cases, 40)
    folders = files_of(launches, "accelerate", tmp_path)

    paths = [str(folder / "autopar_accelerate.yaml") for folder in folders]

    results = loaded("load_accelerate.py", paths, tmp_path)

    assert isinstance(results, list)
    for launch, result in zip(launches, results, strict=True):
        trainer, degrees = launch.trainer, launch.degrees
        assert trainer is not None
        assert result["processes"] == degrees.world
        if trainer.keeper == "deepspeed":
            assert result["kind"] == "DEEPSPEED"
            continue
        assert result["precision"] == {"fp32": "no"}.get(
            launch.precision.kind, launch.precision.kind
        )
        if result["kind"] == "FSDP":
            assert result["fsdp"] == "2"
            assert result["reshard"] == str(trainer.zero == 3).lower()
            assert result["checkpoints"] == str(trainer.checkpoint == "full").lower()
            assert (result["tp"], result["cp"]) == (degrees.tp, degrees.cp)
            assert result["total"] == degrees.world
            assert result["dp_shard"] == degrees.dp // trainer.replicas


@pytest.mark.skipif(
    not has("transformers"), reason="needs transformers: pip install --group launches"
)
def test_transformers_reads_the_models(tmp_path: Path) -> None:
    """A `config.json` of sizes is a configuration of its kind, with the same sizes."""
    launches = some(torch_launches(keeper="deepspeed"), 15)
    folders = files_of(launches, "deepspeed", tmp_path)

    results = loaded("load_config.py", [str(folder / "model") for folder in folders], tmp_path)

    assert isinstance(results, list)
    for launch, result in zip(launches, results, strict=True):
        model, attention = launch.model, launch.model.attention
        assert result["sizes"] == [model.num_layers, model.hidden, model.ffn, model.vocab]
        assert result["heads"] == [attention.heads, attention.groups, attention.width]
        assert result["tied"] is model.tied
