"""Exported configurations, read by the packages they are for.

The packages are the dependency group `exports` (`pip install --group exports`); a Python that has
them elsewhere is named by AUTOPAR_EXPORTS_PYTHON. They are loaded in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from autopar.documents.spec import load_spec
from autopar.run.model import embedding_parameter_counts, parameter_count
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from search.engines.plans import lower_for, zero_stage
from search.engines.torchtitan import recipe as torchtitan
from tests.unit.export_plans import job_of, uniform_plan

FOLDER = Path(__file__).resolve().parent
PYTHON = os.environ.get("AUTOPAR_EXPORTS_PYTHON", sys.executable)
_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"

PLANS = {
    "ddp": uniform_plan(8, LayerStrategy()),
    "zero2": uniform_plan(8, LayerStrategy(), default_dp_type="zero2"),
    "zero3": uniform_plan(8, LayerStrategy(zero3=True, checkpoint=True)),
    "tp": uniform_plan(12, LayerStrategy(tp=2, zero3=True)),
    "tp only": uniform_plan(2, LayerStrategy(tp=2)),
    "ulysses": uniform_plan(12, LayerStrategy(tp=3, ulysses=True, zero3=True)),
    "context": uniform_plan(4, LayerStrategy(cp=2, zero3=True), VocabStrategy(zero3=True)),
    "one": uniform_plan(1, LayerStrategy()),
}


def has(package: str, release: str | None = None) -> bool:
    """Return whether the packages' Python has a package, of one release where it is given."""
    done = subprocess.run(
        [PYTHON, "-c", _VERSION, package], capture_output=True, text=True, check=False
    )
    return done.returncode == 0 and (release is None or done.stdout.strip() == release)


def loaded(script: str, arguments: Sequence[str], folder: Path) -> object:
    """Return what a loading script printed as its result."""
    done = subprocess.run(
        [PYTHON, str(FOLDER / script), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def written(engine: str, folder: Path) -> tuple[list[Path], list[Plan]]:
    """Write the files of every plan; return its configuration and the plans they stand for."""
    files, plans = [], []
    for name, plan in PLANS.items():
        lowered = lower_for(engine)(job_of(plan, sequence_parallel=False))
        for file, text in lowered.files.items():
            (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / file).write_text(text)
        files.append(folder / name / next(iter(lowered.files)))
        plans.append(lowered.plan)
    return files, plans


@pytest.mark.skipif(not has("deepspeed"), reason="needs deepspeed: pip install --group exports")
def test_deepspeed_loads_the_configurations(tmp_path):
    """DeepSpeedConfig agrees on batch, stage and degrees at the plan's world; a wrong batch not."""
    files, plans = written("deepspeed", tmp_path)
    broken = json.loads(files[0].read_text()) | {"train_batch_size": 7}
    (tmp_path / "broken").write_text(json.dumps(broken))
    arguments = [f"{f}:{p.world_size}" for f, p in zip(files, plans, strict=True)]

    *results, refused = loaded(
        "load_deepspeed.py", [*arguments, f"{tmp_path / 'broken'}:8"], tmp_path
    )
    assert "7 != 3 * 2 * 8" in refused["refused"]
    for name, plan, result in zip(PLANS, plans, results, strict=True):
        layer, ranks = plan.layers[0], plan.data_degree(0)
        tensor = layer.tp if not layer.ulysses and layer.tp > 1 else 0
        assert result["tensor"] == tensor, name
        assert result["accumulation"] == plan.num_microbatches
        assert result["micro_batch"] * plan.num_microbatches * ranks == plan.global_batch
        assert result["stage"] == zero_stage(plan)
        assert result["overlap"] is (result["stage"] > 0)
        assert result["bf16"] is True
        # The note of a tensor-parallel export: its own batch counts tensor ranks.
        assert result["world"] == ranks * max(tensor, 1)
        assert result["batch"] == plan.global_batch * max(tensor, 1)


@pytest.mark.skipif(
    not (has("accelerate") and has("transformers") and has("deepspeed")),
    reason="needs accelerate, transformers and deepspeed: pip install --group exports",
)
def test_accelerate_loads_the_configurations(tmp_path):
    """`accelerate launch` takes every file, and its processes would see the plan's degrees."""
    files, plans = written("accelerate", tmp_path)

    results = loaded("load_accelerate.py", [str(f) for f in files], tmp_path)
    for name, plan, result in zip(PLANS, plans, results, strict=True):
        layer = plan.layers[0]
        assert result["processes"] == plan.world_size, name
        if result["kind"] != "DEEPSPEED":
            assert result["precision"] == "bf16"
        if "total" in result:
            assert result["total"] == plan.world_size
            assert result["tp"] * result["sp"] == layer.tp
            assert (result["sp"] > 1) == (layer.ulysses and layer.tp > 1)
            assert (result["cp"], result["dp_shard"]) == (layer.cp, plan.data_degree(0))
        else:
            assert result["kind"] in ("NO", "MULTI_GPU")
        if result["kind"] == "FSDP":
            assert result["fsdp"] == "2"
            assert result["reshard"] == str(layer.zero3).lower()
            assert result["checkpoints"] == str(layer.checkpoint).lower()
        if result["kind"] == "DEEPSPEED":
            below = json.loads((tmp_path / name / "autopar_deepspeed.json").read_text())
            assert below["zero_optimization"]["stage"] == 3
            assert below["bf16"]["enabled"] is True
    kinds = {result["kind"] for result in results}
    assert kinds == {"NO", "MULTI_GPU", "FSDP", "DEEPSPEED"}


@pytest.mark.parametrize(
    ("name", "stages", "checkpointed"),
    [
        ("llama3-8b", (15, 17), (0, 3, 20)),
        pytest.param("llama2-7b", (), (), marks=pytest.mark.slow),
        pytest.param("mistral-7b", (), range(32), marks=pytest.mark.slow),
        pytest.param("llama3-70b", (9, 11) * 4, (79,), marks=pytest.mark.slow),
        pytest.param("llama3-405b", (), (), marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(
    not has("torchtitan", torchtitan.VERSION),
    reason=f"needs torchtitan {torchtitan.VERSION}: pip install --group exports",
)
def test_torchtitan_parses_the_recipe(tmp_path, name, stages, checkpointed):
    """Its parser takes the recipe; the model has our parameters, the layers our checkpoints."""
    spec = load_spec(name)
    layers = tuple(
        LayerStrategy(tp=2, zero3=True, checkpoint=i in checkpointed)
        for i in range(spec.num_layers)
    )
    plan = Plan(
        world_size=8 * max(1, len(stages)),
        num_stages=max(1, len(stages)),
        stage_sizes=stages or (spec.num_layers,),
        layers=layers,
        vocab=VocabStrategy(tp=2, zero3=True),
        global_batch=64,
        num_microbatches=8,
    )
    lowered = lower_for("torchtitan")(job_of(plan, spec))
    assert lowered.losses == ()
    for file, text in lowered.files.items():
        (tmp_path / file).write_text(text)

    result = loaded("load_torchtitan.py", [str(plan.world_size)], tmp_path)
    assert result["degrees"] == {
        "dp_replicate": 1,
        "dp_shard": 4,
        "cp": 1,
        "tp": 2,
        "pp": plan.num_stages,
    }
    own = spec.num_layers * parameter_count(spec.layers[0])
    embedding, head = embedding_parameter_counts(spec, spec.vocab_size)
    assert result["parameters"] == own + embedding + head
    assert result["rope"] == [spec.rotary_base, spec.rotary_scaling_factor]
    assert result["checkpointed"] == list(checkpointed)
    assert result["reshard"] == "always"
    assert result["global_batch"] == 64
    assert result["seq_len"] == spec.layers[0].seq_length
    assert result["initial_load_in_hf"] is True
    if stages:
        assert result["virtual_stages"] == len(stages)
        assert result["schedule"] == "1F1B"
        assert (result["local_batch"], result["micro_batch"]) == (16, 2)
        modules = [module for stage in result["stages"] for module in stage]
        numbers = [f"layers.{i}" for i in range(spec.num_layers)]
        assert modules == ["tok_embeddings", *numbers, "norm", "lm_head"]
        counts = [sum(m.startswith("layers.") for m in stage) for stage in result["stages"]]
        assert counts == list(stages)
    else:
        assert (result["local_batch"], result["stages"]) == (2, None)
