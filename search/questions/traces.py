"""A measured trace: seconds of a step by term on one rank, read as a stream.

Files are in the trace-event format of PyTorch's profiler (Kineto). Of every event only the numbers
that terms need are kept, so that a large file needs little memory.
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from autopar.errors import DocumentError
from autopar.records import Record, shorten
from autopar.units import GIB, MIB

_F64 = NDArray[np.float64]

TRACE_TERMS = (
    "products",
    "attention",
    "optimizer",
    "memory-bound",
    "tensor parallel",
    "context parallel",
    "experts",
    "stage transfer",
    "data parallel",
    "collectives",
)
"""Terms of a trace in order of priority: time counts for the first term that is active.

Computation has priority, so communication counts only while it is exposed. Time without an active
term is `idle`.
"""
_OF_TERM = {
    "tensor": "tensor parallel",
    "tp": "tensor parallel",
    "ulysses": "tensor parallel",
    "context": "context parallel",
    "cp": "context parallel",
    "experts": "experts",
    "redistribution": "experts",
    "transfer": "stage transfer",
    "sharding": "data parallel",
    "zero3": "data parallel",
    "gradients": "data parallel",
    "gradient_sync": "data parallel",
    "sync": "data parallel",
}
"""Trace term of each step term in traces that autopar writes."""
_GROUPS = (
    ({"data", "dp", "fsdp", "replicate"}, "data parallel"),
    ({"tensor", "tp"}, "tensor parallel"),
    ({"context", "cp"}, "context parallel"),
    ({"expert", "ep"}, "experts"),
    ({"pipeline", "pp"}, "stage transfer"),
)
"""Words in descriptions of process groups, from Megatron-LM and PyTorch's device meshes."""
_KINDS = (
    # Fused dispatchers are no NCCL kernels: DeepEP (csrc/kernels, namespace deep_ep), its
    # successor hybrid_ep, and NVSHMEM's own kernels, which serve them between nodes.
    (re.compile(r"deep_?ep|hybrid_?ep|nvshmem", re.IGNORECASE), "experts"),
    # Transformer Engine's userbuffers overlap tensor-parallel transfers with GEMMs.
    (re.compile(r"userbuffers", re.IGNORECASE), "tensor parallel"),
    (re.compile(r"multi_tensor|adam|optimizer", re.IGNORECASE), "optimizer"),
    (re.compile(r"flash|fmha|attention|attn", re.IGNORECASE), "attention"),
    (re.compile(r"gemm|cutlass|cublas|nvjet|xmma|wgmma|matmul|_mm_", re.IGNORECASE), "products"),
)
_POINT_TO_POINT = re.compile(r"(nccl:)?i?(send|recv|coalesced)(?![a-z_])", re.IGNORECASE)
"""Names of transfers between stages, such as `nccl:send 0->1`; `coalesced` is a batch of them."""
_UNNAMED = len(TRACE_TERMS)
"""Place after the terms, for grouped sends and receives without a collective name."""
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_MARKS = ("gpu_user_annotation", "user_annotation")
_MOST_BYTES = 2 * GIB
_MOST_VALUE = 8 * MIB
_MOST_EVENTS = 8_000_000
_MOST_ALONE = 1_000_000
"""Limit of events that are read one by one: most are read by the chunk, which is ten times as
fast."""
_MOST_KERNELS = 4_000_000
_MOST_PROCESSES = 100_000
_MOST_US = 2.0**53
"""Largest time of an event, 285 years; sums of larger ones lose whole microseconds."""
_CHUNK = MIB
_LEAST_US = 1e-4
"""Shortest exposed time that counts, microseconds: traces have whole nanoseconds."""


def is_trace(path: str) -> bool:
    """Return True if the first 64 KiB of a file contain the keys of a Kineto trace."""
    where = Path(path)
    if not where.is_file():
        return False
    try:
        with where.open("rb") as raw:
            head = _opened(raw).read(1 << 16)
    except (OSError, EOFError, zlib.error):
        return False
    return b'"traceEvents"' in head or (
        b'"schemaVersion"' in head and b'"deviceProperties"' in head
    )


class Trace(Record):
    """Times of one rank of a trace, read from events."""

    step_s: float
    """Mean length of the marked steps, seconds."""
    terms_s: Mapping[str, float]
    """Mean seconds of a step by term; they add up to the step."""
    peak_bytes: int | None
    """Largest number of allocated device bytes; None if memory was not recorded."""
    rank: int
    world_size: int | None
    """Number of ranks; None if the trace does not contain it."""
    notes: tuple[str, ...] = ()


def read_trace(path: str) -> Trace:
    """Return the times of a trace file, compressed or not.

    Times are the mean over the steps of the trace. If a file contains several ranks, the rank that
    it names is read. At most 2 GiB of expanded text, 8 MiB an event and 8 million events, 4 million
    of them of a device, are read. Raises DocumentError for a larger file, one that is no trace or
    has no kernels, and a value that is no time or no rank.
    """
    where = Path(path)
    events = _Events(path)
    try:
        with where.open("rb") as raw:
            file = _opened(raw)
            _require_size(file, path)
            file.seek(0)
            info = _Stream(file, path).read(events.add)
        return events.trace(info)
    except RecursionError:
        raise DocumentError(path, "not a readable trace (nested too deeply)") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DocumentError(
            path, f"not a readable trace ({error})", remedy="Use the JSON of torch.profiler"
        ) from None


def trace_of(data: Any, name: str, rank: int | None = None) -> Trace:
    """Return the times of a parsed trace; see `read_trace`.

    rank : rank to read; None: the rank that the trace names.
    """
    events = _Events(name)
    whole = isinstance(data, dict)
    found = data.get("traceEvents") if whole else data
    for place, event in enumerate(found if isinstance(found, list) else []):
        events.add(place, _event_of(event, name, place))
    info = data.get("distributedInfo") if whole else None
    return events.trace(info if rank is None else {**(info or {}), "rank": rank})


def _opened(raw: IO[bytes]) -> IO[bytes]:
    """Return a file with its expanded content; gzip is told by its first two bytes."""
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[return-value]


def _require_size(file: IO[bytes], path: str) -> None:
    """Raise DocumentError if a file expands to more than the limit.

    Expanding is much faster than reading events, so that a small file that expands to many GB is
    refused in seconds.
    """
    size = 0
    while chunk := file.read(_CHUNK):
        size += len(chunk)
        if size > _MOST_BYTES:
            raise DocumentError(
                path,
                f"the trace has more than {_MOST_BYTES // GIB} GiB of text",
                remedy="Record fewer steps",
            )


# --------------------------------------------------------------------------------------------------
# JSON text in pieces: one event is decoded at a time.

_SPACE = re.compile(r"[ \t\n\r]*")
_CUT = re.compile(r"\}[ \t\n\r]*,[ \t\n\r]*\{")
"""Text between two objects of an array."""
_TAIL = 1 << 16
"""Characters before the end of a chunk in which a cut is looked for."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """Keys of an event that terms need; None if missing."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    ts: Any = None
    dur: Any = None
    args: msgspec.Raw | dict[str, Any] | None = None
    """Arguments, read when they are needed: most events are none of a device."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments by name; empty if there are none."""
        args = self.args
        given = json.loads(bytes(args)) if isinstance(args, msgspec.Raw) else args
        return given if isinstance(given, dict) else {}


_BATCH = msgspec.json.Decoder(list[Event])


def _event_of(value: Any, path: str, index: int) -> Event:
    """Return the keys of an event; raises DocumentError for a value that is no object."""
    if not isinstance(value, dict):
        problem = f"the value is {shorten(value)}, expected an object"
        raise DocumentError(path, problem, key=f"traceEvents[{index}]")
    return Event(**{key: value.get(key) for key in Event.__struct_fields__})


class _Stream:
    """Reader of a trace's JSON text that holds one chunk, or one value, at a time."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._file = file
        self._path = path
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._json = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0
        self._ended = self._fresh = False

    def read(self, add: Callable[[int, Event], None]) -> Any:
        """Pass (index, event) of every event to `add`, and return `distributedInfo` or None."""
        info, seen = None, set()
        opening = self._sign("[{")
        if opening == "[":
            self._events(add)
        for key in self._keys() if opening == "{" else ():
            if key in seen:
                raise DocumentError(self._path, "this key occurs twice", key=key)
            if key == "traceEvents":
                seen.add(key)
                self._sign("[")
                self._events(add)
                continue
            value = self._value(key)
            if key == "distributedInfo":
                seen.add(key)
                info = value
        self._skip_space()
        if self._at < len(self._text):
            raise ValueError("text after the end of the trace")
        return info

    def _keys(self) -> Iterator[str]:
        """Yield the keys of an object; the caller reads the value of each before the next."""
        if self._skip_space() == "}":
            self._at += 1
            return
        while True:
            key = self._value("a key")
            if not isinstance(key, str):
                raise ValueError(f"{shorten(key)} is no key")
            self._sign(":")
            yield key
            if self._sign(",}") == "}":
                return

    def _events(self, add: Callable[[int, Event], None]) -> None:
        """Pass every item of an array to `add`, after its opening bracket."""
        if self._skip_space() == "]":
            self._at += 1
            return
        index = alone = 0
        while True:
            for event in self._batch(index):
                add(index, event)
                index += 1
            add(index, _event_of(self._value(f"traceEvents[{index}]"), self._path, index))
            index, alone = index + 1, alone + 1
            for number, most, layout in (
                (index, _MOST_EVENTS, ""),
                (alone, _MOST_ALONE, " in another layout than torch.profiler's"),
            ):
                if number > most:
                    problem = f"the trace has more than {most:,} events{layout}"
                    raise DocumentError(self._path, problem, remedy="Record fewer steps")
            if self._sign(",]") == "]":
                return
            self._skip_space()

    def _batch(self, index: int) -> list[Event]:
        """Return the events up to the last cut of the chunk, once a chunk; empty if they differ.

        Only whole events can be decoded, so that a cut inside one is no harm: events of this chunk
        are then read one by one.
        """
        if not self._fresh:
            return []
        self._fresh = False
        cuts = [*_CUT.finditer(self._text, max(self._at, len(self._text) - _TAIL))]
        if not cuts:
            return []
        cut = cuts[-1]
        text = f"[{self._text[self._at : cut.start() + 1]}]"
        try:
            found = _BATCH.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError):
            # Python's slower reader knows NaN, too.
            try:
                values = json.loads(text)
            except ValueError:
                return []
            found = [_event_of(v, self._path, at) for at, v in enumerate(values, index)]
        self._at = cut.end() - 1
        return found

    def _value(self, key: str) -> Any:
        """Return the next value, however many chunks it takes."""
        self._skip_space()
        while True:
            problem: Exception | None = None
            end = len(self._text)
            try:
                value, end = self._json(self._text, self._at)
            except json.JSONDecodeError as error:
                problem = error
            if end - self._at > _MOST_VALUE:
                raise DocumentError(
                    self._path, f"the value is larger than {_MOST_VALUE // MIB} MiB", key=key
                )
            # A number may go on in the next chunk.
            if problem is None and (end < len(self._text) or self._ended):
                self._at = end
                return value
            if not self._more() and problem is not None:
                raise problem

    def _sign(self, expected: str) -> str:
        """Return the next character, one of those `expected`."""
        found = self._skip_space()
        if not found or found not in expected:
            raise ValueError(f"{found or 'the end'!r} where {expected!r} should be")
        self._at += 1
        return found

    def _skip_space(self) -> str:
        """Return the next character that is no space, without reading it; "" at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None, "the pattern matches nothing, too"
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Read the next chunk after the text that is left; return False at the end."""
        if self._ended:
            return False
        left = self._text[self._at :]
        # Doubling keeps the number of attempts at a long value low.
        data = self._file.read(max(_CHUNK, len(left)))
        self._ended = not data
        self._text, self._at = left + self._decode(data, final=self._ended), 0
        self._fresh = True
        return True


# --------------------------------------------------------------------------------------------------
# Events -> times by term.


class _Events:
    """Numbers of the events of a trace that terms need."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kernels, self._marks = _Spans(), _Spans()
        self._processes: dict[int | str | None, int] = {}
        self._peak_bytes = 0
        self._exchanges = self._transfers = False

    def add(self, place: int, event: Event) -> None:
        """Keep the numbers of an event; `place` is its index in the file.

        Raises DocumentError for a time, length or process that is none.
        """
        name, category = event.name, event.cat
        if name == "[memory]":
            self._peak_bytes = max(self._peak_bytes, _allocated(event))
        elif isinstance(name, str) and name.startswith(("nccl:", "record_param_comms")):
            # The range that PyTorch puts around the kernels of a collective.
            self._see(_collective(event) or name)
        if event.ph != "X":
            return
        if category in _KERNELS:
            self._keep(self._kernels, place, event, self._term(event))
        elif category in _MARKS and str(name).startswith("ProfilerStep"):
            self._keep(self._marks, place, event, _MARKS.index(category))

    def _keep(self, spans: _Spans, place: int, event: Event, kind: int) -> None:
        start, length = self._time(place, "ts", event.ts), self._time(place, "dur", event.dur)
        if length < 0.0:
            raise self._fault(place, "dur", event.dur, "microseconds from 0")
        process = event.pid
        if isinstance(process, bool) or not isinstance(process, int | str | None):
            raise self._fault(place, "pid", process, "the number of a process")
        number = self._processes.setdefault(process, len(self._processes))
        kept = len(self._kernels.kinds) + len(self._marks.kinds)
        if kept >= _MOST_KERNELS or number >= _MOST_PROCESSES:
            most = f"{_MOST_KERNELS:,} device events or {_MOST_PROCESSES:,} processes"
            raise DocumentError(
                self._name, f"the trace has more than {most}", remedy="Record fewer steps"
            )
        spans.add(start, start + length, number, kind)

    def _time(self, place: int, key: str, value: Any) -> float:
        """Return a time in microseconds; raises DocumentError if it is none, or no such time."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                found = float(value)
            except OverflowError:
                found = math.inf
            if abs(found) <= _MOST_US:
                return found
        expected = f"microseconds of at most {_MOST_US:.2g}"
        raise self._fault(place, key, value, expected)

    def _fault(self, place: int, key: str, value: object, expected: str) -> DocumentError:
        return DocumentError(
            self._name,
            f"the value is {shorten(value)}, expected {expected}",
            key=f"traceEvents[{place}].{key}",
            remedy="Record the trace again",
        )

    def _see(self, collective: str) -> None:
        if _is_exchange(collective):
            self._exchanges = True
        elif _POINT_TO_POINT.match(collective):
            self._transfers = True

    def _term(self, kernel: Event) -> int:
        """Return the index of a kernel's term: by process group for NCCL kernels, else by name."""
        name = str(kernel.name)
        if "nccl" not in name.lower():
            return _kind_of(name)
        arguments = kernel.arguments
        own = _OF_TERM.get(str(arguments.get("term")))
        own = own or _group_of(str(arguments.get("Process Group Description", "")))
        if own is not None:
            return TRACE_TERMS.index(own)
        if "sendrecv" not in name.lower():
            return TRACE_TERMS.index("collectives")
        # NCCL runs an all-to-all as grouped sends and receives: only its name tells them apart.
        collective = _collective(kernel)
        if not collective:
            return _UNNAMED
        self._see(collective)
        transfer = _POINT_TO_POINT.match(collective) is not None
        return TRACE_TERMS.index("stage transfer" if transfer else "collectives")

    def trace(self, info: Any) -> Trace:
        """Return the times of the events; `info` is `distributedInfo` of the file or None."""
        if not self._kernels.kinds:
            raise DocumentError(
                self._name,
                "contains no device kernels",
                key="traceEvents",
                remedy="Record a step with ProfilerActivity.CUDA",
            )
        rank, world = _rank_of(info, self._name)
        kernels, kinds = self._kernels.of(None)
        marks, categories = self._marks.of(None)
        places = np.frombuffer(self._kernels.processes, dtype=np.int32)
        if places.min() != places.max():
            # A trace of one process has one device. Traces of autopar have one rank of every stage.
            used = {*np.unique(places).tolist()}
            below = [
                one
                for one, number in self._processes.items()
                if number in used and isinstance(one, int) and one <= rank
            ]
            own = self._processes[max(below)] if below else int(places[0])
            kernels, kinds = self._kernels.of(own)
            marks, categories = self._marks.of(own)
        # Marks of the device take precedence over those of the host.
        steps = marks[categories == (categories.min() if len(categories) else 0)]
        steps = steps[steps[:, 1] > steps[:, 0]]
        notes = []
        if not len(steps):
            steps = np.array([[kernels[:, 0].min(), kernels[:, 1].max()]])
            notes.append(
                f"{self._name} marks no steps (ProfilerStep#N): all kernels are treated as one step"
            )
        # A file whose collectives are all-to-alls has no transfers between stages.
        exchange = self._exchanges and not self._transfers
        unnamed = TRACE_TERMS.index("collectives" if exchange else "stage transfer")
        kinds = np.where(kinds == _UNNAMED, unnamed, kinds)
        return Trace(
            step_s=float(np.mean(steps[:, 1] - steps[:, 0])) * 1e-6,
            terms_s=_exposed(kernels, kinds, steps),
            peak_bytes=self._peak_bytes or None,
            rank=rank,
            world_size=world,
            notes=tuple(notes),
        )


class _Spans:
    """Start, end, process and kind of many events, 21 bytes each."""

    def __init__(self) -> None:
        self._ends = array("d")
        self.processes = array("i")
        self.kinds = array("b")

    def add(self, start: float, end: float, process: int, kind: int) -> None:
        self._ends.extend((start, end))
        self.processes.append(process)
        self.kinds.append(kind)

    def of(self, process: int | None) -> tuple[_F64, NDArray[np.int8]]:
        """Return start and end (microseconds, shape (N, 2)) and kinds of the events of a process.

        process : number of the process; None: all of them.
        """
        ends = np.array(self._ends, dtype=np.float64).reshape(-1, 2)
        kinds = np.array(self.kinds, dtype=np.int8)
        if process is None:
            return ends, kinds
        own = np.array(self.processes, dtype=np.int32) == process
        return ends[own], kinds[own]


def _rank_of(info: Any, name: str) -> tuple[int, int | None]:
    """Return rank and number of ranks of `distributedInfo`: 0 and None if it is missing.

    Raises DocumentError for a rank outside the world.
    """
    if info is None:
        return 0, None
    if not isinstance(info, dict):
        raise DocumentError(
            name, f"the value is {shorten(info)}, expected an object", key="distributedInfo"
        )
    world, rank = info.get("world_size"), info.get("rank", 0)
    for key, value, least in (("world_size", world, 1), ("rank", rank, 0)):
        wrong = isinstance(value, bool) or not isinstance(value, int) or value < least
        if wrong and not (key == "world_size" and value is None):
            raise DocumentError(
                name,
                f"the value is {shorten(value)}, expected a whole number from {least}",
                key=f"distributedInfo.{key}",
            )
    if world is not None and rank >= world:
        raise DocumentError(
            name,
            f"the value is {shorten(rank)}, expected a rank of the {shorten(world)} of this trace",
            key="distributedInfo.rank",
        )
    return rank, world


def _collective(event: Event) -> str:
    """Return the name of the collective of an event, such as all_to_allv; "" if not given."""
    return str(event.arguments.get("Collective name") or "")


def _allocated(event: Event) -> int:
    """Return the allocated device bytes of a memory event; 0 for those of the host."""
    arguments = event.arguments
    total = arguments.get("Total Allocated")
    # Device type 0 is the host.
    return total if isinstance(total, int) and arguments.get("Device Type") != 0 else 0


def _is_exchange(collective: str) -> bool:
    """Return True for names of an all-to-all, such as all_to_allv and alltoall_base."""
    return "alltoall" in collective.lower().replace("_", "")


@lru_cache(maxsize=4096)
def _kind_of(name: str) -> int:
    """Return the index in `TRACE_TERMS` of the term of a kernel other than NCCL's, by its name."""
    term = next((term for pattern, term in _KINDS if pattern.search(name)), "memory-bound")
    return TRACE_TERMS.index(term)


@lru_cache(maxsize=4096)
def _group_of(description: str) -> str | None:
    """Return the term of a process group by its description; None if the words are unknown."""
    words = set(re.findall(r"[a-z]+", description.lower()))
    return next((term for known, term in _GROUPS if known & words), None)


def _exposed(ends: _F64, kinds: NDArray[np.integer[Any]], steps: _F64) -> dict[str, float]:
    """Return the mean seconds of a step by term, without time of terms of higher priority.

    ends, kinds : start and end in microseconds, and index of the term, of every kernel.
    steps : start and end of the steps in microseconds, shape (M, 2).
    """
    covered = np.empty((0, 2))
    before, found = np.zeros(len(steps)), {}
    for place, term in enumerate(TRACE_TERMS):
        covered = _merged(np.concatenate([covered, ends[kinds == place]]))
        inside = _covered_until(covered, steps[:, 1]) - _covered_until(covered, steps[:, 0])
        found[term], before = inside - before, inside
    found["idle"] = steps[:, 1] - steps[:, 0] - before
    return {
        term: float(np.mean(length)) * 1e-6
        for term, length in found.items()
        if (np.abs(length) > _LEAST_US).any()
    }


def _covered_until(pairs: _F64, times: _F64) -> _F64:
    """Return the length of sorted, disjoint intervals before each of `times`, microseconds."""
    if not len(pairs):
        return np.zeros(len(times))
    whole = np.concatenate([[0.0], np.cumsum(pairs[:, 1] - pairs[:, 0])])
    last = np.searchsorted(pairs[:, 0], times, side="right")
    beyond = np.maximum(pairs[last - 1, 1] - times, 0.0)
    # Of the last interval that begins before a time, the part after it does not count.
    return np.where(last > 0, whole[last] - beyond, 0.0)


def _merged(pairs: _F64) -> _F64:
    """Return the union of intervals as sorted intervals that do not touch, shape (N, 2)."""
    pairs = pairs[pairs[:, 1] > pairs[:, 0]]
    if not len(pairs):
        return pairs
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(pairs[:, 1])
    first = np.concatenate([[True], pairs[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([pairs[first, 0], reach[last]], axis=1)
