"""A proxy in front of a server: it counts the requests, and can make an honest server lie."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.servers.s3 import SECRET_KEY

HOP_BY_HOP = ("connection", "transfer-encoding", "keep-alive")


@dataclass(frozen=True, slots=True)
class Request:
    """A request that went through.

    Attributes:
        range: its header Range.
    """

    method: str
    path: str
    range: str | None


@dataclass(kw_only=True)
class Proxy:
    """A running proxy.

    Attributes:
        endpoint: its address.
        requests: all that came, in order.
        forget: headers of requests (lower case) that the server never sees.
        shift: what is added to both ends of each range that is asked for, while the answer still claims the range.
        cut: bytes missing at the end of each ranged answer.
        lose: so many of the next answers to a PUT never arrive, though the server has done what was asked.
    """

    endpoint: str
    requests: list[Request] = field(default_factory=list)
    forget: set[str] = field(default_factory=set)
    shift: int = 0
    cut: int = 0
    lose: int = 0

    def count(self, method: str, containing: str = "") -> int:
        """Requests of a method so far whose path holds a text."""
        return sum(r.method == method and containing in r.path for r in list(self.requests))


@contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    """A proxy in front of 127.0.0.1:port, on another port of the loopback."""
    server = _Server(port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.proxy = Proxy(endpoint=f"http://127.0.0.1:{self.server_port}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _pass_on(self) -> None:
        lie = self.server.proxy
        asked = self.headers.get("Range")
        lie.requests.append(Request(self.command, self.path, asked))
        headers = {k.lower(): v for k, v in self.headers.items() if k.lower() not in lie.forget}
        if asked and lie.shift:
            first, last = asked.removeprefix("bytes=").split("-")
            headers["range"] = f"bytes={max(0, int(first) + lie.shift)}-{max(0, int(last) + lie.shift)}"
        if lie.forget or lie.shift:
            _sign(self.command, self.path, headers)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        try:
            upstream.request(self.command, self.path, body=body, headers=headers)
            answer = upstream.getresponse()
            data = answer.read()
            fields = dict(answer.getheaders())
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # as if there were no proxy
            return
        finally:
            upstream.close()
        if self.command == "PUT" and lie.lose:
            lie.lose -= 1
            self.close_connection = True
            return
        if asked and answer.status == 206:
            data = data[: len(data) - lie.cut]
            if lie.shift or lie.cut:
                total = fields["Content-Range"].split("/")[1]
                fields["Content-Range"] = f"{asked.replace('=', ' ')}/{total}"
        if self.command != "HEAD":
            fields["Content-Length"] = str(len(data))
        self.send_response_only(answer.status)
        for name, value in fields.items():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests look at `requests`."""


def _sign(method: str, path: str, headers: dict[str, str]) -> None:
    """Sign a changed request again (AWS signature version 4), with the date and the scope it had."""
    found = re.search(r"Credential=\w[^/]*/(\w+)/([\w-]+)/(\w+)/aws4_request", headers["authorization"])
    assert found is not None
    date, region, service = found.groups()
    signed = sorted(h for h in headers if h in ("host", "range", "if-none-match") or h.startswith("x-amz-"))
    path, _, query = path.partition("?")
    canonical = "\n".join(
        [
            method,
            path,
            "&".join(sorted(part if "=" in part else f"{part}=" for part in query.split("&") if part)),
            *(f"{name}:{headers[name].strip()}" for name in signed),
            "",
            ";".join(signed),
            headers["x-amz-content-sha256"],
        ]
    )
    scope = f"{date}/{region}/{service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", headers["x-amz-date"], scope, digest])
    key = f"AWS4{SECRET_KEY}".encode()
    for part in (date, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    credential = headers["authorization"].split("Credential=")[1].split(",")[0]
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={';'.join(signed)}, Signature={signature}"
    )
