"""Memory of a run as a table of terms that sum to the allocated bytes of one rank.

Each term names the options that control it. The formulas are in the other files of this package.
The reserved bytes are an interval based on published ratios of reserved to allocated memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from autopar.price import workspaces
from autopar.price.allocator import reserved_bytes
from autopar.price.parameters import stage_weights
from autopar.price.peak import Moment, PeakBreakdown, gathered_bytes, peak_of, peaks
from autopar.price.sharded_peak import MemoryItem, sharded_moments, sharded_parts
from autopar.price.states import States, states_of, widened_bytes
from autopar.records import Record, replace
from autopar.run.run import Run, run_with_split
from autopar.run.runtime import ActivationOffload


class Term(Record):
    """One term of a rank's memory."""

    name: str
    num_bytes: int
    switch: str
    """Options that control the size of the term."""


class Account(Record):
    """Allocated bytes of one rank: after a step and at the peak of a step, by term."""

    stage: int
    states: tuple[Term, ...]
    peak: tuple[Term, ...]
    """Terms at the peak of a step: those of `states` still allocated then, and transient memory."""

    @property
    def states_bytes(self) -> int:
        """Allocated bytes after a step."""
        return sum(term.num_bytes for term in self.states)

    @property
    def peak_bytes(self) -> int:
        """Peak allocated bytes of a step."""
        return sum(term.num_bytes for term in self.peak)

    @property
    def reserved_bytes(self) -> tuple[int, int]:
        """(low, high) reserved bytes at the peak."""
        return reserved_bytes(self.peak_bytes)


def account_of(run: Run, stage: int | None = None) -> Account:
    """Return the allocated bytes of one rank of a pipeline stage by term.

    stage : index of the stage; None: the last stage.
    """
    last = run.strategy.pp - 1
    at = last if stage is None else stage
    if run.kernels.torch_layers:
        states, fullest = sharded_parts(run, at)
        return Account(
            stage=at,
            states=tuple(_named(part) for part in states if part.num_bytes),
            peak=tuple(map(_named, fullest)),
        )
    chunks = stage_weights(run, at)
    kept_states = states_of(run, chunks)
    after = tuple(
        term for term in (*_state_terms(run, kept_states), *_kept_terms(run, at)) if term.num_bytes
    )
    during = tuple(term for term in after if term.name not in _GONE)
    widened = widened_bytes(run, chunks)
    step = (*during, Term(name="moments in fp32", num_bytes=widened, switch=_MOMENTS))
    peak = peak_of(run, at)
    during += tuple(term for term in _peak_terms(run, peak, at) if term.num_bytes)
    # the optimizer's step follows the last backward, when no activation is live
    return Account(stage=at, states=after, peak=max(during, step, key=_sum) if widened else during)


_MOMENTS = "--use-precision-aware-optimizer, --exp-avg-dtype, --exp-avg-sq-dtype"


def _sum(terms: Iterable[Term]) -> int:
    return sum(term.num_bytes for term in terms)


def host_bytes_of(run: Run, account: Account) -> float:
    """Return a lower bound of the host bytes of a rank: the device bytes that offload frees.

    It is 0 without offload of optimizer states or activations, and without paged moments. Other
    host memory of an engine, such as pinned transfer buffers, is not counted.

    account : memory of the rank's stage with offload.
    """
    runtime = run.runtime
    optimizer = runtime.optimizer
    if not optimizer.offload and not optimizer.paged and not run.offloads_activations:
        return 0.0
    optimizer = replace(
        optimizer, offload=0.0, offload_master=False, offload_weights=False, paged=False
    )
    on_device = replace(runtime, optimizer=optimizer, offload=ActivationOffload())
    whole = run_with_split(replace(run, runtime=on_device), offload=frozenset())
    there = account_of(whole, account.stage).peak_bytes - account.peak_bytes
    return max(0.0, float(there))


_GONE = frozenset({"fp32 gradients of fp16", "pipeline inputs"})
"""Terms that are allocated after a step but not at the peak."""


def moment_terms(run: Run, account: Account) -> Callable[[Moment], tuple[Term, ...]]:
    """Return a function from an event of a step to the peak allocated terms during that event.

    The largest sum over all events is the peak of `account`.
    """
    if run.kernels.torch_layers:
        parts_at = sharded_moments(run, account.stage)
        others = tuple(term for term in account.peak if term.name == "blocks of other streams")
        return lambda moment: (*map(_named, parts_at(moment)), *others)
    peak_at = peaks(run, account.stage)
    there = tuple(term for term in account.states if term.name not in _GONE)

    def at(moment: Moment) -> tuple[Term, ...]:
        extra = _peak_terms(run, peak_at(moment), account.stage)
        return (*there, *(term for term in extra if term.num_bytes))

    return at


def _named(part: MemoryItem) -> Term:
    return Term(name=part.name, num_bytes=part.num_bytes, switch=part.switch)


def _state_terms(run: Run, states: States) -> Iterator[Term]:
    fp4 = run.runtime.precision.fp4
    sharding = "--use-distributed-optimizer, --num-distributed-optimizer-instances"
    yield Term(name="weights", num_bytes=states.weights_bytes, switch="--bf16, --fp16")
    yield Term(
        name="gradients",
        num_bytes=states.gradients_bytes,
        switch="--bf16, --fp16, --grad-reduce-in-bf16",
    )
    yield Term(name="fp32 weights", num_bytes=states.master_bytes, switch=sharding)
    yield Term(name="Adam moments", num_bytes=states.moments_bytes, switch=sharding)
    yield Term(
        name="4-bit copies of weights" if fp4 else "8-bit copies of weights",
        num_bytes=states.copies_bytes,
        switch="--fp4-format, --fp4-param-gather" if fp4 else "--fp8-format, --fp8-param-gather",
    )
    yield Term(name="fp32 gradients of fp16", num_bytes=states.unscaled_bytes, switch="--fp16")
    rounding = states.rounding_bytes(run)
    yield Term(name="rounding to blocks", num_bytes=rounding, switch="PYTORCH_CUDA_ALLOC_CONF")


def _kept_terms(run: Run, stage: int) -> Iterator[Term]:
    chunks = run.strategy.stages[stage]
    weights = stage_weights(run, stage)
    rows = (
        ("cuBLAS workspaces", workspaces.cublas_bytes(run), "CUBLAS_WORKSPACE_CONFIG, GPU"),
        (
            "Transformer Engine workspaces",
            workspaces.engine_workspace_bytes(run),
            "--transformer-impl, --moe-grouped-gemm, GPU",
        ),
        (
            "pipeline inputs",
            workspaces.pipeline_bytes(run),
            "--pipeline-model-parallel-size, chunks of a stage",
        ),
        (
            "gather buffer",
            workspaces.gather_bytes(run, chunks),
            "--sequence-parallel, --moe-token-dispatcher-type, --transformer-impl",
        ),
        ("overlapped products", workspaces.overlap_bytes(run), "--tp-comm-overlap"),
        ("rotary tables", workspaces.rotary_bytes(run, chunks), "--position-embedding-type"),
        (
            "routing maps",
            workspaces.routing_bytes(run, chunks),
            "--num-experts, --moe-permute-fusion",
        ),
        (
            "stand-ins of weight gradients",
            workspaces.dummy_weight_gradient_bytes(run, weights),
            "--no-gradient-accumulation-fusion",
        ),
    )
    for name, size, switch in rows:
        yield Term(name=name, num_bytes=size, switch=switch)


def _peak_terms(run: Run, peak: PeakBreakdown, stage: int) -> Iterator[Term]:
    rows = (
        (
            "saved activations",
            peak.saved_bytes,
            "--micro-batch-size, --seq-length, recomputation, stages",
        ),
        ("rounding of activations", peak.rounding_bytes, "PYTORCH_CUDA_ALLOC_CONF"),
        ("head and loss", peak.head_bytes, "vocabulary, --cross-entropy-loss-fusion"),
        ("tokens between experts", peak.dispatched_bytes, "--moe-token-dispatcher-type"),
        ("backward of a layer", peak.backward_bytes, "--attention-backend, recomputation"),
        (
            "working memory of a mixer",
            peak.scan_bytes,
            "--micro-batch-size, --tensor-model-parallel-size",
        ),
        ("freed before", -peak.freed_bytes, "--attention-backend"),
        (
            "micro-batch",
            workspaces.mask_bytes(run, run.strategy.stages[stage]),
            "--no-create-attention-mask-in-dataloader",
        ),
        ("transfers", peak.transfer_bytes, "--pipeline-model-parallel-size"),
        ("gathered weights", gathered_bytes(run, stage), "--use-megatron-fsdp"),
    )
    for name, size, switch in rows:
        yield Term(name=name, num_bytes=size, switch=switch)
