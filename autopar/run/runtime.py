"""Engine settings other than parallel degrees: precision, model states, kernels, overlap.

This module counts neither bytes nor seconds. Bytes of model states are in
`autopar.price.state_layouts`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from autopar.records import Count, Positive, Record, SecondsOrZero, number, replace
from autopar.training.adapters import Adapters, Target

Engine = Literal["galvatron", "megatron", "torchtitan", "deepspeed", "accelerate", "paddlenlp"]
"""Engines that plans are written for: values of `--engine` and names in `search.engines.table`."""
Trainer = Literal["megatron", "torchtitan", "deepspeed", "accelerate"]
"""Engines for which uniform plans are searched and stored in files."""
Keeper = Literal[
    "megatron",
    "megatron-fsdp",
    "torchtitan",
    "accelerate",
    "ddp",
    "deepspeed",
    "paddlenlp",
    "galvatron",
    "executor",
]
"""Software that stores the model states: an engine, or a mode of one. `ddp` is
DistributedDataParallel under autocast, used by torchtitan until 0.2 and by accelerate."""
Zero = Literal[0, 1, 2, 3]
HostAdam = Literal["torch", "deepspeed"]
"""Adam implementation on the host: torch's, or DeepSpeed's with vector instructions."""
PrecisionKind = Literal["bf16", "fp16", "fp32"]
_Share = Annotated[float, number(0.0, 1.0)]
_Factor = Annotated[float, number(0.0, 1e12)]


class Buckets(Record):
    """Sizes of DeepSpeed's `zero_optimization`, in elements; defaults of release 0.19."""

    reduce: Count = 500_000_000
    """`reduce_bucket_size`: gradients that are reduced together."""
    allgather: Count = 500_000_000
    """`allgather_bucket_size`: for an all-gather in place, which allocates no memory."""
    prefetch: Count = 50_000_000
    """`stage3_prefetch_bucket_size`: parameters that ZeRO-3 gathers ahead."""
    live: Count = 1_000_000_000
    """`stage3_max_live_parameters`: limit of prefetched parameters."""
    reuse: Count = 1_000_000_000
    """`stage3_max_reuse_distance`: maximum distance to the next use of kept parameters."""
    persistent: Count = 100_000
    """`stage3_param_persistence_threshold`: largest parameter that every rank keeps whole."""
    model_persistent: Count | None = None
    """`stage3_model_persistence_threshold`: limit of all parameters kept whole; None: no limit."""
    sub_group: Count = 1_000_000_000
    """`sub_group_size`: parameters of the shard of a rank that are updated together."""
    contiguous: bool = True
    """`contiguous_gradients`: gradients are copied to one contiguous bucket."""
    overlap: bool | None = None
    """`overlap_comm`, which adds a second bucket at stages 1 and 2; None: only at stage 3."""
    reduce_scatter: bool = True


BUCKETS = Buckets()


# --------------------------------------------------------------------------------------------------
# Precision and optimizer.


PrecisionRecipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
"""Scaling of fp8: per tensor with scales from earlier values (`delayed`) or from current values
(`tensorwise`), per block of 128 (`blockwise`) or of 32 elements (`mxfp8`)."""


class Precision(Record):
    """Data types of computation, all-gathers and gradient sums."""

    kind: PrecisionKind = "bf16"
    fp8: bool = False
    fp8_weights: bool = False
    """True if weights are stored in 8 bits, without a 16-bit copy (`--fp8-param-gather`)."""
    fp8_recipe: PrecisionRecipe = "delayed"
    fp8_attention: bool = False
    """True if attention also uses fp8; affects time only."""
    fp8_head: bool = False
    """True if the head uses fp8 as well (`fp8_output_proj`); affects time only."""
    fp4: bool = False
    """True if layers use NVFP4 GEMMs: 4 bits, with a scale per 16 elements and one per tensor."""
    fp4_weights: bool = False
    """True if weights are stored in 4 bits (`--fp4-param-gather`)."""
    gradients_bf16: bool = False
    gradients_fp32: bool = False
    """True if gradients are summed in fp32 (`--accumulate-allreduce-grads-in-fp32`), which is not
    the default with fp16."""
    row_scales: bool = False
    """True if fp8 has one scale per row."""
    experts_only: bool = False
    """True if only expert GEMMs run in low precision."""

    @property
    def low_precision(self) -> bool:
        """True if GEMMs use fewer than 16 bits."""
        return self.fp8 or self.fp4

    @property
    def low_bytes(self) -> float:
        """Bytes per operand element of low-precision GEMMs.

        NVFP4 includes its 8-bit scale per 16 elements. Scales of 8-bit formats, one per 32 elements
        or more, are ignored.
        """
        return 0.5 + 1.0 / 16.0 if self.fp4 else 1.0

    @property
    def low_weights(self) -> bool:
        """True if weights are stored in the precision of the GEMMs, without a 16-bit copy."""
        return self.fp4_weights if self.fp4 else self.fp8_weights

    @property
    def element_bytes(self) -> int:
        """Bytes per element of activations and weights."""
        return 4 if self.kind == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes per element of the gradient accumulation buffer of Megatron-LM."""
        # By default, Megatron-LM accumulates in fp32 only for bf16.
        wide = {"fp32": True, "bf16": not self.gradients_bf16, "fp16": self.gradients_fp32}
        return 4 if wide[self.kind] else 2

    @property
    def unscaled_bytes(self) -> int:
        """Bytes per element of the fp32 gradient copy that the fp16 optimizer makes in its step."""
        # `.float()` of an fp32 tensor makes no copy.
        return 4 if self.kind == "fp16" and self.gradient_bytes == 2 else 0

    @property
    def plain(self) -> Precision:
        """The same precision of states, with 16-bit GEMMs."""
        return replace(
            self,
            fp8=False,
            fp8_weights=False,
            fp8_attention=False,
            fp8_head=False,
            fp4=False,
            fp4_weights=False,
        )


OptimizerKind = Literal["adam", "adam8bit", "lion", "lion8bit", "sgd", "adafactor", "muon", "none"]
"""Kind of an optimizer. Muon keeps one momentum per matrix. The 8-bit kinds keep moments of 8 bits
with a scale per 256 elements (arXiv 2110.02861). Adafactor keeps sums of rows and columns (arXiv
1804.04235), without a first moment. `none` is for runs without an update."""


class LowRank(Record):
    """Moments of gradients projected to a low rank (GaLore, arXiv 2403.03507; APOLLO, 2412.05270).

    A matrix of m x n weights, m >= n, has moments of m x rank and a projector of rank x n elements.
    """

    rank: Positive = 128
    targets: frozenset[Target]
    """Matrices whose gradients are projected."""
    head: bool = False
    """True if the head is one of them."""


class Optimizer(Record):
    """Optimizer and location of its states."""

    kind: OptimizerKind = "adam"
    moments_bytes: Count = 8
    """Bytes per parameter of all moments before a reduction to 8 bits: 8 for Adam in fp32, 4 in 16
    bits; 0 for Adafactor with factored moments."""
    master_bytes: Count = 4
    """Bytes per parameter of the fp32 weight: 2 if the half that equals the bf16 weight is not
    stored twice, 0 if 16-bit weights are trained directly."""
    offload: _Share = 0.0
    """Fraction of the states in host memory, updated there (`--optimizer-offload-fraction`)."""
    offload_master: bool = False
    """True if fp32 weights are offloaded together with the moments."""
    offload_weights: bool = False
    """True if weights are in host memory as well (`offload_param`, CPUOffloadPolicy)."""
    host_adam: HostAdam = "torch"
    fused: bool = True
    """True if the update makes no temporary. False for `torch.optim.AdamW` without `fused`, whose
    update makes a temporary of the rank's shard in the precision of the moments."""
    paged: bool = False
    """True if moments are in memory that moves to the host when the device has no more (CUDA
    unified memory, bitsandbytes)."""
    torchao: bool = False
    """True for 8-bit Adam of torchao, which also has 8-bit moments of embeddings."""
    layerwise: bool = False
    """True if each weight is updated in the backward, which frees its gradient."""
    low_rank: LowRank | None = None

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter of the moments, without those of Adafactor and of a low rank."""
        if self.kind in ("adam8bit", "lion8bit"):
            # One byte per moment, and an fp32 scale per 256 elements.
            return (1.0 if self.kind == "lion8bit" else 2.0) * (1.0 + 4.0 / 256.0)
        return float(self.moments_bytes)


class States(Record):
    """Storage and reduction of weights, gradients and optimizer states."""

    keeper: Keeper = "megatron"
    each_micro_batch: bool = False
    """True if gradients are reduced after every micro-batch."""
    wide_gradients: bool | None = None
    """True if gradients are summed in fp32; None for the default of the engine."""
    buckets: Buckets = BUCKETS
    """Bucket sizes of DeepSpeed, in elements."""
    bucket: Positive | None = None
    """Bucket size of Megatron-LM in parameters; None for its default."""
    padded_buckets: bool = False
    """True if buckets end on multiples of 65,536 elements."""
    flat: bool = False
    """True if FSDP units are flat tensors, which are gathered in place (FSDP1)."""
    least_unit: Count = 0
    """Elements of the smallest modules that are FSDP units (`fsdp_min_num_params`); the root
    contains the others. More than the model has: no module is a unit. 0: each layer is one."""
    one_root: bool = False
    """True if embedding, final norm and head are one FSDP unit (torchtitan before 2025)."""
    apart: bool = False
    """True if embedding and head are two FSDP units in transformers, where they are one otherwise
    (verl, Automodel)."""
    gathered_fp8: bool = False
    """True if weights are gathered in 8 bits (torchao)."""


# --------------------------------------------------------------------------------------------------
# Kernels, overlaps, memory.


Graphs = Literal["none", "attention", "partial", "full"]
"""CUDA graphs: of attention alone, of several parts of layers, or of the whole step."""
AttentionKernel = Literal["fused", "flash", "unfused", "local"]
"""Attention kernel: cuDNN, FlashAttention, GEMMs with a softmax, or Megatron-LM's own layers."""
LayerModule = Literal["te", "megatron", "torchtitan", "transformers"]
"""Implementation of layers: Transformer Engine, Megatron-LM, torchtitan or transformers."""
Loss = Literal["none", "native", "te", "whole", "compiled", "chunked", "liger", "trl"]
"""Cross-entropy of Megatron-LM: unfused (`none`), fused (`native`) or Transformer Engine's (`te`).
Of PyTorch on fp32 logits: eager (`whole`), `compiled`, or in chunks of tokens (`chunked`). Fused
with the head, without logits of all tokens: Liger's (`liger`) and TRL's (`trl`)."""


class Quirks(Record):
    """Memory behaviour that differs between releases of Megatron-Core, TE and torch."""

    kept_dummies: bool = True
    """True if dummy weight gradients are kept, one per shape."""
    grouped_workspaces: Count = 4
    """Number of cuBLAS workspaces of grouped GEMMs."""
    expert_workspace: bool = True
    """True if Megatron-LM's own layers allocate a workspace in MoE models."""
    saved_expert_output: bool = False
    """True if grouped experts save their output instead of the weighted activation."""
    compiled_experts: bool = False
    """True if grouped experts are compiled ones that preceded Transformer Engine's."""
    unfused_backward_copies: Count = 4
    """Number of copies of the scores in the backward pass of unfused attention."""
    fused_loss_copies: Count = 5
    """Number of copies of the 16-bit logits in the native fused cross-entropy."""
    regathered_experts: bool = True
    """True if experts with tensor parallelism save their gathered tokens twice."""
    logit_bytes: Positive | None = 12
    """Bytes per logit of an eager loss in fp32: its output and two gradients. None: between 12 and
    18, as loops of scripts hold the output of the model, which transformers before 4.45 copies."""
    saved_norms: bool = True
    """True if norms of layers of transformers save their input in fp32, and the normed input; False
    if they save their input alone (NeMo Automodel)."""
    stage_outputs: bool = False
    """True if the last stage keeps the logits of all micro-batches (torch before 2.9)."""


class Kernels(Record):
    """Kernels of layers and loss."""

    attention: AttentionKernel = "fused"
    module: LayerModule = "te"
    compiled: bool = False
    """True if layers are compiled with torch.compile."""
    graphs: Graphs = "none"
    """CUDA graphs; their memory is not counted."""
    liger: bool = False
    """True if norms and activations are Liger's kernels, which recompute what they do not save."""
    loss: Loss = "none"
    loss_chunks: Positive = 1
    loss_parallel: bool = True
    """True if each tensor rank holds a part of the vocabulary up to the loss."""
    fused_gate: bool = True
    fused_rotary: bool = True
    fused_norms: bool = True
    fused_accumulation: bool = True
    """True if the GEMM kernel adds weight gradients to their buffer."""
    repeated_heads: bool = False
    """True if keys and values are copied for every query head."""
    deferred_head: Count | None = None
    """Micro-batches with deferred head gradients (`--defer-embedding-wgrad-compute`); None for
    none."""
    quirks: Quirks = Quirks()

    @property
    def torch_layers(self) -> bool:
        """True if layers are those of torchtitan or transformers, not of Megatron-LM."""
        return self.module in ("torchtitan", "transformers")

    @property
    def own_layers(self) -> bool:
        """True if layers are Megatron-LM's own, without Transformer Engine."""
        return self.module == "megatron"


HOPPER = ("H100", "H200", "H800", "H20", "GH200")
BLACKWELL = ("GB200", "GB300", "B200", "B300", "VR200")
"""Name prefixes of devices of one generation, by the first digits of their compute capability;
Rubin has 10.7. Precisions and attention kernels are facts of the
card (`autopar.rates.devices`)."""


Dispatcher = Literal["allgather", "alltoall", "flex"]
"""Token dispatcher of experts; `flex` is a fused dispatcher (DeepEP, HybridEP)."""


class ExpertKernels(Record):
    """Dispatcher and kernels of experts."""

    dispatcher: Dispatcher = "allgather"
    capacity: _Factor | None = None
    """Capacity of an expert over the mean number of tokens per expert
    (`--moe-expert-capacity-factor`); None if no token is dropped."""
    padded: bool = False
    """True if each expert is padded to its full capacity."""
    router_fp32: bool = False
    grouped: bool = False
    """True if the experts of a rank run as one grouped GEMM."""
    fused_permutation: bool = False
    fused_weighting: bool = True
    """True if the activation kernel multiplies by the router probabilities."""
    fused_mlp: bool = False
    """True if the MLP of an expert is one kernel; affects time only."""
    skew: _Factor | None = None
    """Tokens of the busiest rank over the mean; None for the value of published runs."""


class Overlap(Record):
    """Communication and copies that overlap with computation."""

    tensor: bool = False
    """Tensor-parallel communication overlapped with GEMMs (`--tp-comm-overlap`)."""
    gradients: bool = False
    """Gradient reduction overlapped with the backward pass."""
    experts: bool = False
    """Dispatch and combine overlapped with the computation of another micro-batch."""
    optimizer_host: bool = False
    """Copies of offloaded optimizer states overlapped with the update of other states."""


class ActivationOffload(Record):
    """Selection of offloaded activations; `Split.offload` lists the modules."""

    fraction: _Share = 1.0
    """Fraction of the modules' activations (`--activation-offload-fraction`)."""
    layers: Count = 0
    """Number of first layers that are offloaded whole (`--cpu-offloading-num-layers`)."""
    least_elements: Count = 1 << 20
    """Smallest offloaded tensor in elements (`--min-offloaded-tensor-size`)."""


class Allocator(Record):
    """Settings of the caching allocator and the cuBLAS workspace."""

    expandable: bool = False
    """True with `expandable_segments`."""
    cublas: str | None = None
    """CUBLAS_WORKSPACE_CONFIG, such as `:4096:8`; None if not set."""


class Runtime(Record):
    """Engine settings other than the parallel strategy."""

    engine: str
    """Name of the engine, a value of `--engine`."""
    release: str = ""
    """Release of the engine; empty for the newest known one."""
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    adapters: Adapters | None = None
    """Trained adapters; None if all weights are trained."""
    sft: bool = False
    """True if Megatron-Bridge trains all weights on samples of a task (`*_sft_config`)."""
    states: States = States()
    kernels: Kernels = Kernels()
    experts: ExpertKernels = ExpertKernels()
    overlap: Overlap = Overlap()
    offload: ActivationOffload = ActivationOffload()
    allocator: Allocator = Allocator()
    masks: bool = True
    """True if the data loader creates an attention mask for every micro-batch."""

    @property
    def fine_tunes(self) -> bool:
        """True if Megatron-Bridge trains the run on samples of a task: all weights or adapters."""
        return self.sft or self.adapters is not None


# --------------------------------------------------------------------------------------------------
# Overlap of communication, computation and host code.


class OverlapFactors(Record):
    """Overlap and overhead factors of a software stack, next to the documented overlap coefficient.

    The values come from a stack (`autopar.rates.stack`).
    """

    tensor: _Share
    """Fraction of tensor-parallel communication that overlaps with GEMMs, forward and backward."""
    regather: Annotated[float, number(1.0, 2.0)]
    """Time of both sequence-parallel all-gathers of a backward over the time of one. The second, of
    the input for the weight gradient, is partly overlapped."""
    sharded_network: Annotated[float, number(0.02, 1.0)]
    """Fraction of the network rate that ZeRO-3 communication reaches."""
    gradients: _Share
    """Fraction of a micro-batch's time that can hide the gradient reduction."""
    reduction: _Share
    """Fraction of a gradient reduction that stays exposed even with enough time to overlap it."""
    stragglers: _Share
    """Straggler factor: fraction of a step added per doubling of the number of nodes."""
    update_states: _Share
    """Fraction of an estimated optimizer step that updates states, which ZeRO shards."""
    update_gradients: _Share
    """Fraction of an estimated optimizer step that reads gradients, by bytes per element; gradients
    are unsharded with ZeRO-1 and 2."""
    host_forward_s: SecondsOrZero
    """Host overhead of a layer's forward in seconds; it runs concurrently with the device."""
    host_backward_s: SecondsOrZero
    host_collective_s: SecondsOrZero
    """Host overhead of launching one collective, seconds."""
    host_experts_s: SecondsOrZero
    """Host overhead of a layer's routing in seconds, forward and backward together."""
