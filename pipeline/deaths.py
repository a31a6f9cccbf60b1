"""Why a worker died, as far as Ray can tell: by itself, or because its node went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Death:
    """A dead worker.

    Attributes:
        text: the cause in one line.
        lost: its node went (preempted, drained, crashed, out of reach): nothing that its unit is to blame for.
    """

    text: str
    lost: bool


def death_of(error: BaseException) -> Death:
    """What Ray's error for a call to a dead actor says.

    Ray waits `RAY_timeout_ms_task_wait_for_death_info` to be told the cause. When that is not enough, as when a whole
    node goes silent, the actor is "unavailable": out of reach, so nothing that its unit is known to have done.
    """
    import ray

    text = " ".join(str(error).split())
    if getattr(error, "preempted", False):
        return Death("node preempted", lost=True)
    if isinstance(error, ray.exceptions.NodeDiedError) or "its node has died" in text:
        _, _, told = text.partition("node was terminated ")
        return Death(f"node lost ({told[:200].rstrip('.') or 'it died'})", lost=True)
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return Death("node lost (the worker is out of reach)", lost=True)
    start = max(text.find("Worker exit type"), 0)
    told = text[start:].partition(" Some common causes")[0][:300].rstrip(".")
    return Death(f"the worker died ({type(error).__name__}: {told}); killed, out of memory, or crashed", lost=False)


def dead_nodes() -> set[str]:
    """Ids of the nodes that have left the cluster."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
