"""What falls with a member that goes back: callers, members in the middle of a turn, children; what refuses to."""

from __future__ import annotations

from typing import Any

import pytest
from team_kit import due_now, mail_states, query, state_of, states

import perdure
from perdure.errors import UsageError
from perdure.snapshots.store import SnapshotStore
from perdure.teams import Team

charged: list[tuple[Any, str]] = []


@perdure.effect(on_doubt="retry", name="falling.charge")
def charge(amount: Any, key: perdure.IdempotencyKey) -> Any:
    charged.append((amount, str(key)))
    return amount


@perdure.durable(name="falling.child")
def child(amount: int) -> Any:
    return charge(amount)


@perdure.durable(name="falling.payee")
def payee() -> list[Any]:
    return [perdure.receive(), perdure.receive(timeout_s=0)]


def work(store: perdure.Store, *teams: Team) -> None:
    """Let the teams work until none of them has anything to do."""
    for team in teams:
        team.work(until_idle=True)
    due_now(store)
    for team in teams:
        team.work(until_idle=True)


def calling_team(store: perdure.Store) -> Team:
    team = store.team("calling")

    @team.agent
    def source(state: Any, message: Any) -> None:
        state.setdefault("got", []).append(message)

    @team.agent
    def callee(state: Any, message: Any) -> int:
        state["n"] = state.get("n", 0) + message
        return int(state["n"])

    @team.agent
    def caller(state: Any, message: Any) -> None:
        note = perdure.receive("notes", timeout_s=0)
        state.setdefault("got", []).append([note, perdure.call("callee", message)])

    return team


def test_a_caller_falls_with_the_member_that_answered_it_and_topics_come_back(store: perdure.Store) -> None:
    team = calling_team(store)
    for number in (1, 2):
        team.members()
        store.send("calling/caller", f"note {number}", topic="notes")
        team.send("caller", number)
        work(store, team)
    got = [["note 1", 1], ["note 2", 3]]
    assert state_of(team, "caller")["got"] == got
    would = team.rewind("callee", turn=1, dry_run=True)
    assert {(one.member, one.to_turn) for one in would.falls} == {("callee", 1), ("caller", 1)}
    team.rewind("callee", turn=1)
    assert state_of(team, "caller") == {"got": got[:1]}
    work(store, team)
    assert (state_of(team, "caller")["got"], state_of(team, "callee")) == (got, {"n": 3})
    team.rewind("caller", turn=0)
    assert (state_of(team, "caller"), state_of(team, "callee")) == ({}, {})
    work(store, team)
    assert state_of(team, "caller")["got"] == got
    assert store.ops.verify().ok


def test_what_a_run_outside_has_received_is_not_sent_to_it_again(store: perdure.Store) -> None:
    team = store.team("outside")

    @team.agent
    def payer(state: Any, message: Any) -> None:
        perdure.send(message, "payment")

    store.start(payee, id="payee")
    store.start(payee, id="late")
    team.send("payer", "late")
    team.send("payer", "payee")
    team.work(until_idle=True)
    perdure.Worker(store, [payee]).run(until_idle=True)
    with pytest.raises(UsageError, match="run 'late' has received what 'outside/payer' sent in turn 1"):
        team.rewind("payer", turn=0)
    assert store.get_run("payee").result() == ["payment", None]
    store.start(payee, id="third")
    team.send("payer", "third")
    team.work(until_idle=True)
    assert team.rewind("payer", turn=2).withdrawn == 1  # it waits still: it was never sent now
    team.work(until_idle=True)
    perdure.Worker(store, [payee]).run(until_idle=True)
    assert store.get_run("third").result() == ["payment", None]


def middle_team(store: perdure.Store) -> Team:
    charged.clear()
    team = store.team("middle")

    @team.agent
    def first(state: Any, message: Any) -> None:
        perdure.send("asker", message)

    @team.agent
    def asker(state: Any, message: Any) -> None:
        charge(message)
        perdure.send("third", message, now=True)
        state[message] = perdure.ask(f"{message}?")

    @team.agent
    def third(state: Any, message: Any) -> None:
        state[message] = True

    return team


def test_a_member_in_the_middle_of_a_turn_falls_with_its_effects_and_what_it_sent(store: perdure.Store) -> None:
    team = middle_team(store)
    team.send("first", "a")
    team.work(until_idle=True)
    would = team.rewind("first", turn=0, dry_run=True)
    assert [(one.member, one.from_turn, one.to_turn) for one in would.falls] == [
        ("first", 1, 0),
        ("asker", 1, 0),
        ("third", 1, 0),
    ]
    assert [(one.member, one.turn) for one in would.effects] == [("asker", 1)]
    with pytest.raises(UsageError, match="asker ran falling"):
        team.rewind("first", turn=0)
    team.rewind("first", turn=0, keys="same")
    assert states(team) == {"first": {}, "asker": {}, "third": {}}
    team.work(until_idle=True)
    store.answer("middle/asker", "yes")
    team.work(until_idle=True)
    assert states(team) == {"first": {}, "asker": {"a": "yes"}, "third": {"a": True}}
    assert len(charged) == 2
    assert charged[0] == charged[1]


def test_a_withdrawn_message_that_only_waits_interrupts_no_turn(store: perdure.Store) -> None:
    team = middle_team(store)
    team.send("asker", "outside")
    team.work(until_idle=True)
    team.send("first", "a")
    team.work(until_idle=True)
    assert [one.text for one in store.questions()] == ["outside?"]
    assert [one.member for one in team.rewind("first", turn=0).falls] == ["first"]
    assert [one.text for one in store.questions()] == ["outside?"]
    assert len(charged) == 1


def test_children_of_undone_turns_are_removed_and_their_effects_listed(store: perdure.Store) -> None:
    charged.clear()
    team = store.team("parents")

    @team.agent
    def parent(state: Any, message: Any) -> None:
        state["sum"] = state.get("sum", 0) + perdure.spawn(child, message).result()

    def work_all() -> None:
        for _ in range(2):
            team.work(until_idle=True)
            perdure.Worker(store, [child]).run(until_idle=True)
        team.work(until_idle=True)

    for amount in (1, 2):
        team.send("parent", amount)
        work_all()
    assert state_of(team, "parent") == {"sum": 3}
    [effect] = team.rewind("parent", turn=1, dry_run=True).effects
    assert effect.name == "falling.charge"
    with pytest.raises(UsageError, match="1 effects ran"):
        team.rewind("parent", turn=1)
    team.rewind("parent", turn=1, keys="same")
    assert len(query(store, "SELECT 1 FROM run WHERE tenant = :tenant AND function = 'falling.child'")) == 1
    work_all()
    assert state_of(team, "parent") == {"sum": 3}
    assert [amount for amount, _ in charged] == [1, 2, 2]
    assert charged[1] == charged[2]


def test_a_rewind_gives_a_member_that_left_no_mail_but_dead_letters(store: perdure.Store) -> None:
    team = store.team("left")

    @team.agent
    def stays(state: Any, message: Any) -> None:
        state["n"] = message

    @team.agent
    def leaves(state: Any, message: Any) -> None:
        perdure.send("stays", message)

    for number in (1, 2):
        team.send("leaves", number)
    team.work(until_idle=True)
    team.leave("leaves")
    team.rewind("leaves", turn=1)
    assert [(one.member, one.message) for one in team.dead()] == [("leaves", 2)]
    assert mail_states(store) == {1: 2, 2: 1, 3: 1}
    assert state_of(team, "stays") == {"n": 1}


def test_a_member_that_joins_while_the_team_is_restored_is_removed_too(
    store: perdure.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = store.team("joining")

    @team.agent
    def agent(state: Any, message: Any) -> None: ...

    team.members()
    snap = team.snapshot(f"{store._context.tenant_name} cut")
    take = SnapshotStore._snapshot

    def and_spawn(self: Any, *args: Any, **options: Any) -> Any:
        snapshot = yield from take(self, *args, **options)
        yield from restoring_spawn()
        return snapshot

    def restoring_spawn() -> Any:
        from perdure.teams.members import add_member

        yield from add_member(team._context, "joining", "late", agent.perdure_agent)  # type: ignore[attr-defined]

    monkeypatch.setattr(SnapshotStore, "_snapshot", and_spawn)
    assert team.restore(snap).removed == ("late",)
    assert [one.name for one in team.members()] == ["agent"]


def test_a_child_that_was_started_again_under_its_id_goes_when_the_first_one_comes_back(store: perdure.Store) -> None:
    team = store.team("parents")

    @team.agent
    def parent(state: Any, message: Any) -> None:
        state["child"] = perdure.spawn(child, message).result()

    team.send("parent", 1)
    team.work(until_idle=True)
    snap = team.snapshot(f"{store._context.tenant_name} cut")
    team.rewind("parent", turn=0)
    team.work(until_idle=True)
    team.restore(snap)
    perdure.Worker(store, [child]).run(until_idle=True)
    team.work(until_idle=True)
    assert state_of(team, "parent") == {"child": 1}


def test_a_dead_letter_that_a_rewind_hands_back_keeps_the_keys_of_what_stands(store: perdure.Store) -> None:
    charged.clear()
    team = store.team("dying")

    @team.agent(policy="dead_letter")
    def agent(state: Any, message: Any) -> None:
        charge(message)
        raise ValueError

    team.send("agent", 1)
    team.work(until_idle=True)
    assert len(team.dead()) == 1
    team.rewind("agent", turn=0, keys="same")
    assert team.dead() == []
    team.work(until_idle=True)
    assert (len(charged), len(set(charged))) == (2, 1)
