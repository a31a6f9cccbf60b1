"""Servers that tests of several folders share."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.ray_head import ray_head
from tests.servers.s3 import S3Server, missing_programs, start_s3

BUCKET = "dflash-tests"

# Ray's workers run at nice 15: on a machine that does anything else, tests would wait for them for minutes.
os.environ.setdefault("RAY_worker_niceness", "0")


LONG_FIRST = ("test_pipeline", "test_rolling", "killed", "test_security", "test_worker_resources", "test_cache_cli",
              "test_engines", "test_runner", "test_resume", "test_interruptions")  # fmt: skip
"""Groups of tests that take long, so that no process of `make test` is left alone with one at the end."""
MadeOnce = Callable[[str, Callable[[Path], None]], Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file go to one process of pytest-xdist, unless they name another group."""

    def place(item: pytest.Item) -> int:
        (group,) = (mark.args[0] for mark in item.iter_markers("xdist_group"))
        return LONG_FIRST.index(group) if group in LONG_FIRST else len(LONG_FIRST)

    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=place)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Folders by name; the first process of the session that asks for one makes it, the others wait."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = root / name, root / f"{name}.done"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server (Ceph RGW) with one bucket, for the whole session."""
    if missing := missing_programs():
        pytest.skip(f"no {', '.join(missing)} on this machine: apt-get install radosgw ceph-mon ceph-osd")
    server = start_s3(tmp_path_factory.mktemp("s3"))
    try:
        server.make_bucket(BUCKET)
        yield server
    finally:
        server.stop()


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place on the real S3 server; the environment holds what a client needs to reach it."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_SKIP_SIGNATURE"):
        monkeypatch.delenv(name, raising=False)
    return f"s3://{BUCKET}/{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Where a Ray waits for the command lines of tests (set RAY_ADDRESS to it), for the whole session."""
    with ray_head() as address:
        yield address
