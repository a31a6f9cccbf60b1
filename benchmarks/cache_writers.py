"""Ways to write the samples of the benchmark, each with fsync; a reader for each is in `cache_readers`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from safetensors.torch import save_file
from zarr.codecs import BytesCodec, Crc32cCodec

from benchmarks.cache_data import Setting, identity
from benchmarks.timing import sync_files
from cache_schema.layout import CHUNK_ROWS, n_chunks
from cache_schema.plan import plan_shards
from cache_schema.reader import create_cache
from cache_schema.writer import ShardWriter

Samples = Mapping[str, NDArray[np.uint16]]
APPEND_SHARD_ROWS = 64 * CHUNK_ROWS
"""zarr-python rewrites a shard for each sample that touches it; with one shard of all rows it would never end."""
ONE_GO = "zarr-python, in one go"
ZARRS = "zarrs.ZarrsCodecPipeline"
ZARR_PYTHON = "zarr.core.codec_pipeline.BatchedCodecPipeline"


def writers(setting: Setting, samples: Samples) -> dict[str, Callable[[Path], int]]:
    """Each way by its name: writes all samples to a path that is not there, and returns the bytes of features."""
    rows = np.concatenate(list(samples.values()))

    def in_one_go(path: Path) -> int:
        array = zarr_array(path, setting, len(rows), n_chunks(len(rows)) * CHUNK_ROWS)
        array[:] = rows
        sync_files(path)
        return rows.nbytes

    def through_zarrs(path: Path) -> int:
        with zarr.config.set({"codec_pipeline.path": ZARRS}):
            return in_one_go(path)

    return {
        "raw": lambda path: write_raw(path, samples),
        "ours": lambda path: write_ours(path, setting, samples),
        ONE_GO: in_one_go,
        "zarr-python, by sample": lambda path: write_by_sample(path, setting, samples),
        "zarrs, in one go": through_zarrs,
        ".pt per sample": lambda path: write_files(path, samples, _save_pt),
        "safetensors per sample": lambda path: write_files(path, samples, _save_safetensors),
    }


def write_raw(path: Path, samples: Samples) -> int:
    """The bytes end to end in one file."""
    with path.open("xb", buffering=0) as file:
        for values in samples.values():
            view = values.reshape(-1).view(np.uint8).data
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return path.stat().st_size


def write_ours(path: Path, setting: Setting, samples: Samples) -> int:
    """One shard, all checks on, from the plan to the commit marker."""
    tokens = [len(values) for values in samples.values()]
    plan = plan_shards(list(samples), tokens, setting.row_bytes, sum(tokens) * setting.row_bytes)
    create_cache(path, identity(), plan)
    with ShardWriter(path, "shard-00000", identity(), setting.hidden) as writer:
        for (sample_id, values), n in zip(samples.items(), tokens, strict=True):
            writer.append(sample_id, values, np.arange(n, dtype=np.int32), np.ones(n, np.uint8))
        writer.commit()
    return sum(values.nbytes for values in samples.values())


def zarr_array(path: Path, setting: Setting, rows: int, shard_rows: int) -> Any:
    """An array with our inner chunks and codecs, made by zarr-python."""
    return zarr.create_array(
        path,
        shape=(rows, *setting.row_shape),
        dtype="uint16",
        chunks=(CHUNK_ROWS, *setting.row_shape),
        shards=(shard_rows, *setting.row_shape),
        serializer=BytesCodec(),
        compressors=[Crc32cCodec()],
        fill_value=0,
    )


def write_by_sample(path: Path, setting: Setting, samples: Samples) -> int:
    """Each sample put at its rows, as it comes."""
    array = zarr_array(path, setting, sum(map(len, samples.values())), APPEND_SHARD_ROWS)
    at = 0
    for values in samples.values():
        array[at : at + len(values)] = values
        at += len(values)
    sync_files(path)
    return at * setting.row_bytes


def write_files(path: Path, samples: Samples, save: Callable[[torch.Tensor, Path], None]) -> int:
    """One file per sample."""
    path.mkdir()
    for sample_id, values in samples.items():
        file = path / sample_id
        save(torch.from_numpy(values.view(np.int16)).view(torch.bfloat16), file)
        sync_files(file)
    return sum(values.nbytes for values in samples.values())


def _save_pt(features: torch.Tensor, path: Path) -> None:
    torch.save({"features": features}, path)


def _save_safetensors(features: torch.Tensor, path: Path) -> None:
    save_file({"features": features}, path)
