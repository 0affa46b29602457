"""Published MoE launches compared with the fastest plan of a search for the same job.

`python -m benchmarks.published_plans` takes the fastest published launch of each model, machine,
batch and precision in NVIDIA's tables of Megatron-Bridge, prices it, and searches for the fastest
plan that fits. Both are predicted in the same way, without CUDA graphs and with even routing.
Settings missing in a table are those of the recipe of its release (`published_runs_settings`). The
newest rows have no known recipe and use defaults: a fused dispatcher, no overlap of dispatch and
combine, no recomputation. Then five launches of one job (Qwen3-235B on 256 H100,
Megatron-MoE-ModelZoo) are ranked, measured and predicted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.price.assessment import Assessment, Target, assess
from autopar.rates.accuracy import load_accuracy
from autopar.rates.card import load_card
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import load_stack
from autopar.run.of_plan import uniform_model
from autopar.run.strategy import chunks_of_sizes
from benchmarks.ledger import read_runs
from benchmarks.ledger_recipes import recipe_parts
from search.engines.candidate import MODULES, Candidate, Constraints
from search.engines.space import EngineContext
from search.engines.table import engine_space
from search.planning.uniform.best_first import PricedRun, solve
from search.planning.uniform.cost_model import UniformCostModel

__all__ = ["FIVE", "Published", "five_priced", "main", "published"]

_MODELS = {
    "DeepSeekV3": "deepseek-v3",
    "GPT OSS 120B": "gpt-oss-120b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "Kimi_K2": "kimi-k2",
}
_CARDS = {"H100-SXM": "h100-80gb", "GB200": "gb200", "GB300": "gb300", "B200": "b200",
          "B300": "b300"}  # fmt: skip
_PRECISIONS = {"BF16": "bf16", "FP8": "fp8", "FP8-CS": "fp8", "MXFP8": "mxfp8", "FP8-MX": "mxfp8"}
_ENGINE = engine_space("megatron")


class Published(NamedTuple):
    """One launch of a table."""

    model: str
    card: str
    world: int
    seq: int
    precision: str
    choice: Candidate
    tokens_per_s: float
    """Measured tokens per second and GPU."""


def even(layers: int, pp: int, vpp: int, mtp: int = 0) -> Any:
    """Return chunks with an even number of layers; the first ones have one more if needed."""
    parts = pp * vpp
    sizes = [layers // parts + (at < layers % parts) for at in range(parts)]
    return chunks_of_sizes(sizes, pp, mtp=mtp)


def _chunks(model: str, layers: int, pp: int, vpp: int, mtp: int) -> Any:
    """Return the chunks of a recipe's layout if it has one, else even ones."""
    parts = recipe_parts(model, pp, vpp, mtp=mtp)
    if parts is None:
        return even(layers, pp, vpp, mtp)
    further = [part.count("m") for part in parts]
    return chunks_of_sizes([part.count("t") for part in parts], pp, mtp=further)


def published() -> Iterator[Published]:
    """Yield the fastest published launch of each model, machine, batch and precision."""
    best: dict[tuple[str, ...], Mapping[str, str]] = {}
    recipes: dict[tuple[str, ...], Mapping[str, Any] | None] = {}
    rows, settings = read_runs()
    for line, row in rows:
        if not row["source"].startswith("NVIDIA Megatron-Bridge") or not row["tokens_s_gpu"]:
            continue
        if row["model"] not in _MODELS or row["precision"] not in _PRECISIONS:
            continue
        key = tuple(row[name] for name in ("model", "gpu_type", "num_gpus", "precision", "seq"))
        key += (row["global_batch"],)
        known = best.get(key)
        if known is None or float(row["tokens_s_gpu"]) > float(known["tokens_s_gpu"]):
            best[key], recipes[key] = row, settings.get(line)
    for key, row in best.items():
        name = _MODELS[row["model"]]
        spec = load_spec(name)
        degrees: dict[str, Any] = {
            key: int(row[key] or 1) for key in ("tp", "cp", "ep", "pp", "vpp")
        }
        yield Published(
            model=name,
            card=_CARDS[row["gpu_type"]],
            world=int(row["num_gpus"]),
            seq=int(row["seq"]),
            precision=_PRECISIONS[row["precision"]],
            choice=Candidate(
                **degrees,
                micro_batch=int(row["micro_batch"]),
                precision=cast(Any, _PRECISIONS[row["precision"]]),
                **_told(degrees, recipes[key]),
                global_batch=int(row["global_batch"]),
                chunks=_chunks(
                    row["model"], spec.num_layers, degrees["pp"], degrees["vpp"], spec.mtp_layers
                ),
            ),
            tokens_per_s=float(row["tokens_s_gpu"]),
        )


def _told(degrees: Mapping[str, int], recipe: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the switches of a recipe that these degrees support; None: the default recipe."""
    known = {"moe_flex_dispatcher_backend": "hybridep"} if recipe is None else recipe
    fused = degrees["ep"] > 1 and known.get("moe_flex_dispatcher_backend")
    # merged directions need virtual chunks if there are pipeline stages
    merged = degrees["ep"] > 1 and (degrees["pp"] == 1 or degrees["vpp"] > 1)
    modules = known.get("recompute_modules") or ()
    return {
        "dispatcher": "flex" if fused else "alltoall",
        "overlap_experts": bool(merged and known.get("moe_a2a_overlap")),
        "recompute": "+".join(name for name in MODULES if name in modules) or "none",
    }


def _prices(model: str, card: str, world: int, seq: int, batch: int) -> UniformCostModel:
    target = Target(
        machine=machine_of(load_card(card), load_stack(_ENGINE.stack)),
        accuracy=load_accuracy(),
        site_known=False,
        oom_risk=0.01,
    )
    job = EngineContext(
        name=model,
        model=uniform_model(load_spec(model)),
        seq=seq,
        global_batches=(batch,),
        world=world,
        gpu=card,
    )
    return UniformCostModel(_ENGINE, job, target)


def priced(one: Published) -> Assessment:
    """Return the price of a published launch by its first stage; raises InputError."""
    prices = _prices(one.model, one.card, one.world, one.seq, one.choice.global_batch)
    return assess(prices.run(one.choice), prices.target, (0,))


def ours(one: Published) -> tuple[PricedRun | None, float]:
    """Return the fastest launch of the same job that fits, and the CPU seconds of the search."""
    prices = _prices(one.model, one.card, one.world, one.seq, one.choice.global_batch)
    fixed = Constraints(precision=(one.choice.precision,))
    solved = solve(_ENGINE, prices.job, prices.target, fixed, top=1)
    return (solved.solutions[0] if solved.solutions else None), solved.effort.cpu_s


# --------------------------------------------------------------------------------------------------
# Five launches of one job: Megatron-MoE-ModelZoo e8650517, best_practice/qwen3/readme.md.


def _five() -> dict[str, tuple[Candidate, float]]:
    def choice(**degrees: Any) -> Candidate:
        chunks = even(94, degrees.get("pp", 1), degrees.get("vpp", 1))
        return Candidate(global_batch=2048, chunks=chunks, **degrees)

    flex: dict[str, Any] = {"dispatcher": "flex"}
    again: dict[str, Any] = {"recompute": "layernorm+moe_act"}
    four = {"tp": 2, "ep": 32, "pp": 8, "vpp": 4, **flex, **again}
    return {
        "tp2 ep32 pp8, 4 chunks": (choice(**four), 245.0),
        "the same, exchanges overlapped": (choice(**four, overlap_experts=True), 276.0),
        "tp2 ep8, ZeRO-3, micro-batch 4, full recomputation": (
            choice(tp=2, ep=8, zero=3, micro_batch=4, recompute="full", **flex),
            276.0,
        ),
        "tp2 ep8 pp32, 3 chunks, all-to-all": (
            choice(tp=2, ep=8, pp=32, vpp=3, **again),
            200.0,
        ),
        "tp4 ep8 pp8, 4 chunks": (choice(tp=4, ep=8, pp=8, vpp=4, **flex), 167.0),
    }


FIVE: Mapping[str, tuple[Candidate, float]] = _five()
"""Launches of Qwen3-235B on 256 H100, 4,096 tokens, in bf16, and their measured TFLOP/s."""


def five_priced() -> dict[str, tuple[float, float]]:
    """Return measured and predicted TFLOP/s of a GPU of the five launches."""
    prices = _prices("qwen3-235b-a22b", "h100-80gb", 256, 4096, 2048)
    found = {}
    for name, (choice, measured) in FIVE.items():
        one = assess(prices.run(choice), prices.target, (0,))
        assert one.throughput is not None, "published plans have a step time"
        found[name] = (measured, (one.throughput.flop_per_s or 0.0) / 1e12)
    return found


def _line(one: Published, choice: Candidate) -> str:
    return choice.line(one.world, experts=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print published launches and the plans of a search; return the exit code."""
    parser = argparse.ArgumentParser(description="published launches beside those of a search")
    parser.add_argument("--model", help="only of this model")
    asked = parser.parse_args(arguments)
    for one in published():
        if asked.model not in (None, one.model):
            continue
        print(f"{one.model} on {one.world} {one.card}, {one.choice.global_batch} x {one.seq}")
        try:
            theirs = priced(one).tokens_per_s or 0.0
            print(
                f"  published {one.tokens_per_s:8,.0f} tokens/s, predicted {theirs:8,.0f}: "
                f"{_line(one, one.choice)}"
            )
        except InputError as error:
            print(f"  published {one.tokens_per_s:8,.0f} tokens/s, not priced: {error}")
        found, cpu_s = ours(one)
        if found is None:
            print(f"  ours: nothing fits ({cpu_s:.1f} s)")
        else:
            rate = found.assessment.tokens_per_s or 0.0
            print(
                f"  ours      {'':8s}           predicted {rate:8,.0f}: "
                f"{_line(one, found.choice)} ({cpu_s:.1f} s)"
            )
    print("\nQwen3-235B on 256 H100: five launches of one job, TFLOP/s measured and predicted")
    for name, (measured, predicted) in five_priced().items():
        print(f"  {measured:4.0f} {predicted:6.0f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
