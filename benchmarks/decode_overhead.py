"""What our loop costs: the speed-up with a drafter that is always right, beside equation 1 of the paper.

The stub does the whole work of a real drafter's pass and then answers with what the target will say. Equation 1: a
token takes (T_draft + T_verify) / τ, against T_target plainly.

The raw times are of bare passes (the forward pass, head and argmax; nothing is kept) over the loop's own caches, before
or after each cycle in turn. So both sums cover the same positions within the same moments, and their ratio is what the
loop adds, whatever else the machine does. Processor time of one thread is measured. The loop adds something to plain
decoding too, which equation 1 with raw times leaves out: a share above 1 means that it adds less to a drafted cycle, in
proportion, than to a plain one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.decode_identity import heldout_requests, load_models
from stages.clock import Clock
from stages.decode import Loop, Request, decode_batch
from stages.drafter import Drafter
from stages.sampling import GREEDY
from stages.sessions import DraftSession, target_logits
from stages.target import Target

NEEDED = 0.8
ROUNDS = 3
DRAFTED_EACH = 4
"""Drafted responses per plain one: they have fewer cycles."""
NEVER: frozenset[int] = frozenset()


@dataclass(slots=True)
class Spent:
    """Seconds of cycles in the loop and of bare passes beside them.

    Attributes:
        loop_s, raw_s: sums.
        cycles, tokens: that they gave.
    """

    loop_s: float = 0.0
    raw_s: float = 0.0
    cycles: int = 0
    tokens: int = 0

    @property
    def adds(self) -> float:
        """Time of the loop, by that of its bare passes."""
        return self.loop_s / self.raw_s


def run_overhead(model: str, folder: Path | None, sizes: Sequence[int], tokens: int) -> bool:
    """Print both speed-ups for each block size; says whether the loop reaches its share of what equation 1 gives."""
    torch.set_num_threads(1)
    target, drafter, _ = load_models(model, folder, "float32")
    request = heldout_requests(target, 1)[0]
    # A drafted response overshoots, and the last cycle drafts beyond that.
    truth = decode_batch(target, [request], max_new_tokens=tokens + 2 * max(sizes), stop_ids=NEVER).rows[0].ids
    rounds: list[dict[int, Spent]] = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        spent = {size: Spent() for size in (1, *sizes)}
        for size, sums in spent.items():
            for _ in range(1 if size == 1 else DRAFTED_EACH):
                _decode(target, drafter, request, size, tokens, truth, sums)
        rounds.append(spent)
    shown = [_print(size, rounds[1:]) for size in sizes]
    return all(shown)


def _print(size: int, rounds: Sequence[dict[int, Spent]]) -> bool:
    shares = [spent[1].adds / spent[size].adds for spent in rounds]
    share = statistics.median(shares)
    middle = rounds[shares.index(share)]
    plain, fast = middle[1], middle[size]
    tau = fast.tokens / fast.cycles
    step_s, pass_s = plain.raw_s / plain.cycles, fast.raw_s / fast.cycles
    speedup = plain.loop_s / plain.tokens * fast.tokens / fast.loop_s
    print(
        f"  block {size}: τ {tau:.1f}, speed-up {speedup:.2f}, equation 1 gives {tau * step_s / pass_s:.2f} from bare "
        f"passes of {1000 * step_s:.1f} ms (plain) and {1000 * pass_s:.1f} ms (draft and verify): {share:.3f} of it "
        f"({min(shares):.3f}–{max(shares):.3f} in {len(shares)} rounds; at least {NEEDED}). The loop takes "
        f"{plain.adds:.3f} of bare plain passes, {fast.adds:.3f} of drafted ones",
        flush=True,
    )
    return share >= NEEDED


def _decode(
    target: Target, drafter: Drafter, request: Request, size: int, tokens: int, truth: list[int], sums: Spent
) -> None:
    """One response, cycle by cycle, with bare passes in turn before and after."""
    honest = DraftSession.draft
    with torch.inference_mode(), patch.object(DraftSession, "draft", always_right(truth, len(request.ids))):
        loop = Loop(target, [request], drafter if size > 1 else None, size, tokens, NEVER, GREEDY)
        clock = Clock(target.device)
        loop.prefill()
        loop.dismiss(clock)

        def cycle() -> None:
            loop.cycle(clock)
            loop.dismiss(clock)
            clock.lap("rest")

        def bare() -> None:
            if loop.drafts is not None:
                honest(loop.drafts, loop.anchors_R, size).argmax(dim=-1).tolist()
            hidden, _ = loop.session.forward(loop.anchors_R[:, None].expand(-1, size))
            target_logits(target, hidden).argmax(dim=-1).tolist()

        first = False
        while loop.working:
            # What runs second finds warm memory, so they take turns.
            first = not first
            if first:
                sums.raw_s += _timed(bare)
            sums.loop_s += _timed(cycle)
            if not first:
                sums.raw_s += _timed(bare)
    row = loop.rows[0]
    assert row.ids[:tokens] == truth[:tokens]
    # All that the cycles made counts, as in τ: the last one's surplus too.
    sums.cycles += len(row.cycles)
    sums.tokens += sum(row.cycles)


def _timed(call: Callable[[], None]) -> float:
    mark = time.process_time()
    call()
    return time.process_time() - mark


def always_right(truth: list[int], n_prompt: int) -> Callable[[DraftSession, torch.Tensor, int], torch.Tensor]:
    """`DraftSession.draft` of one row that costs what it costs and is right."""
    honest = DraftSession.draft

    def draft(session: DraftSession, anchors_R: torch.Tensor, block_size: int) -> torch.Tensor:
        logits = honest(session, anchors_R, block_size)
        place = session.kv.longest - n_prompt
        right = torch.tensor(truth[place + 1 : place + block_size])
        return logits.scatter_(2, right[None, :, None], torch.inf)

    return draft
