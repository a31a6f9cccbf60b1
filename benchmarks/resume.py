"""Figure 4: however training is divided and interrupted, it is the same training.

    python -m benchmarks.resume [--stops 10] [--dir DIR]

1. One rank with batches of 8, and two ranks with 4 samples each (gloo, two processes), replicated and divided: the
   largest relative difference of the loss over all steps.
2. A training that is stopped at random steps, by kill -9 or SIGTERM, and resumed each time in a new process: whether
   its last checkpoint has the bytes of the undisturbed one's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from cache_schema.reader import FeatureCache
from stages import checkpoint
from stages.config import TrainConfig
from stages.dataset import SampleReader
from stages.drafter import Drafter
from stages.errors import TrainingStopped
from stages.order import StepPlan
from stages.train import FrozenEnds, Trainer
from stages.world import World
from tests.tiny import make_spec, make_target, response, start_extraction

CONFIG = TrainConfig(
    anchors=12, epochs=40, batch_samples=8, micro_samples=4, heldout_share=0.1, heldout_every=20, checkpoint_every=7,
    log_every=1, lr=1e-2, bf16=False, trackers=(), threads=1,
)  # fmt: skip
TARGET = make_target()


def make_cache(folder: Path) -> FeatureCache:
    """40 samples of 20 to 60 tokens."""
    return start_extraction(folder, TARGET, [response(f"s{i}", 6 + i % 9, 14 + i) for i in range(40)]).run()


def trainer(cache: FeatureCache, folder: Path, config: TrainConfig = CONFIG, world: World | None = None) -> Trainer:
    plan, reader = StepPlan(cache.plan, config, 1), SampleReader(cache, config, 1)
    ends = FrozenEnds(TARGET.embed, TARGET.head)
    return Trainer(Drafter(make_spec(), seed=1), ends, plan, reader, config, folder, "f" * 64, world)


def rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in found if row["kind"] == "step"]


def _rank(rank: int, cache: FeatureCache, folder: Path, configs: dict[str, TrainConfig]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for name, config in configs.items():
        trainer(cache, folder / name, config, World(rank, 2)).run()
    torch.distributed.destroy_process_group()


def compare_ranks(cache: FeatureCache, folder: Path) -> dict[str, float]:
    """Largest relative difference of the loss of two ranks from that of one, by way of dividing."""
    short = dataclasses.replace(CONFIG, epochs=10)
    ways = {"replicated": short, "divided": dataclasses.replace(short, shard=True)}
    trainer(cache, folder / "one", short).run()
    torch.multiprocessing.spawn(_rank, args=(cache, folder, ways), nprocs=2)
    alone = [row["loss"] for row in rows(folder / "one")]
    return {
        name: max(abs(a - b["loss"]) / a for a, b in zip(alone, rows(folder / name), strict=True)) for name in ways
    }


def stop_and_resume(cache: FeatureCache, folder: Path, stops: int, seed: int) -> dict[str, Any]:
    """Stop one training at random steps; returns what was done and whether the end is the same."""
    whole = trainer(cache, folder / "whole").run()
    n_steps, rng = len(rows(folder / "whole")), random.Random(seed)
    at = sorted(rng.sample(range(3, n_steps - 2), stops))
    done = []
    for step in at:
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        done.append({"wanted_step": step, "signal": number.name, **_stopped(cache, folder / "cut", step, number)})
    last = trainer(cache, folder / "cut").run()
    same = {
        name: (last / name).read_bytes() == (whole / name).read_bytes()
        for name in (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE)
    }
    return {"steps": n_steps, "stops": done, "same_bytes": same}


def _stopped(cache: FeatureCache, folder: Path, step: int, number: signal.Signals) -> dict[str, Any]:
    """Train in a process of its own until this step is logged, and stop it there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stages.train", "tests.tiny"])  # imported once, not for every process
    process = context.Process(target=_body, args=(cache, folder))
    process.start()
    while process.is_alive() and not any(row["step"] >= step for row in rows(folder)):
        time.sleep(0.002)
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, number)
    process.join()
    code = process.exitcode
    newest = checkpoint.newest_checkpoint(folder / "checkpoints", "f" * 64)
    reached = max((row["step"] for row in rows(folder)), default=0)
    return {"exit": code, "last_logged": reached, "resumes_behind": newest[1].step if newest else 0}


def _body(cache: FeatureCache, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        trainer(cache, folder).run()
    except TrainingStopped:
        sys.exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        cache = make_cache(Path(name) / "made")
        differences = compare_ranks(cache, Path(name))
        print(json.dumps({"largest_relative_difference_of_the_loss_two_ranks": differences}))
        found = stop_and_resume(cache, Path(name), args.stops, args.seed)
    for stop in found["stops"]:
        print(json.dumps(stop))
    print(json.dumps({"steps": found["steps"], "stops": len(found["stops"]), "same_bytes": found["same_bytes"]}))
    if not all(found["same_bytes"].values()) or max(differences.values()) > 1e-5:
        sys.exit(1)


if __name__ == "__main__":
    main()
