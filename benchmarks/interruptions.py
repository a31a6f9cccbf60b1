"""Random interruptions of writers, runners, disks and object stores; `make bench-interruptions`.

Each interruption is followed by what a user would do: run the same command again. Then the cache must be equal to one
that nothing disturbed, every planned sample must be there once or in the ledger, every object must be the same byte
for byte (the random tags in the names of groups aside), and `verify` must agree. Groups that an attempt left behind
are counted: no marker names them, so no reader sees them, and `dflash cache gc` removes them.
"""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy
import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.interruption_check import Outcome
from benchmarks.interruption_extract import ExtractKills
from benchmarks.interruption_kinds import WriterKinds
from benchmarks.interruption_store import StoreKinds

SHARES = {
    "writer killed at any moment": 54,
    "writer killed at a system call": 54,
    "one of two writers killed": 30,
    "full disk": 26,
    "object store killed": 10,
    "object store hangs": 5,
    "writer to an object store killed": 6,
    "extract: runner killed": 5,
    "extract: workers killed": 5,
    "extract: runner and workers killed": 5,
}
"""Interruptions of each kind among 200."""
_TRIES = 3
"""An interruption that came too late is looked at as well, and tried again: on average at most so often."""


def run(
    folder: Path, n: int, seed: int, kinds: list[str] | None = None, tell: Callable[[str], None] = lambda text: None
) -> list[Outcome]:
    """So many interruptions, divided among kinds as in `SHARES`.

    Args:
        folder: an existing empty one.
        n: how many in all that meet something at work.
        seed: of what is random here (the moments also depend on the machine).
        kinds: only these; None takes all that the machine allows.
        tell: called with a line for each.
    """
    makers: list[Any] = [WriterKinds(folder / "writer", seed), StoreKinds(folder / "store", seed)]
    makers.append(ExtractKills(folder / "extract", seed))
    known = {kind: maker for maker in makers for kind in maker.kinds}
    wanted = {kind: SHARES[kind] for kind in known if kinds is None or kind in kinds}
    outcomes: list[Outcome] = []
    try:
        for kind, count in _divide(n, wanted).items():
            met, tries = 0, 0
            while met < count and tries < _TRIES * count:
                begun = time.monotonic()
                outcomes.append(known[kind].interrupt(kind))
                met, tries = met + outcomes[-1].interrupted, tries + 1
                tell(f"{kind} {met}/{count}: {outcomes[-1].what} ({time.monotonic() - begun:.1f} s)")
    finally:
        for maker in makers:
            maker.close()
    return outcomes


def _divide(n: int, shares: dict[str, int]) -> dict[str, int]:
    """Whole numbers in about these shares that add up to n."""
    total, given = sum(shares.values()), 0
    counts: dict[str, int] = {}
    so_far = 0
    for kind, share in shares.items():
        so_far += share
        counts[kind] = round(n * so_far / total) - given
        given += counts[kind]
    return counts


def summary(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Counts by kind."""
    rows = []
    for kind in dict.fromkeys(o.kind for o in outcomes):
        own = [o for o in outcomes if o.kind == kind]
        rows.append(
            {
                "kind": kind,
                "interruptions": sum(o.interrupted for o in own),
                "too_late": sum(not o.interrupted for o in own),
                "as_undisturbed": sum(not o.problems for o in own),
                "groups_left": sum(o.garbage_groups for o in own),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interruptions", description=__doc__)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=list(SHARES), help="only these")
    parser.add_argument("--json", type=Path, help="write counts and outcomes to this file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-interruptions-"))
    try:
        outcomes = run(folder, options.n, options.seed, options.kinds, lambda text: print(text, file=sys.stderr))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _print(outcomes)
    if options.json:
        body = {"summary": summary(outcomes), "outcomes": [asdict(o) for o in outcomes]}
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    return int(any(o.problems for o in outcomes))


def _print(outcomes: list[Outcome]) -> None:
    columns = ("interruptions", "too_late", "as_undisturbed", "groups_left")
    rows = summary(outcomes)
    rows.append({"kind": "all", **{c: sum(row[c] for row in rows) for c in columns}})
    print(f"{'':<36}" + "".join(f"{c:>16}" for c in columns))
    for row in rows:
        print(f"{row['kind']:<36}" + "".join(f"{row[c]:>16}" for c in columns))
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"  {outcome.kind} ({outcome.what}): {problem}")


if __name__ == "__main__":
    sys.exit(main())
