"""Errors of the formats on disk, and the base of every error this project raises on purpose.

Each takes one finished message (what it is about, what was found, what was expected, what to do), so
that pickling across a process boundary keeps it whole.
"""

from __future__ import annotations


class DFlashError(Exception):
    """Base of all errors that a user can do something about; the command line prints only its message."""


class StorageFault(DFlashError):
    """The disk is full, read-only or not ours, or the object store is away: later, the same may go well."""


class CacheError(DFlashError):
    """Something on disk is not what it has to be."""


class BadLocation(CacheError):
    """A URL that names no place where a cache or run could lie."""


class UnknownName(CacheError):
    """A shard or sample was asked for that the plan does not have."""


class ShardNotCommitted(CacheError, FileNotFoundError):
    """The shard has no commit marker: it does not exist yet, whatever files lie about."""


class ShardCorrupt(CacheError):
    """A committed shard is damaged: an object is missing, short, or fails a checksum."""


class FingerprintMismatch(CacheError):
    """Data on disk was made under another identity than the one expected."""


class SchemaVersion(CacheError):
    """Data on disk was written under a schema version that this code does not know."""


class ShardRefused(CacheError):
    """A shard must not be committed: a layer's states are all zero, or two layers are identical."""


class ResponsesError(CacheError):
    """The responses table is damaged or incomplete."""
