"""A unit on its way: how often it was tried, which attempts count against it, and the story of them all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cache_schema.errors import DFlashError
from pipeline.errors import PoisonShard


def unit_name(unit: Any) -> str:
    """What a unit is called in messages: its `name`, else its text."""
    return str(getattr(unit, "name", unit))


@dataclass
class Attempt:
    """One attempt that came to nothing.

    Attributes:
        number: from 1, over all attempts.
        worker: that had it.
        text: what happened.
        excuse: why it does not count against the unit; "" if it does.
        node_id: where the worker died, if it did.
        node_lost: the excuse is that its node went.
    """

    number: int
    worker: str
    text: str
    excuse: str = ""
    node_id: str = ""
    node_lost: bool = False

    def __str__(self) -> str:
        excuse = f" ({self.excuse}, not counted)" if self.excuse else ""
        return f"attempt {self.number} on {self.worker}: {self.text}{excuse}"


@dataclass
class Task:
    """A unit with its history.

    Attributes:
        index: its place among the units.
        attempt: the number of the attempt that is under way, from 1.
        lone: it is on probation: it must have a worker for itself, so that what happens to that is its own doing.
        error: what it raised that would come again.
        traceback: of the last attempt, where it raised.
    """

    index: int
    unit: Any
    label: str
    attempt: int = 0
    lone: bool = False
    story: list[Attempt] = field(default_factory=list)
    error: DFlashError | None = None
    traceback: str = ""

    @property
    def name(self) -> str:
        """For messages: "shard-00042", "part 7"."""
        name = unit_name(self.unit)
        return name if name.startswith(self.label) else f"{self.label} {name}"

    def counted(self) -> int:
        """Attempts that count against it."""
        return sum(not a.excuse for a in self.story)

    def node_losses(self) -> int:
        """Attempts that ended with their node."""
        return sum(a.node_lost for a in self.story)

    def excuse_lost(self, dead: set[str]) -> None:
        """Excuse the deaths whose node has gone since: a node that is taken away may end its processes first."""
        for attempt in self.story:
            if not attempt.excuse and attempt.node_id in dead:
                attempt.excuse, attempt.node_lost = "its node went soon after", True

    def told(self, in_full: bool) -> str:
        """All attempts, and the last traceback if `in_full`."""
        lines = [f"{self.name}:", *(f"  {a}" for a in self.story)]
        if self.traceback and in_full:
            lines.append("    " + self.traceback.replace("\n", "\n    "))
        return "\n".join(lines)


def failure_of(failed: list[Task], done: str) -> DFlashError:
    """What to raise when all that can be done is done: for the first unit that failed, naming the others.

    Args:
        failed: the units without attempts left, one at least.
        done: how many are done, "57 of 60".

    Returns:
        The unit's own DFlashError, with the unit named, or a PoisonShard with the story of every attempt.
    """
    first, *others = sorted(failed, key=lambda t: t.index)
    also = f"\nAlso failed: {', '.join(t.name for t in others)}" if others else ""
    stories = "".join(f"\n{t.told(in_full=t is first)}" for t in [first, *others] if t.error is None)
    if first.error is not None:
        message = str(first.error)
        named = message if unit_name(first.unit) in message else f"{first.name}: {message}"
        # The same object, so that its type survives whatever its constructor takes.
        first.error.args = (named + also + stories, *first.error.args[1:])
        return first.error
    return PoisonShard(
        f"{first.name} failed on every attempt; {done} are done and committed, so running again tries only what is "
        f"missing.{also}{stories}"
    )
