"""Figure 3: how long training waits for its data, with the cache on a local disk.

    python -m benchmarks.train_data [--quick] [--dir DIR]

1. The real trainer on a cache of realistic shapes (samples of 64 to 3,072 tokens, five layers of a hidden size of
   1,024, bfloat16, 32 anchors; a drafter of one layer with a vocabulary of 8,192, which is less work per byte of data
   than any real one): the share of the time that it waits for the next step. On a CPU a step takes seconds, so that
   this says little about a GPU; therefore
2. the stream of steps alone, nothing computed: tokens and bytes per second that one reading thread delivers, with the
   files in the page cache and with them dropped from it. Training on a device that takes fewer tokens per second than
   that waits for nothing. With `train.loader_workers` it is that many processes.

One thread for computing, one for reading, on whatever cores there are.
"""

from __future__ import annotations

import benchmarks.one_thread  # noqa: F401  # isort: skip  # before numpy and torch
import argparse
import contextlib
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.cache_data import MAX_TOKENS, SEED, Setting, identity, lengths, states
from benchmarks.timing import drop_cached
from cache_schema.plan import plan_shards
from cache_schema.reader import FeatureCache, create_cache
from cache_schema.writer import ShardWriter
from stages.config import DrafterConfig, TrainConfig
from stages.dataset import SampleReader, StepDataset, TrainingStream
from stages.drafter import Drafter, DrafterSpec
from stages.order import StepPlan
from stages.train import FrozenEnds, Trainer

HIDDEN, VOCAB, BLOCK = 1024, 8192, 16
CONFIG = TrainConfig(
    anchors=32, epochs=1, batch_samples=4, micro_samples=1, heldout_share=0.0, log_every=1, checkpoint_every=10_000,
    trackers=(), bf16=False, threads=1,
)  # fmt: skip


def make_cache(folder: Path, n_bytes: int) -> FeatureCache:
    """A cache that no model made: states that look real, a third of each sample prompt."""
    setting = Setting(HIDDEN, n_bytes)
    tokens = lengths(setting)
    ids = [f"sample-{i:06d}" for i in range(len(tokens))]
    plan = plan_shards(ids, np.array(tokens), setting.row_bytes, 256 << 20)
    create_cache(folder, identity(), plan)
    pool, rng, length_of = states(setting), np.random.default_rng(SEED), dict(zip(ids, tokens, strict=True))
    for shard in plan.shards():
        with ShardWriter(folder, shard, identity(), HIDDEN) as writer:
            for sample_id in plan.samples(shard):
                n = length_of[sample_id]
                rows = np.ascontiguousarray(np.roll(pool, int(rng.integers(MAX_TOKENS)), axis=0)[:n])
                mask = (np.arange(n) >= n // 3).astype(np.uint8)
                writer.append(sample_id, rows, rng.integers(0, VOCAB - 1, n).astype(np.int32), mask)
            writer.commit()
    return FeatureCache.open(folder, require_complete=True)


def spec() -> DrafterSpec:
    return DrafterSpec(
        hidden_size=HIDDEN, intermediate_size=2048, n_layers=1, n_heads=16, n_kv_heads=8, head_dim=64, vocab_size=VOCAB,
        block_size=BLOCK, n_target_layers=28, feature_layer_ids=identity().layer_ids, mask_token_id=VOCAB - 1,
        rope_theta=1e6,
    )  # fmt: skip


class _Enough(Exception):
    """Ends a training."""


def waiting(cache: FeatureCache, folder: Path, n_steps: int) -> dict[str, Any]:
    """Train so many steps; the first one, before which nothing can be read ahead, is left out."""
    rows: list[dict[str, Any]] = []
    embed = nn.Embedding(VOCAB, HIDDEN).requires_grad_(False)
    plan, reader = StepPlan(cache.plan, CONFIG, SEED), SampleReader(cache, CONFIG, SEED, DrafterConfig())

    def on_step(row: dict[str, Any]) -> None:
        rows.append(row)
        if len(rows) > n_steps:
            raise _Enough

    trainer = Trainer(Drafter(spec(), seed=0), FrozenEnds(embed, embed.weight.detach()), plan, reader, CONFIG, folder,
                      "f" * 64, on_step=on_step)  # fmt: skip
    with contextlib.suppress(_Enough):
        trainer.run()
    took = rows[-1]["seconds"] - rows[0]["seconds"]
    waited = sum(row["data_wait_s"] for row in rows[1:])
    tokens = sum(b["tokens_per_s"] * (b["seconds"] - a["seconds"]) for a, b in itertools.pairwise(rows))
    return {"steps": len(rows) - 1, "seconds": round(took, 2), "waited_s": round(waited, 4),
            "wait_share": round(waited / took, 5), "tokens_per_s": round(tokens / took)}


def streaming(cache: FeatureCache, n_steps: int) -> dict[str, float]:
    """Steps as fast as they come."""
    plan, reader = StepPlan(cache.plan, CONFIG, SEED), SampleReader(cache, CONFIG, SEED, DrafterConfig())
    stream = TrainingStream(StepDataset(plan, reader, BLOCK, VOCAB - 1))
    begun, cpu, tokens, n_bytes = time.perf_counter(), time.process_time(), 0, 0
    for i, data in enumerate(stream):
        tokens += data.n_tokens
        n_bytes += sum(b.features_CLD.nbytes for b in data.batches)
        if i + 1 == n_steps:
            break
    took = time.perf_counter() - begun
    return {"tokens_per_s": round(tokens / took), "mb_per_s": round(n_bytes / took / 1e6),
            "cpu_s_per_1000_tokens": round((time.process_time() - cpu) / tokens * 1000, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    n_bytes, n_steps = (300 << 20, 3) if args.quick else (1 << 30, 10)
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        cache = make_cache(Path(name) / "cache", n_bytes)
        found: dict[str, Any] = {}
        if drop_cached(Path(name) / "cache"):
            found["stream, page cache dropped"] = streaming(FeatureCache.open(Path(name) / "cache"), 5 * n_steps)
        found["stream, in the page cache"] = max(
            (streaming(FeatureCache.open(Path(name) / "cache"), 5 * n_steps) for _ in range(3)),
            key=lambda row: row["tokens_per_s"],
        )
        drop_cached(Path(name) / "cache")
        found["training, page cache dropped before"] = waiting(cache, Path(name) / "train", n_steps)
    for what, row in found.items():
        print(json.dumps({what: row}))


if __name__ == "__main__":
    main()
