"""Every option of `autopar-search`, one row each, and the one table of other spellings.

A row says how an option is written, read and explained and which field of `SearchOptions` it
fills; `cli_parse` reads command lines by it. A new option is one row, another name for it one
entry of `ALIASES`.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.units import GIB

__all__ = ["ALIASES", "IGNORED", "OPTIONS", "PLANNED", "VALUES", "OptionRow"]

Kind = Literal["int", "float", "text", "choice", "ints", "texts", "flag", "switch"]
"""`flag`: off unless given; `switch`: has a `--no-` form; `ints`: comma list; `texts`: repeats."""


@dataclass(frozen=True)
class OptionRow:
    """One option: name, kind, help, panel of the help, and where its value goes."""

    name: str
    kind: Kind
    help: str
    panel: str
    field: str | None = None
    """Field of `SearchOptions`; None for inputs and outputs."""
    choices: tuple[str, ...] = ()
    low: float | None = None
    """Smallest accepted number."""
    above: float | None = None
    """The number must exceed this."""
    high: float | None = None
    scale: float = 1.0
    """Factor from the unit of the command line to the base unit of the field."""
    off: int | None = None
    """A number that peers write for `not given`."""

    @property
    def key(self) -> str:
        """The name as a Python identifier."""
        key = self.name.replace("-", "_")
        return f"{key}_" if keyword.iskeyword(key) else key


_IN, _MEM, _SPACE, _COST, _OUT = (
    "Inputs",
    "Memory and batch",
    "Search space",
    "Cost model",
    "Solver and output",
)
_MODES = ("static", "batch", "sequence")


def _disable(name: str, what: str) -> OptionRow:
    return OptionRow(
        f"disable-{name}", "flag", f"leave out {what}", _SPACE, f"disable_{name.replace('-', '_')}"
    )


OPTIONS: tuple[OptionRow, ...] = (
    # --- inputs
    OptionRow("model", "text", "shipped name, config.json of a model, or a model spec file", _IN),
    OptionRow("hardware", "text", "CARD:NxG (estimated), shipped name, or a folder of files", _IN),
    OptionRow("num-nodes", "int", "machines [default: 1]", _IN, low=1, high=1 << 20),
    OptionRow("num-gpus-per-node", "int", "GPUs of a machine [default: 8]", _IN, low=1, high=4096),
    OptionRow("world-size", "int", "GPUs in all, nodes x GPUs per node", _IN, low=1, high=1 << 24),
    OptionRow("memory-profiling-path", "text", "memory file of the model, or its folder", _IN),
    OptionRow("time-profiling-path", "text", "computation file of the model, or its folder", _IN),
    OptionRow(
        "allreduce-bandwidth-config-path", "text", "all-reduce bandwidths, or their folder", _IN
    ),
    OptionRow("p2p-bandwidth-config-path", "text", "point-to-point bandwidths, or folder", _IN),
    OptionRow("overlap-coe-path", "text", "overlap coefficient, or its folder", _IN),
    OptionRow("sp-time-path", "text", "collective times (for tp+sp), or their folder", _IN),
    OptionRow(
        "bandwidth-unit",
        "choice",
        "unit of files without a sidecar [default: GB/s]",
        _IN,
        choices=("GB/s", "MiB/ms"),
    ),
    OptionRow(
        "parameter-bytes",
        "choice",
        "bytes per parameter behind parameter_size [default: 4]",
        _IN,
        choices=("4", "2"),
    ),
    OptionRow("num-layers", "ints", "layers of every layer type", _IN, low=1, high=1 << 16),
    OptionRow("seq-length", "ints", "tokens per sample, by layer type", _IN, low=1, high=1 << 28),
    OptionRow("hidden-size", "ints", "hidden size, by layer type", _IN, low=1, high=1 << 24),
    OptionRow("num-heads", "int", "attention heads, checked for divisibility", _IN, low=1),
    OptionRow("vocab-size", "int", "words of the vocabulary", _IN, low=1),
    OptionRow(
        "make-vocab-size-divisible-by", "int", "padding of the vocabulary per vtp", _IN, low=1
    ),
    OptionRow(
        "extrapolate", "flag", "use the profile far outside what was measured", _IN, "extrapolate"
    ),
    # --- memory and batch
    OptionRow(
        "memory-constraint",
        "float",
        "memory of one GPU, GiB [default: the GPU's where known, else 24]",
        _MEM,
        "memory_constraint_bytes",
        above=0,
        high=1 << 20,
        scale=GIB,
    ),
    OptionRow(
        "reserve",
        "float",
        "allocator overhead as a share of what is allocated [default: 0.05]",
        _MEM,
        "reserve_fraction",
        low=0,
        high=1,
    ),
    OptionRow(
        "context-gib",
        "float",
        "device context, GiB per GPU [default: 1]",
        _MEM,
        "context_bytes",
        low=0,
        high=1 << 20,
        scale=GIB,
    ),
    OptionRow("min-bsz", "int", "smallest global batch [default: 8]", _MEM, "min_bsz", low=1),
    OptionRow("max-bsz", "int", "largest global batch [default: 8]", _MEM, "max_bsz", low=1),
    OptionRow("bsz-scale", "int", "step between batches [default: 8]", _MEM, "bsz_scale", low=1),
    OptionRow(
        "settle-bsz",
        "int",
        "the one global batch; instead of a range",
        _MEM,
        "settle_bsz",
        low=1,
        off=-1,
    ),
    OptionRow(
        "settle-chunk",
        "int",
        "the one number of micro-batches",
        _MEM,
        "settle_chunk",
        low=1,
        off=-1,
    ),
    # --- search space
    OptionRow(
        "search-space",
        "choice",
        "dimensions to combine [default: full]",
        _SPACE,
        "search_space",
        choices=("full", "3d", "dp+tp", "dp+pp", "dp", "sdp", "tp", "pp"),
    ),
    OptionRow(
        "sp-space",
        "choice",
        "tensor parallelism, Ulysses, or either per layer [default: tp]",
        _SPACE,
        "sp_space",
        choices=("tp", "sp", "tp+sp"),
    ),
    _disable("dp", "data parallelism"),
    _disable("tp", "tensor parallelism"),
    _disable("vtp", "vocabulary parallelism"),
    _disable("sp", "Ulysses sequence parallelism"),
    _disable("cp", "context parallelism"),
    _disable("pp", "pipeline parallelism"),
    _disable("sdp", "ZeRO-3"),
    _disable("ckpt", "activation checkpointing"),
    _disable("tp-consec", "strided tensor groups"),
    _disable("embedding-lmhead-tp", "tensor parallelism of embedding and head"),
    _disable("embedding-lmhead-sp", "Ulysses for embedding and head"),
    OptionRow("strided-tp", "flag", "also try strided tensor groups", _SPACE, "strided_tp"),
    OptionRow(
        "max-tp-deg", "int", "largest tensor degree [default: 8]", _SPACE, "max_tp_deg", low=1
    ),
    OptionRow("max-pp-deg", "int", "most stages [default: no limit]", _SPACE, "max_pp_deg", low=1),
    OptionRow(
        "max-sp-deg", "int", "largest Ulysses degree [default: 8]", _SPACE, "max_sp_deg", low=1
    ),
    OptionRow(
        "max-cp-deg", "int", "largest context degree [default: 1]", _SPACE, "max_cp_deg", low=1
    ),
    OptionRow(
        "fine-grained-mode",
        "switch",
        "a strategy per layer (1) or one for all (0) [default: 1]",
        _SPACE,
        "fine_grained_mode",
    ),
    OptionRow(
        "pipeline-type",
        "choice",
        "schedule [default: pipedream_flush]",
        _SPACE,
        "pipeline_type",
        choices=("pipedream_flush", "1f1b", "gpipe"),
    ),
    OptionRow(
        "default-dp-type",
        "choice",
        "what a layer without ZeRO-3 does [default: ddp]",
        _SPACE,
        "default_dp_type",
        choices=("ddp", "zero2", "any"),
    ),
    OptionRow(
        "pp-division", "ints", "layers of every stage, e.g. 9,7,8,8", _SPACE, "pp_division", low=1
    ),
    OptionRow(
        "engine",
        "choice",
        "only plans that this engine runs as they are (see autopar-export)",
        _SPACE,
        choices=("galvatron", "megatron", "torchtitan", "deepspeed", "accelerate"),
    ),
    OptionRow("pin", "texts", "rule to keep, e.g. 'layers 0-3:tp=4'; repeats", _SPACE, "pin"),
    OptionRow("forbid", "texts", "rule to rule out, same grammar; repeats", _SPACE, "forbid"),
    # --- cost model
    OptionRow(
        "profile-mode", "choice", "both modes below at once", _COST, choices=(*_MODES, "hybrid")
    ),
    OptionRow(
        "time-profile-mode",
        "choice",
        "how time grows with the batch [default: static; batch for estimates]",
        _COST,
        "time_profile_mode",
        choices=_MODES,
    ),
    OptionRow(
        "memory-profile-mode",
        "choice",
        "how memory grows with the sequence [default: static]",
        _COST,
        "memory_profile_mode",
        choices=_MODES,
    ),
    OptionRow(
        "mixed-precision",
        "choice",
        "training precision [default: bf16]",
        _COST,
        "mixed_precision",
        choices=("bf16", "fp16", "fp32"),
    ),
    OptionRow(
        "fp32-gradients",
        "switch",
        "gradients are kept in fp32 [default: off]",
        _COST,
        "fp32_gradients",
    ),
    OptionRow(
        "sequence-parallel",
        "switch",
        "Megatron sequence parallelism [default: on]",
        _COST,
        "sequence_parallel",
    ),
    OptionRow(
        "global-memory-buffer",
        "switch",
        "one gather buffer per stage [default: on]",
        _COST,
        "global_memory_buffer",
    ),
    OptionRow(
        "async-grad-reduce",
        "switch",
        "reduce gradients once per step [default: on]",
        _COST,
        "async_grad_reduce",
    ),
    OptionRow(
        "tp-overlap",
        "switch",
        "tensor communication hides in backward [default: on]",
        _COST,
        "tp_overlap",
    ),
    OptionRow(
        "column-parallel-share",
        "float",
        "share of column-parallel linears in backward [default: 0.5]",
        _COST,
        "column_parallel_share",
        low=0,
        high=1,
    ),
    OptionRow("calibration", "text", "factors on times and memory, from autopar-verify", _COST),
    # --- solver and output
    OptionRow("top", "int", "alternatives to report [default: 5]", _OUT, "top", low=0, high=1000),
    OptionRow(
        "threads", "int", "threads of the search [default: 1]", _OUT, "threads", low=1, high=1024
    ),
    OptionRow(
        "time-limit",
        "float",
        "seconds after which the best found is returned",
        _OUT,
        "time_limit_s",
        above=0,
    ),
    OptionRow("frontier", "flag", "best throughput by memory budget", _OUT),
    OptionRow("evaluate", "text", "price this plan or strategy file instead of searching", _OUT),
    OptionRow("json", "text", "write the result as JSON to a path, or - for stdout", _OUT),
    OptionRow(
        "output-config-path",
        "text",
        "strategy file or its folder; `none` writes nothing [default: configs]",
        _OUT,
    ),
)

ALIASES: Mapping[str, str] = {
    # PaddleNLP
    "memory-upper-limit": "memory-constraint",
    "max-tp-size": "max-tp-deg",
    "max-pp-size": "max-pp-deg",
    "max-sp-size": "max-sp-deg",
    "layernum": "num-layers",
    "layernum-list": "num-layers",
    "layer-num-list": "num-layers",
    "hidden-size-list": "hidden-size",
    "seqlen-list": "seq-length",
    "allreduce-coe-path": "allreduce-bandwidth-config-path",
    "p2p-coe-path": "p2p-bandwidth-config-path",
    "time-profile-data-path": "time-profiling-path",
    "memory-profile-data-path": "memory-profiling-path",
    "mixed-precision-type": "mixed-precision",
    "search-granularity": "fine-grained-mode",
    "bsz-step": "bsz-scale",
    # the newest and older releases of the Galvatron engine and its models
    "disable-fsdp": "disable-sdp",
    "num-gpus": "num-gpus-per-node",
    "gpus-per-node": "num-gpus-per-node",
    "model-size": "model",
    "model-name": "model",
    "num-hidden-layers": "num-layers",
    "n-layer": "num-layers",
    "num-attention-heads": "num-heads",
    "n-head": "num-heads",
    "seqlen": "seq-length",
    "seq": "seq-length",
    "n-positions": "seq-length",
    "reduce-in-fp32": "fp32-gradients",
    "sp-time-config-path": "sp-time-path",
    "overlap-coe-config-path": "overlap-coe-path",
}
"""Other names of the options above, underscores written as hyphens."""

VALUES: Mapping[tuple[str, str], str] = {
    ("fine-grained-mode", "coarse-grained"): "0",
    ("fine-grained-mode", "fine-grained"): "1",
}
"""Other spellings of values."""

_SEARCHED = "it is searched; use --pin to fix it"
_NOTHING = "it has no meaning here"
IGNORED: Mapping[str, str] = {
    "embed-sdp": _SEARCHED,
    "set-model-config-manually": "sizes given are always used",
    "set-layernum-manually": "sizes given are always used",
    "set-seqlen-manually": "sizes given are always used",
    "recommend-min-bsz": "every batch of the range is considered",
    "use-pipeline-costmodel": "the pipeline is always part of the cost",
    "costmodel-coe": "costs are not scaled",
    "debug-costmodel-coe": "costs are not scaled",
    "parallel-search": "use --threads",
    "worker": "use --threads",
    "log-dir": "no log files are written",
    "num-layertype": "the number of layer types follows from --num-layers",
    "profile-gpu-num": "files name their own groups",
    "profile-unit": _NOTHING,
    "shape-order": _NOTHING,
    "use-flash-attn": "the profile says what was measured",
    "dropout-prob": _NOTHING,
    "set-experts-manually": _NOTHING,
    "is-moe-model": "MoE layers are planned at expert degree 1",
    "debug-config-path": _NOTHING,
}
"""Options of the peers that are accepted and do nothing, with what to say about them."""

_DATA = "it follows from the GPUs and the other degrees: fix those, for example with --pin tp=N"
PLANNED: Mapping[str, str] = {
    "tensor-parallel-degree": "fix it with --pin tp={n}",
    "tensor-model-parallel-size": "fix it with --pin tp={n}",
    "global-tp-deg": "fix it with --pin tp={n}",
    "pipeline-parallel-degree": "fix it with --pin pp={n}",
    "pipeline-model-parallel-size": "fix it with --pin pp={n}",
    "pp-deg": "fix it with --pin pp={n}",
    "context-parallel-degree": "fix it with --max-cp-deg {n} --pin cp={n}",
    "context-parallel-size": "fix it with --max-cp-deg {n} --pin cp={n}",
    "global-cp-deg": "fix it with --max-cp-deg {n} --pin cp={n}",
    "sep-parallel-degree": "fix it with --sp-space sp --pin tp={n}",
    "sharding-parallel-degree": f"{_DATA} (--pin zero3=1 shards the parameters)",
    "data-parallel-degree": _DATA,
    "vocab-tp": "fix it with --pin vtp={n}",
    "chunks": "fix it with --settle-chunk {n}",
    "gradient-accumulation-steps": "fix it with --settle-chunk {n}",
}
"""Options of launchers for what a search finds, with how to fix it; `{n}` is the number given.

They are refused: taken for a limit or ignored, they would plan something else than was meant."""
