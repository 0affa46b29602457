"""Facts of a GPU model that its architecture decides: tensor cores by precision, flash attention.

A card has the architecture of its device: the compute capability of NVIDIA (`sm_90`) or the LLVM
target of AMD (`gfx942`). What engines and kernels can do with it is here alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from autopar.documents import catalog
from autopar.documents.json import load_object
from autopar.rates.card import read_card
from autopar.run.runtime import BLACKWELL, HOPPER, AttentionKernel, PrecisionKind

_TENSOR_PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "sm_70": ("fp16",),
    "sm_75": ("fp16",),
    "sm_80": ("fp16", "bf16"),
    "sm_86": ("fp16", "bf16"),
    "sm_87": ("fp16", "bf16"),
    "sm_89": ("fp16", "bf16", "fp8"),
    "sm_90": ("fp16", "bf16", "fp8", "fp8_block"),
    "sm_100": ("fp16", "bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"),
    "sm_103": ("fp16", "bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"),
    "sm_107": ("fp16", "bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"),
    "sm_120": ("fp16", "bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"),
    "sm_121": ("fp16", "bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"),
    "gfx908": ("fp16", "bf16"),
    "gfx90a": ("fp16", "bf16"),
    "gfx942": ("fp16", "bf16", "fp8"),
    "gfx950": ("fp16", "bf16", "fp8", "mxfp8"),
}
"""Precisions that tensor cores multiply, by architecture.

NVIDIA: CUDA C++ programming guide, tensor core input types by compute capability; low-precision
recipes by `_compute_fp8_support` and its neighbours in transformer_engine/pytorch/quantization.py
(fp8 from 8.9, blocks from 9.0, mxfp8 and nvfp4 from 10.0). AMD: ROCm documentation, data types and
precision support (fp8 from gfx942, MX formats on gfx950).
"""
_NO_FLASH_ATTENTION = ("sm_70", "sm_75", "gfx908")
"""Architectures on which neither FlashAttention 2 nor cuDNN's fused attention trains.

Transformer Engine disables both below compute capability 8.0 (`get_attention_backend` of
pytorch/attention/dot_product_attention/utils.py); FlashAttention 2 supports Ampere and newer, and
gfx90a, gfx942 and gfx950 (its README). PyTorch's memory-efficient kernel runs everywhere.
"""


@cache
def architecture_of(gpu: str) -> str | None:
    """Return the architecture of a GPU model; None if no shipped card tells it.

    gpu : name or alias of a shipped card in any spelling, also with its nodes (`v100_1x8`)
    """
    path = catalog.shipped_card(gpu.partition("_")[0])
    return None if path is None else read_card(load_object(path)).architecture


def lacks_precision(gpu: str, precision: str) -> bool:
    """Return True if a GPU model is known to have no tensor cores for a precision.

    precision : precision of GEMM inputs, one of `autopar.rates.constants.DTYPES`
    """
    known = _TENSOR_PRECISIONS.get(architecture_of(gpu) or "")
    return known is not None and precision not in known


def lacks_flash_attention(gpu: str) -> bool:
    """Return True if a GPU model is known to run neither FlashAttention nor cuDNN's attention."""
    return architecture_of(gpu) in _NO_FLASH_ATTENTION


_SPARSE = ("sm_90", "sm_100", "sm_103")
"""Prefixes of architectures with kernels of sparse attention (FlashMLA, NVIDIA/cudnn-frontend)."""


def lacks_sparse_attention(gpu: str) -> bool:
    """Return True if a GPU model is known to have no kernels of sparse attention."""
    own = architecture_of(gpu)
    return own is not None and not own.startswith(_SPARSE)


def default_attention(
    gpu: str, *, precision: PrecisionKind = "bf16", deterministic: bool = False
) -> AttentionKernel:
    """Return the attention kernel that Transformer Engine selects by default on a device."""
    # Flash and fused kernels exist for 16 bits and fewer.
    if precision == "fp32" or lacks_flash_attention(gpu):
        return "unfused"
    name = gpu.upper()
    # The cuDNN kernel has a deterministic backward only on Hopper.
    fused = name.startswith(HOPPER) or (name.startswith(BLACKWELL) and not deterministic)
    return "fused" if fused else "flash"
