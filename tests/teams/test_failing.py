"""Messages that fail, processes that die, members that are hostile: nothing of others is lost or read."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lab import PLACES
from soak import SOAK
from team_kit import check_coins, coin_team, due_now, mail_states, start_coins, state_of, states

import perdure
from perdure.errors import Conflict, MailboxFull, NotFound, UsageError

KILLS = 40 if SOAK else 2
AGENTS = 8
HOPS = 400 if SOAK else 15


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "a.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


def test_killed_workers_lose_no_coin_repeat_none_and_keep_every_order(url: str) -> None:
    """Two workers at a time; one of them is killed again and again."""
    with perdure.open(url) as store:
        team = coin_team(store, AGENTS)
        start_coins(team, 20, HOPS, AGENTS)
        total = 20 * (HOPS + 1)
        workers = [start_worker(url)]
        try:
            for kill in range(KILLS):
                workers.append(start_worker(url))
                until = total * (kill + 1) // (KILLS + 1)
                while mail_states(store)[1] < until:
                    time.sleep(0.01)
                kill_and_wait(workers.pop())
        finally:
            for worker in workers:
                kill_and_wait(worker)
        while mail_states(store)[1] < total:  # those of the killed are due when their leases have ended
            team.work(until_idle=True)
        check_coins(states(team), [], AGENTS)
        assert mail_states(store) == {1: total}
        assert store.ops.verify().ok


def kill_and_wait(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()


def start_worker(url: str) -> subprocess.Popen[bytes]:
    child = Path(__file__).parent / "coin_worker.py"
    return subprocess.Popen([sys.executable, str(child), url, str(AGENTS)])


def test_a_poison_message_becomes_a_dead_letter_which_is_corrected_and_sent_again(store: perdure.Store) -> None:
    team = store.team("poison")
    told: list[Any] = []

    @team.agent
    def boss(state: Any, message: Any) -> None:
        told.append(message)

    @team.agent(attempts=2, supervisor=boss)
    def worker(state: Any, message: Any) -> None:
        state["sum"] = state.get("sum", 0) + message["n"]

    for message in ({"n": 1}, {"m": 2}, {"n": 3}):
        team.send("worker", message)
    team.work(until_idle=True)
    assert [(one.turn, one.failures) for one in team.members()] == [(0, 0), (1, 1)]
    due_now(store)
    team.work(until_idle=True)
    assert state_of(team, "worker") == {"sum": 4}
    [letter] = team.dead()
    assert (letter.member, letter.message, letter.error) == ("worker", {"m": 2}, "KeyError: 'n'")
    assert told == [{"failed": "worker", "error": "KeyError: 'n'", "key": letter.key}]
    letter.resend({"n": 2})
    with pytest.raises(NotFound, match="no dead letter"):
        letter.resend()
    team.work(until_idle=True)
    assert (state_of(team, "worker"), team.dead()) == ({"sum": 6}, [])
    assert store.ops.verify().ok


def test_a_message_that_kills_its_process_becomes_a_dead_letter(tmp_path: Path) -> None:
    url, child = str(tmp_path / "a.db"), Path(__file__).parent / "deadly_worker.py"
    for code in (-signal.SIGKILL, 0):
        assert subprocess.run([sys.executable, str(child), url], timeout=60, check=False).returncode == code
    with perdure.open(url) as store:
        [letter] = store.team("deadly").dead()
        assert letter.error == "its process died, 1 times in a row"
        assert store.thread("run:deadly/agent").load().state == {"got": ["harmless"]}


undone: list[str] = []


def cancel(name: str) -> None:
    undone.append(name)


@perdure.effect(name="failing.book", undo=cancel)
def book(name: str) -> str:
    return name


def test_the_effects_of_a_message_that_is_given_up_are_undone_and_its_caller_is_told(store: perdure.Store) -> None:
    team = store.team("undoing")
    undone.clear()

    @team.agent
    def caller(state: Any, message: Any) -> None:
        try:
            perdure.call("booker", message)
        except perdure.RunFailed as error:
            state["error"] = str(error)

    @team.agent(policy="dead_letter")
    def booker(state: Any, message: Any) -> None:
        state["booked"] = book(message)
        raise ValueError("sold out")

    team.send("caller", "sea view")
    team.work(until_idle=True)
    assert undone == ["sea view"]
    assert state_of(team, "caller") == {"error": "'booker' could not answer: ValueError: sold out"}
    assert state_of(team, "booker") == {}


@pytest.mark.parametrize("policy", ["stop", "escalate"])
def test_what_happens_to_a_message_that_failed_is_the_agents_policy(store: perdure.Store, policy: Any) -> None:
    team = store.team("policies")
    told: list[Any] = []

    @team.agent
    def boss(state: Any, message: Any) -> None:
        told.append(message.get("message"))

    is_fixed = False

    @team.agent(attempts=1, policy=policy, supervisor=boss)
    def worker(state: Any, message: Any) -> None:
        if not is_fixed:
            raise ValueError

    team.send("worker", "hard")
    team.work(until_idle=True)
    status = {one.name: (one.status, one.waiting, one.dead) for one in team.members()}["worker"]
    if policy == "escalate":
        assert (status, told) == (("waiting", 0, 1), ["hard"])
        return
    assert (status, told) == (("stuck", 1, 0), [])
    is_fixed = True
    store.get_run("policies/worker").resume()
    team.work(until_idle=True)
    assert [one.turn for one in team.members()] == [0, 1]


def test_a_full_box_refuses_senders_outside_and_slows_members(store: perdure.Store) -> None:
    team = store.team("full")

    @team.agent(capacity=2)
    def box(state: Any, message: Any) -> None:
        state["n"] = state.get("n", 0) + 1

    @team.agent
    def flood(state: Any, message: Any) -> None:
        for number in range(5):
            perdure.send("box", number)

    for number in range(2):
        team.send("box", number)
    with pytest.raises(MailboxFull, match="2 messages wait for 'full/box'"):
        team.send("box", 2)
    with pytest.raises(MailboxFull):
        team.broadcast("all or none")
    assert [one.waiting for one in team.members()] == [2, 0]
    team.send("flood", 1)
    team.send("flood", 2)
    team.work(until_idle=True)
    due_now(store)
    team.work(until_idle=True)
    assert state_of(team, "box") == {"n": 12}


def test_mail_to_a_member_that_left_becomes_dead_letters(store: perdure.Store) -> None:
    team = store.team("leaving")

    @team.agent
    def stays(state: Any, message: Any) -> None:
        perdure.send("leaves", message)

    @team.agent
    def leaves(state: Any, message: Any) -> None:
        state["asked"] = perdure.ask("?")

    team.send("leaves", "waiting")
    assert team.leave("leaves") == 1
    team.send("stays", "later")
    team.work(until_idle=True)
    assert [(one.message, one.sender, one.error) for one in team.dead()] == [
        ("waiting", None, "its receiver left the team"),
        ("later", "stays", "its receiver had left the team"),
    ]
    with pytest.raises(NotFound, match="has left"):
        team.dead()[0].resend()
    team.dead()[0].drop()
    assert len(team.dead()) == 1


def test_a_member_in_the_middle_of_a_turn_does_not_leave(store: perdure.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.teams.letters._PATIENCE", 2)
    team = store.team("staying")

    @team.agent
    def asker(state: Any, message: Any) -> None:
        perdure.ask("?")

    team.send("asker", 1)
    team.work(until_idle=True)
    with pytest.raises(Conflict, match="in the middle of a turn"):
        team.leave("asker")


def test_a_hostile_member_gets_an_error_and_reaches_nobody_else(place: perdure.Store, store: perdure.Store) -> None:
    other_tenant = place.tenant(f"{store._context.tenant_name} other")
    got: list[Any] = []
    for name, where in (("own", store), ("other", store), ("own", other_tenant)):
        team = where.team(name)

        @team.agent
        def victim(state: Any, message: Any) -> None:
            got.append(message)

        team.members()
    team = store.team("own")
    targets = itertools.count()
    attacks: list[Any] = [
        lambda: perdure.send("other/victim", "wrong team"),
        lambda: perdure.send("victim", "x" * 1_100_000),
        lambda: perdure.send("victim", object()),
        lambda: perdure.send("", "nobody"),
        lambda: perdure.send("victim", "forged", "call:0/1"),
        lambda: perdure.call("other/victim", "wrong team", timeout_s=0),
    ]

    @team.agent(policy="dead_letter")
    def hostile(state: Any, message: Any) -> None:
        next(targets)
        attacks[message]()

    for number in range(len(attacks)):
        team.send("hostile", number)
    team.work(until_idle=True)
    errors = {one.message: one.error for one in team.dead("hostile")}
    assert set(errors) == {0, 1, 2, 3, 5}  # mail on a topic that nobody reads harms nobody
    assert "another team" in errors[0]
    assert "another team" in errors[5]
    assert got == []
    team.send("victim", "from a friend")
    team.work(until_idle=True)
    assert got == ["from a friend"]
    assert [one.turn for one in other_tenant.team("own").members()] == [0]
    assert [one.turn for one in store.team("other").members()] == [0]


def test_a_team_says_what_is_wrong_with_its_names(store: perdure.Store) -> None:
    team = store.team("named")

    @team.agent
    def agent(state: Any, message: Any) -> None: ...

    with pytest.raises(NotFound, match="no team 'nothing'"):
        store.team("nothing").members()
    with pytest.raises(UsageError, match="no agent of team 'other'"):
        store.team("other").spawn(agent, "second")
    with pytest.raises(NotFound, match="no agent of team"):
        store.team("other").work(until_idle=True)
    team.members()
    for call in (
        lambda: store.fork("named/agent"),
        lambda: store.replay("named/agent"),
        store.get_run("named/agent").undo,
    ):
        with pytest.raises(UsageError, match="is a member of a team"):
            call()
    with pytest.raises(NotFound, match="no member 'nobody'"):
        team.rewind("nobody", turn=0)


def test_a_turn_after_a_full_box_begins_with_a_journal_of_its_own(store: perdure.Store) -> None:
    """Values that a turn recorded without a commit of their own must not become those of the next one."""
    team = store.team("full")

    @team.agent(capacity=1)
    def slow(state: Any, message: Any) -> None:
        perdure.ask("hold?")

    @team.agent(state={"drawn": []})
    def source(state: Any, message: Any) -> None:
        state["drawn"].append(perdure.random())
        perdure.send("slow", message)

    team.send(slow, "first")
    team.work(until_idle=True)
    for number in range(3):
        team.send(source, number)
    for _ in range(4):
        due_now(store)
        team.work(until_idle=True)
    assert len(set(state_of(team, "source")["drawn"])) == 3


def test_a_team_and_its_members_are_not_cancelled(store: perdure.Store) -> None:
    team = store.team("kept")

    @team.agent
    def writer(state: Any, message: Any) -> None: ...

    team.send(writer, "hello")
    for name in ("kept", "kept/writer"):
        with pytest.raises(perdure.UsageError, match="removes a member"):
            store.get_run(name).cancel()
    assert set(store.bulk("cancel", id_prefix="kept").refused) == {"kept", "kept/writer"}
    assert team.members()[0].waiting == 1
