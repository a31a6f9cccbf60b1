"""A layer of the drafter: attention over injected context and the own block, and an MLP.

Shapes: C context rows and Q slots of all samples, end to end; R slots that are asked for, P rows of either kind,
D hidden, H query heads, G key/value heads, E head width.
"""

from __future__ import annotations

import torch
from torch import nn

from stages.attention import BlockAttention
from stages.drafter_spec import DrafterSpec
from stages.fused import gated, normed_rotation, rms_norm
from stages.layout import KeysValues

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of each row's angles, float32 [P, E/2] each."""
Injected = tuple[torch.Tensor, Rotation] | KeysValues
"""Context states [C, D] with their rotation, or what a layer made of them."""


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def rotary(positions: torch.Tensor, head_dim: int, theta: float) -> Rotation:
    """Cosines and sines for positions [P] → [P, E/2], float32."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Attention of block slots over injected context and their own block."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        bias = spec.attention_bias
        self.head_dim = spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, spec.n_heads * spec.head_dim, bias=bias)
        self.k_proj = nn.Linear(spec.hidden_size, spec.n_kv_heads * spec.head_dim, bias=bias)
        self.v_proj = nn.Linear(spec.hidden_size, spec.n_kv_heads * spec.head_dim, bias=bias)
        self.o_proj = nn.Linear(spec.n_heads * spec.head_dim, spec.hidden_size, bias=bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads

    def keys_values(self, x_PD: torch.Tensor, rotation: Rotation) -> KeysValues:
        """Keys (normed, rotated) and values [P, G, E] of states [P, D], context and block alike."""
        keys = normed_rotation(self._heads(self.k_proj(x_PD)), self.k_norm.weight, self.k_norm.eps, *rotation)
        return KeysValues(keys, self._heads(self.v_proj(x_PD)))

    def forward(
        self, x_QD: torch.Tensor, rotation: Rotation, context: KeysValues, attend: BlockAttention,
        rows_R: torch.Tensor | None,
    ) -> torch.Tensor:
        asking_RD, turned = x_QD, rotation
        if rows_R is not None:
            asking_RD, turned = x_QD[rows_R], (rotation[0][rows_R], rotation[1][rows_R])
        queries = normed_rotation(self._heads(self.q_proj(asking_RD)), self.q_norm.weight, self.q_norm.eps, *turned)
        out_RHE = attend(queries, context, self.keys_values(x_QD, rotation))
        out_RD: torch.Tensor = self.o_proj(out_RHE.flatten(1))
        return out_RD


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
        return out


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self, h_QD: torch.Tensor, context: Injected, rotation: Rotation, attend: BlockAttention,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States of the slots after this layer; of `rows_R` only, if given: their keys and values come from all.

        Args:
            h_QD: of all slots.
            context: the injected states and their rotation, or their keys and values from an earlier pass.
            rotation: of the slots.
            attend: the layer's attention.
            rows_R: slots that are asked for, ascending.
        """
        kv = context if isinstance(context, KeysValues) else self.self_attn.keys_values(*context)
        out_RD = self.self_attn(self.input_layernorm(h_QD), rotation, kv, attend, rows_R)
        h_RD = (h_QD if rows_R is None else h_QD[rows_R]) + out_RD
        out: torch.Tensor = h_RD + self.mlp(self.post_attention_layernorm(h_RD))
        return out
