"""Published configurations of Megatron-Bridge are read, priced, and what its recipes set.

They are rows of NVIDIA's performance tables, written as the arguments of the project's own scripts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.price.assessment import assess
from autopar.price.step import step_time
from benchmarks.ledger import read_runs
from benchmarks.ledger_rows import run_of
from search.engines.bridge.recipes import performance_recipe
from tests.bridge_cases import (
    CARDS,
    MODELS,
    checked,
    dtype_of,
    model_of,
    recipe_run,
    runs,
    spread,
    texts,
    words_of_row,
)
from tests.step_cases import target_named

LINES = (
    # H100: 30B, GPT-OSS, 235B, 70B, 405B; 70B and 235B of 25.11; 8B fully sharded, 70B, 405B and
    # DeepSeek-V3 of 25.09
    59, 79, 86, 140, 144, 164, 166, 171, 172, 173, 174,
    # Blackwell, some of them with graphs of the whole step: DeepSeek-V3, 235B, 70B, GPT-OSS, 235B,
    # 405B, 235B, 8B, 405B, 8B
    43, 44, 47, 70, 75, 85, 99, 127, 154, 162, 167,
)  # fmt: skip
"""Lines of the table of published runs."""
OUTSIDE = frozenset[int]()
"""Lines of one run in ten whose step is not in its interval."""


@pytest.mark.parametrize("line", LINES)
def test_published_configurations_are_read_and_priced(line: int, tmp_path: Path) -> None:
    """Nothing is illegal or not understood; the step is one of nine of ten, and there is room."""
    row = runs()[line]
    card = CARDS[row["gpu_type"]]
    file = checked(tmp_path, words_of_row(line), gpu=card)
    run = file.run

    assert run is not None, file.findings
    assert not file.withdrawn, file.findings
    assert {one.kind for one in file.findings} <= {"not priced", "read"}
    assert all("memory" in text or "save" in text for text in texts(file, "not priced"))
    strategy, split = run.strategy, run.split
    said = {"num_gpus": strategy.gpus, "tp": split.tp, "pp": strategy.pp, "cp": split.cp,
            "ep": split.ep, "vpp": strategy.vpp, "dp": strategy.dp, "seq": run.seq_length,
            "micro_batch": strategy.micro_batch, "global_batch": strategy.global_batch}  # fmt: skip
    # a table has the GPUs of a data-parallel group under FSDP, of experts of one expert too
    assert {key: int(row[key]) for key in said} == said
    found = assess(run, target_named(card))
    assert found.interval_s is not None, found.untimed
    low, high = found.interval_s
    measured = float(row["iter_time_s"])
    assert (low < measured < high) != (line in OUTSIDE)
    assert 0.96 * low < measured < 1.04 * high
    # it ran
    assert found.odds_of_oom < 0.5


@pytest.mark.parametrize("line", LINES)
def test_the_ledger_has_the_price_that_is_told(line: int, tmp_path: Path) -> None:
    """Errors, and intervals made of them, are of what `autopar check` says of such a launch.

    Within 3.5 %: a table leaves open which bytes gradients and gathered weights have, and what is
    computed again beside sharded weights.
    """
    rows, settings = read_runs()
    row = dict(rows)[line]
    card = CARDS[row["gpu_type"]]
    run = checked(tmp_path, words_of_row(line), gpu=card).run
    assert run is not None
    told = assess(run, target_named(card))
    own = run_of(row, settings.get(line, {}))
    assert told.step is not None
    assert told.step.total_s == pytest.approx(step_time(own.machine, own.job).total_s, rel=0.035)


def test_published_configurations_are_many() -> None:
    """More than twenty, of every model and device of the tables."""
    rows = [runs()[line] for line in LINES]
    assert len(set(LINES)) == len(LINES) > 20
    assert {model_of(row) for row in rows} == set(MODELS.values())
    assert {row["gpu_type"] for row in rows} >= {"H100-SXM", "GB200", "GB300", "B200"}


@pytest.mark.whole
def test_nine_of_ten_published_steps_lie_in_their_intervals(tmp_path: Path) -> None:
    """Of all rows of these models, as far as anybody can price them; and why not the others."""
    inside, refused = [], {}
    for line, row in runs().items():
        # skills and verification cards compare settings that are not those of a recipe
        known = row["source"].startswith("NVIDIA Megatron-Bridge performance") and model_of(row)
        if not known or row["notes"] in ("SFT", "LoRA"):
            continue
        card = CARDS[row["gpu_type"]]
        world = int(row["num_gpus"])
        file = checked(tmp_path, words_of_row(line), gpu=card, world=world)
        kinds = {one.kind for one in file.findings}
        if file.run is not None:
            assert not file.withdrawn, (line, file.findings)
        else:
            refused[line] = "illegal" if "illegal" in kinds else texts(file, "not priced")[0]
            continue
        found = assess(file.run, target_named(card))
        assert found.interval_s is not None
        low, high = found.interval_s
        inside.append(low < float(row["iter_time_s"]) < high)
    assert len(inside) >= 101
    assert 0.85 < sum(inside) / len(inside) < 0.95
    # without its further token DeepSeek-V3 had layouts that no table has; a preset that offloads
    # layers has no pipeline beside it
    assert refused == {156: "illegal", 157: "illegal", 160: "illegal"}


def test_presets_are_what_was_published() -> None:
    """The rows of the two newest containers have the degrees and the batch of the newest preset."""
    others = {}
    compared = 0
    for line, row in runs().items():
        model = model_of(row)
        newest = row["source"].startswith("NVIDIA Megatron-Bridge") and "26.06" in row["source"]
        if not newest or model is None or row["notes"] in ("SFT", "LoRA"):
            continue
        gpu = CARDS[row["gpu_type"]].split("-")[0]
        recipe = performance_recipe(model, gpu, dtype_of(row), "v2")
        assert recipe.model is not None, row
        compared += 1
        keys = ("train.global_batch_size", "train.micro_batch_size",
                *(f"model.{name}_parallel_size" for name in (
                    "tensor_model", "pipeline_model", "context", "virtual_pipeline_model",
                    "expert_model")))  # fmt: skip
        ours = (recipe.num_gpus, *(recipe.settings[key] or 1 for key in keys))
        columns = ("num_gpus", "global_batch", "micro_batch", "tp", "pp", "cp", "vpp", "ep")
        if ours != tuple(int(row[column]) for column in columns):
            others[line] = ours
    assert compared == 15
    # DeepSeek-V3 on B300 was measured with two sequences in whole stages
    assert others == {54: (256, 4096, 1, 1, 8, 1, 2, 8)}


def test_a_recipe_alone_says_it_all(tmp_path: Path) -> None:
    """A published row is what its recipe sets; of twice the GPUs the batch is twice as large."""
    short = spread("-m llama -mr llama3_70b -g h100 -c fp8_cs")
    explicit = checked(tmp_path, words_of_row(140)).run
    newest = [*short, "-ng", "64"]
    assert explicit is not None
    for words in ([*newest, "-cv", "v2"], [*newest, "-i", "nvcr.io/nvidia/nemo:26.04"]):
        assert checked(tmp_path, words).run == explicit
    # Release 0.6 has one variant, which is v2.
    assert checked(tmp_path, newest).run == explicit
    assert texts(checked(tmp_path, newest)) == []
    doubled = checked(tmp_path, [*short, "-ng", "128", "-cv", "v2"]).run
    assert doubled is not None
    assert (explicit.strategy.global_batch, doubled.strategy.global_batch) == (256, 512)
    older = checked(tmp_path, [*short, "-ng", "64", "-cv", "v1"])
    assert older.run is not None
    assert older.run.strategy.global_batch == 128
    said = "llama3_70b on h100 in fp8_cs: the variant v1 of Megatron-Bridge 0.5.1"
    assert texts(older) == [said]
    # family and size apart, as the first releases had them
    first = [
        "-m",
        "llama3",
        "-s",
        "70b",
        "-g",
        "h100",
        "-c",
        "fp8",
        "--fp8_recipe",
        "cs",
        "-cv",
        "v1",
        "-ng",
        "64",
    ]
    assert checked(tmp_path, first).run == older.run
    flat = recipe_run(tmp_path, "--recipe llama3_70b_pretrain_64gpu_h100_fp8cs_config").run
    assert flat is not None
    assert flat.strategy == explicit.strategy
    assert flat.runtime.precision == explicit.runtime.precision
