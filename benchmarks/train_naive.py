"""The naive training step, written plainly: dense mask, all rows everywhere, padded anchors, full float32 logits.

It uses the drafter's own weights, so that loss and gradients can be compared, and nothing else of it.

Shapes: T tokens, A anchors (padded), B block size, Q = A·B slots, D hidden, E head width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.train_cases import BLOCK, Setup
from stages.anchors import supervised_slots
from stages.drafter import Drafter


class NaiveStep:
    """Forward and backward pass of one sample; `__call__` leaves gradients and returns the loss."""

    def __init__(self, setup: Setup) -> None:
        self.drafter, self.embed, self.head_VD = setup.drafter, setup.embed, setup.head_VD
        case, sample = setup.case, setup.sample
        anchors = torch.from_numpy(sample.anchors)
        n, n_valid = case.anchors, len(anchors)
        self.anchors_A = F.pad(anchors, (0, n - n_valid))
        self.real_A = torch.arange(n) < n_valid
        self.features_TF = sample.features_TLD.float().flatten(1)
        ids_T = torch.from_numpy(sample.input_ids).long()
        self.places_Q = (self.anchors_A[:, None] + torch.arange(BLOCK)).flatten()
        self.labels_Q = ids_T[self.places_Q.clamp(max=case.tokens - 1)]
        self.blocks_AB = torch.full((n, BLOCK), case.vocab - 1)
        self.blocks_AB[:, 0] = ids_T[self.anchors_A]
        labelled = torch.from_numpy(supervised_slots(sample.loss_mask, sample.anchors, BLOCK))
        self.weights_Q = F.pad(labelled * setup.weights_B, (0, 0, 0, n - n_valid)).flatten()

    def mask(self) -> torch.Tensor:
        """Boolean [Q, T + Q]."""
        anchor_Q, real_Q = (x.repeat_interleave(BLOCK) for x in (self.anchors_A, self.real_A))
        context = (torch.arange(len(self.features_TF)) < anchor_Q[:, None]) & real_Q[:, None]
        block_Q = torch.arange(len(self.anchors_A)).repeat_interleave(BLOCK)
        return torch.cat([context, block_Q[:, None] == block_Q], dim=1)

    def __call__(self) -> torch.Tensor:
        drafter = self.drafter
        ctx_TD = norm(drafter.hidden_norm, drafter.fc(self.features_TF))
        hidden_QD = self.embed(self.blocks_AB).flatten(0, 1)
        mask = self.mask()
        context_places = torch.arange(len(ctx_TD))
        for layer in drafter.layers:
            hidden_QD = self.layer(layer, hidden_QD, ctx_TD, context_places, mask)
        logits_QV = norm(drafter.norm, hidden_QD) @ self.head_VD.T
        each_Q = F.cross_entropy(logits_QV, self.labels_Q, reduction="none")
        loss = (each_Q * self.weights_Q).sum() / self.weights_Q.sum()
        loss.backward()
        return loss.detach()

    def layer(
        self, layer: nn.Module, hidden_QD: torch.Tensor, ctx_TD: torch.Tensor, places_T: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        own = layer.self_attn
        x_QD = norm(layer.input_layernorm, hidden_QD)
        both = torch.cat([ctx_TD, x_QD])
        places = torch.cat([places_T, self.places_Q])
        queries = turn(norm(own.q_norm, heads(own.q_proj(x_QD), own)), self.places_Q, self.drafter)
        keys = turn(norm(own.k_norm, heads(own.k_proj(both), own)), places, self.drafter)
        values = heads(own.v_proj(both), own)
        shared = queries.shape[1] // keys.shape[1]
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        out_QD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1).flatten(1)
        hidden_QD = hidden_QD + own.o_proj(out_QD)
        x_QD = norm(layer.post_attention_layernorm, hidden_QD)
        mlp = layer.mlp
        return hidden_QD + mlp.down_proj(F.silu(mlp.gate_proj(x_QD)) * mlp.up_proj(x_QD))


def heads(x: torch.Tensor, own: nn.Module) -> torch.Tensor:
    return x.unflatten(-1, (-1, own.head_dim))


def norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm as model code writes it."""
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps)
    return module.weight * scaled


def turn(x: torch.Tensor, places: torch.Tensor, drafter: Drafter) -> torch.Tensor:
    """Rotary embeddings as model code writes them."""
    width = drafter.spec.head_dim
    frequencies = 1.0 / drafter.spec.rope_theta ** (torch.arange(0, width, 2).float() / width)
    angles = places.float()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
