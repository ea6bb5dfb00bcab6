"""Callers always get an answer, members do not get stuck, and what is sent again has keys of its own."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from team_kit import due_now, mail_states, state_of

import perdure
from perdure.errors import MailboxFull, NotFound
from perdure.teams import Team

charged: list[str] = []
reserved: list[str] = []


@perdure.effect(on_doubt="retry", name="letters.charge")
def charge(amount: Any, key: perdure.IdempotencyKey) -> Any:
    charged.append(str(key))
    return amount


def give_back(amount: Any) -> None: ...


@perdure.effect(on_doubt="retry", undo=give_back, name="letters.reserve")
def reserve(amount: Any, key: perdure.IdempotencyKey) -> Any:
    reserved.append(str(key))
    return amount


@perdure.durable(name="letters.outsider")
def outsider(member: str) -> Any:
    return perdure.call(member, "from outside")


def failing_team(store: perdure.Store) -> Team:
    """A team whose agent charges, and fails unless it gets a number above 1."""
    charged.clear()
    team = store.team("letters")

    @team.agent(policy="dead_letter", supervisor="nobody")
    def agent(state: Any, message: Any) -> None:
        charge(message)
        if message == 1:
            raise ValueError

    return team


def test_a_call_of_a_member_that_left_or_leaves_gets_an_error(store: perdure.Store) -> None:
    team = store.team("calls")

    @team.agent
    def caller(state: Any, message: Any) -> None:
        try:
            perdure.call("callee", message)
        except perdure.PerdureError as error:
            state[message] = str(error)

    @team.agent
    def callee(state: Any, message: Any) -> Any:
        return message

    team.send("caller", "first")
    worker = perdure.Worker(store, [only(team, "caller")])
    worker.run(until_idle=True)
    assert team.leave("callee") == 1
    perdure.Worker(store, [only(team, "caller")]).run(until_idle=True)
    team.send("caller", "second")
    team.work(until_idle=True)
    assert state_of(team, "caller") == {
        "first": "'callee' could not answer: its receiver left the team",
        "second": "'calls/callee' has left the team, and cannot answer a call",
    }
    assert [one.waiting for one in team.members()] == [0, 0]


def only(team: Team, name: str) -> Any:
    from perdure.teams.members import roster_of
    from perdure.teams.team import _TeamAgent

    return _TeamAgent(roster_of(team._context, team.name).declared[name].spec)


def test_a_supervisor_that_never_joined_makes_no_member_stuck(store: perdure.Store) -> None:
    team = failing_team(store)
    for message in (1, 2):
        team.send("agent", message)
    team.work(until_idle=True)
    assert [(one.status, one.turn, one.dead) for one in team.members()] == [("waiting", 2, 1)]


@pytest.mark.parametrize("is_deleted", [False, True])
def test_an_answer_goes_to_the_run_that_called_or_nowhere(store: perdure.Store, is_deleted: bool) -> None:
    team = store.team("answers")
    got: list[Any] = []

    @team.agent
    def echo(state: Any, message: Any) -> Any:
        return message

    @team.agent
    def outside(state: Any, message: Any) -> None:
        got.append(message)

    team.members()
    run = store.start(outsider, "answers/echo", id="outside")
    perdure.Worker(store, [outsider]).run(until_idle=True)
    if is_deleted:
        run.cancel()
        store.delete_run("outside")
    team.work(until_idle=True)
    perdure.Worker(store, [outsider]).run(until_idle=True)
    assert [(one.status, one.turn, one.waiting) for one in team.members()] == [("waiting", 1, 0), ("waiting", 0, 0)]
    assert is_deleted or run.result() == "from outside"


def reserving_team(store: perdure.Store) -> Team:
    """A team whose agent charges, which stands, reserves, which is undone, and fails."""
    charged.clear()
    reserved.clear()
    team = store.team("letters")

    @team.agent(policy="dead_letter")
    def agent(state: Any, message: Any) -> None:
        charge(message)
        reserve(message)
        raise ValueError

    return team


def test_a_resend_has_new_keys_for_what_was_undone_and_the_old_ones_for_what_stands(store: perdure.Store) -> None:
    team = reserving_team(store)
    team.send("agent", 1)
    team.work(until_idle=True)
    [letter] = team.dead()
    for _ in range(2):  # from one listing
        letter.resend(who="ann")
        team.work(until_idle=True)
    assert (len(charged), len(set(charged))) == (3, 1)
    assert (len(reserved), len(set(reserved))) == (3, 3)
    assert [(one.who, one.action, one.subject) for one in store.ops.actions()] == [
        ("ann", "resend", "member letters/agent")
    ] * 2


@pytest.mark.parametrize("is_sent", [True, False])
def test_what_was_undone_after_a_cut_gets_new_keys_when_the_team_went_back(store: perdure.Store, is_sent: bool) -> None:
    team = reserving_team(store)
    handler = team.agent(lambda state, message: perdure.send("agent", message), name="sender")
    team.send(handler, 1)
    if is_sent:
        perdure.Worker(store, [only(team, "sender")]).run(until_idle=True)
    snap = team.snapshot(f"{store._context.tenant_name} cut")
    for _ in range(3):
        team.work(until_idle=True)
        assert len(team.dead()) == 1
        team.restore(snap, keys="same")
    assert len(set(charged)) == 1
    assert (len(reserved), len(set(reserved))) == (3, 3)


def test_a_turn_that_had_begun_at_a_cut_gets_its_answer_after_it_was_given_up_and_restored(
    store: perdure.Store,
) -> None:
    team = store.team("begun")
    is_mended = False

    @team.agent(policy="dead_letter")
    def caller(state: Any, message: Any) -> None:
        state["answer"] = perdure.call("callee", message)
        if not is_mended:
            raise ValueError

    @team.agent
    def callee(state: Any, message: Any) -> Any:
        return message

    team.send("caller", "question")
    perdure.Worker(store, [only(team, "caller")]).run(until_idle=True)
    snap = team.snapshot(f"{store._context.tenant_name} cut")
    team.work(until_idle=True)
    assert len(team.dead()) == 1
    team.restore(snap)
    is_mended = True
    team.work(until_idle=True)
    assert state_of(team, "caller") == {"answer": "question"}


def test_a_letter_of_a_member_that_left_keeps_its_keys(store: perdure.Store) -> None:
    team = failing_team(store)
    team.send("agent", 2)
    team.work(until_idle=True)
    team.rewind("agent", turn=0, keys="same")
    team.leave("agent")
    team.spawn(only(team, "agent").perdure_durable.fn, "agent")
    team.dead()[0].resend()
    team.work(until_idle=True)
    assert (len(charged), len(set(charged))) == (2, 1)


def test_an_answer_that_comes_after_its_call_had_ended_does_not_stay_in_the_box(store: perdure.Store) -> None:
    team = store.team("late")

    @team.agent
    def caller(state: Any, message: Any) -> None:
        with suppress(TimeoutError):
            perdure.call("callee", message, timeout_s=0)
        perdure.ask("?")

    @team.agent
    def callee(state: Any, message: Any) -> Any:
        return message

    team.send("caller", 1)
    team.work(until_idle=True)
    assert mail_states(store) == {0: 2, 1: 1}
    store.answer("late/caller", "yes")
    team.work(until_idle=True)
    assert mail_states(store) == {1: 2, 3: 1}


def test_a_dropped_letter_is_not_revived_by_its_key(store: perdure.Store) -> None:
    team = failing_team(store)
    team.send("agent", 1, key="order-7")
    team.work(until_idle=True)
    team.dead()[0].drop()
    team.send("agent", 1, key="order-7")
    team.work(until_idle=True)
    assert (len(charged), mail_states(store), team.dead()) == (1, {4: 1}, [])


def test_a_key_that_is_used_again_after_retention_has_keys_of_its_own(store: perdure.Store) -> None:
    team = failing_team(store)
    for key in ("order-7", "order-8"):
        team.send("agent", 2, key=key)
        team.send("agent", 2, key=key)
    team.work(until_idle=True)
    assert len(charged) == 2
    store.ops.retention(runs=timedelta(0))
    store.ops.compact()
    team.send("agent", 2, key="order-7")
    team.work(until_idle=True)
    assert len(set(charged)) == 3


def test_a_member_that_a_person_resumes_has_all_its_attempts_again(store: perdure.Store) -> None:
    team = store.team("stops")
    tried = 0

    @team.agent(attempts=2, policy="stop")
    def agent(state: Any, message: Any) -> None:
        nonlocal tried
        tried += 1
        raise ValueError

    team.send("agent", 1)
    for _ in range(2):
        for _ in range(3):
            team.work(until_idle=True)
            due_now(store)
        assert team.members()[0].status == "stuck"
        store.get_run("stops/agent").resume()
    assert tried == 4


def test_a_turn_that_is_given_up_hands_back_the_mail_of_its_topics(store: perdure.Store) -> None:
    team = store.team("topics")

    @team.agent(policy="dead_letter")
    def agent(state: Any, message: Any) -> None:
        note = perdure.receive("notes")
        if message == "bad":
            raise ValueError
        state["note"] = note

    team.members()
    store.send("topics/agent", "kept", topic="notes")
    for message in ("bad", "good"):
        team.send("agent", message)
    team.work(until_idle=True)
    assert (state_of(team, "agent"), len(team.dead())) == ({"note": "kept"}, 1)


def test_a_member_that_left_comes_back_by_spawn_with_its_state(store: perdure.Store) -> None:
    team = store.team("back")

    @team.agent
    def agent(state: Any, message: Any) -> None:
        state["n"] = state.get("n", 0) + 1

    for _ in range(2):
        team.send("agent", 1)
        team.work(until_idle=True)
        team.leave("agent")
        team.send("agent", 2)
        letter = team.dead()[-1]
        with pytest.raises(NotFound, match="has left"):
            letter.resend()
        team.spawn(agent, "agent")
    team.dead()[0].resend()
    team.work(until_idle=True)
    assert state_of(team, "agent") == {"n": 3}
    assert store.ops.verify().ok


def test_a_new_capacity_reaches_members_that_exist(store: perdure.Store) -> None:
    def declare(capacity: int) -> Team:
        team = store.team("sized")

        @team.agent(capacity=capacity)
        def agent(state: Any, message: Any) -> None: ...

        team.spawn(agent, "second")
        return team

    first = declare(1)
    for name in ("agent", "second"):
        first.send(name, 1)
    team = declare(2)
    for name in ("agent", "second"):
        team.send(name, 2)
        with pytest.raises(MailboxFull, match="2 messages wait"):
            team.send(name, 3)
