"""Switches for what the published numbers of this model contain and should not.

Every switch is one known defect. All off is the corrected model and the default; all on reproduces
published figures (`compat`). Numbers are those of the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["COMPAT", "CORRECT", "Quirks"]


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """Defects to reproduce, one switch each."""

    running_recompute_totals: bool = False
    """B1: a recomputed layer adds the block's running forward totals, not its own FLOP and bytes;
    right: its own."""
    pipe_tile_twice: bool = False
    """B2: `pipe` counts its exposed tile as processing and as exposed time; right: once."""
    edge_overlaps_as_base: bool = False
    """B3: tiles of the edge block overlap the base block's communication; right: their own."""
    recommunication_as_forward: bool = False
    """B4: repeated communication is exposed as in the forward, and its slowdown counted in the
    recomputation too; right: as beside the weight gradient, once."""
    attention_input_dropped: bool = False
    """B5: without `rs_ag`, the input of query, key and value is not kept; right: it is."""
    overlapped_activations: bool = False
    """B6: overlapped linear layers keep other tensors than plain ones; right: the same."""
    dropout_gradient_bytes: bool = False
    """B7: activation gradients of dropout have one byte; right: those of the datatype."""
    weight_gradient_bytes: bool = False
    """B8: weight gradients have the bytes of the datatype; right: 4 while they accumulate."""
    checkpoint_unsharded: bool = False
    """B9: a checkpoint is whole under `rs_ag`; right: divided by the tensor degree."""
    optimizer_per_microbatch: bool = False
    """B10: efficiencies count the optimizer step once per microbatch; right: once per batch."""
    overlap_requirements: bool = False
    """B11: required bandwidths set one chunk (all blocks) against the room of all chunks (one
    block less), and leave out ring factors; right: the same set on both sides, ring included."""
    tail_windows: bool = False
    """B12: the last chunk's window counts the optimizer once too often and removes block times
    that are not in it, and charges one block's slowdown; right: c-1 windows and slowdowns."""
    latency_without_neighbour: bool = False
    """B13: blocks pay the latency of a pipeline transfer without a neighbour and, backward, in
    inference, and windows look at base blocks that do not exist; right: neither."""
    offload_sums: bool = False
    """B14: bytes to move in backward add both directions of the link and leave gradients out;
    right: the busier direction, gradients included."""
    divisor_fills_tier: bool = False
    """B15: a tier that must be filled takes any divisor of its size, even if too few processors
    are there; right: its size, or several groups that fill whole domains of it."""
    no_checkpoint_figure: bool = False
    """B16: offloaded checkpoints are null in inference; right: 0."""
    communication_flops: bool = False
    """B17: FLOP and bytes of collectives are in the block's sums, though their time is not;
    right: left out."""
    unknown_datatype_ends_search: bool = False
    """B19: a datatype that the system lacks is an assertion; right: infeasible."""


CORRECT = Quirks()
COMPAT = Quirks(**dict.fromkeys((f.name for f in fields(Quirks)), True))
