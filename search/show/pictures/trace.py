"""Trace of a predicted step in the trace-event format of PyTorch's profiler (Kineto).

A process is a rank and a thread is one of its streams. Categories and names are those of measured
traces, so that Perfetto, chrome://tracing and other trace readers can compare both.
`search.show.pictures.timeline` computes the times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from autopar.records import Record
from autopar.run.run import Run
from search.show.pictures.terms import Stream
from search.show.pictures.timeline import Span, Timeline, Track, Work

Dialect = Literal["megatron", "torch"]

_THREADS: dict[Stream, int] = {
    # PyTorch's default stream comes first. The other numbers are arbitrary, as in a real process.
    "compute": 7,
    "tensor": 20,
    "context": 24,
    "experts": 28,
    "pipeline": 32,
    "data": 36,
    "host": 1,
}
_THREAD_NAMES: dict[Stream, str] = {
    "compute": "stream 7: compute",
    "tensor": "stream 20: tensor parallel",
    "context": "stream 24: context parallel",
    "experts": "stream 28: expert parallel",
    "pipeline": "stream 32: pipeline",
    "data": "stream 36: data parallel",
    "host": "host",
}
_MOST_PIECES = 250_000
"""Limit of pieces in a file, about 90 MB; above it, micro-batches are not split into terms."""
_ARGUMENTS = "(ncclDevKernelArgsStorage<4096ul>)"


class TraceNames(Record):
    """Engine-specific names and settings of a trace."""

    dialect: Dialect
    device: str
    """Name of the card."""
    gradient: Literal["f32", "bf16"] = "f32"
    """Data type of gradient reduction, in NCCL's spelling."""
    scattered: bool = True
    """True with sequence parallelism: all-gather and reduce-scatter instead of all-reduce."""
    stages: int = 1
    """Number of pipeline stages."""


def names_of(run: Run, device: str) -> TraceNames:
    """Return the names that traces of the run's engine contain; device : name of the card."""
    return TraceNames(
        dialect="torch" if run.kernels.torch_layers else "megatron",
        device=device,
        gradient="f32" if run.runtime.precision.gradient_bytes == 4 else "bf16",
        scattered=run.split.splits_sequence,
        stages=run.strategy.pp,
    )


def trace_text(timeline: Timeline, names: TraceNames, title: str) -> str:
    """Return the text of a trace file, with one rank of each stage."""
    number = sum(len(track.work) * (len(track.pieces["F"]) + 1) for track in timeline.tracks)
    whole = number > _MOST_PIECES
    writer = _Writer(timeline, names)
    notes = list(timeline.notes)
    if whole:
        notes.append("micro-batches are not split into their terms: the file would be too large")
    head: dict[str, Any] = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceName": title,
        "baseTimeNanoseconds": 0,
        "deviceProperties": [
            {"id": track.first_rank, "name": names.device} for track in timeline.tracks
        ],
        "distributedInfo": {
            "backend": "nccl",
            "rank": 0,
            "world_size": timeline.tracks[-1].last_rank + 1,
        },
        "predicted": {"step_s": timeline.step_s, "apportioned": notes},
    }
    begun = json.dumps(head)[:-1]
    lines = (line for track in timeline.tracks for line in writer.track(track, whole=whole))
    return f'{begun}, "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n"


class _Kernel(NamedTuple):
    """Category and name of a span in a trace."""

    category: str
    name: str


class _Writer:
    """Writer of trace events as lines, with a cache of quoted names."""

    def __init__(self, timeline: Timeline, names: TraceNames) -> None:
        """Start numbering events at 1; the numbers serve as correlation ids."""
        self._timeline = timeline
        self._names = names
        self._number = 0
        self._quoted: dict[str, str] = {}

    def track(self, track: Track, *, whole: bool) -> Iterator[str]:
        """Yield the lines of a rank: names, step, micro-batches and their spans.

        whole : True to write spans only outside micro-batches and in the detailed micro-batch.
        """
        rank = track.first_rank
        yield from self._metadata(track)
        yield self._line(
            rank, "compute", _Kernel("gpu_user_annotation", "ProfilerStep#0"), 0.0,
            self._timeline.step_s, "",
        )  # fmt: skip
        last: Work | None = None
        for span in track.spans(self._timeline.detailed):
            work = span.work
            if work is not None and work is not last:
                last = work
                yield self._range(track, work)
            if whole and work is not None and work.micro_batch != self._timeline.detailed:
                continue
            yield from self._span(rank, span)

    def _metadata(self, track: Track) -> Iterator[str]:
        rank = track.first_rank
        texts = {
            "process_name": f"rank {rank}",
            "process_labels": f"stage {track.stage}, {track.ranks} alike",
        }
        for kind, text in texts.items():
            key = "labels" if kind == "process_labels" else "name"
            yield self._meta(rank, 0, kind, {key: text})
        yield self._meta(rank, 0, "process_sort_index", {"sort_index": track.stage})
        used = {span.stream for span in track.spans()} | {"compute"}
        for place, (stream, thread) in enumerate(_THREADS.items()):
            if stream in used:
                yield self._meta(rank, thread, "thread_name", {"name": _THREAD_NAMES[stream]})
                yield self._meta(rank, thread, "thread_sort_index", {"sort_index": place})

    @staticmethod
    def _meta(rank: int, thread: int, kind: str, arguments: dict[str, object]) -> str:
        return json.dumps(
            {"ph": "M", "name": kind, "pid": rank, "tid": thread, "ts": 0, "args": arguments}
        )

    def _range(self, track: Track, work: Work) -> str:
        """Return the range of a micro-batch, named as in profiles of the engine."""
        if self._names.dialect == "megatron":
            name = "forward-compute" if work.kind == "F" else "backward-compute"
        elif self._names.stages == 1:
            name = f"{'Forward' if work.kind == 'F' else 'Backward'} {work.micro_batch}"
        else:
            # torch.distributed.pipelining numbers the stages of all ranks consecutively.
            place = work.chunk * self._names.stages + track.stage
            name = f"PP:{place}{work.kind}{work.micro_batch}"
        more = f', "micro_batch": {work.micro_batch}, "chunk": {work.chunk}, "work": "{work.kind}"'
        return self._line(
            track.first_rank, "compute", _Kernel("gpu_user_annotation", name), work.start_s,
            work.end_s, more,
        )  # fmt: skip

    def _span(self, rank: int, span: Span) -> Iterator[str]:
        kernels = self._kernels(span)
        length = (span.end_s - span.start_s) / len(kernels)
        more = f', "term": {self._quote(span.term)}, "what": {self._quote(span.name)}'
        if span.work is not None:
            work = span.work
            more += f', "micro_batch": {work.micro_batch}, "chunk": {work.chunk}'
        if span.layer is not None:
            more += f', "layer": {span.layer}'
        if span.num_bytes:
            more += f', "bytes": {round(span.num_bytes)}'
        for at, kernel in enumerate(kernels):
            start = span.start_s + at * length
            yield self._line(rank, span.stream, kernel, start, start + length, more)

    def _line(
        self, rank: int, stream: Stream, kernel: _Kernel, start: float, end: float, more: str
    ) -> str:
        self._number += 1
        # Microseconds with three digits as in Kineto, rounded so that spans never overlap.
        begins = round(start * 1e6, 3)
        lasts = round(round(end * 1e6, 3) - begins, 3)
        thread = _THREADS[stream]
        # In Kineto's files only kernels have a stream in their arguments.
        on = f'"device": {rank}, "stream": {thread}, ' if kernel.category == "kernel" else ""
        return (
            f'{{"ph": "X", "cat": "{kernel.category}", "name": {self._quote(kernel.name)}, '
            f'"pid": {rank}, "tid": {thread}, "ts": {begins:.3f}, "dur": {lasts:.3f}, '
            f'"args": {{{on}"External id": {self._number}, "correlation": {self._number}{more}}}}}'
        )

    def _quote(self, text: str) -> str:
        found = self._quoted.get(text)
        if found is None:
            found = self._quoted[text] = json.dumps(text)
        return found

    def _kernels(self, span: Span) -> tuple[_Kernel, ...]:
        """Return the events of a span: NCCL kernels for communication, else named by purpose."""
        if span.stream == "host":
            return (_Kernel("user_annotation", span.name),)
        if span.term == "stragglers":
            return (_Kernel("gpu_user_annotation", span.name),)
        if span.stream != "compute":
            return tuple(_Kernel("kernel", name) for name in self._collectives(span))
        if span.term == "optimizer":
            return (_Kernel("kernel", "multi_tensor_apply_kernel (Adam)"),)
        backward = "backward" if span.work is not None and span.work.kind != "F" else "forward"
        prefix = {
            "gemm": "gemm",
            "attention": f"flash_attention_{backward}",
            "memory": "elementwise_kernel",
            "cast": "cast_kernel",
        }.get(span.term, span.term)
        return (_Kernel("kernel", f"{prefix} ({span.name})"),)

    def _collectives(self, span: Span) -> tuple[str, ...]:
        gather = f"ncclDevKernel_AllGather_RING_LL{_ARGUMENTS}"
        scatter = f"ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL{_ARGUMENTS}"
        reduce = f"ncclDevKernel_AllReduce_Sum_bf16_RING_LL{_ARGUMENTS}"
        message = f"ncclDevKernel_SendRecv{_ARGUMENTS}"
        named = {"all-gather": gather, "reduce-scatter": scatter, "all-reduce": reduce}
        gradient = self._names.gradient
        first = span.name.partition(" of ")[0]
        if span.stream in ("pipeline", "context", "experts"):
            return (message,)
        if first in named:
            of_gradients = span.term == "gradients"
            return (named[first].replace("bf16", gradient) if of_gradients else named[first],)
        if span.stream == "tensor":
            return (gather, scatter) if self._names.scattered else (reduce,)
        if span.term in ("gradients", "gradient_sync"):
            return (scatter.replace("bf16", gradient),)
        forward = span.work is not None and span.work.kind == "F"
        return (gather,) if forward else (gather, scatter.replace("bf16", gradient))
