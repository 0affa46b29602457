"""The rows of the table of bad input that `autopar-explore` answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e.bad_estimates_table import prepare_estimates
from tests.e2e.bad_input_table import Case, case_of, changed, write
from tests.unit.explore_documents import EXECUTION

COMMAND = "autopar-explore"
CALCULON = (
    "calculon",
    *("--application", "application.json"),
    *("--system", "system.json"),
    *("--num-procs", "4"),
    *("--max-batch", "4"),
    *("--top", "1"),
)
TWO = (
    "tensor2d",
    *("--model", "two.json"),
    *("--system", "two_system.json"),
    *("--num-gpus", "8"),
    *("--batch", "8"),
    *("--strategy", "1d"),
)
TUNER = (*CALCULON[:5], "--space", "space.json")
SPACE: dict[str, Any] = {key: value for key, value in EXECUTION.items() if key != "data_par"} | {
    "num_procs": 4,
    "tensor_par": [1, 2],
    "pipeline_par": {"from": 1, "to": 2},
    "pipeline_par_net": 0,
    "data_par_net": 0,
    "batch_size": 4,
    "fused_activation": True,
    "activation_recompute": ["none", "full"],
}
WHAT_IF = (
    *("--model", "config.json"),
    *("--hardware", "card.json:1x2", "--hardware", "a100-80gb:1x2"),
    *("--stack", "megatron-core"),
    *("--global-batch-size", "8"),
)
GOOD = (
    WHAT_IF,
    CALCULON,
    TWO,
    TUNER,
    (*CALCULON, "--compat"),
    (*TWO, "--sweep", "model.l=1024,2048"),
)
"""What the rows start from, and what is searched without a word."""


def prepare_explore(folder: Path, root: Path) -> None:
    """Add documents of both models and a space to a folder."""
    prepare_estimates(folder, root)
    write(folder / "space.json", SPACE)


def _case(section: str, *row: Any, **others: Any) -> Case:
    return case_of(COMMAND, f"{section} of {COMMAND}", *row, **others)


_WRONG = (
    ("text for a number", "8 GB"),
    ("a boolean", True),
    ("null", None),
    ("NaN", float("nan")),
    ("negative", -1),
    ("zero", 0),
)
_NUMBERS: tuple[tuple[tuple[str, ...], str, tuple[str | int, ...]], ...] = (
    (CALCULON, "application.json", ("feedforward",)),
    (CALCULON, "system.json", ("networks", 0, "bandwidth")),
    (TWO, "two.json", ("l",)),
    (TWO, "two_system.json", ("hbm_capacity",)),
    (TUNER, "space.json", ("tensor_par",)),
)


def cases() -> Iterator[Case]:
    """Yield every row."""
    for arguments, file, path in _NUMBERS:
        for what, value in _WRONG:
            name = f"{file}: {what} in {'.'.join(map(str, path))}"
            yield _case("documents", name, arguments, changed(file, path, value))
        if file != "application.json":  # what else a file says of a model is not asked
            where = (*path[:-1], "nonsense_key")
            yield _case("documents", f"{file}: unknown key", arguments, changed(file, where, 1))
    yield from _spaces()
    yield from _what_ifs()
    yield from _nothing_runs()
    for what, path in {
        "a path that leads nowhere": "system.networks.0.bandwith=1,2",
        "a tier that does not exist": "system.networks.7.bandwidth=100,200",
        "a word": "system.processing_mode=1,2",
        "a document of the other model": "model.l=1,2",
        "no values": "system.mem1.GiB=",
        "no path": "40,80",
        "a value that is no number": "system.mem1.GiB=40,eighty",
        "a range of two numbers": "system.mem1.GiB=40:80",
        "a range that never ends": "system.mem1.GiB=40:80:-5",
        "a factor of 1": "system.mem1.GiB=40:80:x1",
        "a range of too many values": "system.mem1.GiB=1:1e9:1",
        "a value that the document refuses": "system.networks.0.bandwidth=0,100",
        "half a head": "application.attn_heads=8,8.5",
    }.items():
        yield _case("sweeps", what, (*CALCULON, "--sweep", path))
    twice = ("--sweep", "model.l=1024", "--sweep", "model.l=2048")
    yield _case("sweeps", "a path twice", (*TWO, *twice))
    yield from _options()


def _spaces() -> Iterator[Case]:
    range_ = ("batch_size",)
    for what, path, value in (
        ("an unknown word", ("datatype",), "fp16"),
        ("an unknown word in a list", ("activation_recompute",), ["none", "selective"]),
        ("a number for a flag", ("weight_offload",), 2),
        ("a negative tier", ("data_par_net",), -1),
        ("an empty list", ("microbatch_size",), []),
        ("a list in a list", ("microbatch_size",), [[1, 2]]),
        ("a value twice", ("microbatch_size",), [1, 2, 1]),
        ("two numbers of processors", ("num_procs",), [4, 8]),
        ("training and inference", ("training",), [True, False]),
        ("a range that descends", range_, {"from": 8, "to": 4}),
        ("a range without an end", range_, {"from": 8}),
        ("a step of 0", range_, {"from": 4, "to": 8, "step": 0}),
        ("a factor of 1", range_, {"from": 4, "to": 8, "times": 1}),
        ("half a step", range_, {"from": 4, "to": 8, "step": 0.5}),
        ("a range of words", ("datatype",), {"from": "float8", "to": "float32"}),
        ("a range of flags", ("weight_offload",), {"from": 0, "to": 1}),
        ("a factor from 0", range_, {"from": 0, "to": 8, "times": 2}),
        ("a range of too many values", range_, {"from": 1, "to": 2**40}),
        ("a range that ends too late", range_, {"from": 1, "to": 2**40, "step": 2**24}),
        ("a factor that ends too late", range_, {"from": 1, "to": 2**40, "times": 2}),
        ("too large a degree", ("tensor_par",), 2**31),
        ("an unknown word of a range", range_, {"from": 4, "until": 8}),
    ):
        yield _case("spaces", what, TUNER, changed("space.json", path, value))
    for what, drop in (
        ("a missing field", ("datatype",)),
        ("two missing degrees", ("tensor_par", "pipeline_par")),
        ("no number of processors", ("num_procs",)),
    ):
        left = {key: value for key, value in SPACE.items() if key not in drop}
        yield _case("spaces", what, TUNER, lambda f, s=left: write(f / "space.json", s))  # type: ignore[misc]
    yield _case("spaces", "a missing file", (*TUNER[:6], "spaces.json"))
    yield _case("spaces", "another number of processors", (*TUNER, "--num-procs", "8"))
    yield _case("spaces", "numbers of processors", (*TUNER, "--num-procs", "4,8"))
    yield _case("spaces", "an option of the built-in space", (*TUNER, "--max-batch", "8"))
    yield _case("spaces", "a flag of the built-in space", (*TUNER, "--even-stages"))
    yield _case("spaces", "a tuner without a space", (*CALCULON[:5], "--tuner", "random"))
    yield _case("spaces", "an unknown tuner", (*TUNER, "--tuner", "optuna"))
    yield _case("spaces", "no evaluations", (*TUNER, "--tuner", "random", "--evaluations", "0"))
    yield _case("spaces", "a negative seed", (*TUNER, "--tuner", "random", "--seed", "-1"))
    yield _case("spaces", "Ray for another tuner", (*TUNER, "--tuner", "random", "--ray", "local"))
    yield _case("spaces", "a tuner of the other model", (*TWO, "--tuner", "random"))


def _what_ifs() -> Iterator[Case]:
    for what, arguments, edit in (
        ("no model", WHAT_IF[2:], None),
        ("no hardware", (*WHAT_IF[:2], *WHAT_IF[6:]), None),
        ("no batch", WHAT_IF[:8], None),
        ("an unknown model", (*WHAT_IF, "--model", "llama2-8b"), None),
        ("an unknown card", (*WHAT_IF, "--hardware", "a1000:1x8"), None),
        ("a cluster without a shape", (*WHAT_IF, "--hardware", "a100-80gb"), None),
        ("an unknown stack", (*WHAT_IF, "--stack", "megatron"), None),
        ("an unknown site", (*WHAT_IF, "--site", "moon"), None),
        ("an unknown engine", (*WHAT_IF, "--engine", "jax"), None),
        ("half a batch", (*WHAT_IF, "--global-batch-size", "8.5"), None),
        ("lengths of two layer types", (*WHAT_IF, "--seq-length", "64,64"), None),
        ("a layer that no model has", (*WHAT_IF, "--pin", "layers 90-99:tp=1"), None),
        ("an order by price without prices", (*WHAT_IF, "--by", "cost"), None),
        ("a price of nothing", (*WHAT_IF, "--price", "b200=2"), None),
        ("a price that is none", (*WHAT_IF, "--price", "a100-80gb=cheap"), None),
        ("a price below 0", (*WHAT_IF, "--price", "a100-80gb=-1"), None),
        ("a price of one of two", (*WHAT_IF, "--by", "cost", "--price", "a100-80gb=1"), None),
        ("processors of a closed form", (*WHAT_IF, "--num-procs", "8"), None),
        ("a word too many", (*WHAT_IF, "h100:1x8"), None),
        ("measured files", (*WHAT_IF, "--time-profiling-path", "x.json"), None),
        ("--json is the card", (*WHAT_IF, "--json", "card.json"), None),
        ("a folder that is a file", (*WHAT_IF, "--output-config-path", "system.json"), None),
        (
            "a card with text for a number",
            WHAT_IF,
            changed("card.json", ("device", "memory_bytes", "value"), "8 GB"),
        ),
    ):
        yield _case("what-ifs", what, arguments, edit)
    many = [word for count in range(1, 502) for word in ("--global-batch-size", str(count))]
    yield _case("what-ifs", "too many combinations", (*WHAT_IF[:8], *many))
    nothing = (*WHAT_IF, "--seq-length", "64", "--memory-constraint", "1.1")
    # each combination says what it needs
    yield replace(_case("what-ifs", "nothing fits", nothing, code=3), prints=True)


def _nothing_runs() -> Iterator[Case]:
    for what, arguments, file, path, value in (
        ("no memory", CALCULON, "system.json", ("mem1", "GiB"), 0.001),
        ("no tier that is large enough", CALCULON, "system.json", ("networks",), None),
        ("no memory of tensor2d", TWO, "two_system.json", ("hbm_capacity",), 0.001),
        ("a tier that no point of a space has", TUNER, "space.json", ("tensor_par_net",), 7),
        ("no memory for a space", TUNER, "system.json", ("mem1", "GiB"), 0.001),
    ):
        edit = _small_tiers if value is None else changed(file, path, value)
        yield _case("searches without an answer", what, arguments, edit, code=3)
    yield _case(
        "searches without an answer",
        "GPUs that nothing divides",
        (*TWO[:5], "--num-gpus", "1009", "--batch", "8"),
        code=3,
    )


def _small_tiers(folder: Path) -> None:
    changed("system.json", ("networks", 0, "size"), 1)(folder)
    changed("system.json", ("networks", 1, "size"), 1)(folder)


def _options() -> Iterator[Case]:
    for what, arguments in {
        "no model": ("--application", "application.json"),
        "unknown model": ("calculus",),
        "unknown option": (*CALCULON, "--maxbatch", "4"),
        "no application": ("calculon", *CALCULON[3:]),
        "no system": (*CALCULON[:3], *CALCULON[5:]),
        "no processors": (*CALCULON[:5], "--max-batch", "4"),
        "no batch": CALCULON[:7],
        "no GPUs": (*TWO[:5], "--batch", "8"),
        "unknown application": (*CALCULON[:2], "llama2-8b", *CALCULON[3:]),
        "unknown system": (*TWO[:4], "a1000", *TWO[5:]),
        "the other model's system": (*CALCULON[:4], "two_system.json", *CALCULON[5:]),
        "an encoder-decoder model": (*CALCULON[:2], "t5-3b", *CALCULON[3:]),
        "0 processors": (*CALCULON, "--num-procs", "0"),
        "half a processor": (*CALCULON, "--num-procs", "8.5"),
        "processors with spaces": (*CALCULON, "--num-procs", "8;16"),
        "too many processors": (*CALCULON, "--num-procs", "3000000000"),
        "a negative batch": (*CALCULON, "--max-batch", "-4"),
        "the best 0": (*CALCULON, "--top", "0"),
        "0 threads": (*CALCULON, "--threads", "0"),
        "unknown objective": (*CALCULON, "--objective", "cost"),
        "unknown datatype": (*CALCULON, "--datatype", "fp16"),
        "unknown strategy": (*TWO, "--strategy", "1d,3d"),
        "flash attention under --compat": (*CALCULON, "--compat", "--attention", "flash"),
        "gated blocks under --compat": (*CALCULON, "--compat", "--structure", "llama"),
        "statistics without a file": (*CALCULON, "--all-statistics"),
        "a format without pictures": (*CALCULON, "--plot-format", "svg"),
        "--all below a file": (*CALCULON, "--all", "system.json/all.csv"),
        "no name for --all": (*CALCULON, "--all="),
    }.items():
        yield _case("options", what, arguments)
    lacks = "a datatype that the system lacks"
    yield _case("options", lacks, (*CALCULON, "--datatype", "float8"), code=3)
    for what, arguments in {
        "--json below a file": (*TWO, "--json", "system.json/best.json"),
        "--plot is a file": (*TWO, "--plot", "system.json"),
    }.items():  # a search may have taken an hour: its tables are shown all the same
        yield replace(_case("options", what, arguments), prints=True)
