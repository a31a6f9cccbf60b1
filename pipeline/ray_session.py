"""A Ray to work in: started, joined or used as it is; and whether a worker fits in it at all.

A Ray of our own is for this machine and this user alone: all its processes listen on the loopback interface only, and
ask for a token. A cluster that RAY_ADDRESS names is joined as it is.

Ray is imported inside functions, so that importing this module costs nothing.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError

_STARTS = 3  # tries to start Ray
_DEATH_INFO_MS = "5000"  # how long a lost call waits to be told why; Ray's 1 s is too little on a busy machine


_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's own switch, whatever the system: without clusters, the address of the machine is 127.0.0.1, and its processes
listen there alone (`ray._private.services.get_node_ip_address`, Ray 2.60)."""


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
    alone = not os.environ.get("RAY_ADDRESS")
    import ray

    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"namespace": "dflash", "log_to_driver": log_to_driver, "logging_level": "WARNING"}
    if not alone:
        options["address"] = os.environ["RAY_ADDRESS"]
    else:
        _keep_token_private()
        # Receipts are small, so Ray's usual third of the memory is not set aside for objects.
        options |= {"address": "local", "include_dashboard": False, "num_cpus": num_cpus, "num_gpus": num_gpus}
        options["object_store_memory"] = 256 << 20
        # Ray protects an own instance with a token; that is as it should be, and no news to anybody.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    try:
        with _loopback_only() if alone else nullcontext():
            _start_ray(options)
        yield
    finally:
        ray.shutdown()


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Let a Ray that is imported or started meanwhile be for this machine alone; the environment is as before then.

    Ray reads the switch when it is imported, which others may have done before; its processes read the environment.
    """
    before = os.environ.get(_CLUSTERS)
    os.environ[_CLUSTERS] = "0"
    from ray._private import ray_constants

    clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        os.environ.pop(_CLUSTERS)
        if before is not None:
            os.environ[_CLUSTERS] = before


def _keep_token_private() -> None:
    """See that the token which Ray asks for can be read by this user alone: Ray writes it for all (2.60).

    With a home that cannot be written to, the token is in the environment of our processes.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return  # switched off by the user
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    file = Path.home() / ".ray" / "auth_token"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
                out.write(secrets.token_hex(32))
            with suppress(FileExistsError):  # another of our runs was faster
                os.link(draft, file)
            draft.unlink()
        file.chmod(0o600)
    except OSError:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


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
