"""What a work folder of `autopar-verify` answers: its options, the given files, the release."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from autopar import __version__, catalog
from autopar.hardware_files import read_hardware_dir
from autopar.jsonio import load_object
from autopar.sources import Source
from autopar.verify.options import VerifyOptions

__all__ = ["differences", "profile_sources", "question_of"]

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
