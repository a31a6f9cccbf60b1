"""What a target's architecture asks of the recipe's lengths and of its division among processes.

All of it is found in the target's config and structure, never by its name. Two kinds of target know only so many
positions: those with a table of learned ones, and those whose rotation depends on the longest sequence of a pass
(`transformers.modeling_rope_utils.dynamic_rope_update`): `longrope` takes other factors for the whole pass once one
sequence is longer than `original_max_position_embeddings`, and `dynamic` also keeps what a longer pass left behind.
Neither is an error in the model, so no pass over short samples shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from stages.errors import TargetSettingError
from stages.target import Target

_OFFSET = 2
"""Rows that OPT and its kin keep in front of the first position."""


@dataclass(frozen=True, slots=True)
class LengthRope:
    """A rotation that depends on the longest sequence of a pass.

    Attributes:
        kind: `longrope` or `dynamic`.
        threshold: tokens up to which it does not.
        setting: what the threshold is called in config.json.
    """

    kind: str
    threshold: int
    setting: str


def length_rope(text_config: Any) -> LengthRope | None:
    """The rotation of this target that depends on lengths, None if none does; the one with the lowest threshold if
    layer types differ (`dynamic` before `longrope`)."""
    found = [rope for parameters in _ropes(text_config) if (rope := _length_rope(parameters, text_config))]
    return min(found, key=lambda rope: (rope.kind != "dynamic", rope.threshold), default=None)


def _ropes(text_config: Any) -> Iterator[dict[str, Any]]:
    """Parameters of every rotation: one for all layers, or one per layer type (transformers 4 says `rope_scaling`)."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(text_config, name, None)
        if isinstance(parameters, dict):
            yield parameters
            yield from (nested for nested in parameters.values() if isinstance(nested, dict))


def _length_rope(parameters: dict[str, Any], text_config: Any) -> LengthRope | None:
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if "dynamic" in kind:
        return LengthRope("dynamic", int(text_config.max_position_embeddings), "max_position_embeddings")
    if kind == "longrope":
        setting = "original_max_position_embeddings"
        threshold = parameters.get(setting) or getattr(text_config, setting, None)
        return LengthRope("longrope", int(threshold or text_config.max_position_embeddings), setting)
    return None


def learned_positions(target: Target) -> int | None:
    """How many positions a target with learned ones has (GPT-2, OPT); None where positions are no table."""
    limit = getattr(target.text_config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    for module in target.decoder.modules():
        if not isinstance(module, nn.Embedding) or module is target.embed:
            continue
        if 0 <= module.num_embeddings - limit <= _OFFSET:
            return limit
    return None


def why_single(target: Target, max_length: int) -> str | None:
    """Why samples of up to `max_length` tokens must not share a pass; None if they may, as far as lengths go.

    Args:
        target: the model.
        max_length: the recipe's `cache.max_length`. The samples themselves do not matter: all workers decide alike.

    Raises:
        TargetSettingError: the target knows too few positions, or what a sample gets would depend on those before it.
    """
    positions = learned_positions(target)
    if positions is not None and max_length > positions:
        raise TargetSettingError(
            f"cache.max_length is {max_length}, but target {target.name} has a table of {positions} learned positions "
            f"(max_position_embeddings); set cache.max_length to at most {positions}"
        )
    rope = length_rope(target.text_config)
    if rope is None or max_length <= rope.threshold:
        return None
    if rope.kind == "dynamic":
        raise TargetSettingError(
            f"cache.max_length is {max_length}, but target {target.name} has rope type dynamic with {rope.setting} "
            f"{rope.threshold}: beyond that its rotation depends on the samples that went before, so its states are "
            f"not a sample's own; set cache.max_length to at most {rope.threshold}"
        )
    return (
        f"its rope type {rope.kind} rotates a whole pass by its longest sample beyond {rope.threshold} tokens "
        f"({rope.setting}), and cache.max_length is {max_length}"
    )


@dataclass(frozen=True, slots=True)
class PositionLimit:
    """How long a sequence may be that is decoded with a KV cache, alone or beside others.

    Attributes:
        tokens: prompt and everything behind it.
        why: for messages; begins with a verb.
    """

    tokens: int
    why: str


def position_limit(target: Target) -> PositionLimit | None:
    """The limit of a target with learned positions or with a rotation that depends on lengths; None for others."""
    positions, rope = learned_positions(target), length_rope(target.text_config)
    if positions is not None:
        return PositionLimit(positions, f"has a table of {positions} learned positions (max_position_embeddings)")
    if rope is None:
        return None
    why = (f"has rope type {rope.kind} with {rope.setting} {rope.threshold}: beyond that the longest sequence of a "
           "pass decides how all are rotated, but keys in the cache keep their rotation")
    return PositionLimit(rope.threshold, why)


def require_decodable(target: Target, longest: int) -> None:
    """Refuse to decode sequences of `longest` tokens (prompt, new tokens and drafts) if positions would go wrong.

    Raises:
        TargetSettingError: the target knows too few positions, or keys in the cache would be of another rotation than
            later ones.
    """
    limit = position_limit(target)
    if limit is None or longest <= limit.tokens:
        return
    raise TargetSettingError(
        f"target {target.name} {limit.why}; sequences of up to {longest} tokens would be decoded (longest prompt, "
        f"evaluate.max_new_tokens and one block of drafts). Lower evaluate.max_new_tokens, or leave out the longest "
        f"prompts, until the sum is at most {limit.tokens}"
    )


def require_divisible(config: Any, name: str, processes: int) -> None:
    """Refuse to divide a target among processes that cannot each have the same number of its heads.

    Args:
        config: the target's transformers config.
        name: what the recipe calls the target.
        processes: the recipe's `extract.tensor_parallel`.

    Raises:
        TargetSettingError: names the numbers of heads.
    """
    text = config.get_text_config()
    known = {key: getattr(text, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
    heads = {key: value for key, value in known.items() if isinstance(value, int)}
    if all(n % processes == 0 for n in heads.values()):
        return
    most = math.gcd(*heads.values())
    can = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
    raise TargetSettingError(
        f"extract.tensor_parallel is {processes}, but target {name} has "
        f"{' and '.join(f'{key} {n}' for key, n in heads.items())}; it must divide each of them ({can})"
    )
