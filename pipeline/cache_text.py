"""The text of cached token ids: the target's tokenizer, found on this machine and proved to be the right one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from cache_schema.errors import CacheError, DFlashError
from cache_schema.identity import CacheIdentity


def find_tokenizer(identity: CacheIdentity, given: str | None) -> tuple[Any | None, str]:
    """The tokenizer that a cache's ids belong to, without any network.

    Args:
        identity: of the cache.
        given: a folder or name from the user; None looks for the identity's target.

    Returns:
        The tokenizer and an empty text; or None, and why there is no text.

    Raises:
        CacheError: the given tokenizer is not the cache's; names both hashes.
        TargetError: the given one cannot be loaded.
    """
    if given is not None:
        tokenizer = _load(str(_local(given, None) or given))
        _require_same(identity, tokenizer, given)
        return tokenizer, ""
    folder = _local(identity.target_name, identity.target_revision)
    if folder is None:
        return None, f"no text: the target {identity.target_name!r} is not on this machine; give --tokenizer FOLDER"
    try:
        tokenizer = _load(str(folder))
        _require_same(identity, tokenizer, str(folder))
    except DFlashError as error:
        return None, f"no text: {error}"
    return tokenizer, ""


def _local(name: str, revision: str | None) -> Path | None:
    """The folder of a model that is on this machine already: a folder, the converted demo target, or the hub's."""
    from stages.smollm2 import FOLDER, PACKAGE, default_cache_root

    folder = default_cache_root() / FOLDER if name == PACKAGE else Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name == PACKAGE or name.startswith(("/", ".", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "tokenizer_config.json", revision=revision)
    except ValueError:  # no hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def _load(folder: str) -> Any:
    from stages.config import TargetConfig
    from stages.target import load_tokenizer

    return load_tokenizer(TargetConfig(model=folder))


def _require_same(identity: CacheIdentity, tokenizer: Any, where: str) -> None:
    from stages.target import hash_tokenizer

    found = hash_tokenizer(tokenizer)
    if found != identity.tokenizer_sha256:
        raise CacheError(
            f"the tokenizer of {where} has SHA-256 {found}, but the cache was made with {identity.tokenizer_sha256} "
            f"(target {identity.target_name!r}); its text would be wrong, give the target's own with --tokenizer"
        )


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token by itself; a token that is part of a character gives U+FFFD."""
    return [_decode(tokenizer, [i]) for i in ids]


def runs(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[tuple[str, bool]]:
    """The text in runs of tokens that are supervised or are not: (text, supervised)."""
    pairs = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [(_decode(tokenizer, [i for i, _ in run]), supervised) for supervised, run in pairs]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
