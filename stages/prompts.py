"""From prompt sources to conversations that a target can answer, and a list of the rows that are not fit.

Every row ends as one conversation or as one reject that names its line and the reason; none stops the rest.
Two shares guard a run against a wrong source: rows that cannot be used, and rows whose id was there before.
Each of them may be at most `max_bad_share` of a source's rows (apart, since a repeated row is not a damaged one).

The same id twice is rejected, since resume, masks and random streams go by id. The same content under two ids
is kept and counted, or rejected (`prompts.duplicates`). Of what is fit, the mix takes its share (`stages.mix`).
What only token ids can tell (too long, control tokens in a text) is found in the generate stage.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cache_schema.identity import canonical_json
from cache_schema.rejects import Reject
from stages.config import PromptsConfig, SourceConfig
from stages.conversation import Conversation, Reason, parse_row, row_id
from stages.errors import PromptError, SampleRefused
from stages.mix import choose
from stages.sources import BlankLine, RawRow, read_rows

__all__ = [
    "Conversation",
    "PromptImport",
    "Reason",
    "Reject",
    "SourceCount",
    "answers_of",
    "import_prompts",
    "prompts_sha256",
    "to_prompt",
]
_EXAMPLES = 3
Place = tuple[int, str, int]
"""Where a row stands: number and path of its source, line. The same file may be two sources."""


@dataclass(frozen=True, slots=True)
class SourceCount:
    """What a source gave."""

    path: str
    n_rows: int
    n_fit: int
    """Rows that could be used."""
    n_taken: int
    """Of these, what caps, weights and total took."""


@dataclass(frozen=True, slots=True)
class PromptImport:
    """What came out of the sources."""

    conversations: list[Conversation]
    """What was taken, in the order of the sources and their rows; ids are unique."""
    rejects: list[Reject]
    n_rows: int = 0
    """Rows read, good and bad, blank lines apart."""
    n_blank: int = 0
    """Blank lines: neither rows nor rejects."""
    duplicate_content: int = 0
    """Rows whose messages and tools are those of another one before them, under another id."""
    sources: list[SourceCount] = field(default_factory=list)

    @property
    def n_not_taken(self) -> int:
        """Conversations that are fit and that caps, weights and total left out."""
        return sum(s.n_fit - s.n_taken for s in self.sources)

    def reasons(self) -> dict[str, int]:
        """Rejects per reason, most frequent first."""
        return dict(Counter(r.reason for r in self.rejects).most_common())


def import_prompts(config: PromptsConfig | Sequence[SourceConfig], base: Path, seed: int = 0) -> PromptImport:
    """Read all sources, in order, and take the mix.

    Args:
        config: the sources, with or without the limits around them.
        base: folder that relative paths start from (the recipe's).
        seed: of the choice, where caps, weights or a total leave something out.

    Raises:
        PromptError: a source is missing, unreadable, empty, without a usable row, has too large a share of
            bad rows (the message shows the first of them), or gets no share in the mix.
    """
    if not isinstance(config, PromptsConfig):
        config = PromptsConfig(sources=tuple(config))
    importer = _Importer(base, config.max_bad_share, config.duplicates == "drop")
    for source in config.sources:
        importer.read(source)
    taken = choose(importer.by_source, config, seed)
    counts = [SourceCount(source.path, n, len(fit), len(rows)) for source, n, fit, rows
              in zip(config.sources, importer.rows_of, importer.by_source, taken, strict=True)]  # fmt: skip
    _require_shares(counts)
    return PromptImport(
        [c for rows in taken for c in rows], importer.rejects, importer.n_rows, importer.n_blank,
        importer.duplicate_content, counts,
    )  # fmt: skip


def _require_shares(counts: Sequence[SourceCount]) -> None:
    for count in counts:
        if count.n_taken == 0:
            sizes = ", ".join(f"{c.path}: {c.n_taken} of {c.n_fit}" for c in counts)
            raise PromptError(
                f"prompt source {count.path}: the mix takes none of its {count.n_fit} conversations ({sizes}); raise "
                "its weight, the limits of the scarcest source, or prompts.max_samples"
            )


def answers_of(conversations: Sequence[Conversation], n: int) -> list[Conversation]:
    """Each conversation n times, as `<id>~1` … `<id>~n`; one answer leaves the ids as they are."""
    if n == 1:
        return list(conversations)
    return [replace(c, sample_id=f"{c.sample_id}~{k}") for c in conversations for k in range(1, n + 1)]


def to_prompt(conversation: Conversation) -> Conversation:
    """The conversation without the assistant's turns at its end: what the target is asked to answer anew."""
    last = max(i for i, m in enumerate(conversation.messages) if m["role"] != "assistant")
    return replace(conversation, messages=conversation.messages[: last + 1])


def prompts_sha256(conversations: Sequence[Conversation]) -> str:
    """SHA-256 over ids, messages, tools and categories, in order: the input's part of a run's identity."""
    digest = hashlib.sha256()
    for c in conversations:
        row = {"sample_id": c.sample_id, "messages": c.messages, "category": c.category, "tools": c.tools}
        digest.update(canonical_json(row).encode() + b"\n")
    return digest.hexdigest()


@dataclass(slots=True)
class _Importer:
    base: Path
    max_bad_share: float
    drop_duplicates: bool = False
    by_source: list[list[Conversation]] = field(default_factory=list)
    rows_of: list[int] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    n_rows: int = 0
    n_blank: int = 0
    duplicate_content: int = 0
    _first_with_id: dict[str, Place] = field(default_factory=dict)
    _first_with_content: dict[bytes, Place] = field(default_factory=dict)

    def read(self, source: SourceConfig) -> None:
        rows_before, rejects_before = self.n_rows, len(self.rejects)
        self.by_source.append([])
        for row in read_rows(source, self.base):
            if isinstance(row, BlankLine):
                self.n_blank += 1
                continue
            self.n_rows += 1
            try:
                self._accept(row, source)
            except SampleRefused as refused:
                reject = Reject(source.path, row.line, _id_or_none(row), str(refused.reason), refused.detail)
                self.rejects.append(reject)
        self.rows_of.append(self.n_rows - rows_before)
        n_good = len(self.by_source[-1])
        _require_fit(source, self.rows_of[-1], n_good, self.rejects[rejects_before:], self.max_bad_share)

    def _accept(self, row: RawRow, source: SourceConfig) -> None:
        if row.problem is not None:
            raise row.problem
        conversation = parse_row(row.value, source.category)
        here = (len(self.by_source), source.path, row.line)
        first = self._first_with_id.setdefault(conversation.sample_id, here)
        if first != here:
            where = _place(first, here)
            detail = f"id {conversation.sample_id!r} is that of {where} already; expected an id of its own"
            raise SampleRefused(Reason.DUPLICATE_ID, detail)
        content = hashlib.sha256(conversation.content_json().encode()).digest()
        first = self._first_with_content.setdefault(content, here)
        if first != here:
            self.duplicate_content += 1
            if self.drop_duplicates:
                detail = f"its messages are those of {_place(first, here)}; expected others (prompts.duplicates: drop)"
                raise SampleRefused(Reason.DUPLICATE_CONTENT, detail)
        self.by_source[-1].append(conversation)


def _place(place: Place, seen_from: Place) -> str:
    return f"line {place[2]}" + ("" if place[0] == seen_from[0] else f" of {place[1]}")


def _id_or_none(row: RawRow) -> str | None:
    try:
        return row_id(row.value) if isinstance(row.value, Mapping) else None
    except SampleRefused:
        return None


def _require_fit(source: SourceConfig, n_rows: int, n_good: int, rejects: list[Reject], max_bad_share: float) -> None:
    if n_rows == 0:
        raise PromptError(f"prompt source {source.path} is empty: it has no rows; expected at least one prompt")
    n_repeated = sum(r.reason == Reason.DUPLICATE_ID for r in rejects)
    # Dropping rows of the same content was asked for: they are neither bad nor repeated ids.
    n_bad = sum(r.reason != Reason.DUPLICATE_CONTENT for r in rejects) - n_repeated
    if n_good and max(n_bad, n_repeated) <= max_bad_share * n_rows:
        return
    if n_good:
        found = f"{n_bad} of its {n_rows} rows are bad and {n_repeated} repeat an id"
    else:
        found = f"none of its {n_rows} rows can be used"
    first = "".join(f"\n  line {r.line}: {r.reason}: {r.detail}" for r in rejects[:_EXAMPLES])
    raise PromptError(
        f"prompt source {source.path}: {found}; at most {max_bad_share:.0%} of either are allowed "
        f"(prompts.max_bad_share). Mend the source, or raise the limit. The first:{first}"
    )
