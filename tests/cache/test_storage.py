"""One suite that each storage passes: a folder, an object store in memory, a real S3 server."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import resource
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from cache_schema.errors import CacheError
from cache_schema.storage import FolderStorage, Storage, open_storage

KINDS = ("folder", "memory", "s3")
SPAWN = multiprocessing.get_context("spawn")
MIB = 1 << 20
BIG = np.random.default_rng(0).bytes(20 * MIB + 17)


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return open_storage(request.getfixturevalue("s3_url"))
    return open_storage(tmp_path / "cache" if request.param == "folder" else f"memory://{secrets.token_hex(6)}/a/cache")


def put(storage: Storage, key: str, data: bytes) -> None:
    writer = storage.writer(key)
    writer.write(data)
    writer.close()


def read_all(storage: Storage, key: str) -> bytes:
    reader = storage.open(key)
    data = bytearray(reader.size)
    reader.read_into(0, [data])
    return bytes(data)


def race(url: str, keys: list[str], name: str) -> list[str]:
    """What one process of several does: 16 threads that all try to create each key. Returns what it created."""
    storage = open_storage(url)
    start = threading.Barrier(16)

    def run(i: int) -> list[str]:
        start.wait()
        return [f"{k} {name}{i}" for k in keys if storage.create(k, f"{k} {name}{i}".encode())]

    with ThreadPoolExecutor(16) as pool:
        return [won for found in pool.map(run, range(16)) for won in found]


def in_fork(call: Callable[[], Any]) -> Any:
    """The result of a call in a forked child, which gets half a minute."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(call()))
    child.start()
    try:
        assert receiver.poll(30), "the forked child hangs"
        return receiver.recv()
    finally:
        child.kill()
        child.join()
        child.close()


class TestStorage:
    """The contract of `Storage`."""

    def test_create_happens_once(self, storage: Storage) -> None:
        assert storage.create("commits/a.json", b"first")
        assert not storage.create("commits/a.json", b"second")
        assert not storage.create("commits/a.json", b"first")  # the same content is no excuse
        assert storage.read("commits/a.json") == b"first"

    def test_of_32_threads_exactly_one_creates(self, storage: Storage) -> None:
        for n in range(5):
            start = threading.Barrier(32)

            def run(i: int, key: str = f"race/{n}", start: threading.Barrier = start) -> bool:
                start.wait()
                return storage.create(key, b"%d" % i)

            with ThreadPoolExecutor(32) as pool:
                won = [i for i, first in enumerate(pool.map(run, range(32))) if first]
            assert [storage.read(f"race/{n}")] == [b"%d" % i for i in won]

    def test_of_two_processes_exactly_one_creates(self, storage: Storage) -> None:
        if storage.url.startswith("memory:"):
            pytest.skip("a store in memory belongs to one process")
        keys = [f"race/{n}" for n in range(20)]
        with ProcessPoolExecutor(2, mp_context=SPAWN) as pool:
            parts = pool.map(race, [storage.url] * 2, [keys] * 2, "ab")
            won = sorted(w for part in parts for w in part)
        assert won == sorted(storage.read(k).decode() for k in keys)

    def test_replace(self, storage: Storage) -> None:
        for data in (b"one", b"", b"three" * 1000):
            storage.replace("x/y", data)
            assert storage.read("x/y") == data
            assert list(storage.list("x")) == [("x/y", len(data))]

    @pytest.mark.parametrize("n_bytes", [0, 1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, len(BIG)])
    def test_writer_streams_an_object(self, storage: Storage, n_bytes: int) -> None:
        writer = storage.writer("g/features/c/0")
        sizes = random.Random(n_bytes)
        at = 0
        while at < n_bytes:
            step = min(n_bytes - at, sizes.choice([1, 1000, 65_536, 3 * MIB]))
            buffer = bytearray(BIG[at : at + step])
            writer.write(buffer)
            buffer[:] = bytes(step)  # the buffer is the caller's again
            at += step
        writer.close()
        writer.abort()  # nothing after close
        assert list(storage.list()) == [("g/features/c/0", n_bytes)]
        assert read_all(storage, "g/features/c/0") == BIG[:n_bytes]
        assert storage.read("g/features/c/0") == BIG[:n_bytes]

    def test_writer_takes_arrays(self, storage: Storage) -> None:
        array = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
        writer = storage.writer("a")
        writer.write(array)
        writer.write(memoryview(b"end"))
        writer.close()
        assert storage.read("a") == array.tobytes() + b"end"

    def test_nothing_is_there_before_close(self, storage: Storage) -> None:
        if isinstance(storage, FolderStorage):
            pytest.skip("in a folder it is there, unnamed by any marker")
        writer = storage.writer("g/a")
        writer.write(BIG)
        assert not storage.exists("g/a")
        assert list(storage.list()) == []
        writer.close()
        assert storage.exists("g/a")

    @pytest.mark.parametrize("n_bytes", [0, 1, len(BIG)])
    def test_abort_leaves_nothing(self, storage: Storage, n_bytes: int) -> None:
        writer = storage.writer("g/a")
        writer.write(BIG[:n_bytes])
        writer.abort()
        writer.abort()
        assert not storage.exists("g/a")
        assert list(storage.list()) == []

    def test_ranges(self, storage: Storage) -> None:
        put(storage, "a", BIG)
        reader = storage.open("a")
        assert reader.size == len(BIG)
        places = [0, 1, 4095, 8 * MIB - 1, 8 * MIB, 12_345_677, len(BIG) - 200_000]
        for start in places:
            buffers = [bytearray(n) for n in (1, 0, 7, 100_000, 3, 4096)]
            reader.read_into(start, buffers)
            found = b"".join(buffers)
            assert found == BIG[start : start + len(found)]
        last = bytearray(1)
        reader.read_into(len(BIG) - 1, [last])
        assert last == BIG[-1:]
        reader.read_into(5, [])
        reader.read_into(len(BIG), [bytearray()])

    def test_more_buffers_than_one_call_takes(self, storage: Storage) -> None:
        put(storage, "a", BIG[:10_000])
        buffers = [np.zeros(3, np.uint8) for _ in range(2_500)]
        storage.open("a").read_into(11, buffers)
        assert b"".join(b.tobytes() for b in buffers) == BIG[11:7_511]

    def test_range_into_an_array(self, storage: Storage) -> None:
        values = np.arange(60, dtype=np.float32).reshape(5, 3, 4)
        put(storage, "a", b"head" + values.tobytes())
        found = np.zeros_like(values)
        storage.open("a").read_into(4, [found[:2], found[2:]])
        np.testing.assert_array_equal(found, values)

    @pytest.mark.parametrize(("start", "n_bytes"), [(0, 101), (99, 2), (100, 1), (5_000, 1)])
    def test_a_range_past_the_end_raises(self, storage: Storage, start: int, n_bytes: int) -> None:
        put(storage, "a", BIG[:100])
        with pytest.raises(EOFError, match="a"):
            storage.open("a").read_into(start, [bytearray(n_bytes)])

    def test_a_reader_serves_threads(self, storage: Storage) -> None:
        put(storage, "a", BIG)
        reader = storage.open("a")

        def run(seed: int) -> bool:
            places = random.Random(seed)
            ok = True
            for _ in range(20):
                start, first, second = places.randrange(19 * MIB), bytearray(1000), bytearray(places.randrange(5000))
                reader.read_into(start, [first, second])
                ok &= BIG[start : start + 1000 + len(second)] == first + second
            return ok

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(run, range(8)))

    def test_what_is_not_there_raises(self, storage: Storage) -> None:
        put(storage, "g/b", b"x")
        for key in ("a", "g/a", "g/b/c", "g"):
            with pytest.raises((FileNotFoundError, IsADirectoryError)):
                storage.read(key)
        for key in ("a", "g/a", "g/b/c"):
            with pytest.raises(FileNotFoundError):
                storage.open(key)
            assert not storage.exists(key)
        with pytest.raises(FileNotFoundError) as caught:
            storage.read("g/a")
        assert storage.where("g/a") in str(caught.value)

    def test_list(self, storage: Storage) -> None:
        keys = ["b", "g/b", "g/a/c/0", "g-x/1", "g0/1", "g/späte ✓%41+"]
        for i, key in enumerate(keys):
            put(storage, key, bytes(i))
        sizes = {k: i for i, k in enumerate(keys)}
        assert list(storage.list()) == sorted(sizes.items())
        assert list(storage.list("g")) == sorted((k, n) for k, n in sizes.items() if k.startswith("g/"))
        assert list(storage.list("nothing/here")) == []
        assert list(storage.list("b")) == []  # an object, no folder

    def test_a_list_of_several_pages(self, storage: Storage) -> None:
        keys = [f"commits/shard-{i:05}.json" for i in range(1_050)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda k: storage.create(k, b"{}"), keys))
        assert [k for k, _ in storage.list("commits")] == keys
        storage.delete_tree("commits")
        assert list(storage.list()) == []

    def test_folders(self, storage: Storage) -> None:
        for key in ("shards/s-2.ab/x", "shards/s-1.cd/y/z", "shards/file", "shards-not/a/b", "top"):
            put(storage, key, b"x")
        assert storage.folders("shards") == ["s-1.cd", "s-2.ab"]
        assert storage.folders("") == ["shards", "shards-not"]
        assert storage.folders("nothing") == []

    def test_delete(self, storage: Storage) -> None:
        put(storage, "a/b", b"x")
        put(storage, "a/c", b"y")
        storage.delete("a/b")
        storage.delete("a/b")
        storage.delete("never/there")
        assert list(storage.list()) == [("a/c", 1)]

    def test_delete_tree(self, storage: Storage) -> None:
        for key in ("a/b/1", "a/b/c/2", "a/bc", "a-b"):
            put(storage, key, b"x")
        storage.delete_tree("a/b")
        assert [k for k, _ in storage.list()] == ["a-b", "a/bc"]
        storage.delete_tree("a/b")
        storage.delete_tree("nothing")

    def test_age(self, storage: Storage) -> None:
        assert storage.age_s("a") == float("inf")
        put(storage, "a/b", b"x")
        assert -5 < storage.age_s("a") < 60
        assert -5 < storage.age_s("") < 60

    def test_sync_takes_what_was_written(self, storage: Storage) -> None:
        put(storage, "shards/g/features/c/0", b"x")
        storage.sync("shards/g")
        assert storage.read("shards/g/features/c/0") == b"x"

    @pytest.mark.parametrize("key", ["/a", "../a", "a/../../b", ".."])
    def test_keys_stay_below_the_root(self, storage: Storage, key: str) -> None:
        calls: list[Callable[[], Any]] = [
            lambda: storage.read(key),
            lambda: storage.open(key),
            lambda: list(storage.list(key)),
            lambda: storage.folders(key),
            lambda: storage.create(key, b""),
            lambda: storage.replace(key, b""),
            lambda: put(storage, key, b""),
            lambda: storage.delete(key),
            lambda: storage.delete_tree(key),
        ]
        for call in calls:
            with pytest.raises(CacheError, match="below the root"):
                call()

    def test_it_can_be_sent_to_another_process(self, storage: Storage) -> None:
        put(storage, "a", b"in the other process")
        again = pickle.loads(pickle.dumps(storage))  # noqa: S301
        assert again.url == storage.url
        assert again.read("a") == b"in the other process"
        if not storage.url.startswith("memory:"):
            with ProcessPoolExecutor(1, mp_context=SPAWN) as pool:
                assert pool.submit(read_all, storage, "a").result(60) == b"in the other process"

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_it_serves_a_forked_process(self, storage: Storage) -> None:
        put(storage, "a", BIG[:1000])
        reader = storage.open("a")
        assert storage.read("a") == BIG[:1000]  # the parent has used it: its threads are not in the child

        def child() -> Any:
            data = bytearray(10)
            reader.read_into(90, [data])
            return storage.read("a"), bytes(data), in_fork(lambda: storage.read("a"))

        assert in_fork(child) == (BIG[:1000], BIG[90:100], BIG[:1000])
        assert storage.read("a") == BIG[:1000]  # and the parent goes on
        assert storage.create("after", b"x")

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_forked_process_can_write(self, storage: Storage) -> None:
        if storage.url.startswith("memory:"):
            pytest.skip("a store in memory belongs to one process")
        assert storage.create("a", b"parent")
        assert in_fork(lambda: (storage.create("a", b"child"), storage.create("b", b"child"))) == (False, True)
        assert in_fork(lambda: put(storage, "c", BIG)) is None
        assert read_all(storage, "c") == BIG

    def test_zarr_reads_through_it(self, storage: Storage, tmp_path: Path) -> None:
        values = np.arange(300, dtype=np.int32).reshape(100, 3)
        group = zarr.create_group(tmp_path / "made")
        group.create_array("input_ids", shape=values.shape, dtype="int32", chunks=(8, 3), shards=(104, 3))[:] = values
        for path in sorted(p for p in (tmp_path / "made").rglob("*") if p.is_file()):
            put(storage, f"shards/g 1.ab/{path.relative_to(tmp_path / 'made').as_posix()}", path.read_bytes())
        opened = zarr.open_group(storage.zarr_store("shards/g 1.ab"), mode="r")
        np.testing.assert_array_equal(opened["input_ids"][:], values)
        np.testing.assert_array_equal(opened["input_ids"][37:39], values[37:39])
        with pytest.raises(ValueError, match="read-only"):
            opened["input_ids"][0] = 1

        def child() -> Any:
            return zarr.open_group(storage.zarr_store("shards/g 1.ab"), mode="r")["input_ids"][5].tolist()

        assert in_fork(child) == values[5].tolist()

    def test_where_and_repr(self, storage: Storage) -> None:
        assert storage.where("a/b") == f"{storage.url}/a/b"
        assert storage.where() == storage.url
        assert open_storage(storage.url).url == storage.url
        assert open_storage(storage) is storage
        assert storage.url in repr(storage)


def write_much(url: str, n_bytes: int) -> int:
    """Write an object in a fresh process. Returns by how many bytes the peak of its memory grew."""
    storage = open_storage(url)
    storage.create("warm", b"x")
    block = bytes(MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    writer = storage.writer("big")
    for _ in range(n_bytes // MIB):
        writer.write(block)
    writer.close()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_a_writer_of_objects_needs_little_memory(s3_url: str) -> None:
    with ProcessPoolExecutor(1, mp_context=SPAWN) as pool:
        grown = pool.submit(write_much, s3_url, 300 * MIB).result(120)
    assert grown < 120 * MIB
    assert dict(open_storage(s3_url).list())["big"] == 300 * MIB
    open_storage(s3_url).delete_tree("")
