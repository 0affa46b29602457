"""Arguments of Megatron-LM read as launches: what they mean, what is refused, what is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import DocumentError, InputError
from autopar.price.oom_risk import reserved_interval
from autopar.run.run import Run
from search.engines.arguments import UnpricedError, words_of
from search.engines.megatron.read import arguments_of_configuration, read_run
from search.engines.megatron.release import Release
from search.engines.text import read_configuration

SMALL: dict[str, Any] = {
    "--num-layers": 12,
    "--hidden-size": 512,
    "--num-attention-heads": 8,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--micro-batch-size": 4,
    "--global-batch-size": 32,
    "--vocab-size": 50257,
    "--bf16": True,
}
EXPERTS: dict[str, Any] = {"--num-experts": 8, "--moe-router-topk": 2}
LATENT: dict[str, Any] = {
    "--multi-latent-attention": True,
    "--kv-lora-rank": 64,
    "--qk-head-dim": 16,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 16,
}


def read(arguments: dict[str, Any] | None = None, **options: Any) -> Run:
    """Return the run of the small model with more arguments."""
    return read_run(SMALL | (arguments or {}), **({"world_size": 8} | options)).run


def test_what_is_not_said_is_the_trainers_default() -> None:
    """Tied embeddings, learned positions, LayerNorm, biases, GELU, dropout of 0.1."""
    found = read()
    model = found.model
    assert model.tied
    assert model.positions == "learned"
    assert model.last.norm == "layer"
    assert model.last.biases
    assert model.last.gates == 1
    assert model.dense_width == 2048
    assert model.dropout == model.attention.dropout == 0.1
    assert model.attention.kv_heads == 8
    assert found.strategy.dp == 8
    assert found.strategy.micro_batches == 1
    assert found.padded_vocab == 50304


def test_a_gated_width_is_two_thirds_of_four_hidden() -> None:
    """Rounded down to a multiple of 64, unless it is given."""
    assert read({"--swiglu": True}).model.dense_width == 1344
    assert read({"--swiglu": True, "--ffn-hidden-size": 1000}).model.dense_width == 1000


def test_steps_are_those_until_the_run_ends_or_exits() -> None:
    """Iterations, samples over the batch, an exit: the fewest; None where nothing says it."""
    assert read().steps is None
    assert read({"--train-iters": 100, "--exit-interval": 50}).steps == 50
    assert read({"--train-samples": 3200, "--exit-interval": 500}).steps == 100


def test_query_groups_need_their_switch() -> None:
    """`--num-query-groups` alone changes nothing."""
    assert read({"--num-query-groups": 2}).model.attention.kv_heads == 8
    both = {"--num-query-groups": 2, "--group-query-attention": True}
    assert read(both).model.attention.kv_heads == 2


def test_experts() -> None:
    """Every layer has them unless a pattern says which; ETP is TP unless it is given."""
    found = read(EXPERTS | {"--tensor-model-parallel-size": 2, "--expert-model-parallel-size": 2})
    assert found.model.experts is not None
    assert found.model.experts.width == 2048
    assert found.model.mixtures == (True,) * 12
    assert found.split.etp == 2
    assert found.strategy.edp == 2
    assert read(EXPERTS | {"--expert-tensor-parallel-size": 1}).split.etp == 1
    second = read(EXPERTS | {"--moe-layer-freq": 3}).model.mixtures
    assert second == (True, False, False) * 4
    listed = read(EXPERTS | {"--moe-layer-freq": "([0]*3+[1]*9)"}).model.mixtures
    assert listed == (False,) * 3 + (True,) * 9
    for mark in ("'", '"'):  # for the shell that a launcher starts
        quoted = f"{mark}([0]*3+[1]*9){mark}"
        assert read(EXPERTS | {"--moe-layer-freq": quoted}).model.mixtures == listed
    # without experts there is nothing to split
    dense = read({"--expert-tensor-parallel-size": 4, "--expert-model-parallel-size": 2})
    assert dense.split.ep == dense.split.etp == 1


@pytest.mark.parametrize(
    ("words", "context"),
    [
        ("p2p", {}),
        ("a2a", {"cp_kind": "a2a"}),
        ("all_gather", {"cp_kind": "all-gather"}),
        ("a2a+p2p", {"cp_kind": "a2a", "rings": 4}),
        # as no price is by layer
        ("p2p a2a p2p a2a", {}),
    ],
)
def test_context_ranks_exchange_as_they_are_told(words: str, context: dict[str, Any]) -> None:
    """Rings of four groups, of which two neighbours each exchange heads."""
    found = read(
        {
            "--context-parallel-size": 8,
            "--cp-comm-type": words,
            "--hierarchical-context-parallel-sizes": "2 4",
        }
    ).split
    plain = {"cp_kind": "ring", "rings": 1}
    assert {name: getattr(found, name) for name in plain} == plain | context


def test_latent_attention_and_further_tokens() -> None:
    """MLA's widths, with and without a narrow projection of queries; modules on the last stage."""
    attention = read(LATENT | {"--q-lora-rank": 192}).model.attention
    assert attention.latent is not None
    assert attention.latent.query_rank == 192
    assert attention.value_width == 16
    whole = read(LATENT).model.attention.latent
    assert whole is not None
    assert whole.query_rank is None
    more = read({"--mtp-num-layers": 1, "--pipeline-model-parallel-size": 2})
    assert [chunk.mtp for stage in more.strategy.stages for chunk in stage] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "layers"),
    [
        ({}, [[3], [3], [3], [3]]),
        ({"--num-layers-per-virtual-pipeline-stage": 1}, [[1, 1, 1]] * 4),
        ({"--num-virtual-stages-per-pipeline-rank": 3}, [[1, 1, 1]] * 4),
        (
            {
                "--decoder-first-pipeline-num-layers": 2,
                "--decoder-last-pipeline-num-layers": 4,
            },
            [[2], [3], [3], [4]],
        ),
        (
            {
                "--num-layers": 10,
                "--account-for-embedding-in-pipeline-split": True,
                "--account-for-loss-in-pipeline-split": True,
            },
            [[2], [3], [3], [2]],
        ),
        ({"--pipeline-model-parallel-layout": "Ett|t*4|t*4|ttL"}, [[2], [4], [4], [2]]),
        (
            {"--pipeline-model-parallel-layout": r"Et\|t\|\(tt\|\)*4t\|tL"},
            [[1, 2], [1, 2], [2, 1], [2, 1]],
        ),
    ],
)
def test_stages_and_chunks(arguments: dict[str, Any], layers: list[list[int]]) -> None:
    """Even, interleaved, with ends of their own, counted with embedding and loss, or laid out."""
    found = read({"--pipeline-model-parallel-size": 4} | arguments).strategy.stages
    assert [[len(chunk.layers) for chunk in stage] for stage in found] == layers
    flat = [chunk for stage in found for chunk in stage]
    assert sum(chunk.embeds for chunk in flat) == sum(chunk.head for chunk in flat) == 1
    assert found[0][0].embeds
    assert found[-1][-1].head


def test_how_it_is_trained() -> None:
    """Precision, optimizer, recomputation, overlap and fusion by their own words."""
    found = read(
        {
            "--bf16": False,
            "--fp16": True,
            "--fp8-format": "hybrid",
            "--fp8-param-gather": True,
            "--use-distributed-optimizer": True,
            "--num-distributed-optimizer-instances": 2,
            "--overlap-grad-reduce": True,
            "--recompute-granularity": "selective",
            "--recompute-modules": "[layernorm moe_act]",
            "--cross-entropy-loss-fusion": True,
            "--cross-entropy-fusion-impl": "te",
            "--no-create-attention-mask-in-dataloader": True,
            "--defer-embedding-wgrad-compute": True,
            "--wgrad-deferral-limit": 2,
        }
    )
    assert found.runtime.precision.kind == "fp16"
    assert found.runtime.precision.fp8_weights
    assert found.split.zero == 1
    assert found.split.replicas == 2
    assert found.runtime.overlap.gradients
    assert found.split.modules == {"layernorm", "moe_act"}
    assert found.kernels.loss == "te"
    assert not found.runtime.masks
    assert found.kernels.deferred_head == 2
    full = read(
        {
            "--recompute-granularity": "full",
            "--recompute-method": "block",
            "--recompute-num-layers": 3,
        }
    ).strategy.recomputed
    assert (full.kind, full.number) == ("block", 3)
    fsdp = {
        "--use-megatron-fsdp": True,
        "--data-parallel-sharding-strategy": "optim_grads_params",
    }
    assert read(fsdp).split.zero == 3
    assert read({"--optimizer": "muon"}).runtime.optimizer.kind == "muon"


@pytest.mark.parametrize(
    ("gpu", "release", "deterministic", "backend", "kernel"),
    [
        ("H100", Release(), True, None, "fused"),
        ("A100", Release(), False, None, "flash"),
        ("GB200", Release(), True, None, "flash"),
        ("GB200", Release(), False, None, "fused"),
        ("A100", Release(container="lts", date="2025-10-12"), True, None, "unfused"),
        ("A100", Release(container="lts", date="2025-11-06"), True, None, "flash"),
        ("H100", Release(), True, "unfused", "unfused"),
        ("v100", Release(), False, None, "unfused"),
        ("V100", Release(), True, None, "unfused"),
    ],
)
def test_the_kernel_of_attention(
    gpu: str, release: Release, deterministic: bool, backend: str | None, kernel: str
) -> None:
    """Device, determinism and the container's libraries choose where nobody does."""
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": 0 if deterministic else 1}
    arguments = {} if backend is None else {"--attention-backend": backend}
    found = read(arguments, gpu=gpu, release=release, environment=environment)
    assert found.kernels.attention == kernel


def test_products_are_beside_transfers_of_more_than_one_rank() -> None:
    for tp, expected in ((1, False), (2, True)):
        found = read({"--tensor-model-parallel-size": tp, "--tp-comm-overlap": True,
                      "--sequence-parallel": True})  # fmt: skip
        assert found.runtime.overlap.tensor is expected


@pytest.mark.parametrize(
    ("arguments", "graphs"),
    [
        ({}, "none"),
        ({"--cuda-graph-impl": "none"}, "none"),
        ({"--cuda-graph-impl": "local"}, "partial"),
        ({"--enable-cuda-graph": True}, "partial"),
        ({"--external-cuda-graph": True, "--cuda-graph-scope": ["attn", "moe_router"]}, "partial"),
        ({"--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": "attn"}, "attention"),
        ({"--cuda-graph-impl": "local", "--cuda-graph-scope": "full_iteration"}, "full"),
        ({"--cuda-graph-impl": "full_iteration"}, "full"),
    ],
)
def test_the_graphs_of_a_run(arguments: dict[str, Any], graphs: str) -> None:
    """Implementation and scope, in the words of all releases; their memory is an interval."""
    run = read(arguments)
    assert run.kernels.graphs == graphs
    low, high = reserved_interval(run, 1e9)
    plain = reserved_interval(read(), 1e9)
    assert ((low, high) == plain) == (graphs == "none")
    assert high >= plain[1]


def test_a_kernel_can_be_switched_off() -> None:
    """Of the two that keep no scores the other one is taken."""
    assert read(environment={"NVTE_FUSED_ATTN": 0}).kernels.attention == "flash"
    assert read(gpu="A100", environment={"NVTE_FLASH_ATTN": "0"}).kernels.attention == "fused"
    # neither runs in 32 bits, or below compute capability 8.0
    whole = {name: value for name, value in SMALL.items() if name != "--bf16"}
    assert read_run(whole, world_size=8).run.kernels.attention == "unfused"
    assert read(gpu="v100", environment={"NVTE_FLASH_ATTN": "0"}).kernels.attention == "unfused"


def test_the_environment_reaches_the_software() -> None:
    """Workspaces, segments, layers of Megatron's own, and what a release keeps."""
    variables = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8",
    }
    found = read({"--transformer-impl": "local"}, environment=variables)
    assert found.runtime.allocator.cublas == ":4096:8"
    assert found.runtime.allocator.expandable
    assert found.kernels.own_layers
    assert found.kernels.attention == "local"
    assert found.kernels.quirks.kept_dummies
    assert not read(release=Release(date="2025-07-05")).kernels.quirks.kept_dummies


def test_the_vocabulary_follows_from_the_tokenizer() -> None:
    """As given, GPT-2's of merges, that of a known tokenizer; the stand-in once added one."""
    bare = {key: value for key, value in SMALL.items() if key != "--vocab-size"}
    merges = {"--vocab-file": "v.json", "--merge-file": "m.txt"}
    assert read_run(bare | merges, world_size=8).run.model.vocab == 50257
    llama = {"--tokenizer-type": "Llama2Tokenizer"}
    assert read_run(bare | llama, world_size=8).run.model.vocab == 32000
    stand_in = {"--tokenizer-type": "NullTokenizer"}
    assert read(stand_in).model.vocab == 50257
    assert read(stand_in, release=Release(date="2025-07-05")).model.vocab == 50258
    with pytest.raises(DocumentError, match="'--vocab-size'"):
        read_run(bare, world_size=8)


@pytest.mark.parametrize(
    "arguments",
    [
        {"--moe-layer-freq": "$FREQ"} | EXPERTS,
        {"--pipeline-model-parallel-layout": "E|${REST}", "--pipeline-model-parallel-size": 2},
        {"--window-size": ["$LEFT", 0]},
        {"--rotary-percent": "$SHARE"},
        {"--context-parallel-size": 4, "--cp-comm-type": "$KIND"},
        {"--recompute-granularity": "selective", "--recompute-modules": "$MODULES"},
        {"--step-batch-size-schedule": "0:$FIRST 2B:64"},
        {"--normalization": "$NORM"},
        {"--moe-router-dtype": "${TYPE}"} | EXPERTS,
        {"--optimizer": "$OPTIMIZER"},
    ],
)
def test_values_that_nobody_knows_are_not_wrong(arguments: dict[str, Any]) -> None:
    with pytest.raises(UnpricedError, match=r"is .*\$"):
        read(arguments)


def test_open_values_that_no_price_depends_on() -> None:
    open_values = {"--train-iters": "$N", "--tokenizer-type": "$T", "--train-samples": "$S"}
    assert read(open_values | {"--vocab-size": 32000}) == read({"--vocab-size": 32000})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"--hybrid-attention-ratio": 0.1}, "a hybrid model without --hybrid-layer-pattern"),
        ({"--mamba-num-heads": 8}, "a hybrid model without --hybrid-layer-pattern"),
        ({"--decoder-seq-length": 512}, "belongs to a T5 model"),
        ({"--tokenizer-type": "BertWordPieceCase"}, "belongs to a BERT model"),
        ({"--img-h": 336}, "belongs to a multimodal model"),
        ({"--decoder-seq-length": 512, "--img-h": 336}, "belongs to a multimodal model"),
        ({"--spec": "[some.module spec]"}, "names unknown layers"),
        ({"--perform-rl-step": True}, "keeps a second model"),
        ({"--cuda-graph-impl": "cuda"}, "expected one of none, local"),
        ({"--fine-grained-activation-offloading": True}, "attn_norm"),
        ({"--fine-grained-activation-offloading": True, "--offload-modules": "mlp"}, "got mlp"),
        ({"--delta-offload-bytes-across-pp-ranks": 1024}, "stages offload different bytes"),
        ({"--optimizer": "sgd"}, "sgd"),
        ({"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": "optim"}, "is not"),
        ({"--position-embedding-type": "mrope"}, "mrope is not priced"),
        ({"--cross-entropy-fusion-impl": "linear"}, "linear is not priced"),
        ({"--num-layers": 99999999}, "expected at most 4096, got 99999999"),
        ({"--num-layers": "${LAYERS}"}, "'\\$\\{LAYERS\\}'"),
        ({"--moe-layer-freq": "__import__('os')"} | EXPERTS, "expected a list of 0 and 1"),
        ({"--moe-layer-freq": "[1]*99999999"} | EXPERTS, "expected a list of 0 and 1"),
        ({"--moe-layer-freq": "[1]*11"} | EXPERTS, "expected 12 entries of 0 and 1, got 11"),
        ({"--recompute-granularity": "full"}, "'--recompute-method': this key is missing"),
        (
            {"--recompute-granularity": "selective", "--recompute-modules": "everything"},
            "expected core_attn",
        ),
        (
            {
                "--pipeline-model-parallel-size": 2,
                "--pipeline-model-parallel-layout": "Ettt|tttL",
            },
            "has 6 layers",
        ),
        (
            {
                "--pipeline-model-parallel-size": 2,
                "--pipeline-model-parallel-layout": "E(t|t*12L",
            },
            "a bracket is not closed",
        ),
        (
            {"--context-parallel-size": 4, "--cp-comm-type": "a2a+p2p"},
            "expected two sizes that multiply to 4",
        ),
        ({"--hidden-dropout": "much"}, "expected a number of at least 0"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], problem: str) -> None:
    """Other models and unusable values are one sentence with the flag, never a traceback."""
    with pytest.raises(InputError, match=problem) as caught:
        read(arguments)
    assert "\n" not in str(caught.value)


def test_a_launch_without_its_number_of_gpus_is_refused() -> None:
    """Nothing is assumed."""
    with pytest.raises(InputError, match=r"'--world-size'.*GPUs"):
        read_run(SMALL)


def test_what_was_not_needed_is_told_apart() -> None:
    """Logging and storing change nothing; what nobody knows is listed as such."""
    found = read_run(
        SMALL | {"--log-interval": 10, "--no-such-flag": "x y", "--lr": 1e-4}, world_size=8
    )
    assert [(entry.flag, entry.value) for entry in found.not_understood] == [
        ("no-such-flag", "x y")
    ]
    assert {entry.flag for entry in found.ignored if entry.understood} == {"log-interval", "lr"}
    # of time alone, and defaults spelt out, are known; other values of those are not
    known = {"--overlap-param-gather": True, "--megatron-fsdp-main-grads-dtype": "fp32"}
    assert read_run(SMALL | known, world_size=8).ignored == ()
    other = {"--megatron-fsdp-main-grads-dtype": "bf16"}
    (entry,) = read_run(SMALL | other, world_size=8).not_understood
    assert entry.value == "bf16"


def test_words_of_a_document() -> None:
    """Switches that are off are no flags; numbers are as they are written."""
    document: dict[str, Any] = {
        "--a_b": True,
        "c": False,
        "d": None,
        "e": 5e3,
        "f": [2, 2],
        "g": 0.5,
        "h": {},
    }
    assert words_of(document) == {"a-b": (), "e": ("5000",), "f": ("2", "2"), "g": ("0.5",)}
    # one text with several words, where an argument takes several; 0 of what there need not be
    several = {"cp_comm_type": "p2p a2a", "mtp_num_layers": 0, "spec": "a b"}
    assert words_of(several) == {"cp-comm-type": ("p2p", "a2a"), "spec": ("a b",)}


SCRIPT = """#!/bin/bash
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
ARGS=(--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024
  --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32
  --vocab-size 50257 --bf16 --hierarchical-context-parallel-sizes 2 2 --cp-comm-type a2a+p2p
  --context-parallel-size 4)
torchrun --nproc-per-node 8 pretrain_gpt.py "${ARGS[@]}"
"""


def test_scripts_and_yaml_are_read_alike(tmp_path: Path) -> None:
    """A script, a functional test's YAML and JSON of one launch are the same launch."""
    script, yaml, plain = (tmp_path / f"launch.{suffix}" for suffix in ("sh", "yaml", "json"))
    script.write_text(SCRIPT, encoding="utf-8")
    arguments = SMALL | {
        "--hierarchical-context-parallel-sizes": "2 2",
        "--cp-comm-type": "a2a+p2p",
        "--context-parallel-size": 4,
    }
    lines = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in arguments.items())
    variables = "ENV_VARS:\n  CUBLAS_WORKSPACE_CONFIG: :4096:8\n"
    yaml.write_text(f"{variables}MODEL_ARGS:\n{lines}", encoding="utf-8")
    plain.write_text(json.dumps(arguments | {"--world-size": 8}), encoding="utf-8")

    def read_file(path: Path) -> Run:
        world = 8 if path == yaml else None
        source = read_configuration(path)
        arguments, environment = arguments_of_configuration(source)
        world_size = world or source.world_size
        return read_run(arguments, world_size=world_size, environment=environment).run

    found = {path: read_file(path) for path in (script, yaml, plain)}
    assert found[script].strategy == found[yaml].strategy == found[plain].strategy
    assert found[script].model == found[yaml].model == found[plain].model
    assert found[yaml].runtime.allocator.cublas == ":4096:8"
    assert found[script].runtime.allocator.cublas is None
    assert found[script].runtime.allocator.expandable
    assert not found[plain].runtime.allocator.expandable
