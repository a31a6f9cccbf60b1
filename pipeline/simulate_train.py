"""A training, played: ranks that take every step together, fall back to a checkpoint when one is lost, and wait for
shards that are not there. And the cache of a rolling run, where extraction makes what training needs next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.errors import PipelineError
from pipeline.report_text import bytes_text
from pipeline.simulate_clock import Clock, Curve, Event, Nodes
from pipeline.simulate_file import Simulation
from pipeline.simulate_pool import UNEVENTFUL, PoolPlay


@dataclass(slots=True)
class TrainTally:
    """What a training has come to, in seconds of its ranks."""

    busy_s: float = 0.0
    lost_s: float = 0.0
    starting_s: float = 0.0
    steps_again: float = 0.0
    restarts: int = 0
    deaths: int = 0


class TrainPlay:
    """Training from step 0 to the last.

    Args:
        clock: of the simulation.
        sim: what is played.
        chance: where losses of nodes come from.
        arrived: called when the step `target` is reached; sets the next one with `go_to`.
        fell_back: called with the step that a training goes on from after a loss.
    """

    def __init__(
        self, clock: Clock, sim: Simulation, *, chance: random.Random, arrived: Callable[[], Any],
        fell_back: Callable[[float], Any],
    ) -> None:  # fmt: skip
        assert sim.train is not None
        self.tally, self.working, self.sim, self.rates = TrainTally(), Curve(clock), sim, sim.train
        self.n_steps = math.ceil(sim.samples / self.rates.batch_samples) * self.rates.epochs
        self.position = self.target = self._saved = 0.0
        self._clock, self._arrived, self._fell_back = clock, arrived, fell_back
        per_node = sim.cluster.gpus_per_node // self.rates.gpus_per_rank
        self._per_node = [min(per_node, self.rates.ranks - at) for at in range(0, self.rates.ranks, per_node)]
        self._here = set(range(len(self._per_node)))
        self._working_ranks = 0
        self._since_s = self._began_s = 0.0
        self._event: Event | None = None  # the start of the ranks, or the arrival at the target
        self._not_before_s = clock.now_s
        self.nodes = Nodes(
            clock, len(self._per_node), mtbf_s=(sim.cluster.node_mtbf_h or 0) * 3600 or None,
            announced_share=sim.cluster.announced_share, replace_s=sim.cluster.replace_s, chance=chance,
            lost=self._lose, back=self._return,
        )  # fmt: skip
        self._chance, self._mtbf_h = chance, sim.cluster.worker_mtbf_h
        self._watch_ranks()
        self._start()

    def over(self) -> bool:
        """Whether the last step is done."""
        return self.position >= self.n_steps - UNEVENTFUL

    def go_to(self, target: float) -> None:
        """Train up to this step, then ask again."""
        self._settle()
        self.target = target
        self._plan()

    def bytes_per_step(self) -> float:
        """Bytes that a step reads."""
        extract = self.sim.extract
        token_bytes = extract.token_bytes if extract else 0.0
        return self.rates.batch_samples * self.sim.tokens_per_sample * token_bytes * self.rates.read_share

    def step_s(self, ranks: int) -> tuple[float, float]:
        """Seconds of one step, checkpoints included, and of its arithmetic alone."""
        rates, store = self.rates, self.sim.store
        per_rank = rates.tokens_per_s * rates.gpus_per_rank
        compute_s = rates.batch_samples * self.sim.tokens_per_sample / (per_rank * ranks)
        n_nodes = len(self._here) or 1
        speeds = [store.read_bytes_per_s, store.node_read_bytes_per_s and store.node_read_bytes_per_s * n_nodes]
        limits = [speed for speed in speeds if speed]
        read_s = self.bytes_per_step() / min(limits) if limits else 0.0
        return max(compute_s, read_s) + rates.checkpoint_s / rates.checkpoint_every, compute_s

    # --- ranks ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start all ranks that there are, as soon as it is known that there are enough."""
        ranks = sum(self._per_node[node] for node in self._here)
        if ranks < (self.rates.min_ranks or self.rates.ranks):
            return
        wait_s = max(0.0, self._not_before_s - self._clock.now_s)
        self._began_s = self._clock.now_s + wait_s
        self._event = self._clock.after(wait_s + self.rates.start_s, lambda: self._begin(ranks))

    def _begin(self, ranks: int) -> None:
        self.tally.starting_s += (self._clock.now_s - self._began_s) * ranks
        self._event = None
        self._working_ranks = ranks
        self._since_s = self._clock.now_s
        self._plan()

    def _watch_ranks(self) -> None:
        if self._mtbf_h is not None:
            rate = self.rates.ranks / (self._mtbf_h * 3600)
            self._clock.after(self._chance.expovariate(rate), self._lose_rank)

    def _lose_rank(self) -> None:
        """A rank dies alone: all of them begin again from the newest checkpoint."""
        if self._working_ranks:
            self.tally.deaths += 1
            self._stop(saved=False)
            self._start()
        self._watch_ranks()

    def _lose(self, node: int, announced: bool) -> None:
        self._stop(saved=announced)
        self._here.discard(node)
        self._not_before_s = self._clock.now_s + (0.0 if announced else self.sim.cluster.detect_s)
        self._start()

    def _return(self, node: int) -> None:
        """A node is back; an elastic training that went on without it takes it in from the newest checkpoint."""
        self._stop(saved=False)
        self._here.add(node)
        self._start()

    def _stop(self, saved: bool) -> None:
        """All ranks end; what was done since the checkpoint is lost, unless there was time to save."""
        self._settle()
        if self._event is not None:
            self._event.cancel()
            self._event = None
        if not self._working_ranks:
            return
        self._set_working(0)
        every, ranks = self.rates.checkpoint_every, self._working_ranks
        kept: float = math.floor(self.position + UNEVENTFUL)
        if not saved:
            kept = max(self._saved, kept // every * every)
        self._saved = max(self._saved, kept)
        lost = max(0.0, self.position - kept)
        lost_s = min(lost * self.step_s(ranks)[1] * ranks, self.tally.busy_s)
        self.tally.busy_s -= lost_s
        self.tally.lost_s += lost_s
        self.tally.steps_again += lost
        self.tally.restarts += 1
        self._working_ranks = 0
        self.position = min(self.position, kept)
        self._fell_back(self.position)

    # --- steps ----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Count the steps since the last look."""
        now_s = self._clock.now_s
        if self._working_ranks and self.position < self.target:
            step_s, compute_s = self.step_s(self._working_ranks)
            steps = min((now_s - self._since_s) / step_s, self.target - self.position)
            self.position += steps
            self.tally.busy_s += steps * compute_s * self._working_ranks
        self._since_s = now_s

    def _plan(self) -> None:
        if not self._working_ranks:
            return
        if self._event is not None:
            self._event.cancel()
            self._event = None
        left = self.target - self.position
        self._set_working(self._working_ranks if left > 0 else 0)
        if left > 0:
            self._event = self._clock.after(left * self.step_s(self._working_ranks)[0], self._arrive)

    def _set_working(self, ranks: int) -> None:
        if ranks != self.working.value:
            self.working.add(ranks - self.working.value)

    def _arrive(self) -> None:
        self._settle()
        self._event, self.position = None, self.target
        self._set_working(0)
        self._arrived()


class RollingCache:
    """Which shards are there while extraction and training run at the same time.

    Shards come in the order of the windows that training goes through; those that it is done with go when room is
    needed. Every round (`passes_per_window` epochs) makes all of them again: what a round leaves behind for the next is
    not counted on, so a limit near the whole cache's size is judged too harshly.

    Args:
        sim: what is played.
        stored: the bytes on disk.
    """

    def __init__(self, sim: Simulation, stored: Curve) -> None:
        assert sim.train is not None
        assert sim.extract is not None
        self.sim, self.stored, self.limit, self.rates = sim, stored, sim.max_bytes or math.inf, sim.train
        self.n_shards, self.n_rounds = sim.n_shards, sim.train.epochs // sim.train.passes_per_window
        self.shard_bytes = sim.cache_bytes / self.n_shards
        self._there: dict[int, float] = {}
        self._coming: set[int] = set()
        self._bytes = 0.0
        self._window_at = self._complete_to = self._next = self._low = 0
        self.made = self.made_again = 0
        self._seen: set[int] = set()
        self.train: TrainPlay | None = None
        self.extraction: PoolPlay | None = None
        need = (self.rates.window_shards + sim.extract.workers) * self.shard_bytes
        if need > self.limit:
            raise PipelineError(
                f"max_bytes is {bytes_text(self.limit)}, but a window of {self.rates.window_shards} shards and one for "
                f"each of {sim.extract.workers} extract workers take {bytes_text(need)}; raise it, or lower "
                "train.window_shards"
            )

    # A place is round · n_shards + place in the round's order.

    def _window_end(self, place: int) -> int:
        """The place behind the window that `place` is in."""
        number, within = divmod(place, self.n_shards)
        return number * self.n_shards + min((within // self.rates.window_shards + 1) * self.rates.window_shards,
                                            self.n_shards)  # fmt: skip

    def _step_of(self, place: int) -> float:
        """The step at which training is through with all shards before this place."""
        assert self.train is not None
        return place / (self.n_rounds * self.n_shards) * self.train.n_steps

    def _place_of(self, step: float) -> int:
        """Where the window begins that a step reads."""
        assert self.train is not None
        place = math.floor(step / self.train.n_steps * self.n_rounds * self.n_shards + UNEVENTFUL)
        number, within = divmod(place, self.n_shards)
        return number * self.n_shards + within // self.rates.window_shards * self.rates.window_shards

    def next_unit(self) -> int | None:
        """The shard that training needs next and that is neither there nor coming, if there is room for it."""
        while self._next in self._there or self._next in self._coming:
            self._next += 1
        if self._next >= self.n_rounds * self.n_shards:
            return None
        while self._bytes + (len(self._coming) + 1) * self.shard_bytes > self.limit:
            gone = self._removable()
            if gone is None:
                return None
            size = self._there.pop(gone)
            self._bytes -= size
            self.stored.add(-size)
        self._coming.add(self._next)
        return self._next

    def left(self) -> int | None:
        return None

    def _removable(self) -> int | None:
        """A shard that training is done with, else the one that it needs last, if that is after the next one."""
        while self._low < self._window_at:
            self._low += 1
            if self._low - 1 in self._there:
                return self._low - 1
        needed_now = self._next < self._window_end(self._window_at)
        last = max(self._there, default=-1) if needed_now else -1
        return last if last > self._next else None

    def take(self, number: int, size: float) -> None:
        """A shard has been committed."""
        self._coming.discard(number)
        self._there[number] = size
        self._bytes += size
        self.stored.add(size)
        self.made += 1
        again = number % self.n_shards in self._seen
        self.made_again += again
        self._seen.add(number % self.n_shards)
        self.advance()

    def advance(self) -> None:
        """Let training go to the end of its window if all of that is there."""
        assert self.train is not None
        end = self._window_end(self._window_at)
        if self._complete_to < end and all(n in self._there for n in range(self._complete_to, end)):
            self._complete_to = end
        if self._complete_to >= end and self.train.target < self._step_of(end):
            self.train.go_to(self._step_of(end))

    def arrived(self) -> None:
        """Training is through with a window."""
        self._window_at = min(self._window_end(self._window_at), self.n_rounds * self.n_shards - 1)
        self._complete_to = max(self._complete_to, self._window_at)
        self.advance()
        if self.extraction is not None:
            self.extraction.poke()  # there is room for more

    def fell_back(self, step: float) -> None:
        """Training goes on from an earlier step: what it needs from there on must be there again."""
        assert self.train is not None
        place = self._place_of(min(step, self.train.n_steps - 1))
        if place < self._window_at:
            self._window_at = self._complete_to = self._next = place
            self._low = min(self._low, place)
            self.train.target = min(self.train.target, step)
            self.advance()
            if self.extraction is not None:
                self.extraction.poke()
