"""Rows of published training runs as inputs of closed-form models.

Missing settings are never guessed silently. A row without a required setting is refused by name.
Where the software of a source leaves little choice, `_SOURCES` sets the value, and the run lists
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autopar.units import GIB
from tests.data.read import read_csv

__all__ = ["FILES", "Run", "UnusableError", "read_rows", "run_of"]

FILES = ("published_runs", "published_runs_single_node")
"""Tables of rows, NAME.csv or NAME.csv.gz; the second are composed times, see tests/data."""
GB = 1e9
_SYSTEMS = {  # (type of GPU, GB of its memory; empty where unknown) -> shipped system
    ("A100-SXM", "80"): "a100-80gb",
    ("A100-SXM", "40"): "a100-40gb",
    ("A100-SXM", ""): "a100-80gb",
    ("H100-SXM", "80"): "h100-80gb",
    ("H200", "141"): "h200",
    ("B200", "192"): "b200",
}
_DATATYPES = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "amp_bf16": "bfloat16",
    "BF16": "bfloat16",
}


class UnusableError(Exception):
    """A setting is missing in a row, or a model does not support one; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Settings that the rows of a source share and do not state."""

    flash: bool = False
    data_overlap: bool = False
    inter_node_gbps: float | None = None
    """GB/s per GPU and direction between nodes; None: that of the shipped system."""
    blocks_only: bool = False
    """True if figures do not include embedding and head."""
    gib: bool = True
    """True if memory is in GiB, False if in GB."""
    taken: tuple[tuple[str, str], ...] = ()
    """Values of fields that are empty in the rows."""
    stack: str = "megatron-core"
    """Software stack of the planner's estimates."""
    site: str | None = None
    tensor_overlap: bool = True
    """True if tensor-parallel collectives overlap with GEMMs, as far as the stack supports it."""
    fp32_gradients: bool = False


_SOURCES = {  # by the start of a source's name
    "Korthikanti et al. 2022 arXiv 2205.05198 Figure 1": _Source(blocks_only=True),
    "BigScience": _Source(inter_node_gbps=6.25, gib=False),  # 4 x 100 Gb/s for 8 GPUs
    "vTrain": _Source(  # 800 Gb/s for 8 GPUs
        inter_node_gbps=12.5, taken=(("sharded_optimizer", "0"), ("gpu_mem_gb", "80"))
    ),
    "MosaicML": _Source(flash=True, data_overlap=True, stack="composer-fsdp"),
    "SimuMax": _Source(
        flash=True,
        taken=(("sequence_parallel", "1"), ("sharded_optimizer", "1")),
        site="simumax-b200",
        # as in its launch scripts and in `benchmarks.ledger`
        tensor_overlap=False,
        fp32_gradients=True,
    ),
    "torchtitan": _Source(flash=True, data_overlap=True, stack="torchtitan-eager"),
    "Megatron-Core": _Source(flash=True, data_overlap=True),
    "NVIDIA": _Source(flash=True, data_overlap=True),
    "Llama 3": _Source(flash=True, data_overlap=True),
    "Colossal-AI": _Source(flash=True),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run in base units."""

    model: str
    gated: bool
    tied: bool
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    system: str
    gpus_per_node: int
    num_gpus: int
    tp: int
    pp: int
    dp: int
    vpp: int
    micro_batch: int
    global_batch: int
    sequence_parallel: bool
    recompute: str
    """'none', 'selective' or 'full'."""
    zero: int
    datatype: str
    flash: bool
    data_overlap: bool
    inter_node_bytes_per_s: float | None
    stack: str
    site: str | None
    tensor_overlap: bool
    fp32_gradients: bool
    time_s: float | None
    memory_bytes: float | None
    taken: tuple[str, ...]
    """Settings taken from the software of the source because the row does not state them."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes; the last may be used in part."""
        return -(-self.num_gpus // self.gpus_per_node)


def read_rows(folder: Path) -> Iterator[dict[str, str]]:
    """Yield every row of the two files, as text by column."""
    for name in FILES:
        yield from read_csv(folder, name)


def run_of(row: Mapping[str, str]) -> Run:
    """Return the run of a row; raises UnusableError with the reason if settings are missing."""
    source = next(
        (known for start, known in _SOURCES.items() if row["source"].startswith(start)), _Source()
    )
    cells, taken = dict(row), []
    for name, value in source.taken:
        if not cells[name]:
            cells[name] = value
            taken.append(f"{name}={value}")
    _refuse(cells)
    tp, pp, dp = (_count(cells, name) for name in ("tp", "pp", "dp"))
    gpus = _count(cells, "num_gpus")
    if tp * pp * dp != gpus:
        raise UnusableError("degrees do not multiply to the GPUs")
    if tp > 1 and not cells["sequence_parallel"]:
        raise UnusableError("sequence parallelism is not given")
    if pp > 1 and not cells["vpp"]:
        raise UnusableError("interleaving is not given")
    zero = cells["zero_stage"] or cells["sharded_optimizer"]
    if dp > 1 and zero not in ("0", "1", "2", "3"):
        raise UnusableError("what the data groups shard is not given")
    rate = source.inter_node_gbps
    peak = cells["peak_mem_gb"]
    return Run(
        model=cells["model"],
        gated=cells["arch"].startswith("llama"),
        tied=cells["arch"].startswith("gpt"),
        layers=_count(cells, "layers"),
        hidden=_count(cells, "hidden"),
        ffn=_count(cells, "ffn"),
        heads=_count(cells, "heads"),
        kv_heads=_count(cells, "kv_heads"),
        vocab=0 if source.blocks_only else _count(cells, "vocab"),
        seq=_count(cells, "seq"),
        system=_SYSTEMS[cells["gpu_type"], cells["gpu_mem_gb"]],
        gpus_per_node=_count(cells, "gpus_per_node"),
        num_gpus=gpus,
        tp=tp,
        pp=pp,
        dp=dp,
        vpp=int(cells["vpp"] or 1),
        micro_batch=_count(cells, "micro_batch"),
        global_batch=_count(cells, "global_batch"),
        sequence_parallel=cells["sequence_parallel"] == "1",
        recompute=cells["recompute"],
        zero=max(int(zero or 0), int(cells["sharded_optimizer"] or 0)),
        datatype=_DATATYPES[cells["precision"]],
        flash=source.flash,
        data_overlap=source.data_overlap,
        inter_node_bytes_per_s=rate * GB if rate else None,
        stack=source.stack,
        site=source.site,
        tensor_overlap=source.tensor_overlap,
        fp32_gradients=source.fp32_gradients,
        time_s=float(cells["iter_time_s"]) if cells["iter_time_s"] else None,
        memory_bytes=float(peak) * (GIB if source.gib else GB) if peak else None,
        taken=tuple(taken),
    )


def _refuse(cells: Mapping[str, str]) -> None:
    """Raise UnusableError for the first reason why no model can price a row."""
    if cells["arch"].startswith("moe") or int(cells["ep"] or 1) > 1:
        raise UnusableError("a mixture of experts or a hybrid")
    if cells["precision"] not in _DATATYPES:
        raise UnusableError(
            "8- or 4-bit numbers beside others" if cells["precision"] else "no datatype"
        )
    if int(cells["cp"] or 1) > 1:
        raise UnusableError("context parallelism")
    if (cells["gpu_type"], cells["gpu_mem_gb"]) not in _SYSTEMS:
        raise UnusableError(f"no system is shipped for its GPU ({cells['gpu_type'].split(' ')[0]})")
    if cells["recompute"] not in ("none", "selective", "full"):
        raise UnusableError("recomputation is not given")
    if not (cells["iter_time_s"] or cells["peak_mem_gb"]):
        raise UnusableError("neither time nor memory")


def _count(cells: Mapping[str, str], name: str) -> int:
    if not cells[name]:
        raise UnusableError(f"{name} is not given")
    return int(float(cells[name]))
