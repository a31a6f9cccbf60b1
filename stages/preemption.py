"""A wish to stop, from outside: SIGTERM, or a node that is about to be taken away.

Only noted here; the trainer acts on it at the next step boundary, on all ranks at the same one (`World.agree`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Asked = Callable[[], bool]


@contextmanager
def noting_sigterm() -> Iterator[Asked]:
    """While this holds, SIGTERM does not end the process but is remembered; gives a function that tells whether one
    has come. A second one ends the process as usual. In another than the main thread, where no handler can be set, it
    never has.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    came = threading.Event()
    before: Any = signal.getsignal(signal.SIGTERM)

    def note(_number: int, _frame: FrameType | None) -> None:
        came.set()
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    signal.signal(signal.SIGTERM, note)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
