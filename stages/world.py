"""This process among those that train together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

BUCKET_ELEMENTS = 32 << 20
"""Elements that are summed over ranks in one go: large enough that the number of calls does not matter, and a copy of
them is small beside the gradients."""


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

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """Sums over ranks of a few plain numbers, in one exchange."""
        packed = torch.tensor(list(numbers), dtype=torch.float64, device=self.device)
        out: list[float] = self.total(packed).tolist()
        return out

    def total_each(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum each tensor over ranks, in place; many are exchanged at a time."""
        if self.size == 1:
            return
        bucket: list[torch.Tensor] = []
        elements = 0
        for tensor in tensors:
            if bucket and elements + tensor.numel() > BUCKET_ELEMENTS:
                self._total_bucket(bucket)
                bucket, elements = [], 0
            bucket.append(tensor)
            elements += tensor.numel()
        self._total_bucket(bucket)

    def _total_bucket(self, bucket: Sequence[torch.Tensor]) -> None:
        flat = self.total(torch.cat([tensor.reshape(-1) for tensor in bucket]))
        parts = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(list(bucket), [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def largest(self, number: int) -> int:
        """The largest over ranks."""
        if self.size == 1:
            return number
        value = torch.tensor([number], device=self.device)
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
        return int(value)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value)
        return found
