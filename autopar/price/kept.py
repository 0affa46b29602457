"""What a rank holds besides states from step to step: workspaces and kept buffers, in bytes.

None of it grows with the number of parameters, but for the stand-ins of weight gradients that are
added where they are made. Activations that live within a step are in `autopar.price.activations`.
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
"""cuBLAS's workspace where none is configured: the default that PyTorch documents for Hopper, and
for others (`:4096:2:16:8`)."""
_HOPPER_ENGINE = 32 * MIB
_OTHER_ENGINE = 4 * MIB
"""Transformer Engine's workspace of a product, from Hopper on, and before."""
_BEFORE_HOPPER = ("V100", "A100", "A10", "A6000", "L40", "RTX")
_THREADS = 2
"""Handles of cuBLAS: the thread of the forward has one, and that of the backward."""


def cublas_bytes(run: Run) -> int:
    """Return the workspaces of cuBLAS: as configured, for two threads."""
    config = run.runtime.allocator.cublas
    if config is None:
        # PyTorch's default is larger on Hopper alone
        hopper = run.gpu.upper().startswith(HOPPER)
        return _THREADS * (_HOPPER_CUBLAS if hopper else _OTHER_CUBLAS)
    # `:SIZE:COUNT` in KiB, as often as given
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    return _THREADS * sum(int(size) * int(count) for size, count in pairs) * KIB


def engine_workspace_bytes(run: Run) -> int:
    """Return the workspaces of Transformer Engine: one, and more for grouped products."""
    quirks, mixed = run.kernels.quirks, run.model.experts is not None
    one = _OTHER_ENGINE if run.gpu.upper().startswith(_BEFORE_HOPPER) else _HOPPER_ENGINE
    if run.kernels.own_layers:
        return one if mixed and quirks.expert_workspace else 0
    number = 1 + (quirks.grouped_workspaces if mixed and run.runtime.experts.grouped else 0)
    # products that run beside their transfers have a workspace for each of three streams
    number += 2 if run.runtime.overlap.tensor else 0
    return one * number


def overlap_bytes(run: Run) -> int:
    """Return the buffers of products that overlap with their transfers: twelve of T*h*e.

    Of qkv, output projection and both matrices of the MLP: forward, and both gradients.
    """
    if not run.runtime.overlap.tensor:
        return 0
    return 12 * run.tokens * run.model.hidden * run.element_bytes


def pipeline_bytes(run: Run) -> int:
    """Return the last input and its gradient, which every chunk of a pipeline keeps: 2*v*T'*h*e."""
    strategy = run.strategy
    if strategy.pp == 1:
        return 0
    return 2 * strategy.vpp * run.scattered_tokens * run.model.hidden * run.element_bytes


def gather_bytes(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return the one buffer in which sequences or tokens of experts are gathered, or scores made.

    It is kept at the largest size that was asked for: T*h*e of the head (and of Megatron's own
    layers) with sequence parallelism, T'*EP*ETP*h*e where all tokens go to all ranks of experts,
    b*n/t*(s/c)^2*e of Megatron's own attention.
    """
    split, model = run.split, run.model
    sizes = [0]
    # layers of Transformer Engine gather into buffers of their own, which are gone
    if split.scattered and (run.kernels.own_layers or any(chunk.head for chunk in chunks)):
        sizes.append(run.tokens * model.hidden)
    if run.runtime.experts.dispatcher == "allgather" and mixture_count(run, chunks):
        ranks = split.ep * split.etp
        sizes.append(run.scattered_tokens * ranks * model.hidden if ranks > 1 else 0)
    if run.kernels.attention == "local":
        heads = model.attention.heads // split.tp
        sizes.append(run.strategy.micro_batch * heads * (run.seq_length // split.cp) ** 2)
    return max(sizes) * run.element_bytes


def mixture_count(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return the mixtures of experts in chunks, MTP layers among them."""
    mixtures = run.model.mixtures
    return sum(
        sum(mixtures[layer] for layer in chunk.layers) + chunk.mtp * mixtures[-1]
        for chunk in chunks
    )


def rotary_bytes(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return the tables of rotary positions: one of the model, with MLA of every layer, in fp32."""
    attention = run.model.attention
    if attention.latent is not None:
        layers = sum(len(chunk.layers) + chunk.mtp for chunk in chunks)
        # angles of the sequence, and cosines and sines of YaRN's 4096 original positions
        return layers * (run.seq_length + 4096) * attention.rotary_width * 4
    if run.model.positions != "rotary":
        return 0
    # a context rank keeps the positions that are its own
    return run.seq_length // run.split.cp * attention.rotary_width * 4


def routing_bytes(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return what layers with experts keep of the last routing: masks and orders of tokens."""
    experts, kernels, split = run.model.experts, run.runtime.experts, run.split
    if experts is None:
        return 0
    tokens = run.scattered_tokens
    if kernels.dispatcher == "allgather":
        tokens *= split.ep * split.etp
    # a byte for each token and expert, and 8 of each token's place
    each = tokens * (experts.number + 8)
    if kernels.fused_permutation:
        # the row map of 2E + 1 whole numbers a token, and its probabilities
        each += run.scattered_tokens * ((2 * experts.number + 1) * 4 + experts.number * 4)
    return mixture_count(run, chunks) * each


def accumulation_bytes(run: Run, chunks: Sequence[Sequence[Weight]]) -> int:
    """Return the 16-bit stand-ins of weight gradients: one of each shape that the rank has."""
    if not (run.kernels.fused_accumulation and run.kernels.quirks.kept_dummies):
        return 0
    shapes = {
        weight.shape for chunk in chunks for weight in chunk if weight.linear and weight.trained
    }
    return sum(rows * columns for rows, columns in shapes) * run.element_bytes


def mask_bytes(run: Run, chunks: Sequence[Chunk]) -> int:
    """Return one micro-batch as the data loader makes it: tokens, labels, positions, masks.

    12 bytes a token (loss mask and positions among them), and b*s*s/c of the attention mask; only
    stages with embedding or head load any.
    """
    if not any(chunk.embeds or chunk.head for chunk in chunks):
        return 0
    mask = run.tokens * run.seq_length if run.runtime.masks else 0
    return 12 * run.tokens + mask
