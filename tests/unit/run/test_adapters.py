"""Adapters on frozen weights: bytes and seconds by hand, and what they make possible."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InputError
from autopar.price.account import Account, account_of
from autopar.price.activations import saved_parts
from autopar.price.job import job_of_run
from autopar.price.parameters import stage_weights
from autopar.price.step import step_time
from autopar.rates.layer import layer_times
from autopar.records import replace
from autopar.run.architecture import Experts, LatentAttention, Model
from autopar.run.job import Job, adapter_parameters
from autopar.run.run import Run
from autopar.run.runtime import Optimizer
from autopar.training.adapters import Adapters, adapted_widths, base_bytes
from tests.runs import llama, run_of, torch_run
from tests.step_cases import machine_named

SIZES: dict[str, Any] = {"layers": 32, "hidden": 4096, "width": 11008, "heads": 32, "vocab": 32000}
LLAMA2_7B = llama(**SIZES)
MIXTURE = llama(**SIZES, experts=Experts(number=8, per_token=2, width=1024))
EVERYWHERE = frozenset({"query", "key", "value", "projection", "fc1", "fc2"})
LORA = Adapters(rank=16)


def megatron(adapters: Adapters | None, model: Model = LLAMA2_7B, **more: Any) -> Run:
    """Return a run of Megatron-LM on four GPUs."""
    usual = {"gpus": 4, "seq_length": 4096, "global_batch": 16}
    return run_of(model, adapters=adapters, **{**usual, **more})


def on_24_gb(keeper: Any, zero: Any, engine: str = "", **more: Any) -> Run:
    """Return transformers' layers on four GPUs of 24 GB, computed again as a whole."""
    return torch_run(
        LLAMA2_7B,
        keeper,
        engine=engine or keeper,
        zero=zero,
        gpus=4,
        gpu="RTX 4090",
        seq_length=4096,
        global_batch=16,
        each_micro_batch=True,
        module="transformers",
        attention="flash",
        fused_norms=False,
        recompute="full",
        **more,
    )


def terms(account: Account) -> dict[str, int]:
    """Return what is kept by name."""
    return {term.name: term.num_bytes for term in account.states}


def trained(run: Run) -> int:
    """Return the trained parameters of the first stage."""
    weights = [weight for chunk in stage_weights(run, 0) for weight in chunk]
    return sum(weight.elements for weight in weights if weight.trained)


# --------------------------------------------------------------------------------------------------
# Parameters.

ATTENTION, MLP = 4 * 16 * 2 * 4096, 3 * 16 * (4096 + 11008)
"""Of one layer of Llama 2 7B at rank 16: query, key, value, projection; gate, up and down."""


def test_parameters_of_adapters_by_hand() -> None:
    """r (outputs + inputs) of every matrix: 40.0 M at rank 16 in 32 layers, as PEFT counts them."""
    run = megatron(LORA)
    assert trained(run) == 32 * (ATTENTION + MLP) == 39_976_960
    whole = sum(weight.elements for chunk in stage_weights(run, 0) for weight in chunk)
    plain = sum(weight.elements for chunk in stage_weights(megatron(None), 0) for weight in chunk)
    assert whole - trained(run) == plain


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
    adapters = Adapters(
        rank=8, targets=frozenset({"expert_fc1", "expert_fc2"}), shared_by_experts=shared
    )
    each = 8 * (3 * 4096 + 3 * 1024)
    assert trained(megatron(adapters, MIXTURE, ep=4)) == 32 * each * (1 if shared else 2)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("targets", [EVERYWHERE, frozenset({"query", "value"}), {"fc2"}])
def test_time_counts_the_adapters_that_memory_does(latent: bool, targets: Any) -> None:
    """Both from the same shapes, with MLA's narrow projections too."""
    model = LLAMA2_7B
    if latent:
        narrow = LatentAttention(query_rank=512, kv_rank=256, key_width=128, rotary_width=64)
        model = llama(**SIZES, latent=narrow, value_width=128)
    run = megatron(Adapters(rank=8, targets=frozenset(targets)), model)
    job = job_of_run(run)
    experts, dense = adapter_parameters(job, job.blocks[0])
    if latent and "value" in targets and "key" not in targets:
        # one matrix of both, which memory counts with either
        return
    assert (experts, 32 * dense) == (0.0, trained(run))


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
    found = terms(account_of(megatron(LORA, gpus=1)))
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
    weights = terms(account_of(megatron(adapters, gpus=1)))["weights"]
    quantised = weights - 2 * around - 2 * trained(megatron(LORA))
    assert quantised == pytest.approx(base_bytes(adapters) * layers, rel=1e-3)


def test_frozen_matrices_keep_no_input() -> None:
    """Without adapters beside fc2 the product in front of it goes, and nothing else does."""
    without = Adapters(rank=16, targets=EVERYWHERE - {"fc2"})
    whole, fewer = (
        dict(saved_parts(megatron(adapters).rank_layers[0])) for adapters in (LORA, without)
    )
    assert set(whole) - set(fewer) == {"mlp activation"}
    # A's output of all, and of all but the last: queries, keys, values, projection, gate, up, down
    assert whole["adapters"] == 7 * 4096 * 16 * 2
    assert fewer["adapters"] == 6 * 4096 * 16 * 2


def test_dropout_in_front_of_adapters() -> None:
    """A copy and a byte of mask of each input; the inputs themselves are needed by nobody."""
    dropped = dict(saved_parts(megatron(replace(LORA, dropout=0.1)).rank_layers[0]))
    inputs = 4 * 4096 + 2 * 4096 + 11008
    assert dropped["adapters"] == 4096 * (7 * 16 * 2 + 3 * inputs)
    assert {"norm output", "mlp activation"}.isdisjoint(dropped)


SEVEN_B = {
    "all of it in fp32 states": (on_24_gb("accelerate", 3), False),
    "in 16 bits with 8-bit moments": (
        on_24_gb(
            "accelerate", 3, optimizer=Optimizer(kind="adam8bit", master_bytes=0)
        ),
        True,
    ),
    "states on the host": (
        on_24_gb("deepspeed", 3, optimizer=Optimizer(
                offload=1.0, offload_master=True, host_adam="deepspeed"
            )),
        True,
    ),
    "adapters, sharded": (on_24_gb("accelerate", 3, adapters=LORA), True),
    "adapters on 4 bits, replicas": (
        on_24_gb("ddp", 0, "accelerate", adapters=replace(LORA, base="nf4")),
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", SEVEN_B)
def test_seven_billion_on_four_gpus_of_24_gb(way: str) -> None:
    """Whole states do not fit with room for the rest; every one of the ways out does, in time."""
    run, fits = SEVEN_B[way]
    assert (account_of(run).peak_bytes < 22e9) == fits
    machine = machine_named("rtx-4090", "torchtitan-eager")
    assert step_time(machine, job_of_run(run)).total_s > 0


# --------------------------------------------------------------------------------------------------
# Seconds.


def h100_job(adapters: Adapters | None, **options: Any) -> Job:
    """Return one GPU's job of Llama 2 7B."""
    job = job_of_run(megatron(adapters, gpus=1))
    return replace(job, **options)


def seconds(job: Job, what: str) -> float:
    """Return forward, input's and weight's gradient seconds of the parts whose name has a text."""
    machine = machine_named()
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
    machine = machine_named()
    share = machine.kernels.memory_share("elementwise")
    moved = 2 * (2 + base_bytes(replace(LORA, base="nf4"))) * 2 * 11008 * 4096
    found = seconds(job, "mlp up in 16 bits")
    assert found == pytest.approx(moved / (machine.kernels.memory_bytes_per_s * share), rel=0.1)


def test_adapters_are_all_that_is_reduced_and_updated() -> None:
    """160 times fewer parameters: reduction and update are a fraction of the whole model's."""
    machine = machine_named()
    plain, lora = (
        step_time(machine, job_of_run(megatron(adapters))).terms_s for adapters in (None, LORA)
    )
    assert 0 < lora["optimizer"] < plain["optimizer"] / 50
    assert 0 < lora["gradients"] < plain["gradients"] / 20


def test_experts_have_adapters_in_time() -> None:
    """Grouped thin products where each expert has one, single ones where a rank's share it."""
    targets: Any = frozenset({"expert_fc1", "expert_fc2"})
    jobs = [
        job_of_run(
            megatron(Adapters(rank=8, targets=targets, shared_by_experts=shared), MIXTURE, gpus=1)
        )
        for shared in (False, True)
    ]
    assert isinstance(jobs[0].blocks[0].mlp, Experts)
    assert all(seconds(job, "experts up adapter") > 0 for job in jobs)
    assert [adapter_parameters(job, job.blocks[0])[0] for job in jobs] == [
        8 * 8 * 3 * (4096 + 1024),
        8 * 3 * (4096 + 1024),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0}, "expected at least 1"),
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
    with pytest.raises(InputError, match="adapters need Adam"):
        megatron(LORA, optimizer=Optimizer(kind="muon"))
