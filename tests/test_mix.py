"""Mixes of sources: caps, weights and totals by hash, duplicates by id and content, several answers to a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_schema.responses import conversation_id, prompt_id
from stages.config import ConfigError, GenerateConfig, PromptsConfig, SourceConfig
from stages.conversation import Conversation
from stages.errors import PromptError
from stages.mix import choose, quotas
from stages.prompts import PromptImport, answers_of, import_prompts
from stages.spans import turn_suffix


def write(folder: Path, name: str, texts: list[str], *, ids: bool = True) -> None:
    rows = [{"prompt": text} | ({"id": f"{name}-{i}"} if ids else {}) for i, text in enumerate(texts)]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def mixed(folder: Path, *sources: SourceConfig, seed: int = 0, **settings: Any) -> PromptImport:
    return import_prompts(PromptsConfig(sources=sources, **settings), folder, seed)


def ids_of(found: PromptImport) -> list[str]:
    return [c.sample_id for c in found.conversations]


def test_a_cap_is_a_choice_by_hash_and_not_by_place(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(40)]
    write(tmp_path, "a", texts, ids=False)
    write(tmp_path, "turned", texts[::-1], ids=False)
    ten, again, twenty, other, turned = (
        set(ids_of(mixed(tmp_path, SourceConfig(path=path, cap=cap), seed=seed)))
        for path, cap, seed in [("a", 10, 0), ("a", 10, 0), ("a", 20, 0), ("a", 10, 1), ("turned", 10, 0)]
    )
    assert ten == again == turned
    assert len(ten) == 10
    assert ten < twenty
    assert ten != other
    everything = ids_of(mixed(tmp_path, SourceConfig(path="a")))
    found = mixed(tmp_path, SourceConfig(path="a", cap=10))
    assert ids_of(found) == [i for i in everything if i in ten]  # in the order of the rows
    assert (found.n_not_taken, found.sources[0].n_fit, found.sources[0].n_taken) == (30, 40, 10)


def test_weights_share_out_until_the_scarcest_source_is_used_up(tmp_path: Path) -> None:
    for name, n in (("a", 30), ("b", 30), ("c", 8)):
        write(tmp_path, name, [f"{name} {i}" for i in range(n)])
    sources = [SourceConfig(path=p, weight=w) for p, w in (("a", 3), ("b", 1.5), ("c", 1))]
    found = mixed(tmp_path, *sources)
    assert [s.n_taken for s in found.sources] == [24, 12, 8]
    assert [s.n_taken for s in mixed(tmp_path, *sources, max_samples=11).sources] == [6, 3, 2]
    capped = [SourceConfig(path="a", weight=3, cap=6), *sources[1:]]
    assert [s.n_taken for s in mixed(tmp_path, *capped).sources] == [6, 3, 2]
    with pytest.raises(PromptError, match=r"source c: the mix takes none of its 8 .*prompts\.max_samples"):
        mixed(tmp_path, *sources, max_samples=2)


def test_a_total_without_weights_goes_over_all_sources(tmp_path: Path) -> None:
    for name, n in (("a", 300), ("b", 100)):
        write(tmp_path, name, [f"{name} {i}" for i in range(n)])
    found = mixed(tmp_path, SourceConfig(path="a"), SourceConfig(path="b"), max_samples=100)
    assert len(found.conversations) == 100
    assert 10 < found.sources[1].n_taken < 40


SIZES = st.lists(st.tuples(st.integers(1, 400), st.sampled_from([0.1, 0.25, 0.3, 1, 2, 7])), min_size=1, max_size=5)


@given(SIZES, st.none() | st.integers(1, 500))
def test_quotas_are_as_large_as_they_can_be_and_in_proportion(
    sizes: list[tuple[int, float]], max_samples: int | None
) -> None:
    available, weights = [n for n, _ in sizes], [w for _, w in sizes]
    counts = quotas(available, weights, max_samples)
    assert all(0 <= n <= most for n, most in zip(counts, available, strict=True))
    t = sum(counts) / sum(weights)
    assert all(abs(n - w * t) < 1.5 for n, w in zip(counts, weights, strict=True))
    used_up = any(n == most for n, most in zip(counts, available, strict=True))
    assert used_up or sum(counts) == max_samples
    assert max_samples is None or sum(counts) <= max_samples


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 60), st.integers(0, 5))
def test_a_choice_takes_nothing_twice_and_keeps_the_order(sizes: list[int], total: int, seed: int) -> None:
    by_source = [[Conversation(f"{s}-{i}", []) for i in range(n)] for s, n in enumerate(sizes)]
    config = PromptsConfig(sources=tuple(SourceConfig(path=str(s)) for s in range(len(sizes))), max_samples=total)
    taken = choose(by_source, config, seed)
    flat = [c.sample_id for rows in taken for c in rows]
    assert len(flat) == len(set(flat)) == min(total, sum(sizes))
    for rows, source in zip(taken, by_source, strict=True):
        assert rows == [c for c in source if c in rows]


def test_impossible_mixes_are_errors_of_the_recipe() -> None:
    a, b = SourceConfig(path="a", weight=1.0), SourceConfig(path="b")
    with pytest.raises(ConfigError, match="all sources must have a weight, or none"):
        PromptsConfig(sources=(a, b))
    for name, value in (("cap", 0), ("weight", 0.0), ("weight", float("nan")), ("weight", float("inf")), ("limit", -1)):
        with pytest.raises(ConfigError, match=rf"prompts\.sources\.{name}"):
            SourceConfig(path="a", **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"prompts\.max_samples is 0"):
        PromptsConfig(sources=(b,), max_samples=0)


def test_the_same_content_under_another_id_is_counted_or_dropped(tmp_path: Path) -> None:
    write(tmp_path, "a", ["x", "y", "x"])
    write(tmp_path, "b", ["y", "z"])
    sources = SourceConfig(path="a"), SourceConfig(path="b")
    kept = mixed(tmp_path, *sources)
    assert (len(kept.conversations), kept.duplicate_content, kept.rejects) == (5, 2, [])
    dropped = mixed(tmp_path, *sources, duplicates="drop", max_bad_share=0.0)
    assert ids_of(dropped) == ["a-0", "a-1", "b-1"]
    assert dropped.duplicate_content == 2
    assert [(r.source, r.line, r.sample_id, r.reason) for r in dropped.rejects] == [
        ("a", 3, "a-2", "duplicate_content"), ("b", 1, "b-0", "duplicate_content"),
    ]  # fmt: skip
    assert "those of line 1;" in dropped.rejects[0].detail
    assert "those of line 2 of a;" in dropped.rejects[1].detail


def test_a_file_given_twice_repeats_its_ids(tmp_path: Path) -> None:
    write(tmp_path, "a", ["x", "y"])
    with pytest.raises(PromptError, match="none of its 2 rows can be used"):
        mixed(tmp_path, SourceConfig(path="a"), SourceConfig(path="a"))


def test_ids_leave_room_for_the_names_of_samples(tmp_path: Path) -> None:
    ids = ["i" * 238, "i" * 239, "a#turn-2", "a#turn-x", "a~12", "~", "a~b"]
    rows = [{"prompt": "x", "id": i} for i in ids]
    (tmp_path / "a").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = mixed(tmp_path, SourceConfig(path="a"))
    assert ids_of(found) == ["i" * 238, "a#turn-x", "~", "a~b"]
    assert [(r.line, r.reason) for r in found.rejects] == [(2, "bad_id"), (3, "bad_id"), (5, "bad_id")]
    for sample_id in ids_of(found):
        for made, conversation in ((sample_id, sample_id), (f"{sample_id}~3", f"{sample_id}~3")):
            assert [conversation_id(made + t) for t in ("", "#turn-2")] == [conversation] * 2
            assert [prompt_id(made + t) for t in ("", "#turn-2")] == [sample_id] * 2
    assert "expected at most 238" in found.rejects[0].detail
    assert "expected neither ~<number> nor #turn-<number>" in found.rejects[1].detail


def test_several_answers_have_ids_of_their_own() -> None:
    asked = [Conversation(i, [{"role": "user", "content": i}], "c") for i in ("x", "y")]
    assert answers_of(asked, 1) == asked
    ids = [c.sample_id for c in answers_of(asked, 3)]
    assert ids == ["x~1", "x~2", "x~3", "y~1", "y~2", "y~3"]
    assert [c.messages for c in answers_of(asked, 3)] == [asked[0].messages] * 3 + [asked[1].messages] * 3
    assert turn_suffix(1) == ""


def test_several_answers_need_sampling() -> None:
    assert GenerateConfig(answers_per_prompt=4, temperature=0.7).answers_per_prompt == 4
    for settings, words in [({"answers_per_prompt": 2}, "temperature above 0"), ({"answers_per_prompt": 0}, "above 0"),
                            ({"answers_per_prompt": 2, "temperature": 1.0, "mode": "keep"}, "mode keep")]:  # fmt: skip
        with pytest.raises(ConfigError, match=rf"generate\.answers_per_prompt.*{words}"):
            GenerateConfig(**settings)  # type: ignore[arg-type]
