"""What `dflash check-serve` found, read for the report."""

from __future__ import annotations

from typing import Any

from cache_schema.storage import Location, join
from pipeline.folder import RESULTS
from pipeline.report_values import as_dict, dict_rows, number, read_json

NUMBERS = ("prompts", "identical", "ties", "identical_to_ours", "block_size", "max_new_tokens")
SHARES = ("position", "server", "ours", "low", "high")


def read_served(folder: Location, problems: list[str]) -> dict[str, Any] | None:
    """The fields of `serve-check/results.json` that the report knows; None where there is none."""
    found = as_dict(read_json(join(folder, RESULTS), problems))
    if not found:
        return None
    acceptance = as_dict(found.get("acceptance"))
    tau = as_dict(acceptance.get("tau"))
    positions = [
        {**{name: number(row.get(name)) for name in SHARES}, "within": row.get("within") is True}
        for row in dict_rows(acceptance.get("positions"))
    ]
    version = found.get("server_version")
    return {
        **{name: number(found.get(name)) for name in NUMBERS},
        "ok": found.get("ok") is True,
        "server_version": version if isinstance(version, str) else None,
        "dtype": str(found.get("dtype")),
        "tau": {name: number(tau.get(name)) for name in ("server", "ours")},
        "positions": [row for row in positions if all(row[name] is not None for name in SHARES)],
    }
