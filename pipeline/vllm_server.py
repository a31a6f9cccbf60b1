"""A vLLM server on this machine, started for a check and stopped afterwards, in an environment of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from cache_schema.durable import make_dirs
from pipeline.errors import PipelineError

START_S = 900.0
STOP_S = 20.0
_TAIL_LINES = 12
_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    # Binding to cores fails where a container may not choose them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def server_command(
    python: Path, model: str, *, port: int, dtype: str, max_model_len: int, drafter: Path | None = None,
    block_size: int = 0,
) -> list[str]:
    """The command line of a server, with a drafter or without. Source: vLLM 0.32, `config/speculative.py`."""
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", dtype,
        "--max-model-len", str(max_model_len), "--enforce-eager", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    if drafter is not None:
        speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": block_size - 1}
        command += ["--speculative-config", json.dumps(speculative)]
    return command


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(command: Sequence[str], url: str, log: Path, start_s: float = START_S) -> Iterator[str]:
    """Start a server, wait until it answers, and stop it with all its processes at the end.

    Args:
        command: what starts it.
        url: where it answers.
        log: where its output goes.
        start_s: how long it may take.

    Raises:
        PipelineError: it cannot be started, ends, or does not answer in time; with the end of its log.
    """
    log = log.resolve()
    make_dirs(log.parent)
    with log.open("wb") as sink:
        try:
            # `python -m` imports what lies in the working directory before what the environment has.
            server = subprocess.Popen(
                command, cwd=log.parent, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                env=_environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise PipelineError(
                f"{command[0]} cannot be started: {error.strerror or error}. Give the Python of an environment with "
                "vLLM as --vllm-python; `make check-serve` makes one"
            ) from error
    try:
        with _sigterm_interrupts():
            _wait(server, url, log, start_s)
            yield url
    finally:
        _stop(server)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM is as Ctrl-C meanwhile: it would end this process at once, and leave the server behind."""
    if threading.current_thread() is not threading.main_thread():  # no handler can be set there
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _environment() -> dict[str, str]:
    # What points at this environment's packages has no business in the other one.
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return _SETTINGS | kept


def _wait(server: subprocess.Popen[bytes], url: str, log: Path, start_s: float) -> None:
    from stages.engine import EngineError
    from stages.engine_metrics import read_url

    end = time.monotonic() + start_s
    while server.poll() is None:
        try:
            read_url(f"{url}/health", timeout_s=5)
            return
        except EngineError:
            if time.monotonic() > end:
                raise PipelineError(f"the server does not answer after {start_s:.0f} s; {_said(log)}") from None
        time.sleep(0.5)
    raise PipelineError(f"the server ended with exit status {server.returncode} before it answered; {_said(log)}")


def _said(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return f"its log {log} ends with:\n  " + "\n  ".join(line[:300] for line in lines)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Its whole session, since the engine is a child of what was started."""
    for sign, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        try:
            os.killpg(server.pid, sign)
        except ProcessLookupError:
            break
        try:
            server.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
    server.wait()
