from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_schema.errors import CacheError, FingerprintMismatch, SchemaVersion, ShardCorrupt, ShardNotCommitted
from cache_schema.identity import CacheIdentity
from cache_schema.plan import ShardPlan
from cache_schema.reader import FeatureCache, create_cache
from cache_schema.storage import open_storage
from cache_schema.verify import verify_cache
from tests.cache.builders import (
    IDENTITY,
    LENGTHS,
    WITH_HIDDEN,
    features,
    flip_byte,
    make_cache,
    make_plan,
    mask,
    token_ids,
    write_shard,
)


@pytest.mark.parametrize("identity", [IDENTITY, WITH_HIDDEN], ids=["plain", "last_hidden"])
def test_every_sample_reads_as_written_in_any_order(tmp_path: Path, identity: CacheIdentity) -> None:
    make_cache(tmp_path, identity)
    cache = FeatureCache.open(tmp_path, expected=identity, require_complete=True)
    assert cache.sample_ids == list(LENGTHS)
    assert len(cache) == len(LENGTHS)
    for sample_id in reversed(cache.sample_ids):
        n = LENGTHS[sample_id]
        sample = cache.read(sample_id)
        assert sample.sample_id == sample_id
        assert cache.n_tokens(sample_id) == n
        assert sample.features_dtype == "bfloat16"
        np.testing.assert_array_equal(sample.features, features(sample_id, n))
        np.testing.assert_array_equal(sample.input_ids, token_ids(sample_id, n))
        np.testing.assert_array_equal(sample.loss_mask, mask(n))
        if identity.last_hidden:
            np.testing.assert_array_equal(sample.last_hidden, features(sample_id, n)[:, 0])
        else:
            assert sample.last_hidden is None


@settings(max_examples=6, deadline=None)
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6), data=st.data())
def test_any_lengths_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cache")
    planned = {f"s{i}": n for i, n in enumerate(lengths)}
    make_cache(path, lengths=planned)
    cache = FeatureCache.open(path, require_complete=True)
    for sample_id in data.draw(st.permutations(list(planned))):
        np.testing.assert_array_equal(cache.read(sample_id).features, features(sample_id, planned[sample_id]))
    assert verify_cache(path).ok


def test_opening_reads_no_shard(tmp_path: Path) -> None:
    """Case 17: identity, plan and markers are enough for ids, lengths and ledger."""
    make_cache(tmp_path)
    (tmp_path / "shards").rename(tmp_path / "elsewhere")
    cache = FeatureCache.open(tmp_path, IDENTITY, require_complete=True)
    assert {s: cache.n_tokens(s) for s in cache.sample_ids} == LENGTHS
    assert cache.ledger() == []
    (tmp_path / "elsewhere").rename(tmp_path / "shards")
    assert cache.read("a").features.shape[0] == LENGTHS["a"]


def test_opening_needs_only_the_shards_that_are_read(tmp_path: Path) -> None:
    plan = make_cache(tmp_path)
    cache = FeatureCache.open(tmp_path)
    keep = cache.markers[plan.shard_of("a")].group
    for group in (tmp_path / "shards").iterdir():
        if group.name != keep:
            group.rename(tmp_path / group.name)
    assert cache.read("a").features.shape[0] == LENGTHS["a"]
    with pytest.raises(ShardCorrupt, match="is missing"):
        cache.read("e")


def test_uncommitted_shard_is_not_there_whatever_files_lie_about(tmp_path: Path) -> None:
    plan = make_cache(tmp_path)
    last = plan.shards()[-1]
    (tmp_path / "commits" / f"{last}.json").unlink()
    cache = FeatureCache.open(tmp_path)
    assert cache.missing_shards() == [last]
    assert cache.sample_ids == [s for s in LENGTHS if plan.shard_of(s) != last]
    for call in (cache.read, cache.n_tokens):
        with pytest.raises(ShardNotCommitted, match=f"'e' belongs to {last}"):
            call("e")
    with pytest.raises(ShardNotCommitted, match=f"first missing: {last}"):
        FeatureCache.open(tmp_path, require_complete=True)
    write_shard(tmp_path, plan, last)
    FeatureCache.open(tmp_path, require_complete=True).read("e")


def test_another_identity_is_refused_with_both_values(tmp_path: Path) -> None:
    """Case 6."""
    make_cache(tmp_path)
    other = dataclasses.replace(IDENTITY, layer_ids=(1, 4, 8), max_length=256)
    for refuse in (
        lambda: FeatureCache.open(tmp_path, expected=other),
        lambda: create_cache(tmp_path, other, make_plan()),
    ):
        with pytest.raises(FingerprintMismatch) as caught:
            refuse()
        assert "layer_ids: found [1, 4, 7], expected [1, 4, 8]" in str(caught.value)
        assert "max_length: found 512, expected 256" in str(caught.value)
    assert verify_cache(tmp_path).ok


def test_changed_shard_bytes_keeps_the_plan(tmp_path: Path) -> None:
    first = make_cache(tmp_path)
    other = make_plan(shard_bytes=1 << 30)
    assert other != first
    assert create_cache(tmp_path, IDENTITY, other) == first
    with pytest.raises(CacheError, match="ids, order or lengths differ"):
        create_cache(tmp_path, IDENTITY, make_plan(LENGTHS | {"e": 201}))


def test_cache_killed_before_its_plan_goes_on(tmp_path: Path) -> None:
    create_cache(tmp_path, IDENTITY, make_plan())
    (tmp_path / "plan.parquet").unlink()
    with pytest.raises(CacheError, match="no plan yet"):
        FeatureCache.open(tmp_path)
    assert create_cache(tmp_path, IDENTITY, make_plan()) == make_plan()


def test_marker_of_another_cache_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path / "one")
    make_cache(tmp_path / "two", dataclasses.replace(IDENTITY, max_length=500))
    marker = (tmp_path / "two" / "commits" / "shard-00000.json").read_bytes()
    (tmp_path / "one" / "commits" / "shard-00000.json").write_bytes(marker)
    with pytest.raises(FingerprintMismatch, match=r"shard-00000 of .* comes from another cache"):
        FeatureCache.open(tmp_path / "one")
    assert verify_cache(tmp_path / "one").shards[0].status == "corrupt"


def test_damaged_cache_json_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path)
    path = tmp_path / "cache.json"
    text = path.read_text()
    changed = json.loads(text)
    changed["identity"]["max_length"] = 511
    future = json.loads(text)
    future["identity"]["schema_version"] = 2
    for bad, kind in [
        ("{", CacheError),
        ("[]", CacheError),
        (json.dumps(changed), FingerprintMismatch),
        (json.dumps(future), SchemaVersion),
    ]:
        path.write_text(bad)
        with pytest.raises(kind):
            FeatureCache.open(tmp_path)
    path.unlink()
    with pytest.raises(CacheError, match="no feature cache here"):
        FeatureCache.open(tmp_path)


def test_unknown_sample_is_named(tmp_path: Path) -> None:
    make_cache(tmp_path)
    with pytest.raises(CacheError, match="'x' is not in the plan"):
        FeatureCache.open(tmp_path).read("x")


def test_cache_can_be_sent_to_another_process(tmp_path: Path) -> None:
    make_cache(tmp_path)
    cache = FeatureCache.open(tmp_path)
    cache.read("a")
    again = pickle.loads(pickle.dumps(cache))  # noqa: S301
    np.testing.assert_array_equal(again.read("a").features, cache.read("a").features)


def test_object_that_has_gone_is_not_read_as_zeros(tmp_path: Path) -> None:
    make_cache(tmp_path)
    cache = FeatureCache.open(tmp_path)
    group = tmp_path / "shards" / cache.markers[cache.plan.shard_of("a")].group
    (group / "features" / "c" / "0" / "0" / "0").unlink()
    assert not np.asarray(zarr.open_array(group / "features", mode="r")[:]).any()  # what zarr alone makes of it
    with pytest.raises(ShardCorrupt, match=r"shard-00000: features is damaged: its object is missing"):
        cache.read("a")


def test_plan_on_disk_is_the_plan_of_the_cache(tmp_path: Path) -> None:
    plan = make_cache(tmp_path)
    assert ShardPlan.read(open_storage(tmp_path)) == plan == FeatureCache.open(tmp_path).plan


def test_damaged_marker_is_refused_wherever_a_byte_flips(tmp_path: Path) -> None:
    make_cache(tmp_path, lengths={"a": 10})
    path = tmp_path / "commits" / "shard-00000.json"
    whole = path.read_bytes()
    for at in range(0, len(whole) - 1, 13):
        path.write_bytes(whole)
        flip_byte(path, at)
        with pytest.raises((ShardCorrupt, SchemaVersion), match=r"shard-00000\.json"):
            FeatureCache.open(tmp_path)
