"""A recipe: one YAML file that describes a run, checked before anything heavy starts.

    recipe = load_recipe(Path("recipes/demo.yaml"), ["train.lr=3e-4"])

A recipe is one frozen config per stage (`stages.config`) and three settings of its own. Unknown keys are
errors that name the nearest known one, a value of another kind is an error (the string "3" is no integer),
and all faults of a file are reported together. `Recipe.identity(stage)` is what the stage's output is made
of: identity fields only, so that execution settings never reach a fingerprint.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cache_schema.errors import CacheError
from cache_schema.object_client import parse_url
from cache_schema.storage import Location, is_remote
from pipeline.credentials import credential_faults, shown_setting
from pipeline.errors import RecipeError
from pipeline.yaml_text import parse_yaml
from stages.config import (
    CacheConfig,
    ConfigError,
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
        object.__setattr__(self, "run", _run_location(str(self.run)))

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


def _run_location(text: str) -> Location:
    """A URL as text, anything else as a path.

    Raises:
        RecipeError: a URL that nothing can open, or one with a credential in it; or no path.
    """
    if "\0" in text:
        raise RecipeError(f"run is {text!r}, but a path cannot hold a NUL")
    if is_remote(text):
        try:
            return parse_url(text).text
        except CacheError as error:
            raise RecipeError(f"run: {error}") from error
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", text):
        raise RecipeError("run (not shown) looks like a URL with a slash too few; expected s3://bucket/path, or a path")
    return Path("/" + text.removeprefix("file://").lstrip("/")) if text.startswith("file://") else Path(text)


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
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: the recipe cannot be read: {error}") from error
    raw = parse_yaml(text, where=str(path))
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: found {_kind(raw)}, expected a mapping with the keys {', '.join(_file_keys())}")
    for override in overrides:
        _apply(raw, override)
    where = " ".join([str(path), *(f"--set {shown_setting(o)}" for o in overrides)])
    secret = [*credential_faults(raw)]  # first of all: other faults show the values
    if secret:
        raise RecipeError("\n".join(f"{where}: {fault}" for fault in secret))
    faults = [*_unknown_keys(raw, Recipe, "")]
    values, more = _validated(raw)
    if faults or more:
        raise RecipeError("\n".join(f"{where}: {fault}" for fault in [*faults, *more]))
    values.setdefault("run", Path("runs") / values["name"])
    return Recipe(**values, base=path.parent)


# --- checking -----------------------------------------------------------------------------------------


@functools.cache
def _types(cls: type) -> dict[str, Any]:
    """Field name -> resolved type, `base` left out: it is no key of the file."""
    hints = typing.get_type_hints(cls)
    if cls is Recipe:
        hints["run"] = str  # `__post_init__` tells a path from a URL
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name != "base"}


def _file_keys() -> list[str]:
    return list(_types(Recipe))


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return next(a for a in typing.get_args(kind) if a is not types.NoneType)
    return kind


def _item_type(kind: Any) -> Any:
    """Type of the items when `kind` is `tuple[X, ...]`, else None."""
    kind = _without_none(kind)
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def _unknown_keys(raw: Any, kind: Any, prefix: str) -> Iterator[str]:
    """One fault per key of `raw` that the config `kind` does not have, sections and lists included."""
    kind = _without_none(kind)
    item = _item_type(kind)
    if item is not None and isinstance(raw, list):
        for i, value in enumerate(raw):
            yield from _unknown_keys(value, item, f"{prefix}{i}.")
    elif dataclasses.is_dataclass(kind) and isinstance(raw, dict):
        known = _types(typing.cast(type, kind))
        for key, value in raw.items():
            if key in known:
                yield from _unknown_keys(value, known[key], f"{prefix}{key}.")
            else:
                yield f"unknown key {prefix}{key}; {_nearest(str(key), prefix, known)}"


def _nearest(key: str, prefix: str, known: Mapping[str, Any]) -> str:
    """A hint at the key that was meant: the nearest here, or the same word in another section."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    for section, kind in _types(Recipe).items():
        if dataclasses.is_dataclass(kind) and key in _types(typing.cast(type, kind)):
            return f"did you mean {section}.{key}?"
    return f"known keys here are {', '.join(known)}"


def _validated(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The recipe's fields, and the faults of those that do not fit."""
    values: dict[str, Any] = {}
    faults: list[str] = []
    required = {f.name for f in dataclasses.fields(Recipe) if _has_no_default(f)} - {"run"}
    for name, kind in _types(Recipe).items():
        if name not in raw and name in required:
            faults.append(f"{name} is missing; expected {_expected_of(kind)}")
        if name not in raw:
            continue
        # An empty section, all its lines commented out, means its defaults.
        value = {} if raw[name] is None and dataclasses.is_dataclass(kind) else raw[name]
        try:
            # Strict JSON: a list is a tuple, an integer is a float, and nothing else is converted.
            values[name] = _adapter(kind).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            faults += [_fault(name, dict(e)) for e in error.errors(include_url=False)]
        except ConfigError as error:
            faults.append(str(error))
    return values, faults


@functools.cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(typing.cast(Any, kind))


def _has_no_default(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _expected_of(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        cls = typing.cast(type, kind)
        needed = [f.name for f in dataclasses.fields(cls) if _has_no_default(f)]
        return f"a section with at least {' and '.join(needed)}" if needed else "a section"
    return "a text" if kind is str else f"a value of type {kind}"


_EXPECTED = {
    "float_type": "a number",
    "int_type": "an integer",
    "string_type": "a text (quote it if YAML reads it as something else)",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping",
    "path_type": "a path",
}


def _fault(section: str, error: dict[str, Any]) -> str:
    key = ".".join([section, *map(str, error["loc"])])
    if error["type"] == "missing":
        return f"{key} is missing; it has no default"
    expected = _EXPECTED.get(error["type"]) or error.get("ctx", {}).get("expected") or error["msg"]
    return f"{key}: found {_kind(error['input'])}, expected {expected}"


def _kind(value: Any) -> str:
    """A value as a reader of YAML would name it."""
    if value is None:
        return "nothing (null)"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a text", list: "a list", dict: "a mapping"}
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({names.get(type(value), type(value).__name__)})"


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
    kind = _without_none(kind)
    if dataclasses.is_dataclass(kind):
        known = _types(typing.cast(type, kind))
        if key not in known:
            raise RecipeError(f"{where}: unknown key {done}{key}; {_nearest(key, done, known)}")
        return known[key]
    if kind in (str, int, float, bool, Path):
        raise RecipeError(f"{where}: {done.rstrip('.')} is a single value and has no {key!r} in it")
    return _item_type(kind)


def _section(at: Any, key: str, done: str, where: str) -> Any:
    if not isinstance(at, dict):
        raise RecipeError(f"{where}: {done.rstrip('.')} is {_kind(at)} in the recipe, so {key!r} cannot be set in it")
    if at.get(key) is None:
        at[key] = {}
    return at[key]


def _index(at: list[Any], key: str, done: str, where: str) -> int:
    if not key.isdecimal() or int(key) >= len(at):
        raise RecipeError(f"{where}: {done.rstrip('.')} has {len(at)} items, expected an index below that, not {key!r}")
    return int(key)
