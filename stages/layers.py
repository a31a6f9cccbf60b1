"""Which of the target's layers are captured (specification, section 1).

A layer id is 0-based and means the residual stream *after* that decoder layer, which transformers calls
`output_hidden_states[id + 1]`, because its index 0 is the embedding.
"""

from __future__ import annotations

from itertools import pairwise

from stages.config import ConfigError


def feature_layer_ids(n_target_layers: int, n: int) -> tuple[int, ...]:
    """Ids of `n` uniformly spaced feature layers: `round(1 + i·(L−4)/(n−1))`, and `L//2` for n = 1.

    Python's rounding (halves to even) is part of the rule: the published drafters were made with it.

    Args:
        n_target_layers: decoder layers L of the target.
        n: feature layers wanted.

    Raises:
        ConfigError: n is below 1, or L is too small for n different layers.
    """
    L = n_target_layers
    if n < 1:
        raise ConfigError(f"cache.n_layers is {n}, but at least one feature layer is needed")
    ids = (L // 2,) if n == 1 else tuple(round(1 + i * (L - 4) / (n - 1)) for i in range(n))
    check_layer_ids(ids, L)
    return ids


def check_layer_ids(ids: tuple[int, ...], n_target_layers: int) -> None:
    """Refuse ids that are not strictly increasing in [0, L−1].

    Raises:
        ConfigError: names the ids, the target's number of layers and the setting to change.
    """
    rising = all(a < b for a, b in pairwise(ids))
    if not ids or not rising or ids[0] < 0 or ids[-1] >= n_target_layers:
        raise ConfigError(
            f"feature layers {list(ids)} do not fit a target of {n_target_layers} layers: ids must be strictly "
            f"increasing in [0, {n_target_layers - 1}]. Set cache.layer_ids, or a smaller cache.n_layers"
        )
