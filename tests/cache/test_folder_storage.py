"""What a local folder must not hide: folders that cannot be read, objects that cannot be removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from cache_schema.errors import CacheError
from cache_schema.object_client import make_client, parse_url
from cache_schema.storage import FolderStorage


def deny(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", "x")

    monkeypatch.setattr(os, name, denied)


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FolderStorage(tmp_path)
    storage.create("commits/a.json", b"x")
    assert list(storage.list("nothing-here")) == []
    deny(monkeypatch, "scandir")
    with pytest.raises(PermissionError):
        list(storage.list("commits"))


def test_what_cannot_be_removed_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FolderStorage(tmp_path)
    storage.create("shards/g/a/b", b"x")
    storage.delete_tree("shards/missing")
    with monkeypatch.context() as patched:
        deny(patched, "unlink")
        with pytest.raises(PermissionError):
            storage.delete_tree("shards/g")
    storage.delete_tree("shards/g")
    assert not (tmp_path / "shards" / "g").exists()


@pytest.mark.parametrize("address", ["notaurl", "http://user:hush@127.0.0.1:1", "127.0.0.1:9000"])
def test_an_address_that_is_no_url_is_refused_unseen(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    obstore = pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(CacheError, match=r"AWS_ENDPOINT_URL \(not shown\) has to be an address") as caught:
        make_client(obstore, parse_url("s3://bucket/c"))
    assert "hush" not in str(caught.value)
