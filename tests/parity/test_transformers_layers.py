"""Activations that layers of transformers save, against those of its modules on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="it runs modules of torch")
transformers = pytest.importorskip("transformers", reason="it runs transformers' modules")

from autopar.documents.spec import load_spec  # noqa: E402
from autopar.price.torch_layers import parts_without_recompute  # noqa: E402
from autopar.run.of_plan import uniform_model  # noqa: E402
from autopar.run.run import Run  # noqa: E402
from autopar.run.strategy import even_chunks  # noqa: E402
from search.engines.candidate import Candidate  # noqa: E402
from search.engines.space import EngineContext, run_of  # noqa: E402
from search.engines.table import engine_space  # noqa: E402

TOKENS = 64
GEMMA: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_global_key_value_heads": 2, "head_dim": 32,
    "global_head_dim": 288, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "vocab_size": 128, "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48,
}  # fmt: skip


KIMI: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "moe_intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "vocab_size": 128,
    "max_position_embeddings": 64, "linear_head_dim": 32, "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False,
}  # fmt: skip


def run_in(family: str, config: dict[str, Any], folder: Path, sequences: int) -> Run:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": family, **config}), encoding="utf-8")
    model = uniform_model(load_spec(str(path), seq_length=[TOKENS]))
    job = EngineContext(
        name="own", model=model, seq=TOKENS, global_batches=(8 * sequences,), world=8,
        gpu="h100-80gb", domain=8,
    )  # fmt: skip
    choice = Candidate(
        global_batch=8 * sequences, micro_batch=sequences, zero=3,
        chunks=even_chunks(model.num_layers, 1),
    )  # fmt: skip
    return run_of(engine_space("deepspeed"), job, choice)


def seen(family: str, config: dict[str, Any], sequences: int) -> list[int]:
    """Return the bytes that autograd saves in each layer, without weights and inputs."""
    made = transformers.AutoConfig.for_model(family, **config)
    made._attn_implementation = "sdpa"
    model: Any = transformers.AutoModelForCausalLM.from_config(made).to(torch.bfloat16)
    inputs: list[tuple[Any, Any, Any]] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append((module, args, kwargs)), with_kwargs=True
        )
    words = torch.randint(0, config["vocab_size"], (sequences, TOKENS))
    model(input_ids=words, use_cache=False)
    weights = {one.data_ptr() for one in (*model.parameters(), *model.buffers())}
    return [_saved(*one, weights) for one in [*inputs]]


def _saved(layer: Any, args: Any, kwargs: Any, weights: set[int]) -> int:
    layer._forward_pre_hooks.clear()
    hidden = args[0].detach().clone().requires_grad_()
    known = {*weights, hidden.data_ptr(), *_storages((args, kwargs))}
    found: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        kept = layer(hidden, *args[1:], **kwargs)
    assert kept is not None
    return sum(one.nbytes() for one in found.values())


def _storages(value: Any) -> set[int]:
    if torch.is_tensor(value):
        return {value.untyped_storage().data_ptr()}
    inner = value.values() if isinstance(value, dict) else value
    return {at for one in inner for at in _storages(one)} if isinstance(
        value, tuple | list | dict
    ) else set()  # fmt: skip


@pytest.mark.parametrize("sequences", [1, 2])
def test_layers_of_gemma_4_save_what_autograd_does(sequences: int, tmp_path: Path) -> None:
    """Norms in fp32 also of values, repeated heads, and the mask of a window."""
    run = run_in("gemma4_text", GEMMA, tmp_path, sequences)
    counted = [sum(size for _, size in parts_without_recompute(one)) for one in run.rank_layers]
    # weights of norms in fp32 are no activations
    assert seen("gemma4_text", GEMMA, sequences) == pytest.approx(counted, rel=0.003)


def test_experts_of_gemma_4_save_what_autograd_does(tmp_path: Path) -> None:
    """With three more norms and that of the router; indices of tokens are not counted."""
    config = {**GEMMA, **EXPERTS}
    run = run_in("gemma4_text", config, tmp_path, 1)
    counted = [sum(size for _, size in parts_without_recompute(one)) for one in run.rank_layers]
    assert seen("gemma4_text", config, 1) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_save_one_copy_of_their_tokens(family: str, tmp_path: Path) -> None:
    """In the order of experts; there is no dispatch."""
    own = {"decoder_sparse_step": 1, "mlp_only_layers": []} if family == "qwen3_moe" else {}
    config = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
        "num_experts_per_tok": 2, "num_experts" if own else "num_local_experts": 8,
        **({"moe_intermediate_size": 48, "head_dim": 32} if own else {}), **own,
    }  # fmt: skip
    run = run_in(family, config, tmp_path, 1)
    counted = sum(size for _, size in parts_without_recompute(run.rank_layers[0]))
    assert seen(family, config, 1) == pytest.approx([counted], rel=0.015)


class _Kernel(torch.autograd.Function):
    """Tensors that the kernel of flash-linear-attention saves (fla/ops/kda/chunk.py)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        q, k, v, g, beta = (one.contiguous() for one in inputs)
        scales = [torch.zeros(q.shape[:-1]) for _ in range(2)]
        matrices = [q.new_zeros(*q.shape[:-1], 64) for _ in range(2)]
        saved = (q.clone(), k.clone(), v, g, torch.zeros_like(g), beta, *scales, *matrices)
        ctx.save_for_backward(*saved)
        return v.clone()


class _Convolution(torch.autograd.Function):
    """Tensors that causal_conv1d saves."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any) -> Any:
        ctx.save_for_backward(hidden, weight)
        return hidden.clone()


def test_kimi_delta_attention_saves_what_autograd_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around its kernels, which run on a GPU alone."""
    family = transformers.models.kimi_linear.modeling_kimi_linear
    for name, made in (
        ("chunk_kimi_delta_attention",
         lambda *each, g, beta, **more: (_Kernel.apply(*each, g, beta), None)),
        ("causal_conv1d_fn", lambda hidden, weight, **more: _Convolution.apply(hidden, weight)),
    ):  # fmt: skip
        monkeypatch.setattr(family, name, made)
    own = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_local_experts": 8}
    config = {key: one for key, one in KIMI.items() if key != "num_experts"}
    first = seen("kimi_linear", {**config, **own}, 1)[0]
    run = run_in("kimi_linear", KIMI, tmp_path, 1)
    counted = sum(size for _, size in parts_without_recompute(run.rank_layers[0]))
    assert first == pytest.approx(counted, rel=0.001)
