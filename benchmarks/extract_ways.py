"""Ways to put samples through a target: the extract stage, and what it is measured against.

- `ours`: `ExtractWorker.run`: responses read, states captured, quantised, checked, written, fsynced and committed.
- `padded`: a bare pass over batches of 8 in arrival order, all layers, nothing kept. No attention mask is given: on
  right-padded causal batches it changes nothing that anybody reads, and without it attention is faster.
- `rivals`: the same with `output_hidden_states=True`, and one `torch.save` per sample: chosen layers side by side, ids
  and mask.
- `single`: a bare pass over one unpadded sequence at a time.

Each of the last three also `with head`: as the plain call of the model does it, logits included.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.extract_data import BATCH, Work, extraction
from stages.target import Target

OURS, PADDED, RIVALS, SINGLE = "ours", "padded", "rivals", "single"
WITH_HEAD = " with head"
Ids = NDArray[np.int32]
Way = Callable[[Sequence[str]], None]


class Ways:
    """All ways over the same samples, shard by shard.

    Args:
        folder: where things are written; made anew by `begin`.
        given: target and samples.
        batch_tokens: of our batches.
    """

    def __init__(self, folder: Path, given: Work, batch_tokens: int) -> None:
        self.folder, self.given, self.batch_tokens = folder, given, batch_tokens
        self.sequences = given.sequences
        self.begin()
        self.shards = [unit.sample_ids for unit in self._ours.units]

    def begin(self) -> None:
        """A new, empty cache and an empty folder for the rivals' files."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._ours = extraction(self.folder / "ours", self.given, self.batch_tokens)
        self._units = {unit.sample_ids: unit for unit in self._ours.units}
        (self.folder / "rivals").mkdir()

    @property
    def batching(self) -> str:
        return self._ours.worker.choice.way.name

    def all(self, with_head: bool = True) -> dict[str, Way]:
        """The ways by name; each takes the ids of a shard's samples."""
        model, decoder = self.given.target.model, self.given.target.decoder
        found: dict[str, Way] = {OURS: self.ours}
        for suffix, run in [("", decoder), (WITH_HEAD, model)][: 1 + with_head]:
            found[PADDED + suffix] = lambda ids, run=run: self.padded(run, ids)  # type: ignore[misc]
            found[RIVALS + suffix] = lambda ids, run=run: self.rivals(run, ids)  # type: ignore[misc]
            found[SINGLE + suffix] = lambda ids, run=run: self.single(run, ids)  # type: ignore[misc]
        return found

    def ours(self, ids: Sequence[str]) -> None:
        self._ours.worker.run(self._units[tuple(ids)], 1)

    @torch.inference_mode()
    def padded(self, run: Any, ids: Sequence[str]) -> None:
        for batch in _batches(ids):
            run(input_ids=_pad([self.sequences[s] for s in batch]), use_cache=False)

    @torch.inference_mode()
    def rivals(self, run: Any, ids: Sequence[str]) -> None:
        for batch in _batches(ids):
            sequences = [self.sequences[s] for s in batch]
            out = run(input_ids=_pad(sequences), use_cache=False, output_hidden_states=True)
            states = torch.cat([out.hidden_states[i + 1] for i in self.given.layer_ids], dim=-1)
            for row, (sample_id, sequence) in enumerate(zip(batch, sequences, strict=True)):
                n = len(sequence)
                kept = {"input_ids": torch.from_numpy(sequence), "loss_mask": torch.ones(n, dtype=torch.uint8),
                        "hidden_states": states[row, :n].clone()}
                torch.save(kept, self.folder / "rivals" / f"{sample_id}.pt")

    @torch.inference_mode()
    def single(self, run: Any, ids: Sequence[str]) -> None:
        for sample_id in ids:
            run(input_ids=_pad([self.sequences[sample_id]]), use_cache=False)


def _batches(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[i : i + BATCH] for i in range(0, len(ids), BATCH)]


def _pad(sequences: Sequence[Ids]) -> torch.Tensor:
    ids = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    return torch.from_numpy(ids)


def warm(target: Target) -> None:
    """First passes are slower; nobody is charged for that."""
    with torch.inference_mode():
        for n in (16, 300):
            target.decoder(input_ids=torch.zeros(1, n, dtype=torch.long), use_cache=False)
