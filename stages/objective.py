"""The training objective over one micro-batch, and what can be read off it for free.

Shapes: S samples, A anchors, B block size, R supervised rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stages.batch import Batch
from stages.drafter import Drafter
from stages.loss import head_cross_entropy


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one micro-batch gave.

    Attributes:
        loss_sum: `Σ w · CE`, differentiable, not normalised.
        weight_sum: `Σ w` of the same rows.
        correct_SAB, supervised_SAB: per slot; correct is False where there is no label.
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    correct_SAB: torch.Tensor
    supervised_SAB: torch.Tensor

    def slot_counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Correct and supervised slots per position 1…B−1, float64 [B−1] each."""
        return (self.correct_SAB.sum((0, 1)).double()[1:], self.supervised_SAB.sum((0, 1)).double()[1:])

    def leading_correct_SA(self) -> torch.Tensor:
        """Correct slots from the front of every block until the first wrong or unlabelled one."""
        return self.correct_SAB[..., 1:].long().cumprod(dim=-1).sum(dim=-1)


def run_objective(
    drafter: Drafter, embed: torch.nn.Module, head_VD: torch.Tensor, batch: Batch, weights_B: torch.Tensor, *,
    bf16: bool,
) -> Outcome:
    """Forward pass and loss; only slots with a label reach the head.

    Args:
        drafter: with float32 master weights.
        embed, head_VD: the target's, frozen.
        batch: on the drafter's device.
        weights_B: position weights, 0 for the anchor's slot.
        bf16: compute in bfloat16 (autocast), else in float32.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    device = batch.features_STLD.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        embedded = embed(batch.block_ids_SAB).to(dtype)
        hidden_SABD = drafter(batch.features(dtype), embedded, batch.anchors_SA)
    supervised = batch.supervised_SAB
    hidden_RD = hidden_SABD[supervised]
    weights_R = weights_B.expand(supervised.shape)[supervised]
    labels_R = batch.labels_SAB[supervised]
    loss_sum, predictions_R = head_cross_entropy(hidden_RD, head_VD.to(dtype), labels_R, weights_R)
    correct = torch.zeros_like(supervised)
    correct[supervised] = predictions_R == labels_R
    return Outcome(loss_sum, weights_R.sum(), correct, supervised)


def batch_weight(batch: Batch, weights_B: torch.Tensor) -> torch.Tensor:
    """`Σ w` of a batch before its forward pass; the global sum normalises the step's loss."""
    return weights_B.expand(batch.supervised_SAB.shape)[batch.supervised_SAB].sum()


def heldout_tau(outcomes: list[Outcome], batches: list[Batch]) -> tuple[float, int]:
    """Simulated τ: mean of (leading correct slots + 1) over the blocks of a sample, then over samples.

    Returns:
        τ and the number of samples.
    """
    per_sample: list[float] = []
    for outcome, batch in zip(outcomes, batches, strict=True):
        lengths_SA = (outcome.leading_correct_SA() + 1).double()
        real_SA = batch.anchors_SA >= 0
        per_sample += [float(lengths[real].mean()) for lengths, real in zip(lengths_SA, real_SA, strict=True)]
    return (sum(per_sample) / len(per_sample) if per_sample else 0.0), len(per_sample)
