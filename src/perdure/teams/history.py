"""What a team has done: turns and messages, drawn as a diagram and put into words."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from perdure.snapshots.diff import read_at
from perdure.snapshots.handle import find_snapshot, list_snapshots
from perdure.storage.program import Batch, Flow, Program, Sql, read
from perdure.teams.diagram import diagram
from perdure.teams.explain import TeamFacts, explain
from perdure.teams.members import find_team
from perdure.teams.recovery import SentMessage, recovery_line

if TYPE_CHECKING:
    from perdure.ops.store import Store

MESSAGES_MAX = 100_000  # the newest that are read
_TRIED_MAX = 50  # members of which the words say how far others fall with them
_TURNS = Sql(
    "SELECT id, turn FROM run WHERE tenant = :tenant AND root = :root AND turn IS NOT NULL ORDER BY run",
)
_MESSAGES = Sql(
    """SELECT m.sender, m.sent_turn, r.id, CASE WHEN m.state = 1 THEN m.taken_turn END
    FROM mail m JOIN run r ON r.tenant = m.tenant AND r.run = m.run
    WHERE r.tenant = :tenant AND r.root = :root AND m.state < 2 AND m.sent_turn IS NOT NULL AND m.sender IS NOT NULL
    ORDER BY m.at DESC, m.run, m.seq DESC LIMIT :limit"""
)
_COUNTS = Sql(
    """SELECT count(*), coalesce(sum(CASE WHEN m.state = 0 THEN 1 ELSE 0 END), 0)
    FROM mail m JOIN run r ON r.tenant = m.tenant AND r.run = m.run
    WHERE r.tenant = :tenant AND r.root = :root AND m.state < 2"""
)
_PEERS = Sql("SELECT count(*) FROM peer_key WHERE tenant = :tenant AND team = :team")


class TeamHistory(NamedTuple):
    """The newest turn of each member, and the messages between them, the oldest first."""

    turns: dict[str, int]
    messages: list[SentMessage]


def read_history(tenant: int, root: int, team: str, limit: int = MESSAGES_MAX) -> Program[TeamHistory]:
    """Return what the tables have of a team. Taken messages are there as long as retention keeps them."""
    turns, messages = yield Batch(_TURNS(tenant=tenant, root=root), _MESSAGES(tenant=tenant, root=root, limit=limit))
    prefix = f"{team}/"
    return TeamHistory(
        {run_id.removeprefix(prefix): turn for run_id, turn in turns},
        [
            SentMessage(sender.removeprefix(prefix), sent_turn, receiver.removeprefix(prefix), taken_turn)
            for sender, sent_turn, receiver, taken_turn in reversed(messages)
        ],
    )


def _turns(tenant: int, root: int, team: str) -> Program[dict[str, int]]:
    [rows] = yield Batch(_TURNS(tenant=tenant, root=root))
    return {run_id.removeprefix(f"{team}/"): turn for run_id, turn in rows}


def draw(whole: Store, team: str, at: str | None) -> Flow[str]:
    """Return the diagram of a team, with the cut of a snapshot through it."""
    tenant, root = yield from find_team(whole._context, team)
    history = yield from read(partial(read_history, tenant, root.run, team, 5_000))
    cut = None
    if at is not None:
        snapshot = yield from find_snapshot(whole, at)
        cut = yield from read_at(snapshot.store._context, partial(_turns, tenant, root.run, team))
    return diagram(*history, cut, title=f"Team {team}" if at is None else f"Team {team} at snapshot {at}")


def tell(whole: Store, team: str) -> Flow[str]:
    """Return in words which ways of checkpointing a team has, and what each costs."""
    tenant, root = yield from find_team(whole._context, team)
    history = yield from read(partial(read_history, tenant, root.run, team))
    (messages, waiting), peers = yield from read(partial(_count, tenant, root.run, team))
    snapshots = yield from list_snapshots(whole)
    facts = TeamFacts(
        team, 1 + peers, len(history.turns), sum(history.turns.values()), messages, waiting, len(snapshots),
        _furthest_fall(history),
    )  # fmt: skip
    return explain(facts)


def _count(tenant: int, root: int, team: str) -> Program[tuple[tuple[int, int], int]]:
    counts, peers = yield Batch(_COUNTS(tenant=tenant, root=root), _PEERS(tenant=tenant, team=team), last=True)
    return (int(counts[0][0]), int(counts[0][1])), int(peers[0][0])


def _furthest_fall(history: TeamHistory) -> tuple[str, int, int] | None:
    """Return the member whose step back of one turn undoes most turns: with how many others fall, and the turns."""
    worst: tuple[str, int, int] | None = None
    for member in [name for name, turn in history.turns.items() if turn][:_TRIED_MAX]:
        line = recovery_line(history.turns, history.messages, {member: history.turns[member] - 1})
        undone = sum(fall.from_turn - fall.to_turn for fall in line.falls)
        if len(line.falls) > 1 and (worst is None or undone > worst[2]):
            worst = member, len(line.falls) - 1, undone
    return worst
