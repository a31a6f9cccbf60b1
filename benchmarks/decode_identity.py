"""Is the output of speculative decoding that of plain decoding, on a real model, at every block and batch size?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from stages.chat import end_of_turn_ids, render_prompt
from stages.checkpoint_format import load_drafter
from stages.config import DrafterConfig, TargetConfig
from stages.decode import Decoded, Request, decode_batch
from stages.drafter import Drafter, spec_for_target
from stages.evaluate import explain_difference, first_difference
from stages.target import DTYPES, Target, choose_mask_token, load_target

HELDOUT = Path(__file__).parents[1] / "recipes" / "demo" / "heldout.jsonl"


def load_models(model: str, folder: Path | None, dtype: str) -> tuple[Target, Drafter, frozenset[int]]:
    """Target, drafter (an untrained one without a folder) and stop ids, in a dtype."""
    target = load_target(TargetConfig(model=model), dtype=dtype)
    if folder is not None:
        drafter = load_drafter(folder)
    else:
        mask = choose_mask_token(target.tokenizer, target.shape.vocab_size).id
        ids = target.shape.layer_ids(5, None)
        spec = spec_for_target(DrafterConfig(n_layers=3), target.config, feature_layer_ids=ids, mask_token_id=mask)
        drafter = Drafter(spec, seed=0)
    drafter = drafter.to(DTYPES[dtype]).eval().requires_grad_(False)
    stop_ids = end_of_turn_ids(target.tokenizer, getattr(target.model, "generation_config", None))
    return target, drafter, stop_ids


def heldout_requests(target: Target, n: int) -> list[Request]:
    """The demo's held-out prompts, as the target is asked."""
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()][:n]
    messages = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    return [Request(row["id"], render_prompt(target.tokenizer, m)) for row, m in zip(rows, messages, strict=True)]


def in_batches(requests: Sequence[Request], n: int) -> Iterator[list[Request]]:
    for start in range(0, len(requests), n):
        yield list(requests[start : start + n])


def run_identity(
    model: str, folder: Path | None, dtype: str, sizes: Sequence[int], batches: Sequence[int], tokens: int, prompts: int
) -> bool:
    """Every prompt at every block and batch size against plain decoding of that prompt alone; prints each difference.

    Returns:
        Whether all outputs are identical in float32, or every difference is a tie in a lower dtype.
    """
    target, drafter, stop_ids = load_models(model, folder, dtype)
    requests = heldout_requests(target, prompts)
    started = time.perf_counter()
    plain: dict[str, Decoded] = {}
    for number, request in enumerate(requests):
        _say_progress(f"{dtype}, plain", number, len(requests))
        one = decode_batch(target, [request], max_new_tokens=tokens, stop_ids=stop_ids)
        plain[request.sample_id] = one.rows[0]
    print(f"{dtype}: {len(plain)} prompts, {sum(len(p.ids) for p in plain.values())} tokens by plain decoding in "
          f"{time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
    ok = True
    for batch in batches:
        for size in (*(() if batch == 1 else (1,)), *sizes):
            ok &= _compare(target, drafter, requests, plain, size, batch, tokens, stop_ids)
    return ok


def _say_progress(name: str, done: int, n: int) -> None:
    """Where it is, on one line of a terminal; nothing in a log."""
    if sys.stderr.isatty():
        print(f"\r\033[K{name} {done} of {n}" if name else "\r\033[K", end="", file=sys.stderr, flush=True)


def _compare(
    target: Target, drafter: Drafter, requests: list[Request], plain: dict[str, Decoded], size: int, batch: int,
    tokens: int, stop_ids: frozenset[int],
) -> bool:
    mark = time.process_time()
    same, ties, taus, others = 0, 0, [], []
    name = f"{str(target.dtype).removeprefix('torch.')}, block {size}, batch {batch}"
    for number, together in enumerate(in_batches(requests, batch)):
        _say_progress(name, number * batch, len(requests))
        found = decode_batch(target, together, drafter=drafter if size > 1 else None, block_size=size,
                             max_new_tokens=tokens, stop_ids=stop_ids)  # fmt: skip
        for request, row in zip(together, found.rows, strict=True):
            taus.append(row.tau)
            expected = plain[request.sample_id].ids
            difference = first_difference(request.sample_id, expected, row.ids)
            if difference is None:
                same += 1
                continue
            why = explain_difference(target, request.ids, expected, row.ids, difference["position"])
            ties += why["tie"]
            others.append((request.sample_id, difference["position"], why))
    _say_progress("", 0, 0)
    print(f"  {name}: {same} of {len(requests)} identical, {ties} ties, {len(others) - ties} unexplained; "
          f"τ {sum(taus) / len(taus):.2f}; {time.process_time() - mark:.0f} s of CPU", flush=True)  # fmt: skip
    for sample_id, position, why in others:
        gap = "–" if why["gap"] is None else f"{why['gap']:.4f} (bound {why['bound']:.4f})"
        kind = "tie" if why["tie"] else "NOT EXPLAINED"
        print(f"    {kind}: {sample_id} at token {position}, gap {gap}", flush=True)
    return len(others) == (0 if target.dtype == torch.float32 else ties)
