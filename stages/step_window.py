"""What is logged of several training steps together.

Shapes: N blocks, B block size.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stages.objective import Outcome
from stages.world import World


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One optimizer step, as one rank sees it.

    Attributes:
        loss, grad_norm, rate: of the global batch; the norm before clipping.
        waited_s: that this rank waited for its data.
        n_tokens, flops: of this rank's samples.
    """

    loss: float
    grad_norm: float
    rate: float
    waited_s: float
    n_tokens: int
    flops: float


class StepWindow:
    """Sums over the steps since the last logged one.

    Args:
        block_size: B.
        peak_tflops: of a rank's hardware; None if it is not known.
    """

    def __init__(self, block_size: int, peak_tflops: float | None = None) -> None:
        self.block_size, self.peak_tflops = block_size, peak_tflops
        self._clear()

    def _clear(self) -> None:
        self.slots = torch.zeros(4, self.block_size - 1, dtype=torch.float64)
        self.steps: list[StepFigures] = []
        self.opened = time.perf_counter()

    def add(self, outcome: Outcome) -> None:
        """Count the slots of a micro-batch."""
        counts = slot_counts(outcome)
        # Summed where they are: a copy to the host would wait for the device in every micro-batch.
        self.slots = self.slots.to(counts.device) + counts

    def close_step(self, figures: StepFigures) -> None:
        self.steps.append(figures)

    def summary(
        self, world: World, done: int, epoch: int, skipped: Mapping[str, str], weight_norm: float
    ) -> dict[str, Any]:
        """One row of `metrics.jsonl`; joins the counts of all ranks and starts a new window."""
        elapsed, n = time.perf_counter() - self.opened, max(1, len(self.steps))
        sums = [sum(values) for values in zip(*((s.n_tokens, s.flops, s.waited_s) for s in self.steps), strict=True)]
        totals = world.totals([*self.slots.flatten().tolist(), *(sums or [0.0, 0.0, 0.0])])
        right, seen, reached, asked = torch.tensor(totals[:-3], dtype=torch.float64).view(4, -1)
        tokens, flops, waited_s = totals[-3:]
        tflops = flops / elapsed / world.size / 1e12
        row = {
            "kind": "step",
            "step": done,
            "epoch": epoch,
            "loss": sum(s.loss for s in self.steps) / n,
            "lr": self.steps[-1].rate if self.steps else 0.0,
            "grad_norm": sum(s.grad_norm for s in self.steps) / n,
            "weight_norm": weight_norm,
            "accuracy": shares(right, seen),
            "expected_acceptance": round(1 + sum(shares(reached, asked)), 5),
            "tokens_per_s": tokens / elapsed,
            "data_wait_s": waited_s / world.size / n,
            "data_wait_share": round(waited_s / world.size / elapsed, 5),
            "tflops": tflops,
            "peak_share": tflops / self.peak_tflops if self.peak_tflops else None,
            "skipped": len(skipped),
            "skipped_why": dict(sorted(Counter(skipped.values()).items())),
        }
        self._clear()
        return row


def slot_counts(outcome: Outcome) -> torch.Tensor:
    """Per slot 1…B−1, float64 [4, B−1]: correct; with a label; correct up to it; blocks that have labels up to it.

    The last two give the share of blocks whose drafts are accepted at least so far, over the blocks that are long
    enough to tell; one plus their sum is the expected acceptance length.
    """
    correct_NB = outcome.correct_NB[:, 1:]
    supervised_NB = outcome.supervised_NB[:, 1:]
    reached_NB = correct_NB.long().cumprod(dim=-1)
    parts = (correct_NB, supervised_NB, reached_NB, supervised_NB)
    return torch.stack([part.sum(dim=0).double() for part in parts])


def shares(right: torch.Tensor, seen: torch.Tensor) -> list[float]:
    return [round(float(r / s), 5) if s else 0.0 for r, s in zip(right, seen, strict=True)]
