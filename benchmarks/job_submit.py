"""Every stage by `ray job submit` on a cluster of separate processes: `ray start --head` and two `ray start --address`.

    python -m benchmarks.job_submit [--run FOLDER]

The cluster asks for a token (RAY_AUTH_MODE=token), has ports and temporary folders of its own, and ends with the
command. Printed are the commands, their exit codes and times. Where Ceph's gateway is installed, the run folder is on
that S3 server. Then all stages are submitted once more: each must say that it is done. (The nodes listen at the
machine's own address: Ray, 2.60, lets no node join a head at 127.0.0.1.)
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.chaos_home import REPO, make_home
from pipeline.recipe import STAGES
from tests.servers.s3 import missing_programs, start_s3

START_S, JOB_S = 180.0, 1200.0
BUCKET = "submitted"
RAY = str(Path(sys.executable).with_name("ray"))


class Cluster:
    """A head and workers as processes of their own.

    Attributes:
        address: of the head, host:port.
        dashboard: where jobs are submitted.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self._processes: list[subprocess.Popen[bytes]] = []
        host, (port, dashboard) = socket.gethostbyname(socket.gethostname()), _free_ports(2)
        self.address, self.dashboard = f"{host}:{port}", f"http://127.0.0.1:{dashboard}"
        self._start("head", "--head", f"--port={port}", "--num-cpus=1", f"--node-ip-address={host}",
                    "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}")  # fmt: skip
        _await_port("127.0.0.1", dashboard, self._processes[0])

    def add(self) -> None:
        """One worker more."""
        self._start(f"worker-{len(self._processes)}", f"--address={self.address}", "--num-cpus=2")

    def _start(self, name: str, *arguments: str) -> None:
        command = [RAY, "start", "--block", "--disable-usage-stats", "--object-store-memory=100000000", *arguments]
        command += [f"--dashboard-agent-listen-port={_free_ports(1)[0]}"]
        if name == "head":
            command += [f"--temp-dir={self.folder / 'ray'}"]
        print(f"$ {shlex.join(command)}", flush=True)
        with (self.folder / f"{name}.txt").open("wb") as output:
            self._processes.append(
                subprocess.Popen(command, cwd=REPO, stdout=output, stderr=output, env=self.environment)
            )

    def submit(self, stage: str, recipe: Path, settings: list[str]) -> tuple[int, float, str]:
        """Exit code, seconds, and what was printed."""
        command = [RAY, "job", "submit", "--address", self.dashboard, "--working-dir", ".", "--"]
        command += ["python", "-m", f"jobs.{stage}", "--recipe", str(recipe)]
        command += [part for setting in settings for part in ("--set", setting)]
        print(f"$ {shlex.join(command)}", flush=True)
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=REPO, env=self.environment, capture_output=True, text=True, timeout=JOB_S, check=False
        )
        return done.returncode, time.monotonic() - began, done.stdout + done.stderr

    def close(self) -> None:
        """End all that was started, workers first."""
        for process in reversed(self._processes):
            own: list[psutil.Process] = []
            with suppress(psutil.Error):
                own = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            for one in own:
                with suppress(psutil.Error):
                    one.kill()
            process.kill()
            process.wait()


def _free_ports(n: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _await_port(host: str, port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=2).close()
            return
        time.sleep(0.2)
    raise SystemExit(f"the head did not come up at {host}:{port} (exit {process.poll()})")


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A head and two workers that ask for a token, and a store that they know."""
    token = folder / "token"
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(secrets.token_hex(32))
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0",
                    "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # fmt: skip
    with ExitStack() as stack:
        if not missing_programs():
            server = start_s3(folder / "server")
            stack.callback(server.stop)
            server.make_bucket(BUCKET)
            environment |= server.environment()
            os.environ.update(server.environment())
        started = Cluster(folder, environment)
        stack.callback(started.close)
        for _ in range(2):
            started.add()
        yield started


def submit_all(folder: Path, run: str | None) -> bool:
    """All stages, twice; True if all is as it should be."""
    recipe, good = make_home(folder / "home"), True
    settings = [f"run={run or (folder / 'run' if missing_programs() else f's3://{BUCKET}/run')}"]
    with cluster(folder) as started:
        for words in ("done in", "already done"):
            for stage in STAGES:
                code, seconds, output = started.submit(stage, recipe, settings)
                said = words in output
                good = good and code == 0 and said
                print(f"  {stage}: exit code {code}, {seconds:.1f} s, {'says' if said else 'DOES NOT SAY'} {words!r}",
                      flush=True)  # fmt: skip
                if code != 0 or not said:
                    print(output[-4000:], flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.job_submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", help="another run folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="submit-"))  # short: the names of Ray's sockets have a limit
    try:
        (folder / "home").mkdir()
        return int(not submit_all(folder, options.run))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
