"""The translation of PostgreSQL's errors to Perdure's, by SQLSTATE.

A message names the server, the database and the user, and what to do. It never holds the password or a statement's
parameters: PostgreSQL puts values into an error's detail, so only its primary message is used. The original error is
the `__cause__`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import psycopg

from perdure.errors import (
    Busy,
    DiskFull,
    OpenError,
    OutcomeUnknown,
    PerdureError,
    ReadOnlyStore,
    StoreError,
    Unavailable,
)
from perdure.storage.program import ConstraintFailed, ConstraintKind

# Serialization failure and deadlock: the transaction was rolled back and, as PostgreSQL documents, should run again.
RETRIED = frozenset({"40001", "40P01"})
# A prepared statement is missing or exists already: a pooler has switched to another session.
FOREIGN_SESSION = frozenset({"26000", "42P05"})
# A table has changed its columns since a statement was prepared: it is prepared again.
STALE_PLAN = "0A000"
_CONSTRAINTS: dict[str, ConstraintKind] = {
    "23505": "unique",
    "23503": "foreign_key",
    "23514": "check",
    "23502": "not_null",
}


@dataclass(frozen=True, slots=True)
class ConnectionTarget:
    """Where a store lives. `conninfo` may hold a password: it is in no message and no repr."""

    conninfo: str = field(repr=False)
    options: str = field(repr=False)
    host: str
    port: str
    database: str
    user: str
    schema: str

    def __str__(self) -> str:
        return f'database "{self.database}" on {self.host}:{self.port} as user "{self.user}"'


def translated(error: psycopg.Error, target: ConnectionTarget, timeout_s: float) -> PerdureError | ConstraintFailed:
    """Return the error to raise for the server's answer to a statement. Nothing was written."""
    state = error.sqlstate or ""
    said = error.diag.message_primary or type(error).__name__
    if state.startswith("23"):
        return ConstraintFailed(said, kind=_CONSTRAINTS.get(state, "other"))
    if state in ("55P03", "57014"):
        return Busy(f"{target} did not finish within {timeout_s:g} s: {said}. Nothing was written; try again later.")
    if state in RETRIED:
        return Busy(f"{target}: other writers got in the way again and again: {said}. Nothing was written.")
    if state == "53100":
        return DiskFull(f"{target} has no space left: {said}. Nothing was written; free space on the server.")
    if state == "25006":
        where = "" if "promote" in said else " Connect to the primary server."  # a replica says what it is
        return ReadOnlyStore(f"{target}: {said}.{where}")
    if state in ("42P01", "3F000"):
        return OpenError(
            f'{target} has no Perdure store in schema "{target.schema}": {said}. `perdure store create URL` makes one.'
        )
    if state == "42501" and "row-level security" in said:
        return OpenError(
            f"{target} may not write the rows of this tenant: {said}. `perdure doctor` shows what this role sees."
        )
    if state == "42501":
        return OpenError(
            f"{target} lacks a privilege: {said}. Let the owner grant it (`perdure store role` makes all the grants "
            "that a role needs), or open the store with another role."
        )
    if not state or state.startswith(("08", "53", "57P")):
        return Unavailable(f"{target}: {said}. Nothing was written; try again later.")
    if state in ("42P08", "42P18"):
        return StoreError(f"{said}: the statement must say the type, as in CAST(:name AS bigint) (SQLSTATE {state})")
    return StoreError(f"{target} refused a statement: {said} (SQLSTATE {state})")


def lost(reason: str, target: ConnectionTarget) -> Unavailable:
    """Return the error for a connection that was lost before anything could be committed."""
    return Unavailable(f"the connection to {target} was lost: {reason}. Nothing was written; try again later.")


def unknown(reason: str, target: ConnectionTarget) -> OutcomeUnknown:
    """Return the error for a connection that was lost after COMMIT was sent."""
    return OutcomeUnknown(
        f"the connection to {target} was lost while committing: {reason}. "
        "It may or may not have been written: look before writing it again."
    )


def not_opened(error: psycopg.Error, target: ConnectionTarget) -> StoreError:
    """Return the error for a failed first connection. libpq's text names host, port and user, not the password."""
    # A line for each host. After a refused connection libpq adds a question, which the advice below answers.
    lines = [" ".join(line.split()) for line in str(error).splitlines() if "Is the server running" not in line]
    said = "; ".join(line for line in lines if line)
    # A refused connection has no SQLSTATE. These two texts are the server's, by default in English.
    if "the database system is" in said or "too many clients" in said:
        return Unavailable(f"{target} takes no connections now: {said}")
    if "FATAL" in said:  # the server has answered
        return OpenError(f"cannot open {target}: {said}. Check the user, the password and the database's name.")
    return OpenError(f"cannot open {target}: {said.rstrip('.')}. Check that the server runs and that the URL is right.")


def not_connected(error: psycopg.Error, target: ConnectionTarget) -> Unavailable:
    """Return the error for a failed later connection."""
    said = " ".join(str(error).split())
    return Unavailable(f"cannot connect to {target}: {said}. Nothing was written; try again later.")
