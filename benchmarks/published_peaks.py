"""Published peaks of real models, by pipeline stage, compared with counts from their launches.

`python -m benchmarks.published_peaks [--rows TEXT] [--json OUT] [--docs]`

`benchmarks.memory_goldens` prices the engine's own tests, all of the last stage; this benchmark
uses tables that others published (`tests/data/published_peaks.csv`). SimuMax measured 19 launches
of four models on eight B200, every rank, allocated and reserved; its launcher contains the
arguments. Notes of Megatron-Bridge list two runs of Qwen3 30B with arguments from its recipe.
Korthikanti et al. (arXiv 2205.05198, figure 1) counted eight launches, which could not be run.
Other rows of `published_runs` with a memory figure are listed with the reason why they are not
compared.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from autopar.documents.json import write_json
from autopar.price.account import Account, account_of
from autopar.price.oom_risk import (
    CONTEXT_BYTES,
    PEAK_RATIOS,
    kind_of,
    oom_probability_at,
    reserved_interval,
)
from autopar.run.run import Run
from autopar.units import GIB, MIB
from benchmarks import memory_odds as odds
from benchmarks.intervals import Covered
from benchmarks.ledger_docs import write_tables
from search.engines.megatron.read import read_run
from search.engines.megatron.release import Release
from tests.data.read import read_csv

__all__ = [
    "Compared",
    "errors_by_source",
    "first_counts",
    "main",
    "not_compared",
    "peaks_table",
    "published_peaks",
    "reserve_odds",
    "reserved_ratios",
    "summary_table",
]

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
PAGE = ROOT / "docs" / "concepts" / "memory.md"
PEAKS = "published_peaks"
RUNS = "published_runs"


class Compared(NamedTuple):
    """One stage of one launch with its published and its counted bytes."""

    source: str
    name: str
    stage: int
    what: Literal["allocated", "counted"]
    """Measured by torch's allocator, or counted by the authors."""
    run: Run
    account: Account
    published_bytes: float
    ours_bytes: float
    reserved_bytes: tuple[float, float] | None
    """Least and most reserved bytes of the ranks of the stage; None: not published."""
    first_bytes: float | None = None
    """Bytes counted before the causes of its error were known; None: as `ours_bytes`."""

    @property
    def error(self) -> float:
        """Ours over published bytes, less one."""
        return self.ours_bytes / self.published_bytes - 1.0


# --------------------------------------------------------------------------------------------------
# Launches.


def _decoder(sizes: tuple[int, int, int, int], **more: Any) -> dict[str, Any]:
    """Return the arguments of a decoder: hidden and MLP width, heads, vocabulary; others."""
    hidden, ffn, heads, vocab = sizes
    given = {
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        **more,
    }
    return {"--" + name.replace("_", "-"): value for name, value in given.items()}


_MIXTURE: Mapping[str, Any] = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1,
    "moe_pad_expert_input_to_capacity": True,
}
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama3_70b": _decoder(
        (8192, 28672, 64, 128256), group_query_attention=True, num_query_groups=8
    ),
    # its launcher sets 16 groups, where the model's card has 8
    "llama3_405b": _decoder(
        (16384, 53248, 128, 128256), group_query_attention=True, num_query_groups=16
    ),
    "deepseekv2": _decoder(
        (5120, 12288, 128, 102400),
        num_experts=160,
        moe_router_topk=6,
        moe_ffn_hidden_size=1536,
        moe_shared_expert_intermediate_size=3072,
        **_MIXTURE,
    ),
    "deepseekv3": _decoder(
        (7168, 18432, 128, 129280),
        num_experts=256,
        moe_router_topk=8,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        **_MIXTURE,
    ),
    "qwen3_30b": _decoder(
        (2048, 6144, 32, 151936),
        group_query_attention=True,
        num_query_groups=4,
        kv_channels=128,
        qk_layernorm=True,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
    ),
}
_COMMON: Mapping[str, Any] = {
    "--swiglu": True,
    "--normalization": "RMSNorm",
    "--position-embedding-type": "rope",
    "--untie-embeddings-and-output-weights": True,
    "--disable-bias-linear": True,
    "--attention-dropout": 0.0,
    "--hidden-dropout": 0.0,
    "--micro-batch-size": 1,
    "--bf16": True,
    "--use-distributed-optimizer": True,
    "--cross-entropy-loss-fusion": True,
    "--cross-entropy-fusion-impl": "te",
    "--no-create-attention-mask-in-dataloader": True,
}
_SIMUMAX: Mapping[str, Any] = {
    "--sequence-parallel": True,
    "--tokenizer-type": "NullTokenizer",
    "--train-iters": 3,
}
"""Arguments that its launcher sets per model, in addition to the common ones."""
_BRIDGE: Mapping[str, Any] = {
    "--expert-tensor-parallel-size": 1,
    "--grad-reduce-in-bf16": True,
    "--overlap-grad-reduce": True,
    "--overlap-param-gather": True,
    "--moe-router-force-load-balancing": True,
    "--train-iters": 8,
}
"""Arguments of the recipe of Qwen3 30B."""
_MICRO_BATCHES = 4
_TRAINER = Release(date="2025-10-01")
"""Megatron-LM 0.14, whose stand-in tokenizer adds the end of document to the vocabulary."""


def _measured() -> Iterator[Compared]:
    for row in read_csv(DATA, PEAKS):
        tp, pp, cp, ep = (int(row[key]) for key in ("tp", "pp", "cp", "ep"))
        gpus, layers, stage = (int(row[key]) for key in ("num_gpus", "layers", "stage"))
        bridge = row["source"].startswith("Megatron-Bridge")
        arguments = {
            **_COMMON,
            **(_BRIDGE if bridge else _SIMUMAX),
            **_MODELS[row["model"]],
            "--num-layers": layers,
            "--seq-length": int(row["seq"]),
            "--max-position-embeddings": int(row["seq"]),
            "--tensor-model-parallel-size": tp,
            "--pipeline-model-parallel-size": pp,
            "--context-parallel-size": cp,
            "--expert-model-parallel-size": ep,
            "--global-batch-size": _MICRO_BATCHES * gpus // (tp * pp * cp),
        }
        if cp > 1:
            arguments["--cp-comm-type"] = "a2a"
        if "--num-experts" in arguments and not bridge:
            arguments["--moe-layer-freq"] = f"([0]*1+[1]*{layers - 1})"
        if row["recompute"]:
            arguments["--recompute-granularity"] = "selective"
            arguments["--recompute-modules"] = row["recompute"].split()
        run = read_run(
            arguments,
            world_size=gpus,
            gpu=row["gpu"],
            release=Release() if bridge else _TRAINER,
            source=row["model"],
        ).run
        account = account_of(run, stage)
        degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
        split = " ".join(f"{key} {value}" for key, value in degrees.items() if value > 1)
        length = f", {int(row['seq']) // 1024}k tokens" if cp > 1 else ""
        again = f", recompute {row['recompute']}" if row["recompute"] else ""
        reserved = [row[f"reserved_{end}_mib"] for end in ("least", "most")]
        yield Compared(
            source=row["source"],
            name=f"{row['model']}, {layers} layers, {split}{length}{again}",
            stage=stage,
            what="allocated",
            run=run,
            account=account,
            published_bytes=float(row["allocated_mib"]) * MIB,
            ours_bytes=account.peak_bytes,
            reserved_bytes=(float(reserved[0]) * MIB, float(reserved[1]) * MIB)
            if all(reserved)
            else None,
            first_bytes=float(row["first_counted_mib"]) * MIB if row["first_counted_mib"] else None,
        )


_STATES = ("weights", "gradients", "fp32 weights", "Adam moments")


def _korthikanti() -> Iterator[Compared]:
    """Yield the first stages: states of 18 bytes a parameter, and saved activations."""
    for row in read_csv(DATA, RUNS):
        if not (row["source"].startswith("Korthikanti") and row["peak_mem_gb"]):
            continue
        found = re.search(r"optimizer ([\d.]+), activations ([\d.]+)", row["notes"])
        assert found is not None, "both parts are in the remark"
        sizes = (row["hidden"], row["ffn"], row["heads"], row["vocab"])
        arguments = {
            **_decoder(tuple(map(int, sizes))),  # type: ignore[arg-type]
            "--num-layers": int(row["layers"]),
            "--seq-length": int(row["seq"]),
            "--max-position-embeddings": int(row["seq"]),
            "--micro-batch-size": int(row["micro_batch"]),
            "--global-batch-size": int(row["global_batch"]),
            # gradients of 4 bytes with weights of 2, as in the figure
            "--bf16": True,
            "--attention-backend": "unfused",
            "--tensor-model-parallel-size": int(row["tp"]),
            "--pipeline-model-parallel-size": int(row["pp"]),
        }
        if int(row["vpp"]) > 1:
            arguments["--num-virtual-stages-per-pipeline-rank"] = int(row["vpp"])
        if row["sequence_parallel"] == "1":
            arguments["--sequence-parallel"] = True
        if row["recompute"] == "selective":
            arguments["--recompute-granularity"] = "selective"
            arguments["--recompute-modules"] = ["core_attn"]
        run = read_run(
            arguments, world_size=int(row["num_gpus"]), gpu="A100", source=row["model"]
        ).run
        account = account_of(run, 0)
        parts = (*_STATES, "saved activations")
        yield Compared(
            source="Korthikanti et al., figure 1",
            name=f"{row['model']}, recompute {row['recompute']}",
            stage=0,
            what="counted",
            run=run,
            account=account,
            published_bytes=sum(map(float, found.groups())) * GIB,
            ours_bytes=sum(term.num_bytes for term in account.peak if term.name in parts),
            reserved_bytes=None,
        )


def published_peaks() -> list[Compared]:
    """Return every stage that is compared."""
    return [*_measured(), *_korthikanti()]


_REASONS = (
    ("SimuMax", None),
    ("Korthikanti", None),
    (
        "BigScience",
        "whole GB of a counter that is not named, of DeepSpeed's optimizer on an fp16 trainer",
    ),
    ("Colossal-AI", "sizes of the model, recomputation and micro-batch are not printed"),
    ("torchtitan", "another trainer than Megatron-LM"),
)
"""Sources by the start of their name, with the reason for no comparison; None: compared."""


def not_compared() -> Counter[tuple[str, str]]:
    """Return numbers of published rows with a memory that is not compared, by source and reason."""
    found: Counter[tuple[str, str]] = Counter()
    for row in read_csv(DATA, RUNS):
        if not row["peak_mem_gb"]:
            continue
        name = row["source"]
        start, reason = next(pair for pair in _REASONS if name.startswith(pair[0]))
        if reason is not None:
            found[start, reason] += 1
    return found


def reserved_ratios(rows: Sequence[Compared]) -> list[float]:
    """Return reserved over allocated bytes of the peak rank of every measured stage."""
    return [
        row.reserved_bytes[1] / row.published_bytes
        for row in rows
        if row.reserved_bytes is not None
    ]


def first_counts(rows: Sequence[Compared]) -> list[Covered]:
    """Return how many measured peaks are in the intervals of the first count of their launch.

    No error of these launches was known when they were counted. The bytes that the peak rank of a
    stage reserved are compared with the interval that reports print.
    """
    peaks: list[tuple[str, bool, float]] = []
    reserved: list[tuple[str, bool, float]] = []
    for row in rows:
        if row.what != "allocated":
            continue
        first = row.first_bytes or row.ours_bytes
        low, high = PEAK_RATIOS[kind_of(row.run)]
        peaks.append((row.name, low <= row.published_bytes / first <= high, math.log(high / low)))
        if row.reserved_bytes is not None:
            low, high = reserved_interval(row.run, first)
            inside = low <= row.reserved_bytes[1] <= high
            reserved.append((row.name, inside, math.log(high / low)))
    return [
        Covered(
            name=name,
            rows=len(found),
            sources=len({config for config, _, _ in found}),
            inside=sum(inside for _, inside, _ in found),
            width=float(np.mean([width for _, _, width in found])),
        )
        for name, found in (
            ("first counts, allocated", peaks),
            ("first counts, reserved", reserved),
        )
    ]


def reserve_odds(rows: Sequence[Compared]) -> tuple[float, list[odds.Reliable]]:
    """Return the share of peak ranks inside the 90 % interval, and bins of OOM probability.

    Both are of the first count of each launch. Probabilities are those of `autopar check`, on
    fictitious devices: the memory after the context is the first count times 0.9 to 1.2.
    """
    pairs: list[tuple[float, bool]] = []
    for row in rows:
        if row.reserved_bytes is None:
            continue
        most = row.reserved_bytes[1]
        first = row.first_bytes or row.ours_bytes
        for ratio in np.geomspace(0.9, 1.2, 121):
            left = ratio * first
            pairs.append((oom_probability_at(row.run, first, left + CONTEXT_BYTES), most > left))
    _, reserved = first_counts(rows)
    return reserved.coverage, list(odds.binned(pairs))


# --------------------------------------------------------------------------------------------------
# Output.


def errors_by_source(rows: Sequence[Compared]) -> dict[str, dict[str, float]]:
    """Return by source, and by stage of the measured ones, rows, median and worst error."""
    groups: dict[str, list[Compared]] = {}
    for row in rows:
        groups.setdefault(row.source, []).append(row)
        pp = row.run.strategy.pp
        if row.what == "allocated" and pp > 1:
            place = "last" if row.stage == pp - 1 else "first"
            groups.setdefault(f"{row.source}, {place} of several stages", []).append(row)
    return {
        name: {
            "rows": len(members),
            "median": float(np.median([abs(row.error) for row in members])),
            "worst": max(abs(row.error) for row in members),
        }
        for name, members in groups.items()
    }


def summary_table(rows: Sequence[Compared]) -> str:
    """Return the errors of every source as a table of docs/concepts/memory.md."""
    lines = ["| source | stages | median | worst |", "|---|---|---|---|"]
    for name, found in errors_by_source(rows).items():
        median, worst = (f"{100 * found[key]:.2f} %" for key in ("median", "worst"))
        lines.append(f"| {name} | {found['rows']} | {median} | {worst} |")
    return "\n".join(lines) + "\n"


def peaks_table(rows: Sequence[Compared]) -> str:
    """Return every compared stage as a table."""
    lines = [
        "| launch | stage | published, GiB | ours | error | reserved over allocated |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratios = "-"
        if row.reserved_bytes is not None:
            ends = [f"{size / row.published_bytes:.3f}" for size in row.reserved_bytes]
            ratios = " to ".join(dict.fromkeys(ends))
        lines.append(
            f"| {row.name} | {row.stage} of {row.run.strategy.pp} "
            f"| {row.published_bytes / GIB:.2f} | {row.ours_bytes / GIB:.2f} "
            f"| {100 * row.error:+.2f} % | {ratios} |"
        )
    return "\n".join(lines) + "\n"


def _document(rows: Sequence[Compared]) -> dict[str, Any]:
    return {
        "rows": [
            {
                "source": row.source,
                "name": row.name,
                "stage": row.stage,
                "what": row.what,
                "published_bytes": round(row.published_bytes),
                "ours_bytes": round(row.ours_bytes),
                "terms_bytes": {term.name: term.num_bytes for term in row.account.peak},
            }
            for row in rows
        ]
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every compared stage, and the errors of every source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", metavar="TEXT", help="print rows whose name has TEXT, by terms")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every row's bytes")
    parser.add_argument(
        "--docs", action="store_true", help="write the tables of docs/concepts/memory.md"
    )
    asked = parser.parse_args(arguments)
    rows = published_peaks()
    if asked.rows is not None:
        for row in rows:
            if asked.rows.lower() in row.name.lower():
                print(f"{row.name}, stage {row.stage}: {100 * row.error:+.2f} %")
                for term in row.account.peak:
                    print(f"    {term.num_bytes / MIB:12.3f} MiB  {term.name} ({term.switch})")
        return 0
    print(peaks_table(rows))
    print(summary_table(rows))
    share, bins = reserve_odds(rows)
    print(f"{share:.0%} of what ranks reserved are within 9 of 10\n\n{odds.odds_table(bins)}")
    for (source, reason), number in sorted(not_compared().items()):
        print(f"{number:3d} rows of {source} are not compared: {reason}")
    if asked.docs:
        write_tables(
            {
                "sources": summary_table(rows),
                "reserves": odds.odds_table(bins),
            },
            PAGE,
        )
    if asked.json is not None:
        write_json(asked.json, _document(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
