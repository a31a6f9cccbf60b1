"""How many samples a run has and how long they are: from the responses where they exist, else from the
sources of prompts, else by an assumption that is stated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cache_schema import names
from pipeline.errors import PipelineError
from pipeline.recipe import Recipe
from stages.config import SourceConfig

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
    measured = _measured(recipe.run / "responses", recipe.cache.max_length)
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


def _measured(folder: Path, max_length: int) -> SampleCounts | None:
    """Counts of a responses table, from the lengths in some of its parts; None when there is none yet."""
    try:
        plan = json.loads(names.responses_json(folder).read_bytes())
        markers = sorted(names.commits_dir(folder).glob("part-*.json"))
        parts = [json.loads(m.read_bytes()) for m in markers[:: max(1, len(markers) // _PARTS_READ)]]
        lengths = [_lengths(names.parts_dir(folder) / p["file"]) for p in parts if p["rows"]]
    except (FileNotFoundError, KeyError, ValueError):  # not begun, or nothing that could be counted
        return None
    if not lengths:
        return None
    prompt, response = (pa.concat_arrays([pair[i] for pair in lengths]).to_numpy().astype(float) for i in (0, 1))
    kept = (prompt + response).clip(max=max_length)
    return SampleCounts(
        n_samples=int(plan["n_samples"]),
        n_samples_source="responses of this run",
        mean_tokens=float(kept.mean()),
        mean_response_tokens=float((kept - prompt).clip(min=0).mean()),
        mean_tokens_source=f"measured on {len(kept)} responses of this run",
    )


def _lengths(part: Path) -> tuple[Any, Any]:
    table = pq.read_table(part, columns=["prompt_ids", "response_ids"])
    prompt, response = (pc.list_value_length(table[c]).combine_chunks() for c in ("prompt_ids", "response_ids"))
    return prompt, response


# --- sources of prompts -------------------------------------------------------------------------------


def _from_sources(recipe: Recipe) -> tuple[int, str]:
    counts = [_rows(source, recipe.base) for source in recipe.prompts.sources]
    exact = all(known for _, known in counts)
    return sum(
        n for n, _ in counts
    ), "rows of the sources" if exact else "limits of sources that are not on this machine"


def _rows(source: SourceConfig, base: Path) -> tuple[int, bool]:
    """Rows of a source, and whether they were counted rather than taken from its limit."""
    path = base / Path(source.path).expanduser()
    n = _rows_of_path(path, source.split)
    if n is not None:
        return min(n, source.limit or n), True
    if source.limit is not None:
        return source.limit, False
    raise PipelineError(
        f"prompt source {source.path}: its rows cannot be counted here (no file or saved dataset at {path}) and it has "
        f"no limit; say how many samples to plan for with --samples"
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
