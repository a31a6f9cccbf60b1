"""Where a worker computes."""

from __future__ import annotations

import torch


def worker_device() -> torch.device:
    """The GPU that this process was given (Ray makes it device 0), else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def use_threads(n: int | None) -> None:
    """CPU threads of this process; None leaves torch's choice. Results on a CPU may depend on it in the last bit."""
    if n is not None:
        torch.set_num_threads(n)
