"""Progress of a stage: a bar on a terminal, a plain line now and then in a log, always a closing line.

Everything goes to stderr, because stdout is for data. The rate counts only the work of this run, so that
resuming a stage at 90 % does not make the rest look instant.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from pipeline.report_text import seconds_text


class Progress:
    """Counts finished units out of a total.

    Args:
        total: units in the whole stage.
        unit: what is counted, plural: "parts", "steps".
        label: what is running: "generate".
        done: units that were there before this run began.
        interval_s: seconds between lines where there is no terminal.
        stream: where to write; stderr unless given.
        clock: seconds, monotonic.
        terminal: draw a bar; None asks the stream.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        label: str,
        *,
        done: int = 0,
        interval_s: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        terminal: bool | None = None,
    ) -> None:
        self.total, self.unit, self.label, self.done = total, unit, label, done
        self.failures = self.tokens = 0
        self._before = done
        self._interval_s = interval_s
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began = self._last_line = clock()
        self._closed = False
        self._bar: tqdm[Any] | None = None
        if self._stream.isatty() if terminal is None else terminal:
            self._bar = tqdm(total=total, initial=done, desc=label, unit=f" {unit}", file=self._stream, leave=False)

    @property
    def rate(self) -> float:
        """Units per second of this run, 0 before the first one."""
        elapsed_s = self._clock() - self._began
        return (self.done - self._before) / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at this rate; None while nothing is known."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None

    def update(self, n: int = 1, failures: int = 0, tokens: int = 0) -> None:
        """Count `n` more finished units, the tokens in them, and failed attempts; `update(0)` shows signs of life."""
        self.done += n
        self.failures += failures
        self.tokens += tokens
        if self._bar is not None:
            self._bar.update(n)
            if n or failures:
                self._bar.set_postfix_str(", ".join(p for p in (self._tokens(), self._failed()) if p), refresh=False)
            return
        now = self._clock()
        if now - self._last_line >= self._interval_s:
            self._last_line = now
            self._write(self._line())

    def note(self, text: str) -> None:
        """One line that stands by itself, such as the reason of a retry."""
        if self._bar is not None:
            self._bar.write(f"{self.label}: {text}", file=self._stream)
        else:
            self._write(f"{self.label}: {text}")

    def close(self) -> None:
        """Write the closing line; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.close()
        tokens = f", {self._tokens()}" if self.tokens else ""
        took = f"in {seconds_text(self._clock() - self._began)} ({self.rate:.3g} {self.unit}/s{tokens})"
        before = f", {self._before} of them from before" if self._before else ""
        failed = f", {self._failed()}" if self.failures else ""
        self._write(f"{self.label}: {self.done}/{self.total} {self.unit} {took}{before}{failed}")

    def _line(self) -> str:
        share = f"{self.done / self.total:.0%}" if self.total else "100%"
        eta = "?" if self.eta_s is None else seconds_text(self.eta_s)
        failed = f", {self._failed()}" if self.failures else ""
        tokens = f", {self._tokens()}" if self.tokens else ""
        speed = f"{self.rate:.3g} {self.unit}/s{tokens}, {eta} left"
        return f"{self.label}: {self.done}/{self.total} {self.unit} ({share}), {speed}{failed}"

    def _failed(self) -> str:
        return f"{self.failures} failed attempt{'' if self.failures == 1 else 's'}" if self.failures else ""

    def _tokens(self) -> str:
        """Tokens per second of this run."""
        elapsed_s = self._clock() - self._began
        return f"{self.tokens / elapsed_s:,.0f} tokens/s" if self.tokens and elapsed_s > 0 else ""

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
