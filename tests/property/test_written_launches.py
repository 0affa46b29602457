"""Launches written for an engine and read back: the same launch, without idle settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from autopar.errors import InputError, UnsupportedError
from autopar.price.account import account_of
from autopar.run.run import Run
from search.engines.differences import without_effect
from search.engines.exporter_types import ExportTarget
from search.engines.files import checked, written
from search.engines.megatron.names import harmless
from search.engines.megatron.read import read_run
from search.engines.megatron.release import CORE, Release
from search.engines.megatron.write import environment_of
from search.engines.table import as_trained
from search.engines.text import flags_of, script_command
from tests.often import often
from tests.run_cases import megatron_runs, some, titan_runs, torch_runs

NOT_IN_BRIDGE = tuple(
    f"Megatron-Bridge does not support {what}: "
    for what in (
        # its learned positions equal the sequence length
        "max positions",
        # recipes without a section of overlaps
        "overlap.tensor",
        "kernels.deferred head",
        # arguments of Megatron-LM without a key
        "quirks.compiled experts",
        "fused multiplication with the router's probabilities",
    )
)


def place_of(run: Run) -> ExportTarget:
    """Return nodes of four GPUs for a launch, or one."""
    world = run.strategy.gpus
    each = 4 if world % 4 == 0 else world
    return ExportTarget(num_nodes=world // each, gpus_per_node=each)


def read_back(run: Run, engine: str) -> None:
    """Check that written files are read as the same run, without idle or unknown settings."""
    found = written(run, engine=engine, place=place_of(run))

    assert found.losses == ()
    assert without_effect(found.runs) == without_effect(run)
    said = [
        one
        for one in checked(found, run).findings
        # the precision of ranks without sharding is reported whether or not a file sets it
        if one.kind not in ("read", "environment") and "mixed_precision_param" not in one.text
    ]
    assert said == []


@often(40, 600, megatron_runs())
def test_megatron_says_all_of_a_launch(run: Run) -> None:
    """The script of a launch, read as `autopar check` reads it, is that launch."""
    read_back(run, "megatron")


SPOKEN_OF_TIME = frozenset(
    {
        # dispatcher and start of early gathering have no separate price
        *("moe-flex-dispatcher-backend", "overlap-param-gather"),
        # the vocabulary size is given separately
        "tokenizer-type",
        # there is only one 4-bit recipe
        "fp4-recipe",
    }
)
"""Flags of Megatron-LM that are written and change nothing of a launch that is priced."""


_RELEASES = (Release(), Release(date=CORE["0.16"]))
"""The newest code, and older code, in which other settings are the default."""


def _read(flags: Mapping[str, Sequence[str]], run: Run, release: Release) -> Run | None:
    """Return the run of flags that were written for `run`, without idle settings."""
    words = {name: list(given) or True for name, given in flags.items()}
    found = read_run(
        words,
        world_size=run.strategy.gpus,
        environment=environment_of(run),
        gpu=run.gpu,
        release=release,
    ).run
    return None if found is None else without_effect(found)


@pytest.mark.whole
def test_each_flag_that_is_written_says_something() -> None:
    """Without each flag, some launch is read as another one, or not at all."""
    silent, heard = set[str](), set[str]()
    for run in some(megatron_runs(), 60):
        found = written(run, engine="megatron", place=place_of(run))
        text = found.files["megatron_args.sh"]
        flags = flags_of(script_command(text, "x").arguments)
        for flag in flags:
            if flag in heard or harmless(flag):
                continue
            rest = {name: given for name, given in flags.items() if name != flag}
            try:
                other = any(_read(rest, run, one) != _read(flags, run, one) for one in _RELEASES)
            except InputError:
                other = True
            (heard if other else silent).add(flag)

    assert silent - heard <= SPOKEN_OF_TIME
    assert len(heard) > 60


@often(40, 400, titan_runs())
def test_torchtitan_says_all_of_a_launch(run: Run) -> None:
    """The recipe of a launch, or else its job file, is that launch again."""
    read_back(run, "torchtitan")


@often(40, 400, titan_runs(recipe=True))
def test_recipes_of_torchtitan_say_all_of_a_launch(run: Run) -> None:
    """Read as the same launch of 0.3, with the same memory, with or without adapters."""
    found = written(run, engine="torchtitan", place=place_of(run))
    assert found.engine_version == "0.3.0"
    assert account_of(found.runs) == account_of(run)
    read_back(run, "torchtitan")


@often(30, 400, torch_runs(keeper="deepspeed"))
def test_deepspeed_says_all_of_a_launch(run: Run) -> None:
    """The configuration of a launch, with its script and its model, is that launch again."""
    read_back(run, "deepspeed")


@often(40, 400, torch_runs(keeper="accelerate") | torch_runs(keeper="deepspeed"))
def test_accelerate_says_all_of_a_launch(run: Run) -> None:
    """The configuration of a launch for accelerate, whose plug-in receives DeepSpeed's settings."""
    read_back(run, "accelerate")


@often(30, 300, torch_runs(keeper="accelerate", trl=True))
def test_accelerate_says_all_of_a_fine_tuning(run: Run) -> None:
    """TRL's sft.yaml and the file of accelerate are that run again, at the price of its loss."""
    read_back(run, "accelerate")


@often(30, 300, torch_runs(keeper="deepspeed", trl=True))
def test_deepspeed_says_all_of_a_fine_tuning(run: Run) -> None:
    """TRL's sft.yaml and the file of DeepSpeed are that run again, for both of its launchers."""
    read_back(run, "deepspeed")
    read_back(run, "accelerate")


@often(
    30, 300, torch_runs(keeper="accelerate", trl=True) | torch_runs(keeper="deepspeed", trl=True)
)
def test_other_programs_say_all_of_a_fine_tuning(run: Run) -> None:
    """YAML of other programs is the run as their Trainer prices it, with all logits."""
    for engine in ("llamafactory", "axolotl", "ms-swift"):
        trained = as_trained(engine, run)
        plain = run.split.zero == 0 and run.runtime.states.keeper == "accelerate"
        # axolotl trains replicas in 16 bits, and shards with fp32 weights
        pure = run.runtime.optimizer.master_bytes == 0
        of_deepspeed = run.runtime.states.keeper == "deepspeed"
        other = run.runtime.adapters is None and not of_deepspeed and plain != pure
        replicas = run.split.replicas > 1 and engine != "llamafactory"
        if run.split.cp > 1 or replicas or (engine == "axolotl" and other):
            with pytest.raises(UnsupportedError, match=r"context|16 bits|HSDP"):
                read_back(trained, engine)
        else:
            read_back(trained, engine)


@often(60, 600, torch_runs(keeper="accelerate", trl=True))
def test_programs_with_keys_of_their_own_say_all_of_a_fine_tuning(run: Run) -> None:
    """Recipes of Automodel and words of verl are the run as they train it, at its price."""
    adapters = run.runtime.adapters
    named = run.runtime.optimizer.kind not in ("sgd", "adafactor")
    base = adapters is None or adapters.base == "16 bits"
    usual = named and base and run.split.cp == 1 and run.runtime.precision.kind == "bf16"
    for engine in ("automodel", "verl"):
        trained = as_trained(engine, run)
        if usual and (run.split.zero or engine == "automodel"):
            read_back(trained, engine)
            found = written(trained, engine=engine, place=place_of(run)).runs
            assert account_of(found).peak_bytes == account_of(trained).peak_bytes
        else:
            with pytest.raises(UnsupportedError, match=r"context|bf16|base|shard|optimizer"):
                read_back(trained, engine)


@pytest.mark.whole
@often(40, 600, megatron_runs())
def test_bridge_says_all_of_a_launch_that_it_can(run: Run) -> None:
    """Overrides of a recipe are that launch again, except for settings without a key."""
    found = written(run, engine="megatron-bridge", place=place_of(run))

    assert [one for one in found.losses if not one.what.startswith(NOT_IN_BRIDGE)] == []
