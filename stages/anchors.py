"""Anchors, supervised slots and position weights: pure functions of ids, masks and seeds (numpy).

Shapes: T tokens, A anchors, B block size.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def eligible_anchors(loss_mask: npt.NDArray[np.uint8]) -> Ints:
    """Positions a with `loss_mask[a]` and `loss_mask[a+1]` set: response tokens with a supervised successor.

    Source: specification, section 3.
    """
    mask = loss_mask.astype(bool)
    return np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int64)


def sample_anchors(loss_mask: npt.NDArray[np.uint8], n: int, *, seed: int, epoch: int, sample_id: str) -> Ints:
    """Up to `n` anchors, uniformly without replacement, in ascending order.

    They depend on (seed, epoch, sample id) and the mask only, so any number of ranks, workers or
    restarts sees the same ones. Fewer eligible positions than `n`: all of them. None: an empty array.
    """
    eligible = eligible_anchors(loss_mask)
    if len(eligible) <= n:
        return eligible
    rng = np.random.Generator(np.random.Philox(key=stable_key("anchors", seed, epoch, sample_id)))
    return np.sort(rng.choice(eligible, size=n, replace=False))


def stable_key(*parts: object) -> int:
    """A 128-bit key from the parts' text, the same on every machine and Python (`hash` is not)."""
    text = "\x1f".join(str(p) for p in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def supervised_slots(loss_mask: npt.NDArray[np.uint8], anchors: Ints, block_size: int) -> Bools:
    """Which slots have a label, [A, B]: slot k is true when a+1 … a+k all exist and are response tokens.

    Slot 0 (the anchor itself) is never supervised. A block at the end of a response, or of the
    sequence, keeps its contiguous prefix. Source: specification, section 3.
    """
    offsets = np.arange(1, block_size)
    positions = anchors[:, None] + offsets[None, :]
    inside = positions < len(loss_mask)
    labelled = np.where(inside, loss_mask[np.minimum(positions, len(loss_mask) - 1)], 0).astype(bool)
    prefix = np.logical_and.accumulate(labelled, axis=1)
    return np.concatenate([np.zeros((len(anchors), 1), dtype=bool), prefix], axis=1)


def slot_weights(block_size: int, gamma: float) -> Floats:
    """Loss weights per slot, [B]: `exp(−(k−1)/γ)` for k = 1…B−1 and 0 for the anchor's slot."""
    k = np.arange(block_size, dtype=np.float32)
    weights: Floats = np.exp(-(k - 1) / np.float32(gamma)).astype(np.float32)
    weights[0] = 0
    return weights


def default_gamma(block_size: int) -> float:
    """γ of the paper for B = 16, 10 and 8; between and beyond them B/2 − 1 (at least 1), which is near all three."""
    return _PAPER_GAMMA.get(block_size, max(1.0, block_size / 2 - 1))


def partition_anchors(loss_mask: npt.NDArray[np.uint8], n: int, block_size: int, **key: object) -> Ints:
    """First tokens of the blocks of B into which every response is divided from its first token on, ascending.

    They are the same in every epoch; only which `n` of them are taken, where there are more, depends on `key`
    (as in `sample_anchors`). The blocks of a response do not overlap and leave none of its tokens out, except that the
    last one may have no successor to predict. Source: DFlash, arXiv 2602.06036, Table 9 (without random anchors).
    """
    mask = loss_mask.astype(bool)
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    places = np.arange(len(mask))
    # Distance of each position from the start of its response; meaningless outside of one.
    into = places - starts[np.maximum(np.searchsorted(starts, places, side="right") - 1, 0)] if len(starts) else places
    eligible = eligible_anchors(loss_mask)
    anchors: Ints = eligible[into[eligible] % block_size == 0]
    if len(anchors) <= n:
        return anchors
    rng = np.random.Generator(np.random.Philox(key=stable_key("anchors", *key.values())))
    return np.sort(rng.choice(anchors, size=n, replace=False))


def choose_anchors(
    loss_mask: npt.NDArray[np.uint8], n: int, *, choice: str, block_size: int, seed: int, epoch: int, sample_id: str
) -> Ints:
    """Anchors by `train.anchor_choice`: `random` (see `sample_anchors`) or `partition` (see `partition_anchors`)."""
    if choice == "partition":
        return partition_anchors(loss_mask, n, block_size, seed=seed, epoch=epoch, sample_id=sample_id)
    return sample_anchors(loss_mask, n, seed=seed, epoch=epoch, sample_id=sample_id)
