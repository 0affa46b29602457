"""SearchOptions: every choice a user can make about a search, in base units, validated once.

The command line, the Python interface and the plan file all speak this one record; `cli` maps
option spellings (kebab, underscore, peers' names) on it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from autopar.plan import PipelineType

if TYPE_CHECKING:
    from autopar.documents.calibration import Calibration

__all__ = ["ProfileMode", "SearchOptions", "option_record"]

ProfileMode = Literal["static", "batch", "sequence"]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of one search; the defaults are those documented for `autopar-search`."""

    # memory
    memory_constraint_bytes: float = 24 * 2.0**30
    """Memory of one GPU (`--memory-constraint`, GiB)."""
    reserve_fraction: float = 0.05
    """Allocator overhead: reserved = allocated * (1 + reserve_fraction) + context_bytes."""
    context_bytes: float = 2.0**30
    # batch
    min_bsz: int = 8
    max_bsz: int = 8
    bsz_scale: int = 8
    settle_bsz: int | None = None
    settle_chunk: int | None = None
    # space
    search_space: Literal["full", "3d", "dp+tp", "dp+pp", "dp", "sdp", "tp", "pp"] = "full"
    sp_space: Literal["tp", "sp", "tp+sp"] = "tp"
    disable_dp: bool = False
    disable_tp: bool = False
    disable_vtp: bool = False
    disable_sp: bool = False
    disable_cp: bool = False
    disable_pp: bool = False
    disable_sdp: bool = False
    disable_ckpt: bool = False
    disable_tp_consec: bool = False
    disable_embedding_lmhead_tp: bool = False
    disable_embedding_lmhead_sp: bool = False
    strided_tp: bool = False
    max_tp_deg: int = 8
    max_pp_deg: int | None = None
    """None: as many stages as layers and ranks allow."""
    max_sp_deg: int = 8
    max_cp_deg: int = 1
    fine_grained_mode: bool = True
    """False: one strategy for all layers."""
    pipeline_type: PipelineType = "1f1b"
    default_dp_type: Literal["ddp", "zero2", "any"] = "ddp"
    pp_division: tuple[int, ...] | None = None
    pin: tuple[str, ...] = ()
    """Rules such as `layers 0-3:tp=4`, `stage 0:ckpt=0`, `tp=2`, `pp=4`, `vtp=2`."""
    forbid: tuple[str, ...] = ()
    # model of cost
    time_profile_mode: ProfileMode = "static"
    memory_profile_mode: Literal["static", "sequence"] = "static"
    mixed_precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    fp32_gradients: bool = False
    sequence_parallel: bool = True
    """Megatron sequence parallelism for tensor-parallel layers."""
    global_memory_buffer: bool = True
    async_grad_reduce: bool = True
    tp_overlap: bool = True
    column_parallel_share: float = 0.5
    """Share of the backward FLOP in column-parallel linears (overlap windows)."""
    extrapolate: bool = False
    calibration: Calibration | None = None
    """Factors on times and bytes, from plans that ran (`--calibration`)."""
    # solver
    top: int = 5
    """Alternatives to report."""
    threads: int = 1
    time_limit_s: float | None = None


def option_record(options: SearchOptions, memory_bytes: float) -> dict[str, object]:
    """Return the options that shape an answer; threads and limits of time do not."""
    record = asdict(options)
    record["memory_constraint_bytes"] = memory_bytes
    for name in ("threads", "time_limit_s"):
        del record[name]
    if options.calibration is None:  # plan files of questions without one do not name it
        del record["calibration"]
    return record
