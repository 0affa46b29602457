"""Result of `autopar check` for every launch file below a folder of clones, a row each.

`python -m benchmarks.corpus FOLDER --out ROWS` reads every script, YAML, TOML and JSON file in the
clones `FOLDER/OWNER/NAME`. `--against tests/data/corpus.jsonl` reads the files of stored rows only,
lists what changed, and exits with 1 if anything did. A file whose content differs from its row is
skipped: check out the commit of the row. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import autopar
from autopar.errors import AutoparError, DocumentError
from autopar.records import Record

__all__ = ["Row", "changes", "launch_files", "load_rows", "main", "row_of", "write_rows"]

_DOCUMENTS = frozenset({".yaml", ".yml", ".toml", ".json"})
SUFFIXES = _DOCUMENTS | {".sh", ".bash", ".slurm", ".sbatch"}
ASSUMED_GPUS = (8, 16, 32, 64, 128, 256, 1024, 1)
"""Numbers of GPUs of a launch that does not say it, such as a configuration without a launcher: the
first one whose degrees and batch are legal counts, else the first."""
ASSUMED_MODEL: Mapping[str, Any] = {"model": "llama-3-8b", "seq_length": 4096}
"""Options for a configuration whose training script names the model."""
CPU_LIMIT_S = 20.0
MOVED = 1e-4
"""Relative difference of step time or peak memory above which a price has changed."""
Status = Literal["read", "refused", "not a launch", "slow", "crashed"]
_DEGREES = ("pp", "tp", "cp", "ep", "dp")
_NOT_A_LAUNCH = re.compile(
    "is not a launch (script or configuration|file of an engine)|contains no (launch )?command|"
    "the top level is|is empty"
)
"""Starts of the messages on files that launch nothing that is known here."""
_NO_GPUS = "contains no number of GPUs"
_OF_THE_NUMBER = frozenset({"grid", "batch"})
"""Words in the ids of rules that another number of GPUs can satisfy."""
_SAID = frozenset({"illegal", "not priced", "not understood"})
"""Kinds of findings whose ids a row has."""


class Row(Record):
    """Result for one file."""

    repository: str
    """`OWNER/NAME`, from the folders of the clone; empty for a file in no clone."""
    path: str
    """Path in the repository, or below the given folder."""
    commit: str
    """Commit that is checked out; empty if unknown."""
    blob: str
    """First 12 digits of git's object name of the content."""
    status: Status
    """`read`: there is a run. `refused`: `ids` has the reasons. `slow`: over the CPU limit.
    `crashed`: an error that is not meant for users, a fault of autopar."""
    ids: tuple[str, ...] = ()
    """Ids of findings of the kinds `illegal`, `not priced` and `not understood`, with the argument
    if there is one; for an unreadable file the message without values of the file."""
    engine: str = ""
    gpus: int | None = None
    assumed: tuple[str, ...] = ()
    """Values that the file lacks: `gpus`, `model`."""
    degrees: Mapping[str, int] | None = None
    """Degrees pp, tp, cp, ep, dp; None: no run."""
    batch: int | None = None
    """Sequences per step."""
    step_s: float | None = None
    """Predicted seconds of a step; None: no estimate."""
    peak_bytes: float | None = None
    """Predicted allocated peak of the fullest stage, bytes; None: no estimate."""

    @property
    def key(self) -> tuple[str, str]:
        """Repository and path."""
        return self.repository, self.path


# --------------------------------------------------------------------------------------------------
# Files and clones.


def launch_files(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder with a suffix of `SUFFIXES`, sorted by path."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            path = Path(parent, name)
            if path.suffix.lower() in SUFFIXES and path.is_file() and not path.is_symlink():
                yield path


@cache
def _clone(folder: Path) -> Path | None:
    """Return the clone that contains a folder, or None."""
    if (folder / ".git").exists():
        return folder
    return None if folder == folder.parent else _clone(folder.parent)


@cache
def _commit(clone: Path) -> str:
    """Return the commit that is checked out, or an empty text."""
    command = ("git", "-C", str(clone), "rev-parse", "HEAD")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


# --------------------------------------------------------------------------------------------------
# One row.


class _CpuLimitError(BaseException):
    """The CPU limit of a file is reached; not an Exception, so that no reader handles it."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _CpuLimitError in this block after some CPU seconds of this process."""

    def stop(*_: object) -> None:
        raise _CpuLimitError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def row_of(path: Path, folder: Path, *, cpu_limit_s: float = CPU_LIMIT_S) -> Row:
    """Return the row of a file below `folder`.

    The file is read as `autopar check` does with its defaults in the root of the clone. A launch
    that does not say its number of GPUs is read with one of `ASSUMED_GPUS`.
    """
    path, folder = path.resolve(), folder.resolve()
    clone = _clone(path.parent)
    if clone is None or not clone.is_relative_to(folder):
        clone = None
    content = path.read_bytes()
    said: dict[str, Any] = {
        "repository": "" if clone is None else f"{clone.parent.name}/{clone.name}",
        "path": path.relative_to(clone or folder).as_posix(),
        "commit": "" if clone is None else _commit(clone),
        "blob": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()[:12],
    }
    try:
        # Scripts name their configurations from the folder that they are started in.
        with _limited(cpu_limit_s), chdir(clone or folder):
            return Row(**said, **_checked(path))
    except _CpuLimitError:
        return Row(**said, status="slow")
    except DocumentError as error:
        nothing = _NOT_A_LAUNCH.match(error.problem) is not None
        status: Status = "not a launch" if nothing else "refused"
        return Row(**said, status=status, ids=() if nothing else (_without_values(error),))
    except AutoparError as error:
        return Row(**said, status="refused", ids=(_without_values(error),))
    except Exception as error:
        return Row(**said, status="crashed", ids=(type(error).__name__,))


def _checked(path: Path) -> dict[str, Any]:
    """Return the fields of a row that the check answers."""
    found, assumed = _answered(path)
    asked = [_id(one) for one in found["findings"] if one["kind"] in _SAID]
    # A script has its model, so that only a document is read with the assumed one.
    if asked == ["read.unpriced model"] and path.suffix.lower() in _DOCUMENTS:
        found, assumed = _answered(path, **ASSUMED_MODEL)
        assumed = (*assumed, "model")
    ids = [_id(one) for one in found["findings"] if one["kind"] in _SAID]
    illegal = any(one["kind"] == "illegal" for one in found["findings"])
    understood = found["understood"]
    fields: dict[str, Any] = {
        "status": "read" if understood and not illegal else "refused",
        "ids": tuple(dict.fromkeys(ids)),
        "engine": found["trainer"],
        "gpus": found["num_gpus"],
        "assumed": assumed,
    }
    if understood:
        named = dict(re.findall(r"\b([a-z]+)([0-9]+)\b", understood["degrees"]))
        fields["degrees"] = {name: int(named.get(name, 1)) for name in _DEGREES}
        fields["batch"] = int(understood["batch"].split()[0].replace(",", ""))
    peaks = [stage["peak_bytes"] for stage in found.get("stages", ())]
    return fields | {
        "step_s": found.get("step_time_s"),
        "peak_bytes": max(peaks, default=None),
    }


def _answered(path: Path, **options: Any) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the answer of the check for a file, and `gpus` if it does not say their number."""
    try:
        return autopar.check(path, neighbours=False, **options)["launches"][0], ()
    except DocumentError as error:
        if not error.problem.startswith(_NO_GPUS):
            raise
    found = []
    for number in ASSUMED_GPUS:
        hardware = f"h100:1x{number}" if number < 8 else f"h100:{number // 8}x8"
        answer = autopar.check(path, neighbours=False, hardware=hardware, **options)
        found.append(answer["launches"][0])
        illegal = [one["id"] for one in found[-1]["findings"] if one["kind"] == "illegal"]
        if not any(_OF_THE_NUMBER & set(name.split(".")) for name in illegal):
            return found[-1], ("gpus",)
    return found[0], ("gpus",)


def _id(finding: Mapping[str, Any]) -> str:
    """Return the id of a finding, with the argument that it is about."""
    values = finding.get("values", {})
    about = values.get("key") or str(values.get("given", "")).partition(" ")[0]
    about = re.sub(r"""["':]|=.*""", "", about)  # keys as a document spells them, or with a value
    return f"{finding['id']} {about}".strip()


def _without_values(error: AutoparError) -> str:
    """Return the start of a message without quoted texts, numbers, arguments and paths."""
    problem = _QUOTED.sub("_", getattr(error, "problem", str(error)))
    start = re.split(r"['\"`\[{(<$]", problem)[0]  # a quoted text with quotes in it
    words = ("_" if _VALUE.match(word) else word for word in start.split())
    return " ".join(words)[:80].rstrip(" ,:")


_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\$\{[^{}]*\}|\$\w+|(?<= )[^\w\s]{1,3}(?= )")
_VALUE = re.compile(r"-|.*[0-9/_]|.*[.]\w")
"""Words that can be of the file: arguments, numbers, paths and names of files."""


# --------------------------------------------------------------------------------------------------
# Tables of rows.


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Write rows, sorted by repository and path, one JSON object a line without default fields."""
    defaults = {name: getattr(_EMPTY, name) for name in Row.__struct_fields__}
    required = ("repository", "path", "commit", "blob", "status")
    lines = []
    for row in sorted(rows, key=lambda one: one.key):
        fields = {name: getattr(row, name) for name in Row.__struct_fields__}
        kept = {
            name: value
            for name, value in fields.items()
            if name in required or value != defaults[name]
        }
        lines.append(json.dumps(kept) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


_EMPTY = Row(repository="", path="", commit="", blob="", status="read")


def load_rows(path: Path) -> list[Row]:
    """Return the rows of a file that `write_rows` wrote."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        lists = {name: tuple(fields.get(name, ())) for name in ("ids", "assumed")}
        found.append(Row(**fields | lists))
    return found


def changes(before: Row, now: Row) -> list[str]:
    """Return what changed between two rows of a file, a sentence each; prices by over `MOVED`."""
    found = []
    for name in ("status", "ids", "engine", "gpus", "assumed", "degrees", "batch"):
        old, new = getattr(before, name), getattr(now, name)
        if old != new:
            found.append(f"{name}: {_shown(old)} -> {_shown(new)}")
    for name in ("step_s", "peak_bytes"):
        old, new = getattr(before, name), getattr(now, name)
        if (old is None) != (new is None):
            found.append(f"{name}: {_shown(old)} -> {_shown(new)}")
        elif old is not None and abs(new - old) > MOVED * abs(old):
            found.append(f"{name}: {old:.6g} -> {new:.6g} ({new / old - 1:+.2%})")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}{number}" for name, number in value.items())
    if isinstance(value, tuple):
        return "; ".join(value) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _counts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of the number of files by repository and status."""
    names = get_args(Status)
    yield f"{'repository':44}" + "".join(f"{name:>13}" for name in names)
    by: Counter[tuple[str, str]] = Counter((row.repository, row.status) for row in rows)
    for repository in sorted({row.repository for row in rows}):
        cells = "".join(f"{by[repository, name]:13}" for name in names)
        yield f"{repository or '(no clone)':44}{cells}"
    total: Counter[str] = Counter(row.status for row in rows)
    yield f"{'all':44}" + "".join(f"{total[name]:13}" for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the files, and print counts or changes; return 1 if anything changed or crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with clones as OWNER/NAME")
    parser.add_argument("--out", type=Path, help="write the rows to this file (JSON lines)")
    parser.add_argument("--against", type=Path, help="stored rows; only their files are read")
    parser.add_argument("--cpu-limit", type=float, default=CPU_LIMIT_S, help="seconds per file")
    asked = parser.parse_args(arguments)
    if not asked.folder.is_dir():
        parser.error(f"{asked.folder} is not a folder")
    start = time.process_time()
    if asked.against is None:
        paths = list(launch_files(asked.folder))
        before: dict[tuple[str, str], Row] = {}
    else:
        before = {row.key: row for row in load_rows(asked.against)}
        paths = [asked.folder / row.repository / row.path for row in before.values()]
    rows = [
        row_of(path, asked.folder, cpu_limit_s=asked.cpu_limit) for path in paths if path.is_file()
    ]
    same = [row for row in rows if not before or row.blob == before[row.key].blob]
    for line in _counts(rows):
        print(line)
    print(f"{len(rows)} files, {time.process_time() - start:.0f} CPU-s")
    if asked.out is not None:
        write_rows(rows, asked.out)
    if asked.against is None:
        return 1 if any(row.status in ("slow", "crashed") for row in rows) else 0
    print(
        f"{len(same)} of {len(before)} rows compared: {len(before) - len(rows)} files are not "
        f"there, {len(rows) - len(same)} have other content"
    )
    changed = 0
    for row in same:
        found = changes(before[row.key], row)
        changed += bool(found)
        for text in found:
            print(f"{row.repository} {row.path}: {text}")
    print(f"{changed} changed")
    return 1 if changed or not same else 0


if __name__ == "__main__":
    sys.exit(main())
