"""What is logged of several training steps together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from stages.objective import Outcome
from stages.world import World


class StepWindow:
    """Sums over the steps since the last logged one."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._clear()

    def _clear(self) -> None:
        self.correct = torch.zeros(self.block_size - 1, dtype=torch.float64)
        self.seen = torch.zeros(self.block_size - 1, dtype=torch.float64)
        self.steps, self.loss, self.norm, self.rate, self.waited_s, self.tokens = 0, 0.0, 0.0, 0.0, 0.0, 0
        self.opened = time.perf_counter()

    def add(self, outcome: Outcome) -> None:
        correct, seen = outcome.slot_counts()
        self.correct += correct.cpu()
        self.seen += seen.cpu()

    def close_step(self, loss: float, rate: float, norm: float, waited_s: float, tokens: int) -> None:
        self.steps += 1
        self.loss, self.norm, self.rate = self.loss + loss, self.norm + norm, rate
        self.waited_s, self.tokens = self.waited_s + waited_s, self.tokens + tokens

    def summary(self, world: World, done: int, epoch: int, skipped: Mapping[str, str]) -> dict[str, Any]:
        """One row of `metrics.jsonl`; joins the counts of all ranks and starts a new window."""
        tokens = torch.tensor([float(self.tokens)], dtype=torch.float64)
        packed = world.total(torch.cat([self.correct, self.seen, tokens]).to(world.device)).cpu()
        n = self.block_size - 1
        elapsed, steps = time.perf_counter() - self.opened, max(1, self.steps)
        row = {
            "kind": "step",
            "step": done,
            "epoch": epoch,
            "loss": self.loss / steps,
            "lr": self.rate,
            "grad_norm": self.norm / steps,
            "accuracy": shares(packed[:n], packed[n : 2 * n]),
            "tokens_per_s": float(packed[-1]) / elapsed,
            "data_wait_s": self.waited_s / steps,
            "skipped": len(skipped),
            "skipped_why": dict(sorted(Counter(skipped.values()).items())),
        }
        self._clear()
        return row


def shares(right: torch.Tensor, seen: torch.Tensor) -> list[float]:
    return [round(float(r / s), 5) if s else 0.0 for r, s in zip(right, seen, strict=True)]
