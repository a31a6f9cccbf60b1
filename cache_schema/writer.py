"""Writes one shard and commits it: nothing is visible before the marker, nothing is overwritten after.

Samples are streamed: memory stays bounded by a few chunks per array, whatever the shard's size. The order of
`commit`: finish every object (it is on the storage for good then), look at what was written, create the
marker. Killed before the marker, the group is garbage that no reader sees.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache_schema import names
from cache_schema.array_reader import ArrayReader
from cache_schema.array_writer import ArrayWriter, WrittenArray
from cache_schema.checks import LayerCheck, non_finite
from cache_schema.codec import ChunkCodec
from cache_schema.errors import CacheError, ShardCorrupt, ShardNotCommitted
from cache_schema.identity import CacheIdentity, require_same, sha256_bytes
from cache_schema.layout import GROUP_JSON, PER_SAMPLE, array_specs, encode_ids, group_metadata, offsets_of
from cache_schema.ledger import LedgerRow
from cache_schema.manifest import read_identity
from cache_schema.marker import ArrayRecord, CommitMarker, create_marker, read_marker, record_array, shard_sha256
from cache_schema.plan import ShardPlan
from cache_schema.storage import Location, Storage, open_storage


class ShardWriter:
    """One attempt at one shard. Use as a context manager: an error inside removes this attempt's files.

    Args:
        cache: a cache made by `create_cache`.
        shard: name of the shard.
        identity: what this run makes; must be the cache's.
        hidden_size: D.
        n_expected: samples of the shard, if the caller wants that checked against the plan.
        attempt: which try of the pool this is, for the record.
        planned: the shard's sample ids by the cache's plan; read from the plan if None.
        compression: of features, scales and `last_hidden`: one of `codec.COMPRESSIONS`.

    Raises:
        FingerprintMismatch: the cache has another identity.
        CacheError: no cache here, no such shard, or another number of samples than expected.
    """

    def __init__(
        self,
        cache: Location | Storage,
        shard: str,
        identity: CacheIdentity,
        hidden_size: int,
        n_expected: int | None = None,
        attempt: int = 1,
        *,
        planned: Sequence[str] | None = None,
        compression: str = "none",
    ):
        self._storage = open_storage(cache)
        self._shard = shard
        self._identity = identity
        self._attempt = attempt
        require_same(read_identity(self._storage), identity, self._storage.where())
        self._planned = list(planned) if planned is not None else ShardPlan.read(self._storage).samples(shard)
        if n_expected not in (None, len(self._planned)):
            raise CacheError(
                f"{shard} has {len(self._planned)} samples by the plan, but the caller expects {n_expected}"
            )
        self._place = {sample_id: i for i, sample_id in enumerate(self._planned)}
        width = max((len(s.encode()) for s in self._planned), default=1)
        self._specs = array_specs(identity, hidden_size, width, ChunkCodec(compression))
        self._layers = LayerCheck(shard, identity.layer_ids, identity.feature_dtype)
        self._group = f"{shard}.{names.random_tag()}"
        self._arrays = {name: ArrayWriter(self._storage, self._prefix, spec) for name, spec in self._specs.items()}
        self._stored: dict[str, int] = {}
        self._dropped: dict[str, tuple[str, str]] = {}
        self._notes: list[tuple[str, str, str]] = []
        self._started = time.monotonic()
        self._write_s = 0.0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self.abort()

    def append(
        self,
        sample_id: str,
        features_TLD: NDArray[Any],
        input_ids: NDArray[Any],
        loss_mask: NDArray[Any],
        last_hidden: NDArray[Any] | None = None,
        scale_TLG: NDArray[Any] | None = None,
    ) -> bool:
        """Add the next sample; samples come in the plan's order.

        Args:
            sample_id: one of the shard's samples.
            features_TLD: [T, L, D] as stored: uint16 bit patterns for bfloat16, uint8 ones for float8, float16, int8.
            input_ids: [T] int32.
            loss_mask: [T] uint8, 0 or 1.
            last_hidden: [T, D], bfloat16 bit patterns (float16 beside float16 features), if the cache has it.
            scale_TLG: [T, L, G] float32, if the features are quantised.

        Returns:
            False if the sample has NaN or infinite states: it is not stored, its ledger row `non_finite` is made.

        Raises:
            ShardRefused: a layer is all zero, or two layers are identical.
            CacheError: a wrong shape or type, or a sample out of place.
            OSError: as the storage gave it.
        """
        self._require_place(sample_id)
        given = {
            "features": features_TLD,
            "feature_scale": scale_TLG,
            "last_hidden": last_hidden,
            "input_ids": input_ids,
            "loss_mask": loss_mask,
        }
        values = {name: value for name, value in given.items() if value is not None}
        self._require_shapes(sample_id, values)
        for name in ("features", "feature_scale", "last_hidden"):
            if name in values and non_finite(values[name], self._specs[name].dtype):
                self.drop(sample_id, "non_finite", f"{name} has NaN or infinite values")
                return False
        self._layers.add(sample_id, features_TLD, scale_TLG)
        begun = time.monotonic()
        for name, value in values.items():
            self._arrays[name].append(value)
        self._write_s += time.monotonic() - begun
        self._stored[sample_id] = len(input_ids)
        return True

    def drop(self, sample_id: str, reason: str, detail: str) -> None:
        """Record that a planned sample is not stored.

        Raises:
            CacheError: the sample is not planned here, stored already, or dropped already.
        """
        self._require_open()
        if sample_id not in self._place or sample_id in self._dropped or sample_id in self._stored:
            raise CacheError(f"{self._shard}: sample {sample_id!r} cannot be dropped: {self._state(sample_id)}")
        self._dropped[sample_id] = reason, detail

    def note(self, sample_id: str, reason: str, detail: str) -> None:
        """Record that a sample is stored but not as it was, e.g. shortened.

        Raises:
            CacheError: the sample is not planned here.
        """
        self._require_open()
        if sample_id not in self._place:
            raise CacheError(f"{self._shard}: sample {sample_id!r} cannot be noted: {self._state(sample_id)}")
        self._notes.append((sample_id, reason, detail))

    def commit(self) -> CommitMarker:
        """Write, check and commit the shard.

        Returns:
            The marker that counts: this attempt's, or that of the attempt which was first (then this
            attempt's files are removed).

        Raises:
            ShardRefused: all samples of one token show a zero layer or two equal ones.
            CacheError: planned samples are neither stored nor dropped.
            ShardCorrupt: what lies on the storage is not what was written.
            OSError: as the storage gave it (a full disk is ENOSPC); this attempt's files are removed.
        """
        self._require_open()
        try:
            self._require_complete()
            self._layers.finish()
            marker = self._write()
            won = create_marker(self._storage, marker)
        except BaseException:
            self.abort()
            raise
        if won:
            self._closed = True
            return marker
        self.abort()
        first = read_marker(self._storage, self._shard)
        if first.fingerprint != marker.fingerprint:
            raise ShardCorrupt(
                f"{self._shard} is committed with fingerprint {first.fingerprint}, expected {marker.fingerprint}"
            )
        return first

    def abort(self) -> None:
        """Give the shard up and remove what this attempt wrote (never what is committed)."""
        self._closed = True
        if not self._is_committed():
            # What cannot be removed now is garbage for `gc`; the error that led here matters more.
            with suppress(OSError):
                for array in self._arrays.values():
                    array.abort()
                self._storage.delete_tree(self._prefix)

    @property
    def _prefix(self) -> str:
        return names.group_key(self._group)

    def _is_committed(self) -> bool:
        # An interrupt can arrive between the marker's creation and the return from it.
        try:
            return read_marker(self._storage, self._shard).group == self._group
        except ShardNotCommitted:
            return False
        except (CacheError, OSError):
            return True

    def _write(self) -> CommitMarker:
        begun = time.monotonic()
        self._arrays["offsets"].append(offsets_of(list(self._stored.values())))
        self._arrays["sample_id"].append(self._id_rows())
        written = {name: array.close() for name, array in self._arrays.items()}
        group = self._storage.writer(f"{self._prefix}/{GROUP_JSON}")
        group.write(group_metadata())
        group.close()
        self._storage.sync(self._prefix)
        synced = time.monotonic()
        records = {name: record_array(self._specs[name], array) for name, array in written.items()}
        self._require_written(written, records)
        ledger = self._ledger()
        now = time.monotonic()
        return CommitMarker(
            shard=self._shard,
            group=self._group,
            samples=len(self._stored),
            tokens=written["input_ids"].rows,
            bytes=self._group_bytes(written),
            lengths=tuple(self._stored.values()),
            arrays=records,
            group_sha256=sha256_bytes(group_metadata()),
            fingerprint=self._identity.fingerprint(),
            content_sha256=shard_sha256(records, ledger),
            attempt=self._attempt,
            timings={
                "total_s": round(now - self._started, 3),
                "write_s": round(self._write_s, 3),
                "sync_s": round(synced - begun, 3),
                "check_s": round(now - synced, 3),
            },
            ledger=ledger,
        )

    def _id_rows(self) -> NDArray[np.uint8]:
        ids = encode_ids(list(self._stored))
        width = self._specs["sample_id"].row_shape[0]
        return np.pad(ids, [(0, 0), (0, width - ids.shape[1])])

    def _group_bytes(self, written: dict[str, WrittenArray]) -> int:
        metadata = sum(len(self._specs[name].metadata(array.rows)) for name, array in written.items())
        return metadata + len(group_metadata()) + sum(array.bytes for array in written.values())

    def _require_written(self, written: dict[str, WrittenArray], records: dict[str, ArrayRecord]) -> None:
        """Look at what lies on the storage: each object there, its size, its index, its first and last rows.

        Raises:
            ShardCorrupt: names array and rows.
        """
        tokens = sum(self._stored.values())
        for name, record in records.items():
            rows = written[name].rows
            expected = len(self._stored) + (name == "offsets") if name in PER_SAMPLE else tokens
            if rows != expected:
                raise ShardCorrupt(f"{self._shard}: {name} was written with {rows} rows, expected {expected}")
            reader = ArrayReader(
                self._storage, self._prefix, record.spec(name), rows, record.bytes, record.index_xxh128,
                shard=self._shard, remedy="check the disk and run the extract stage again",
            )  # fmt: skip
            reader.read_index()
            for start in sorted({0, max(0, rows - 1)}):
                reader.read(start, min(start + 1, rows))

    def _ledger(self) -> tuple[LedgerRow, ...]:
        rows = [(s, reason, detail) for s, (reason, detail) in self._dropped.items()] + self._notes
        rows.sort(key=lambda row: self._place[row[0]])
        return tuple(LedgerRow(sample_id=s, reason=r, detail=d, kept=s in self._stored) for s, r, d in rows)

    def _require_open(self) -> None:
        if self._closed:
            raise CacheError(f"{self._shard}: this attempt is committed or aborted; make a new ShardWriter")

    def _require_complete(self) -> None:
        lost = [s for s in self._planned if s not in self._dropped and s not in self._stored]
        if lost:
            raise CacheError(
                f"{self._shard}: {len(lost)} of {len(self._planned)} planned samples are neither stored nor dropped, "
                f"first {lost[0]!r}; "
                "append or drop each"
            )

    def _require_place(self, sample_id: str) -> None:
        self._require_open()
        place = self._place.get(sample_id)
        last = self._place[next(reversed(self._stored))] if self._stored else -1
        if place is None or sample_id in self._dropped or place <= last:
            raise CacheError(
                f"{self._shard}: sample {sample_id!r} cannot be appended: {self._state(sample_id)}; "
                "samples come in the plan's order, each once"
            )

    def _state(self, sample_id: str) -> str:
        if sample_id not in self._place:
            return "it is not planned for this shard"
        if sample_id in self._dropped:
            return "it is dropped already"
        if sample_id in self._stored:
            return "it is stored already"
        later = next(reversed(self._stored), None)
        return (
            f"it is number {self._place[sample_id]} of the shard, and {later!r}, which comes later, is stored already"
        )

    def _require_shapes(self, sample_id: str, values: dict[str, NDArray[Any]]) -> None:
        where = f"{self._shard}, sample {sample_id!r}"
        expected = [name for name in self._specs if name not in PER_SAMPLE]
        if set(values) != set(expected):
            raise CacheError(
                f"{where}: given are {sorted(values)}, expected {sorted(expected)} (by the identity's feature type and "
                "last_hidden)"
            )
        n_tokens = len(values["input_ids"])
        if n_tokens < 1 or n_tokens > self._identity.max_length:
            raise CacheError(
                f"{where}: {n_tokens} tokens, expected 1 to {self._identity.max_length} (cache.max_length)"
            )
        for name, value in values.items():
            spec = self._specs[name]
            if value.dtype != spec.stored or value.shape != (n_tokens, *spec.row_shape):
                raise CacheError(
                    f"{where}: {name} is {value.dtype}{list(value.shape)}, expected "
                    f"{spec.stored}{[n_tokens, *spec.row_shape]} for {spec.dtype}"
                )
        if (values["loss_mask"] > 1).any():
            raise CacheError(f"{where}: loss_mask has the value {values['loss_mask'].max()}, expected 0 or 1")
