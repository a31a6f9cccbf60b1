"""The responses table: what the target said, as token ids and masks that nothing downstream works out again.

    responses/responses.json              identity, fingerprint, number of parts and samples
    responses/parts/part-00042.<tag>.parquet
    responses/commits/part-00042.json     written last: the part exists if and only if this does

A part is written by one attempt of one worker under a name of its own, forced to the disk, and then named
by a commit marker that only the first finisher can create. Every byte is checked against the marker when
a part is read. The table lies in a folder or at a URL, as a cache does (`cache_schema.storage`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from cache_schema import names
from cache_schema.errors import ResponsesError
from cache_schema.identity import ResponsesIdentity, canonical_json, require_same, sha256_bytes
from cache_schema.ledger import PartLedgerRow, part_rows
from cache_schema.rejects import REJECTS_SCHEMA, Reject, read_rejects, write_rejects
from cache_schema.response_format import (
    KEPT_REASONS,
    SCHEMA,
    Response,
    conversation_id,
    list_offsets,
    list_values,
    prompt_id,
    to_response,
    to_table,
)
from cache_schema.storage import FolderStorage, Location, Storage, open_storage

_REQUESTS = 16
"""Markers that are fetched from an object store at once."""
_LENGTHS = ("sample_id", "loss_mask")
_CONTENT = ("sample_id", "prompt_ids", "response_ids", "loss_mask")

__all__ = [
    "KEPT_REASONS",
    "REJECTS_SCHEMA",
    "SCHEMA",
    "Reject",
    "Response",
    "ResponsesTable",
    "committed_parts",
    "conversation_id",
    "create_responses",
    "prompt_id",
    "read_rejects",
    "write_part",
    "write_rejects",
]


def create_responses(
    location: Location | Storage, identity: ResponsesIdentity, n_parts: int, n_samples: int
) -> None:
    """Write `responses.json` once; a second run with the same arguments changes nothing.

    Raises:
        FingerprintMismatch: the folder holds the table of another identity.
        ResponsesError: same identity, but another division into parts.
    """
    storage = open_storage(location)
    body = {
        "identity": identity.to_json(),
        "fingerprint": identity.fingerprint(),
        "n_parts": n_parts,
        "n_samples": n_samples,
    }
    if storage.create(names.RESPONSES_JSON, canonical_json(body).encode()):
        return
    found, found_parts, found_samples = _read_description(storage)
    where = storage.where(names.RESPONSES_JSON)
    require_same(found, identity, where)
    if (found_parts, found_samples) != (n_parts, n_samples):
        raise ResponsesError(
            f"{where} plans {found_samples} samples in {found_parts} parts, this run {n_samples} in {n_parts}, under "
            "the same identity; use another folder"
        )


def _read_description(storage: Storage) -> tuple[ResponsesIdentity, int, int]:
    path = storage.where(names.RESPONSES_JSON)
    missing = f"{path} is missing: no responses table here; run the generate stage first"
    data = _load_json(storage, names.RESPONSES_JSON, missing)
    try:
        identity = ResponsesIdentity.from_json(data["identity"])
        counts = int(data["n_parts"]), int(data["n_samples"])
        fingerprint = data["fingerprint"]
    except (KeyError, TypeError, ValueError) as error:
        raise ResponsesError(
            f"{path} lacks a field or has one of the wrong type ({error!r}); make the table again"
        ) from error
    if identity.fingerprint() != fingerprint:
        raise ResponsesError(
            f"{path}: fingerprint is {fingerprint}, but its fields give {identity.fingerprint()}; it was changed"
        )
    return identity, *counts


def _load_json(storage: Storage, key: str, missing: str) -> dict[str, Any]:
    path = storage.where(key)
    try:
        data = json.loads(storage.read(key))
    except FileNotFoundError as error:
        raise ResponsesError(missing) from error
    except ValueError as error:
        raise ResponsesError(f"{path} is not JSON: {error}; remove it and run the stage again") from error
    if not isinstance(data, dict):
        raise ResponsesError(
            f"{path} holds {type(data).__name__}, expected a JSON object; remove it and run the stage again"
        )
    return data


def write_part(
    location: Location | Storage,
    part: int,
    responses: Sequence[Response],
    ledger: Iterable[Mapping[str, Any]] = (),
    attempt: int = 1,
    seconds: float = 0.0,
    *,
    planned: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Write and commit one part; if another attempt has committed it, drop this one's file.

    Args:
        location: the responses table, made by `create_responses`.
        part: index of the part.
        responses: the part's samples, in the order of the prompts.
        ledger: rows `sample_id`, `reason`, `detail` for the samples that the part lacks.
        attempt: which try of the pool this is, for the record.
        seconds: how long it took, for the record.
        planned: ids of the conversations that the part accounts for; None takes those of its rows. One
            conversation may become several samples, `<id>#turn-2` beside `<id>`.

    Returns:
        The commit marker that counts: this attempt's, or the one found.

    Raises:
        ResponsesError: a response is malformed or an id occurs twice.
        OSError: as the system gave it; this attempt's file is removed.
    """
    name = names.part_name(part)
    table = to_table(responses, name)
    rows = part_rows(ledger, name)
    n_planned = _accounted(name, [*(r.sample_id for r in responses), *(row["sample_id"] for row in rows)], planned)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data = sink.getvalue().to_pybytes()
    storage, file = open_storage(location), f"{name}.{names.random_tag()}.parquet"
    marker = {
        "part": name,
        "file": file,
        "rows": len(responses),
        "bytes": len(data),
        "sha256": sha256_bytes(data),
        "attempt": attempt,
        "ledger": rows,
        "planned": n_planned,
        "seconds": seconds,
    }
    key, commit = names.part_key(file), names.commit_key(name)
    try:
        storage.create(key, data)
        won = storage.create(commit, canonical_json(marker).encode())
    except BaseException:
        # A store that has gone cannot tell whether the marker reached it; the file then stays, as garbage at worst.
        if not storage.exists(commit) or _read_marker(storage, part)["file"] != file:
            storage.delete(key)
        raise
    if not won:
        storage.delete(key)
        return _read_marker(storage, part)
    return marker


def _accounted(name: str, sample_ids: Sequence[str], planned: Sequence[str] | None) -> int:
    """How many conversations the part accounts for.

    Raises:
        ResponsesError: one that was planned has neither a row nor a ledger row.
    """
    if planned is None:
        return len(set(sample_ids))
    found = set(map(conversation_id, sample_ids))
    lost = [s for s in planned if s not in found]
    if lost:
        raise ResponsesError(
            f"{name}: {len(lost)} of {len(planned)} planned samples have neither a row nor a ledger row, the first is "
            f"{lost[0]!r}; this is a fault of the generate stage, nothing was committed"
        )
    return len(planned)


def _read_marker(storage: Storage, part: int) -> dict[str, Any]:
    key = names.commit_key(names.part_name(part))
    path = storage.where(key)
    missing = f"{path} is missing: part {part} of the responses table is not there; run the generate stage again"
    marker = _load_json(storage, key, missing)
    fields = {"part": str, "file": str, "rows": int, "bytes": int, "sha256": str, "ledger": list, "planned": int}
    bad = [name for name, kind in fields.items() if not isinstance(marker.get(name), kind)]
    if bad or marker["part"] != names.part_name(part):
        raise ResponsesError(
            f"{path} is damaged (fields {bad}, part {marker.get('part')!r}); remove it and run the generate stage again"
        )
    return marker


def _read_markers(storage: Storage) -> dict[int, dict[str, Any]]:
    parts = sorted(committed_parts(storage))
    if isinstance(storage, FolderStorage):
        return {part: _read_marker(storage, part) for part in parts}
    with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="parts") as pool:
        return dict(zip(parts, pool.map(lambda part: _read_marker(storage, part), parts), strict=True))


def committed_parts(location: Location | Storage) -> set[int]:
    """Indices of the parts that have a commit marker; resume is the plan minus these."""
    keys = (key.removeprefix(f"{names.COMMITS}/part-") for key, _ in open_storage(location).list(names.COMMITS))
    found = (key.removesuffix(".json") for key in keys if key.endswith(".json"))
    return {int(stem) for stem in found if stem.isdecimal()}


@dataclass(frozen=True, slots=True)
class Content:
    """All samples of a responses table, in order.

    Attributes:
        sample_ids: of the samples.
        lengths: tokens of each, prompt and response.
        sha256: SHA-256 over XXH3-128 of each sample's id, tokens and mask: equal tables give equal hashes, however they
            are divided into parts and Parquet encodes them. (The files themselves are under a SHA-256 of their own.)
    """

    sample_ids: list[str]
    lengths: NDArray[np.int64]
    sha256: str


class ResponsesTable:
    """Read access to the committed parts of a responses table, in order. Make one with `open`."""

    def __init__(
        self,
        storage: Storage,
        identity: ResponsesIdentity,
        n_parts: int,
        n_samples: int,
        markers: dict[int, dict[str, Any]],
    ):
        self.storage = storage
        self.folder = storage.where()
        self.identity = identity
        self.n_parts = n_parts
        self.n_planned = n_samples
        self._markers = markers
        self._place: dict[str, tuple[int, int]] | None = None
        self._last: tuple[int, pa.Table] | None = None

    @classmethod
    def open(cls, location: Location | Storage, require_complete: bool = True) -> ResponsesTable:
        """Read `responses.json` and the markers; no part is opened.

        Raises:
            ResponsesError: no table here, it is damaged, or (`require_complete`) parts are missing or
                samples are neither stored nor in the ledger.
            SchemaVersion: written by another version of the format.
        """
        storage = open_storage(location)
        identity, n_parts, n_samples = _read_description(storage)
        table = cls(storage, identity, n_parts, n_samples, _read_markers(storage))
        if require_complete:
            table._require_complete()
        return table

    def _require_complete(self) -> None:
        missing = [p for p in range(self.n_parts) if p not in self._markers]
        if missing:
            raise ResponsesError(
                f"{self.folder} has {len(self._markers)} of {self.n_parts} parts (first missing: "
                f"{names.part_name(missing[0])}); "
                "run the generate stage again, it goes on where it stopped"
            )
        accounted = sum(m["planned"] for m in self._markers.values())
        if accounted != self.n_planned:
            raise ResponsesError(
                f"{self.folder} accounts for {accounted} prompts ({len(self)} samples stored, the rest in the ledger), "
                "but "
                f"{self.n_planned} "
                "were planned; the table is damaged, make it again"
            )

    def __len__(self) -> int:
        return sum(m["rows"] for m in self._markers.values())

    def __iter__(self) -> Iterator[Response]:
        for part in self._markers:
            yield from map(to_response, self._read(part).to_pylist())

    @property
    def ledger(self) -> list[PartLedgerRow]:
        """Samples that were planned and are not stored, with reasons, in order of the parts; and those that are
        stored otherwise than planned (`KEPT_REASONS`)."""
        return [row for part, m in self._markers.items() for row in part_rows(m["ledger"], names.part_name(part))]

    def content(self) -> Content:
        """Ids, lengths and hash of all samples, in one reading, without parsing conversations."""
        ids: list[str] = []
        counts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        digest = hashlib.sha256()
        for part in self._markers:
            table = self._read(part, _CONTENT)
            own_ids, own_counts = _ids_and_counts(table)
            ids += own_ids
            counts.append(own_counts)
            prompts, responses, masks = (
                list_values(table[c], d)
                for c, d in (("prompt_ids", "<i4"), ("response_ids", "<i4"), ("loss_mask", "u1"))
            )
            for sample_id, p, r, m in zip(own_ids, prompts, responses, masks, strict=True):
                # Lengths first, so that no two different samples give the same bytes.
                sample = xxhash.xxh3_128(canonical_json([sample_id, len(p), len(r)]).encode())
                for values in (p, r, m):
                    sample.update(values.data)
                digest.update(sample.digest())
        return Content(ids, np.concatenate(counts), digest.hexdigest())

    def lengths(self) -> tuple[list[str], NDArray[np.int64]]:
        """Sample ids and token counts (prompt + response) in order, without parsing conversations."""
        ids: list[str] = []
        counts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        for part in self._markers:
            own_ids, own_counts = _ids_and_counts(self._read(part, _LENGTHS))
            ids += own_ids
            counts.append(own_counts)
        return ids, np.concatenate(counts)

    def select(self, sample_ids: Iterable[str]) -> Iterator[Response]:
        """The responses of these ids, in their order; cheapest when it follows the table's.

        Raises:
            ResponsesError: an id is not in the table.
        """
        if self._place is None:
            self._place = self._places()
        for sample_id in sample_ids:
            if sample_id not in self._place:
                raise ResponsesError(f"sample {sample_id!r} is not in {self.folder}, which holds {len(self)} samples")
            part, row = self._place[sample_id]
            if self._last is None or self._last[0] != part:
                self._last = part, self._read(part)
            yield to_response(self._last[1].slice(row, 1).to_pylist()[0])

    def _places(self) -> dict[str, tuple[int, int]]:
        places: dict[str, tuple[int, int]] = {}
        for part in self._markers:
            for row, sample_id in enumerate(self._read(part, _LENGTHS[:1])["sample_id"].to_pylist()):
                if sample_id in places:
                    raise ResponsesError(
                        f"sample {sample_id!r} is in parts {places[sample_id][0]} and {part} of {self.folder}; make "
                        "it again"
                    )
                places[sample_id] = part, row
        return places

    def responses_hash(self) -> str:
        """`Content.sha256`, where nothing else of it is needed."""
        return self.content().sha256

    def _read(self, part: int, columns: Sequence[str] = SCHEMA.names) -> pa.Table:
        """These columns of a part, whose bytes are checked as a whole."""
        marker = self._markers[part]
        key = names.part_key(marker["file"])
        path = self.storage.where(key)
        try:
            data = self.storage.read(key)
        except FileNotFoundError as error:
            raise ResponsesError(f"{path} is missing, though its part is committed; {_remedy(part)}") from error
        found = sha256_bytes(data)
        if found != marker["sha256"]:
            raise ResponsesError(
                f"{path} is damaged: {len(data)} bytes with SHA-256 {found}, expected {marker['bytes']} bytes with "
                f"{marker['sha256']}; {_remedy(part)}"
            )
        # Without threads it takes less CPU; conversations are decoded where they are wanted alone.
        file = pq.ParquetFile(pa.BufferReader(data))
        n_rows = file.metadata.num_rows
        if file.schema_arrow != SCHEMA or n_rows != marker["rows"]:
            raise ResponsesError(
                f"{path} has {n_rows} rows of schema {file.schema_arrow}, expected {marker['rows']} rows of {SCHEMA}"
            )
        return file.read(columns=list(columns), use_threads=False)


def _ids_and_counts(table: pa.Table) -> tuple[list[str], NDArray[np.int64]]:
    """Of a part: its sample ids, and each one's tokens (prompt + response)."""
    return table["sample_id"].to_pylist(), np.diff(list_offsets(table["loss_mask"]))


def _remedy(part: int) -> str:
    return f"remove commits/{names.part_name(part)}.json and run the generate stage again"
