"""`dflash simulate`: a run at a size that is not here, played as discrete events from measured rates.

Generate and extract are played unit by unit with the rules of the real pool (`pipeline.simulate_pool`), training by
stretches between losses (`pipeline.simulate_train`); the store is a bandwidth that all share evenly. What is left out:
the driver's own arithmetic beyond a fixed pause per unit, slow nodes, and a store that fails. `python -m
benchmarks.simulate` compares it with real runs.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import PipelineError
from pipeline.simulate_clock import Clock, Curve, Link
from pipeline.simulate_file import RESPONSE_TOKEN_BYTES, PoolRates, Simulation
from pipeline.simulate_pool import Listed, PoolPlay, Source
from pipeline.simulate_train import RollingCache, TrainPlay

POINTS = 240
"""Of a curve over the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlay:
    """What a stage came to. Shares are of the time of all its GPUs, from its begin to its end.

    Attributes:
        gpus: that it holds.
        busy_share: work that counts; lost_share: work that a failure took; starting_share: of workers; waiting_share:
            everything else (the store, the driver, others' ends, nodes that are gone).
        lost_gpu_s: GPU seconds of `lost_share`.
        again: units that were begun again (pools), steps that were taken again (training).
    """

    name: str
    began_s: float
    wall_s: float
    gpus: int
    units: int
    tokens_per_s: float
    busy_share: float
    lost_share: float
    starting_share: float
    waiting_share: float
    lost_gpu_s: float
    again: float
    failed_units: int
    node_losses: int
    worker_deaths: int
    read_bytes: float
    written_bytes: float
    garbage_bytes: float

    @property
    def gpu_hours(self) -> float:
        """Of its GPUs."""
        return self.gpus * self.wall_s / 3600

    def to_json(self) -> dict[str, Any]:
        """With what follows from the rest."""
        moved = (self.read_bytes + self.written_bytes) / self.wall_s if self.wall_s else 0.0
        more = {"gpu_hours": self.gpu_hours, "idle_share": 1 - self.busy_share - self.lost_share,
                "network_bytes_per_s": moved}  # fmt: skip
        return dataclasses.asdict(self) | more


class Player:
    """Plays one simulation; `play` is the way in."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.clock = sim, Clock()
        self.stored = Curve(self.clock)
        self.curves: dict[str, tuple[Curve, int]] = {}
        self.stages: list[StagePlay] = []
        self.made_again = 0

    def links(self, rates: PoolRates) -> tuple[Link, Link]:
        """The store as a pool's workers see it; a worker's share of its node's speed is its own."""
        per_node = min(self.sim.cluster.gpus_per_node // rates.gpus_per_worker, rates.workers)
        store = self.sim.store

        def link(total: float | None, node: float | None) -> Link:
            return Link(self.clock, total, node / per_node if node else None)

        read = link(store.read_bytes_per_s, store.node_read_bytes_per_s)
        return read, link(store.write_bytes_per_s, store.node_write_bytes_per_s)

    def pool(
        self, name: str, rates: PoolRates, source: Source, n_tokens: float, on_done: Callable[[int, float], Any]
    ) -> tuple[PoolPlay, Callable[[], StagePlay]]:
        """A stage on a pool, begun; and what tells how it went, once it is over."""
        read, write = self.links(rates)
        chance = random.Random(f"{self.sim.seed} {name}")
        began_s = self.clock.now_s
        play = PoolPlay(self.clock, rates, self.sim.cluster, source, n_tokens, read=read, write=write, chance=chance,
                        on_done=on_done)  # fmt: skip
        gpus = rates.workers * rates.gpus_per_worker
        self.curves[name] = play.working, rates.workers

        def told() -> StagePlay:
            play.nodes.stop()
            tally, wall_s = play.tally, self.clock.now_s - began_s
            self.stored.add(tally.garbage_bytes)
            return _stage(
                name, began_s, wall_s, gpus, rates.workers, tally, units=tally.done, tokens=tally.tokens,
                again=float(tally.attempts_again), failed_units=tally.failed, node_losses=play.nodes.n_losses,
                worker_deaths=tally.worker_deaths, read_bytes=read.bytes_moved, written_bytes=write.bytes_moved,
                garbage_bytes=tally.garbage_bytes,
            )  # fmt: skip

        return play, told

    def alone(self, name: str, rates: PoolRates, n_tokens: float) -> None:
        """A pool that has the cluster for itself."""
        n_units = max(1, -(-int(n_tokens) // int(rates.unit_tokens)))
        play, told = self.pool(name, rates, Listed(n_units), n_tokens, lambda _, size: self.stored.add(size))
        self.run(name, play.over)
        self.stages.append(told())

    def train(self, cache: RollingCache | None = None) -> tuple[TrainPlay, Callable[[], StagePlay]]:
        """A training, begun; and what tells how it went."""
        rates = self.sim.train
        assert rates is not None
        began_s, chance = self.clock.now_s, random.Random(f"{self.sim.seed} train")
        play = TrainPlay(
            self.clock, self.sim, chance=chance, arrived=cache.arrived if cache else lambda: None,
            fell_back=cache.fell_back if cache else lambda _: None,
        )  # fmt: skip
        self.stored.add(rates.checkpoint_bytes * (rates.keep_checkpoints + 1))
        self.curves["train"] = play.working, rates.ranks
        if cache is None:
            play.go_to(play.n_steps)

        def told() -> StagePlay:
            play.nodes.stop()
            n_checkpoints, steps_read = play.n_steps // rates.checkpoint_every, play.n_steps + play.tally.steps_again
            wall_s = self.clock.now_s - began_s
            return _stage(
                "train", began_s, wall_s, rates.ranks * rates.gpus_per_rank, rates.ranks, play.tally,
                units=play.n_steps, tokens=play.n_steps * rates.batch_samples * self.sim.tokens_per_sample,
                again=play.tally.steps_again, failed_units=0, node_losses=play.nodes.n_losses,
                worker_deaths=play.tally.deaths, read_bytes=steps_read * play.bytes_per_step(),
                written_bytes=n_checkpoints * rates.checkpoint_bytes, garbage_bytes=0.0,
            )  # fmt: skip

        return play, told

    def together(self) -> None:
        """Extraction and training at the same time."""
        rates = self.sim.extract
        assert rates is not None
        cache = RollingCache(self.sim, self.stored)
        training, train_told = self.train(cache)
        tokens = self.sim.samples * self.sim.tokens_per_sample
        extraction, extract_told = self.pool("extract", rates, cache, tokens, cache.take)
        cache.train, cache.extraction = training, extraction
        self.run("extract and train", training.over)
        self.stages += [extract_told(), train_told()]
        self.made_again = cache.made_again

    def run(self, name: str, over: Callable[[], bool]) -> None:
        """Let time go on until it is over."""
        if not self.clock.run(over):
            raise PipelineError(f"{name} came to a stand after {self.clock.now_s:.0f} s: nothing is left to happen")


def _stage(
    name: str, began_s: float, wall_s: float, gpus: int, seats: int, tally: Any, *, tokens: float, **counts: Any
) -> StagePlay:
    whole = seats * wall_s or 1.0
    busy, lost, starting = tally.busy_s / whole, tally.lost_s / whole, tally.starting_s / whole
    return StagePlay(
        name=name, began_s=began_s, wall_s=wall_s, gpus=gpus, tokens_per_s=tokens / wall_s if wall_s else 0.0,
        busy_share=busy, lost_share=lost, starting_share=starting, waiting_share=max(0.0, 1 - busy - lost - starting),
        lost_gpu_s=tally.lost_s * gpus / seats, **counts,
    )  # fmt: skip


def play(sim: Simulation) -> dict[str, Any]:
    """Play a run; the same rates and seed give the same result.

    Returns:
        JSON-able: `stages` (`StagePlay` each), `wall_s`, `gpu_hours`, `peak_bytes` of the store, `timeline` with
        `edges_s` and, between each two of them, the share of each stage's workers at work and the bytes stored.

    Raises:
        PipelineError: `max_bytes` cannot hold what must be there at once.
    """
    player = Player(sim)
    if sim.generate is not None:
        player.alone("generate", sim.generate, sim.samples * sim.answers)
    elif sim.extract is not None:
        player.stored.add(sim.samples * sim.tokens_per_sample * RESPONSE_TOKEN_BYTES)
    if sim.rolling:
        player.together()
    else:
        if sim.extract is not None:
            player.alone("extract", sim.extract, sim.samples * sim.tokens_per_sample)
        if sim.train is not None:
            training, told = player.train()
            player.run("train", training.over)
            player.stages.append(told())
    return _result(sim, player)


def _result(sim: Simulation, player: Player) -> dict[str, Any]:
    wall_s = player.clock.now_s
    edges = np.linspace(0.0, wall_s, POINTS + 1) if wall_s else np.array([0.0, 1.0])
    stages = [stage.to_json() for stage in player.stages]
    return {
        "name": sim.name,
        "seed": sim.seed,
        "samples": sim.samples,
        "shards": sim.n_shards if sim.extract else 0,
        "rolling": sim.rolling,
        "gpus": sim.cluster.nodes * sim.cluster.gpus_per_node,
        "wall_s": wall_s,
        "gpu_hours": sum(stage["gpu_hours"] for stage in stages),
        "lost_gpu_hours": sum(stage["lost_gpu_s"] for stage in stages) / 3600,
        "cache_bytes": sim.cache_bytes,
        "max_bytes": sim.max_bytes,
        "peak_bytes": player.stored.peak,
        "shards_made_again": player.made_again,
        "events": player.clock.n_events,
        "stages": stages,
        "timeline": {
            "edges_s": edges.tolist(),
            "stored_bytes": player.stored.means(edges),
            "working": {name: [v / n for v in curve.means(edges)] for name, (curve, n) in player.curves.items()},
        },
    }
