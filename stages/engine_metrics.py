"""What a vLLM server counts of speculative decoding, read from its `/metrics`.

Source: vLLM 0.32, `v1/spec_decode/metrics.py`: `…_num_drafts` is cycles, `…_num_accepted_tokens_per_pos` has one
counter per position from 0. Prometheus appends `_total`.
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable

from stages.acceptance import Accepted
from stages.engine import EngineError

DRAFTS = "vllm:spec_decode_num_drafts_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_LINE = re.compile(rf"^({DRAFTS}|{PER_POSITION})(?:\{{(.*)\}})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
READ_S = 30.0
SETTLE_S = 5.0
"""The counters follow a reply within moments; after this long they are taken as they are."""
_PAUSE_S = 0.05
# A server on this machine or in the own network is not asked through a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read_url(url: str, timeout_s: float = READ_S) -> str:
    """The body of a GET.

    Raises:
        EngineError: it cannot be had.
    """
    try:
        with _OPENER.open(url, timeout=timeout_s) as reply:
            return str(reply.read().decode(errors="replace"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise EngineError(f"{url} cannot be read: {error}; expected a running server there") from error


def parse_counters(text: str) -> Accepted | None:
    """The counters of all engines of a server together; None if it does not decode speculatively, or counts nothing."""
    cycles, by_position = 0.0, defaultdict[int, float](float)
    for name, labels, value in _LINE.findall(text):
        if name == DRAFTS:
            cycles += float(value)
        elif position := _POSITION.search(labels):
            by_position[int(position.group(1))] += float(value)
    if not by_position:
        return None
    return Accepted(int(cycles), tuple(int(by_position[k]) for k in range(max(by_position) + 1)))


def read_counters(url: str) -> Accepted | None:
    """`parse_counters` of a server's `/metrics`, or None where it has no such page.

    Raises:
        EngineError: nobody answers.
    """
    try:
        return parse_counters(read_url(f"{url}/metrics"))
    except EngineError as error:
        if isinstance(error.__cause__, urllib.error.HTTPError):
            return None
        raise


def counters_after(url: str, before: Accepted, n_tokens: int) -> Accepted:
    """The counters once they tell of all tokens of one more response.

    Its first token is the prefill's; each cycle gives its accepted drafts and one more.

    Raises:
        EngineError: the server counts no more.
    """
    end = time.monotonic() + SETTLE_S
    while True:
        found = read_counters(url)
        if found is None or len(found.by_position) != len(before.by_position):
            raise EngineError(f"{url}/metrics counts otherwise than before; was the server started anew?")
        new = found.since(before)
        if 1 + new.cycles + sum(new.by_position) >= n_tokens or time.monotonic() > end:
            return found
        time.sleep(_PAUSE_S)


def settled(read: Callable[[], Accepted | None]) -> Accepted | None:
    """The counters when two looks agree."""
    found = read()
    while True:
        time.sleep(4 * _PAUSE_S)
        again = read()
        if again == found:
            return found
        found = again
