"""Files of trainers read as launches of a search, and launches handed to another trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.records import replace
from autopar.run.run import Run, run_with_split
from autopar.run.strategy import even_chunks, recomputing
from autopar.training.adapters import Adapters
from autopar.training.launch_settings import settings_of
from search.commands import check, compare, explain, export, search
from search.engines.differences import without_effect
from search.engines.exporter_types import ExportTarget
from search.engines.files import LAUNCH, written
from search.engines.space import run_of
from search.engines.table import engine_space, read_checked
from search.planning.uniform.files import choice_of, is_launch, read_launch
from tests.runs import told
from tests.unit.engines.test_writing import NODE, searched

HARDWARE = ("--hardware", "h100:1x8")


pytestmark = pytest.mark.usefixtures("folder")


def files_of(run: Run, engine: str, place: ExportTarget = NODE) -> str:
    """Write the files of a run into the working folder; return the one that says all of it."""
    found = written(run, engine=engine, place=place)
    for name, text in {**found.files, LAUNCH: found.launch}.items():
        path = Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return found.entry or LAUNCH


def again(run: Run, **more: Any) -> Run:
    """Return a run that recomputes layers whole."""
    return replace(run, strategy=recomputing(run.strategy, "full", **more))


MEGATRON = searched("megatron", tp=2, pp=2, vpp=2)
TITAN = searched("torchtitan", tp=2, recompute="op")
SPEED = searched("deepspeed", zero=3, recompute="full")


@pytest.mark.parametrize(
    ("engine", "run"),
    [
        ("megatron", MEGATRON),
        ("megatron", told(MEGATRON, states={"bucket": 1 << 22})),
        ("megatron", replace(again(MEGATRON, unit=2), steps=50)),
        ("megatron", run_with_split(MEGATRON, offload=frozenset({"core_attn"}))),
        ("megatron", told(MEGATRON, optimizer={"moments_bytes": 4, "master_bytes": 2})),
        ("megatron", searched("megatron", zero=3, cp=2, precision="fp8", recompute="full")),
        ("megatron", searched("megatron", "mixtral-8x7b", ep=8, zero=0, recompute="moe_act")),
        ("megatron-bridge", MEGATRON),
        ("torchtitan", TITAN),
        ("torchtitan", told(again(run_with_split(TITAN, replicas=2, recompute=frozenset()),
            every=2),
                            kernels={"compiled": True})),
        ("torchtitan", searched("torchtitan", pp=2, vpp=2, schedule="dual_pipe_v", zero=3)),
        ("deepspeed", SPEED),
        ("deepspeed", told(SPEED, adapters=Adapters(rank=8, targets=frozenset({"query"})))),
        ("accelerate", searched("accelerate", zero=2, tp=2)),
        ("accelerate", searched("accelerate", zero=0)),
    ],
)  # fmt: skip
def test_what_a_trainer_runs_comes_back_whole(
    engine: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run, as files, as the file of a launch, is that run: degrees, and what else it says.

    Whatever a search could not have chosen stands beside its degrees.
    """
    entry = files_of(run, engine, replace(NODE, model="llama3-8b"))

    assert export.run(["--from", engine, entry, *HARDWARE, "--out", "back.json"]) == 0

    assert is_launch("back.json")
    assert without_effect(read_launch("back.json").run) == without_effect(run)
    assert "does not support" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "choice"),
    [
        ("megatron", {"tp": 2, "cp": 4, "cp_kind": "a2a", "zero": 1, "tp_overlap": True}),
        ("megatron", {"tp": 2, "cp": 4, "cp_kind": "all-gather", "zero": 1}),
        ("megatron", {"zero": 1, "dp_replicate": 2, "micro_batch": 2, "recompute": "block 3"}),
        ("megatron", {"pp": 2, "vpp": 2, "zero": 0, "recompute": "core_attn+layernorm"}),
        ("megatron", {"zero": 3, "precision": "fp8-blockwise", "recompute": "full"}),
        ("megatron", {"zero": 1, "recompute": "layernorm", "offload": "core_attn+qkv_linear"}),
        ("torchtitan", {"zero": 3, "dp_replicate": 2, "recompute": "op"}),
        ("torchtitan", {"zero": 3, "compiled": True, "recompute": "op"}),
        ("torchtitan", {"pp": 4, "vpp": 2, "schedule": "interleaved_zero_bubble", "zero": 2}),
        ("accelerate", {"zero": 3, "dp_replicate": 2, "cp": 2}),
        ("deepspeed", {"zero": 2, "tp": 2}),
    ],
)
def test_what_a_search_can_choose_comes_back_as_its_choice(
    engine: str, choice: dict[str, Any]
) -> None:
    """And nothing of it as a setting."""
    entry = files_of(searched(engine, **choice), engine, replace(NODE, model="llama3-8b"))

    assert export.run(["--from", engine, entry, *HARDWARE, "--out", "back.json"]) == 0

    found = read_launch("back.json")
    assert {name: getattr(found.choice, name) for name in choice} == choice
    usual = run_of(engine_space(found.engine), found.question.job, found.choice)
    # embeddings of torch have no rows to pad with
    assert set(settings_of(found.run, usual)) <= {"model.vocab_divisor"}


@pytest.mark.parametrize(
    ("dispatcher", "expected"),
    [("alltoall", "alltoall"), ("flex", "flex"), ("allgather", "alltoall")],
)
def test_dispatchers_of_a_choice(dispatcher: str, expected: str) -> None:
    """Of models with experts: the nearest that a search chooses from."""
    run = searched("megatron", "mixtral-8x7b", ep=8)
    assert choice_of(told(run, experts={"dispatcher": dispatcher})).dispatcher == expected
    assert choice_of(told(MEGATRON, experts={"dispatcher": dispatcher})).dispatcher == "alltoall"


def test_compiled_layers_are_priced_as_such() -> None:
    """As long as `autopar check` says of the file, wherever the launch is priced."""
    run = searched("torchtitan", zero=3, compiled=True)
    entry = files_of(run, "torchtitan", replace(NODE, model="llama3-8b"))
    assert check.run([entry, *HARDWARE, "--json", "check.json"]) == 0
    assert export.run(["--from", "torchtitan", entry, *HARDWARE, "--out", "back.json"]) == 0
    assert search.run(["--evaluate", "back.json", "--json", "again.json"]) == 0
    (checked,) = json.loads(Path("check.json").read_text())["launches"]
    assert checked["stack"] == "torchtitan-compiled"
    again = json.loads(Path("again.json").read_text())["launch"]["predicted"]
    for price in (again, json.loads(Path("back.json").read_text())["price"]):
        assert price["step_time_s"] == pytest.approx(checked["step_time_s"])


@pytest.mark.parametrize(
    ("section", "name", "value"), [("states", "bucket", 1 << 22), ("overlap", "gradients", False)]
)
def test_a_launch_that_was_read_is_priced_and_written_again_as_it_was(
    section: str, name: str, value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--evaluate` and `autopar-export` take it, and what they make of it is the same run."""
    run = told(MEGATRON, **{section: {name: value}})
    files_of(run, "megatron")
    assert export.run(["--from", "megatron", LAUNCH, *HARDWARE, "--out", "back.json"]) == 0
    stored = json.loads(Path("back.json").read_text())
    capsys.readouterr()

    assert search.run(["--evaluate", "back.json", "--json", "again.json"]) == 0
    assert export.run(["back.json", "--out", "out"]) == 0

    again = json.loads(Path("again.json").read_text())
    assert again["launch"]["settings"] == {f"runtime.{section}.{name}": value}
    assert again["launch"]["predicted"] == stored["price"]
    # the object of --json is a file of the launch as well
    assert read_launch("again.json").run == read_launch("back.json").run
    found = read_checked("out/launch.sh", world_size=8, gpu="h100-80gb").run
    assert found is not None
    assert without_effect(found) == without_effect(run)


def test_what_is_not_understood_withdraws_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless it is declared harmless; arguments of data and learning rate are known to be."""
    files_of(MEGATRON, "megatron")
    script = Path("megatron_args.sh")
    text = script.read_text()
    script.write_text(text.replace("--bf16", "--bf16 --made-up-by-us 4"))

    asked = ["--from", "megatron", LAUNCH, *HARDWARE, "--out", "back.json"]
    assert export.run(asked) == 2
    assert "--made-up-by-us is not understood" in capsys.readouterr().err
    assert not Path("back.json").exists()
    for command in (explain.run, lambda words: compare.run([LAUNCH, *words])):
        assert command([LAUNCH, *HARDWARE]) == 2
        assert "--check-ignore made_up_by_us" in capsys.readouterr().err

    assert export.run([*asked, "--check-ignore", "made_up_by_us"]) == 0

    said = capsys.readouterr().err
    assert "no effect on time or memory: " in said
    assert "--data-path" in said
    assert "--made-up-by-us" in said
    assert "check-ignore" not in Path("back.json").read_text()


def test_without_a_cluster_megatron_lm_gives_a_plan_and_others_ask_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files_of(searched("megatron", tp=2), "megatron")
    assert export.run(["--from", "megatron", LAUNCH, "--num-nodes", "1"]) == 0
    assert "tp_sizes_enc" in capsys.readouterr().out

    entry = files_of(TITAN, "torchtitan")
    assert export.run(["--from", "torchtitan", entry]) == 2
    assert "--hardware CARD:NODESxGPUS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "deepspeed"), "Megatron-LM"),
        (("--from", "megatron", "--model", "llama2-7b"), "has heads of keys and values 8"),
        (
            ("--from", "megatron", "--model", "mixtral-8x7b"),
            "has experts none, but mixtral-8x7b has 8",
        ),
    ],
)
def test_files_of_others_and_of_other_models_are_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files_of(MEGATRON, "megatron")

    assert export.run([*words, LAUNCH, *HARDWARE]) == 2

    assert said in capsys.readouterr().err


def test_what_the_trainer_refuses_is_no_launch(capsys: pytest.CaptureFixture[str]) -> None:
    files_of(MEGATRON, "megatron")
    script = Path("megatron_args.sh")
    script.write_text(script.read_text().replace("--global-batch-size 64", "--global-batch-size 9"))

    assert export.run(["--from", "megatron", LAUNCH, *HARDWARE]) == 2

    assert "Megatron-LM" in capsys.readouterr().err


def test_fewer_layers_of_a_shipped_model_are_found_by_its_name() -> None:
    """As of a model cut for a test; alone its sizes are those of no shipped one."""
    run, layers = searched("megatron"), 4
    (group,), (split,) = run.model.layers, run.strategy.layers
    fewer = (replace(split, count=layers),)
    small = replace(
        run,
        model=replace(run.model, layers=(replace(group, count=layers),)),
        strategy=replace(run.strategy, layers=fewer, stages=even_chunks(layers, 1)),
    )
    files_of(small, "megatron")
    words = ["--from", "megatron", LAUNCH, *HARDWARE, "--out", "back.json"]

    assert export.run(words) == 2
    assert export.run([*words, "--model", "llama3-8b"]) == 0

    assert read_launch("back.json").run.model.num_layers == layers


# --------------------------------------------------------------------------------------------------
# Another trainer.


def launch_file(run: Run, engine: str) -> str:
    """Return the file of a launch."""
    entry = files_of(run, engine, replace(NODE, model="llama3-8b"))
    name = f"{engine}.json"
    assert export.run(["--from", engine, entry, *HARDWARE, "--out", name]) == 0
    return name


@pytest.mark.parametrize(
    ("engine", "choice", "to", "losses"),
    [
        ("megatron", {"tp": 2}, "megatron-bridge", []),
        ("deepspeed", {"zero": 3}, "accelerate", []),
        ("megatron", {"tp": 2}, "torchtitan", ["torchtitan has no ZeRO-1: ZeRO-2"]),
        ("megatron", {"tp": 2, "zero": 3, "recompute": "mlp"}, "torchtitan",
         ["torchtitan has no recomputation of mlp: full"]),
        ("torchtitan", {"pp": 2, "zero": 3, "recompute": "op"}, "megatron",
         ["Megatron-LM has no ZeRO-3 with pipeline stages: ZeRO-1",
          "Megatron-LM has no recomputation of op: full"]),
        ("torchtitan", {"pp": 2, "vpp": 2, "schedule": "zero_bubble_v", "zero": 3}, "megatron",
         ["Megatron-LM has no schedule ZBV: interleaved 1F1B",
          "Megatron-LM has no ZeRO-3 with pipeline stages: ZeRO-1"]),
        ("torchtitan", {"zero": 3, "dp_replicate": 2}, "megatron",
         ["Megatron-LM has no 2 copies of ZeRO-3: one"]),
        ("megatron", {"cp": 2, "cp_kind": "a2a", "zero": 3}, "torchtitan",
         ["torchtitan has no a2a between context ranks: ring"]),
        ("megatron", {"cp": 2, "cp_kind": "all-gather", "zero": 3}, "torchtitan",
         ["torchtitan has no all-gather between context ranks: ring"]),
        ("torchtitan", {"zero": 3, "precision": "fp8"}, "deepspeed",
         ["DeepSpeed has no fp8 GEMMs: bf16"]),
        ("megatron", {"zero": 3, "offload": "core_attn"}, "torchtitan",
         ["torchtitan has no activations of modules on the host: they stay on the device"]),
        ("accelerate", {"zero": 3}, "torchtitan", []),
        ("torchtitan", {"pp": 2, "zero": 3}, "megatron-bridge",
         ["Megatron-LM has no ZeRO-3 with pipeline stages: ZeRO-1"]),
    ],
)  # fmt: skip
def test_another_trainer_gets_the_nearest_launch_with_what_is_lost(
    engine: str,
    choice: dict[str, Any],
    to: str,
    losses: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With losses nothing is written unless the nearest launch is asked for; it is priced."""
    name = launch_file(searched(engine, **choice), engine)
    own = read_launch(name).run
    capsys.readouterr()

    code = export.run([name, "--to", to, "--out", "out", "--json", "answer.json"])

    answer = json.loads(Path("answer.json").read_text())
    assert [loss["what"] for loss in answer["losses"]] == losses
    assert code == (3 if losses else 0)
    assert answer["status"] == ("refused" if losses else "exported")
    assert Path("out").exists() is not bool(losses)
    if losses:
        err = capsys.readouterr().err
        assert losses[0] in err
        assert "per step instead of" in err
        assert answer["price"]["after"]["step_time_s"] > 0
        assert export.run([name, "--to", to, "--out", "out", "--allow-approx"]) == 0
    entry = next(path for path in (Path("out/autopar_torchtitan.toml"), Path("out/launch.sh"))
                 if path.is_file())  # fmt: skip
    found = read_checked(str(entry), world_size=8, gpu="h100-80gb").run
    assert found is not None
    degrees = [(one.split.tp, one.strategy.pp, one.strategy.dp) for one in (found, own)]
    assert degrees[0] == degrees[1]


@pytest.mark.parametrize(
    ("choice", "to", "said"),
    [
        ({"pp": 2}, "deepspeed", "DeepSpeed"),
        ({"tp": 4, "cp": 2}, "deepspeed", "DeepSpeed"),
        ({"tp": 2}, "galvatron", "--to galvatron"),
    ],
)
def test_ranks_that_a_trainer_does_not_have_are_refused(
    choice: dict[str, Any], to: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = launch_file(searched("megatron", **choice), "megatron")

    assert export.run([name, "--to", to, "--allow-approx"]) == 2

    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--to", "torchtitan"], ["--from", "megatron"]])
def test_an_unknown_card_is_the_fault(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither ignored nor told as a missing number of GPUs."""
    path = files_of(MEGATRON, "megatron")
    assert export.run([path, *words, "--hardware", "hxx", "--out", "own.json"]) == 2
    assert "no device card 'hxx'" in capsys.readouterr().err
    assert not Path("own.json").exists()


def test_a_plan_does_not_go_to_megatron_bridge(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.json").write_text("{}")

    assert export.run(["plan.json", "--to", "megatron-bridge"]) == 2

    assert "--to " in capsys.readouterr().err


def test_a_script_is_priced_and_explained_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--evaluate` and `autopar-explain` read what a trainer is started with, as compare does."""
    path = files_of(MEGATRON, "megatron")
    assert not path.endswith(".json")
    assert search.run(["--evaluate", path]) == 2
    assert "--hardware CARD:NODESxGPUS" in capsys.readouterr().err

    assert export.run(["--from", "megatron", path, *HARDWARE, "--out", "own.json"]) == 0
    assert search.run(["--evaluate", "own.json", "--json", "-"]) == 0
    own = json.loads(capsys.readouterr().out)["launch"]
    assert search.run(["--evaluate", path, *HARDWARE, "--price", "2", "--json", "-"]) == 0
    its = json.loads(capsys.readouterr().out)
    assert its["status"] == "evaluated"
    assert its["launch"]["degrees"] == own["degrees"]
    assert its["launch"]["samples_per_s"] == own["samples_per_s"]

    assert explain.run([path, *HARDWARE, "--why-not", "tp=8"]) == 0
    assert "\nWhy not tp=8: " in capsys.readouterr().out
    Path("notes.txt").write_text("no launch\n")
    assert search.run(["--evaluate", "notes.txt", *HARDWARE]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_check_and_explain_have_one_peak_for_an_unknown_loop(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration alone does not tell whether its loop holds the logits."""
    words = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    Path("ds.json").write_text(json.dumps(words), encoding="utf-8")
    asked = ["ds.json", *HARDWARE, "--model", "llama3-8b", "--seq-length", "2048", "--json", "-"]
    assert check.run([*asked, "--no-neighbours"]) == 0
    (read,) = json.loads(capsys.readouterr().out)["launches"]
    assert explain.run(asked) == 0
    priced = json.loads(capsys.readouterr().out)["launch"]["predicted"]
    assert priced["stages"][0]["peak_bytes"] == read["stages"][0]["peak_bytes"]
    assert priced["odds_of_oom"] == read["odds_of_oom"]
