"""What a training launch is, as far as memory depends on it: sizes, degrees, arguments, software.

A `Launch` holds no bytes and reads no file. Its words are those of Megatron-Core, and its defaults
those of that trainer's newest release; `search.engines` makes one of a launch's arguments. Sizes
are elements of one replica, before any degree divides them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from autopar.errors import InputError
from autopar.pipeline.orders import rank_of
from autopar.pipeline.schedules import Schedule, schedule_of_chunks
from autopar.records import Record, replace
from autopar.run.plan import Module
from autopar.run.rules import DEGREES, EVEN_LAYERS, LAUNCH, OPTIMIZER, PRECISION, refuse
from autopar.run.runtime import BUCKETS, Buckets, Keeper, Zero
from autopar.training.adapters import Adapters
from autopar.training.offload import Offload

AttentionKernel = Literal["fused", "flash", "unfused", "local"]
"""cuDNN's, FlashAttention, products with a softmax of their own, and those of Megatron itself."""


HOPPER = ("H100", "H200", "H800", "H20", "GH200")
BLACKWELL = ("GB200", "GB300", "B200", "B300")
"""How names of devices begin."""


def default_attention(gpu: str, *, deterministic: bool = False) -> AttentionKernel:
    """Return the kernel of attention that Transformer Engine takes by itself on a device."""
    name = gpu.upper()
    # cuDNN's has a deterministic backward on Hopper alone
    fused = name.startswith(HOPPER) or (name.startswith(BLACKWELL) and not deterministic)
    return "fused" if fused else "flash"


class Latent(Record):
    """Widths of multi-head latent attention: queries and keys pass through narrow projections."""

    query_rank: int | None
    """None: queries are projected at once."""
    key_value_rank: int
    key_width: int
    """Of one head, the part without positions."""
    rotary_width: int
    """The part with positions, of a key one for all heads."""
    value_width: int


class Attention(Record):
    """The attention of every layer."""

    heads: int
    groups: int
    """Of keys and values."""
    width: int
    """Of a query and a key of one head."""
    head_norms: bool = False
    """Norms of queries and keys; of MLA norms of the narrow projections."""
    dropout: float = 0.1
    latent: Latent | None = None
    window: int | None = None
    """Tokens that a query sees at most, in the layers that have a window; None: in none. It changes
    time alone: kernels save no scores."""
    whole_every: int = 0
    """Every so many layers one has no window; 0: all have it."""

    @property
    def query_width(self) -> int:
        """Of a query of one head, with positions."""
        latent = self.latent
        return self.width if latent is None else latent.key_width + latent.rotary_width

    @property
    def value_width(self) -> int:
        """Of a value of one head."""
        return self.width if self.latent is None else self.latent.value_width

    def has_window(self, layer: int) -> bool:
        """Return whether queries of a layer, counted from 0, see a window alone."""
        # Megatron-Core's `is_layer_window_attention`: of layers counted from 1 every n-th is whole
        whole = self.whole_every > 0 and (layer + 1) % self.whole_every == 0
        return self.window is not None and not whole


class Experts(Record):
    """The mixture of experts of some layers."""

    number: int
    per_token: int
    ffn: int
    """Width of one expert."""
    shared_ffn: int = 0
    """Width of what every token visits; 0 for none."""
    dispatcher: Literal["allgather", "alltoall", "flex"] = "allgather"
    capacity: float | None = None
    """Tokens that an expert takes of a batch, over the mean of all experts; more are dropped
    (`--moe-expert-capacity-factor`). None: none are."""
    padded_capacity: bool = False
    """Experts compute as many tokens as they could take (`--moe-pad-expert-input-to-capacity`)."""
    router_fp32: bool = False
    """Probabilities are fp32 (`--moe-router-dtype`), and with `allgather` what comes back is."""
    grouped: bool = False
    """The experts of a rank are multiplied by one kernel."""
    fused_permutation: bool = False
    fused_weighting: bool = True
    """The activation multiplies with the router's probabilities and saves no product before."""
    fused_mlp: bool = False
    """An expert's products and what is between them are one kernel, which changes time alone."""
    skew: float | None = None
    """Tokens of the busiest rank over the mean, at the worst step; None: as in published runs."""


class Model(Record):
    """The sizes of a decoder-only transformer."""

    hidden: int
    ffn: int
    attention: Attention
    vocab: int
    """Without padding."""
    vocab_divisor: int = 128
    expert_layers: tuple[bool, ...]
    """For every layer whether its MLP is the mixture; as long as there are layers."""
    experts: Experts | None = None
    gated: bool = False
    fused_gate: bool = True
    """Gate and product are one kernel that saves its input alone."""
    biases: bool = True
    """Of all linear layers, the router's left out."""
    qkv_biases: bool = True
    """Of the projection to queries, keys and values."""
    tied: bool = True
    norm: Literal["layer", "rms"] = "layer"
    norms: int = 2
    """Of the hidden size in a layer: 4 where attention and MLP have one behind them as well, 1
    where they stand side by side (activations are then those of layers that do not)."""
    positions: Literal["learned", "rotary", "none"] = "learned"
    max_positions: int = 0
    """Rows of learned positions."""
    rotary_share: float = 1.0
    """Of a head's width that carries positions."""
    fused_rotary: bool = True
    """Queries and keys are rotated by one kernel that saves nothing."""
    hidden_dropout: float = 0.1
    mtp: int = 0
    """Modules that predict further tokens."""
    mtp_repeated: bool = False
    """All of them are one module."""

    @property
    def num_layers(self) -> int:
        """Layers without the modules of further tokens."""
        return len(self.expert_layers)

    @property
    def rotary_width(self) -> int:
        """Of a query or key of one head, the part that carries positions."""
        latent = self.attention.latent
        if latent is not None:
            return latent.rotary_width
        return int(self.attention.width * self.rotary_share)

    @property
    def norm_tensors(self) -> int:
        """Vectors of a norm: its scale, and of LayerNorm its shift."""
        return 2 if self.norm == "layer" else 1

    @property
    def gates(self) -> int:
        """Matrices in front of the activation."""
        return 2 if self.gated else 1


Chunk = tuple[bool, tuple[int, ...], int, bool]
"""Of a pipeline: whether it embeds, its layers by number, its MTP modules, whether it has the
head."""


def even_chunks(
    num_layers: int,
    stages: int,
    chunks: int = 1,
    *,
    mtp: int = 0,
    ends: tuple[int, int] = (0, 0),
    schedule: Schedule | None = None,
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage with layers as evenly as an interleaved pipeline has them.

    ends : how many layers fewer the first and the last chunk have than the others, such as 1 where
    the embedding counts as a layer. schedule : as `chunks_of_sizes`. Raises InputError where layers
    do not divide.
    """
    parts = stages * chunks
    total = num_layers + sum(ends)
    refuse((EVEN_LAYERS,), {"layers": total, "pp": stages, "vpp": chunks})
    sizes = [total // parts] * parts
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    if min(sizes) < 0:
        raise InputError(f"{num_layers} layers are too few for {parts} parts of the pipeline")
    return chunks_of_sizes(sizes, stages, mtp=mtp, schedule=schedule)


def chunks_of_sizes(
    sizes: Sequence[int],
    stages: int,
    *,
    mtp: int | Sequence[int] = 0,
    schedule: Schedule | None = None,
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage from the layers of all parts in execution order.

    mtp : modules of further tokens of the last part, or of each. schedule : places the parts on the
    stages; None: one after the other, and again from the first.
    """
    parts = len(sizes)
    found: list[list[Chunk]] = [[] for _ in range(stages)]
    first = 0
    for part, size in enumerate(sizes):
        layers = tuple(range(first, first + size))
        first += size
        last = part == parts - 1
        stage = part % stages if schedule is None else rank_of(schedule, part, stages)
        further = (mtp if last else 0) if isinstance(mtp, int) else mtp[part]
        found[stage].append((part == 0, layers, further, last))
    return tuple(map(tuple, found))


class Degrees(Record):
    """How a model is split over ranks."""

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    """Of experts."""
    sequence_parallel: bool = False
    chunks: tuple[tuple[Chunk, ...], ...]
    """Of every pipeline stage."""
    group: int = 0
    """Micro-batches of a chunk that are run in a row; 0: as many as there are stages."""
    heads_exchanged: bool = False
    """Context ranks exchange heads for tokens around attention (`--cp-comm-type a2a`), no ring."""
    rings: int = 1
    """Where they do so within groups of neighbours, how many groups there are, whose ranks pass
    keys and values on in rings of so many (`a2a+p2p`)."""
    keys_gathered: bool = False
    """Context ranks gather all keys and values before attention (`all_gather`)."""
    overlap_experts: bool = False
    """Exchanges of a micro-batch run beside another: one chunk more is warmed up."""
    schedule: Schedule | None = None
    """Of the pipeline; None: 1F1B, interleaved where a stage has several chunks."""

    def __post_init__(self) -> None:
        """Refuse degrees that do not divide."""
        refuse(
            DEGREES,
            {
                **{name: getattr(self, name) for name in ("world", "tp", "cp", "pp", "ep", "etp")},
                "rings": self.rings,
                "heads_exchanged": self.heads_exchanged,
                "keys_gathered": self.keys_gathered,
                "laid_stages": len(self.chunks),
                "chunk_counts": len(set(map(len, self.chunks))),
            },
        )

    @property
    def dp(self) -> int:
        """Replicas of the dense layers."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Replicas of the experts."""
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def scattered(self) -> bool:
        """Whether tensor ranks hold parts of the sequence between their products."""
        return self.sequence_parallel and self.tp > 1

    @property
    def vpp(self) -> int:
        """Chunks of a stage."""
        return len(self.chunks[0])

    @property
    def pipeline(self) -> Schedule:
        """The schedule by name, whether it was told or not."""
        return self.schedule or schedule_of_chunks(self.vpp)


class Precision(Record):
    """In what is computed and kept."""

    kind: Literal["bf16", "fp16", "fp32"] = "bf16"
    fp8: bool = False
    fp8_weights: bool = False
    """Weights themselves are 8 bits (`--fp8-param-gather`), not a copy of them."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    gradients_bf16: bool = False
    gradients_fp32: bool = False
    """Asked for (`--accumulate-allreduce-grads-in-fp32`), which fp16 does not do by itself."""
    fp8_attention: bool = False
    """Scores are products of 8 bits, too, which changes time alone."""
    fp4: bool = False
    """Products of layers are NVFP4: 4 bits, a scale for each 16 and one of the tensor."""
    fp4_weights: bool = False
    """Weights themselves are 4 bits (`--fp4-param-gather`), not a copy of them."""
    wide_ends: tuple[int, int] = (0, 0)
    """The first and the last so many layers are computed in 16 bits (`--first-last-layers-bf16`,
    `--num-layers-at-start-in-bf16`, `--num-layers-at-end-in-bf16`)."""

    def __post_init__(self) -> None:
        """Refuse two low precisions at once, and low precision beside another kind."""
        refuse(
            PRECISION,
            {
                "precision": self.kind,
                "fp8": self.fp8,
                "fp4": self.fp4,
                "fp4_weights": self.fp4_weights,
                "least_end": min(self.wide_ends),
            },
        )

    @property
    def low(self) -> bool:
        """Whether products are of fewer than 16 bits."""
        return self.fp8 or self.fp4

    @property
    def low_bytes(self) -> float:
        """Of an element of what such products take: NVFP4 with its 8-bit scales of 16 elements.

        Scales of 8-bit formats, of 32 elements and more, are left out.
        """
        return 0.5 + 1.0 / 16.0 if self.fp4 else 1.0

    @property
    def low_weights(self) -> bool:
        """Whether weights are kept as products take them, and not in 16 bits beside."""
        return self.fp4_weights if self.fp4 else self.fp8_weights

    @property
    def element_bytes(self) -> int:
        """Of activations and weights."""
        return 4 if self.kind == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Of the buffer in which gradients are added up."""
        # Megatron adds up in fp32 for bf16 alone, where it is not told otherwise
        wide = {"fp32": True, "bf16": not self.gradients_bf16, "fp16": self.gradients_fp32}
        return 4 if wide[self.kind] else 2

    @property
    def unscaled_bytes(self) -> int:
        """Of the fp32 copy of a gradient that fp16's optimizer makes for its step."""
        # `.float()` of what is fp32 already is no copy
        return 4 if self.kind == "fp16" and self.gradient_bytes == 2 else 0


class Optimizer(Record):
    """Who keeps which state."""

    kind: Literal["adam", "adam8bit", "muon"] = "adam"
    """Muon keeps a momentum of matrices, and of other weights what Adam keeps; adam8bit two moments
    of 8 bits, and a scale of each 256 (Dettmers et al., arXiv 2110.02861)."""
    sharding: Literal["none", "distributed", "zero2", "fsdp"] = "none"
    """The optimizer's states over data-parallel ranks (Megatron's distributed optimizer, ZeRO-1),
    gradients as well, or weights as well (Megatron-FSDP; ZeRO-3 and FSDP2 keep the same)."""
    moments_bytes: int = 8
    """Of a parameter's two moments: 4 each in fp32, 2 in 16 bits."""
    master_bytes: int = 4
    """Of a parameter's fp32 weight: 2 where what a bf16 weight has of it is not kept twice, 0 where
    16-bit weights are trained as they are."""
    offload: float = 0.0
    """Share of the states that lie, and are updated, on the host (`--optimizer-offload-fraction`;
    DeepSpeed's `offload_optimizer`)."""
    offload_master: bool = False
    """fp32 weights go with the moments, as Megatron-Core has it beside
    `--use-precision-aware-optimizer` alone, and DeepSpeed always."""
    offload_weights: bool = False
    """The weights lie on the host, too (DeepSpeed's `offload_param`, FSDP's CPUOffloadPolicy)."""
    overlap_offload: bool = False
    """Copies of one part run beside the update of another (`--overlap-cpu-optimizer-d2h-h2d`)."""
    instances: int = 1
    """Of the distributed optimizer: each shards its states over its own part of the ranks."""
    overlap_gradients: bool = False
    bucket: int | None = None
    """Parameters of a bucket, where it is given."""
    padded_buckets: bool = False
    """Buckets end on multiples of 65,536 elements."""

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        refuse(
            OPTIMIZER,
            {
                "optimizer": self.kind,
                "offload": self.offload,
                "offload_weights": self.offload_weights,
            },
        )

    @property
    def adam_bytes(self) -> float:
        """Of a parameter's two moments, as its kind keeps them."""
        if self.kind == "adam8bit":
            # a byte each, and an fp32 scale of 256
            return 2.0 * (1.0 + 4.0 / 256.0)
        return float(self.moments_bytes)


class Recompute(Record):
    """What the backward computes again."""

    layers: Literal["none", "uniform", "block"] = "none"
    number: int = 0
    """Layers that are one unit (uniform), or that are recomputed of a chunk (block)."""
    modules: frozenset[Module] = frozenset()


class Software(Record):
    """The device and the libraries below the trainer, and what differs between their releases."""

    gpu: str = "H100"
    attention: AttentionKernel = "fused"
    local_layers: bool = False
    """Layers are Megatron's own, not those of Transformer Engine."""
    cublas_config: str | None = None
    """CUBLAS_WORKSPACE_CONFIG, such as `:4096:8`."""
    expandable_segments: bool = False
    fused_accumulation: bool = True
    """Weight gradients are added to the buffer by the kernel that makes them."""
    kept_dummies: bool = True
    """What stands for such gradients is kept, one of each shape."""
    grouped_workspaces: int = 4
    """Workspaces of grouped products besides that of the others."""
    expert_workspace: bool = True
    """Megatron's own layers have a workspace where there are experts."""
    saved_expert_output: bool = False
    """Grouped experts save their output in the place of the weighted activation."""
    compiled_experts: bool = False
    """Grouped experts are those before Transformer Engine's, whose activation and weighting are
    compiled into one kernel."""
    unfused_backward_copies: int = 4
    """Of the scores, in the backward of attention that is not fused."""
    fused_loss_copies: int = 5
    """Of the 16-bit logits, in the native fused cross-entropy."""
    regathered_experts: bool = True
    """Gathered tokens of split experts are saved a second time."""


Checkpointing = Literal["none", "op", "layers", "full"]
"""What layers of torch compute again: nothing, all but attention and every other product
(torchtitan's selective `op`), every n-th layer, all of them."""


class TorchTrainer(Record):
    """How a trainer with layers of torch keeps states and computes: FSDP2, DeepSpeed, replicas.

    Where a launch has one, its `optimizer`, `recompute` and `software` say no more than what a step
    time asks for, and memory is counted by `autopar.price.sharded`.
    """

    keeper: Keeper
    zero: Zero = 3
    """FSDP2 that does not reshard behind the forward is 2."""
    replicas: int = 1
    """Copies of all states: their ranks divide nothing among each other (`dp_replicate`)."""
    wide_gradients: bool | None = None
    """Gradients are summed in fp32; None: as the trainer does unless it is told."""
    each_micro_batch: bool = True
    """Gradients are reduced behind every micro-batch, or there is one."""
    buckets: Buckets = BUCKETS
    one_root: bool = False
    """Embedding, last norm and head are one unit (torchtitan until early 2025)."""
    gathered_fp8: bool = False
    """Weights of products are gathered in 8 bits (torchao)."""
    layers: Literal["torchtitan", "transformers"] = "torchtitan"
    compiled: bool = False
    """Each layer by torch.compile, whose partitioner keeps less."""
    checkpoint: Checkpointing = "none"
    every: int = 1
    """Of `layers`: each so-manieth one is computed again."""
    fused_norms: bool = True
    """RMSNorm is one kernel (torch 2.9 and later), and keeps no fp32 copies."""
    repeated_heads: bool = False
    """Keys and values are copied for every head of queries."""
    loss: Literal["whole", "compiled", "chunked"] = "whole"
    """Cross-entropy of fp32 logits, the same by torch.compile, or of one part of the tokens after
    the other."""
    loss_chunks: int = 1
    loss_parallel: bool = True
    """Tensor ranks have a part of the vocabulary each until the loss."""
    stage_outputs: bool = False
    """The last stage of a pipeline keeps the logits of every micro-batch (torch before 2.9)."""


class Launch(Record):
    """A model, its batch and how it is trained."""

    name: str = ""
    model: Model
    degrees: Degrees
    seq: int
    micro_batch: int
    global_batch: int
    steps: int | None = None
    """Of the run, of which the worst routing counts; None: thousands."""
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    recompute: Recompute = Recompute()
    software: Software = Software()
    loss_fusion: Literal["none", "native", "te"] = "none"
    attention_masks: bool = True
    """The data loader makes a mask of every micro-batch."""
    tensor_overlap: bool = False
    """Products run beside the transfers of tensor parallelism (`--tp-comm-overlap`)."""
    graphs: Literal["none", "partial", "full"] = "none"
    """CUDA graphs of parts of layers, or of the whole step: time alone, since nobody has counted
    the memory that they keep."""
    deferred_head: int | None = None
    """Micro-batches whose head gradients wait (`--defer-embedding-wgrad-compute`); None: none."""
    trainer: TorchTrainer | None = None
    """None: Megatron-LM."""
    adapters: Adapters | None = None
    """What is trained beside frozen weights; None: all weights are trained."""
    offload: Offload = Offload()
    """Activations that wait on the host."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        model, degrees, optimizer = self.model, self.degrees, self.optimizer
        placed = [n for stage in degrees.chunks for chunk in stage for n in chunk[1]]
        experts, trainer = model.experts, self.trainer
        refuse(
            LAUNCH,
            {
                "global_batch": self.global_batch,
                "micro_batch": self.micro_batch,
                "dp": degrees.dp,
                "cp": degrees.cp,
                "tp": degrees.tp,
                "pp": degrees.pp,
                "ep": degrees.ep,
                "seq_length": self.seq,
                "heads": model.attention.heads,
                "layers": model.num_layers,
                "placed_layers": len(placed),
                "misplaced_layers": sorted(placed) != list(range(model.num_layers)),
                "mixtures": any(model.expert_layers),
                "has_experts": experts is not None,
                "experts": None if experts is None else experts.number,
                "offload_layers": self.offload.layers,
                "offloads": self.offload.any,
                "recomputes": self.recompute != Recompute(),
                "torch": trainer is not None,
                "keeper": "" if trainer is None else trainer.keeper,
                "zero": 0 if trainer is None else trainer.zero,
                "optimizer": optimizer.kind,
                "sharding": optimizer.sharding,
                "offload": optimizer.offload,
                "offload_weights": optimizer.offload_weights,
                "adapters": self.adapters is not None,
            },
        )

    def of_layer(self, layer: int) -> Launch:
        """Return the launch as a layer computes, which may be in 16 bits at the ends of a model."""
        precision = self.precision
        first, last = precision.wide_ends
        if not precision.low or first <= layer < self.model.num_layers - last:
            return self
        plain = replace(
            precision, fp8=False, fp8_weights=False, fp4=False, fp4_weights=False,
            fp8_attention=False,
        )  # fmt: skip
        return replace(self, precision=plain)

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.global_batch // (self.micro_batch * self.degrees.dp)

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a context rank."""
        return self.micro_batch * self.seq // self.degrees.cp

    @property
    def scattered_tokens(self) -> int:
        """Of a micro-batch between the products of tensor ranks."""
        return self.tokens // self.degrees.tp if self.degrees.scattered else self.tokens

    @property
    def padded_vocab(self) -> int:
        """The vocabulary with the rows that make it divisible."""
        unit = self.model.vocab_divisor * self.degrees.tp
        return math.ceil(self.model.vocab / unit) * unit
