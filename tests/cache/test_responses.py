from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from cache_schema.errors import FingerprintMismatch, ResponsesError, SchemaVersion
from cache_schema.responses import (
    Reject,
    ResponsesTable,
    committed_parts,
    create_responses,
    read_rejects,
    write_part,
    write_rejects,
)
from tests.cache.builders import RESPONSES_IDENTITY, flip_byte, response
from tests.cache.test_durable import survey_kills

DROPPED = {"sample_id": "s9", "reason": "too_short", "detail": "1 token, at least 2 are needed"}


def make_table(folder: Path) -> ResponsesTable:
    create_responses(folder, RESPONSES_IDENTITY, n_parts=3, n_samples=6)
    write_part(folder, 2, [response("s5", 2, 9)])
    write_part(folder, 0, [response("s1"), response("s2", 3, 70)], seconds=1.5)
    write_part(folder, 1, [response("s3"), response("s4")], [DROPPED], attempt=2)
    return ResponsesTable.open(folder)


def part_files(folder: Path) -> list[Path]:
    return sorted((folder / "parts").glob("*"))


def test_round_trip_in_order_of_parts(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    rows = list(table)
    assert [r.sample_id for r in rows] == ["s1", "s2", "s3", "s4", "s5"]
    assert len(table) == 5
    for found in rows:
        expected = response(found.sample_id, len(found.prompt_ids), len(found.response_ids))
        for field in dataclasses.fields(expected):
            a, b = getattr(found, field.name), getattr(expected, field.name)
            np.testing.assert_array_equal(a, b)
            assert type(a) is type(b)
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
    assert rows[1].input_ids.tolist() == [*rows[1].prompt_ids, *rows[1].response_ids]
    assert table.ledger == [DROPPED]
    assert table.identity == RESPONSES_IDENTITY
    assert committed_parts(tmp_path) == {0, 1, 2}


def test_lengths_and_select(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    ids, n_tokens = table.lengths()
    assert ids == ["s1", "s2", "s3", "s4", "s5"]
    assert n_tokens.tolist() == [10, 73, 10, 10, 11]
    assert [r.sample_id for r in table.select(["s5", "s2", "s1"])] == ["s5", "s2", "s1"]
    with pytest.raises(ResponsesError, match="'s9' is not in"):
        next(table.select(["s9"]))


def test_part_is_plain_parquet(tmp_path: Path) -> None:
    make_table(tmp_path)
    table = pq.read_table(part_files(tmp_path)[0])
    assert table["sample_id"].to_pylist() == ["s1", "s2"]
    assert table["finish_reason"].to_pylist() == ["stop", "stop"]


def test_hash_is_over_content_not_parts_or_encoding(tmp_path: Path) -> None:
    table = make_table(tmp_path / "a")
    create_responses(tmp_path / "b", RESPONSES_IDENTITY, n_parts=1, n_samples=5)
    rows = list(table)
    write_part(tmp_path / "b", 0, rows)
    assert ResponsesTable.open(tmp_path / "b").responses_hash() == table.responses_hash()

    changes: list[dict[str, Any]] = [
        {"sample_id": "other"},
        {"loss_mask": np.ones(10, np.uint8)},
        {"response_ids": rows[0].response_ids + 1},
        # The same tokens, divided otherwise.
        {"prompt_ids": rows[0].input_ids[:5], "response_ids": rows[0].input_ids[5:]},
    ]
    for i, change in enumerate(changes):
        folder = tmp_path / f"c{i}"
        create_responses(folder, RESPONSES_IDENTITY, n_parts=1, n_samples=5)
        write_part(folder, 0, [dataclasses.replace(rows[0], **change), *rows[1:]])
        assert ResponsesTable.open(folder).responses_hash() != table.responses_hash()


def test_flipped_byte_is_named(tmp_path: Path) -> None:
    make_table(tmp_path)
    path = part_files(tmp_path)[1]
    whole = path.read_bytes()
    for at in range(0, len(whole), len(whole) // 20):
        path.write_bytes(whole)
        flip_byte(path, at)
        table = ResponsesTable.open(tmp_path)
        with pytest.raises(ResponsesError, match=path.name):
            table.responses_hash()
        with pytest.raises(ResponsesError, match=path.name):
            table.lengths()
        with pytest.raises(ResponsesError, match=path.name):
            list(table)
        with pytest.raises(ResponsesError, match=path.name):
            next(table.select(["s3"]))


def test_missing_part_file_is_named(tmp_path: Path) -> None:
    make_table(tmp_path)
    part_files(tmp_path)[2].unlink()
    with pytest.raises(ResponsesError, match=r"part-00002.*is missing, though its part is committed"):
        list(ResponsesTable.open(tmp_path))


def test_incomplete_table_is_refused_unless_asked_for(tmp_path: Path) -> None:
    create_responses(tmp_path, RESPONSES_IDENTITY, n_parts=2, n_samples=2)
    write_part(tmp_path, 1, [response("s2")])
    with pytest.raises(ResponsesError, match="1 of 2 parts"):
        ResponsesTable.open(tmp_path)
    assert [r.sample_id for r in ResponsesTable.open(tmp_path, require_complete=False)] == ["s2"]
    write_part(tmp_path, 0, [])
    with pytest.raises(ResponsesError, match="accounts for 1 prompts"):
        ResponsesTable.open(tmp_path)


def test_second_attempt_removes_its_own_file_and_returns_the_first_marker(tmp_path: Path) -> None:
    create_responses(tmp_path, RESPONSES_IDENTITY, n_parts=1, n_samples=1)
    first = write_part(tmp_path, 0, [response("s1")], attempt=1)
    second = write_part(tmp_path, 0, [response("s1"), response("s2")], attempt=2)
    assert second == first
    assert [p.name for p in part_files(tmp_path)] == [first["file"]]
    assert [r.sample_id for r in ResponsesTable.open(tmp_path)] == ["s1"]


def test_creating_again_keeps_and_another_identity_is_refused(tmp_path: Path) -> None:
    make_table(tmp_path)
    create_responses(tmp_path, RESPONSES_IDENTITY, n_parts=3, n_samples=6)
    other = dataclasses.replace(RESPONSES_IDENTITY, chat_template_sha256="d" * 64)
    with pytest.raises(FingerprintMismatch, match=r"chat_template_sha256: found 'c+', expected 'd+'"):
        create_responses(tmp_path, other, n_parts=3, n_samples=6)
    with pytest.raises(ResponsesError, match="6 samples in 3 parts, this run 6 in 4"):
        create_responses(tmp_path, RESPONSES_IDENTITY, n_parts=4, n_samples=6)


def test_damaged_description_is_refused(tmp_path: Path) -> None:
    make_table(tmp_path)
    path = tmp_path / "responses.json"
    text = path.read_text()
    for bad, kind in [
        ("{", ResponsesError),
        ("[]", ResponsesError),
        ("{}", ResponsesError),
        (text.replace("max_new_tokens", "max_old_tokens"), ResponsesError),
        (text.replace('"schema_version":1', '"schema_version":7'), SchemaVersion),
    ]:
        path.write_text(bad)
        with pytest.raises(kind, match=r"responses\.json|schema version 7"):
            ResponsesTable.open(tmp_path)
    path.unlink()
    with pytest.raises(ResponsesError, match="run the generate stage first"):
        ResponsesTable.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": np.ones(9, np.uint8)}, "loss_mask of sample 's1' has 9 values"),
        ({"loss_mask": np.full(10, 2, np.uint8)}, "largest 2"),
        ({"prompt_ids": np.zeros(4, np.int64)}, r"prompt_ids of sample 's1' is int64\[4\]"),
        ({"finish_reason": "bored"}, "finish_reason of sample 's1' is 'bored'"),
    ],
)
def test_malformed_response_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    create_responses(tmp_path, RESPONSES_IDENTITY, n_parts=1, n_samples=1)
    with pytest.raises(ResponsesError, match=message):
        write_part(tmp_path, 0, [dataclasses.replace(response("s1"), **change)])
    with pytest.raises(ResponsesError, match="occurs twice"):
        write_part(tmp_path, 0, [response("s1"), response("s1")])
    assert part_files(tmp_path) == []


def test_same_sample_in_two_parts_is_refused(tmp_path: Path) -> None:
    create_responses(tmp_path, RESPONSES_IDENTITY, n_parts=2, n_samples=2)
    write_part(tmp_path, 0, [response("s1")])
    write_part(tmp_path, 1, [response("s1")])
    with pytest.raises(ResponsesError, match="'s1' is in parts 0 and 1"):
        list(ResponsesTable.open(tmp_path).select(["s1"]))


def test_full_disk_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_responses(tmp_path, RESPONSES_IDENTITY, n_parts=1, n_samples=1)
    real = os.fsync
    for fits in range(3):
        left = iter(range(fits))

        def full(descriptor: int, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_part(tmp_path, 0, [response("s1")])
        assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["responses.json"]


def test_part_killed_at_each_step_is_there_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half-visible part, and the next run ends with the same table (issue 2, figure 4)."""
    script = """
from cache_schema.responses import create_responses, write_part
from tests.cache.builders import RESPONSES_IDENTITY, response
rows = [response("s1"), response("s2")]
def step(folder):
    create_responses(folder, RESPONSES_IDENTITY, n_parts=1, n_samples=2)
    write_part(folder, 0, rows)
survey(sys.argv[1], step)
"""
    folders = survey_kills(tmp_path, script)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # as in the survey
    expected = ResponsesTable.open(folders[-1]).responses_hash()
    seen = set()
    for folder in folders:
        done = committed_parts(folder)
        seen.add(len(done))
        create_responses(folder, RESPONSES_IDENTITY, n_parts=1, n_samples=2)
        if done:
            assert ResponsesTable.open(folder).responses_hash() == expected
        write_part(folder, 0, [response("s1"), response("s2")])
        assert ResponsesTable.open(folder).responses_hash() == expected
    assert seen == {0, 1}


def test_rejects_round_trip(tmp_path: Path) -> None:
    rejects = [
        Reject("prompts.jsonl", 3, None, "not_json", "found '{', expected a JSON object"),
        Reject("prompts.jsonl", 2**40, "x", "no_messages", "✓"),
    ]
    path = tmp_path / "responses" / "rejects.parquet"
    write_rejects(path, rejects)
    assert read_rejects(path) == rejects
    write_rejects(path, [])
    assert read_rejects(path) == []
    assert pq.read_schema(path).names == ["source", "line", "sample_id", "reason", "detail"]
    path.write_bytes(b"PAR1")
    with pytest.raises(ResponsesError, match=r"rejects\.parquet"):
        read_rejects(path)
