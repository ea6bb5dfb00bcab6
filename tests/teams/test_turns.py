"""A turn: one message, one transaction, exactly once, whatever fails."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import PLACES, hooked
from soak import spread
from team_kit import check_coins, coin_team, due_now, mail_states, query, start_coins, state_of, states

import perdure
from perdure.errors import NotFound, UsageError
from perdure.runs.execution.hooks import Point
from perdure.teams import Team


def test_a_message_goes_through_members_of_both_kinds(store: perdure.Store) -> None:
    team = store.team("research")
    looked: list[str] = []

    @perdure.step
    def search(topic: str) -> str:
        looked.append(topic)
        return f"all about {topic}"

    @team.agent(state={"notes": []})
    def researcher(state: Any, message: Any) -> None:
        state["notes"].append(search(message["topic"]))
        perdure.send(writer, state["notes"][-1])

    @team.agent
    async def writer(state: Any, message: Any) -> None:
        state["edited"] = await perdure.call("editor", message, timeout_s=60)
        await perdure.send("editor", "thanks")

    @team.agent
    def editor(state: Any, message: Any) -> str:
        state[message] = state.get(message, 0) + 1
        return str(message).upper()

    team.send(researcher, {"topic": "tides"})
    team.work(until_idle=True)
    assert states(team) == {
        "researcher": {"notes": ["all about tides"]},
        "writer": {"edited": "ALL ABOUT TIDES"},
        "editor": {"all about tides": 1, "thanks": 1},
    }
    assert looked == ["tides"]
    assert [(one.turn, one.waiting, one.status) for one in team.members()] == [
        (1, 0, "waiting"),
        (1, 0, "waiting"),
        (2, 0, "waiting"),
    ]
    assert store.ops.verify().ok
    assert not query(store, "SELECT 1 FROM journal WHERE tenant = :tenant")


async def test_every_operation_has_an_async_twin(store: perdure.Store) -> None:
    team = store.team("async")

    @team.agent(attempts=1)
    async def adder(state: Any, message: Any) -> None:
        if message == "bad":
            raise ValueError(message)
        state["sum"] = state.get("sum", 0) + message

    await team.aspawn(adder, "second")
    await team.asend("adder", 1)
    assert await team.abroadcast(2) == 2
    await team.asend("second", "bad")
    snap = await team.asnapshot(f"async {id(store)}")
    in_flight = [(one.receiver, one.message) for one in await snap.ain_flight()]
    assert in_flight == [("second", 2), ("second", "bad"), ("adder", 1), ("adder", 2)]
    await team.awork(until_idle=True)
    [letter] = await team.adead()
    await letter.aresend(40)
    await team.awork(until_idle=True)
    assert await team.aleave("adder") == 0
    assert [(one.name, one.has_left) for one in await team.amembers()] == [("second", False), ("adder", True)]
    assert (state_of(team, "adder"), state_of(team, "second")) == ({"sum": 3}, {"sum": 42})


def test_messages_of_a_pair_arrive_in_order_and_once(store: perdure.Store) -> None:
    team = coin_team(store, 5)
    start_coins(team, 10, 20, 5)
    team.work(until_idle=True, concurrency=4)
    check_coins(states(team), [], 5)
    assert mail_states(store) == {1: 10 * 21}


class Fault(Exception):
    pass


class Striker:
    """Raises at the n-th point of the transactions that end turns."""

    def __init__(self) -> None:
        self.at, self.points, self.is_turn = 0, list[str](), False

    def __call__(self, point: str) -> None:
        if self.is_turn:
            self.points.append(point)
            if len(self.points) == self.at and point != "committed":
                self.is_turn = False
                raise Fault(point)

    def heard(self, point: Point) -> None:
        self.is_turn = point.kind == "turn" and point.when == "before"


@pytest.fixture(params=PLACES)
def struck(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[perdure.Store, Striker]]:
    url = str(tmp_path / "a.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    striker = Striker()
    with perdure.open(url, durability="normal", hook=striker) as opened, hooked(striker.heard):
        yield opened, striker


def sending_team(store: perdure.Store) -> Team:
    team = store.team("pair")

    @perdure.step
    def look() -> int:
        return 1

    @team.agent
    def first(state: Any, message: Any) -> None:
        state["n"] = state.get("n", 0) + look()
        perdure.send("second", message)
        perdure.send("first", "again") if message != "again" else None

    @team.agent
    def second(state: Any, message: Any) -> None:
        state.setdefault("got", []).append(message)

    return team


def test_a_turn_that_fails_at_any_statement_happened_not_at_all(struck: tuple[perdure.Store, Striker]) -> None:
    place, striker = struck

    def attempt(number: int, at: int) -> list[str]:
        store = place.tenant(f"t{number}")
        team = sending_team(store)
        team.send("first", "go")
        striker.at, striker.points = at, []
        team.work(until_idle=True, concurrency=1)
        points, striker.at = striker.points, 0
        if 0 < at <= len(points):  # how many statements there are depends on who wakes first
            [stuck] = [one for one in team.members() if one.status == "stuck"]
            turns = sum(one.turn for one in team.members())
            assert mail_states(store)[1] == turns  # a message is taken with its turn, or not
            store.get_run(f"pair/{stuck.name}").resume()
            team.work(until_idle=True, concurrency=1)
        assert states(team) == {"first": {"n": 2}, "second": {"got": ["go", "again"]}}
        assert mail_states(store) == {1: 4}
        assert store.ops.verify().ok
        return points

    points = attempt(0, 0)
    struck_at = [number for number, point in enumerate(points, 1) if point != "committed"]
    for number in spread(struck_at, 8):
        attempt(number, number)


def test_a_member_parks_in_the_middle_of_a_turn_and_its_mail_waits(store: perdure.Store) -> None:
    team = store.team("asking")
    began = itertools.count()

    @team.agent
    def asker(state: Any, message: Any) -> None:
        next(began)
        state[message] = perdure.ask(f"{message}?") if message == "first" else "unasked"

    for message in ("first", "second"):
        team.send("asker", message)
    team.work(until_idle=True)
    assert next(began) == 1  # the second message has not even woken it
    assert state_of(team, "asker") == {}
    store.answer("asking/asker", "yes")
    team.work(until_idle=True)
    assert state_of(team, "asker") == {"first": "yes", "second": "unasked"}
    team.send("asker", "first")  # a question of another turn at the same place
    team.work(until_idle=True)
    assert [question.text for question in store.questions()] == ["first?"]


def test_a_call_ends_at_its_time_and_a_late_answer_is_withdrawn(store: perdure.Store) -> None:
    team = store.team("calls")

    @team.agent
    def caller(state: Any, message: Any) -> None:
        try:
            state["answer"] = perdure.call("slow", message, timeout_s=0)
        except TimeoutError as error:
            state["late"] = str(error)

    @team.agent
    def slow(state: Any, message: Any) -> str:
        return "too late"

    team.send("caller", "?")
    team.work(until_idle=True)
    assert state_of(team, "caller") == {"late": "'slow' did not answer within 0 s"}
    assert mail_states(store) == {1: 2, 3: 1}


def test_mail_may_leave_at_once_and_is_not_repeated(store: perdure.Store) -> None:
    team = store.team("now")
    attempts = itertools.count(1)

    @team.agent(attempts=2)
    def sender(state: Any, message: Any) -> None:
        perdure.send("box", "at once", now=True)
        perdure.send("box", "at the end")
        if next(attempts) == 1:
            raise ValueError

    @team.agent
    def box(state: Any, message: Any) -> None:
        state.setdefault("got", []).append(message)

    team.send("sender", "go")
    team.work(until_idle=True)
    assert state_of(team, "box") == {"got": ["at once"]}
    due_now(store)
    team.work(until_idle=True)
    assert state_of(team, "box") == {"got": ["at once", "at the end"]}


def test_a_name_that_nobody_has_fails_the_message(store: perdure.Store) -> None:
    team = store.team("lost")

    @team.agent(attempts=1)
    def sender(state: Any, message: Any) -> None:
        state["sent"] = True
        perdure.send("nobody", message)

    team.send("sender", 1)
    team.work(until_idle=True)
    [letter] = team.dead()
    assert "no member 'nobody' in team 'lost'" in letter.error
    assert state_of(team, "sender") == {}
    with pytest.raises(NotFound, match="nobody"):
        team.send("nobody", 1)


def test_what_a_turn_cannot_do_says_so(store: perdure.Store) -> None:
    team = store.team("wrong")
    calls: dict[str, Any] = {
        "state": lambda: perdure.state(),
        "receive": lambda: perdure.receive(),
        "anew": lambda: perdure.continue_as_new(),
        "huge": lambda: perdure.send("agent", "x" * 2_000_000),
        "to": lambda: perdure.send(5, 1),  # type: ignore[arg-type]
    }

    @team.agent(attempts=1)
    def agent(state: Any, message: Any) -> None:
        calls[message]()

    for message in calls:
        team.send(agent, message)
    team.work(until_idle=True)
    errors = {letter.message: letter.error for letter in team.dead()}
    assert set(errors) == set(calls)
    said = {
        "state": "first argument",
        "receive": "one by one",
        "anew": "each message",
        "huge": "1,000,000",
        "to": "name",
    }
    assert {call: said[call] in errors[call] for call in calls} == dict.fromkeys(calls, True)
    for bad in ({"capacity": 0}, {"attempts": 0}, {"policy": "pray"}, {"policy": "escalate"}):
        with pytest.raises(UsageError):
            team.agent(**bad)
    with pytest.raises(UsageError, match="slash"):
        store.team("a/b")


def test_idle_members_are_not_claimed(store: perdure.Store) -> None:
    team = coin_team(store, 3)
    start_coins(team, 3, 0, 3)
    team.work(until_idle=True)
    fences = query(store, "SELECT fence FROM run WHERE tenant = :tenant ORDER BY run")
    began = time.process_time()
    team.work(until_idle=True)
    assert time.process_time() - began < 1
    assert query(store, "SELECT fence FROM run WHERE tenant = :tenant ORDER BY run") == fences
