from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cache_schema.errors import CacheError, ShardCorrupt, ShardNotCommitted
from cache_schema.identity import canonical_json, sha256_json
from cache_schema.reader import FeatureCache, create_cache
from cache_schema.verify import describe_cache, describe_shard, equal_caches, list_shards, verify_cache
from cache_schema.writer import ShardWriter
from tests.cache.builders import (
    HIDDEN,
    IDENTITY,
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

SHARD = "shard-00000"
ARRAYS = ["features", "last_hidden", "input_ids", "loss_mask", "offsets", "sample_id"]


def object_of(cache: Path, shard: str, name: str) -> Path:
    (path,) = (p for p in (cache / "shards").glob(f"{shard}.*/{name}/c/**/*") if p.is_file())
    return path


def change_marker(cache: Path, shard: str, **changes: object) -> None:
    """A marker that is whole, but says something else."""
    path = cache / "commits" / f"{shard}.json"
    body = json.loads(path.read_bytes()) | changes
    del body["checksum"]
    path.write_text(canonical_json(body | {"checksum": sha256_json(body)}) + "\n")


def test_whole_cache_is_ok_and_progress_is_told(tmp_path: Path) -> None:
    plan = make_cache(tmp_path, WITH_HIDDEN)
    seen: list[str] = []
    report = verify_cache(tmp_path, progress=seen.append)
    assert report.ok
    assert report.counts() == {"ok": plan.n_shards, "missing": 0, "corrupt": 0}
    assert seen == plan.shards()


@pytest.mark.parametrize("name", ARRAYS)
def test_flipped_byte_in_any_array_is_found(tmp_path: Path, name: str) -> None:
    """At the front, in the middle, in the shard's index and in its checksum; by verify, and by reading."""
    plan = make_cache(tmp_path, WITH_HIDDEN)
    path = object_of(tmp_path, SHARD, name)
    whole = path.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole)
        flip_byte(path, at)
        report = verify_cache(tmp_path)
        assert [s.status for s in report.shards] == ["corrupt"] + ["ok"] * (plan.n_shards - 1)
        assert any(name in problem for problem in report.shards[0].problems)
        read_all_or_raise(tmp_path)
    path.write_bytes(whole)
    assert read_all_or_raise(tmp_path)


def read_all_or_raise(path: Path) -> bool:
    """Read every sample: the right numbers or an error, never wrong ones. Whether nothing raised."""
    cache, whole = FeatureCache.open(path), True
    for sample_id, n in LENGTHS.items():
        try:
            sample = cache.read(sample_id)
        except ShardCorrupt:
            whole = False
            continue
        np.testing.assert_array_equal(sample.features, features(sample_id, n))
        np.testing.assert_array_equal(sample.last_hidden, features(sample_id, n)[:, 0])
        np.testing.assert_array_equal(sample.input_ids, token_ids(sample_id, n))
        np.testing.assert_array_equal(sample.loss_mask, mask(n))
    return whole


def test_crc_error_names_shard_array_and_sample(tmp_path: Path) -> None:
    make_cache(tmp_path)
    flip_byte(object_of(tmp_path, SHARD, "features"), 5)
    where = r"bytes 0:3076 of .*features"
    message = rf"shard-00000: features is damaged: sample 'a', rows 0:64 fail their checksum \({where}"
    with pytest.raises(ShardCorrupt, match=message):
        FeatureCache.open(tmp_path).read("a")


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("damage", ["missing", "short", "zeros"])
def test_missing_short_or_zeroed_object_is_found(tmp_path: Path, name: str, damage: str) -> None:
    make_cache(tmp_path, WITH_HIDDEN)
    path = object_of(tmp_path, SHARD, name)
    size = path.stat().st_size
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "short" else bytes(size))
    read = read_all_or_raise(tmp_path)
    assert read == (name in ("offsets", "sample_id"))  # known from marker and plan, so not read
    report = verify_cache(tmp_path)
    assert report.shards[0].status == "corrupt"
    assert not report.ok


def test_changed_metadata_and_stray_files_are_found(tmp_path: Path) -> None:
    make_cache(tmp_path)
    (group,) = (tmp_path / "shards").glob(f"{SHARD}.*")
    stray = group / "features" / "c" / "0" / "0" / "1"
    stray.write_bytes(b"x")
    assert "does not belong" in verify_cache(tmp_path).shards[0].problems[0]
    stray.unlink()
    meta = group / "features" / "zarr.json"
    text = meta.read_text()
    for old, new in [('"bfloat16"', '"float16"'), ('"uint16"', '"int16"'), ("{", "["), ('"crc32c"', '"bytes"')]:
        meta.write_text(text.replace(old, new))
        assert verify_cache(tmp_path).shards[0].status == "corrupt"
    meta.write_text(text)
    assert verify_cache(tmp_path).ok


def test_missing_shard_and_stray_marker_are_found(tmp_path: Path) -> None:
    plan = make_cache(tmp_path)
    commits = tmp_path / "commits"
    last = plan.shards()[-1]
    (commits / f"{last}.json").rename(commits / "shard-00099.json")
    report = verify_cache(tmp_path)
    assert report.counts() == {"ok": plan.n_shards - 1, "missing": 1, "corrupt": 0}
    assert report.problems == ["shard-00099 has a commit marker, but is not in the plan"]
    assert not report.ok
    assert verify_cache(tmp_path, [SHARD]).shards[0].status == "ok"
    with pytest.raises(CacheError, match="not in the plan"):
        verify_cache(tmp_path, ["shard-00042"])


def test_planned_sample_neither_stored_nor_in_the_ledger_is_found(tmp_path: Path) -> None:
    """Case 2, on disk: a whole marker whose ledger lost a row."""
    create_cache(tmp_path, IDENTITY, make_plan({"a": 70, "b": 3}, 1 << 30))
    with ShardWriter(tmp_path, SHARD, IDENTITY, HIDDEN) as writer:
        append(writer, "a", 70)
        writer.drop("b", "non_finite", "x")
        writer.commit()
    assert verify_cache(tmp_path).ok
    change_marker(tmp_path, SHARD, ledger=[])
    problems = verify_cache(tmp_path).shards[0].problems
    assert any("plan has 2 samples, the ledger drops 0 and the marker says 1" in p for p in problems)
    with pytest.raises(ShardCorrupt, match="every planned sample must be stored or in the ledger"):
        FeatureCache.open(tmp_path)


def test_marker_that_swaps_lengths_is_found(tmp_path: Path) -> None:
    make_cache(tmp_path)
    change_marker(tmp_path, SHARD, lengths=[3, 70])
    problems = verify_cache(tmp_path).shards[0].problems
    assert any("offsets" in p for p in problems)


def test_group_of_another_shard_is_found(tmp_path: Path) -> None:
    """Same shapes and sizes, other samples: only the ids tell."""
    plan = create_cache(tmp_path, IDENTITY, make_plan({"a": 9, "b": 9}, 1))
    markers = [write_shard(tmp_path, plan, shard) for shard in plan.shards()]
    one, two = (tmp_path / "shards" / m.group for m in markers)
    for source, target in ((one, tmp_path / "x"), (two, one), (tmp_path / "x", two)):
        source.rename(target)
    with pytest.raises(ShardCorrupt, match="input_ids is damaged: its values have"):
        FeatureCache.open(tmp_path).read("a")
    report = verify_cache(tmp_path)
    assert report.counts()["corrupt"] == 2
    assert any("sample 0 is ['b'], by plan and ledger it is ['a']" in p for p in report.shards[0].problems)


def test_summaries_are_plain_and_add_up(tmp_path: Path) -> None:
    plan = make_cache(tmp_path)
    last = plan.shards()[-1]
    (tmp_path / "commits" / f"{last}.json").unlink()
    rows, whole = list_shards(tmp_path), describe_cache(tmp_path)
    json.dumps([rows, whole])
    assert [r["shard"] for r in rows] == plan.shards()
    assert [r["status"] for r in rows] == ["committed"] * (plan.n_shards - 1) + ["missing"]
    assert whole["planned_samples"] == len(LENGTHS)
    assert whole["samples"] == sum(r.get("samples", 0) for r in rows)
    assert whole["tokens"] == sum(LENGTHS.values()) - int(plan.lengths(last).sum())
    assert whole["bytes"] == sum(p.stat().st_size for s in plan.shards()[:-1] for p in files_of(tmp_path, s))
    assert whole["missing"] == [last]
    assert whole["fingerprint"] == IDENTITY.fingerprint()
    shard = describe_shard(tmp_path, SHARD)
    json.dumps(shard)
    assert shard["stored"] == [{"sample_id": s, "tokens": LENGTHS[s]} for s in plan.samples(SHARD)]
    with pytest.raises(ShardNotCommitted):
        describe_shard(tmp_path, last)
    (tmp_path / "commits" / f"{SHARD}.json").write_text("{")
    assert describe_cache(tmp_path)["corrupt"] == [SHARD]


def files_of(cache: Path, shard: str) -> list[Path]:
    return [p for p in (cache / "shards").glob(f"{shard}.*/**/*") if p.is_file()]


def test_differences_between_caches_are_named(tmp_path: Path) -> None:
    lengths = {"a": 70, "b": 3}

    def build(name: str, detail: str = "x", flip: bool = False) -> Path:
        path = tmp_path / name
        create_cache(path, IDENTITY, make_plan(lengths, 1 << 30))
        with ShardWriter(path, SHARD, IDENTITY, HIDDEN) as writer:
            append(writer, "a", 70, loss_mask=np.full(70, int(flip), np.uint8))
            writer.drop("b", "non_finite", detail)
            writer.commit()
        return path

    one = build("one")
    assert equal_caches(one, build("same")) == []
    assert equal_caches(one, build("mask", flip=True)) == [f"{SHARD}: loss_mask differs"]
    assert equal_caches(one, build("ledger", detail="y")) == [f"{SHARD}: the ledgers differ (1 and 1 rows)"]
    create_cache(tmp_path / "empty", IDENTITY, make_plan(lengths, 1 << 30))
    assert equal_caches(one, tmp_path / "empty") == [f"{SHARD}: committed only in {one}"]
    make_cache(tmp_path / "hidden", WITH_HIDDEN)
    assert equal_caches(one, tmp_path / "hidden") == ["identity: last_hidden is False and True", "the plans differ"]
