"""Products of fewer bits: bytes by hand, and why they pay or do not."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InputError
from autopar.price.account import account_of
from autopar.price.activations import saved_parts
from autopar.price.job import job_of_run
from autopar.price.parameters import stage_weights
from autopar.price.step import step_time
from autopar.rates.parts.operations import Machine
from autopar.records import replace
from autopar.run.architecture import Experts, Model
from autopar.run.run import Run
from autopar.run.runtime import ExpertKernels, Overlap, Precision
from autopar.run.strategy import wide_ends, with_wide_ends
from search.engines.megatron.read import read_run
from tests.runs import llama, run_of
from tests.step_cases import machine_named

SIZES: dict[str, Any] = {"layers": 8, "hidden": 4096, "width": 14336, "heads": 32, "kv_heads": 8}
DENSE = llama(**SIZES, vocab=32000)
FINE = llama(**SIZES, vocab=32000, experts=Experts(number=64, per_token=8, width=1024))


def run(precision: Precision, model: Model = DENSE, **more: Any) -> Run:
    """Return a run on eight GPUs of the newest kind."""
    usual: dict[str, Any] = {"seq_length": 4096, "micro_batch": 2}
    return run_of(
        model,
        gpus=8,
        gpu="B200",
        zero=1,
        global_batch=64,
        precision=precision,
        overlap=Overlap(gradients=True),
        experts=ExpertKernels(dispatcher="alltoall", grouped=True),
        **{**usual, **more},
    )


def machine(name: str = "b200") -> Machine:
    """Return a device with Megatron-Core."""
    return machine_named(name)


def quantized(found: Run) -> int:
    """Return the weights of products of a stage."""
    weights = [weight for chunk in stage_weights(found, 0) for weight in chunk]
    return sum(weight.elements for weight in weights if weight.quantized)


def kept(found: Run) -> dict[str, int]:
    """Return what is kept between steps by name."""
    return {term.name: term.num_bytes for term in account_of(found).states}


def test_copies_of_weights_by_hand() -> None:
    """NVFP4 keeps two copies of 0.5625 bytes beside bf16, or bf16's place with one copy."""
    plain, four = Precision(), Precision(fp4=True)
    alone = replace(four, fp4_weights=True)
    number = quantized(run(plain))
    beside, instead = kept(run(four)), kept(run(alone))
    assert beside["weights"] == kept(run(plain))["weights"]
    assert beside["4-bit copies of weights"] == pytest.approx(2 * 0.5625 * number, rel=1e-6)
    assert instead["4-bit copies of weights"] == pytest.approx(0.5625 * number, rel=1e-6)
    assert beside["weights"] - instead["weights"] == pytest.approx((2 - 0.5625) * number, rel=1e-6)
    # in 8 bits with a scale of 32: one byte each
    mx = kept(run(Precision(fp8=True, fp8_recipe="mxfp8")))
    assert mx["8-bit copies of weights"] == 2 * number


def test_inputs_of_products_are_kept_in_their_precision() -> None:
    """4096 x 2 tokens of the model's width: 2 bytes, 1 and 0.5625."""
    sizes = []
    for precision in (Precision(), Precision(fp8=True), Precision(fp4=True)):
        parts = dict(saved_parts(run(precision).rank_layers[0]))
        sizes.append(parts["norm output"] / (2 * 4096 * 4096))
        # softmax and norms are of 16 bits in any case
        assert parts["attention output"] == 2 * 4096 * 4096 * 2
    assert sizes == [2.0, 1.0, 0.5625]


def test_ends_are_no_more_than_the_layers() -> None:
    strategy = run(Precision(fp8=True)).strategy
    for first, last, counts in ((5, 6, [8]), (9, 1, [8]), (2, 1, [2, 5, 1])):
        found = with_wide_ends(strategy, first, last).layers
        assert [group.count for group in found] == counts
        assert not found[0].split.low_precision


def test_ends_of_a_model_stay_in_16_bits() -> None:
    """One layer at either end: six of eight have copies, and keep inputs in fewer bits."""
    whole = run(Precision(fp8=True, fp8_recipe="mxfp8"))
    ends = replace(whole, strategy=with_wide_ends(whole.strategy, 1, 1))
    assert quantized(ends) * 8 == quantized(whole) * 6
    assert kept(ends)["8-bit copies of weights"] * 8 == kept(whole)["8-bit copies of weights"] * 6
    saved = [
        {term.name: term.num_bytes for term in account_of(found).peak}["saved activations"]
        for found in (run(Precision()), ends, whole)
    ]
    assert saved[0] > saved[1] > saved[2]
    # a quarter of the layers, as all of them are alike
    assert 4 * (saved[1] - saved[2]) == pytest.approx(saved[0] - saved[2], rel=0.01)
    blocks = job_of_run(ends).blocks
    assert [(block.number, block.precision) for block in blocks] == [
        (1, "bf16"),
        (6, None),
        (1, "bf16"),
    ]
    seconds = [
        step_time(machine(), job_of_run(found)).terms_s["gemm"]
        for found in (run(Precision()), ends, whole)
    ]
    assert seconds[0] > seconds[1] > seconds[2]


def test_weights_are_gathered_in_fewer_bits() -> None:
    """Where they are kept so: half the bytes in front of the forward, and for NVFP4 fewer still."""
    kinds = {
        "bf16": Precision(),
        "per tensor": Precision(fp8=True, fp8_weights=True, fp8_recipe="tensorwise"),
        "copies": Precision(fp8=True, fp8_recipe="tensorwise"),
        "mxfp8": Precision(fp8=True, fp8_weights=True, fp8_recipe="mxfp8"),
        "nvfp4": Precision(fp4=True, fp4_weights=True),
    }
    found = {name: job_of_run(run(one)).gathered_bytes for name, one in kinds.items()}
    assert found == {
        "bf16": None,
        "per tensor": 1.0,
        "copies": None,
        "mxfp8": None,
        "nvfp4": 0.5625,
    }
    sent = [
        step_time(machine(), job_of_run(run(kinds[name]))).terms_s["gradients"]
        for name in ("bf16", "nvfp4")
    ]
    assert sent[1] < sent[0]


def test_low_precision_shortens_products_and_adds_casts() -> None:
    """A dense model gains more of its step than one of fine experts, whose GEMMs are small."""

    def times(model: Model, precision: Precision) -> Any:
        return step_time(machine(), job_of_run(run(precision, model)))

    share = {}
    for name, model in (("dense", DENSE), ("fine", FINE)):
        high, low = (
            times(model, one) for one in (Precision(), Precision(fp8=True, fp8_recipe="mxfp8"))
        )
        assert low.terms_s["gemm"] < high.terms_s["gemm"]
        assert low.terms_s["cast"] > high.terms_s.get("cast", 0.0)
        share[name] = 1 - low.total_s / high.total_s
    assert share["dense"] > 0
    assert share["fine"] < share["dense"]


def test_a_device_without_such_products_is_refused() -> None:
    """In a sentence that names the card."""
    with pytest.raises(InputError, match="h100"):
        step_time(machine("h100-80gb"), job_of_run(run(Precision(fp4=True))))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: run(Precision(fp8=True, fp4=True)), "fp8 and fp4"),
        (lambda: run(Precision(kind="fp16", fp4=True)), "needs bf16"),
        (lambda: run(Precision(fp4_weights=True)), "fp4 GEMMs"),
    ],
)
def test_precisions_that_exclude_each_other(wrong: Any, said: str) -> None:
    """They are refused in a sentence."""
    with pytest.raises(InputError, match=said):
        wrong()


_ARGUMENTS: dict[str, Any] = {
    "--num-layers": 4,
    "--hidden-size": 1024,
    "--num-attention-heads": 8,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--micro-batch-size": 1,
    "--global-batch-size": 8,
    "--bf16": True,
    "--vocab-size": 32000,
    "--use-distributed-optimizer": True,
}


def test_the_recipe_of_four_bits_is_known() -> None:
    """The one that is priced leaves nothing open; one of somebody's own has no price."""
    given = {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"}
    assert read_run(_ARGUMENTS | given, world_size=2).not_understood == ()
    with pytest.raises(InputError, match=r"--fp4-recipe.*is a custom recipe"):
        read_run(_ARGUMENTS | given | {"--fp4-recipe": "custom"}, world_size=2)


@pytest.mark.parametrize(
    ("given", "wanted", "ends"),
    [
        ({"--fp4-format": "e2m1"}, Precision(fp4=True), (0, 0)),
        (
            {"--fp4-format": "e2m1", "--fp4-param-gather": True},
            Precision(fp4=True, fp4_weights=True),
            (0, 0),
        ),
        (
            {"--fp8-format": "hybrid", "--first-last-layers-bf16": True},
            Precision(fp8=True),
            (1, 1),
        ),
        (
            {
                "--fp8-format": "hybrid",
                "--first-last-layers-bf16": True,
                "--num-layers-at-start-in-bf16": 0,
                "--num-layers-at-end-in-bf16": 2,
            },
            Precision(fp8=True),
            (0, 2),
        ),
    ],
)
def test_arguments_of_precisions_are_read(
    given: dict[str, Any], wanted: Precision, ends: tuple[int, int]
) -> None:
    """As Megatron-LM has them."""
    found = read_run(_ARGUMENTS | given, world_size=2).run
    assert (found.runtime.precision, wide_ends(found.strategy)) == (wanted, ends)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (0.0, False, 8, 4)),
        # what bf16 weights have of fp32 ones is not kept twice
        ({"--use-precision-aware-optimizer": True}, (0.0, False, 8, 2)),
        (
            {
                "--use-precision-aware-optimizer": True,
                "--exp-avg-dtype": "bf16",
                "--exp-avg-sq-dtype": "fp8",
            },
            (0.0, False, 3, 2),
        ),
        ({"--optimizer-cpu-offload": True}, (1.0, False, 8, 4)),
        (
            {
                "--optimizer-cpu-offload": True,
                "--optimizer-offload-fraction": 0.25,
                "--use-precision-aware-optimizer": True,
            },
            (0.25, True, 8, 4),
        ),
    ],
)
def test_arguments_of_states_are_read(given: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    """Share on the host, whether fp32 weights are there, bytes of moments and of fp32 weights."""
    found = read_run(_ARGUMENTS | given, world_size=2).run.runtime.optimizer
    assert (found.offload, found.offload_master, found.moments_bytes, found.master_bytes) == wanted
