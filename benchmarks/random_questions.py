"""Random questions: each answer is exported, read back and checked, as a user would do.

`python -m benchmarks.random_questions [--questions 600] [--seed 1] [--part 1/2] [--adapters]` draws
questions about shipped models, clusters of cards, engines and batches; with `--adapters` about LoRA
and QLoRA on one node. For every proven answer:
- `autopar check` must read the output of `autopar export` with the price of the search, in time and
  in the memory of every stage;
- `autopar check` must find no launch next to it that fits and is faster: the search has proven
that.

It prints what failed, and exits with 1 if a price differs.
With `--doors` it compares command, Python and server instead (`benchmarks.same_answers`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar import ask
from autopar.errors import AutoparError

MODELS = ("llama2-7b", "llama3-8b", "llama3-70b", "qwen2.5-7b", "mixtral-8x7b", "gpt-oss-20b",
          "qwen3-30b-a3b", "gpt-6.7b")  # fmt: skip
CLUSTERS = ("h100:1x8", "h100:2x8", "h100:4x8", "h100:8x8", "a100-80gb:2x8", "a100-80gb:8x8",
            "gb200:4x4", "b200:2x8")  # fmt: skip
ENGINES = ("megatron", "megatron", "torchtitan", "deepspeed", "accelerate")
"""Engines to draw from; Megatron-LM twice, because most questions are about it."""
NODES = ("h100:1x8", "h100:1x4", "a100-80gb:1x8", "a100-40gb:1x8", "l40s:1x8", "l40s:1x4",
         "a10g:1x4", "a10g:1x8", "rtx-4090:1x2", "rtx-4090:1x8", "h200:1x8",
         "b200:1x8")  # fmt: skip
"""Clusters of questions about adapters."""
TUNED = (*MODELS, "llama3-8b", "qwen3-8b", "qwen3-32b", "qwen2.5-72b", "mistral-7b", "phi-4",
         "llama2-13b", "glm-4.5-air", "gemma-3-27b")  # fmt: skip
"""Models of questions about adapters."""
TUNERS = ("megatron", "megatron", "deepspeed", "accelerate", "accelerate", "any", "torchtitan")
"""Engines of questions about adapters."""
PROGRAMS = ("", "llamafactory", "axolotl", "ms-swift")
"""Programs that receive the answers of accelerate and DeepSpeed, with adapters; empty: TRL."""
KEYED = ("automodel", "verl")
"""Programs that also receive shards of accelerate, with adapters of a base of 16 bits."""
BASES = ("", "", "nf4", "nf4", "int8")
"""Precisions of frozen weights to draw from; empty: 16 bits, without the option."""
SAME = 1e-9
"""Relative difference below which two times are equal: sums in another order."""


def drawn(seed: int) -> dict[str, str]:
    """Return the options of a question."""
    rng = random.Random(seed)
    asked = {
        "model": rng.choice(MODELS),
        "hardware": rng.choice(CLUSTERS),
        "engine": rng.choice(ENGINES),
        "global-batch-size": str(rng.choice((16, 64, 256, 512))),
    }
    if rng.random() < 0.5:
        asked["seq-length"] = str(rng.choice((2048, 4096, 8192, 16384)))
    if asked["engine"] == "megatron" and rng.random() < 0.2:
        asked["precision"] = "any"
    return asked


def drawn_adapters(seed: int) -> dict[str, str]:
    """Return the options of a question about LoRA or QLoRA on one node."""
    rng = random.Random(seed)
    asked = {
        "model": rng.choice(TUNED),
        "hardware": rng.choice(NODES),
        "engine": rng.choice(TUNERS),
        "global-batch-size": str(rng.choice((8, 16, 64, 128))),
        "seq-length": str(rng.choice((1024, 2048, 4096, 8192))),
        "lora": str(rng.choice((1, 4, 8, 10, 16, 32, 64, 256))),
    }
    base = rng.choice(BASES)
    # Megatron-Bridge has no other base than 16 bits
    if base and (asked["engine"] != "megatron" or rng.random() < 0.1):
        asked["lora-base"] = base
    if rng.random() < 0.15:
        asked["optimizer"] = rng.choice(("adam8bit", "adam-bf16"))
    if rng.random() < 0.1:
        asked["offload-optimizer"] = "1"
    return asked


def asked_of(folder: Path, asked: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of one question: its outcome, and errors of its answer."""
    plan, files = folder / "plan.json", folder / "exported"
    try:
        found = ask("search", **asked, output_config_path=str(plan), top="1").to_dict()
    except AutoparError as error:
        yield "no answer", str(error)
        return
    if found["exit_code"] or found.get("launch") is None:
        yield "no answer", str(found.get("status", "refused"))
        return
    predicted = found["launch"]["predicted"]
    engine = found["launch"]["engine"]
    yield "answered", engine
    degrees, program = found["launch"]["degrees"], ""
    # these programs have neither context ranks nor replicas of shards
    alike = degrees["cp"] == degrees["dp_replicate"] == 1
    if "lora" in asked and engine in ("accelerate", "deepspeed") and alike:
        keyed = engine == "accelerate" and degrees["zero"] and "lora-base" not in asked
        program = random.Random(str(asked)).choice((*PROGRAMS, *(KEYED if keyed else ())))
    if program:
        yield "given to another program", program
    try:
        to = {"to": program} if program else {}
        export = ask("export", str(plan), out=str(files), force=True, **to).to_dict()
    except AutoparError as error:
        yield "not exported", str(error)
        return
    if export["exit_code"]:
        yield "not exported", json.dumps(export.get("losses") or export.get("error"))
        return
    if export["losses"]:
        yield "exported with losses", json.dumps(export["losses"])
    # the command of some engines names the file that holds everything
    texts = [files / "launch.sh", *map(Path, export["files"])]
    again, why = _checked(texts, asked["hardware"])
    if again is None:
        yield "not checked", why
        return
    illegal = [one for one in again["findings"] if one["kind"] in ("illegal", "not priced")]
    if illegal:
        yield "finding", json.dumps(illegal)
    step = again.get("step_time_s")
    if program:
        # it holds all logits, at the price that the export reports
        if step is None:
            yield "no verdict", json.dumps(again["findings"])[:300]
        return
    if step is None or abs(step / predicted["step_time_s"] - 1.0) > SAME:
        yield "another time", f"{predicted['step_time_s']} as searched, {step} as checked"
    # a search lists the first of equal stages, which has the largest peak of them
    peaks = [
        {one["stage"]: one["peak_bytes"] for one in each["stages"]} for each in (predicted, again)
    ]
    if not peaks[0].items() <= peaks[1].items() or max(peaks[0].values()) != max(peaks[1].values()):
        yield "another memory", f"{peaks[0]} as searched, {peaks[1]} as checked"
    for name, better in (again.get("neighbours") or {}).items():
        if better is not None:
            yield "contradiction", f"{name}: {json.dumps(better)[:300]}"


def _checked(files: Sequence[Path], hardware: str) -> tuple[dict[str, Any] | None, str]:
    """Return the result of check for the first file that is a launch, else the reason."""
    why = ""
    for file in files:
        try:
            answer = ask("check", str(file), hardware=hardware).to_dict()
        except AutoparError as error:
            why = why or str(error)
            continue
        (launch,) = answer["launches"]
        return launch, ""
    return None, why


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the questions and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=600, help="how many [600]")
    parser.add_argument("--seed", type=int, default=1, help="of the first question [1]")
    parser.add_argument("--adapters", action="store_true", help="ask about LoRA and QLoRA")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th question, from the I-th")
    parser.add_argument("--doors", action="store_true", help="compare command, Python and server")
    asked = parser.parse_args(arguments)
    part, parts = map(int, asked.part.split("/"))
    if asked.doors:
        from benchmarks.same_answers import run

        return run(asked.seed + number for number in range(part - 1, asked.questions, parts))
    kinds: Counter[str] = Counter()
    home = Path.cwd()
    for number in range(part - 1, asked.questions, parts):
        question = (drawn_adapters if asked.adapters else drawn)(asked.seed + number)
        with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
            os.chdir(folder)
            try:
                ends = [*asked_of(Path(folder), question)]
            finally:
                os.chdir(home)
        # one contradiction per question, for any number of better launches
        kinds.update({kind for kind, _ in ends})
        for kind, what in ends:
            if kind not in ("answered", "no answer", "given to another program"):
                words = " ".join(f"--{key} {value}" for key, value in question.items())
                print(f"{asked.seed + number}: {kind}: {what[:400]}\n    {words}", flush=True)
    print(", ".join(f"{kind} {number}" for kind, number in kinds.most_common()))
    return 1 if kinds["another time"] or kinds["another memory"] else 0


if __name__ == "__main__":
    sys.exit(main())
