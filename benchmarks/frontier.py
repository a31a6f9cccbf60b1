"""The storage frontier: bytes against error, CPU time and acceptance length, on real hidden states.

    python -m benchmarks.frontier                      bytes, errors, CPU time
    python -m benchmarks.frontier --tau-steps 130      and the same short training from each (hours)
    python -m benchmarks.frontier --louder 8           as if the target's outlier channels were 8 times louder

The hidden states are those of the demo's target on its own answers to the demo's prompts (`recipes/demo.yaml`); they
are made on the first call (about four minutes on two cores) and kept. Results go to `<folder>/frontier.json` and
`frontier.png`; results of trainings are appended to `<folder>/tau.jsonl` one by one, so an interrupted call goes on.

Shapes: T tokens, L feature layers, D hidden.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import frontier_bytes, frontier_data
from benchmarks.frontier_data import Features
from benchmarks.frontier_schemes import CALIBRATION_TOKENS, Scheme, channel_scale, parse

RECIPE = Path(__file__).parent.parent / "recipes" / "demo.yaml"
BITS, GROUPS = (8, 7, 6, 5, 4), ("D", "192", "64", "32")
SCHEMES = (
    "bfloat16", "float16", *(f"float8-{g}" for g in GROUPS),
    *(f"float8-{b}b-{g}" for b in BITS[1:] for g in ("D", "64")),
    *(f"int8-{b}b-{g}" for b in BITS for g in GROUPS),
    *(f"norm-{b}b-{g}" for b in BITS for g in ("D", "64")),
)
REORDERED = ("float8-5b-D", "float8-4b-D", "int8-8b-D", "int8-6b-64", "norm-5b-D")
"""Schemes that are also tried in other orders of the axes."""
TAU_SCHEMES = (
    "bfloat16", "float8-5b-D", "float8-4b-D", "int8-8b-D", "int8-7b-D", "int8-4b-D", "int8-6b-64", "norm-6b-D",
    "float8-D", "int8-6b-D", "norm-5b-D", "int8-5b-64", "int8-8b-64", "int8-4b-64", "int8-6b-32", "int8-5b-D",
    "norm-4b-D", "int8-4b-32",
)
SEEDS = (0, 1, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write JSON and plot."""
    options = _options(arguments)
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    features = frontier_data.load(_ensure_features(folder))
    schemes = [parse(name) for name in options.schemes or SCHEMES]
    states_TLD, calibration_TLD = _spread(features, options.tokens), _calibration(features)
    scale_LD = channel_scale(calibration_TLD)
    if options.louder != 1:
        factor_LD = torch.where(frontier_bytes.outliers(states_TLD), float(options.louder), 1.0)
        scale_LD = channel_scale(calibration_TLD.float() * factor_LD)
        print(table(measure_bytes(schemes, (states_TLD.float() * factor_LD).bfloat16(), scale_LD)))
        return
    rows = measure_bytes(schemes, states_TLD, scale_LD)
    if options.tau_steps:
        train_all(features, scale_LD, options.schemes or TAU_SCHEMES, options.tau_steps, folder / "tau.jsonl")
    add_tau(rows, folder / "tau.jsonl")
    result = {"tokens": options.tokens, "layer_ids": features.layer_ids, "rows": rows}
    (folder / "frontier.json").write_text(json.dumps(result, indent=1) + "\n")
    from benchmarks.frontier_plot import draw

    draw(rows, folder / "frontier.png")
    print(json.dumps(result) if options.json else table(rows))


def measure_bytes(
    schemes: Sequence[Scheme], states_TLD: torch.Tensor, scale_LD: torch.Tensor
) -> list[dict[str, Any]]:
    """One row per scheme: errors, and a point per compression and order."""
    rows = []
    for scheme in schemes:
        orders = tuple(frontier_bytes.ORDERS) if scheme.name in REORDERED else ("TLD",)
        errors, points = frontier_bytes.measure(scheme, states_TLD, scale_LD, orders=orders)
        rows.append({"scheme": scheme.name, "errors": errors.summary(), "points": [asdict(p) for p in points]})
        print(f"frontier: {scheme.name}", file=sys.stderr)
    return rows


def train_all(features: Features, scale_LD: torch.Tensor, names: Sequence[str], n_steps: int, file: Path) -> None:
    """The same short training from each kind of features, three seeds; what `file` has already is not done again."""
    from benchmarks.frontier_tau import Trial

    torch.set_num_threads(1)
    done = {(r["scheme"], r["seed"]) for r in _lines(file) if r["steps"] == n_steps}
    trial = Trial(features, n_steps)
    for name in names:
        for seed in SEEDS:
            if (name, seed) in done:
                continue
            started = time.perf_counter()
            run = trial.run(_stored_and_read(parse(name), features.features_TLD, scale_LD), seed)
            wall_s = time.perf_counter() - started
            row = {"scheme": name, "seed": seed, "steps": n_steps, **asdict(run), "wall_s": wall_s}
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(f"frontier: τ {run.tau:.3f} from {name}, seed {seed}", file=sys.stderr)


def add_tau(rows: list[dict[str, Any]], file: Path) -> None:
    """Add to each row what the trainings gave: mean τ, its range over seeds, and the paired difference to bfloat16."""
    runs = _lines(file)
    exact = {r["seed"]: r for r in runs if r["scheme"] == "bfloat16"}
    for row in rows:
        own = [r for r in runs if r["scheme"] == row["scheme"]]
        paired = [r for r in own if r["seed"] in exact]
        if not own:
            continue
        row["tau"] = {
            "values": [r["tau"] for r in own],
            "mean": float(np.mean([r["tau"] for r in own])),
            "against_exact": [r["tau"] - exact[r["seed"]]["tau"] for r in paired],
            "loss_against_exact": [r["heldout_loss"] - exact[r["seed"]]["heldout_loss"] for r in paired],
        }


def table(rows: list[dict[str, Any]]) -> str:
    """A plain table: one line per scheme, with its bytes in every compression."""
    head = f"{'scheme':12}" + "".join(f"{c:>11}" for c in frontier_bytes.COMPRESSIONS)
    lines = [head + f"{'err all':>9}{'inner':>8}{'token':>8}{'worst':>8}{'write':>7}{'read':>7}  τ (against bfloat16)"]
    for row in rows:
        plain = {p["compression"]: p for p in row["points"] if p["order"] == "TLD"}
        e, z = row["errors"], plain["zstd-1"]
        line = f"{row['scheme']:12}" + "".join(f"{plain[c]['ratio']:11.3f}" for c in frontier_bytes.COMPRESSIONS)
        line += f"{e['all']:9.2%}{e['inner']:8.2%}{e['token_mean']:8.2%}{e['token_worst']:8.1%}"
        lines.append(line + f"{z['write_s']:7.2f}{z['read_s']:7.2f}  {_tau_text(row)}")
    lines.append("inner, token, worst: without the outlier channels; write, read: CPU s per GB of bf16, with zstd-1")
    moved = [p for row in rows for p in row["points"] if p["order"] != "TLD" and p["compression"] != "none"]
    for p in moved:
        lines.append(f"order {p['order']}: {p['scheme']:12}{p['compression']:11}{p['ratio']:.3f}")
    return "\n".join(lines)


def _tau_text(row: dict[str, Any]) -> str:
    if "tau" not in row:
        return ""
    differences = ", ".join(f"{d:+.3f}" for d in row["tau"]["against_exact"])
    return f"{row['tau']['mean']:.3f} ({differences})"


def _stored_and_read(scheme: Scheme, features_TLD: torch.Tensor, scale_LD: torch.Tensor) -> torch.Tensor:
    return torch.cat([scheme.restore(*scheme.store(p, scale_LD), scale_LD) for p in features_TLD.split(4096)])


def _spread(features: Features, n_tokens: int) -> torch.Tensor:
    """Whole samples, evenly spaced, end to end, cut to the number of tokens."""
    mean = len(features.features_TLD) / len(features.sample_ids)
    step = max(1, int(len(features.sample_ids) * mean / (1.2 * n_tokens)))
    chosen = [features.features_TLD[features.rows(i)] for i in range(0, len(features.sample_ids), step)]
    return torch.cat(chosen)[:n_tokens]


def _calibration(features: Features) -> torch.Tensor:
    """The first 64 tokens of a few samples that `_spread` does not begin with."""
    picked = range(3, len(features.sample_ids), max(1, len(features.sample_ids) // 12))
    return torch.cat([features.features_TLD[features.rows(i)][:64] for i in picked])[:CALIBRATION_TOKENS]


def _ensure_features(folder: Path) -> Path:
    file = folder / "features.safetensors"
    if not file.exists():
        run = folder / "run"
        for stage in ("generate", "extract"):
            command = [sys.executable, "-m", "pipeline.cli", stage, str(RECIPE), "--set", f"run={run}"]
            subprocess.run(command, check=True, stdout=sys.stderr)
        frontier_data.collect(run / "cache", file)
    return file


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/frontier"), help="hidden states and results")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the bytes and error part")
    parser.add_argument("--tau-steps", type=int, default=0, help="steps of each training; 0 trains nothing")
    parser.add_argument("--louder", type=float, default=1, help="multiply the outlier channels, print only")
    parser.add_argument("--schemes", nargs="*", help="only these, e.g. int8-6b-64 (both parts)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
