"""Real speculative decoding on held-out prompts, beside plain decoding of the same target.

One prompt at a time, temperature 0. Every output is compared token for token with plain greedy decoding;
a difference is recorded with its position, never hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.decode import Decoded, decode_plain, decode_speculative
from stages.drafter import Drafter
from stages.target import Target

N_EXAMPLES = 2


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A prompt to decode: its id, category, text for the report, and token ids."""

    sample_id: str
    category: str
    text: str
    ids: list[int]


@dataclass(slots=True)
class Tally:
    """What one drafter achieved, prompt by prompt.

    Attributes:
        block_size: B.
        rows: per prompt a JSON-able record (see `record`).
    """

    block_size: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    def results(self) -> dict[str, Any]:
        """The drafter's part of `results.json`. τ is the mean over cycles of a response, then over responses;
        a response that ended with its first token has no cycle and does not count."""
        rows = [r for r in self.rows if r["cycles"]]
        histogram = [0] * self.block_size
        for length in (c for r in rows for c in r["cycles"]):
            histogram[length - 1] += 1
        cycles = sum(histogram)
        by_category: dict[str, list[float]] = defaultdict(list)
        for r in rows:
            by_category[r["category"]].append(r["tau"])
        spec, plain = _rate(self.rows, "speculative_s", "tokens"), _rate(self.rows, "plain_s", "plain_tokens")
        return {
            "tau": _mean([r["tau"] for r in rows]),
            "by_category": {c: {"tau": _mean(v), "responses": len(v)} for c, v in sorted(by_category.items())},
            "acceptance_histogram": histogram,
            "accept_by_slot": [sum(histogram[k:]) / cycles if cycles else 0.0 for k in range(1, self.block_size)],
            "tokens_per_s": spec,
            "plain_tokens_per_s": plain,
            "speedup": spec / plain if plain else 0.0,
            "draft_share": _share(self.rows, "draft_s"),
            "verify_share": _share(self.rows, "verify_s"),
            "identical": sum(r["difference"] is None for r in self.rows),
            "prompts": len(self.rows),
            "differences": [r["difference"] for r in self.rows if r["difference"] is not None],
            "examples": [r["example"] for r in sorted(rows, key=lambda r: -r["tau"])[:N_EXAMPLES]],
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _rate(rows: Sequence[Mapping[str, Any]], seconds: str, tokens: str) -> float:
    """Tokens per second: one over the mean, over responses, of decode seconds per output token.

    The prefill's token and time are left out. Source: specification, section 4 (speed-up).
    """
    per_token = [r[seconds] / (r[tokens] - 1) for r in rows if r[tokens] > 1]
    return 1 / _mean(per_token) if sum(per_token) else 0.0


def _share(rows: Sequence[Mapping[str, Any]], part: str) -> float:
    spent = sum(r["speculative_s"] for r in rows)
    return sum(r[part] for r in rows) / spent if spent else 0.0


def record(target: Target, prompt: EvalPrompt, plain: Decoded, speculative: Decoded) -> dict[str, Any]:
    """One prompt's row: acceptance lengths, times, and where the outputs differ (None: nowhere)."""
    return {
        "sample_id": prompt.sample_id, "category": prompt.category,
        "tau": speculative.tau, "cycles": speculative.cycles,
        "tokens": len(speculative.ids), "plain_tokens": len(plain.ids),
        "speculative_s": speculative.decode_s, "plain_s": plain.decode_s,
        "draft_s": speculative.draft_s, "verify_s": speculative.verify_s,
        "difference": first_difference(prompt.sample_id, plain.ids, speculative.ids),
        "example": {"sample_id": prompt.sample_id, "category": prompt.category, "prompt": prompt.text,
                    "pieces": _pieces(target, speculative)},
    }


def first_difference(sample_id: str, plain: list[int], speculative: list[int]) -> dict[str, Any] | None:
    """Where two outputs part, or None when they are equal."""
    if plain == speculative:
        return None
    shorter = min(len(plain), len(speculative))
    at = next((i for i in range(shorter) if plain[i] != speculative[i]), shorter)
    after = slice(at, at + 4)
    return {"sample_id": sample_id, "position": at, "plain": plain[after], "speculative": speculative[after]}


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
    decode_plain(target, prompt.ids, 2, stop_ids)
    for drafter in drafters.values():
        decode_speculative(target, drafter, prompt.ids, 2, stop_ids)


def evaluate_prompt(
    target: Target, drafters: Mapping[str, Drafter], prompt: EvalPrompt, *,
    max_new_tokens: int, stop_ids: frozenset[int],
) -> dict[str, dict[str, Any]]:
    """Decode one prompt plainly and with each drafter, in turn; returns a row per drafter (see `record`).

    Args:
        target: the model, in the dtype to measure in.
        drafters: by name (`trained`, `untrained`), on the target's device and in its dtype.
        prompt: one that was not trained on.
        max_new_tokens: of each response.
        stop_ids: that end a response.
    """
    plain = decode_plain(target, prompt.ids, max_new_tokens, stop_ids)
    rows: dict[str, dict[str, Any]] = {}
    for name, drafter in drafters.items():
        speculative = decode_speculative(target, drafter, prompt.ids, max_new_tokens, stop_ids)
        rows[name] = record(target, prompt, plain, speculative)
    return rows
