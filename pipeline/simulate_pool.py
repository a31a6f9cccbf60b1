"""A pool of workers, played: the rules of `pipeline.pool_loop`, with seconds instead of work.

What happens to a unit whose worker dies or whose node goes is what the real loop does: a death counts against a unit
that was alone, never against several; a lost node counts against none, up to `NODE_LOSSES` times; units that came back
wait until all others are on their way; a unit on probation has a worker for itself.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.pool_loop import NODE_LOSSES
from pipeline.simulate_clock import Clock, Curve, Event, Flow, Link, Nodes
from pipeline.simulate_file import ClusterRates, PoolRates

UNEVENTFUL = 1e-9  # seconds or tokens that are nothing


class Source(Protocol):
    """Where units come from."""

    def next_unit(self) -> int | None:
        """The next one, None when there is none just now; raises StopIteration when there will be none."""

    def left(self) -> int | None:
        """How many are left, where that is known."""


class Listed:
    """Units 0 … n − 1."""

    def __init__(self, n: int) -> None:
        self._n, self._next = n, 0

    def next_unit(self) -> int | None:
        if self._next >= self._n:
            raise StopIteration
        self._next += 1
        return self._next - 1

    def left(self) -> int | None:
        return self._n - self._next


@dataclass(slots=True, eq=False)
class Unit:
    """A unit with its history."""

    number: int
    tokens: float
    counted: int = 0
    node_losses: int = 0
    lone: bool = False


@dataclass(slots=True, eq=False)
class _Open:
    """A unit on a seat."""

    unit: Unit
    flow: Flow | None = None
    event: Event | None = None
    began_s: float | None = None
    """When it got the GPU, while it has it."""
    spent_s: float = 0.0
    """Seconds of the GPU that it has had."""
    writing: bool = False


@dataclass(slots=True, eq=False)
class _Seat:
    """A worker."""

    node: int
    open: list[_Open] = field(default_factory=list)
    queue: deque[_Open] = field(default_factory=deque)
    on_device: _Open | None = None
    events: list[Event] = field(default_factory=list)
    ready: bool = False
    began_s: float = 0.0


@dataclass(slots=True)
class PoolTally:
    """What a pool has come to, in seconds of workers."""

    done: int = 0
    failed: int = 0
    attempts_again: int = 0
    busy_s: float = 0.0
    lost_s: float = 0.0
    starting_s: float = 0.0
    tokens: float = 0.0
    worker_deaths: int = 0
    garbage_bytes: float = 0.0


class PoolPlay:
    """A stage on a pool.

    Args:
        clock: of the simulation.
        rates: of the stage.
        cluster: its nodes; the first `n_nodes` of them have workers.
        source: the units.
        n_tokens: of all units together; the last one has what is left.
        read, write: the store.
        chance: where everything random comes from.
        on_done: called with the number and bytes of a unit as it is committed.
    """

    def __init__(
        self, clock: Clock, rates: PoolRates, cluster: ClusterRates, source: Source, n_tokens: float, *,
        read: Link, write: Link, chance: random.Random, on_done: Callable[[int, float], Any],
    ) -> None:  # fmt: skip
        self.tally, self.working = PoolTally(), Curve(clock)
        self._clock, self._rates, self._cluster, self._source, self._n_tokens = clock, rates, cluster, source, n_tokens
        self._read, self._write, self._chance, self._on_done = read, write, chance, on_done
        self._again: deque[Unit] = deque()
        self._exhausted = False
        self._n_drawn = self._n_away = 0  # away: their node has gone and nobody knows yet
        # Seats with room, by the number of units that they have: the emptiest is served first.
        self._free: list[dict[_Seat, None]] = [{} for _ in range(rates.in_flight)]
        self._seats: dict[int, list[_Seat]] = {}
        self._n_ready = 0
        self._driver_free_s = 0.0
        per_node = cluster.gpus_per_node // rates.gpus_per_worker
        self._per_node = [min(per_node, rates.workers - at) for at in range(0, rates.workers, per_node)]
        for node in range(len(self._per_node)):
            self._fill(node)
        self.nodes = Nodes(
            clock, len(self._per_node), mtbf_s=_seconds(cluster.node_mtbf_h), announced_share=cluster.announced_share,
            replace_s=cluster.replace_s, chance=chance, lost=self._lose, back=self._fill,
        )  # fmt: skip

    def over(self) -> bool:
        """Whether every unit is done or given up."""
        nothing = self._exhausted and not self._again and not self._n_away
        return nothing and self.tally.done + self.tally.failed == self._n_drawn

    def poke(self) -> None:
        """The source may have something now."""
        self._employ()

    # --- seats ----------------------------------------------------------------------------------------

    def _fill(self, node: int) -> None:
        self._seats[node] = []
        for _ in range(self._per_node[node]):
            self._hire(node)

    def _hire(self, node: int) -> None:
        seat = _Seat(node, began_s=self._clock.now_s)
        self._seats[node].append(seat)
        seat.events.append(self._clock.after(self._rates.start_s, lambda: self._begin(seat)))

    def _begin(self, seat: _Seat) -> None:
        seat.ready = True
        seat.events.clear()
        self.tally.starting_s += self._clock.now_s - seat.began_s
        self._n_ready += 1
        mtbf_s = _seconds(self._cluster.worker_mtbf_h)
        if mtbf_s is not None:
            seat.events.append(self._clock.after(self._chance.expovariate(1 / mtbf_s), lambda: self._die(seat)))
        self._offer(seat)
        self._employ()

    def _offer(self, seat: _Seat) -> None:
        """Put a seat where its number of units says, unless it is full or has one on probation."""
        for free in self._free:
            free.pop(seat, None)
        n = len(seat.open)
        if seat.ready and n < self._rates.in_flight and not any(o.unit.lone for o in seat.open):
            self._free[n][seat] = None

    def _die(self, seat: _Seat) -> None:
        """A worker dies alone; another starts on the same node."""
        self.tally.worker_deaths += 1
        self._seats[seat.node].remove(seat)
        units = self._end(seat)
        if len(units) == 1:
            units[0].counted += 1
        for unit in units:
            unit.lone |= len(units) > 1
        self._come_back(units)
        self._hire(seat.node)
        self._employ()

    def _lose(self, node: int, announced: bool) -> None:
        """A node goes with all its workers; the driver hears of it at once if it said so."""
        units = [unit for seat in self._seats.pop(node, []) for unit in self._end(seat)]
        for unit in units:
            unit.node_losses += 1
        self._n_away += len(units)

        def hear() -> None:
            self._n_away -= len(units)
            self._come_back(units)
            self._employ()

        self._clock.after(0.0 if announced else self._cluster.detect_s, hear)

    def _end(self, seat: _Seat) -> list[Unit]:
        """Take a seat away; the units that it had."""
        now_s = self._clock.now_s
        for event in seat.events:
            event.cancel()
        if not seat.ready:
            self.tally.starting_s += now_s - seat.began_s
        self._n_ready -= seat.ready
        seat.ready = False
        self._offer(seat)
        for opened in seat.open:
            if opened.event is not None:
                opened.event.cancel()
            if opened.flow is not None:
                moved = (self._write if opened.writing else self._read).cancel(opened.flow)
                self.tally.garbage_bytes += moved if opened.writing else 0.0
            if opened.began_s is not None:
                opened.spent_s += now_s - opened.began_s
                self.working.add(-1)
            self.tally.lost_s += opened.spent_s
        return [opened.unit for opened in seat.open]

    def _come_back(self, units: list[Unit]) -> None:
        for unit in units:
            if unit.counted >= self._rates.max_attempts or unit.node_losses >= NODE_LOSSES:
                self.tally.failed += 1
            else:
                self.tally.attempts_again += 1
                self._again.append(unit)

    # --- units ----------------------------------------------------------------------------------------

    def _employ(self) -> None:
        while (level := next((n for n, free in enumerate(self._free) if free), None)) is not None:
            unit = self._next_unit(idle=level == 0)
            if unit is None:
                return
            self._open(next(iter(self._free[level])), unit)

    def _next_unit(self, idle: bool) -> Unit | None:
        left = self._source.left()
        if not self._exhausted:
            if not idle and left is not None and left < self._n_ready:
                return None
            try:
                number = self._source.next_unit()
            except StopIteration:
                self._exhausted = True
            else:
                self._exhausted = self._source.left() == 0
                if number is not None:
                    self._n_drawn += 1
                    return Unit(number, self._tokens_of(number))
        unit = next((u for u in self._again if idle or not u.lone), None)
        if unit is not None:
            self._again.remove(unit)
        return unit

    def _tokens_of(self, number: int) -> float:
        size = self._rates.unit_tokens
        n_units = math.ceil(self._n_tokens / size - UNEVENTFUL)
        return size if number % n_units < n_units - 1 else self._n_tokens - size * (n_units - 1)

    def _open(self, seat: _Seat, unit: Unit) -> None:
        opened = _Open(unit)
        seat.open.append(opened)
        self._offer(seat)
        # The driver is one process: whoever comes while it serves others waits.
        now_s = self._clock.now_s
        self._driver_free_s = max(self._driver_free_s, now_s) + self._rates.dispatch_s
        opened.event = self._clock.after(self._driver_free_s - now_s, lambda: self._fetch(seat, opened))

    def _fetch(self, seat: _Seat, opened: _Open) -> None:
        size = opened.unit.tokens * self._rates.read_token_bytes
        opened.flow = self._read.send(size, lambda: self._queue(seat, opened))

    def _queue(self, seat: _Seat, opened: _Open) -> None:
        opened.flow = None
        if seat.on_device is None:
            self._compute(seat, opened)
        else:
            seat.queue.append(opened)

    def _compute(self, seat: _Seat, opened: _Open) -> None:
        seat.on_device, opened.began_s = opened, self._clock.now_s
        self.working.add(1)
        opened.event = self._clock.after(self._seconds_of(opened.unit), lambda: self._computed(seat, opened))

    def _seconds_of(self, unit: Unit) -> float:
        mean_s = unit.tokens / (self._rates.tokens_per_s * self._rates.gpus_per_worker)
        spread = self._rates.unit_spread
        if spread == 0:
            return mean_s
        sigma = math.sqrt(math.log1p(spread**2))
        return mean_s * self._chance.lognormvariate(-(sigma**2) / 2, sigma)

    def _computed(self, seat: _Seat, opened: _Open) -> None:
        self.working.add(-1)
        opened.spent_s += self._clock.now_s - (opened.began_s or 0.0)
        opened.began_s = opened.event = seat.on_device = None
        if seat.queue:
            self._compute(seat, seat.queue.popleft())
        opened.writing = True
        size = opened.unit.tokens * self._rates.token_bytes
        opened.flow = self._write.send(size, lambda: self._committed(seat, opened, size))

    def _committed(self, seat: _Seat, opened: _Open, size: float) -> None:
        seat.open.remove(opened)
        self._offer(seat)
        self.tally.done += 1
        self.tally.busy_s += opened.spent_s
        self.tally.tokens += opened.unit.tokens
        self._on_done(opened.unit.number, size)
        self._employ()


def _seconds(hours: float | None) -> float | None:
    return None if hours is None else hours * 3600
