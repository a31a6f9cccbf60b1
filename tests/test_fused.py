"""Norm, rotation and gate, both ways that they are computed, against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stages import fused

P, H, E = 7, 3, 8
EPS = 1e-3
ANGLES_PF = torch.linspace(0, 3, P * E // 2).view(P, E // 2)
Compute = Callable[..., torch.Tensor]


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


def turned(x_PHE: torch.Tensor) -> torch.Tensor:
    """Each pair (i, i + E/2) as one complex number."""
    pairs_PHF = torch.complex(x_PHE[..., : E // 2], x_PHE[..., E // 2 :])
    out_PHF = pairs_PHF * torch.polar(torch.ones_like(ANGLES_PF), ANGLES_PF).to(pairs_PHF.dtype)[:, None]
    return torch.cat([out_PHF.real, out_PHF.imag], dim=-1)


CASES: dict[str, tuple[Compute, Compute, tuple[int, ...], tuple[int, ...]]] = {
    "norm": (lambda x, w: fused.rms_norm(x, w, EPS), normed, (P, E), (E,)),
    "normed rotation": (
        lambda x, w: fused.normed_rotation(x, w, EPS, ANGLES_PF.cos(), ANGLES_PF.sin()),
        lambda x, w: turned(normed(x, w)),
        (P, H, E),
        (E,),
    ),
    "gate": (fused.gated, lambda gate, up: gate / (1 + (-gate).exp()) * up, (P, E), (P, E)),
}


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_formula(
    name: str, dtype: torch.dtype, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_by_hand", lambda x: by_hand)
    ours, formula, x_shape, weight_shape = CASES[name]
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(x_shape, generator=generator).to(dtype)
    weight_dtype = dtype if name == "gate" else torch.float32
    second = torch.randn(weight_shape, generator=generator).to(weight_dtype)
    towards = torch.randn(x_shape, generator=generator).to(dtype)
    found = _with_gradients(ours, first, second, towards)
    expected = _with_gradients(formula, first.double(), second.double(), towards.double())
    near = 3e-6 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=near, atol=near)
    assert [one.dtype for one in found] == [dtype, dtype, weight_dtype]


def _with_gradients(
    compute: Compute, first: torch.Tensor, second: torch.Tensor, towards: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    first, second = first.clone().requires_grad_(), second.clone().requires_grad_()
    out = compute(first, second)
    return (out.detach(), *torch.autograd.grad(out, (first, second), towards.to(out.dtype)))
