"""Job: model, degrees and training settings of one step, the input of time estimates.

A `Job` contains the layers of a model in blocks, and the degrees, precision and recomputation of a
run. Times, machine and software stack are in `autopar.rates.card`, `site` and `stack`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, islice
from typing import Literal, NamedTuple

from autopar.errors import InputError
from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.records import Record, replace
from autopar.run.architecture import (
    Attention,
    Experts,
    Layer,
    Mlp,
    Recurrent,
    input_matrices,
    rank_matrices,
)
from autopar.run.model import ModelSpec
from autopar.run.of_plan import layers_of_spec
from autopar.run.runtime import HostAdam
from autopar.training.adapters import Adapters, Target, adapted_widths, adapter_elements

Precision = Literal["bf16", "fp16", "fp32", "fp8", "fp8_block", "mxfp8", "nvfp4"]
Module = Literal[
    "layernorm",
    "core_attn",
    "mla_up_proj",
    "gdn_norm_out",
    "attention",
    "mlp",
    "moe_act",
    "moe",
    "shared_experts",
    "per_op",
]
"""Modules that can be recomputed, named as in Megatron-Core. `per_op` is torchtitan's selective
mode, which recomputes everything except attention and every second GEMM."""
FP32_STATES = 12.0
"""Bytes per parameter of two fp32 moments and an fp32 weight; default of `Job.state_bytes`."""
Recomputation = frozenset[Module] | Literal["full"]


class Block(Record):
    """A group of equal layers: token mixers, then an MLP or experts; each part may be missing."""

    number: int
    hidden: int
    attention: Attention | None = None
    recurrent: Recurrent | None = None
    mlp: Mlp | Experts | None = None
    biases: bool = False
    """True if linear layers have biases."""
    cross_tokens: int | None = None
    """Tokens of the sequence that cross-attention reads, such as the encoder output; None without
    cross-attention."""
    elementwise: int = 0
    """Further elementwise operations per layer, as in `Layer`."""
    extra: int = 0
    """Parameters of a layer without a GEMM over tokens, as in `Layer`."""
    num_norms: int | None = None
    """Number of norms per layer; None for one before each part. It is 1 if parts run in parallel,
    and twice the number of parts with norms before and after each."""
    recompute: Recomputation | None = None
    """Recomputation of the block; None for that of the job. `precision`, `zero`, `tp` and `cp` have
    the same default."""
    precision: Precision | None = None
    offloaded_bytes: float = 0.0
    """Offloaded activation bytes of one layer and micro-batch, per rank."""
    zero: int | None = None
    tp: int | None = None
    cp: int | None = None
    """Tensor and context degrees of the block; None for those of the job. The time of
    redistribution between blocks with different degrees is not estimated."""

    @property
    def sums(self) -> int:
        """Number of residual additions, one after each part."""
        parts = (self.attention, self.recurrent, self.mlp, self.cross_tokens)
        return sum(part is not None for part in parts)

    @property
    def norms(self) -> int:
        """Number of norms over the hidden size per layer."""
        return self.sums if self.num_norms is None else self.num_norms


class Matrices(NamedTuple):
    """Equal weight matrices that Muon orthogonalizes, each as a whole on one rank."""

    rows: int
    columns: int
    number: int
    ranks: int
    """Data-parallel ranks among which the matrices are distributed; 1: every rank has them all."""


class Job(Record):
    """A model, its parallel strategy and training settings; sizes in elements."""

    name: str
    blocks: tuple[Block, ...]
    """Blocks in execution order."""
    vocab: int
    """Rows of embedding and head; 0 for a model of images or videos."""
    seq: int
    micro_batch: int
    global_batch: int
    """Global batch size, sequences per step."""
    tied: bool = False
    gpus: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    """Expert tensor degree: number of ranks that shard each expert. All of them receive the tokens
    sent to any of them."""
    vpp: int = 1
    """Virtual pipeline size: model chunks per stage."""
    schedule: Schedule | None = None
    """Pipeline schedule; None: 1F1B, interleaved if a stage has several chunks."""
    stage_layers: tuple[int, ...] = ()
    """Number of layers of every stage; empty for an even partition by `stage_blocks`."""
    vocab_tp: int | None = None
    """Tensor degree of embedding and head; None for `tp`."""
    vocab_zero: int | None = None
    """ZeRO stage of embedding and head; None for `zero`."""
    sequence_parallel: bool = False
    zero: int = 0
    """ZeRO stage: data-parallel ranks shard nothing (0), optimizer states (1), also gradients (2),
    also weights (3)."""
    replicas: int = 1
    """Number of HSDP replicas or distributed-optimizer instances. Neighbouring ranks form a
    sharding group; gradients are also reduced over the replicas."""
    reshard: bool = True
    """True if ZeRO-3 gathers weights again for the backward."""
    precision: Precision = "bf16"
    recompute: Recomputation = frozenset()
    attention_kernel: str | None = None
    """One of the card's attention kernels, or "unfused"; None for the default of the stack."""
    torch_layers: bool = False
    """True for layers of torchtitan or transformers: separate matrices of queries, keys, values,
    gate and up, recomputation that ends before its last GEMM, and a context-parallel all-gather of
    the keys and values of all heads."""
    heads_exchanged: bool = False
    """True if context-parallel ranks exchange heads for tokens around attention (Ulysses)."""
    rings: int = 1
    """Ring size if context parallelism combines all-to-all with ring attention: number of groups of
    neighbouring ranks that exchange heads. 1: no combination."""
    keys_gathered: bool = False
    """True if context-parallel ranks all-gather keys and values before attention."""
    low_precision_attention: bool = False
    low_precision_head: bool = False
    """True if the head runs in the low precision of the layers."""
    tiled_loss: bool = False
    """True if head and loss run in tiles, and the head again in the backward pass (TRL)."""
    fused_rotary: bool = True
    """True if rotary positions are applied by one kernel."""
    graphs: Literal["none", "partial", "full"] = "none"
    """CUDA graphs of parts of layers, or of the whole iteration."""
    fused_experts: bool = False
    """True if the MLP of an expert is one kernel."""
    fused_permutation: bool = True
    """True if one kernel permutes tokens by expert."""
    dispatcher: Literal["all_to_all", "allgather", "fused"] = "all_to_all"
    router_fp32: bool = False
    """True if router probabilities are fp32; with `allgather` the combined output is fp32, too."""
    capacity: float | None = None
    """Capacity factor: maximum tokens of an expert over the mean; None if no token is dropped."""
    padded_capacity: bool = False
    """True if each expert is padded to its full capacity."""
    overlap_experts: bool = False
    """True if dispatch and combine overlap with the computation of another micro-batch."""
    overlap_tensor: bool = True
    """True if tensor-parallel collectives overlap with GEMMs, by the fraction that the software
    stack defines."""
    overlap_gradients: bool = True
    reduce_every_micro_batch: bool = False
    """True if gradients are reduced over data-parallel ranks after each micro-batch, not once per
    step."""
    gathered_bytes: float | None = None
    """Bytes per weight when data-parallel ranks all-gather a layer; None: 2, or 4 in fp32."""
    gradient_bytes: float | None = None
    """Bytes per element of the data-parallel gradient reduction; None for the default of the
    stack."""
    accumulation_bytes: float | None = None
    """Bytes moved per weight and micro-batch to add a gradient; None for the default of the
    stack."""
    optimizer_bytes: float | None = None
    """Bytes moved per parameter that a rank updates; None for the default of the stack."""
    row_scales: bool = False
    """True if fp8 uses one scale per row; such GEMMs are slower than with one scale per tensor."""
    experts_only: bool = False
    """True if only expert GEMMs run in low precision."""
    frozen: bool = False
    """True if the base weights are not trained (LoRA): they have no weight gradients and no
    optimizer."""
    adapters: Adapters | None = None
    """Trained adapters, which imply a frozen base; None for no adapters."""
    optimizer: bool = True
    state_bytes: float = FP32_STATES
    """Bytes per parameter of moments and fp32 weight, read and written by each update."""
    paged_bytes: float = 0.0
    """Bytes per parameter of paged moments, all copied from the host and back in each update: an
    upper bound, as those that fit stay on the device."""
    orthogonalized: tuple[tuple[Matrices, ...], ...] = ()
    """Matrices that Muon orthogonalizes, by stage; empty for other optimizers."""
    optimizer_offload: float = 0.0
    """Fraction of the optimizer states kept and updated on the host."""
    offloaded_master: bool = False
    """True if the fp32 weights of the fraction `optimizer_offload` are in host memory as well;
    updated 16-bit weights are copied to the device."""
    overlap_offload: bool = False
    """True if copies between host and device of some optimizer states overlap with the update of
    others."""
    host_adam: HostAdam = "torch"
    offloaded_weights: bool = False
    """True if weights are in host memory and are copied for each forward and backward."""
    mtp: int = 0
    """Number of MTP layers, each with a separate head."""
    mtp_block: tuple[Block, ...] = ()
    """Layers of one MTP layer; empty for those of `mtp_blocks`."""
    stage_mtp: tuple[int, ...] = ()
    """MTP layers per stage; empty if the last stage has all."""
    skew: float = 1.0
    """Tokens of the busiest expert rank over the mean."""
    attended: float | None = None
    """Length of the documents in a packed sequence that attention does not cross, tokens: the mean
    over tokens of the length of their document. None: a sequence is one document."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step in one pipeline."""
        return max(1, self.global_batch // (self.micro_batch * self.dp))

    @property
    def element_bytes(self) -> float:
        """Bytes per element of communication, activations and weights: 2, or 4 in fp32."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def tokens(self) -> float:
        """Tokens per micro-batch on one context-parallel rank."""
        return self.micro_batch * self.seq / self.cp


def blocks_of(spec: ModelSpec) -> tuple[Block, ...]:
    """Return the blocks of a model spec, groups of consecutive equal layers, in execution order.

    A layer type is one block, unless layer types alternate or only some of its layers have a
    sliding window. Raises InputError if heads or MLP width are unknown.
    """
    alike = zip(spec.layer_types, layer_blocks(spec), strict=True)
    runs = ((block, len(list(run))) for (_, block), run in groupby(alike))
    return tuple(replace(block, number=number) for block, number in runs)


def layer_blocks(spec: ModelSpec) -> tuple[Block, ...]:
    """Return one single-layer block per layer of a model, in execution order.

    A layer type with a sliding window can include periodic full-attention layers, whose blocks have
    no window. Raises InputError if heads or MLP width are unknown.
    """
    made: dict[tuple[int, Layer], Block] = {}
    found = []
    for kind, layer in zip(spec.layer_types, layers_of_spec(spec), strict=True):
        if (kind, layer) not in made:
            # Cross-attention reads the output of the preceding layer type, the encoder.
            other = spec.layers[max(kind - 1, 0)].seq_length if layer.cross else None
            made[kind, layer] = block_of_layer(layer, other)
        found.append(made[kind, layer])
    return tuple(found)


def block_of_layer(layer: Layer, cross_tokens: int | None = None) -> Block:
    """Return one layer as a block of a job, without recomputation or other per-layer settings.

    cross_tokens : tokens of the sequence that cross-attention reads; None without cross-attention
    """
    return Block(
        number=1,
        hidden=layer.hidden,
        attention=_attention(layer),
        recurrent=layer.recurrent,
        mlp=layer.mlp,
        biases=layer.biases,
        cross_tokens=cross_tokens or layer.cross_tokens or None,
        # operations in fp32 move twice the bytes
        elementwise=layer.elementwise * (2 if layer.fp32_norms else 1),
        extra=layer.extra,
        num_norms=None if layer.norms == layer.parts else layer.norms,
    )


def halves(block: Block) -> tuple[Block, Block]:
    """Return the mixer and the MLP of a layer as blocks whose kernels add up to those of the layer.

    Cross-attention and operations of the whole layer belong to the mixer.
    """
    if block.mlp is None or (block.attention is None and block.recurrent is None):
        return block, block
    number = block.num_norms
    first, second = (None, None) if number is None else (number - number // 2, number // 2)
    return (
        replace(block, mlp=None, num_norms=first),
        replace(
            block, attention=None, recurrent=None, cross_tokens=None, elementwise=0, extra=0,
            num_norms=second,
        ),
    )  # fmt: skip


def _attention(layer: Layer) -> Attention | None:
    """Return the attention of a layer; MLA gets as many key-value heads as query heads."""
    attention = layer.attention
    if attention is None or attention.latent is None or attention.kv_heads == attention.heads:
        return attention
    return replace(attention, kv_heads=attention.heads)


def type_blocks(spec: ModelSpec) -> tuple[tuple[Block, ...], ...]:
    """Return the blocks of each layer type: two if only some layers have a window, else one."""
    layers = tuple(zip(spec.layer_types, layer_blocks(spec), strict=True))
    found = []
    for kind in range(len(spec.layers)):
        numbers = Counter(block for own, block in layers if own == kind)
        found.append(tuple(replace(block, number=n) for block, n in numbers.items()))
    return tuple(found)


# --------------------------------------------------------------------------------------------------
# Counts


def parameters(block: Block) -> tuple[float, float]:
    """Return (weights of the experts, all other weights) of one layer of a block."""
    h = block.hidden
    dense = float(h * block.norms + block.extra)
    experts = 0.0
    attention = block.attention
    if attention is not None:
        matrices = sum(n * k for n, k in attention_matrices(h, attention)) + attention.value * h
        matrices += sum(n * k for n, k in indexer_matrices(h, attention))
        # Cross-attention has separate matrices.
        dense += matrices * (1 if block.cross_tokens is None else 2)
    if block.recurrent is not None:
        mixer = block.recurrent
        dense += h * (mixer.projected + mixer.inner)
        dense += sum(rows * columns for rows, columns in rank_matrices(mixer))
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


def data_ranks(job: Job) -> int:
    """Return the number of ranks in the reduction of dense gradients, context ranks included."""
    return job.dp * job.cp


def expert_ranks(job: Job) -> int:
    """Return the number of ranks that hold the same experts."""
    return max(1, job.tp * job.cp * job.dp // (job.ep * job.etp))


def data_shards(job: Job) -> int:
    """Return the sharding degree of dense weights: ranks per replica of the sharded states."""
    return max(1, data_ranks(job) // job.replicas)


def expert_shards(job: Job) -> int:
    """Return the sharding degree of experts."""
    return max(1, expert_ranks(job) // job.replicas)


def projection_targets(attention: Attention) -> tuple[tuple[tuple[Target, float], ...], ...]:
    """Return (adapter target, output width) pairs for each matrix of `attention_matrices`.

    With latent attention, matrices of keys and values together are listed under the target `key`.
    """
    latent = attention.latent
    if latent is None:
        names: tuple[Target, ...] = ("query", "key", "value")
        widths = ((1 + attention.gated) * attention.query, *attention.key_projections)
        return (tuple(zip(names, widths, strict=False)),)
    narrow = latent.kv_rank + latent.rotary_width
    values = attention.value_width
    keys = attention.heads * (attention.width - latent.rotary_width + values)
    first: tuple[tuple[Target, float], ...] = (("key", narrow),)
    if latent.query_rank is not None:
        first = (("query", latent.query_rank), *first)
    return (first, (("query", attention.query),), (("key", keys),))


def adapter_parameters(job: Job, block: Block) -> tuple[float, float]:
    """Return (adapter weights of the experts, all other adapter weights) of one layer."""
    adapters, h = job.adapters, block.hidden
    if adapters is None:
        return 0.0, 0.0

    def number(inputs: float, *widths: tuple[Target, float]) -> float:
        return adapter_elements(adapters.rank, adapted_widths(adapters, widths), inputs)

    dense = experts = 0.0
    attention = block.attention
    if attention is not None:
        matrices = attention_matrices(h, attention)
        for targets, (_, inputs) in zip(projection_targets(attention), matrices, strict=True):
            dense += number(inputs, *targets)
        dense += number(attention.value, ("projection", h))
    mixer = block.recurrent
    if mixer is not None:
        dense += sum(number(h, ("mixer_in", width)) for width in input_matrices(mixer))
        dense += number(mixer.inner, ("mixer_out", h))
    if block.mlp is not None:
        mlp = block.mlp
        gates = 2 if mlp.gated else 1
        width = mlp.width if isinstance(mlp, Mlp) else mlp.shared_width
        if width:
            up: list[tuple[Target, float]] = [("fc1", width)] * gates
            dense += number(h, *up) + number(width, ("fc2", h))
        if isinstance(mlp, Experts):
            inner = mlp.latent or h
            first: list[tuple[Target, float]] = [("expert_fc1", mlp.width)] * gates
            each = number(inner, *first) + number(mlp.width, ("expert_fc2", inner))
            experts = each * (job.ep if adapters.shared_by_experts else mlp.number)
    return experts, dense


def attention_matrices(hidden: int, attention: Attention) -> tuple[tuple[int, int], ...]:
    """Return the (output, input) widths of the projections before attention."""
    latent = attention.latent
    if latent is None:
        gate = attention.query if attention.gated else 0
        return ((attention.query + gate + sum(attention.key_projections), hidden),)
    values = attention.value_width
    # DeepSeek-V2 (arXiv 2405.04434), section 2.1: compress, then expand to the heads.
    keys = attention.heads * (attention.width - latent.rotary_width + values)
    narrow = latent.kv_rank + latent.rotary_width
    if latent.query_rank is None:
        # The smaller DeepSeek-V2 models project queries directly.
        return (
            (narrow, hidden),
            (attention.query, hidden),
            (keys, latent.kv_rank),
        )
    return (
        (latent.query_rank + narrow, hidden),
        (attention.query, latent.query_rank),
        (keys, latent.kv_rank),
    )


def indexer_matrices(hidden: int, attention: Attention) -> tuple[tuple[int, int], ...]:
    """Return the (output, input) widths of the matrices of an indexer; empty without one."""
    if attention.indexer is None or attention.latent is None:
        return ()
    return attention.indexer.matrices(hidden, attention.latent.query_rank)


def stage_blocks(job: Job) -> tuple[tuple[Block, ...], ...]:
    """Return the blocks of every pipeline stage.

    Without `Job.stage_layers`, layers are divided evenly; middle stages get the remainder first,
    because the first and the last stage have embedding and head. Three or more blocks of a stage
    are merged where their layers are equal. Raises InputError for fewer layers than stages.
    """
    queue = [(block, block.number) for block in job.blocks]
    stages = []
    for count in _stage_counts(job):
        blocks = []
        while count and queue:
            block, left = queue.pop(0)
            taken = min(left, count)
            blocks.append(_resized(block, taken))
            count -= taken
            if left > taken:
                queue.insert(0, (block, left - taken))
        stages.append(_merged(blocks))
    return tuple(stages)


def _stage_counts(job: Job) -> list[int]:
    """Return the number of layers of every stage; raises InputError like `stage_blocks`."""
    total = sum(block.number for block in job.blocks)
    if total < job.pp:
        raise InputError(f"{total} layers are too few for pp {job.pp}: a stage needs at least one")
    counts = [total // job.pp] * job.pp
    # Middle stages get additional layers first, then the first and the last.
    for stage in [*range(1, job.pp - 1), 0, job.pp - 1][: total % job.pp]:
        counts[stage] += 1
    return [*job.stage_layers] or counts


def _merged(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return blocks with equal layers merged into one block."""
    if len(blocks) < 3:
        return tuple(blocks)
    numbers: dict[Block, int] = {}
    for block in blocks:
        one = _resized(block, 1)
        numbers[one] = numbers.get(one, 0) + block.number
    return tuple(_resized(one, number) for one, number in numbers.items())


def mtp_blocks(job: Job) -> tuple[Block, ...]:
    """Return the blocks of one MTP layer, which has the architecture of the last layer.

    If the last layer of a hybrid model has no attention, the last layer with attention precedes it
    (DeepSeek-V3, arXiv 2412.19437, section 2.2; Megatron-Core's specs of MTP).
    """
    if job.mtp_block:
        return job.mtp_block
    last = _resized(_last_block(job), 1)
    if last.attention is not None:
        return (last,)
    mixers = (block for block in reversed(job.blocks) if block.attention is not None)
    return (*(_resized(block, 1) for block in islice(mixers, 1)), last)


def _last_block(job: Job) -> Block:
    """Return the block of the last layer; V-shaped schedules place it on the first stage."""
    schedule = job.schedule or "1f1b"
    if job.pp == 1 or not SCHEDULES[schedule].v_shaped:
        return job.blocks[-1]
    # In `job.blocks` the layers of a stage are consecutive.
    left = _stage_counts(job)[0]
    for block in job.blocks:
        left -= block.number
        if left <= 0:
            return block
    return job.blocks[-1]


def _resized(block: Block, number: int) -> Block:
    return block if number == block.number else replace(block, number=number)
