"""The training objective over one micro-batch, and what can be read off it for free.

Shapes: N blocks of all samples, B block size, R supervised slots, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stages.batch import Batch
from stages.config import DistillConfig
from stages.distill import Teacher
from stages.drafter import Drafter
from stages.loss import head_losses
from stages.train_config import AttentionForm
from stages.weighting import SlotWeights


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one micro-batch gave.

    Attributes:
        loss_sum: `Σ w · loss`, differentiable, not normalised.
        weight_sum: `Σ w` of the same rows.
        correct_NB, supervised_NB: per slot; correct is False where there is no label.
    """

    loss_sum: torch.Tensor
    weight_sum: torch.Tensor
    correct_NB: torch.Tensor
    supervised_NB: torch.Tensor

    def slot_counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Correct and supervised slots per position 1…B−1, float64 [B−1] each."""
        return self.correct_NB.sum(0).double()[1:], self.supervised_NB.sum(0).double()[1:]

    def leading_correct_N(self) -> torch.Tensor:
        """Correct slots from the front of every block until the first wrong or unlabelled one."""
        return self.correct_NB[:, 1:].long().cumprod(dim=-1).sum(dim=-1)


def run_objective(
    drafter: Drafter, embed: torch.nn.Module, head_VD: torch.Tensor, batch: Batch, weights: SlotWeights, *,
    bf16: bool, attention: AttentionForm = "auto", distill: DistillConfig | None = None,
) -> Outcome:
    """Forward pass and loss; only slots with a label reach the last layer's output and the head.

    Args:
        drafter: with float32 master weights.
        embed, head_VD: the target's, frozen.
        batch: on the drafter's device.
        weights: of the slots.
        bf16: compute in bfloat16 (autocast), else in float32.
        attention: its form.
        distill: a loss towards the target's distribution to mix in, for a batch that has its states.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    with torch.autocast(batch.features_CLD.device.type, dtype=torch.bfloat16, enabled=bf16):
        embedded = batch.embedded(embed, dtype)
        if drafter.spec.features == "none":  # the text in place of what the target made of it
            features = embed(batch.context_ids_C).to(dtype)[:, None]
        else:
            features = batch.features(dtype)
        hidden_RD = drafter(features, embedded, batch.layout, batch.rows_R, attention)
    head = head_VD.to(dtype)
    teacher = None
    if distill is not None and batch.teacher_RD is not None:
        teacher = Teacher(distill, batch.teacher_RD, head)
    losses = head_losses(hidden_RD, head, batch.labels_R, teacher)
    weights_R = weights.rows(batch, losses.cross_entropy_R)
    supervised_NB = batch.supervised_NB
    correct_NB = torch.zeros_like(supervised_NB)
    correct_NB.view(-1)[batch.rows_R] = losses.predictions_R == batch.labels_R
    return Outcome((losses.loss_R * weights_R).sum(), weights_R.sum(), correct_NB, supervised_NB)


def heldout_tau(outcomes: list[Outcome], batches: list[Batch]) -> tuple[float, int]:
    """Simulated τ: mean of (leading correct slots + 1) over the blocks of a sample, then over samples.

    Returns:
        τ and the number of samples.
    """
    per_sample: list[float] = []
    for outcome, batch in zip(outcomes, batches, strict=True):
        lengths_N = (outcome.leading_correct_N() + 1).double()
        per_sample += [float(lengths.mean()) for lengths in lengths_N.split(batch.layout.n_blocks)]
    return (sum(per_sample) / len(per_sample) if per_sample else 0.0), len(per_sample)
