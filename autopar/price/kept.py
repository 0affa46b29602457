"""What a rank holds besides states from step to step: workspaces and kept buffers, in bytes.

None of it grows with the number of parameters, but for the stand-ins of weight gradients that are
added where they are made. Activations that live within a step are in `autopar.price.activations`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autopar.price.parameters import Weight
from autopar.run.launch import Chunk, Launch, Software
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


def _before_hopper(software: Software) -> bool:
    return software.gpu.upper().startswith(_BEFORE_HOPPER)


def cublas_bytes(software: Software) -> int:
    """Return the workspaces of cuBLAS: as configured, for two threads."""
    config = software.cublas_config
    if config is None:
        # PyTorch's default is larger on Hopper alone
        hopper = software.gpu.upper().startswith(("H100", "H200", "H800", "H20", "GH200"))
        return _THREADS * (_HOPPER_CUBLAS if hopper else _OTHER_CUBLAS)
    # `:SIZE:COUNT` in KiB, as often as given
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    return _THREADS * sum(int(size) * int(count) for size, count in pairs) * KIB


def engine_workspace_bytes(launch: Launch) -> int:
    """Return the workspaces of Transformer Engine: one, and more for grouped products."""
    software, experts = launch.software, launch.model.experts
    one = _OTHER_ENGINE if _before_hopper(software) else _HOPPER_ENGINE
    if software.local_layers:
        return one if experts is not None and software.expert_workspace else 0
    grouped = experts is not None and experts.grouped
    number = 1 + (software.grouped_workspaces if grouped else 0)
    # products that run beside their transfers have a workspace for each of three streams
    number += 2 if launch.tensor_overlap else 0
    return one * number


def overlap_bytes(launch: Launch) -> int:
    """Return the buffers of products that overlap with their transfers: twelve of T*h*e.

    Of qkv, output projection and both matrices of the MLP: forward, and both gradients.
    """
    if not launch.tensor_overlap:
        return 0
    return 12 * launch.tokens * launch.model.hidden * _element(launch)


def pipeline_bytes(launch: Launch) -> int:
    """Return the last input and its gradient, which every chunk of a pipeline keeps: 2*v*T'*h*e."""
    degrees = launch.degrees
    if degrees.pp == 1:
        return 0
    return 2 * degrees.vpp * launch.scattered_tokens * launch.model.hidden * _element(launch)


def gather_bytes(launch: Launch, chunks: Sequence[Chunk]) -> int:
    """Return the one buffer in which sequences or tokens of experts are gathered, or scores made.

    It is kept at the largest size that was asked for: T*h*e of the head (and of Megatron's own
    layers) with sequence parallelism, T'*EP*ETP*h*e where all tokens go to all ranks of experts,
    b*n/t*(s/c)^2*e of Megatron's own attention.
    """
    degrees, model = launch.degrees, launch.model
    sizes = [0]
    # layers of Transformer Engine gather into buffers of their own, which are gone
    own = launch.software.local_layers or any(chunk[3] for chunk in chunks)
    if degrees.scattered and own:
        sizes.append(launch.tokens * model.hidden)
    experts = model.experts
    mixed = any(model.expert_layers[layer] for chunk in chunks for layer in chunk[1]) or any(
        chunk[2] and model.expert_layers[-1] for chunk in chunks
    )
    if mixed and experts is not None and experts.dispatcher == "allgather":
        ranks = degrees.ep * degrees.etp
        sizes.append(launch.scattered_tokens * ranks * model.hidden if ranks > 1 else 0)
    if launch.software.attention == "local":
        heads = model.attention.heads // degrees.tp
        sizes.append(launch.micro_batch * heads * (launch.seq // degrees.cp) ** 2)
    return max(sizes) * _element(launch)


def rotary_bytes(launch: Launch, chunks: Sequence[Chunk]) -> int:
    """Return the tables of rotary positions: one of the model, with MLA of every layer, in fp32."""
    model = launch.model
    latent = model.attention.latent
    if latent is not None:
        layers = sum(len(chunk[1]) + chunk[2] for chunk in chunks)
        # angles of the sequence, and cosines and sines of YaRN's 4096 original positions
        return layers * (launch.seq + 4096) * latent.rotary_width * 4
    if model.positions != "rotary":
        return 0
    # a context rank keeps the positions that are its own
    return launch.seq // launch.degrees.cp * model.rotary_width * 4


def routing_bytes(launch: Launch, chunks: Sequence[Chunk]) -> int:
    """Return what layers with experts keep of the last routing: masks and orders of tokens."""
    experts, degrees = launch.model.experts, launch.degrees
    if experts is None:
        return 0
    tokens = launch.scattered_tokens
    if experts.dispatcher == "allgather":
        tokens *= degrees.ep * degrees.etp
    layers = sum(
        sum(launch.model.expert_layers[layer] for layer in chunk[1])
        + chunk[2] * launch.model.expert_layers[-1]
        for chunk in chunks
    )
    # a byte for each token and expert, and 8 of each token's place
    each = tokens * (experts.number + 8)
    if experts.fused_permutation:
        # the row map of 2E + 1 whole numbers a token, and its probabilities
        each += launch.scattered_tokens * ((2 * experts.number + 1) * 4 + experts.number * 4)
    return layers * each


def accumulation_bytes(launch: Launch, chunks: Sequence[Sequence[Weight]]) -> int:
    """Return the 16-bit stand-ins of weight gradients: one of each shape that the rank has."""
    software = launch.software
    if not (software.fused_accumulation and software.kept_dummies):
        return 0
    shapes = {
        weight.shape for chunk in chunks for weight in chunk if weight.linear and weight.trained
    }
    return sum(rows * columns for rows, columns in shapes) * _element(launch)


def mask_bytes(launch: Launch, chunks: Sequence[Chunk]) -> int:
    """Return one micro-batch as the data loader makes it: tokens, labels, positions, masks.

    12 bytes a token (loss mask and positions among them), and b*s*s/c of the attention mask; only
    stages with embedding or head load any.
    """
    if not any(chunk[0] or chunk[3] for chunk in chunks):
        return 0
    tokens = launch.tokens
    mask = tokens * launch.seq if launch.attention_masks else 0
    return 12 * tokens + mask


def _element(launch: Launch) -> int:
    return launch.precision.element_bytes
