"""Command lines of `profile-model`: what they mean and what is said about them."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from autopar.errors import OptionError
from profiler.model.command import COMMAND
from profiler.model.options import (
    ModelOptions,
    build_options,
    parse_batches,
    parse_degrees,
    parse_seq_lengths,
)
from profiler.model.sources import load_source
from tests.unit.profile_model_support import make_options
from tests.warm import new_interpreter


def read(*arguments: str) -> ModelOptions:
    """Return the options of a command line."""
    raw = COMMAND.read(["--model", "llama2-7b", *arguments], lambda _: None)
    assert raw is not None
    return build_options(**raw)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process that cannot import torch."""
    code = "import sys; sys.modules['torch'] = None\nfrom autopar.cli import model; model()"
    return new_interpreter(code, *arguments)


@pytest.mark.parametrize(("text", "device"), [("gpu", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_device_in_the_words_of_scripts(text: str, device: str) -> None:
    assert read("--device", text).device == device


def test_blocks_without_sizes_are_profiled_with_those_of_the_line() -> None:
    """A profile is of single layers, so the line needs no number of them."""
    widths = ("--hidden-size", "64", "--num-heads", "4", "--ffn-hidden-size", "96")
    options = read("--vocab-size", "320", *widths)
    spec = load_source("llama", sizes=options.sizes).sizes
    assert (spec.layers[0].hidden_size, spec.layers[0].num_heads, spec.vocab_size) == (64, 4, 320)
    with pytest.raises(OptionError, match="--ffn-hidden-size"):
        load_source("llama", sizes=read(*widths[:4]).sizes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", (8,)),
        ("1:4", (1, 2, 3, 4)),
        ("1:9:4", (1, 5, 9)),
        ("1:20:x4", (1, 4, 16)),
        ("4,1,2:3", (1, 2, 3, 4)),
    ],
)
def test_batch_ranges(text: str, expected: tuple[int, ...]) -> None:
    """Numbers, ranges with step or factor, and lists of them; both ends count."""
    assert parse_batches(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2048", ((2048,),)),
        ("512:4096:x2", ((512,), (1024,), (2048,), (4096,))),
        ("1024,2048", ((1024,), (2048,))),
        ("[512,128]", ((512, 128),)),
        ("[1024,256],[512,128],64", ((64,), (512, 128), (1024, 256))),
    ],
)
def test_sequence_lengths(text: str, expected: tuple[tuple[int, ...], ...]) -> None:
    """A number is a length of all layer types, brackets hold one length per type."""
    assert parse_seq_lengths(text) == expected


@given(
    low=st.integers(1, 500), more=st.integers(0, 2000), step=st.integers(1, 50), twice=st.booleans()
)
def test_ranges_begin_where_they_say(low: int, more: int, step: int, twice: bool) -> None:
    """A range has its first number, none beyond its last, and equal steps or factors between."""
    high = low + more
    found = parse_batches(f"{low}:{high}:{'x2' if twice else step}")

    assert found[0] == low
    assert found[-1] <= high < (found[-1] * 2 if twice else found[-1] + step)
    assert all(b == (2 * a if twice else a + step) for a, b in itertools.pairwise(found))


def test_degrees_contain_one() -> None:
    """The documented tables need degree 1, whatever else is asked for."""
    assert parse_degrees("8,2") == (1, 2, 8)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "batch", "--bsz", "1:12:1", "--seq", "1024,2048", "--tp", "1,2,4,8"],
        [
            *("--profile_mode", "batch", "--profile_min_batch_size", "1"),
            *("--profile_max_batch_size=12", "--profile-batch-size-step", "1"),
            *("--profile_fixed_seq_length_list", "1024,2048", "--max_tp_deg", "8"),
        ],
        [
            *("model_profiler.profile_mode=batch", "model_profiler.profile_min_batch_size=1"),
            *("model_profiler.profile_max_batch_size=12", "profile_batch_size_step=1"),
            *("--profile-seq-length-list", "1024,2048", "--profile_max_tp_deg", "8"),
        ],
    ],
)
def test_documented_spellings_mean_the_same(arguments: list[str]) -> None:
    """Ours, Galvatron's with underscores, and overrides of its newest release."""
    found = read(*arguments)

    assert found.mode == "batch"
    assert found.batches == tuple(range(1, 13))
    assert found.seq_lengths == ((1024,), (2048,))
    assert found.degrees == (1, 2, 4, 8)


def test_documented_sequence_range() -> None:
    """A step is added as Galvatron does; without one each length is twice the one before."""
    ends = ("--mode", "sequence", "--profile-min-seq-length", "512")
    ends = (*ends, "--profile-max-seq-length", "2048")

    assert read(*ends).seq_lengths == ((512,), (1024,), (2048,))
    stepped = read(*ends, "--profile-seq-length-step", "512")
    assert stepped.seq_lengths == ((512,), (1024,), (1536,), (2048,))


@pytest.mark.parametrize(
    ("words", "lengths", "said"),
    [
        (("--profile-max-seq-length", "4096"), (256, 512, 1024, 2048, 4096), "using 256"),
        (("--profile-max-seq-length", "192"), (96, 192), "using 96"),
        (
            ("--profile-max-seq-length", "300", "--profile-seq-length-step", "100"),
            (100, 200, 300),
            "using 100",
        ),
    ],
)
def test_the_last_length_alone(words: tuple[str, ...], lengths: tuple[int, ...], said: str) -> None:
    """The first follows from it, and is said."""
    found, notes = told("--mode", "sequence", *words)

    assert found.seq_lengths == tuple((length,) for length in lengths)
    assert notes == [f"--profile-min-seq-length not given; {said}"]


def test_the_last_batch_alone() -> None:
    found, notes = told("--mode", "batch", "--profile-max-batch-size", "4")

    assert found.batches == (1, 2, 3, 4)
    assert notes == ["--profile-min-batch-size not given; using 1"]


def test_the_length_of_the_model() -> None:
    """It is measured where nothing else says lengths, and ends those of the sequence mode."""
    assert told("--seq_length", "64")[0].seq_lengths == ((64,),)
    found, notes = told("--mode", "sequence", "--seq_length", "256")
    assert found.seq_lengths == ((64,), (128,), (256,))
    assert notes == []
    found, notes = told("--seq_length", "64", "--profile_seq_length_list", "32")
    assert found.seq_lengths == ((32,),)
    assert notes == ["--seq-length is not used: other options set the lengths"]


def test_a_mode_alone_profiles_the_default_model() -> None:
    notes: list[str] = []

    assert build_options(notes.append, mode="sequence").model == "llama2-7b"
    assert notes == ["--model not given; using the shipped llama2-7b"]


def test_sizes_are_laid_over_a_described_model_alone() -> None:
    sizes = told("--hidden_size", "2048", "--num_attention_heads", "16")[0].sizes

    layer = sizes.load("llama2-7b").layers[0]
    assert (layer.hidden_size, layer.num_heads, layer.num_kv_heads) == (2048, 16, 16)
    assert layer.ffn_hidden_size == 5504
    with pytest.raises(OptionError, match="--hidden-size"):
        load_source("hf:x", sizes=sizes)


def test_meaningless_options_are_named() -> None:
    """Options of peers that mean nothing here are left out with a sentence, values included."""
    notes: list[str] = []
    given = ["--use-flash-attn", "--profile_dp_type", "zero3", "--sequence-parallel", "1"]

    assert COMMAND.read([*given, "--tp", "2"], notes.append) == {"tp": "2"}
    assert [note.split()[0] for note in notes] == [
        "--use-flash-attn",
        "--profile_dp_type",
        "--sequence-parallel",
    ]


def test_a_path_is_no_override() -> None:
    """A value with an equals sign stays the value of the option before it."""
    assert COMMAND.read(["--out", "a=b"], lambda _: None) == {"out": "a=b"}


def test_defaults_by_mode() -> None:
    """One batch of 8, batches 1 to 12, one sample of several lengths: as documented."""
    assert make_options().batches == (8,)
    assert make_options(mode="batch").batches == tuple(range(1, 13))
    assert make_options(mode="sequence").batches == (1,)
    assert make_options().profile_types == ("computation", "memory")
    assert make_options(source="exact").profile_types == ("memory",)


def told(*arguments: str) -> tuple[ModelOptions, list[str]]:
    """Return the options of a command line for a shipped model, and what is said of them."""
    raw = COMMAND.read(["--model", "llama2-7b", *arguments], lambda _: None)
    assert raw is not None
    notes: list[str] = []
    return build_options(notes.append, **raw), notes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": None}, "--model is missing"),
        ({"mode": "bach"}, "Did you mean 'batch'"),
        ({"bsz": "1:4"}, "--mode"),
        ({"mode": "batch", "bsz": "4"}, "at least 8 for Galvatron"),
        ({"mode": "sequence", "seq": "64"}, "--mode"),
        ({"bsz": "0"}, "ascending range"),
        ({"bsz": "4:1"}, "ascending range"),
        ({"bsz": "1:4:x1"}, "never reaches the end"),
        ({"bsz": "1:9999999"}, "more than 4096 values"),
        ({"bsz": "many"}, "1:12"),
        (
            {"bsz": "2", "profile_min_batch_size": 1, "profile_max_batch_size": 3},
            "Remove one of them",
        ),
        ({"profile_min_batch_size": 1}, "needs --profile-max-batch-size"),
        ({"profile_batch_size_step": 1}, "needs --profile-min-batch-size"),
        ({"profile_max_seq_length": 0}, "--profile-max-seq-length 0 is not a range"),
        ({"profile_min_batch_size": 3, "profile_max_batch_size": 1}, "are not a range"),
        ({"seq": "[512,128"}, "Use [512,128]"),
        ({"seq": "[512:1024,128]"}, "Use [512,128]"),
        ({"seq": "1k"}, "neither a number nor a range"),
        ({"tp": "0"}, "is not a list of tensor degrees"),
        ({"tp": "2", "max_tp_deg": 2}, "Remove one of them"),
        ({"layernum_min": 4, "layernum_max": 4}, "must exceed"),
        ({"layernum_min": 0}, "--layernum-min: expected 1 to"),
        ({"source": "exact", "profile_type": "computation"}, "autopar-profile-estimate"),
        ({"source": "fake"}, "--source: expected auto, device or exact"),
        ({"profile_type": "both"}, "--profile-type: expected computation, memory or all"),
        ({"resume": True, "force": True}, "Remove one of them"),
        ({"out": Path(__file__)}, "expected a folder, got a file"),
        ({"max_seconds": 0.0}, "--max-seconds: expected seconds above 0"),
        ({"iters": 0}, "--iters: expected 1 to"),
        ({"make_vocab_size_divisible_by": 0}, "--make-vocab-size-divisible-by: expected 1 to"),
    ],
)
def test_unusable_options_get_one_sentence(changes: dict[str, object], said: str) -> None:
    """The sentence names the option and the remedy."""
    with pytest.raises(OptionError) as caught:
        make_options(**changes)

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_command_line_without_torch() -> None:
    """Mistakes are found before torch is looked for, and a missing torch is one sentence."""
    typo = command("--model", "llama2-7b", "--mode", "bach")
    assert (typo.returncode, typo.stdout) == (2, "")
    assert typo.stderr.startswith("profile-model: --mode:")
    unknown = command("--wat")
    assert unknown.returncode == 2
    assert unknown.stderr.count("\n") == 1
    lacking = command("--model", "llama2-7b", "--use_flash_attn")
    assert lacking.returncode == 1
    first, second = lacking.stderr.splitlines()
    assert first.startswith("profile-model: --use_flash_attn is ignored")
    assert "pip install 'autopar[profile]'" in second


def test_an_unknown_model_is_said_without_torch() -> None:
    """Importing torch takes seconds, which a wrong name need not wait for."""
    script = (
        "import sys\nfrom profiler.model import command\n"
        "code = command.run(['--model', 'llama2-7c'])\nprint(code, 'torch' in sys.modules)"
    )
    done = new_interpreter(script)
    assert done.stdout == "2 False\n"
    assert "no model 'llama2-7c'" in done.stderr
