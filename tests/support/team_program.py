"""A team whose members do all that members can do, and a model of what must be left of it, for random programs.

Everything follows from the name of a message, its token: whom the handler charges, asks, calls and sends to. So a
message that is handled again, after a kill or a rewind, must do the same. What happened outside is lines of files,
which outlive a killed process: `Ledger`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import perdure
from perdure.errors import NotFound, RunFailed
from perdure.teams import Team

NAMES = ("a", "b", "c", "d")
HOPS = 3


class Ledger:
    """What the world outside of the store has seen, and which messages are broken, in a folder."""

    folder = Path()

    def note(self, kind: str, token: str, key: str) -> None:
        handle = os.open(self.folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{kind} {token} {key}\n".encode())
        os.close(handle)

    def lines(self) -> list[list[str]]:
        path = self.folder / "ledger"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def refused(self) -> set[str]:
        """Return the messages whose handlers called a member that had left."""
        return {line[1] for line in self.lines() if line[0] == "refuse"}

    def charges(self) -> dict[str, list[str]]:
        """Return for each token the keys of its charges that were not undone. A receiver acts once for each key."""
        seen, undone = dict[str, str](), set[str]()
        for kind, token, *keys in self.lines():
            key = "".join(keys)
            if kind == "charge":
                seen.setdefault(key, token)
            elif kind == "undo":
                undone.add(key)
        charged: dict[str, list[str]] = {}
        for key, token in seen.items():
            if key not in undone:
                charged.setdefault(token, []).append(key)
        return charged

    def break_messages(self, tokens: set[str]) -> None:
        new = self.folder / "broken.new"
        new.write_text(" ".join(tokens))
        new.replace(self.folder / "broken")

    def is_broken(self, token: str) -> bool:
        path = self.folder / "broken"
        return path.exists() and token in path.read_text().split()


LEDGER = Ledger()


def take_back(token: str, result: str) -> None:
    LEDGER.note("undo", token, result)


@perdure.effect(on_doubt="retry", undo=take_back, name="program.charge")
def charge(token: str, key: perdure.IdempotencyKey) -> str:
    LEDGER.note("charge", token, str(key))
    return str(key)


@perdure.durable(name="program.child")
def child(token: str) -> str:
    charge(f"{token}/child")
    return token


@perdure.step(name="program.is_broken")
def is_broken(token: str) -> bool:
    """A step, because a turn that is replayed after a kill must go the same way."""
    return LEDGER.is_broken(token)


class Plan:
    """What the handler of a message does."""

    def __init__(self, token: str, hops: int, me: str) -> None:
        chance = Random(f"{token} at {me}")
        self.charges, self.asks, self.spawns = (chance.random() < share for share in (0.5, 0.1, 0.15))
        self.receives, self.sends_now = chance.random() < 0.3, chance.random() < 0.3
        callees = NAMES[NAMES.index(me) + 1 :]  # later ones alone: no two wait for each other
        calls = hops > 0 and bool(callees) and chance.random() < 0.3
        self.call = (chance.choice(callees), {"token": f"{token}.c", "hops": hops - 1}) if calls else None
        count = chance.choice((0, 1, 1, 2)) if hops else 0
        self.sends = [(chance.choice(NAMES), {"token": f"{token}.{n}", "hops": hops - 1}) for n in range(count)]

    def follows(self) -> list[tuple[str, dict[str, Any]]]:
        return [*self.sends, *([self.call] if self.call else [])]


def handle(me: str, state: Any, message: Any) -> str:
    """Handle a message at a member."""
    token = message["token"]
    plan = Plan(token, message["hops"], me)
    if plan.charges:
        charge(token)
    if plan.receives and (note := perdure.receive("notes", timeout_s=0)) is not None:
        state["notes"].append(note)
    if is_broken(token):
        raise ValueError(token)
    if plan.call is not None:  # before what leaves at once: it fails if the callee has left
        try:
            assert perdure.call(*plan.call) == plan.call[1]["token"]
        except RunFailed:
            state["refused"] = state.get("refused", 0) + 1
        except NotFound:
            LEDGER.note("refuse", token, "")
            raise
    for number, (to, follow) in enumerate(plan.sends):
        perdure.send(to, follow, now=True) if plan.sends_now and number == 0 else perdure.send(to, follow)
    if plan.asks:
        assert perdure.ask(f"{token}?") == "yes"
    if plan.spawns:
        assert perdure.spawn(child, token).result() == token
    state["got"].append(token)
    return str(token)


def program_team(store: perdure.Store, folder: Path, attempts: int | None = None) -> Team:
    """Declare the team whose random programs `test_random_team_programs.py` runs.

    Where processes are killed there are many `attempts`: what a turn sent at once stays sent when it is given up.
    """
    LEDGER.folder = folder
    team = store.team("program")
    empty: dict[str, Any] = {"got": [], "notes": []}

    @team.agent(state=empty, attempts=attempts or 2)
    def a(state: Any, message: Any) -> str:
        return handle("a", state, message)

    @team.agent(state=empty, attempts=attempts or 1)
    def b(state: Any, message: Any) -> str:
        return handle("b", state, message)

    @team.agent(state=empty, attempts=attempts or 1, supervisor="nobody")
    def c(state: Any, message: Any) -> str:
        return handle("c", state, message)

    @team.agent(state=empty, attempts=attempts or 3)
    def d(state: Any, message: Any) -> str:
        return handle("d", state, message)

    return team


def expected(sent: dict[str, str]) -> Iterator[tuple[str, Plan]]:
    """Return all messages that follow from those that were sent from outside, with their plans."""
    waiting: list[tuple[str, dict[str, Any]]] = [(to, {"token": token, "hops": HOPS}) for token, to in sent.items()]
    while waiting:
        to, message = waiting.pop()
        plan = Plan(message["token"], message["hops"], to)
        yield message["token"], plan
        waiting += plan.follows()


def check_program(
    states: dict[str, Any], notes_waiting: list[Any], sent: dict[str, str], notes: set[str], spoilt: set[str]
) -> None:
    """Fail unless each message was handled once, each charge is there once, and each note is somewhere once.

    `spoilt` messages were given up in a program that also went back: a charge that was undone after the point that the
    team went back to stays undone, and what their failed turns started follows from them anew.
    """
    plans = dict(expected(sent))
    handled = Counter(token for state in states.values() for token in state["got"])
    once = Counter(plans.keys())
    assert handled == once, {"lost": once - handled, "repeated": handled - once}
    charged = LEDGER.charges()
    due = {token for token, plan in plans.items() if plan.charges}
    due |= {f"{token}/child" for token, plan in plans.items() if plan.spawns}
    due = {token for token in due if not any(f"{token}.".startswith((f"{one}.", f"{one}/")) for one in spoilt)}
    wrong = {token: charged.get(token, []) for token in due if len(charged.get(token, [])) != 1}
    assert not wrong, wrong
    got = [note for state in states.values() for note in state["notes"]]
    assert Counter([*got, *notes_waiting]) == Counter(notes)
