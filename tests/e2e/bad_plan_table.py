"""The rows of the table of bad input that `profile-plan` answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autopar.documents.plan import HardwareEntry, RunDocument, read_strategy
from autopar.documents.spec import load_spec
from autopar.run.of_plan import run_of_plan
from tests.e2e.bad_input_table import Case, changed, write
from tests.plan_cases import STRATEGY

COMMAND = "profile-plan"
LAYER = {
    "num_layers": 4,
    "seq_length": 16,
    "hidden_size": 32,
    "num_heads": 4,
    "ffn_hidden_size": 48,
}
MODEL: dict[str, Any] = {
    "format": "autopar-model",
    "version": 1,
    "name": "tiny",
    "vocab_size": 256,
    "learned_positions": 64,
    "layers": [LAYER],
}
PLAN: dict[str, Any] = {
    "format": "autopar-plan",
    "version": 1,
    "plan": STRATEGY,
    "step_time_s": 0.5,
    "prediction": {"stages": [{"forward_s": 0.1, "allocated_bytes": 9}, {"forward_s": 0.1}]},
    "options": {"sequence_parallel": True, "mixed_precision": "bf16"},
    "request": {"model": "tiny.json"},
}
STRATEGY_ONLY = ("tried.json", "--model", "tiny.json")
WITH_MODEL = ("tried_plan.json",)
GLOBAL = ("--pp-deg", "2", "--global-train-batch-size", "8", "--model", "tiny.json")
WITH_RUN = ("tried_run.json",)
GOOD = (STRATEGY_ONLY, WITH_MODEL, WITH_RUN, (*GLOBAL, "--world-size", "4"))
"""What the rows start from."""
_SECTION = "plan to check"


def prepare_plans(folder: Path) -> None:
    """Add a small model and its plans to a folder."""
    write(folder / "tiny.json", MODEL)
    write(folder / "tried.json", STRATEGY)
    write(folder / "tried_plan.json", PLAN)
    spec = load_spec(str(folder / "tiny.json"))
    run = run_of_plan(
        read_strategy(STRATEGY), spec, engine="none", gpu="a100-80gb", keeper="galvatron"
    )
    hardware = HardwareEntry(card="a100-80gb", num_nodes=1, num_gpus_per_node=4)
    document = RunDocument.of(run, hardware, {"request": PLAN["request"]})
    write(folder / "tried_run.json", document.content())
    encoder = {**LAYER, "num_layers": 2, "causal": False}
    decoder = {
        **LAYER,
        "num_layers": 2,
        "cross_attention": True,
        "norm_parameters_per_hidden": 3,
    }
    write(folder / "two_stacks.json", {**MODEL, "layers": [encoder, decoder]})
    write(folder / "decoder_first.json", {**MODEL, "layers": [decoder, encoder]})


def _case(
    what: str,
    arguments: tuple[str, ...],
    edit: Callable[[Path], None] | None = None,
    *,
    section: str = _SECTION,
) -> Case:
    return Case(section=section, what=what, arguments=arguments, edit=edit, command=COMMAND)


def cases() -> Iterator[Case]:
    """Yield every row."""
    yield from _files()
    yield from _illegal()
    yield from _options()
    yield from _modes()


def _files() -> Iterator[Case]:
    for what, keys, value in (
        ("text for a time", ("step_time_s",), "0.5 s"),
        ("negative time", ("step_time_s",), -0.5),
        ("NaN time", ("step_time_s",), float("nan")),
        ("a prediction that is a list", ("prediction",), []),
        ("a predicted time below 0", ("prediction", "stages", 0, "forward_s"), -1),
        ("one end of an interval", ("prediction", "step_time_interval_s"), [1]),
        ("fewer stages predicted than planned", ("prediction", "stages"), [{}]),
        ("text for predicted bytes", ("prediction", "stages", 0, "allocated_bytes"), "9 GB"),
        ("options that are a list", ("options",), [1]),
        ("text for a flag", ("options", "sequence_parallel"), "yes"),
        ("a number for fp32 gradients", ("options", "fp32_gradients"), 4),
        ("unknown precision", ("options", "mixed_precision"), "fp8"),
        ("a request whose model is a number", ("request", "model"), 7),
        ("a request with unusable layers", ("request", "num-layers"), "many"),
        ("a request whose model is gone", ("request", "model"), "no-such-model"),
        ("a newer version", ("version",), 99),
        ("no plan in it", ("plan",), None),
    ):
        yield _case(what, WITH_MODEL, changed("tried_plan.json", keys, value))
    for what, keys, value in (
        ("text for a degree of a run", ("strategy", "layers", 0, "split", "tp"), "two"),
        ("a run with stages of other layers", ("strategy", "stages", 0, 0, 1), [0, 3]),
        ("a run without engine settings", ("runtime",), None),
        ("a run with layers of no kind", ("model", "layers", 0, "layer", "mlp", "kind"), "none"),
        ("a run of 8-bit GEMMs", ("runtime", "precision", "fp8"), True),
        ("a newer run", ("version",), 99),
    ):
        yield _case(what, WITH_RUN, changed("tried_run.json", keys, value))
    yield _case("no such file", ("no-such-plan.json", "--model", "tiny.json"))
    yield _case("strategy without a model", ("tried.json",))
    yield _case("strategy that does not say its ranks", STRATEGY_ONLY, _without("world_size"))
    yield _case("strategy without degrees", STRATEGY_ONLY, _without("tp_sizes_enc"))
    yield _case("a model that does not exist", ("tried.json", "--model", "no-such-model"))
    yield _case("a model of other layers", ("tried.json", "--model", "llama2-7b"))
    yield _case(
        "a model without widths",
        STRATEGY_ONLY,
        changed("tiny.json", ("layers", 0, "ffn_hidden_size"), None),
    )
    yield _case(
        "a model without a vocabulary", STRATEGY_ONLY, changed("tiny.json", ("vocab_size",), None)
    )


def _illegal() -> Iterator[Case]:
    for what, key, value in (
        ("fewer micro-batches than stages", "chunks", 1),
        ("degrees that do not fill the ranks", "tp_sizes_enc", "2,8,2,1"),
        ("a batch that cannot be divided", "global_bsz", 6),
        ("stages that do not divide the ranks", "world_size", 5),
        ("several rules at once", "vtp", 3),
    ):
        yield _case(what, STRATEGY_ONLY, changed("tried.json", (key,), value))
    for what, arguments in (
        ("a sequence that the degree does not divide", ("--seq", "15")),
        ("a sequence beyond the positions", ("--seq", "128")),
        ("another batch that cannot be divided", ("--global-batch", "7")),
        ("more micro-batches than samples", ("--microbatches", "16")),
        ("fewer layers than stages", ("--layers", "1")),
        ("more layers than the plan has", ("--layers", "9")),
        ("other ranks than the plan's", ("--world-size", "8")),
    ):
        yield _case(what, (*STRATEGY_ONLY, *arguments))


def _options() -> Iterator[Case]:
    for what, arguments in (
        ("neither plan nor GLOBAL options", ()),
        ("GLOBAL mode without a batch", ("--pp-deg", "2", *GLOBAL[4:], "--world-size", "4")),
        ("GLOBAL mode without ranks", GLOBAL),
        ("GLOBAL mode without a model", (*GLOBAL[:4], "--world-size", "4")),
        ("more stages than layers", ("--pp-deg", "8", *GLOBAL[2:], "--world-size", "8")),
        ("a flag that is 2", (*GLOBAL, "--sdp", "2")),
        ("an unknown schedule", (*GLOBAL, "--pipeline-type", "zigzag")),
        ("ring attention", (*GLOBAL, "--global-cp-deg", "2")),
        ("an unknown mode", (*STRATEGY_ONLY, "--mode", "dry")),
        ("no steps", (*STRATEGY_ONLY, "--steps", "0")),
        ("text for a number", (*STRATEGY_ONLY, "--steps", "two")),
        ("an unknown option", (*STRATEGY_ONLY, "--step", "2")),
        ("a value is missing", (*STRATEGY_ONLY, "--mode")),
        ("two plans", (*STRATEGY_ONLY, "tried_plan.json")),
        ("GPUs' backend on the CPU", (*STRATEGY_ONLY, "--backend", "nccl", "--device", "cpu")),
        ("the CPU's backend on GPUs", (*STRATEGY_ONLY, "--backend", "gloo", "--device", "cuda")),
        ("no time at all", (*STRATEGY_ONLY, "--timeout", "0")),
        ("layers in words", (*STRATEGY_ONLY, "--num-layers", "four")),
        ("timed steps below 0", (*STRATEGY_ONLY, "--timed-steps", "-1")),
        ("a seed below 0", (*STRATEGY_ONLY, "--seed", "-1")),
        ("a document below a file", (*STRATEGY_ONLY, "--json", "tiny.json/out.json")),
    ):
        yield _case(what, arguments, section="options of profile-plan")


def _modes() -> Iterator[Case]:
    for what, arguments in (
        ("a run without torchrun", ("--mode", "run")),
        ("a dry run of a rank that there is not", ("--mode", "dryrun", "--ranks", "4")),
        ("a dry run of a stage that there is not", ("--mode", "dryrun", "--ranks", "middle")),
    ):
        yield _case(what, (*STRATEGY_ONLY, *arguments))
    one = ("--pp-deg", "1", *GLOBAL[2:4], "--world-size", "1", "--mode", "run")
    yield _case("a run of a decoder and an encoder", (*one, "--model", "decoder_first.json"))
    yield _case(
        "fewer layers than an encoder and a decoder have",
        (*one, "--model", "two_stacks.json", "--layers", "1"),
    )
    ring = {**STRATEGY, "cp_sizes_enc": "1,2,1,1"}

    def narrow(folder: Path) -> None:
        write(folder / "tried.json", ring)
        write(folder / "tiny.json", {**MODEL, "layers": [{**LAYER, "window": 8}]})

    yield _case(
        "a dry run of ring attention within a window", (*STRATEGY_ONLY, "--mode", "dryrun"), narrow
    )
    degrees = {"tp_sizes_enc": "3,2,1,1", "world_size": 12, "global_bsz": 48, "vtp": 1}
    odd = {**STRATEGY, **degrees, "use_sp": "0,0,0,0"}

    def edit(folder: Path) -> None:
        write(folder / "tried.json", odd)
        layer = {**LAYER, "num_heads": 6, "hidden_size": 48, "seq_length": 18}
        write(folder / "tiny.json", {**MODEL, "layers": [layer]})

    yield _case(
        "a dry run of degrees without a common mesh", (*STRATEGY_ONLY, "--mode", "dryrun"), edit
    )


def _without(key: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        write(folder / "tried.json", {k: v for k, v in STRATEGY.items() if k != key})

    return edit
