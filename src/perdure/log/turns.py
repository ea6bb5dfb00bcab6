"""Whose turn it is to extend a thread, where two processes must not: one at a time runs the effects of its nodes.

`thread.owner` names the process that took the turn last. NULL: none ever had to; empty: one that runs no effects has
written since. A turn is not given back. Another process takes it as soon as its owner has nothing under way, which is
the caller's to say (`Turn.busy`), or has died. What the old owner left is fenced then (`Turn.fence`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from perdure.storage.program import Batch, Rows, Sql, Statement

# The row is locked when this is asked: nothing about it changes until the transaction ends.
OWNER = Sql("SELECT owner FROM thread WHERE tenant = :tenant AND thread = :thread")
_SET_OWNER = Sql("UPDATE thread SET owner = :owner WHERE tenant = :tenant AND thread = :thread")
# A condition of statements that change a thread's row.
IS_OURS = "coalesce(owner, '') IN ('', :owner)"


class Turn(NamedTuple):
    """This process, "" if it never took a turn; an owner that is known to have died; and what to ask of another."""

    owner: str = ""
    gone: str = ""
    busy: Sql | None = None
    fence: Sql | None = None


class Held(Exception):
    """Another process has the turn, and work under way: nothing was written."""

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


def take_turn(
    turn: Turn, tenant: int, thread: int, holder: str | None, now: int
) -> Generator[Batch, list[Rows], list[Statement]]:
    """What takes the turn from its holder, if that is another. Raises Held. For a thread whose row is locked."""
    if holder == turn.owner:
        return []
    this = {"tenant": tenant, "thread": thread}
    statements = [_SET_OWNER(**this, owner=turn.owner)]
    if holder and turn.busy is not None and turn.fence is not None:
        if holder != turn.gone and (yield Batch(turn.busy(**this, owner=holder, now=now)))[0]:
            raise Held(holder)
        statements.append(turn.fence(**this, owner=holder, now=now))
    return statements
