"""Jobs: what blocks hold, how they lie on stages, and which degrees and sizes are refused."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.price.job import block_of_layer
from autopar.price.step import step_time
from autopar.rates.parts.operations import Machine
from autopar.records import replace
from autopar.run.architecture import Experts, Mamba, Mlp
from autopar.run.job import Block, Job, blocks_of, parameters, stage_blocks, type_blocks
from autopar.run.model import ModelSpec, layer_norms, parameter_count
from benchmarks.ledger_models import known_architecture
from tests.runs import attention_of
from tests.shipped import PROFILED
from tests.step_cases import DENSE, job_with, machine_named

(LLAMA,) = DENSE.blocks
assert LLAMA.attention is not None
MIXTURE = replace(LLAMA, mlp=Experts(number=8, per_token=2, width=1024, gated=True))
MIXER = Block(number=4, hidden=4096, recurrent=Mamba(heads=60, width=64, state=128, groups=4))


SPECS = [load_spec(name) for name in PROFILED]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_weights_of_a_block_are_those_of_the_spec(spec: ModelSpec) -> None:
    """Matrices and one weight per norm exactly; biases and further norm weights are left out."""
    assert sum(block.number for block in blocks_of(spec)) == spec.num_layers
    for blocks, layer in zip(type_blocks(spec), spec.layers, strict=True):
        block = replace(blocks[0], number=sum(block.number for block in blocks))
        exact, (experts, dense) = parameter_count(layer), parameters(block)
        # by default one norm before each of attention, attention to another sequence and MLP
        bare = replace(
            layer,
            biases=False,
            qkv_biases=False,
            qk_norms=False,
            attention_sinks=False,
            router_biases=False,
            norm_parameters_per_hidden=layer_norms(layer),
        )
        assert experts + dense == parameter_count(bare)
        # they are two thousandths at most, and no kernel is priced by them
        assert 0 <= exact - experts - dense <= 2e-3 * exact
        assert block.number == layer.num_layers
        assert (experts > 0) == (layer.num_experts is not None)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("DeepSeek-V3", 671),
        ("DeepSeek-V2", 236),
        ("Kimi-K2", 1040),
        ("Qwen3-30B-A3B", 30.5),
        ("Qwen3-235B-A22B", 235),
        ("GPT-OSS-120B", 117),
        ("GPT-OSS-20B", 20.9),
        ("Nemotron-3-Nano", 31.6),
        ("Nemotron-3-Super", 120),
        ("Llama3 8B", 8.03),
        ("Llama3 70B", 70.6),
        ("Qwen2.5 7B", 7.62),
        ("GPT 1T", 1008),
        ("GPT 529.6B", 529.6),
    ],
)
def test_known_models_are_as_large_as_published(name: str, billions: float) -> None:
    """Within 1.5 %: makers round, and some count biases; layers of further tokens are apart."""
    model = known_architecture(name)
    assert model is not None
    tables = (1 if model.tied else 2) * model.vocab * model.hidden
    weights = tables + sum(sum(parameters(block_of_layer(one))) for one in model.each_layer)
    assert weights / 1e9 == pytest.approx(billions, rel=0.015)


def test_experts_behind_a_latent_are_of_its_width() -> None:
    """Two matrices of each, and two between the latent and the model; what all visit is apart."""
    mlp = Experts(number=4, per_token=1, width=6, gated=False, shared_width=5, latent=3)
    block = Block(number=1, hidden=8, mlp=mlp, num_norms=1)
    experts, router, shared, latent = 4 * 2 * 3 * 6, 8 * 4, 2 * 8 * 5, 2 * 8 * 3
    assert parameters(block) == (experts, 8 + router + shared + latent)


def test_specs_that_a_block_cannot_say() -> None:
    """Unknown widths are refused."""
    spec = load_spec("llama2-7b")
    unknown = replace(spec, layers=(replace(spec.layers[0], ffn_hidden_size=None),))
    with pytest.raises(InputError, match="--model"):
        blocks_of(unknown)


def test_layers_of_stages() -> None:
    """Whole layers; what is over goes to the middle, then to the first stage, never to the last."""

    def counts(layers: int, pp: int) -> list[int]:
        job = replace(DENSE, blocks=(replace(LLAMA, number=layers),), pp=pp)
        return [sum(block.number for block in stage) for stage in stage_blocks(job)]

    assert counts(126, 16) == [7, *[8] * 14, 7]
    assert counts(9, 4) == [2, 3, 2, 2]
    assert counts(11, 4) == [3, 3, 3, 2]
    assert counts(3, 2) == [2, 1]
    assert counts(5, 1) == [5]
    assert counts(4, 4) == [1, 1, 1, 1]


def test_stages_cut_blocks_in_order() -> None:
    """A stage has the end of one block and the beginning of the next."""
    job = replace(DENSE, blocks=(replace(LLAMA, number=3), replace(MIXTURE, number=5)), pp=2)
    first, last = stage_blocks(job)
    assert [(block.number, block.mlp) for block in first] == [(3, LLAMA.mlp), (1, MIXTURE.mlp)]
    assert [(block.number, block.mlp) for block in last] == [(4, MIXTURE.mlp)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tp": 2}, "tp(2) * cp(1) * pp(1) * dp(1) != world size(1)"),
        ({"gpus": 8}, "!= world size(8)"),
        ({"tp": 0}, "tp(0)"),
        ({"dp": -1, "pp": -1}, "pp(-1)"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"global_batch": 0}, "global_batch"),
        ({"vocab": -1}, "vocab(-1)"),
        ({"seq": -4096}, "seq(-4096)"),
        ({"vpp": 0}, "vpp(0)"),
        ({"micro_batch": 3}, "global batch(8) % (micro batch(3) * dp(1)) = 2 != 0"),
        ({"dp": 16, "gpus": 16}, "global batch(8) % (micro batch(1) * dp(16)) = 8 != 0"),
        ({"cp": 3, "gpus": 3}, "seq_length(4096) % cp(3) = 1 != 0"),
        ({"tp": 64, "gpus": 64}, "heads(32) % tp(64) = 32 != 0"),
        ({"tp": 3, "gpus": 3}, "heads(32) % tp(3) = 2 != 0"),
        ({"ep": 2}, "tp(1) * cp(1) * dp(1) % (ep(2) * etp(1)) = 1 != 0"),
        ({"pp": 17, "gpus": 17}, "16 layers are too few for pp 17"),
        ({"pp": 4, "vpp": 5, "gpus": 4}, "chunks(5)"),
    ],
)
def test_impossible_jobs_are_refused(
    machine: Machine, changes: dict[str, Any], sentence: str
) -> None:
    """One sentence says which number does not fit which."""
    with pytest.raises(InputError) as caught:
        step_time(machine, replace(DENSE, **changes))
    assert sentence in str(caught.value)


def test_degrees_that_do_not_divide_experts_and_mixers(machine: Machine) -> None:
    """More expert ranks than experts, and heads of a mixer."""
    mixture = replace(DENSE, blocks=(MIXTURE,), global_batch=64)
    with pytest.raises(InputError, match=r"experts\(8\) % ep\(16\) = 8 != 0"):
        step_time(machine, job_with(mixture, dp=16, ep=16))
    with pytest.raises(InputError, match=r"experts\(8\) % ep\(3\) = 2 != 0"):
        step_time(machine, job_with(mixture, dp=3, ep=3, global_batch=3))
    with pytest.raises(InputError, match=r"heads of a mixer\(\d+\) % tp\(8\)"):
        step_time(machine, job_with(replace(DENSE, blocks=(MIXER,)), tp=8))
    assert step_time(machine, job_with(mixture, dp=8, ep=8)).total_s > 0


def test_chunks_may_count_embedding_and_head(machine: Machine) -> None:
    """Llama 3 405B has 126 layers in 16 stages of 8 chunks; without a pipeline chunks are none."""
    large = replace(DENSE, blocks=(replace(LLAMA, number=126),), global_batch=64)
    assert step_time(machine, job_with(large, pp=16, vpp=8)).total_s > 0
    one, two = (step_time(machine, replace(DENSE, vpp=vpp)).total_s for vpp in (1, 2))
    assert one == two


def test_numbers_of_a_job() -> None:
    """Micro-batches of one pipeline, tokens of a rank, widths of heads."""
    job = job_with(DENSE, dp=4, cp=2, global_batch=64, micro_batch=2)
    assert (job.micro_batches, job.tokens) == (8, 4096)
    attention = attention_of(heads=8, kv_heads=2, width=192, value_width=128)
    assert (attention.query, attention.key_value, attention.value) == (1536, 640, 1024)
    assert LLAMA.norms == 2
    assert MIXER.norms == 1
    assert Block(number=1, hidden=8, mlp=Mlp(width=8)).norms == 1


def test_frozen_weights_have_no_gradients_to_add(machine: Machine) -> None:
    """Not among data ranks, and not among the two copies of a tied table either."""
    job = job_with(DENSE, pp=2, dp=2, tied=True, global_batch=16)
    terms = step_time(machine, replace(job, frozen=True)).terms_s
    assert (terms["gradients"], terms["optimizer"]) == (0.0, 0.0)
    apart, tied = (step_time(machine, replace(job, tied=tied)).terms_s for tied in (False, True))
    assert tied["gradients"] > apart["gradients"]


def test_frozen_weights_are_gathered_but_have_no_gradients_to_scatter(machine: Machine) -> None:
    """ZeRO-3 of dense and routed weights; the stack's share of the network is that of both."""
    for block in (LLAMA, MIXTURE):
        job = job_with(replace(DENSE, blocks=(block,)), dp=8, zero=3, graphs="full")
        trained, frozen = (
            step_time(machine, replace(job, frozen=frozen)).terms_s["sharding"]
            for frozen in (False, True)
        )
        assert 0 < frozen < trained


def test_attention_again_gets_its_keys_again(machine: Machine) -> None:
    """Recomputation of core attention in a ring is kernels and what the ring does not hide."""
    job = job_with(DENSE, cp=4, seq=2048)
    plain = step_time(machine, job).terms_s
    again = step_time(machine, replace(job, recompute=frozenset({"core_attn"}))).terms_s
    full = step_time(machine, replace(job, recompute="full")).terms_s
    assert again["context"] == plain["context"] > 0
    alone = job_with(job, cp=1)
    kernels = step_time(machine, replace(alone, recompute=frozenset({"core_attn"}))).terms_s
    assert again["recompute"] > kernels["recompute"] / 4
    assert plain["recompute"] == 0.0 < again["recompute"] < full["recompute"]


def test_a_job_of_one_layer_of_each_kind(machine: Machine) -> None:
    """Blocks may lack attention, or what follows it."""
    job: Job = replace(
        DENSE, blocks=(MIXER, replace(LLAMA, mlp=None), replace(LLAMA, attention=None))
    )
    terms = step_time(machine, job).terms_s
    assert terms["gemm"] > 0
    assert terms["experts"] == 0.0


def test_transfers_of_32_bit_training_are_twice_as_large() -> None:
    """Activations, keys and values, weights: what is bound by bandwidth takes twice as long."""
    machine = machine_named("a100-80gb", "torchtitan-eager")
    base = job_with(DENSE, tp=4, dp=4, pp=2, zero=3)
    half, whole = (
        step_time(machine, replace(base, precision=name, attention_kernel="unfused"))
        for name in ("fp16", "fp32")
    )
    assert 1.8 < whole.terms_s["tensor"] / half.terms_s["tensor"] < 2.0
    assert whole.terms_s["transfer"] > half.terms_s["transfer"]
