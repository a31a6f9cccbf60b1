"""Interruptions of a writer whose cache lies in an object store: a real S3 server (Ceph's gateway) on this machine."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.interruption_check import Outcome, differences
from benchmarks.interruption_kinds import PATIENCE_S, exit_code, spawning
from benchmarks.interruption_writer import run, write_missing
from tests.servers.s3 import S3Server, missing_programs, start_s3

STORE_KILLED, STORE_HANGS = "object store killed", "object store hangs"
WRITER_KILLED = "writer to an object store killed"
BUCKET = "interruptions"


class StoreKinds:
    """Interrupts a store, or a writer to it; each in a cache of its own. The server starts when it is needed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self._chance, self._context, self._n = folder, random.Random(f"{seed} store"), spawning(), 0
        self.kinds = [] if missing_programs() else [STORE_KILLED, STORE_HANGS, WRITER_KILLED]
        self._server: S3Server | None = None
        self._seconds = 0.0

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.stop()

    def interrupt(self, kind: str) -> Outcome:
        """One interruption, the run after it, and the comparison."""
        server = self._server or self._started()
        self._n += 1
        cache = f"s3://{BUCKET}/{self._n:03d}"
        delay_s = self._chance.uniform(0, self._seconds)
        process = self._start(cache)
        time.sleep(delay_s)
        if kind == WRITER_KILLED:
            process.kill()
            code = exit_code(process)
            outcome = Outcome(kind=kind, what=f"after {delay_s:.2f} s", interrupted=code == -signal.SIGKILL)
        else:
            away_s = self._away(server, kind, process)
            at_work = process.exitcode is None
            code = exit_code(process)
            ended = "the writer went on" if code == 0 else f"the writer ended with {code}"
            what = f"after {delay_s:.2f} s, for {away_s:.1f} s; {ended}"
            outcome = Outcome(kind=kind, what=what, interrupted=at_work or code != 0)
        if (code := exit_code(self._start(cache))) != 0:
            outcome.problems.append(f"the run after the interruption ended with {code}")
        found, outcome.garbage_groups = differences(cache, self.folder / "undisturbed")
        outcome.problems += found
        return outcome

    def _away(self, server: S3Server, kind: str, process: Any) -> float:
        """The store is away for a moment; every other time for as long as it takes the writer to give up."""
        begun = time.monotonic()
        (server.kill_gateway if kind == STORE_KILLED else server.pause_gateway)()
        process.join(PATIENCE_S if self._n % 2 else self._chance.uniform(0, 2))
        away_s = time.monotonic() - begun
        (server.start_gateway if kind == STORE_KILLED else server.resume_gateway)()
        return away_s

    def _started(self) -> S3Server:
        server = self._server = start_s3(self.folder / "server")
        server.make_bucket(BUCKET)
        os.environ.update(server.environment())
        write_missing(self.folder / "undisturbed")
        begun = time.monotonic()
        exit_code(self._start(f"s3://{BUCKET}/timed"))
        self._seconds = time.monotonic() - begun
        return server

    def _start(self, cache: str) -> Any:
        assert self._server is not None
        process = self._context.Process(target=run, args=(cache, None, self._server.environment()))
        process.start()
        return process
