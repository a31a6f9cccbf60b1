"""`dflash cache export`: shards as safetensors or Arrow files, for programs that know nothing of this project.

    OUT/export.json               what was exported: identity and fingerprint of the cache, format, type of features
    OUT/shard-00042.safetensors   or shard-00042.arrow: one file per shard; OUT/samples.… with --samples

Features are bfloat16 (float16 from a float16 cache): quantised ones are dequantised, rounded once to nearest even.
With `raw` they are as the cache stores them, with their scales (a value is code × scale of its group).

A file appears whole or not at all, so an interrupted export is gone on with by starting it again: shards whose files
are there are left as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from cache_schema.durable import create_once, fsync_dir, make_dirs
from cache_schema.errors import CacheError
from cache_schema.identity import CacheIdentity, canonical_json
from cache_schema.layout import feature_format
from cache_schema.reader import FeatureCache
from cache_schema.storage import Location
from pipeline.cache_samples import choose, shard_names
from pipeline.export_samples import ExportSamples, array_kinds
from pipeline.progress import Progress

DESCRIPTION = "export.json"
FORMATS = {"safetensors": ".safetensors", "arrow": ".arrow"}


def export_cache(
    cache: Location,
    out: Path,
    format: str,
    *,
    shards: Sequence[str] = (),
    n_samples: int | None = None,
    seed: int = 0,
    raw: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write shards, or some samples, as files.

    Args:
        cache: folder or URL.
        out: folder, made if missing.
        format: `safetensors` or `arrow`.
        shards: as `cache_samples.shard_names` reads them; none means every committed one.
        n_samples: instead of shards: so many samples into one file.
        seed: which samples.
        raw: do not dequantise.
        progress: counts files.

    Returns:
        What was written, ready for JSON.

    Raises:
        CacheError: the folder holds another export, or the cache or a sample is damaged.
        ShardNotCommitted: a shard that was asked for is not there.
        OSError: as the system or the storage gave it.
    """
    from pipeline.arrow_file import write_arrow
    from pipeline.safetensors_file import write_safetensors

    opened = FeatureCache.open(cache)
    write = {"safetensors": write_safetensors, "arrow": write_arrow}[format]
    about = describe(opened.identity, format, raw)
    _claim(out, about)
    written: list[str] = []
    present: list[str] = []
    files = list(_files(opened, shards, n_samples, seed))
    if progress is not None:
        progress.total = len(files)
    for name, ids in files:
        path = out / f"{name}{FORMATS[format]}"
        if path.exists() and n_samples is None:
            present.append(path.name)
        else:
            with atomic_file(path) as file:
                write(file, ExportSamples(opened, ids, raw), _texts(about))
            written.append(path.name)
        if progress is not None:
            progress.update(1)
    return {"out": str(out), "format": format, "raw": raw, "written": written, "present": present,
            "bytes": sum((out / name).stat().st_size for name in written)}  # fmt: skip


def describe(identity: CacheIdentity, format: str, raw: bool) -> dict[str, Any]:
    """What an export is, for its `export.json` and the metadata of its files."""
    form = feature_format(identity)
    return {
        "format": format,
        "raw": raw,
        "identity": identity.to_json(),
        "fingerprint": identity.fingerprint(),
        "features": "[tokens, layers, hidden] " + array_kinds(identity, raw)["features"],
        "feature_scale": "[tokens, layers, groups] float32: value = code * scale" if raw and form.quantised else None,
        "layers": identity.layer_convention,
    }


def _claim(out: Path, about: dict[str, Any]) -> None:
    """Say in a folder what is exported there, once.

    Raises:
        CacheError: it holds another export.
    """
    make_dirs(out)
    file = out / DESCRIPTION
    text = json.dumps(about, indent=1, ensure_ascii=False).encode() + b"\n"
    if create_once(file, text):
        return
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise CacheError(f"{file} is damaged ({error}); export to another folder") from error
    differs = [k for k, v in json.loads(text).items() if not isinstance(found, dict) or found.get(k) != v]
    if differs:
        raise CacheError(f"{out} holds an export that differs in {', '.join(differs)}; export to another folder")


def _files(
    opened: FeatureCache, shards: Sequence[str], n_samples: int | None, seed: int
) -> Iterator[tuple[str, list[str]]]:
    """Names of files (without ending) and the samples that go into each."""
    committed = [s for s in opened.plan.shards() if s in opened.markers]
    wanted = shard_names(opened.plan.shards(), shards) or committed
    stored = ((shard, opened.shard(shard).sample_ids) for shard in wanted)
    if n_samples is None:
        yield from stored
    else:
        yield "samples", choose([sample_id for _, ids in stored for sample_id in ids], n_samples, seed)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name when the block is through, whole and on the disk; else nothing is left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def _texts(about: dict[str, Any]) -> dict[str, str]:
    """A description as texts, which is what the metadata of both formats can hold."""
    return {k: v if isinstance(v, str) else canonical_json(v) for k, v in about.items() if v is not None}
