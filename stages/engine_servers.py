"""Requests to several servers, each of which may fail: who gets one, when it is tried again, when that has no sense.

A request goes to the server with the fewest on their way. One that cannot be reached, breaks off, says nothing or that
it has too much to do is left out for a while, longer each time; then it is asked for its models first, and gets prompts
again once it answers that. Answering is free of side effects, so that any request may be sent twice.

What ends it for a request, once its tries are used up:
  - no server could be reached, or all have too much to do: `EngineError`, since the next request would fare no better;
  - a server that still lives fails on this request, each time: the request's own fault, a `Failure` with its story.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stages.engine import EngineError
from stages.engine_http import LONGEST_WAIT_S, MODELS, AttemptFailed, Connections, Reply, Trouble
from stages.engine_tokens import BadReply

FIRST_WAIT_S = 1.0
"""Pause after the first failure; each further one doubles it."""
T = TypeVar("T")
_LEFT_OUT = (Trouble.UNREACHABLE, Trouble.BUSY, Trouble.LOST)
"""Troubles that tell something about the server, beyond the one request."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed on every attempt, though the server lives."""

    reason: str
    detail: str


@dataclass
class Server:
    """One server and how it fares."""

    url: str
    """Without a path."""
    n_open: int = 0
    """Requests on their way."""
    n_asked: int = 0
    n_failures: int = 0
    """In a row."""
    left_out_since: float = float("-inf")
    left_out_until: float = float("-inf")
    manner: Any = None
    """How it wants to be asked, once that is known; kept for the caller."""
    meeting: asyncio.Lock | None = None
    """Held while `manner` is found out."""


@dataclass
class Servers:
    """The servers of one engine.

    Args:
        urls: like http://host:port, with or without /v1.
        key_env: environment variable with the API key.
        timeout_s: for one reply.
        retries: further attempts of a request.
        first_wait_s: pause after a first failure (tests).

    Raises:
        EngineError: the variable is not set.
    """

    urls: Sequence[str]
    key_env: str | None
    timeout_s: float
    retries: int
    first_wait_s: float = FIRST_WAIT_S
    all: list[Server] = field(init=False)
    down: bool = field(init=False, default=False)
    """No server could be reached when that was last tried."""

    def __post_init__(self) -> None:
        self.all = [Server(url.rstrip("/").removesuffix("/v1")) for url in self.urls]
        self._connections = Connections(self.key_env, self.timeout_s)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connections for what follows; they belong to the running event loop."""
        async with self._connections.open():
            for server in self.all:
                server.n_open, server.meeting = 0, asyncio.Lock()
            yield

    async def get(self, server: Server, path: str) -> Reply:
        """See `engine_http.Connections`; use it inside `ask`."""
        return await self._connections.get(server.url, path)

    async def post(self, server: Server, path: str, body: dict[str, Any]) -> Reply:
        """See `engine_http.Connections`; use it inside `ask`."""
        return await self._connections.post(server.url, path, body)

    async def ask(self, attempt: Callable[[Server], Awaitable[T]]) -> T | Failure:
        """Make attempts at servers until one succeeds.

        Raises:
            EngineError: no server can be reached, or all have too much to do; or `attempt` raised it.
        """
        story: list[tuple[Server, AttemptFailed]] = []
        started = time.monotonic()
        while len(story) <= self.retries:
            server = await self._take()
            began = time.monotonic()
            try:
                if server.n_failures:
                    await self.get(server, MODELS)
                found = await attempt(server)
            except (AttemptFailed, BadReply) as error:
                failure = await self._explained(server, error)
                story.append((server, failure))
                self._note(server, failure, began)
            else:
                server.n_failures, server.left_out_until, self.down = 0, float("-inf"), False
                return found
            finally:
                server.n_open -= 1
            # Of a server that is left out, the pause is its own.
            if failure.trouble not in (Trouble.UNREACHABLE, Trouble.BUSY) and len(story) <= self.retries:
                await asyncio.sleep(self._pause(len(story)))
        return await self._verdict(story, time.monotonic() - started)

    async def require_one(self) -> None:
        """Look whether a server can be reached again.

        Raises:
            EngineError: none.
        """
        said = [await self._sign_of_life(server) for server in self.all]
        if all(said):
            raise EngineError(_down(self.all, " and ".join(s for s in said if s)))
        self.down = False
        for server, problem in zip(self.all, said, strict=True):
            if problem is None:
                server.n_failures, server.left_out_until = 0, float("-inf")

    async def _verdict(self, story: list[tuple[Server, AttemptFailed]], seconds: float) -> Failure:
        """Whose fault it is that all attempts failed."""
        server, last = story[-1]
        tries = f"{len(story)} attempts in {seconds:.0f} s"
        if last.trouble == Trouble.BUSY:
            raise EngineError(
                f"{server.url} has too much to do: {last.text}, {tries}. Lower generate.concurrency or "
                "generate.workers, or raise generate.retries, and run again: what is committed stays"
            )
        said = [await self._sign_of_life(s) for s in self.all]
        reached = [(s, f) for s, f in story if f.trouble not in (Trouble.UNREACHABLE, Trouble.BUSY)]
        if all(said) or not reached:
            self.down = True
            raise EngineError(_down(self.all, f"{server.url}: {last.text}, {tries}"))
        server, last = reached[-1]
        return Failure(str(last.trouble), f"{server.url}: {last.text}; {tries}, and the server lives")

    async def _explained(self, server: Server, error: AttemptFailed | BadReply) -> AttemptFailed:
        """What an attempt's failure means; a reply that did not come in time may be slow, or its server dead."""
        if isinstance(error, BadReply):
            return AttemptFailed(Trouble.GARBLED, f"bad reply: {error}")
        if error.trouble != Trouble.TIMED_OUT or await self._sign_of_life(server) is None:
            return error
        return AttemptFailed(Trouble.UNREACHABLE, f"{error.text}, nor anything else")

    async def _sign_of_life(self, server: Server) -> str | None:
        """None if the server says anything at all, else what is wrong."""
        try:
            await self.get(server, MODELS)
        except BadReply:
            return None
        except AttemptFailed as error:
            return None if error.trouble in (Trouble.BUSY, Trouble.BROKEN) else f"{server.url}: {error.text}"
        return None

    async def _take(self) -> Server:
        """The server with the fewest requests; waits while all are left out."""
        while True:
            now = time.monotonic()
            ready = [s for s in self.all if s.left_out_until <= now]
            if ready:
                server = min(ready, key=lambda s: (s.n_open, s.n_asked))
                server.n_open += 1
                server.n_asked += 1
                return server
            await asyncio.sleep(min(s.left_out_until for s in self.all) - now)

    def _note(self, server: Server, failure: AttemptFailed, began: float) -> None:
        """Leave a server out after what tells against it; requests that began before the last such time tell nothing
        new."""
        if failure.trouble not in _LEFT_OUT or began < server.left_out_since:
            return
        server.n_failures += 1
        server.left_out_since = time.monotonic()
        pause = self._pause(server.n_failures) if failure.wait_s is None else failure.wait_s
        server.left_out_until = server.left_out_since + pause

    def _pause(self, n_failures: int) -> float:
        """Doubles with each failure; at random, so that many who wait do not come back all at once."""
        longest = min(LONGEST_WAIT_S, self.first_wait_s * 2.0 ** min(n_failures - 1, 30))
        return longest * random.uniform(0.5, 1.0)


def _down(servers: Sequence[Server], said: str) -> str:
    which = "the server is" if len(servers) == 1 else f"all {len(servers)} servers are"
    return (
        f"{which} down: {said}. Start {'it' if len(servers) == 1 else 'one'} (or mend generate.server_urls) and run "
        "again: what is committed stays, the rest is asked anew"
    )
