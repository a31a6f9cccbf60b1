"""The checkpoints of a training whose folder may be in an object store.

There a checkpoint's files are carried over first and `state.json`, which holds their hashes, last: one that was cut
off has no `state.json` and is never picked. What the store holds counts; scratch is only where the files are used.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from cache_schema.carried import Carried, download, upload
from cache_schema.names import random_tag
from stages import checkpoint
from stages.checkpoint import Progress
from stages.checkpoint_names import CHECKPOINTS, MODEL, OPTIMIZER, STATE

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one training.

    Args:
        place: the training's folder.
    """

    def __init__(self, place: Carried) -> None:
        self.place = place
        self.folder = place.path / CHECKPOINTS

    def newest(self, fingerprint: str) -> tuple[Path, Progress] | None:
        """The newest intact checkpoint, on this machine, or None. Every rank may call it.

        Raises:
            FingerprintMismatch: the newest intact one belongs to another training.
            OSError: as the store gave it.
        """
        if self.place.is_remote:
            self._fetch_newest()
        return checkpoint.newest_checkpoint(self.folder, fingerprint, self.place.storage.where(CHECKPOINTS))

    def carry(self, final: Path, keep: int, best: int | None) -> None:
        """Rotate, and take a checkpoint that was just saved to the store, where the same are kept. For the chief."""
        if self.place.is_remote:
            key = f"{CHECKPOINTS}/{final.name}"
            # One of this step that is there already was not whole, or training had gone on from it.
            self.place.storage.delete(f"{key}/{STATE}")
            for name in (MODEL, OPTIMIZER, STATE):
                upload(final / name, self.place.storage, f"{key}/{name}")
            self._rotate(keep, best)
        checkpoint.rotate(self.folder, keep, best)

    def _rotate(self, keep: int, best: int | None) -> None:
        for name in self._stored()[:-keep]:
            if best is None or name != checkpoint.step_folder(self.folder, best).name:
                self.place.storage.delete(f"{CHECKPOINTS}/{name}/{STATE}")
                self.place.storage.delete_tree(f"{CHECKPOINTS}/{name}")

    def _stored(self) -> list[str]:
        """Names of the checkpoints in the store, oldest first, torn ones among them."""
        found = [n for n in self.place.storage.folders(CHECKPOINTS) if n.startswith("step-")]
        return sorted(found, key=lambda name: (len(name), name))

    def _fetch_newest(self) -> None:
        """Have in scratch the newest intact checkpoint of the store, and no other."""
        chosen = next((name for name in reversed(self._stored()) if self._fetch(name)), None)
        for other in self.folder.glob("step-*"):
            if other.name != chosen:
                shutil.rmtree(other, ignore_errors=True)

    def _fetch(self, name: str) -> bool:
        storage, key, local = self.place.storage, f"{CHECKPOINTS}/{name}", self.folder / name
        try:
            state = storage.read(f"{key}/{STATE}")
            if _is_same(local, state):
                return True
            partial = self.folder / f".{name}.{random_tag()}"
            try:
                for file in (MODEL, OPTIMIZER, STATE):
                    download(storage, f"{key}/{file}", partial / file)
                if checkpoint.intact_state(partial, name) is not None:
                    return _put_in_place(partial, local, state)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        except FileNotFoundError:
            pass
        log.warning("%s is torn or altered; an older checkpoint is used", storage.where(key))
        return False


def _is_same(local: Path, state: bytes) -> bool:
    """Whether a checkpoint in scratch is whole, and the one whose `state.json` is given."""
    try:
        found = (local / STATE).read_bytes()
    except FileNotFoundError:
        return False
    return found == state and checkpoint.intact_state(local, local.name) is not None


def _put_in_place(partial: Path, local: Path, state: bytes) -> bool:
    """Rename a fetched checkpoint; another rank of this machine may have done the same meanwhile."""
    while not _is_same(local, state):
        shutil.rmtree(local, ignore_errors=True)
        try:
            partial.rename(local)
        except OSError:
            if not partial.exists():
                raise
    return True
