"""When two ways of computing the same states agree: rounding is allowed for, anything else is not.

Shapes: T tokens, L feature layers, D hidden.

States are compared as ‖found − expected‖ / ‖expected‖ per token and layer. Measured on SmolLM2-135M in bfloat16, one
sequence alone beside the same one in a batch: 0.012 on average in the worst layer, 0.07 for the worst token; the layer
beside the right one gives 0.22 and more on average, the row beside the right one 0.62, another sample 0.77.
"""

from __future__ import annotations

import torch

LIMITS = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest mean difference of a layer that rounding explains."""
_WORST = 10.0
"""Factor on the limit for a single token: in bfloat16 a token may even be sent to another expert."""
_WORST_SHARE = 0.02
"""So many tokens may be beyond that (one always may, of 20 and more)."""


def difference(found_TLD: torch.Tensor, expected_TLD: torch.Tensor) -> torch.Tensor:
    """‖found − expected‖ / ‖expected‖ over channels, [T, L] float32; where expected is zero, 0 if both are, else 1."""
    found, expected = found_TLD.float(), expected_TLD.float()
    apart, size = (found - expected).norm(dim=-1), expected.norm(dim=-1)
    return torch.where(size > 0, apart / size, (apart > 0).float())


def disagreement(
    found_TLD: torch.Tensor, expected_TLD: torch.Tensor, dtype: torch.dtype
) -> tuple[int, str] | None:
    """What differs beyond rounding, or None.

    Args:
        found_TLD: states of one sample, [T, L, D].
        expected_TLD: what they should be, the same shape.
        dtype: in which the target computes.

    Returns:
        Index of the worst layer in L, and the figures as text.
    """
    if found_TLD.shape != expected_TLD.shape:
        return 0, f"states of shape {list(found_TLD.shape)}, expected {list(expected_TLD.shape)}"
    apart_TL = difference(found_TLD, expected_TLD.to(found_TLD.device))
    limit = LIMITS[dtype]
    # NaN is beyond any limit.
    means_L = apart_TL.mean(0).nan_to_num(nan=float("inf"))
    far_TL = ~(apart_TL <= _WORST * limit)
    n_tokens = len(apart_TL)
    allowed = max(int(n_tokens >= 20), int(_WORST_SHARE * n_tokens))
    far_L = far_TL.sum(0)
    if bool((means_L <= limit).all()) and bool((far_L <= allowed).all()):
        return None
    worst = int((means_L / limit).argmax()) if bool((means_L > limit).any()) else int(far_L.argmax())
    first = int((~(apart_TL[:, worst] <= limit)).int().argmax())
    return worst, (
        f"the states differ by {float(means_L[worst]):.2g} of their size on average ({int(far_L[worst])} of {n_tokens} "
        f"tokens by more than {_WORST * limit:g}; first at token {first}), expected at most {limit:g} by rounding"
    )
