"""What each supervised slot counts in the loss, and what the sum is divided by.

`decay` and `uniform` are fixed per slot. `dpace` follows the drafter's own confidence: with q_i the probability that it
gives to the right token of slot i, the expected number of accepted drafts is E = Σ_m Π_{i≤m} q_i, and
∂E/∂log q_j = Σ_{m≥j} Π_{i≤m} q_i. That derivative, of q smoothed to (1−α)·q + α and held constant, is the weight of
slot j's cross-entropy. It falls along the block, and reaches further back the surer the drafter is of the front.
Source: D-PACE, arXiv 2605.18810, equations 7 to 9; its author on the divisor (a mean over weights would cancel what
they say, so it is the number of blocks): SpecForge issue 828.

Shapes: N blocks, B block size, R supervised slots in block-major order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from stages.anchors import default_gamma, slot_weights
from stages.batch import Batch
from stages.config import TrainConfig


@dataclass(frozen=True, slots=True)
class SlotWeights:
    """How slots are weighted.

    Attributes:
        static_B: float32, weight per slot, 0 for the anchor's.
        divisor: `mean` divides by the sum of `static_B` over supervised slots, `sum` by the number of blocks.
        alpha: smoothing of D-PACE; None is a static weighting.
    """

    static_B: torch.Tensor
    divisor: Literal["mean", "sum"] = "mean"
    alpha: float | None = None

    def rows(self, batch: Batch, cross_entropy_R: torch.Tensor) -> torch.Tensor:
        """Weights of the supervised slots, float32 [R]; no gradient passes through them.

        Args:
            batch: says which slots they are.
            cross_entropy_R: of each of them, detached.
        """
        if self.alpha is None:
            return self.static_B[batch.rows_R % batch.block_size]
        return dpace_weights(batch.supervised_NB, cross_entropy_R, self.alpha)

    def divide_by(self, batch: Batch) -> torch.Tensor:
        """A batch's part of the divisor, known before its forward pass; the sum over the global batch divides."""
        if self.divisor == "sum":
            return torch.tensor(float(batch.n_blocks), device=self.static_B.device)
        return self.static_B[batch.rows_R % batch.block_size].sum()


def make_slot_weights(config: TrainConfig, block_size: int, device: torch.device) -> SlotWeights:
    """The weighting that the settings ask for."""
    if config.slot_weights == "decay":
        static_B = torch.from_numpy(slot_weights(block_size, config.gamma or default_gamma(block_size)))
    else:
        static_B = torch.ones(block_size)
        static_B[0] = 0
    alpha = config.dpace_alpha if config.slot_weights == "dpace" else None
    return SlotWeights(static_B.to(device), config.normalised_by, alpha)


@torch.no_grad()
def dpace_weights(supervised_NB: torch.Tensor, ce_R: torch.Tensor, alpha: float) -> torch.Tensor:
    """D-PACE's weights, float32 [R]: `Σ_{m≥j} Π_{i≤m} ((1−α)·q_i + α)` over the supervised slots of each block.

    Args:
        supervised_NB: boolean; in each block a contiguous prefix of the slots from 1 on.
        ce_R: cross-entropy of each supervised slot.
        alpha: smoothing.
    """
    smoothed_NB = torch.ones(supervised_NB.shape, dtype=torch.float32, device=ce_R.device)
    smoothed_NB[supervised_NB] = (1 - alpha) * torch.exp(-ce_R.float()) + alpha
    reached_NB = smoothed_NB.cumprod(dim=-1) * supervised_NB
    onwards_NB = reached_NB.flip(-1).cumsum(dim=-1).flip(-1)
    return onwards_NB[supervised_NB]
