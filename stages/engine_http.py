"""One request to one server: over the wire, and what the reply means for those who asked.

A reply is one of four things: an answer, or words with which the server declines this one request (`Reply`); a trouble
that may pass (`AttemptFailed`); something that will be so for every request (`EngineError`); or no reply of this
protocol (`BadReply`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

import aiohttp

from stages.engine import EngineError
from stages.engine_tokens import BadReply

MODELS = "/v1/models"
CONNECT_S = 10.0
SIGN_S = 30.0
"""How long a server may take to name its models."""
LONGEST_WAIT_S = 60.0
_SHOWN = 300


class Trouble(StrEnum):
    """What went wrong with a request; the name is also the reason of a refusal."""

    UNREACHABLE = "server_down"
    BUSY = "server_busy"
    LOST = "connection_lost"
    TIMED_OUT = "timed_out"
    BROKEN = "server_error"
    GARBLED = "bad_reply"


class AttemptFailed(Exception):
    """A request failed in a way that may pass."""

    def __init__(self, trouble: Trouble, text: str, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.trouble, self.text, self.wait_s = trouble, text, wait_s


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server said: a JSON object with status 200, else its words."""

    status: int
    body: dict[str, Any]
    text: str


@dataclass
class Connections:
    """Connections to the servers of one engine.

    Args:
        key_env: environment variable with the API key.
        timeout_s: for one reply.

    Raises:
        EngineError: the variable is not set.
    """

    key_env: str | None
    timeout_s: float
    _key: str | None = field(init=False, repr=False)
    _session: aiohttp.ClientSession | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        self._key = _key(self.key_env)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("connections hold sockets and a key; make them where they are used")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """For what follows; they belong to the running event loop."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # Concurrency is bounded by the caller; a request must not spend its time waiting for a connection.
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, connector=connector) as self._session:
            yield

    async def get(self, url: str, path: str) -> Reply:
        """See `post`; the time limit is `SIGN_S`."""
        return await self._send(url, "GET", path, None, min(SIGN_S, self.timeout_s))

    async def post(self, url: str, path: str, body: dict[str, Any]) -> Reply:
        """One attempt at one server. A reply has status 200, or is what the server declined with.

        Raises:
            EngineError: the server refuses the key, or sends us elsewhere.
            AttemptFailed, BadReply: another attempt may do.
        """
        return await self._send(url, "POST", path, body, self.timeout_s)

    async def _send(
        self, url: str, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> Reply:
        if self._session is None:
            raise EngineError("the servers were asked outside `open`; this is a fault of the generate stage")
        options: dict[str, Any] = {
            "json": body, "allow_redirects": False,
            "timeout": aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s)),
        }  # fmt: skip
        try:
            async with self._session.request(method, url + path, **options) as reply:
                data = await reply.read()
                return self._judged(url + path, reply, data)
        except aiohttp.ClientConnectorError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise AttemptFailed(Trouble.UNREACHABLE, f"cannot be reached ({why})") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise AttemptFailed(Trouble.UNREACHABLE, f"cannot be reached (no connection in {CONNECT_S:g} s)") from error
        except TimeoutError as error:
            if method == "GET":
                raise AttemptFailed(Trouble.UNREACHABLE, f"does not name its models in {timeout_s:g} s") from error
            text = f"no reply in {timeout_s:g} s (generate.timeout_s)"
            raise AttemptFailed(Trouble.TIMED_OUT, text) from error
        except aiohttp.ClientError as error:
            said = self._clean(str(error)) or "no reply"
            raise AttemptFailed(Trouble.LOST, f"broke off ({type(error).__name__}: {said})") from error

    def _judged(self, where: str, reply: aiohttp.ClientResponse, data: bytes) -> Reply:
        status, said = reply.status, self._clean(error_text(data))
        where = f"{where} answers {status}"
        if status in (401, 403):
            has = f"{self.key_env} holds" if self._key else "generate.api_key_env names none"
            raise EngineError(
                f"{where}: it refuses our API key ({has}): {said}. Put the right key into an environment variable, on "
                "every machine with workers, and its name into generate.api_key_env"
            )
        if 300 <= status < 400:
            raise EngineError(f"{where} and sends us to another place; put that one into generate.server_urls")
        if status in (429, 502, 503, 504):
            raise AttemptFailed(Trouble.BUSY, f"{status} {said}", _retry_after(reply.headers.get("Retry-After")))
        if status == 408:
            raise AttemptFailed(Trouble.TIMED_OUT, f"{status} {said}")
        if status >= 500:
            raise AttemptFailed(Trouble.BROKEN, f"{status} {said}")
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
