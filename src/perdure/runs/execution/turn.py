"""`AgentTurn`: the message that a member of a team handles, its state, and what it sends when the turn ends."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from blake3 import blake3

from perdure.errors import UsageError
from perdure.runs.journal.mail import MailRow
from perdure.runs.run_table import RunRow
from perdure.threads.context import Cursor

MESSAGE_BYTES_MAX = 1_000_000
ATTEMPTS = 5  # of a message, unless the agent says otherwise


class AgentOptions(NamedTuple):
    """The options of `@team.agent` that its turns obey."""

    attempts: int = ATTEMPTS
    policy: str = "retry"
    supervisor: str | None = None


class MailDraft(NamedTuple):
    """A message that leaves with the turn. `target` names a member of the team, or a run.

    With `is_id` it is the id of a run, and the message is left out if there is no such run: an answer whose caller was
    deleted, or a notice to a supervisor that never joined, must not stop the member.
    """

    target: str
    value: bytes
    topic: str = ""
    header: bytes | None = None
    for_turn: int | None = None
    is_id: bool = False


class Sent:
    """The result of a buffered send, which an async handler may await."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


SENT = Sent()


class AgentTurn:
    """One turn of a member. `number` counts from 1."""

    def __init__(self, row: RunRow, mail: MailRow, cursor: Cursor, text: bytes) -> None:
        self.row, self.number = row, (row.turn or 0) + 1
        self.mail, self.cursor, self.text = mail, cursor, text
        self.lineage = turn_incarnation(row.incarnation, mail, 0)  # however often the message was given up
        self.undone = frozenset[str](mail.about.get("undone", ()))
        self.state: Any = None  # the handler changes it in place
        self.message: Any = None
        self.sends: list[MailDraft] = []


def turn_incarnation(incarnation: bytes, mail: MailRow, given_up: int | None = None) -> bytes:
    """Return what the ids of a turn's children and calls are derived from.

    It follows from the message. So a message that is handled again after a rewind has the same ids, and another message
    at the same place has others. A message that was given up, and is sent again, has new ones: its children were
    undone. A nonce tells messages apart for which a sender outside chose the same key, after retention has removed the
    first one. `given_up` asks for the ids of an earlier time; those of 0 are what the keys of effects are derived from.
    """
    about = mail.about
    parts = (
        incarnation,
        mail.key.encode(),
        about.get("given_up", 0) if given_up is None else given_up,
        about.get("nonce", "").encode(),
    )
    return blake3(b"%b/%b/%d/%b" % parts).digest(16)


def member_name(target: object) -> str:
    """Return the name that a message is sent to: of an agent's function, or the text itself."""
    name = getattr(target, "perdure_member", target)
    if not isinstance(name, str) or not name:
        raise UsageError(f"a message is sent to the name of a member or the id of a run, not to {target!r}")
    return name


def team_of(run_id: str) -> str:
    """Return the team of a member by its run's id, such as research/writer."""
    return run_id.partition("/")[0]


def check_size(text: bytes) -> bytes:
    """Return the text of a message. Raises UsageError if it is too large for a box."""
    if len(text) > MESSAGE_BYTES_MAX:
        raise UsageError(
            f"a message of {len(text):,} bytes: at most {MESSAGE_BYTES_MAX:,}. Save it (a thread, an item of memory) "
            "and send where it is"
        )
    return text
