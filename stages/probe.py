"""Which way of batching is right for the target at hand: proven with a few short sequences before work begins.

The reference is transformers' own `output_hidden_states` of single sequences. `auto` takes the first way that gives the
same states within rounding: packed, padded, single. A target for which not even single sequences do is refused.

Shapes: T tokens, L feature layers, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.agreement import disagreement
from stages.capture import PackedWay, PaddedWay, SingleWay, Way, take_rows
from stages.errors import TargetError, TargetSettingError
from stages.features import capture_features
from stages.packing import MIN_SHARED, Ids
from stages.target import Target
from stages.target_limits import why_single

WAYS: dict[str, type[PackedWay | PaddedWay | SingleWay]] = {
    "packed": PackedWay, "padded": PaddedWay, "single": SingleWay,
}
_LENGTHS = (21, 5, MIN_SHARED + 9)


@dataclass(frozen=True, slots=True)
class Choice:
    """The way to use, and in words why."""

    way: Way
    reason: str


@dataclass(frozen=True, slots=True)
class _Expected:
    features_TLD: torch.Tensor
    final_TD: torch.Tensor | None


def choose_way(target: Target, layer_ids: tuple[int, ...], *, last_hidden: bool = False,
               batching: str = "auto", max_length: int | None = None) -> Choice:
    """The way of batching for this target, proven equal to single sequences.

    Args:
        target: the model.
        layer_ids: feature layers.
        last_hidden: whether states after the final norm are captured too.
        batching: `auto`, or the one way to use.
        max_length: tokens of the longest sample that there may be (`cache.max_length`); None if it is of no matter.

    Raises:
        TargetError: no way gives the states that `output_hidden_states` does, or not the one that was asked for.
        TargetSettingError: the target's positions do not allow for samples that long, or not in this way.
    """
    names, problems = _candidates(target, batching, max_length)
    sequences = probe_sequences(target.shape.vocab_size)
    expected = [_expected(target, layer_ids, ids, last_hidden) for ids in sequences]
    for name in names:
        try:
            way: Way = WAYS[name](target, layer_ids, last_hidden)
            problem = _problem(way, sequences, expected, layer_ids, target.dtype)
        except Exception as error:  # a model may stumble over anything it is not used to; the next way is simpler
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        if problem is None:
            return Choice(way, "; ".join(f"not {n}: {p}" for n, p in problems.items()))
        problems[name] = problem
    told = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    remedy = ("set extract.batching to auto" if batching != "auto" else
              "hidden states cannot be captured from this architecture with this version of transformers")
    raise TargetError(
        f"target {target.name}: the states captured are not those of output_hidden_states ({told}); {remedy}"
    )


def _candidates(target: Target, batching: str, max_length: int | None) -> tuple[list[str], dict[str, str]]:
    """Names of the ways to try, in order, and what speaks against others; the probe's few tokens cannot show it."""
    why = None if max_length is None else why_single(target, max_length)
    if why is None:
        return list(WAYS) if batching == "auto" else [batching], {}
    if batching not in ("auto", "single"):
        raise TargetSettingError(
            f"extract.batching is {batching!r}, but samples of target {target.name} must not share a pass: {why}; set "
            "extract.batching to auto or single, or lower cache.max_length"
        )
    return ["single"], {"packed or padded": why}


def probe_sequences(vocab_size: int) -> list[Ids]:
    """Random ids of unequal lengths; the last one begins as the one before it."""
    rng = np.random.default_rng(20250922)
    found = [rng.integers(0, vocab_size, n).astype(np.int32) for n in _LENGTHS]
    return [*found, np.concatenate([found[-1][: MIN_SHARED + 2], rng.integers(0, vocab_size, 11).astype(np.int32)])]


def _expected(target: Target, layer_ids: tuple[int, ...], ids: Ids, last_hidden: bool) -> _Expected:
    """What transformers says the states of one sequence are.

    Raises:
        TargetError: it says nothing.
    """
    hidden, final = output_hidden_states(target, ids)
    if len(hidden) != target.shape.n_layers + 1 or any(h.shape != hidden[0].shape for h in hidden):
        raise TargetError(
            f"target {target.name}: output_hidden_states gives {len(hidden)} states for {target.shape.n_layers} "
            "layers, expected one more than layers, all of shape [tokens, hidden]; what is captured cannot be proven "
            "right"
        )
    last = target.shape.n_layers - 1
    if last in layer_ids and torch.equal(hidden[-1], final):
        # Most models replace the last entry by the states after the final norm.
        alone = capture_features(target, (last,), [ids.tolist()], last_hidden=True)[0][0]
        hidden = [*hidden[:-1], alone[:, 0]]
    return _Expected(torch.stack([hidden[i + 1] for i in layer_ids], dim=1), final if last_hidden else None)


@torch.inference_mode()
def output_hidden_states(target: Target, ids: Ids) -> tuple[list[torch.Tensor], torch.Tensor]:
    """transformers' hidden states of one sequence: L + 1 of [T, D], and those after the final norm [T, D]."""
    decoder: Any = target.decoder
    ids_1T = torch.from_numpy(np.asarray(ids, np.int64))[None].to(target.device)
    out = decoder(input_ids=ids_1T, use_cache=False, output_hidden_states=True)
    return [states[0] for states in out.hidden_states or ()], out.last_hidden_state[0]


def _problem(way: Way, sequences: Sequence[Ids], expected: Sequence[_Expected], layer_ids: tuple[int, ...],
             dtype: torch.dtype) -> str | None:
    """What is wrong with the states that a way captures; None if nothing."""
    for batch in way.batches(sequences, sum(map(len, sequences))):
        captured = way.capture([sequences[i] for i in batch])
        for place, i in enumerate(batch):
            wrong = disagreement(captured.features(place), expected[i].features_TLD, dtype)
            if wrong is not None:
                return f"layer {layer_ids[wrong[0]]}: {wrong[1]}"
            final = expected[i].final_TD
            if final is not None:
                assert captured.final_RD is not None
                found = take_rows(captured.final_RD, captured.rows[place])
                wrong = disagreement(found[:, None], final[:, None], dtype)
                if wrong is not None:
                    return f"states after the final norm: {wrong[1]}"
    return None
