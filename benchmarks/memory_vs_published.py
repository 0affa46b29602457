"""Exact memory of llama2-7b and gpt-6.7b against published memory, difference by difference.

`python -m benchmarks.memory_vs_published [--cases DIR] [--json LEDGER]`

The published tables come from few raw figures of a training run on 8 GPUs with 8 samples, ZeRO-3
and Megatron's sequence parallelism. The tables are first recomputed from them. Then every
difference to our count is split into terms, each with its cause. docs/concepts/accuracy.md
describes the consequences for a plan.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from autopar.documents.spec import load_spec
from autopar.records import replace
from autopar.run.model import padded_vocab_size
from autopar.units import MIB
from benchmarks.metadata import ROOT, append
from benchmarks.published_llama import llama_rows
from benchmarks.published_memory import BLOCK, DEVICES, WORKSPACES, Published, Row, Run
from profiler.model.counting import layer_memory, vocab_memory
from profiler.model.layers.sharding import Sharding

__all__ = ["gpt_rows", "main"]


def gpt_rows(cases: Path) -> Iterator[Row]:
    """Yield the published quantities of gpt-6.7b at one sample a GPU, at every length."""
    path = cases / "model_v24" / "memory_profiling_bf16_gpt-6.7b.json"
    run = Run(pp=1, tp=1, vtp=1)
    for length in (512, 2048, 8192):
        published = Published.read(path, length)
        # its embedding and head are two tables, and its positions are as many as tokens
        spec = replace(load_spec("gpt-6.7b"), tied_embeddings=False, learned_positions=length)
        layer = replace(spec.layers[0], seq_length=length)
        spec = replace(spec, layers=(layer,))
        counted = layer_memory(layer, Sharding())
        around = vocab_memory(spec, "only", batch=1)
        at = f"gpt-6.7b, {length} tokens: "
        yield Row(
            quantity=at + "parameter_size",
            published_bytes=published.layer["parameter_size"] * MIB,
            ours_bytes=4 * counted.num_parameters,
        )
        yield Row(
            quantity=at + "activation",
            published_bytes=published.layer["tp_activation_per_bsz_dict"]["1"] * MIB,
            ours_bytes=counted.activation_bytes,
            terms={
                "two dropout masks": 2 * length * layer.hidden_size,
                "flash attention's offsets and random state": 2 * BLOCK,
            },
        )
        yield Row(
            quantity=at + "around the layers, kept",
            published_bytes=published.figure(run, "act", 1) - published.per_layer(run, "act"),
            ours_bytes=around.activation_bytes,
            terms={
                "the loss keeps its softmax in bf16": -2 * length * padded_vocab_size(spec),
                "a dropout mask of the embedding": length * layer.hidden_size,
                "targets, masks, losses; tokens and positions were there before": (
                    (8 + 1 + 2) * length - (16 + 8) * length + 2 * BLOCK
                ),
            },
        )
        yield Row(
            quantity=at + "other_memory_pp_off, model_states",
            published_bytes=published.other("off")["model_states"]["1"] * MIB,
            ours_bytes=16 * around.num_parameters,
            terms={
                "two cuBLAS workspaces": WORKSPACES * DEVICES,
                "tokens and labels": (length + 1) * 8 * DEVICES,
            },
        )


def _text(row: Row) -> str:
    difference = row.published_bytes - row.ours_bytes
    causes = "; ".join(f"{name} {term / MIB:+.3f}" for name, term in row.terms.items() if term)
    return (
        f"| {row.quantity} | {row.published_bytes / MIB:.3f} | {row.ours_bytes / MIB:.3f} "
        f"| {difference / MIB:+.3f} | {difference / row.published_bytes:+.1%} | {row.verdict} "
        f"| {causes} |"
    )


def main() -> int:
    """Print every quantity; return 1 if a difference is not explained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, default=ROOT.parent / "shared/cases/galvatron")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    if not (arguments.cases / "model").is_dir():
        print(f"skipped: no folder model in {arguments.cases}; give --cases DIR")
        return 0
    print("| quantity | published, MiB | ours | difference | % of it | explained | terms, MiB |")
    print("|---|---|---|---|---|---|---|")
    found = [*llama_rows(arguments.cases), *gpt_rows(arguments.cases)]
    for row in found:
        print(_text(row))
    values = [
        {
            "quantity": row.quantity,
            "published_bytes": row.published_bytes,
            "ours_bytes": row.ours_bytes,
            "terms_bytes": dict(row.terms),
            "verdict": row.verdict,
        }
        for row in found
    ]
    append(arguments.json, "memory_vs_published", {"rows": values})
    return 1 if any("open" in row.verdict for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
