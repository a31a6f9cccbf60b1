"""Where a pool's units come from, and whom it tells how it goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol


class Feed(Protocol):
    """Says what to do next, one unit at a time; asked in the driver, by one thread."""

    def next_unit(self) -> Any | None:
        """The next unit, or None when there is none just now.

        Raises:
            StopIteration: there will be none any more.
        """
        ...

    def given_up(self) -> bool:
        """Whether nothing is wanted any more, not even what is being done."""
        ...


class Listed:
    """A feed of units that are all known."""

    def __init__(self, units: Sequence[Any]) -> None:
        self._left = deque(units)

    def __len__(self) -> int:
        return len(self._left)

    def next_unit(self) -> Any:
        if not self._left:
            raise StopIteration
        return self._left.popleft()

    def given_up(self) -> bool:
        return False


class Shown(Protocol):
    """What a pool tells as it goes; `progress.Progress` is one."""

    def update(self, n: int = 1, failures: int = 0, tokens: int = 0) -> None:
        """Count finished units, the tokens in them, and failed attempts."""

    def note(self, text: str) -> None:
        """One line, such as the reason of a retry."""


class Silent:
    """Shows nothing."""

    def update(self, n: int = 1, failures: int = 0, tokens: int = 0) -> None:
        """Not shown."""

    def note(self, text: str) -> None:
        """Not shown."""
