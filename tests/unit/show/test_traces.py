"""Traces of a predicted step: the trace-event format, kineto's names, and what commands write."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from autopar.price.assessment import assess
from search.commands import check, explain, search
from search.planning.uniform.answer import answer, open_launches
from search.request.request import build_request
from search.show.pictures import trace as traces
from search.show.pictures.timeline import Timeline, launch_timeline
from search.show.pictures.trace import TraceNames, names_of, trace_text

_LAUNCH = ("--model", "llama3-8b", "--hardware", "h100:1x8", "--seq-length", "4096")
_QUESTION = (
    *(*_LAUNCH, "--global-batch-size", "32", "--engine", "megatron"),
    *("--tp", "2", "--pp", "2"),
)
pytestmark = pytest.mark.usefixtures("folder")
_PLANNED = (*_LAUNCH, "--global-batch-size", "32", "--engine", "galvatron")


def _timeline(**more: str) -> tuple[Timeline, TraceNames]:
    asked = {"model": "llama3-8b", "hardware": "h100:1x8", "seq-length": "4096", "top": "0"}
    found = answer(open_launches(build_request({**asked, "global-batch-size": "32", **more})))
    best = found.best
    assert best is not None
    assert best.best is not None
    assessment = assess(best.best.run, best.target)
    timeline = launch_timeline(assessment, best.target)
    return timeline, names_of(best.best.run, best.target.machine.card.name)


def _events(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


def _check_format(document: dict[str, Any], step_s: float) -> None:
    """Hold a document to the trace-event format, as far as viewers rely on it."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert document["schemaVersion"] == 1
    named: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    on: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    last = 0.0
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            named[event["name"]].add((event["pid"], event["tid"]))
            continue
        assert event["cat"] in ("kernel", "gpu_user_annotation", "user_annotation")
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        last = max(last, event["ts"] + event["dur"])
        on[event["pid"], event["tid"]].append((event["ts"], event["dur"], event["name"]))
        # kineto's files: what says its stream is a kernel
        assert ("stream" in event["args"]) == (event["cat"] == "kernel")
    assert last == pytest.approx(step_s * 1e6, abs=1.0)
    assert named["thread_name"] >= set(on)
    assert {pid for pid, _ in named["process_name"]} == {pid for pid, _ in on}
    assert {pid for pid, _ in named["process_sort_index"]} == {pid for pid, _ in on}
    for events in on.values():
        # complete events of a thread are nested or apart
        open_until: list[float] = []
        for start, length, name in sorted(events, key=lambda event: (event[0], -event[1])):
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or start + length <= open_until[-1] + 2e-3, name
            open_until.append(start + length)


def test_a_trace_is_in_the_trace_event_format() -> None:
    timeline, names = _timeline(engine="megatron", tp="2", pp="2")
    document = json.loads(trace_text(timeline, names, "a step"))
    _check_format(document, timeline.step_s)
    assert document["distributedInfo"]["world_size"] == 8
    assert document["predicted"]["apportioned"] == list(timeline.notes)


def test_names_are_those_of_real_profiles() -> None:
    timeline, names = _timeline(engine="megatron", tp="2", pp="2")
    found = {event["name"].partition("(")[0] for event in _events(trace_text(timeline, names, ""))}
    assert {
        "forward-compute",
        "backward-compute",
        "ProfilerStep#0",
        "ncclDevKernel_AllGather_RING_LL",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
        "ncclDevKernel_SendRecv",
        "multi_tensor_apply_kernel ",
    } <= found


def test_stages_of_torch_are_counted_through_as_torch_does() -> None:
    timeline, names = _timeline(engine="torchtitan", pp="2", tp="1", schedule="1f1b")
    found = {event["name"] for event in _events(trace_text(timeline, names, ""))}
    # torch.distributed.pipelining.schedules: PP:{stage}{kind}{micro-batch}
    assert {"PP:0F0", "PP:1F0", "PP:1B0", "PP:0B0"} <= found


def test_each_kernel_says_what_it_is_of() -> None:
    timeline, names = _timeline(engine="megatron", tp="2", pp="2")
    kernels = [event for event in _events(trace_text(timeline, names, "")) if event["ph"] == "X"]
    layers = [event["args"] for event in kernels if "layer" in event["args"]]
    assert {one["layer"] for one in layers} == set(range(32))
    assert {one["micro_batch"] for one in layers} == {timeline.detailed}
    sends = [
        event["args"]["bytes"]
        for event in kernels
        if "AllGather" in event["name"] and "layer" in event["args"]
    ]
    # 4,096 tokens of 4,096 elements of 2 bytes, for each sample of a micro-batch
    assert sends
    assert {size % (4096 * 4096 * 2) for size in sends} == {0}


def test_a_file_that_would_be_too_large_has_whole_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeline, names = _timeline(engine="megatron", tp="2", pp="2")
    whole = len(_events(trace_text(timeline, names, "")))
    monkeypatch.setattr(traces, "_MOST_PIECES", 10)
    document = json.loads(trace_text(timeline, names, ""))
    _check_format(document, timeline.step_s)
    assert len(document["traceEvents"]) < whole
    assert "too large" in document["predicted"]["apportioned"][-1]


# --------------------------------------------------------------------------------------------------
# Commands


@pytest.mark.whole
def test_a_search_writes_both_and_an_evaluation_draws_the_same_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*_QUESTION, "--output-config-path", "launch.json")
    assert search.run([*words, "--html", "a.html", "--trace", "a.json.gz"]) == 0
    assert "wrote a.html" in capsys.readouterr().err
    assert search.run(["--evaluate", "launch.json", "--trace", "b.json"]) == 0
    first = gzip.decompress((folder / "a.json.gz").read_bytes()).decode()
    assert _events(first) == _events((folder / "b.json").read_text())
    assert (folder / "a.html").read_text().startswith("<!doctype html>")


@pytest.mark.whole
def test_outputs_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert search.run([*_QUESTION, "--output-config-path", "launch.json"]) == 0
    for words, said in (
        (("--html", "x", "--trace", "x"), "--trace"),
        (("--json", "x", "--html", "x"), "--html"),
        (("--trace", "launch.json"), "launch.json"),
        (("--html", "-"), "--html: '-' is not a file name"),
        (("--html", "/dev/full"), "--html /dev/full: cannot be written"),
    ):
        capsys.readouterr()
        assert search.run(["--evaluate", "launch.json", *words]) == 2
        told = capsys.readouterr()
        assert said in told.err
        assert told.out == ""


def test_an_explained_plan_and_a_checked_launch_have_pictures(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search.run([*_PLANNED, "--output-config-path", "s.json"]) == 0
    assert explain.run(["autopar_plan_s.json", "--html", "e.html", "--trace", "e.json"]) == 0
    events = _events((folder / "e.json").read_text())
    assert {event["name"] for event in events} >= {"ProfilerStep#0", "Forward 0", "Backward 0"}
    script = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 2048 "
        "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 1 --global-batch-size 32 --pipeline-model-parallel-size 2 "
        "--vocab-size 32000 --bf16 --use-distributed-optimizer --swiglu "
        "--disable-bias-linear --position-embedding-type rope\n"
    )
    (folder / "run.sh").write_text(script)
    asked = ["--hardware", "h100:1x8", "--no-neighbours"]
    assert check.run(["run.sh", *asked, "--html", "c.html", "--trace", "c.json"]) == 0
    assert "run.sh" in (folder / "c.html").read_text()
    document = json.loads((folder / "c.json").read_text())
    _check_format(document, document["predicted"]["step_s"])
    capsys.readouterr()
    assert check.run(["run.sh", "run.sh", *asked, "--html", "c.html"]) == 2
    assert "--html" in capsys.readouterr().err
