"""Files of written launches, read by the packages they are for.

The packages are the dependency group `launches` (`pip install --group launches`), which has the
last torchtitan with job files in the place of 0.3, which is in the group `exports`; a Python that
has them elsewhere is named by AUTOPAR_EXPORTS_PYTHON. Megatron-Bridge is in no wheel that installs
without a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.pipeline.schedules import TORCH_NAMES
from autopar.price.parameters import chunk_weights
from autopar.records import replace
from autopar.run.run import Run
from autopar.run.strategy import Split, chunks_of_sizes, uniform_layers
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.huggingface.models import FLAVOURS, flavour
from search.engines.megatron.names import harmless
from search.engines.megatron.stages import parts_in_order
from search.engines.text import flags_of, script_command
from search.engines.torchtitan.flavours import (
    JOB_FILES,
    MODELS,
    RECIPES,
    UNSHARDED,
    adapted_modules,
    linear_modules,
)
from search.engines.torchtitan.recipe import beyond_recipes
from tests.e2e.test_export_packages import has, loaded
from tests.run_cases import megatron_runs, some, titan_runs, torch_runs

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


def files_of(runs: list[Run], engine: str, folder: Path) -> list[Path]:
    """Write the files of every launch into a folder of its own; return the folders."""
    folders = []
    for number, run in enumerate(runs):
        place = ExportTarget(num_nodes=1, gpus_per_node=run.strategy.gpus)
        found = written(run, engine=engine, place=place)
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
    runs = some(megatron_runs(), 60)
    paths = []
    for folder in files_of(runs, "megatron", tmp_path):
        text = (folder / "megatron_args.sh").read_text()
        paths.append(folder / "flags.json")
        paths[-1].write_text(json.dumps(flags_of(script_command(text, "x").arguments)))

    results = loaded("load_megatron_core.py", [str(path) for path in paths], tmp_path)

    assert isinstance(results, list)
    assert [one["refused"] for one in results if "refused" in one] == []
    for run, path, result in zip(runs, paths, results, strict=True):
        split, strategy = run.split, run.strategy
        assert result["degrees"] == [split.tp, strategy.pp, split.cp]
        assert result["layers"] == run.model.num_layers
        assert result["experts"] == (run.model.experts and run.model.experts.number)
        assert result["sharded"] is (run.split.zero > 0)
        if result["layout"] is not None:
            counts = [[part.count("decoder") for part in stage] for stage in result["layout"]]
            assert counts == [[len(chunk.layers) for chunk in stage] for stage in strategy.stages]
        flags = {*json.loads(path.read_text())} - {*result["taken"]}
        unknown = {flag for flag in flags if not harmless(flag)} - OF_SCRIPT
        assert unknown == set()


@pytest.mark.skipif(
    not (has("torchtitan", JOB_FILES) and has("triton")),
    reason=f"needs torchtitan {JOB_FILES}, triton: pip install --group launches",
)
def test_torchtitan_parses_the_job_files(tmp_path: Path) -> None:
    """Its parser takes every key, its mesh every degree, and its flavours have the sizes."""
    runs = [run for run in some(titan_runs(), 90) if beyond_recipes(run)]
    assert len(runs) > 20
    folders = files_of(runs, "torchtitan", tmp_path)
    arguments = [
        f"{folder / 'autopar_torchtitan.toml'}:{run.strategy.gpus}"
        for folder, run in zip(folders, runs, strict=True)
    ]

    results = loaded("load_titan_job.py", arguments, tmp_path)

    assert isinstance(results, list)
    for run, result in zip(runs, results, strict=True):
        split, strategy = run.split, run.strategy
        copies = split.replicas if split.zero else strategy.dp
        assert result["degrees"] == {
            "dp_replicate": copies,
            "dp_shard": strategy.dp // copies,
            "cp": split.cp,
            "tp": split.tp,
            "pp": strategy.pp,
        }
        if split.ep > 1:
            assert result["experts"] == [split.ep, split.etp]
        model = run.model
        assert result["model"] == [model.num_layers, model.hidden, model.vocab]
        assert result["global_batch"] == strategy.global_batch
        assert result["seq_len"] == run.seq_length
        assert bool(result["converters"]) is run.runtime.precision.fp8
        assert result["gathered"] is run.runtime.states.gathered_fp8
        assert ("model" in result["compiled"]) is run.kernels.compiled
        if strategy.pp > 1:
            assert result["micro_batch"] == strategy.micro_batch
            assert result["local_batch"] == strategy.micro_batch * strategy.micro_batches
            counts = [sum(name.startswith("layers.") for name in part) for part in result["stages"]]
            assert counts == [len(chunk.layers) for chunk in parts_in_order(strategy)]
            assert result["schedule"] == TORCH_NAMES[strategy.schedule]


@pytest.mark.slow
@pytest.mark.skipif(
    not has("torchtitan", RECIPES),
    reason=f"needs torchtitan {RECIPES}: pip install --group exports",
)
def test_torchtitan_builds_the_recipes(tmp_path: Path) -> None:
    """Its mesh, batch and model are those of the run, and so are the weights that it trains."""
    # fp8 needs torchao, the flex dispatcher DeepEP, and both a GPU
    runs = [
        run
        for run in some(titan_runs(recipe=True), 90)
        if not run.runtime.precision.fp8 and run.runtime.experts.dispatcher != "flex"
    ]
    assert sum(run.runtime.adapters is not None for run in runs) > 10
    assert (True, True) in {(run.strategy.pp > 1, run.split.tp > 1) for run in runs}
    folders = files_of(runs, "torchtitan", tmp_path)
    arguments = [f"{folder}:{run.strategy.gpus}" for folder, run in zip(folders, runs, strict=True)]

    results = loaded("load_recipes.py", arguments, tmp_path)

    assert isinstance(results, list)
    for run, result in zip(runs, results, strict=True):
        split, strategy, kernels = run.split, run.strategy, run.kernels
        adapters, staged = run.runtime.adapters, strategy.pp > 1
        shards = strategy.dp // split.replicas
        assert result["degrees"] == [
            *(split.replicas, shards, split.cp, split.tp, strategy.pp, split.ep)
        ]
        assert result["reshard"] == ("always" if split.zero == 3 else "never")
        whole = trained(replace(run, runtime=replace(run.runtime, adapters=None)))
        # sinks of attention and biases of routers are not counted
        assert result["parameters"] == pytest.approx(whole, rel=2e-7)
        if adapters is None:
            assert result["trained"] == result["parameters"]
        else:
            assert result["trained"] == trained(run)
        wanted = () if adapters is None else adapted_modules(run.model, adapters.targets)
        assert result["adapted"] == sorted(wanted)
        assert (result["dtype"] == "bfloat16") is (run.runtime.optimizer.master_bytes == 0)
        assert (result["precision"] == "float32") is (run.runtime.precision.kind == "fp32")
        local = strategy.micro_batch * (strategy.micro_batches if staged else 1)
        micro = strategy.micro_batch if staged else 1
        assert result["batch"] == [local, strategy.global_batch, micro]
        assert result["seq_len"] == run.seq_length
        policies = {"none": None, "op": "SelectiveAC.Config", "full": "FullAC.Config"}
        assert result["policy"] == policies[strategy.recomputed.kind]
        assert ("model" in result["compiled"]) is kernels.compiled
        assert result["chunks"] == (kernels.loss_chunks if kernels.loss == "chunked" else 1)
        if staged:
            assert result["schedule"] == TORCH_NAMES[strategy.schedule]
            counts = [sum(name.startswith("layers.") for name in part) for part in result["stages"]]
            assert counts == [len(chunk.layers) for chunk in parts_in_order(strategy)]


def trained(run: Run) -> int:
    """Return the number of trained weights of a whole model."""
    layers, ends = uniform_layers(run.model.num_layers, Split())
    chunks = chunks_of_sizes([run.model.num_layers], 1)
    alone = replace(
        run.strategy,
        gpus=1,
        layers=layers,
        ends=ends,
        stages=chunks,
        schedule="1f1b",
        global_batch=run.strategy.micro_batch,
    )
    weights = chunk_weights(replace(run, strategy=alone), chunks[0][0])
    return sum(weight.elements for weight in weights if weight.trained)


@pytest.mark.slow
@pytest.mark.skipif(
    not has("torchtitan", RECIPES),
    reason=f"needs torchtitan {RECIPES}: pip install --group exports",
)
def test_modules_with_adapters_are_those_of_torchtitan(tmp_path: Path) -> None:
    """The linear modules of each flavor, and those whose adapters it cannot build."""
    names = [(name, size) for name in MODELS[RECIPES] for size in FLAVOURS[name]]

    results = loaded("load_linears.py", [f"{name}:{size}" for name, size in names], tmp_path)

    assert isinstance(results, list)
    for (name, size), result in zip(names, results, strict=True):
        model = flavour(name, size)
        assert model is not None
        assert set(result["linears"]) == linear_modules(model)
        assert set(result["failed"]) == linear_modules(model) & UNSHARDED


@pytest.mark.skipif(not has("deepspeed"), reason="needs deepspeed: pip install --group launches")
def test_deepspeed_loads_the_configurations(tmp_path: Path) -> None:
    """DeepSpeedConfig agrees on batch, stage and degrees at the world of each launch."""
    runs = some(torch_runs(keeper="deepspeed"), 40)
    folders = files_of(runs, "deepspeed", tmp_path)
    arguments = [
        f"{folder / 'autopar_deepspeed.json'}:{run.strategy.gpus}"
        for folder, run in zip(folders, runs, strict=True)
    ]

    results = loaded("load_deepspeed.py", arguments, tmp_path)

    assert isinstance(results, list)
    for run, result in zip(runs, results, strict=True):
        split, strategy = run.split, run.strategy
        assert "refused" not in result, result
        assert result["stage"] == split.zero
        assert result["micro_batch"] == strategy.micro_batch
        assert result["accumulation"] == strategy.micro_batches
        assert result["tensor"] == (split.tp if split.tp > 1 else 0)
        assert result["bf16"] is (run.runtime.precision.kind == "bf16")
        assert result["batch"] == strategy.global_batch * split.tp


@pytest.mark.skipif(
    not (has("accelerate") and has("transformers") and has("deepspeed")),
    reason="needs accelerate, transformers and deepspeed: pip install --group launches",
)
def test_accelerate_loads_the_configurations(tmp_path: Path) -> None:
    """`accelerate launch` takes every file, and its processes would see the launch's degrees."""
    cases = torch_runs(keeper="accelerate") | torch_runs(keeper="deepspeed")
    runs = some(cases, 40)
    folders = files_of(runs, "accelerate", tmp_path)

    paths = [str(folder / "autopar_accelerate.yaml") for folder in folders]

    results = loaded("load_accelerate.py", paths, tmp_path)

    assert isinstance(results, list)
    for run, result in zip(runs, results, strict=True):
        split, strategy = run.split, run.strategy
        assert result["processes"] == strategy.gpus
        if run.runtime.states.keeper == "deepspeed":
            assert result["kind"] == "DEEPSPEED"
            continue
        kind = run.runtime.precision.kind
        assert result["precision"] == {"fp32": "no"}.get(kind, kind)
        if result["kind"] == "FSDP":
            assert result["fsdp"] == "2"
            assert result["reshard"] == str(split.zero == 3).lower()
            assert result["checkpoints"] == str(split.recompute == "full").lower()
            assert (result["tp"], result["cp"]) == (split.tp, split.cp)
            assert result["total"] == strategy.gpus
            assert result["dp_shard"] == strategy.dp // split.replicas


@pytest.mark.skipif(
    not has("transformers"), reason="needs transformers: pip install --group launches"
)
def test_transformers_reads_the_models(tmp_path: Path) -> None:
    """A `config.json` of sizes is a configuration of its kind, with the same sizes."""
    runs = some(torch_runs(keeper="deepspeed"), 15)
    folders = files_of(runs, "deepspeed", tmp_path)

    results = loaded("load_config.py", [str(folder / "model") for folder in folders], tmp_path)

    assert isinstance(results, list)
    for run, result in zip(runs, results, strict=True):
        model, attention = run.model, run.model.attention
        assert result["sizes"] == [model.num_layers, model.hidden, model.dense_width, model.vocab]
        assert result["heads"] == [attention.heads, attention.kv_heads, attention.width]
        assert result["tied"] is model.tied
