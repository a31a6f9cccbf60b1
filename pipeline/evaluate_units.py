"""What evaluation decodes, unit by unit, and the records of units that are done: a run may stop at any moment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cache_schema.identity import sha256_json
from cache_schema.storage import Storage, open_storage
from pipeline.progress import Progress
from pipeline.run import Run, read_object, say_resume

PROMPTS = "prompts"
"""Where the records of finished units lie, in the folder of evaluation."""
Key = tuple[str, int | str, float, int]
"""Drafter, block size (or `schedule`), temperature, batch size: one column of the results."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Prompts that are decoded together in one setting, with every variant.

    Attributes:
        temperature, batch_size: the setting.
        prompts: of type `EvalPrompt`, at most `batch_size`.
        variants: of type `Variant`.
    """

    temperature: float
    batch_size: int
    prompts: tuple[Any, ...]
    variants: tuple[Any, ...]

    @property
    def key(self) -> str:
        """Of its records, in the folder of evaluation."""
        names = [v.key for v in self.variants]
        ids = [p.sample_id for p in self.prompts]
        return f"{PROMPTS}/{sha256_json([self.temperature, self.batch_size, names, ids])[:32]}.json"

    def finished(self, storage: Storage) -> dict[str, Any] | None:
        """The unit's records by variant, or None when it has to be decoded (again)."""
        found = read_object(storage, self.key)
        if found is None or found.keys() != {v.key for v in self.variants}:
            return None
        ids = [p.sample_id for p in self.prompts]
        return found if all(_answers(record) == ids for record in found.values()) else None


def _answers(record: Any) -> list[Any] | None:
    """Ids of a record's responses in order, or None when it is no record."""
    rows = record.get("responses") if isinstance(record, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return None
    return [row.get("sample_id") for row in rows]


def plan_units(
    prompts: Sequence[Any], temperatures: Sequence[float], batch_sizes: Sequence[int], main: Sequence[Any],
    others: Sequence[Any],
) -> list[Unit]:
    """Every setting's units; the first setting measures the variants `main`, the others `others`."""
    units = []
    for number, (batch_size, temperature) in enumerate((b, t) for b in batch_sizes for t in temperatures):
        variants = tuple(main if number == 0 else others)
        for start in range(0, len(prompts), batch_size):
            together = tuple(prompts[start : start + batch_size])
            units.append(Unit(temperature, batch_size, together, variants))
    return units


@dataclass
class Bench:
    """Everything that decoding a unit needs.

    Attributes:
        run: whose folder the records lie in.
        target, drafters, stop_ids, max_new_tokens: see `stages.evaluate`.
    """

    run: Run
    target: Any
    drafters: dict[str, Any]
    stop_ids: frozenset[int]
    max_new_tokens: int
    storage: Storage = field(init=False)

    def __post_init__(self) -> None:
        self.storage = open_storage(self.run.folder.evaluate)

    def decode(self, units: Sequence[Unit]) -> dict[Key, list[dict[str, Any]]]:
        """Decode what is not done yet; returns the records of each column, in order."""
        from stages.evaluate import warm_up

        finished = [unit.finished(self.storage) for unit in units]
        total = sum(len(u.prompts) for u in units)
        have = sum(len(u.prompts) for u, records in zip(units, finished, strict=True) if records is not None)
        self.run.folder.begin("evaluate", len(units))
        say_resume(self.run, "evaluate", have, total, "prompts")
        if have < total:
            warm_up(self.target, self.drafters, units[0].prompts[0], self.stop_ids)
        columns: dict[Key, list[dict[str, Any]]] = {}
        with Progress(total, "prompts", "evaluate", done=have) as progress:
            for unit, records in zip(units, finished, strict=True):
                if records is None:
                    records = self._decode(unit)
                    progress.update(len(unit.prompts))
                for variant in unit.variants:
                    key = (variant.drafter, variant.block_size, unit.temperature, unit.batch_size)
                    columns.setdefault(key, []).append(records[variant.key])
        return columns

    def _decode(self, unit: Unit) -> dict[str, Any]:
        from stages.evaluate import evaluate_unit
        from stages.sampling import Sampling

        config = self.run.recipe.evaluate
        sampling = Sampling(temperature=unit.temperature, top_k=config.top_k, top_p=config.top_p,
                            drafts=config.drafts, seed=self.run.recipe.seed)  # fmt: skip
        records = evaluate_unit(
            self.target, self.drafters, unit.variants, unit.prompts, max_new_tokens=self.max_new_tokens,
            stop_ids=self.stop_ids, sampling=sampling,
        )  # fmt: skip
        self.storage.replace(unit.key, json.dumps(records).encode())
        return records
