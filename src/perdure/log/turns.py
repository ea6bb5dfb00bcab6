"""Single-writer ownership (the turn) of a thread whose nodes run effects.

`thread.owner` names the process that took the turn last. NULL: no process ever took it. Empty: a process that runs no
effects has written since. A turn is not given back. Another process takes it when the owner has died or has no work in
progress, which the caller's statement `Turn.busy` finds out. Then `Turn.fence` invalidates the old owner's work.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from perdure.storage.program import Batch, Rows, Sql, Statement

# Read it only while the thread's row is locked: then the owner cannot change until the transaction ends.
OWNER = Sql("SELECT owner FROM thread WHERE tenant = :tenant AND thread = :thread")
_SET_OWNER = Sql("UPDATE thread SET owner = :owner WHERE tenant = :tenant AND thread = :thread")
# A condition for statements that update a thread's row.
IS_OURS = "coalesce(owner, '') IN ('', :owner)"


class Turn(NamedTuple):
    """How a process takes turns.

    `owner`: this process, "" if it never took a turn. `gone`: an owner that is known to have died. `busy`: selects a
    row if another owner has work in progress. `fence`: invalidates that owner's work."""

    owner: str = ""
    gone: str = ""
    busy: Sql | None = None
    fence: Sql | None = None


class Held(Exception):
    """Another process has the turn and work in progress. Nothing was written."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


def take_turn(
    turn: Turn, tenant: int, thread: int, holder: str | None, now: int
) -> Generator[Batch, list[Rows], list[Statement]]:
    """Return the statements that take the turn from another holder. Raise Held if that holder is busy.

    The thread's row must be locked."""
    if holder == turn.owner:
        return []
    key = {"tenant": tenant, "thread": thread}
    statements = [_SET_OWNER(**key, owner=turn.owner)]
    if holder and turn.busy is not None and turn.fence is not None:
        if holder != turn.gone and (yield Batch(turn.busy(**key, owner=holder, now=now)))[0]:
            raise Held(holder)
        statements.append(turn.fence(**key, owner=holder, now=now))
    return statements
