"""Bytes, errors and CPU time of each way of storing features, chunk by chunk as the cache stores them.

Bytes are those of codes and scales in inner chunks of 64 tokens, each with its checksum and its entry in the shard's
index, over the bytes of the same values in bfloat16. Errors are L2 over L2. "Without outliers" leaves out, per layer,
the 2 % of channels that carry the most energy: they set the scale, and over all channels they hide what the others
lose. Times are CPU seconds of one thread, the least of three, per 10^9 bytes of bfloat16.

Shapes: T tokens, L feature layers, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numcodecs import Blosc, Zstd, blosc
from numpy.typing import NDArray

from benchmarks.frontier_schemes import Scheme
from cache_schema.codec import BLOSC_LEVEL

CHUNK_TOKENS = 64
CHUNK_OVERHEAD = 4 + 16
"""CRC-32C, and the chunk's offset and size in the shard's index."""
OUTLIER_SHARE = 0.02
REPEATS = 3
COMPRESSIONS = ("none", "zstd-1", "zstd-3", "blosc-lz4", "blosc-zstd")
ORDERS: dict[str, tuple[int, ...]] = {"TLD": (0, 1, 2), "LTD": (1, 0, 2), "LDT": (1, 2, 0)}
"""Order of the axes inside a chunk: as the array is, layer by layer, channel by channel."""


@dataclass(frozen=True, slots=True)
class Point:
    """One way of storing.

    Attributes:
        ratio: bytes over those of bfloat16; `scale_ratio` is the scales' part of it.
        write_s, read_s: CPU seconds per GB of quantising and compressing, and back to bfloat16.
    """

    scheme: str
    compression: str
    order: str
    ratio: float
    scale_ratio: float
    write_s: float
    read_s: float


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of one scheme.

    Attributes:
        all_L, inner_L: per layer, over all channels and without outliers.
        token_mean, token_worst: over tokens and layers, without outliers; `token_worst_all` over all channels.
    """

    all_L: list[float]
    inner_L: list[float]
    token_mean: float
    token_worst: float
    token_worst_all: float

    def summary(self) -> dict[str, Any]:
        """All fields, with the means over layers."""
        return asdict(self) | {"all": float(np.mean(self.all_L)), "inner": float(np.mean(self.inner_L))}


def outliers(states_TLD: torch.Tensor) -> torch.Tensor:
    """Which channels carry the most energy, bool [L, D]: `OUTLIER_SHARE` of each layer's."""
    energy_LD = states_TLD.double().square().sum(0)
    loudest = energy_LD.topk(round(OUTLIER_SHARE * energy_LD.shape[1]), dim=1).indices
    return torch.zeros_like(energy_LD, dtype=torch.bool).scatter_(1, loudest, True)


def errors(exact_TLD: torch.Tensor, restored_TLD: torch.Tensor) -> Errors:
    """How far restored states (float32) are from the exact ones."""
    x, e = exact_TLD.double(), restored_TLD.double() - exact_TLD.double()
    energy_LD, inner_LD = x.square().sum(0), (~outliers(exact_TLD)).double()
    token = (e.square() * inner_LD).sum(-1).div((x.square() * inner_LD).sum(-1)).sqrt()
    return Errors(
        all_L=e.square().sum((0, 2)).div(energy_LD.sum(1)).sqrt().tolist(),
        inner_L=(e.square() * inner_LD).sum((0, 2)).div((energy_LD * inner_LD).sum(1)).sqrt().tolist(),
        token_mean=float(token.mean()),
        token_worst=float(token.max()),
        token_worst_all=float(e.square().sum(-1).div(x.square().sum(-1)).sqrt().max()),
    )


def measure(
    scheme: Scheme, states_TLD: torch.Tensor, channel_scale_LD: torch.Tensor, *, orders: Sequence[str] = ("TLD",),
    compressions: Sequence[str] = COMPRESSIONS,
) -> tuple[Errors, list[Point]]:
    """Store the states in every compression and order, and read them back."""
    torch.set_num_threads(1)
    blosc.set_nthreads(1)
    giga = states_TLD.numel() * 2 / 1e9
    codes, scale = scheme.store(states_TLD, channel_scale_LD)
    quantise_s = _least(lambda: scheme.store(states_TLD, channel_scale_LD)) / giga
    dequantise_s = _least(lambda: scheme.restore(codes, scale, channel_scale_LD)) / giga
    if not scheme.format.quantised:
        quantise_s = dequantise_s = 0.0
    points = []
    for compression in compressions:
        scale_bytes, *scale_s = (0, 0.0, 0.0) if scale is None else _stored(scale, compression, ORDERS["TLD"])
        for order in orders:
            code_bytes, *code_s = _stored(codes, compression, ORDERS[order])
            points.append(Point(
                scheme=scheme.name, compression=compression, order=order,
                ratio=(code_bytes + scale_bytes) / giga / 1e9, scale_ratio=scale_bytes / giga / 1e9,
                write_s=quantise_s + (code_s[0] + scale_s[0]) / giga,
                read_s=dequantise_s + (code_s[1] + scale_s[1]) / giga,
            ))
    return errors(states_TLD, scheme.restore(codes, scale, channel_scale_LD, torch.float32)), points


def _stored(values: NDArray[Any], compression: str, order: tuple[int, ...]) -> tuple[int, float, float]:
    """Bytes on disk, and CPU seconds to compress and to decompress."""
    chunks = [values[i : i + CHUNK_TOKENS] for i in range(0, len(values), CHUNK_TOKENS)]
    codec = _codec(compression, values.itemsize)

    def encode() -> list[Any]:
        ordered = (np.ascontiguousarray(chunk.transpose(order)) for chunk in chunks)
        return [codec.encode(o.view(np.uint8).reshape(-1)) if codec else o for o in ordered]

    encoded = encode()
    out = np.empty(chunks[0].nbytes, np.uint8)

    def decode() -> None:
        shape = [chunks[0].shape[axis] for axis in order]
        for body, chunk in zip(encoded, chunks, strict=True):
            if codec:
                codec.decode(body, out=out[: chunk.nbytes])
            if order != ORDERS["TLD"]:
                np.ascontiguousarray(out.view(values.dtype).reshape(shape).transpose(np.argsort(order)))

    size = sum(memoryview(body).nbytes + CHUNK_OVERHEAD for body in encoded)
    return size, (_least(encode) if codec else 0.0), (_least(decode) if codec else 0.0)


def _codec(compression: str, itemsize: int) -> Any:
    name, _, setting = compression.partition("-")
    if name == "zstd":
        return Zstd(level=int(setting))
    if name == "blosc":
        return Blosc(cname=setting, clevel=BLOSC_LEVEL, shuffle=Blosc.BITSHUFFLE, typesize=itemsize)
    return None


def _least(work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return min(seconds)
