"""A seat in the pool: one actor, or a group of them that holds one target together.

Ray is imported inside functions, so that importing this module costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.deaths import death_of
from pipeline.host import Host, Outcome, Place, Worker
from pipeline.tasks import Task
from stages.group import Member

PLACING, BUILDING, READY = "placing", "building", "ready"
CREATION_S = 60  # how long an actor that has room may take to start its process


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatKind:
    """What all seats of a pool have in common.

    Attributes:
        resources: Ray's options for one actor: `num_cpus`, `num_gpus`, `memory`, `resources`, `label_selector`.
        size: actors of a seat.
        in_flight: units that a seat has at once.
        namespace: of Ray, where the actors' names are unique: each pool has its own.
        call: what Ray calls a unit, in its dashboard and metrics. One name for all: every process keeps, and sends
            every 10 s, a series of `ray_tasks` per name (Ray 2.60, `metric_cardinality_level=low` or not), which in
            the driver came to 10 KB per unit.
    """

    resources: Mapping[str, Any]
    size: int = 1
    in_flight: int = 1
    namespace: str = "dflash"
    call: str = "unit"


def amounts_of(options: Mapping[str, Any]) -> dict[str, float]:
    """What an actor with these options takes, by the name that Ray's nodes offer it under."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    amounts = {names[option]: n for option, n in options.items() if option in names and n}
    return amounts | dict(options.get("resources", {}))


class Seat:
    """Actors that do units together, from the moment that they are asked for.

    Attributes:
        name: for people, with process and host once they are known.
        phase: waiting for room, building the worker, or ready.
        tasks: that it has now.
        places: of its actors, by rank, once they are placed.
        hired_at: by the monotonic clock.
    """

    def __init__(self, name: str, kind: SeatKind) -> None:
        self.name, self.kind, self.phase = name, kind, PLACING
        self.tasks: list[Task] = []
        self.places: dict[int, Place] = {}
        self.hired_at = time.monotonic()
        self._group: Any = None
        self._asked: list[Any] = []
        self._actors = [self._actor(rank) for rank in range(kind.size)]

    def _actor(self, rank: int) -> Any:
        import ray

        kind = self.kind
        name = self.name if kind.size == 1 else f"{self.name}-rank-{rank}"
        options: dict[str, Any] = dict(kind.resources)
        if amounts_of(kind.resources):
            options.pop("label_selector", None)  # the group has chosen the node
            options["scheduling_strategy"] = self._place_in_group(rank)
        return ray.remote(Host).options(
            name=name, namespace=kind.namespace, max_restarts=0, max_concurrency=kind.in_flight, **options
        ).remote()  # fmt: skip

    def _place_in_group(self, rank: int) -> Any:
        """All actors of a seat on one node, or none. A lone actor has a group too: `close` says why."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._group is None:
            size, labels = self.kind.size, self.kind.resources.get("label_selector")
            where: dict[str, Any] = {"bundle_label_selector": [labels] * size} if labels else {}
            bundles = [amounts_of(self.kind.resources)] * size
            self._group = ray.util.placement_group(bundles, strategy="STRICT_PACK", **where)
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)

    @property
    def has_room(self) -> bool:
        """Whether it can take another unit."""
        return self.phase == READY and len(self.tasks) < self.kind.in_flight and not any(t.lone for t in self.tasks)

    def ask_place(self) -> list[Any]:
        """References to the places, by rank; they resolve when Ray has found room."""
        self._asked = [actor.place.remote() for actor in self._actors]
        return self._asked

    def build(self, factory: Callable[..., Worker]) -> list[Any]:
        """References to the outcomes of building the worker, by rank."""
        size = self.kind.size
        if size == 1:
            return [self._actors[0].build.remote(factory)]
        meet = self.places[0]
        members = [Member(rank, size, meet.address, meet.port) for rank in range(size)]
        return [actor.build.remote(factory, m) for actor, m in zip(self._actors, members, strict=True)]

    def run(self, task: Task, shown: str) -> list[Any]:
        """References to the outcomes of a unit, by rank; `shown` is what the processes are called meanwhile."""
        self.tasks.append(task)
        name = self.kind.call
        return [actor.run.options(name=name).remote(task.unit, task.attempt, shown) for actor in self._actors]

    def close(self) -> None:
        """End its actors, whatever they are at, and give back their room.

        Those that Ray is creating are waited for: of actors that were killed, cancelled or robbed of their placement
        group in that moment, about one in a hundred kept its room for as long as the driver lived (Ray 2.60).
        """
        import ray

        if self.phase == PLACING and self._has_place():
            ray.wait(self._asked, num_returns=len(self._asked), timeout=CREATION_S)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)

    def _has_place(self) -> bool:
        """Whether Ray has found room, so that the actors are there or about to be."""
        import ray

        return self._group is None or ray.util.placement_group_table(self._group)["state"] == "CREATED"


@dataclass(eq=False)
class Call:
    """Something that a seat was asked for: to say where it is, to build its worker, or to do a unit."""

    seat: Seat
    task: Task | None = None
    outcomes: dict[int, Outcome] = field(default_factory=dict)


def outcome_of(reference: Any) -> Outcome:
    """What came back for a call; a death is an outcome too, with `died` and whether its node was `lost`."""
    import ray

    try:
        found: Outcome = ray.get(reference)
        return found
    except ray.exceptions.RayTaskError as error:  # around the guarded call: what it returned cannot be sent, say
        return {"failure": str(error).strip().rpartition("\n")[2], "traceback": str(error)}
    except ray.exceptions.RayError as error:
        death = death_of(error)
        return {"failure": death.text, "died": True, "lost": death.lost}
