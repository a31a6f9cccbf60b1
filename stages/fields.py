"""What the configuration classes are made of: fields that say of which kind they are, and checks of their values."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any

from cache_schema.errors import DFlashError


class ConfigError(DFlashError):
    """A setting has a value that no run could use. The message names field, value and remedy."""


def identity(default: Any = dataclasses.MISSING, *, factory: Any = dataclasses.MISSING) -> Any:
    """A field that changes what is computed; it enters the stage's fingerprint."""
    return _tagged("identity", default, factory)


def execution(default: Any = dataclasses.MISSING, *, factory: Any = dataclasses.MISSING) -> Any:
    """A field that changes only how, where or how fast; it never enters a fingerprint."""
    return _tagged("execution", default, factory)


def _tagged(kind: str, default: Any, factory: Any) -> Any:
    if factory is not dataclasses.MISSING:
        return field(default_factory=factory, metadata={"kind": kind})
    if default is not dataclasses.MISSING:
        return field(default=default, metadata={"kind": kind})
    return field(metadata={"kind": kind})


def identity_fields(config: Any) -> dict[str, Any]:
    """The identity fields of a config as JSON-able values, nested configs included."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        if f.metadata.get("kind", "identity") == "execution":
            continue
        out[f.name] = _plain(getattr(config, f.name))
    return out


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return identity_fields(value)
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


def require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}, but {rule}")


def require_threads(stage: str, threads: int | None) -> None:
    require(threads is None or threads > 0, f"{stage}.threads", threads, "it must be above 0, or absent")
