"""A pool of Ray actors that works through units (shards, parts), one or a few in flight per worker.

The queue is in the driver: a worker gets its next unit when it has finished one, so a slow worker or one that never
starts holds nobody up, and what comes back is a small receipt, never a tensor. The work itself lies on disk, committed
by the worker, which makes every unit safe to run again.

What happens when something fails:

- **A worker dies** (killed, out of memory): a fresh one takes its place, its unit is queued again. If it had several
  units open, nobody knows which one killed it: none is charged, and each has a worker for itself from then on, so
  that the next death is its own doing.
- **A node goes** (preempted, drained, crashed, out of reach): same, but that is nobody's fault and counts against no
  unit, up to `NODE_LOSSES` times.
- **A unit raises** anything but a DFlashError: the worker is replaced too, because after a CUDA fault every later
  call in that process fails. Other units that it had open are queued again and charged nothing.
- **A unit raises a DFlashError**: it will again, so it is not retried.
- **A unit runs out of attempts**: the rest is finished first; then `PoisonShard` tells the story of every
  attempt (or the DFlashError is raised again, with the unit named).
- **A worker cannot be built**: nothing will work, so that is raised at once.
- **There is no room for a worker**: the run goes on with the others, says so now and then, and uses it once it comes.

A worker may be a group of actors (`group_size`) that hold one target together: all do every unit, the first one's
receipt counts, and one that fails or dies takes the group with it.

Units may also come from a `Feed`, which says what to do next only when a worker asks: then a unit that failed for
good ends the pool at once, since what comes next may depend on it.

Ray is imported inside functions, so that importing this module costs nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.feed import Feed, Listed, Shown, Silent
from pipeline.host import Receipt, Worker
from pipeline.pool_loop import Pool, PoolKind
from pipeline.ray_session import ensure_ray, require_room
from pipeline.seats import SeatKind, amounts_of
from pipeline.tasks import unit_name

__all__ = ["Feed", "Receipt", "Shown", "Worker", "ensure_ray", "run_pool", "unit_name"]


def run_pool(
    units: Sequence[Any] | Feed,
    build_worker: Callable[..., Worker],
    *,
    n_workers: int,
    resources: Mapping[str, Any],
    progress: Shown | None = None,
    max_attempts: int = 3,
    label: str = "unit",
    on_receipt: Callable[[Any, Receipt], None] | None = None,
    in_flight: int = 1,
    group_size: int = 1,
    stage: str = "",
    run_name: str = "",
) -> list[Receipt]:
    """Run every unit on a pool of workers; call it inside `ensure_ray()`.

    Args:
        units: small and picklable; each is named by its `name`, else by its text. Or a feed of such.
        build_worker: makes the worker inside the actor, once; picklable. In a group it is given its `Member`.
        n_workers: workers at most (never more than units).
        resources: Ray's options for one actor: `num_cpus`, `num_gpus`, `memory`, `resources`, `label_selector`.
        progress: counts finished units and failed attempts; the caller closes it.
        max_attempts: attempts per unit before it counts as poison.
        label: what a unit is called: "shard", "part".
        on_receipt: called in the driver with unit and receipt as each unit finishes.
        in_flight: units that a worker has at once, each in a thread of its own, so that its next one is at hand while
            it commits the last; `run` must be safe to call so.
        group_size: actors that make one worker, on one node (tensor parallelism).
        stage, run_name: for names in the dashboard and labels of the metrics.

    Returns:
        The receipts in the order of `units`, whatever order they finished in.

    Raises:
        ValueError: a group with several units in flight: its members must do units in the same order.
        PoisonShard: a unit failed on every attempt; all others of a sequence are done.
        DFlashError: a unit raised it; same type, with the unit named; all others of a sequence are done.
        PipelineError: a worker could not be built, or the machine has no room for even one.
    """
    if group_size > 1 and in_flight > 1:
        raise ValueError(f"in_flight={in_flight} with group_size={group_size}: a group does one unit at a time")
    hasty = not isinstance(units, Sequence)
    feed: Feed = Listed(units) if isinstance(units, Sequence) else units
    if isinstance(units, Sequence):
        if not units:
            return []
        n_workers = min(n_workers, len(units))
    require_room(amounts_of(resources), group_size, resources.get("label_selector"))
    # Names of actors are unique in a namespace, and two runs on one cluster must not meet.
    namespace = f"dflash-{stage or label}-{secrets.token_hex(4)}"
    seats = SeatKind(resources=dict(resources), size=group_size, in_flight=in_flight, namespace=namespace,
                     call=f"{stage} {label}".lstrip())  # fmt: skip
    kind = PoolKind(
        build_worker=build_worker, n_workers=n_workers, max_attempts=max_attempts, label=label, stage=stage,
        run_name=run_name, hasty=hasty, seats=seats,
    )  # fmt: skip
    return Pool(feed, kind, progress or Silent(), on_receipt or (lambda *_: None)).run()
