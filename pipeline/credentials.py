"""Credentials have no place in a recipe: what is taken for one, and how a message is rid of it.

A recipe is copied into the run folder, the report and the model card, and errors quote it. So a URL with a user, a
password or a signed query is refused, and the refusal names the key, not the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_USER = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*:/{1,2})[^/\s@'\"]*@")
_QUERY = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^\s?'\"]*)\?[^\s'\"]*")
_SIGNED = re.compile(
    r"://[^\s'\"]*[?&](x-(amz|goog|ms)-[a-z-]+|sig|signature|(access_?|auth_?)?token|(api_?|access_?)?key|secret|password)=",
    re.IGNORECASE,
)
_ABFS = re.compile(r"\babfss?://[^:/\s@'\"]*@")
"""`abfss://container@account…`: no user stands before this @."""
_SECRET_KEY = re.compile(
    r"(^|_|\.)(token|secret|password|passwd|credentials?|(api|access|secret)_?key)$", re.IGNORECASE
)
_FREE = ("generate.vllm_args.",)
"""Sections whose keys are another library's, which may take credentials there."""


def redacted(error: object) -> str:
    """A message without the user, password and query of any URL in it: it may quote a recipe or an override."""
    return _QUERY.sub(r"\1?…", _USER.sub(r"\1…@", str(error)))


def shown_setting(setting: str) -> str:
    """A `dotted.key=value` for messages."""
    key, equals, _ = setting.partition("=")
    secret = equals and bool(_SECRET_KEY.search(key.strip()))  # one that no section has is named in an error
    return f"{redacted(key)}=…" if secret else redacted(setting)


def _is_secret(key: str) -> bool:
    return key.startswith(_FREE) and bool(_SECRET_KEY.search(key))


def carries_credential(text: str) -> bool:
    """Whether a text holds a URL with a user or password, or with a signature or key in its query."""
    return bool(_USER.search(_ABFS.sub("", text)) or _SIGNED.search(text))


def credential_faults(raw: Any, prefix: str = "") -> Iterator[str]:
    """One line for each value of a parsed recipe that holds a credential; the value is not in it.

    Args:
        raw: the recipe, or a part of it.
        prefix: the dotted key of that part, with a dot at its end.
    """
    key = prefix.rstrip(".")
    if isinstance(raw, dict):
        for name, value in raw.items():
            yield from credential_faults(value, f"{prefix}{redacted(name)}.")
    elif isinstance(raw, list):
        for i, value in enumerate(raw):
            yield from credential_faults(value, f"{prefix}{i}.")
    elif isinstance(raw, str) and carries_credential(raw):
        yield (
            f"{key} (not shown) is a URL with a user, a password or a signature in it, and a recipe is copied into the "
            "run's folder; give the URL alone, and the credentials in the environment (AWS_…, HF_TOKEN, "
            "generate.api_key_env)"
        )
    elif isinstance(raw, str) and _is_secret(key):
        yield (
            f"{key} (not shown) is a credential, and a recipe is copied into the run's folder; set it in the "
            "environment (HF_TOKEN, …)"
        )
