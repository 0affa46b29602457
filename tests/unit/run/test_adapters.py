"""Adapters on frozen weights: bytes and seconds by hand, and what they make possible."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InputError
from autopar.price.account import Account, account_of
from autopar.price.activations import saved_parts
from autopar.price.parameters import stage_weights
from autopar.price.step import step_time
from autopar.rates.layer import layer_times
from autopar.rates.parts.operations import machine_of
from autopar.records import replace
from autopar.run.job import Experts as Mixture, Job, adapter_parameters
from autopar.run.launch import (
    Attention,
    Degrees,
    Experts,
    Latent,
    Launch,
    Model,
    Optimizer,
    Recompute,
    Software,
    TorchTrainer,
    even_chunks,
)
from autopar.training.adapters import Adapters, adapted_widths, base_bytes
from search.check.job import job_of_launch
from tests.step_cases import card_named, stack_named

LLAMA2_7B = Model(
    hidden=4096,
    ffn=11008,
    attention=Attention(heads=32, groups=32, width=128, dropout=0.0),
    vocab=32000,
    expert_layers=(False,) * 32,
    gated=True,
    biases=False,
    qkv_biases=False,
    tied=False,
    norm="rms",
    positions="rotary",
    hidden_dropout=0.0,
)
EVERYWHERE = frozenset({"query", "key", "value", "projection", "fc1", "fc2"})
LORA = Adapters(rank=16)
WHOLE = Recompute(layers="uniform", number=1)


def megatron(adapters: Adapters | None, model: Model = LLAMA2_7B, **options: Any) -> Launch:
    """Return a launch of Megatron-LM on four GPUs."""
    own = {name: options.pop(name) for name in [*options] if name in Degrees.__annotations__}
    chunks = even_chunks(model.num_layers, own.get("pp", 1))
    return Launch(
        model=model,
        degrees=Degrees(**({"world": 4, "chunks": chunks} | own)),
        seq=4096,
        micro_batch=1,
        global_batch=16,
        adapters=adapters,
        **options,
    )


def torch_launch(keeper: Any, zero: Any, **options: Any) -> Launch:
    """Return transformers' layers on four GPUs of 24 GB, computed again as a whole."""
    trainer = TorchTrainer(
        keeper=keeper, zero=zero, layers="transformers", checkpoint="full", fused_norms=False
    )
    return Launch(
        model=LLAMA2_7B,
        degrees=Degrees(world=4, chunks=even_chunks(32, 1)),
        seq=4096,
        micro_batch=1,
        global_batch=16,
        software=Software(gpu="RTX 4090", attention="flash"),
        trainer=trainer,
        recompute=WHOLE,
        **options,
    )


def terms(account: Account) -> dict[str, int]:
    """Return what is kept by name."""
    return {term.name: term.num_bytes for term in account.states}


def trained(launch: Launch, stage: int = 0) -> int:
    """Return the trained parameters of a stage."""
    weights = [weight for chunk in stage_weights(launch, stage) for weight in chunk]
    return sum(weight.elements for weight in weights if weight.trained)


# --------------------------------------------------------------------------------------------------
# Parameters.

ATTENTION, MLP = 4 * 16 * 2 * 4096, 3 * 16 * (4096 + 11008)
"""Of one layer of Llama 2 7B at rank 16: query, key, value, projection; gate, up and down."""


def test_parameters_of_adapters_by_hand() -> None:
    """r (outputs + inputs) of every matrix: 40.0 M at rank 16 in 32 layers, as PEFT counts them."""
    launch = megatron(LORA)
    assert trained(launch) == 32 * (ATTENTION + MLP) == 39_976_960
    whole = sum(weight.elements for chunk in stage_weights(launch, 0) for weight in chunk)
    plain = sum(weight.elements for chunk in stage_weights(megatron(None), 0) for weight in chunk)
    assert whole - trained(launch) == plain


def test_fused_matrices_share_an_adapter() -> None:
    """One A of queries, keys and values, and one of gate and up: 3 x 16 x 4096 fewer a layer."""
    fused = megatron(replace(LORA, fused=True))
    assert trained(megatron(LORA)) - trained(fused) == 32 * 3 * 16 * 4096


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_ranks_divide_adapters(tp: int) -> None:
    """Both matrices of an adapter are split over them."""
    assert trained(megatron(LORA, tp=tp)) == trained(megatron(LORA)) // tp


@pytest.mark.parametrize("shared", [False, True])
def test_adapters_of_experts(shared: bool) -> None:
    """Each of a rank's two experts has one, or both share it."""
    model = replace(
        LLAMA2_7B, experts=Experts(number=8, per_token=2, ffn=1024), expert_layers=(True,) * 32
    )
    adapters = Adapters(
        rank=8, targets=frozenset({"expert_fc1", "expert_fc2"}), shared_by_experts=shared
    )
    each = 8 * (3 * 4096 + 3 * 1024)
    assert trained(megatron(adapters, model, ep=4)) == 32 * each * (1 if shared else 2)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("targets", [EVERYWHERE, frozenset({"query", "value"}), {"fc2"}])
def test_time_counts_the_adapters_that_memory_does(latent: bool, targets: Any) -> None:
    """Both from the same shapes, with MLA's narrow projections too."""
    model = LLAMA2_7B
    if latent:
        narrow = Latent(
            query_rank=512, key_value_rank=256, key_width=128, rotary_width=64, value_width=128
        )
        model = replace(model, attention=replace(model.attention, latent=narrow))
    launch = megatron(Adapters(rank=8, targets=frozenset(targets)), model)
    job = job_of_launch(launch)
    experts, dense = adapter_parameters(job, job.blocks[0])
    if latent and "value" in targets and "key" not in targets:
        # one matrix of both, which memory counts with either
        return
    assert (experts, 32 * dense) == (0.0, trained(launch))


def test_widths_that_adapters_stand_beside() -> None:
    """Those that are asked for, together where their matrix is one."""
    widths = (("query", 64.0), ("key", 16.0), ("value", 16.0))
    some = Adapters(targets=frozenset({"query", "value"}))
    assert adapted_widths(some, widths) == (64.0, 16.0)  # type: ignore[arg-type]
    assert adapted_widths(replace(some, fused=True), widths) == (80.0,)  # type: ignore[arg-type]
    assert adapted_widths(None, widths) == ()  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# Bytes.


def test_states_of_frozen_weights() -> None:
    """2 bytes of 6.74e9 weights that are frozen; 18 of those that are trained."""
    found = terms(account_of(megatron(LORA, world=1, optimizer=Optimizer())))
    adapters = trained(megatron(LORA))
    base = sum(w.elements for chunk in stage_weights(megatron(None), 0) for w in chunk)
    assert found["weights"] == 2 * (base + adapters)
    assert found["gradients"] == 4 * adapters
    assert found["Adam moments"] == 8 * adapters
    assert found["fp32 weights"] == 4 * adapters


def test_quantised_base_by_hand() -> None:
    """4.127 bits of the matrices of layers; embedding, norms and head keep 16."""
    adapters = replace(LORA, base="nf4")
    assert base_bytes(adapters) == pytest.approx((4 + 0.127) / 8, rel=1e-3)
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    around = 2 * 32000 * 4096 + 65 * 4096
    weights = terms(account_of(megatron(adapters, world=1)))["weights"]
    quantised = weights - 2 * around - 2 * trained(megatron(LORA))
    assert quantised == pytest.approx(base_bytes(adapters) * layers, rel=1e-3)


def test_frozen_matrices_keep_no_input() -> None:
    """Without adapters beside fc2 the product in front of it goes, and nothing else does."""
    without = Adapters(rank=16, targets=EVERYWHERE - {"fc2"})
    whole, fewer = (
        dict(saved_parts(megatron(adapters), experts=False)) for adapters in (LORA, without)
    )
    assert set(whole) - set(fewer) == {"mlp activation"}
    # A's output of all, and of all but the last: queries, keys, values, projection, gate, up, down
    assert whole["adapters"] == 7 * 4096 * 16 * 2
    assert fewer["adapters"] == 6 * 4096 * 16 * 2


def test_dropout_in_front_of_adapters() -> None:
    """A copy and a byte of mask of each input; the inputs themselves are needed by nobody."""
    dropped = dict(saved_parts(megatron(replace(LORA, dropout=0.1)), experts=False))
    inputs = 4 * 4096 + 2 * 4096 + 11008
    assert dropped["adapters"] == 4096 * (7 * 16 * 2 + 3 * inputs)
    assert {"norm output", "mlp activation"}.isdisjoint(dropped)


SEVEN_B = {
    "all of it in fp32 states": (torch_launch("accelerate", 3), False),
    "in 16 bits with 8-bit moments": (
        torch_launch(
            "accelerate", 3, optimizer=Optimizer(kind="adam8bit", master_bytes=0)
        ),
        True,
    ),
    "states on the host": (
        torch_launch("deepspeed", 3, optimizer=Optimizer(offload=1.0, offload_master=True)),
        True,
    ),
    "adapters, sharded": (torch_launch("accelerate", 3, adapters=LORA), True),
    "adapters on 4 bits, replicas": (
        torch_launch("ddp", 0, adapters=replace(LORA, base="nf4")),
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", SEVEN_B)
def test_seven_billion_on_four_gpus_of_24_gb(way: str) -> None:
    """Whole states do not fit with room for the rest; every one of the ways out does, in time."""
    launch, fits = SEVEN_B[way]
    assert (account_of(launch).peak_bytes < 22e9) == fits
    machine = machine_of(card_named("rtx-4090"), stack_named("torchtitan-eager"))
    assert step_time(machine, job_of_launch(launch)).total_s > 0


# --------------------------------------------------------------------------------------------------
# Seconds.


def h100_job(adapters: Adapters | None, **options: Any) -> Job:
    """Return one GPU's job of Llama 2 7B."""
    job = job_of_launch(megatron(adapters, world=1))
    return replace(job, **options)


def seconds(job: Job, what: str) -> float:
    """Return forward, input's and weight's gradient seconds of the parts whose name has a text."""
    machine = machine_of(card_named("h100-80gb"), stack_named("megatron-core"))
    parts = layer_times(machine, job, job.blocks[0]).parts
    return sum(
        float(part.forward_s + part.input_s + part.weight_s) for part in parts if what in part.name
    )


def test_thin_products_come_and_weight_gradients_go() -> None:
    """Of the base forward and input gradient are left: about two thirds, and adapters on top."""
    plain, lora = h100_job(None), h100_job(LORA)
    base = [seconds(job, "mlp up") for job in (plain, lora)]
    beside = seconds(lora, "mlp up adapter")
    assert 0.55 < (base[1] - beside) / base[0] < 0.75
    assert beside > 0
    assert seconds(plain, "adapter") == 0


def test_dequantisation_is_paid_in_front_of_every_product() -> None:
    """Twice 2.516 bytes of each weight of a matrix at the memory's rate."""
    job = h100_job(replace(LORA, base="nf4"))
    machine = machine_of(card_named("h100-80gb"), stack_named("megatron-core"))
    share = machine.kernels.memory_share("elementwise")
    moved = 2 * (2 + base_bytes(replace(LORA, base="nf4"))) * 2 * 11008 * 4096
    found = seconds(job, "mlp up in 16 bits")
    assert found == pytest.approx(moved / (machine.kernels.memory_bytes_per_s * share), rel=0.1)


def test_adapters_are_all_that_is_reduced_and_updated() -> None:
    """160 times fewer parameters: reduction and update are a fraction of the whole model's."""
    machine = machine_of(card_named("h100-80gb"), stack_named("megatron-core"))
    plain, lora = (
        step_time(machine, job_of_launch(megatron(adapters))).terms_s for adapters in (None, LORA)
    )
    assert 0 < lora["optimizer"] < plain["optimizer"] / 50
    assert 0 < lora["gradients"] < plain["gradients"] / 20


def test_experts_have_adapters_in_time() -> None:
    """Grouped thin products where each expert has one, single ones where a rank's share it."""
    model = replace(
        LLAMA2_7B, experts=Experts(number=8, per_token=2, ffn=1024), expert_layers=(True,) * 32
    )
    targets: Any = frozenset({"expert_fc1", "expert_fc2"})
    jobs = [
        job_of_launch(
            megatron(Adapters(rank=8, targets=targets, shared_by_experts=shared), model, world=1)
        )
        for shared in (False, True)
    ]
    assert isinstance(jobs[0].blocks[0].mlp, Mixture)
    assert all(seconds(job, "experts up adapter") > 0 for job in jobs)
    assert [adapter_parameters(job, job.blocks[0])[0] for job in jobs] == [
        8 * 8 * 3 * (4096 + 1024),
        8 * 3 * (4096 + 1024),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0}, "1 at least"),
        ({"targets": frozenset()}, "got none"),
        ({"targets": frozenset({"head"})}, "got head"),
        ({"base": "fp4"}, "got fp4"),
        ({"dropout": 1.0}, "expected 0 to 1"),
    ],
)
def test_adapters_that_are_none(options: dict[str, Any], said: str) -> None:
    """They are refused in a sentence."""
    with pytest.raises(InputError, match=said):
        Adapters(**options)


def test_adapters_are_not_trained_with_muon() -> None:
    """Muon is for whole matrices."""
    with pytest.raises(InputError, match="trained with Adam"):
        megatron(LORA, optimizer=Optimizer(kind="muon"))
