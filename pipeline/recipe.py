"""A recipe: one YAML file that describes a run, checked before anything heavy starts.

    recipe = load_recipe(Path("recipes/demo.yaml"), ["train.lr=3e-4"])

A recipe is one frozen config per stage (`stages.config`) and three settings of its own. Unknown keys are
errors that name the nearest known one, a value of another kind is an error (the string "3" is no integer),
and all faults of a file are reported together. `Recipe.identity(stage)` is what the stage's output is made
of: identity fields only, so that execution settings never reach a fingerprint.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cache_schema.errors import CacheError
from cache_schema.object_client import MEMORY, parse_url
from cache_schema.storage import Location, is_remote
from pipeline.checked_yaml import checked, fields_of, item_type, nearest, read_mapping, value_text, without_none
from pipeline.credentials import credential_faults, shown_setting
from pipeline.errors import RecipeError
from pipeline.yaml_text import parse_yaml
from stages.config import (
    CacheConfig,
    DrafterConfig,
    EvaluateConfig,
    ExportConfig,
    ExtractConfig,
    GenerateConfig,
    PromptsConfig,
    TargetConfig,
    TrainConfig,
    execution,
    identity,
    identity_fields,
)

ONE_PROCESS = (MEMORY,)
"""Schemes of stores that other processes do not see."""
STAGES = ("generate", "extract", "train", "evaluate", "export")

# What a stage's output is made of: each stage's sections include those of the stages that it reads.
_SECTIONS: dict[str, tuple[str, ...]] = {
    "generate": ("target", "prompts", "generate"),
    "extract": ("target", "prompts", "generate", "cache", "extract"),
    "train": ("target", "prompts", "generate", "cache", "extract", "drafter", "train"),
    "evaluate": ("target", "prompts", "generate", "cache", "extract", "drafter", "train", "evaluate"),
    "export": ("target", "prompts", "generate", "cache", "extract", "drafter", "train", "export"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A run's configuration; `load_recipe` makes one."""

    FILE_TYPES: ClassVar[dict[str, Any]] = {"run": str}
    """Of fields that are another type in the file."""

    name: str = execution()
    """Name of the run."""
    run: Location = execution()
    """Run folder: a path, relative to the working directory, or the URL of a place in an object store
    (s3://bucket/path, gs://…, az://…); `runs/<name>` unless given."""
    seed: int = identity(0)
    """Seed of everything random: sampling, anchors, initial weights, order."""
    target: TargetConfig = identity()
    prompts: PromptsConfig = identity()
    generate: GenerateConfig = identity(factory=GenerateConfig)
    cache: CacheConfig = identity(factory=CacheConfig)
    extract: ExtractConfig = identity(factory=ExtractConfig)
    drafter: DrafterConfig = identity(factory=DrafterConfig)
    train: TrainConfig = identity(factory=TrainConfig)
    evaluate: EvaluateConfig = identity()
    export: ExportConfig = identity(factory=ExportConfig)
    base: Path = execution(Path())
    """Folder of the recipe file; the paths of sources are relative to it. Not a key of the file."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise RecipeError(f"seed is {self.seed}, but it must be between 0 and 2^63 − 1")
        object.__setattr__(self, "run", run_location(str(self.run)))
        if self.cache.path is not None:
            _refuse_memory("cache.path", str(self.cache.path))

    def identity(self, stage: str) -> dict[str, Any]:
        """What `stage` computes from, as JSON-able values: the seed and the identity fields of its sections
        and of every stage before it. Names, folders and execution settings are not in it.

        Raises:
            RecipeError: `stage` is none of `STAGES`.
        """
        if stage not in _SECTIONS:
            raise RecipeError(f"unknown stage {stage!r}: stages are {', '.join(STAGES)}")
        return {"seed": self.seed} | {name: identity_fields(getattr(self, name)) for name in _SECTIONS[stage]}

    def to_json(self) -> dict[str, Any]:
        """Every setting, defaults filled in, as JSON-able values (`base` and `run` as strings)."""
        return {f.name: _jsonable(getattr(self, f.name)) for f in dataclasses.fields(self)}


def run_location(text: str) -> Location:
    """A URL as text, anything else as a path.

    Raises:
        RecipeError: a URL that nothing can open, one of a store that only one process sees, or one with a credential
            in it; or no path.
    """
    if "\0" in text:
        raise RecipeError(f"run is {text!r}, but a path cannot hold a NUL")
    if is_remote(text):
        _refuse_memory("run", text)
        try:
            return parse_url(text).text
        except CacheError as error:
            raise RecipeError(f"run: {error}") from error
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", text):
        raise RecipeError("run (not shown) looks like a URL with a slash too few; expected s3://bucket/path, or a path")
    return Path("/" + text.removeprefix("file://").lstrip("/")) if text.startswith("file://") else Path(text)


def _refuse_memory(name: str, text: str) -> None:
    scheme = text.partition("://")[0].lower()
    if "://" in text and scheme in ONE_PROCESS:
        raise RecipeError(
            f"{name} is {text!r}, but a store in memory belongs to one process, and workers have their own: expected a "
            "folder, or a place in an object store (s3://bucket/path, gs://…, az://…)"
        )


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: _jsonable(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_jsonable(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: the YAML file.
        overrides: settings as `dotted.key=value`, the value in YAML: `train.lr=3e-4`,
            `prompts.sources.0.limit=10`, `cache.layer_ids=[1, 8]`. They win over the file.

    Raises:
        RecipeError: the file cannot be read, is no mapping, or a key or value does not fit; one line per
            fault with file, dotted key, what was found and what was expected.
    """
    path = Path(path)
    raw = read_mapping(path, "recipe", Recipe)
    for override in overrides:
        _apply(raw, override)
    where = " ".join([str(path), *(f"--set {shown_setting(o)}" for o in overrides)])
    secret = [*credential_faults(raw)]  # first of all: other faults show the values
    if secret:
        raise RecipeError("\n".join(f"{where}: {fault}" for fault in secret))
    values = checked(raw, Recipe, where=where, optional=frozenset({"run"}))
    values.setdefault("run", Path("runs") / values["name"])
    return Recipe(**values, base=path.parent)


# --- overrides ----------------------------------------------------------------------------------------


def _apply(raw: dict[str, Any], override: str) -> None:
    """Set one `dotted.key=value` in the parsed file, in place."""
    dotted, equals, text = override.partition("=")
    dotted = dotted.strip()
    where = f"--set {shown_setting(override)}"
    if not equals or not all(dotted.split(".")):
        raise RecipeError(f"{where}: expected dotted.key=value, such as train.lr=3e-4")
    value = parse_yaml(text, where=where)
    at: Any = raw
    kind: Any = Recipe
    *parents, last = dotted.split(".")
    done = ""
    for key in parents:
        kind = _child(kind, key, done, where)
        at = at[_index(at, key, done, where)] if isinstance(at, list) else _section(at, key, done, where)
        done += f"{key}."
    _child(kind, last, done, where)
    if isinstance(at, list):
        at[_index(at, last, done, where)] = value
    else:
        at[last] = value


def _child(kind: Any, key: str, done: str, where: str) -> Any:
    """Type of `key` inside `kind`; None where anything goes.

    Raises:
        RecipeError: `kind` is a section without that key.
    """
    kind = without_none(kind)
    if dataclasses.is_dataclass(kind):
        known = fields_of(typing.cast(type, kind))
        if key not in known:
            raise RecipeError(f"{where}: unknown key {done}{key}; {nearest(key, done, known, Recipe)}")
        return known[key]
    if kind in (str, int, float, bool, Path):
        raise RecipeError(f"{where}: {done.rstrip('.')} is a single value and has no {key!r} in it")
    return item_type(kind)


def _section(at: Any, key: str, done: str, where: str) -> Any:
    if not isinstance(at, dict):
        raise RecipeError(
            f"{where}: {done.rstrip('.')} is {value_text(at)} in the recipe, so {key!r} cannot be set in it"
        )
    if at.get(key) is None:
        at[key] = {}
    return at[key]


def _index(at: list[Any], key: str, done: str, where: str) -> int:
    if not key.isdecimal() or int(key) >= len(at):
        raise RecipeError(f"{where}: {done.rstrip('.')} has {len(at)} items, expected an index below that, not {key!r}")
    return int(key)
