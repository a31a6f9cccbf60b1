"""How the ranks of a training hold one drafter between them: every rank all of it (the default).

Gradients are summed once per optimizer step, after all of a rank's micro-batches, in one exchange of large pieces,
and not during the backward pass as `DistributedDataParallel` does it: that averages instead of summing (the loss is
normalised over the global batch already), and it expects the same number of passes of every rank, while the last step
of an epoch leaves some ranks with fewer samples, or with none. What is lost is the overlap of the exchange with the
last of the backward passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from stages.batch import Batch
from stages.drafter import Drafter
from stages.world import World


class Replicas:
    """Every rank holds all weights, gradients and moments.

    Args:
        drafter: float32, the same on every rank.
        world: this process.
    """

    def __init__(self, drafter: Drafter, world: World) -> None:
        self.drafter, self.world = drafter, world

    def passes(self, own: int) -> int:
        """How many forward and backward passes this rank makes in a step in which it has `own` micro-batches."""
        return own

    @contextmanager
    def passing(self, _number: int, _passes: int) -> Iterator[None]:
        """Holds during a pass, 0-based."""
        yield

    def sum_gradients(self) -> None:
        """After the last pass: every rank has the gradient of the global batch."""
        if self.world.size == 1:
            return
        parameters = list(self.drafter.parameters())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.world.total_each([p.grad for p in parameters if p.grad is not None])

    def clip(self, limit: float) -> float:
        """Scale the gradient to a norm of `limit` at most; returns the norm before."""
        return float(nn.utils.clip_grad_norm_(self.drafter.parameters(), limit))

    def weight_norm(self) -> float:
        return float(nn.utils.get_total_norm(list(self.drafter.parameters())))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of a weight or moment; every rank calls it."""
        return tensor

    def own_part(self, tensor: torch.Tensor, _like: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole one that belongs to the weight `like`."""
        return tensor

    def stand_in(self) -> Batch:
        """A batch for a pass in which this rank has none; never asked for here."""
        raise NotImplementedError

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put whole weights in place of the drafter's."""
        self.drafter.load_state_dict(dict(tensors))
