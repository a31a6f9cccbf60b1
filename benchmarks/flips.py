"""Single bytes of a cache changed at random: is each found, and does no read give wrong numbers? `make bench-flips`.

One flip at a time: a random byte of a random file gets another value, then `verify` looks at the cache, every sample
is read through `FeatureCache` and compared with what was written, and the byte is put back. Half of the draws take
a file first and then a byte of it, so that small files get their share; the others take any byte of the cache.
"""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy
import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.cache_data import identity
from cache_schema.errors import CacheError
from cache_schema.identity import CacheIdentity
from cache_schema.marker import evict
from cache_schema.plan import plan_shards
from cache_schema.reader import CachedSample, FeatureCache, create_cache
from cache_schema.storage import FolderStorage
from cache_schema.verify import verify_cache
from cache_schema.writer import ShardWriter

HIDDEN, LAYERS, GROUP = 8, 3, 4
LENGTHS = {"a": 70, "b": 3, "späte-✓": 129, "d": 64, "e": 200, "f": 90, "g": 65}
EVICTED = "shard-00001"
"""This shard is written, and removed again to make room: its marker stays, its samples cannot be read."""
KINDS: dict[str, tuple[CacheIdentity, str]] = {
    "bfloat16": (dataclasses.replace(identity(), layer_ids=(1, 4, 7), last_hidden=True), "none"),
    "int8+zstd": (
        dataclasses.replace(
            identity(), layer_ids=(1, 4, 7), last_hidden=True, feature_dtype="int8", feature_bits=8, feature_group=GROUP
        ),
        "zstd",
    ),
}
Values = dict[str, NDArray[Any]]
Outcome = Literal["raises", "right", "WRONG"]


@dataclass(frozen=True, slots=True)
class Flip:
    """What one changed byte led to."""

    file: str
    at: int
    found: bool
    """By `verify`."""
    reads: Outcome
    """Whether reading the cache raised for some sample, or all were right, or one was wrong."""


def sample_values(kind: CacheIdentity, sample_id: str) -> Values:
    """What is written for a sample; the same for the same id."""
    rng, n = np.random.default_rng(list(sample_id.encode())), LENGTHS[sample_id]
    values: Values = {
        "input_ids": rng.integers(0, 1000, n).astype(np.int32),
        "loss_mask": (np.arange(n) >= n // 2).astype(np.uint8),
        "last_hidden": rng.integers(1, 0x7F00, (n, HIDDEN)).astype(np.uint16),
    }
    if kind.feature_dtype == "int8":
        values["features_TLD"] = rng.integers(-127, 128, (n, LAYERS, HIDDEN)).astype(np.int8)
        values["scale_TLG"] = rng.uniform(0.01, 1, (n, LAYERS, HIDDEN // GROUP)).astype(np.float32)
    else:
        values["features_TLD"] = rng.integers(1, 0x7F00, (n, LAYERS, HIDDEN)).astype(np.uint16)
    return values


def make_cache(folder: Path, kind: str) -> None:
    """A small cache with several shards, dropped and noted samples, and one shard evicted."""
    made_of, compression = KINDS[kind]
    row_bytes = LAYERS * HIDDEN * 2
    plan = create_cache(
        folder, made_of, plan_shards([*LENGTHS, "dropped"], [*LENGTHS.values(), 5], row_bytes, 150 * row_bytes)
    )
    for shard in plan.shards():
        with ShardWriter(folder, shard, made_of, HIDDEN, compression=compression) as writer:
            for sample_id in plan.samples(shard):
                if sample_id == "dropped":
                    writer.drop(sample_id, "non_finite", "made so")
                else:
                    writer.append(sample_id, **sample_values(made_of, sample_id))
            writer.note(plan.samples(shard)[0], "shortened", "made so")
            writer.commit()
    evict(FolderStorage(folder), EVICTED)


def reads_of(folder: Path, kind: str) -> Outcome:
    """Open the cache and read everything that it says it has."""
    try:
        cache = FeatureCache.open(folder)
        ids = cache.sample_ids
    except CacheError:
        return "raises"
    outcome: Outcome = "right"
    # A missing shard is an answer too (the marker's name is not in the data); all others must be there.
    for sample_id in ids:
        try:
            sample = cache.read(sample_id)
        except CacheError:
            outcome = "raises"
            continue
        if sample_id not in LENGTHS or not _is_right(sample, sample_values(KINDS[kind][0], sample_id)):
            return "WRONG"
    expected = {s for shard in cache.plan.shards() if shard != EVICTED for s in cache.plan.samples(shard)}
    return outcome if set(ids) == expected - {"dropped"} else "WRONG"


def _is_right(sample: CachedSample, written: Mapping[str, NDArray[Any]]) -> bool:
    given = {
        "features_TLD": sample.features,
        "scale_TLG": sample.scale,
        "last_hidden": sample.last_hidden,
        "input_ids": sample.input_ids,
        "loss_mask": sample.loss_mask,
    }
    return all(
        value is not None and value.dtype == written[name].dtype and np.array_equal(value, written[name])
        for name, value in given.items()
        if name in written
    )


def is_found(folder: Path) -> bool:
    """Whether `verify` finds something wrong (beside the evicted shard)."""
    try:
        report = verify_cache(folder)
    except CacheError:
        return True
    expected = {EVICTED: "missing"}
    return bool(report.problems) or any(s.status != expected.get(s.shard, "ok") for s in report.shards)


def flips(folder: Path, kind: str, n: int, seed: int) -> list[Flip]:
    """Make a cache, and change single bytes of it, one after the other; it is whole again at the end.

    Raises:
        ValueError: the whole cache does not verify or read right, so that flips would tell nothing.
    """
    make_cache(folder, kind)
    if is_found(folder) or reads_of(folder, kind) != "right":
        raise ValueError(f"{folder} is not right before any byte is changed")
    chance = random.Random(f"{seed} {kind}")
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    sizes = [p.stat().st_size for p in files]
    found: list[Flip] = []
    for i in range(n):
        path = chance.choice(files) if i % 2 else chance.choices(files, sizes)[0]
        raw = path.read_bytes()
        at = chance.randrange(len(raw))
        changed = bytearray(raw)
        changed[at] ^= chance.randrange(1, 256)
        path.write_bytes(changed)
        found.append(Flip(str(path.relative_to(folder)), at, is_found(folder), reads_of(folder, kind)))
        path.write_bytes(raw)
    return found


def kind_of_file(file: str) -> str:
    """`shards/shard-00000.1234/features/c/0/0/0` → `features object`."""
    parts = file.split("/")
    if parts[0] != "shards":
        return parts[0] if len(parts) == 1 else f"{parts[0]} marker"
    if len(parts) == 3:
        return "zarr.json of a group"
    return f"{parts[2]} {'zarr.json' if parts[3] == 'zarr.json' else 'object'}"


def summary(found: list[Flip]) -> list[dict[str, Any]]:
    """Counts by kind of file."""
    rows = []
    for kind in sorted({kind_of_file(f.file) for f in found}):
        own = [f for f in found if kind_of_file(f.file) == kind]
        reads = Counter(f.reads for f in own)
        rows.append(
            {
                "file": kind,
                "flips": len(own),
                "found": sum(f.found for f in own),
                "reads_raise": reads["raises"],
                "reads_right": reads["right"],
                "reads_wrong": reads["WRONG"],
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flips", description=__doc__)
    parser.add_argument("--n", type=int, default=1000, help="flips of each kind of cache (default 1000)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the counts and each miss to this file")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for kind in KINDS:
        folder = Path(tempfile.mkdtemp(prefix="bench-flips-"))
        try:
            found = flips(folder / "cache", kind, options.n, options.seed)
        finally:
            shutil.rmtree(folder)
        misses = [dataclasses.asdict(f) for f in found if not f.found or f.reads == "WRONG"]
        result[kind] = {"counts": summary(found), "misses": misses}
        _print(kind, result[kind])
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(r["misses"] for r in result.values()))


def _print(kind: str, result: dict[str, Any]) -> None:
    columns = ("flips", "found", "reads_raise", "reads_right", "reads_wrong")
    print(f"{kind:<24}" + "".join(f"{c:>13}" for c in columns))
    total = {c: sum(row[c] for row in result["counts"]) for c in columns}
    for row in [*result["counts"], {"file": "all", **total}]:
        print(f"  {row['file']:<22}" + "".join(f"{row[c]:>13}" for c in columns))
    for miss in result["misses"]:
        print(f"  MISSED: {miss}")


if __name__ == "__main__":
    sys.exit(main())
