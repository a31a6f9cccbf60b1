"""The plan of a cache: which sample belongs to which shard.

A pure function of the samples (in the order of the responses table), their lengths and the wanted size of
a shard; never of the number of workers. Shards are therefore ranges of the sample list: a plan is the list
plus the place where each shard begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache_schema import names
from cache_schema.errors import CacheError, UnknownName
from cache_schema.identity import canonical_json, sha256_bytes
from cache_schema.storage import Storage

_SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("n_tokens", pa.int64(), nullable=False),
    ]
)
_SHA_KEY = b"plan_sha256"


class ShardPlan:
    """Samples in order, divided into shards.

    Args:
        sample_ids: all samples, in the order of the responses table.
        n_tokens: tokens of each that the cache will hold.
        starts: index of the first sample of each shard; rising, the first is 0.

    Raises:
        CacheError: ids repeat or cannot be stored, a sample has no token, or the lengths disagree.
    """

    def __init__(self, sample_ids: Sequence[str], n_tokens: Sequence[int] | NDArray[np.int64], starts: Sequence[int]):
        self._ids = list(sample_ids)
        self._tokens: NDArray[np.int64] = np.asarray(n_tokens, np.int64).reshape(-1)
        self._bounds: NDArray[np.int64] = np.asarray([*starts, len(self._ids)], np.int64)
        self._index = {sample_id: i for i, sample_id in enumerate(self._ids)}
        self._check()

    def _check(self) -> None:
        if not _surely_storable(self._ids):
            for sample_id in self._ids:
                names.require_sample_id(sample_id)
        if len(self._index) != len(self._ids):
            twice = next(s for i, s in enumerate(self._ids) if self._index[s] != i)
            raise CacheError(f"sample {twice!r} is planned twice; sample ids must be unique")
        if len(self._tokens) != len(self._ids):
            raise CacheError(
                f"the plan has {len(self._ids)} sample ids and {len(self._tokens)} lengths; expected as many"
            )
        if (self._tokens < 1).any():
            empty = int(np.argmax(self._tokens < 1))
            raise CacheError(
                f"sample {self._ids[empty]!r} has {self._tokens[empty]} tokens; a planned sample has at least 1"
            )
        if self._bounds[0] != 0 or (len(self._ids) > 0 and bool((np.diff(self._bounds) < 1).any())):
            raise CacheError(f"shards start at samples {self._bounds[:-1].tolist()[:5]}…; expected rising from 0")

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardPlan) and self.sha == other.sha

    __hash__ = None  # type: ignore[assignment]  # compared by content, never a key

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return len(self._bounds) - 1

    @property
    def sample_ids(self) -> list[str]:
        """All samples, in order."""
        return list(self._ids)

    def shards(self) -> list[str]:
        """Names of all shards, in order."""
        return [names.shard_name(i) for i in range(self.n_shards)]

    def __contains__(self, shard: str) -> bool:
        """Whether a shard is planned."""
        return names.shard_index(shard) < self.n_shards

    def samples(self, shard: str) -> list[str]:
        """The ids of a shard's samples, in order.

        Raises:
            CacheError: no such shard in the plan.
        """
        start, stop = self._range(shard)
        return self._ids[start:stop]

    def lengths(self, shard: str) -> NDArray[np.int64]:
        """Planned tokens of each sample of a shard, [samples] int64."""
        start, stop = self._range(shard)
        return self._tokens[start:stop].copy()

    def n_tokens(self, sample_id: str) -> int:
        """Planned tokens of a sample."""
        return int(self._tokens[self._position(sample_id)])

    def shard_of(self, sample_id: str) -> str:
        """The shard that a sample belongs to.

        Raises:
            CacheError: the sample is not in the plan.
        """
        return names.shard_name(int(np.searchsorted(self._bounds, self._position(sample_id), side="right")) - 1)

    def _position(self, sample_id: str) -> int:
        try:
            return self._index[sample_id]
        except KeyError:
            raise CacheError(f"sample {sample_id!r} is not in the plan, which has {len(self)} samples") from None

    def _range(self, shard: str) -> tuple[int, int]:
        index = names.shard_index(shard)
        if index >= self.n_shards:
            raise UnknownName(f"{shard} is not in the plan, which has {self.n_shards} shards")
        return int(self._bounds[index]), int(self._bounds[index + 1])

    @property
    def samples_sha(self) -> str:
        """SHA-256 over ids and lengths in order: the same for every size of shards."""
        return self._digest().hexdigest()

    @property
    def sha(self) -> str:
        """SHA-256 over ids, lengths and shard starts."""
        digest = self._digest()
        digest.update(self._bounds.astype("<i8").tobytes())
        return digest.hexdigest()

    def _digest(self) -> hashlib._Hash:
        digest = hashlib.sha256(canonical_json(self._ids).encode())
        digest.update(self._tokens.astype("<i8").tobytes())
        return digest

    def create(self, storage: Storage) -> bool:
        """Write the plan if none is there; True if this call did.

        Beside it goes `plan.sha256`, as `sha256sum -c` reads it: the checksums inside a Parquet file leave out
        parts of it. Killed between the two, the next call adds it.
        """
        made = storage.create(names.PLAN, self._to_parquet())
        if not storage.exists(names.PLAN_SHA256):
            raw = storage.read(names.PLAN)
            _decode(raw, storage.where(names.PLAN))
            storage.create(names.PLAN_SHA256, _checksum_line(raw))
        return made

    def _to_parquet(self) -> bytes:
        shard = np.repeat(np.arange(self.n_shards), np.diff(self._bounds))
        columns = {"shard": shard, "sample_id": pa.array(self._ids, pa.string()), "n_tokens": self._tokens}
        table = pa.table(columns, schema=_SCHEMA.with_metadata({_SHA_KEY: self.sha.encode()}))
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        data: bytes = sink.getvalue().to_pybytes()
        return data

    @classmethod
    def read(cls, storage: Storage) -> ShardPlan:
        """The plan that `create` wrote.

        Raises:
            CacheError: it is missing, damaged, or not a plan.
            OSError: as the storage gave it.
        """
        where = storage.where(names.PLAN)
        try:
            raw = storage.read(names.PLAN)
            recorded = storage.read(names.PLAN_SHA256)
        except FileNotFoundError as error:
            raise CacheError(
                f"{where} (or {names.PLAN_SHA256} beside it) is missing: the cache has no plan yet; run "
                "the extract stage first"
            ) from error
        if recorded != _checksum_line(raw):
            raise CacheError(
                f"{where} has SHA-256 {sha256_bytes(raw)}, but {names.PLAN_SHA256} beside it holds "
                f"{recorded.decode(errors='replace')!r}; {_REMEDY}"
            )
        return _decode(raw, where)


def _column(table: pa.Table, name: str) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *map(np.from_dlpack, table[name].chunks)])


def _surely_storable(sample_ids: list[str]) -> bool:
    """Whether no id needs a closer look; a million are looked at in a twentieth of a second."""
    sizes = list(map(len, sample_ids))
    text = "".join(sample_ids)
    # Only ASCII has one byte a character. Half surrogate pairs exist beyond ASCII only.
    longest = names.MAX_SAMPLE_ID_BYTES if text.isascii() else 0
    return not sizes or (min(sizes) > 0 and max(sizes) <= longest and "\0" not in text)


def _checksum_line(raw: bytes) -> bytes:
    return f"{sha256_bytes(raw)}  {names.PLAN}\n".encode()


def _decode(raw: bytes, where: str) -> ShardPlan:
    try:
        # `read_table`, like `to_numpy` of its columns, imports pandas where that is installed: a second for nothing.
        table = pq.ParquetFile(pa.BufferReader(raw)).read()
    except (pa.ArrowException, OSError) as error:
        raise CacheError(f"{where} is damaged ({error}); {_REMEDY}") from error
    if not table.schema.equals(_SCHEMA):
        raise CacheError(f"{where} has columns {table.schema.names}, expected {_SCHEMA.names}; {_REMEDY}")
    starts = np.flatnonzero(np.diff(_column(table, "shard"), prepend=-1)).tolist()
    try:
        plan = ShardPlan(table["sample_id"].to_pylist(), _column(table, "n_tokens"), starts)
    except (CacheError, ValueError) as error:
        raise CacheError(f"{where} is damaged ({error}); {_REMEDY}") from error
    recorded = (table.schema.metadata or {}).get(_SHA_KEY, b"").decode(errors="replace")
    if plan.sha != recorded:
        raise CacheError(f"{where} holds a plan with SHA-256 {plan.sha}, but records {recorded!r}; {_REMEDY}")
    return plan


_REMEDY = "it was damaged after it was written: restore it from a copy, or make the cache again in another folder"


def plan_shards(
    sample_ids: Sequence[str], n_tokens: Sequence[int] | NDArray[np.int64], bytes_per_token: int, shard_bytes: int
) -> ShardPlan:
    """Divide samples into shards: in order, each shard as full as `shard_bytes` allows, but never empty.

    Args:
        sample_ids: samples in the order of the responses table.
        n_tokens: tokens of each that the cache will hold, [samples].
        bytes_per_token: bytes of features of one token (layers × hidden size × bytes of the type).
        shard_bytes: bytes of features in a shard, at most; a single sample may exceed it.

    Raises:
        CacheError: a size below 1, a repeated id, or a sample without tokens.
    """
    if bytes_per_token < 1 or shard_bytes < 1:
        raise CacheError(
            f"bytes_per_token is {bytes_per_token} and shard_bytes is {shard_bytes}; both must be at least 1"
        )
    starts: list[int] = []
    filled = 0
    for i, tokens in enumerate(np.asarray(n_tokens, np.int64).tolist()):
        size = tokens * bytes_per_token
        if not starts or filled + size > shard_bytes:
            starts.append(i)
            filled = 0
        filled += size
    return ShardPlan(sample_ids, n_tokens, starts)
