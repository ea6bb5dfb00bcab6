"""The translation of apsw's exceptions to Perdure's.

Each message names the file and says what to do. The original error is its `__cause__`. An error without a translation
becomes a `StoreError`. Callers decide whether to retry.
"""

from __future__ import annotations

import apsw

from perdure.errors import Busy, Damaged, DiskFull, OpenError, PerdureError, ReadOnlyStore, StoreError
from perdure.storage import metrics
from perdure.storage.program import ConstraintFailed, ConstraintKind

_CONSTRAINT_KINDS: dict[int, ConstraintKind] = {
    apsw.SQLITE_CONSTRAINT_UNIQUE: "unique",
    apsw.SQLITE_CONSTRAINT_PRIMARYKEY: "unique",
    apsw.SQLITE_CONSTRAINT_ROWID: "unique",
    apsw.SQLITE_CONSTRAINT_FOREIGNKEY: "foreign_key",
    apsw.SQLITE_CONSTRAINT_CHECK: "check",
    apsw.SQLITE_CONSTRAINT_NOTNULL: "not_null",
}


def translate(error: BaseException, path: str, timeout_s: float) -> BaseException:
    """Return a new error with `error` as its cause. An error that is not SQLite's is returned itself.

    Each call makes a new object: the jobs of a group share a failure, and must not share a traceback.
    """
    if not isinstance(error, apsw.Error):
        return error
    translated = _translated(error, path, timeout_s)
    translated.__cause__ = error
    return translated


def _translated(error: apsw.Error, path: str, timeout_s: float) -> PerdureError | ConstraintFailed:
    code = getattr(error, "extendedresult", 0)
    match error:
        case apsw.ConstraintError() if code == apsw.SQLITE_CONSTRAINT_TRIGGER:  # of a replica
            return ReadOnlyStore(f"{path}: {error}")
        case apsw.ConstraintError():
            return ConstraintFailed(str(error), kind=_CONSTRAINT_KINDS.get(code, "other"))
        case apsw.BusyError() | apsw.LockedError():
            return busy(path, timeout_s)
        case apsw.FullError():
            return DiskFull(f"no space left for {path}: nothing of this operation was written; free some space")
        case apsw.ReadOnlyError() if code == apsw.SQLITE_READONLY_DBMOVED:
            return StoreError(f"{path} was moved or deleted while it was open; put it back and open it again")
        case apsw.ReadOnlyError() | apsw.PermissionsError():
            return read_only(path)
        case apsw.NotADBError():
            return OpenError(f"{path} is not an SQLite file (or is encrypted); choose another path")
        case apsw.CorruptError():
            if (sink := metrics.sink) is not None:
                sink.record(metrics.CORRUPTIONS, 1, "file")
            return Damaged(f"{path} is damaged: {error}; run `perdure store repair`, or restore it from a backup")
        case apsw.CantOpenError():
            return OpenError(f"SQLite cannot open {path}: {error}; check its permissions and those of its folder")
        case apsw.IOError():
            name = apsw.mapping_extended_result_codes.get(code, "SQLITE_IOERR")
            return StoreError(f"the disk under {path} failed ({name}); check the disk, then open the store again")
        case _:
            return StoreError(f"SQLite refused a statement on {path}: {type(error).__name__}: {error}")


def busy(path: str, timeout_s: float) -> Busy:
    """Return the error for a write that another writer kept waiting until its deadline."""
    if (sink := metrics.sink) is not None:
        sink.record(metrics.LOCK_TIMEOUTS, 1, "sqlite")
    return Busy(
        f"another writer held {path} for longer than the deadline of {timeout_s:g} s; nothing was written, try again"
    )


def read_only(path: str) -> ReadOnlyStore:
    """Return the error for a write that the disk, the file or its folder does not allow."""
    return ReadOnlyStore(
        f"{path} cannot be written: the file, its folder or the disk is read-only; nothing was written"
    )
