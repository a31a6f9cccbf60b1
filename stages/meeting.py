"""How processes of one machine meet for torch.distributed: on the loopback interface alone.

Torch's own rendezvous (`tcp://`, `env://`) opens a store on every interface of the machine, without a password, and
what is in it decides where the processes connect to. Here the store's socket is bound before torch is given it.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys

LOOPBACK = "127.0.0.1"
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def bind_loopback(port: int = 0) -> socket.socket:
    """A socket that listens on the loopback interface alone.

    Args:
        port: where; 0 takes a free one (`getsockname()[1]` tells which).
    """
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((LOOPBACK, port))
    listening.listen(1024)
    return listening


def join_on_loopback(
    backend: str, *, rank: int, size: int, port: int, timeout_s: float, listening: socket.socket | None = None
) -> None:
    """Meet the other processes; returns when all are there. They must be on one machine.

    Args:
        backend: `gloo` or `nccl`.
        rank, size: who this is, and how many there are.
        port: where rank 0 listens.
        timeout_s: how long they wait for each other, at first and in every exchange.
        listening: rank 0's socket, if it is bound already.

    Raises:
        RuntimeError, ValueError: they did not all come in time.
        OSError: the port is taken.
    """
    import torch.distributed as dist

    for library in ("GLOO", "NCCL"):
        os.environ[f"{library}_SOCKET_IFNAME"] = _INTERFACE
    timeout = datetime.timedelta(seconds=timeout_s)
    descriptor = (listening or bind_loopback(port)).detach() if rank == 0 else None
    store = dist.TCPStore(LOOPBACK, port, size, rank == 0, timeout, False, master_listen_fd=descriptor)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
