"""Norm, rotation and gate of the drafter's layers with their gradients written out.

On a CPU every elementwise pass over the rows costs about a tenth of a small projection, and autograd over plain
operations makes several times the passes that are needed and keeps every one's result. The numbers are the same: all in
float32, rounded once to the type that came in.

Shapes: P rows, H heads, E head width, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def rms_norm(x_PD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / √(mean x² + eps) · weight` over the last axis."""
    if _by_hand(x_PD):
        out: torch.Tensor = _RMSNorm.apply(x_PD, weight_D, eps)  # type: ignore[no-untyped-call]
        return out
    return F.rms_norm(x_PD.float(), weight_D.shape, weight_D.float(), eps).to(x_PD.dtype)


def normed_rotation(
    x_PHE: torch.Tensor, weight_E: torch.Tensor, eps: float, cos_PF: torch.Tensor, sin_PF: torch.Tensor
) -> torch.Tensor:
    """RMSNorm over the width of each head, then rotary embeddings, half against half (as Qwen3).

    Args:
        x_PHE: queries or keys.
        weight_E, eps: of the norm.
        cos_PF, sin_PF: float32, of each row's angles; F = E/2.
    """
    if _by_hand(x_PHE):
        out: torch.Tensor = _NormedRotation.apply(  # type: ignore[no-untyped-call]
            x_PHE, weight_E, cos_PF, sin_PF, eps
        )
        return out
    normed_PHE = F.rms_norm(x_PHE.float(), weight_E.shape, weight_E.float(), eps)
    first, second = normed_PHE.chunk(2, dim=-1)
    cos_P1F, sin_P1F = cos_PF[:, None], sin_PF[:, None]
    turned = torch.cat([first * cos_P1F - second * sin_P1F, second * cos_P1F + first * sin_P1F], dim=-1)
    return turned.to(x_PHE.dtype)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) · up`."""
    if _by_hand(gate):
        out: torch.Tensor = _GatedUnit.apply(gate, up)  # type: ignore[no-untyped-call]
        return out
    return F.silu(gate) * up


def _by_hand(x: torch.Tensor) -> bool:
    """Elsewhere one kernel does what takes several here, and a compiler fuses plain operations better."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        wide_PD = x_PD.float()
        inverse_P1 = _inverse_rms(wide_PD, eps)
        out_PD = (wide_PD * inverse_P1).mul_(weight_D)
        ctx.save_for_backward(x_PD, weight_D, inverse_P1)
        return out_PD.to(x_PD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x_PD, weight_D, inverse_P1 = ctx.saved_tensors
        wide_PD, grad_PD = x_PD.float(), grad_PD.float()
        product_PD = grad_PD * wide_PD
        weight_grad_D = product_PD.T.mv(inverse_P1[:, 0])
        along_P1 = product_PD.mv(weight_D)[:, None].mul_(inverse_P1.pow(3)).div_(-x_PD.shape[1])
        change_PD = torch.mul(grad_PD, weight_D, out=product_PD).mul_(inverse_P1).addcmul_(wide_PD, along_P1)
        return change_PD.to(x_PD.dtype), weight_grad_D, None


class _NormedRotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PHE: torch.Tensor, weight_E: torch.Tensor, cos_PF: torch.Tensor, sin_PF: torch.Tensor, eps: float
    ) -> torch.Tensor:
        wide_PHE = x_PHE.float()
        inverse_PH1 = _inverse_rms(wide_PHE, eps)
        unit_PHE = wide_PHE * inverse_PH1
        out_PHE = _turn(unit_PHE * weight_E, cos_PF, sin_PF)
        ctx.save_for_backward(unit_PHE.to(x_PHE.dtype), inverse_PH1, weight_E, cos_PF, sin_PF)
        return out_PHE.to(x_PHE.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PHE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        unit_PHE, inverse_PH1, weight_E, cos_PF, sin_PF = ctx.saved_tensors
        dtype, width = unit_PHE.dtype, unit_PHE.shape[2]
        unit_PHE = unit_PHE.float()
        back_PHE = _turn(grad_PHE.float(), cos_PF, -sin_PF)
        product_PHE = back_PHE * unit_PHE
        weight_grad_E = product_PHE.sum((0, 1))
        along_PH1 = product_PHE.view(-1, width).mv(weight_E).view(inverse_PH1.shape).div_(-width)
        change_PHE = back_PHE.mul_(weight_E).addcmul_(unit_PHE, along_PH1).mul_(inverse_PH1)
        return change_PHE.to(dtype), weight_grad_E, None, None, None


class _GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        gate_grad: torch.Tensor = torch.ops.aten.silu_backward(grad * up, gate)
        return gate_grad, F.silu(gate).mul_(grad)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _turn(x_PHE: torch.Tensor, cos_PF: torch.Tensor, sin_PF: torch.Tensor) -> torch.Tensor:
    """Rotate each head, half against half (as Qwen3); F = E/2."""
    first, second = x_PHE.chunk(2, dim=-1)
    out_PHE = torch.empty_like(x_PHE, memory_format=torch.contiguous_format)
    to_first, to_second = out_PHE.chunk(2, dim=-1)
    cos_P1F, sin_P1F = cos_PF[:, None], sin_PF[:, None]
    torch.mul(first, cos_P1F, out=to_first).addcmul_(second, sin_P1F, value=-1)
    torch.mul(second, cos_P1F, out=to_second).addcmul_(first, sin_P1F)
    return out_PHE
