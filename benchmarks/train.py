"""How long a training step takes and how much memory, beside others: `make bench-train`.

One thread, process time, least of several; what is compared runs in turns in the same process or minute. Drafters have
5 layers, blocks of 16, 5 feature layers, float32; one sample per step (`benchmarks.train_cases`).

1. Against the naive step (`benchmarks.train_naive`): time, gradients, peak memory.
2. Against the steps of SpecForge 0.2.0 and speculators 0.9.0 (`benchmarks.train_rival` says what each computes), with
   the optimizer's step, if the Pythons of their environments are given.
3. The head's loss against chunks under torch.utils.checkpoint.
4. Time against anchors and context length, and the share outside matrix products.
"""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy and torch
import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.train_cases import Case
from benchmarks.train_memory import step_memory
from benchmarks.train_parts import scaling, share_outside
from benchmarks.train_rivals import INSTALL, against_rivals
from benchmarks.train_steps import compare, compare_losses

PARTS = ("naive", "memory", "rivals", "loss", "scaling", "share")
NAIVE = {Case(128, 8192): 3.5, Case(256, 32768): 2.8, Case(256, 32768, valid=100): 6.0}
"""Cases and how many times faster than the naive step each has to be."""
RIVALS = {Case(128, 8192): 3.5, Case(256, 32768): 2.5}
QUICK = {Case(64, 512, tokens=128, anchors=16): 0.0}


def main() -> None:
    torch.set_num_threads(1)
    options = _options()
    pythons = {name: getattr(options, name) for name in ("specforge", "speculators") if getattr(options, name)}
    result = run(options.only or PARTS, pythons, quick=options.quick, rounds=options.rounds)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    for part in PARTS:
        _print(part, result.get(part, []))
    print(f"load before and after: {result['load_before'][0]:.1f}, {result['load_after'][0]:.1f}", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, one round: shows that it runs")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--rounds", type=int, default=4, help="of each measurement (default 4)")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="some parts of it")
    for rival in ("specforge", "speculators"):
        parser.add_argument(f"--{rival}", type=Path, help=f"Python of an environment that has {rival}")
    return parser.parse_args()


def run(parts: Any, pythons: dict[str, Path], *, quick: bool = False, rounds: int = 4) -> dict[str, Any]:
    """The chosen parts' rows, as one JSON-able dict."""
    rounds = 1 if quick else rounds
    naive, rivals = (QUICK, QUICK) if quick else (NAIVE, RIVALS)
    size, vocab, rows = (64, 512, 100) if quick else (256, 32768, 3840)
    half = size // 2, vocab // 4
    anchors = [8, 16] if quick else [64, 128, 256, 512]
    lengths = [64, 128] if quick else [512, 1024, 2048, 3072]
    work = {
        "naive": lambda: [compare(case, rounds) | {"asked": least} for case, least in naive.items()],
        "memory": lambda: [step_memory(case) | {"asked": 0.0 if quick else 3.0} for case in naive],
        "rivals": lambda: [against_rivals(case, pythons, rounds) | {"asked": least} for case, least in rivals.items()],
        "loss": lambda: [compare_losses(size, vocab, rows, rounds) | {"asked": 0.0 if quick else 2.0}],
        "scaling": lambda: [
            *scaling([Case(*half, tokens=2 * max(anchors), anchors=a) for a in anchors], "anchors", rounds),
            *scaling([Case(*half, tokens=t, anchors=anchors[1]) for t in lengths], "tokens", rounds),
        ],
        "share": lambda: [share_outside(case, rounds, bf16=bf16) for case in rivals for bf16 in (False, True)],
    }
    result: dict[str, Any] = {"load_before": os.getloadavg()}
    for part in PARTS:
        if part in parts:
            result[part] = work[part]()
    return result | {"load_after": os.getloadavg()}


def _print(part: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        print(f"\n{part}")
    for row in rows:
        if part == "rivals":
            _print_rivals(row)
            continue
        numbers = [
            f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, float) and key not in ("asked",)
        ]
        asked = f" (asked: {row['asked']:g})" if row.get("asked") else ""
        print(f"  {row['case']}{' bf16' if row.get('bf16') else ''}: {', '.join(numbers)}{asked}")


def _print_rivals(row: dict[str, Any]) -> None:
    print(f"  {row['case']}: ours {row['ours']:.3g} s, with AdamW")
    if not row["rivals"]:
        print(f"    no rival: give --specforge and --speculators the Python of their environments. To make one:\n"
              f"    {INSTALL}")  # fmt: skip
        return
    for name, found in row["rivals"].items():
        print(f"    {name} {found['seconds']:.3g} s: {found['what']}")
    print(f"    {row['ratio']:.2f} times the fastest (asked: {row['asked']:g})")


if __name__ == "__main__":
    main()
