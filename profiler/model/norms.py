"""RMSNorm and LayerNorm that keep exactly what a GPU's fused kernels keep.

On a CPU torch decomposes them and keeps fp32 copies; here they are autograd functions whose saved
tensors are written down. The formulas are registered as operators, so that whoever watches
operators sees one, as on a GPU, and not the temporary fp32 copies.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["layer_norm", "rms_norm", "statistics_like"]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def statistics_like(x: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor for one number per row of x: fp32, or fp64 where x is that."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((*x.shape[:-1], 1), dtype=dtype)


@torch.library.custom_op(
    "autopar::rms_norm", mutates_args=(), schema="(Tensor x, Tensor w, float eps) -> Tensor[]"
)
def _rms_norm(x: Any, w: Any, eps: float) -> Any:
    wide = _wide(x)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return [(wide * rstd * w).to(x.dtype), rstd]


@_rms_norm.register_fake
def _(x: Any, w: Any, eps: float) -> Any:
    return [torch.empty_like(x), statistics_like(x)]


@torch.library.custom_op(
    "autopar::rms_norm_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor x, Tensor w, Tensor rstd) -> Tensor[]",
)
def _rms_norm_backward(g: Any, x: Any, w: Any, rstd: Any) -> Any:
    wide, g_wide = _wide(x), _wide(g)
    normal = wide * rstd
    g_normal = g_wide * w
    g_x = rstd * (g_normal - normal * (g_normal * normal).mean(-1, keepdim=True))
    return [g_x.to(x.dtype), (g_wide * normal).flatten(0, -2).sum(0).to(w.dtype)]


@_rms_norm_backward.register_fake
def _(g: Any, x: Any, w: Any, rstd: Any) -> Any:
    return [torch.empty_like(x), torch.empty_like(w)]


@torch.library.custom_op(
    "autopar::layer_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor b, float eps) -> Tensor[]",
)
def _layer_norm(x: Any, w: Any, b: Any, eps: float) -> Any:
    wide = _wide(x)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return [(centred * rstd * w + b).to(x.dtype), mean, rstd]


@_layer_norm.register_fake
def _(x: Any, w: Any, b: Any, eps: float) -> Any:
    return [torch.empty_like(x), statistics_like(x), statistics_like(x)]


@torch.library.custom_op(
    "autopar::layer_norm_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor x, Tensor w, Tensor mean, Tensor rstd) -> Tensor[]",
)
def _layer_norm_backward(g: Any, x: Any, w: Any, mean: Any, rstd: Any) -> Any:
    g_wide = _wide(g)
    normal = (_wide(x) - mean) * rstd
    g_normal = g_wide * w
    g_x = rstd * (
        g_normal
        - g_normal.mean(-1, keepdim=True)
        - normal * (g_normal * normal).mean(-1, keepdim=True)
    )
    g_w = (g_wide * normal).flatten(0, -2).sum(0).to(w.dtype)
    return [g_x.to(x.dtype), g_w, g_wide.flatten(0, -2).sum(0).to(w.dtype)]


@_layer_norm_backward.register_fake
def _(g: Any, x: Any, w: Any, mean: Any, rstd: Any) -> Any:
    return [torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, eps: float) -> Any:
        # older versions of torch have an operator of that name for other devices, no backward
        ctx.fused = x.is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm_backward")
        if ctx.fused:
            y, rstd = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], w, eps)
        else:
            y, rstd = _rms_norm(x, w, eps)
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w, rstd = ctx.saved_tensors
        if ctx.fused:
            g_x, g_w = torch.ops.aten._fused_rms_norm_backward(
                g.contiguous(), x, [x.shape[-1]], rstd, w, [True, True]
            )
        else:
            g_x, g_w = _rms_norm_backward(g, x, w, rstd)
        return g_x, g_w, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, b: Any, eps: float) -> Any:
        if x.is_cuda:
            y, mean, rstd = torch.ops.aten.native_layer_norm(x, [x.shape[-1]], w, b, eps)
        else:
            y, mean, rstd = _layer_norm(x, w, b, eps)
        ctx.save_for_backward(x, w, b, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w, b, mean, rstd = ctx.saved_tensors
        if x.is_cuda:
            found = torch.ops.aten.native_layer_norm_backward(
                g.contiguous(), x, [x.shape[-1]], mean, rstd, w, b, [True, True, True]
            )
        else:
            found = _layer_norm_backward(g, x, w, mean, rstd)
        return (*found, None)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return x over its root mean square; keeps x and one fp32 number per token."""
    return _RmsNorm.apply(x, weight, eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """Return x with mean 0 and variance 1; keeps x and two fp32 numbers per token."""
    return _LayerNorm.apply(x, weight, bias, eps)
