"""The rows of the table of bad input that `profile-model` answers.

Their configurations are small, so that a row that were accepted by mistake would end soon.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.e2e.bad_input_table import Case, changed, write

COMMAND = "profile-model"
MODULES = Path(__file__).with_name("bad_modules.py")
QUICK = (
    "--device",
    "cpu",
    "--dtype",
    "fp32",
    "--bsz",
    "1",
    "--max-seconds",
    "0.02",
    "--out",
    "out",
)
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}
FAMILIES = {
    "llama": SMALL,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 32, "vocab_size": 100},
    "t5": {
        "d_model": 64,
        "num_layers": 2,
        "num_heads": 8,
        "d_kv": 8,
        "d_ff": 96,
        "vocab_size": 100,
    },
}
GOOD = (
    ("--model", "py:bad_modules:good", "--seq", "16", *QUICK),
    *(
        ("--model", f"{family}.json", "--source", "exact", "--tp", "1", *QUICK)
        for family in FAMILIES
    ),
)
"""What the rows start from, and what is measured without a word."""


def prepare_models(folder: Path) -> None:
    """Add a module and small configurations to a folder."""
    shutil.copyfile(MODULES, folder / MODULES.name)
    for family, values in FAMILIES.items():
        named = {"model_type": family, "_name_or_path": f"small-{family}"}
        write(folder / f"{family}.json", {**values, **named})


def cases() -> tuple[Case, ...]:
    """Return all rows."""
    return (*_configurations(), *_sizes(), *_modules())


def _case(
    what: str,
    *arguments: str,
    edit: Callable[[Path], None] | None = None,
    code: int = 2,
    section: str = "profile-model",
) -> Case:
    options = (*QUICK, *arguments)
    return Case(
        section=section, what=what, arguments=options, code=code, command=COMMAND, edit=edit
    )


def _configurations() -> Iterator[Case]:
    for family, values in FAMILIES.items():
        for key in values:
            if key == "num_key_value_heads":  # as many as heads, where it is missing
                continue
            yield _case(
                f"{family}: no {key}",
                *("--model", f"{family}.json"),
                edit=_without(f"{family}.json", key),
            )
    for what, key, value in (
        ("a text for a size", "hidden_size", "64"),
        ("a list for a size", "intermediate_size", [96]),
        ("a negative size", "intermediate_size", -96),
        ("no layers", "num_hidden_layers", 0),
        ("an impossible size", "vocab_size", 10**30),
        ("key-value heads that do not divide the heads", "num_key_value_heads", 3),
        ("a base of rotary positions that is a text", "rope_theta", "1e4"),
        ("a base of rotary positions below 1", "rope_theta", 0.5),
        ("a scaling of rotary positions that is no object", "rope_scaling", 8),
        ("an unknown architecture", "model_type", "resnet"),
        ("an architecture that is no text", "model_type", ["llama"]),
    ):
        yield _case(what, "--model", "llama.json", edit=changed("llama.json", (key,), value))


def _sizes() -> Iterator[Case]:
    for what, arguments in (
        ("more tokens than positions", ("--model", "gpt2.json", "--seq", "64")),
        ("degree that does not divide the heads", ("--model", "llama.json", "--tp", "3")),
        ("degree above the heads", ("--model", "llama.json", "--tp", "16")),
        (
            "degree that does not divide the length",
            ("--model", "llama.json", "--tp", "8", "--seq", "12"),
        ),
        ("memory of a GPU without one", ("--model", "llama.json", "--source", "device")),
        ("a folder that is a file", ("--model", "llama.json", "--out", "llama.json")),
        (
            "a folder that cannot be made",
            # with a length: one that nobody chose is said in a line before
            ("--model", "llama.json", "--seq", "32", "--out", "llama.json/out"),
        ),
        ("no such model", ("--model", "no-such-model")),
        ("no model", ()),
        ("no range of lengths", ("--model", "llama.json", "--seq", "32:16")),
    ):
        yield _case(what, *arguments)
    divided = changed("llama.json", ("intermediate_size",), 90)
    yield _case(
        "degree that does not divide the MLP", "--model", "llama.json", "--tp", "4", edit=divided
    )


def _modules() -> Iterator[Case]:
    for what, factory in (
        ("layers return nothing", "returns_nothing"),
        ("layers return a dict without hidden_states", "returns_a_dict"),
        ("layers return a tuple without the state", "returns_flags"),
        ("NaN activations", "nan_activations"),
        ("NaN weights", "nan_weights"),
        ("operators of CUDA on a CPU", "needs_cuda"),
        ("factory raises", "raises"),
        ("factory of other arguments", "too_few_arguments"),
        ("factory makes nothing", "makes_nothing"),
        ("factory makes no model", "makes_a_layer"),
        ("factory ignores the number of layers", "other_number"),
        ("no factory of that name", "god"),
        ("no factory but a text", "returned"),
        ("layers in no ModuleList", "no_list"),
        ("layers of two classes", "two_classes"),
        ("layers without parameters", "no_parameters"),
        ("nothing to train", "frozen"),
        ("batches of one sample", "one_sample"),
        ("batches of no tokens", "no_tokens"),
        ("batches on another device", "other_device"),
        ("tokens beyond the table", "large_tokens"),
    ):
        name = f"py:bad_modules:{factory}"
        yield _case(what, "--model", name, "--seq", "16", section="module of your own")
    for what, arguments in (
        ("no such Python module", ("--model", "py:no_such_module:build")),
        ("a file for a module", ("--model", "py:bad_modules.py:good")),
        ("no factory named", ("--model", "py:bad_modules")),
        ("more tokens than positions", ("--model", "py:bad_modules:good", "--seq", "64")),
        (
            "degree that does not divide the heads",
            ("--model", "py:bad_modules:good", "--seq", "16", "--tp", "3"),
        ),
        (
            "half a layer",
            ("--model", "py:bad_modules:good", "--seq", "16", "--profile-unit", "mlp"),
        ),
    ):
        yield _case(what, *arguments, section="module of your own")


def _without(file: str, key: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        family = file.removesuffix(".json")
        values = {**FAMILIES[family], "model_type": family}
        del values[key]
        write(folder / file, values)

    return edit
