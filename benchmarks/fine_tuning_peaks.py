"""Published memory of fine-tuning runs, compared with `autopar check` of launches that do the same.

`python -m benchmarks.fine_tuning_peaks [--rows FILE] [--json OUT]`

Each row of `tests/data/fine_tuning_peaks.csv` is written as an accelerate launch of a script with
the arguments of transformers and TRL, and read by the product's own reader. Rows come from three
sources: Answer.AI's FSDP-QLoRA (its own loop on FSDP1), PEFT (transformers' Trainer), and
torchtune, whose recipes are no files that autopar reads: their settings are written with words of
TRL. Measured figures are reserved bytes, bytes of nvidia-smi (with the context) or active bytes.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from autopar.documents.json import write_json
from autopar.errors import InputError
from autopar.price.account import account_of
from autopar.price.allocator import RESERVED_RATIOS
from autopar.price.oom_risk import CONTEXT_BYTES, reserved_interval
from autopar.records import replace
from autopar.units import GIB
from search.engines.table import read_checked

__all__ = ["Compared", "compared", "launch_of", "main", "read_rows"]

ROWS = Path(__file__).resolve().parent.parent / "tests" / "data" / "fine_tuning_peaks.csv"
Row = Mapping[str, str]
_MODULES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "up": "up_proj",
    "down": "down_proj",
    "gate": "gate_proj",
}
_MODELS = {
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B",
}
_YI = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 20480,
    "num_hidden_layers": 60,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""The config.json of 01-ai/Yi-34B, which autopar has no sizes of."""


_IN_BACKWARD = ("30", "42")
"""Rows whose optimizer steps in the backward, which no argument of a launch sets.

Row 30 notes it; row 42 is below the bytes of weights, gradients and moments."""


class Compared(NamedTuple):
    """One row with its measured and its predicted bytes."""

    row: Row
    measured_bytes: float
    predicted_bytes: float
    """Bytes of the measured kind: allocated, or the middle of the interval of reserved bytes."""
    interval_bytes: tuple[float, float]
    verdict: bool
    """True if `autopar check` gives a verdict over memory."""

    @property
    def error(self) -> float:
        """Predicted over measured bytes, less one."""
        return self.predicted_bytes / self.measured_bytes - 1.0

    @property
    def covered(self) -> bool:
        """True if the measured bytes are within the interval."""
        low, high = self.interval_bytes
        return low <= self.measured_bytes <= high


def read_rows(path: Path = ROWS) -> list[Row]:
    """Return the rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def launch_of(row: Row) -> dict[str, str]:
    """Return the files of a launch with the settings of a row: `run.sh` and the others."""
    files: dict[str, str] = {}
    name = _MODELS.get(row["model"], "model")
    if name == "model":
        files["model/config.json"] = json.dumps(_YI)
    config = _accelerate(row)
    if row["sharding"] == "zero3":
        files["ds.json"] = json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": 3},
            }
        )
    files["accelerate.yaml"] = "".join(f"{line}\n" for line in config)
    words = " ".join([f"--model_name_or_path {name}", *_words(row)])
    program = "examples/sft/train.py"
    files["run.sh"] = f"accelerate launch --config_file accelerate.yaml {program} {words}\n"
    return files


def _is_answer(row: Row) -> bool:
    return row["source"].startswith("AnswerDotAI")


def _is_torchtune(row: Row) -> bool:
    return "torchtune" in row["source"]


def _is_loop(row: Row) -> bool:
    """Return True for a loop without Trainer, which has no `--optim` and uses `AdamW` of torch.

    Answer.AI's train.py, and run.py of PEFT's method comparison.
    """
    return _is_answer(row) or "method_comparison" in row["source"]


def _accelerate(row: Row) -> Iterator[str]:
    """Yield the lines of the accelerate configuration of a row."""
    kind = {"full_shard": "FSDP", "zero3": "DEEPSPEED", "ddp": "MULTI_GPU", "none": "NO"}
    yield f"distributed_type: '{kind[row['sharding']]}'"
    yield f"num_processes: {row['gpus']}"
    yield "num_machines: 1"
    # Answer.AI and torchtune compute in the type of the weights, without autocast.
    yield f"mixed_precision: '{'no' if _is_answer(row) or _is_torchtune(row) else 'bf16'}'"
    if row["sharding"] == "full_shard":
        yield "fsdp_config:"
        yield "  fsdp_version: 1"
        yield "  fsdp_sharding_strategy: FULL_SHARD"
        yield "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        yield f"  fsdp_offload_params: {str(row['offload'] == '1').lower()}"
    if row["sharding"] == "zero3":
        yield "deepspeed_config:"
        yield "  deepspeed_config_file: ds.json"


def _words(row: Row) -> Iterator[str]:
    """Yield the arguments of the script."""
    yield f"--max_length {row['seq']}"
    yield f"--per_device_train_batch_size {row['micro_batch']}"
    yield "--attn_implementation sdpa"
    if row["checkpointing"] == "full":
        yield "--gradient_checkpointing True"
    # All three load weights in bf16; Answer.AI and torchtune train in that type.
    yield "--dtype bfloat16"
    if not (_is_loop(row) or _is_torchtune(row)):
        yield "--bf16 True"
    if not _is_loop(row):
        names = {"adamw_torch_fused": "adamw_torch_fused"}
        yield f"--optim {names.get(row['optimizer'], 'paged_adamw_8bit')}"
    if _is_torchtune(row):
        if row["checkpointing"] == "full" or row["loss"] == "chunked":
            yield "--torch_compile True"
        if row["loss"] == "chunked":
            yield "--use_liger_kernel True"
    if row["offload"] == "activations":
        yield "--activation_offloading True"
    if row["train"] in ("lora", "qlora", "dora", "vera"):
        yield "--use_peft True"
        # VeRA trains vectors, as many elements as a rank of 1
        yield f"--lora_r {1 if row['train'] == 'vera' else row['rank']}"
        # defaults of Answer.AI's train.py, and the command of PEFT's documentation
        dropout = _is_answer(row) or "docs" in row["source"]
        yield f"--lora_dropout {'0.1' if dropout else '0.0'}"
        names = row["targets"] or "q,v,o,gate,up,down"
        targets = [_MODULES.get(name, name) for name in names.split(",")]
        yield f"--lora_target_modules {' '.join(targets)}"
    if row["train"] == "qlora":
        # default of `Linear4bit` of bitsandbytes, and of the examples of PEFT
        yield "--load_in_4bit True --use_bnb_nested_quant True"
        yield "--bnb_4bit_quant_storage bfloat16"
    if row["train"] == "dora":
        yield "--use_dora True"


def compared(rows: Sequence[Row]) -> Iterator[Compared | str]:
    """Yield each row with its prediction, or the reason why it has none."""
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            yield _compared(row, Path(folder) / row["id"])


def _compared(row: Row, folder: Path) -> Compared | str:
    for name, text in launch_of(row).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    try:
        found = read_checked(str(folder / "run.sh"), gpu=row["card"], world_size=int(row["gpus"]))
    except InputError as error:
        return f"{row['id']}: {error}"
    run = found.run
    if run is None:
        said = [str(one) for one in found.findings]
        return f"{row['id']}: {'; '.join(said)}"
    if row["id"] in _IN_BACKWARD:
        optimizer = replace(run.runtime.optimizer, layerwise=True)
        run = replace(run, runtime=replace(run.runtime, optimizer=optimizer))
    peak = account_of(run).peak_bytes
    low, high = reserved_interval(run, peak)
    if row["measured_kind"] == "active":
        # without the free blocks of the allocator
        least, _, most = RESERVED_RATIOS
        low, predicted, high = low / most, float(peak), high / least
    else:
        outside = CONTEXT_BYTES if row["measured_kind"] == "nvidia-smi" else 0
        low, high = low + outside, high + outside
        predicted = (low * high) ** 0.5
    return Compared(
        row=row,
        measured_bytes=float(row["measured_gib"]) * GIB,
        predicted_bytes=predicted,
        interval_bytes=(low, high),
        verdict="memory" not in found.withdrawn,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the error of every row, and median and coverage by source."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    done: list[Compared] = []
    for found in compared(read_rows(asked.rows)):
        if isinstance(found, str):
            print(found)
            continue
        done.append(found)
        row, (low, high) = found.row, (end / GIB for end in found.interval_bytes)
        sizes = f"{found.measured_bytes / GIB:6.2f}  {found.predicted_bytes / GIB:6.2f}"
        print(
            f"{row['id']}  {row['model']:12} {row['train']:18} {row['sharding']:10} {sizes} "
            f"({low:6.2f} to {high:6.2f})  {100 * found.error:+6.1f} %"
            f"{'' if found.covered else '  outside'}{'' if found.verdict else '  no verdict'}"
        )
    groups: dict[str, list[Compared]] = defaultdict(list)
    for found in done:
        groups[found.row["source"].split(" ")[0].split("/")[1]].append(found)
        groups["all"].append(found)
    for name, own in groups.items():
        errors = sorted(abs(one.error) for one in own)
        inside, verdicts = sum(one.covered for one in own), sum(one.verdict for one in own)
        print(
            f"{name}: {len(own)} rows, median error {100 * median(errors):.1f} %, largest "
            f"{100 * errors[-1]:.0f} %, {inside} inside the interval, {verdicts} with a verdict"
        )
    if asked.json is not None:
        write_json(asked.json, [one._asdict() for one in done])
    return 0


if __name__ == "__main__":
    sys.exit(main())
