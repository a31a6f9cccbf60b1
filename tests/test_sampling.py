"""Speculative sampling is distributed as the target; a wrong rule is noticed; streams belong to samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.decode_distribution import drawn_triples, exact_triples, fit, processed, small_models, wrong_rule
from stages.config import ConfigError
from stages.decode import Request, decode_batch
from stages.sampling import (
    ACCEPT,
    CHOOSE,
    Sampling,
    Streams,
    accepts,
    after_drafts,
    draw,
    leading,
    probabilities,
)
from tests.tiny import make_drafter, make_target

DRAWS = 4000
NEVER: frozenset[int] = frozenset()


@pytest.mark.parametrize("sampling", [
    Sampling(temperature=1.0, drafts="sampled"), Sampling(temperature=1.5, top_k=5, top_p=0.9, drafts="greedy"),
], ids=["sampled", "greedy"])  # fmt: skip
def test_three_tokens_are_jointly_distributed_as_the_target_and_a_wrong_rule_is_noticed(sampling: Sampling) -> None:
    """Seeded, so no luck is involved. The full version: `python -m benchmarks.decode --distribution`."""
    target, drafter = small_models(7)
    exact = exact_triples(target, sampling)
    assert exact.sum() == pytest.approx(1)
    right = fit(drawn_triples(target, drafter, sampling, DRAWS), exact)
    assert right.p_value > 1e-3
    assert 1.1 < right.tau < 3.9  # drafts are accepted and refused
    with wrong_rule():
        assert fit(drawn_triples(target, drafter, sampling, DRAWS), exact).p_value < 1e-6


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    target, drafter = make_target(), make_drafter()
    requests = [Request(f"s{i}", [5 + i] * (1 + i)) for i in range(4)]
    sampling = Sampling(temperature=0.8, top_p=0.95, drafts="sampled", seed=4)

    def ids(some: list[Request], sampling: Sampling = sampling) -> list[list[int]]:
        batch = decode_batch(target, some, drafter=drafter, max_new_tokens=8, stop_ids=NEVER, sampling=sampling)
        return [row.ids for row in batch.rows]

    together = ids(requests)
    assert [ids([r])[0] for r in requests] == together
    assert ids(requests[::-1]) == together[::-1]
    assert ids(requests, Sampling(temperature=0.8, top_p=0.95, drafts="sampled", seed=5)) != together


@pytest.mark.parametrize("sampling", [
    Sampling(temperature=0.5), Sampling(temperature=2.0, top_k=5), Sampling(temperature=1.0, top_p=0.6),
    Sampling(temperature=1.0, top_k=7, top_p=0.5), Sampling(temperature=1.0, top_k=1),
])  # fmt: skip
def test_processed_distributions_are_those_of_the_definitions(sampling: Sampling) -> None:
    logits = torch.randn(3, 4, 30, generator=torch.Generator().manual_seed(1)) * 2
    logits[0, 0, 3] = logits[0, 0].max()  # two tokens share the first place
    found = probabilities(logits, sampling)
    expected = np.stack([processed(row.double().numpy(), sampling) for row in logits.flatten(0, 1)])
    np.testing.assert_allclose(found.flatten(0, 1).numpy(), expected, atol=1e-6)


def test_impossible_tokens_are_never_drawn() -> None:
    p = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(3, -1)
    assert draw(p, torch.tensor([0.0, 0.2999, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 1, 3]


def test_acceptance_by_hand() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.2, 0.6], [0.1, 0.0, 0.9]]])
    q = torch.tensor([[[0.25, 0.75, 0.0], [0.0, 1.0, 0.0]]])
    drafts = torch.tensor([[1, 1]])
    # Ratios are 0.5/0.75 and 0.2; greedy drafts are accepted with p itself.
    uniform = torch.tensor([[0.6, 0.3]], dtype=torch.float64)
    accepted = accepts(drafts, p, q, uniform)
    assert accepted.tolist() == [[True, False]]
    assert accepts(drafts, p, None, uniform).tolist() == [[False, False]]
    n = leading(accepted)
    assert n.tolist() == [1]
    torch.testing.assert_close(after_drafts(n, drafts, p, q), torch.tensor([[0.2, 0.0, 0.6]]))
    torch.testing.assert_close(after_drafts(torch.tensor([0]), drafts, p, None), torch.tensor([[0.5, 0.0, 0.0]]))
    torch.testing.assert_close(after_drafts(torch.tensor([2]), drafts, p, q), p[:, 2])
    # Where p and q are the same but for rounding, nothing is left, and the target's distribution stands in.
    torch.testing.assert_close(after_drafts(torch.tensor([0]), drafts, q, q), q[:, 0])


def test_streams_are_uniform_and_independent_of_each_other() -> None:
    streams = Streams(0, [f"s{i}" for i in range(500)], torch.device("cpu"))
    index = torch.arange(40).expand(500, -1)
    a, b = streams.uniform(index, ACCEPT), streams.uniform(index, CHOOSE)
    for x in (a, b):
        assert 0 <= float(x.min()) < float(x.max()) < 1
        counts = torch.histc(x.float(), 20, 0, 1)
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 45  # 19 degrees of freedom, p = 7e-4
    for x, y in ((a, b), (a[:, 1:], a[:, :-1]), (a[1:], a[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1])) < 0.03
    streams.select([7, 3])
    assert torch.equal(streams.uniform(index[:2], ACCEPT), a[[7, 3]])


@pytest.mark.parametrize(("name", "value"), [("temperature", -1.0), ("top_p", 0.0), ("top_k", -1), ("drafts", "some")])
def test_settings_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        Sampling(**{name: value})  # type: ignore[arg-type]
