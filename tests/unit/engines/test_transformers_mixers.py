"""Layers of transformers that Megatron-LM does not have, and norms over all heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.documents.spec import load_spec
from autopar.price.activations import saved_parts
from autopar.price.assessment import Target, assess
from autopar.price.job import job_of_run
from autopar.price.oom_risk import few_runs
from autopar.price.parameters import stage_weights
from autopar.price.torch_layers import backward_gradients_bytes, parts_without_recompute
from autopar.rates.accuracy import load_accuracy
from autopar.rates.card import load_card
from autopar.rates.layer import layer_times
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import load_stack
from autopar.records import replace
from autopar.run.job import adapter_parameters
from autopar.run.model import model_parameter_count
from autopar.run.of_plan import uniform_model
from autopar.run.run import Run
from autopar.run.strategy import even_chunks
from autopar.training.adapters import Adapters
from search.engines.candidate import Candidate, Constraints, TrainingSettings
from search.engines.differences import without_effect
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.space import EngineContext, run_of
from search.engines.table import engine_space
from search.planning.uniform.infeasibility import violated_rule

LFM2: dict[str, Any] = {
    "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 16, "vocab_size": 65536,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 128000,
}  # fmt: skip
"""LFM2-1.2B."""
MOE = {
    "model_type": "lfm2_moe", "intermediate_size": 7168, "block_ff_dim": None,
    "num_hidden_layers": 24, "full_attn_idxs": None,
    "layer_types": ["full_attention" if at in (2, 6, 10, 14, 18, 21) else "conv"
                    for at in range(24)],
}  # fmt: skip
"""LFM2-8B-A1B, over LFM2-1.2B."""
M2: dict[str, Any] = {
    "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536,
    "num_hidden_layers": 4, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 200064, "max_position_embeddings": 196608, "num_local_experts": 16,
    "num_experts_per_tok": 8,
}  # fmt: skip
"""Four layers of MiniMax-M2 with fewer experts."""
TEXT: dict[str, Any] = {
    "model_type": "minimax", "hidden_size": 6144, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 8, "intermediate_size": 9216,
    "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 200064,
    "max_position_embeddings": 10240000, "attn_type_list": [0] * 7 + [1],
    "tie_word_embeddings": False,
}  # fmt: skip
"""Eight layers of MiniMax-Text-01 with fewer experts."""
TOKENS = 4096


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    def write(config: dict[str, Any], **more: Any) -> Path:
        given = {key: one for key, one in {**config, **more}.items() if one is not None}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(given))
        return path

    return write


def context(path: Path, **more: Any) -> EngineContext:
    own = uniform_model(load_spec(str(path), seq_length=[TOKENS]))
    values: dict[str, Any] = {"name": "own", "seq": TOKENS, "global_batches": (64,), "world": 8}
    return EngineContext(model=own, gpu="h100-80gb", domain=8, **{**values, **more})


def run_in(engine: str, path: Path, **choice: Any) -> Run:
    job = context(path)
    chunks = even_chunks(job.model.num_layers, 1)
    given = {"global_batch": 64, "micro_batch": 1, "zero": 3, "chunks": chunks, **choice}
    return run_of(engine_space(engine), job, Candidate(**given))


def bridged(path: Path, tp: int) -> Run:
    """Return the run of a model with wide norms as Megatron-Bridge builds it, by its own layer."""
    config = {**json.loads(path.read_text(encoding="utf-8")), "use_qk_norm": False}
    plain = path.with_name("plain.json")
    plain.write_text(json.dumps(config), encoding="utf-8")
    return replace(run_in("megatron", plain, tp=tp, zero=1), model=context(path).model)


@pytest.mark.parametrize(
    "config", [LFM2, {**LFM2, **MOE}, TEXT], ids=["dense", "experts", "lightning"]
)
@pytest.mark.parametrize("engine", ["deepspeed", "accelerate"])
def test_an_export_is_read_back_as_the_plan(
    config: dict[str, Any], engine: str, model: Callable[..., Path]
) -> None:
    """Its `config.json` describes the model to the last parameter."""
    path = model(config)
    run = run_in(engine, path)
    place = ExportTarget(num_nodes=1, gpus_per_node=8, model=None, spec=None)
    found = written(run, engine=engine, place=place)
    assert found.losses == ()
    (name,) = (name for name in found.files if name.endswith("config.json"))
    again = model(json.loads(found.files[name]))
    spec, own = (load_spec(str(one), seq_length=[TOKENS]) for one in (again, model(config)))
    assert model_parameter_count(spec) == model_parameter_count(own)
    weights = sum(one.elements for one in stage_weights(run, 0)[0])
    assert weights == model_parameter_count(own)


def test_a_short_convolution_saves_what_autograd_does(model: Callable[..., Path]) -> None:
    """The operators of `Lfm2ShortConv`, from the output of the norm to the last matrix."""
    hidden, tokens = 32, 64
    path = model({**LFM2, "hidden_size": hidden, "num_attention_heads": 2,
                  "num_key_value_heads": 1})  # fmt: skip
    run = run_in("deepspeed", path)
    parts = dict(parts_without_recompute(run.rank_layers[0]))
    names = ("mixer projection", "gated input", "convolution output", "mixer output")
    counted = sum(parts[name] for name in names) // TOKENS

    def forward(x: torch.Tensor, first: Any, second: Any, weight: torch.Tensor) -> torch.Tensor:
        gate, out, value = first(x).transpose(-1, -2).chunk(3, dim=-2)
        convolved = torch.nn.functional.conv1d(
            torch.nn.functional.pad(gate * value, (2, 0)), weight, groups=hidden
        )
        return second((out * convolved).transpose(-1, -2).contiguous())

    first = torch.nn.Linear(hidden, 3 * hidden, bias=False, dtype=torch.bfloat16)
    second = torch.nn.Linear(hidden, hidden, bias=False, dtype=torch.bfloat16)
    weight = torch.randn(hidden, 1, 3, dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16)
    own = {one.data_ptr() for one in (x, weight, first.weight, second.weight)}
    seen = _seen(lambda: forward(x, first, second, weight), own)
    # the operator of PyTorch pads the sequence by two tokens
    assert sum(seen) // tokens == pytest.approx(counted, rel=2 / tokens)
    # frozen, so that only the last matrix needs its input no more
    for one in (*first.parameters(), *second.parameters(), weight, x):
        one.requires_grad_(one is x)
    frozen = sum(_seen(lambda: forward(x, first, second, weight), own)) // tokens
    with_attention = replace(
        run, runtime=replace(run.runtime, adapters=Adapters(targets=frozenset({"query"})))
    )
    parts = dict(parts_without_recompute(with_attention.rank_layers[0]))
    assert "mixer output" not in parts
    assert parts["norm output"] == 0
    counted = sum(parts[name] for name in names[:3]) // TOKENS
    assert frozen == pytest.approx(counted, rel=2 / tokens)


SMALL = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
         "vocab_size": 1000}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "elements", "names"),
    [
        (LFM2, 11_108_352,
         "q_proj k_proj v_proj in_proj out_proj w1 w3 w2"),
        ({**LFM2, **MOE, **SMALL, "intermediate_size": 1024, "moe_intermediate_size": 256,
          "num_experts": 8, "num_hidden_layers": 6, "layer_types": [
              "full_attention" if at in (2, 4) else "conv" for at in range(6)]}, 450_560,
         "q_proj k_proj v_proj in_proj out_proj w1 w3 w2"),
        ({**TEXT, **SMALL, "head_dim": 64, "num_hidden_layers": 4, "intermediate_size": 256,
          "attn_type_list": [1, 0] * 2}, 237_568,
         "q_proj k_proj v_proj o_proj qkv_proj output_gate out_proj"),
    ],
    ids=["dense", "experts", "lightning"],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["deepspeed", "accelerate"])
def test_adapters_of_mixers_are_those_of_peft(
    config: dict[str, Any], elements: int, names: str, engine: str, model: Callable[..., Path]
) -> None:
    """Trainable parameters of PEFT 0.21.2 on a meta device, with the modules of the export."""
    training = TrainingSettings(lora_rank=16)
    job = context(model(config), training=training)
    chunks = even_chunks(job.model.num_layers, 1)
    choice = Candidate(global_batch=64, micro_batch=1, zero=2, chunks=chunks)
    run = run_of(engine_space(engine), job, choice)
    trained = sum(one.elements for one in stage_weights(run, 0)[0] if one.trained)
    assert trained == elements
    priced = job_of_run(run)
    counted = sum(block.number * sum(adapter_parameters(priced, block)) for block in priced.blocks)
    assert counted == elements
    found = written(run, engine=engine, place=ExportTarget(num_nodes=1, gpus_per_node=8))
    assert found.losses == ()
    assert without_effect(found.runs) == without_effect(run)
    assert f"lora_target_modules: [{', '.join(names.split())}]\n" in found.files["sft.yaml"]


def test_adapters_of_mixers_need_targets(model: Callable[..., Path], tmp_path: Path) -> None:
    """PEFT knows the default of q_proj and v_proj for listed families alone."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
    }))  # fmt: skip
    words = f"deepspeed sft.py --deepspeed {path} --model_name_or_path {model(LFM2)} "
    for more, problems in (
        ("", ["read.key"]), ("--optim adamw_torch --lora_target_modules in_proj out_proj", [])
    ):  # fmt: skip
        script = tmp_path / "run.sh"
        script.write_text(f"{words} --max_length 4096 --use_peft {more}\n")
        found = autopar.check(str(script), hardware="h100:1x8")
        assert [one["id"] for one in found["launches"][0]["findings"]] == problems


@pytest.mark.parametrize("sequences", [1, 2])
def test_lightning_attention_saves_what_autograd_does(
    sequences: int, model: Callable[..., Path]
) -> None:
    """The loop of `MiniMaxLightningAttention` over blocks, and its norm and gate."""
    heads, width, chunk, tokens = 2, 16, 32, 512
    path = model({**TEXT, "num_attention_heads": heads, "head_dim": width, "block_size": chunk,
                  "num_key_value_heads": 1, "hidden_size": 32})  # fmt: skip
    run = run_in("deepspeed", path, micro_batch=sequences)
    parts = dict(parts_without_recompute(run.rank_layers[0]))
    names = ("mixer projection", "queries, keys and values", "decayed queries and keys", "scores",
             "states", "mixer norm", "mixer output")  # fmt: skip
    counted = sum(parts[name] for name in names) / (sequences * TOKENS)
    inner, dtype = heads * width, torch.bfloat16
    query_decay, key_decay = (torch.rand(heads, chunk, 1, dtype=dtype) for _ in range(2))
    diagonal = torch.rand(1, heads, chunk, chunk, dtype=dtype)
    block_decay = torch.rand(heads, 1, 1, dtype=dtype)
    qkv, gate, out = (
        torch.nn.Linear(columns, rows, bias=False, dtype=dtype)
        for columns, rows in ((32, 3 * inner), (32, inner), (inner, 32))
    )
    weight = torch.nn.Parameter(torch.ones(inner, dtype=dtype))
    x = torch.randn(sequences, tokens, 32, dtype=dtype)

    def forward() -> torch.Tensor:
        mixed = torch.nn.functional.silu(qkv(x)).reshape(sequences, tokens, heads, 3 * width)
        q, k, v = (one.transpose(1, 2) for one in torch.split(mixed, width, dim=3))
        state, found = torch.zeros(sequences, heads, width, width, dtype=dtype), []
        for start in range(0, tokens, chunk):
            a, b, c = (one[:, :, start : start + chunk] for one in (q, k, v))
            inside = torch.matmul(torch.matmul(a, b.transpose(-1, -2)) * diagonal, c)
            found.append(torch.matmul(a * query_decay, state) + inside)
            own = torch.matmul((b * key_decay).transpose(-1, -2), c)
            state = state * block_decay + own
        attended = torch.cat(found, dim=-2).transpose(1, 2).reshape(sequences, tokens, inner)
        wide = attended.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return out(torch.sigmoid(gate(x)) * (weight * wide.to(dtype)))

    fixed = (x, weight, query_decay, key_decay, diagonal, qkv.weight, gate.weight, out.weight)
    seen = sum(_seen(forward, {one.data_ptr() for one in (*fixed, block_decay)}))
    # the first block has no earlier state to multiply its queries with
    assert seen / (sequences * tokens) == pytest.approx(counted, rel=0.01)


def _seen(forward: Callable[[], Any], known: set[int]) -> list[int]:
    """Return the bytes of the storages that a forward saves, without the known ones."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        kept = forward()
    assert kept is not None
    return list(found.values())


@pytest.mark.parametrize(
    ("engine", "degrees", "rule"),
    [
        ("megatron", {}, "torch-mixers.engine"),
        ("deepspeed", {"tp": (4,)}, "torch-mixers.tensor"),
        ("accelerate", {"tp": (2,)}, "torch-mixers.tensor"),
        ("accelerate", {"cp": (2,)}, "torch-mixers.context"),
    ],
)
def test_other_engines_and_degrees_are_refused(
    engine: str, degrees: dict[str, Any], rule: str, model: Callable[..., Path]
) -> None:
    found = violated_rule(engine_space(engine), context(model(LFM2)), Constraints(**degrees))
    assert found is not None
    assert found.id == rule


KIMI: dict[str, Any] = {
    "model_type": "kimi_linear", "hidden_size": 1024, "intermediate_size": 2048,
    "moe_intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 8, "num_experts_per_token": 2,
    "num_shared_experts": 1, "vocab_size": 32000, "model_max_length": 8192,
    "tie_word_embeddings": False,
    "linear_attn_config": {"kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 8},
}  # fmt: skip
"""Four layers of Kimi Linear with fewer experts."""


def test_kimi_linear_is_priced_for_transformers_alone(model: Callable[..., Path]) -> None:
    """Weights are those of the file; intervals are the widest, adapters have no price."""
    path = model(KIMI)
    run = run_in("deepspeed", path)
    weights = sum(one.elements for one in stage_weights(run, 0)[0])
    assert weights == model_parameter_count(load_spec(str(path)))
    assert few_runs(run.model) == "none with Kimi delta attention"
    tuned = TrainingSettings(lora_rank=8)
    for engine, job, rule in (
        ("megatron", context(path), "torch-mixers.engine"),
        ("accelerate", context(path, training=tuned), "kimi-delta.adapters"),
    ):
        found = violated_rule(engine_space(engine), job, Constraints())
        assert found is not None
        assert found.id == rule


def test_latent_attention_with_positions_is_not_priced() -> None:
    """Kimi Linear has none; operators of DeepSeek-V3 save more."""
    spec = load_spec("deepseek-v2-lite")
    job = EngineContext(
        name="deepseek-v2-lite", model=uniform_model(spec), seq=TOKENS, global_batches=(64,),
        world=8, gpu="h100-80gb", domain=8,
    )  # fmt: skip
    found = violated_rule(engine_space("deepspeed"), job, Constraints())
    assert found is not None
    assert found.id == "transformers.latent"


def test_a_backward_contains_the_gradients_of_a_delta_rule(model: Callable[..., Path]) -> None:
    """States of 64 chunks of 64 tokens and three tensors like the values, three times."""
    run = run_in("deepspeed", model({**KIMI, "intermediate_size": 64, "first_k_dense_replace": 1}))
    inner = 8 * 128
    states = TOKENS // 64 * inner * 128
    residual = TOKENS * 1024 * 2
    expected = 3 * (states + 3 * TOKENS * inner) * 2 + residual
    assert backward_gradients_bytes(run.rank_layers[0]) == expected


def test_intervals_span_all_classes_of_published_runs(model: Callable[..., Path]) -> None:
    """No run with short convolutions is published, so the interval of a step is the widest."""
    run = run_in("deepspeed", model(LFM2))
    assert few_runs(run.model) == "none with short convolutions"
    target = Target(
        machine=machine_of(load_card("h100-80gb"), stack=load_stack("torchtitan-eager")),
        accuracy=load_accuracy(),
        site_known=False,
        oom_risk=0.5,
    )
    found, own = assess(run, target).runs, load_accuracy()
    assert found is not None
    assert found.low == min(one.low for one in own.classes)
    assert found.high == max(one.high for one in own.classes)


@pytest.mark.parametrize("name", ["qwen3-next-80b", "granite-4-small", "deepseek-v3.2"])
def test_files_of_torch_engines_do_not_get_layers_of_megatron(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    }))  # fmt: skip
    found = autopar.check(str(path), hardware="h100:1x8", model=name, seq_length=TOKENS)
    assert [one["id"] for one in found["launches"][0]["findings"]] == ["hybrid.engine"]


# --------------------------------------------------------------------------------------------------
# Norms of queries and keys over all heads


def test_tensor_ranks_of_megatron_sum_squares(model: Callable[..., Path]) -> None:
    """Two sums of four bytes per token each way of the forward, and none in the backward."""
    machine = machine_of(load_card("h100-80gb"), stack=load_stack("megatron-core"))
    run = bridged(model(M2), tp=2)
    job = job_of_run(run)
    norms = {}
    for kind in ("head", "all"):
        attention = job.blocks[0].attention
        assert attention is not None
        block = replace(job.blocks[0], attention=replace(attention, head_norms=kind))
        norms[kind] = layer_times(machine, job, block)
    narrow, wide = norms["head"].tensor, norms["all"].tensor
    assert wide.calls == narrow.calls + 2
    assert wide.forward_s > narrow.forward_s
    assert wide.backward_s == narrow.backward_s
    alone = layer_times(machine, replace(job, tp=1), job.blocks[0]).tensor
    assert alone.calls == 0


def test_norms_over_all_heads_save_what_autograd_does(model: Callable[..., Path]) -> None:
    """The operators of `_FullDimRMSNorm` on queries and keys, before positions and attention."""
    width, tokens = 64, 32
    weight = torch.nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
    x = torch.randn(tokens, 1, width, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> torch.Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).sum(-1, keepdim=True) / width
        return weight * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype)

    seen = sum(_seen(forward, {x.data_ptr(), weight.data_ptr()})) / (tokens * width)
    run = bridged(model(M2), tp=1)
    parts, elements = dict(saved_parts(run.rank_layers[0])), TOKENS * 128 * (48 + 8)
    counted = parts["queries and keys in fp32"] + parts["normed queries and keys"]
    # and one number per row
    assert seen == pytest.approx(counted / elements + 4 / width)
    assert "qkv" not in parts


def test_weights_of_wide_norms_are_divided(model: Callable[..., Path]) -> None:
    for tp in (1, 2):
        run = bridged(model(M2), tp=tp)
        sizes = {one.name: one.elements for one in stage_weights(run, 0)[0]}
        assert (sizes["query norm"], sizes["key norm"]) == (48 * 128 // tp, 8 * 128 // tp)


def test_transformers_has_a_configuration_of_wide_norms(model: Callable[..., Path]) -> None:
    run = run_in("deepspeed", model(M2))
    place = ExportTarget(num_nodes=1, gpus_per_node=8, model=None, spec=None)
    found = written(run, engine="deepspeed", place=place)
    assert found.losses == ()
    assert json.loads(found.files["model/config.json"])["model_type"] == "minimax_m2"
    refused = violated_rule(engine_space("deepspeed"), context(model(M2)), Constraints(tp=(2,)))
    assert refused is not None
    assert refused.id == "wide-norms.tensor"


def test_megatron_has_no_script_of_wide_norms(model: Callable[..., Path]) -> None:
    """Megatron-Bridge has a separate layer for MiniMax-M2, which no argument names."""
    run = bridged(model(M2), tp=2)
    place = ExportTarget(num_nodes=1, gpus_per_node=8, model=None, spec=None)
    found = written(run, engine="megatron", place=place)
    assert [one.field for one in found.losses] == ["attention.head_norms"]


BLOOM = {"model_type": "bloom", "hidden_size": 4096, "n_layer": 4, "n_head": 32,
         "vocab_size": 250880, "seq_length": TOKENS}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "broken"), [(M2, "megatron.wide-norms"), (BLOOM, "megatron.extra-embedding")]
)
def test_what_no_argument_of_megatron_tells_is_not_searched(
    config: dict[str, Any], broken: str, model: Callable[..., Path]
) -> None:
    refused = violated_rule(engine_space("megatron"), context(model(config)), Constraints())
    assert refused is not None
    assert refused.id == broken


_MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", **SMALL, "num_hidden_layers": 2, "intermediate_size": 256,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 4096,
}  # fmt: skip
_SHARED: dict[str, Any] = {
    "model_type": "qwen2_moe", **SMALL, "num_hidden_layers": 2, "intermediate_size": 256,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256, "num_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "modules", "problems"),
    [
        (_MIXTRAL, "q_proj v_proj", []),
        (_MIXTRAL, "all-linear", ["read.unpriced"]),
        (_SHARED, "q_proj gate_proj up_proj", ["read.unpriced"]),
        (LFM2, "all-linear", []),
        ({**LFM2, **MOE}, "all-linear", ["read.unpriced"]),
    ],
)
def test_fused_experts_and_routers_have_no_priced_adapters(
    config: dict[str, Any], modules: str, problems: list[str], model: Callable[..., Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    """PEFT 0.21.2 adapts `mlp.gate` and `mlp.experts` of Mixtral and Qwen 2 for such names."""
    path, script = tmp_path / "ds.json", tmp_path / "run.sh"
    path.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
    }))  # fmt: skip
    script.write_text(
        f"deepspeed sft.py --deepspeed {path} --model_name_or_path {model(config)} --max_length "
        f"4096 --optim adamw_torch --use_peft --lora_target_modules {modules}\n"
    )
    found = autopar.check(str(script), hardware="h100:1x8")
    assert [one["id"] for one in found["launches"][0]["findings"]] == problems


def test_a_search_adapts_no_module_that_peft_takes_for_experts(
    model: Callable[..., Path],
) -> None:
    """Names of a shared expert would adapt the routed ones instead."""
    job = context(model(_SHARED), training=TrainingSettings(lora_rank=16))
    choice = Candidate(
        global_batch=64, micro_batch=1, zero=2, chunks=even_chunks(job.model.num_layers, 1)
    )
    run = run_of(engine_space("deepspeed"), job, choice)
    assert run.runtime.adapters is not None
    assert run.runtime.adapters.targets == {"query", "key", "value", "projection"}
