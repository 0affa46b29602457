"""Sizes of one execution, from which all figures are derived."""

from __future__ import annotations

import math
from dataclasses import dataclass

from search.closed_form.calculon.documents import DATATYPE_BYTES, Application, Execution
from search.closed_form.calculon.engine import Quirks


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One micro-batch of one execution on a processor of the first stage."""

    quirks: Quirks
    hidden: int
    feedforward: int
    seq: int
    heads: int
    head_size: int
    microbatch: int
    """Samples of a micro-batch."""
    tokens: int
    element_bytes: int
    tensor: int
    shards: int
    """Processors that share optimizer states and gradients; 1 without sharding."""
    blocks: int
    """Blocks on a processor of the first stage, the largest."""
    missing_blocks: int
    """Blocks that later stages have less than the first."""
    chunk_blocks: int
    chunks: int
    microbatches: int
    fused_activation: bool
    kv_heads: int
    """Heads of keys and values, at least one per processor."""
    flash: bool
    """True for attention without scores in memory."""
    causal: bool
    """True if flash attention skips the masked scores of a causal mask."""
    gated: bool
    """True for gated feed-forward layers, RMSNorm and no dropout."""
    vocab: int
    """Rows of the embedding on a processor; 0 without embedding."""
    tied: bool
    rs: bool
    """True if tensor parallelism scatters the sequence between layers (`rs_ag`)."""
    rs_at_edges: bool
    """True if it scatters the sequence between stages only (`p2p_rs_ag`)."""
    tiled: bool
    """True if collectives overlap the tiles of their linear layer (`ring`, `pipe`)."""
    pipe: bool
    training: bool
    recompute_all: bool
    recompute_attention: bool
    regather_attention: bool
    """True if the input of the attention is gathered again in backward."""
    regather_mlp: bool

    @property
    def elements(self) -> int:
        """Return the elements of the residual stream."""
        return self.tokens * self.hidden

    @property
    def local_elements(self) -> float:
        """Return the elements of the residual stream on one processor between layers."""
        return self.elements / self.tensor if self.rs else self.elements

    @property
    def kv_width(self) -> float:
        """Return the columns of the key (and value) projection on one processor."""
        return self.head_size * max(self.kv_heads / self.tensor, 1)

    @property
    def shared_kv(self) -> bool:
        """Return True if some processors share keys and values."""
        return self.kv_heads % self.tensor != 0


def shape_of(application: Application, execution: Execution, quirks: Quirks) -> Shape:
    """Return the sizes of an execution that passed its checks."""
    x = execution
    blocks = math.ceil(application.num_blocks / x.pipeline_par)
    rs = x.tensor_par_comm_type == "rs_ag"
    everything = x.activation_recompute == "full"
    attention = x.activation_recompute in ("full", "attn_only")
    return Shape(
        quirks=quirks,
        hidden=application.hidden,
        feedforward=application.feedforward,
        seq=application.seq_size,
        heads=application.attn_heads,
        head_size=application.attn_size,
        microbatch=x.microbatch_size,
        tokens=x.microbatch_size * application.seq_size,
        element_bytes=DATATYPE_BYTES[x.datatype],
        tensor=x.tensor_par,
        shards=x.data_par if x.optimizer_sharding else 1,
        blocks=blocks,
        missing_blocks=(x.pipeline_par - application.num_blocks % x.pipeline_par) % x.pipeline_par,
        chunk_blocks=blocks // x.pipeline_interleaving,
        chunks=x.pipeline_interleaving,
        microbatches=x.batch_size // x.data_par // x.microbatch_size,
        fused_activation=x.fused_activation,
        kv_heads=1
        if x.attention_type == "multiquery"
        else application.attn_kv_heads or application.attn_heads,
        flash=x.attention_type == "flash",
        causal=application.causal,
        gated=x.structure_type == "llama",
        vocab=math.ceil(application.vocab_size / x.tensor_par),
        tied=application.tied_embeddings,
        rs=rs,
        rs_at_edges=x.tensor_par_comm_type == "p2p_rs_ag",
        tiled=x.tensor_par_overlap != "none",
        pipe=x.tensor_par_overlap == "pipe",
        training=x.training,
        recompute_all=everything,
        recompute_attention=attention,
        regather_attention=attention or x.seq_par_ag_redo,
        regather_mlp=everything or x.seq_par_ag_redo,
    )
