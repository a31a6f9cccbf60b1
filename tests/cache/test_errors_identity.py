from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import pytest

from cache_schema import errors
from cache_schema.errors import CacheError, DFlashError, FingerprintMismatch, SchemaVersion, ShardNotCommitted
from cache_schema.identity import CacheIdentity, ResponsesIdentity, canonical_json, require_same
from tests.cache.builders import IDENTITY, RESPONSES_IDENTITY

ERRORS = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, DFlashError)]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda e: e.__name__)
def test_error_survives_pickling(kind: type[DFlashError]) -> None:
    error = pickle.loads(pickle.dumps(kind("shard-00001: what, and what to do")))  # noqa: S301
    assert type(error) is kind
    assert str(error) == "shard-00001: what, and what to do"


def test_not_committed_is_also_file_not_found() -> None:
    assert issubclass(ShardNotCommitted, FileNotFoundError)
    assert issubclass(ShardNotCommitted, CacheError)


def test_canonical_json_does_not_depend_on_key_order() -> None:
    assert canonical_json({"b": [1, {"y": 2, "x": "ü"}], "a": None}) == '{"a":null,"b":[1,{"x":"ü","y":2}]}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [math.nan, {"x": {1, 2}}, "\ud800"])
def test_canonical_json_refuses_what_has_no_json_form(value: object) -> None:
    with pytest.raises(CacheError, match="canonical JSON"):
        canonical_json(value)


@pytest.mark.parametrize("identity", [IDENTITY, RESPONSES_IDENTITY], ids=["cache", "responses"])
def test_identity_round_trip_through_json(identity: CacheIdentity | ResponsesIdentity) -> None:
    again = type(identity).from_json(json.loads(json.dumps(identity.to_json())))
    assert again == identity
    assert again.fingerprint() == identity.fingerprint()
    assert pickle.loads(pickle.dumps(identity)) == identity  # noqa: S301


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(CacheIdentity)])
def test_every_field_enters_the_fingerprint_and_is_named_when_it_differs(name: str) -> None:
    """Case 6: a run under another identity is refused; the message names field and both values."""
    old = getattr(IDENTITY, name)
    new: Any = {"layer_ids": (1, 4, 8), "last_hidden": True, "feature_group": 64}.get(name, f"{old}x")
    if isinstance(old, int) and not isinstance(old, bool):
        new = old + 1
    other = dataclasses.replace(IDENTITY, **{name: new})
    assert other.fingerprint() != IDENTITY.fingerprint()
    with pytest.raises(FingerprintMismatch) as caught:
        require_same(IDENTITY, other, "/runs/x/cache")
    lines = [line for line in str(caught.value).splitlines() if "found" in line]
    assert len(lines) == 1
    found, expected = (repr(list(v) if isinstance(v, tuple) else v) for v in (old, new))
    assert lines[0].strip() == f"{name}: found {found}, expected {expected}"
    assert "/runs/x/cache" in str(caught.value)


def test_nested_difference_is_named() -> None:
    other = dataclasses.replace(RESPONSES_IDENTITY, settings={"max_new_tokens": 32, "temperature": 0.0})
    with pytest.raises(FingerprintMismatch, match=r"settings\.max_new_tokens: found 16, expected 32"):
        require_same(RESPONSES_IDENTITY, other, "here")


def test_same_identity_is_accepted() -> None:
    require_same(IDENTITY, dataclasses.replace(IDENTITY), "here")


def test_unknown_schema_version_is_refused() -> None:
    with pytest.raises(SchemaVersion, match="schema version 2"):
        CacheIdentity.from_json(IDENTITY.to_json() | {"schema_version": 2})


def test_missing_and_unknown_fields_are_named() -> None:
    data = IDENTITY.to_json()
    del data["max_length"]
    with pytest.raises(CacheError, match=r"max_length.*colour"):
        CacheIdentity.from_json(data | {"colour": 1})
