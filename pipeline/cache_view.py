"""What `dflash cache` prints: tables of shards, samples and findings, from plain dicts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cache_schema.checks import require_same_ids
from cache_schema.errors import CacheError
from cache_schema.reader import FeatureCache
from cache_schema.verify import verify_cache
from pipeline.progress import Progress
from pipeline.report_text import bytes_text

HEAD_CHANNELS = 6


def _render(*parts: Any) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=110)
    for part in parts:
        console.print(part)
    return stream.getvalue().rstrip()


def _table(columns: list[str], rows: list[list[Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("shard", "state", "array", "dtype", "problem") else "right"
        )
    for row in rows:
        table.add_row(*(Text(str(v)) for v in row))
    return table


def shards_table(cache: dict[str, Any], shards: list[dict[str, Any]]) -> str:
    """`dflash cache ls`."""
    rows = [
        [
            s["shard"],
            s["status"],
            s.get("samples", "–"),
            s.get("tokens", "–"),
            bytes_text(s.get("bytes")),
            s.get("dropped", "–"),
            s.get("noted", "–"),
        ]
        for s in shards
    ]
    identity = cache["identity"]
    total = (
        f"{cache['path']}: {cache['committed_shards']} of {cache['planned_shards']} shards, "
        f"{cache['samples']} samples, "
        f"{cache['tokens']} tokens, {bytes_text(cache['bytes'])}, "
        f"{cache['dropped']} dropped {cache['ledger_reasons'] or ''}\n"
        f"target {identity['target_name']}, layers {identity['layer_ids']}, {identity['feature_dtype']}, "
        f"fingerprint {cache['fingerprint'][:16]}"
    )
    return _render(_table(["shard", "state", "samples", "tokens", "bytes", "dropped", "noted"], rows), Text(total))


def shard_table(shard: dict[str, Any]) -> str:
    """`dflash cache show SHARD`."""
    plain = "\n".join(f"{k}: {v}" for k, v in shard.items() if not isinstance(v, dict | list))
    arrays = [[name, a["dtype"], a["shape"], bytes_text(a["bytes"])] for name, a in shard["arrays"].items()]
    samples = [[s["sample_id"], s["tokens"]] for s in shard["stored"]]
    ledger = [[r["sample_id"], r["reason"], r["detail"]] for r in shard["ledger"]]
    return _render(
        Text(plain),
        _table(["array", "dtype", "shape", "bytes"], arrays),
        _table(["sample", "tokens"], samples),
        _table(["ledger: sample", "reason", "detail"], ledger) if ledger else Text("ledger: empty"),
    )


def sample_view(cache: Path, shard: str, sample_id: str) -> dict[str, Any]:
    """One sample: ids, mask, norms per layer and the first channels of its first tokens.

    Raises:
        CacheError: no such sample in that shard, or it is damaged.
    """
    opened = FeatureCache.open(cache)
    planned = opened.plan.samples(shard)
    if sample_id not in planned:
        raise CacheError(f"{shard} of {cache} has no sample {sample_id!r}; it has {', '.join(planned[:4])}…")
    sample = opened.read(sample_id)
    values_TLD = widen(sample.features, sample.features_dtype)
    return {
        "sample_id": sample_id,
        "shard": shard,
        "tokens": len(sample.input_ids),
        "supervised": int(sample.loss_mask.sum()),
        "input_ids": sample.input_ids.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "layers": [
            {
                "layer": layer,
                "mean_norm": round(float(np.linalg.norm(values_TLD[:, i], axis=-1).mean()), 4),
                "max_abs": round(float(np.abs(values_TLD[:, i]).max()), 4),
                "head": [round(float(v), 4) for v in values_TLD[0, i, :HEAD_CHANNELS]],
            }
            for i, layer in enumerate(opened.identity.layer_ids)
        ],
    }


def widen(features: Any, dtype: str) -> Any:
    """Stored features as float32."""
    if dtype == "bfloat16":
        return (features.astype(np.uint32) << 16).view(np.float32)
    return features.astype(np.float32)


def sample_table(view: dict[str, Any]) -> str:
    """`dflash cache show SHARD SAMPLE`: supervised ids in brackets."""
    ids = " ".join(f"[{i}]" if m else str(i) for i, m in zip(view["input_ids"], view["loss_mask"], strict=True))
    rows = [
        [r["layer"], r["mean_norm"], r["max_abs"], "  ".join(f"{v:.3f}" for v in r["head"])] for r in view["layers"]
    ]
    head = f"{view['sample_id']} in {view['shard']}: {view['tokens']} tokens, "
    head += f"{view['supervised']} supervised [in brackets]"
    return _render(Text(head), Text(ids), _table(["layer", "mean norm", "max |x|", "first channels of token 0"], rows))


def verify(cache: Path, responses: Path | None) -> dict[str, Any]:
    """Everything of a cache checked, and its ids against the responses table where there is one."""
    from cache_schema.verify import list_shards

    total = len(list_shards(cache))
    with Progress(total, "shards", "verify") as progress:
        report = verify_cache(cache, progress=lambda *_: progress.update(1))
    problems = [*report.problems, *(f"{s.shard}: {p}" for s in report.shards for p in s.problems)]
    problems += [f"{s.shard}: {s.status}" for s in report.shards if s.status != "ok" and not s.problems]
    table = responses or (
        cache.parent / "responses" if (cache.parent / "responses" / "responses.json").exists() else None
    )
    if table is not None and not problems:
        problems += _compare_ids(cache, table)
    return {
        "ok": not problems,
        "shards": report.counts(),
        "compared_with": str(table) if table else None,
        "problems": problems,
    }


def _compare_ids(cache: Path, responses: Path) -> list[str]:
    from cache_schema.responses import ResponsesTable

    opened, problems = FeatureCache.open(cache), []
    stored = opened.sample_ids
    for sample_id, response in zip(stored, ResponsesTable.open(responses).select(stored), strict=True):
        cached = opened.read(sample_id)
        kept = len(cached.input_ids)
        try:
            require_same_ids(sample_id, cached.input_ids, response.input_ids[:kept], str(cache))
            require_same_ids(sample_id, cached.loss_mask, response.loss_mask[:kept], f"{cache} (loss mask)")
        except CacheError as error:
            problems.append(str(error))
    return problems


def verify_table(report: dict[str, Any]) -> str:
    """`dflash cache verify`."""
    counts = ", ".join(f"{n} {state}" for state, n in report["shards"].items())
    where = f"; ids and masks compared with {report['compared_with']}" if report["compared_with"] else ""
    lines = [f"{'ok' if report['ok'] else 'DAMAGED'}: {counts}{where}", *(f"  {p}" for p in report["problems"])]
    return "\n".join(lines)
