"""The Train entry: the plain training function on a Ray Train (v2) worker group. The only stage module that knows Ray.

A failed group is restarted up to `max_restarts` times and goes on from the newest checkpoint, which is this
project's own (`stages.checkpoint`); Ray only starts, watches and restarts the ranks.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache_schema.durable import is_storage_fault, storage_text
from cache_schema.errors import DFlashError, StorageFault
from cache_schema.names import random_tag
from cache_schema.storage import Storage, open_storage
from stages.config import TrainConfig
from stages.errors import TrainingError
from stages.meeting import LOOPBACK, bind_loopback, join_on_loopback
from stages.train import TrainJob

if TYPE_CHECKING:
    from stages.world import World

_PATIENCE_S = 1800
"""How long ranks wait for each other."""
_ASK_EVERY = 20
"""Steps between two questions whether a node is about to be taken away: each is a barrier of all ranks."""


def _rank(settings: dict[str, Any]) -> None:
    import ray.train
    import torch
    from ray.train.torch import get_device

    from stages.train import train_rank
    from stages.world import World

    context = ray.train.get_context()
    device = get_device()
    world = World(context.get_world_rank(), context.get_world_size(), device)
    job: TrainJob = settings["job"]
    if settings["alone"] and world.size > 1:
        _meet(world, settings["patience_s"])
    place = open_storage(job.folder)
    if place.exists(settings["failure"]):
        return  # another rank has said what no retry mends; Ray restarted this group all the same
    try:
        train_rank(job, world, leaving=_node_leaves())
    except DFlashError as error:
        # Another try would end the same way: leave the words for the driver, and let the group end in order.
        _leave(place, settings["failure"], f"{type(error).__name__}: {error}", storage=False)
    except OSError as error:
        if not is_storage_fault(error):
            raise
        _leave(place, settings["failure"], storage_text(error), storage=True)
    if settings["alone"] and world.size > 1:
        torch.distributed.destroy_process_group()


def _meet(world: World, patience_s: float) -> None:
    """Let the ranks of one machine find each other without a port that other machines reach."""
    from ray.train.collective import broadcast_from_rank_zero

    listening = bind_loopback() if world.rank == 0 else None
    port = broadcast_from_rank_zero(listening.getsockname()[1] if listening else None)
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    join_on_loopback(
        backend, rank=world.rank, size=world.size, port=port, timeout_s=patience_s, listening=listening
    )


def _torch_config(alone: bool, patience_s: float) -> Any:
    """Ray's own way to let ranks meet; on a Ray that is alone on this machine, they do it themselves (`_meet`)."""
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig

    class Unmet(Backend):
        share_cuda_visible_devices = True

    class UnmetConfig(TorchConfig):
        @property
        def backend_cls(self) -> Any:
            return Unmet

    return (UnmetConfig if alone else TorchConfig)(timeout_s=round(patience_s))


def _node_leaves() -> Callable[[], bool]:
    """Tells whether Ray knows that a node of this training is about to be taken away, as far as this Ray can tell.

    The trainer then writes a checkpoint at once and goes on; when the node is gone, Ray restarts the ranks, which does
    not count as one of the failures that `max_restarts` allows.
    """
    import ray.train

    ask = getattr(ray.train, "get_preemption_info", None)
    asked = itertools.count()
    if ask is None:
        return lambda: False
    return lambda: next(asked) % _ASK_EVERY == 0 and ask() is not None


def _ranks(config: TrainConfig) -> Any:
    """How many ranks, or a pair: between how many (ray's own annotation knows only the first).

    Raises:
        TrainingError: this Ray has no elastic training.
    """
    from ray.train import ScalingConfig

    if config.min_workers is None or config.min_workers == config.workers:
        return config.workers
    if not hasattr(ScalingConfig, "elasticity_enabled"):
        raise TrainingError(
            f"train.min_workers is {config.min_workers}, but this version of Ray cannot change the number of ranks of "
            "a training; install ray 2.60 or newer, or leave train.min_workers out"
        )
    return config.min_workers, config.workers


def _scaling(config: TrainConfig, gpus: float) -> Any:
    """What Ray Train sets aside for the ranks, and where.

    Raises:
        TrainingError: this Ray cannot do what the recipe asks for.
    """
    from ray.train import ScalingConfig

    resources: dict[str, float] = {"CPU": config.threads or 1, **config.resources}
    if gpus:
        resources["GPU"] = gpus
    if config.memory_bytes is not None:
        resources["memory"] = config.memory_bytes
    options: dict[str, Any] = {"label_selector": dict(config.label_selector)} if config.label_selector else {}
    if options and not hasattr(ScalingConfig, "label_selector"):
        raise TrainingError(
            f"train.label_selector is {config.label_selector}, but this version of Ray cannot choose a training's "
            "nodes by their labels; install ray 2.60 or newer, or use train.resources"
        )
    return ScalingConfig(num_workers=_ranks(config), use_gpu=gpus > 0, resources_per_worker=resources, **options)


def train_with_ray(job: TrainJob, *, storage: Path, gpus_per_worker: float = 0) -> None:
    """Train on `job.train.workers` ranks; returns when the final checkpoint is written.

    Args:
        job: what to train; `folder` must be reachable from every worker.
        storage: a local folder for Ray Train's own small state.
        gpus_per_worker: 0 trains on CPUs with gloo; below 1 shares a GPU, with extract workers in rolling mode.

    Raises:
        TrainingError: the ranks failed, more often than `max_restarts` allows, or with an error that no retry mends.
        StorageFault: their storage is full, refuses, or is out of reach.
    """
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    from ray.exceptions import RayActorError

    place, failure = open_storage(job.folder), f"failure.{random_tag()}.txt"
    for deaths in itertools.count(1):
        trainer = _trainer(job, storage, failure, gpus_per_worker)
        try:
            with _handler_kept():
                trainer.fit()
            break
        except SystemExit as interrupted:  # how Ray Train answers Ctrl-C, once its ranks are down
            raise KeyboardInterrupt from interrupted
        except RayActorError as error:  # not of the ranks, whose failures Ray wraps: their controller is gone
            if deaths > job.train.max_restarts:
                raise TrainingError(f"Ray's controller of the training died, {deaths} times: {error}") from error
        except Exception as error:  # Ray wraps whatever the ranks raised in errors of its own
            if place.exists(failure):
                raise _taken(place, failure) from error
            raise TrainingError(
                f"training failed on {job.train.workers} worker(s), restarts included: {error}"
            ) from error
    if place.exists(failure):
        raise _taken(place, failure)


def _trainer(job: TrainJob, storage: Path, failure: str, gpus_per_worker: float) -> Any:
    """A training for Ray to drive, under a name of its own, so that Ray takes up no earlier one."""
    import ray
    from ray.train import FailureConfig, RunConfig
    from ray.train.torch import TorchTrainer

    # While one rank waits for a shard, the others wait for that rank.
    patience_s = _PATIENCE_S + (job.rolling.wait_s if job.rolling else 0)
    alone = ray.util.get_node_ip_address() == LOOPBACK  # no other machine can be in a Ray with such an address
    return TorchTrainer(
        _rank,
        train_loop_config={"job": job, "failure": failure, "alone": alone, "patience_s": patience_s},
        torch_config=_torch_config(alone, patience_s),
        scaling_config=_scaling(job.train, gpus_per_worker),
        run_config=RunConfig(name=f"train-{random_tag()}", storage_path=str(storage.resolve()),
                             failure_config=FailureConfig(max_failures=job.train.max_restarts)),
    )


def _leave(place: Storage, failure: str, text: str, *, storage: bool) -> None:
    """Say in a file why this rank has ended; where the storage is at fault, that may not be possible."""
    with suppress(OSError):
        place.replace(failure, json.dumps({"text": text, "storage": storage}).encode())


@contextmanager
def _handler_kept() -> Iterator[None]:
    """Ray Train answers Ctrl-C with a handler that it leaves behind, and that asks a controller which has gone."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def _taken(place: Storage, failure: str) -> DFlashError:
    """What a rank left in the file, which goes, as an error."""
    found = json.loads(place.read(failure))
    place.delete(failure)
    return StorageFault(found["text"]) if found["storage"] else TrainingError(found["text"])
