"""Servers that tests of several folders share."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.servers.ray_head import ray_head
from tests.servers.s3 import S3Server, missing_programs, start_s3

BUCKET = "dflash-tests"

# Ray's workers run at nice 15: on a machine that does anything else, tests would wait for them for minutes.
os.environ.setdefault("RAY_worker_niceness", "0")


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
