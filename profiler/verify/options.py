"""What `autopar-verify` is asked to do, as one validated value."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autopar import __version__
from autopar.command.options import option, validate
from autopar.documents import catalog
from autopar.documents.hardware import read_hardware_dir
from autopar.documents.json import load_object
from autopar.errors import OptionError
from autopar.sources import Source

__all__ = [
    "MINIMUM_PLANS",
    "OWN_FOLDERS",
    "PANELS",
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
_WHAT, _HOW, _FILES = "What to verify", "How to measure", "Files"
PANELS = (_WHAT, _HOW, _FILES)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of one verification; defaults are those of the command."""

    model: str | None = option(
        None,
        help="shipped name or model file; without it a small model that a CPU runs",
        panel=_WHAT,
        metavar="MODEL",
        most_used=True,
    )
    """None: the small one is written into the work folder."""
    layers: str | None = option(
        None,
        help="layers that are left of the model: 4, or 2,2",
        panel=_WHAT,
        metavar="K",
        shown="all",
        most_used=True,
    )
    seq_length: int | None = option(
        None,
        name="seq",
        help="tokens of a sample",
        panel=_WHAT,
        shown="the model's own",
        between=(1, 1 << 28),
    )
    nproc: int = option(
        2, help="ranks, all on this machine", panel=_WHAT, between=(1, _MOST_RANKS), most_used=True
    )
    batch: int = option(
        8, help="global batch of a step", panel=_WHAT, between=(1, 1 << 20), most_used=True
    )
    plans: int = option(
        4,
        help="best plans of the search that are run",
        panel=_WHAT,
        between=(1, 100),
        most_used=True,
    )
    contrast: int = option(
        8,
        help="plans beside them that differ in kind, for a range of times",
        panel=_WHAT,
        between=(0, 100),
    )
    memory_constraint: float | None = option(
        None,
        help="memory of a rank for the search, GiB",
        panel=_WHAT,
        above=0,
        high=1 << 20,
        expects="GiB above {above}",
    )
    """None: that of the search."""
    repeats: int = option(
        3, help="rounds; each starts every plan once, in turn", panel=_HOW, between=(1, 1000)
    )
    steps: int = option(5, help="timed steps of a start", panel=_HOW, between=(1, 10**6))
    device: Device | None = option(
        None,
        help="auto: GPUs where torch finds one for every rank",
        panel=_HOW,
        choices={"auto": None, "cuda": "cuda", "cpu": "cpu"},
        shown="auto",
        most_used=True,
    )
    precision: Literal["fp32", "bf16"] | None = option(
        None,
        help="auto: bf16 on GPUs, fp32 on CPUs",
        panel=_HOW,
        choices={"auto": None, "bf16": "bf16", "fp32": "fp32"},
        shown="auto",
    )
    work: Path = option(
        Path("verify"),
        help="folder of everything that is measured and found",
        panel=_FILES,
        metavar="DIR",
        most_used=True,
    )
    resume: bool = option(
        True,
        help="keep what DIR has of the same question; otherwise begin again",
        panel=_FILES,
        most_used=True,
    )
    hardware: str | None = option(
        None,
        help="measured hardware files; otherwise measured quickly",
        panel=_FILES,
        metavar="DIR",
        most_used=True,
    )
    profiles: str | None = option(
        None,
        help="measured files of the model; otherwise measured",
        panel=_FILES,
        metavar="DIR",
        most_used=True,
    )
    json: str | None = option(
        None,
        help="write the result to a path too, or - for stdout alone",
        panel=_FILES,
        metavar="FILE",
        most_used=True,
    )
    dry_run: bool = option(
        False, help="print the commands; run nothing", panel=_FILES, most_used=True
    )

    def __post_init__(self) -> None:
        validate(self)


def checked_options(options: VerifyOptions) -> VerifyOptions:
    """Return the options, which can be met.

    Raises
    ------
    OptionError : a folder or a combination is unusable.
    """
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
    # links are followed: what counts is where files are, not how they are called
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
    # another release may price the same plan differently
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
    # names without folders: files that were moved are the same
    lines = sorted(f"{Path(source.path).name} {source.sha256}\n" for source in sources)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
