"""The ledger: what happened to samples that are not stored as planned. Nothing is lost with a log line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from cache_schema.errors import CacheError

NON_FINITE, SHORTENED, TOO_SHORT = "non_finite", "shortened", "no_supervised_token"
"""Reasons in a cache's ledger: NaN or infinite states; stored, but cut; nothing to learn from within the maximum."""


class PartLedgerRow(TypedDict):
    """A sample that a part of the responses table does not hold, and why."""

    sample_id: str
    reason: str
    """One word for the kind, e.g. `too_short`."""
    detail: str
    """A sentence with the numbers. It must be the same in equal runs: no times, no worker names."""


class LedgerRow(PartLedgerRow):
    """A sample that a shard does not hold, or holds changed (`kept`), and why."""

    kept: bool
    """True if the sample is stored nevertheless, e.g. shortened."""


def part_rows(rows: Iterable[Mapping[str, Any]], where: object) -> list[PartLedgerRow]:
    """Rows with exactly the three text fields of a part's ledger.

    Raises:
        CacheError: a field is missing, unknown or not text.
    """
    out: list[PartLedgerRow] = []
    for row in rows:
        if set(row) != set(PartLedgerRow.__annotations__) or not all(isinstance(v, str) for v in row.values()):
            raise CacheError(
                f"{where}: ledger row {dict(row)!r} must have the texts sample_id, reason and detail, and no more"
            )
        out.append({"sample_id": row["sample_id"], "reason": row["reason"], "detail": row["detail"]})
    return out
