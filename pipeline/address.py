"""Whether a cluster's dashboard answers, before anything is submitted to it: `python -m pipeline.address URL`.

`ray job submit` to an address where nobody is ends in a traceback (Ray 2.60).
"""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.request

from pipeline.exits import Exit, exit_code
from stages.config import ConfigError, require_server_url

ANSWER_S = 10.0


def address_fault(address: str, timeout_s: float = ANSWER_S) -> str | None:
    """What is wrong with the address of a dashboard that does not answer; None if it does, be it with a refusal.

    Args:
        address: like http://head:8265.
        timeout_s: how long it may take.

    Raises:
        ConfigError: it is no such address.
    """
    require_server_url("ADDRESS", address)
    try:
        # As `ray job submit` asks first; through the proxy of the environment too, if there is any.
        urllib.request.urlopen(f"{address.rstrip('/')}/api/version", timeout=timeout_s).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (404, 502, 503, 504):
            return f"ADDRESS {address} answers {error.code} {error.reason}: no dashboard of a Ray cluster is there"
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or str(error) or type(error).__name__
        return (
            f"ADDRESS {address} does not answer ({why}): expected the dashboard of a Ray cluster, port 8265 of its "
            "head node unless said otherwise"
        )
    return None


def main() -> int:
    """0 if it answers."""
    try:
        fault = address_fault(sys.argv[1])
    except ConfigError as error:
        print(f"error: {error}; nothing was submitted", file=sys.stderr)
        return exit_code(error)
    if fault is not None:
        print(f"error: {fault}; nothing was submitted", file=sys.stderr)
    return Exit.DONE if fault is None else Exit.BAD


if __name__ == "__main__":
    sys.exit(main())
