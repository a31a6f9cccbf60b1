"""Ways to read whole samples of the benchmark in random order, from what `cache_writers` wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
import torch
import zarr
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks.cache_data import MAX_TOKENS, SEED, Setting, read_order
from benchmarks.cache_writers import ZARR_PYTHON, ZARRS
from cache_schema.layout import offsets_of
from cache_schema.reader import FeatureCache

RAW, RAW_NEW, RAW_STOP = "raw", "raw, new arrays", "raw, stop"
OURS, OURS_NEW, OURS_STOP = "ours", "ours, new arrays", "ours, stop"
BESIDE = {OURS_NEW: RAW_NEW, OURS_STOP: RAW_STOP}
"""What a way is compared with; all others with `RAW`."""
REMARKS = {
    "zarrs": "CRC not checked",
    "safetensors": "no checksum; copied out of its memory map",
    ".pt": "zip CRC not checked by torch",
}


class Reading:
    """The samples of a setting, as files that lie below a folder, and the order in which they are read.

    Args:
        folder: with what each writer made, under the writer's name.
        setting: the setting.
        tokens: of each sample, in the order in which they were written.
    """

    def __init__(self, folder: Path, setting: Setting, tokens: Mapping[str, int]) -> None:
        self.folder, self.setting, self.tokens = folder, setting, tokens
        self.order = read_order(list(tokens))
        self.starts = dict(zip(tokens, offsets_of(list(tokens.values())).tolist(), strict=False))
        rng = np.random.default_rng(SEED + 2)
        self.stops = {sample_id: int(rng.integers(1, n + 1)) for sample_id, n in tokens.items()}
        self.buffer = np.empty((MAX_TOKENS, *setting.row_shape), np.uint16)

    def readers(self) -> dict[str, tuple[Path, Callable[[], int]]]:
        """Each way by its name: where its files lie, and what reads all samples once and returns their bytes."""
        raw, ours, pt, st = (self.folder / n for n in ("raw", "ours", ".pt per sample", "safetensors per sample"))
        one_go = self.folder / "zarr-python, in one go"
        return {
            RAW: (raw, lambda: self._raw(self.tokens, self.buffer)),
            OURS: (ours, lambda: self._ours(None, self.buffer)),
            RAW_NEW: (raw, lambda: self._raw(self.tokens, None)),
            OURS_NEW: (ours, lambda: self._ours(None, None)),
            RAW_STOP: (raw, lambda: self._raw(self.stops, self.buffer)),
            OURS_STOP: (ours, lambda: self._ours(self.stops, self.buffer)),
            "zarr-python": (one_go, lambda: self._zarr(ZARR_PYTHON)),
            "zarrs": (one_go, lambda: self._zarr(ZARRS)),
            "TensorStore": (one_go, self._tensorstore),
            ".pt": (pt, lambda: self._files(pt, _load_pt)),
            "safetensors": (st, lambda: self._files(st, _load_safetensors)),
        }

    def _raw(self, rows: Mapping[str, int], buffer: NDArray[np.uint16] | None) -> int:
        descriptor = os.open(self.folder / "raw", os.O_RDONLY)
        total = 0
        for sample_id in self.order:
            out = np.empty((rows[sample_id], *self.setting.row_shape), np.uint16) if buffer is None else buffer
            view = memoryview(out[: rows[sample_id]].reshape(-1).view(np.uint8))
            at = self.starts[sample_id] * self.setting.row_bytes
            total += len(view)
            while view:
                n = os.preadv(descriptor, [view], at)
                view, at = view[n:], at + n
        os.close(descriptor)
        return total

    def _ours(self, stops: Mapping[str, int] | None, buffer: NDArray[np.uint16] | None) -> int:
        cache = FeatureCache.open(self.folder / "ours")
        return sum(
            cache.read(sample_id, stops[sample_id] if stops else None, buffer).features.nbytes
            for sample_id in self.order
        )

    def _zarr(self, pipeline: str) -> int:
        with zarr.config.set({"codec_pipeline.path": pipeline}):
            array: Any = zarr.open_array(self.folder / "zarr-python, in one go", mode="r")
            return self._slices(lambda start, stop: array[start:stop])

    def _tensorstore(self) -> int:
        one = {"limit": 1}
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{self.folder}/zarr-python, in one go/"}}
        context = tensorstore.Context({"data_copy_concurrency": one, "file_io_concurrency": one})
        array = tensorstore.open(spec, context=context).result()
        return self._slices(lambda start, stop: array[start:stop].read().result())

    def _slices(self, read: Callable[[int, int], Any]) -> int:
        starts, tokens = self.starts, self.tokens
        return sum(int(read(starts[s], starts[s] + tokens[s]).nbytes) for s in self.order)

    def _files(self, folder: Path, load: Callable[[Path], torch.Tensor]) -> int:
        return sum(load(folder / sample_id).nbytes for sample_id in self.order)


def _load_pt(path: Path) -> torch.Tensor:
    features: torch.Tensor = torch.load(path, weights_only=True)["features"]
    return features


def _load_safetensors(path: Path) -> torch.Tensor:
    return load_file(path)["features"].clone()


def check_equal(reading: Reading, samples: Mapping[str, NDArray[np.uint16]], some: Sequence[str]) -> None:
    """Check that our reader gives what was written.

    Raises:
        ValueError: names the sample.
    """
    cache = FeatureCache.open(reading.folder / "ours")
    for sample_id in some:
        if not np.array_equal(cache.read(sample_id).features, samples[sample_id]):
            raise ValueError(f"sample {sample_id!r} was read with other values than were written")
