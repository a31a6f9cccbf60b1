"""From prompt sources to conversations that a target can answer, and a list of the rows that are not fit.

Every row ends as one conversation or as one reject that names its line and the reason; none stops the rest.
Two shares guard a run against a wrong source: rows that cannot be used, and rows whose id was there before.
Each of them may be at most `max_bad_share` of a source's rows (apart, since a repeated row is not a damaged one).

The same id twice is rejected, since resume, masks and random streams go by id. The same content under two ids
is kept and counted. Prompts too long for the target are found in the generate stage, where token ids are known.
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
from stages.sources import BlankLine, RawRow, read_rows

__all__ = ["Conversation", "PromptImport", "Reason", "Reject", "import_prompts", "prompts_sha256", "to_prompt"]
_DEFAULT_BAD_SHARE = 0.5
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class PromptImport:
    """What came out of the sources."""

    conversations: list[Conversation]
    """In the order of the sources and their rows; ids are unique."""
    rejects: list[Reject]
    n_rows: int = 0
    """Rows read, good and bad, blank lines apart."""
    n_blank: int = 0
    """Blank lines: neither rows nor rejects."""
    duplicate_content: int = 0
    """Conversations that another one before them equals but for the id."""

    def reasons(self) -> dict[str, int]:
        """Rejects per reason, most frequent first."""
        return dict(Counter(r.reason for r in self.rejects).most_common())


def import_prompts(config: PromptsConfig | Sequence[SourceConfig], base: Path) -> PromptImport:
    """Read all sources, in order.

    Args:
        config: the sources, with or without the limits around them.
        base: folder that relative paths start from (the recipe's).

    Raises:
        PromptError: a source is missing, unreadable, empty, without a usable row, or has too large a share of
            bad rows; the message shows the first of them.
    """
    if isinstance(config, PromptsConfig):
        sources, max_bad_share = config.sources, config.max_bad_share
    else:
        sources, max_bad_share = tuple(config), _DEFAULT_BAD_SHARE
    importer = _Importer(base, max_bad_share)
    for source in sources:
        importer.read(source)
    return PromptImport(
        importer.conversations, importer.rejects, importer.n_rows, importer.n_blank, importer.duplicate_content
    )


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
    conversations: list[Conversation] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    n_rows: int = 0
    n_blank: int = 0
    duplicate_content: int = 0
    _first_with_id: dict[str, tuple[str, int]] = field(default_factory=dict)
    _contents: set[bytes] = field(default_factory=set)

    def read(self, source: SourceConfig) -> None:
        rows_before, good_before, rejects_before = self.n_rows, len(self.conversations), len(self.rejects)
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
        n_good = len(self.conversations) - good_before
        _require_fit(source, self.n_rows - rows_before, n_good, self.rejects[rejects_before:], self.max_bad_share)

    def _accept(self, row: RawRow, source: SourceConfig) -> None:
        if row.problem is not None:
            raise row.problem
        conversation = parse_row(row.value, source.category)
        first = self._first_with_id.setdefault(conversation.sample_id, (source.path, row.line))
        if first != (source.path, row.line):
            where = f"line {first[1]}" + ("" if first[0] == source.path else f" of {first[0]}")
            detail = f"id {conversation.sample_id!r} is that of {where} already; expected an id of its own"
            raise SampleRefused(Reason.DUPLICATE_ID, detail)
        content = hashlib.sha256(conversation.content_json().encode()).digest()
        self.duplicate_content += content in self._contents
        self._contents.add(content)
        self.conversations.append(conversation)


def _id_or_none(row: RawRow) -> str | None:
    try:
        return row_id(row.value) if isinstance(row.value, Mapping) else None
    except SampleRefused:
        return None


def _require_fit(source: SourceConfig, n_rows: int, n_good: int, rejects: list[Reject], max_bad_share: float) -> None:
    if n_rows == 0:
        raise PromptError(f"prompt source {source.path} is empty: it has no rows; expected at least one prompt")
    n_repeated = sum(r.reason == Reason.DUPLICATE_ID for r in rejects)
    n_bad = len(rejects) - n_repeated
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
