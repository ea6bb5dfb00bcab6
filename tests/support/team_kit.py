"""Fixtures and agents for tests of teams: a store on either database, and agents that pass coins to each other."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab import PLACES, open_place

import perdure
from perdure.storage.program import Batch, Program, Rows, Sql, drive, read, write
from perdure.teams import Team

_numbers = itertools.count(1)


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    """A store on either database, for all tests of a module."""
    yield from open_place(request, tmp_path_factory)


@pytest.fixture
def store(place: perdure.Store) -> perdure.Store:
    """A tenant of its own."""
    return place.tenant(f"team-{next(_numbers)}")


def query(store: perdure.Store, text: str, **params: Any) -> Rows:
    """The rows of a statement that both databases understand. `:tenant` is the store's tenant."""
    tenant = drive(store._context.driver, store._context.tenant())

    def look() -> Program[Rows]:
        [rows] = yield Batch(Sql(text)(tenant=tenant, **params), last=True)
        return rows

    rows: Rows = drive(store._context.driver, read(look))
    return rows


def due_now(store: perdure.Store) -> None:
    """Make runs due that wait for another attempt."""

    def op() -> Program[None]:
        yield Batch(Sql("UPDATE run SET wake_at = 0 WHERE status = 'queued'")(), last=True)

    drive(store._context.driver, write(op))


def state_of(team: Team, member: str) -> Any:
    return team._whole.thread(f"run:{team.name}/{member}").load().state


def states(team: Team) -> dict[str, Any]:
    return {one.name: state_of(team, one.name) for one in team.members()}


def mail_states(store: perdure.Store) -> Counter[int]:
    """How many messages there are of each state: 0 waiting, 1 taken, 2 dead, 3 withdrawn."""
    return Counter(state for (state,) in query(store, "SELECT state FROM mail WHERE tenant = :tenant"))


COINS = 10  # that each agent begins with


def neighbours(name: str, count: int) -> list[str]:
    number = int(name.removeprefix("a"))
    return [f"a{(number * 7 + step) % count}" for step in (1, 2, 3)]


def coin_handler(count: int) -> Callable[[Any, Any], None]:
    """Return a handler that passes coins on. It notices a lost, repeated or reordered message of each sender."""

    def a0(state: Any, message: Any) -> None:
        sender, name = message["from"], message["to"]
        if sender is not None:
            last = state["seen"].get(sender, 0)
            assert message["n"] == last + 1, f"{name} got {message['n']} of {sender} after {last}"
            state["seen"][sender] = message["n"]
        state["coins"] += message["coins"]
        state["turns"] += 1
        if message["hops"]:
            to = neighbours(name, count)[state["turns"] % 3]
            pay = min(state["coins"], 1 + state["turns"] % 4)
            state["coins"] -= pay
            number = state["out"][to] = state["out"].get(to, 0) + 1
            note = {"from": name, "to": to, "n": number, "coins": pay, "hops": message["hops"] - 1}
            perdure.send(to, note)

    return a0


def coin_team(store: perdure.Store, count: int, name: str = "coins") -> Team:
    """Return a team of `count` agents with COINS each."""
    team = store.team(name)
    agent = team.agent(state={"coins": COINS, "turns": 0, "seen": {}, "out": {}}, attempts=1000)(coin_handler(count))
    for number in range(count):
        team.spawn(agent, f"a{number}")
    return team


def start_coins(team: Team, messages: int, hops: int, count: int) -> None:
    for number in range(messages):
        to = f"a{number % count}"
        team.send(to, {"from": None, "to": to, "n": 0, "coins": 0, "hops": hops})


def coins_of(states: dict[str, Any], in_flight: list[Any]) -> int:
    """Return all coins: those that the agents have, and those on their way."""
    return sum(int(one["coins"]) for one in [*states.values(), *in_flight])


def check_coins(states: dict[str, Any], in_flight: list[Any], count: int) -> None:
    """Fail unless each coin is there once, and between each pair nothing is lost, repeated or out of order."""
    assert coins_of(states, in_flight) == COINS * count
    on_way: dict[tuple[str, str], list[int]] = {}
    for message in in_flight:
        if message["from"] is not None:
            on_way.setdefault((message["from"], message["to"]), []).append(message["n"])
    for sender, state in states.items():
        for to, sent in state["out"].items():
            seen = states[to]["seen"].get(sender, 0)
            assert on_way.pop((sender, to), []) == list(range(seen + 1, sent + 1)), (sender, to)
    assert not on_way
