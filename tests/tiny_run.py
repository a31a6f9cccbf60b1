"""A tiny run by its recipe: target, prompts and settings, as tests and benchmarks of whole pipelines start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.tiny import make_target, make_tokenizer, save_target

SETTINGS: dict[str, dict[str, Any]] = {
    "target": {"dtype": "float32"},
    "prompts": {"sources": [{"path": "train.jsonl"}]},
    "generate": {"max_new_tokens": 12, "part_samples": 4, "batch_size": 4, "threads": 1},
    "cache": {"n_layers": 3, "shard_bytes": 60_000},
    "extract": {"threads": 1},
    "drafter": {"n_layers": 2, "block_size": 4},
    "train": {
        "epochs": 6, "batch_samples": 4, "micro_samples": 2, "anchors": 4, "heldout_share": 0.1, "bf16": False,
        "checkpoint_every": 4, "heldout_every": 30, "log_every": 1, "threads": 1,
    },
    "evaluate": {"sources": [{"path": "held.jsonl"}], "max_new_tokens": 12, "threads": 1},
}  # fmt: skip
"""Of every run, unless it says otherwise."""


def make_home(folder: Path, n_train: int, n_held: int, *, name: str = "tiny", **sections: dict[str, Any]) -> Path:
    """Make a folder with a target, so many prompts to train on and to evaluate with, and the recipe of a run.

    Args:
        folder: where.
        n_train, n_held: prompts.
        name: of the run.
        sections: settings that differ from `SETTINGS`, by section.

    Returns:
        The recipe, `r.yaml` in the folder.
    """
    save_target(folder / "target", make_target(0, make_tokenizer(), vocab_size=300))
    write_prompts(folder / "train.jsonl", n_train, "Count from {} up.")
    write_prompts(folder / "held.jsonl", n_held, "Count down from {}.")
    given = {"target": {"model": str(folder / "target")}} | sections
    recipe = {"name": name} | {key: settings | given.get(key, {}) for key, settings in SETTINGS.items()}
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "r.yaml"


def write_prompts(path: Path, n: int, text: str) -> None:
    """A file of prompts, in two categories; `text` has a place for the number."""
    rows = [{"id": f"{path.stem}-{i}", "prompt": text.format(i), "category": f"c{i % 2}"} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
