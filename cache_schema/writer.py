"""Writes one shard and commits it: nothing is visible before the marker, nothing is overwritten after.

This first writer holds a shard in memory and hands it to zarr-python in one go (about three times the
shard's size at the peak). The streaming writer of the specification, with memory bounded by a few chunks,
takes its place later behind the same methods; samples must therefore already come in the plan's order.

The order of `commit`: write the group under a name of its own, read it back and compare, force it to the
disk, create the marker. Killed before the marker, the group is garbage that no reader sees.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache_schema import names
from cache_schema.checks import LayerCheck, non_finite
from cache_schema.durable import fsync_dir, fsync_tree, make_dirs
from cache_schema.errors import CacheError, ShardCorrupt, ShardNotCommitted
from cache_schema.identity import CacheIdentity, require_same, sha256_file
from cache_schema.layout import array_specs, encode_ids, group_files, offsets_of, require_written, write_group
from cache_schema.ledger import LedgerRow
from cache_schema.manifest import read_identity
from cache_schema.marker import CommitMarker, create_marker, read_marker, record_array, shard_sha256
from cache_schema.plan import ShardPlan


class ShardWriter:
    """One attempt at one shard. Use as a context manager: an error inside removes this attempt's files.

    Args:
        cache_dir: a cache made by `create_cache`.
        shard: name of the shard.
        identity: what this run makes; must be the cache's.
        hidden_size: D.
        n_expected: samples of the shard, if the caller wants that checked against the plan.
        attempt: which try of the pool this is, for the record.
        planned: the shard's sample ids by the cache's plan; read from the plan if None.

    Raises:
        FingerprintMismatch: the cache has another identity.
        CacheError: no cache here, no such shard, or another number of samples than expected.
    """

    def __init__(
        self,
        cache_dir: Path,
        shard: str,
        identity: CacheIdentity,
        hidden_size: int,
        n_expected: int | None = None,
        attempt: int = 1,
        *,
        planned: Sequence[str] | None = None,
    ):
        self._cache = Path(cache_dir)
        self._shard = shard
        self._identity = identity
        self._hidden_size = hidden_size
        self._attempt = attempt
        require_same(read_identity(self._cache), identity, self._cache)
        self._planned = (
            list(planned) if planned is not None else ShardPlan.read(names.plan_file(self._cache)).samples(shard)
        )
        if n_expected not in (None, len(self._planned)):
            raise CacheError(
                f"{shard} has {len(self._planned)} samples by the plan, but the caller expects {n_expected}"
            )
        self._place = {sample_id: i for i, sample_id in enumerate(self._planned)}
        self._specs = array_specs(identity, hidden_size, 1)
        self._layers = LayerCheck(shard, identity.layer_ids)
        self._group = f"{shard}.{names.random_tag()}"
        self._rows: dict[str, list[NDArray[Any]]] = {
            name: [] for name in self._specs if name not in ("offsets", "sample_id")
        }
        self._stored: dict[str, int] = {}
        self._dropped: dict[str, tuple[str, str]] = {}
        self._notes: list[tuple[str, str, str]] = []
        self._started = time.monotonic()
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
    ) -> bool:
        """Add the next sample; samples come in the plan's order.

        Args:
            sample_id: one of the shard's samples.
            features_TLD: [T, L, D], uint16 bit patterns for bfloat16, or float16.
            input_ids: [T] int32.
            loss_mask: [T] uint8, 0 or 1.
            last_hidden: [T, D] like the features, if the cache has it.

        Returns:
            False if the sample has NaN or infinite states: it is not stored, its ledger row `non_finite` is made.

        Raises:
            ShardRefused: a layer is all zero, or two layers are identical.
            CacheError: a wrong shape or type, or a sample out of place.
        """
        self._require_place(sample_id)
        values = {"features": features_TLD, "input_ids": input_ids, "loss_mask": loss_mask}
        if last_hidden is not None:
            values["last_hidden"] = last_hidden
        self._require_shapes(sample_id, values)
        for name in ("features", "last_hidden"):
            if name in values and non_finite(values[name], self._identity.feature_dtype):
                self.drop(sample_id, "non_finite", f"{name} has NaN or infinite values")
                return False
        self._layers.add(sample_id, features_TLD)
        for name, value in values.items():
            self._rows[name].append(np.array(value, self._specs[name].stored, order="C"))
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
            ShardCorrupt: what was read back is not what was written.
            OSError: as the system gave it (a full disk is ENOSPC); this attempt's files are removed.
        """
        self._require_open()
        try:
            self._require_complete()
            self._layers.finish()
            marker = self._write()
            won = create_marker(self._cache, marker)
        except BaseException:
            self.abort()
            raise
        if won:
            self._close()
            return marker
        self.abort()
        first = read_marker(self._cache, self._shard)
        if first.fingerprint != marker.fingerprint:
            raise ShardCorrupt(
                f"{self._shard} is committed with fingerprint {first.fingerprint}, expected {marker.fingerprint}"
            )
        return first

    def abort(self) -> None:
        """Give the shard up and remove what this attempt wrote (never what is committed)."""
        self._close()
        if not self._is_committed():
            shutil.rmtree(self._path, ignore_errors=True)

    @property
    def _path(self) -> Path:
        return names.shards_dir(self._cache) / self._group

    def _close(self) -> None:
        self._closed = True
        self._rows.clear()

    def _is_committed(self) -> bool:
        # An interrupt can arrive between the marker's creation and the return from it.
        try:
            return read_marker(self._cache, self._shard).group == self._group
        except ShardNotCommitted:
            return False
        except CacheError:
            return True

    def _write(self) -> CommitMarker:
        data = self._data()
        specs = array_specs(self._identity, self._hidden_size, data["sample_id"].shape[1])
        make_dirs(names.shards_dir(self._cache))
        make_dirs(names.commits_dir(self._cache))
        begun = time.monotonic()
        write_group(self._path, specs, data)
        written = time.monotonic()
        require_written(self._path, specs, data)
        checked = time.monotonic()
        fsync_tree(self._path)
        fsync_dir(self._path.parent)
        arrays = {name: record_array(self._path, spec, data[name]) for name, spec in specs.items()}
        ledger = self._ledger()
        now = time.monotonic()
        return CommitMarker(
            shard=self._shard,
            group=self._group,
            samples=len(self._stored),
            tokens=len(data["input_ids"]),
            bytes=sum(group_files(self._path).values()),
            lengths=tuple(self._stored.values()),
            arrays=arrays,
            group_sha256=sha256_file(self._path / "zarr.json"),
            fingerprint=self._identity.fingerprint(),
            content_sha256=shard_sha256(arrays, ledger),
            attempt=self._attempt,
            timings={
                "total_s": round(now - self._started, 3),
                "write_s": round(written - begun, 3),
                "check_s": round(checked - written, 3),
                "sync_s": round(now - checked, 3),
            },
            ledger=ledger,
        )

    def _data(self) -> dict[str, NDArray[Any]]:
        data: dict[str, NDArray[Any]] = {}
        for name in list(self._rows):
            spec = self._specs[name]
            # Each array's pieces are let go before the next is joined, so the peak is not twice the shard.
            data[name] = np.concatenate([np.zeros((0, *spec.row_shape), spec.stored), *self._rows.pop(name)])
        return data | {"offsets": offsets_of(list(self._stored.values())), "sample_id": encode_ids(list(self._stored))}

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
        if set(values) != set(self._rows):
            raise CacheError(
                f"{where}: given are {sorted(values)}, expected {sorted(self._rows)} (by the identity's last_hidden)"
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
