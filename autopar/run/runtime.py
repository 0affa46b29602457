"""What an engine is told besides degrees, and how it computes: states, kernels, overlaps.

No bytes are counted and no seconds here. Bytes of states are in `autopar.price.state_layouts`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from autopar.records import Record, SecondsOrZero, number, replace
from autopar.training.adapters import Adapters

Engine = Literal["galvatron", "megatron", "torchtitan", "deepspeed", "accelerate", "paddlenlp"]
"""Engines that plans are written for: values of `--engine`, of `search.engines.table` the names."""
Trainer = Literal["megatron", "torchtitan", "deepspeed", "accelerate"]
"""Those with one set of degrees, whose launches are searched and kept in files."""
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
"""Whose code keeps the states: an engine by its name, and where it has two ways, the way. `ddp` is
DistributedDataParallel under autocast, which torchtitan until 0.2 and accelerate replicate with."""
Zero = Literal[0, 1, 2, 3]
HostAdam = Literal["torch", "deepspeed"]
"""Whose Adam runs on the host: torch's, or DeepSpeed's with vector instructions."""
PrecisionKind = Literal["bf16", "fp16", "fp32"]


class Buckets(Record):
    """Sizes of DeepSpeed's `zero_optimization`, in elements; defaults are those of 0.19."""

    reduce: int = 500_000_000
    """`reduce_bucket_size`"""
    allgather: int = 500_000_000
    """`allgather_bucket_size`: of an exchange in place, without memory of its own."""
    prefetch: int = 50_000_000
    """`stage3_prefetch_bucket_size`"""
    live: int = 1_000_000_000
    """`stage3_max_live_parameters`: of what is fetched ahead."""
    reuse: int = 1_000_000_000
    """`stage3_max_reuse_distance`"""
    sub_group: int = 1_000_000_000
    """`sub_group_size`: of a rank's part."""
    contiguous: bool = True
    """`contiguous_gradients`: gradients are copied to a bucket that is made at once."""
    overlap: bool | None = None
    """`overlap_comm`, which has a second bucket at stages 1 and 2; None: at stage 3 alone."""
    reduce_scatter: bool = True


BUCKETS = Buckets()


# --------------------------------------------------------------------------------------------------
# Precision and optimizer.


PrecisionRecipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
"""Scales of fp8: of a tensor from its history or its values, of blocks of 128, of 32 elements."""


class Precision(Record):
    """Types in which a run computes, gathers and sums."""

    kind: PrecisionKind = "bf16"
    fp8: bool = False
    fp8_weights: bool = False
    """True if weights are stored in 8 bits, without a 16-bit copy (`--fp8-param-gather`)."""
    fp8_recipe: PrecisionRecipe = "delayed"
    fp8_attention: bool = False
    """True if attention multiplies in 8 bits as well. It changes time alone."""
    fp4: bool = False
    """True if layers multiply in NVFP4: 4 bits, a scale per 16 elements and one per tensor."""
    fp4_weights: bool = False
    """True if weights are stored in 4 bits (`--fp4-param-gather`)."""
    gradients_bf16: bool = False
    gradients_fp32: bool = False
    """True if set (`--accumulate-allreduce-grads-in-fp32`); fp16 does not do it by default."""
    row_scales: bool = False
    """True if fp8 has one scale per row."""
    experts_only: bool = False
    """True if only the GEMMs of experts have low precision."""

    @property
    def low(self) -> bool:
        """True if GEMMs have fewer than 16 bits."""
        return self.fp8 or self.fp4

    @property
    def low_bytes(self) -> float:
        """Bytes of an element of the operands of such GEMMs: of NVFP4 with its 8-bit scales of 16.

        Scales of 8-bit formats, of 32 elements and more, are left out.
        """
        return 0.5 + 1.0 / 16.0 if self.fp4 else 1.0

    @property
    def low_weights(self) -> bool:
        """True if weights are stored as GEMMs take them, without a 16-bit copy."""
        return self.fp4_weights if self.fp4 else self.fp8_weights

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of activations and weights."""
        return 4 if self.kind == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the buffer in which Megatron-LM sums gradients."""
        # it sums in fp32 for bf16 alone, where it is not told otherwise
        wide = {"fp32": True, "bf16": not self.gradients_bf16, "fp16": self.gradients_fp32}
        return 4 if wide[self.kind] else 2

    @property
    def unscaled_bytes(self) -> int:
        """Bytes of the fp32 copy of a gradient that fp16's optimizer makes for its step."""
        # `.float()` of fp32 is no copy
        return 4 if self.kind == "fp16" and self.gradient_bytes == 2 else 0

    @property
    def plain(self) -> Precision:
        """The same with GEMMs of 16 bits."""
        return replace(
            self, fp8=False, fp8_weights=False, fp8_attention=False, fp4=False, fp4_weights=False
        )


class Optimizer(Record):
    """The optimizer and where its states are."""

    kind: Literal["adam", "adam8bit", "muon", "none"] = "adam"
    """Muon keeps one momentum of matrices; adam8bit two moments of 8 bits with a scale per 256
    (arXiv 2110.02861); `none` for runs without an update."""
    moments_bytes: int = 8
    """Bytes per parameter of both moments: 8 in fp32, 4 in 16 bits."""
    master_bytes: int = 4
    """Bytes per parameter of the fp32 weight; 2 if a bf16 weight's half is not stored twice, 0 if
    16-bit weights are trained directly."""
    offload: float = 0.0
    """Share of the states in host memory, updated there (`--optimizer-offload-fraction`)."""
    offload_master: bool = False
    """True if fp32 weights are offloaded with the moments."""
    offload_weights: bool = False
    """True if weights are in host memory, too (`offload_param`, CPUOffloadPolicy)."""
    host_adam: HostAdam = "torch"

    @property
    def adam_bytes(self) -> float:
        """Bytes per parameter of both moments, as the kind keeps them."""
        if self.kind == "adam8bit":
            # a byte each, and an fp32 scale of 256
            return 2.0 * (1.0 + 4.0 / 256.0)
        return float(self.moments_bytes)


class States(Record):
    """How weights, gradients and optimizer states are kept and reduced."""

    keeper: Keeper = "megatron"
    each_micro_batch: bool = False
    """True if gradients are reduced after every micro-batch."""
    wide_gradients: bool | None = None
    """True if gradients are summed in fp32; None: as the engine does by default."""
    buckets: Buckets = BUCKETS
    """Buckets of DeepSpeed."""
    bucket: int | None = None
    """Parameters of a bucket of Megatron-LM; None: its default."""
    padded_buckets: bool = False
    """True if buckets end on multiples of 65,536 elements."""
    one_root: bool = False
    """True if embedding, last norm and head are one FSDP unit (torchtitan before 2025)."""
    gathered_fp8: bool = False
    """True if weights are gathered in 8 bits (torchao)."""


# --------------------------------------------------------------------------------------------------
# Kernels, overlaps, memory.


AttentionKernel = Literal["fused", "flash", "unfused", "local"]
"""cuDNN's kernel, FlashAttention, GEMMs with a softmax, and Megatron-LM's own layers."""
LayerModule = Literal["te", "megatron", "torchtitan", "transformers"]
"""Whose layers run: Transformer Engine's, Megatron-LM's, torchtitan's, those of transformers."""
Loss = Literal["none", "native", "te", "whole", "compiled", "chunked"]
"""Cross-entropy: Megatron-LM's unfused, native fused and Transformer Engine's; torch's of fp32
logits, the same compiled, and in chunks of tokens."""


class Quirks(Record):
    """Memory behaviour that differs between releases of Megatron-Core, TE and torch."""

    kept_dummies: bool = True
    """True if dummy weight gradients are kept, one of each shape."""
    grouped_workspaces: int = 4
    """cuBLAS workspaces of grouped GEMMs."""
    expert_workspace: bool = True
    """True if Megatron-LM's own layers have a workspace in a mixture."""
    saved_expert_output: bool = False
    """True if grouped experts save their output instead of the weighted activation."""
    compiled_experts: bool = False
    """True for grouped experts before Transformer Engine's, which are compiled."""
    unfused_backward_copies: int = 4
    """Copies of the scores in the backward pass of unfused attention."""
    fused_loss_copies: int = 5
    """Copies of the 16-bit logits in the native fused cross-entropy."""
    regathered_experts: bool = True
    """True if gathered tokens of split experts are saved a second time."""
    stage_outputs: bool = False
    """True if the last stage keeps the logits of all micro-batches (torch before 2.9)."""


class Kernels(Record):
    """Kernels of layers and loss."""

    attention: AttentionKernel = "fused"
    module: LayerModule = "te"
    compiled: bool = False
    """True if layers are compiled by torch.compile."""
    graphs: Literal["none", "partial", "full"] = "none"
    """CUDA graphs of parts of layers, or of the step. Their memory is not counted."""
    loss: Loss = "none"
    loss_chunks: int = 1
    loss_parallel: bool = True
    """True if tensor ranks have a part of the vocabulary each until the loss."""
    fused_gate: bool = True
    fused_rotary: bool = True
    fused_norms: bool = True
    fused_accumulation: bool = True
    """True if weight gradients are added to their buffer by the GEMM kernel."""
    repeated_heads: bool = False
    """True if keys and values are copied for every head of queries."""
    deferred_head: int | None = None
    """Micro-batches whose head gradients wait (`--defer-embedding-wgrad-compute`); None: none."""
    quirks: Quirks = Quirks()

    @property
    def torch_layers(self) -> bool:
        """True if layers are torchtitan's or those of transformers, not Megatron-LM's."""
        return self.module in ("torchtitan", "transformers")

    @property
    def own_layers(self) -> bool:
        """True if layers are Megatron-LM's own, without Transformer Engine."""
        return self.module == "megatron"


HOPPER = ("H100", "H200", "H800", "H20", "GH200")
BLACKWELL = ("GB200", "GB300", "B200", "B300")
BEFORE_FP8 = ("V100", "A100", "A800", "A10", "A30", "A40", "A6000")
"""How names of devices begin; the last ones have no products in 8 bits."""


def default_attention(gpu: str, *, deterministic: bool = False) -> AttentionKernel:
    """Return the kernel of attention that Transformer Engine takes by itself on a device."""
    name = gpu.upper()
    # cuDNN's has a deterministic backward on Hopper alone
    fused = name.startswith(HOPPER) or (name.startswith(BLACKWELL) and not deterministic)
    return "fused" if fused else "flash"


Dispatcher = Literal["allgather", "alltoall", "flex"]
"""How tokens reach experts of other ranks; `flex` is a fused dispatcher (DeepEP, HybridEP)."""


class ExpertKernels(Record):
    """Dispatcher and kernels of experts."""

    dispatcher: Dispatcher = "allgather"
    capacity: float | None = None
    """Tokens that an expert takes over the mean of all (`--moe-expert-capacity-factor`); None: no
    token is dropped."""
    padded: bool = False
    """True if experts compute as many tokens as their capacity."""
    router_fp32: bool = False
    grouped: bool = False
    """True if the experts of a rank are one grouped GEMM."""
    fused_permutation: bool = False
    fused_weighting: bool = True
    """True if the activation multiplies with the router's probabilities."""
    fused_mlp: bool = False
    """True if an expert's MLP is one kernel. It changes time alone."""
    skew: float | None = None
    """Tokens of the busiest rank over the mean; None: as in published runs."""


class Overlap(Record):
    """Communication and copies that run while the device computes."""

    tensor: bool = False
    """Tensor-parallel communication with GEMMs (`--tp-comm-overlap`)."""
    gradients: bool = False
    """Gradient reduction with the backward pass."""
    experts: bool = False
    """Dispatch and combine with another micro-batch's compute."""
    optimizer_host: bool = False
    """Copies of offloaded optimizer states with the update of other ones."""


class ActivationOffload(Record):
    """How offloaded activations are chosen; the modules are those of `Split.offload`."""

    fraction: float = 1.0
    """Share of the modules' activations (`--activation-offload-fraction`)."""
    layers: int = 0
    """First layers that are offloaded whole (`--cpu-offloading-num-layers`)."""
    least_elements: int = 1 << 20
    """Smaller tensors stay on the device (`--min-offloaded-tensor-size`)."""


class Allocator(Record):
    """The caching allocator and the workspace of cuBLAS."""

    expandable: bool = False
    """True with `expandable_segments`."""
    cublas: str | None = None
    """CUBLAS_WORKSPACE_CONFIG, such as `:4096:8`; None: not set."""


class Runtime(Record):
    """What an engine is told besides the strategy, and how it computes."""

    engine: str
    """Name as in `--engine`."""
    release: str = ""
    """Release of the engine; empty: the newest that is known."""
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    adapters: Adapters | None = None
    """Adapters that are trained; None: all weights are."""
    states: States = States()
    kernels: Kernels = Kernels()
    experts: ExpertKernels = ExpertKernels()
    overlap: Overlap = Overlap()
    offload: ActivationOffload = ActivationOffload()
    allocator: Allocator = Allocator()
    masks: bool = True
    """True if the data loader makes an attention mask of every micro-batch."""


# --------------------------------------------------------------------------------------------------
# What runs beside what.


_Share = Annotated[float, number(0.0, 1.0)]


class Hiding(Record):
    """What a trainer's software hides of its traffic, beside the documented coefficient.

    Source of the figures: a stack (`autopar.rates.stack`).
    """

    tensor: _Share
    """Share of tensor-parallel collectives that runs under products, forward and backward."""
    regather: Annotated[float, number(1.0, 2.0)]
    """All-gathers of a backward with sequence parallelism over one: the second, of the input for
    the weight gradient, is new in part."""
    sharded_network: Annotated[float, number(0.02, 1.0)]
    """Share of the network's rate that ZeRO-3's traffic reaches."""
    gradients: _Share
    """Of a micro-batch's time, the share under which the reduction of gradients hides."""
    reduction: _Share
    """Of a reduction, the share that is seen even if there is time to hide it."""
    stragglers: _Share
    """Share of a step that its slowest node adds per doubling of the nodes."""
    update_states: _Share
    """Of an estimated optimizer step, the share that updates states, which ZeRO shards."""
    update_gradients: _Share
    """The share that reads gradients, by bytes of an element: whole ones with ZeRO-1 and 2."""
    host_forward_s: SecondsOrZero
    """Of host code, which device and collectives run beside: of a layer's forward."""
    host_backward_s: SecondsOrZero
    host_collective_s: SecondsOrZero
    """Of launching one collective."""
    host_experts_s: SecondsOrZero
    """Of a layer's routing, in both directions together."""
