"""Is what speculative sampling gives distributed as the target? Chi-square of the first three tokens, jointly.

The exact distribution comes from enumerating every triple of a small vocabulary; temperature, top-k and top-p are
computed here by themselves, from their definitions. The draws are rows of the engine's own batches, many copies of one
prompt under different sample ids. A deliberately wrong rule (what follows a refused draft drawn from the target instead
of from the residual) is put to the same test.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from stages import sampling as sampling_module
from stages.decode import Request, decode_batch
from stages.drafter import Drafter
from stages.sampling import Sampling
from stages.target import Target
from tests.tiny import make_spec, make_target

Floats = npt.NDArray[np.float64]
PROMPT = [1, 3, 0, 2]
BLOCK = 4
WRONG_DRAWS = 10_000
"""That many are enough to notice the wrong rule."""
MIN_EXPECTED = 5.0
"""Cells with fewer expected draws are taken together, as is usual for chi-square."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How well draws fit a distribution."""

    p_value: float
    chi_square: float
    cells: int
    tau: float


def small_models(vocab: int, seed: int = 3) -> tuple[Target, Drafter]:
    """A random target and a random drafter that share a vocabulary of a few tokens."""
    target = make_target(seed, vocab_size=vocab, num_hidden_layers=3, bos_token_id=0, eos_token_id=1)
    spec = make_spec(vocab_size=vocab, n_target_layers=3, feature_layer_ids=(0, 1), mask_token_id=vocab - 1, n_layers=1)
    return target, Drafter(spec, seed=seed).eval()


def processed(logits: Floats, sampling: Sampling) -> Floats:
    """One distribution by the definitions: temperature, the k largest, the smallest set with at least top_p."""
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept = order[: sampling.top_k] if sampling.top_k else order
    total = sum(weights[i] for i in kept)
    out, mass = np.zeros(len(weights)), 0.0
    for i in kept:
        if mass >= sampling.top_p:
            break
        out[i] = weights[i]
        mass += weights[i] / total
    return np.asarray(out / out.sum(), np.float64)


@torch.inference_mode()
def exact_triples(target: Target, sampling: Sampling) -> Floats:
    """Probability of every triple of first tokens, [V, V, V]."""
    V = target.shape.vocab_size

    def step(prefixes: list[tuple[int, ...]]) -> list[Floats]:
        ids = torch.tensor([[*PROMPT, *p] for p in prefixes])
        logits = target.model(input_ids=ids, use_cache=False).logits[:, -1].double().numpy()
        return [processed(row, sampling) for row in logits]

    first = step([()])[0]
    second = step([(a,) for a in range(V)])
    third = step(list(itertools.product(range(V), repeat=2)))
    return first[:, None, None] * np.stack(second)[:, :, None] * np.stack(third).reshape(V, V, V)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Counts of triples, [V, V, V], and the mean acceptance length."""

    counts: npt.NDArray[np.int64]
    tau: float


def drawn_triples(target: Target, drafter: Drafter, sampling: Sampling, draws: int, rows: int = 2500) -> Drawn:
    """What the engine gives for so many copies of the prompt."""
    V = target.shape.vocab_size
    counts, cycles = np.zeros((V, V, V), np.int64), []
    for start in range(0, draws, rows):
        requests = [Request(f"draw-{i}", PROMPT) for i in range(start, min(start + rows, draws))]
        batch = decode_batch(target, requests, drafter=drafter, block_size=BLOCK, max_new_tokens=3,
                             stop_ids=frozenset(), sampling=sampling)  # fmt: skip
        for row in batch.rows:
            counts[tuple(row.ids)] += 1
            cycles += row.cycles
    return Drawn(counts, float(np.mean(cycles)))


def fit(drawn: Drawn, exact: Floats) -> Fit:
    """Chi-square of counts against probabilities; a triple that cannot be and was drawn gives p = 0."""
    found = drawn.counts.ravel()
    expected = exact.ravel() * found.sum()
    if found[expected == 0].any():
        return Fit(0.0, float("inf"), 0, drawn.tau)
    large = expected >= MIN_EXPECTED
    expected = np.append(expected[large], expected[~large].sum())
    found = np.append(found[large], found[~large].sum())
    keep = expected > 0
    chi_square = float(((found - expected)[keep] ** 2 / expected[keep]).sum())
    freedom = int(keep.sum()) - 1
    tail = torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(chi_square / 2).double())
    return Fit(float(tail), chi_square, int(keep.sum()), drawn.tau)


@contextmanager
def wrong_rule() -> Iterator[None]:
    """The token behind a refused draft is drawn from the target's distribution, not from the residual."""
    with patch.object(sampling_module, "residual", lambda p_NV, q_NV: p_NV):
        yield


def all_settings() -> list[Sampling]:
    """Temperatures 0.5, 1.0, 1.5, each alone, with top-p 0.9 and with top-k 5; drafts greedy and sampled."""
    limits: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"top_k": 5}]
    combined = itertools.product((0.5, 1.0, 1.5), limits, ("greedy", "sampled"))
    return [Sampling(temperature=t, drafts=d, seed=i, **limit)  # type: ignore[arg-type]
            for i, (t, limit, d) in enumerate(combined)]  # fmt: skip


def name_of(sampling: Sampling) -> str:
    limit = f", top-k {sampling.top_k}" if sampling.top_k else f", top-p {sampling.top_p}" if sampling.top_p < 1 else ""
    return f"temperature {sampling.temperature}{limit}, drafts {sampling.drafts}"


def holm(p_values: list[float]) -> list[float]:
    """p-values corrected for their number (Holm)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    out, worst = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        out[i] = worst
    return out


def run_distribution(draws: int, vocab: int) -> bool:
    """Every setting with the right rule and with the wrong one; prints both, says whether all is as it must be."""
    target, drafter = small_models(vocab)
    settings = all_settings()
    right, wrong = [], []
    print(f"{draws} draws per setting, vocabulary {vocab}, joint of three tokens", flush=True)
    for setting in settings:
        exact = exact_triples(target, setting)
        right.append(fit(drawn_triples(target, drafter, setting, draws), exact))
        with wrong_rule():
            wrong.append(fit(drawn_triples(target, drafter, setting, min(draws, WRONG_DRAWS)), exact))
        found = right[-1]
        print(f"  {name_of(setting)}: p {found.p_value:.3f} (chi-square {found.chi_square:.0f}, {found.cells} cells, "
              f"τ {found.tau:.2f}); wrong rule: p {wrong[-1].p_value:.1e}", flush=True)  # fmt: skip
    corrected, broken = (holm([f.p_value for f in fits]) for fits in (right, wrong))
    print(f"smallest p after Holm's correction: {min(corrected):.3g}; wrong rule, largest: {max(broken):.3g}")
    return min(corrected) > 1e-3 and max(broken) < 1e-3

