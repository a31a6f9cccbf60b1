from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from cache_schema.array_writer import ArrayWriter, WrittenArray
from cache_schema.codec import COMPRESSIONS
from cache_schema.errors import CacheError, FingerprintMismatch, ShardCorrupt, ShardNotCommitted, ShardRefused
from cache_schema.layout import decode_ids
from cache_schema.marker import read_marker
from cache_schema.reader import FeatureCache, create_cache
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
    flip_byte,
    make_cache,
    make_plan,
    mask,
    token_ids,
    write_shard,
)
from tests.cache.test_durable import survey_kills

SHARD = "shard-00000"


def open_writer(cache: Path, lengths: dict[str, int] | None = None, **changes: Any) -> ShardWriter:
    """A writer of the only shard of a new cache."""
    plan = make_plan(lengths or {"a": 70, "b": 3, "c": 9}, shard_bytes=1 << 30)
    create_cache(cache, changes.get("identity", IDENTITY), plan)
    arguments: dict[str, Any] = {"identity": IDENTITY, "hidden_size": HIDDEN}
    return ShardWriter(cache, SHARD, **(arguments | changes))


def groups(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.glob("shards/*"))


def test_zarr_opens_the_group_without_our_code(tmp_path: Path) -> None:
    plan = make_cache(tmp_path / "cache", WITH_HIDDEN)
    for shard in plan.shards():
        (folder,) = (tmp_path / "cache" / "shards").glob(f"{shard}.*")
        group = zarr.open_group(folder, mode="r")
        arrays = dict(group.arrays())
        assert set(arrays) == {"features", "last_hidden", "input_ids", "loss_mask", "offsets", "sample_id"}
        offsets, ids = np.asarray(arrays["offsets"][:]), decode_ids(np.asarray(arrays["sample_id"][:]))
        assert ids == plan.samples(shard)
        for i, sample_id in enumerate(ids):
            rows = slice(int(offsets[i]), int(offsets[i + 1]))
            n = LENGTHS[sample_id]
            np.testing.assert_array_equal(arrays["features"][rows], features(sample_id, n))
            np.testing.assert_array_equal(arrays["last_hidden"][rows], features(sample_id, n)[:, 0])
            np.testing.assert_array_equal(arrays["input_ids"][rows], token_ids(sample_id, n))
            np.testing.assert_array_equal(arrays["loss_mask"][rows], mask(n))
        assert arrays["features"].attrs["dtype"] == arrays["last_hidden"].attrs["dtype"] == "bfloat16"


def test_layout_is_one_object_per_array_in_chunks_of_64_rows(tmp_path: Path) -> None:
    with open_writer(tmp_path, {"a": 130}) as writer:
        append(writer, "a", 130)
        marker = writer.commit()
    folder = tmp_path / "shards" / marker.group
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    axes = {"features": 3, "input_ids": 1, "loss_mask": 1, "offsets": 1, "sample_id": 2}
    objects = [f"{name}/c" + "/0" * n for name, n in axes.items()]
    assert files == sorted(["zarr.json", *(f"{name}/zarr.json" for name in axes), *objects])
    array = zarr.open_array(folder / "features", mode="r")
    assert array.shape == (130, len(LAYERS), HIDDEN)
    assert array.chunks == (64, len(LAYERS), HIDDEN)
    assert array.shards == (192, len(LAYERS), HIDDEN)
    codec = json.loads((folder / "features" / "zarr.json").read_text())["codecs"][0]
    assert codec["name"] == "sharding_indexed"
    assert [c["name"] for c in codec["configuration"]["codecs"]] == ["bytes", "crc32c"]
    assert marker.bytes == sum((folder / f).stat().st_size for f in files)


def test_float16_is_stored_as_itself(tmp_path: Path) -> None:
    identity = dataclasses.replace(IDENTITY, feature_dtype="float16")
    values = np.random.default_rng(0).standard_normal((5, len(LAYERS), HIDDEN)).astype(np.float16)
    with open_writer(tmp_path, {"a": 5}, identity=identity) as writer:
        append(writer, "a", 5, features_TLD=values)
        writer.commit()
    sample = FeatureCache.open(tmp_path).read("a")
    assert sample.features_dtype == "float16"
    assert sample.features.dtype == np.float16
    np.testing.assert_array_equal(sample.features, values)


def test_arrays_of_zeros_are_written_too(tmp_path: Path) -> None:
    """Zarr readers take what is not there for zeros, so what is zero must be there."""
    with open_writer(tmp_path, {"a": 200}) as writer:
        append(writer, "a", 200, input_ids=np.zeros(200, np.int32), loss_mask=np.zeros(200, np.uint8))
        marker = writer.commit()
    assert marker.arrays["loss_mask"].bytes > 200
    assert verify_cache(tmp_path).ok
    (tmp_path / "shards" / marker.group / "loss_mask" / "c" / "0").unlink()
    with pytest.raises(ShardCorrupt, match=r"loss_mask is damaged: its object is missing"):
        FeatureCache.open(tmp_path).read("a")


def test_every_planned_sample_is_stored_or_in_the_ledger(tmp_path: Path) -> None:
    """Case 2."""
    with open_writer(tmp_path) as writer:
        append(writer, "a", 70)
        writer.drop("c", "too_long", "600 tokens, at most 512")
        with pytest.raises(CacheError, match=r"1 of 3 planned samples are neither stored nor dropped, first 'b'"):
            writer.commit()
    assert groups(tmp_path) == []
    with pytest.raises(ShardNotCommitted):
        read_marker(open_storage(tmp_path), SHARD)


def test_non_finite_sample_is_quarantined_and_the_rest_commits(tmp_path: Path) -> None:
    """Case 5."""
    bad = features("b", 3)
    bad[1, 2, 3] = 0x7F80
    with open_writer(tmp_path) as writer:
        assert append(writer, "a", 70)
        assert not append(writer, "b", 3, features_TLD=bad)
        assert append(writer, "c", 9)
        writer.note("c", "shortened", "12 tokens cut to 9")
        marker = writer.commit()
    assert [(row["sample_id"], row["reason"], row["kept"]) for row in marker.ledger] == [
        ("b", "non_finite", False),
        ("c", "shortened", True),
    ]
    cache = FeatureCache.open(tmp_path, require_complete=True)
    assert cache.sample_ids == ["a", "c"]
    np.testing.assert_array_equal(cache.read("c").features, features("c", 9))
    with pytest.raises(CacheError, match=r"'b' is not stored in shard-00000.*non_finite"):
        cache.read("b")
    assert verify_cache(tmp_path).ok


def test_non_finite_last_hidden_is_quarantined(tmp_path: Path) -> None:
    with open_writer(tmp_path, {"a": 4}, identity=WITH_HIDDEN) as writer:
        assert not append(writer, "a", 4, last_hidden=np.full((4, HIDDEN), 0xFFC0, np.uint16))
        assert writer.commit().ledger[0]["detail"].startswith("last_hidden")


def test_shard_without_any_stored_sample_commits(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        for sample_id in "abc":
            writer.drop(sample_id, "non_finite", "all of it")
        marker = writer.commit()
    assert (marker.samples, marker.tokens) == (0, 0)
    cache = FeatureCache.open(tmp_path, require_complete=True)
    assert cache.sample_ids == []
    assert cache.shard(SHARD).array("features").rows == 0
    assert verify_cache(tmp_path).ok


@pytest.mark.parametrize("fault", ["zero", "equal"])
def test_refused_shard_leaves_nothing(tmp_path: Path, fault: str) -> None:
    """Cases 3 and 4, through the writer."""
    states = features("b", 3)
    states[:, 2] = 0 if fault == "zero" else states[:, 0]
    with open_writer(tmp_path) as writer:
        append(writer, "a", 70)
        with pytest.raises(ShardRefused, match=r"shard-00000, sample 'b'.*7.*(zero|identical)"):
            append(writer, "b", 3, features_TLD=states)
    assert groups(tmp_path) == []
    assert not list(tmp_path.glob("commits/*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features_TLD": features("a", 69)}, r"features is uint16\[69, 3, 8\], expected uint16\[70, 3, 8\]"),
        ({"features_TLD": features("a", 70, 2)}, r"features is uint16\[70, 2, 8\]"),
        ({"features_TLD": features("a", 70).view(np.float16)}, r"features is float16.*for bfloat16"),
        ({"input_ids": token_ids("a", 70).astype(np.int64)}, r"input_ids is int64"),
        ({"loss_mask": mask(71)}, r"loss_mask is uint8\[71\]"),
        ({"loss_mask": mask(70) * 3}, r"loss_mask has the value 3"),
        ({"last_hidden": features("a", 70)[:, 0]}, r"given are .*last_hidden"),
        ({"input_ids": np.zeros(0, np.int32)}, r"0 tokens, expected 1 to 512"),
    ],
)
def test_wrong_shapes_and_types_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with open_writer(tmp_path) as writer, pytest.raises(CacheError, match=f"shard-00000, sample 'a': .*{message}"):
        append(writer, "a", 70, **change)


def test_samples_out_of_place_are_refused(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        append(writer, "b", 3)
        with pytest.raises(CacheError, match=r"'a' cannot be appended.*'b', which comes later"):
            append(writer, "a", 70)
        with pytest.raises(CacheError, match=r"'b' cannot be appended: it is stored already"):
            append(writer, "b", 3)
        with pytest.raises(CacheError, match=r"'x' cannot be appended: it is not planned"):
            append(writer, "x", 3)
        writer.drop("c", "why", "so")
        with pytest.raises(CacheError, match=r"'c' cannot be appended: it is dropped"):
            append(writer, "c", 9)
        with pytest.raises(CacheError, match=r"'b' cannot be dropped: it is stored"):
            writer.drop("b", "why", "so")
        with pytest.raises(CacheError, match=r"'x' cannot be noted"):
            writer.note("x", "why", "so")
    with pytest.raises(CacheError, match="committed or aborted"):
        append(writer, "a", 70)


def test_writer_refuses_another_identity_plan_or_place(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no feature cache here"):
        ShardWriter(tmp_path, SHARD, IDENTITY, HIDDEN)
    open_writer(tmp_path).abort()
    with pytest.raises(FingerprintMismatch, match="max_length: found 512, expected 256"):
        ShardWriter(tmp_path, SHARD, dataclasses.replace(IDENTITY, max_length=256), HIDDEN)
    with pytest.raises(CacheError, match="has 3 samples by the plan, but the caller expects 4"):
        ShardWriter(tmp_path, SHARD, IDENTITY, HIDDEN, n_expected=4)
    with pytest.raises(CacheError, match="shard-00001 is not in the plan"):
        ShardWriter(tmp_path, "shard-00001", IDENTITY, HIDDEN)


def test_two_writers_on_one_shard_have_one_winner(tmp_path: Path) -> None:
    plan = create_cache(tmp_path, IDENTITY, make_plan())
    writers = [ShardWriter(tmp_path, SHARD, IDENTITY, HIDDEN, attempt=i) for i in (1, 2)]
    for writer in writers:
        for sample_id in plan.samples(SHARD):
            append(writer, sample_id, LENGTHS[sample_id])
    second, first = writers[1].commit(), writers[0].commit()
    assert first == second
    assert first.attempt == 2
    assert groups(tmp_path) == [first.group]
    assert verify_cache(tmp_path, [SHARD]).ok


def test_equal_runs_give_equal_markers_but_for_group_attempt_and_timings(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_cache(tmp_path / name)
    a, b = (read_marker(open_storage(tmp_path / name), SHARD) for name in ("one", "two"))
    assert a != b
    assert a == dataclasses.replace(b, group=a.group, attempt=a.attempt, timings=a.timings)
    assert equal_caches(tmp_path / "one", tmp_path / "two") == []


def test_caller_may_reuse_its_buffers(tmp_path: Path) -> None:
    buffer = features("a", 70)
    with open_writer(tmp_path, {"a": 70}) as writer:
        append(writer, "a", 70, features_TLD=buffer)
        buffer[:] = 0
        writer.commit()
    np.testing.assert_array_equal(FeatureCache.open(tmp_path).read("a").features, features("a", 70))


def test_full_disk_leaves_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = open_writer(tmp_path)
    for sample_id, n in {"a": 70, "b": 3, "c": 9}.items():
        append(writer, sample_id, n)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        writer.commit()
    assert groups(tmp_path) == []
    assert not list(tmp_path.glob("commits/*"))


@pytest.mark.parametrize("at", [0, -1], ids=["first chunk", "index"])
def test_write_that_reads_back_otherwise_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    close = ArrayWriter.close

    def bad_disk(self: ArrayWriter) -> WrittenArray:
        written = close(self)
        if self.spec.name == "input_ids":
            (path,) = tmp_path.glob("shards/*/input_ids/c/0")
            flip_byte(path, at)
        return written

    monkeypatch.setattr(ArrayWriter, "close", bad_disk)
    with open_writer(tmp_path, {"a": 70}) as writer:
        append(writer, "a", 70)
        with pytest.raises(ShardCorrupt, match="input_ids is damaged"):
            writer.commit()
    assert groups(tmp_path) == []


def test_shard_killed_at_each_step_is_there_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kill -9` at any step of a commit: no half-visible shard, and the next run ends with an equal cache."""
    script = """
from cache_schema.reader import create_cache
from tests.cache.builders import IDENTITY, make_plan, write_shard
def step(folder):
    plan = create_cache(folder, IDENTITY, make_plan({"a": 70, "b": 3}, 1 << 30))
    write_shard(folder, plan, "shard-00000")
survey(sys.argv[1], step)
"""
    folders = survey_kills(tmp_path, script)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # as in the survey
    committed = []
    for folder in folders:
        committed.append((folder / "commits" / f"{SHARD}.json").exists())
        if committed[-1]:
            assert verify_cache(folder).ok
        plan = create_cache(folder, IDENTITY, make_plan({"a": 70, "b": 3}, 1 << 30))
        if not committed[-1]:
            assert FeatureCache.open(folder).missing_shards() == [SHARD]
            write_shard(folder, plan, SHARD)
        assert equal_caches(folder, folders[-1]) == []
    assert committed == sorted(committed)
    assert committed[-1]
    assert committed.count(False) > 15
    assert all(verify_cache(folder).ok for folder in folders[:: len(folders) // 4])


def test_ledger_lies_in_the_plans_order_whenever_its_rows_came(tmp_path: Path) -> None:
    def commit(cache: Path, order: str) -> None:
        with open_writer(cache) as writer:
            append(writer, "a", 70)
            for sample_id in order:
                writer.drop(sample_id, "why", sample_id)
            assert [row["sample_id"] for row in writer.commit().ledger] == ["b", "c"]

    commit(tmp_path / "one", "bc")
    commit(tmp_path / "two", "cb")
    assert equal_caches(tmp_path / "one", tmp_path / "two") == []


QUANTISED = dataclasses.replace(WITH_HIDDEN, feature_dtype="int8", feature_bits=8, feature_group=3)


def quantised(sample_id: str, n_tokens: int) -> dict[str, Any]:
    """Codes that repeat, so that they compress, and scales of three groups (3, 3 and 2 of 8 channels)."""
    rng = np.random.default_rng(list(sample_id.encode()))
    return {
        "features_TLD": rng.integers(-3, 4, (n_tokens, len(LAYERS), HIDDEN)).astype(np.int8),
        "scale_TLG": rng.random((n_tokens, len(LAYERS), 3), np.float32),
        "last_hidden": features(sample_id, n_tokens)[:, 0].copy(),
    }


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_quantised_features_read_as_written(tmp_path: Path, compression: str) -> None:
    """By us, whole and in part, and by zarr-python; whatever the compression."""
    plan = create_cache(tmp_path, QUANTISED, make_plan())
    for shard in plan.shards():
        with ShardWriter(tmp_path, shard, QUANTISED, HIDDEN, compression=compression) as writer:
            for sample_id in plan.samples(shard):
                append(writer, sample_id, LENGTHS[sample_id], **quantised(sample_id, LENGTHS[sample_id]))
            marker = writer.commit()
        group = zarr.open_group(tmp_path / "shards" / marker.group, mode="r")
        stored = [quantised(s, LENGTHS[s]) for s in plan.samples(shard)]
        for name, key in (("features", "features_TLD"), ("feature_scale", "scale_TLG"), ("last_hidden", "last_hidden")):
            np.testing.assert_array_equal(group[name][:], np.concatenate([values[key] for values in stored]))
        plain = marker.tokens * len(LAYERS) * HIDDEN
        assert (marker.arrays["features"].bytes < plain) == (compression != "none")
    cache = FeatureCache.open(tmp_path, QUANTISED, require_complete=True)
    for sample_id, n in LENGTHS.items():
        expected = quantised(sample_id, n)
        for stop in (None, 1, 63, 64, 65, 500):
            sample = cache.read(sample_id, stop)
            np.testing.assert_array_equal(sample.features, expected["features_TLD"][:stop])
            np.testing.assert_array_equal(sample.scale, expected["scale_TLG"][:stop])
            np.testing.assert_array_equal(sample.last_hidden, expected["last_hidden"][:stop])
            assert len(sample.input_ids) == n
    assert verify_cache(tmp_path).ok


def test_scales_that_are_not_finite_or_missing_are_noticed(tmp_path: Path) -> None:
    values = quantised("a", 70)
    with open_writer(tmp_path, {"a": 70}, identity=QUANTISED) as writer:
        with pytest.raises(CacheError, match=r"given are .*expected .*feature_scale"):
            append(writer, "a", 70, **(values | {"scale_TLG": None}))
        values["scale_TLG"][3, 1, 2] = np.inf
        assert not append(writer, "a", 70, **values)
        assert writer.commit().ledger[0]["detail"].startswith("feature_scale")
