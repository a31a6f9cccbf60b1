"""The DFlash drafter: a few Qwen3-style layers over blocks, with the target's features injected into K and V.

Shapes: C context rows and N blocks of all samples, end to end; B block size, Q = N·B slots, R slots that are asked for,
L feature layers, D hidden, G key/value heads, E head width.

`ctx = hidden_norm(fc(features))` is computed once and enters keys and values of every layer through
the same projections (and key norm) as the block's own states; it passes through nothing else. The
embedding and the head are the target's and are not part of this module. Source: specification,
section 2; DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stages.attention import AttentionPlan, PassForm
from stages.drafter_layer import DrafterLayer, Injected, RMSNorm, Rotation, rotary
from stages.drafter_spec import ENTRIES, LAYER_TYPES, DrafterSpec, rope_theta_of, spec_for_target
from stages.layout import KeysValues, Layout
from stages.train_config import AttentionForm

__all__ = ["ENTRIES", "LAYER_TYPES", "Drafter", "DrafterSpec", "rope_theta_of", "rotary", "spec_for_target"]


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
        n_features = 1 if spec.features == "none" else len(spec.feature_layer_ids)
        self.fc = nn.Linear(n_features * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers: nn.ModuleList = nn.ModuleList([DrafterLayer(spec) for _ in range(spec.n_layers)])
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.recompute = False
        """Compute each layer a second time in the backward pass instead of keeping what it computed in the first."""
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

    def context(self, features_CLD: torch.Tensor) -> torch.Tensor:
        """The injected context, [C, D], from features [C, L, D]."""
        out: torch.Tensor = self.hidden_norm(self.fc(features_CLD.flatten(-2)))
        return out

    def context_kv(self, ctx_CD: torch.Tensor, positions_C: torch.Tensor | None = None) -> list[KeysValues]:
        """Keys and values of context rows at these positions (int64; None: 0 … C−1), per layer, [C, G, E] each; of no
        row for a layer that gets no context."""
        if positions_C is None:
            positions_C = torch.arange(len(ctx_CD), device=ctx_CD.device)
        rotation = rotary(positions_C, self.spec.head_dim, self.spec.rope_theta)
        return [
            layer.self_attn.keys_values(*self._offered(i, ctx_CD, rotation))
            for i, layer in enumerate(self._typed_layers())
        ]

    def _offered(self, layer: int, ctx_CD: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, Rotation]:
        """What a layer gets of the context: all of it, or no row."""
        if self.spec.sees_context(layer):
            return ctx_CD, rotation
        return ctx_CD[:0], (rotation[0][:0], rotation[1][:0])

    def entering(self, embedded_NBD: torch.Tensor, before_ND: torch.Tensor) -> torch.Tensor:
        """The blocks' input, given the context feature just before each block, [N, D]."""
        if self.spec.features != "input":
            return embedded_NBD
        return embedded_NBD + before_ND[:, None].to(embedded_NBD.dtype)

    def _typed_layers(self) -> list[DrafterLayer]:
        return [layer for layer in self.layers if isinstance(layer, DrafterLayer)]

    def forward(
        self, features_CLD: torch.Tensor, embedded_NBD: torch.Tensor, layout: Layout,
        rows_R: torch.Tensor | None = None, attention: AttentionForm = "auto",
    ) -> torch.Tensor:
        """States after the final norm for every slot of every block (the training pass).

        Args:
            features_CLD: the target's features; positions at or after a block's anchor are not seen by it.
            embedded_NBD: target embeddings of `[anchor, MASK × (B−1)]` per block.
            layout: which rows and blocks belong together, and where they stand.
            rows_R: slots that are asked for, `n·B + k`, ascending; None for all. The last layer computes
                nothing else, with the same results.
            attention: its form.

        Returns:
            [N, B, D], or [R, D] for chosen slots; slot k of a block predicts token `anchor + k`.
        """
        rotation = rotary(layout.context_positions(), self.spec.head_dim, self.spec.rope_theta)
        ctx_CD = self.context(features_CLD)
        context = [self._offered(i, ctx_CD, rotation) for i in range(self.spec.n_layers)]
        if self.spec.features == "input":
            embedded_NBD = self.entering(embedded_NBD, ctx_CD[layout.rows_before()] * (layout.anchors_N > 0)[:, None])
        return self._run(embedded_NBD, layout, context, rows_R, attention)

    def blocks(self, embedded_NBD: torch.Tensor, layout: Layout, context: list[KeysValues]) -> torch.Tensor:
        """As `forward` for all slots, with the context's keys and values at hand (the drafting pass keeps them).

        All samples of the layout have one number of context rows and one of blocks; a block sees the rows below its
        anchor only, so contexts that are shorter may be filled up with anything finite.
        """
        return self._run(embedded_NBD, layout, context, None, "rows")

    def _run(
        self, embedded_NBD: torch.Tensor, layout: Layout, context: Sequence[Injected], rows_R: torch.Tensor | None,
        attention: PassForm,
    ) -> torch.Tensor:
        n_blocks, block_size = embedded_NBD.shape[:2]
        rotation = rotary(layout.slot_positions(block_size), self.spec.head_dim, self.spec.rope_theta)
        seeing = AttentionPlan(layout, block_size, form=attention, causal=self.spec.is_causal, rows_R=rows_R)
        blind = AttentionPlan(layout.without_context(), block_size, form=attention, causal=self.spec.is_causal,
                              rows_R=rows_R)
        h = embedded_NBD.flatten(0, 1)
        layers = self._typed_layers()
        for i, (layer, injected) in enumerate(zip(layers, context, strict=True)):
            last = i == len(layers) - 1
            attend = (seeing if self.spec.sees_context(i) else blind).layer(self.spec.window(i), last=last)
            arguments = (h, injected, rotation, attend, rows_R if last else None)
            if self.recompute and torch.is_grad_enabled():
                h = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                h = layer(*arguments)
        out: torch.Tensor = self.norm(h)
        return out if rows_R is not None else out.unflatten(0, (n_blocks, block_size))
