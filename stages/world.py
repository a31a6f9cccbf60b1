"""This process among those that train together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class World:
    """This process among all: rank, number of ranks, device."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values
