"""The driver's loop over a pool of workers: hands out units, takes what comes back, replaces workers that failed.

See `pipeline.runner` for what happens when something fails. Per unit it costs one call of an actor and a look at each
worker; nothing that grows with the number of units.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.deaths import dead_nodes
from pipeline.errors import PipelineError, StorageError
from pipeline.feed import Feed, Listed, Shown
from pipeline.host import Outcome, Receipt, Worker
from pipeline.metrics import RunMetrics
from pipeline.seats import BUILDING, PLACING, READY, Call, Seat, SeatKind, outcome_of
from pipeline.tasks import Attempt, Task, failure_of

WAIT_S = 1.0  # how often the driver shows signs of life while nothing finishes
ASK_S = 0.1  # how often a feed is asked again while workers are idle
ROOM_S = 30.0  # how often it is said that workers wait for room
NODE_LOSSES = 10  # times that a unit's node may go under it: a unit that brings nodes down must end some time


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolKind:
    """What `run_pool` was asked for; `hasty`: a unit that failed for good ends it all."""

    build_worker: Callable[..., Worker]
    n_workers: int
    max_attempts: int
    label: str
    stage: str
    run_name: str
    hasty: bool
    seats: SeatKind


class Pool:
    """One run over the units of a feed."""

    def __init__(
        self, feed: Feed, kind: PoolKind, progress: Shown, on_receipt: Callable[[Any, Receipt], None]
    ) -> None:
        self._feed, self._kind, self._progress, self._on_receipt = feed, kind, progress, on_receipt
        self._metrics = RunMetrics(kind.run_name or "run", kind.stage or kind.label)
        self._again: deque[Task] = deque()  # failed units; those of a sequence wait until all others are on their way
        self._n_drawn = self._n_hired = self._build_deaths = self._build_losses = 0
        self._exhausted = False
        self._receipts: dict[int, Receipt] = {}
        self._failed: list[Task] = []
        self._seats: list[Seat] = []
        self._waiting: dict[Any, tuple[Call, int]] = {}  # reference -> the call that it answers, and whose rank
        self._told_room = time.monotonic()

    def run(self) -> list[Receipt]:
        """Receipts in the order of the units."""
        try:
            for _ in range(self._kind.n_workers):
                self._hire()
            while self._goes_on():
                self._wait()
                self._employ()
                self._progress.update(0)
                self._tell_room()
        finally:
            # Also on Ctrl-C: whatever is still running is unwanted, and what it had not committed is not there.
            for seat in self._seats:
                seat.close()
            self._metrics.workers(0)
        if self._failed:
            raise failure_of(self._failed, f"{len(self._receipts)} of {self._n_drawn}")
        return [self._receipts[i] for i in sorted(self._receipts)]

    def _goes_on(self) -> bool:
        if (self._kind.hasty and self._failed) or self._feed.given_up():
            return False
        return bool(self._again or not self._exhausted or any(seat.tasks for seat in self._seats))

    # --- what comes back ------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Take all that comes back within a moment."""
        import ray

        patience_s = ASK_S if any(seat.has_room for seat in self._seats) else WAIT_S
        references = list(self._waiting)
        if not references:
            time.sleep(patience_s)
            return
        ready, _ = ray.wait(references, num_returns=1, timeout=patience_s)
        if ready and len(references) > 1:
            ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        arrived = [(reference, outcome_of(reference)) for reference in ready]
        # Receipts first: a worker that died just after a commit must not take that with it.
        for reference, outcome in sorted(arrived, key=lambda a: "receipt" not in a[1]):
            call, rank = self._waiting.pop(reference, (None, 0))
            if call is not None:  # None: its seat has been given up meanwhile
                self._take(call, rank, outcome)

    def _take(self, call: Call, rank: int, outcome: Outcome) -> None:
        """Note one member's outcome; with the last one, or the first failure, the call is over."""
        call.outcomes[rank] = outcome
        if "receipt" in outcome and len(call.outcomes) < self._kind.seats.size:
            return
        if call.task is not None:
            self._settle(call.seat, call.task, rank, call.outcomes)
        elif "receipt" not in outcome:
            self._not_built(call.seat, outcome)
        elif call.seat.phase == PLACING:
            self._build(call)
        else:
            call.seat.phase = READY
            self._build_deaths = self._build_losses = 0
            self._metrics.workers(sum(seat.phase == READY for seat in self._seats))

    def _build(self, call: Call) -> None:
        """There is room for the seat: let it build its worker."""
        seat = call.seat
        seat.places = {rank: outcome["receipt"] for rank, outcome in call.outcomes.items()}
        seat.name += f" ({seat.places[0].text})"
        seat.phase = BUILDING
        self._expect(Call(seat), seat.build(self._kind.build_worker))

    def _not_built(self, seat: Seat, outcome: Outcome) -> None:
        if "error" in outcome:
            raise outcome["error"]
        if "traceback" in outcome:
            raise PipelineError(f"{seat.name} could not be built: {outcome['failure']}\n{outcome['traceback']}")
        self._build_deaths += not outcome["lost"]
        self._build_losses += outcome["lost"]
        most = (self._kind.max_attempts, NODE_LOSSES * self._kind.n_workers)
        if self._build_deaths >= most[0] or self._build_losses >= most[1]:
            times = f"{self._build_deaths + self._build_losses} workers died while they were being built"
            advice = "Is there memory for the model?" if self._build_deaths else "Their nodes went: use some that stay"
            raise PipelineError(f"{times}, the last: {outcome['failure']}. {advice}")
        self._replace(seat)

    def _settle(self, seat: Seat, task: Task, rank: int, outcomes: dict[int, Outcome]) -> None:
        """A unit's attempt is over."""
        outcome = outcomes[rank]
        failed = "receipt" not in outcome
        if not failed or "receipt" in outcomes.get(0, {}):
            seat.tasks.remove(task)
            self._done(task, outcomes[0]["receipt"])
        elif "error" in outcome:
            seat.tasks.remove(task)
            self._refused(seat, task, outcome["error"])
        elif "traceback" in outcome:
            seat.tasks.remove(task)
            self._raised(seat, task, outcome)
        else:
            self._died(seat, rank, outcome)
        # After an error of the unit a lone actor is as good as before; the others of a group may wait for it for ever.
        if failed and ("error" not in outcome or self._kind.seats.size > 1):
            self._replace(seat)

    def _done(self, task: Task, receipt: Receipt) -> None:
        self._receipts[task.index] = receipt
        self._on_receipt(task.unit, receipt)
        self._metrics.done(receipt)
        self._progress.update(1, 0, receipt.get("tokens", 0))

    # --- what failed ----------------------------------------------------------------------------------

    def _refused(self, seat: Seat, task: Task, error: Any) -> None:
        if isinstance(error, StorageError):
            raise StorageError(f"{task.name}: {error}")  # every other unit would end the same way
        task.error = error
        self._count_failure(task, Attempt(task.attempt, seat.name, str(error)), "refused")

    def _raised(self, seat: Seat, task: Task, outcome: Outcome) -> None:
        task.traceback = outcome["traceback"].rstrip()
        task.lone = True  # it may have spoilt the process for others, or they for it
        self._count_failure(task, Attempt(task.attempt, seat.name, outcome["failure"]), "raised")

    def _died(self, seat: Seat, rank: int, outcome: Outcome) -> None:
        """The seat's units come back; only one that was alone is to blame, and only if the node is still there."""
        tasks, seat.tasks = seat.tasks, []
        node_id = seat.places[rank].node_id
        for task in tasks:
            attempt = Attempt(task.attempt, seat.name, outcome["failure"], node_id=node_id)
            if outcome["lost"]:
                attempt.node_lost, attempt.excuse = True, "no fault of its own"
            elif len(tasks) > 1:
                others = ", ".join(t.name for t in tasks if t is not task)
                attempt.excuse = f"{others} was open too"
                task.lone = True
            self._count_failure(task, attempt, "node_lost" if outcome["lost"] else "died")

    def _count_failure(self, task: Task, attempt: Attempt, cause: str) -> None:
        """Write down an attempt, and decide whether there is another."""
        task.story.append(attempt)
        self._metrics.failed(cause)
        self._progress.update(0, 1)
        final = self._is_final(task)
        (self._failed if final else self._again).append(task)
        excuse = f" ({attempt.excuse}, not counted)" if attempt.excuse else ""
        then = "giving up on it, the rest goes on" if final else "trying again"
        self._progress.note(f"{task.name} failed on {attempt.worker}: {attempt.text}{excuse}; {then}")

    def _is_final(self, task: Task) -> bool:
        if task.error is not None:
            return True
        if task.counted() >= self._kind.max_attempts:
            task.excuse_lost(dead_nodes())
        return task.counted() >= self._kind.max_attempts or task.node_losses() >= NODE_LOSSES

    def _replace(self, seat: Seat) -> None:
        """End a seat that failed; units that it still had are queued again, charged nothing."""
        seat.close()
        self._seats.remove(seat)
        self._waiting = {r: entry for r, entry in self._waiting.items() if entry[0].seat is not seat}
        self._again.extend(seat.tasks)
        seat.tasks = []
        if self._again or not self._exhausted:
            self._hire()
        self._metrics.workers(sum(s.phase == READY for s in self._seats))

    # --- what is handed out ---------------------------------------------------------------------------

    def _hire(self) -> None:
        """Ask for an actor, or a group of them; it is placed when there is room."""
        prefix = f"{self._kind.stage}-" if self._kind.stage else ""
        seat = Seat(f"{prefix}worker-{self._n_hired}", self._kind.seats)
        self._n_hired += 1
        self._seats.append(seat)
        self._expect(Call(seat), seat.ask_place())

    def _expect(self, call: Call, references: list[Any]) -> None:
        self._waiting |= {reference: (call, rank) for rank, reference in enumerate(references)}

    def _employ(self) -> None:
        """Give workers with room something to do; once there is nothing left, let the idle ones go."""
        # Looked for once: of a thousand seats few have room at a time, and only what is handed out here changes that.
        free = [seat for seat in self._seats if seat.has_room]
        while free:
            seat = min(free, key=lambda s: len(s.tasks))
            task = self._next_task(idle=not seat.tasks)
            if task is None:
                break
            task.attempt += 1
            shown = f"{self._kind.stage} {task.name} (attempt {task.attempt})".lstrip()
            self._expect(Call(seat, task), seat.run(task, shown))
            if not seat.has_room:
                free.remove(seat)
        if self._exhausted and not self._again:
            for seat in [s for s in self._seats if s.phase == READY and not s.tasks]:
                seat.close()
                self._seats.remove(seat)

    def _next_task(self, idle: bool) -> Task | None:
        """The next unit for the seat with the most room; `idle` if that has none now."""
        if self._kind.hasty and self._again:
            return self._tried_task(idle)
        if not self._exhausted:
            if not idle and self._scarce():
                return None
            try:
                unit = self._feed.next_unit()
            except StopIteration:
                self._exhausted = True
            else:
                self._exhausted = isinstance(self._feed, Listed) and not len(self._feed)
                if unit is not None:
                    self._n_drawn += 1
                    return Task(self._n_drawn - 1, unit, self._kind.label)
        return self._tried_task(idle)

    def _tried_task(self, idle: bool) -> Task | None:
        """A unit that came back; one on probation waits for a seat that has nothing else."""
        task = next((t for t in self._again if idle or not t.lone), None)
        if task is not None:
            self._again.remove(task)
        return task

    def _scarce(self) -> bool:
        """Whether the last units had better wait for workers that have none than queue behind others."""
        return isinstance(self._feed, Listed) and len(self._feed) < sum(s.phase == READY for s in self._seats)

    def _tell_room(self) -> None:
        """Say now and then how many workers are not placed."""
        now = time.monotonic()
        long = [s for s in self._seats if s.phase == PLACING and now - s.hired_at > ROOM_S]
        if long and now - self._told_room > ROOM_S:
            self._told_room = now
            others = "; the others go on" if len(long) < len(self._seats) else ""
            self._progress.note(f"waiting for room for {len(long)} of {len(self._seats)} workers{others}")
