"""Bytes per parameter by engine and ZeRO stage: persistent, sharded and transient.

Padding of Megatron-LM's buffers is in `autopar.price.states`, the live tensors of other engines in
`autopar.price.sharded_peak`. Each layout names the source file of the engine that it describes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, cast

from autopar.errors import InputError
from autopar.records import Record
from autopar.run.runtime import BUCKETS, Buckets, Keeper, PrecisionKind, Zero

Phase = Literal["forward", "backward", "step"]
Of = Literal["stage", "shard", "unit", "bucket"]
"""Size of a transient tensor: all parameters of a rank, its shard, one gathered unit (a layer, or
embedding or head), or a bucket of a given number of elements."""

_MOMENTS = 8.0
"""Two moments of Adam in fp32, bytes per parameter."""
UPDATE = "temporary of the update"
"""Name of the temporary that an Adam update without a fused kernel makes."""
REDUCED = ("input of the reduction", "whole gradients")
"""Names of gradients in the type of their sum."""
_ALWAYS: frozenset[Phase] = frozenset({"forward", "backward", "step"})
_FORWARD: frozenset[Phase] = frozenset({"forward"})
_BACKWARD: frozenset[Phase] = frozenset({"backward"})
_BOTH: frozenset[Phase] = frozenset({"forward", "backward"})
_STEP: frozenset[Phase] = frozenset({"step"})


class PersistentBytes(Record):
    """Bytes of one parameter that persist between steps, or from backward to optimizer step."""

    each_bytes: float
    sharded: bool = False
    """True if sharded over data-parallel ranks; `each_bytes` is before that division."""
    always: bool = True
    """False if allocated by the backward and freed after the step, as `param.grad` is."""
    stepped_sharded: bool = False
    """True if the optimizer keeps only this rank's shard of unsharded values during its step."""
    to_host: bool = False
    """True if the end of a backward that reduces them moves them to host memory."""


class TransientBytes(Record):
    """Transient tensor that is live in some phases of a step, in bytes per element."""

    what: str
    each_bytes: float
    of: Of
    during: frozenset[Phase]
    number: int = 1
    """Number of units that are live at once."""
    beside: int = 0
    """Elements in addition to the units."""
    elements: int | None = None
    """Elements of a bucket, or maximum of elements for other sizes. None: no maximum."""

    def num_bytes(self, *, stage: float, unit: float, replicas: int) -> float:
        """Return the bytes of the tensor on a rank.

        stage : parameters of the rank.
        unit : parameters of its largest unit.
        replicas : number of ranks over which states are sharded.
        """
        if self.of == "bucket":
            return self.each_bytes * (self.elements or 0)
        units = self.number * unit + self.beside
        size = {"stage": stage, "shard": stage / replicas, "unit": units}[self.of]
        # no more units than the stage has
        size = min(size, stage)
        return self.each_bytes * (size if self.elements is None else min(size, self.elements))


class StateLayout(Record):
    """Bytes per parameter of an engine at a ZeRO stage, persistent and transient."""

    keeper: Keeper
    zero: Zero
    weights: PersistentBytes
    """Weights of the model between steps."""
    gradients: PersistentBytes
    master: PersistentBytes
    """fp32 copies of the weights; 0 bytes if the weights are fp32."""
    moments: PersistentBytes
    passing: tuple[TransientBytes, ...] = ()
    source: str = ""
    """Source file and release of the engine."""

    @property
    def kept(self) -> tuple[tuple[str, PersistentBytes], ...]:
        """Persistent states by name."""
        return (
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("fp32 weights", self.master),
            ("Adam moments", self.moments),
        )

    def per_parameter(self, replicas: int = 1, *, always: bool = False) -> float:
        """Return the bytes per parameter at the optimizer step.

        replicas : number of ranks over which states are sharded.
        always : True to exclude gradients that are freed after the step.
        """
        return sum(
            kept.each_bytes / (replicas if kept.sharded else 1)
            for _, kept in self.kept
            if kept.always or not always
        )

    def whole_and_shared(self) -> tuple[float, float]:
        """Return (replicated, sharded) bytes per parameter, the second before division by ranks."""
        parts = [(kept.each_bytes, kept.sharded) for _, kept in self.kept]
        return (
            sum(size for size, sharded in parts if not sharded),
            sum(size for size, sharded in parts if sharded),
        )

    def passing_bytes(self, phase: Phase, *, stage: float, unit: float, replicas: int = 1) -> float:
        """Return the bytes of transient tensors that are live at once in a phase of a step.

        stage : parameters of the rank.
        unit : parameters of its largest unit.
        replicas : number of ranks over which states are sharded.
        """
        return sum(
            entry.num_bytes(stage=stage, unit=unit, replicas=replicas)
            for entry in self.passing
            if phase in entry.during
        )


class _LayoutArguments(Record):
    """Arguments of `layout_of` with defaults resolved."""

    keeper: Keeper
    zero: Zero
    precision: PrecisionKind
    wide: bool | None
    """True if gradients are summed in fp32; None: the engine's default."""
    each: bool
    """True if gradients are reduced after every micro-batch, or there is only one."""
    buckets: Buckets
    fused: bool
    """True if the update of Adam makes no temporary."""
    offload: bool
    """True if states of the optimizer are in host memory."""

    @property
    def element(self) -> float:
        return 4.0 if self.precision == "fp32" else 2.0

    def gradient(self, default: bool) -> float:
        """Return the bytes of an accumulated gradient element.

        default : True if the engine accumulates in fp32 by default.
        """
        wide = default if self.wide is None else self.wide
        return 4.0 if wide or self.precision == "fp32" else 2.0

    @property
    def master(self) -> float:
        """Bytes of the fp32 master weight; fp32 weights need none."""
        return 0.0 if self.precision == "fp32" else 4.0


def _recipe(
    asked: _LayoutArguments,
    source: str,
    *,
    weights: PersistentBytes,
    gradients: PersistentBytes,
    optimizer: bool,
    master: float,
    passing: Sequence[TransientBytes | None] = (),
) -> StateLayout:
    """Return a layout with Adam's states.

    source : source file and release of the engine.
    optimizer : True if fp32 weights and moments are sharded.
    master : bytes of an fp32 master weight.
    passing : transient tensors; None entries are skipped.
    """
    if not asked.fused:
        passing = (*passing, _temporary(asked))
    return StateLayout(
        keeper=asked.keeper,
        zero=asked.zero,
        weights=weights,
        gradients=gradients,
        master=PersistentBytes(each_bytes=master, sharded=optimizer),
        moments=PersistentBytes(each_bytes=_MOMENTS, sharded=optimizer),
        passing=tuple(entry for entry in passing if entry is not None and entry.each_bytes),
        source=source,
    )


def _temporary(asked: _LayoutArguments) -> TransientBytes:
    """Return the temporary of an Adam update without a fused kernel: one fp32 shard.

    Source: torch 2.13 optim/adam.py. `_multi_tensor_adam` allocates the square root of the second
    moments. `_single_tensor_adam` (default before torch 2.0) also allocates a quotient of the same
    size. The quotient is not counted: DeepSpeed frees 16-bit gradients of as many bytes before the
    update. Measured: hiyouga/LLaMA-Factory#1221.
    """
    # DeepSpeed updates the shard of ZeRO-3 by sub-groups
    grouped = asked.keeper == "deepspeed" and asked.zero == 3
    return TransientBytes(
        what=UPDATE,
        each_bytes=4.0,
        of="shard",
        elements=asked.buckets.sub_group if grouped else None,
        during=_STEP,
    )


def _megatron(asked: _LayoutArguments) -> StateLayout:
    """Return the states of Megatron-Core and Megatron-FSDP.

    Megatron-Core allocates one gradient buffer before the first step. Its distributed optimizer
    (ZeRO-1) keeps the buffer unsharded. ZeRO-2 and ZeRO-3 are Megatron-FSDP. In fp16 the optimizer
    step makes fp32 copies of the gradients.
    """
    zero = asked.zero
    # fp32 sums only with bf16 (`accumulate_allreduce_grads_in_fp32` follows from --bf16)
    gradient = asked.gradient(asked.precision == "bf16")
    fully = asked.keeper == "megatron-fsdp"
    # one unit is in use while the next is prefetched
    gathered = TransientBytes(
        what="gathered weights", each_bytes=asked.element, of="unit", number=2, during=_BOTH
    )
    unscaled = TransientBytes(what="unscaled gradients", each_bytes=4.0, of="shard", during=_STEP)
    reduced = TransientBytes(
        what="unreduced gradients", each_bytes=gradient, of="unit", during=_BACKWARD
    )
    return _recipe(
        asked,
        "megatron/core/distributed/param_and_grad_buffer.py, distributed/fsdp; docs of the "
        "distributed optimizer (bytes per parameter: 18; 6 + 12/d)",
        weights=PersistentBytes(each_bytes=asked.element, sharded=zero == 3),
        gradients=PersistentBytes(each_bytes=gradient, sharded=zero >= 2),
        optimizer=zero >= 1,
        master=asked.master,
        passing=(
            gathered if fully and zero == 3 else None,
            reduced if fully and zero >= 2 else None,
            unscaled if asked.precision == "fp16" else None,
        ),
    )


def _fsdp2(asked: _LayoutArguments) -> StateLayout:
    """Return the states of `fully_shard`: fp32 shards, gathered as 16-bit units.

    ZeRO-1 and ZeRO-2 keep units gathered after the forward (`reshard_after_forward` false). ZeRO-0
    stands for replicated weights, whose units are still cast to 16 bits. torchtitan reduces
    gradients in fp32 (`mixed_precision_reduce`), accelerate in the precision of the model.
    """
    zero, element = asked.zero, asked.element
    reduced = asked.gradient(asked.keeper == "torchtitan")
    gathers = not (zero == 0 and asked.precision == "fp32")
    held = zero in (1, 2) and gathers
    passing: list[TransientBytes | None] = [
        # weights that stay gathered from the forward of a unit to its backward
        TransientBytes(what="gathered weights", each_bytes=element, of="stage", during=_BOTH)
        if held
        else None,
        TransientBytes(what="gathered weights", each_bytes=element, of="unit", during=_BOTH)
        if gathers and not held
        else None,
        # the forward keeps the gather's output until the next unit's is copied out of it; the
        # backward prefetches the next unit, except with units that stay gathered
        TransientBytes(
            what="output of the gather",
            each_bytes=element,
            of="unit",
            during=_FORWARD if held else _BOTH,
        )
        if gathers and zero
        else None,
        # autograd's gradients in the precision of the gathered weights
        TransientBytes(what="unreduced gradients", each_bytes=element, of="unit", during=_BACKWARD),
        # the copy of a unit is kept until the preceding unit is reduced
        TransientBytes(
            what="input of the reduction", each_bytes=reduced, of="unit", during=_BACKWARD
        )
        if zero
        else None,
        # `to_accumulated_grad_if_needed`: sums kept until the last micro-batch
        None
        if asked.each
        else TransientBytes(what="whole gradients", each_bytes=reduced, of="stage", during=_BOTH),
    ]
    return _recipe(
        asked,
        "torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py; "
        "torchtitan 0.3 distributed/fsdp.py; accelerate 1.15 utils/fsdp_utils.py (upcasts to fp32)",
        weights=PersistentBytes(each_bytes=4.0, sharded=zero > 0),
        gradients=PersistentBytes(each_bytes=4.0, sharded=zero > 0, always=False),
        optimizer=zero > 0,
        master=0.0,
        passing=passing,
    )


def _replicated(asked: _LayoutArguments) -> StateLayout:
    """Return the states of DistributedDataParallel under autocast: fp32 with 16-bit copies.

    Autocast casts a weight once and keeps the copy until the end of the backward. Reduction buckets
    are in fp32 and separate from the gradients (`gradient_as_bucket_view` false).
    """
    narrow = asked.precision != "fp32"
    copies = TransientBytes(what="copies of autocast", each_bytes=2.0, of="stage", during=_BOTH)
    buckets = TransientBytes(
        what="buckets of the reduction", each_bytes=4.0, of="stage", during=_ALWAYS
    )
    return _recipe(
        asked,
        "torch 2.13, nn/parallel/distributed.py and csrc/distributed/c10d/reducer.cpp; accelerate "
        "1.15 accelerator.py (autocast of the forward)",
        weights=PersistentBytes(each_bytes=4.0),
        gradients=PersistentBytes(each_bytes=4.0, always=False),
        optimizer=False,
        master=0.0,
        passing=(copies if narrow else None, buckets),
    )


def _accelerate(asked: _LayoutArguments) -> StateLayout:
    return _replicated(asked) if asked.zero == 0 else _fsdp2(asked)


def _deepspeed(asked: _LayoutArguments) -> StateLayout:
    return (_flat, _partitioned, _partitioned, _stage3)[asked.zero](asked)


def _flat(asked: _LayoutArguments) -> StateLayout:
    """Return the states of DeepSpeed without ZeRO.

    Release 0.19 accumulates 16-bit gradients only in 16 bits (`FP16_Optimizer`). Earlier releases
    accumulate bf16 gradients in fp32 with `BF16_Optimizer`, which shards its states.
    """
    if asked.precision == "bf16" and asked.wide:
        return _bf16_optimizer(asked)
    bucket = TransientBytes(
        what="bucket of the reduction",
        each_bytes=asked.element,
        of="stage",
        # `allreduce_gradients` flattens at most this number of elements
        elements=asked.buckets.reduce,
        during=_BACKWARD,
    )
    # each gradient in fp32, and all of them as one tensor, before the 16-bit ones are freed
    copies = TransientBytes(what="fp32 gradients", each_bytes=8.0, of="stage", during=_STEP)
    return _recipe(
        asked,
        "DeepSpeed 0.19.8 runtime/engine.py (_do_optimizer_sanity_check), "
        "runtime/fp16/fused_optimizer.py",
        weights=PersistentBytes(each_bytes=asked.element),
        gradients=PersistentBytes(each_bytes=asked.element, always=False),
        optimizer=False,
        master=asked.master,
        passing=(bucket, copies if asked.precision != "fp32" else None),
    )


def _bf16_optimizer(asked: _LayoutArguments) -> StateLayout:
    """Return the states of DeepSpeed's `BF16_Optimizer`.

    On D ranks they take 2 + 4 + 12/D bytes per parameter, with one unsharded fp32 gradient buffer;
    each backward adds 16-bit gradients. Release 0.19 uses it for ZeRO-1 with bf16 and
    `grad_accum_dtype` fp32, earlier releases for bf16 without ZeRO.
    """
    bucket = TransientBytes(
        what="bucket of the reduction",
        each_bytes=4.0,
        of="stage",
        elements=asked.buckets.reduce,
        during=_BACKWARD,
    )
    # added to the buffer at the end of the backward (`immediate_grad_update` false)
    own = TransientBytes(what="16-bit gradients", each_bytes=2.0, of="stage", during=_BACKWARD)
    return _recipe(
        asked,
        "DeepSpeed 0.19.8 runtime/bf16_optimizer.py",
        weights=PersistentBytes(each_bytes=2.0),
        gradients=PersistentBytes(each_bytes=4.0),
        optimizer=True,
        master=4.0,
        passing=(bucket, own),
    )


def _partitioned(asked: _LayoutArguments) -> StateLayout:
    """Return the states of DeepSpeed's ZeRO-1 and ZeRO-2: weights are unsharded.

    fp32 weights and moments are sharded. Gradients are sharded at ZeRO-2; at ZeRO-1 they stay
    unsharded until the step. The first gradient of a micro-batch allocates a bucket of
    `reduce_bucket_size` elements, two with `overlap_comm`.

    With an offloaded optimizer, each backward that reduces gradients copies this rank's shard to
    the host. ZeRO-2 reduces in each micro-batch, ZeRO-1 in the last one (`process_gradients`,
    `copy_grads_in_partition`, `independent_gradient_partition_epilogue`).
    """
    buckets, second = asked.buckets, asked.zero == 2
    gradient = asked.gradient(False)
    # `_do_optimizer_sanity_check`: not with offload
    if not second and asked.precision == "bf16" and gradient == 4.0 and not asked.offload:
        return _bf16_optimizer(asked)
    # offload implies `contiguous_gradients`
    contiguous = buckets.contiguous or asked.offload
    bucket = TransientBytes(
        what="buckets of the reduction",
        # ZeRO-1 fills it from the summed gradients
        each_bytes=(asked.element if second else gradient)
        * (2 if buckets.overlap and contiguous else 1),
        of="bucket" if contiguous else "stage",
        elements=buckets.reduce,
        during=_BACKWARD,
    )
    # the rank's shard is flattened and converted to fp32 for the step
    flat = TransientBytes(what="flat gradients", each_bytes=gradient, of="shard", during=_STEP)
    wide = TransientBytes(what="fp32 gradients", each_bytes=4.0, of="shard", during=_STEP)
    return _recipe(
        asked,
        "DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py (setup_buckets, step), zero/config.py",
        weights=PersistentBytes(each_bytes=asked.element),
        # the remainder is freed when all are reduced
        gradients=PersistentBytes(
            each_bytes=gradient,
            sharded=second,
            always=False,
            stepped_sharded=not second,
            to_host=asked.offload,
        ),
        optimizer=True,
        master=asked.master,
        passing=(bucket, flat, wide if gradient < 4.0 else None),
    )


def _stage3(asked: _LayoutArguments) -> StateLayout:
    """Return the states of DeepSpeed's ZeRO-3: all sharded, with a limit on gathered parameters.

    Unsharded copies of small parameters (`stage3_param_persistence_threshold`) are counted by unit
    in `autopar.price.states`. `stage3_max_live_parameters` limits only the prefetch.
    """
    buckets, gradient = asked.buckets, asked.gradient(False)
    # A layer, its prefetch, and weights that the backward reuses within the distance. At the end of
    # the forward half of that distance counts, for the other half is in the backward.
    gathered = TransientBytes(
        what="gathered weights",
        each_bytes=asked.element,
        of="unit",
        beside=min(buckets.prefetch, buckets.live) + buckets.reuse // 2,
        during=_BOTH,
    )
    # each weight is copied out of the single buffer of a gather
    output = TransientBytes(
        what="output of the gather",
        each_bytes=asked.element,
        of="stage",
        elements=min(buckets.prefetch, buckets.live),
        during=_BOTH,
    )
    bucket = TransientBytes(
        what="bucket of the reduction",
        each_bytes=asked.element,
        of="bucket",
        elements=buckets.reduce if buckets.contiguous else 0,
        during=_ALWAYS,
    )
    # `reduce_scatter_coalesced` copies a bucket into the order of ranks
    ordered = TransientBytes(
        what="input of the reduction",
        each_bytes=asked.element,
        of="stage",
        elements=buckets.reduce,
        during=_BACKWARD,
    )
    # gradients of one sub-group of the shard, flat and in fp32
    step = TransientBytes(
        what="fp32 gradients",
        each_bytes=4.0 + (gradient if gradient < 4.0 else 0.0),
        of="shard",
        elements=buckets.sub_group,
        during=_STEP,
    )
    return _recipe(
        asked,
        "DeepSpeed 0.19.8 runtime/zero/stage3.py, zero/partitioned_param_coordinator.py, "
        "zero/config.py",
        weights=PersistentBytes(each_bytes=asked.element, sharded=True),
        # one buffer for all shards, on the host if any fraction of the optimizer is
        # (`grad_partitions_flat_buffer`)
        gradients=PersistentBytes(each_bytes=0.0 if asked.offload else gradient, sharded=True),
        optimizer=True,
        master=asked.master,
        passing=(gathered, output, bucket, ordered if buckets.reduce_scatter else None, step),
    )


def _paddle(asked: _LayoutArguments) -> StateLayout:
    """Return the states of Paddle's O2: 16-bit weights, gradients fp32 with `amp_master_grad`.

    `--sharding stage1` shards the optimizer, `stage2` also gradients, `stage3` also weights.
    """
    zero, gradient = asked.zero, asked.gradient(False)
    gathered = TransientBytes(
        what="gathered weights", each_bytes=asked.element, of="unit", during=_BOTH
    )
    own = TransientBytes(
        what="unreduced gradients", each_bytes=asked.element, of="unit", during=_BACKWARD
    )
    return _recipe(
        asked,
        "paddle distributed/fleet/utils/mix_precision_utils.py (main_grad), "
        "distributed/fleet/meta_parallel/sharding; PaddleNLP trainer/training_args.py",
        weights=PersistentBytes(each_bytes=asked.element, sharded=zero == 3),
        gradients=PersistentBytes(each_bytes=gradient, sharded=zero >= 2),
        optimizer=zero >= 1,
        master=asked.master,
        passing=(gathered if zero == 3 else None, own if zero >= 2 or gradient == 4.0 else None),
    )


def _fsdp1(asked: _LayoutArguments) -> StateLayout:
    """Return the states of Galvatron: PyTorch's FSDP1 with one flat parameter per layer.

    Shards are fp32. ZeRO-1 and ZeRO-2 keep units gathered until the backward. Reduction after the
    last micro-batch (`no_sync`) accumulates unsharded 16-bit gradients.
    """
    zero, element = asked.zero, asked.element
    reduced = asked.gradient(False)
    wide = TransientBytes(what="fp32 gradients", each_bytes=reduced, of="unit", during=_BACKWARD)
    return _recipe(
        asked,
        "torch 2.13, distributed/fsdp/_flat_param.py and _runtime_utils.py; Galvatron "
        "core/runtime/parallel.py (wrap_modules_data_parallel)",
        weights=PersistentBytes(each_bytes=4.0, sharded=zero > 0),
        gradients=PersistentBytes(each_bytes=4.0, sharded=zero > 0, always=False),
        optimizer=zero > 0,
        master=0.0,
        passing=(
            TransientBytes(what="gathered weights", each_bytes=element, of="stage", during=_BOTH)
            if zero in (1, 2)
            else TransientBytes(
                # the backward prefetches the preceding unit
                what="gathered weights",
                each_bytes=element if zero or asked.precision != "fp32" else 0.0,
                of="unit",
                number=2 if zero else 1,
                during=_BOTH,
            ),
            TransientBytes(
                what="unreduced gradients", each_bytes=element, of="unit", during=_BACKWARD
            )
            if asked.each
            else TransientBytes(
                what="whole gradients", each_bytes=element, of="stage", during=_BOTH
            ),
            wide if reduced > element else None,
        ),
    )


def _executor(asked: _LayoutArguments) -> StateLayout:
    """Return the states of `profile-plan`; with ZeRO they are those of FSDP2.

    Without ZeRO, gradients are accumulated in the precision of the weights and copied to fp32 for
    the optimizer step, which updates fp32 masters.
    """
    if asked.zero:
        return _fsdp2(asked)
    narrow = asked.precision != "fp32"
    wide = TransientBytes(what="fp32 gradients", each_bytes=4.0, of="stage", during=_STEP)
    return _recipe(
        asked,
        "profiler/plan/stage.py",
        weights=PersistentBytes(each_bytes=asked.element),
        gradients=PersistentBytes(each_bytes=asked.element),
        optimizer=False,
        master=asked.master,
        passing=(wide if narrow else None,),
    )


_RECIPES: Mapping[Keeper, Callable[[_LayoutArguments], StateLayout]] = {
    "megatron": _megatron,
    "megatron-fsdp": _megatron,
    "torchtitan": _fsdp2,
    "accelerate": _accelerate,
    "ddp": _accelerate,
    "deepspeed": _deepspeed,
    "paddlenlp": _paddle,
    "galvatron": _fsdp1,
    "executor": _executor,
}
KEEPERS: tuple[Keeper, ...] = tuple(_RECIPES)


def layout_of(
    keeper: str,
    zero: int,
    precision: str = "bf16",
    *,
    fp32_gradients: bool | None = None,
    each_micro_batch: bool = True,
    buckets: Buckets = BUCKETS,
    fused: bool = True,
    offload: bool = False,
) -> StateLayout:
    """Return the bytes per parameter of an engine with Adam.

    Parameters
    ----------
    keeper : one of KEEPERS.
    zero : ZeRO stage, 0 for DDP.
    precision : bf16, fp16 or fp32.
    fp32_gradients : True if gradients are summed in fp32; None: the engine's default.
    each_micro_batch : True if gradients are reduced after each micro-batch; False: after the last.
    buckets : bucket sizes of DeepSpeed.
    fused : False if the update of Adam makes an fp32 temporary.
    offload : True if DeepSpeed has states of the optimizer in host memory.

    Raises InputError for an unknown engine, stage or precision.
    """
    if keeper not in _RECIPES:
        raise InputError(f"no state layout of {keeper!r}", remedy=f"Use {', '.join(KEEPERS)}")
    if zero not in (0, 1, 2, 3) or precision not in ("bf16", "fp16", "fp32"):
        raise InputError(f"no state layout of ZeRO stage {zero} in {precision}")
    if keeper == "megatron" and zero > 1:
        # Megatron-FSDP shards gradients and weights
        keeper = "megatron-fsdp"
    asked = _LayoutArguments(
        keeper=cast(Keeper, keeper),
        zero=cast(Zero, zero),
        precision=cast(PrecisionKind, precision),
        wide=fp32_gradients,
        each=each_micro_batch,
        buckets=buckets,
        fused=fused,
        offload=offload,
    )
    return _RECIPES[asked.keeper](asked)
