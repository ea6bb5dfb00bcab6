"""Rows that somebody who can write to the database puts back as they were, or moves: what is noticed, and what is not.

What is not is in docs/how-to/encryption.md, line by line; a test here that begins to fail because more is noticed than
it says is good news, and the page must say so then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint
from sealed_kit import OLD, Raw

import perdure
from perdure import PerdureError, Store
from perdure.errors import Damaged
from perdure.langgraph import PerdureSaver


def opened(url: str, keys: Any = OLD, **options: Any) -> Store:
    return perdure.open(url, durability="normal", keys=keys, **options)


class Rows:
    """Rows of a table as they are now, to be put back later."""

    def __init__(self, raw: Raw, table: str, key: Sequence[str], where: str = "1 = 1") -> None:
        self._raw, self._table, self._key = raw, table, key
        columns = raw(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = 'perdure' AND table_name = ?"
            if raw.is_postgres
            else "SELECT name FROM pragma_table_info(?)",
            (table,),
        )
        self._columns = [str(name) for (name,) in columns]
        self.rows = raw(f"SELECT {', '.join(self._columns)} FROM {table} WHERE {where}")

    def put_back(self, only: Sequence[str] | None = None) -> None:
        for row in self.rows:
            values = dict(zip(self._columns, row, strict=True))
            changed = [name for name in (only or self._columns) if name not in self._key]
            self._raw(
                f"UPDATE {self._table} SET {', '.join(f'{name} = ?' for name in changed)}"
                f" WHERE {' AND '.join(f'{name} = ?' for name in self._key)}",
                [values[name] for name in (*changed, *self._key)],
            )


# --- threads


def test_a_threads_older_row_gives_the_older_state_unless_its_hash_is_forgotten(url: str) -> None:
    raw = Raw(url)
    with opened(url) as store:
        thread = store.thread("a")
        thread.save({"n": 1})
        before = Rows(raw, "thread", ("tenant", "thread"))
        thread.save({"n": 2})
    before.put_back(["head"])
    with opened(url) as store:
        assert not store.ops.verify().ok, "only the head: noticed"
        with pytest.raises(Damaged):
            store.thread("a").load(strict=True)
    before.put_back()
    with opened(url) as store:
        assert store.ops.verify().ok, "the whole row: not noticed"
        assert store.thread("a").load().state == {"n": 1}


def test_a_checkpoints_row_and_body_are_what_was_saved_or_an_error(url: str) -> None:
    """A prune and a compaction move them; what was there before says the same, or does not fit."""
    raw = Raw(url)
    with opened(url) as store:
        thread = store.thread("a")
        for number in range(12):
            thread.save({"n": number, "list": [f"word {at}" for at in range(number)]}, note=f"note {number}")
        state = thread.load().state
        records, bodies = Rows(raw, "record", ("tenant", "tree", "id")), Rows(raw, "body", ("id",))
        thread.prune(keep=3)
    for rows in (records, bodies):
        rows.put_back()
        with opened(url) as store:
            try:
                assert store.thread("a").load(strict=True).state == state
            except PerdureError:
                assert not store.ops.verify().ok


def test_older_metadata_of_a_thread_is_noticed_by_verify_unless_its_tags_are_older_too(url: str) -> None:
    raw = Raw(url)
    with opened(url) as store:
        store.thread("a", metadata={"role": "admin"}).save({})
        before = Rows(raw, "thread", ("tenant", "thread"))
        [(tag,)] = raw("SELECT value FROM tag")
        store.thread("a", metadata={"role": "guest"}).save({"n": 2})
        assert store.ops.verify().ok
    before.put_back(["metadata"])
    with opened(url) as store:
        assert store.threads()[0].metadata == {"role": "admin"}
        assert store.threads(where={"role": "admin"}) == [], "its tags are rows of their own"
        assert [problem.what for problem in store.ops.verify().problems] == ["its metadata is not what it is found by"]
    raw("UPDATE tag SET value = ?", (tag,))
    with opened(url) as store:
        assert store.threads(where={"role": "admin"}) != []
        assert store.ops.verify().ok, "not noticed"


def test_a_langgraph_id_that_was_put_twice_can_be_pointed_at_the_first(url: str) -> None:
    raw = Raw(url)
    config: Any = {"configurable": {"thread_id": "graph", "checkpoint_ns": ""}}
    with opened(url) as store:
        saver = PerdureSaver(store)
        checkpoint = empty_checkpoint()
        checkpoint["channel_versions"] = {"messages": 1}
        stored = config
        before: list[Rows] = []
        for word in ("first", "second"):
            checkpoint["channel_values"] = {"messages": [word]}
            stored = saver.put(config, checkpoint, {"source": "input", "step": -1, "parents": {}}, {"messages": 1})
            saver.put_writes(stored, [("__error__", word)], "task")
            before.append(Rows(raw, "write", ("tenant", "thread", "space", "id", "task", "idx")))
            before.append(Rows(raw, "label", ("tenant", "thread", "space", "id")))
    before[0].put_back()
    before[1].put_back()
    with opened(url) as store:
        found = PerdureSaver(store).get_tuple(stored)
        assert found is not None
        assert found.checkpoint["channel_values"] == {"messages": ["first"]}
        assert found.pending_writes == [("task", "__error__", "first")], "a special write is replaced by a later one"


def test_a_pending_write_of_another_channel_task_or_checkpoint_is_noticed(url: str) -> None:
    raw = Raw(url)
    config: Any = {"configurable": {"thread_id": "graph", "checkpoint_ns": ""}}
    with opened(url) as store:
        saver = PerdureSaver(store)
        checkpoint = empty_checkpoint()
        checkpoint["channel_versions"] = {"messages": 1}
        checkpoint["channel_values"] = {"messages": []}
        stored = saver.put(config, checkpoint, {"source": "input", "step": -1, "parents": {}}, {"messages": 1})
        saver.put_writes(stored, [("messages", "one"), ("other", "two")], "task")
    for change in ("key = 'other' WHERE key = 'messages'", "path = 'elsewhere' WHERE idx = 0"):
        kept = Rows(raw, "write", ("tenant", "thread", "space", "id", "task", "idx"))
        raw(f"UPDATE write SET {change}")
        with opened(url) as store:
            with pytest.raises(Damaged):
                PerdureSaver(store).get_tuple(stored)
            assert not store.ops.verify().ok
        kept.put_back()


# --- runs


@perdure.step(name="sealing_replay.add")
def add(n: int) -> int:
    return n + 1


@perdure.durable(name="sealing_replay.count")
def count(n: int) -> str:
    add(n)
    add(n + 1)
    return str(perdure.ask("go on?"))


@perdure.durable(name="sealing_replay.pay")
def pay(amount: int) -> int:
    return amount


def test_a_runs_older_row_with_its_older_journal_is_not_noticed(url: str) -> None:
    raw = Raw(url)
    with opened(url) as store:
        store.run(count, 1, id="r")
        before = Rows(raw, "run", ("tenant", "run"))
        asks = Rows(raw, "ask", ("tenant", "run", "path"))
        [(last,)] = raw("SELECT max(seq) FROM journal")
        store.answer("r", "yes")
        assert store.run(count, 1, id="r").result() == "yes"
    before.put_back()
    asks.put_back()
    raw("DELETE FROM journal WHERE seq > ?", (last,))
    raw("DELETE FROM run_value WHERE kind = 'outcome'")
    raw("DELETE FROM answer")
    with opened(url) as store:
        assert store.ops.verify().ok
        store.answer("r", "no")
        assert store.run(count, 1, id="r").result() == "no"


@pytest.mark.parametrize("table", ["journal", "run_value"])
def test_an_entry_or_an_outcome_of_another_run_is_noticed(url: str, table: str) -> None:
    raw = Raw(url)
    with opened(url) as store:
        for number in (1, 2):
            store.run(count, number, id=f"r{number}")
            store.answer(f"r{number}", f"yes {number}")
            store.run(count, number, id=f"r{number}").result()
    [(one,), (two,)] = raw("SELECT run FROM run ORDER BY run")
    column, more = ("body", "seq = 1") if table == "journal" else ("value", "kind = 'outcome'")
    [(cell,)] = raw(f"SELECT {column} FROM {table} WHERE run = ? AND {more}", (two,))
    raw(f"UPDATE {table} SET {column} = ? WHERE run = ? AND {more}", (cell, one))
    with opened(url) as store:
        assert not store.ops.verify().ok
        with pytest.raises(PerdureError):
            store.get_run("r1").steps() if table == "journal" else store.get_run("r1").result()


@pytest.mark.parametrize("with_digest", [False, True], ids=["args", "args-and-digest"])
def test_the_arguments_of_another_run_are_noticed(url: str, with_digest: bool) -> None:
    """Also together with the digest that they are checked against: it is bound to the run's id."""
    raw = Raw(url)
    with opened(url) as store:
        store.start(pay, 10, id="to-bob")
        store.start(pay, 10_000, id="to-eve")
    [(bob,), (eve,)] = raw("SELECT run FROM run ORDER BY run")
    raw.swap("run_value", "value", "run", bob, eve)
    if with_digest:
        raw.swap("run", "input", "run", bob, eve)
    with opened(url) as store:
        assert not store.ops.verify().ok
        store.start(pay, 1, id="to-carol")
        perdure.Worker(store, [pay]).run(until_idle=True)
        assert store.get_run("to-carol").result() == 1, "a damaged run holds up no other"
    assert raw("SELECT id, status FROM run WHERE id <> 'to-carol' ORDER BY id") == [
        ("to-bob", "stuck"),
        ("to-eve", "stuck"),
    ]


def test_a_repair_lets_a_thread_be_found_by_what_its_metadata_says(url: str) -> None:
    raw = Raw(url)
    with opened(url) as store:
        store.thread("a", metadata={"role": "admin"}).save({})
        store.thread("b", metadata={"role": "guest"}).save({})
        [(guest,)] = raw("SELECT value FROM tag JOIN thread ON thread.thread = tag.thread WHERE name = 'b'")
        raw("UPDATE tag SET value = ? WHERE thread = (SELECT thread FROM thread WHERE name = 'a')", (guest,))
        assert not store.ops.verify().ok
    to = f"{url}-repaired.db" if "://" not in url else "repaired"
    done = perdure.ops.repair_store(url, to=to, keys=OLD)
    with opened(to) if "://" not in url else opened(url, schema=to) as store:
        assert store.ops.verify().ok, done
        assert [info.name for info in store.threads(where={"role": "admin"})] == ["a"]


# --- what is not noticed, and is said not to be


@perdure.durable(name="sealing_replay.listening")
def listening() -> list[str]:
    first = perdure.receive("topic")
    perdure.ask("go on?")
    return [first, perdure.receive("topic")]


def test_a_message_can_be_marked_as_not_received(url: str) -> None:
    with opened(url) as store:
        store.run(listening, id="r")
        store.send("r", "pay", topic="topic")
        store.run(listening, id="r")
        Raw(url)("UPDATE mail SET state = 0")
        store.answer("r", "yes")
        assert store.run(listening, id="r").result() == ["pay", "pay"]


@perdure.durable(name="sealing_replay.rounds")
def rounds(amount: int, again: bool = True) -> int:
    if again:
        perdure.continue_as_new(amount * 10, again=False)
    return amount


def test_arguments_of_a_run_that_began_anew_are_bound_to_it(url: str) -> None:
    raw = Raw(url)
    with opened(url) as store:
        for name, amount in (("a", 1), ("b", 2)):
            store.start(rounds, amount, id=name)
        worker = perdure.Worker(store, [rounds], concurrency=1)
        worker.run(until_idle=True)
        assert [store.get_run(name).result() for name in ("a", "b")] == [10, 20]
    [(one,), (two,)] = raw("SELECT run FROM run ORDER BY run")
    [(first,)] = raw("SELECT value FROM run_value WHERE run = ? AND kind = 'args'", (one,))
    raw("UPDATE run_value SET value = ? WHERE run = ? AND kind = 'args'", (first, two))
    with opened(url) as store:
        assert not store.ops.verify().ok


@perdure.durable(name="sealing_replay.deciding")
def deciding() -> Any:
    return perdure.ask("pay?", options=["yes", "no"], approvers=["ann", "bob"], quorum=2)


def test_an_older_answer_of_the_same_person_can_be_put_back_while_the_question_is_open(url: str) -> None:
    raw = Raw(url)
    with opened(url) as store:
        store.run(deciding, id="r")
        store.answer("r", "yes", who="ann")
        before = Rows(raw, "answer", ("tenant", "run", "path", "who"))
        store.answer("r", "no", who="ann")
        before.put_back()
        assert store.answer("r", "yes", who="bob").settled
        assert store.run(deciding, id="r").result() == "yes"


def test_messages_and_answers_of_another_run_are_noticed(url: str) -> None:
    raw = Raw(url)
    with opened(url) as store:
        for name, answer in (("a", "yes"), ("b", "no")):
            store.run(listening, id=f"listening-{name}")
            store.send(f"listening-{name}", f"message {name}", topic="topic")
            store.run(deciding, id=f"deciding-{name}")
            store.answer(f"deciding-{name}", answer, who="ann")
        numbers = {name: run for run, name in raw("SELECT run, id FROM run")}
        raw.swap("mail", "value", "run", numbers["listening-a"], numbers["listening-b"])
        raw.swap("answer", "value", "run", numbers["deciding-a"], numbers["deciding-b"])
        wrong = {problem.run for problem in store.ops.verify().problems}
        assert wrong == {"listening-a", "listening-b", "deciding-a", "deciding-b"}
        for name in ("a", "b"):
            with pytest.raises(PerdureError):
                store.run(listening, id=f"listening-{name}").result(timeout_s=60)
            with pytest.raises(Damaged):
                store.answer(f"deciding-{name}", "yes", who="bob")
