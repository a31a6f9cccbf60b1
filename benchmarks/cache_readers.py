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
from benchmarks.cache_writers import ONE_GO, ZARR_PYTHON, ZARRS
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
        self._file = (folder / "raw").open("rb", buffering=0)
        self.buffer = np.empty((MAX_TOKENS, *setting.row_shape), np.uint16)

    def close(self) -> None:
        """No way reads any more."""
        self._file.close()

    def readers(self) -> dict[str, tuple[Path, Callable[[str], int]]]:
        """Each way by its name: where its files lie, and what reads a sample and returns its bytes."""
        pt, st = self.folder / ".pt per sample", self.folder / "safetensors per sample"
        raw, ours, one_go = self._raw(), self._ours(), self.folder / ONE_GO
        ways = {
            RAW: ("raw", lambda s: raw(s, self.tokens[s], self.buffer)),
            OURS: ("ours", lambda s: ours.read(s, None, self.buffer).features.nbytes),
            RAW_NEW: ("raw", lambda s: raw(s, self.tokens[s], None)),
            OURS_NEW: ("ours", lambda s: ours.read(s).features.nbytes),
            RAW_STOP: ("raw", lambda s: raw(s, self.stops[s], self.buffer)),
            OURS_STOP: ("ours", lambda s: ours.read(s, self.stops[s], self.buffer).features.nbytes),
            "zarr-python": (ONE_GO, self._slices(zarr_array(one_go, ZARR_PYTHON))),
            "zarrs": (ONE_GO, self._slices(zarr_array(one_go, ZARRS))),
            "TensorStore": (ONE_GO, self._slices(_TensorStore(one_go))),
            ".pt": (pt.name, lambda s: _load_pt(pt / s).nbytes),
            "safetensors": (st.name, lambda s: _load_safetensors(st / s).nbytes),
        }
        return {name: (self.folder / written, read) for name, (written, read) in ways.items()}

    def _raw(self) -> Callable[[str, int, NDArray[np.uint16] | None], int]:
        file = self._file

        def read(sample_id: str, rows: int, buffer: NDArray[np.uint16] | None) -> int:
            out = np.empty((rows, *self.setting.row_shape), np.uint16) if buffer is None else buffer
            left = out[:rows].reshape(-1).view(np.uint8).data
            n_bytes, at = len(left), self.starts[sample_id] * self.setting.row_bytes
            while left:
                n = os.preadv(file.fileno(), [left], at)
                left, at = left[n:], at + n
            return n_bytes

        return read

    def _ours(self) -> FeatureCache:
        return FeatureCache.open(self.folder / "ours")

    def _slices(self, array: Any) -> Callable[[str], int]:
        starts, tokens = self.starts, self.tokens
        return lambda s: int(array[starts[s] : starts[s] + tokens[s]].nbytes)


def zarr_array(path: Path, pipeline: str) -> Any:
    """An array that reads through one of zarr's codec pipelines."""
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        return zarr.open_array(path, mode="r")


class _TensorStore:
    """An array whose slices are read at once, by one thread."""

    def __init__(self, path: Path) -> None:
        one = {"limit": 1}
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
        context = tensorstore.Context({"data_copy_concurrency": one, "file_io_concurrency": one})
        self._array = tensorstore.open(spec, context=context).result()

    def __getitem__(self, rows: slice) -> Any:
        return self._array[rows].read().result()


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
