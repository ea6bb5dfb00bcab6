"""A team goes back: to a cut that was taken while it worked, or to a turn with all that must fall with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from team_kit import check_coins, coin_team, mail_states, query, start_coins, state_of, states

import perdure
from perdure.errors import UsageError
from perdure.log.append import GuardedHead
from perdure.runs.journal import mail
from perdure.storage.program import Sql, write
from perdure.teams import Team, TeamSnapshot, restoring

COUNT = 6


def cut_states(snap: TeamSnapshot, team: Team) -> dict[str, Any]:
    return {one.name: snap.state(one.name) for one in team.members()}


class Working:
    """The team works in other threads, by two workers with stores of their own, while the block runs."""

    def __init__(self, place: perdure.Store, team: Team) -> None:
        driver: Any = place._context.driver
        self._url = driver.capabilities.path or driver._target.conninfo
        self._tenant, self._team = place._context.tenant_name, team
        self._stores = [perdure.open(self._url, tenant=self._tenant, durability="normal") for _ in range(2)]
        self._workers = [
            perdure.Worker(store, agents(team), concurrency=2, poll_s=0.02, drain_s=5) for store in self._stores
        ]
        self._threads = [threading.Thread(target=worker.run) for worker in self._workers]

    def __enter__(self) -> Working:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()
        for thread in self._threads:
            thread.join()
        for store in self._stores:
            store.close()


def agents(team: Team) -> Any:
    from perdure.teams.members import roster_of
    from perdure.teams.team import _TeamAgent

    return [_TeamAgent(one.spec) for one in roster_of(team._context, team.name).declared.values()]


def wait_for_turns(team: Team, more: int) -> None:
    """Wait until the team has done so many turns. Fails at once if a member has refused a message."""
    members = team.members()
    until, give_up = sum(one.turn for one in members) + more, time.monotonic() + 20
    while sum(one.turn for one in members) < until:
        assert not any(one.failures for one in members)
        assert time.monotonic() < give_up
        members = team.members()


def test_cuts_under_load_lose_no_coin_and_keep_every_order(store: perdure.Store) -> None:
    team = coin_team(store, COUNT)
    start_coins(team, 6, 1000, COUNT)
    team.snapshot(f"{store._context.tenant_name} first")  # makes the tables of the past
    with Working(store, team):
        snaps = []
        for number in range(4):
            wait_for_turns(team, 10)
            snaps.append(team.snapshot(f"{store._context.tenant_name} cut {number}"))
    for snap in snaps:
        check_coins(cut_states(snap, team), [one.message for one in snap.in_flight()], COUNT)


def restore_under_load(store: perdure.Store) -> tuple[dict[str, Any], list[Any]]:
    """Restore a team to a cut while it works, twice. Return states and messages afterwards."""
    team = coin_team(store, COUNT)
    start_coins(team, 6, 1000, COUNT)
    with Working(store, team):
        wait_for_turns(team, 10)
        snap = team.snapshot(f"{store._context.tenant_name} before")
        for _ in range(3):
            wait_for_turns(team, 20)
            back = team.restore(snap)
            assert len(back.members) == COUNT
        wait_for_turns(team, 10)
    after = team.snapshot(f"{store._context.tenant_name} after")
    return cut_states(after, team), [one.message for one in after.in_flight()]


def test_a_restore_under_load_is_exact(store: perdure.Store) -> None:
    check_coins(*restore_under_load(store), COUNT)
    assert store.ops.verify().ok


def breaks(store: perdure.Store, attempts: int = 6) -> bool:
    """Whether a broken restore shows, within some attempts."""
    for number in range(attempts):
        try:
            check_coins(*restore_under_load(store.tenant(f"{store._context.tenant_name} {number}")), COUNT)
        except (AssertionError, perdure.PerdureError):
            return True
    return False


def test_control_a_family_for_each_member_is_not_exact(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that go back one by one are seen at different times."""
    whole: Callable[..., Any] = restoring._restore
    family = restoring._family

    def one_by_one(op: partial[Any]) -> Any:
        tenant, root, then, places, chances, *others = op.args
        for number, row in then.items():
            own = [(place, chance) for place, chance in zip(places, chances, strict=True) if place.run_id == row[1]]
            some = [place for place, _ in own], [chance for _, chance in own]
            monkeypatch.setattr(restoring, "_family", partial(only, number, row))
            yield from write(partial(whole, tenant, root, {number: row}, *some, *others), solo=True)
        monkeypatch.setattr(restoring, "_family", family)
        return []

    def only(number: int, row: Any, *_: object) -> Any:
        yield from ()
        return {number: row}

    monkeypatch.setattr(restoring, "_write", one_by_one)
    assert breaks(store)


def lost_turn(store: perdure.Store) -> Any:
    """Take a team back while a handler runs, then let that handler end. Return what the receiver of its mail got."""
    team = store.team("lost")
    begun, go_on = threading.Event(), threading.Event()

    @team.agent
    def forwarder(state: Any, message: Any) -> None:
        perdure.send("box", message)
        if message == 2 and not begun.is_set():
            begun.set()
            assert go_on.wait(20)

    @team.agent(state=[])
    def box(state: Any, message: Any) -> None:
        state.append(message)

    for message in (1, 2):
        team.send("forwarder", message)
    snap = team.snapshot(f"{store._context.tenant_name} cut")
    working = threading.Thread(target=team.work, kwargs={"until_idle": True})
    working.start()
    assert begun.wait(20)
    team.restore(snap)
    go_on.set()
    working.join()
    team.work(until_idle=True)
    return state_of(team, "box")


def test_an_owner_that_lost_its_member_writes_nothing(store: perdure.Store) -> None:
    assert lost_turn(store) == [1, 2]


def test_control_without_the_fence_a_lost_owner_takes_a_message_out_of_turn(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = "tenant = :tenant AND run = :me AND fence = :fence AND status = 'running' AND turn = :turn - 1"
    for name in ("_TAKE", "_PUT_HELD", "_WAKE_HELD", "_END"):
        sql = getattr(mail, name)
        loose = [text.replace(held, "tenant = :tenant AND run = :me") for text in (sql.postgres, sql.sqlite[0])]
        assert loose[0] != sql.postgres
        monkeypatch.setattr(mail, name, Sql(loose[0], sqlite=loose[1], seals=dict(sql.seals)))
    monkeypatch.setattr(mail, "_SAVE", GuardedHead("1 = 1"))
    # An owner whose lease is renewed just then learns that it has lost its member, and stops by itself.
    tenants = (store.tenant(f"{store._context.tenant_name} {number}") for number in range(6))
    assert any(lost_turn(each) != [1, 2] for each in tenants)


charged: list[tuple[Any, str]] = []


@perdure.effect(on_doubt="retry", name="going_back.charge")
def charge(amount: int, key: perdure.IdempotencyKey) -> int:
    charged.append((amount, str(key)))
    return amount


def paying_team(store: perdure.Store) -> Team:
    charged.clear()
    team = store.team("paying")

    @team.agent
    def clerk(state: Any, message: Any) -> None:
        state["n"] = state.get("n", 0) + 1
        perdure.send("till", message)

    @team.agent
    def till(state: Any, message: Any) -> None:
        state["sum"] = state.get("sum", 0) + charge(message)

    return team


def test_effects_of_ended_turns_are_listed_and_a_restore_is_refused(store: perdure.Store) -> None:
    team = paying_team(store)
    team.send("clerk", 5)
    team.work(until_idle=True)
    snap = team.snapshot(f"{store._context.tenant_name} cut")
    team.send("clerk", 7)
    team.work(until_idle=True)
    would = team.restore(snap, dry_run=True)
    assert [(one.member, one.name, one.turn) for one in would.effects] == [("till", "going_back.charge", 2)]
    with pytest.raises(UsageError, match=r"till ran going_back\.charge"):
        team.restore(snap)
    assert state_of(team, "till") == {"sum": 12}
    assert team.restore(snap, keys="same").undo is not None
    assert states(team) == {"clerk": {"n": 1}, "till": {"sum": 5}}
    team.work(until_idle=True)  # nothing waits: they park
    assert {one.status for one in team.members()} == {"waiting"}
    team.send("clerk", 7)  # another message with equal arguments has a key of its own
    team.work(until_idle=True)
    assert len({key for _, key in charged}) == 3
    assert store.ops.verify().ok


def test_a_message_that_is_handled_again_keeps_its_keys(store: perdure.Store) -> None:
    team = paying_team(store)
    team.send("clerk", 5)
    snap = team.snapshot(f"{store._context.tenant_name} cut")
    for keys in ("same", "new"):
        team.work(until_idle=True)
        team.restore(snap, keys=keys)
    team.work(until_idle=True)
    first, again, new = (key for _, key in charged)
    assert first == again != new


def test_members_that_joined_since_are_removed_and_those_that_left_come_back(store: perdure.Store) -> None:
    team = coin_team(store, 2)
    snap = team.snapshot(f"{store._context.tenant_name} cut")
    team.leave("a1")
    [agent] = agents(team)
    handler = agent.perdure_durable.fn
    team.spawn(handler, "late")
    start_coins(team, 1, 0, 1)
    back = team.restore(snap)
    assert (back.members, back.removed) == (("a0", "a1"), ("late",))
    assert [(one.name, one.has_left, one.turn) for one in team.members()] == [("a0", False, 0), ("a1", False, 0)]
    team.work(until_idle=True)
    assert {one.status for one in team.members()} == {"waiting"}


def test_a_rewind_takes_along_whoever_took_what_is_unsent(store: perdure.Store) -> None:
    team = store.team("line")

    @team.agent
    def first(state: Any, message: Any) -> None:
        state.setdefault("got", []).append(message)
        perdure.send("second", message)

    @team.agent
    def second(state: Any, message: Any) -> None:
        state.setdefault("got", []).append(message)

    @team.agent
    def third(state: Any, message: Any) -> None:
        state.setdefault("got", []).append(message)

    for number in (1, 2, 3):
        team.send("first", number)
        team.send("third", number)
        team.work(until_idle=True)
    would = team.rewind("first", turn=1, dry_run=True)
    assert [str(fall) for fall in would.falls] == [
        "first goes back from turn 3 to turn 1: you asked for it",
        "second goes back from turn 3 to turn 1: its turn 2 took a message that first sent in turn 2, which is undone",
    ]
    assert state_of(team, "first") == {"got": [1, 2, 3]}
    back = team.rewind("first", turn=1)
    assert (len(back.falls), back.returned, back.withdrawn) == (2, 2, 2)
    assert states(team) == {"first": {"got": [1]}, "second": {"got": [1]}, "third": {"got": [1, 2, 3]}}
    assert mail_states(store) == {0: 2, 1: 5, 3: 2}
    team.work(until_idle=True)  # the messages from outside are handled again, and sent again
    assert states(team) == {name: {"got": [1, 2, 3]} for name in ("first", "second", "third")}
    assert mail_states(store) == {1: 9}
    team.rewind("first", turn=0)
    assert state_of(team, "first") == {}
    assert store.ops.verify().ok


def test_a_rewind_of_turns_with_effects_is_refused_and_says_which(store: perdure.Store) -> None:
    team = paying_team(store)
    for amount in (5, 7):
        team.send("clerk", amount)
    team.work(until_idle=True)
    would = team.rewind("clerk", turn=1, dry_run=True)
    assert [(one.member, one.turn) for one in would.effects] == [("till", 2)]
    with pytest.raises(UsageError, match="1 effects ran in the turns"):
        team.rewind("clerk", turn=1)
    team.rewind("clerk", turn=1, keys="same")
    team.work(until_idle=True)
    assert state_of(team, "till") == {"sum": 12}
    assert [amount for amount, _ in charged] == [5, 7, 7]
    assert charged[1] == charged[2]
    assert team.rewind("clerk", turn=2, dry_run=True).falls == ()


def test_retention_removes_old_messages_and_intents_and_a_rewind_says_so(store: perdure.Store) -> None:
    team = paying_team(store)
    for amount in (1, 2, 3):
        team.send("clerk", amount)
    team.work(until_idle=True)
    team.send("till", 4)  # it waits, and stays
    store.ops.retention(runs=timedelta(0))
    store.ops.compact()
    assert mail_states(store) == {0: 1, 1: 2}
    assert len(list(store.thread("run:paying/till").history())) == 1  # of four: one for each turn, and the first
    assert len(query(store, "SELECT 1 FROM journal WHERE tenant = :tenant")) == 1
    assert team.rewind("till", turn=3, dry_run=True).falls == ()
    with pytest.raises(UsageError, match="not kept any more"):
        team.rewind("till", turn=1, keys="same")
    team.work(until_idle=True)
    assert state_of(team, "till") == {"sum": 10}


def test_a_rewind_interrupts_who_is_in_the_middle_of_a_withdrawn_message(store: perdure.Store) -> None:
    team = store.team("mid")

    @team.agent
    def first(state: Any, message: Any) -> None:
        perdure.send("asker", message)

    @team.agent
    def asker(state: Any, message: Any) -> None:
        state[message] = perdure.ask(f"{message}?")

    team.send("first", "a")
    team.work(until_idle=True)
    assert [one.text for one in store.questions()] == ["a?"]
    team.rewind("first", turn=0)
    assert store.questions() == []
    assert not query(store, "SELECT 1 FROM journal WHERE tenant = :tenant")
    team.work(until_idle=True)
    store.answer("mid/asker", "yes")
    team.work(until_idle=True)
    assert state_of(team, "asker") == {"a": "yes"}
