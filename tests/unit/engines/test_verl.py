"""Commands of verl's supervised fine-tuning: their overrides, defaults and limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import DocumentError, UnsupportedError
from autopar.price.account import account_of
from autopar.records import replace
from autopar.run.run import Run
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.reader import CheckedFile
from search.engines.table import as_trained, read_checked

# the words of tests/special_e2e/sft/run_sft_engine.sh of verl, with other sizes
_WORDS = (
    "torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer",
    "data.train_files=$HOME/data/gsm8k/train.parquet",
    "data.train_batch_size=64",
    "data.pad_mode=no_padding",
    "data.truncation=error",
    "data.use_dynamic_bsz=True",
    "data.max_token_len_per_gpu=8192",
    "data.max_length=2048",
    "data.messages_key=messages",
    "model.path=Qwen/Qwen3-8B",
    "model.use_remove_padding=True",
    "engine=fsdp",
    "engine.strategy=fsdp2",
    "optim=fsdp",
    "optim.lr=1e-5",
    "optim.lr_warmup_steps_ratio=0.2",
    "optim.betas=[0.9,0.95]",
    "optim.clip_grad=1.0",
    "+optim.override_optimizer_config.fused=True",
    "trainer.test_freq=after_each_epoch",
    "trainer.logger=['console','file']",
    "trainer.total_epochs=2",
    "trainer.default_local_dir=$HOME/ckpts",
)
COMMAND = " \\\n    ".join(_WORDS) + "\n"


def checked(folder: Path, *words: str, gpus: int = 8) -> CheckedFile:
    """Return the result of checking the command with further words at its end."""
    (folder / "run.sh").write_text(" \\\n    ".join((*_WORDS, *words)) + "\n")
    return read_checked(str(folder / "run.sh"), world_size=gpus, gpu="h100-80gb")


def run_in(found: CheckedFile) -> Run:
    """Return the priced run of a file; its absence fails the test."""
    assert found.run is not None, found.findings
    return replace(found.run, name="")


def test_a_command(tmp_path: Path) -> None:
    """Weights in fp32, recomputed by default, with dynamic batches of 4 sequences."""
    found = checked(tmp_path)
    run = run_in(found)
    assert (found.trainer, found.withdrawn) == ("verl", {})
    assert (run.strategy.micro_batch, run.strategy.micro_batches) == (4, 2)
    assert (run.seq_length, run.strategy.recomputed.kind) == (2048, "full")
    assert (run.split.zero, run.runtime.states.flat) == (3, False)
    # gradients are reduced after each micro-batch, in fp32
    states = run.runtime.states
    assert (states.each_micro_batch, states.wide_gradients) == (True, True)
    assert states.apart
    assert run.runtime.optimizer.master_bytes == 4
    assert (run.kernels.quirks.logit_bytes, run.kernels.repeated_heads) == (2, False)
    later = checked(tmp_path, "engine.use_no_sync_for_gradient_accumulation=True")
    assert not run_in(later).runtime.states.each_micro_batch


def test_defaults(tmp_path: Path) -> None:
    """FSDP1, 256 sequences of 1,024 tokens, at most 8,192 tokens a micro-batch."""
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B\n"
    )
    run = run_in(read_checked(str(tmp_path / "run.sh"), world_size=None, gpu="h100-80gb"))
    assert (run.strategy.gpus, run.strategy.global_batch, run.seq_length) == (4, 256, 1024)
    assert (run.strategy.micro_batch, run.runtime.states.flat) == (8, True)
    assert not run.runtime.states.apart
    assert not run.runtime.optimizer.fused


def test_batches(tmp_path: Path) -> None:
    """A fixed micro-batch, and dynamic ones that are smaller than the limit or unequal."""
    fixed = ("data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=2")
    assert run_in(checked(tmp_path, *fixed)).strategy.micro_batches == 4
    # 8 sequences of 2,048 tokens in two micro-batches, although 6 would fit
    most = "data.max_token_len_per_gpu=13000"
    assert run_in(checked(tmp_path, most)).strategy.micro_batch == 4
    uneven = checked(tmp_path, "data.max_token_len_per_gpu=6200")
    assert uneven.run is None
    assert uneven.withdrawn
    short = checked(tmp_path, "data.max_token_len_per_gpu=1000")
    assert [one.id for one in short.findings if one.kind == "illegal"] == ["read.key"]
    other = checked(tmp_path, "data.train_batch_size=63")
    assert [one.id for one in other.findings if one.kind == "illegal"] == ["read.key"]


def test_adapters_have_the_type_of_the_base(tmp_path: Path) -> None:
    """The base has fp32 by default (`model_dtype`), and adapters are cast to its type."""
    words = ("model.lora_rank=32", "model.target_modules=[q_proj,v_proj]")
    found = run_in(checked(tmp_path, *words))
    assert found.runtime.adapters is not None
    assert found.runtime.adapters.targets == {"query", "value"}
    assert found.runtime.adapters.wide
    assert found.runtime.optimizer.master_bytes == 4
    narrow = run_in(checked(tmp_path, *words, "engine.model_dtype=bf16"))
    assert narrow.runtime.adapters is not None
    assert not narrow.runtime.adapters.wide
    assert narrow.runtime.optimizer.master_bytes == 0
    assert account_of(narrow).peak_bytes < account_of(found).peak_bytes


def test_sharding(tmp_path: Path) -> None:
    """The shard group, kept weights and states on the host."""
    run = run_in(checked(tmp_path, "engine.fsdp_size=4", "engine.reshard_after_forward=False"))
    assert (run.split.zero, run.split.replicas) == (2, 2)
    host = run_in(checked(tmp_path, "engine.offload_policy=True"))
    assert host.runtime.optimizer.offload_weights
    found = checked(tmp_path, "engine.fsdp_size=3")
    assert [one.kind for one in found.findings if one.id == "read.key"] == ["illegal"]


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("engine=megatron", "engine"),
        ("engine=torchtitan", "engine"),
        ("engine.strategy=fsdp_turbo", "engine.strategy"),
        ("engine.ulysses_sequence_parallel_size=2", "engine.ulysses_sequence_parallel_size"),
        ("model.use_remove_padding=False", "model.use_remove_padding"),
        ("engine.model_dtype=fp16", "engine.model_dtype"),
        ("optim.optimizer=Muon", "optim.optimizer"),
        ("data.max_length=$LENGTH", "data.max_length"),
    ],
)
def test_settings_without_a_price(tmp_path: Path, word: str, key: str) -> None:
    """They leave no run, with one finding that names the key."""
    found = checked(tmp_path, word)
    assert found.run is None
    (one,) = [one for one in found.findings if one.id == "read.unpriced"]
    assert one.values["key"] == key


@pytest.mark.parametrize(
    "word",
    [
        "model.use_fused_kernels=True",
        "model.use_liger=True",
        "model.enable_activation_offload=True",
        "engine.param_offload=True",
        "engine.optimizer_offload=True",
        "engine.pad_to_length=True",
        "+engine.no_such_key=3",
    ],
)
def test_words_that_withdraw_the_verdict(tmp_path: Path, word: str) -> None:
    """A key that is unknown, or that changes memory or time without a formula, keeps the run."""
    found = checked(tmp_path, word)
    assert found.run is not None
    assert found.withdrawn


def test_options_replace_open_values(tmp_path: Path) -> None:
    """The last part of a path names the model; `--model` and `--seq-length` replace both keys."""
    assert run_in(checked(tmp_path, "model.path=$HOME/models/Qwen3-8B")).model.num_layers == 36
    found = checked(tmp_path, "model.path=$MODEL", "data.max_length=$LENGTH")
    assert found.run is None
    path = str(tmp_path / "run.sh")
    options = {"model": "qwen3-8b", "seq_length": 1024}
    found = read_checked(path, world_size=8, gpu="h100-80gb", **options)  # type: ignore[arg-type]
    assert not found.withdrawn
    run = run_in(found)
    # 8 sequences of 1,024 tokens in one micro-batch
    assert (run.seq_length, run.strategy.micro_batch, run.model.num_layers) == (1024, 8, 36)


def test_other_trainers_are_refused(tmp_path: Path) -> None:
    """Trainers of reinforcement learning hold other models."""
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo data.train_batch_size=8\n")
    with pytest.raises(DocumentError, match="verl"):
        read_checked(str(tmp_path / "run.sh"), world_size=8, gpu="h100-80gb")


def test_a_plan_has_its_price(tmp_path: Path) -> None:
    """An export names weights, data and nothing else, and is the run of verl."""
    trained = as_trained("verl", run_in(checked(tmp_path)))
    place = ExportTarget(num_nodes=1, gpus_per_node=8, model="qwen3-8b")
    found = written(trained, engine="verl", place=place)
    assert found.losses == ()
    assert account_of(found.runs).peak_bytes == account_of(trained).peak_bytes
    assert found.launch.count(":?") == 1
    assert 'model.path="${LOAD:-Qwen/Qwen3-8B}"' in found.launch
    one = replace(trained, gpu="V100")
    with pytest.raises(UnsupportedError):
        written(as_trained("verl", one), engine="verl", place=place)
