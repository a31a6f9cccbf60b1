"""Rolling mode: what is made and evicted when, readers that wait, and whole runs that stay below their limit."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_schema import names
from cache_schema.errors import ShardCorrupt, ShardRefused
from cache_schema.identity import sha256_file
from cache_schema.marker import committed_shards, evict
from cache_schema.plan import ShardPlan
from cache_schema.reader import FeatureCache
from cache_schema.storage import FolderStorage
from cache_schema.verify import verify_cache
from pipeline import rolling_train
from pipeline.errors import PipelineError
from pipeline.extract_step import QuarantineGuard
from pipeline.recipe import load_recipe
from pipeline.rolling import NEVER, Evict, Make, RollingSchedule, require_room, shard_sizes, what_is_seen
from pipeline.rolling_feed import RollingFeed
from pipeline.run import Run
from pipeline.train_step import run_train
from stages.config import TrainConfig
from stages.dataset import SampleReader, StepDataset, TrainingStream
from stages.errors import TrainingError
from stages.extract import ExtractJob, ExtractWorker, ShardUnit
from stages.order import StepPlan
from stages.rolling import POSITION, PositionFile, Rolling, WaitingReader, read_position, write_position
from tests.test_pipeline import REPO, dflash_here
from tests.tiny import MASK_ID, Extraction, make_target, response, start_extraction
from tests.tiny_run import make_home

# --- the schedule ------------------------------------------------------------------------------------------------

schedules = st.fixed_dictionaries(
    {
        "samples": st.integers(2, 60),
        "per_shard": st.integers(1, 8),
        "batch": st.integers(1, 9),
        "window": st.integers(1, 5),
        "passes": st.integers(1, 2),
        "rounds": st.integers(1, 3),
        "workers": st.integers(1, 3),
        "extra": st.integers(0, 60),
        "seed": st.integers(0, 999),
    }
)


def make_schedule(o: dict[str, Any], share: float = 0.1) -> RollingSchedule:
    ids = [f"s{i}" for i in range(o["samples"])]
    starts = range(0, o["samples"], o["per_shard"])
    config = TrainConfig(
        batch_samples=o["batch"], epochs=o["passes"] * o["rounds"], passes_per_window=o["passes"],
        window_shards=o["window"], heldout_share=share,
    )  # fmt: skip
    sizes = np.random.default_rng(o["seed"]).integers(5, 20, len(starts))
    try:
        plan = StepPlan(ShardPlan(ids, [1] * len(ids), starts), config, o["seed"])
    except TrainingError:  # all held out
        return make_schedule(o, 0.0)
    schedule = RollingSchedule(plan, sizes, 0, reserved=7)
    needed = schedule.peak_bytes() + 7 + o["workers"] * int(sizes.max())
    return RollingSchedule(plan, sizes, needed + o["extra"], reserved=7)


@settings(max_examples=80, deadline=None)
@given(o=schedules, position=st.integers(0, 10_000))
def test_next_use_is_the_next_step_that_reads_the_shard(o: dict[str, Any], position: int) -> None:
    schedule = make_schedule(o)
    plan = schedule.plan
    position %= plan.n_steps
    rounds_end = (position // plan.steps_per_round + 2) * plan.steps_per_round
    expected = np.full(len(schedule.sizes), NEVER)
    for step in reversed(range(position, min(rounds_end, plan.n_steps))):
        expected[list(plan.shards_of_step(step))] = step
    assert schedule.next_use(position).tolist() == expected.tolist()
    assert (schedule.next_use(plan.n_steps) == NEVER).all()


@settings(max_examples=120, deadline=None)
@given(o=schedules, luck=st.integers(0, 2**32), kills=st.integers(0, 2))
def test_a_simulated_run_ends_and_stays_below_the_limit(o: dict[str, Any], luck: int, kills: int) -> None:
    schedule, chance = make_schedule(o), random.Random(luck)
    plan, sizes = schedule.plan, schedule.sizes
    require_room(schedule, o["workers"])
    there: dict[int, int] = {}
    coming: set[int] = set()
    position, made = 0, 0
    for _ in range(20_000):
        if position == plan.n_steps:
            break
        doings = ["train", "make"] + ["finish"] * bool(coming)
        doing = chance.choice(doings)
        if doing == "train" and plan.shards_of_step(position) <= there.keys():
            position += 1
            if kills and chance.random() < 0.05:  # training goes back to its checkpoint
                position, kills = chance.randrange(position + 1), kills - 1
        elif doing == "make" and len(coming) < o["workers"]:
            action = schedule.next_action(position, there, coming)
            if isinstance(action, Make):
                assert action.shard not in there
                assert action.shard not in coming
                coming.add(action.shard)
                made += 1
            elif isinstance(action, Evict):
                assert action.shard not in plan.shards_of_step(position)
                del there[action.shard]
        elif doing == "finish":
            shard = chance.choice(sorted(coming))
            coming.remove(shard)
            # Compressed, and so smaller than expected.
            there[shard] = max(1, int(sizes[shard]) - chance.randrange(4))
        assert 7 + sum(there.values()) + sum(int(sizes[s]) for s in coming) <= schedule.max_bytes
    assert position == plan.n_steps


def test_with_passes_every_shard_is_made_once() -> None:
    order = {"samples": 60, "per_shard": 4, "batch": 3, "window": 3, "passes": 2, "rounds": 1, "workers": 1}
    schedule = make_schedule(order | {"extra": 0, "seed": 1})
    there: dict[int, int] = {}
    made: list[int] = []
    position = 0
    while position < schedule.plan.n_steps:
        action = schedule.next_action(position, there, set())
        if isinstance(action, Make):
            made.append(action.shard)
            there[action.shard] = int(schedule.sizes[action.shard])
        elif isinstance(action, Evict):
            del there[action.shard]
        else:
            position += 1
    assert len(made) == len(set(made)) == schedule.times_made()[0]
    assert schedule.times_made()[1] == 1


def test_what_does_not_fit_is_refused_with_numbers_and_a_remedy() -> None:
    plan = ShardPlan([f"s{i}" for i in range(80)], [1] * 80, range(0, 80, 4))
    config = TrainConfig(epochs=2, batch_samples=2, window_shards=8, heldout_share=0.0)
    sizes = np.full(20, 1000)
    require_room(RollingSchedule(StepPlan(plan, config, 0), sizes, 12_000), 2)
    with pytest.raises(PipelineError) as error:
        require_room(RollingSchedule(StepPlan(plan, config, 0), sizes, 6_500, 400), 2)
    for words in ("is 6.5 kB", "a window of 8 shards", "for each of 2 extract workers (2.0 kB)", "samples (400 B)"):
        assert words in str(error.value)
    smaller = int(str(error.value).split("train.window_shards to ")[1].split()[0])
    assert 1 <= smaller < 8
    fits = dataclasses.replace(config, window_shards=smaller)
    require_room(RollingSchedule(StepPlan(plan, fits, 0), sizes, 6_500, 400), 2)
    raised = int(str(error.value).split("Raise cache.max_bytes to ")[1].split(",")[0])
    require_room(RollingSchedule(StepPlan(plan, config, 0), sizes, raised, 400), 2)
    with pytest.raises(PipelineError, match="make shards smaller"):
        require_room(RollingSchedule(StepPlan(plan, config, 0), sizes, 2_500), 2)


def test_what_each_epoch_sees_is_said() -> None:
    plan = ShardPlan([f"s{i}" for i in range(80)], [1] * 80, range(0, 80, 4))
    config = TrainConfig(epochs=6, batch_samples=2, window_shards=2, heldout_share=0.0)
    text = what_is_seen(RollingSchedule(StepPlan(plan, config, 0), np.full(20, 1000), 9_000), 8_000)
    assert text == (
        "rolling: at most 9.0 kB on disk of a cache of 20.0 kB in all: each of 6 epochs sees every sample, and each of "
        "20 shards is made up to 6 times; train.passes_per_window=6 would make each once"
    )
    six = dataclasses.replace(config, passes_per_window=6)
    text = what_is_seen(RollingSchedule(StepPlan(plan, six, 0), np.full(20, 1000), 7_000), 8_000)
    assert "each of 20 shards is made once (6 epochs go through a window of 2 shards in a row). Below 8.0 kB" in text


# --- readers that wait -------------------------------------------------------------------------------------------

CONFIG = TrainConfig(anchors=4, epochs=2, batch_samples=3, heldout_share=0.0, window_shards=2)


@pytest.fixture
def extraction(tmp_path: Path) -> Extraction:
    responses = [response(f"s{i}", 3 + i, 6 + i) for i in range(9)]
    return start_extraction(tmp_path, make_target(), responses, shard_bytes=8_000)


def rolling(folder: Path, wait_s: float = 60.0) -> Rolling:
    return Rolling(None, folder / "stop.txt", wait_s)


def waiting_reader(extraction: Extraction, settings: Rolling) -> WaitingReader:
    return WaitingReader(FeatureCache.open(extraction.job.cache_dir), CONFIG, 1, settings)


def test_the_estimate_of_a_shard_is_its_size(extraction: Extraction) -> None:
    cache = extraction.run()
    sizes = shard_sizes(cache.plan, cache.identity, make_target().shape.hidden_size)
    assert sizes.tolist() == [cache.markers[s].bytes for s in cache.plan.shards()]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reader_waits_for_shards_that_come_later(extraction: Extraction, tmp_path: Path, workers: int) -> None:
    """They come in the wrong order too, and each is evicted and made again once."""
    cache_dir = extraction.job.cache_dir
    plan = StepPlan(FeatureCache.open(cache_dir).plan, CONFIG, 1)
    reader = waiting_reader(extraction, rolling(tmp_path))

    def extract() -> None:
        for unit in reversed(extraction.units):
            time.sleep(0.1)
            extraction.worker.run(unit, 1)
        for unit in extraction.units:
            evict(FolderStorage(Path(cache_dir)), unit.name)
            time.sleep(0.05)
            extraction.worker.run(unit, 1)

    torch.set_num_threads(1)
    thread = threading.Thread(target=extract)
    thread.start()
    stream = TrainingStream(StepDataset(plan, reader, 4, MASK_ID), workers=workers, start_method="spawn")
    found = [sorted(s for b in data.batches for s in b.sample_ids) for data in stream]
    thread.join()
    assert found == [sorted(plan.step(i).sample_ids) for i in range(plan.n_steps)]


def test_a_shard_that_was_made_again_is_read_from_its_new_group(extraction: Extraction, tmp_path: Path) -> None:
    reader = waiting_reader(extraction, rolling(tmp_path))
    extraction.run()
    reader.cache.refresh()
    before = reader.cache.markers["shard-00001"].group
    evict(FolderStorage(Path(extraction.job.cache_dir)), "shard-00001")
    extraction.worker.run(extraction.units[1], 1)
    reader._refreshed = time.monotonic()  # the markers are those of before
    sample = reader.read(extraction.units[1].sample_ids[0], 0)
    assert sample is not None
    assert reader.cache.markers["shard-00001"].group != before
    expected = SampleReader(FeatureCache.open(extraction.job.cache_dir), CONFIG, 1).read(sample.sample_id, 0)
    assert expected is not None
    assert torch.equal(sample.features_TLD, expected.features_TLD)


def test_damage_is_no_reason_to_wait(extraction: Extraction, tmp_path: Path) -> None:
    cache = extraction.run()
    reader = waiting_reader(extraction, rolling(tmp_path))
    group = Path(extraction.job.cache_dir) / "shards" / cache.markers["shard-00000"].group
    for file in group.rglob("c/*/*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])
    for file in group.rglob("c/0"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ShardCorrupt, match="shard-00000"):
        reader.read(extraction.units[0].sample_ids[0], 0)


def test_a_reader_gives_up_when_nothing_is_finished_any_more(extraction: Extraction, tmp_path: Path) -> None:
    reader = waiting_reader(extraction, rolling(tmp_path, wait_s=0.5))
    with pytest.raises(TrainingError, match=r"for shard-00000 .* no shard was finished \(train.shard_wait_s 0.5\)"):
        reader.read(extraction.units[0].sample_ids[0], 0)


def test_a_reader_stops_when_extraction_has_failed(extraction: Extraction, tmp_path: Path) -> None:
    settings = rolling(tmp_path)
    timer = threading.Timer(0.4, lambda: settings.stop_file.write_text("PoisonShard: shard-00001 failed"))
    timer.start()
    with pytest.raises(TrainingError, match="extraction failed: PoisonShard: shard-00001 failed"):
        waiting_reader(extraction, settings).read(extraction.units[0].sample_ids[0], 0)


def test_the_last_position_reaches_the_file(tmp_path: Path) -> None:
    assert read_position(tmp_path / POSITION) == 0
    file = PositionFile(tmp_path / POSITION)
    for step in range(50):
        file.set(step)
    deadline = time.monotonic() + 5
    while read_position(tmp_path / POSITION) != 49 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert read_position(tmp_path / POSITION) == 49  # though nobody closed it
    file.set(50)
    file.close()
    assert read_position(tmp_path / POSITION) == 50
    (tmp_path / POSITION).write_text("{")
    assert read_position(tmp_path / POSITION) == 0


# --- the feed ----------------------------------------------------------------------------------------------------


def make_feed(extraction: Extraction, folder: Path, max_bytes: int, lines: list[str]) -> RollingFeed:
    cache = FeatureCache.open(extraction.job.cache_dir)
    sizes = shard_sizes(cache.plan, cache.identity, make_target().shape.hidden_size)
    schedule = RollingSchedule(StepPlan(cache.plan, CONFIG, 1), sizes, max_bytes)
    return RollingFeed(schedule, cache, folder, QuarantineGuard(100, 0.5, "here"), lines.append)


def on_disk(cache_dir: str | Path) -> int:
    return sum(size for _, size in FolderStorage(Path(cache_dir)).list(names.SHARDS))


def test_the_feed_makes_and_evicts_as_training_goes_on(extraction: Extraction, tmp_path: Path) -> None:
    cache_dir = extraction.job.cache_dir
    largest = int(shard_sizes(FeatureCache.open(cache_dir).plan, extraction.job.identity, 32).max())
    max_bytes = 4 * largest
    feed = make_feed(extraction, tmp_path, max_bytes, [])
    plan = feed.schedule.plan
    reader = SampleReader(FeatureCache.open(cache_dir), CONFIG, 1)
    for position in range(plan.n_steps):
        write_position(tmp_path / POSITION, position)
        while (unit := feed.next_unit()) is not None:
            feed.take(unit, extraction.worker.run(unit, 1))
            assert on_disk(cache_dir) <= max_bytes
        reader.cache.refresh()
        assert all(reader.read(s, 0) is not None for s in plan.step(position).sample_ids)
    counts = feed.counts
    assert counts.made - counts.made_again == len(extraction.units)
    assert counts.made_again > 0
    assert counts.made - counts.evicted == len(committed_shards(FolderStorage(Path(cache_dir))))
    assert 0 < counts.peak_bytes <= max_bytes
    again = make_feed(extraction, tmp_path, max_bytes, [])
    assert again.counts.summary(max_bytes) == counts.summary(max_bytes)  # a restart goes on counting
    feed.stop()
    assert feed.given_up()
    with pytest.raises(StopIteration):
        feed.next_unit()


def test_what_dead_attempts_left_is_removed_once_it_is_old(extraction: Extraction, tmp_path: Path) -> None:
    extraction.worker.run(extraction.units[0], 1)
    shards = Path(extraction.job.cache_dir) / "shards"
    for name, age_s in (("shard-00001.dead", 100), ("shard-00002.fresh", 0)):
        (shards / name).mkdir()
        (shards / name / "part").write_bytes(b"x" * 500)
        for path in (shards / name / "part", shards / name):
            os.utime(path, (time.time() - age_s,) * 2)
    lines: list[str] = []
    feed = make_feed(extraction, tmp_path, 10**6, lines)
    feed.next_unit()
    left = sorted(p.name for p in shards.iterdir())
    assert [name for name in left if name.endswith("fresh")] == ["shard-00002.fresh"]
    assert not any(name.endswith("dead") for name in left)
    assert len(left) == 2  # the committed one is kept
    assert lines == ["rolling: removed 1 unfinished shards of attempts that died (500 B)"]


def test_what_a_failed_attempt_left_goes_when_the_next_one_commits(extraction: Extraction, tmp_path: Path) -> None:
    feed = make_feed(extraction, tmp_path, 10**6, [])
    unit = feed.next_unit()
    assert unit is not None
    half = Path(extraction.job.cache_dir) / "shards" / f"{unit.name}.dead"
    half.mkdir(parents=True)
    (half / "part").write_bytes(b"x")
    feed.take(unit, extraction.worker.run(unit, 2))
    assert not half.exists()
    assert committed_shards(FolderStorage(Path(extraction.job.cache_dir))) == [unit.name]


# --- whole runs --------------------------------------------------------------------------------------------------

SETTINGS = ["extract.workers=2", "train.window_shards=2"]


@pytest.fixture(scope="module", autouse=True)
def _ray(ray_address: str) -> Iterator[None]:
    """One Ray for all runs of this module, those in processes of their own included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_address)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipe, target, and a run folder `start` with responses only."""
    folder = tmp_path_factory.mktemp("rolling")
    make_home(
        folder, 60, 2, generate={"max_new_tokens": 8, "part_samples": 30, "batch_size": 30},
        cache={"shard_bytes": 30_000}, drafter={"n_layers": 1},
        train={"epochs": 3, "micro_samples": 4, "checkpoint_every": 5, "window_shards": 2},
    )  # fmt: skip
    stage(folder, "generate", "start")
    return folder


def stage(home: Path, name: str, run: str, *sets: str) -> subprocess.CompletedProcess[str]:
    options = [part for setting in (f"run={home / run}", *sets) for part in ("--set", setting)]
    done = dflash_here(name, home / "r.yaml", *options, ray=os.environ["RAY_ADDRESS"])
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def unlimited(home: Path) -> Path:
    shutil.copytree(home / "start", home / "unlimited")
    stage(home, "extract", "unlimited")
    stage(home, "train", "unlimited")
    return home / "unlimited"


@pytest.fixture(scope="module")
def limit(unlimited: Path) -> str:
    """A fifth of the cache: a window of two shards, one per worker, and the held-out samples."""
    cache = FeatureCache.open(unlimited / "cache")
    return f"cache.max_bytes={int(sum(m.bytes for m in cache.markers.values()) * 0.4)}"


@pytest.fixture(scope="module")
def extracted(home: Path, limit: str) -> Path:
    """A run folder whose extract stage is done under the limit: no shard is made, but the held-out samples are."""
    shutil.copytree(home / "start", home / "extracted")
    said = stage(home, "extract", "extracted", limit, *SETTINGS).stderr
    assert "shards are made while training" in said
    assert not list((home / "extracted" / "cache" / "shards").glob("*"))
    assert verify_cache(home / "extracted" / "cache-heldout").ok
    return home / "extracted"


TIMED = {"seconds", "tokens_per_s", "data_wait_s", "data_wait_share", "tflops", "peak_share"}


def outcome(run: Path) -> tuple[list[Any], str]:
    """Metrics without times (the last of each step), and the hash of the final weights."""
    rows = {}
    for line in (run / "train" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[row["kind"], row["step"]] = {
            k: v for k, v in row.items() if k not in TIMED
        }
    newest = max((run / "train" / "checkpoints").glob("step-*"))
    return sorted(rows.items()), sha256_file(newest / "model.safetensors")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_a_limit_is_the_run_without(home: Path, extracted: Path, unlimited: Path, limit: str) -> None:
    shutil.copytree(extracted, home / "limited")
    assert "already done" in stage(home, "extract", "limited", limit, *SETTINGS).stderr
    said = stage(home, "train", "limited", limit, *SETTINGS).stderr
    assert "each of 3 epochs sees every sample" in said
    assert outcome(home / "limited") == outcome(unlimited)
    summary = json.loads((home / "limited" / "status" / "train.json").read_text())["summary"]
    max_bytes = int(limit.partition("=")[2])
    assert summary["max_bytes"] == max_bytes
    assert 0 < summary["peak_bytes"] <= max_bytes
    assert summary["shards_made_again"] > 0
    assert summary["shards_evicted"] > 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_and_ends_the_same(home: Path, extracted: Path, unlimited: Path, limit: str) -> None:
    run = home / "killed"
    shutil.copytree(extracted, run)
    command = [*dflash_command("train", home, run), "--set", limit, *(p for s in SETTINGS for p in ("--set", s))]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while read_position(run / "train" / POSITION) < 17:
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    said = stage(home, "train", "killed", limit, *SETTINGS).stderr
    assert "resuming" in said
    assert outcome(run) == outcome(unlimited)


def dflash_command(name: str, home: Path, run: Path) -> list[str]:
    return [sys.executable, "-m", "pipeline.cli", name, str(home / "r.yaml"), "--set", f"run={run}"]


class Refusing(ExtractWorker):
    """Refuses its third shard."""

    def __init__(self, job: ExtractJob) -> None:
        super().__init__(job)
        self.n = 0

    def run(self, unit: ShardUnit, attempt: int) -> dict[str, Any]:
        self.n += 1
        if self.n == 3:
            raise ShardRefused("layer 3 is all zero")
        return super().run(unit, attempt)


def rolling_run(home: Path, name: str, limit: str, *sets: str) -> Callable[[], None]:
    shutil.copytree(home / "extracted", home / name)
    lines: list[str] = []
    run = Run(load_recipe(home / "r.yaml", [f"run={home / name}", limit, *SETTINGS, *sets]), lines.append)
    return lambda: run_train(run)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # of Ray, about its own settings
@pytest.mark.usefixtures("extracted")
def test_failed_extraction_ends_the_training_with_its_own_error(
    home: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = rolling_run(home, "refused", limit, "extract.workers=1")
    monkeypatch.setattr(rolling_train, "ExtractWorker", Refusing)
    with pytest.raises(ShardRefused, match="layer 3 is all zero"):
        train()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # of Ray, about its own settings
@pytest.mark.usefixtures("extracted")
def test_failed_training_ends_the_extraction(home: Path, limit: str) -> None:
    train = rolling_run(home, "diverged", limit, "train.lr=1e30")
    with pytest.raises(TrainingError, match="the loss is nan"):
        train()
    assert not [t for t in threading.enumerate() if t.name == "extraction"]
