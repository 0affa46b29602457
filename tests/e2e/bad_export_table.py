"""The rows of the table of bad input that `autopar-export` answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.bad_input_table import STRATEGY, Case, case_of, changed, write

COMMAND = "autopar-export"
PLAN: dict[str, Any] = {**STRATEGY, "dp_types_enc": "0,0", "checkpoint": "1,1", "vtp": 2}
MODEL = ("--model", "llama2-7b", "--num-layers", "2")
NODES = ("--num-nodes", "1", "--num-gpus-per-node", "8")
TO = ("plan.json", "--to", "megatron", *MODEL, *NODES, "--out", "here")
SCRIPT = """TP=2
ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 2
    --num-layers 4
    --micro-batch-size 1
    --global-batch-size 8
    --sequence-parallel
    --overlap-grad-reduce
    --bf16
)
torchrun --nproc-per-node 8 pretrain_gpt.py ${ARGS[@]}
"""
GLOBAL = """runtime:
  parallel:
    pp_deg: 2
    global_tp_deg: 2
    reduce_in_fp32: true
  model:
    num_layers: 4
  train:
    global_batch_size: 8
    chunks: 2
"""
MEGATRON = ("--from", "megatron", "train.sh")
GALVATRON = ("--from", "galvatron", "train_dist.yaml", *NODES)
GOOD = (TO, MEGATRON, GALVATRON, ("--from", "galvatron", "plan.json"))
"""What the rows start from, and what is done without a word of complaint."""


def prepare_exports(folder: Path) -> None:
    """Add a plan and configurations of engines to a folder."""
    write(folder / "plan.json", PLAN)
    (folder / "train.sh").write_text(SCRIPT, encoding="utf-8")
    (folder / "train_dist.yaml").write_text(GLOBAL, encoding="utf-8")


def _replaced(file: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / file).read_text(encoding="utf-8")
        assert old in text
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")

    return edit


_case = partial(case_of, COMMAND)


def cases() -> Iterator[Case]:
    """Yield every row."""
    section = "autopar-export: options"
    yield _case(section, "neither --to nor --from", ("plan.json", *MODEL))
    yield _case(section, "both --to and --from", (*TO, "--from", "megatron"))
    yield _case(section, "unknown engine", ("plan.json", "--to", "megatorn", *MODEL))
    yield _case(section, "engine that is not read", ("plan.json", "--from", "deepsped"))
    yield _case(section, "launch of no trainer", ("plan.json", "--from", "deepspeed"))
    yield _case(section, "no plan", ("--to", "megatron"))
    yield _case(section, "no model", ("plan.json", "--to", "megatron", *NODES))
    yield _case(section, "unknown option", (*TO, "--allow-aprox"))
    yield _case(section, "nodes that are not the plan's", (*TO[:7], "--num-nodes", "2", *NODES[2:]))
    yield _case(section, "hardware of another size", (*TO[:7], "--hardware", "a100-80gb:2x8"))
    yield _case(section, "output is a file", (*TO[:-1], "plan.json"))
    yield Case(
        section=section,
        what="JSON to a folder",
        arguments=(*TO, "--json", "folder"),
        edit=lambda folder: (folder / "folder").mkdir(),
        command=COMMAND,
    )
    yield _case(section, "JSON to the folder of the files", (*TO, "--json", "here"))
    yield _case(section, "JSON to the plan", (*TO, "--json", "plan.json"))

    section = "autopar-export: plans"
    yield _case(section, "missing plan", ("none.json", *TO[1:]))
    yield _case(section, "plan of another model", ("plan.json", *TO[1:5], *NODES, "--out", "here"))
    yield _case(section, "illegal plan", TO, changed("plan.json", ("global_bsz",), 6))
    yield _case(section, "unknown key", TO, changed("plan.json", ("tp_size",), "2,2"))
    yield _case(
        section,
        "GPipe with too few micro-batches",
        TO,
        lambda folder: write(folder / "plan.json", {**PLAN, "pipeline_type": "gpipe", "chunks": 1}),
    )
    t5 = {**PLAN, "tp_sizes_enc": "2,2,2,2", "pp_division": "2,2"}
    t5 |= dict.fromkeys(("tp_consecutive_flags", "checkpoint"), "1,1,1,1")
    t5 |= dict.fromkeys(("dp_types_enc", "use_sp"), "0,0,0,0")
    yield _case(
        section,
        "model of another architecture",
        ("plan.json", "--to", "megatron", "--model", "t5-3b", "--num-layers", "2,2", *NODES),
        lambda folder: write(folder / "plan.json", t5),
    )
    yield _case(
        section,
        "stages for an engine without",
        ("plan.json", "--to", "accelerate", *MODEL, *NODES),
    )

    section = "autopar-export: configurations of engines"
    yield _case(section, "missing file", ("--from", "megatron", "none.sh"))
    yield _case(section, "folder", ("--from", "megatron", "."))
    yield _case(
        section,
        "no launch",
        ("--from", "torchtitan", "plan.json", "--hardware", "h100:1x8"),
    )
    yield _case(
        section,
        "script without a launch",
        MEGATRON,
        lambda folder: (folder / "train.sh").write_text("echo 1\n", encoding="utf-8") and None,
    )
    yield _case(section, "open quote", MEGATRON, _replaced("train.sh", "TP=2", "TP='2"))
    yield _case(section, "unknown variable", MEGATRON, _replaced("train.sh", "TP=2", "PP=2"))
    for what, old, new in (
        ("number of GPUs unknown", "--nproc-per-node 8", ""),
        ("no layers", "--num-layers 4", ""),
        ("layers that stages do not divide", "--num-layers 4", "--num-layers 5"),
        ("batch that is no multiple", "--global-batch-size 8", "--global-batch-size 9"),
        ("GPUs that degrees do not divide", "TP=2", "TP=3"),
        ("expert degree", "--bf16", "--bf16 --expert-model-parallel-size 2"),
        ("interleaved schedule", "--bf16", "--bf16 --num-virtual-stages-per-pipeline-rank 2"),
        ("layout", "--bf16", "--bf16 --pipeline-model-parallel-layout 'Et*3|t*2L'"),
        ("layout of other letters", "--bf16", "--bf16 --pipeline-model-parallel-layout 'Ex|tL'"),
        ("all-to-all beside tensor", "--bf16", "--context-parallel-size 2 --cp-comm-type a2a"),
        ("recomputation without a method", "--bf16", "--bf16 --recompute-granularity full"),
        (
            "script that depends on a file",
            "torchrun",
            "if [ -f x ]; then\nARGS+=(--num-layers 8)\nfi\ntorchrun",
        ),
    ):
        yield _case(section, what, MEGATRON, _replaced("train.sh", old, new))
    yaml = "train_dist.yaml"
    yield _case(section, "YAML with a tag", GALVATRON, _replaced(yaml, "pp_deg: 2", "pp_deg: !x 2"))
    yield _case(
        section, "YAML, indented wrongly", GALVATRON, _replaced(yaml, "    pp_deg", "   pp_deg")
    )
    yield _case(section, "no degrees", GALVATRON, _replaced(yaml, "parallel:", "other:"))
    yield _case(
        section, "no layers of the model", GALVATRON, _replaced(yaml, "num_layers: 4", "x: 1")
    )
    yield _case(section, "no batch", GALVATRON, _replaced(yaml, "global_batch_size: 8", "x: 1"))
    yield _case(
        section, "text for a number", GALVATRON, _replaced(yaml, "pp_deg: 2", "pp_deg: two")
    )
    yield _case(section, "text for a flag", GALVATRON, _replaced(yaml, "chunks: 2", "sdp: maybe"))
    yield _case(section, "no cluster", GALVATRON[:3])
    yield _case(
        section,
        "strategy by a variable",
        GALVATRON,
        _replaced(yaml, "pp_deg: 2", "galvatron_config_path: ${HERE}/x.json"),
    )
    yield _case(
        section,
        "missing strategy",
        GALVATRON,
        _replaced(yaml, "pp_deg: 2", "galvatron_config_path: gone.json"),
    )
    yield _case(
        section,
        "broken strategy",
        ("--from", "galvatron", "plan.json"),
        changed("plan.json", ("pp_division",), "1,2"),
    )
    yield _case(
        section,
        "JSON list",
        ("--from", "megatron", "list.json"),
        lambda folder: (
            (folder / "list.json").write_text(json.dumps([1]), encoding="utf-8") and None
        ),
    )
