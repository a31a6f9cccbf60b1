"""The worker pool: what happens to units when workers die, units fail, or workers cannot be built."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import pickle  # only to show that errors survive it
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cache_schema.errors import ShardNotCommitted, ShardRefused
from pipeline.deaths import Death, death_of
from pipeline.errors import PipelineError, PoisonShard
from pipeline.progress import Progress
from pipeline.runner import ensure_ray, run_pool
from pipeline.seats import Seat, SeatKind
from pipeline.tasks import Attempt, Task
from stages.group import Member


@dataclass(frozen=True)
class Unit:
    name: str
    index: int


UNITS = [Unit(f"shard-{i:05d}", i) for i in range(7)]


def wait_until(true: Callable[[], bool], patience_s: float = 120) -> None:
    deadline = time.monotonic() + patience_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert true()


@dataclass
class FakeWorker:
    """Leaves a file per finished unit, and does to one unit whatever the test asks."""

    out: Path
    what: str = ""
    bad: int = -1

    def run(self, unit: Unit, attempt: int) -> dict[str, Any]:
        if unit.index == self.bad:
            self.misbehave(unit, attempt)
        if self.what == "wait for two":
            wait_until(lambda: len(list(self.out.glob("../built-*"))) == 2)
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
        if self.what == "wait for two":
            (self.out.parent / f"built-{os.getpid()}").touch()
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
        out = tmp_path / "out"
        out.mkdir()
        receipts = pool(Factory(out, "wait for two"), progress=progress, on_receipt=lambda u, _: seen.append(u.name))
        assert [r["unit"] for r in receipts] == [u.name for u in UNITS]
        assert sorted(seen) == sorted(ALL)
        assert len({r["pid"] for r in receipts}) == 2
        assert progress.done == 7
        assert finished(out) == ALL

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


@dataclass(frozen=True)
class PairWorker:
    """For workers with two units in flight; does to unit `bad` what the test asks."""

    out: Path
    what: str
    bad: int = -1

    def run(self, unit: Unit, attempt: int) -> dict[str, Any]:
        if unit.index == self.bad and self.what == "exit":
            os._exit(1)
        if self.what == "meet":
            (self.out / f"{unit.name} began").touch()
            other = self.out / f"{UNITS[unit.index ^ 1].name} began"
            wait_until(other.exists)
        if self.what == "raise beside" and attempt == 1:
            if unit.index == self.bad:
                time.sleep(0.5)
                raise RuntimeError("passing trouble")
            time.sleep(100)
        return {"unit": unit.name, "attempt": attempt, "tokens": 10}


class Told:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.failures = self.tokens = 0

    def update(self, n: int = 1, failures: int = 0, tokens: int = 0) -> None:
        self.failures += failures
        self.tokens += tokens

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
class TestSeveralInFlight:
    def pairs(self, out: Path, what: str, units: list[Unit], n_workers: int = 1, bad: int = -1, **options: Any) -> Any:
        return run_pool(
            units, functools.partial(PairWorker, out, what, bad), n_workers=n_workers, resources={"num_cpus": 1},
            label="shard", in_flight=2, **options,
        )  # fmt: skip

    def test_a_worker_has_its_next_unit_at_hand(self, tmp_path: Path) -> None:
        told = Told()
        receipts = self.pairs(tmp_path, "meet", UNITS[:2], progress=told)  # each waits for the other
        assert [r["attempt"] for r in receipts] == [1, 1]
        assert told.tokens == 20

    def test_a_unit_that_kills_every_worker_is_found_and_its_neighbours_are_not_blamed(self, tmp_path: Path) -> None:
        units, told = [Unit(f"shard-{i:05d}", i) for i in range(51)], Told()
        done: list[str] = []
        with pytest.raises(PoisonShard, match="shard-00017 failed on every attempt; 50 of 51 are done") as caught:
            self.pairs(tmp_path, "exit", units, n_workers=2, bad=17, progress=told,
                       on_receipt=lambda unit, _: done.append(unit.name))  # fmt: skip
        assert sorted(done) == [u.name for u in units if u.index != 17]
        assert "Also failed" not in str(caught.value)
        attempts = [line for line in str(caught.value).splitlines() if line.lstrip().startswith("attempt ")]
        assert sum("not counted" not in line for line in attempts) == 3
        assert len(attempts) <= 4
        blamed = [note for note in told.notes if not note.startswith("shard-00017") and "not counted" not in note]
        assert blamed == []

    def test_a_neighbour_of_a_unit_that_raised_is_done_again_and_charged_nothing(self, tmp_path: Path) -> None:
        told = Told()
        receipts = self.pairs(tmp_path, "raise beside", UNITS[:2], bad=1, progress=told, max_attempts=2)
        assert [r["attempt"] for r in receipts] == [2, 2]
        assert told.failures == 1
        assert "shard-00001 failed on worker-0" in told.notes[0]


@dataclass
class MemberWorker:
    """One of a group; leaves a file per unit and rank."""

    out: Path
    member: Member

    def run(self, unit: Unit, attempt: int) -> dict[str, Any]:
        (self.out / f"{unit.name} {attempt} {self.member.rank}").write_text(str(os.getpid()))
        if unit.index == 1 and attempt == 1:
            if self.member.rank == 1:
                os._exit(1)
            time.sleep(100)  # as in a collective operation whose other side is gone
        return {"unit": unit.name, "attempt": attempt, "member": dataclasses.astuple(self.member)}


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
class TestGroups:
    def test_all_members_do_every_unit_and_one_that_dies_takes_the_group_with_it(self, tmp_path: Path) -> None:
        import ray

        receipts = run_pool(
            UNITS[:3], functools.partial(MemberWorker, tmp_path), n_workers=1, resources={"num_cpus": 1},
            label="shard", group_size=2,
        )  # fmt: skip
        assert [(r["unit"], r["attempt"]) for r in receipts] == [(u.name, 2 if u.index == 1 else 1) for u in UNITS[:3]]
        rank, size, address, port = receipts[0]["member"]
        assert (rank, size) == (0, 2)
        assert address
        assert 0 < port < 65536
        done = finished(tmp_path)
        assert {f"{r['unit']} {r['attempt']} {rank}" for r in receipts for rank in (0, 1)} <= done
        pids = {(tmp_path / name).read_text() for name in done}
        assert len(pids) == 4
        assert {g["state"] for g in ray.util.placement_group_table().values()} == {"REMOVED"}

    def test_a_group_that_no_machine_has_room_for_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PipelineError, match=r"a worker \(3 processes\) needs 3 CPU"):
            run_pool(UNITS, Factory(tmp_path), n_workers=1, resources={"num_cpus": 1}, group_size=3)

    def test_a_group_does_one_unit_at_a_time(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="one unit at a time"):
            run_pool(UNITS, Factory(tmp_path), n_workers=1, resources={"num_cpus": 1}, group_size=2, in_flight=2)


@dataclass
class TitleWorker:
    """Tells what its process is called while it works."""

    def run(self, unit: Unit, attempt: int) -> dict[str, Any]:
        title = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0 ").decode()
        return {"title": title, "tokens": 5, "bytes": 7, "seconds": 2.0, "device_wait_s": 0.5, "device_busy_s": 1.5}


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
class TestWhatIsSeen:
    def test_names_in_the_dashboard_do_not_clash_between_two_runs(self) -> None:
        import ray

        seen: list[str] = []

        def note_actors(*_: Any) -> None:
            seen.extend(a["name"] for a in ray.util.list_named_actors(all_namespaces=True))

        def titles(_: int) -> list[str]:
            found = run_pool(UNITS[:2], TitleWorker, n_workers=1, resources={"num_cpus": 1}, stage="extract",
                             label="shard", on_receipt=note_actors)  # fmt: skip
            return [r["title"] for r in found]

        with ThreadPoolExecutor(2) as both:
            found = list(both.map(titles, range(2)))
        assert found == [["ray::extract shard-00000 (attempt 1)", "ray::extract shard-00001 (attempt 1)"]] * 2
        assert set(seen) == {"extract-worker-0"}

    def test_metrics_come_out_of_rays_endpoint(self) -> None:
        run_pool(UNITS[:2], TitleWorker, n_workers=1, resources={"num_cpus": 1}, stage="extract", run_name="seen")
        wanted = {"dflash_units_done_total": 2.0, "dflash_tokens_total": 10.0, "dflash_bytes_total": 14.0,
                  "dflash_unit_seconds_count": 2.0, "dflash_device_wait_share": 0.25, "dflash_workers": 0.0}
        assert wait_for_metrics(wanted, 'run="seen",stage="extract"') == wanted
        # Ray's own: one series for all units, since it keeps every one for as long as the driver lives.
        wait_until(lambda: bool(names_of_units()), 60)
        assert names_of_units() <= {"extract unit", "extract shard"}

    def test_workers_without_room_are_told_of_and_do_not_hold_up_the_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pipeline.pool_loop.ROOM_S", 0.3)
        told = Told()
        run_pool(UNITS, Factory(tmp_path), n_workers=3, resources={"num_cpus": 1}, progress=told)
        assert "waiting for room for 1 of 3 workers; the others go on" in told.notes
        assert finished(tmp_path) == ALL


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
class TestClosing:
    """Ray 2.60 may keep an actor's room for good when it is killed while its process starts."""

    @pytest.mark.parametrize("size", [1, 2])
    def test_an_actor_that_is_being_created_is_killed_once_it_is_there(
        self, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import ray

        kill, missing = ray.kill, list[int]()

        def noting_kill(actor: Any) -> None:
            missing.append(len(ray.wait(asked, num_returns=size, timeout=0)[1]))
            kill(actor)

        monkeypatch.setattr(ray, "kill", noting_kill)
        seat = Seat("early", SeatKind(resources={"num_cpus": 1}, size=size, namespace="closing"))
        asked = seat.ask_place()
        wait_until(lambda: "CREATED" in {g["state"] for g in ray.util.placement_group_table().values()})
        seat.close()
        assert missing == [0] * size
        wait_until(lambda: ray.available_resources().get("CPU") == 2)

    def test_one_that_waits_for_room_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ray

        monkeypatch.setattr("pipeline.seats.CREATION_S", 1000)
        first, second = (Seat(f"seat-{i}", SeatKind(resources={"num_cpus": 2}, namespace="room")) for i in range(2))
        ray.get(first.ask_place())
        second.ask_place()
        second.close()
        first.close()
        wait_until(lambda: ray.available_resources().get("CPU") == 2)


def names_of_units() -> set[str]:
    """What Ray counts the calls of workers under, other than those that make them."""
    names = (re.search('Name="([^"]*)"', line) for line in rays_metrics() if line.startswith("ray_tasks{"))
    return {found[1] for found in names if found and found[1].startswith("extract ")}


def rays_metrics() -> list[str]:
    """The lines of Ray's endpoint."""
    import ray

    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
    with urllib.request.urlopen(address, timeout=10) as answer:
        return list(answer.read().decode().splitlines())


def wait_for_metrics(wanted: dict[str, float], labels: str) -> dict[str, float]:
    """What Ray's endpoint shows of these, once it is what is wanted, or after a while."""
    deadline, found = time.monotonic() + 60, dict[str, float]()
    while found != wanted and time.monotonic() < deadline:
        time.sleep(0.5)
        lines = [line for line in rays_metrics() if labels in line]
        found = {name: float(line.split()[-1]) for line in lines for name in wanted
                 if line.startswith(f"ray_{name}{{")}
    return found


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
class TestLostNodes:
    """A node is lost for real in test_cluster.py; here a death is only told as one."""

    @pytest.fixture(autouse=True)
    def _every_death_is_a_lost_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pipeline.seats.death_of", lambda _: Death("node lost (it died)", lost=True))

    def test_a_lost_node_counts_against_no_unit(self, tmp_path: Path) -> None:
        told = Told()
        receipts = pool(Factory(tmp_path, "exit once", bad=2), progress=told, max_attempts=1)
        assert [r["attempt"] for r in receipts] == [1, 1, 2, 1, 1, 1, 1]
        assert told.notes[0].startswith("shard-00002 failed on worker-")
        assert told.notes[0].endswith(": node lost (it died) (no fault of its own, not counted); trying again")

    def test_a_unit_that_brings_nodes_down_ends_some_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pipeline.pool_loop.NODE_LOSSES", 2)
        with pytest.raises(PoisonShard, match=r"attempt 2 on .*node lost"):
            pool(Factory(tmp_path, "exit", bad=6), max_attempts=1)
        assert finished(tmp_path) == ALL - {"shard-00006"}

    def test_a_worker_that_brings_nodes_down_while_it_is_built_ends_the_run_some_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pipeline.pool_loop.NODE_LOSSES", 2)  # per worker
        with pytest.raises(PipelineError, match=r"4 workers died .* the last: node lost.* Their nodes went: use some"):
            pool(Factory(tmp_path, "die in build"), max_attempts=1)


def died(message: str, reason: str = "UNSPECIFIED") -> Exception:
    """Ray's error of a dead actor."""
    from ray.core.generated.common_pb2 import ActorDiedErrorContext, NodeDeathInfo
    from ray.exceptions import ActorDiedError

    context = ActorDiedErrorContext(error_message=message, actor_id=b"0" * 16)
    context.node_death_info.reason = NodeDeathInfo.Reason.Value(reason)
    return ActorDiedError(context)


@pytest.mark.parametrize(
    ("message", "reason", "text", "lost"),
    [
        ("whatever", "AUTOSCALER_DRAIN_PREEMPTED", "node preempted", True),
        (
            "The actor died because its node has died. Node Id: 34c1\n\tthe actor's node was terminated expectedly: "
            "received SIGTERM",
            "EXPECTED_TERMINATION",
            "node lost (expectedly: received SIGTERM)",
            True,
        ),
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "connection error code 2. Some common causes include: (1) the OOM killer",
            "UNSPECIFIED",
            "the worker died (ActorDiedError: Worker exit type: SYSTEM_ERROR Worker exit detail: connection error code "
            "2); killed, out of memory, or crashed",
            False,
        ),
    ],
)
def test_why_a_worker_died(message: str, reason: str, text: str, lost: bool) -> None:
    assert death_of(died(message, reason)) == Death(text, lost)


def test_a_death_is_excused_when_the_node_goes_after_it() -> None:
    task = Task(0, UNITS[0], "shard")
    task.story = [Attempt(1, "worker-0", "the worker died", node_id="a"), Attempt(2, "worker-1", "raised"),
                  Attempt(3, "worker-2", "the worker died", node_id="b")]  # fmt: skip
    task.excuse_lost({"a"})
    assert (task.counted(), task.node_losses()) == (2, 1)
    assert "attempt 1 on worker-0: the worker died (its node went soon after, not counted)" in task.told(in_full=False)


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

    def test_tokens_are_told_where_they_are_known(self) -> None:
        clock, out = Clock(), io.StringIO()
        with Progress(4, "shards", "extract", stream=out, clock=clock, interval_s=1) as progress:
            clock.now += 2
            progress.update(1, tokens=5000)
        assert out.getvalue().splitlines() == [
            "extract: 1/4 shards (25%), 0.5 shards/s, 2,500 tokens/s, 6.0 s left",
            "extract: 1/4 shards in 2.0 s (0.5 shards/s, 2,500 tokens/s)",
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
        (tmp_path / "out").mkdir()
        receipts = self.feed(Factory(tmp_path / "out", "wait for two"), feed)
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


@pytest.mark.parametrize("error", [ConnectionError("nothing answers."), ValueError("Invalid address format: x")])
def test_a_ray_address_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    import ray

    def init(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    words = rf"RAY_ADDRESS is '10.0.0.1:6379'.*{str(error).rstrip('.')}\. Check the address.*RAY_AUTH_MODE"
    with pytest.raises(PipelineError, match=words), ensure_ray():
        pass
