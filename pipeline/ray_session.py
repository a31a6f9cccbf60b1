"""A Ray to work in: started, joined or used as it is; and whether a worker fits in it at all.

Ray is imported inside functions, so that importing this module costs nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pipeline.errors import PipelineError

_STARTS = 3  # tries to start Ray
_DEATH_INFO_MS = "5000"  # how long a lost call waits to be told why; Ray's 1 s is too little on a busy machine


@contextmanager
def ensure_ray(
    *, num_cpus: int | None = None, num_gpus: int | None = None, log_to_driver: bool = False
) -> Iterator[None]:
    """A Ray to work in: the one that is there, the cluster that RAY_ADDRESS names, or one of our own.

    Only what is started here is shut down on leaving, on errors and Ctrl-C too.

    Args:
        num_cpus: CPUs that an own Ray offers; None takes all.
        num_gpus: GPUs likewise.
        log_to_driver: show what workers print. Off, because the driver tells every failure itself.
    """
    # All are read when Ray is imported or started: no usage report to Ray's makers, and a worker without
    # GPUs keeps its environment (Ray's coming default, whose announcement is a warning).
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", _DEATH_INFO_MS)
    import ray

    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"namespace": "dflash", "log_to_driver": log_to_driver, "logging_level": "WARNING"}
    if os.environ.get("RAY_ADDRESS"):
        options["address"] = os.environ["RAY_ADDRESS"]
    else:
        # Receipts are small, so Ray's usual third of the memory is not set aside for objects.
        options |= {"address": "local", "include_dashboard": False, "num_cpus": num_cpus, "num_gpus": num_gpus}
        options["object_store_memory"] = 256 << 20
        # Ray protects an own instance with a token; that is as it should be, and no news to anybody.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    try:
        _start_ray(options)
        yield
    finally:
        ray.shutdown()


def _start_ray(options: dict[str, Any]) -> None:
    """Start or join Ray; one that a busy machine did not start in time is started again.

    Raises:
        PipelineError: it did not start in time, three times; or what RAY_ADDRESS names cannot be joined.
    """
    import ray
    from ray.exceptions import AuthenticationError

    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(**options)
            return
        except (ConnectionError, ValueError, AuthenticationError) as error:
            if options.get("address") == "local":
                raise
            why = str(error).strip().rstrip(".")
            raise PipelineError(
                f"RAY_ADDRESS is {options.get('address')!r}, but no Ray cluster could be joined there: {why}. Check "
                "the address (host:port of the head node, such as 10.0.0.1:6379), that the head runs and can be "
                "reached, and, if it asks for a token, RAY_AUTH_MODE=token with its RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH; or unset RAY_ADDRESS to work on this machine alone"
            ) from error
        except Exception as error:  # Ray raises a bare Exception here
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if attempt == _STARTS:
                raise PipelineError(
                    f"Ray did not start in time, {_STARTS} times: this machine is too busy, or out of memory. Nothing "
                    "is lost; run the same command again when it is less so"
                ) from error


def require_room(
    amounts: Mapping[str, float], group_size: int = 1, label_selector: Mapping[str, str] | None = None
) -> None:
    """Refuse what would wait for ever: on one machine nothing is ever added.

    Args:
        amounts: of one actor, by the name that nodes offer them under: `CPU`, `GPU`, `memory`, or a custom one.
        group_size: actors that one worker consists of; they must fit at once.
        label_selector: labels of the nodes that may be used.

    Raises:
        PipelineError: not even one worker fits.
    """
    import ray

    if os.environ.get("RAY_ADDRESS"):
        return  # a cluster may still grow
    have = ray.cluster_resources()
    of_group = f" ({group_size} processes)" if group_size > 1 else ""
    for name, amount in amounts.items():
        needed = amount * group_size
        if needed > have.get(name, 0):
            setting = {"CPU": "threads", "GPU": "gpus", "memory": "memory_bytes"}.get(name, "resources")
            raise PipelineError(
                f"a worker{of_group} needs {needed:g} {name}, but this machine offers Ray {have.get(name, 0):g}: "
                f"lower the recipe's {setting}, or set RAY_ADDRESS to a cluster that has them"
            )
    if label_selector:
        raise PipelineError(
            f"a worker{of_group} wants a node with the labels {dict(label_selector)}, but this is one machine of its "
            "own: leave the recipe's label_selector out, or set RAY_ADDRESS to a cluster whose nodes have labels"
        )
