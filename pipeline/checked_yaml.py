"""A YAML file against the config that it describes: keys that nobody knows, values of another kind, what is missing.

All faults of a file are told together; each names the dotted key, what was found and what was expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.errors import RecipeError
from pipeline.yaml_text import parse_yaml
from stages.config import ConfigError


def read_mapping(path: Path, what: str, cls: type) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Args:
        path: of the file.
        what: it is, in words.
        cls: the config that it describes.

    Raises:
        RecipeError: it cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: the {what} cannot be read: {error}") from error
    raw = parse_yaml(text, where=str(path))
    if not isinstance(raw, dict):
        keys = ", ".join(fields_of(cls))
        raise RecipeError(f"{path}: found {value_text(raw)}, expected a mapping with the keys {keys}")
    return raw


def checked(raw: dict[str, Any], cls: type, *, where: str, optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The fields of a config, each of its kind.

    Args:
        raw: what the file holds.
        cls: the config.
        where: the file, for messages.
        optional: fields without a default that the caller fills in.

    Raises:
        RecipeError: keys or values do not fit; one line for each.
    """
    values, faults = _validated(raw, cls, optional)
    faults = [*_unknown_keys(raw, cls, "", cls), *faults]
    if faults:
        raise RecipeError("\n".join(f"{where}: {fault}" for fault in faults))
    return values


@functools.cache
def fields_of(cls: type) -> dict[str, Any]:
    """Field name -> type of its value in the file (`FILE_TYPES` of a class names those that differ), inherited fields
    last, `base` left out: it is no key of the file."""
    hints = typing.get_type_hints(cls) | getattr(cls, "FILE_TYPES", {})
    own = sorted(dataclasses.fields(cls), key=lambda f: f.name not in vars(cls).get("__annotations__", {}))
    return {f.name: hints[f.name] for f in own if f.name != "base"}


def without_none(kind: Any) -> Any:
    """`X` of `X | None`."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return next(a for a in typing.get_args(kind) if a is not types.NoneType)
    return kind


def item_type(kind: Any) -> Any:
    """Type of the items when `kind` is `tuple[X, ...]`, else None."""
    kind = without_none(kind)
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def _unknown_keys(raw: Any, kind: Any, prefix: str, root: type) -> Iterator[str]:
    """One fault per key of `raw` that the config `kind` does not have, sections and lists included."""
    kind = without_none(kind)
    item = item_type(kind)
    if item is not None and isinstance(raw, list):
        for i, value in enumerate(raw):
            yield from _unknown_keys(value, item, f"{prefix}{i}.", root)
    elif dataclasses.is_dataclass(kind) and isinstance(raw, dict):
        known = fields_of(typing.cast(type, kind))
        for key, value in raw.items():
            if key in known:
                yield from _unknown_keys(value, known[key], f"{prefix}{key}.", root)
            else:
                yield f"unknown key {prefix}{key}; {nearest(str(key), prefix, known, root)}"


def nearest(key: str, prefix: str, known: Mapping[str, Any], root: type) -> str:
    """A hint at the key that was meant: the nearest here, or the same word in another section of `root`."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    for section, kind in fields_of(root).items():
        if dataclasses.is_dataclass(kind) and key in fields_of(typing.cast(type, kind)):
            return f"did you mean {section}.{key}?"
    return f"known keys here are {', '.join(known)}"


def _validated(raw: dict[str, Any], cls: type, optional: frozenset[str]) -> tuple[dict[str, Any], list[str]]:
    """The fields, and the faults of those that do not fit."""
    values: dict[str, Any] = {}
    faults: list[str] = []
    required = {f.name for f in dataclasses.fields(cls) if _has_no_default(f)} - optional
    for name, kind in fields_of(cls).items():
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
    return f"{key}: found {value_text(error['input'])}, expected {expected}"


def value_text(value: Any) -> str:
    """A value as a reader of YAML would name it."""
    if value is None:
        return "nothing (null)"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a text", list: "a list", dict: "a mapping"}
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({names.get(type(value), type(value).__name__)})"
