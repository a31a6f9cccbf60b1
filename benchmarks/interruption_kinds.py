"""Interruptions of a writer on a local disk."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.interruption_check import Outcome, differences
from benchmarks.interruption_writer import FULL, count_steps, run
from cache_schema.marker import committed_shards
from cache_schema.storage import FolderStorage

ANY_MOMENT, AT_A_CALL, OF_TWO = (
    "writer killed at any moment",
    "writer killed at a system call",
    "one of two writers killed",
)
FULL_DISK = "full disk"
PATIENCE_S = 120.0


def exit_code(process: Any) -> int:
    """Wait for a process to end, and end it if it takes too long."""
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    return int(process.exitcode)


def spawning() -> Any:
    """Processes that start clean and at once: forked from one that has everything imported and no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.interruption_writer"])
    return context


class WriterKinds:
    """Interrupts writers of small caches below a folder, each in a cache of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self._chance, self._context, self._n = folder, random.Random(f"{seed} writer"), spawning(), 0
        self._undisturbed: Path | None = None
        self._seconds, self._steps = 0.0, 0
        self.kinds = [ANY_MOMENT, AT_A_CALL, OF_TWO]
        if sys.platform.startswith("linux") and os.geteuid() == 0 and shutil.which("mount"):
            self.kinds.append(FULL_DISK)

    def close(self) -> None:
        """Nothing stays behind but the folder."""

    def interrupt(self, kind: str) -> Outcome:
        """One interruption, the run after it, and the comparison."""
        self._n += 1
        undisturbed = self._reference()
        cache = self.folder / f"cache-{self._n:03d}"
        if kind == FULL_DISK:
            return self._full_disk(cache, undisturbed)
        ways = {ANY_MOMENT: self._any_moment, AT_A_CALL: self._at_a_call, OF_TWO: self._of_two}
        what, interrupted = ways[kind](cache)
        outcome = Outcome(kind=kind, what=what, interrupted=interrupted)
        self._finish(cache, undisturbed, outcome)
        shutil.rmtree(cache)
        return outcome

    def _reference(self) -> Path:
        if self._undisturbed is None:
            self._undisturbed = self.folder / "undisturbed"
            answer = self._context.Queue()
            process = self._context.Process(target=count_steps, args=(self._undisturbed, answer))
            process.start()
            self._steps = answer.get(timeout=PATIENCE_S)
            process.join(PATIENCE_S)
            begun = time.monotonic()
            exit_code(self._start(self.folder / "timed"))
            self._seconds = time.monotonic() - begun
        return self._undisturbed

    def _start(self, *args: Any) -> Any:
        process = self._context.Process(target=run, args=args)
        process.start()
        return process

    def _any_moment(self, cache: Path) -> tuple[str, bool]:
        delay_s = self._chance.uniform(0, self._seconds)
        process = self._start(cache)
        time.sleep(delay_s)
        process.kill()
        return f"after {delay_s:.3f} s", exit_code(process) == -signal.SIGKILL

    def _at_a_call(self, cache: Path) -> tuple[str, bool]:
        at, side = self._chance.randrange(self._steps), self._chance.choice(["before", "after"])
        return f"{side} call {at} of {self._steps}", exit_code(self._start(cache, (at, side))) == -signal.SIGKILL

    def _of_two(self, cache: Path) -> tuple[str, bool]:
        delay_s = self._chance.uniform(0, 2 * self._seconds)
        victim, other = self._start(cache), self._start(cache)
        time.sleep(delay_s)
        victim.kill()
        codes = exit_code(victim), exit_code(other)
        if codes[1] != 0:
            return f"the other writer ended with {codes[1]}", False
        return f"after {delay_s:.3f} s", codes[0] == -signal.SIGKILL

    def _finish(self, cache: Path, undisturbed: Path, outcome: Outcome) -> None:
        """Run again until the end, and compare."""
        code = exit_code(self._start(cache))
        if code != 0:
            outcome.problems.append(f"the run after the interruption ended with {code}")
        found, outcome.garbage_groups = differences(cache, undisturbed)
        outcome.problems += found

    def _full_disk(self, disk: Path, undisturbed: Path) -> Outcome:
        """A disk of a random size, too small; then it grows."""
        needed = sum(p.stat().st_size for p in undisturbed.rglob("*") if p.is_file())
        size = self._chance.randrange(16 << 10, needed)
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
        try:
            code = exit_code(self._start(disk / "cache"))
            outcome = Outcome(kind=FULL_DISK, what=f"{size} of {needed} bytes", interrupted=code == FULL)
            outcome.problems += _left_half_written(disk / "cache")
            subprocess.run(["mount", "-o", f"remount,size={4 * needed + (64 << 20)}", str(disk)], check=True)
            self._finish(disk / "cache", undisturbed, outcome)
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)
        return outcome


def _left_half_written(cache: Path) -> list[str]:
    """A writer that lives to see the disk full removes what it wrote."""
    if not (cache / "plan.parquet").exists():
        return []
    storage = FolderStorage(cache)
    shards = set(committed_shards(storage))
    groups = [g for g in storage.folders("shards") if g.partition(".")[0] not in shards]
    return [f"after the disk was full, {group} was left" for group in groups]
