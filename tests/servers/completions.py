"""A small server that speaks OpenAI's completions protocol, over real sockets, and misbehaves when told to.

What it answers is a function of the prompt's ids alone, so that a test knows every answer beforehand. Its three kinds
are those of `stages.engine_openai`: `ids` as vLLM and SGLang, `generation` as `transformers serve`, `plain` as OpenAI.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Kind = Literal["ids", "generation", "plain"]
_PLAIN = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed"}


@dataclass(frozen=True, slots=True)
class Request:
    """A completion that is asked for."""

    body: dict[str, Any]
    prompt_ids: list[int]
    n: int
    """How often this prompt was asked for before."""
    authorization: str | None


@dataclass(frozen=True, slots=True)
class Say:
    """Answer with this instead."""

    status: int
    body: Any
    """JSON-able, or text that is sent as it is."""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the connection without a word."""


@dataclass(frozen=True, slots=True)
class Change:
    """Answer as usual, but for these."""

    choice: dict[str, Any] = field(default_factory=dict)
    """None takes a field out."""
    usage: dict[str, Any] | None = field(default_factory=dict)
    delay_s: float = 0.0


Action = Say | Drop | Change | None


@dataclass
class CompletionServer:
    """The server and what it saw.

    Args:
        tokenizer: what it tokenizes with.
        kind: what it understands.
        model: the name that it lists.
        root: the folder that it says the model is from.
        n_tokens: length of the answers, the end of turn included.
    """

    tokenizer: Any
    kind: Kind = "ids"
    model: str = "tiny"
    root: str | None = None
    n_tokens: Callable[[list[int]], int] = lambda ids: 4 + sum(ids) % 5
    behave: Callable[[Request], Action] = lambda request: None
    models: Action = None
    pages: dict[str, Callable[[], Say]] = field(default_factory=dict)
    """What else can be got, by path."""
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    most_open: int = 0
    n_listed: int = 0
    _asked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def end_id(self) -> int:
        end: int = self.tokenizer.eos_token_id
        return end

    def answer_ids(self, prompt_ids: list[int]) -> list[int]:
        """What it answers: letters that depend on the prompt, then the end of turn."""
        n = self.n_tokens(prompt_ids)
        letters = "".join(chr(ord("a") + (sum(prompt_ids) + 7 * i) % 26) for i in range(n - 1))
        return [*self.tokenizer(letters, add_special_tokens=False)["input_ids"], self.end_id]

    def prompt_requests(self) -> list[Request]:
        """Without those that only ask how the server is to be asked."""
        return [r for r in self.requests if r.body["max_tokens"] != 2]

    @contextmanager
    def running(self) -> Iterator[CompletionServer]:
        """Serve on a free port (or again on the one from before) until the block ends."""
        server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        server.daemon_threads = True
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def complete(self, body: dict[str, Any], authorization: str | None) -> Say | Drop:
        prompt = body["prompt"]
        refusal = self._misunderstood(body)
        if refusal:
            return refusal
        ids = prompt if isinstance(prompt, list) else list(self.tokenizer(prompt)["input_ids"])
        with self._lock:
            request = Request(body, ids, self._asked[tuple(ids)], authorization)
            self._asked[tuple(ids)] += 1
            self.requests.append(request)
            self._open += 1
            self.most_open = max(self.most_open, self._open)
        try:
            action = None if body["max_tokens"] == 2 and self.behave.__name__ != "every" else self.behave(request)
            if isinstance(action, Say | Drop):
                return action
            change = action or Change()
            time.sleep(change.delay_s)
            return Say(200, self._completion(body, ids, change))
        finally:
            with self._lock:
                self._open -= 1

    def _misunderstood(self, body: dict[str, Any]) -> Say | None:
        if body["model"] != self.model:
            return Say(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        if self.kind == "ids":
            return None
        if not isinstance(body["prompt"], str):
            return Say(400, {"detail": "prompt must be a string."})
        unknown = set(body) - _PLAIN - ({"generation_config"} if self.kind == "generation" else set())
        return Say(422, {"detail": f"Unexpected fields in the request: {sorted(unknown)}"}) if unknown else None

    def _completion(self, body: dict[str, Any], prompt_ids: list[int], change: Change) -> dict[str, Any]:
        whole = self.answer_ids(prompt_ids)
        ids = whole[: body["max_tokens"]]
        text = self.tokenizer.decode([i for i in ids if i != self.end_id])
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "stop" if ids == whole else "length"}
        if self.kind == "ids" and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt_ids}
        choice = {k: v for k, v in (choice | change.choice).items() if v is not None}
        reply = {"object": "text_completion", "choices": [choice], "system_fingerprint": "test-1"}
        if change.usage is not None:
            reply["usage"] = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)} | change.usage
        return reply


def _handler(served: CompletionServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if page := served.pages.get(self.path):
                self._send(page())
                return
            served.n_listed += 1
            if isinstance(served.models, Change):
                time.sleep(served.models.delay_s)
            card = {"id": served.model, "object": "model", "root": served.root}
            told = None if isinstance(served.models, Change) else served.models
            self._send(told or Say(200, {"object": "list", "data": [card]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(served.complete(body, self.headers["Authorization"]))

        def _send(self, action: Action) -> None:
            if not isinstance(action, Say):
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            data = (action.body if isinstance(action.body, str) else json.dumps(action.body)).encode()
            self.send_response(action.status)
            for name, value in ({"Content-Length": str(len(data))} | action.headers).items():
                self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(data)
            except ConnectionError:  # the client did not wait
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
