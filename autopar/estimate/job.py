"""What is trained and how: the question that a step time answers.

A `Job` names blocks of a model, their sizes and the degrees, precision and recomputation of a
launch, in the words of trainers. It holds no times, and neither a machine nor a trainer's software:
those are `autopar.estimate.card`, `site` and `stack`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from autopar.errors import InputError
from autopar.model import LayerSpec, ModelSpec, head_dim
from autopar.records import dataclass

__all__ = [
    "Attention",
    "Block",
    "Experts",
    "Job",
    "LatentAttention",
    "Mamba",
    "Mlp",
    "Module",
    "Precision",
    "attention_matrices",
    "blocks_of",
    "mamba_inputs",
    "parameters",
    "stage_blocks",
]

Precision = Literal["bf16", "fp16", "fp32", "fp8", "fp8_block", "mxfp8", "nvfp4"]
Module = Literal[
    "layernorm",
    "core_attn",
    "mla_up_proj",
    "attention",
    "mlp",
    "moe_act",
    "moe",
    "shared_experts",
    "per_op",
]
"""What recomputation can be of, in Megatron-Core's words; `per_op` is torchtitan's: everything but
attention and every other product."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Widths of multi-head latent attention (DeepSeek-V2): queries and keys are compressed."""

    query_rank: int
    key_value_rank: int
    rotary_width: int
    """Of each key, the part that carries positions and is one for all heads."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of a block."""

    heads: int
    kv_heads: int
    width: int
    """Of a query and a key of one head."""
    value_width: int | None = None
    """Of a value of one head, where it is another."""
    window: int | None = None
    """Tokens that a query sees at most; None: all before it."""
    causal: bool = True
    rotary: bool = True
    head_norms: bool = False
    """Queries and keys of every head pass a norm."""
    latent: LatentAttention | None = None

    @property
    def query(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.width

    @property
    def key_value(self) -> int:
        """Width of keys and values of all heads together."""
        return self.kv_heads * (self.width + (self.value_width or self.width))

    @property
    def value(self) -> int:
        """Width of the result of all heads."""
        return self.heads * (self.value_width or self.width)


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A dense MLP of two matrices, or of three where it is gated."""

    width: int
    gated: bool = False


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of MLPs, of which every token visits a few."""

    number: int
    per_token: int
    width: int
    gated: bool = True
    shared_width: int = 0
    """Of an MLP that every token visits; 0 for none."""
    latent: int | None = None
    """Width to which tokens are projected for the experts; None: they keep the model's."""


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """A selective state-space mixer (Mamba-2)."""

    heads: int
    width: int
    """Of one head."""
    state: int
    groups: int

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.width


@dataclass(frozen=True, kw_only=True)
class Block:
    """A run of equal layers: what mixes tokens, then what works on each of them; each may lack."""

    number: int
    hidden: int
    attention: Attention | None = None
    mamba: Mamba | None = None
    mlp: Mlp | Experts | None = None
    cross_tokens: int | None = None
    """Of another sequence, such as an encoder's, that its attention sees in a part of its own."""

    @property
    def norms(self) -> int:
        """Norms, and residual sums: one before and after each part."""
        parts = (self.attention, self.mamba, self.mlp, self.cross_tokens)
        return sum(part is not None for part in parts)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, how it is split, and what a trainer is told; sizes are elements, bytes are bytes."""

    name: str
    blocks: tuple[Block, ...]
    """In execution order."""
    vocab: int
    seq: int
    micro_batch: int
    global_batch: int
    """Sequences of a step."""
    tied: bool = False
    gpus: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    vpp: int = 1
    """Chunks of layers that a pipeline stage holds."""
    sequence_parallel: bool = False
    zero: int = 0
    """What data-parallel ranks shard: 1 optimizer, 2 gradients, 3 weights as well."""
    reshard: bool = True
    """ZeRO-3: weights are gathered again for the backward."""
    precision: Precision = "bf16"
    recompute: frozenset[Module] | Literal["full"] = frozenset()
    attention_kernel: str | None = None
    """One of the card's kernels, or "unfused"; None: what the stack uses."""
    ring_balanced: bool = True
    """Context-parallel ranks have equal shares of a causal triangle."""
    low_precision_attention: bool = False
    graphs: Literal["none", "partial", "full"] = "none"
    """CUDA graphs: of parts of layers, or of the whole iteration."""
    fused_experts: bool = False
    """An expert's MLP is one kernel."""
    dispatcher: Literal["all_to_all", "fused"] = "all_to_all"
    overlap_experts: bool = False
    """Dispatch and combine of one micro-batch run under another's compute."""
    overlap_tensor: bool = True
    """Tensor-parallel collectives run under products, as far as the stack can."""
    overlap_gradients: bool = True
    gradient_bytes: float | None = None
    """Of an element when data-parallel ranks reduce; None: what the stack does."""
    accumulation_bytes: float | None = None
    """Moved per weight and micro-batch to add a gradient; None: what the stack does."""
    optimizer_bytes: float | None = None
    """Moved per parameter that a rank updates; None: what the stack does."""
    row_scales: bool = False
    """FP8 with a scale per row, which libraries run slower than one per tensor."""
    experts_only: bool = False
    """Of low precision: only the experts' products."""
    frozen: bool = False
    """The base weights are not trained (LoRA): no weight gradients, no optimizer of them."""
    optimizer: bool = True
    mtp: int = 0
    """Layers that predict further tokens, each with a head of its own."""
    skew: float = 1.0
    """Tokens of the busiest rank of experts over the mean."""
    notes: tuple[str, ...] = field(default=())

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step in one pipeline."""
        return max(1, self.global_batch // (self.micro_batch * self.dp))

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.micro_batch * self.seq / self.cp


def blocks_of(spec: ModelSpec) -> tuple[Block, ...]:
    """Return the blocks of a model spec; raises InputError for what they cannot say."""
    blocks = []
    for index, layer in enumerate(spec.layers):
        # cross-attention reads what the layer type in front of it, the encoder, puts out
        other = spec.layers[index - 1].seq_length if index else layer.seq_length
        blocks.append(_block(layer, other if layer.cross_attention else None))
    return tuple(blocks)


def _block(layer: LayerSpec, cross_tokens: int | None) -> Block:
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        raise InputError("heads and MLP width are unknown; give a model spec (--model)")
    mlp: Mlp | Experts = Mlp(width=layer.ffn_hidden_size, gated=layer.gated_mlp)
    if layer.num_experts is not None:
        mlp = Experts(
            number=layer.num_experts,
            per_token=layer.experts_per_token or layer.num_experts,
            width=layer.ffn_hidden_size,
            gated=layer.gated_mlp,
        )
    return Block(
        number=layer.num_layers,
        hidden=layer.hidden_size,
        attention=Attention(
            heads=layer.num_heads,
            kv_heads=layer.num_kv_heads or layer.num_heads,
            width=head_dim(layer),
            causal=layer.causal,
            rotary=layer.gated_mlp,
            head_norms=layer.qk_norms,
        ),
        mlp=mlp,
        cross_tokens=cross_tokens,
    )


# --------------------------------------------------------------------------------------------------
# Counts


def parameters(block: Block) -> tuple[float, float]:
    """Return the weights of one layer of a block: of its experts, and of everything else."""
    h = block.hidden
    dense = float(h * block.norms)
    experts = 0.0
    attention = block.attention
    if attention is not None:
        matrices = sum(n * k for n, k in attention_matrices(h, attention)) + attention.value * h
        # attention to another sequence has matrices of its own
        dense += matrices * (1 if block.cross_tokens is None else 2)
    if block.mamba is not None:
        mamba = block.mamba
        dense += h * mamba_inputs(mamba) + mamba.inner * h
    if isinstance(block.mlp, Mlp):
        dense += (3 if block.mlp.gated else 2) * h * block.mlp.width
    elif block.mlp is not None:
        mlp = block.mlp
        matrices = 3 if mlp.gated else 2
        width = mlp.latent or h
        experts = float(mlp.number * matrices * width * mlp.width)
        dense += h * mlp.number + matrices * h * mlp.shared_width
        if mlp.latent:
            dense += 2 * h * mlp.latent
    return experts, dense


def attention_matrices(hidden: int, attention: Attention) -> tuple[tuple[int, int], ...]:
    """Return (outputs, inputs) of the projections in front of attention."""
    latent = attention.latent
    if latent is None:
        return ((attention.query + attention.key_value, hidden),)
    values = attention.value_width or attention.width
    # DeepSeek-V2 (arXiv 2405.04434), section 2.1: compress, and expand to the heads
    return (
        (latent.query_rank + latent.key_value_rank + latent.rotary_width, hidden),
        (attention.query, latent.query_rank),
        (attention.heads * (attention.width - latent.rotary_width + values), latent.key_value_rank),
    )


def mamba_inputs(mamba: Mamba) -> int:
    """Return the outputs of Mamba-2's input projection: gate, values, states of groups, steps."""
    return 2 * mamba.inner + 2 * mamba.groups * mamba.state + mamba.heads


def stage_blocks(job: Job) -> tuple[tuple[Block, ...], ...]:
    """Return the blocks of every pipeline stage, with whole layers.

    Layers that do not divide evenly are fewest on the stages with embedding and head, which have
    work of their own. Raises InputError where a stage would have no layer.
    """
    total = sum(block.number for block in job.blocks)
    if total < job.pp:
        raise InputError(f"{total} layers are too few for pp {job.pp}: a stage has at least one")
    counts = [total // job.pp] * job.pp
    # middle stages first; then the last and the first
    for stage in [*range(1, job.pp - 1), 0, job.pp - 1][: total % job.pp]:
        counts[stage] += 1
    queue = [(block, block.number) for block in job.blocks]
    stages = []
    for count in counts:
        blocks = []
        while count and queue:
            block, left = queue.pop(0)
            taken = min(left, count)
            blocks.append(_resized(block, taken))
            count -= taken
            if left > taken:
                queue.insert(0, (block, left - taken))
        stages.append(tuple(blocks))
    return tuple(stages)


def _resized(block: Block, number: int) -> Block:
    from dataclasses import replace

    return block if number == block.number else replace(block, number=number)
