"""Every term of a launch's memory against numbers made by hand, and what they must not be."""

from __future__ import annotations

from typing import Any

import pytest
from autopar.run.launch import (
    Attention,
    Degrees,
    Experts,
    Latent,
    Launch,
    Model,
    Optimizer,
    Precision,
    Recompute,
    Software,
    even_chunks,
)

from autopar.errors import InputError
from autopar.price import kept
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
    dispatched_bytes,
    head_bytes,
    peak_of,
    transfer_bytes,
)
from autopar.price.schedule import order, warmup_chunks
from autopar.price.states import buffers_of, states_of, states_per_parameter
from autopar.records import replace
from autopar.units import MIB

PLAIN = Model(
    hidden=512,
    ffn=2048,
    attention=Attention(heads=8, groups=8, width=64),
    vocab=50257,
    expert_layers=(False,) * 12,
    max_positions=1024,
)
"""The usual small GPT of Megatron-LM's tests."""
QUIET = Software(attention="flash", expandable_segments=True, fused_accumulation=False)
EXPERTS = Experts(number=8, per_token=2, ffn=1024)
LATENT = Latent(query_rank=192, key_value_rank=64, key_width=16, rotary_width=8, value_width=16)


def launch(
    model: Model = PLAIN, *, world: int = 1, chunks: int = 1, mtp: int = 0, **options: Any
) -> Launch:
    """Return a launch of micro-batches of four sequences of 1024 tokens, 32 in a step."""
    own = {name: options.pop(name) for name in [*options] if name in Degrees.__annotations__}
    stages = own.get("pp", 1)
    laid = even_chunks(model.num_layers, stages, chunks, mtp=mtp)
    degrees = Degrees(**({"world": world, "chunks": laid} | own))
    return Launch(
        model=replace(model, mtp=mtp),
        degrees=degrees,
        **(
            {"seq": 1024, "steps": 50, "micro_batch": 4, "global_batch": 32, "software": QUIET}
            | options
        ),
    )


def parameters(found: Launch, stage: int = 0) -> int:
    """Return the parameters of a stage."""
    return sum(weight.elements for chunk in stage_weights(found, stage) for weight in chunk)


def part(found: Launch, name: str, *, experts: bool = False) -> int:
    """Return the bytes of the parts of a layer with a name."""
    return sum(size for part, size in saved_parts(found, experts=experts) if part == name)


# --------------------------------------------------------------------------------------------------
# Parameters and states.


def test_parameters_of_a_dense_layer() -> None:
    """12 h^2 and 13 h of biases and norms, and whole biases behind a split product."""
    h = 512
    whole = sum(weight.elements for weight in layer_weights(launch(), experts=False))
    split = sum(weight.elements for weight in layer_weights(launch(world=4, tp=4), experts=False))

    assert whole == 12 * h * h + 13 * h
    # of the 13 h the biases of qkv and of the first matrix are split: 7 h
    assert split == 3 * h * h + 6 * h + 7 * h // 4


def test_parameters_around_the_layers() -> None:
    """Tied weights are one matrix in one stage, and two in two; positions are on the first."""
    layers = 12 * (12 * 512 * 512 + 13 * 512)
    words, positions, norm = 50304 * 512, 1024 * 512, 2 * 512

    assert parameters(launch()) == layers + words + positions + norm
    untied = replace(PLAIN, tied=False)
    assert parameters(launch(untied)) == layers + 2 * words + positions + norm
    two = launch(world=2, pp=2)
    assert parameters(two) == layers // 2 + words + positions
    assert parameters(two, 1) == layers // 2 + words + norm


def test_parameters_of_experts_and_latent_attention() -> None:
    """Experts are divided by their own degrees; MLA's down projections are whole everywhere."""
    model = replace(
        PLAIN, biases=False, qkv_biases=False, experts=EXPERTS, expert_layers=(True,) * 12
    )
    found = layer_weights(launch(model, world=4, tp=2, ep=2, etp=1), experts=True)
    by_name = {weight.name: weight for weight in found}
    assert by_name["router"].shape == (8, 512)
    assert by_name["expert fc1"].number == 4
    assert by_name["expert fc1"].shape == (1024, 512)
    assert by_name["expert fc2"].elements == 4 * 512 * 1024

    latent = replace(PLAIN, attention=replace(PLAIN.attention, latent=LATENT, head_norms=True))
    shapes = {
        weight.name: weight.shape
        for weight in layer_weights(launch(latent, world=2, tp=2), experts=False)
    }
    assert shapes["q down"] == (192, 512)
    assert shapes["q up"] == (8 * 24 // 2, 192)
    assert shapes["kv down"] == (72, 512)
    assert shapes["kv up"] == (8 * 32 // 2, 64)
    assert shapes["proj"] == (512, 8 * 16 // 2)


def test_a_module_of_further_tokens_has_a_layer_and_an_embedding() -> None:
    """Three norms, a projection of 2h to h, a layer, and the words again on another stage."""
    plain = launch(replace(PLAIN, tied=False), world=2, pp=2)
    more = launch(replace(PLAIN, tied=False), world=2, pp=2, mtp=1)

    layer = 12 * 512 * 512 + 13 * 512
    assert parameters(more, 1) - parameters(plain, 1) == (
        6 * 512 + 2 * 512 * 512 + layer + 50304 * 512
    )
    assert parameters(more, 0) == parameters(plain, 0)


@pytest.mark.parametrize(
    ("precision", "sharding", "replicas", "expected"),
    [
        (Precision(), "none", 8, 18.0),
        (Precision(gradients_bf16=True), "none", 8, 16.0),
        (Precision(), "distributed", 8, 6 + 12 / 8),
        (Precision(kind="fp16"), "none", 1, 20.0),
        (Precision(kind="fp32"), "none", 1, 16.0),
        (Precision(), "zero2", 8, 2 + 16 / 8),
        (Precision(), "fsdp", 4, 4.5),
    ],
)
def test_states_of_a_parameter(
    precision: Precision, sharding: str, replicas: int, expected: float
) -> None:
    """Weights, gradients, fp32 weights, moments; fp16 has fp32 gradients for the optimizer too."""
    assert states_per_parameter(precision, replicas=replicas, sharding=sharding) == expected


def test_states_of_a_rank_are_those_of_its_parameters() -> None:
    """18 bytes each; with the distributed optimizer of padded buffers, all gradients whole."""
    plain = launch(world=8)
    weights = stage_weights(plain, 0)
    assert states_of(plain, weights).total_bytes == 18 * parameters(plain)

    sharded = replace(plain, optimizer=Optimizer(sharding="distributed"))
    (buffer,) = buffers_of(sharded, weights[0])
    assert 0 <= buffer.elements - parameters(plain) < 128 * 8
    assert buffer.elements % 128 == 0
    states = states_of(sharded, weights)
    assert states.gradients_bytes == 4 * buffer.elements
    assert states.total_bytes == 6 * buffer.elements + 12 * buffer.elements // 8
    assert sum(buffer.spans) <= buffer.elements // 8
    second = replace(sharded, optimizer=Optimizer(sharding="zero2"))
    assert states_of(second, weights).gradients_bytes == 4 * buffer.elements // 8
    halves = replace(sharded, optimizer=Optimizer(sharding="distributed", instances=2))
    assert states_of(halves, weights).moments_bytes == 2 * states.moments_bytes


def test_buckets_close_where_reductions_overlap() -> None:
    """Every bucket of 40 million is padded, and tied weights have one of their own."""
    overlapping = Optimizer(sharding="distributed", overlap_gradients=True, bucket=1_000_000)
    found = launch(world=6, pp=2, global_batch=48, optimizer=overlapping)
    for stage in (0, 1):
        (buffer,) = buffers_of(found, stage_weights(found, stage)[0])
        # lcm(3, 128)
        assert buffer.elements % 384 == 0
        assert buffer.elements > parameters(found, stage)
    nccl = replace(found, optimizer=replace(overlapping, padded_buckets=True))
    (buffer,) = buffers_of(nccl, stage_weights(nccl, 0)[0])
    assert buffer.elements % 65536 == 0


def test_muon_keeps_one_moment_of_matrices() -> None:
    """Embedding, head, biases and norms have two."""
    adam = launch(replace(PLAIN, tied=False))
    muon = replace(adam, optimizer=Optimizer(kind="muon"))
    weights = stage_weights(adam, 0)

    saved = states_of(adam, weights).total_bytes - states_of(muon, weights).total_bytes
    assert saved == 4 * 12 * 12 * 512 * 512


def test_copies_of_eight_bits() -> None:
    """Two of each weight of a product beside 16 bits; one where weights are of 8 bits."""
    plain = launch()
    weights = stage_weights(plain, 0)
    matrices = 12 * 12 * 512 * 512
    beside = replace(plain, precision=Precision(fp8=True))
    instead = replace(plain, precision=Precision(fp8=True, fp8_weights=True))
    before = states_of(plain, weights).total_bytes
    assert states_of(beside, weights).total_bytes == before + 2 * matrices
    assert states_of(instead, weights).total_bytes == before
    # Blackwell multiplies in either order, but for scales of blocks
    blackwell = replace(beside, software=replace(QUIET, gpu="GB200"))
    assert states_of(blackwell, weights).total_bytes == before + matrices
    blocks = replace(blackwell, precision=Precision(fp8=True, fp8_recipe="mxfp8"))
    assert states_of(blocks, weights).total_bytes == before + 2 * matrices


def test_fully_sharded_states_and_what_is_gathered() -> None:
    """18 bytes over all replicas; at the head its unit and two layers in 16 bits."""
    found = launch(world=8, optimizer=Optimizer(sharding="fsdp"))
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
    assert kept.cublas_bytes(Software(gpu=gpu, cublas_config=config)) == expected


def test_workspaces_of_transformer_engine() -> None:
    """One; four more for grouped products, two more where products overlap with transfers."""
    one = launch()
    grouped = replace(PLAIN, experts=replace(EXPERTS, grouped=True), expert_layers=(True,) * 12)
    assert kept.engine_workspace_bytes(one) == 32 * MIB
    a100 = replace(one, software=replace(QUIET, gpu="A100"))
    assert kept.engine_workspace_bytes(a100) == 4 * MIB
    assert kept.engine_workspace_bytes(launch(grouped)) == 5 * 32 * MIB
    assert kept.engine_workspace_bytes(replace(one, tensor_overlap=True)) == 3 * 32 * MIB
    local = replace(QUIET, local_layers=True)
    assert kept.engine_workspace_bytes(replace(one, software=local)) == 0
    assert kept.engine_workspace_bytes(replace(launch(grouped), software=local)) == 32 * MIB


def test_buffers_kept_between_steps() -> None:
    """Inputs of pipelines, one gather buffer at its largest, rotary tables, routing maps."""
    two = launch(world=8, pp=2, tp=2, sequence_parallel=True, chunks=2)
    assert kept.pipeline_bytes(two) == 2 * 2 * 2048 * 512 * 2
    assert kept.pipeline_bytes(launch()) == 0
    assert kept.gather_bytes(two, two.degrees.chunks[1]) == 4096 * 512 * 2
    # only the head gathers there
    assert kept.gather_bytes(two, two.degrees.chunks[0]) == 0
    local = replace(two, software=replace(QUIET, attention="local"))
    # the scores lie in the same buffer
    assert kept.gather_bytes(local, two.degrees.chunks[0]) == 4 * 4 * 1024 * 1024 * 2
    mixture = replace(PLAIN, experts=EXPERTS, expert_layers=(True,) * 12)
    gathered = launch(mixture, world=4, ep=4)
    assert kept.gather_bytes(gathered, gathered.degrees.chunks[0]) == 4 * 4096 * 512 * 2
    chunks = gathered.degrees.chunks[0]
    assert kept.routing_bytes(gathered, chunks) == 12 * 4 * 4096 * 16
    rotary = launch(replace(PLAIN, positions="rotary", rotary_share=0.5))
    assert kept.rotary_bytes(rotary, rotary.degrees.chunks[0]) == 1024 * 32 * 4
    latent = replace(PLAIN, attention=replace(PLAIN.attention, latent=LATENT))
    found = launch(latent)
    assert kept.rotary_bytes(found, found.degrees.chunks[0]) == 12 * 5120 * 8 * 4


def test_stand_ins_of_weight_gradients_are_one_of_a_shape() -> None:
    """Equal matrices share one; without fused accumulation there is none."""
    fused = launch(software=replace(QUIET, fused_accumulation=True))
    weights = stage_weights(fused, 0)
    # qkv, proj, both of the MLP, and the words, which are the head here
    elements = (3 + 1 + 4 + 4) * 512 * 512 + 50304 * 512
    assert kept.accumulation_bytes(fused, weights) == 2 * elements
    assert kept.accumulation_bytes(launch(), weights) == 0


# --------------------------------------------------------------------------------------------------
# Activations.


def test_saved_of_a_dense_layer() -> None:
    """Of s b h = 1: 34 with two masks and copies of Korthikanti et al., less what is fused."""
    unit = 4096 * 512
    found = launch()
    # norms 4, qkv 6, output and its copy 4, masks 2, both of the MLP 16, and small statistics
    statistics = 16 * 4096 + 4 * 8 * 4096
    fixed = 2 * (2 + 3 + 1 + 1 + 2 + 4 + 4) + 2
    assert layer_saved_bytes(found, experts=False) == fixed * unit + statistics

    scores = 4 * 8 * 1024 * 1024
    unfused = replace(found, software=replace(QUIET, attention="unfused"))
    assert part(unfused, "scores") == 2 * scores
    assert part(unfused, "scores' mask") == scores
    assert part(unfused, "scores after dropout") == 2 * scores
    assert part(unfused, "attention output's copy") == 0


def test_norms_of_heads_and_of_latents() -> None:
    """Queries and keys a second time, values copied beside them, and statistics of every head."""
    normed = replace(PLAIN, attention=replace(PLAIN.attention, groups=2, head_norms=True))
    found = launch(normed)
    assert part(found, "query norm") == 4096 * 512 * 2
    assert part(found, "key norm") == part(found, "values") == 4096 * 128 * 2
    assert part(found, "head norms' statistics") == 4096 * 10 * 8
    assert part(launch(), "values") == 0
    latent = replace(PLAIN, attention=replace(PLAIN.attention, latent=LATENT, head_norms=True))
    assert part(launch(latent), "latent norms") == 4096 * 256 * 2
    bare = replace(latent, attention=replace(latent.attention, head_norms=False))
    assert part(launch(bare), "latent norms") == 0


def test_rotary_factors_are_saved_where_no_kernel_makes_them() -> None:
    """Cosines and sines of queries and of keys: four tables of a layer."""
    rotary = replace(PLAIN, positions="rotary", rotary_share=0.5)
    assert part(launch(rotary), "rotary factors") == 0
    apart = launch(replace(rotary, fused_rotary=False))
    assert part(apart, "rotary factors") == 4 * 1024 * 32 * 2


def test_sequence_parallelism_scatters_norms_and_masks() -> None:
    """What is between the products is divided; without it, only what is inside them."""
    whole, split = launch(world=4, tp=4), launch(world=4, tp=4, sequence_parallel=True)
    for name in ("norm input", "norm output", "dropout mask"):
        assert part(whole, name) == 4 * part(split, name)
    for name in ("query", "mlp fc1 output", "mlp activation"):
        assert part(whole, name) == part(split, name) == part(launch(), name) // 4


def test_context_parallelism_divides_scores_once() -> None:
    """A rank's queries see all keys."""
    unfused = replace(QUIET, attention="unfused")
    both = launch(software=unfused), launch(world=2, cp=2, software=unfused)
    assert part(both[0], "scores") == 2 * part(both[1], "scores")
    assert part(both[0], "qkv") == 2 * part(both[1], "qkv") > 0


def test_saved_of_experts() -> None:
    """Inputs, both widths, the product with the probabilities, and what a gathered copy adds."""
    model = replace(PLAIN, gated=True, experts=EXPERTS, expert_layers=(True,) * 12)
    found = launch(model, world=4, tp=2, ep=2, etp=2, sequence_parallel=True)
    routed = -(-2048 * 2 * 2 * 1025 // 1000)
    assert part(found, "expert input", experts=True) == routed * 512 * 2
    assert part(found, "expert input, gathered", experts=True) == routed * 512 * 2
    assert part(found, "expert fc1 output", experts=True) == 2 * routed * 512 * 2
    assert part(found, "expert activation", experts=True) == routed * 512 * 2
    assert part(found, "expert product", experts=True) == 0
    weighted = replace(model, experts=replace(EXPERTS, fused_weighting=False))
    again = replace(found, model=weighted)
    assert part(again, "expert product", experts=True) == routed * 512 * 2
    act = replace(again, recompute=Recompute(modules=frozenset({"moe_act"})))
    assert part(act, "expert activation", experts=True) == 0
    assert part(act, "expert product", experts=True) == 0


def test_routing_is_worst_where_a_rank_has_one_expert() -> None:
    """Several experts even out, all of them have all tokens, and what is given counts."""

    def skew(experts: Experts, ep: int) -> float:
        model = replace(PLAIN, experts=experts, expert_layers=(True,) * 12)
        found = launch(model, world=8, ep=ep)
        # many steps, or nobody knows how many, have worse ones
        assert routing_skew(replace(found, steps=None)) == (
            1.0 if ep == 1 else experts.skew or 1.17
        )
        return routing_skew(found)

    assert 1.17 > skew(EXPERTS, 8) > skew(EXPERTS, 4) > skew(EXPERTS, 1) == 1.0
    assert skew(replace(EXPERTS, skew=1.5), 4) == 1.5
    assert routing_skew(launch()) == 1.0


def test_products_of_eight_bits_save_their_copies() -> None:
    """Inputs of products are saved in 8 bits, twice in grouped ones; other tensors as they are."""
    plain = launch()
    eight = replace(plain, precision=Precision(fp8=True))
    for name in ("mlp activation", "norm output"):
        assert part(plain, name) == 2 * part(eight, name)
    assert part(plain, "mlp fc1 output") == part(eight, "mlp fc1 output")
    model = replace(PLAIN, experts=EXPERTS, expert_layers=(True,) * 12)
    single = launch(model, precision=Precision(fp8=True))
    grouped = replace(model, experts=replace(EXPERTS, grouped=True))
    both = replace(single, model=grouped)
    name = "expert activation"
    assert part(both, name, experts=True) == 2 * part(single, name, experts=True)


def test_recomputation_keeps_inputs_alone() -> None:
    """Of full units their first inputs, of blocks the other layers; modules lose their outputs."""
    inputs = 4096 * 512 * 2
    uniform = launch(recompute=Recompute(layers="uniform", number=2))
    (chunk,) = uniform.degrees.chunks[0]
    # the embedding's mask, six units, and the final norm's input and output
    assert chunk_saved_bytes(uniform, chunk) == inputs // 2 + 6 * inputs + 2 * inputs
    block = replace(uniform, recompute=Recompute(layers="block", number=10))
    layers = 2 * layer_saved_bytes(launch(), experts=False)
    assert chunk_saved_bytes(block, chunk) == inputs // 2 + 10 * inputs + layers + 2 * inputs

    core = replace(
        launch(software=replace(QUIET, attention="unfused")),
        recompute=Recompute(modules=frozenset({"core_attn"})),
    )
    assert part(core, "scores") == 0
    assert part(core, "attention output") == inputs


# --------------------------------------------------------------------------------------------------
# Schedule and peak.


def kinds(found: Launch, stage: int) -> str:
    """Return a stage's events as `f0 f1 b0`, of chunks `f00`."""
    vpp = found.degrees.vpp > 1
    return " ".join(
        f"{event.kind[0]}{event.chunk if vpp else ''}{event.micro_batch}"
        for event in order(found, stage)
    )


def test_one_forward_one_backward() -> None:
    """The last stage alternates at once, the first after as many forwards as there are behind."""
    found = launch(world=2, pp=2, global_batch=12)
    assert kinds(found, 1) == "f0 b0 f1 b1 f2 b2"
    assert kinds(found, 0) == "f0 f1 b0 f2 b1 b2"
    short = launch(world=4, pp=4, global_batch=4)
    assert kinds(short, 0) == "f0 b0"


def test_interleaved_order() -> None:
    """Groups of micro-batches pass through all chunks; backwards begin with the last chunk."""
    found = launch(world=2, pp=2, chunks=2, global_batch=16)
    assert kinds(found, 1).startswith("f00 f01 f10 b10 f11 b11 f02 b00 f03 b01")
    assert warmup_chunks(found, 0) == 4
    assert warmup_chunks(found, 1) == 2
    wide = launch(world=2, pp=2, chunks=2, global_batch=16, group=4)
    assert warmup_chunks(wide, 1) == 4
    beside = launch(world=2, pp=2, chunks=2, global_batch=16, overlap_experts=True)
    assert warmup_chunks(beside, 1) == 3
    assert kinds(launch(overlap_experts=True, global_batch=12), 0) == "f0 f1 b0 f2 b1 b2"


def test_many_micro_batches_are_not_all_replayed() -> None:
    """What is live repeats itself: a step of a million takes no longer than one of fifty."""
    few = launch(world=4, pp=4, chunks=3, global_batch=4 * 50)
    many = launch(world=4, pp=4, chunks=3, global_batch=4 * 1_000_002)
    assert len(order(many, 0)) < 300
    for stage in range(4):
        assert account_of(few, stage).peak_bytes == account_of(many, stage).peak_bytes


def test_peak_of_the_last_stage_is_one_micro_batch_and_three_logits() -> None:
    """3X of logits in 16 bits, and of an interleaved stage a chunk more than its groups."""
    found = launch(world=2, pp=2)
    peak = peak_of(found, 1)
    assert peak.moment.live == (1,)
    assert peak.head_bytes == 3 * 4096 * 50304 * 2
    deep = launch(world=4, pp=4, chunks=3)
    assert sum(peak_of(deep, 3).moment.live) == 2 * 4 + 1
    assert sum(peak_of(launch(world=4, pp=4), 0).moment.live) == 4


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
    found = launch(loss_fusion=fusion, precision=Precision(kind=kind), mtp=mtp)
    assert head_bytes(found, mtp) == expected * 4096 * 50304


def test_a_loss_in_place_leaves_the_gradient_of_the_heads_input() -> None:
    """16 bits of every logit, and of the module's; all tokens' gradient, and a rank's own of it."""
    unit = 4096 * 512 * 2
    found = launch(loss_fusion="te")
    assert head_bytes(found) == 2 * 4096 * 50304 + unit
    assert head_bytes(replace(found, model=replace(found.model, mtp=2)), 2) == (
        3 * 2 * 4096 * 50304 + unit
    )
    split = launch(loss_fusion="te", world=4, tp=4, sequence_parallel=True)
    # 50257 words are 50688 of four ranks
    assert head_bytes(split) == 2 * 4096 * 50688 // 4 + unit + unit // 4


def test_backward_of_scores_can_be_the_peak() -> None:
    """Four gradients of the scores, when the MLP behind them is freed."""
    unfused = launch(software=replace(QUIET, attention="unfused"))
    (chunk,) = unfused.degrees.chunks[0]
    scores = 4 * 8 * 1024 * 1024 * 2
    own, freed = backward_bytes(unfused, chunk)
    unit = 4096 * 512
    assert own == 4 * scores
    assert freed == 2 * 2 * unit + (2 * 2 + 1 + 16) * unit + 16 * 4096


def test_modules_are_computed_again_where_their_backward_is() -> None:
    """An MLP that is recomputed is there again beside its gradients, and nothing else is."""
    plain = launch()
    again = replace(plain, recompute=Recompute(modules=frozenset({"mlp"})))
    (chunk,) = plain.degrees.chunks[0]
    mlp = 4096 * 2048 * 2 * 2
    assert backward_bytes(plain, chunk)[0] == mlp // 2 + 4096 * 512 * 2
    assert backward_bytes(again, chunk)[0] == mlp + mlp // 2 + 4096 * 512 * 2


def test_transfers_and_micro_batches() -> None:
    """Two tensors of 1F1B, one and none of its first stage, three of interleaved stages; a mask."""
    unit = 4096 * 512 * 2
    assert transfer_bytes(launch(), 0, "forward") == 0
    two = launch(world=2, pp=2)
    assert transfer_bytes(two, 1, "forward") == transfer_bytes(two, 1, "backward") == 2 * unit
    assert transfer_bytes(two, 0, "forward") == unit
    assert transfer_bytes(two, 0, "backward") == 0
    assert transfer_bytes(launch(world=2, pp=2, chunks=2), 0, "backward") == 3 * unit
    found = launch(world=4, pp=4)
    loaded = [kept.mask_bytes(found, chunks) for chunks in found.degrees.chunks]
    assert loaded == [4 * 1024 * (12 + 1024), 0, 0, 4 * 1024 * (12 + 1024)]
    bare = launch(attention_masks=False)
    assert kept.mask_bytes(bare, bare.degrees.chunks[0]) == 4 * 1024 * 12


@pytest.mark.parametrize(
    ("experts", "degrees", "copies"),
    [
        # permuted, received; sorted back, sent
        ({"number": 8}, {"ep": 4}, 4),
        # one expert a rank needs no order
        ({"number": 4}, {"ep": 4}, 3),
        # nothing is sent
        ({"number": 8}, {"ep": 1}, 3),
        # each token twice at most: received, made, put back
        ({"number": 8, "dispatcher": "flex"}, {"ep": 4}, 3),
        ({"number": 8, "dispatcher": "flex", "per_token": 8}, {"ep": 4}, 2 * 2 + 4),
        # made, and put among the tokens of all four ranks
        ({"number": 8, "dispatcher": "allgather"}, {"ep": 4}, 1 + 2),
    ],
)
def test_tokens_between_experts(
    experts: dict[str, Any], degrees: dict[str, Any], copies: int
) -> None:
    """At its fullest a mixture's forward holds every routed token several times, unsaved."""
    mixture = replace(EXPERTS, **({"dispatcher": "alltoall", "skew": 1.0} | experts))
    pattern = (False,) * 11 + (True,)
    model = replace(PLAIN, experts=mixture, expert_layers=pattern)
    found = launch(model, world=4, etp=1, **degrees)
    (chunk,) = found.degrees.chunks[0]
    assert dispatched_bytes(found, chunk) == copies * 2 * 4096 * 512 * 2
    dense = launch(replace(model, expert_layers=pattern[::-1]), world=4, etp=1, **degrees)
    assert dispatched_bytes(dense, dense.degrees.chunks[0][0]) == 0


def test_mixtures_are_fullest_in_their_forward_where_the_head_is_small() -> None:
    """The first of two stages, with no head, holds tokens of experts beside its live batches."""
    mixture = replace(EXPERTS, dispatcher="alltoall", skew=1.0, per_token=8)
    model = replace(PLAIN, experts=mixture, expert_layers=(True,) * 12)
    found = peak_of(launch(model, world=4, pp=2, ep=2, etp=1), 0)
    assert found.moment.event.kind == "forward"
    assert found.dispatched_bytes == 4 * 8 * 4096 * 512 * 2
    assert found.moment.live == (2,)


def test_exchanged_heads_keep_what_attention_made() -> None:
    """The kernel's output, and what comes back of it to the product behind; a ring has one."""
    ring = launch(world=2, cp=2, software=replace(QUIET, attention="fused"))
    heads = launch(world=2, cp=2, heads_exchanged=True, software=ring.software)
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
    blocks = replace(QUIET, expandable_segments=False)
    found = launch(world=4, tp=4, software=blocks)
    fused = replace(found, software=replace(blocks, attention="fused"))
    assert part(found, "query") == MIB
    assert part(fused, "qkv") == 3 * MIB
    # 12 layers and the embedding; of one tensor of 3 MiB each block is 4
    assert peak_of(found, 0).rounding_bytes - peak_of(fused, 0).rounding_bytes == (25 - 12) * MIB
    assert recycled_bytes(2 * MIB, expandable=False, hole_bytes=3 * MIB) == 3 * MIB
    assert recycled_bytes(2 * MIB, expandable=False, hole_bytes=3 * MIB + 512) == 2 * MIB


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
    account = account_of(launch(world=2, pp=2, precision=Precision(kind="fp16")))
    names = [term.name for term in account.peak]
    assert len(set(names)) == len(names)
    assert all(term.switch and term.num_bytes for term in (*account.states, *account.peak))
    only = {term.name for term in account.states} - set(names)
    assert only == {"fp32 gradients of fp16", "pipeline inputs"}
    assert account.peak_bytes == sum(term.num_bytes for term in account.peak)
    low, _, high = RESERVED_RATIOS
    assert account.reserved_bytes == (int(account.peak_bytes * low), int(account.peak_bytes * high))
    assert account.scored
    stages = [account_of(launch(world=3, pp=3), stage).scored for stage in range(3)]
    assert stages == [True, False, True]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"world": 3, "tp": 2}, r"world size\(3\) % \(tp\(2\) \* cp\(1\) \* pp\(1\)\) = 1 != 0"),
        ({"global_batch": 30}, r"global batch\(30\) % \(micro batch\(4\) \* dp\(1\)\) = 2 != 0"),
        ({"world": 16, "tp": 16}, r"heads\(8\) % tp\(16\) = 8 != 0"),
        ({"world": 3, "cp": 3}, r"seq_length\(1024\) % cp\(3\) = 1 != 0"),
        ({"world": 5, "pp": 5}, r"layers\(12\) % \(pp\(5\) \* chunks\(1\)\) = 2 != 0"),
        ({"model": replace(PLAIN, expert_layers=(True,) * 12)}, "experts are not given"),
        ({"chunks": 1, "pp": 1, "world": 1, "mtp": 0, "ep": 2}, "world size"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], problem: str) -> None:
    """Degrees and batches that do not divide are one sentence with their arithmetic."""
    with pytest.raises(InputError, match=problem):
        launch(**options)


def test_layouts_place_every_layer_once() -> None:
    """Chunks beside the model's layers, and stages beside chunks, are refused."""
    with pytest.raises(InputError, match="places 6 layers where the model has 12"):
        Launch(
            model=PLAIN,
            degrees=Degrees(world=1, chunks=even_chunks(6, 1)),
            seq=1024,
            micro_batch=4,
            global_batch=32,
        )
    with pytest.raises(InputError, match="stages are laid out as 1"):
        Degrees(world=2, pp=2, chunks=even_chunks(6, 1))
