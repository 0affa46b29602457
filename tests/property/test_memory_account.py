"""Properties of the memory of runs: equal to an independent implementation, and monotone."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, strategies as st

from autopar.errors import InputError
from autopar.price.account import account_of
from autopar.records import replace
from autopar.run.architecture import Experts, LatentAttention
from autopar.run.run import Run
from autopar.run.runtime import Allocator, ExpertKernels, Kernels, Overlap, Precision, Quirks
from autopar.run.strategy import recomputing
from search.engines.megatron.read import read_run
from tests.often import often
from tests.oracles import memory as oracle
from tests.runs import decoder, run_of

MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Return a run of any architecture, split and trained in any way."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    tp, cp, pp = one(1, 2, 4), one(1, 2), one(1, 2, 4)
    replicas = one(1, 2, 3, 8)
    world = tp * cp * pp * replicas
    heads = one(4, 8, 24)
    experts, kernels, ep, etp = None, ExpertKernels(), 1, 1
    layers = pp * one(1, 2) * one(1, 2, 3)
    pattern = (False,) * layers
    if one(True, False):
        ep = one(*(n for n in (1, 2, 4) if (world // pp) % n == 0))
        etp = one(*(n for n in (1, 2) if (world // pp) % (ep * n) == 0))
        pattern = tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers)))
        experts = Experts(
            number=ep * one(1, 2, 3),
            per_token=one(1, 2),
            width=one(128, 1000, 4096),
            shared_width=one(0, 512),
        )
        kernels = ExpertKernels(
            dispatcher=one("allgather", "alltoall", "flex"),
            grouped=one(True, False),
            fused_permutation=one(True, False),
            fused_weighting=one(True, False),
            skew=one(None, 1.0, 1.3),
        )
    latent = LatentAttention(query_rank=one(None, 96), kv_rank=64, key_width=16, rotary_width=8)
    latent = one(None, None, latent)
    chunks = one(1, 2) if pp > 1 and layers % (2 * pp) == 0 else 1
    recompute: dict[str, Any] = one(
        {},
        {"recompute": frozenset(draw(st.sets(st.sampled_from(MODULES))))},
        {"recompute": "full", "unit": one(1, 2)},
        {"block": one(1, 2)},
    )
    try:
        return run_of(
            decoder(
                layers=layers,
                hidden=one(256, 520, 4096),
                width=one(512, 2048, 16384),
                heads=heads,
                kv_heads=one(4, heads),
                head_width=one(16, 64, 128),
                value_width=None if latent is None else 24,
                head_norms=one(True, False),
                attention_dropout=one(0.0, 0.1),
                latent=latent,
                vocab=one(1000, 50257, 131072),
                vocab_divisor=one(1, 128, 3232),
                mixtures=pattern,
                experts=experts,
                gated=one(True, False),
                biases=one(True, False),
                qkv_biases=one(True, False),
                tied=one(True, False),
                norm=one("layer", "rms"),
                positions=one("learned", "rotary", "none"),
                max_positions=1024,
                rotary_share=one(0.5, 1.0),
                dropout=one(0.0, 0.1),
                mtp=one(0, 0, 1, 2),
                mtp_shared=one(True, False),
            ),
            gpus=world,
            tp=tp,
            cp=cp,
            cp_kind=one("a2a", "ring") if cp > 1 else "ring",
            pp=pp,
            vpp=chunks,
            ep=ep,
            etp=etp,
            sequence_parallel=tp > 1 and one(True, False),
            zero=one(0, 1),
            replicas=one(1, 2) if replicas % 2 == 0 else 1,
            group=one(0, 0, pp + 1) if chunks > 1 else 0,
            seq_length=one(512, 1024),
            steps=one(None, 50, 100_000),
            gpu=one("A100", "H100", "GB200"),
            micro_batch=one(1, 4),
            global_batch=4 * one(1, 2, 3, 7) * replicas,
            **recompute,
            precision=Precision(
                kind=one("bf16", "fp16", "fp32"),
                fp8=one(True, False, False),
                fp8_recipe=one("tensorwise", "mxfp8"),
                gradients_bf16=one(True, False),
            ),
            kernels=Kernels(
                attention=one("fused", "flash", "unfused", "local"),
                module=one("megatron", "te", "te"),
                loss=one("none", "native", "te"),
                fused_gate=one(True, False),
                fused_rotary=one(True, False),
                fused_accumulation=one(True, False),
                deferred_head=one(None, None, 2),
                quirks=Quirks(
                    kept_dummies=one(True, False),
                    grouped_workspaces=one(0, 4),
                    expert_workspace=one(True, False),
                    saved_expert_output=one(True, False),
                    compiled_experts=one(True, False),
                    unfused_backward_copies=one(3, 4),
                    fused_loss_copies=one(5, 7, 9),
                    regathered_experts=one(True, False),
                ),
            ),
            experts=kernels,
            overlap=Overlap(
                tensor=one(True, False), gradients=one(True, False), experts=one(True, False)
            ),
            allocator=Allocator(cublas=one(None, ":4096:8"), expandable=one(True, False)),
            masks=one(True, False),
        )
    except InputError:
        # a batch that does not divide
        assume(False)
        raise


@often(60, 1500, runs(), st.integers(0, 3))
def test_terms_add_up_to_a_second_writing(run: Run, stage: int) -> None:
    """States and peak of every stage are those of the plain formulas, to the byte."""
    stage %= run.strategy.pp

    found = account_of(run, stage)

    assert found.states_bytes == oracle.states_bytes(run, stage)
    assert found.peak_bytes == oracle.peak_bytes(run, stage)


@often(30, 500, runs())
def test_more_of_everything_needs_more(run: Run) -> None:
    """More sequences at once, and less recomputation, never need less memory at the peak."""
    whole = replace(run.runtime.allocator, expandable=True)
    run = replace(run, runtime=replace(run.runtime, allocator=whole))
    strategy = run.strategy
    micro_batch, global_batch = 2 * strategy.micro_batch, 2 * strategy.global_batch
    larger = replace(
        run, strategy=replace(strategy, micro_batch=micro_batch, global_batch=global_batch)
    )
    saving = replace(run, strategy=recomputing(strategy, frozenset(MODULES)))
    keeping = replace(run, strategy=recomputing(strategy, frozenset()))

    assert account_of(larger).peak_bytes >= account_of(run).peak_bytes
    assert account_of(larger).states_bytes >= account_of(run).states_bytes
    assert account_of(saving).peak_bytes <= account_of(keeping).peak_bytes


_FLAGS = """
num-layers hidden-size num-attention-heads seq-length max-position-embeddings micro-batch-size
global-batch-size vocab-size tensor-model-parallel-size pipeline-model-parallel-size
context-parallel-size num-experts moe-router-topk expert-model-parallel-size
expert-tensor-parallel-size moe-ffn-hidden-size num-layers-per-virtual-pipeline-stage
num-virtual-stages-per-pipeline-rank decoder-first-pipeline-num-layers
decoder-last-pipeline-num-layers mtp-num-layers num-query-groups kv-lora-rank q-lora-rank
qk-head-dim recompute-num-layers num-distributed-optimizer-instances ddp-bucket-size
wgrad-deferral-limit microbatch-group-size-per-virtual-pipeline-stage
hierarchical-context-parallel-sizes make-vocab-size-divisible-by hidden-dropout
attention-dropout rotary-percent moe-expert-capacity-factor bf16 fp16 fp8-format
fp8-param-gather swiglu sequence-parallel use-distributed-optimizer overlap-grad-reduce
multi-latent-attention qk-layernorm group-query-attention untie-embeddings-and-output-weights
moe-grouped-gemm moe-permute-fusion moe-pad-expert-input-to-capacity recompute-activations
use-megatron-fsdp account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
moe-layer-freq recompute-granularity recompute-method recompute-modules
pipeline-model-parallel-layout attention-backend transformer-impl tokenizer-type normalization
position-embedding-type cp-comm-type data-parallel-sharding-strategy cross-entropy-loss-fusion
cross-entropy-fusion-impl moe-token-dispatcher-type optimizer spec defer-embedding-wgrad-compute
tp-comm-overlap no-such-flag
"""
FLAGS = tuple(_FLAGS.split())
_WORDS = """
1 2 3 4 8 64 1024 4096 999999999 0 -1 1e3 0.1 nan x [1,2] ([0]*1+[1]*3) full selective uniform
block Ett|ttL E|t*4|L allgather alltoall optim_grads_params fused flash local rope RMSNorm te
NullTokenizer a2a+p2p muon
"""
WORDS = tuple(_WORDS.split())
BASE: dict[str, Any] = {
    "num-layers": 4,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "seq-length": 64,
    "micro-batch-size": 1,
    "vocab-size": 100,
    "bf16": True,
}


@often(
    150,
    4000,
    st.dictionaries(st.sampled_from(FLAGS), st.sampled_from((*WORDS, True)), max_size=8),
    st.sampled_from((1, 2, 4, 8, 48)),
)
def test_any_arguments_are_priced_or_refused(arguments: dict[str, Any], world: int) -> None:
    """For any values of flags: a positive number of bytes, or one sentence."""
    problem = ""
    accounts = []
    try:
        run = read_run(BASE | arguments, world_size=world).run
        accounts = [account_of(run, stage) for stage in range(run.strategy.pp)]
    except InputError as error:
        problem = str(error)
    assert bool(problem) != bool(accounts)
    assert "\n" not in problem
    for account in accounts:
        assert account.states_bytes > 0
        assert account.peak_bytes > 0
