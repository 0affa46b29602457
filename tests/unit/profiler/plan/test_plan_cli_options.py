"""Command lines of `profile-plan`: what they mean, GLOBAL mode, and what is said about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from profiler.plan.command import COMMAND
from profiler.plan.job import GlobalOptions, PlanOptions
from profiler.plan.question import make_plan
from tests.unit.plan_cli_support import read


def test_defaults_are_those_of_the_dataclass() -> None:
    """A bare plan takes every default from one place."""
    assert read("plan.json") == PlanOptions(plan=Path("plan.json"))


def test_underscores_hyphens_and_overrides_mean_the_same() -> None:
    """The documented names come with underscores, the newest as hydra's overrides."""
    spelled = (
        "--pp_deg 2 --global_tp_deg 2 --global_tp_consec 0 --sdp 1 --chunks 4 "
        "--global_checkpoint 1 --pipeline_type pipedream_flush --vocab_tp 2 "
        "--global_train_batch_size 16 --default_dp_type zero2"
    )
    hydra = [
        f"train.{name}={value}"
        for name, value in zip(
            [word[2:] for word in spelled.split()[::2]], spelled.split()[1::2], strict=True
        )
    ]
    expected = GlobalOptions(
        pp_deg=2,
        global_tp_deg=2,
        global_tp_consec=False,
        sdp=True,
        chunks=4,
        global_checkpoint=True,
        pipeline_type="1f1b",
        vocab_tp=2,
        global_train_batch_size=16,
        default_dp_type="zero2",
    )

    for arguments in (spelled.split(), spelled.replace("_", "-").split(), hydra):
        # the value pipedream_flush keeps its underscore, and has a short form
        fixed = [a.replace("pipedream-flush", "1f1b") for a in arguments]
        assert read(*fixed).uniform == expected


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--no_async_grad_reduce"], "async_grad_reduce", False),
        (["--no-async-grad-reduce", "0"], "async_grad_reduce", True),
        (["--sequence-parallel", "1"], "sequence_parallel", True),
        (["--sequence_parallel=0"], "sequence_parallel", False),
        (["--no-reference"], "reference", False),
        (["--mixed_precision", "bf16"], "precision", "bf16"),
        (["--seq-length", "64"], "seq_length", 64),
        (["--ranks", "all,3"], "ranks", ("all", "3")),
        (["--dry-run"], "mode", "dryrun"),
        (["--num-layers", "2,3"], "num_layers", (2, 3)),
    ],
)
def test_single_options(arguments: list[str], field: str, value: object) -> None:
    """Flags take a 0 or 1 behind them, as peers write them."""
    assert getattr(read("plan.json", *arguments), field) == value


def test_minus_one_is_not_given() -> None:
    """Galvatron writes -1 for what is not set."""
    options = read("plan.json", "--chunks", "-1", "--global_tp_deg=-1", "--global_tp_consec", "-1")
    assert options.uniform == GlobalOptions()


def test_galvatron_config_path_is_the_plan() -> None:
    """JSON mode is activated by it; None is GLOBAL mode."""
    assert read("--galvatron_config_path", "x.json").plan == Path("x.json")
    options = read("--galvatron_config_path", "None", "--pp_deg", "1")
    assert (options.plan, options.uniform.pp_deg) == (None, 1)


def test_options_without_a_meaning_are_named() -> None:
    """They take their value with them."""
    notes: list[str] = []
    given = ["--lr", "1e-4", "plan.json", "--use-flash-attn", "--steps", "1"]
    assert COMMAND.read(given, notes.append) == {"plan": "plan.json", "steps": "1"}
    assert [note.split()[0] for note in notes] == ["--lr", "--use-flash-attn"]


def test_global_mode_makes_one_strategy_for_all_layers() -> None:
    """Even stages with the remainder on the last one, as old strategy files have it."""
    options = read(
        *("--pp-deg", "3", "--global-tp-deg", "2", "--global-tp-consec", "0", "--sdp", "1"),
        *("--global-checkpoint", "1", "--vocab-tp", "4", "--vocab-sp", "1", "--embed-sdp", "1"),
        *("--global-train-batch-size", "24"),
    )
    layer = LayerStrategy(tp=2, zero3=True, checkpoint=True, strided=True)

    assert make_plan(options.uniform, num_layers=8, world_size=12) == Plan(
        world_size=12,
        num_stages=3,
        stage_sizes=(2, 2, 4),
        layers=(layer,) * 8,
        vocab=VocabStrategy(tp=4, ulysses=True, zero3=True),
        global_batch=24,
        num_microbatches=3,
        pipeline_type="gpipe",
    )
