"""How many samples a run has and how long they are: from the responses where they exist, else from the
sources of prompts, else by an assumption that is stated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache_schema import names
from cache_schema.storage import Storage, join, open_storage
from pipeline.errors import PipelineError
from pipeline.folder import RESPONSES
from pipeline.recipe import Recipe
from stages.config import SourceConfig
from stages.mix import quotas

_ASSUMED_PROMPT = 256
_PARTS_READ = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCounts:
    """Numbers of a run's samples and where each comes from."""

    n_samples: int
    n_samples_source: str
    mean_tokens: float
    """Prompt and response together, cut to `cache.max_length`."""
    mean_response_tokens: float
    mean_tokens_source: str


def count_samples(recipe: Recipe, n_samples: int | None = None, mean_tokens: float | None = None) -> SampleCounts:
    """Number and mean length of the samples of a run; arguments win over what is found.

    Raises:
        PipelineError: the number is not known: a source is on the hub and has no limit.
    """
    measured = _measured(open_storage(join(recipe.run, RESPONSES)), recipe.cache.max_length)
    if n_samples is not None:
        count, count_source = n_samples, "given"
    elif measured is not None:
        count, count_source = measured.n_samples, measured.n_samples_source
    else:
        count, count_source = _from_sources(recipe)
    if mean_tokens is None and measured is not None:
        tokens, response, source = measured.mean_tokens, measured.mean_response_tokens, measured.mean_tokens_source
    else:
        tokens, response, source = _assumed(recipe, mean_tokens)
    return SampleCounts(
        n_samples=count,
        n_samples_source=count_source,
        mean_tokens=tokens,
        mean_response_tokens=response,
        mean_tokens_source=source,
    )


def _assumed(recipe: Recipe, mean_tokens: float | None) -> tuple[float, float, str]:
    longest = recipe.cache.max_length
    if mean_tokens is not None:
        tokens = min(mean_tokens, longest)
        prompt = min(_ASSUMED_PROMPT, tokens / 4)
        return tokens, tokens - prompt, f"given; {prompt:.0f} of them prompt, by assumption"
    new = recipe.generate.max_new_tokens
    tokens = min(_ASSUMED_PROMPT + new, longest)
    what = f"assumed: {_ASSUMED_PROMPT} prompt tokens and every answer at its limit of {new}, cut to {longest}"
    return tokens, max(tokens - _ASSUMED_PROMPT, tokens / 2), f"{what}; an upper bound for most data"


# --- responses that are there -------------------------------------------------------------------------


def _measured(storage: Storage, max_length: int) -> SampleCounts | None:
    """Counts of a responses table, from its markers and the lengths in some of its parts; None when there is none yet.

    A conversation may be several samples, or none: what the finished parts made of theirs is what the others will.
    """
    try:
        planned = int(_object(storage, names.RESPONSES_JSON)["n_samples"])
        keys = [key for key, _ in storage.list(names.COMMITS) if key.startswith(f"{names.COMMITS}/part-")]
        markers = [_object(storage, key) for key in keys if key.endswith(".json")]
        rows, done = (sum(int(m.get(name, m["rows"])) for m in markers) for name in ("rows", "planned"))
        full = [m for m in markers if m["rows"]]
        parts = full[:: max(1, len(full) // _PARTS_READ)]
        lengths = [_lengths(storage.read(names.part_key(p["file"]))) for p in parts]
    except (FileNotFoundError, KeyError, TypeError, ValueError):  # not begun, or nothing that could be counted
        return None
    if not lengths:
        return None
    total, prompt, answers = (np.concatenate([part[i] for part in lengths]).astype(float) for i in range(3))
    kept = total.clip(max=max_length)
    # What is cut off at the end takes of the answers; of those between which others speak, in proportion.
    share = ((kept - prompt).clip(min=0) / (total - prompt).clip(min=1)).clip(max=1)
    return SampleCounts(
        n_samples=round(planned * rows / done),
        n_samples_source="responses of this run",
        mean_tokens=float(kept.mean()),
        mean_response_tokens=float((answers * share).mean()),
        mean_tokens_source=f"measured on {len(kept)} responses of this run",
    )


def _object(storage: Storage, key: str) -> dict[str, Any]:
    value = json.loads(storage.read(key))
    if not isinstance(value, dict):
        raise ValueError(f"{storage.where(key)} holds {type(value).__name__}, expected a JSON object")
    return value


def _lengths(part: bytes) -> tuple[Any, Any, Any]:
    """Tokens of each sample: all, before the first answer, and of the answers."""
    table = pq.read_table(pa.BufferReader(part), columns=["prompt_ids", "response_ids", "loss_mask"])
    prompt, response = (pc.list_value_length(table[c]).to_numpy() for c in ("prompt_ids", "response_ids"))
    masks = table["loss_mask"].to_pylist()
    return prompt + response, prompt, np.array([sum(mask) for mask in masks], dtype=np.int64)


# --- sources of prompts -------------------------------------------------------------------------------


def _from_sources(recipe: Recipe) -> tuple[int, str]:
    """Samples, if every row is fit and every conversation becomes one sample for each of its answers."""
    prompts = recipe.prompts
    counts = [_rows(source, recipe.base) for source in prompts.sources]
    available = [min(n, source.cap or n) for (n, _), source in zip(counts, prompts.sources, strict=True)]
    weights = [source.weight for source in prompts.sources if source.weight is not None]
    if weights and all(available):
        available = quotas(available, weights, prompts.max_samples)
    n = min(sum(available), prompts.max_samples or sum(available))
    exact = all(known for _, known in counts)
    source = "rows of the sources" if exact else "limits of sources that are not on this machine"
    mixed = "" if n == sum(rows for rows, _ in counts) else ", in their mix"
    each = recipe.generate.answers_per_prompt
    return n * each, source + mixed + (f", {each} answers each" if each > 1 else "")


def _rows(source: SourceConfig, base: Path) -> tuple[int, bool]:
    """Rows of a source, and whether they were counted rather than taken from its limit."""
    path = base / Path(source.path).expanduser()
    n = _rows_of_path(path, source.split)
    if n is not None:
        return min(n, source.limit or n), True
    if source.limit is not None or source.cap is not None:
        return min(n for n in (source.limit, source.cap) if n is not None), False
    raise PipelineError(
        f"prompt source {source.path}: its rows cannot be counted here (no file or saved dataset at {path}) and it has "
        f"neither limit nor cap; say how many samples to plan for with --samples"
    )


def _rows_of_path(path: Path, split: str) -> int | None:
    if path.is_file():
        with path.open("rb") as file:
            if path.suffix == ".parquet" or file.read(4) == b"PAR1":
                return int(pq.read_metadata(path).num_rows)
            file.seek(0)
            return sum(1 for line in file if line.strip())
    info = next((p for p in (path / split / "dataset_info.json", path / "dataset_info.json") if p.is_file()), None)
    if info is None:
        return None
    try:
        return int(json.loads(info.read_bytes())["splits"][split]["num_examples"])
    except (KeyError, ValueError, TypeError):
        return None
