"""The rows of the table of bad input that `autopar-estimate` answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from msgspec import to_builtins

from search.closed_form.files import calculon_system, tensor2d_system
from tests.e2e.bad_input_table import STRATEGY, Case, case_of, changed, write

COMMAND = "autopar-estimate"
APPLICATION = {
    "hidden": 1024,
    "feedforward": 4096,
    "seq_size": 512,
    "attn_heads": 16,
    "attn_size": 64,
    "num_blocks": 8,
}
MODEL = {"l": 2048, "e": 4096, "h": 32, "depth": 32, "f": 16384}
CANDIDATE = {
    "strategy": "1d",
    "config": {"dp": 2, "tp": 4, "pp": 2, "mbs": 1},
    "placement": {"nv_tp": 4, "nv_dp": 2, "nv_pp": 1},
    "n_gpus": 16,
    "global_batch_size": 64,
}
CALCULON = (
    "calculon",
    *("--application", "application.json"),
    *("--system", "system.json"),
    *("--execution", "execution.json"),
)
TWO = (
    "tensor2d",
    *("--model", "two.json"),
    *("--system", "two_system.json"),
    *("--execution", "candidate.json"),
)
_TINY = {
    "format": "autopar-model",
    "version": 1,
    "name": "tiny",
    "vocab_size": 512,
    "layers": [
        {
            "num_layers": 2,
            "seq_length": 128,
            "hidden_size": 256,
            "num_heads": 4,
            "ffn_hidden_size": 1024,
        }
    ],
}
PLAN = ("--plan", "plan.json", "--model", "tiny_model.json", "--system", "card.json")
GOOD = (CALCULON, TWO, (*CALCULON, "--compat"), (*TWO, "--compat", "--layers"), PLAN)
"""What the rows start from, and what is priced without a word."""


def prepare_estimates(folder: Path, root: Path) -> None:
    """Add documents of both models to a folder."""
    configs = root / "hardware_configs"
    shutil.copyfile(configs / "executions" / "8x8-tp8-pp4-dp2.json", folder / "execution.json")
    write(folder / "system.json", to_builtins(calculon_system("a100-80gb")))
    write(folder / "two_system.json", to_builtins(tensor2d_system("a100-80gb")))
    changed("execution.json", ("attention_type",), "multihead")(folder)
    write(folder / "application.json", APPLICATION)
    write(folder / "two.json", MODEL)
    write(folder / "candidate.json", CANDIDATE)
    write(folder / "tiny_model.json", _TINY)
    write(folder / "plan.json", {"format": "autopar-plan", "version": 1, "plan": STRATEGY})
    shutil.copyfile(configs / "cards" / "a100-80gb.json", folder / "card.json")
    shutil.copyfile(configs / "stacks" / "megatron-core.json", folder / "stack.json")


_case = partial(case_of, COMMAND)


_WRONG = (
    ("text for a number", "8 GB"),
    ("null", None),
    ("NaN", float("nan")),
    ("infinity", float("inf")),
    ("negative", -1),
    ("zero", 0),
    ("an object", {"a": 1}),
)
_NUMBERS: tuple[tuple[str, tuple[str, ...], str, tuple[str | int, ...]], ...] = (
    ("application", CALCULON, "application.json", ("hidden",)),
    ("system of calculon", CALCULON, "system.json", ("networks", 0, "bandwidth")),
    ("execution", CALCULON, "execution.json", ("microbatch_size",)),
    ("model of tensor2d", TWO, "two.json", ("depth",)),
    ("system of tensor2d", TWO, "two_system.json", ("nvlink_bandwidth",)),
    ("candidate", TWO, "candidate.json", ("global_batch_size",)),
    ("candidate", TWO, "candidate.json", ("config", "tp")),
)


def cases() -> Iterator[Case]:
    """Yield every row."""
    for section, arguments, file, path in _NUMBERS:
        for what, value in _WRONG:
            name = f"{what} in {'.'.join(map(str, path))}"
            yield _case(section, name, arguments, changed(file, path, value))
        if section != "application":  # what else a file says of a model is not asked
            where = (*path[:-1], "nonsense_key")
            yield _case(
                section, f"unknown key beside {path[-1]}", arguments, changed(file, where, 1)
            )
        yield _case(section, f"missing file, {path[-1]}", arguments, _unlinked(file))
    yield from _executions()
    yield from _systems()
    yield from _candidates()
    yield from _options()
    yield from _plans()


def _plans() -> Iterator[Case]:
    for what, edit in (
        ("missing file", _unlinked("plan.json")),
        ("no plan", changed("plan.json", ("plan",), None)),
        ("text for a degree", changed("plan.json", ("plan", "vtp"), "two")),
        ("another number of layers", changed("tiny_model.json", ("layers", 0, "num_layers"), 5)),
        ("degrees that do not fill the GPUs", changed("plan.json", ("plan", "world_size"), 7)),
        ("a missing model", _unlinked("tiny_model.json")),
        ("a missing card", _unlinked("card.json")),
        ("a card without a number", _without("card.json", "device", "memory_bytes")),
        ("a stack without a key", _without("stack.json", "host")),
        ("a share above 1", changed("stack.json", ("overlap", "value", "tensor"), 1.5)),
    ):
        yield _case("plan in four models", what, (*PLAN, "--stack", "stack.json"), edit)
    for what, arguments in (
        ("no devices", PLAN[:4]),
        ("no model", (*PLAN[:2], *PLAN[4:])),
        ("unknown stack", (*PLAN, "--stack", "megatron-cor")),
        ("a card for a stack", (*PLAN, "--stack", "card.json")),
        ("an unknown card", (*PLAN[:4], "--system", "b2000")),
        ("two questions", (*PLAN, "--validate")),
        ("a stack without a plan", ("--validate", "--stack", "megatron-core")),
        ("an answer over a plan", (*PLAN, "--json", "plan.json")),
        ("an empty name", ("--plan", "")),
    ):
        yield _case("plan in four models", what, arguments)


def _without(file: str, *keys: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = node = json.loads((folder / file).read_text(encoding="utf-8"))
        for key in keys[:-1]:
            node = node[key]
        del node[keys[-1]]
        write(folder / file, data)

    return edit


def _unlinked(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def _executions() -> Iterator[Case]:
    for what, key, value in (
        ("degrees whose product is another", "num_procs", 32),
        ("a tier that does not exist", "pipeline_par_net", 2),
        ("a negative tier", "data_par_net", -1),
        ("a batch that does not divide", "batch_size", 129),
        ("unknown datatype", "datatype", "fp16"),
        ("unknown attention", "attention_type", "linear"),
        ("unknown recomputation", "activation_recompute", "selective"),
        ("a number for a flag", "optimizer_sharding", 2),
        ("half a processor", "tensor_par", 8.5),
        ("interleaving without stages", "pipeline_interleaving", 0),
        ("redo without sequence parallelism", "tensor_par_comm_type", "zigzag"),
    ):
        yield _case("execution", what, CALCULON, changed("execution.json", (key,), value))
    for what, file, key, value in (
        ("interleaving above the blocks", "execution.json", ("pipeline_interleaving",), 3),
        ("a tier that is too small", "system.json", ("networks", 0, "size"), 4),
        ("memory that is too small", "system.json", ("mem1", "GiB"), 0.01),
        ("a datatype that the system lacks", "execution.json", ("datatype",), "float8"),
    ):
        yield _case("execution", what, CALCULON, changed(file, key, value), code=3)
    yield _case(
        "execution",
        "heads that do not divide",
        CALCULON,
        changed("application.json", ("attn_heads",), 12),
    )


def _systems() -> Iterator[Case]:
    network = ("networks", 0)
    for what, path, value in (
        ("unknown processing mode", ("processing_mode",), "overlap"),
        ("no networks", ("networks",), []),
        ("a curve that does not start at 0", ("mem1", "MB_efficiency"), [[1, 0.9]]),
        ("a curve that rises", ("mem1", "MB_efficiency"), [[1, 0.9], [10, 0.9], [0, 0.1]]),
        ("an efficiency above 1", ("mem1", "MB_efficiency"), [[0, 90]]),
        ("an efficiency in percent", (*network, "efficiency"), 90),
        ("an unknown operation", (*network, "ops", "broadcast"), [1.0, 0.0]),
        ("an offset of p2p", (*network, "ops", "p2p"), [1.0, 0.0]),
        ("no offset", (*network, "ops", "all_reduce"), [2.0, None]),
        ("a scalar of 0", (*network, "ops", "all_reduce"), [0.0, 0.0]),
        ("all of the processor used", (*network, "processor_usage"), 1.0),
    ):
        yield _case("system of calculon", what, CALCULON, changed("system.json", path, value))
    yield _case(
        "system of calculon",
        "a card without the memory of the host",
        (*CALCULON[:4], "card.json", *CALCULON[5:]),
        _without("card.json", "host"),
    )
    yield _case(
        "system of tensor2d",
        "a card without its peak outside the matrix units",
        (*TWO[:4], "card.json", *TWO[5:]),
        _without("card.json", "device", "vector_fp16_flop_per_s"),
    )
    yield _case(
        "system of tensor2d",
        "a bandwidth of 1e-308",
        TWO,
        changed("two_system.json", ("nvlink_bandwidth",), 1e-308),
    )


def _candidates() -> Iterator[Case]:
    config, placement = ("config",), ("placement",)
    for what, path, value in (
        ("degrees whose product is another", ("n_gpus",), 32),
        ("unknown strategy", ("strategy",), "3d"),
        ("a degree of another strategy", (*config, "tp1"), 4),
        ("a placement that does not divide", (*placement, "nv_tp"), 3),
        ("a list for an object", config, [2, 4]),
    ):
        yield _case("candidate", what, TWO, changed("candidate.json", path, value))
    for what, file, key, value in (
        ("heads that do not divide", "two.json", ("h",), 30),
        ("a batch that does not divide", "candidate.json", ("global_batch_size",), 63),
        ("tokens that do not divide", "two.json", ("l",), 2050),
        ("a domain that is too small", "two_system.json", ("nvlink_size",), 4),
        ("memory that is too small", "two_system.json", ("hbm_capacity",), 1),
    ):
        yield _case("candidate", what, TWO, changed(file, key, value), code=3)


def _options() -> Iterator[Case]:
    options = {
        "no model": ("--application", "application.json"),
        "unknown model": ("calculo",),
        "neither model nor --validate": ("--system", "a100"),
        "unknown option": (*CALCULON, "--layer"),
        "no application": ("calculon", "--system", "a100", "--execution", "execution.json"),
        "no execution": CALCULON[:5],
        "no strategy": (*TWO[:5], "--config", "dp=1,tp=1,pp=1,mbs=1", "--batch", "8"),
        "no batch": (*TWO[:5], "--strategy", "1d", "--config", "dp=1,tp=1,pp=1,mbs=1"),
        "unknown application": (*CALCULON[:2], "llama2-8b", *CALCULON[3:]),
        "unknown system": (*CALCULON[:4], "a1000", *CALCULON[5:]),
        "unknown execution": (*CALCULON[:6], "1x8-tp9"),
        "an encoder-decoder model": (*CALCULON[:2], "t5-3b", *CALCULON[3:]),
        "a mixture of experts": (*TWO[:2], "mixtral-8x7b", *TWO[3:]),
        "unknown strategy": (*TWO, "--strategy", "2d-summa"),
        "degrees without names": (*TWO, "--config", "2,4,2,1"),
        "a degree twice": (*TWO, "--config", "dp=2,dp=2,tp=4,pp=2,mbs=1"),
        "a degree is missing": (*TWO, "--config", "dp=2,tp=4,pp=2"),
        "a degree of 0": (*TWO, "--config", "dp=0,tp=4,pp=2,mbs=1"),
        "half a GPU": (*TWO, "--n-gpus", "15.5"),
        "a batch of 0": (*TWO, "--batch", "0"),
        "flash attention under --compat": (*CALCULON, "--compat"),
        "--json below a file": (*CALCULON, "--json", "system.json/answer.json"),
        "unknown attention": (*TWO, "--attention", "linear"),
        "SUMMA attention without rows": (*TWO, "--attention", "summa"),
        "recomputed flash attention": (*TWO, "--recompute"),
        "no name for --json": (*CALCULON, "--json="),
        "no name for --system": (*TWO, "--system="),
        "--peers below a file": (*CALCULON, "--peers", "system.json/peers.json"),
        "a file that is no application": (*CALCULON[:2], "two.json", *CALCULON[3:]),
        "another model's system": (*CALCULON[:4], "two_system.json", *CALCULON[5:]),
    }
    for what, arguments in options.items():
        edit = None
        if what.startswith("flash"):
            edit = changed("execution.json", ("attention_type",), "flash")
        yield _case("options of autopar-estimate", what, arguments, edit)
