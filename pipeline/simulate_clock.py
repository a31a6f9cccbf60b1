"""What a simulation is made of: a clock with events, links that flows share, nodes that come and go, and curves.

A heap of our own instead of simpy: what this needs beyond a heap (flows that share a bandwidth, all of which change
speed when one begins or ends, and work that a lost node takes away) simpy has not, and its processes would cost a
generator for each of them.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pipeline.errors import PipelineError

Call = Callable[[], object]
_NEVER = float("inf")
MOST_EVENTS = 10_000_000
"""Fifty times what a run of 20,000 shards on 1,000 GPUs has; about a minute."""


class Event:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("call", "live")

    def __init__(self, call: Call) -> None:
        self.call, self.live = call, True

    def cancel(self) -> None:
        """It will not happen."""
        self.live = False


class Clock:
    """Simulated seconds, and what happens in them in order; at the same time, in the order of asking."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.n_events = 0
        self._heap: list[tuple[float, int, Event]] = []
        self._count = itertools.count()

    def after(self, seconds: float, call: Call) -> Event:
        """Let something happen in so many seconds."""
        event = Event(call)
        heapq.heappush(self._heap, (self.now_s + seconds, next(self._count), event))
        return event

    def run(self, over: Callable[[], bool]) -> bool:
        """Let time go on until `over`; False if nothing is left to happen before that.

        Raises:
            PipelineError: there is no end to it.
        """
        while not over():
            if not self._heap:
                return False
            when_s, _, event = heapq.heappop(self._heap)
            if event.live:
                self.now_s = when_s
                self.n_events += 1
                if self.n_events > MOST_EVENTS:
                    raise PipelineError(
                        f"after {MOST_EVENTS:,} events, {self.now_s:.3g} simulated seconds, the run is not over: with "
                        "these rates hardly anything gets done. Look at node_mtbf_h and worker_mtbf_h against start_s, "
                        "checkpoint_s and the seconds of a unit"
                    )
                event.call()
        return True


class Flow:
    """Bytes on their way."""

    __slots__ = ("begun_at", "done", "live", "size")

    def __init__(self, size: float, begun_at: float, done: Call) -> None:
        self.size, self.begun_at, self.done, self.live = size, begun_at, done, True


class Link:
    """Flows that share a bandwidth evenly, none faster than what its own node gives it.

    All flows run at the same speed, so one number, the bytes that a flow which was always there would have had, says
    when each ends: at its own size beyond that number's value when it began.

    Args:
        clock: of the simulation.
        total: bytes per second of all flows together; None: no limit.
        each: bytes per second of one flow, at most; None: no limit.
    """

    def __init__(self, clock: Clock, total: float | None, each: float | None) -> None:
        self._clock, self._total, self._each = clock, total or _NEVER, each or _NEVER
        self._given = self._since_s = 0.0
        self._flows: list[tuple[float, int, Flow]] = []
        self._n_live = 0
        self._count = itertools.count()
        self._next: Event | None = None
        self.bytes_moved = 0.0

    def send(self, size: float, done: Call) -> Flow:
        """Begin a flow; `done` is called when its last byte has arrived."""
        self._advance()
        flow = Flow(size, self._given, done)
        if size <= 0 or (self._total == _NEVER and self._each == _NEVER):
            self.bytes_moved += size
            self._clock.after(0.0, lambda: flow.live and done())
            return flow
        self._n_live += 1
        heapq.heappush(self._flows, (self._given + size, next(self._count), flow))
        self._plan()
        return flow

    def cancel(self, flow: Flow) -> float:
        """End a flow early; the bytes that it had moved."""
        self._advance()
        flow.live = False
        if not any(f is flow for _, _, f in self._flows):  # one without limits, or already there
            return 0.0
        moved = min(self._given - flow.begun_at, flow.size)
        self.bytes_moved += moved
        self._n_live -= 1
        self._plan()
        return moved

    def _speed(self) -> float:
        return min(self._each, self._total / self._n_live)

    def _advance(self) -> None:
        """Give every flow its share of the time since the last look."""
        now_s = self._clock.now_s
        if self._n_live:
            self._given += self._speed() * (now_s - self._since_s)
        self._since_s = now_s

    def _plan(self) -> None:
        """Set the time at which the next flow ends."""
        while self._flows and not self._flows[0][2].live:
            heapq.heappop(self._flows)
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._flows:
            left = max(0.0, self._flows[0][0] - self._given)
            self._next = self._clock.after(left / self._speed(), self._arrive)

    def _arrive(self) -> None:
        self._advance()
        _, _, flow = heapq.heappop(self._flows)
        self._next = None
        self._n_live -= 1
        flow.live = False
        self.bytes_moved += flow.size
        self._plan()
        flow.done()


class Nodes:
    """Nodes that are lost at random and replaced.

    Args:
        clock: of the simulation.
        count: nodes.
        mtbf_s: mean seconds between losses of one node; None: none is lost.
        announced_share: of the losses, those that are announced (a drain, a spot notice).
        replace_s: until another node is there.
        chance: where the times come from.
        lost: called with the node's number and whether it was announced.
        back: called with the number of a node that has been replaced.
    """

    def __init__(
        self, clock: Clock, count: int, *, mtbf_s: float | None, announced_share: float, replace_s: float,
        chance: random.Random, lost: Callable[[int, bool], object], back: Callable[[int], object],
    ) -> None:  # fmt: skip
        self._clock, self._mtbf_s, self._announced, self._replace_s = clock, mtbf_s, announced_share, replace_s
        self._chance, self._lost, self._back = chance, lost, back
        self.n_losses = 0
        self._over = False
        for node in range(count):
            self._watch(node)

    def stop(self) -> None:
        """The stage is over; what happens to its nodes is of no interest."""
        self._over = True

    def _watch(self, node: int) -> None:
        if self._mtbf_s is not None:
            self._clock.after(self._chance.expovariate(1 / self._mtbf_s), lambda: self._lose(node))

    def _lose(self, node: int) -> None:
        if self._over:
            return
        self.n_losses += 1
        self._clock.after(self._replace_s, lambda: self._return(node))
        self._lost(node, self._chance.random() < self._announced)

    def _return(self, node: int) -> None:
        if not self._over:
            self._watch(node)
            self._back(node)


class Curve:
    """A value that changes in steps over simulated time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.value = self.peak = 0.0
        self._times: list[float] = [0.0]
        self._values: list[float] = [0.0]

    def add(self, change: float) -> None:
        """Change it now."""
        self.value += change
        self.peak = max(self.peak, self.value)
        self._times.append(self._clock.now_s)
        self._values.append(self.value)

    def means(self, edges_s: npt.NDArray[np.float64]) -> list[float]:
        """Its mean between each two neighbouring times, [edges − 1]."""
        times, values = np.asarray(self._times), np.asarray(self._values)
        areas = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
        at = np.clip(np.searchsorted(times, edges_s, side="right") - 1, 0, len(times) - 1)
        total = areas[at] + values[at] * (edges_s - times[at])
        means: list[float] = (np.diff(total) / np.diff(edges_s)).tolist()
        return means
