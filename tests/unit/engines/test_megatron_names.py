"""Names of Megatron-LM's arguments: each has one row, and misspelt ones find the one that is meant.

What the arguments mean is tested where they are read.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from benchmarks.memory_goldens import read_goldens
from search.engines.changes import arguments_of
from search.engines.engine import spanned
from search.engines.megatron import names as megatron_names
from search.engines.megatron.names import OTHER_MODELS, UNPRICED, alike, concern_of, harmless
from search.engines.megatron.read import _OF_TIME, read_run

TABLES = (megatron_names._HARMLESS, megatron_names._EFFECTIVE)
ROWS = [spanned(word)[0] for table in TABLES for names in table.values() for word in names.split()]
SMALL = {
    "--num-layers": 12,
    "--hidden-size": 512,
    "--num-attention-heads": 8,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--micro-batch-size": 4,
    "--vocab-size": 50257,
    "--bf16": True,
}


def test_a_name_has_one_row() -> None:
    """As argparse has it, with hyphens."""
    assert [name for name, count in Counter(ROWS).items() if count > 1] == []
    assert [name for name in ROWS if "_" in name or name.startswith("-")] == []
    assert len(ROWS) > 800


def test_what_is_read_is_not_harmless() -> None:
    """Advice, the models that are named, and what has no price are of arguments with an effect."""
    run = read_run(SMALL, world_size=8).run
    read = {*arguments_of(run), *(flag[2:] for flag in SMALL)}
    read |= {flag for flags, _ in (*OTHER_MODELS, *UNPRICED) for flag in flags}
    assert [flag for flag in read if harmless(flag)] == []
    assert [flag for flag in _OF_TIME if concern_of(flag) is None] == []


def test_arguments_of_measured_runs_are_known() -> None:
    """Those of the trainer's tests, but for what a script of theirs adds."""
    given = {flag[2:] for row in read_goldens() for flag in json.loads(row["args"])}
    unknown = {flag for flag in given if concern_of(flag.replace("_", "-")) is None}
    # of the elastic model's own script
    assert {flag for flag in unknown if alike(flag) is not None} == set()
    assert len(unknown) < 0.1 * len(given)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tensor-model-paralell-size", "tensor-model-parallel-size"),
        ("pipeline-parallel-model-size", None),
        ("num-layer", "num-layers"),
        ("seq-lenght", "seq-length"),
        ("lr-warmup-itres", "lr-warmup-iters"),
        ("moe-router-top-k", "moe-router-topk"),
        ("recompute-granularty", "recompute-granularity"),
        ("bf-16", "bf16"),
        ("use-flash-attn-v2", None),
        # one letter of a short part, two of a long one, another number of none
        ("sedd", "seed"),
        ("sdet", None),
        ("kv-layernorm", None),
        ("mtp-loss-scale", None),
        ("mirco-bacth-size", "micro-batch-size"),
        ("microbatch-size", "micro-batch-size"),
        ("adam-beta3", None),
        ("train-data-paths", "train-data-path"),
        ("micro-batch-size", None),
        ("x", None),
        ("", None),
    ],
)
def test_misspelt_names(written: str, meant: str | None) -> None:
    """The nearest, by letters that are left out, added, changed or swapped."""
    assert alike(written) == meant


@pytest.mark.whole
def test_every_single_mistake_is_found() -> None:
    """A letter left out or twice, two letters swapped, of every name of some length."""
    # every fifth of them is enough for a second of work
    for name in (row for row in ROWS[::5] if len(row) > 3):
        middle = len(name) // 2
        left_out = name[:middle] + name[middle + 1 :]
        twice = name[:middle] + name[middle] + name[middle:]
        swapped = name[:middle] + name[middle + 1] + name[middle] + name[middle + 2 :]
        for wrong in (left_out, twice, swapped):
            part = name[name.rfind("-", 0, middle) + 1 :].partition("-")[0]
            # another argument may be as near, or be it; short parts are names of their own
            if (
                len(part) > 3
                and concern_of(wrong) is None
                and not any(mark.isdigit() for mark in name)
            ):
                found = alike(wrong)
                assert found is not None, wrong
                assert megatron_names._apart(wrong, found) <= 1, wrong


def test_distances() -> None:
    """Counted by hand; beyond the limit only that they are beyond it."""
    cases = (("ab", "ab", 0), ("ab", "ba", 1), ("abcd", "acbd", 1), ("abc", "abd", 1),
             ("abc", "ab", 1), ("kitten", "sitting", 3), ("a", "abcd", 3))  # fmt: skip
    for one, other, edits in cases:
        assert megatron_names._edits(one, other, 3) == edits
        assert megatron_names._edits(other, one, 3) == edits
    assert megatron_names._edits("kitten", "sitting", 2) == 3
    assert megatron_names._edits("a", "abcdefgh", 2) == 3
