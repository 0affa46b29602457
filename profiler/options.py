"""Options shared by several profilers: cluster, site, model and plan.

Options of a single profiler are in its `options` module, those of plans in `plan.job`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from autopar.command.fields import option, validate
from autopar.errors import OptionError
from autopar.records import replace
from autopar.run.model import ModelSpec, refuse_hybrid

WHAT, HOW, MACHINE = "What to measure", "How to measure", "Machine"
FILES, SIZES = "Files", "Sizes of the model"
"""Headings of the help that several commands share."""
MAX_RANKS = 1 << 20
MAX_REPETITIONS = 10**6
MAX_SIZE = 1 << 28
"""Upper limit of model sizes and of the sequence length."""

Backend = Literal["auto", "nccl", "gloo"]
DeviceChoice = Literal["auto", "cuda", "cpu"]
Precision = Literal["bf16", "fp16", "fp32"]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]
"""Element type of messages and matrices; auto: bf16 on GPUs, fp32 on CPUs."""


def duration(default: float, *, help: str, high: float = 100_000, **how: Any) -> Any:
    """Return an option field in seconds, above 0 and up to `high`; `how` is passed to `option`."""
    expects = "seconds above {above} up to {high}"
    given = {"panel": HOW, **how}
    return option(default, help=help, metavar="S", above=0, high=high, expects=expects, **given)


def budget(default: float) -> Any:
    """Return the option field of `--max-seconds`."""
    return duration(
        default, help="after so long no further repetition of the same measurement begins"
    )


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """Number of repetitions, and the treatment of existing files."""

    PANEL: ClassVar[str] = FILES

    iters: int = option(
        50,
        help="largest number of timed repetitions",
        panel=HOW,
        between=(1, MAX_REPETITIONS),
        of="repetitions",
    )
    """Maximum timed repetitions of a cell."""
    warmup: int = option(
        5,
        help="largest number of untimed repetitions",
        panel=HOW,
        between=(1, MAX_REPETITIONS),
        of="repetitions",
    )
    """Maximum untimed repetitions of a cell, at least one; slow cells use fewer."""
    max_seconds: float = budget(2.0)
    """Seconds after which a cell starts no further repetition, once it has the minimum."""
    resume: bool = option(False, help="measure only missing values", most_used=True)
    force: bool = option(False, help="measure again and overwrite")
    dry_run: bool = option(
        False,
        help="print the planned measurements and their duration",
        most_used=True,
    )

    host_names: bool = option(
        False, help="store the names of hosts instead of labels such as host-3fa2"
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.resume and self.force:
            raise OptionError(
                "--resume keeps measurements and --force repeats them",
                remedy="Remove one of them",
            )


@dataclass(frozen=True, kw_only=True)
class RankOptions(MeasuringOptions):
    """Options of measurements between the ranks of a cluster."""

    PANEL: ClassVar[str] = MACHINE

    dtype: Dtype = option(
        "auto", help="element type; auto: bf16 on GPUs, fp32 on CPUs", panel=WHAT, place=1
    )
    timeout_s: float = duration(
        60.0,
        name="timeout",
        help="time limit of one operation, seconds",
    )
    check: bool = option(
        True, help="compare the result of every operation with the expected one, once", panel=HOW
    )
    backend: Backend = option(
        "auto", help="auto: nccl where torch finds a GPU, otherwise gloo on the CPU", most_used=True
    )
    allow_shared_gpu: bool = option(
        False, help="allow several ranks per GPU; files are marked synthetic"
    )


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Sizes that override those of the model; None keeps the model's size or derives it."""

    PANEL: ClassVar[str] = SIZES

    hidden_size: int | None = option(
        None, help="hidden size", shown="that of the model", between=(1, MAX_SIZE)
    )
    num_heads: int | None = option(None, help="attention heads", between=(1, MAX_SIZE))
    num_kv_heads: int | None = option(
        None, help="key-value heads [in proportion to the heads]", between=(1, MAX_SIZE)
    )
    head_dim: int | None = option(
        None, help="head dimension [hidden size / heads]", between=(1, MAX_SIZE)
    )
    ffn_hidden_size: int | None = option(
        None, help="MLP width [in proportion to the hidden size]", between=(1, MAX_SIZE)
    )
    vocab_size: int | None = option(None, help="vocabulary size", between=(1, MAX_SIZE))

    def __post_init__(self) -> None:
        validate(self)

    @property
    def given(self) -> dict[str, int]:
        """Sizes given by the user, field -> value."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def load(
        self,
        name: str,
        *,
        num_layers: Sequence[int] | None = None,
        seq_length: Sequence[int] | None = None,
        hidden_size: Sequence[int] | None = None,
    ) -> ModelSpec:
        """Return the spec of a model name or file with these sizes.

        hidden_size : hidden size per layer type, used where `--hidden-size` is not given.

        Raises the errors of `load_spec`.
        """
        from autopar.documents.spec import load_spec  # slow import, not needed for --help

        widths = self.given
        own = widths.pop("hidden_size", None)
        vocab_size = widths.pop("vocab_size", None)
        spec = load_spec(
            name,
            num_layers=num_layers,
            seq_length=seq_length,
            hidden_size=hidden_size if own is None else (own,),
            **widths,
        )
        refuse_hybrid(spec, "the profiler")
        return spec if vocab_size is None else replace(spec, vocab_size=vocab_size)


def check_out(out: Path | None) -> None:
    """Raise OptionError if the output folder exists as a file."""
    if out is not None and out.exists() and not out.is_dir():
        raise OptionError(f"--out {out}: expected a folder, got a file", remedy="Use a folder")
