"""Recipes of torchtitan 0.3: launches that name one, and files of users."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import DocumentError
from autopar.training.adapters import DENSE_TARGETS, Adapters
from search.engines.reader import CheckedFile
from search.engines.table import read_checked
from search.engines.torchtitan.read import read_titan
from search.engines.torchtitan.source import read_source, recipes
from tests.bridge_cases import texts

START = """
import os
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_70b
from torchtitan.trainer import Trainer

def mine() -> Trainer.Config:
"""


SPEC = "model_spec=model_registry('70B')"


def launched(folder: Path, words: str, *, gpus: int = 8) -> CheckedFile:
    """Return the check of a script that starts torchtitan's trainer."""
    path = folder / "launch.sh"
    path.write_text(
        f"torchrun --nnodes {gpus // 8} --nproc_per_node 8 -m torchtitan.train {words}\n",
        encoding="utf-8",
    )
    return read_checked(str(path), world_size=None, gpu="h100-80gb")


def python_file(folder: Path, lines: str, *, more: str = "", gpus: int = 64) -> CheckedFile:
    """Return the check of a recipe that edits `cfg`; more : what follows it."""
    path = folder / "mine.py"
    body = f"    cfg = llama3_70b()\n    {lines}\n    return cfg\n"
    path.write_text(START + body + more, encoding="utf-8")
    return read_checked(str(path), world_size=gpus, gpu="h100-80gb")


def test_a_launch_names_a_recipe_of_the_package(tmp_path: Path) -> None:
    """Its keys are those of the registry, and arguments change them."""
    file = launched(tmp_path, "--module llama3 --config llama3_8b --training.local-batch-size 2")
    run = file.run
    assert run is not None, file.findings
    assert (run.strategy.micro_batch, run.strategy.global_batch, run.seq_length) == (2, 16, 8192)
    assert run.strategy.recomputed.kind == "op"
    # Graphs and a loss in chunks are defaults of 0.3; a pipeline has no graphs.
    kernels = run.kernels
    assert (kernels.graphs, kernels.loss, kernels.loss_chunks) == ("full", "chunked", 8)
    assert not file.withdrawn
    said = "memory of CUDA graphs is not counted"
    assert [said in text for text in texts(file, "not priced")] == [True]
    words = "--module llama3 --config llama3_8b --parallelism.pipeline_parallel_degree 2 "
    piped = launched(tmp_path, words + "--training.local_batch_size 4").run
    assert piped is not None
    assert (piped.strategy.pp, piped.kernels.graphs) == (2, "none")


def test_a_recipe_is_the_job_file_of_the_same_keys(tmp_path: Path) -> None:
    """But for what 0.3 changed: graphs, the loss in chunks and the precision without shards."""
    run = launched(tmp_path, "--module llama3 --config llama3_70b", gpus=64).run
    old = read_titan(
        {
            "model": {"name": "llama3", "flavor": "70B"},
            "training": {"local_batch_size": 8, "seq_len": 8192, "steps": 1000},
            "parallelism": {"tensor_parallel_degree": 8},
            "activation_checkpoint": {"mode": "full"},
            "compile": {"enable": False},
        },
        world_size=64,
        gpu="h100-80gb",
    ).run
    assert run is not None
    assert (run.model, run.strategy, run.seq_length) == (old.model, old.strategy, old.seq_length)


@pytest.mark.parametrize(
    ("lines", "degrees"),
    [
        ("cfg.parallelism.tensor_parallel_degree = 4", (4, 1, 128)),
        ("for n in ('context', 'tensor'): setattr(cfg.parallelism, f'{n}_parallel_degree', 2)",
         (2, 2, 128)),
        (f"cfg = Trainer.Config({SPEC}, training=TrainingConfig(local_batch_size=1))", (1, 1, 64)),
    ],
)  # fmt: skip
def test_a_recipe_of_a_file_is_read(
    lines: str, degrees: tuple[int, int, int], tmp_path: Path
) -> None:
    """From a recipe of the package, or from the configuration alone."""
    file = python_file(tmp_path, lines)
    assert file.run is not None, file.findings
    split, strategy = file.run.split, file.run.strategy
    assert (split.tp, split.cp, strategy.global_batch) == degrees
    assert not file.withdrawn


def test_float8_of_a_recipe_has_scales_by_row(tmp_path: Path) -> None:
    """The converter's default; the weights are not gathered in 8 bits."""
    converter = "Float8LinearConverter.Config(model_compile_enabled=True)"
    lines = f"cfg.model_spec = model_registry('70B', converters=[{converter}])"
    run = python_file(tmp_path, lines).run
    assert run is not None
    precision = run.runtime.precision
    assert (precision.fp8, precision.row_scales) == (True, True)
    assert not run.runtime.states.gathered_fp8


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("cfg.training.seq_len = int(os.environ['S'])", "line 13: training.seq_len is not known"),
        ("cfg.activation_checkpoint = os.policy()", "activation_checkpoint is not known"),
        ("cfg.parallelism.new_degree = 2", "new_degree"),
        ("cfg.model_spec = model_registry('70B', ep_backend='x')", "ep_backend"),
        ("cfg.model_spec = model_registry(os.environ['F'])", "line 13: model.flavor is not known"),
        ("cfg.model_spec = model_registry('8B', converters=os.x)", "a converter is not known"),
        ("cfg.loss = ChunkedLossWrapper.Config(num_chunks=os.x)", "loss.num_chunks"),
        (
            "class Mine(TrainingConfig):\n        seq_len: int = 8192\n    cfg.training = Mine()",
            "line 13: training is not known: the defaults of Mine",
        ),
        ("cfg.training.local_batch_size = lambda: 3", "training.local_batch_size is not known"),
        ("cfg.training = None", "training is not known: it is None"),
        ("cfg.training.parent = cfg", "training.parent is not known: it is a Trainer.Config"),
    ],
)
def test_what_is_not_known_withdraws_the_estimates(lines: str, said: str, tmp_path: Path) -> None:
    """With the line or the key."""
    file = python_file(tmp_path, lines)
    assert any(said in text for text in texts(file, "not understood")), file.findings
    assert file.withdrawn


def test_two_recipes_of_a_file_need_a_launch(tmp_path: Path) -> None:
    """With a launch that has --config, whose file is in its folder."""
    other = "\ndef other():\n    cfg = llama3_70b()\n    cfg.training.local_batch_size = 4\n"
    other += "    return cfg\n"
    with pytest.raises(DocumentError, match="has 2 recipes: mine, other"):
        python_file(tmp_path, "", more=other)
    found = [
        launched(tmp_path, f"--module mine --config {name}", gpus=64).run
        for name in ("mine", "other")
    ]
    assert [run.strategy.micro_batch for run in found if run is not None] == [8, 4]
    with pytest.raises(DocumentError, match="has no function third"):
        launched(tmp_path, "--module mine --config third")


def test_recipes_of_the_package_are_those_of_its_registry() -> None:
    """Source: `models/llama3/config_registry.py` and `models/qwen3/config_registry.py` of 0.3.0."""
    known = recipes()
    assert len(known) > 50
    small, large = known["llama3_8b"], known["llama3_405b"]
    assert small["training"] == {"local_batch_size": 1, "seq_len": 8192, "steps": 1000}
    assert large["parallelism"]["tensor_parallel_degree"] == 8
    assert large["compile"] == {"enable": True, "enable_async_tensor_parallel": True}
    assert large["activation_checkpoint"] == {"mode": "full"}


def test_a_recipe_of_the_package_is_read_back() -> None:
    """The configuration that a file starts from has the keys of the data."""
    for name, document in recipes().items():
        path = Path("x.py")
        text = f"from torchtitan.models.m.config_registry import {name}\n"
        found = read_source(path, f"{text}def f():\n    return {name}()\n")
        for key in ("training", "parallelism", "compile", "activation_checkpoint", "loss"):
            assert found.document.get(key) == document.get(key), (name, key)


LORA = "LoRAConverter.Config(rank=16, target_modules={names})"
BF16 = "cfg.training.dtype = 'bfloat16'"


def adapted(names: str, *, flavor: str = "70B", more: str = BF16) -> str:
    """Return the lines of a recipe with adapters."""
    start = "from torchtitan.components.lora import LoRAConverter"
    spec = f"model_registry('{flavor}', converters=[{LORA.format(names=names)}])"
    return f"{start}\n    cfg.model_spec = {spec}\n    {more}"


def test_adapters_of_a_recipe_have_the_type_of_the_model(tmp_path: Path) -> None:
    """One for queries, keys and values, and one for each other module, all in bf16."""
    file = python_file(tmp_path, adapted("['wqkv', 'wo', 'w1', 'w2', 'w3']"))
    assert file.run is not None, file.findings
    runtime = file.run.runtime
    assert runtime.adapters == Adapters(rank=16, targets=frozenset(DENSE_TARGETS), fused="qkv")
    assert (runtime.optimizer.master_bytes, runtime.optimizer.moments_bytes) == (0, 4)
    assert not file.withdrawn


def test_names_that_match_nothing_are_reported(tmp_path: Path) -> None:
    """The recipe of 0.3.0 has such names, which torchtitan only warns of."""
    file = python_file(tmp_path, adapted("['wq', 'wkv', 'wo']"))
    assert file.run is not None, file.findings
    assert file.run.runtime.adapters is not None
    assert file.run.runtime.adapters.targets == {"projection"}
    (said,) = texts(file, "no effect")
    assert "wkv, wq: no such module" in said


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (adapted("['wq']"), "matches no module, so nothing is trained"),
        (adapted("None"), "adapters of the head are not counted"),
        (adapted("['wqkv', 'lm_head']"), "adapters of the head are not counted"),
        (adapted("['w1', 'w2']"), "one of w1, w3 without the other is not counted"),
        (adapted("['wo']", more="pass"), "frozen weights of 32 bits are not counted"),
    ],
)
def test_adapters_that_are_not_counted_have_no_price(lines: str, said: str, tmp_path: Path) -> None:
    file = python_file(tmp_path, lines)
    assert file.run is None
    assert any(said in one.text for one in file.findings), file.findings


@pytest.mark.parametrize(
    ("name", "said"),
    [("wkv_a", "end with an AssertionError"), ("wkv_b", "latent attention is not counted")],
)
def test_adapters_of_latent_attention(name: str, said: str, tmp_path: Path) -> None:
    """LoRAConverter cannot split weights that tensor ranks replicate."""
    lines = adapted(f"['{name}']", flavor="16B")
    path = tmp_path / "mine.py"
    text = (START + f"    cfg = llama3_70b()\n    {lines}\n    return cfg\n").replace(
        "torchtitan.models.llama3 import", "torchtitan.models.deepseek_v3 import"
    )
    path.write_text(text, encoding="utf-8")
    file = read_checked(str(path), world_size=64, gpu="h100-80gb")
    assert file.run is None
    assert any(said in one.text for one in file.findings), file.findings


def test_fsdp2_copies_weights_without_shards(tmp_path: Path) -> None:
    """One GPU and tensor ranks alone have no DDP in 0.3, and compute in bf16."""
    file = python_file(tmp_path, "cfg.parallelism.tensor_parallel_degree = 8", gpus=8)
    assert file.run is not None, file.findings
    assert (file.run.split.zero, file.run.runtime.states.keeper) == (3, "torchtitan")
    assert file.run.runtime.precision.kind == "bf16"
    assert texts(file, "no effect") == []
