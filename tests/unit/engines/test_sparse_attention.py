"""Sparse attention of Megatron-LM, whose indexer chooses keys: read, counted, refused, written."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

import autopar
from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.price.activations import mixer_bytes, saved_parts
from autopar.price.job import job_of_run
from autopar.price.parameters import stage_weights
from autopar.rates.layer import context_parallel_comm, layer_times
from autopar.rates.parts.operations import transfer_s
from autopar.records import replace
from autopar.run.architecture import Indexer, Model
from autopar.run.of_plan import uniform_model
from autopar.run.rules import RuleError
from autopar.run.run import Run
from search.engines.arguments import MissingError, UnpricedError
from search.engines.bridge.read import run_of_settings
from search.engines.exporter_types import ExportTarget
from search.engines.huggingface.architectures import architecture
from search.engines.megatron.read import read_run
from search.engines.megatron.rules import broken_rules, violated_rules
from search.engines.megatron.setting import Setting
from search.engines.megatron.write import write
from search.engines.text import flags_of, script_command
from search.planning.uniform.layout import balanced_sizes, layouts
from tests.runs import llama, run_of
from tests.step_cases import machine_named

GLM: dict[str, Any] = {
    "--num-layers": 10, "--hidden-size": 6144, "--ffn-hidden-size": 12288,
    "--num-attention-heads": 64, "--multi-latent-attention": True, "--q-lora-rank": 2048,
    "--kv-lora-rank": 512, "--qk-head-dim": 192, "--qk-pos-emb-head-dim": 64,
    "--v-head-dim": 256, "--kv-channels": 256, "--qk-layernorm": True,
    "--experimental-attention-variant": "dsa", "--dsa-kernel-backend": "cudnn",
    "--dsa-indexer-n-heads": 32, "--dsa-indexer-head-dim": 128, "--dsa-indexer-topk": 2048,
    "--dsa-indexer-loss-coeff": 0.001, "--dsa-indexer-use-sparse-loss": True,
    "--swiglu": True, "--normalization": "RMSNorm", "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True, "--position-embedding-type": "rope",
    "--vocab-size": 154880, "--seq-length": 4096, "--max-position-embeddings": 4096,
    "--micro-batch-size": 1, "--global-batch-size": 64, "--bf16": True,
    "--use-distributed-optimizer": True, "--hidden-dropout": 0, "--attention-dropout": 0,
    "--no-rope-fusion": True,
}  # fmt: skip
"""Ten dense layers of GLM-5."""
_GATHERED = {"--context-parallel-size": 2, "--cp-comm-type": "all_gather"}


def read(more: dict[str, Any] | None = None, *, world_size: int = 64) -> Run:
    """Return the run of GLM's layers with more arguments; None takes an argument out."""
    arguments = {key: one for key, one in (GLM | (more or {})).items() if one is not None}
    return read_run(arguments, world_size=world_size, gpu="H100").run


def indexers(run: Run) -> list[Indexer | None]:
    """Return the indexer of every layer."""
    return [one.attention and one.attention.indexer for one in run.model.each_layer]


def test_an_indexer_is_read() -> None:
    """Its loss trains it only if it has a weight."""
    own = Indexer(heads=32, width=128, topk=2048)
    assert indexers(read()) == [own] * 10
    untrained = indexers(read({"--dsa-indexer-loss-coeff": 0}))
    assert {one.trained for one in untrained if one} == {False}


@pytest.mark.parametrize(("offset", "chosen"), [(0, [1, 5, 9]), (3, [1, 2, 3, 7])])
def test_layers_reuse_the_keys_of_an_earlier_layer(offset: int, chosen: list[int]) -> None:
    """Layers count from 1, and those up to the offset choose (`is_dsa_skip_topk_layer`)."""
    more = {"--dsa-indexer-topk-freq": 4, "--dsa-indexer-skip-topk-offset": offset}
    run = read(more)
    assert [place for place, one in enumerate(indexers(run), 1) if one and not one.reused] == chosen
    assert written(run).model == run.model


def test_letters_d_are_layers_with_an_indexer() -> None:
    """`validate_args` switches latent attention on; pairs are the GPT run."""
    pattern = {
        "--hybrid-layer-pattern": "D-" * 10,
        "--multi-latent-attention": None,
        "--experimental-attention-variant": None,
    }
    assert read(pattern) == read()
    mixed = read({**pattern, "--hybrid-layer-pattern": "D-D"})
    assert [one.mlp is None for one in mixed.model.each_layer] == [True, False, True]
    assert written(mixed).model == mixed.model


def test_weights_are_those_of_the_model() -> None:
    """The indexer is whole on every tensor rank."""
    run = read({"--tensor-model-parallel-size": 1})
    latent, inner = 2048 * (6144 + 64 * 256), 64 * (192 + 256) * 512
    attention = latent + 6144 * 576 + inner + 64 * 256 * 6144 + 2048 + 512
    indexer = 2048 * 32 * 128 + 6144 * (128 + 32) + 2 * 128
    each = attention + indexer + 3 * 6144 * 12288 + 2 * 6144
    found = sum(one.elements for one in stage_weights(run, 0)[0])
    assert found == 10 * each + 2 * 154880 * 6144 + 6144
    halves = read({"--tensor-model-parallel-size": 2, "--sequence-parallel": True})
    names = {one.name: one.elements for one in stage_weights(halves, 0)[0] if one.name == "indexer"}
    assert names == {"indexer": 6144 * 32}  # the last of three matrices, not divided


def test_saved_tensors_are_those_of_the_source() -> None:
    """Counted by hand, per token, in elements of 2 bytes."""
    parts, tokens = dict(saved_parts(read().rank_layers[0])), 4096
    assert parts["query latent"] == parts["latent norms"] == 2 * tokens * 2048
    assert parts["key-value latent"] == parts["key"] == 2 * tokens * 576
    assert parts["query"] == 2 * tokens * 64 * 256
    assert parts["absorbed query"] == 2 * tokens * 64 * 576
    assert parts["latent output"] == 2 * tokens * 64 * 512
    assert parts["attention output"] == 2 * tokens * 64 * 256
    assert parts["value weights"] == 2 * 64 * 256 * 512
    assert parts["rotary factors"] == 4 * tokens * 64 * 2  # of queries and key, or of the indexer
    assert parts["chosen keys"] == 4 * tokens * 2048
    assert parts["indexer keys"] == tokens * (2 * 128 + 8)
    assert parts["indexer gradients"] == 2 * tokens * (32 * 129 + 128)
    assert "indexer input" not in parts
    scattered = {"--tensor-model-parallel-size": 2, "--sequence-parallel": True}
    gathered = dict(saved_parts(read(scattered).rank_layers[0]))
    assert gathered["indexer input"] == 2 * tokens * (6144 + 2048)
    assert gathered["query latent"] == tokens * 2048


@pytest.mark.parametrize(
    ("more", "gone"),
    [
        ({"--dsa-indexer-loss-coeff": 0}, {"indexer keys", "indexer gradients"}),
        ({"--recompute-granularity": "selective", "--recompute-modules": "core_attn"},
         {"value weights", "latent output", "softmax statistics", "chosen keys", "indexer keys",
          "indexer gradients"}),
        ({"--recompute-granularity": "selective", "--recompute-modules": "mla_up_proj"},
         {"query", "absorbed query", "key"}),
        # there are no hooks for it in `AbsorbedMLASelfAttention`
        ({"--fine-grained-activation-offloading": True, "--offload-modules": "core_attn"}, set()),
    ],
)  # fmt: skip
def test_what_is_made_again_is_not_saved(more: dict[str, Any], gone: set[str]) -> None:
    """An indexer without a loss saves nothing."""
    every, left = ({*dict(saved_parts(one.rank_layers[0]))} for one in (read(), read(more)))
    assert every - left == gone


def test_scores_are_held_in_parts() -> None:
    """Scores of all pairs, up to 1 GiB, and twice as much for the choice."""
    short, long = (
        mixer_bytes(read({"--seq-length": seq, "--max-position-embeddings": seq}).rank_layers[0])
        for seq in (4096, 65536)
    )
    queries = 3 * 2 * 32 * 128
    assert short[0] == 12 * 4096**2 + 4096 * queries
    assert long[0] == 3 * 2**30 + 65536 * queries
    # gradient of the output and of queries, and two copies of queries, output, its gradient, keys
    assert short[1] == 4096 * (2 * 64 * (512 + 576 + 2 * (576 + 2 * 512)) + 2 * 4 * 2048)
    assert mixer_bytes(run_of(llama()).rank_layers[0]) == (0, 0)


def test_heads_fill_a_tile() -> None:
    """Output and statistics of 16 heads per rank are views of those of 64."""
    more = {"--tensor-model-parallel-size": 4, "--sequence-parallel": True}
    parts = dict(saved_parts(read(more).rank_layers[0]))
    assert parts["latent output"] == 2 * 4096 * 64 * 512
    assert parts["softmax statistics"] == 4 * 4096 * 64
    assert parts["absorbed query"] == 2 * 4096 * 16 * 576


def test_scores_of_long_sequences_are_those_of_torch() -> None:
    """CuDNN's kernel computes up to 1 GiB of scores, 16,384 tokens of one sequence."""
    machine = machine_named()
    seconds = []
    for seq in (16384, 32768):
        run = read({"--seq-length": seq, "--max-position-embeddings": seq})
        job = job_of_run(run)
        times = layer_times(machine, job, job.blocks[0]).parts
        seconds.append(next(float(one.forward_s) for one in times if "scores" in one.name))
    assert seconds[1] > 16 * seconds[0]


def test_a_dense_letter_beside_a_sparse_one() -> None:
    """Latent attention without an indexer (+) is another kind of layer."""
    pattern = {"--hybrid-layer-pattern": "D-+-D-", "--experimental-attention-variant": None}
    sparse = [one and one.topk for one in indexers(read(pattern))]
    assert sparse == [2048, None, 2048]


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"--num-attention-heads": 96}, "sparse-heads.tensor"),
        ({"--kv-lora-rank": 256}, "sparse-latent"),
        ({"--bf16": None, "--fp16": True}, "sparse.precision"),
        ({"--dsa-indexer-topk-freq": 4, "--pipeline-model-parallel-size": 2}, "sparse.stages"),
        ({"--context-parallel-size": 2}, "sparse.context"),
    ],
)
def test_kernels_have_their_sizes(more: dict[str, Any], rule: str) -> None:
    """Sizes that the kernels of cuDNN and FlashMLA decline; others have no price."""
    with pytest.raises(RuleError) as caught:
        read(more)
    assert rule in caught.value.ids


@pytest.mark.parametrize(
    ("more", "flag"),
    [
        ({"--dsa-kernel-backend": None}, "dsa-kernel-backend"),
        ({"--dsa-kernel-backend": "tilelang"}, "dsa-kernel-backend"),
        ({"--dsa-indexer-use-sparse-loss": None}, "dsa-indexer-loss-coeff"),
        ({"--hybrid-layer-pattern": "D-", "--dsa-indexer-topk-freq": 4}, "dsa-indexer-topk-freq"),
        ({"--attention-backend": "unfused"}, "attention-backend"),
        ({"--fp8-format": "hybrid"}, "fp8-format"),
    ],
)
def test_what_has_no_price_is_refused(more: dict[str, Any], flag: str) -> None:
    """Other kernels, a loss over all keys, and shared keys of a pattern."""
    with pytest.raises(UnpricedError) as caught:
        read(more)
    assert f"--{flag}" in str(caught.value)


def test_a_missing_argument_is_named() -> None:
    """Sparse attention is latent attention, and its indexer has sizes."""
    for flag in ("--multi-latent-attention", "--dsa-indexer-topk"):
        with pytest.raises(MissingError) as caught:
            read({flag: None})
        assert flag in str(caught.value)


def test_tensor_ranks_need_sequence_parallelism() -> None:
    """`AbsorbedMLASelfAttention` asserts it."""
    words = {key[2:]: () if one is True else (str(one),) for key, one in GLM.items()}
    words |= {"tensor-model-parallel-size": ("2",)}
    assert "megatron.sparse.sequence-parallel" in {one.id for one in violated_rules(words, 64)}
    other = {key: one for key, one in words.items() if key not in ("no-rope-fusion",
             "disable-bias-linear")} | {"no-dsa-indexer-scoring-relu": ()}  # fmt: skip
    assert {one.id for one in violated_rules(other, 64)} >= {
        "megatron.no-dsa-indexer-scoring-relu.kernels",
        "megatron.sparse.rope-fusion",
        "megatron.sparse.biases",
    }
    old = broken_rules(Setting(words, 64, gpu="A100"))
    assert "megatron.sparse.device" in {one.id for one in old}


def written(run: Run) -> Run:
    """Return a run as read from the arguments that are written for it."""
    draft = write(run, ExportTarget(num_nodes=8, gpus_per_node=8))
    flags = flags_of(script_command(draft.files["megatron_args.sh"], "x").arguments)
    arguments = {
        f"--{flag}": True if not words else words[0] if len(words) == 1 else [*words]
        for flag, words in flags.items()
    }
    return read_run(arguments, world_size=64, gpu="H100").run


def test_sparse_attention_is_written_as_it_is_read() -> None:
    """In GPT models and in patterns, with and without a loss."""
    reused = {"--dsa-indexer-topk-freq": 4, "--dsa-indexer-skip-topk-offset": 3}
    mtp = {**reused, "--mtp-num-layers": 1}
    none = {**reused, "--dsa-indexer-skip-topk-offset": 10}
    for more in ({}, {"--dsa-indexer-loss-coeff": 0}, _GATHERED, mtp, none):
        run = read(more)
        assert written(run).model == run.model


def test_an_mtp_layer_has_an_indexer() -> None:
    """Its layers count from 1, so that the first one chooses keys."""
    reused = {"--dsa-indexer-topk-freq": 4, "--dsa-indexer-skip-topk-offset": 3}
    (layer,) = read({**reused, "--mtp-num-layers": 1}).model.each_mtp
    assert layer.attention is not None
    assert layer.attention.indexer is not None
    assert not layer.attention.indexer.reused


@pytest.mark.parametrize("card", ["a100-80gb:1x8", "mi300x:1x8", "l40s:1x8"])
def test_a_search_has_no_plan_without_the_kernels(card: str) -> None:
    """They need Hopper or Blackwell."""
    with pytest.raises(InputError, match="sparse attention needs"):
        autopar.search("glm-5", card, engine="megatron", global_batch_size=64)


def bridge_model(name: str, more: dict[str, Any]) -> Model:
    """Return the model that Megatron-Bridge's settings of a shipped model mean."""
    sizes = (architecture(name) or {}) | {"dsa_kernel_backend": "cudnn", "seq_length": 4096}
    settings = {f"model.{key}": value for key, value in (sizes | more).items()}
    settings |= {
        "train.global_batch_size": 64,
        "train.micro_batch_size": 1,
        "ddp.use_distributed_optimizer": True,
        "mixed_precision.bf16": True,
    }
    degrees = {"model.expert_model_parallel_size": 64, "model.pipeline_model_parallel_size": 1}
    return run_of_settings(
        settings | degrees, world_size=64, environment={}, gpu="H100", source="config.yaml"
    ).run.model


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5"])
def test_settings_of_megatron_bridge_have_the_indexer(name: str) -> None:
    """Sizes of an indexer count only beside its variant, as in `TransformerConfig`."""
    published = uniform_model(load_spec(name))
    own = published.first_sparse
    assert own is not None

    found = bridge_model(name, {})
    assert found.first_sparse is not None
    assert found.first_sparse.indexer == own.indexer
    assert found.each_layer == published.each_layer
    plain = bridge_model(name, {"experimental_attention_variant": None})
    assert plain.first_sparse is None


def test_stages_begin_with_layers_that_choose_keys() -> None:
    """In GLM-5.2 layers 0, 1 and every fourth from 2 on have an indexer."""
    reused = tuple(max(place - 2, 0) % 4 > 0 for place in range(78))
    found = [*layouts([1.0] * 78, 0.0, 2.0, 8, 1, reused=reused)]
    assert len(found) == 1
    starts = [stage[0].layers[0] for stage in found[0]]
    assert not any(reused[start] for start in starts)
    balanced = list(accumulate(balanced_sizes([1.0] * 78, 0.0, 2.0, 8, 1) or (), initial=0))[:-1]
    assert all(abs(one - other) <= 2 for one, other in zip(starts, balanced, strict=True))
    # more stages than layers that choose keys
    assert [*layouts([1.0] * 78, 0.0, 2.0, 26, 1, reused=reused)] == []


def test_context_ranks_gather_all_keys() -> None:
    """Compressed keys and those of the indexer, of 4,096 tokens; queries are those of a rank."""
    one, two = (dict(saved_parts(read(more).rank_layers[0])) for more in ({}, _GATHERED))
    assert "gathered keys" not in one
    assert two["gathered keys"] == 4096 * (512 + 64) * 2
    assert two["absorbed query"] == one["absorbed query"] // 2
    # gathered in 16 bits, and 8 bytes for each own token
    assert two["indexer keys"] == 4096 * 128 * 2 + 2048 * 8


def test_gathered_keys_take_time() -> None:
    """All-gather and reduce-scatter of 704 elements a token, or of 576 where keys are reused."""
    machine = machine_named("h100-80gb")
    job = job_of_run(read(_GATHERED))
    attention = job.blocks[0].attention
    assert attention is not None
    assert attention.indexer is not None
    found = context_parallel_comm(machine, job, attention)
    moved = [4096 * width * 2.0 for width in (576, 128)]
    sends = [
        sum(transfer_s(machine, kind, size, 2, job.tp) for size in moved)
        for kind in ("allgather", "reducescatter")
    ]
    assert [found.forward_s, found.backward_s] == pytest.approx(sends)
    reused = replace(attention, indexer=replace(attention.indexer, reused=True))
    less = context_parallel_comm(machine, job, reused)
    assert less.forward_s == pytest.approx(transfer_s(machine, "allgather", moved[0], 2, job.tp))


def test_a_search_gathers_keys_unless_told_otherwise() -> None:
    found = autopar.search(
        "glm-5", "h200:16x8", engine="megatron", global_batch_size=64, cp=2, pp=4, ep=32, vpp=1
    )
    assert "cp2 (all-gather)" in str(found)
