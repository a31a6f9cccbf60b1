"""Training beside extraction, from the side of the ranks: readers that wait for shards, and where the training is.

The driver makes shards in the order in which training will need them and evicts those that it does not need for
longest (`pipeline.rolling`). The two sides meet in files only: commit markers, the trainer's position, and a stop
file that appears when extraction has failed. So they may be on different machines, and either may be killed.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import Any

from cache_schema.errors import ShardCorrupt, ShardNotCommitted
from cache_schema.reader import FeatureCache
from cache_schema.storage import FolderStorage, Location, is_remote, join, read_at, replace_at
from stages.batch import TrainingSample
from stages.config import DrafterConfig, TrainConfig
from stages.dataset import SampleReader
from stages.errors import TrainingError

log = logging.getLogger(__name__)
POSITION, STOP = "position.json", "stop.txt"
WRITE_S, WRITE_STORE_S = 0.25, 2.0
"""Between two writes of the position, to a folder and to an object store."""
REFRESH_S = 2.0
"""Between two looks at which shards are there; an evicted one that a reader holds open keeps its disk space."""
TELL_S = 30.0
_POLL_FOLDER_S, _POLL_STORE_S = 0.2, 2.0


@dataclass(frozen=True, slots=True)
class Rolling:
    """What a rank needs to train from a cache that is being made.

    Attributes:
        heldout_dir: the cache of the held-out samples; None if there are none.
        stop_file: appears when extraction has failed; holds the reason.
        wait_s: how long no shard may be finished while a reader waits.
    """

    heldout_dir: Location | None
    stop_file: Location
    wait_s: float

    def require_going(self) -> None:
        """Check that extraction has not failed.

        Raises:
            TrainingError: it has.
        """
        try:
            reason = read_at(self.stop_file).decode()
        except FileNotFoundError:
            return
        raise TrainingError(f"training was stopped, because extraction failed: {reason}")


class WaitingReader(SampleReader):
    """Reads samples as `SampleReader` does, and waits for the shard of one that is not there (yet, or any more)."""

    def __init__(
        self, cache: FeatureCache, config: TrainConfig, seed: int, rolling: Rolling,
        drafter: DrafterConfig | None = None,
    ) -> None:
        super().__init__(cache, config, seed, drafter)
        self.rolling = rolling
        self._refreshed = 0.0

    def read(self, sample_id: str, epoch: int, n_anchors: int | None = None) -> TrainingSample | None:
        """As `SampleReader.read`.

        Raises:
            TrainingError: extraction has failed, or has finished no shard for too long.
            ShardCorrupt: the shard is damaged.
        """
        if time.monotonic() - self._refreshed > REFRESH_S:
            self._refresh()
        shard = self.cache.plan.shard_of(sample_id)
        while True:
            group = self._group(shard)
            try:
                return super().read(sample_id, epoch, n_anchors)
            except ShardNotCommitted:
                self._wait_for(shard)
            except (ShardCorrupt, FileNotFoundError):
                # It may have been evicted, and perhaps made again, since the markers were read.
                self.cache.refresh([shard])
                if self._group(shard) == group:
                    raise

    def _group(self, shard: str) -> str | None:
        marker = self.cache.markers.get(shard)
        return marker.group if marker is not None else None

    def _refresh(self) -> None:
        self.cache.refresh()
        self._refreshed = time.monotonic()

    def _wait_for(self, shard: str) -> None:
        poll_s = _POLL_FOLDER_S if isinstance(self.cache.storage, FolderStorage) else _POLL_STORE_S
        began = news = told = time.monotonic()
        known = self._groups()
        while True:
            self.rolling.require_going()
            self._refresh()
            now = time.monotonic()
            if shard in self.cache.markers:
                return
            if self._groups() - known:
                known, news = known | self._groups(), now
            if now - news > self.rolling.wait_s:
                raise TrainingError(
                    f"training waited {now - began:.0f} s for {shard} of {self.cache.storage.where()}, and for "
                    f"{now - news:.0f} s no shard was finished (train.shard_wait_s {self.rolling.wait_s:g}); look at "
                    "the extract workers"
                )
            if now - told > TELL_S:
                told = now
                log.warning("waiting for %s: not extracted yet (%.0f s)", shard, now - began)
            time.sleep(poll_s)

    def _groups(self) -> set[str]:
        return {marker.group for marker in self.cache.markers.values()}


class PositionFile:
    """Tells the driver how many steps are done: the newest number reaches the file, a few writes a second at most."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self._between_s = WRITE_STORE_S if is_remote(path) else WRITE_S
        self._step: int | None = None
        self._error: OSError | None = None
        self._news, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="position", daemon=True)
        self._thread.start()

    def set(self, step: int) -> None:
        """Steps that are done.

        Raises:
            OSError: an earlier number could not be written.
        """
        if self._error is not None:
            raise self._error
        self._step = step
        self._news.set()

    def close(self) -> None:
        """Write what is not written yet."""
        self._closing.set()
        self._news.set()
        self._thread.join()

    def _write_on(self) -> None:
        last = False
        while not last:
            # At once and not at fixed times: a trainer that now waits for a shard sets no other number.
            self._news.wait()
            self._news.clear()
            last = self._closing.is_set()
            try:
                if self._step is not None:
                    write_position(self.path, self._step)
            except OSError as error:
                self._error = error
                return
            self._closing.wait(self._between_s)


def write_position(path: Location, step: int) -> None:
    """Record that so many steps are done."""
    replace_at(path, json.dumps({"step": step}).encode())


def read_position(path: Location) -> int:
    """Steps that are done; 0 if nothing says so."""
    try:
        return int(json.loads(read_at(path))["step"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


class Watch:
    """Called by a trainer at its start and after each step: stops it when extraction has failed, tells where it is.

    Args:
        rolling: of the run.
        folder: of the run's training files.
        chief: whether this rank writes the position.
    """

    def __init__(self, rolling: Rolling, folder: Location, *, chief: bool) -> None:
        self.rolling = rolling
        self._file = PositionFile(join(folder, POSITION)) if chief else None
        self._between_s = _POLL_STORE_S if is_remote(rolling.stop_file) else 0.0
        self._looked = -math.inf

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._looked >= self._between_s:
            self.rolling.require_going()
            self._looked = time.monotonic()
        if self._file is not None:
            self._file.set(done)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._file is not None:
            self._file.close()
