"""Options that several profilers share: of clusters, of models, of plans.

What only one of them is asked stands in `hardware.options`, `model.options` and `plan.job`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.command.fields import option, validate
from autopar.errors import OptionError
from autopar.records import replace
from autopar.run.model import ModelSpec

HOW, FILES, SIZES = "How to measure", "Files", "Sizes of the model"
"""Headings of the help that several have."""
SECONDS = "seconds above {above} up to {high}"
"""How an error says the bounds of a duration."""
_MAX_REPETITIONS = 10**6
_MAX_SIZE = 1 << 28


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """How often to measure, and what becomes of the files that are there."""

    iters: int = option(
        50,
        help="most timed repetitions",
        panel=HOW,
        between=(1, _MAX_REPETITIONS),
        of="repetitions",
    )
    """Of a cell."""
    warmup: int = option(
        5,
        help="most untimed repetitions",
        panel=HOW,
        between=(1, _MAX_REPETITIONS),
        of="repetitions",
    )
    """Of a cell; slow cells take fewer, at least one."""
    max_seconds: float = option(
        2.0,
        help="after so long no further repetition of the same measurement begins",
        panel=HOW,
        metavar="S",
        above=0,
        high=100_000,
        expects=SECONDS,
    )
    """A cell goes on until it has the fewest repetitions allowed."""
    resume: bool = option(
        False, help="measure only what the files do not have yet", panel=FILES, most_used=True
    )
    force: bool = option(False, help="measure again and replace what there is", panel=FILES)
    dry_run: bool = option(
        False,
        help="print what would be measured and how long it takes; write nothing",
        panel=FILES,
        most_used=True,
    )

    host_names: bool = option(
        False, help="store the names of hosts instead of labels such as host-3fa2", panel=FILES
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.resume and self.force:
            raise OptionError(
                "--resume keeps what is measured and --force measures it again; give one of them"
            )


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Sizes in place of the model's own; None is its own, or what follows from the others."""

    hidden_size: int | None = option(
        None, help="hidden size", panel=SIZES, shown="the model's own", between=(1, _MAX_SIZE)
    )
    num_heads: int | None = option(
        None, help="attention heads", panel=SIZES, between=(1, _MAX_SIZE)
    )
    num_kv_heads: int | None = option(
        None, help="key-value heads; else in proportion", panel=SIZES, between=(1, _MAX_SIZE)
    )
    head_dim: int | None = option(
        None,
        help="width of a head; else hidden size / heads",
        panel=SIZES,
        between=(1, _MAX_SIZE),
    )
    ffn_hidden_size: int | None = option(
        None, help="width of the MLP; else in proportion", panel=SIZES, between=(1, _MAX_SIZE)
    )
    vocab_size: int | None = option(
        None, help="words of the vocabulary", panel=SIZES, between=(1, _MAX_SIZE)
    )

    def __post_init__(self) -> None:
        validate(self)

    @property
    def given(self) -> dict[str, int]:
        """Field -> value of those that are given."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def load(
        self,
        name: str,
        *,
        num_layers: Sequence[int] | None = None,
        seq_length: Sequence[int] | None = None,
        hidden_size: Sequence[int] | None = None,
    ) -> ModelSpec:
        """Return the spec of a name or a file with these sizes.

        hidden_size : by layer type, where one is not given for all. Errors as `load_spec`.
        """
        from autopar.documents.spec import load_spec  # heavy for a help

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
        return spec if vocab_size is None else replace(spec, vocab_size=vocab_size)


def check_out(out: Path | None) -> None:
    """Raise OptionError where files are to go into a file."""
    if out is not None and out.exists() and not out.is_dir():
        raise OptionError(f"--out: {out} is a file; name a folder")
