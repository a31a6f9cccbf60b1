"""`dflash cache export`: shards as safetensors or Arrow files, for programs that know nothing of this project.

    OUT/export.json               what was exported: identity, fingerprint and plan of the cache, format, features
    OUT/shard-00042.safetensors   or shard-00042.arrow: one file per shard, whose content its metadata name
    OUT/samples-100-seed0.…       with --samples: number and seed

Features are bfloat16 (float16 from a float16 cache): quantised ones are dequantised, rounded once to nearest even.
With `raw` they are as the cache stores them, with their scales (a value is code × scale of its group).

A file appears whole or not at all, so an interrupted export is gone on with by starting it again: files that are there
and whole are left as they are, and one that was made from something else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_schema.identity import canonical_json, sha256_json
from cache_schema.layout import feature_format
from cache_schema.reader import FeatureCache
from cache_schema.storage import Location
from pipeline.cache_samples import choose, shard_names
from pipeline.export_folder import Metadata, atomic_file, claim, is_there
from pipeline.export_samples import ExportSamples, array_kinds
from pipeline.progress import Progress

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
        CacheError: the folder holds another export or a file of other content, or the cache or a sample is damaged.
        ShardNotCommitted: a shard that was asked for is not there.
        OSError: as the system or the storage gave it.
    """
    from pipeline.arrow_file import arrow_metadata, write_arrow
    from pipeline.safetensors_file import safetensors_metadata, write_safetensors

    opened = FeatureCache.open(cache)
    write, read = {
        "safetensors": (write_safetensors, safetensors_metadata),
        "arrow": (write_arrow, arrow_metadata),
    }[format]
    about = describe(opened, format, raw)
    written: list[str] = []
    present: list[str] = []
    files = _files(opened, shards, n_samples, seed)
    claim(out, about)
    _require_one_content(opened, out, FORMATS[format], read)
    if progress is not None:
        progress.total = len(files)
    for wanted in files:
        path, texts = out / f"{wanted.name}{FORMATS[format]}", _texts(about | wanted.about)
        if is_there(path, texts, read):
            present.append(path.name)
        else:
            with atomic_file(path) as file:
                write(file, ExportSamples(opened, wanted.ids, raw), texts)
            written.append(path.name)
        if progress is not None:
            progress.update(1)
    return {"out": str(out), "format": format, "raw": raw, "written": written, "present": present,
            "bytes": sum((out / name).stat().st_size for name in written)}  # fmt: skip


def describe(opened: FeatureCache, format: str, raw: bool) -> dict[str, Any]:
    """What an export is, for its `export.json` and the metadata of its files."""
    identity = opened.identity
    form = feature_format(identity)
    return {
        "format": format,
        "raw": raw,
        "identity": identity.to_json(),
        "fingerprint": identity.fingerprint(),
        "plan_sha256": opened.plan.sha,
        "features": "[tokens, layers, hidden] " + array_kinds(identity, raw)["features"],
        "feature_scale": "[tokens, layers, groups] float32: value = code * scale" if raw and form.quantised else None,
        "layers": identity.layer_convention,
    }


@dataclass(frozen=True, slots=True)
class _File:
    """One file of an export."""

    name: str
    ids: list[str]
    about: dict[str, Any]
    """What it holds, for its metadata: from which content."""


def _files(opened: FeatureCache, shards: Sequence[str], n_samples: int | None, seed: int) -> list[_File]:
    """Files (without ending) and the samples that go into each.

    Raises:
        UnknownName, ShardNotCommitted: a shard that was asked for is not planned, or not there.
    """
    committed = [s for s in opened.plan.shards() if s in opened.markers]
    wanted = shard_names(opened.plan.shards(), shards) or committed
    stored = {shard: opened.shard(shard).sample_ids for shard in wanted}
    content = {shard: opened.markers[shard].content_sha256 for shard in wanted}
    if n_samples is None:
        return [_File(shard, ids, {"content_sha256": content[shard]}) for shard, ids in stored.items()]
    ids = choose([sample_id for found in stored.values() for sample_id in found], n_samples, seed)
    about = {"content_sha256": sha256_json(content), "samples": n_samples, "seed": seed}
    return [_File(f"samples-{n_samples}-seed{seed}", ids, about)]


def _require_one_content(opened: FeatureCache, out: Path, ending: str, read: Metadata) -> None:
    """Refuse a folder with a shard's file of other content, whichever shards are asked for now.

    Raises:
        CacheError: it has one.
    """
    for shard, marker in opened.markers.items():
        is_there(out / f"{shard}{ending}", {"content_sha256": marker.content_sha256}, read)


def _texts(about: dict[str, Any]) -> dict[str, str]:
    """A description as texts, which is what the metadata of both formats can hold."""
    return {k: v if isinstance(v, str) else canonical_json(v) for k, v in about.items() if v is not None}
