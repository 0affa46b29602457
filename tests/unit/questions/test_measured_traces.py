"""A measured trace: terms of kernels, refused values, and limits of large files."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import DocumentError
from search.questions import traces
from search.questions.traces import is_trace, read_trace, trace_of

SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, start: float, end: float, **arguments: Any) -> dict[str, Any]:
    """Return an event of a device, microseconds."""
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": "kernel", "pid": 0, "name": name, **times, "args": arguments}


def step(start: float, end: float, category: str = "gpu_user_annotation") -> dict[str, Any]:
    """Return the mark of a step."""
    times = {"ts": start, "dur": end - start, "args": {}}
    return {"ph": "X", "cat": category, "pid": 0, "name": "ProfilerStep#3", **times}


def terms_us(*events: dict[str, Any], rank: int | None = None) -> dict[str, float]:
    """Return microseconds by term of a trace of these events."""
    found = trace_of({"traceEvents": list(events)}, "t.json", rank)
    return {name: round(value * 1e6, 6) for name, value in found.terms_s.items()}


def term_of(name: str, *events: dict[str, Any], **arguments: Any) -> str:
    """Return the term of a kernel in a trace with other events."""
    seen = terms_us(step(0, 10), kernel(name, 0, 10, **arguments), *events)
    (only,) = seen
    return only


def test_time_belongs_to_computation_before_transfers() -> None:
    """By hand: a transfer counts where nothing computes, by its group; the rest is idle."""
    nccl = "ncclDevKernel_AllGather_RING_LL(...)"
    events = [
        step(0, 100),
        kernel("sm90_xmma_gemm_bf16", 0, 30),
        kernel("flash_fwd_kernel", 20, 50),
        kernel("elementwise_kernel", 50, 55),
        kernel(nccl, 40, 70, **{"Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP"}),
        kernel(nccl, 65, 80, **{"Process Group Description": "mesh_dp_shard"}),
        kernel("ncclDevKernel_SendRecv(...)", 80, 85),
        kernel("ncclDevKernel_AllReduce_Sum(...)", 85, 86),
        kernel("multi_tensor_apply_kernel", 86, 90),
        kernel("outside_the_step", 100, 130),
    ]
    found = trace_of({"traceEvents": events}, "t.json")
    assert terms_us(*events) == {
        "products": 30,
        "attention": 20,
        "optimizer": 4,
        "memory-bound": 5,
        "tensor parallel": 15,
        "data parallel": 10,
        "stage transfer": 5,
        "collectives": 1,
        "idle": 10,
    }
    assert found.step_s == pytest.approx(100e-6)
    assert (found.rank, found.world_size, found.notes) == (0, None, ())


def test_steps_are_averaged() -> None:
    """By hand: of two steps of 100 and 60 microseconds; kernels between them count for none."""
    seen = terms_us(
        step(0, 100), step(200, 260), kernel("gemm", 10, 60), kernel("gemm", 90, 230),
        kernel("copy", 120, 190),
    )  # fmt: skip
    assert seen == {"products": (60 + 30) / 2, "idle": (40 + 30) / 2}


@pytest.mark.parametrize(
    ("name", "arguments", "term"),
    [
        (SEND, {"Collective name": "all_to_allv", "Process Group Name": "12"}, "collectives"),
        (SEND, {"Collective name": "alltoall_base"}, "collectives"),
        (
            SEND,
            {
                "Collective name": "all_to_allv",
                "Process Group Description": "EXPERT_MODEL_PARALLEL_GROUP",
            },
            "experts",
        ),
        (
            SEND,
            {"Collective name": "all_to_all", "Process Group Description": "mesh_cp"},
            "context parallel",
        ),
        (SEND, {"Collective name": "gather"}, "collectives"),
        (SEND, {"Collective name": "send"}, "stage transfer"),
        (SEND, {"Collective name": "coalesced"}, "stage transfer"),
        (SEND, {}, "stage transfer"),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", {}, "experts"),
        ("void deep_ep::internode::combine<true, __nv_bfloat16>(int4*)", {}, "experts"),
        ("_ZN7deep_ep12internode_ll8dispatchILb1EEEvPv", {}, "experts"),
        ("void hybrid_ep::dispatch_kernel<4>(int)", {}, "experts"),
        ("nvshmemi_transfer_quiet", {}, "experts"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs_oop", {}, "tensor parallel"),
    ],
)
def test_a_kernel_counts_for_its_term(name: str, arguments: dict[str, str], term: str) -> None:
    """An exchange of tokens is no transfer between stages, and a fused dispatcher is no NCCL."""
    assert term_of(name, **arguments) == term


def test_ranges_tell_what_grouped_sends_are() -> None:
    """Older traces have no collective name at the kernel, only the range around it."""

    def ranged(name: str) -> dict[str, Any]:
        return kernel(name, 0, 10) | {"cat": "user_annotation"}

    assert term_of(SEND, ranged("nccl:all_to_all")) == "collectives"
    assert term_of(SEND, ranged("nccl:send 0->1")) == "stage transfer"
    both = ranged("nccl:all_to_all"), ranged("nccl:recv 0<-1")
    assert term_of(SEND, *both) == "stage transfer"
    gathers = ranged("nccl:all_to_all"), ranged("nccl:_all_gather_into_tensor_coalesced")
    assert term_of(SEND, *gathers) == "collectives"


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ({"dur": float("nan")}, "traceEvents[1].dur", "nan"),
        ({"dur": float("inf")}, "traceEvents[1].dur", "inf"),
        ({"dur": -1}, "traceEvents[1].dur", "-1"),
        ({"dur": None}, "traceEvents[1].dur", "null"),
        ({"dur": True}, "traceEvents[1].dur", "true"),
        ({"pid": True}, "traceEvents[1].pid", "true"),
        ({"dur": 10**400}, "traceEvents[1].dur", "1000"),
        ({"ts": float("-inf")}, "traceEvents[1].ts", "-inf"),
        ({"ts": "12"}, "traceEvents[1].ts", "'12'"),
        ({"ts": 1e60}, "traceEvents[1].ts", "1e+60"),
        ({"dur": 10**60}, "traceEvents[1].dur", "1000"),
        ({"pid": []}, "traceEvents[1].pid", "[]"),
        ({"pid": 0.5}, "traceEvents[1].pid", "0.5"),
    ],
)
@pytest.mark.parametrize("event", [kernel("gemm", 0, 5), step(0, 5, "user_annotation")])
def test_what_is_no_time_is_refused(
    event: dict[str, Any], change: dict[str, Any], key: str, said: str
) -> None:
    """With file, key and value: a length that is skipped would make a term short."""
    events = [kernel("gemm", 0, 5), event | change]
    with pytest.raises(DocumentError, match=re.escape(said)) as found:
        trace_of({"traceEvents": events}, "t.json")
    assert (found.value.path, found.value.key) == ("t.json", key)


@pytest.mark.parametrize(
    ("info", "key"),
    [
        ({"rank": 8, "world_size": 8}, "distributedInfo.rank"),
        ({"rank": -1, "world_size": 8}, "distributedInfo.rank"),
        ({"rank": "0", "world_size": 8}, "distributedInfo.rank"),
        ({"rank": True, "world_size": 8}, "distributedInfo.rank"),
        ({"rank": 1.0}, "distributedInfo.rank"),
        ({"rank": 10**400, "world_size": 8}, "distributedInfo.rank"),
        ({"rank": 0, "world_size": 0}, "distributedInfo.world_size"),
        ({"rank": 0, "world_size": float("nan")}, "distributedInfo.world_size"),
        ([], "distributedInfo"),
    ],
)
def test_a_rank_outside_the_world_is_refused(info: Any, key: str) -> None:
    """Also ranks and worlds that are no numbers."""
    with pytest.raises(DocumentError) as found:
        trace_of({"traceEvents": [kernel("gemm", 0, 5)], "distributedInfo": info}, "t.json")
    assert (found.value.path, found.value.key) == ("t.json", key)
    kept = {"rank": 3, "world_size": 8}
    trace = trace_of({"traceEvents": [kernel("gemm", 0, 5)], "distributedInfo": kept}, "t.json")
    assert (trace.rank, trace.world_size) == (3, 8)


def test_of_several_processes_the_rank_is_read() -> None:
    """The one at or below the rank: traces of autopar contain one rank of every stage."""
    others = [kernel("gemm", 0, 10), kernel("flash_fwd", 0, 10) | {"pid": 4}]
    assert terms_us(*others, rank=3) == {"products": 10}
    assert terms_us(*others, rank=4) == {"attention": 10}


def test_what_is_no_trace_is_one_sentence(tmp_path: Path) -> None:
    """Text that ends early, goes on, or is nested for ever; files without kernels."""
    whole = '{"traceEvents": [' + json.dumps(kernel("gemm", 0, 5))
    path = tmp_path / "t.json"
    for text, said in (
        (json.dumps({"traceEvents": [{"ph": "M"}]}), "no device kernels"),
        ('{"traceEvents": [{"ph"', "not a readable trace"),
        (whole, "not a readable trace"),
        (whole + "]", "not a readable trace"),
        (whole + "]} x", "not a readable trace"),
        (whole + " {}]}", "not a readable trace"),
        (whole + ",]}", "not a readable trace"),
        (whole + '], "traceEvents": []}', "occurs twice"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "not a readable trace"),
        ('{"traceEvents": {}}', "not a readable trace"),
        ("7", "not a readable trace"),
        ("", "not a readable trace"),
    ):
        path.write_text(text)
        with pytest.raises(DocumentError, match=said):
            read_trace(str(path))
    unmarked = [kernel("gemm", 10, 30), kernel("gemm", 40, 50)]
    found = trace_of(unmarked, "t.json")
    assert found.step_s == pytest.approx(40e-6)
    assert "marks no steps" in found.notes[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_a_stream_reads_what_a_whole_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, packed: bool
) -> None:
    """However events are cut into chunks, with spaces and keys on both sides; compressed, too."""
    monkeypatch.setattr(traces, "_CHUNK", chunk)
    events = [step(0, 100), *(kernel(f'gemm {n} \u00e4\\"]}}', 8 * n, 8 * n + 5) for n in range(9))]
    data = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "n": -12.5e3}],
        "traceEvents": [{}, *events],
        "distributedInfo": {"rank": 12, "world_size": 128},
        "end": 12345,
    }
    expected = trace_of(data, "x")
    assert expected.terms_s == pytest.approx({"products": 45e-6, "idle": 55e-6})
    path = tmp_path / "t.json"
    for text in (
        json.dumps(data),
        json.dumps(data, indent=3, ensure_ascii=False),
        "\ufeff \n" + json.dumps(data, separators=(",", ":")) + "\n ",
    ):
        raw = text.encode()
        path.write_bytes(gzip.compress(raw) if packed else raw)
        assert is_trace(str(path)) or chunk < 8
        assert read_trace(str(path)) == expected
    path.write_text(json.dumps(events))
    assert read_trace(str(path)).terms_s == expected.terms_s


def test_files_that_expand_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, one value, events and processes: each has a limit that the message states."""
    path = tmp_path / "t.json.gz"
    one = json.dumps(kernel("gemm", 0, 5))

    def refused(text: str) -> str:
        path.write_bytes(gzip.compress(text.encode()))
        assert path.stat().st_size < 100_000
        with pytest.raises(DocumentError) as found:
            read_trace(str(path))
        return str(found.value)

    large = '{"traceEvents": [{"name": "' + "x" * (9 << 20) + '"}]}'
    assert "key 'traceEvents[0]': the value is larger than 8 MiB" in refused(large)
    monkeypatch.setattr(traces, "_MOST_ALONE", 3)
    split = '{"name": "' + "x" * 65000 + '},{"},{}'
    monkeypatch.setattr(traces, "_CHUNK", 1 << 16)
    assert "more than 3 events in another" in refused("[" + ",".join([split] * 9) + "]")
    monkeypatch.setattr(traces, "_MOST_ALONE", 1000)
    monkeypatch.setattr(traces, "_MOST_EVENTS", 50)
    for other in ("{}", '{"a": NaN}', '{"b": []}'):
        text = "[" + ",".join([other] * 60_000) + "," + one + "]"
        assert re.search("more than (50|1,000) events", refused(text))
    monkeypatch.setattr(traces, "_MOST_EVENTS", 1000)
    monkeypatch.setattr(traces, "_MOST_KERNELS", 100)
    assert "more than 100 device events" in refused("[" + ",".join([one] * 101) + "]")
    monkeypatch.setattr(traces, "_MOST_PROCESSES", 3)
    many = ",".join(json.dumps(kernel("gemm", 0, 5) | {"pid": n}) for n in range(4))
    assert "or 3 processes" in refused(f"[{many}]")
    monkeypatch.setattr(traces, "_MOST_BYTES", 1 << 20)
    assert "of text" in refused("[" + " " * (30 << 20) + one + "]")


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A tenth of 40 MB of events is held at a time, however far they were compressed."""
    path = tmp_path / "t.json.gz"
    noise = json.dumps({"ph": "X", "cat": "cpu_op", "name": "aten::mm" * 20, "ts": 0, "dur": 1})
    events = ",\n".join([noise] * 2000)
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [' + json.dumps(kernel("gemm", 0, 5)))
        for _ in range(100):
            file.write(",\n" + events)
        file.write("]}")
    tracemalloc.start()
    assert read_trace(str(path)).terms_s == pytest.approx({"products": 5e-6})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 6e6


@pytest.mark.parametrize("cut", [1, 0.5, 0.9])
def test_a_damaged_archive_is_no_internal_error(tmp_path: Path, cut: float) -> None:
    """An archive that ends early, or whose bytes were changed."""
    path = tmp_path / "t.json.gz"
    text = json.dumps({"traceEvents": [kernel(f"gemm {n * n}", n, n + 1) for n in range(3000)]})
    raw = bytearray(gzip.compress(text.encode()))
    if cut == 1:
        raw[len(raw) // 2 : len(raw) // 2 + 40] = b"\0" * 40
    path.write_bytes(raw[: int(len(raw) * cut)])
    is_trace(str(path))
    with pytest.raises(DocumentError, match="not a readable trace"):
        read_trace(str(path))


@pytest.mark.parametrize("event", ["'8'", "8", "[null]", "null"])
@pytest.mark.parametrize("place", [0, 1])
def test_an_event_that_is_no_object_is_refused(tmp_path: Path, event: str, place: int) -> None:
    events = ['{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "ts": 0, "dur": 1}'] * 2
    events[place] = event.replace("'", '"')
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents": [{", ".join(events)}]}}')
    with pytest.raises(DocumentError) as found:
        read_trace(path)
    assert found.value.key == f"traceEvents[{place}]"
