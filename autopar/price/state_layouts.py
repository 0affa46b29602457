"""Bytes of a parameter by engine and ZeRO stage: what is kept, over how many ranks, what passes.

One table for whoever prices states; no shapes of a model, no activations, no padding of buffers,
which `autopar.price.states` and `autopar.price.fsdp` count. Each engine's rows name the file of
it that they were read in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, cast

from autopar.errors import InputError
from autopar.records import Record
from autopar.run.runtime import BUCKETS, Buckets, Keeper, PrecisionKind, Zero

Phase = Literal["forward", "backward", "step"]
Of = Literal["stage", "shard", "unit", "bucket"]
"""What a passing tensor has as many elements as: all parameters of a rank, its part of them, one
unit that is gathered at once (a layer, or embedding or head), or a number of its own."""

_MOMENTS = 8.0
"""Adam's two, in fp32."""
_ALWAYS: frozenset[Phase] = frozenset({"forward", "backward", "step"})
_FORWARD: frozenset[Phase] = frozenset({"forward"})
_BACKWARD: frozenset[Phase] = frozenset({"backward"})
_BOTH: frozenset[Phase] = frozenset({"forward", "backward"})
_STEP: frozenset[Phase] = frozenset({"step"})


class Kept(Record):
    """Bytes of one parameter that stay from step to step, or from a backward to its step."""

    each_bytes: float
    sharded: bool = False
    """Divided by the ranks that share states."""
    always: bool = True
    """False: made by the backward and given back with the step, as `param.grad` is."""
    stepped_sharded: bool = False
    """Of whole ones the rank's own part alone is left when the optimizer steps."""


class Passing(Record):
    """A tensor that is there for a part of a step, in bytes of an element."""

    what: str
    each_bytes: float
    of: Of
    during: frozenset[Phase]
    number: int = 1
    """Of units at once."""
    beside: int = 0
    """Elements beside the units."""
    elements: int | None = None
    """Of a bucket, all of which are there; of others at most so many."""

    def num_bytes(self, *, stage: float, unit: float, replicas: int) -> float:
        """Return the bytes of a stage of so many parameters, the largest unit of which has `unit`.

        replicas : ranks that share states.
        """
        if self.of == "bucket":
            return self.each_bytes * (self.elements or 0)
        units = self.number * unit + self.beside
        size = {"stage": stage, "shard": stage / replicas, "unit": units}[self.of]
        # no more units than there are
        size = min(size, stage)
        return self.each_bytes * (size if self.elements is None else min(size, self.elements))


class StateRecipe(Record):
    """What an engine keeps of a parameter at a ZeRO stage, and what comes and goes beside it."""

    keeper: Keeper
    zero: Zero
    weights: Kept
    """That the model has between steps."""
    gradients: Kept
    master: Kept
    """fp32 copies of the weights; 0 bytes where the weights are fp32 themselves."""
    moments: Kept
    passing: tuple[Passing, ...] = ()
    source: str = ""
    """File, and release, of the engine that the figures are from."""

    @property
    def kept(self) -> tuple[tuple[str, Kept], ...]:
        """All that is kept, by name."""
        return (
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("fp32 weights", self.master),
            ("Adam moments", self.moments),
        )

    def per_parameter(self, replicas: int = 1, *, always: bool = False) -> float:
        """Return the bytes of a parameter where the optimizer steps; always : without gradients
        that are given back."""
        return sum(
            kept.each_bytes / (replicas if kept.sharded else 1)
            for _, kept in self.kept
            if kept.always or not always
        )

    def whole_and_shared(self) -> tuple[float, float]:
        """Return the bytes of a parameter that each rank has, and those that ranks divide."""
        parts = [(kept.each_bytes, kept.sharded) for _, kept in self.kept]
        return (
            sum(size for size, sharded in parts if not sharded),
            sum(size for size, sharded in parts if sharded),
        )

    def passing_bytes(self, phase: Phase, *, stage: float, unit: float, replicas: int = 1) -> float:
        """Return what passes at once in a phase of a step, in bytes.

        stage : parameters of the rank. unit : of its largest unit.
        """
        return sum(
            entry.num_bytes(stage=stage, unit=unit, replicas=replicas)
            for entry in self.passing
            if phase in entry.during
        )


class _Asked(Record):
    """The arguments of `recipe_of`, its defaults filled in."""

    keeper: Keeper
    zero: Zero
    precision: PrecisionKind
    wide: bool | None
    """Gradients are summed in fp32; None: as the engine does unless it is told."""
    each: bool
    """Gradients are reduced behind every micro-batch, or there is one."""
    buckets: Buckets

    @property
    def element(self) -> float:
        return 4.0 if self.precision == "fp32" else 2.0

    def gradient(self, default: bool) -> float:
        """Bytes of a summed gradient; default : whether it is fp32 unless the engine is told."""
        wide = default if self.wide is None else self.wide
        return 4.0 if wide or self.precision == "fp32" else 2.0

    @property
    def master(self) -> float:
        """fp32 weights are their own master."""
        return 0.0 if self.precision == "fp32" else 4.0


def _recipe(
    asked: _Asked,
    source: str,
    *,
    weights: Kept,
    gradients: Kept,
    optimizer: bool,
    master: float,
    passing: Sequence[Passing | None] = (),
) -> StateRecipe:
    """Return a recipe whose optimizer's states are Adam's; optimizer : they are divided."""
    return StateRecipe(
        keeper=asked.keeper,
        zero=asked.zero,
        weights=weights,
        gradients=gradients,
        master=Kept(each_bytes=master, sharded=optimizer),
        moments=Kept(each_bytes=_MOMENTS, sharded=optimizer),
        passing=tuple(entry for entry in passing if entry is not None and entry.each_bytes),
        source=source,
    )


def _megatron(asked: _Asked) -> StateRecipe:
    """Return the states of Megatron-Core: one buffer of all gradients, made before the first step.

    Its distributed optimizer keeps that buffer whole, whatever the number of micro-batches; ZeRO-2
    is Megatron-FSDP's `optim_grads`. fp16 has fp32 gradients for the step.
    """
    zero = asked.zero
    # fp32 sums of bf16 alone (`accumulate_allreduce_grads_in_fp32` follows from --bf16)
    gradient = asked.gradient(asked.precision == "bf16")
    fully = asked.keeper == "megatron-fsdp"
    # weights of one unit are used, those of the next fetched
    gathered = Passing(
        what="gathered weights", each_bytes=asked.element, of="unit", number=2, during=_BOTH
    )
    unscaled = Passing(what="unscaled gradients", each_bytes=4.0, of="shard", during=_STEP)
    reduced = Passing(what="unreduced gradients", each_bytes=gradient, of="unit", during=_BACKWARD)
    return _recipe(
        asked,
        "megatron/core/distributed/param_and_grad_buffer.py, distributed/fsdp; docs of the "
        "distributed optimizer (bytes per parameter: 18; 6 + 12/d)",
        weights=Kept(each_bytes=asked.element, sharded=zero == 3),
        gradients=Kept(each_bytes=gradient, sharded=zero >= 2),
        optimizer=zero >= 1,
        master=asked.master,
        passing=(
            gathered if fully and zero == 3 else None,
            reduced if fully and zero >= 2 else None,
            unscaled if asked.precision == "fp16" else None,
        ),
    )


def _fsdp2(asked: _Asked) -> StateRecipe:
    """Return the states of `fully_shard`: fp32 shards, out of which 16-bit units are gathered.

    ZeRO-1 and ZeRO-2 are units that are not given back behind the forward (`reshard_after_forward`
    false). Replicas alone are the same with nothing divided: a unit is still cast. torchtitan
    reduces in fp32 (`mixed_precision_reduce`), accelerate in the precision of the model.
    """
    zero, element = asked.zero, asked.element
    reduced = asked.gradient(asked.keeper == "torchtitan")
    gathers = not (zero == 0 and asked.precision == "fp32")
    held = zero in (1, 2) and gathers
    passing: list[Passing | None] = [
        # weights that are not given back: from the forward of a unit to its backward
        Passing(what="gathered weights", each_bytes=element, of="stage", during=_BOTH)
        if held
        else None,
        Passing(what="gathered weights", each_bytes=element, of="unit", during=_BOTH)
        if gathers and not held
        else None,
        # the forward keeps the exchange's own output until the next unit's is copied out of; the
        # backward has the next unit's under way, and with kept units none
        Passing(
            what="output of the gather",
            each_bytes=element,
            of="unit",
            during=_FORWARD if held else _BOTH,
        )
        if gathers and zero
        else None,
        # autograd's, in the precision of the gathered weights
        Passing(what="unreduced gradients", each_bytes=element, of="unit", during=_BACKWARD),
        # a unit's copy is kept until the unit before it is reduced
        Passing(what="input of the reduction", each_bytes=reduced, of="unit", during=_BACKWARD)
        if zero
        else None,
        # `to_accumulated_grad_if_needed`: sums that wait for the last micro-batch
        None
        if asked.each
        else Passing(what="whole gradients", each_bytes=reduced, of="stage", during=_BOTH),
    ]
    return _recipe(
        asked,
        "torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py; "
        "torchtitan 0.3 distributed/fsdp.py; accelerate 1.15 utils/fsdp_utils.py (upcasts to fp32)",
        weights=Kept(each_bytes=4.0, sharded=zero > 0),
        gradients=Kept(each_bytes=4.0, sharded=zero > 0, always=False),
        optimizer=zero > 0,
        master=0.0,
        passing=passing,
    )


def _replicated(asked: _Asked) -> StateRecipe:
    """Return the states of DistributedDataParallel under autocast: fp32, and 16-bit copies.

    Autocast casts a weight once and keeps the copy until the backward is through; buckets of fp32
    are apart from gradients unless `gradient_as_bucket_view` says otherwise.
    """
    narrow = asked.precision != "fp32"
    copies = Passing(what="copies of autocast", each_bytes=2.0, of="stage", during=_BOTH)
    buckets = Passing(what="buckets of the reduction", each_bytes=4.0, of="stage", during=_ALWAYS)
    return _recipe(
        asked,
        "torch 2.13, nn/parallel/distributed.py and csrc/distributed/c10d/reducer.cpp; accelerate "
        "1.15 accelerator.py (autocast of the forward)",
        weights=Kept(each_bytes=4.0),
        gradients=Kept(each_bytes=4.0, always=False),
        optimizer=False,
        master=0.0,
        passing=(copies if narrow else None, buckets),
    )


def _accelerate(asked: _Asked) -> StateRecipe:
    return _replicated(asked) if asked.zero == 0 else _fsdp2(asked)


def _deepspeed(asked: _Asked) -> StateRecipe:
    return (_flat, _partitioned, _partitioned, _stage3)[asked.zero](asked)


def _flat(asked: _Asked) -> StateRecipe:
    """Return the states of DeepSpeed without ZeRO.

    0.19 sums gradients of 16 bits as they are (`FP16_Optimizer`), and refuses others; older
    releases sum those of bf16 in fp32, which is `BF16_Optimizer`: its states are divided.
    """
    if asked.precision == "bf16" and asked.wide:
        return _bf16_optimizer(asked)
    bucket = Passing(
        what="bucket of the reduction",
        each_bytes=asked.element,
        of="stage",
        # `allreduce_gradients` flattens up to so many elements
        elements=asked.buckets.reduce,
        during=_BACKWARD,
    )
    # each gradient in fp32, and all of them as one tensor, before the 16-bit ones go
    copies = Passing(what="fp32 gradients", each_bytes=8.0, of="stage", during=_STEP)
    return _recipe(
        asked,
        "DeepSpeed 0.19.8 runtime/engine.py (_do_optimizer_sanity_check), "
        "runtime/fp16/fused_optimizer.py",
        weights=Kept(each_bytes=asked.element),
        gradients=Kept(each_bytes=asked.element, always=False),
        optimizer=False,
        master=asked.master,
        passing=(bucket, copies if asked.precision != "fp32" else None),
    )


def _bf16_optimizer(asked: _Asked) -> StateRecipe:
    """Return the states of `BF16_Optimizer`: 2 + 4 + 12/D, and a 16-bit gradient of each backward.

    It is what stage 1 with bf16 and `grad_accum_dtype` fp32 is in 0.19, and bf16 without ZeRO in
    releases before; gradients lie in one whole buffer.
    """
    bucket = Passing(
        what="bucket of the reduction",
        each_bytes=4.0,
        of="stage",
        elements=asked.buckets.reduce,
        during=_BACKWARD,
    )
    # added to the buffer when the backward is through (`immediate_grad_update` false)
    own = Passing(what="16-bit gradients", each_bytes=2.0, of="stage", during=_BACKWARD)
    return _recipe(
        asked,
        "DeepSpeed 0.19.8 runtime/bf16_optimizer.py",
        weights=Kept(each_bytes=2.0),
        gradients=Kept(each_bytes=4.0),
        optimizer=True,
        master=4.0,
        passing=(bucket, own),
    )


def _partitioned(asked: _Asked) -> StateRecipe:
    """Return the states of ZeRO-1 and ZeRO-2: whole weights, a part of all else.

    Gradients of ZeRO-1 stay whole until the step. A bucket of `reduce_bucket_size` elements is
    made at the first gradient of a micro-batch, two with `overlap_comm`.
    """
    buckets, second = asked.buckets, asked.zero == 2
    gradient = asked.gradient(False)
    if not second and asked.precision == "bf16" and gradient == 4.0:
        return _bf16_optimizer(asked)
    bucket = Passing(
        what="buckets of the reduction",
        # ZeRO-1 fills it from the sums
        each_bytes=(asked.element if second else gradient)
        * (2 if buckets.overlap and buckets.contiguous else 1),
        of="bucket" if buckets.contiguous else "stage",
        elements=buckets.reduce,
        during=_BACKWARD,
    )
    # the rank's part is made one tensor and fp32 for the step
    flat = Passing(what="flat gradients", each_bytes=gradient, of="shard", during=_STEP)
    wide = Passing(what="fp32 gradients", each_bytes=4.0, of="shard", during=_STEP)
    return _recipe(
        asked,
        "DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py (setup_buckets, step), zero/config.py",
        weights=Kept(each_bytes=asked.element),
        # the rest goes when all are reduced
        gradients=Kept(
            each_bytes=gradient, sharded=second, always=False, stepped_sharded=not second
        ),
        optimizer=True,
        master=asked.master,
        passing=(bucket, flat, wide if gradient < 4.0 else None),
    )


def _stage3(asked: _Asked) -> StateRecipe:
    """Return the states of ZeRO-3: all divided; parameters are gathered up to a number of them.

    Parameters below `stage3_param_persistence_threshold` elements (vectors) stay whole, which is
    left out here. `stage3_max_live_parameters` holds back what is fetched ahead, no more.
    """
    buckets, gradient = asked.buckets, asked.gradient(False)
    # a layer, what is fetched ahead of it, and what the backward uses again within the distance:
    # at the end of the forward half of it, for the other half lies on the way back
    gathered = Passing(
        what="gathered weights",
        each_bytes=asked.element,
        of="unit",
        beside=min(buckets.prefetch, buckets.live) + buckets.reuse // 2,
        during=_BOTH,
    )
    # an exchange has one buffer, from which each weight is copied
    output = Passing(
        what="output of the gather",
        each_bytes=asked.element,
        of="stage",
        elements=min(buckets.prefetch, buckets.live),
        during=_BOTH,
    )
    bucket = Passing(
        what="bucket of the reduction",
        each_bytes=asked.element,
        of="bucket",
        elements=buckets.reduce if buckets.contiguous else 0,
        during=_ALWAYS,
    )
    # `reduce_scatter_coalesced` copies a bucket into the order of ranks
    ordered = Passing(
        what="input of the reduction",
        each_bytes=asked.element,
        of="stage",
        elements=buckets.reduce,
        during=_BACKWARD,
    )
    # gradients of one sub-group of the part, flat and in fp32
    step = Passing(
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
        weights=Kept(each_bytes=asked.element, sharded=True),
        gradients=Kept(each_bytes=gradient, sharded=True),
        optimizer=True,
        master=asked.master,
        passing=(gathered, output, bucket, ordered if buckets.reduce_scatter else None, step),
    )


def _paddle(asked: _Asked) -> StateRecipe:
    """Return the states of Paddle's O2: 16-bit weights, gradients fp32 with `amp_master_grad`.

    `--sharding stage1`, `stage2`, `stage3` divide the optimizer, gradients too, weights too.
    """
    zero, gradient = asked.zero, asked.gradient(False)
    gathered = Passing(what="gathered weights", each_bytes=asked.element, of="unit", during=_BOTH)
    own = Passing(what="unreduced gradients", each_bytes=asked.element, of="unit", during=_BACKWARD)
    return _recipe(
        asked,
        "paddle distributed/fleet/utils/mix_precision_utils.py (main_grad), "
        "distributed/fleet/meta_parallel/sharding; PaddleNLP trainer/training_args.py",
        weights=Kept(each_bytes=asked.element, sharded=zero == 3),
        gradients=Kept(each_bytes=gradient, sharded=zero >= 2),
        optimizer=zero >= 1,
        master=asked.master,
        passing=(gathered if zero == 3 else None, own if zero >= 2 or gradient == 4.0 else None),
    )


def _fsdp1(asked: _Asked) -> StateRecipe:
    """Return the states of Galvatron: FSDP of flat parameters, each layer a unit.

    fp32 shards; ZeRO-2 keeps what is gathered until the backward, `no_sync` the 16-bit gradients.
    """
    zero, element = asked.zero, asked.element
    reduced = asked.gradient(False)
    wide = Passing(what="fp32 gradients", each_bytes=reduced, of="unit", during=_BACKWARD)
    return _recipe(
        asked,
        "torch 2.13, distributed/fsdp/_flat_param.py and _runtime_utils.py; Galvatron "
        "core/runtime/parallel.py (wrap_modules_data_parallel)",
        weights=Kept(each_bytes=4.0, sharded=zero > 0),
        gradients=Kept(each_bytes=4.0, sharded=zero > 0, always=False),
        optimizer=zero > 0,
        master=0.0,
        passing=(
            Passing(what="gathered weights", each_bytes=element, of="stage", during=_BOTH)
            if zero in (1, 2)
            else Passing(
                # the backward fetches the unit before the one that is computed
                what="gathered weights",
                each_bytes=element if zero or asked.precision != "fp32" else 0.0,
                of="unit",
                number=2 if zero else 1,
                during=_BOTH,
            ),
            Passing(what="unreduced gradients", each_bytes=element, of="unit", during=_BACKWARD)
            if asked.each
            else Passing(what="whole gradients", each_bytes=element, of="stage", during=_BOTH),
            wide if reduced > element else None,
        ),
    )


def _executor(asked: _Asked) -> StateRecipe:
    """Return the states of `profile-plan`: Megatron's without ZeRO, FSDP2's with it.

    Without ZeRO gradients are summed in the precision of the model.
    """
    if asked.zero:
        return _fsdp2(asked)
    narrow = asked.precision != "fp32"
    wide = Passing(what="fp32 gradients", each_bytes=4.0, of="stage", during=_STEP)
    return _recipe(
        asked,
        "profiler/plan/stage.py",
        weights=Kept(each_bytes=asked.element),
        gradients=Kept(each_bytes=asked.element),
        optimizer=False,
        master=asked.master,
        passing=(wide if narrow else None,),
    )


_RECIPES: Mapping[Keeper, Callable[[_Asked], StateRecipe]] = {
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


def recipe_of(
    keeper: str,
    zero: int,
    precision: str = "bf16",
    *,
    fp32_gradients: bool | None = None,
    each_micro_batch: bool = True,
    buckets: Buckets = BUCKETS,
) -> StateRecipe:
    """Return what an engine keeps of a parameter, in bytes, with Adam.

    Parameters
    ----------
    keeper : one of KEEPERS. zero : stage, 0 for replicas. precision : bf16, fp16 or fp32.
    fp32_gradients : in what gradients are summed; None: as the engine does unless it is told.
    each_micro_batch : gradients are reduced behind each of them; False: behind the last.
    buckets : of DeepSpeed.

    Raises InputError: no such engine, stage or precision.
    """
    if keeper not in _RECIPES:
        raise InputError(f"no recipe of {keeper!r}; known are {', '.join(KEEPERS)}")
    if zero not in (0, 1, 2, 3) or precision not in ("bf16", "fp16", "fp32"):
        raise InputError(f"no recipe of ZeRO stage {zero} in {precision}")
    if keeper == "megatron" and zero > 1:
        # what divides gradients or weights there is Megatron-FSDP
        keeper = "megatron-fsdp"
    asked = _Asked(
        keeper=cast(Keeper, keeper),
        zero=cast(Zero, zero),
        precision=cast(PrecisionKind, precision),
        wide=fp32_gradients,
        each=each_micro_batch,
        buckets=buckets,
    )
    return _RECIPES[asked.keeper](asked)
