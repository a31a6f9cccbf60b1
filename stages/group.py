"""A group of processes that hold one target together (tensor parallelism): who is who in it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from stages.errors import TargetError
from stages.meeting import join_on_loopback

MEETING_S = 600
"""How long processes wait for each other, at first and in every exchange."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a group; picklable.

    Attributes:
        rank: 0 … size - 1; rank 0 alone commits, its receipt counts.
        size: processes of the group.
        address: of the node that all are on.
        port: free on that node when the group was formed; they meet there, on the loopback interface.
    """

    rank: int
    size: int
    address: str
    port: int


def join_group(member: Member) -> None:
    """Meet the other processes of the group; returns when all are there. A process is in one group for its life.

    Raises:
        TargetError: they did not all come in time.
    """
    import torch

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # transformers asks the environment who this is. Ray gives each process its GPU as number 0.
    places = {"RANK": member.rank, "WORLD_SIZE": member.size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": member.size,
              "MASTER_ADDR": member.address, "MASTER_PORT": member.port}
    os.environ.update({name: str(value) for name, value in places.items()})
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    try:
        join_on_loopback(backend, rank=member.rank, size=member.size, port=member.port, timeout_s=MEETING_S)
    except (RuntimeError, ValueError, OSError) as error:
        raise TargetError(
            f"process {member.rank} of {member.size} did not meet its group at port {member.port} of its node within "
            f"{MEETING_S} s: {str(error).strip().splitlines()[0]}. Are the ports between processes of one node open?"
        ) from error
