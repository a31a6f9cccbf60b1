"""The worker pool: what happens to units when workers die, units fail, or workers cannot be built."""

from __future__ import annotations

import io
import os
import pickle  # only to show that errors survive it
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cache_schema.errors import ShardNotCommitted, ShardRefused
from pipeline.errors import PipelineError, PoisonShard
from pipeline.progress import Progress
from pipeline.runner import ensure_ray, run_pool


@dataclass(frozen=True)
class Unit:
    name: str
    index: int


UNITS = [Unit(f"shard-{i:05d}", i) for i in range(7)]


@dataclass
class FakeWorker:
    """Leaves a file per finished unit, and does to one unit whatever the test asks."""

    out: Path
    what: str = ""
    bad: int = -1

    def run(self, unit: Unit, attempt: int) -> dict[str, Any]:
        if unit.index == self.bad:
            self.misbehave(unit, attempt)
        time.sleep(0.02 * (7 - unit.index))  # later units finish sooner
        (self.out / unit.name).write_text(str(attempt))
        return {"unit": unit.name, "attempt": attempt, "pid": os.getpid()}

    def misbehave(self, unit: Unit, attempt: int) -> None:
        if self.what == "exit once" and attempt == 1:
            os._exit(1)
        if self.what == "kill once" and attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "raise once" and attempt == 1:
            raise RuntimeError("passing trouble")
        if self.what == "raise":
            raise RuntimeError(f"trouble number {attempt}")
        if self.what == "exit":
            os._exit(1)
        if self.what == "refuse":
            raise ShardRefused("layer 3 is all zero in sample abc")


@dataclass(frozen=True)
class Factory:
    out: Path
    what: str = ""
    bad: int = -1

    def __call__(self) -> FakeWorker:
        if self.what == "no model":
            raise FileNotFoundError("no such model")
        if self.what == "refuse to build":
            raise ShardNotCommitted("nothing to read")
        if self.what == "die in build":
            os._exit(1)
        return FakeWorker(self.out, self.what, self.bad)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ensure_ray(num_cpus=2):
        yield


def pool(factory: Factory, units: list[Unit] = UNITS, **options: Any) -> list[dict[str, Any]]:
    return run_pool(units, factory, n_workers=2, resources={"num_cpus": 1}, label="shard", **options)


def finished(out: Path) -> set[str]:
    return {p.name for p in out.iterdir()}


ALL = {u.name for u in UNITS}


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
class TestPool:
    def test_receipts_come_in_the_order_of_the_units(self, tmp_path: Path) -> None:
        seen: list[str] = []
        progress = Progress(len(UNITS), "shards", "extract", stream=io.StringIO())
        receipts = pool(Factory(tmp_path), progress=progress, on_receipt=lambda unit, _: seen.append(unit.name))
        assert [r["unit"] for r in receipts] == [u.name for u in UNITS]
        assert sorted(seen) == sorted(ALL)
        assert len({r["pid"] for r in receipts}) == 2
        assert progress.done == 7
        assert finished(tmp_path) == ALL

    def test_nothing_to_do(self, tmp_path: Path) -> None:
        assert pool(Factory(tmp_path, "no model"), []) == []

    @pytest.mark.parametrize("what", ["exit once", "kill once", "raise once"])
    def test_a_failed_attempt_is_repeated_on_a_fresh_worker(self, tmp_path: Path, what: str) -> None:
        out = io.StringIO()
        progress = Progress(len(UNITS), "shards", "extract", stream=out)
        receipts = pool(Factory(tmp_path, what, bad=2), progress=progress)
        assert [r["attempt"] for r in receipts] == [1, 1, 2, 1, 1, 1, 1]
        assert progress.failures == 1
        told = re.search(r"shard-00002 failed on worker-\d \(pid (\d+) on .*\): (.*); trying again", out.getvalue())
        assert told is not None
        assert int(told[1]) not in {r["pid"] for r in receipts[2:]}
        reason = "passing trouble" if what == "raise once" else "the worker died (ActorDiedError: Worker exit type"
        assert reason in told[2]

    def test_poison_is_told_after_the_rest_is_done(self, tmp_path: Path) -> None:
        with pytest.raises(PoisonShard) as caught:
            pool(Factory(tmp_path, "raise", bad=0))
        text = str(caught.value)
        for n in (1, 2, 3):
            assert f"attempt {n} on worker-" in text
            assert f"RuntimeError: trouble number {n}" in text
        assert "shard-00000" in text
        assert "6 of 7" in text
        assert finished(tmp_path) == ALL - {"shard-00000"}

    def test_a_unit_that_kills_every_worker_is_poison_too(self, tmp_path: Path) -> None:
        with pytest.raises(PoisonShard, match=r"attempt 2 on worker-.*the worker died"):
            pool(Factory(tmp_path, "exit", bad=6), max_attempts=2)
        assert finished(tmp_path) == ALL - {"shard-00006"}

    def test_a_deterministic_error_is_not_retried_and_keeps_its_type(self, tmp_path: Path) -> None:
        progress = Progress(len(UNITS), "shards", "extract", stream=io.StringIO())
        with pytest.raises(ShardRefused, match=r"shard-00001: layer 3 is all zero in sample abc"):
            pool(Factory(tmp_path, "refuse", bad=1), progress=progress)
        assert progress.failures == 1
        assert finished(tmp_path) == ALL - {"shard-00001"}

    @pytest.mark.parametrize(
        ("what", "kind", "text"),
        [
            ("no model", PipelineError, "could not be built: FileNotFoundError: no such model"),
            ("refuse to build", ShardNotCommitted, "nothing to read"),
            ("die in build", PipelineError, "3 workers died while they were being built"),
        ],
    )
    def test_a_worker_that_cannot_be_built_ends_the_run(
        self, tmp_path: Path, what: str, kind: type[Exception], text: str
    ) -> None:
        with pytest.raises(kind, match=text):
            pool(Factory(tmp_path, what))
        assert finished(tmp_path) == set()

    def test_more_than_the_machine_has_is_refused_instead_of_waited_for(self, tmp_path: Path) -> None:
        with pytest.raises(PipelineError, match="needs 64 CPU, but this machine offers Ray 2"):
            run_pool(UNITS, Factory(tmp_path), n_workers=1, resources={"num_cpus": 64})

    def test_more_workers_than_fit_do_not_hang(self, tmp_path: Path) -> None:
        run_pool(UNITS, Factory(tmp_path), n_workers=5, resources={"num_cpus": 1})
        assert finished(tmp_path) == ALL

    def test_an_interrupt_stops_the_workers(self, tmp_path: Path) -> None:
        pids: list[int] = []

        def interrupt(_: Unit, receipt: dict[str, Any]) -> None:
            pids.append(receipt["pid"])
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pool(Factory(tmp_path), on_receipt=interrupt)
        time.sleep(1)
        assert len(finished(tmp_path)) < len(ALL)

    def test_ensure_ray_leaves_a_running_ray_alone(self) -> None:
        import ray

        with ensure_ray():
            pass
        assert ray.is_initialized()


@pytest.mark.parametrize("kind", [PipelineError, PoisonShard, ShardRefused, ShardNotCommitted])
def test_errors_survive_pickling(kind: type[Exception]) -> None:
    copy = pickle.loads(pickle.dumps(kind("shard-00001: a message")))  # noqa: S301
    assert type(copy) is kind
    assert str(copy) == "shard-00001: a message"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class TestProgress:
    def test_lines_come_at_intervals_and_once_more_at_the_end(self) -> None:
        clock, out = Clock(), io.StringIO()
        with Progress(10, "parts", "generate", stream=out, clock=clock, interval_s=10) as progress:
            for _ in range(4):
                clock.now += 4
                progress.update()
            progress.update(0, failures=1)
        lines = out.getvalue().splitlines()
        assert lines == [
            "generate: 3/10 parts (30%), 0.25 parts/s, 28 s left",
            "generate: 4/10 parts in 16 s (0.25 parts/s), 1 failed attempt",
        ]

    def test_rate_counts_only_this_run(self) -> None:
        clock, out = Clock(), io.StringIO()
        progress = Progress(100, "steps", "train", done=90, stream=out, clock=clock)
        assert progress.rate == 0
        assert progress.eta_s is None
        clock.now += 10
        progress.update(5)
        assert progress.rate == pytest.approx(0.5)
        assert progress.eta_s == pytest.approx(10)
        progress.close()
        progress.close()
        assert out.getvalue().splitlines()[-1] == "train: 95/100 steps in 10 s (0.5 steps/s), 90 of them from before"

    def test_a_terminal_gets_a_bar_and_the_closing_line(self) -> None:
        out = io.StringIO()
        with Progress(3, "parts", "generate", stream=out, terminal=True) as progress:
            progress.update(3)
            progress.note("a word")
        assert "\r" in out.getvalue()
        assert "generate: a word" in out.getvalue()
        assert out.getvalue().splitlines()[-1].startswith("generate: 3/3 parts in")


class Feeding:
    """Hands out units in rounds: the next round only when the one before has come back."""

    def __init__(self, rounds: list[list[Unit]], then: str = "stop") -> None:
        self.rounds, self.then = [list(r) for r in rounds], then
        self.out = 0
        self.asked_in_vain = 0
        self.gone = False

    def next_unit(self) -> Unit | None:
        if self.rounds and not self.rounds[0] and self.out == 0:
            self.rounds.pop(0)
        if not self.rounds and self.then == "stop":
            raise StopIteration
        if not self.rounds or not self.rounds[0]:
            self.asked_in_vain += 1
            return None
        self.out += 1
        return self.rounds[0].pop(0)

    def given_up(self) -> bool:
        return self.gone

    def take(self, _unit: Unit, _receipt: dict[str, Any]) -> None:
        self.out -= 1


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
class TestFeed:
    def feed(self, factory: Factory, feed: Feeding) -> list[dict[str, Any]]:
        return run_pool(
            feed, factory, n_workers=2, resources={"num_cpus": 1}, label="shard", on_receipt=feed.take
        )

    def test_workers_wait_for_units_that_are_not_there_yet(self, tmp_path: Path) -> None:
        feed = Feeding([UNITS[:1], UNITS[1:3], UNITS[3:6], UNITS[6:]])
        receipts = self.feed(Factory(tmp_path), feed)
        assert [r["unit"] for r in receipts] == [u.name for u in UNITS]
        assert len({r["pid"] for r in receipts}) == 2
        assert feed.asked_in_vain > 0

    def test_a_feed_without_units_ends(self, tmp_path: Path) -> None:
        assert self.feed(Factory(tmp_path), Feeding([])) == []

    def test_a_failed_attempt_is_repeated(self, tmp_path: Path) -> None:
        receipts = self.feed(Factory(tmp_path, "exit once", bad=1), Feeding([UNITS[:2], UNITS[2:4]]))
        assert [(r["unit"], r["attempt"]) for r in receipts] == [
            (u.name, 2 if u.index == 1 else 1) for u in UNITS[:4]
        ]

    def test_a_unit_that_failed_for_good_ends_the_pool_though_the_feed_goes_on(self, tmp_path: Path) -> None:
        feed = Feeding([UNITS[:2]], then="wait")  # it would never say that it has ended
        with pytest.raises(PoisonShard, match="shard-00001 failed on every attempt; 1 of 2 are done"):
            self.feed(Factory(tmp_path, "raise", bad=1), feed)

    def test_a_feed_that_gives_up_ends_the_pool_in_the_middle_of_its_work(self, tmp_path: Path) -> None:
        feed = Feeding([UNITS[:2]], then="wait")

        class Slow(Factory):
            def __call__(self) -> Any:
                time.sleep(0.2)
                return Sleeper()

        threading.Timer(3, lambda: setattr(feed, "gone", True)).start()
        began = time.monotonic()
        assert self.feed(Slow(tmp_path), feed) == []
        assert time.monotonic() - began < 30


class Sleeper:
    def run(self, unit: Unit, attempt: int) -> dict[str, Any]:
        time.sleep(600)
        return {}


@pytest.mark.parametrize("failures", [2, 3])
def test_a_ray_that_does_not_start_in_time_is_started_again(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    import ray

    calls: list[str] = []

    def init(**_: Any) -> None:
        calls.append("init")
        if calls.count("init") <= failures:
            raise Exception("The current node timed out during startup. This could happen because …")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    if failures == 2:
        with ensure_ray(num_cpus=1):
            calls.append("work")
        assert calls == ["init", "shutdown"] * 2 + ["init", "work", "shutdown"]
    else:
        with pytest.raises(PipelineError, match="did not start in time, 3 times"), ensure_ray(num_cpus=1):
            pass
