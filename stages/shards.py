"""How the ranks of a training hold one drafter between them: each a part of it (`train.shard`).

Weights, gradients and moments are divided over the ranks by `fully_shard`, layer by layer: a layer's weights are
gathered for as long as they are needed. That pays for drafters that do not fit otherwise; the arithmetic and the result
are those of `Replicas`, up to the last bits of sums.

Every rank has to make the same passes. One with fewer micro-batches, or none, stands in with a made-up batch whose loss
counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from stages.batch import Batch, TrainingSample, make_batch
from stages.drafter import Drafter, DrafterSpec
from stages.replicas import Replicas
from stages.world import World


class Shards(Replicas):
    """Every rank holds a part of the weights, gradients and moments.

    Args:
        drafter: float32, the same on every rank; it is divided in place.
        world: this process, among at least two.
    """

    def __init__(self, drafter: Drafter, world: World) -> None:
        super().__init__(drafter, world)
        mesh = init_device_mesh(world.device.type, (world.size,))
        for layer in drafter.layers:
            fully_shard(layer, mesh=mesh)
        # The outermost part too is given up after a forward pass: one without a backward pass (a look at the held-out
        # samples) would leave whole parameters in the place of the divided ones, which optimizer and checkpoint know.
        fully_shard(drafter, mesh=mesh, reshard_after_forward=True)

    def passes(self, own: int) -> int:
        return self.world.largest(own)

    @contextmanager
    def passing(self, number: int, passes: int) -> Iterator[None]:
        # Gradients stay whole on each rank until the last pass, and are summed once.
        if isinstance(self.drafter, FSDPModule):
            self.drafter.set_requires_gradient_sync(number == passes - 1)
        yield

    def sum_gradients(self) -> None:
        # `fully_shard` averages over ranks; gloo knows no other divisor than that.
        torch._foreach_mul_([p.grad for p in self.drafter.parameters() if p.grad is not None], float(self.world.size))

    def clip(self, limit: float) -> float:
        return _number(nn.utils.clip_grad_norm_(self.drafter.parameters(), limit))

    def weight_norm(self) -> float:
        return _number(nn.utils.get_total_norm([p.detach() for p in self.drafter.parameters()]))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return _whole(tensor)

    def own_part(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(like, DTensor) or tensor.shape != like.shape:
            return tensor
        return distribute_tensor(tensor, like.device_mesh, like.placements)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.drafter.named_parameters():
            parameter.copy_(self.own_part(tensors[name].to(self.world.device), parameter))

    def stand_in(self) -> Batch:
        """A batch of one block, for a pass in which this rank has none."""
        return _made_up(self.drafter.spec).to(self.world.device)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _number(tensor: torch.Tensor) -> float:
    return float(_whole(tensor))


def _made_up(spec: DrafterSpec) -> Batch:
    features_TLD = torch.zeros(1, len(spec.feature_layer_ids), spec.hidden_size)
    ids, mask = np.zeros(3, np.int32), np.array([0, 1, 1], np.uint8)
    last_TD = torch.zeros(3, spec.hidden_size)
    sample = TrainingSample("none", features_TLD, ids, mask, np.array([1]), last_hidden_TD=last_TD)
    return make_batch([sample], spec.block_size, spec.mask_token_id)
