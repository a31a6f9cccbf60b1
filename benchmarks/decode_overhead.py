"""What our loop costs: the speed-up with a drafter that is always right, beside equation 1 of the paper.

The stub does the whole work of a real drafter's pass and then answers with what the target will say. Equation 1: a
token takes (T_draft + T_verify) / τ, against T_target plainly. The raw times come from single passes at the middle of
the response (`stages.passes`), in the same process, measured in turn with the loops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.decode_identity import heldout_requests, load_models
from stages import clock
from stages.decode import DecodedBatch, decode_batch
from stages.passes import time_passes
from stages.sessions import DraftSession

NEEDED = 0.8
ROUNDS = 3


def run_overhead(model: str, folder: Path | None, sizes: Sequence[int], tokens: int) -> bool:
    """Print both speed-ups for each block size; says whether the loop reaches its share of what equation 1 gives.

    On a CPU processor time is measured, of one thread: other work on the machine is no cost of the loop.
    """
    torch.set_num_threads(1)
    with patch.object(clock, "timer", time.process_time):
        return _run_overhead(model, folder, sizes, tokens)


def _run_overhead(model: str, folder: Path | None, sizes: Sequence[int], tokens: int) -> bool:
    target, drafter, _ = load_models(model, folder, "float32")
    request = heldout_requests(target, 1)[0]
    never: frozenset[int] = frozenset()
    longest = max(sizes)

    def decode(size: int) -> DecodedBatch:
        return decode_batch(target, [request], drafter=drafter if size > 1 else None, block_size=size,
                            max_new_tokens=tokens, stop_ids=never)  # fmt: skip

    truth = decode_batch(target, [request], max_new_tokens=tokens + 2 * longest, stop_ids=never).rows[0].ids
    middle = len(request.ids) + tokens // 2
    ok = True
    for size in sizes:
        plain_s, fast_s, tau = float("inf"), float("inf"), 0.0
        raw = {1: float("inf"), size: float("inf")}
        for _ in range(ROUNDS):
            for b in raw:
                found = time_passes(target, drafter, rows=1, block_size=b, n_context=middle, repeats=3)
                raw[b] = min(raw[b], found.draft_s + found.verify_s)
            plain = decode(1).rows[0]
            plain_s = min(plain_s, plain.decode_s / (len(plain.ids) - 1))
            with patch.object(DraftSession, "draft", always_right(truth, len(request.ids))):
                fast = decode(size).rows[0]
            assert fast.ids == plain.ids
            # All that the cycles made counts, as in τ: the last one's surplus too.
            fast_s, tau = min(fast_s, fast.decode_s / sum(fast.cycles)), fast.tau
        predicted, measured = tau * raw[1] / raw[size], plain_s / fast_s
        ok &= measured >= NEEDED * predicted
        print(f"  block {size}: τ {tau:.1f}, speed-up {measured:.2f}, equation 1 gives {predicted:.2f} from passes of "
              f"{1000 * raw[1]:.1f} ms (plain) and {1000 * raw[size]:.1f} ms (draft and verify): "
              f"{measured / predicted:.2f} of it (at least {NEEDED})", flush=True)  # fmt: skip
    return ok


def always_right(truth: list[int], n_prompt: int) -> Callable[[DraftSession, torch.Tensor, int], torch.Tensor]:
    """`DraftSession.draft` of one row that costs what it costs and is right."""
    honest = DraftSession.draft

    def draft(session: DraftSession, anchors_R: torch.Tensor, block_size: int) -> torch.Tensor:
        logits = honest(session, anchors_R, block_size)
        place = session.kv.longest - n_prompt
        right = torch.tensor(truth[place + 1 : place + block_size])
        return logits.scatter_(2, right[None, :, None], torch.inf)

    return draft
