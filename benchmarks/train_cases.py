"""Shapes, weights and samples of the training benchmarks, all seeded.

Shapes: T tokens, A anchors, B block size, L feature layers, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from stages.anchors import default_gamma, slot_weights
from stages.batch import Batch, TrainingSample, make_batch
from stages.drafter import Drafter, DrafterSpec

BLOCK, N_LAYERS, N_FEATURES = 16, 5, 5
HEADS, KV_HEADS = 4, 2


@dataclass(frozen=True, slots=True)
class Case:
    """One training step: a single sample.

    Attributes:
        hidden, vocab: D, V. Four query heads over two key/value heads of width D/4, an MLP of 3·D (as Qwen3-8B's).
        tokens: T; the first eighth is prompt, the rest response.
        anchors: A, up to which the other steps pad.
        valid: anchors that exist; None for all.
    """

    hidden: int
    vocab: int
    tokens: int = 1024
    anchors: int = 256
    valid: int | None = None

    @property
    def n_valid(self) -> int:
        return self.valid if self.valid is not None else self.anchors

    def spec(self) -> DrafterSpec:
        return DrafterSpec(
            hidden_size=self.hidden, intermediate_size=3 * self.hidden, n_layers=N_LAYERS, n_heads=HEADS,
            n_kv_heads=KV_HEADS, head_dim=self.hidden // HEADS, vocab_size=self.vocab, block_size=BLOCK,
            n_target_layers=36, feature_layer_ids=(1, 9, 17, 25, 33), mask_token_id=self.vocab - 1, rope_theta=1e6,
        )  # fmt: skip

    def __str__(self) -> str:
        valid = f", {self.valid} valid" if self.valid is not None else ""
        return f"H={self.hidden} V={self.vocab:,} T={self.tokens:,} A={self.anchors}{valid}"


@dataclass(frozen=True, slots=True)
class Setup:
    """Weights and data of a case; embedding and head are frozen."""

    case: Case
    drafter: Drafter
    embed: nn.Embedding
    head_VD: torch.Tensor
    sample: TrainingSample
    weights_B: torch.Tensor

    def batch(self) -> Batch:
        return make_batch([self.sample], BLOCK, self.case.vocab - 1)


def make_setup(case: Case) -> Setup:
    """Everything of a case, the same each time."""
    generator = torch.Generator().manual_seed(0)
    head_VD = torch.randn(case.vocab, case.hidden, generator=generator) * case.hidden**-0.5
    table_VD = torch.randn(case.vocab, case.hidden, generator=generator)
    features_TLD = torch.randn(case.tokens, N_FEATURES, case.hidden, generator=generator).bfloat16()
    rng = np.random.default_rng(0)
    ids = rng.integers(0, case.vocab - 1, case.tokens).astype(np.int32)
    mask = (np.arange(case.tokens) >= case.tokens // 8).astype(np.uint8)
    eligible = np.arange(case.tokens // 8, case.tokens - 1)
    anchors = np.sort(rng.choice(eligible, case.n_valid, replace=False)).astype(np.int64)
    weights_B = torch.from_numpy(slot_weights(BLOCK, default_gamma(BLOCK)))
    embed = nn.Embedding(case.vocab, case.hidden, _weight=table_VD).requires_grad_(False)
    sample = TrainingSample("sample", features_TLD, ids, mask, anchors)
    return Setup(case, Drafter(case.spec(), seed=0), embed, head_VD, sample, weights_B)
