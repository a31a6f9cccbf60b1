from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_schema.errors import CacheError
from cache_schema.layout import decode_ids, encode_ids, offsets_of
from cache_schema.names import require_sample_id, shard_index, shard_name
from cache_schema.plan import ShardPlan, plan_shards
from cache_schema.storage import open_storage
from tests.cache.builders import flip_byte

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40)


def ids(n: int) -> list[str]:
    return [f"sample-{i}" for i in range(n)]


@given(lengths=LENGTHS, bytes_per_token=st.integers(1, 50), shard_bytes=st.integers(1, 5000))
def test_plan_keeps_order_and_fills_greedily(lengths: list[int], bytes_per_token: int, shard_bytes: int) -> None:
    plan = plan_shards(ids(len(lengths)), lengths, bytes_per_token, shard_bytes)
    shards = [plan.samples(s) for s in plan.shards()]
    assert [s for shard in shards for s in shard] == ids(len(lengths))
    sizes = [int(plan.lengths(s).sum()) * bytes_per_token for s in plan.shards()]
    for shard, size in zip(shards, sizes, strict=True):
        assert shard
        assert size <= shard_bytes or len(shard) == 1
    for size, following in zip(sizes, plan.shards()[1:], strict=False):
        # Greedy: the next shard's first sample would not have fitted.
        assert size + int(plan.lengths(following)[0]) * bytes_per_token > shard_bytes
    for name in plan.shards():
        assert all(plan.shard_of(s) == name for s in plan.samples(name))


@settings(max_examples=20, deadline=None)
@given(lengths=LENGTHS, shard_bytes=st.integers(1, 500))
def test_plan_round_trip_through_parquet(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard_bytes: int
) -> None:
    path = open_storage(tmp_path_factory.mktemp("plan"))
    plan = plan_shards(ids(len(lengths)), lengths, 1, shard_bytes)
    assert plan.create(path)
    again = ShardPlan.read(path)
    assert again == plan
    assert again.shards() == plan.shards()
    assert [again.n_tokens(s) for s in again.sample_ids] == lengths


def test_existing_plan_is_not_replaced(tmp_path: Path) -> None:
    first, second = (plan_shards(ids(4), [10] * 4, 1, size) for size in (20, 40))
    assert first.create(open_storage(tmp_path))
    assert not second.create(open_storage(tmp_path))
    assert ShardPlan.read(open_storage(tmp_path)) == first


def test_sha_depends_on_shards_and_samples_sha_does_not() -> None:
    first, second = (plan_shards(ids(4), [10] * 4, 1, size) for size in (20, 40))
    assert first.sha != second.sha
    assert first.samples_sha == second.samples_sha
    assert first.samples_sha != plan_shards(ids(4), [10, 10, 10, 11], 1, 20).samples_sha


def test_damaged_plan_is_refused_wherever_a_byte_flips(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    assert plan_shards(ids(40), list(range(1, 41)), 1, 100).create(storage)
    for name, step in (("plan.parquet", 7), ("plan.sha256", 1)):
        path = tmp_path / name
        whole = path.read_bytes()
        for at in range(0, len(whole), step):
            path.write_bytes(whole)
            flip_byte(path, at)
            with pytest.raises(CacheError, match=r"plan\.parquet"):
                ShardPlan.read(storage)
        path.write_bytes(whole)
    assert subprocess.run(["sha256sum", "-c", "plan.sha256"], cwd=tmp_path, check=False).returncode == 0


def test_plan_killed_before_its_checksum_gets_it(tmp_path: Path) -> None:
    storage, plan = open_storage(tmp_path), plan_shards(ids(4), [1, 2, 3, 4], 1, 5)
    assert plan.create(storage)
    (tmp_path / "plan.sha256").unlink()
    assert not plan.create(storage)
    assert ShardPlan.read(storage) == plan


@pytest.mark.parametrize(
    ("sample_ids", "n_tokens", "sizes", "message"),
    [
        (["a", "b", "a"], [1, 1, 1], (1, 1), "'a' is planned twice"),
        (["a"], [0], (1, 1), "'a' has 0 tokens"),
        (["a"], [1, 2], (1, 1), "1 sample ids and 2 lengths"),
        (["a"], [1], (1, 0), "shard_bytes is 0"),
        ([""], [1], (1, 1), "has 0 bytes"),
        (["x" * 256], [1], (1, 1), "has 256 bytes"),
        (["a\0"], [1], (1, 1), "NUL"),
        (["\ud800"], [1], (1, 1), "not valid Unicode"),
    ],
)
def test_impossible_plans_are_refused(
    sample_ids: list[str], n_tokens: list[int], sizes: tuple[int, int], message: str
) -> None:
    with pytest.raises(CacheError, match=message):
        plan_shards(sample_ids, n_tokens, *sizes)


def test_what_is_not_in_the_plan_is_named() -> None:
    plan = plan_shards(ids(3), [1, 1, 1], 1, 10)
    with pytest.raises(CacheError, match="'x' is not in the plan"):
        plan.shard_of("x")
    with pytest.raises(CacheError, match="shard-00001 is not in the plan"):
        plan.samples("shard-00001")
    with pytest.raises(CacheError, match="not a shard's name"):
        plan.samples("shard-1")


@given(st.integers(0, 10**7))
def test_shard_names_and_indices_are_inverse(index: int) -> None:
    assert shard_index(shard_name(index)) == index


@given(st.lists(TEXT, max_size=20))
def test_ids_round_trip_at_fixed_width(sample_ids: list[str]) -> None:
    for s in sample_ids:
        require_sample_id(s)
    assert decode_ids(encode_ids(sample_ids)) == sample_ids


@given(st.lists(st.integers(0, 5000)))
def test_offsets_cut_the_rows_into_the_samples(lengths: list[int]) -> None:
    offsets = offsets_of(lengths)
    assert offsets.dtype == np.int64
    assert offsets[0] == 0
    assert offsets[-1] == sum(lengths)
    assert np.diff(offsets).tolist() == lengths
