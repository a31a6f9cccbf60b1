"""From the records of decoded prompts to the numbers of `results.json`.

τ is the mean over cycles of a response, then over responses; a response that ended with its first token has no cycle
and does not count. Speed-up is mean seconds per output token of the plain loop over that of the drafted one, decode
only, over units (prompts that were decoded together). Source: specification, section 4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.decode import PARTS
from stages.drafter import Drafter
from stages.target import Target

N_EXAMPLES = 2
RESPONSE = ("sample_id", "category", "difficulty", "prompt_tokens", "tau", "tokens")
SHORTEST = 32
"""Prompts of fewer tokens are one group."""


@dataclass(slots=True)
class Tally:
    """What one drafter achieved in one setting.

    Attributes:
        block_size: B, the largest if it follows a schedule.
        units: records of `stages.evaluate.evaluate_unit`.
    """

    block_size: int
    units: list[dict[str, Any]] = field(default_factory=list)

    def results(self) -> dict[str, Any]:
        """The drafter's part of `results.json`."""
        everything = [r for unit in self.units for r in unit["responses"]]
        rows = [r for r in everything if r["cycles"]]
        spec, plain = _rate(self.units, "speculative_s", "tokens"), _rate(self.units, "plain_s", "plain_tokens")
        split = self._time_split()
        return {
            "tau": _mean([r["tau"] for r in rows]),
            "by_category": self._grouped(rows, "category"),
            "by_difficulty": self._grouped(rows, "difficulty"),
            "by_prompt_tokens": self._by_length(rows),
            **acceptance(rows, self.block_size),
            "tokens_per_s": spec,
            "plain_tokens_per_s": plain,
            "speedup": spec / plain if plain else 0.0,
            "time_split": split,
            "draft_share": split["draft"],
            "verify_share": split["verify"],
            **_agreement(everything),
            "responses": [{k: r[k] for k in RESPONSE if k in r} for r in rows],
            "examples": [r["example"] for r in sorted(rows, key=lambda r: -r["tau"])[:N_EXAMPLES]],
        }

    def _time_split(self) -> dict[str, float]:
        spent = sum(unit["speculative_s"] for unit in self.units)
        return {p: sum(u["parts"].get(p, 0.0) for u in self.units) / spent if spent else 0.0 for p in PARTS}

    def _by_length(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As `_grouped`, by the prompt's tokens, shortest first."""
        known = sorted((r for r in rows if "prompt_tokens" in r), key=lambda r: r["prompt_tokens"])
        named = [{**r, "length": bucket(r["prompt_tokens"])} for r in known]
        found = self._grouped(named, "length")
        return {name: found[name] for name in dict.fromkeys(r["length"] for r in named)}

    def _grouped(self, rows: Sequence[Mapping[str, Any]], by: str) -> dict[str, Any]:
        """τ, responses and speed-up by a field of the rows; no speed-up where prompts were decoded together."""
        groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for row in rows:
            if row[by] is not None:
                groups[row[by]].append(row)
        alone = all(len(unit["responses"]) == 1 for unit in self.units)
        out = {}
        for name, members in sorted(groups.items()):
            out[name] = {"tau": _mean([r["tau"] for r in members]), "responses": len(members)}
            if alone:
                ids = {r["sample_id"] for r in members}
                units = [u for u in self.units if u["responses"][0]["sample_id"] in ids]
                plain = _rate(units, "plain_s", "plain_tokens")
                out[name]["speedup"] = _rate(units, "speculative_s", "tokens") / plain if plain else 0.0
        return out


def bucket(n_tokens: int) -> str:
    """A range of prompt lengths, from one power of two to the next."""
    low = 1 << (n_tokens.bit_length() - 1)
    return f"up to {SHORTEST - 1}" if low < SHORTEST else f"{low}–{2 * low - 1}"


def acceptance(rows: Sequence[Mapping[str, Any]], block_size: int) -> dict[str, Any]:
    """Histogram of acceptance lengths, share of cycles whose k-th draft was accepted, share of full blocks."""
    histogram, offered, full = [0] * block_size, [0] * block_size, 0
    for row in rows:
        for length, size in zip(row["cycles"], row["blocks"], strict=True):
            histogram[length - 1] += 1
            full += length == size
            offered[size - 1] += 1
    cycles = sum(histogram)
    # A slot that a smaller block of a schedule did not draft is not counted against it.
    chances = [sum(offered[k:]) for k in range(1, block_size)]
    accepted = [sum(histogram[k:]) for k in range(1, block_size)]
    return {
        "acceptance_histogram": histogram,
        "accept_by_slot": [a / c if c else 0.0 for a, c in zip(accepted, chances, strict=True)],
        "full_blocks": full / cycles if cycles else 0.0,
        "cycles": cycles,
    }


def _agreement(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Outputs equal to plain decoding, and the others, each explained; nothing to compare when sampled."""
    greedy = all("difference" in r for r in rows)
    differences = [r["difference"] for r in rows if r.get("difference") is not None]
    return {
        "identical": sum(r["difference"] is None for r in rows) if greedy else None,
        "ties": sum(bool(d.get("tie")) for d in differences) if greedy else None,
        "prompts": len(rows),
        "differences": differences,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _rate(units: Sequence[Mapping[str, Any]], seconds: str, tokens: str) -> float:
    """Tokens per second: one over the mean, over units, of decode seconds per output token."""
    per_token = [u[seconds] / u[tokens] for u in units if u[tokens] > 0]
    return 1 / _mean(per_token) if sum(per_token) else 0.0


def memory(target: Target, drafter: Drafter, units: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes by part: weights as they lie in memory, caches at their largest (rows as long as the longest)."""
    weights = {id(p): p for p in target.model.parameters()}.values()
    return {
        "target_weights": sum(p.numel() * p.element_size() for p in weights),
        "target_kv": max((u["target_kv_bytes"] for u in units), default=0),
        "drafter_weights": sum(p.numel() * p.element_size() for p in drafter.parameters()),
        "drafter_kv": max((u["drafter_kv_bytes"] for u in units), default=0),
    }
