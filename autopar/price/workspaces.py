"""Workspaces and persistent buffers of a rank besides model states, in bytes.

Only the dummy weight gradients depend on the weights. Activations that live within a step are in
`autopar.price.activations`, which also defines the symbols.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autopar.price.parameters import Weight
from autopar.run.run import Run
from autopar.run.runtime import HOPPER
from autopar.run.strategy import Chunk
from autopar.units import KIB, MIB

_HOPPER_CUBLAS = 32 * MIB
_OTHER_CUBLAS = 8 * MIB + 128 * KIB
"""cuBLAS workspace if none is configured: PyTorch's documented default for Hopper, and for other
GPUs (`:4096:2:16:8`)."""
_HOPPER_ENGINE = 32 * MIB
_OTHER_ENGINE = 4 * MIB
"""Transformer Engine's workspace of one GEMM, from Hopper on and before Hopper."""
_BEFORE_HOPPER = ("V100", "A100", "A10", "A6000", "L40", "RTX")
_THREADS = 2
"""Number of cuBLAS handles: one of the forward thread, one of the backward thread."""


def cublas_bytes(run: Run) -> int:
    """Return the bytes of the cuBLAS workspaces of the forward and the backward thread.

    They follow CUBLAS_WORKSPACE_CONFIG, or PyTorch's default for the GPU.
    """
    config = run.runtime.allocator.cublas
    if config is None:
        # PyTorch's default is larger only on Hopper
        hopper = run.gpu.upper().startswith(HOPPER)
        return _THREADS * (_HOPPER_CUBLAS if hopper else _OTHER_CUBLAS)
    # `:SIZE:COUNT` in KiB, may be repeated
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    return _THREADS * sum(int(size) * int(count) for size, count in pairs) * KIB


def engine_workspace_bytes(run: Run) -> int:
    """Return the bytes of Transformer Engine's workspaces.

    There is one, with more for grouped GEMMs and for TP overlap. Megatron's own layers use none,
    or one with experts in some releases.
    """
    quirks, mixed = run.kernels.quirks, run.model.experts is not None
    one = _OTHER_ENGINE if run.gpu.upper().startswith(_BEFORE_HOPPER) else _HOPPER_ENGINE
    if run.kernels.own_layers:
        return one if mixed and quirks.expert_workspace else 0
    number = 1 + (quirks.grouped_workspaces if mixed and run.runtime.experts.grouped else 0)
    # GEMMs that overlap with their communication use a workspace on each of three streams
    number += 2 if run.runtime.overlap.tensor else 0
    return one * number


def overlap_bytes(run: Run) -> int:
    """Return the bytes of the TP overlap buffers: twelve buffers of T*h*e.

    Each of qkv, output projection, fc1 and fc2 has three: forward, input and weight gradient.
    """
    if not run.runtime.overlap.tensor:
        return 0
    return 12 * run.tokens * run.model.hidden * run.element_bytes


def pipeline_bytes(run: Run) -> int:
    """Return the bytes of the pipeline tensors kept after a step, 2*v*T'*h*e; 0 without pipeline.

    Each of the v model chunks keeps its last received input and the gradient of it.
    """
    strategy = run.strategy
    if strategy.pp == 1:
        return 0
    return 2 * strategy.vpp * run.sequence_parallel_tokens * run.model.hidden * run.element_bytes


def gather_bytes(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return the bytes of the global buffer for gathered sequences, expert tokens or scores.

    The buffer keeps the largest requested size: T*h*e of the head (and of Megatron's own layers)
    with sequence parallelism, T'*EP*ETP*h*e with an all-gather dispatcher, b*n/t*(s/c)^2*e with
    Megatron's own attention.
    """
    split, model = run.split, run.model
    sizes = [0]
    # layers of Transformer Engine gather into temporary buffers
    if split.splits_sequence and (run.kernels.own_layers or any(chunk.head for chunk in chunks)):
        sizes.append(run.tokens * model.hidden)
    if run.runtime.experts.dispatcher == "allgather" and mixture_count(run, chunks):
        ranks = split.ep * split.etp
        widths = {one.routed_width for one in model.kinds if one.experts is not None}
        tokens = run.sequence_parallel_tokens * ranks
        sizes.append(tokens * max(widths) if ranks > 1 else 0)
    if run.kernels.attention == "local" and (attention := model.first_attention) is not None:
        heads = attention.heads // split.tp
        sizes.append(run.strategy.micro_batch * heads * (run.seq_length // split.cp) ** 2)
    return max(sizes) * run.element_bytes


def mixture_count(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return the number of MoE layers in chunks, MTP layers included."""
    mixtures = run.model.mixtures
    each_mtp = sum(one.experts is not None for one in run.model.each_mtp)
    return sum(
        sum(mixtures[layer] for layer in chunk.layers) + chunk.mtp * each_mtp for chunk in chunks
    )


def rotary_bytes(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return the bytes of rotary tables in fp32: one per model, or one per layer with MLA."""
    attention = run.model.first_attention
    if attention is None:
        return 0
    if attention.latent is not None:
        layers = _attention_count(run, chunks)
        # angles of the sequence, and cosines and sines of YaRN's 4096 original positions
        return layers * (run.seq_length + 4096) * attention.rotary_width * 4
    if run.model.positions != "rotary":
        return 0
    # a context-parallel rank keeps only its own positions
    return run.seq_length // run.split.cp * attention.rotary_width * 4


def _attention_count(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return the number of attention layers in chunks, MTP layers included."""
    layers = run.model.each_layer
    each_mtp = sum(one.attention is not None for one in run.model.each_mtp)
    return sum(
        sum(layers[layer].attention is not None for layer in chunk.layers) + chunk.mtp * each_mtp
        for chunk in chunks
    )


def routing_bytes(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return the bytes of routing masks and token orders that MoE layers keep after a step."""
    experts, kernels, split = run.model.experts, run.runtime.experts, run.split
    if experts is None:
        return 0
    tokens = run.sequence_parallel_tokens
    if kernels.dispatcher == "allgather":
        tokens *= split.ep * split.etp
    # one byte per token and expert, and 8 for each token's position
    each = tokens * (experts.number + 8)
    if kernels.fused_permutation:
        # the row map of 2E + 1 integers per token, and its probabilities
        each += run.sequence_parallel_tokens * ((2 * experts.number + 1) * 4 + experts.number * 4)
    return mixture_count(run, chunks) * each


def dummy_weight_gradient_bytes(run: Run, chunks: Sequence[Sequence[Weight]]) -> int:
    """Return the bytes of the 16-bit dummy weight gradients: one per distinct shape on the rank."""
    if not (run.kernels.fused_accumulation and run.kernels.quirks.kept_dummies):
        return 0
    shapes = {
        weight.shape for chunk in chunks for weight in chunk if weight.linear and weight.trained
    }
    return sum(rows * columns for rows, columns in shapes) * run.element_bytes


def mask_bytes(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return the bytes of one micro-batch of the data loader: tokens, labels, positions, masks.

    12 bytes per token (with loss mask and positions), and b*s*s/c for the attention mask. Only
    stages with embedding or head load data.
    """
    if not any(chunk.embeds or chunk.head for chunk in chunks):
        return 0
    mask = run.tokens * run.seq_length if run.runtime.masks else 0
    return 12 * run.tokens + mask
