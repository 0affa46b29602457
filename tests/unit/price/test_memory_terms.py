"""Every term of a run's memory against numbers made by hand, and what they must not be."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InputError
from autopar.price import workspaces
from autopar.price.account import account_of
from autopar.price.activations import (
    chunk_saved_bytes,
    layer_saved_bytes,
    routing_skew,
    saved_parts,
)
from autopar.price.allocator import RESERVED_RATIOS, Pool, recycled_bytes, rounding_bytes
from autopar.price.parameters import layer_weights, stage_weights
from autopar.price.peak import (
    backward_bytes,
    expert_dispatch_bytes,
    head_bytes,
    order,
    peak_of,
    transfer_bytes,
    warmup_chunks,
)
from autopar.price.states import buffers_of, states_of, widened_bytes
from autopar.records import replace
from autopar.run.architecture import Experts, LatentAttention, Model
from autopar.run.run import Run, run_with_split
from autopar.run.runtime import (
    Allocator,
    ExpertKernels,
    Kernels,
    Optimizer,
    Overlap,
    Precision,
    States,
)
from autopar.run.strategy import even_chunks, recomputing
from autopar.training.adapters import Adapters
from autopar.units import MIB
from tests.runs import decoder, run_of, told


def gpt(**more: Any) -> Model:
    """Return the usual small GPT of Megatron-LM's tests, with changes."""
    sizes = {"layers": 12, "hidden": 512, "width": 2048, "heads": 8, "vocab": 50257}
    return decoder(**sizes, max_positions=1024, **more)


QUIET = Kernels(attention="flash", fused_accumulation=False)
EXPERTS = Experts(number=8, per_token=2, width=1024)
LATENT = {
    "latent": LatentAttention(query_rank=192, kv_rank=64, key_width=16, rotary_width=8),
    "value_width": 16,
}


def run(model: Model | None = None, *, world: int = 1, chunks: int = 1, **more: Any) -> Run:
    """Return a run of micro-batches of four sequences of 1024 tokens, 32 in a step."""
    usual = {"steps": 50, "micro_batch": 4, "global_batch": 32}
    quiet = {"kernels": QUIET, "allocator": Allocator(expandable=True)}
    return run_of(model or gpt(), gpus=world, vpp=chunks, **{**usual, **quiet, **more})


def again(found: Run, *modules: Any, **more: Any) -> Run:
    """Return a run that recomputes modules, or layers."""
    recompute = frozenset(modules) if modules else "full"
    return replace(found, strategy=recomputing(found.strategy, recompute, **more))


def parameters(found: Run, stage: int = 0) -> int:
    """Return the parameters of a stage."""
    return sum(weight.elements for chunk in stage_weights(found, stage) for weight in chunk)


def part(found: Run, name: str) -> int:
    """Return the bytes of the parts of the first layer with a name."""
    return sum(size for part, size in saved_parts(found.rank_layers[0]) if part == name)


# --------------------------------------------------------------------------------------------------
# Parameters and states.


def test_parameters_of_a_dense_layer() -> None:
    """12 h^2 and 13 h of biases and norms, and whole biases behind a split product."""
    h = 512
    whole = sum(weight.elements for weight in layer_weights(run().rank_layers[0]))
    own = run(world=4, tp=4).rank_layers[0]
    split = sum(weight.elements for weight in layer_weights(own))

    assert whole == 12 * h * h + 13 * h
    # of the 13 h the biases of qkv and of the first matrix are split: 7 h
    assert split == 3 * h * h + 6 * h + 7 * h // 4


def test_parameters_around_the_layers() -> None:
    """Tied weights are one matrix in one stage, and two in two; positions are on the first."""
    layers = 12 * (12 * 512 * 512 + 13 * 512)
    words, positions, norm = 50304 * 512, 1024 * 512, 2 * 512

    assert parameters(run()) == layers + words + positions + norm
    assert parameters(run(gpt(tied=False))) == layers + 2 * words + positions + norm
    two = run(world=2, pp=2)
    assert parameters(two) == layers // 2 + words + positions
    assert parameters(two, 1) == layers // 2 + words + norm


def test_parameters_of_experts_and_latent_attention() -> None:
    """Experts are divided by their own degrees; MLA's down projections are whole everywhere."""
    model = gpt(biases=False, experts=EXPERTS)
    found = layer_weights(run(model, world=4, tp=2, ep=2).rank_layers[0])
    by_name = {weight.name: weight for weight in found}
    assert by_name["router"].shape == (8, 512)
    assert by_name["expert fc1"].number == 4
    assert by_name["expert fc1"].shape == (1024, 512)
    assert by_name["expert fc2"].elements == 4 * 512 * 1024

    latent = run(gpt(**LATENT, head_norms=True), world=2, tp=2)
    shapes = {weight.name: weight.shape for weight in layer_weights(latent.rank_layers[0])}
    assert shapes["q down"] == (192, 512)
    assert shapes["q up"] == (8 * 24 // 2, 192)
    assert shapes["kv down"] == (72, 512)
    assert shapes["kv up"] == (8 * 32 // 2, 64)
    assert shapes["proj"] == (512, 8 * 16 // 2)


def test_a_module_of_further_tokens_has_a_layer_and_an_embedding() -> None:
    """Three norms, a projection of 2h to h, a layer, and the words again on another stage."""
    plain = run(gpt(tied=False), world=2, pp=2)
    more = run(gpt(tied=False, mtp=1), world=2, pp=2)

    layer = 12 * 512 * 512 + 13 * 512
    assert parameters(more, 1) - parameters(plain, 1) == (
        6 * 512 + 2 * 512 * 512 + layer + 50304 * 512
    )
    assert parameters(more, 0) == parameters(plain, 0)


def test_states_of_a_rank_are_those_of_its_parameters() -> None:
    """18 bytes each; with the distributed optimizer of padded buffers, all gradients whole."""
    plain = run(world=8)
    weights = stage_weights(plain, 0)
    assert states_of(plain, weights).total_bytes == 18 * parameters(plain)

    sharded = run_with_split(plain, zero=1)
    (buffer,) = buffers_of(sharded, weights[0])
    assert 0 <= buffer.elements - parameters(plain) < 128 * 8
    assert buffer.elements % 128 == 0
    states = states_of(sharded, weights)
    assert states.gradients_bytes == 4 * buffer.elements
    assert states.total_bytes == 6 * buffer.elements + 12 * buffer.elements // 8
    assert sum(buffer.spans) <= buffer.elements // 8
    second = run_with_split(plain, zero=2)
    assert states_of(second, weights).gradients_bytes == 4 * buffer.elements // 8
    halves = run_with_split(sharded, replicas=2)
    assert states_of(halves, weights).moments_bytes == 2 * states.moments_bytes


def test_buckets_close_where_reductions_overlap() -> None:
    """Every bucket of 40 million is padded, and tied weights have one of their own."""
    states = States(bucket=1_000_000)
    overlap = Overlap(gradients=True)
    found = run(world=6, pp=2, global_batch=48, zero=1, overlap=overlap, states=states)
    for stage in (0, 1):
        (buffer,) = buffers_of(found, stage_weights(found, stage)[0])
        # lcm(3, 128)
        assert buffer.elements % 384 == 0
        assert buffer.elements > parameters(found, stage)
    nccl = told(found, states=replace(states, padded_buckets=True))
    (buffer,) = buffers_of(nccl, stage_weights(nccl, 0)[0])
    assert buffer.elements % 65536 == 0


@pytest.mark.parametrize(("moments_bytes", "narrow"), [(8, 0), (6, 1), (5, 1), (4, 2), (2, 2)])
def test_narrow_moments_are_widened(moments_bytes: int, narrow: int) -> None:
    """Of 4 and 1 bytes the second has to be copied, of 2 and 2 both."""
    found = told(run(gpt(tied=False)), optimizer=Optimizer(moments_bytes=moments_bytes))
    chunks = stage_weights(found, 0)
    own = sum(
        buffer.elements // buffer.replicas
        for chunk in chunks
        for buffer in buffers_of(found, chunk)
    )
    assert widened_bytes(found, chunks) == 4 * narrow * own


def test_muon_keeps_one_moment_of_matrices() -> None:
    """Embedding, head, biases and norms have two."""
    adam = run(gpt(tied=False))
    muon = told(adam, optimizer=Optimizer(kind="muon"))
    weights = stage_weights(adam, 0)

    saved = states_of(adam, weights).total_bytes - states_of(muon, weights).total_bytes
    assert saved == 4 * 12 * 12 * 512 * 512


def test_copies_of_eight_bits() -> None:
    """Two of each weight of a product beside 16 bits; one where weights are of 8 bits."""
    plain = run()
    weights = stage_weights(plain, 0)
    matrices = 12 * 12 * 512 * 512
    beside = told(plain, precision=Precision(fp8=True))
    instead = told(plain, precision=Precision(fp8=True, fp8_weights=True))
    before = states_of(plain, weights).total_bytes
    assert states_of(beside, weights).total_bytes == before + 2 * matrices
    assert states_of(instead, weights).total_bytes == before
    # Blackwell multiplies in either order, but for scales of blocks
    blackwell = replace(beside, gpu="GB200")
    assert states_of(blackwell, weights).total_bytes == before + matrices
    blocks = told(blackwell, precision=Precision(fp8=True, fp8_recipe="mxfp8"))
    assert states_of(blocks, weights).total_bytes == before + 2 * matrices


def test_fully_sharded_states_and_what_is_gathered() -> None:
    """18 bytes over all replicas; at the head its unit and two layers in 16 bits."""
    found = run(world=8, zero=3, states=States(keeper="megatron-fsdp"))
    account = account_of(found)
    terms = {term.name: term.num_bytes for term in account.peak}
    own = -(-parameters(found) // 8)
    assert sum(terms[n] for n in ("weights", "gradients", "fp32 weights", "Adam moments")) == (
        18 * own
    )
    layer = 12 * 512 * 512 + 13 * 512
    around = 50304 * 512 + 1024 * 512 + 2 * 512
    assert terms["gathered weights"] == 2 * (around + 2 * layer)


# --------------------------------------------------------------------------------------------------
# What is kept.


@pytest.mark.parametrize(
    ("gpu", "config", "expected"),
    [
        ("H100", None, 64 * MIB),
        ("A100", None, 17039360),
        ("GB200", None, 17039360),
        ("A100", ":4096:8", 64 * MIB),
        ("H100", ":4096:2:16:8", 2 * (8192 + 128) * 1024),
    ],
)
def test_workspaces_of_cublas(gpu: str, config: str | None, expected: int) -> None:
    """Two of them, of the device's default or as configured."""
    assert workspaces.cublas_bytes(run(gpu=gpu, allocator=Allocator(cublas=config))) == expected


def test_workspaces_of_transformer_engine() -> None:
    """One; four more for grouped products, two more where products overlap with transfers."""
    one = run()
    grouped = run(gpt(experts=EXPERTS), experts=ExpertKernels(grouped=True))
    assert workspaces.engine_workspace_bytes(one) == 32 * MIB
    assert workspaces.engine_workspace_bytes(replace(one, gpu="A100")) == 4 * MIB
    assert workspaces.engine_workspace_bytes(grouped) == 5 * 32 * MIB
    assert (
        workspaces.engine_workspace_bytes(told(one, overlap=Overlap(tensor=True))) == 3 * 32 * MIB
    )
    local = replace(QUIET, module="megatron")
    assert workspaces.engine_workspace_bytes(told(one, kernels=local)) == 0
    assert workspaces.engine_workspace_bytes(told(grouped, kernels=local)) == 32 * MIB


def test_buffers_kept_between_steps() -> None:
    """Inputs of pipelines, one gather buffer at its largest, rotary tables, routing maps."""
    two = run(world=8, pp=2, tp=2, sequence_parallel=True, chunks=2)
    assert workspaces.pipeline_bytes(two) == 2 * 2 * 2048 * 512 * 2
    assert workspaces.pipeline_bytes(run()) == 0
    assert workspaces.gather_bytes(two, two.strategy.stages[1]) == 4096 * 512 * 2
    # only the head gathers there
    assert workspaces.gather_bytes(two, two.strategy.stages[0]) == 0
    local = told(two, kernels=replace(QUIET, attention="local"))
    # the scores lie in the same buffer
    assert workspaces.gather_bytes(local, two.strategy.stages[0]) == 4 * 4 * 1024 * 1024 * 2
    gathered = run(gpt(experts=EXPERTS), world=4, ep=4)
    assert workspaces.gather_bytes(gathered, gathered.strategy.stages[0]) == 4 * 4096 * 512 * 2
    chunks = gathered.strategy.stages[0]
    assert workspaces.routing_bytes(gathered, chunks) == 12 * 4 * 4096 * 16
    rotary = run(gpt(positions="rotary", rotary_share=0.5))
    assert workspaces.rotary_bytes(rotary, rotary.strategy.stages[0]) == 1024 * 32 * 4
    found = run(gpt(**LATENT))
    assert workspaces.rotary_bytes(found, found.strategy.stages[0]) == 12 * 5120 * 8 * 4


def test_stand_ins_of_weight_gradients_are_one_of_a_shape() -> None:
    """Equal matrices share one; without fused accumulation there is none."""
    fused = run(kernels=replace(QUIET, fused_accumulation=True))
    weights = stage_weights(fused, 0)
    # qkv, proj, both of the MLP, and the words, which are the head here
    elements = (3 + 1 + 4 + 4) * 512 * 512 + 50304 * 512
    assert workspaces.dummy_weight_gradient_bytes(fused, weights) == 2 * elements
    assert workspaces.dummy_weight_gradient_bytes(run(), weights) == 0


# --------------------------------------------------------------------------------------------------
# Activations.


def test_saved_of_a_dense_layer() -> None:
    """Of s b h = 1: 34 with two masks and copies of Korthikanti et al., less what is fused."""
    unit = 4096 * 512
    found = run()
    # norms 4, qkv 6, output and its copy 4, masks 2, both of the MLP 16, and small statistics
    statistics = 16 * 4096 + 4 * 8 * 4096
    fixed = 2 * (2 + 3 + 1 + 1 + 2 + 4 + 4) + 2
    assert layer_saved_bytes(found.rank_layers[0]) == fixed * unit + statistics

    scores = 4 * 8 * 1024 * 1024
    unfused = told(found, kernels=replace(QUIET, attention="unfused"))
    assert part(unfused, "scores") == 2 * scores
    assert part(unfused, "scores' mask") == scores
    assert part(unfused, "scores after dropout") == 2 * scores
    assert part(unfused, "attention output's copy") == 0


def test_norms_of_heads_and_of_latents() -> None:
    """Queries and keys a second time, values copied beside them, and statistics of every head."""
    found = run(gpt(kv_heads=2, head_norms=True))
    assert part(found, "query norm") == 4096 * 512 * 2
    assert part(found, "key norm") == part(found, "values") == 4096 * 128 * 2
    assert part(found, "head norms' statistics") == 4096 * 10 * 8
    assert part(run(), "values") == 0
    latent = run(gpt(**LATENT, head_norms=True))
    assert part(latent, "latent norms") == 4096 * 256 * 2
    assert part(run(gpt(**LATENT)), "latent norms") == 0


def test_rotary_factors_are_saved_where_no_kernel_makes_them() -> None:
    """Cosines and sines of queries and of keys: four tables of a layer."""
    rotary = run(gpt(positions="rotary", rotary_share=0.5))
    assert part(rotary, "rotary factors") == 0
    apart = told(rotary, kernels=replace(QUIET, fused_rotary=False))
    assert part(apart, "rotary factors") == 4 * 1024 * 32 * 2


def test_sequence_parallelism_scatters_norms_and_masks() -> None:
    """What is between the products is divided; without it, only what is inside them."""
    whole, split = run(world=4, tp=4), run(world=4, tp=4, sequence_parallel=True)
    for name in ("norm input", "norm output", "dropout mask"):
        assert part(whole, name) == 4 * part(split, name)
    for name in ("query", "mlp fc1 output", "mlp activation"):
        assert part(whole, name) == part(split, name) == part(run(), name) // 4


def test_context_parallelism_divides_scores_once() -> None:
    """A rank's queries see all keys."""
    unfused = replace(QUIET, attention="unfused")
    both = run(kernels=unfused), run(world=2, cp=2, kernels=unfused)
    assert part(both[0], "scores") == 2 * part(both[1], "scores")
    assert part(both[0], "qkv") == 2 * part(both[1], "qkv") > 0


def test_saved_of_experts() -> None:
    """Inputs, both widths, the product with the probabilities, and what a gathered copy adds."""
    model = gpt(gated=True, experts=EXPERTS)
    found = run(model, world=4, tp=2, ep=2, etp=2, sequence_parallel=True)
    routed = -(-2048 * 2 * 2 * 1025 // 1000)
    assert part(found, "expert input") == routed * 512 * 2
    assert part(found, "expert input, gathered") == routed * 512 * 2
    assert part(found, "expert fc1 output") == 2 * routed * 512 * 2
    assert part(found, "expert activation") == routed * 512 * 2
    assert part(found, "expert product") == 0
    weighted = told(found, experts=ExpertKernels(fused_weighting=False))
    assert part(weighted, "expert product") == routed * 512 * 2
    act = again(weighted, "moe_act")
    assert part(act, "expert activation") == 0
    assert part(act, "expert product") == 0


def test_routing_is_worst_where_a_rank_has_one_expert() -> None:
    """Several experts even out, all of them have all tokens, and what is given counts."""

    def skew(ep: int, given: float | None = None) -> float:
        found = run(gpt(experts=EXPERTS), world=8, ep=ep, experts=ExpertKernels(skew=given))
        # many steps, or nobody knows how many, have worse ones
        many = replace(found, steps=None).rank_layers[0]
        assert routing_skew(many) == (1.0 if ep == 1 else given or 1.17)
        return routing_skew(found.rank_layers[0])

    assert 1.17 > skew(8) > skew(4) > skew(1) == 1.0
    assert skew(4, 1.5) == 1.5
    assert routing_skew(run().rank_layers[0]) == 1.0


def test_products_of_eight_bits_save_their_copies() -> None:
    """Inputs of products are saved in 8 bits, twice in grouped ones; other tensors as they are."""
    plain = run()
    eight = told(plain, precision=Precision(fp8=True))
    for name in ("mlp activation", "norm output"):
        assert part(plain, name) == 2 * part(eight, name)
    assert part(plain, "mlp fc1 output") == part(eight, "mlp fc1 output")
    single = run(gpt(experts=EXPERTS), precision=Precision(fp8=True))
    both = told(single, experts=ExpertKernels(grouped=True))
    name = "expert activation"
    assert part(both, name) == 2 * part(single, name)


def test_recomputation_keeps_inputs_alone() -> None:
    """Of full units their first inputs, of blocks the other layers; modules lose their outputs."""
    inputs = 4096 * 512 * 2
    uniform = again(run(), unit=2)
    (chunk,) = uniform.strategy.stages[0]
    # the embedding's mask, six units, and the final norm's input and output
    assert chunk_saved_bytes(uniform, chunk) == inputs // 2 + 6 * inputs + 2 * inputs
    block = again(run(), first=10)
    layers = 2 * layer_saved_bytes(run().rank_layers[0])
    assert chunk_saved_bytes(block, chunk) == inputs // 2 + 10 * inputs + layers + 2 * inputs

    core = again(run(kernels=replace(QUIET, attention="unfused")), "core_attn")
    assert part(core, "scores") == 0
    assert part(core, "attention output") == inputs


# --------------------------------------------------------------------------------------------------
# Schedule and peak.


def kinds(found: Run, stage: int) -> str:
    """Return a stage's events as `f0 f1 b0`, of chunks `f00`."""
    vpp = found.strategy.vpp > 1
    return " ".join(
        f"{event.kind[0]}{event.chunk if vpp else ''}{event.micro_batch}"
        for event in order(found, stage)
    )


def test_one_forward_one_backward() -> None:
    """The last stage alternates at once, the first after as many forwards as there are behind."""
    found = run(world=2, pp=2, global_batch=12)
    assert kinds(found, 1) == "f0 b0 f1 b1 f2 b2"
    assert kinds(found, 0) == "f0 f1 b0 f2 b1 b2"
    short = run(world=4, pp=4, global_batch=4)
    assert kinds(short, 0) == "f0 b0"


def test_interleaved_order() -> None:
    """Groups of micro-batches pass through all chunks; backwards begin with the last chunk."""
    found = run(world=2, pp=2, chunks=2, global_batch=16)
    assert kinds(found, 1).startswith("f00 f01 f10 b10 f11 b11 f02 b00 f03 b01")
    assert warmup_chunks(found, 0) == 4
    assert warmup_chunks(found, 1) == 2
    wide = run(world=2, pp=2, chunks=2, global_batch=16, group=4)
    assert warmup_chunks(wide, 1) == 4
    beside = run(world=2, pp=2, chunks=2, global_batch=16, overlap=Overlap(experts=True))
    assert warmup_chunks(beside, 1) == 3
    assert kinds(run(overlap=Overlap(experts=True), global_batch=12), 0) == "f0 f1 b0 f2 b1 b2"


def test_many_micro_batches_are_not_all_replayed() -> None:
    """What is live repeats itself: a step of a million takes no longer than one of fifty."""
    few = run(world=4, pp=4, chunks=3, global_batch=4 * 50)
    many = run(world=4, pp=4, chunks=3, global_batch=4 * 1_000_002)
    assert len(order(many, 0)) < 300
    for stage in range(4):
        assert account_of(few, stage).peak_bytes == account_of(many, stage).peak_bytes


def test_peak_of_the_last_stage_is_one_micro_batch_and_three_logits() -> None:
    """3X of logits in 16 bits, and of an interleaved stage a chunk more than its groups."""
    found = run(world=2, pp=2)
    peak = peak_of(found, 1)
    assert peak.moment.live == (1,)
    assert peak.head_bytes == 3 * 4096 * 50304 * 2
    deep = run(world=4, pp=4, chunks=3)
    assert sum(peak_of(deep, 3).moment.live) == 2 * 4 + 1
    assert sum(peak_of(run(world=4, pp=4), 0).moment.live) == 4


@pytest.mark.parametrize("adapters", [None, Adapters(rank=8, targets=frozenset({"query"}))])
def test_the_backward_of_the_head_frees_what_it_saved(adapters: Adapters | None) -> None:
    found = told(run(), adapters=adapters) if adapters else run()
    ((chunk,),) = found.strategy.stages
    bare = chunk._replace(head=False)
    saved = chunk_saved_bytes(found, chunk) - chunk_saved_bytes(found, bare)
    assert saved > 0
    assert backward_bytes(found, chunk)[1] - backward_bytes(found, bare)[1] == saved


@pytest.mark.parametrize(
    ("fusion", "kind", "mtp", "expected"),
    [
        ("none", "bf16", 0, 6),
        ("none", "fp32", 0, 4),
        ("none", "bf16", 1, 10),
        ("native", "bf16", 0, 10),
    ],
)
def test_bytes_of_a_logit(fusion: Any, kind: Any, mtp: int, expected: int) -> None:
    """16 bits and an fp32 copy; fp32 needs no copy, fusion keeps more or works in place."""
    kernels = replace(QUIET, loss=fusion)
    found = run(gpt(mtp=mtp), kernels=kernels, precision=Precision(kind=kind))
    assert head_bytes(found, mtp) == expected * 4096 * 50304


def test_a_loss_in_place_leaves_the_gradient_of_the_heads_input() -> None:
    """16 bits of every logit, and of the module's; all tokens' gradient, and a rank's own of it."""
    unit = 4096 * 512 * 2
    fused = replace(QUIET, loss="te")
    assert head_bytes(run(kernels=fused)) == 2 * 4096 * 50304 + unit
    assert head_bytes(run(gpt(mtp=2), kernels=fused), 2) == 3 * 2 * 4096 * 50304 + unit
    split = run(kernels=fused, world=4, tp=4, sequence_parallel=True)
    # 50257 words are 50688 of four ranks
    assert head_bytes(split) == 2 * 4096 * 50688 // 4 + unit + unit // 4


def test_backward_of_scores_can_be_the_peak() -> None:
    """Four gradients of the scores, when the MLP behind them is freed."""
    unfused = run(kernels=replace(QUIET, attention="unfused"))
    (chunk,) = unfused.strategy.stages[0]
    scores = 4 * 8 * 1024 * 1024 * 2
    own, freed = backward_bytes(unfused, chunk)
    unit = 4096 * 512
    assert own == 4 * scores
    assert freed == 2 * 2 * unit + (2 * 2 + 1 + 16) * unit + 16 * 4096


def test_modules_are_computed_again_where_their_backward_is() -> None:
    """An MLP that is recomputed is there again beside its gradients, and nothing else is."""
    plain = run()
    made = again(plain, "mlp")
    (chunk,) = plain.strategy.stages[0]
    mlp = 4096 * 2048 * 2 * 2
    assert backward_bytes(plain, chunk)[0] == mlp // 2 + 4096 * 512 * 2
    assert backward_bytes(made, chunk)[0] == mlp + mlp // 2 + 4096 * 512 * 2


def test_transfers_and_micro_batches() -> None:
    """Two tensors of 1F1B, one and none of its first stage, three of interleaved stages; a mask."""
    unit = 4096 * 512 * 2
    assert transfer_bytes(run(), 0, "forward") == 0
    two = run(world=2, pp=2)
    assert transfer_bytes(two, 1, "forward") == transfer_bytes(two, 1, "backward") == 2 * unit
    assert transfer_bytes(two, 0, "forward") == unit
    assert transfer_bytes(two, 0, "backward") == 0
    assert transfer_bytes(run(world=2, pp=2, chunks=2), 0, "backward") == 3 * unit
    found = run(world=4, pp=4)
    loaded = [workspaces.mask_bytes(found, chunks) for chunks in found.strategy.stages]
    assert loaded == [4 * 1024 * (12 + 1024), 0, 0, 4 * 1024 * (12 + 1024)]
    bare = run(masks=False)
    assert workspaces.mask_bytes(bare, bare.strategy.stages[0]) == 4 * 1024 * 12


@pytest.mark.parametrize(
    ("sizes", "dispatcher", "ep", "copies"),
    [
        # permuted, received; sorted back, sent
        ({"number": 8}, "alltoall", 4, 4),
        # one expert a rank needs no order
        ({"number": 4}, "alltoall", 4, 3),
        # nothing is sent
        ({"number": 8}, "alltoall", 1, 3),
        # each token twice at most: received, made, put back
        ({"number": 8}, "flex", 4, 3),
        ({"number": 8, "per_token": 8}, "flex", 4, 2 * 2 + 4),
        # made, and put among the tokens of all four ranks
        ({"number": 8}, "allgather", 4, 1 + 2),
    ],
)
def test_tokens_between_experts(
    sizes: dict[str, int], dispatcher: Any, ep: int, copies: int
) -> None:
    """At its fullest a mixture's forward holds every routed token several times, unsaved."""
    sized, pattern = replace(EXPERTS, **sizes), (False,) * 11 + (True,)
    mixed, dense = (
        run(
            gpt(experts=sized, mixtures=which),
            world=4,
            ep=ep,
            experts=ExpertKernels(dispatcher=dispatcher, skew=1.0),
        )
        for which in (pattern, pattern[::-1])
    )
    assert expert_dispatch_bytes(mixed, mixed.strategy.stages[0][0]) == copies * 2 * 4096 * 512 * 2
    assert expert_dispatch_bytes(dense, dense.strategy.stages[0][0]) == 0


def test_mixtures_are_fullest_in_their_forward_where_the_head_is_small() -> None:
    """The first of two stages, with no head, holds tokens of experts beside its live batches."""
    model = gpt(experts=replace(EXPERTS, per_token=8))
    mixture = ExpertKernels(dispatcher="alltoall", skew=1.0)
    found = peak_of(run(model, world=4, pp=2, ep=2, experts=mixture), 0)
    assert found.moment.event.kind == "forward"
    assert found.dispatched_bytes == 4 * 8 * 4096 * 512 * 2
    assert found.moment.live == (2,)


def test_exchanged_heads_keep_what_attention_made() -> None:
    """The kernel's output, and what comes back of it to the product behind; a ring has one."""
    ring = run(world=2, cp=2, kernels=replace(QUIET, attention="fused"))
    heads = run(world=2, cp=2, cp_kind="a2a", kernels=ring.kernels)
    assert part(ring, "attention output's copy") == 0
    assert part(heads, "attention output's copy") == 4096 // 2 * 512 * 2


# --------------------------------------------------------------------------------------------------
# Blocks, the table, and what is refused.


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, 512),
        (MIB, MIB),
        (MIB + 1, 2 * MIB),
        (3 * MIB, 4 * MIB),
        (4 * MIB, 4 * MIB),
        (4 * MIB + 512, 4 * MIB + 512),
        (5 * MIB, 6 * MIB),
        (49.125 * MIB, 50 * MIB),
        (98.25 * MIB, 98.25 * MIB),
    ],
)
def test_blocks_that_come_and_go(size: float, expected: float) -> None:
    """Rests of at most 1 MiB of a hole of whole 2 MiB stay with the block."""
    assert recycled_bytes(size, expandable=False) == expected
    assert recycled_bytes(size, expandable=True) == -(-int(size) // 512) * 512


def test_flash_attention_leaves_a_hole_to_the_masks() -> None:
    """Three copies of 1 MiB lie where nothing is rounded, and two masks of 2 MiB take 3 each."""
    found = run(world=4, tp=4, allocator=Allocator())
    fused = told(found, kernels=replace(QUIET, attention="fused"))
    assert part(found, "query") == MIB
    assert part(fused, "qkv") == 3 * MIB
    # 12 layers and the embedding; of one tensor of 3 MiB each block is 4
    assert peak_of(found, 0).rounding_bytes - peak_of(fused, 0).rounding_bytes == (25 - 12) * MIB
    assert recycled_bytes(2 * MIB, expandable=False, hole_bytes=3 * MIB) == 3 * MIB
    assert recycled_bytes(2 * MIB, expandable=False, hole_bytes=3 * MIB + 512) == 2 * MIB


@pytest.mark.parametrize("size", [100, 1.5 * MIB, 2 * MIB, 3 * MIB, 12.5 * MIB, 20 * MIB])
def test_equal_blocks_are_allocated_together(size: float) -> None:
    """Thousands of experts' tensors take the blocks that they take one after another."""
    for expandable in (False, True):
        alone, together = Pool(expandable=expandable), Pool(expandable=expandable)
        for first in (3 * MIB, 3 * MIB, 13.5 * MIB, 30.5 * MIB, 1.2 * MIB):
            alone.take(first)
            together.take(first)
        for _ in range(41):
            alone.take(size)
        together.take(size, 41)
        for pool in (alone, together):
            pool.take(1.5 * MIB, 7)
        assert together.allocated_bytes == alone.allocated_bytes
        assert together.rounding_bytes == alone.rounding_bytes


def test_blocks_that_stay_share_segments() -> None:
    """Six blocks of 3 MiB leave 2 of a segment of 20, of which one of 1.5 MiB takes all."""
    assert rounding_bytes([3 * MIB] * 6, expandable=False) == 0
    assert rounding_bytes([3 * MIB] * 6 + [1.5 * MIB], expandable=False) == MIB // 2
    assert rounding_bytes([3 * MIB] * 6 + [1.5 * MIB], expandable=True) == 0
    pool = Pool(expandable=False)
    for size in (4 * MIB, 100, 12.5 * MIB):
        pool.take(size)
    assert pool.requested_bytes == 4 * MIB + 100 + 12.5 * MIB
    # 12.5 MiB fit into what is left of the segment
    assert pool.rounding_bytes == 412


def test_the_table_of_terms() -> None:
    """Terms are named once, with their switch; the peak drops what is not there yet."""
    account = account_of(run(world=2, pp=2, precision=Precision(kind="fp16")))
    names = [term.name for term in account.peak]
    assert len(set(names)) == len(names)
    assert all(term.switch and term.num_bytes for term in (*account.states, *account.peak))
    only = {term.name for term in account.states} - set(names)
    assert only == {"fp32 gradients of fp16", "pipeline inputs"}
    assert account.peak_bytes == sum(term.num_bytes for term in account.peak)
    low, _, high = RESERVED_RATIOS
    assert account.reserved_bytes == (int(account.peak_bytes * low), int(account.peak_bytes * high))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"world": 3, "tp": 2}, r"world size\(3\) % \(tp\(2\) \* cp\(1\) \* pp\(1\)\) = 1 != 0"),
        ({"global_batch": 30}, r"global batch\(30\) % \(micro batch\(4\) \* dp\(1\)\) = 2 != 0"),
        ({"world": 16, "tp": 16}, r"heads\(8\) % tp\(16\) = 8 != 0"),
        ({"world": 3, "cp": 3}, r"seq_length\(1024\) % cp\(3\) = 1 != 0"),
        ({"world": 5, "pp": 5}, r"layers\(12\) % \(pp\(5\) \* chunks\(1\)\) = 2 != 0"),
        ({"ep": 2}, "world size"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], problem: str) -> None:
    """Degrees and batches that do not divide are one sentence with their arithmetic."""
    with pytest.raises(InputError, match=problem):
        run(**options)


def test_layouts_place_every_layer_once() -> None:
    """Chunks beside the model's layers are refused."""
    with pytest.raises(
        InputError, match="layers of the layout\\(6\\) != layers of the model\\(12\\)"
    ):
        run(stages=even_chunks(6, 1))
