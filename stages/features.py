"""Capturing hidden states: hooks on the chosen decoder layers, one forward pass, stopped after the last.

Shapes: S sequences, T tokens, L feature layers, D hidden.

The feature of layer i is the residual stream *after* decoder layer i, which transformers calls
`output_hidden_states[i + 1]` (index 0 is the embedding). Capturing by hook costs no memory for the
layers that are not chosen, no head and no cache, and nothing runs behind the last chosen layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stages.target import Target


class _LastLayerReached(Exception):
    """Unwinds the forward pass once everything asked for is captured."""


class FeatureTap:
    """Collects the outputs of chosen layers while it is attached.

    Args:
        target: the model.
        layer_ids: strictly increasing 0-based ids.
    """

    def __init__(self, target: Target, layer_ids: tuple[int, ...]) -> None:
        self.target = target
        self.layer_ids = layer_ids
        self._captured: dict[int, torch.Tensor] = {}

    @contextmanager
    def attached(self, *, stop_after_last: bool = False) -> Iterator[FeatureTap]:
        """Hooks in place within the block; with `stop_after_last` the pass ends at the last chosen layer."""
        last = self.layer_ids[-1] if stop_after_last else None
        handles = [self.target.layers[i].register_forward_hook(self._hook(i, i == last)) for i in self.layer_ids]
        try:
            yield self
        except _LastLayerReached:
            pass
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer_id: int, stop: bool) -> Any:
        def keep(_module: object, _args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            self._captured[layer_id] = output if isinstance(output, torch.Tensor) else output[0]
            if stop:
                raise _LastLayerReached

        return keep

    def take_layers(self) -> list[torch.Tensor]:
        """The captured states, [S, T, D] per layer, ascending; empties the tap."""
        captured, self._captured = self._captured, {}
        return [captured[i] for i in self.layer_ids]

    def take(self) -> torch.Tensor:
        """The captured states, [S, T, L, D], layers ascending; empties the tap."""
        return torch.stack(self.take_layers(), dim=2)


@torch.inference_mode()
def capture_features(
    target: Target, layer_ids: tuple[int, ...], sequences: list[list[int]], *, last_hidden: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Hidden states of whole sequences, from one forward pass over the clean tokens.

    Sequences are padded on the right. The model is causal, so no real token sees the padding and no
    attention mask is needed: what is real follows from lengths, never from ids (pad may equal eos).

    Args:
        target: the model.
        layer_ids: feature layers.
        sequences: token ids, each at least one.
        last_hidden: also return the states after the final norm (then all layers run).

    Returns:
        Per sequence the features [T, L, D] in the target's dtype; and per sequence [T, D], or None.
    """
    longest = max(len(s) for s in sequences)
    ids_ST = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, ids in enumerate(sequences):
        ids_ST[row, : len(ids)] = torch.tensor(ids)
    tap = FeatureTap(target, layer_ids)
    final_STD: torch.Tensor | None = None
    with tap.attached(stop_after_last=not last_hidden):
        out = target.decoder(input_ids=ids_ST.to(target.device), use_cache=False)
        final_STD = out.last_hidden_state
    features_STLD = tap.take()
    features = [features_STLD[row, : len(ids)] for row, ids in enumerate(sequences)]
    if final_STD is None:
        return features, None
    return features, [final_STD[row, : len(ids)] for row, ids in enumerate(sequences)]
