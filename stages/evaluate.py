"""Real speculative decoding on held-out prompts, beside plain decoding of the same target, by the same loop.

A unit of work is a few prompts that are decoded together, plainly and then with each drafter and block size, so that
what is compared was measured within the same minute. Greedy outputs are compared token for token with plain greedy
decoding; a difference is recorded with its position and the two logits there, never hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.decode import BlockSize, Decoded, DecodedBatch, Request, decode_batch
from stages.drafter import Drafter
from stages.sampling import GREEDY, Sampling
from stages.sessions import target_logits
from stages.target import Target

TIE_ROUNDINGS = 4
"""A difference is a tie when both tokens' logits lie within so many roundings of the evaluation dtype below the
largest logit: within `TIE_ROUNDINGS · eps/2 · |largest logit|`, where eps/2 is the relative error of one rounding."""


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A prompt to decode: its id, category, text for the report, token ids, and difficulty if the data has it."""

    sample_id: str
    category: str
    text: str
    ids: list[int]
    difficulty: str | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """A drafter at a block size, as one column of the results.

    Attributes:
        drafter: its name, `trained` or `untrained`.
        block_size: B, or `schedule`.
        sizes: what the engine is given: B, or B by the number of rows.
    """

    drafter: str
    block_size: int | str
    sizes: BlockSize

    @property
    def key(self) -> str:
        return f"{self.drafter}@{self.block_size}"


def record(target: Target, prompt: EvalPrompt, plain: Decoded, speculative: Decoded, greedy: bool) -> dict[str, Any]:
    """One response's row: acceptance lengths, times, and where a greedy output differs (None: nowhere)."""
    row = {
        "sample_id": prompt.sample_id, "category": prompt.category, "difficulty": prompt.difficulty,
        "prompt_tokens": len(prompt.ids),
        "tau": speculative.tau, "cycles": speculative.cycles, "blocks": speculative.blocks,
        "tokens": len(speculative.ids), "plain_tokens": len(plain.ids),
        "speculative_s": speculative.decode_s, "plain_s": plain.decode_s,
        "example": {"sample_id": prompt.sample_id, "category": prompt.category, "prompt": prompt.text,
                    "pieces": _pieces(target, speculative)},
    }  # fmt: skip
    if greedy:
        difference = first_difference(prompt.sample_id, plain.ids, speculative.ids)
        if difference is not None:
            difference |= explain_difference(target, prompt.ids, plain.ids, speculative.ids, difference["position"])
        row["difference"] = difference
    return row


def first_difference(sample_id: str, plain: list[int], speculative: list[int]) -> dict[str, Any] | None:
    """Where two outputs part, or None when they are equal."""
    if plain == speculative:
        return None
    shorter = min(len(plain), len(speculative))
    at = next((i for i in range(shorter) if plain[i] != speculative[i]), shorter)
    after = slice(at, at + 4)
    return {"sample_id": sample_id, "position": at, "plain": plain[after], "speculative": speculative[after]}


@torch.inference_mode()
def explain_difference(
    target: Target, prompt_ids: list[int], plain: list[int], speculative: list[int], position: int
) -> dict[str, Any]:
    """Whether two outputs part at a tie within rounding, by one clean pass over what both have in common.

    Returns:
        `gap`: how far the lower of the two tokens' logits lies below the largest logit; `bound`: see `TIE_ROUNDINGS`;
        `tie`: gap ≤ bound. Where one output simply ends there is no gap and no tie.
    """
    if position >= min(len(plain), len(speculative)):
        return {"gap": None, "bound": None, "tie": False}
    ids = torch.tensor([[*prompt_ids, *plain[:position]]], device=target.device)
    hidden = target.decoder(input_ids=ids, use_cache=False).last_hidden_state[0, -1:]
    logits = target_logits(target, hidden)[0].float()
    top = float(logits.max())
    gap = top - float(torch.minimum(logits[plain[position]], logits[speculative[position]]))
    bound = TIE_ROUNDINGS * torch.finfo(target.dtype).eps / 2 * abs(top)
    return {"gap": gap, "bound": bound, "tie": gap <= bound}


def _pieces(target: Target, decoded: Decoded) -> list[dict[str, Any]]:
    """The text of each cycle, for the report: `[first token], [cycle 1], …`."""
    if target.tokenizer is None:
        return []
    pieces, start = [], 0
    for length in [1, *decoded.cycles]:
        part = decoded.ids[start : start + length]
        if part:
            text = target.tokenizer.decode(part, skip_special_tokens=False)
            pieces.append({"text": text, "accepted": len(part) - 1, "length": length})
        start += length
    return pieces


def warm_up(target: Target, drafters: Mapping[str, Drafter], prompt: EvalPrompt, stop_ids: frozenset[int]) -> None:
    """The first pass through each model pays for allocations and is not measured."""
    request = Request(prompt.sample_id, prompt.ids)
    for drafter in (None, *drafters.values()):
        decode_batch(target, [request], drafter=drafter, max_new_tokens=2, stop_ids=stop_ids)


def evaluate_unit(
    target: Target, drafters: Mapping[str, Drafter], variants: Sequence[Variant], prompts: Sequence[EvalPrompt], *,
    max_new_tokens: int, stop_ids: frozenset[int], sampling: Sampling = GREEDY,
) -> dict[str, dict[str, Any]]:
    """Decode prompts together, plainly and with each variant in turn; returns a record per variant's key.

    Args:
        target: the model, in the dtype to measure in.
        drafters: by name, on the target's device and in its dtype.
        variants: which drafter at which block size.
        prompts: ones that were not trained on.
        max_new_tokens: of each response.
        stop_ids: that end a response.
        sampling: how tokens are chosen.

    Returns:
        JSON-able records for `stages.tally`.
    """
    requests = [Request(p.sample_id, p.ids) for p in prompts]
    plain = decode_batch(target, requests, max_new_tokens=max_new_tokens, stop_ids=stop_ids, sampling=sampling)
    out = {}
    for variant in variants:
        found = decode_batch(
            target, requests, drafter=drafters[variant.drafter], block_size=variant.sizes,
            max_new_tokens=max_new_tokens, stop_ids=stop_ids, sampling=sampling,
        )  # fmt: skip
        out[variant.key] = unit_record(target, prompts, plain, found, sampling.greedy)
    return out


def unit_record(
    target: Target, prompts: Sequence[EvalPrompt], plain: DecodedBatch, found: DecodedBatch, greedy: bool
) -> dict[str, Any]:
    """What one variant did with the prompts of a unit."""
    rows = [record(target, *row, greedy) for row in zip(prompts, plain.rows, found.rows, strict=True)]
    return {
        "responses": rows,
        # The prefill's token and time are left out of speeds.
        "tokens": sum(len(r.ids) - 1 for r in found.rows), "plain_tokens": sum(len(r.ids) - 1 for r in plain.rows),
        "speculative_s": found.decode_s, "plain_s": plain.decode_s, "prefill_s": found.prefill_s,
        "parts": found.parts,
        "target_kv_bytes": found.target_kv_bytes, "drafter_kv_bytes": found.drafter_kv_bytes,
    }  # fmt: skip
