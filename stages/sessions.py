"""Target and drafter with their caches, for a batch of sequences that accept different numbers of drafts.

Shapes: R rows (sequences), Q new tokens of a pass, L feature layers, D hidden, V vocabulary, B block size, K = B−1.

Both sides keep `RaggedKV`: rows are left-aligned, and only what was verified counts. While all rows are equally long
the target makes its own masks, as with any cache, whatever its attention; only rows of different lengths need masks
that are made here, full and sliding-window, from positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from stages.drafter import Drafter
from stages.errors import TargetError
from stages.features import FeatureTap
from stages.kv import Ints, RaggedCache, RaggedKV
from stages.layout import KeysValues, Layout
from stages.target import Target
from stages.target_limits import require_decodable

_CACHED_KINDS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
"""Layers of a transformers cache that hold keys and values per token (or nothing), so tokens can be forgotten."""


class TargetSession:
    """The target with its KV cache and a tap on its feature layers.

    Args:
        target: the model.
        layer_ids: layers whose states are wanted; empty for none.
        n_rows: R.
        reserve: tokens that a row may get, if known.
    """

    def __init__(self, target: Target, layer_ids: tuple[int, ...] = (), n_rows: int = 1, reserve: int = 0) -> None:
        self.target = target
        self.tap = FeatureTap(target, layer_ids) if layer_ids else None
        self.kv = RaggedKV(n_rows, target.device, reserve)
        self._cache = RaggedCache(self.kv)
        self._cache_argument = target.cache_argument

    def forward(self, ids_RQ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Append tokens to each row; returns their states after the final norm [R, Q, D] and features [R, Q, L, D].

        They count only after `advance`.
        """
        positions_RQ = self.kv.positions(ids_RQ.shape[1])
        arguments = {"input_ids": ids_RQ, "position_ids": positions_RQ, "use_cache": True,
                     self._cache_argument: self._cache}  # fmt: skip
        if not self.kv.even:
            arguments["attention_mask"] = ragged_masks(self.target, positions_RQ, self.kv.longest + ids_RQ.shape[1])
        return _tapped(self.target, self.tap, arguments)

    def advance(self, counts: Sequence[int] | Ints) -> None:
        """Keep the first `counts[r]` tokens of the last pass in each row, and forget the others."""
        self.kv.advance(counts)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows."""
        self.kv.select(rows)

    @property
    def peak_bytes(self) -> int:
        """Largest size of the cache so far."""
        return self.kv.peak_bytes


def _tapped(
    target: Target, tap: FeatureTap | None, arguments: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if tap is None:
        return target.decoder(**arguments).last_hidden_state, None
    with tap.attached():
        hidden: torch.Tensor = target.decoder(**arguments).last_hidden_state
    return hidden, tap.take()


class RecomputingSession:
    """As `TargetSession`, for one row of a target whose cache cannot forget tokens: every pass starts at the front.

    Linear-attention and state-space layers fold each token into a state, so rejected drafts cannot be taken out of it.
    Exact, and of use for τ; its times say nothing of a server.
    """

    def __init__(self, target: Target, layer_ids: tuple[int, ...] = ()) -> None:
        self.target = target
        self.tap = FeatureTap(target, layer_ids) if layer_ids else None
        self.ids_1T = torch.zeros(1, 0, dtype=torch.long, device=target.device)
        self._n = 0
        self.peak_bytes = 0

    def forward(self, ids_RQ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.ids_1T = torch.cat([self.ids_1T[:, : self._n], ids_RQ], dim=1)
        hidden, features = _tapped(self.target, self.tap, {"input_ids": self.ids_1T, "use_cache": False})
        return hidden[:, self._n :], None if features is None else features[:, self._n :]

    def advance(self, counts: Sequence[int] | Ints) -> None:
        self._n += int(counts[0])

    def select(self, rows: Sequence[int]) -> None:
        pass


def open_session(
    target: Target, layer_ids: tuple[int, ...], n_rows: int, reserve: int
) -> TargetSession | RecomputingSession:
    """A session that fits the target's layers.

    Raises:
        TargetError: the target cannot forget rejected drafts and the batch has more than one row.
    """
    other = sorted({type(layer).__name__ for layer in _cache_layers(target)} - _CACHED_KINDS)
    if not other:
        return TargetSession(target, layer_ids, n_rows, reserve)
    if n_rows > 1:
        raise TargetError(
            f"target {target.name}: its cache has layers that cannot forget rejected drafts ({', '.join(other)}), so "
            f"{n_rows} sequences cannot be decoded together; set evaluate.batch_sizes to [1], where each pass computes "
            "the whole sequence anew"
        )
    return RecomputingSession(target, layer_ids)


def _cache_layers(target: Target) -> list[Any]:
    return list(DynamicCache(config=target.text_config).layers)


# --- masks for rows of different lengths -------------------------------------------------------------------------


def ragged_masks(target: Target, positions_RQ: torch.Tensor, n_slots: int) -> Any:
    """Masks [R, 1, Q, C] for left-aligned rows, in the form that the target's decoder takes.

    One tensor where all layers attend alike, else one per layer type, as transformers' mixed models expect.

    Args:
        target: the model.
        positions_RQ: of the new tokens.
        n_slots: C.
    """
    windows = layer_windows(target)
    slot_C = torch.arange(n_slots, device=positions_RQ.device)
    distance_RQC = positions_RQ[..., None] - slot_C
    seen = distance_RQC >= 0
    masks = {w: _as_mask(target, (seen if w is None else seen & (distance_RQC < w))[:, None]) for w in windows}
    if len(masks) == 1:
        return next(iter(masks.values()))
    named = {"full_attention" if w is None else "sliding_attention": mask for w, mask in masks.items()}
    if len(named) != len(masks):
        raise TargetError(
            f"target {target.name}: its layers have several windows ({sorted(w for w in windows if w)}), and sequences "
            "of different lengths cannot be decoded together; set evaluate.batch_sizes to [1]"
        )
    return named


def layer_windows(target: Target) -> set[int | None]:
    """The windows of the target's layers in tokens; None stands for full attention."""
    layers = [layer for layer in _cache_layers(target) if type(layer).__name__ != "DummyLayer"]
    chunked = "chunked_attention" in (getattr(target.text_config, "layer_types", None) or ())
    if chunked or getattr(target.text_config, "attention_chunk_size", None):
        raise TargetError(
            f"target {target.name}: chunked attention is not known for sequences of different lengths; set "
            "evaluate.batch_sizes to [1]"
        )
    return {getattr(layer, "sliding_window", None) for layer in layers} or {None}


def _as_mask(target: Target, seen_R1QC: torch.Tensor) -> torch.Tensor:
    kind = getattr(target.text_config, "_attn_implementation", "sdpa")
    if kind == "sdpa":
        return seen_R1QC
    if kind == "eager":
        zero = torch.zeros((), dtype=target.dtype, device=seen_R1QC.device)
        return torch.where(seen_R1QC, zero, torch.finfo(target.dtype).min)
    raise TargetError(
        f"target {target.name}: attention {kind!r} takes no masks for sequences of different lengths; load it with "
        "sdpa or eager attention, or set evaluate.batch_sizes to [1]"
    )


# --- the target's logits -----------------------------------------------------------------------------------------


def target_logits(target: Target, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of states after the final norm, with what some families do behind the head.

    Soft-capping (Gemma 2), a factor (Cohere) or a divisor (Granite) change no argmax, but every probability.
    """
    logits = hidden @ target.head.T
    config = target.text_config
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scaling := getattr(config, "logits_scaling", None):
        logits = logits / scaling
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.inference_mode()
def check_target(target: Target, *, sampled: bool, ragged: bool, longest: int | None = None) -> None:
    """Compare what decoding relies on with the target's own plain forward pass, on a few tokens.

    Args:
        target: the model.
        sampled: whether its probabilities matter, not only its argmax.
        ragged: whether rows of different lengths will be decoded together.
        longest: tokens of the longest sequence that a pass may see, prompt and drafts included; None if not known.

    Raises:
        TargetError: names what differs; sampling or batching this target would give other outputs than its own.
        TargetSettingError: the target's positions do not allow for sequences that long.
    """
    if longest is not None:
        require_decodable(target, longest)
    ids = [[(7 * i + 3 * r + 5) % target.shape.vocab_size for i in range(6)] for r in range(2)]
    plain = [target.model(input_ids=torch.tensor([row], device=target.device), use_cache=False).logits for row in ids]
    if ragged:
        session = open_session(target, (), 2, 0)
        both = torch.tensor(ids, device=target.device)
        session.forward(both[:, :4])
        session.advance([4, 2])
        tail = torch.stack([both[0, 4:6], both[1, 2:4]])
        hidden, _ = session.forward(tail)
        found = target_logits(target, hidden)
        expected = torch.stack([plain[0][0, 4:6], plain[1][0, 2:4]])
        _require_close(target, found, expected, "two sequences of different lengths, decoded together")
    if sampled:
        alone = target.decoder(input_ids=torch.tensor(ids[:1], device=target.device), use_cache=False)
        _require_close(target, target_logits(target, alone.last_hidden_state), plain[0], "logits")


def _require_close(target: Target, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = float((found.float() - expected.float()).abs().max() / expected.float().std().clamp(min=1e-6))
    limit = 1e-3 if target.dtype == torch.float32 else 0.3
    if not error <= limit:
        raise TargetError(
            f"target {target.name}: {what} differ from the model's own forward pass by {error:.3g} of the logits' "
            f"standard deviation (at most {limit:g} is rounding); decode it greedily at evaluate.batch_sizes [1]"
        )


# --- the drafter -------------------------------------------------------------------------------------------------


class DraftSession:
    """The drafter with keys and values of the injected context; block keys and values are never kept."""

    def __init__(self, drafter: Drafter, target: Target, n_rows: int = 1, reserve: int = 0) -> None:
        self.drafter = drafter
        self.target = target
        self.kv = RaggedKV(n_rows, target.device, reserve)
        self._last_RD: torch.Tensor | None = None

    def extend(self, features_RTLD: torch.Tensor, counts: Sequence[int] | Ints, ids_RT: torch.Tensor) -> None:
        """Add the first `counts[r]` positions of each row to its context.

        Args:
            features_RTLD: of the positions behind the context.
            counts: at least one of each row.
            ids_RT: their tokens, for a drafter that is given the text instead of features.
        """
        counts = np.asarray(counts, np.int64)
        n_rows, n_new = len(features_RTLD), int(counts.max())
        features = features_RTLD[:, :n_new]
        if self.drafter.spec.features == "none":
            features = self.target.embed(ids_RT[:, :n_new])[:, :, None]
        ctx_RTD = self.drafter.context(features.to(self.drafter.fc.weight.dtype))
        made = self.drafter.context_kv(ctx_RTD.flatten(0, 1), self.kv.positions(n_new).flatten())
        for layer, pair in enumerate(made):
            if self.drafter.spec.sees_context(layer):
                self.kv.write(layer, *(x.unflatten(0, (n_rows, n_new)).transpose(1, 2) for x in pair))
        ends_R = torch.as_tensor(counts - 1, device=ctx_RTD.device)
        self._last_RD = ctx_RTD[torch.arange(n_rows, device=ctx_RTD.device), ends_R]
        self.kv.advance(counts)

    def draft(self, anchors_R: torch.Tensor, block_size: int) -> torch.Tensor:
        """Logits of B−1 drafts behind each row's anchor token, which stands behind its context, [R, K, V]."""
        n_rows = len(anchors_R)
        block_RB = torch.full((n_rows, block_size), self.drafter.spec.mask_token_id, device=anchors_R.device)
        block_RB[:, 0] = anchors_R
        embedded = self.target.embed(block_RB).to(self.drafter.fc.weight.dtype)
        if self._last_RD is not None:
            embedded = self.drafter.entering(embedded, self._last_RD)
        layout = Layout(self.kv.lengths_R, (self.kv.longest,) * n_rows, (1,) * n_rows)
        hidden = self.drafter.blocks(embedded, layout, self._context())
        logits: torch.Tensor = hidden[:, 1:].to(self.target.dtype) @ self.target.head.T
        return logits

    def _context(self) -> list[KeysValues]:
        """Per layer, keys and values of all rows up to the longest, end to end; none where a layer gets no context."""
        spec, found = self.drafter.spec, self.kv.context()
        kept = {i: KeysValues(*(x.transpose(1, 2).flatten(0, 1) for x in pair)) for i, pair in found.items()}
        nothing = torch.empty(0, spec.n_kv_heads, spec.head_dim, device=self.kv.device)
        return [kept.get(i, KeysValues(nothing, nothing)) for i in range(spec.n_layers)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows."""
        self.kv.select(rows)
        if self._last_RD is not None:
            self._last_RD = self._last_RD[torch.as_tensor(rows, device=self._last_RD.device)]
