"""What is written opens with every Zarr v3 implementation at hand, without our code; and what ours does better."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

from cache_schema.codec import COMPRESSIONS
from cache_schema.errors import ShardCorrupt
from cache_schema.reader import FeatureCache, create_cache
from cache_schema.writer import ShardWriter
from tests.cache.builders import HIDDEN, IDENTITY, LAYERS, append, flip_byte, make_plan

LENGTHS = {"a": 70, "b": 3, "c": 200}
TYPES = {
    "bfloat16": (np.uint16, {}),
    "float16": (np.float16, {}),
    "float8_e4m3fn": (np.uint8, {"feature_group": 3}),
    "int8": (np.int8, {"feature_bits": 6}),
}
Read = Callable[[Path, int, int], NDArray[Any]]


def read_with_zarr(array: Path, start: int, stop: int) -> NDArray[Any]:
    return np.asarray(zarr.open_array(array, mode="r")[start:stop])


def read_with_zarrs(array: Path, start: int, stop: int) -> NDArray[Any]:
    pytest.importorskip("zarrs")
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        return np.asarray(zarr.open_array(array, mode="r")[start:stop])


def read_with_tensorstore(array: Path, start: int, stop: int) -> NDArray[Any]:
    tensorstore = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(array)}}
    opened = tensorstore.open(spec, read=True).result()
    return np.asarray(opened[start:stop].read().result())


READERS = {"zarr-python": read_with_zarr, "zarrs": read_with_zarrs, "TensorStore": read_with_tensorstore}


def make(path: Path, dtype: str, compression: str) -> tuple[Path, dict[str, NDArray[Any]]]:
    """A cache of one shard; also the shard's folder, and what was put into it."""
    stored, changes = TYPES[dtype]
    identity = dataclasses.replace(IDENTITY, feature_dtype=dtype, **changes)
    rng = np.random.default_rng(5)
    n = sum(LENGTHS.values())
    values = rng.integers(-20, 20, (n, len(LAYERS), HIDDEN))
    whole: dict[str, NDArray[Any]] = {"features": values.astype(np.int8).view(np.uint8) % 120}
    whole["features"] = whole["features"].astype(stored)
    if dtype in ("float8_e4m3fn", "int8"):
        groups = -(-HIDDEN // changes.get("feature_group", HIDDEN))
        whole["feature_scale"] = rng.random((n, len(LAYERS), groups), np.float32)
    plan = create_cache(path, identity, make_plan(LENGTHS, 1 << 30))
    with ShardWriter(path, plan.shards()[0], identity, HIDDEN, compression=compression) as writer:
        at = 0
        for sample_id, length in LENGTHS.items():
            rows = slice(at, at + length)
            scale = whole["feature_scale"][rows] if "feature_scale" in whole else None
            append(writer, sample_id, length, features_TLD=whole["features"][rows], scale_TLG=scale)
            at += length
        marker = writer.commit()
    return path / "shards" / marker.group, whole


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # zarrs says that it falls back for what it lacks
def test_every_implementation_reads_every_type(tmp_path: Path, reader: str, dtype: str, compression: str) -> None:
    group, whole = make(tmp_path, dtype, compression)
    for name, expected in whole.items():
        for start, stop in ((0, len(expected)), (0, 1), (60, 70), (64, 128), (200, 273), (272, 273)):
            found = READERS[reader](group / name, start, stop)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected[start:stop])


def test_a_missing_object_is_zeros_to_others_and_an_error_to_us(tmp_path: Path) -> None:
    group, _ = make(tmp_path, "bfloat16", "none")
    (group / "features" / "c" / "0" / "0" / "0").unlink()
    for read in READERS.values():
        assert not read(group / "features", 0, 70).any()
    with pytest.raises(ShardCorrupt, match="features is damaged: its object is missing"):
        FeatureCache.open(tmp_path).read("a")


def test_a_flipped_byte_is_data_to_zarrs_and_an_error_to_us(tmp_path: Path) -> None:
    """Why the hot path does not go through `zarrs`: on a partial read of a shard it skips the checksum."""
    group, whole = make(tmp_path, "bfloat16", "none")
    flip_byte(group / "features" / "c" / "0" / "0" / "0", 100)
    damaged = read_with_zarrs(group / "features", 0, 10)
    assert not np.array_equal(damaged, whole["features"][:10])
    with pytest.raises(ShardCorrupt, match="'a', rows 0:64 fail their checksum"):
        FeatureCache.open(tmp_path).read("a")
