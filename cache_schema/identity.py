"""What data on disk is made of: identities, their fingerprints, and the refusal to mix two of them.

A fingerprint is the SHA-256 of the canonical JSON of an identity's fields. Only what changes the data
is a field here; how fast, where and by how many workers it was made never enters (specification of the
cache, "Identity").
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cache_schema.errors import CacheError, FingerprintMismatch, SchemaVersion

CACHE_SCHEMA_VERSION = 1
"""Version of the cache layout that this code writes and reads."""
RESPONSES_SCHEMA_VERSION = 1
"""Version of the responses table that this code writes and reads."""
_READ_BYTES = 1 << 20
# Made once: `json.dumps` makes one anew for every call that has settings.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(obj: Any) -> str:
    """The one JSON text of a value: keys sorted, no blanks, non-ASCII as itself, no NaN.

    Raises:
        CacheError: the value has no JSON form, or a text in it holds half a surrogate pair (not UTF-8).
    """
    try:
        text = _CANONICAL.encode(obj)
        text.encode()
    except (TypeError, ValueError) as error:
        raise CacheError(f"a value of type {type(obj).__name__} has no canonical JSON form: {error}") from error
    return text


def sha256_bytes(data: bytes) -> str:
    """SHA-256 of bytes, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_json(obj: Any) -> str:
    """SHA-256 of the canonical JSON of a value."""
    return sha256_bytes(canonical_json(obj).encode())


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


class _Identity:
    """What both identities can do; each subclass is a frozen dataclass with a `schema_version` field."""

    __slots__ = ()
    _KNOWN_VERSION = 0
    _WHAT = ""

    def fingerprint(self) -> str:
        """SHA-256 over the canonical JSON of all fields."""
        return sha256_json(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON-able dict (tuples as lists)."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        return {f.name: _plain(getattr(self, f.name)) for f in fields}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The identity that `to_json` gave.

        Raises:
            SchemaVersion: written under a schema version that this code does not know.
            CacheError: a field is missing or unknown.
        """
        version = data.get("schema_version")
        if version != cls._KNOWN_VERSION:
            raise SchemaVersion(
                f"the {cls._WHAT} has schema version {version!r}, but this code reads {cls._KNOWN_VERSION}; "
                "use the release of this project that wrote it, or make it again"
            )
        names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if set(data) != names:
            raise CacheError(
                f"the identity of the {cls._WHAT} lacks {sorted(names - set(data))} and has unknown fields "
                f"{sorted(set(data) - names)}; it was damaged or written by another program"
            )
        return cls(**{name: _frozen(value) for name, value in data.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return value


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheIdentity(_Identity):
    """All that decides which bytes a feature cache holds."""

    schema_version: int = CACHE_SCHEMA_VERSION
    target_name: str
    """Hub id or name of the target."""
    target_revision: str | None
    target_weights_sha256: str
    target_dtype: str
    """What the target computed in."""
    tokenizer_sha256: str
    chat_template_sha256: str
    layer_ids: tuple[int, ...]
    """Feature layers, 0-based, strictly increasing."""
    layer_convention: str
    """What "the feature of layer i" means, in words."""
    feature_dtype: str
    """`bfloat16`, `float16`, `float8_e4m3fn` or `int8`."""
    feature_bits: int | None = None
    """Fineness of the codes, 4 to 8 bits; only for int8 and float8, where None means the finest."""
    feature_group: int | None = None
    """Channels that share a scale; only for float8 and int8, where None means all of them."""
    last_hidden: bool
    """Whether the state after the target's final norm is stored too."""
    max_length: int
    """Longest sample, in tokens."""
    responses_sha256: str
    """`ResponsesTable.responses_hash()` of the samples."""

    _KNOWN_VERSION = CACHE_SCHEMA_VERSION
    _WHAT = "feature cache"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(int(i) for i in self.layer_ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsesIdentity(_Identity):
    """All that decides which rows a responses table holds."""

    schema_version: int = RESPONSES_SCHEMA_VERSION
    target_name: str
    target_revision: str | None
    target_weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    chat_template_kwargs: dict[str, Any]
    """Passed to the chat template."""
    prompts_sha256: str
    """Hash of the accepted prompts."""
    settings: dict[str, Any]
    """Identity fields of the generation settings."""

    _KNOWN_VERSION = RESPONSES_SCHEMA_VERSION
    _WHAT = "responses table"


def require_same(found: _Identity, expected: _Identity, where: str | Path) -> None:
    """Refuse to go on when data on disk has another identity than this run.

    Args:
        found: what the data at `where` was made of.
        expected: what this run would make.
        where: file or folder, for the message.

    Raises:
        FingerprintMismatch: names each field that differs, with both values.
    """
    if found.fingerprint() == expected.fingerprint():
        return
    lines = _differences("", found.to_json(), expected.to_json())
    raise FingerprintMismatch(
        f"{where} was made under another identity than this run's:\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\nUse another folder, or the settings that made this one."
    )


def _differences(prefix: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for name in sorted(set(found) | set(expected)):
        a, b = found.get(name, "(absent)"), expected.get(name, "(absent)")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += _differences(f"{prefix}{name}.", a, b)
        elif a != b:
            lines.append(f"{prefix}{name}: found {a!r}, expected {b!r}")
    return lines
