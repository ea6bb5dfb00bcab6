"""Which way of checkpointing a team has, and what each of the three costs, in words. Pure."""

from __future__ import annotations

from typing import NamedTuple

from perdure.values.amounts import plural


class TeamFacts(NamedTuple):
    """What the words depend on."""

    team: str
    stores: int
    members: int
    turns: int
    messages: int
    waiting: int  # messages that no turn has taken
    snapshots: int  # that are kept
    furthest_fall: tuple[str, int, int] | None = None  # a member that goes back one turn, others that fall, turns


def explain(facts: TeamFacts) -> str:
    """Return a page of plain text: what the team has now, then the three ways with their costs."""
    return "\n\n".join((_what_it_has(facts), _coordinated(facts), _uncoordinated(facts), _induced(facts)))


def _what_it_has(facts: TeamFacts) -> str:
    where = "one store" if facts.stores == 1 else f"{facts.stores} stores"
    kept = f"{plural(facts.snapshots, 'snapshot')} {'is' if facts.snapshots == 1 else 'are'} kept"
    has = "coordinated cuts and a checkpoint of each turn" if facts.snapshots else "a checkpoint of each turn"
    return (
        f"Team {facts.team}: {plural(facts.members, 'member')} in {where}, {plural(facts.turns, 'turn')}, "
        f"{plural(facts.messages, 'message')}, {facts.waiting:,} of them waiting; {kept}.\n"
        f"It has {has}."
    )


def _coordinated(facts: TeamFacts) -> str:
    if facts.stores == 1:
        how = (
            "In one store a cut is a snapshot: one transaction of milliseconds, and no agent stops. Messages that wait "
            "are rows, so they are part of it."
        )
    else:
        how = (
            "Each store takes a snapshot when it first hears of the cut, by a batch or from the register, and before "
            "it takes the batch. No agent stops. What is in flight is in an outbox, which is part of the cut. It "
            "completes when the slowest store has heard of it."
        )
    return (
        f"1. Coordinated (`team.snapshot()`). {how}\n"
        "   Restoring it loses the turns since, of all members, and nothing else. Each kept snapshot costs the old "
        "rows that have changed since."
    )


def _uncoordinated(facts: TeamFacts) -> str:
    if facts.furthest_fall is None:
        now = "No other member falls if a member of this team goes back one turn."
    else:
        member, others, undone = facts.furthest_fall
        now = (
            f"In this team the furthest fall of one turn is that of {member}: it draws {plural(others, 'other')} "
            f"back, and {plural(undone, 'turn')} {'is' if undone == 1 else 'are'} undone."
        )
    return (
        "2. Uncoordinated (`team.rewind(member, turn=…)`). Each turn saves its member: it costs nothing more, and any "
        "turn can be gone back to.\n"
        f"   Who took a message that is undone falls too: the recovery line. {now} Were saves rarer than turns, one "
        "fall could draw the next (the domino effect), down to the start."
    )


def _induced(facts: TeamFacts) -> str:
    who = "Between these stores, batches carry the number of the cut: any store may begin one."
    if facts.stores == 1:
        who = "For members that save on their own in one store it is not needed: each turn is saved."
    return (
        "3. Communication-induced (BCS). Messages carry the number of the sender's newest save, and the receiver saves "
        "first if its own is lower. Saves of one number are consistent, so no domino falls, without a coordinator.\n"
        f"   It costs forced saves: up to one by each member for each save. {who}"
    )
