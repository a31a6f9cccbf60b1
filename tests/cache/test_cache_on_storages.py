"""The whole protocol of the cache on each storage: write, read, verify, resume, race, evict, go away, be damaged."""

from __future__ import annotations

import multiprocessing
import secrets
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zarr

from cache_schema import names, object_client
from cache_schema.durable import is_storage_fault, storage_text
from cache_schema.errors import CacheError, ShardCorrupt, ShardNotCommitted
from cache_schema.identity import CacheIdentity
from cache_schema.manifest import create_cache
from cache_schema.marker import evict, read_marker
from cache_schema.plan import ShardPlan
from cache_schema.reader import FeatureCache
from cache_schema.storage import open_storage
from cache_schema.verify import equal_caches, verify_cache
from cache_schema.writer import ShardWriter
from tests.cache.builders import (
    HIDDEN,
    IDENTITY,
    LAYERS,
    LENGTHS,
    WITH_HIDDEN,
    append,
    features,
    make_cache,
    make_plan,
    mask,
    token_ids,
    write_shard,
)
from tests.servers.proxy import Proxy, proxy
from tests.servers.s3 import S3Server

SPAWN = multiprocessing.get_context("spawn")
FIRST = "shard-00000"


@pytest.fixture(params=["folder", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a cache may be made."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    return str(tmp_path / "cache") if request.param == "folder" else f"memory://{secrets.token_hex(6)}/cache"


def in_process(place: str) -> bool:
    return place.startswith("memory:")


def require_whole(place: str, lengths: dict[str, int] = LENGTHS) -> None:
    """Every planned sample reads as it was written, and `verify` finds nothing."""
    cache = FeatureCache.open(place, IDENTITY, require_complete=True)
    assert sorted(cache.sample_ids) == sorted(lengths)
    for sample_id, n in lengths.items():
        sample = cache.read(sample_id)
        np.testing.assert_array_equal(sample.features, features(sample_id, n))
        np.testing.assert_array_equal(sample.input_ids, token_ids(sample_id, n))
        np.testing.assert_array_equal(sample.loss_mask, mask(n))
    report = verify_cache(place)
    assert report.ok, [s.problems for s in report.shards]


def groups(place: str) -> list[str]:
    return list(open_storage(place).folders(names.SHARDS))


def read_samples(place: str, ids: list[str]) -> list[int]:
    """Sums of features, for a process that was spawned."""
    cache = FeatureCache.open(place)
    return [int(cache.read(i).features.astype(np.int64).sum()) for i in ids]


def begin_a_shard(place: str, ready: str) -> None:
    """Write half a shard and wait to be killed."""
    writer = ShardWriter(place, FIRST, IDENTITY, 8192)
    wide = np.ones((500, len(LAYERS), 8192), np.uint16) * np.arange(1, 4, dtype=np.uint16)[:, None]
    writer.append("a", wide, token_ids("a", 500), mask(500))  # three parts
    Path(ready).touch()
    threading.Event().wait()


def test_a_cache_reads_as_it_was_written(place: str) -> None:
    make_cache(place, IDENTITY)
    require_whole(place)
    cache = FeatureCache.open(place)
    for stop in (0, 1, 64, 65, 150, 10_000):
        sample = cache.read("e", stop)
        np.testing.assert_array_equal(sample.features, features("e", LENGTHS["e"])[:stop])
        assert len(sample.input_ids) == LENGTHS["e"]


def test_last_hidden_too(place: str) -> None:
    make_cache(place, WITH_HIDDEN)
    sample = FeatureCache.open(place, WITH_HIDDEN).read("d")
    np.testing.assert_array_equal(sample.last_hidden, features("d", LENGTHS["d"])[:, 0])
    assert verify_cache(place).ok


@pytest.mark.parametrize("compression", ["zstd", "blosc-lz4"])
def test_compressed_chunks_too(place: str, compression: str) -> None:
    plan = create_cache(place, IDENTITY, make_plan())
    for shard in plan.shards():
        with ShardWriter(place, shard, IDENTITY, HIDDEN, compression=compression) as writer:
            for sample_id in plan.samples(shard):
                append(writer, sample_id, plan.n_tokens(sample_id))
            writer.commit()
    require_whole(place)


def test_all_storages_hold_equal_caches(place: str, tmp_path: Path) -> None:
    make_cache(place)
    make_cache(tmp_path / "other")
    assert equal_caches(place, tmp_path / "other") == []
    write_again = tmp_path / "third"
    make_cache(write_again, IDENTITY, LENGTHS | {"e": 199})
    assert equal_caches(place, write_again) != []


def test_resume_is_the_plan_minus_the_commits(place: str) -> None:
    plan = create_cache(place, IDENTITY, make_plan())
    write_shard(place, plan, plan.shards()[1])
    cache = FeatureCache.open(place)
    assert cache.missing_shards() == [s for s in plan.shards() if s != plan.shards()[1]]
    with pytest.raises(ShardNotCommitted):
        FeatureCache.open(place, require_complete=True)
    again = create_cache(place, IDENTITY, make_plan(shard_bytes=1 << 30))
    assert again.shards() == plan.shards()  # the plan that is there counts
    for shard in cache.missing_shards():
        write_shard(place, again, shard)
    require_whole(place)
    cache.refresh()
    assert cache.missing_shards() == []


def test_another_identity_is_refused(place: str) -> None:
    make_cache(place)
    with pytest.raises(CacheError, match="last_hidden"):
        create_cache(place, WITH_HIDDEN, make_plan())


def test_many_who_create_one_cache_agree_on_its_plan(place: str) -> None:
    plans = [make_plan(shard_bytes=n * len(LAYERS) * HIDDEN * 2) for n in (70, 150, 300, 10_000)]
    start = threading.Barrier(len(plans))

    def create(plan: ShardPlan) -> ShardPlan:
        start.wait()
        return create_cache(place, IDENTITY, plan)

    with ThreadPoolExecutor(len(plans)) as pool:
        found = list(pool.map(create, plans))
    assert len({tuple(p.shards()) for p in found}) == 1


def test_of_several_writers_of_one_shard_one_wins(place: str) -> None:
    plan = create_cache(place, IDENTITY, make_plan())
    start = threading.Barrier(4)

    def write(attempt: int) -> str:
        with ShardWriter(place, FIRST, IDENTITY, HIDDEN, attempt=attempt) as writer:
            for sample_id in plan.samples(FIRST):
                append(writer, sample_id, plan.n_tokens(sample_id))
            start.wait()
            return writer.commit().group

    with ThreadPoolExecutor(4) as pool:
        committed = set(pool.map(write, range(1, 5)))
    assert committed == {read_marker(open_storage(place), FIRST).group}
    assert groups(place) == sorted(committed)  # the others removed what they wrote
    for shard in plan.shards()[1:]:
        write_shard(place, plan, shard)
    require_whole(place)


def test_an_aborted_shard_leaves_nothing(place: str) -> None:
    plan = create_cache(place, IDENTITY, make_plan())
    before = list(open_storage(place).list())
    with ShardWriter(place, FIRST, IDENTITY, HIDDEN) as writer:
        append(writer, plan.samples(FIRST)[0], plan.n_tokens(plan.samples(FIRST)[0]))
    assert list(open_storage(place).list()) == before


def test_an_evicted_shard_can_be_made_again(place: str) -> None:
    plan = make_cache(place)
    storage = open_storage(place)
    cache = FeatureCache.open(place)
    before = read_marker(storage, FIRST)
    assert evict(storage, FIRST) == before.bytes
    assert len(groups(place)) == plan.n_shards - 1
    assert storage.exists(names.evicted_key(FIRST))
    cache.refresh()
    assert cache.missing_shards() == [FIRST]
    with pytest.raises(ShardNotCommitted):
        cache.read(plan.samples(FIRST)[0])
    write_shard(place, plan, FIRST)
    cache.refresh()
    np.testing.assert_array_equal(cache.read("a").features, features("a", LENGTHS["a"]))
    require_whole(place)
    assert read_marker(storage, FIRST).content_sha256 == before.content_sha256


@pytest.mark.parametrize("array", ["features", "input_ids", "loss_mask"])
def test_damage_is_found_and_never_read(place: str, array: str) -> None:
    make_cache(place)
    storage = open_storage(place)
    key = f"{names.group_key(read_marker(storage, FIRST).group)}/{array}/c"
    key = next(k for k, _ in storage.list(key))
    raw = bytearray(storage.read(key))
    for damage in ("flipped", "short", "missing"):
        if damage == "missing":
            storage.delete(key)
        else:
            storage.replace(key, bytes([raw[0] ^ 1]) + raw[1:] if damage == "flipped" else bytes(raw[:-1]))
        with pytest.raises(ShardCorrupt, match=FIRST):
            FeatureCache.open(place).read("a")
        assert [s.shard for s in verify_cache(place).shards if s.status == "corrupt"] == [FIRST]
    storage.replace(key, bytes(raw))
    require_whole(place)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_read_it(place: str) -> None:
    make_cache(place)
    cache = FeatureCache.open(place)
    ids = list(LENGTHS)
    expected = [int(features(i, n).astype(np.int64).sum()) for i, n in LENGTHS.items()]
    assert int(cache.read("a").features.astype(np.int64).sum()) == expected[0]  # open in this process
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        sender.send([int(cache.read(i).features.astype(np.int64).sum()) for i in ids])

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        assert receiver.poll(30), "the forked child hangs"
        assert receiver.recv() == expected
    finally:
        process.kill()
        process.join()
    if not in_process(place):
        with ProcessPoolExecutor(1, mp_context=SPAWN) as pool:
            assert pool.submit(read_samples, place, ids).result(60) == expected


def test_zarr_reads_a_shard_without_our_code(place: str) -> None:
    make_cache(place)
    storage = open_storage(place)
    marker = read_marker(storage, FIRST)
    group = zarr.open_group(storage.zarr_store(names.group_key(marker.group)), mode="r")
    cache = FeatureCache.open(place)
    found = np.concatenate([cache.read(i).features for i in cache.plan.samples(FIRST)])
    np.testing.assert_array_equal(group["features"][:], found)
    np.testing.assert_array_equal(group["offsets"][:], np.cumsum([0, *marker.lengths]))


# --- only where a server is


@pytest.fixture
def between(s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the real server, which `s3_url` now leads to."""
    with proxy(s3_server.port) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.mark.parametrize("identity", [IDENTITY, WITH_HIDDEN])
def test_a_sample_is_one_ranged_get_per_array(between: Proxy, s3_url: str, identity: CacheIdentity) -> None:
    plan = make_cache(s3_url, identity)
    between.requests.clear()
    cache = FeatureCache.open(s3_url)
    opening = len(between.requests)
    assert opening <= 5 + plan.n_shards  # identity, plan and its checksum, a list, and each marker
    assert between.count("GET", "/shards/") == between.count("HEAD") == 0
    ids = list(LENGTHS)
    for sample_id in ids:
        cache.read(sample_id)  # opens the shards
    between.requests.clear()
    for sample_id in ids * 2:
        cache.read(sample_id)
    per_sample = [r.path.split("/c/")[0].rsplit("/", 1)[1] for r in between.requests]
    arrays = ["features", "last_hidden"] if identity.last_hidden else ["features"]
    assert per_sample == arrays * len(ids) * 2
    assert all(r.method == "GET" and r.range for r in between.requests)


def test_opening_a_shard_is_a_head_per_array_and_its_tokens(between: Proxy, s3_url: str) -> None:
    make_cache(s3_url)
    cache = FeatureCache.open(s3_url)
    between.requests.clear()
    cache.read("a")
    assert between.count("HEAD") == 3
    assert between.count("GET") == 3
    assert len(between.requests) == 6


@contextmanager
def hasty() -> Iterator[None]:
    """Give a store that is away seconds instead of a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_client, "RETRIES", 1)
        patch.setattr(object_client, "RETRY_S", 1.0)
        patch.setattr(object_client, "STALL_S", 1.0)
        yield


@pytest.mark.parametrize("when", ["append", "commit"])
def test_a_store_unplugged_while_a_shard_is_written(s3_server: S3Server, s3_url: str, when: str) -> None:
    lengths = dict.fromkeys("abcdefgh", 500)  # 3 MiB of features each
    rows = np.random.default_rng(0).integers(1, 0x7F00, (500, len(LAYERS), 1024)).astype(np.uint16)
    plan = create_cache(s3_url, IDENTITY, make_plan(lengths, shard_bytes=1 << 30))
    assert plan.n_shards == 1

    def write(unplug: str | None) -> None:
        with ShardWriter(s3_url, FIRST, IDENTITY, 1024) as writer:
            for sample_id, n in lengths.items():
                if sample_id == "d" and unplug == "append":
                    s3_server.kill_gateway()
                writer.append(sample_id, rows, token_ids(sample_id, n), mask(n))
            if unplug == "commit":
                s3_server.kill_gateway()
            writer.commit()

    try:
        with hasty(), pytest.raises(OSError, match="cannot be reached") as caught:
            write(when)
        assert is_storage_fault(caught.value)
        assert s3_url in storage_text(caught.value)
    finally:
        s3_server.start_gateway()
    assert FeatureCache.open(s3_url).missing_shards() == [FIRST]
    write(None)
    assert verify_cache(s3_url).ok
    np.testing.assert_array_equal(FeatureCache.open(s3_url).read("h").features, rows)


def test_a_killed_writer_leaves_a_cache_that_goes_on(s3_url: str, tmp_path: Path) -> None:
    plan = create_cache(s3_url, IDENTITY, make_plan({"a": 500, "b": 500}, shard_bytes=1 << 30))
    process = SPAWN.Process(target=begin_a_shard, args=(s3_url, str(tmp_path / "ready")))
    process.start()
    while not (tmp_path / "ready").exists():
        assert process.is_alive()
        process.join(0.02)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    process.close()
    assert FeatureCache.open(s3_url).missing_shards() == [FIRST]
    write_shard(s3_url, plan, FIRST)
    require_whole(s3_url, {"a": 500, "b": 500})


def test_a_server_without_conditional_puts_gets_no_cache(between: Proxy, s3_url: str) -> None:
    between.forget = {"if-none-match"}
    with pytest.raises(CacheError, match="If-None-Match"):
        create_cache(s3_url, IDENTITY, make_plan())
    assert list(open_storage(s3_url).list()) == []
