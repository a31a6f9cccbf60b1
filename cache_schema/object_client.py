"""How an object store is reached: its URL, where the credentials come from, how long to try, and what its errors mean.

Credentials come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`) or a profile, never from the URL, so that
no recipe, log or error message ever carries one.
"""

from __future__ import annotations

import errno
import os
import re
import urllib.parse
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from cache_schema.errors import BadLocation, CacheError

CLOUDS = {"s3": "AWS", "s3a": "AWS", "gs": "GOOGLE", "az": "AZURE", "azure": "AZURE", "abfs": "AZURE", "abfss": "AZURE"}
"""Schemes, and the prefix of the environment variables that each is configured with."""
MEMORY = "memory"
"""Scheme of a store that lives in this process under a name; for tests."""
CONNECT_S = 10.0
STALL_S = 30.0
"""Longest wait for the next byte of an answer."""
REQUEST_S = 600.0
"""Longest request from start to end; leaves a sample of 128 MiB time on a slow line."""
RETRY_S = 60.0
"""No retry starts later than this after the first try: a store that is away is reported within about
`RETRY_S + STALL_S`."""
RETRIES = 10_000
"""Out of reach, so that time alone decides. Each pause is drawn from BACKOFF_S up to three times the last one, so their
number says little about their length: ten of them were over in 4 to 8 s where a store refused connections."""
BACKOFF_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectUrl:
    """A place in an object store.

    Attributes:
        scheme: one of `CLOUDS`, or `memory`.
        bucket: bucket, container, or the name of a store in memory.
        prefix: what all keys start with; empty or without slashes at its ends.
    """

    scheme: str
    bucket: str
    prefix: str

    @property
    def root(self) -> str:
        """The bucket's URL."""
        return f"{self.scheme}://{self.bucket}"

    @property
    def text(self) -> str:
        return f"{self.root}/{self.prefix}" if self.prefix else self.root


def parse_url(url: str) -> ObjectUrl:
    """Take a URL apart.

    Raises:
        BadLocation: a scheme that is not known, no bucket, or anything in it that may be a credential. The message
            does not repeat such a URL.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme not in CLOUDS and scheme != MEMORY:
        raise BadLocation(
            f"no storage for {scheme}:// URLs: runs and caches lie in folders or at "
            f"{', '.join(f'{s}://' for s in CLOUDS)} "
            "(another S3 server: s3://bucket/path, with its address in AWS_ENDPOINT_URL)"
        )
    bucket, _, prefix = rest.partition("/")
    user, at, _ = bucket.rpartition("@")
    container = scheme in ("abfs", "abfss") and ":" not in user  # abfss://container@account…/path
    if ":" in bucket or (at and not container) or set(rest) & set("?#"):
        raise BadLocation(
            f"a {scheme}:// URL (not shown) that carries a user, a password, a port or a query: give "
            f"{scheme}://bucket/path alone, with the credentials in the environment ({CLOUDS.get(scheme, 'AWS')}_…) "
            "or a profile and the server's address in AWS_ENDPOINT_URL"
        )
    prefix = prefix.strip("/")
    if not bucket or any(part in ("", ".", "..") for part in (prefix.split("/") if prefix else [])):
        raise BadLocation(f"{url!r} names no place in an object store: it has to look like {scheme}://bucket/path")
    return ObjectUrl(scheme=scheme, bucket=bucket, prefix=prefix)


def make_client(obstore: Any, place: ObjectUrl, prefix: str = "") -> Any:
    """An obstore client of the bucket (with `prefix`: of the place below it), from environment and profile.

    Raises:
        CacheError: the settings do not name a store that can be reached.
    """
    url = f"{place.root}/{urllib.parse.quote(prefix)}" if prefix else place.root
    cloud = CLOUDS[place.scheme]
    options: dict[str, Any] = {
        "client_options": {
            "allow_http": os.environ.get(f"{cloud}_ALLOW_HTTP", "").lower() in ("1", "true", "yes"),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "read_timeout": timedelta(seconds=STALL_S),
            "timeout": timedelta(seconds=REQUEST_S),
        },
        "retry_config": {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_S),
            "backoff": {
                "init_backoff": timedelta(seconds=BACKOFF_S),
                "max_backoff": timedelta(seconds=10),
                "base": 3,
            },
        },
    }
    if cloud == "AWS":
        _require_endpoint(place)
    if cloud == "AWS" and _wants_profile():
        options["credential_provider"] = _profile()
    try:
        return obstore.store.from_url(url, **options)
    except Exception as error:
        if _is_obstore(error):
            raise CacheError(f"{place.text} cannot be opened: {_essence(error)}; see its {cloud}_… settings") from None
        raise


def _require_endpoint(place: ObjectUrl) -> None:
    """Check the server's address, which obstore's library does not survive when it is no URL."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        value = os.environ.get(name)
        if value is not None and (not re.fullmatch(r"https?://[^/\s@]+(/\S*)?", value)):
            raise CacheError(
                f"{place.text} cannot be opened: {name} (not shown) has to be an address like http://127.0.0.1:9000 "
                "or https://s3.example.org, without a user or password; correct it or unset it"
            )


def _wants_profile() -> bool:
    """Keys in the environment win, as with the AWS tools; roles of a machine or a pod need no profile."""
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_SKIP_SIGNATURE" in os.environ:
        return False
    named = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SHARED_CREDENTIALS_FILE")
    return any(n in os.environ for n in named) or Path("~/.aws/credentials").expanduser().exists()


def _profile() -> Any:
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise CacheError(
            "the AWS credentials are in a profile (AWS_PROFILE or ~/.aws/credentials), and reading profiles needs "
            "boto3: pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    try:
        return Boto3CredentialProvider()
    except Exception as error:  # botocore's own errors, known only where boto3 is
        raise CacheError(f"the AWS profile gives no credentials: {error}") from error


def translated(error: Exception, where: str) -> Exception:
    """An error of obstore as what the protocol of the storage names; any other error as it is.

    Args:
        where: the object's URL.

    Returns:
        FileNotFoundError (no such object), FileExistsError (a conditional put that lost), EOFError (a range beyond
        the end), PermissionError, or an OSError that is a storage fault: EHOSTUNREACH (no answer, or a 5xx, after
        all retries) or EPROTO (an answer that is no success and no such case).
    """
    name = type(error).__name__
    if not _is_obstore(error):
        return error
    text, essence = str(error), _essence(error)
    found = re.search(r"status code: (\d{3})", text)
    status = int(found[1]) if found else None
    if "NoSuchBucket" in text or "ContainerNotFound" in text or "bucket does not exist" in text:
        return OSError(errno.EHOSTUNREACH, "the bucket does not exist (create it, or correct the URL)", where)
    if isinstance(error, FileNotFoundError) or name == "NotFoundError":
        return FileNotFoundError(errno.ENOENT, "there is no such object", where)
    if isinstance(error, FileExistsError) or name in ("AlreadyExistsError", "PreconditionError", "NotModifiedError"):
        return FileExistsError(errno.EEXIST, "the object is there already", where)
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        words = "no credentials were found in the environment or a profile, and this machine has no role of its own"
        return PermissionError(errno.EACCES, words, where)
    if name in ("PermissionDeniedError", "UnauthenticatedError") or isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, f"the object store refuses these credentials ({essence})", where)
    if status == 416:
        return EOFError(f"{where} ends before the range that was asked for")
    if "BadScheme" in text:
        return OSError(errno.EPROTO, "plain http is off unless AWS_ALLOW_HTTP=true is set", where)
    away = "HTTP error" in text if status is None else status in (408, 429) or (status >= 500 and status != 501)
    if away:
        return OSError(errno.EHOSTUNREACH, f"the object store cannot be reached ({essence})", where)
    return OSError(errno.EPROTO, f"the object store gave an answer that makes no sense here ({essence})", where)


def _is_obstore(error: Exception) -> bool:
    """By name, because a forked process has classes of its own; obstore also raises bare built-in errors."""
    ours = any(c.__name__ == "BaseError" and c.__module__.startswith("obstore") for c in type(error).__mro__)
    return ours or (isinstance(error, OSError) and error.errno is None)


def _essence(error: Exception) -> str:
    """What an error says, on one line and without the query of any URL (it can hold a signature)."""
    line = str(error).split("\n\nDebug source", 1)[0]
    code = re.search(r"<Code>(\w+)</Code>(?:\s*<Message>([^<]+)</Message>)?", line)
    line = re.sub(r"(\w://)[^/\s@]*@", r"\1", line)
    line = re.sub(r"\?\S*", "", re.sub(r":?\s*<\?xml.*", "", line, flags=re.DOTALL))
    line = " ".join(line.split())[:400]
    return f"{line}: {': '.join(filter(None, code.groups()))}" if code else line
