"""`autopar check --diff`: the patched file, read again, is the suggested run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from search.check.patch import patch_of
from search.commands import check
from search.engines.reader import CheckedFile
from search.engines.table import read_checked

SCRIPT = """\
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py \\
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \\
  --group-query-attention --num-query-groups 8 --vocab-size 128256 --swiglu --bf16 \\
  --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope \\
  --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \\
  --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 256 \\
  --recompute-granularity full \\
  --recompute-method uniform --recompute-num-layers 1 \\
  --tensor-model-parallel-size {tp} --pipeline-model-parallel-size 2 --sequence-parallel \\
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
"""
TOML = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 8192
[parallelism]
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "none"
[compile]
enable = true
"""
ZERO = """\
{
  "train_micro_batch_size_per_gpu": 1,
  "gradient_accumulation_steps": 8,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3, "overlap_comm": true}
}
"""
AXOLOTL = """\
base_model: Qwen/Qwen3-8B
adapter: lora
lora_r: 16
lora_target_linear: true
lora_mlp_kernel: false
datasets: [data]
sequence_len: {length}
micro_batch_size: {micro}
gradient_accumulation_steps: 2
attn_implementation: flash_attention_2
bf16: true
"""
AUTOMODEL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: 64
  local_batch_size: 1
model:
  pretrained_model_name_or_path: Qwen/Qwen3-8B
  force_hf: true
  use_liger_kernel: false
distributed:
  strategy: fsdp2
  activation_checkpointing: true
dataset:
  seq_length: 1024
"""
VERL = """\
torchrun --nproc_per_node 8 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B \\
  data.train_batch_size=64 data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=1 \\
  data.max_length=1024 engine.strategy=fsdp2 model.enable_gradient_checkpointing=True
"""
SOURCED = 'source "$(dirname "$0")/sizes.sh"\n' + SCRIPT.format(tp=4).replace("80", "$LAYERS", 1)
MODEL = ("--model", "llama3-8b", "--seq-length", "8192")


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("job.sh", SCRIPT.format(tp=4), ("--hardware", "h100:8x8")),
        ("job.sh", "TP=${TP:-4}\n" + SCRIPT.format(tp='"$TP"'), ("--hardware", "h100:8x8")),
        ("job.toml", TOML, ("--hardware", "h100:4x8")),
        ("ds.json", ZERO, ("--hardware", "h200:1x8", *MODEL)),
        ("jobs/job.sh", SOURCED, ("--hardware", "h100:8x8")),
        # a key is removed, and one is added
        (
            "job.yaml",
            AXOLOTL.format(micro=1, length=2048) + "gradient_checkpointing: true\n",
            ("--hardware", "h100:1x8"),
        ),
        ("job.yaml", AXOLOTL.format(micro=2, length=8192), ("--hardware", "h100:1x8")),
        ("recipe.yaml", AUTOMODEL, ("--hardware", "h100:1x8")),
        ("run.sh", VERL, ("--hardware", "h100:1x8")),
    ],
)
def test_a_patched_file_is_the_suggested_run(
    name: str,
    text: str,
    options: tuple[str, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`patch` applies the diff, and the step time of the new file is the one suggested."""
    Path("jobs").mkdir()
    Path("jobs/sizes.sh").write_text("LAYERS=80\n", encoding="utf-8")
    Path(name).write_text(text, encoding="utf-8")
    (before,) = _launches(capsys, name, *options)
    assert check.run([name, *options, "--diff"]) == 0
    subprocess.run(
        ["patch", "-p0"], input=capsys.readouterr().out, text=True, check=True, timeout=30
    )
    (after,) = _launches(capsys, name, *options, "--no-neighbours")

    assert Path(name).read_text(encoding="utf-8") != text
    assert after["step_time_s"] == before["neighbours"]["any"]["step_time_s"]
    assert after["step_time_s"] != before["step_time_s"]


def _launches(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert check.run([*words, "--json", "-"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["launches"]
    return found


def test_a_value_that_is_no_text_is_not_patched(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A computed value: the arguments to change are in the error."""
    Path("job.sh").write_text("TP=$((2 - 1))\n" + SCRIPT.format(tp="$TP"), encoding="utf-8")
    assert check.run(["job.sh", "--hardware", "h100:8x8", "--diff"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "+ --tensor-model-parallel-size 8" in err


def test_a_change_that_reads_as_another_run_is_no_patch(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(SCRIPT.format(tp=4), encoding="utf-8")
    file = read_checked(str(path), world_size=64, gpu="h100-80gb")
    changes = (("tensor-model-parallel-size", "4", "8"),)
    assert file.run is not None

    def read(name: str, text: str | None = None) -> CheckedFile:
        return read_checked(name, world_size=64, gpu="h100-80gb", text=text)

    assert patch_of(file, changes, file.run, read) is None
    path.write_text(SCRIPT.format(tp=8), encoding="utf-8")
    wanted = read(str(path)).run
    assert wanted is not None
    path.write_text(SCRIPT.format(tp=4), encoding="utf-8")
    found = patch_of(file, changes, wanted, read)
    assert found is not None
    assert "\n+  --tensor-model-parallel-size 8 " in found


def test_flags_are_removed_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(SCRIPT.format(tp=4), encoding="utf-8")
    file = read_checked(str(path), world_size=64, gpu="h100-80gb")
    names = ("recompute-granularity", "recompute-method", "recompute-num-layers")
    changes = tuple((name, " ".join(file.words[name]), None) for name in names)
    kept = "\n".join(line for line in SCRIPT.format(tp=4).split("\n") if "recompute" not in line)
    (tmp_path / "wanted.sh").write_text(kept, encoding="utf-8")

    def read(name: str, text: str | None = None) -> CheckedFile:
        return read_checked(name, world_size=64, gpu="h100-80gb", text=text)

    wanted = read(str(tmp_path / "wanted.sh")).run
    assert wanted is not None
    found = patch_of(file, changes, wanted, read)
    assert found is not None
    lines = found.splitlines()
    assert [line for line in lines[2:] if line.startswith("+")] == []
    assert sum("recompute" in line for line in lines if line.startswith("-")) == 2
