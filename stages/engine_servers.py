"""Requests to several servers, each of which may fail: who gets one, when it is tried again, when that has no sense.

A request goes to the server with the fewest on their way. One that cannot be reached, breaks off, or says that it has
too much to do is left out for a while, longer each time, and then tried again. Answering is free of side effects, so
that any request may be sent twice.

What ends it for a request, once its tries are used up:
  - no server could be reached, or all have too much to do: `EngineError`, since the next request would fare no better;
  - a server that still lives fails on this request, each time: the request's own fault, a `Failure` with its story.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, TypeVar

import aiohttp

from stages.engine import EngineError
from stages.engine_tokens import BadReply

FIRST_WAIT_S = 1.0
"""Pause after the first failure; each further one doubles it."""
LONGEST_WAIT_S = 60.0
CONNECT_S = 10.0
_SHOWN = 300
T = TypeVar("T")


class Trouble(StrEnum):
    """What went wrong with a request; the name is also the reason of a refusal."""

    UNREACHABLE = "server_down"
    BUSY = "server_busy"
    LOST = "connection_lost"
    TIMED_OUT = "timed_out"
    BROKEN = "server_error"
    GARBLED = "bad_reply"


_LEFT_OUT = (Trouble.UNREACHABLE, Trouble.BUSY, Trouble.LOST)
"""Troubles that tell something about the server, beyond the one request."""


class _Attempt(Exception):
    """A request failed in a way that may pass."""

    def __init__(self, trouble: Trouble, text: str, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.trouble, self.text, self.wait_s = trouble, text, wait_s


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed on every attempt, though the server lives."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server said: a JSON object with status 200, else its words."""

    status: int
    body: dict[str, Any]
    text: str


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
        self._key = _key(self.key_env)
        self._session: aiohttp.ClientSession | None = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("servers hold connections and a key; build them where they are used")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connections for what follows; they belong to the running event loop."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=min(CONNECT_S, self.timeout_s))
        # Concurrency is bounded by the caller; a request must not spend its time waiting for a connection.
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as self._session:
            for server in self.all:
                server.n_open, server.meeting = 0, asyncio.Lock()
            yield

    async def get(self, server: Server, path: str) -> Reply:
        """See `post`."""
        return await self._send(server, "GET", path, None)

    async def post(self, server: Server, path: str, body: dict[str, Any]) -> Reply:
        """One attempt at one server; use it inside `ask`. A reply has status 200, or is what the server declined with.

        Raises:
            EngineError: the server refuses the key, or sends us elsewhere.
        """
        return await self._send(server, "POST", path, body)

    async def ask(self, attempt: Callable[[Server], Awaitable[T]]) -> T | Failure:
        """Make attempts at servers until one succeeds.

        Raises:
            EngineError: no server can be reached, or all have too much to do; or `attempt` raised it.
        """
        story: list[tuple[Server, _Attempt]] = []
        started = time.monotonic()
        while True:
            server = await self._take()
            began = time.monotonic()
            try:
                found = await attempt(server)
            except (_Attempt, BadReply) as error:
                trouble = error if isinstance(error, _Attempt) else _Attempt(Trouble.GARBLED, f"bad reply: {error}")
                story.append((server, trouble))
                self._note(server, trouble, began)
            else:
                server.n_failures, server.left_out_until, self.down = 0, float("-inf"), False
                return found
            finally:
                server.n_open -= 1
            if len(story) > self.retries:
                return await self._give_up(story, time.monotonic() - started)
            if trouble.trouble not in (Trouble.UNREACHABLE, Trouble.BUSY):  # of those the server's own pause is enough
                await asyncio.sleep(self._pause(len(story)))

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

    async def _give_up(self, story: list[tuple[Server, _Attempt]], seconds: float) -> Failure:
        server, last = story[-1]
        tries = f"{len(story)} attempts in {seconds:.0f} s"
        if last.trouble == Trouble.UNREACHABLE:
            self.down = True
            raise EngineError(_down(self.all, f"{server.url}: {last.text}, {tries}"))
        if last.trouble == Trouble.BUSY:
            raise EngineError(
                f"{server.url} has too much to do: {last.text}, {tries}. Lower generate.concurrency or "
                "generate.workers, or raise generate.retries, and run again: what is committed stays"
            )
        said = [await self._sign_of_life(s) for s in self.all]
        if all(said):
            self.down = True
            raise EngineError(_down(self.all, f"{server.url}: {last.text}, then " + " and ".join(s for s in said if s)))
        return Failure(str(last.trouble), f"{server.url}: {last.text}; {tries}, and the server lives")

    async def _sign_of_life(self, server: Server) -> str | None:
        """None if the server says anything at all, else what is wrong."""
        try:
            await self.get(server, "/v1/models")
        except BadReply:
            return None
        except _Attempt as error:
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

    def _note(self, server: Server, failure: _Attempt, began: float) -> None:
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

    async def _send(self, server: Server, method: str, path: str, body: dict[str, Any] | None) -> Reply:
        if self._session is None:
            raise EngineError("the servers were asked outside `open`; this is a fault of the generate stage")
        try:
            async with self._session.request(method, server.url + path, json=body, allow_redirects=False) as reply:
                data = await reply.read()
                return self._judged(server, path, reply, data)
        except aiohttp.ClientConnectorError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise _Attempt(Trouble.UNREACHABLE, f"cannot be reached ({why})") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise _Attempt(Trouble.UNREACHABLE, f"cannot be reached (no connection in {CONNECT_S:g} s)") from error
        except TimeoutError as error:
            text = f"no reply in {self.timeout_s:g} s (generate.timeout_s)"
            raise _Attempt(Trouble.TIMED_OUT, text) from error
        except aiohttp.ClientError as error:
            said = self._clean(str(error)) or "no reply"
            raise _Attempt(Trouble.LOST, f"broke off ({type(error).__name__}: {said})") from error

    def _judged(self, server: Server, path: str, reply: aiohttp.ClientResponse, data: bytes) -> Reply:
        status, said = reply.status, self._clean(error_text(data))
        where = f"{server.url}{path} answers {status}"
        if status in (401, 403):
            has = f"{self.key_env} holds" if self._key else "generate.api_key_env names none"
            raise EngineError(
                f"{where}: it refuses our API key ({has}): {said}. Put the right key into an environment variable, on "
                "every machine with workers, and its name into generate.api_key_env"
            )
        if 300 <= status < 400:
            raise EngineError(f"{where} and sends us to another place; put that one into generate.server_urls")
        if status in (429, 502, 503, 504):
            raise _Attempt(Trouble.BUSY, f"{status} {said}", _retry_after(reply.headers.get("Retry-After")))
        if status == 408:
            raise _Attempt(Trouble.TIMED_OUT, f"{status} {said}")
        if status >= 500:
            raise _Attempt(Trouble.BROKEN, f"{status} {said}")
        body = _json_object(data)
        if status == 200 and body is None:
            raise BadReply(f"not a JSON object but {self._clean(data.decode(errors='replace'))!r}")
        return Reply(status, body or {}, said)

    def _clean(self, text: str) -> str:
        """One line, without the key, which some servers repeat."""
        line = " ".join(text.split())
        if self._key:
            line = line.replace(self._key, "…")
        return line if len(line) <= _SHOWN else line[:_SHOWN] + "…"


def error_text(data: bytes) -> str:
    """What a server says went wrong: the message of an OpenAI error object or of FastAPI's, else the text."""
    body = _json_object(data) or {}
    error = body.get("error")
    for said in (error.get("message") if isinstance(error, dict) else error, body.get("message"), body.get("detail")):
        if said:
            return str(said)
    return data.decode(errors="replace")


def _json_object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _retry_after(value: str | None) -> float | None:
    """Seconds that a server asks us to wait, at most `LONGEST_WAIT_S`."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT_S)


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    value = os.environ.get(name, "").strip()
    if not value:
        raise EngineError(
            f"generate.api_key_env names {name}, but there is no such environment variable here (or it is empty); set "
            "it on every machine with workers"
        )
    return value


def _down(servers: Sequence[Server], said: str) -> str:
    which = "the server is" if len(servers) == 1 else f"all {len(servers)} servers are"
    return (
        f"{which} down: {said}. Start {'it' if len(servers) == 1 else 'one'} (or mend generate.server_urls) and run "
        "again: what is committed stays, the rest is asked anew"
    )
