"""Training checkpoints: atomic folders of safetensors and JSON, hashed, rotated.

A checkpoint is written under a temporary name, synced, and renamed as a whole; `state.json` names the
SHA-256 of the other files and, as `state_sha256`, of everything else in itself. One that is torn or altered, or lies
under another step's name, is never picked. No random state is kept, since order and anchors are functions of
(seed, epoch, sample id) and the drafter has no dropout.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from cache_schema.durable import fsync_dir, fsync_tree
from cache_schema.errors import FingerprintMismatch
from cache_schema.identity import sha256_bytes, sha256_file
from cache_schema.names import random_tag
from stages.checkpoint_names import MODEL, OPTIMIZER, STATE
from stages.replicas import Replicas

__all__ = ["MODEL", "OPTIMIZER", "STATE", "Best", "Progress", "intact_state", "load_optimizer", "load_weights",
           "newest_checkpoint", "rotate", "save_checkpoint", "step_folder"]  # fmt: skip
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Best:
    """The best look at the held-out samples so far: its step, whose checkpoint is kept, and its simulated τ."""

    step: int
    tau: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training is.

    Attributes:
        step: optimizer steps done.
        fingerprint: of what is trained on what; a checkpoint of another one is refused.
        skipped: reason by id, of the samples met so far that could not be used.
        order: what the order of the steps is made of.
        best: the best look so far; None before the first.
    """

    step: int
    fingerprint: str
    skipped: dict[str, str] = field(default_factory=dict)
    order: dict[str, Any] = field(default_factory=dict)
    best: Best | None = None


def step_folder(folder: Path, step: int) -> Path:
    """`<folder>/step-000100`."""
    return folder / f"step-{step:06d}"


def save_checkpoint(folder: Path, progress: Progress, replicas: Replicas, optimizer: torch.optim.Optimizer) -> Path:
    """Write a checkpoint; returns its folder. An intact one of the same step is left as it is.

    Every rank calls it, since ranks may hold only parts of the weights; the first one writes.
    """
    final = step_folder(folder, progress.step)
    weights, moments = _weights(replicas), _moments(replicas, optimizer)
    if replicas.world.rank != 0:
        return final
    if final.exists():
        if intact_state(final, final.name) is not None:
            return final
        shutil.rmtree(final)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{final.name}.{random_tag()}"
    partial.mkdir()
    try:
        files = {MODEL: save(weights), OPTIMIZER: save(moments)}
        for name, data in files.items():
            (partial / name).write_bytes(data)
        state = {"step": progress.step, "fingerprint": progress.fingerprint, "skipped": progress.skipped,
                 "order": progress.order, "best": asdict(progress.best) if progress.best is not None else None,
                 "sha256": {name: sha256_bytes(data) for name, data in files.items()}}
        state["state_sha256"] = _state_sha256(state)
        (partial / STATE).write_text(json.dumps(state, indent=1, sort_keys=True))
        fsync_tree(partial)
        partial.rename(final)
        fsync_dir(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _weights(replicas: Replicas) -> dict[str, torch.Tensor]:
    named = sorted(replicas.drafter.named_parameters())
    return {name: replicas.whole(p.detach()).cpu().contiguous() for name, p in named}


def _moments(replicas: Replicas, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    moments: dict[str, torch.Tensor] = {}
    for name, parameter in sorted(replicas.drafter.named_parameters()):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            moments[f"{key}/{name}"] = replicas.whole(torch.as_tensor(value).detach()).cpu().contiguous()
    return moments


def rotate(folder: Path, keep: int, best: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints and that of step `best`, and what a killed writer left behind."""
    for stale in folder.glob(".step-*"):
        shutil.rmtree(stale, ignore_errors=True)
    for old in _folders(folder)[:-keep]:
        if best is None or old != step_folder(folder, best):
            shutil.rmtree(old, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), key=lambda f: (len(f.name), f.name))


def newest_checkpoint(folder: Path, fingerprint: str, shown: str | None = None) -> tuple[Path, Progress] | None:
    """The newest intact checkpoint, or None.

    Args:
        folder: of the checkpoints.
        fingerprint: of the training.
        shown: what messages call the folder, where it is only a copy.

    Raises:
        FingerprintMismatch: the newest intact one belongs to another training (other data, drafter or settings).
    """
    for candidate in reversed(_folders(folder)):
        state = intact_state(candidate, candidate.name)
        if state is None:
            log.warning("%s is torn or altered; an older checkpoint is used", candidate)
            continue
        if state["fingerprint"] != fingerprint:
            raise FingerprintMismatch(
                f"{shown or folder}/{candidate.name} belongs to another training (fingerprint "
                f"{state['fingerprint'][:12]}…, this run has {fingerprint[:12]}…): cache, drafter or training settings "
                f"changed. Use another run folder, or remove {shown or folder} to train anew"
            )
        best = Best(**state["best"]) if state.get("best") else None
        return candidate, Progress(state["step"], state["fingerprint"], state["skipped"], state["order"], best)
    return None


def intact_state(folder: Path, name: str) -> dict[str, Any] | None:
    """What `state.json` says, or None when it or a file that it names is missing, torn or altered, or when it is not
    that of the checkpoint of this name."""
    try:
        state = json.loads((folder / STATE).read_text())
        if not _well_formed(state) or state["state_sha256"] != _state_sha256(state):
            return None
        intact = all(sha256_file(folder / name) == state["sha256"][name] for name in (MODEL, OPTIMIZER))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return state if intact and name == step_folder(folder.parent, state["step"]).name else None


def _state_sha256(state: dict[str, Any]) -> str:
    """Of everything in a state but this hash itself, as JSON keeps it."""
    kept = json.loads(json.dumps({key: value for key, value in state.items() if key != "state_sha256"}))
    return sha256_bytes(json.dumps(kept, sort_keys=True).encode())


def _well_formed(state: Any) -> bool:
    """Whether every entry is there and of its type."""
    kinds = {"fingerprint": str, "skipped": dict, "order": dict, "sha256": dict, "state_sha256": str}
    if not isinstance(state, dict) or not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
        return False
    best = state.get("best")
    seen = best is None or (
        isinstance(best, dict) and best.keys() == {"step", "tau"} and _is_step(best["step"])
        and type(best["tau"]) in (int, float)
    )
    return _is_step(state.get("step")) and seen and all(isinstance(why, str) for why in state["skipped"].values())


def _is_step(value: Any) -> bool:
    return type(value) is int and value >= 0


def load_weights(folder: Path, replicas: Replicas) -> None:
    """Read a checkpoint's weights into a drafter of the same shape, in place."""
    replicas.load(load_file(folder / MODEL))


def load_optimizer(folder: Path, replicas: Replicas, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint's moments and step counts into an optimizer over the drafter's parameters."""
    stored = load_file(folder / OPTIMIZER)
    for name, parameter in replicas.drafter.named_parameters():
        entries = {key.split("/", 1)[0]: value for key, value in stored.items() if key.split("/", 1)[1] == name}
        if entries:
            # The step count too: the fused kernel wants it where the parameter is.
            optimizer.state[parameter] = {
                key: replicas.own_part(value.to(parameter.device), parameter) for key, value in entries.items()
            }
