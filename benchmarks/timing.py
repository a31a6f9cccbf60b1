"""How long something takes, in wall and processor time, and how to put files out of the page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cost:
    """What moving some bytes took."""

    n_bytes: int
    wall_s: float
    cpu_s: float
    """Of this process, all threads, system calls included."""

    @property
    def mb_per_s(self) -> float:
        return self.n_bytes / self.wall_s / 1e6

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.n_bytes * 1e9

    def least(self, other: Cost | None) -> Cost:
        """The smaller of each number: noise of a shared machine only ever adds."""
        if other is None:
            return self
        return Cost(self.n_bytes, min(self.wall_s, other.wall_s), min(self.cpu_s, other.cpu_s))


def cost_of(work: Callable[[], int]) -> Cost:
    """The cost of a call that returns how many bytes it moved."""
    wall, cpu = time.perf_counter(), time.process_time()
    n_bytes = work()
    return Cost(n_bytes, time.perf_counter() - wall, time.process_time() - cpu)


def least_costs(
    ways: Mapping[str, Callable[[], int]], rounds: int, before: Callable[[str], None] = lambda name: None
) -> dict[str, Cost]:
    """The least cost of each of several ways; each round goes through all, so that they share the noise.

    Args:
        ways: by name; each moves its bytes and returns how many.
        rounds: how often.
        before: called with the name before each, not measured.
    """
    found: dict[str, Cost] = {}
    for _ in range(rounds):
        for name, work in ways.items():
            before(name)
            found[name] = cost_of(work).least(found.get(name))
    return found


def least_by_item(
    ways: Mapping[str, Callable[[str], int]], items: Sequence[str], rounds: int, before: Callable[[str], None]
) -> dict[str, Cost]:
    """As `least_costs`, of ways that take one item each time: the least of each item, added up.

    Another process that takes the core away spoils one item of one round, and not the round.

    Args:
        ways: by name; each moves the bytes of an item and returns how many.
        items: in the order in which they are moved.
        rounds, before: as there.
    """
    found: dict[str, dict[str, Cost]] = {name: {} for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            before(name)
            for item in items:
                found[name][item] = cost_of(partial(work, item)).least(found[name].get(item))
    return {name: _sum(list(costs.values())) for name, costs in found.items()}


def _sum(costs: Sequence[Cost]) -> Cost:
    return Cost(sum(c.n_bytes for c in costs), sum(c.wall_s for c in costs), sum(c.cpu_s for c in costs))


def files_below(path: Path) -> list[Path]:
    """A file, or all files of a folder."""
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def sync_files(path: Path) -> None:
    """Force what lies at a path to the disk."""
    for file in files_below(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_cached(path: Path) -> bool:
    """Put the files at a path out of the page cache; False if the machine keeps some of them in memory."""
    cold = True
    for file in files_below(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            cold &= not _is_cached(descriptor, os.fstat(descriptor).st_size // 2)
        finally:
            os.close(descriptor)
    return cold


def _is_cached(descriptor: int, at: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:  # a file system without this question, such as tmpfs in old kernels: always in memory
        return True
