"""Gradients that FSDP of accelerate reduces after each micro-batch (`sync_each_batch`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar import ask
from autopar.price.account import account_of
from autopar.price.job import job_of_run
from autopar.run.run import Run, run_with_micro_batch
from search.engines.reader import CheckedFile
from search.engines.table import read_checked

FULL: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "dtype": "bfloat16",
    "bf16": False,
    "max_length": 4096,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "attn_implementation": "flash_attention_2",
    "gradient_checkpointing": False,
    "optim": "adamw_torch_fused",
}
FSDP = {
    "distributed_type": "FSDP",
    "num_processes": 4,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_activation_checkpointing": True,
    },
}


def synced(value: object = True) -> dict[str, Any]:
    """Return the argument of the Trainer."""
    return {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": value}}}


def checked(folder: Path, document: dict[str, Any], words: str = "") -> CheckedFile:
    """Return the result of checking a script that starts TRL with FSDP."""
    write(folder, document, words)
    return read_checked(str(folder / "launch.sh"), world_size=4, gpu="l40s")


def write(folder: Path, document: dict[str, Any], words: str = "") -> None:
    """Write the script and its files."""
    (folder / "fsdp.yaml").write_text(yaml.safe_dump(FSDP))
    (folder / "sft.yaml").write_text(yaml.safe_dump(document))
    (folder / "launch.sh").write_text(
        f"accelerate launch --config_file fsdp.yaml -m trl.scripts.sft --config sft.yaml {words}\n"
    )


def run_in(found: CheckedFile) -> Run:
    """Return the priced run of a file; its absence fails the test."""
    assert found.run is not None, found.findings
    return found.run


def test_files_and_commands_set_it(tmp_path: Path) -> None:
    """As a section of YAML, and as JSON of a command."""
    plain = checked(tmp_path, FULL)
    assert not run_in(plain).syncs_each_batch
    in_file = checked(tmp_path, {**FULL, **synced()})
    text = json.dumps(synced()["accelerator_config"])
    on_command = checked(tmp_path, FULL, f"--accelerator_config '{text}'")
    for found in (in_file, on_command):
        assert run_in(found).syncs_each_batch
        assert not found.withdrawn
    assert not run_in(checked(tmp_path, {**FULL, **synced(False)})).syncs_each_batch
    # one micro-batch is reduced once in either case
    single = {**FULL, "gradient_accumulation_steps": 1}
    assert run_in(checked(tmp_path, {**single, **synced()})) == run_in(checked(tmp_path, single))


@pytest.mark.parametrize(
    "more",
    [
        {"split_batches": True},
        {"gradient_accumulation_kwargs": {"num_steps": 2}},
        {"gradient_accumulation_kwargs": {"no_such_key": 2}},
    ],
)
def test_other_settings_withdraw_the_verdict(tmp_path: Path, more: dict[str, Any]) -> None:
    """Keys that change the batch, and unknown ones."""
    assert checked(tmp_path, {**FULL, "accelerator_config": more}).withdrawn
    assert not checked(tmp_path, {**FULL, "accelerator_config": {"even_batches": True}}).withdrawn


def test_memory_and_time(tmp_path: Path) -> None:
    """No whole gradients of 2 bytes an element are kept; each micro-batch has a message."""
    run = run_in(checked(tmp_path, FULL))
    each = run_with_micro_batch(run, 8, synced=True)
    before, after = account_of(run), account_of(each)
    kept = {term.name: term.num_bytes for term in before.peak}
    elements = kept["gradients of earlier micro-batches"] / 2
    assert elements == pytest.approx(8.03e9, rel=0.01)
    saved = before.peak_bytes - after.peak_bytes
    # the input of a reduction is the largest unit at most: embedding and head
    assert 2 * elements - 2 * 2 * 128256 * 4096 <= saved <= 2 * elements
    assert job_of_run(each).reduce_every_micro_batch
    assert not job_of_run(run).reduce_every_micro_batch


ASKED = {"model": "llama3-8b", "hardware": "l40s:1x4", "seq-length": "4096", "engine": "accelerate",
         "global-batch-size": "128"}  # fmt: skip
PURE = {**ASKED, "pure-bf16": True}


def test_a_search_offers_it() -> None:
    """A batch that needs several micro-batches fits only with it; adapters do not need it."""
    found = ask("search", **PURE, sft=True, output_config_path="none").to_dict()
    assert found["exit_code"] == 0
    assert found["launch"]["settings"] == {"runtime.states.each_micro_batch": True}
    own = ask("search", **ASKED, lora="16", output_config_path="none").to_dict()
    assert own["launch"]["settings"] == {}


@pytest.mark.parametrize("program", ["", "llamafactory", "ms-swift"])
def test_a_plan_runs_it(tmp_path: Path, program: str) -> None:
    """The export sets it, with a smaller micro-batch where the program holds all logits."""
    plan, files = tmp_path / "plan.json", tmp_path / "files"
    ask("search", **PURE, sft=True, output_config_path=str(plan))
    to = {"to": program} if program else {}
    found = ask("export", str(plan), out=str(files), **to).to_dict()
    assert found["exit_code"] == 0
    assert found["losses"] == []
    again = ask("check", str(files / "launch.sh"), hardware="l40s:1x4").to_dict()
    (launch,) = again["launches"]
    assert launch["odds_of_oom"] < 0.01
    name = {"": "sft.yaml", "llamafactory": "train.yaml", "ms-swift": "swift.yaml"}[program]
    document = yaml.safe_load((files / name).read_text())
    assert document["accelerator_config"] == synced()["accelerator_config"]
    small = document["per_device_train_batch_size"] < 4
    assert small is bool(program)


def test_a_check_proposes_it(tmp_path: Path) -> None:
    """Micro-batches and their reduction change together, until the run fits."""
    write(tmp_path, FULL)
    found = ask("check", str(tmp_path / "launch.sh"), hardware="l40s:1x4").to_dict()
    (launch,) = found["launches"]
    assert launch["odds_of_oom"] > 0.9
    best = launch["neighbours"]["any"]
    assert best["odds_of_oom"] < 0.01
    flags = {one["flag"]: one["after"] for one in best["arguments"]}
    assert flags["--per_device_train_batch_size"] == "4"
    assert json.loads(flags["--accelerator_config"]) == synced()["accelerator_config"]


def test_an_export_recomputes_where_no_micro_batch_fits(tmp_path: Path) -> None:
    """Logits of one sequence are too many next to saved activations of all layers."""
    plan, files = tmp_path / "plan.json", tmp_path / "files"
    asked = {"model": "qwen2.5-7b", "hardware": "l40s:1x8", "engine": "accelerate", "lora": "32",
             "seq-length": "2048", "global-batch-size": "128"}  # fmt: skip
    found = ask("search", **asked, output_config_path=str(plan)).to_dict()
    assert found["launch"]["degrees"]["recompute"] == "none"
    assert ask("export", str(plan), out=str(files), to="ms-swift").to_dict()["exit_code"] == 0
    (launch,) = ask("check", str(files / "launch.sh"), hardware="l40s:1x8").to_dict()["launches"]
    assert launch["odds_of_oom"] < 0.01
    section = json.loads((files / "autopar_fsdp.json").read_text())["fsdp_config"]
    assert section["activation_checkpointing"] is True


def test_a_program_without_room_says_so_in_its_object(folder: Path) -> None:
    """A plan that fits with the fused head of TRL, and not with the logits of another program."""
    plan, files = folder / "plan.json", folder / "job"
    words = {"model": "qwen3-8b", "hardware": "a100-40gb:1x8", "engine": "accelerate"}
    sizes = {"lora": "8", "seq_length": "32768", "micro_batch_size": "1"}
    asked = ask("search", **words, **sizes, output_config_path=str(plan))
    assert asked.to_dict()["exit_code"] == 0
    found = ask("export", str(plan), out=str(files), to="llamafactory").to_dict()
    assert (found["exit_code"], found["status"], found["files"]) == (3, "refused", [])
    (one,) = found["losses"]
    assert one["field"] == "memory"
    assert "GiB" in one["what"]
    assert not files.exists()
