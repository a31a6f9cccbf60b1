"""One driver of a run at a time: a lock in a folder, leases in an object store."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache_schema.storage import Storage, open_storage
from pipeline import holder, lock
from pipeline.errors import RunInUse
from pipeline.folder import RunFolder
from pipeline.holder import Holder


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    return tmp_path / "run" if request.param == "folder" else f"memory://{secrets.token_hex(6)}/run"


@pytest.fixture
def store() -> Storage:
    return open_storage(f"memory://{secrets.token_hex(6)}/run")


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def leave_lease(store: Storage, number: int, pid: int, **fields: object) -> None:
    """A lease that a driver has left behind."""
    body = dataclasses.asdict(Holder.me()) | {"pid": pid, "released": False} | fields
    store.replace(f".lock/{number:06d}.json", json.dumps(body).encode())


def test_the_second_driver_is_told_who_holds_the_run(place: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"metadata": {"job_submission_id": "raysubmit_7"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    assert lock.holder_of(open_storage(place)) is None
    with RunFolder(place).locked():
        with pytest.raises(RunInUse, match=rf"process {os.getpid()} on .*since 20.*Ray job raysubmit_7"):
            RunFolder(place).locked().__enter__()
        found = lock.holder_of(open_storage(place))
        assert found is not None
        assert (found.pid, found.job) == (os.getpid(), "raysubmit_7")
    assert lock.holder_of(open_storage(place)) is None
    with RunFolder(place).locked():
        pass


def test_a_driver_of_this_machine_that_was_killed_holds_nothing(store: Storage) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = holder._started(process.pid)
    leave_lease(store, 3, process.pid, started=started)
    with pytest.raises(RunInUse):
        RunFolder(store.url).locked().__enter__()
    process.kill()
    process.wait()
    with RunFolder(store.url).locked():
        assert lock._numbers(store) == [4]


def test_another_process_under_the_number_of_a_killed_driver_holds_nothing(store: Storage) -> None:
    leave_lease(store, 1, os.getpid(), started=Holder.me().started - 100)
    assert lock.holder_of(store) is None


def test_a_driver_elsewhere_holds_the_run_until_its_lease_is_stale(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_lease(store, 1, 1, kernel="another machine", host="node-b")
    with pytest.raises(RunInUse, match="node-b"):
        RunFolder(store.url).locked().__enter__()
    monkeypatch.setattr(lock, "STALE_S", 0.05)
    time.sleep(0.1)
    with RunFolder(store.url).locked():
        assert lock._numbers(store) == [2]
    assert [key for key, _ in store.list(".lock")] == [".lock/000002.json"]


def test_a_fresh_lease_is_never_stale(store: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "REFRESH_S", 0.02)
    with RunFolder(store.url).locked():
        before = store.read(".lock/000001.json")
        wait_for(lambda: store.read(".lock/000001.json") != before)


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["at a terminal", "started with &"])
def start(request: pytest.FixtureRequest) -> Iterator[None]:
    """What SIGINT does, by how the driver was started."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("start")
def test_a_driver_that_was_taken_over_stops(store: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "REFRESH_S", 0.05)
    folder = RunFolder(store.url)
    began = time.monotonic()

    def drive() -> None:
        with folder.locked():
            leave_lease(store, 2, 1, kernel="another machine", host="node-b")
            time.sleep(20)

    with pytest.raises(RunInUse, match=r"taken over by process 1 on node-b"):
        drive()
    assert time.monotonic() - began < 15
    left = lock.holder_of(store)
    assert left is not None
    assert left.host == "node-b", "the one that has lost leaves the lease alone"


def test_a_driver_that_was_taken_over_finishes_nothing(store: Storage) -> None:
    folder = RunFolder(store.url)

    def drive() -> None:
        with folder.locked():
            leave_lease(store, 2, 1, kernel="another machine", host="node-b")
            folder.finish("generate", "f", 1.0, {})

    with pytest.raises(RunInUse):
        drive()
    assert folder.done("generate") is None


def test_one_of_many_takes_a_lease_that_was_left(store: Storage) -> None:
    from concurrent.futures import ThreadPoolExecutor

    leave_lease(store, 1, os.getpid(), started=0)

    def take(_: int) -> int | None:
        try:
            return lock._take(store).number
        except RunInUse:
            return None

    with ThreadPoolExecutor(8) as pool:
        taken = [number for number in pool.map(take, range(8)) if number is not None]
    assert taken == [2]
