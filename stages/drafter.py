"""The DFlash drafter: a few Qwen3-style layers over blocks, with the target's features injected into K and V.

Shapes: S sequences, T context tokens, A anchors, B block size, Q = A·B block slots, L feature layers,
D hidden, H query heads, G key/value heads, E head width, V vocabulary.

`ctx = hidden_norm(fc(features))` is computed once and enters keys and values of every layer through
the same projections (and key norm) as the block's own states; it passes through nothing else. The
embedding and the head are the target's and are not part of this module. Source: specification,
section 2; DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stages.attention import attend, block_positions, visible_mask
from stages.config import ConfigError, DrafterConfig

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """Everything that fixes a drafter's shape and meaning; section 5's `config.json` carries it."""

    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    n_target_layers: int
    feature_layer_ids: tuple[int, ...]
    mask_token_id: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    """Per layer `full_attention` or `sliding_attention`; empty means all full."""
    sliding_window: int | None = None
    is_causal: bool = True
    """Whether sliding-window layers are causal inside the block; full layers never are."""
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"drafter: {self.n_heads} heads cannot share {self.n_kv_heads} key/value heads; make n_heads a multiple"
            )
        if self.head_dim % 2:
            raise ConfigError(f"drafter: head_dim is {self.head_dim}, but rotary embeddings need an even width")
        if self.layer_types and len(self.layer_types) != self.n_layers:
            raise ConfigError(f"drafter: {len(self.layer_types)} layer_types for {self.n_layers} layers")
        unknown = set(self.layer_types) - set(LAYER_TYPES)
        if unknown:
            raise ConfigError(f"drafter: layer_types has {sorted(unknown)}; known are {list(LAYER_TYPES)}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ConfigError("drafter: a sliding_attention layer needs sliding_window")

    def window(self, layer: int) -> int | None:
        """The window of a layer in positions, or None for full attention."""
        return self.sliding_window if self.layer_types and self.layer_types[layer] == "sliding_attention" else None

    def with_block_size(self, block_size: int) -> DrafterSpec:
        """The same drafter used with another block size (cross-size inference)."""
        return replace(self, block_size=block_size)


def spec_for_target(
    config: DrafterConfig, target_config: Any, *, feature_layer_ids: tuple[int, ...], mask_token_id: int
) -> DrafterSpec:
    """A drafter's spec built *for the drafter*: of the target's config only plain sizes are taken.

    Rotary settings other than the base frequency are not copied: a partial or scaled rotation in the
    drafter's config is applied by one engine and not by another, and then ~1.2 tokens are accepted.
    """
    text = target_config.get_text_config()
    heads = config.n_heads or text.num_attention_heads
    shared = heads if config.n_heads else getattr(text, "num_key_value_heads", None) or heads
    return DrafterSpec(
        hidden_size=text.hidden_size,
        intermediate_size=config.intermediate_size or text.intermediate_size,
        n_layers=config.n_layers,
        n_heads=heads,
        n_kv_heads=config.n_kv_heads or shared,
        head_dim=config.head_dim or getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
        block_size=config.block_size,
        n_target_layers=text.num_hidden_layers,
        feature_layer_ids=feature_layer_ids,
        mask_token_id=mask_token_id,
        rope_theta=rope_theta_of(text),
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
    )


def rope_theta_of(text_config: Any) -> float:
    """The base frequency, wherever this version of transformers keeps it (per layer type: full attention's)."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    return float(parameters.get("rope_theta") or getattr(text_config, "rope_theta", None) or 10000.0)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * scaled.to(x.dtype)).to(x.dtype)


def rotary(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions [..., P] → [..., 1, P, E], float32 (half-split form, as Qwen3)."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-3)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embeddings to [..., heads, P, E]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


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
        heads: torch.Tensor = x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
        return heads

    def keys_values(
        self, x_SPD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed, rotated) and values [S, G, P, E] of states [S, P, D], context and block alike."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x_SPD))), cos, sin)
        return keys, self._heads(self.v_proj(x_SPD))

    def forward(
        self, x_SQD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None,
    ) -> torch.Tensor:
        queries = rotate(self.q_norm(self._heads(self.q_proj(x_SQD))), cos, sin)
        keys, values = self.keys_values(x_SQD, cos, sin)
        keys = torch.cat([context[0].to(keys.dtype), keys], dim=2)
        values = torch.cat([context[1].to(values.dtype), values], dim=2)
        out = attend(queries, keys, values, mask)
        out_SQD: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return out_SQD


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
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
        self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None,
    ) -> torch.Tensor:
        h = h + self.self_attn(self.input_layernorm(h), cos, sin, context, mask)
        out: torch.Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Drafter(nn.Module):
    """The drafter. Parameter names are those of the published checkpoints (section 5).

    Args:
        spec: shape and meaning.
        seed: of the initial weights: normal(0, `initializer_range`), norms 1. None leaves the weights to
            a checkpoint that is loaded next.
    """

    def __init__(self, spec: DrafterSpec, *, seed: int | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.feature_layer_ids) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers: nn.ModuleList = nn.ModuleList([DrafterLayer(spec) for _ in range(spec.n_layers)])
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        if seed is not None:
            self._init_weights(seed)

    @torch.no_grad()
    def _init_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(self.named_parameters()):
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * self.spec.initializer_range)
            elif name.endswith("bias"):
                parameter.zero_()

    def context(self, features_STLD: torch.Tensor) -> torch.Tensor:
        """The injected context, [S, T, D], from features [S, T, L, D]."""
        out: torch.Tensor = self.hidden_norm(self.fc(features_STLD.flatten(-2)))
        return out

    def context_kv(
        self, ctx_STD: torch.Tensor, start: int | torch.Tensor = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of context positions start … start+T−1 (one start, or one per sequence as [S, 1]), per
        layer, [S, G, T, E] each."""
        positions = start + torch.arange(ctx_STD.shape[1], device=ctx_STD.device)
        cos, sin = rotary(positions, self.spec.head_dim, self.spec.rope_theta)
        return [layer.self_attn.keys_values(ctx_STD, cos, sin) for layer in self._typed_layers()]

    def _typed_layers(self) -> list[DrafterLayer]:
        return [layer for layer in self.layers if isinstance(layer, DrafterLayer)]

    def forward(
        self, features_STLD: torch.Tensor, embedded_SABD: torch.Tensor, anchors_SA: torch.Tensor
    ) -> torch.Tensor:
        """States after the final norm for every slot of every block (the training pass).

        Args:
            features_STLD: the target's features; positions at or after a block's anchor are not seen by it.
            embedded_SABD: target embeddings of `[anchor, MASK × (B−1)]` per block.
            anchors_SA: int64 anchor positions; a negative one marks a padding block, whose output means nothing.

        Returns:
            [S, A, B, D]; slot k of a block predicts token `anchor + k`.
        """
        kv = self.context_kv(self.context(features_STLD))
        return self.blocks(embedded_SABD, anchors_SA, kv, features_STLD.shape[1])

    def blocks(
        self, embedded_SABD: torch.Tensor, anchors_SA: torch.Tensor,
        context: list[tuple[torch.Tensor, torch.Tensor]], n_context: int,
    ) -> torch.Tensor:
        """As `forward`, with the context's keys and values at hand (the drafting pass keeps them)."""
        n_blocks, block_size = embedded_SABD.shape[1:3]
        positions_SQ = block_positions(anchors_SA, block_size)
        cos, sin = rotary(positions_SQ, self.spec.head_dim, self.spec.rope_theta)
        masks: dict[int | None, torch.Tensor] = {}
        causal = self.spec.is_causal
        h = embedded_SABD.flatten(1, 2)
        for i, layer in enumerate(self._typed_layers()):
            window = self.spec.window(i)
            if window not in masks:
                masks[window] = visible_mask(anchors_SA, block_size, n_context, window=window, causal=causal)
            h = layer(h, cos, sin, context[i], masks[window])
        out: torch.Tensor = self.norm(h).unflatten(1, (n_blocks, block_size))
        return out
