"""Object stores: what a URL may say, errors in clear words, a store that goes away, and stores that lie."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_schema import object_client, obstore_process
from cache_schema.durable import is_storage_fault, storage_text
from cache_schema.errors import CacheError
from cache_schema.object_storage import ObjectStorage
from cache_schema.soundness import PROBE_BYTES, require_sound
from cache_schema.storage import FolderStorage, ObjectReader, open_storage
from tests.cache.test_storage import in_fork
from tests.conftest import BUCKET
from tests.servers.proxy import Proxy, proxy
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server

MIB = 1 << 20


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a store that is away seconds instead of a minute."""
    monkeypatch.setattr(object_client, "RETRIES", 2)
    monkeypatch.setattr(object_client, "RETRY_S", 2.0)
    monkeypatch.setattr(object_client, "STALL_S", 1.0)


@pytest.fixture
def between(s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the real server, which `s3_url` now leads to."""
    with proxy(s3_server.port) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


# --- URLs and credentials


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("S3://bucket", "s3://bucket"),
        ("gs://bucket/späte runs/1", "gs://bucket/späte runs/1"),
        ("abfss://container@account.dfs.core.windows.net/a", "abfss://container@account.dfs.core.windows.net/a"),
    ],
)
def test_urls(given: str, url: str) -> None:
    storage = open_storage(given)
    assert isinstance(storage, ObjectStorage)
    assert storage.url == url
    assert storage.where("commits/x.json") == f"{url}/commits/x.json"


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAEXAMPLE:hunter2@bucket/cache",
        "s3://hunter2@bucket/cache",
        "s3://user:hunter2/with/slash@bucket/cache",
        "s3://bucket:9000/hunter2",
        "s3://bucket/cache?X-Amz-Signature=hunter2",
        "az://container/cache?sig=hunter2",
        "gs://bucket/cache?hunter2",
        "gs://bucket/cache#hunter2",
        "abfss://user:hunter2@account.dfs.core.windows.net/a",
    ],
)
def test_urls_with_a_secret_are_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(CacheError, match="environment") as caught:
        open_storage(url)
    assert "hunter2" not in str(caught.value)
    assert "AKIAEXAMPLE" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://host/a", "http://host/bucket", "s3://", "s3:///a", "s3://b/../a", "s3://b/a//b"])
def test_urls_that_lead_nowhere_are_refused(url: str) -> None:
    with pytest.raises(CacheError, match="s3://"):
        open_storage(url)


def test_wrong_credentials_are_a_storage_fault(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with pytest.raises(PermissionError) as caught:
        open_storage(s3_url).read("a")
    assert is_storage_fault(caught.value)
    said = storage_text(caught.value)
    assert s3_url in said
    assert "credentials" in said
    assert "SignatureDoesNotMatch" in said
    assert "hunter2" not in said
    assert "hunter2" not in repr(caught.value.__cause__) + repr(caught.value.__context__)


def test_a_bucket_that_is_not_there_is_said(s3_url: str) -> None:
    storage = open_storage("s3://no-such-bucket/cache")
    for call in (lambda: storage.read("a"), lambda: storage.create("a", b""), lambda: list(storage.list())):
        with pytest.raises(OSError, match="bucket does not exist") as caught:
            call()
        assert is_storage_fault(caught.value)


def test_plain_http_has_to_be_allowed(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(OSError, match="AWS_ALLOW_HTTP=true"):
        open_storage(s3_url).read("a")


def test_a_profile_needs_boto3(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
    with pytest.raises(CacheError, match="pip install boto3"):
        open_storage(s3_url).read("a")


def test_a_profile_gives_the_credentials(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    (tmp_path / "credentials").write_text(
        f"[mine]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert open_storage(s3_url).create("a", b"x")


def test_without_obstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_process, "_module", None)
    monkeypatch.setattr(obstore_process, "_library", None)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(CacheError, match=r"dflash\[cloud\]"):
        open_storage("memory://never-made").read("a")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_that_cannot_load_obstore_again_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage("memory://parent")
    storage.create("a", b"x")

    def no_copy(name: str) -> int:
        raise PermissionError(errno.EACCES, "memfd is forbidden here")

    def child() -> str:
        monkeypatch.setattr(os, "memfd_create", no_copy)
        try:
            open_storage("memory://child").read("a")
        except CacheError as error:
            return str(error)
        return ""

    assert "'spawn'" in in_fork(child)


# --- requests


def test_a_range_is_one_request(between: Proxy, s3_url: str) -> None:
    storage = open_storage(s3_url)
    storage.create("a", bytes(range(256)) * 100)
    reader = storage.open("a")
    between.requests.clear()
    reader.read_into(1_000, [bytearray(100), bytearray(5_000), bytearray(1)])
    assert [(r.method, r.range) for r in between.requests] == [("GET", "bytes=1000-6100")]


def test_an_object_of_one_part_is_one_request(between: Proxy, s3_url: str) -> None:
    storage = open_storage(s3_url)
    storage.create("warm", b"")
    between.requests.clear()
    writer = storage.writer("a")
    writer.write(bytes(1 * MIB))
    writer.close()
    assert [r.method for r in between.requests] == ["PUT"]


def test_an_upload_that_is_given_up_leaves_no_parts(s3_server: S3Server, s3_url: str) -> None:
    storage = open_storage(s3_url)
    writer = storage.writer("a")
    writer.write(bytes(30 * MIB))
    prefix = s3_url.rsplit("/", 1)[1]
    assert len(s3_server.pending_uploads(BUCKET, prefix)) > 0
    writer.abort()
    assert s3_server.pending_uploads(BUCKET, prefix) == []


@pytest.mark.usefixtures("hasty")
def test_a_create_whose_answer_is_lost_still_knows_that_it_won(between: Proxy, s3_url: str) -> None:
    storage = open_storage(s3_url)
    between.lose = 1
    assert storage.create("commits/a.json", b"x")
    assert between.lose == 0
    assert not storage.create("commits/a.json", b"x")


# --- a store that goes away


def test_time_alone_says_when_a_store_that_is_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_client, "BACKOFF_S", 0.002)
    monkeypatch.setattr(object_client, "RETRY_S", 1.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and never listens
        settings = {"ENDPOINT_URL": f"http://127.0.0.1:{closed.getsockname()[1]}", "ACCESS_KEY_ID": ACCESS_KEY,
                    "SECRET_ACCESS_KEY": SECRET_KEY, "REGION": "us-east-1", "ALLOW_HTTP": "true"}  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        began = time.monotonic()
        with pytest.raises(OSError, match="cannot be reached"):
            open_storage("s3://bucket/x").read("y")
    assert time.monotonic() - began > 0.7


def fault_within(seconds: float, started: float, error: BaseException | None, url: str) -> None:
    """The error is a storage fault in words that name the URL, and came in time."""
    assert time.monotonic() - started < seconds
    assert isinstance(error, OSError), error
    assert is_storage_fault(error)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  (it crosses from a worker to the runner)
    for said in (storage_text(error), storage_text(again)):
        assert url in said
        assert "cannot be reached" in said
        assert "run the same command again" in said
        assert SECRET_KEY not in said


class Until(threading.Thread):
    """Calls something again and again until it raises."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call
        self.error: BaseException | None = None
        self.n_done = 0

    def run(self) -> None:
        try:
            while True:
                self.call()
                self.n_done += 1
        except BaseException as error:
            self.error = error

    def wait_for(self, n_done: int) -> None:
        deadline = time.monotonic() + 30
        while self.n_done < n_done and self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert self.n_done >= n_done, self.error


@pytest.mark.usefixtures("hasty")
def test_a_server_killed_in_the_middle_of_a_read(s3_server: S3Server, s3_url: str) -> None:
    storage = open_storage(s3_url)
    writer = storage.writer("a")
    writer.write(bytes(64 * MIB))
    writer.close()
    reader = storage.open("a")
    buffer = bytearray(60 * MIB)
    reading = Until(lambda: reader.read_into(1, [buffer]))
    reading.start()
    reading.wait_for(2)
    started = time.monotonic()
    s3_server.kill_gateway()
    try:
        reading.join(30)
        fault_within(15, started, reading.error, s3_url)
    finally:
        s3_server.start_gateway()
    reader.read_into(1, [buffer])  # plugged in again, everything goes on


@pytest.mark.usefixtures("hasty")
def test_a_server_killed_in_the_middle_of_a_write(s3_server: S3Server, s3_url: str) -> None:
    storage = open_storage(s3_url)
    writer = storage.writer("a")
    writing = Until(lambda: writer.write(bytes(4 * MIB)))
    writing.start()
    writing.wait_for(8)
    started = time.monotonic()
    s3_server.kill_gateway()
    try:
        writing.join(30)
        writer.abort()
        fault_within(20, started, writing.error, s3_url)
        with pytest.raises(OSError) as caught:  # noqa: PT011  (what kind, `fault_within` says)
            storage.create("commits/a.json", b"x")
        fault_within(30, started, caught.value, s3_url)
    finally:
        s3_server.start_gateway()
    assert list(storage.list()) == []


@pytest.mark.usefixtures("hasty")
def test_a_server_killed_before_close(s3_server: S3Server, s3_url: str) -> None:
    storage = open_storage(s3_url)
    writers = [storage.writer("small"), storage.writer("large")]
    writers[0].write(b"x")
    writers[1].write(bytes(20 * MIB))
    s3_server.kill_gateway()
    try:
        for writer in writers:
            started = time.monotonic()
            with pytest.raises(OSError) as caught:  # noqa: PT011
                writer.close()
            fault_within(15, started, caught.value, s3_url)
            writer.abort()
    finally:
        s3_server.start_gateway()
    assert list(storage.list()) == []


@pytest.mark.usefixtures("hasty")
def test_a_server_that_hangs(s3_server: S3Server, s3_url: str) -> None:
    storage = open_storage(s3_url)
    storage.create("a", bytes(1000))
    reader = storage.open("a")
    s3_server.pause_gateway()
    try:
        started = time.monotonic()
        with pytest.raises(OSError) as caught:  # noqa: PT011
            reader.read_into(0, [bytearray(10)])
        fault_within(20, started, caught.value, s3_url)
    finally:
        s3_server.resume_gateway()
    assert storage.read("a") == bytes(1000)


# --- stores that lie


class _Lying(ObjectStorage):
    """An honest store in memory, of which each test breaks one promise."""


class _SecondCreateWins(_Lying):
    def create(self, key: str, data: bytes) -> bool:
        self.replace(key, data)
        return True


class _SecondCreateWinsSilently(_Lying):
    def create(self, key: str, data: bytes) -> bool:
        first = not self.exists(key)
        self.replace(key, data)
        return first


class _EveryCreateSucceeds(_Lying):
    def create(self, key: str, data: bytes) -> bool:
        super().create(key, data)
        return True


class _CreateNever(_Lying):
    def create(self, key: str, data: bytes) -> bool:
        return False


class _WholeObject(_Lying):
    def read_range(self, key: str, start: int, n_bytes: int) -> memoryview:
        return super().read_range(key, 0, n_bytes)


class _OffByOneAtTheEnd(_Lying):
    def read_range(self, key: str, start: int, n_bytes: int) -> memoryview:
        return super().read_range(key, start - (start + n_bytes == PROBE_BYTES), n_bytes)


class _Zeros(_Lying):
    def read_range(self, key: str, start: int, n_bytes: int) -> memoryview:
        return memoryview(bytes(n_bytes))


class _WrongSize(_Lying):
    def open(self, key: str) -> ObjectReader:
        reader = super().open(key)
        reader.size += 1
        return reader


class _ListsLate(_Lying):
    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return iter(())


class _NeverDeletes(_Lying):
    def delete(self, key: str) -> None:
        pass


class _ReadsWhatIsGone(_Lying):
    def read(self, key: str) -> bytes:
        return super().read(key) if self.exists(key) else b""


@pytest.mark.parametrize(
    ("kind", "promise", "found"),
    [
        (_SecondCreateWins, "If-None-Match", "succeeded too and replaced the first"),
        (_SecondCreateWinsSilently, "If-None-Match", "no longer what the first wrote"),
        (_EveryCreateSucceeds, "If-None-Match", "a second create succeeded too"),
        (_CreateNever, "If-None-Match", "although nothing was there"),
        (_WholeObject, "GET with Range", "from byte 4095 on"),
        (_OffByOneAtTheEnd, "GET with Range", "1 bytes from byte 19999 on"),
        (_Zeros, "GET with Range", "from byte 0 on"),
        (_WrongSize, "GET with Range", "said to have 20001"),
        (_ListsLate, "listed", "not in the list"),
        (_NeverDeletes, "removed", "still opens"),
        (_ReadsWhatIsGone, "removed", "still is read"),
    ],
)
def test_a_store_that_lies_is_refused(kind: type[_Lying], promise: str, found: str) -> None:
    storage = kind(f"memory://lying-{kind.__name__}/cache")
    with pytest.raises(CacheError) as caught:
        require_sound(storage)
    said = str(caught.value)
    assert storage.url in said
    assert promise in said
    assert found in said
    assert "Use another server" in said


@pytest.mark.parametrize(
    ("lie", "promise", "found"),
    [
        ({"forget": {"if-none-match"}}, "If-None-Match", "replaced the first"),
        ({"forget": {"range"}}, "GET with Range", "non-partial"),
        ({"shift": 1}, "GET with Range", "from byte 0 on"),
        ({"cut": 1}, "GET with Range", "gave 0 of the 1 bytes"),
    ],
)
def test_a_server_that_lies_is_refused(
    between: Proxy, s3_url: str, lie: dict[str, Any], promise: str, found: str
) -> None:
    for name, value in lie.items():
        setattr(between, name, value)
    with pytest.raises(CacheError) as caught:
        require_sound(open_storage(s3_url))
    assert promise in str(caught.value)
    assert found in str(caught.value)
    assert s3_url in str(caught.value)
    assert list(open_storage(s3_url).list()) == []


def test_honest_stores_are_sound_and_left_as_they_were(s3_url: str, tmp_path: Path) -> None:
    for storage in (open_storage(s3_url), open_storage("memory://honest"), FolderStorage(tmp_path)):
        require_sound(storage)
        assert list(storage.list()) == []


@pytest.mark.usefixtures("hasty")
def test_a_store_that_is_away_is_no_liar(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(OSError, match="cannot be reached") as caught:
        require_sound(open_storage(s3_url))
    assert caught.value.errno == errno.EHOSTUNREACH
