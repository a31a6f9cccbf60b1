"""Stopping and going on: kill -9 and SIGTERM anywhere, the best checkpoint, any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cache_schema.reader import FeatureCache
from stages import checkpoint
from stages.config import ConfigError, DrafterConfig, TrainConfig
from stages.errors import TrainingStopped
from tests.test_train import CONFIG, Killed, checkpoint_bytes, killed_at, make_cache, make_trainer, metrics

LOOKS = dataclasses.replace(
    CONFIG, heldout_share=0.3, heldout_every=1, epochs=3, checkpoint_every=100, keep_checkpoints=1, trackers=()
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return make_cache(tmp_path_factory.mktemp("cache"), {f"s{i}": (3 + i, 6 + 2 * i) for i in range(7)})


def best_of(folder: Path) -> tuple[int, float]:
    """By the metrics: the first look with the highest τ, the untrained one left out."""
    looks = [(row["step"], row["tau"]) for row in metrics(folder, "heldout") if row["step"]]
    return max(looks, key=lambda look: (look[1], -look[0]))


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_best_checkpoint_is_kept_beside_the_newest(cache: FeatureCache, tmp_path: Path) -> None:
    final = make_trainer(cache, tmp_path, dataclasses.replace(LOOKS, lr=0.3)).run()
    step, tau = best_of(tmp_path)
    assert step < 6 * 3, "a learning rate that spoils the drafter makes an earlier look the best"
    assert folders(tmp_path) == sorted({f"step-{step:06d}", final.name})
    state = json.loads((final / checkpoint.STATE).read_text())
    assert state["best"] == {"step": step, "tau": pytest.approx(tau)}
    newest = checkpoint.newest_checkpoint(tmp_path / "checkpoints", "f" * 64)
    assert newest is not None
    assert newest[0] == final


def test_a_resumed_run_knows_its_best(cache: FeatureCache, tmp_path: Path) -> None:
    config = dataclasses.replace(LOOKS, lr=0.3, checkpoint_every=1)
    whole = make_trainer(cache, tmp_path / "whole", config).run()
    with pytest.raises(Killed):
        make_trainer(cache, tmp_path / "cut", config, on_step=killed_at(4)).run()
    assert checkpoint_bytes(make_trainer(cache, tmp_path / "cut", config).run()) == checkpoint_bytes(whole)
    assert folders(tmp_path / "cut") == folders(tmp_path / "whole")


def test_without_keep_best_only_the_newest_stay(cache: FeatureCache, tmp_path: Path) -> None:
    final = make_trainer(cache, tmp_path, dataclasses.replace(LOOKS, lr=0.3, keep_best=False)).run()
    assert folders(tmp_path) == [final.name]


def test_sigterm_writes_a_checkpoint_at_the_next_step(cache: FeatureCache, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, checkpoint_every=100, trackers=())
    whole = make_trainer(cache, tmp_path / "whole", config).run()

    def on_step(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TrainingStopped, match=r"SIGTERM\) and did after step 3 of 6, with a checkpoint"):
        make_trainer(cache, tmp_path / "cut", config, on_step=on_step).run()
    assert signal.getsignal(signal.SIGTERM) == before
    assert folders(tmp_path / "cut") == ["step-000003"]
    assert checkpoint_bytes(make_trainer(cache, tmp_path / "cut", config).run()) == checkpoint_bytes(whole)


def test_a_machine_that_is_about_to_leave_gets_one_checkpoint_and_goes_on(cache: FeatureCache, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, checkpoint_every=100, trackers=())
    trainer = make_trainer(cache, tmp_path, config)
    trainer.leaving = lambda: trainer.stream.position >= 3
    trainer.run()
    assert folders(tmp_path) == ["step-000003", "step-000006"]


KILLED = dataclasses.replace(CONFIG, epochs=40, checkpoint_every=3, trackers=())
"""120 steps."""


def train_until_killed(cache: FeatureCache, folder: Path) -> None:
    """Body of a process of its own."""
    torch.set_num_threads(1)
    make_trainer(cache, folder, KILLED).run()


@pytest.mark.slow
def test_kill_9_anywhere_and_the_weights_are_the_same(cache: FeatureCache, tmp_path: Path) -> None:
    """Figure 4, quick: three real kills at random moments. `python -m benchmarks.resume` does ten."""
    whole = make_trainer(cache, tmp_path / "whole", KILLED).run()
    folder, codes = tmp_path / "cut", []
    file = folder / "metrics.jsonl"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_resume"])
    for rows in sorted(random.Random(0).sample(range(5, 110), 3)):
        process = context.Process(target=train_until_killed, args=(cache, folder))
        process.start()
        while process.is_alive() and not (file.exists() and file.read_text().count("\n") >= rows):
            time.sleep(0.002)
        process.kill()
        process.join()
        codes.append(process.exitcode)
    assert -signal.SIGKILL in codes
    final = make_trainer(cache, folder, KILLED).run()
    assert checkpoint_bytes(final) == checkpoint_bytes(whole)
    assert len(load_file(final / checkpoint.MODEL)) == 11 * 2 + 3


def test_settings_of_a_run_are_what_they_were() -> None:
    """How the training is watched, kept and divided is no part of what it is."""
    from stages.config import identity_fields

    found = identity_fields(TrainConfig())
    for name in ("trackers", "keep_best", "peak_tflops", "shard", "compile", "activation_checkpointing", "micro_tokens",
                 "attention", "min_workers", "init_from"):
        assert name not in found
    for name in ("anchor_choice", "slot_weights", "dpace_alpha", "normalise", "distill"):
        assert name in found


def test_elastic_training_is_a_range_of_ranks() -> None:
    from stages.train_ray import _ranks

    assert _ranks(TrainConfig(workers=4)) == 4
    assert _ranks(TrainConfig(workers=4, min_workers=4)) == 4
    assert _ranks(TrainConfig(workers=4, min_workers=2)) == (2, 4)
    with pytest.raises(ConfigError, match=r"train\.min_workers is 5.*1 … train\.workers \(4\)"):
        TrainConfig(workers=4, min_workers=5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beta1": 1.0}, r"train\.beta1 is 1\.0.*\[0, 1\)"),
        ({"beta2": -0.1}, r"train\.beta2 is -0\.1"),
        ({"weight_decay": -0.5}, r"train\.weight_decay is -0\.5.*0 or above"),
        ({"heldout_max": -1}, r"train\.heldout_max is -1"),
        ({"max_restarts": -1}, r"train\.max_restarts is -1"),
    ],
)
def test_settings_that_no_training_could_use(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**change)


@pytest.mark.parametrize("name", ["intermediate_size", "n_heads", "n_kv_heads", "head_dim"])
def test_nought_is_not_the_targets_size(name: str) -> None:
    nought: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=rf"drafter\.{name} is 0, but it must be above 0; leave it out for"):
        DrafterConfig(**nought)
