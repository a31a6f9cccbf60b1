"""Who holds a run, in words and as JSON, and whether that process is still there."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def now_text() -> str:
    """The time, as records give it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that drives a run.

    Attributes:
        pid, host: of the process.
        since: when it took hold.
        job: id of the Ray job that it is part of.
        kernel: which boot of which machine, and which space of process ids, `pid` belongs to; empty if unknown.
        started: clock ticks from that boot to the start of the process: another process may get its pid.
    """

    pid: int
    host: str
    since: str
    job: str | None = None
    kernel: str = ""
    started: int = 0

    @classmethod
    def me(cls) -> Holder:
        """This process."""
        pid = os.getpid()
        return cls(pid, socket.gethostname(), now_text(), _ray_job(), _kernel(), _started(pid) or 0)

    @classmethod
    def of(cls, found: Any) -> Holder | None:
        """From what a lock holds; None if that is something else."""
        try:
            return cls(**{f.name: found[f.name] for f in dataclasses.fields(cls) if f.name in found})
        except TypeError:
            return None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        job = f" (Ray job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}, since {self.since}{job}"

    @property
    def is_gone(self) -> bool:
        """Whether it ran on this machine and does no more; of another machine's processes nothing is known."""
        if not self.kernel or self.kernel != _kernel():
            return False
        return _started(self.pid) != self.started


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return ""


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _ray_job() -> str | None:
    """The submission id of the Ray job that this process is part of; Ray hands it down in the environment."""
    try:
        metadata = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]
        return str(metadata["job_submission_id"])
    except (KeyError, ValueError, TypeError):
        return None
