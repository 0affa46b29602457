"""What `autopar-verify` is asked to do, as one validated value."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autopar import __version__
from autopar.documents import catalog
from autopar.documents.hardware import read_hardware_dir
from autopar.documents.json import load_object
from autopar.errors import OptionError
from autopar.sources import Source

__all__ = [
    "MINIMUM_PLANS",
    "OWN_FOLDERS",
    "Device",
    "VerifyOptions",
    "checked_options",
    "differences",
    "profile_sources",
    "question_of",
    "require_own_inputs",
]


Device = Literal["cuda", "cpu"]
MINIMUM_PLANS = 8
"""A rank correlation of fewer plans says little: with 8 a correlation of 0.64 is chance once in
20 times (one-sided, table of Zar, J. Am. Stat. Assoc. 67 (1972) 578)."""
OWN_FOLDERS = ("hardware", "model", "search", "plans", "runs", "probes", "logs", "done")
"""Folders inside of the work folder that are written, and emptied by --no-resume."""
_MOST_RANKS = 1024


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of one verification; defaults are those of the command."""

    model: str | None = None
    """Shipped name or file; None: a small model that a CPU runs, written into the work folder."""
    layers: str | None = None
    """Layers that are left of the model, `4` or `2,2`; None: all."""
    seq_length: int | None = None
    nproc: int = 2
    batch: int = 8
    plans: int = 4
    """Best plans of the search."""
    contrast: int = 8
    """Plans beside them, for contrast."""
    repeats: int = 3
    """Rounds; every plan is started once in each."""
    steps: int = 5
    """Timed steps of a start."""
    work: Path = Path("verify")
    resume: bool = True
    device: Device | None = None
    """None: CUDA devices where torch finds enough of them."""
    precision: Literal["fp32", "bf16"] | None = None
    """None: bf16 on GPUs, fp32 on CPUs."""
    hardware: str | None = None
    """Folder of measured hardware files; None: they are measured."""
    profiles: str | None = None
    """Folder of the model's files; None: they are measured."""
    memory_constraint: float | None = None
    """GiB of a rank; None: that of the search."""
    json: str | None = None
    dry_run: bool = False


def checked_options(options: VerifyOptions) -> VerifyOptions:
    """Return the options, which can be met.

    Raises
    ------
    OptionError : a number or a combination is unusable.
    """
    for name, value, low, high in (
        ("--nproc", options.nproc, 1, _MOST_RANKS),
        ("--batch", options.batch, 1, 1 << 20),
        ("--plans", options.plans, 1, 100),
        ("--contrast", options.contrast, 0, 100),
        ("--repeats", options.repeats, 1, 1000),
        ("--steps", options.steps, 1, 10**6),
        ("--seq", options.seq_length, 1, 1 << 28),
    ):
        if value is not None and not low <= value <= high:
            raise OptionError(f"{name}: expected {low} to {high}, got {value}")
    if options.memory_constraint is not None and not 0.0 < options.memory_constraint <= 1 << 20:
        raise OptionError(
            f"--memory-constraint: expected GiB above 0, got {options.memory_constraint:g}"
        )
    if options.batch % options.nproc:
        raise OptionError(
            f"--batch: {options.batch} does not divide among --nproc {options.nproc} ranks "
            f"({options.batch} % {options.nproc} = {options.batch % options.nproc})"
        )
    if options.layers is not None and not re.fullmatch(
        r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", options.layers
    ):
        raise OptionError(f"--layers: expected 4, or 2,2 for two types, got {options.layers!r}")
    if options.model is None and options.profiles is not None:
        raise OptionError("--model: is missing; --profiles are of a model, so name it")
    for name, folder in (("--hardware", options.hardware), ("--profiles", options.profiles)):
        if folder is not None and not Path(folder).is_dir():
            raise OptionError(f"{name}: {folder} is no folder; give the folder of measured files")
    require_own_inputs(options)
    return options


def require_own_inputs(options: VerifyOptions) -> None:
    """Raise an OptionError when given files lie where --no-resume deletes everything."""
    work = options.work.resolve()
    for name, given in (
        ("--hardware", options.hardware),
        ("--profiles", options.profiles),
        ("--model", options.model),
    ):
        if given is None or not Path(given).exists():  # a shipped name
            continue
        inside = Path(given).resolve()
        for folder in OWN_FOLDERS:
            if inside.is_relative_to(work / folder):
                raise OptionError(
                    f"{name}: {given} is in {options.work / folder}, which autopar-verify writes "
                    "and --no-resume empties; copy these files to another folder, or choose "
                    "another --work"
                )


# --------------------------------------------------------------------------------------------------
# What a work folder of `autopar-verify` answers: its options, the given files, the release.


_NOT_ASKED = {"work", "resume", "json", "dry_run", "repeats", "plans", "contrast"}
"""Options that may change between two calls in one folder: what is there still counts."""
_NOT_GIVEN = "not given"
_SHOWN = 12
"""Characters of a hash in a message."""


def question_of(options: VerifyOptions) -> dict[str, str]:
    """Return the question; a given file with another content makes it another one.

    Raises
    ------
    InputError : a given file is missing or unusable.
    """
    found = {
        name: _NOT_GIVEN if value is None else str(value)
        for name, value in vars(options).items()
        if name not in _NOT_ASKED
    }
    found["autopar"] = __version__
    if options.model is not None:
        found["model_sha256"] = load_object(catalog.find_model(options.model)).sha256
    if options.hardware is not None:
        hardware = read_hardware_dir(options.hardware, num_nodes=1, gpus_per_node=options.nproc)
        found["hardware_sha256"] = _digest(hardware.sources)
    if options.profiles is not None:
        found["profiles_sha256"] = _digest(profile_sources(options.profiles))
    return found


def differences(before: dict[str, object], now: dict[str, str]) -> list[str]:
    """Return what differs between two questions, in words with both values."""
    said = []
    for name, value in now.items():
        then = str(before.get(name, _NOT_GIVEN))
        if then != value:
            shown = _SHOWN if name.endswith("_sha256") else None
            said.append(f"{name} {then[:shown]} then, {value[:shown]} now")
    return said


def profile_sources(folder: str) -> tuple[Source, ...]:
    """Return the files of a model's profile in a folder, with their hashes.

    Raises
    ------
    DocumentError : one cannot be read.
    """
    return tuple(
        Source(role="model profile", path=str(path), sha256=load_object(path).sha256)
        for path in sorted(Path(folder).glob("*_profiling_*.json"))
    )


def _digest(sources: Sequence[Source]) -> str:
    """Return one hash of the names and contents of files."""
    lines = sorted(f"{Path(source.path).name} {source.sha256}\n" for source in sources)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
