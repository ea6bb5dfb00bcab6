"""`store.ops.verify()` looks at runs too: whatever somebody changes in the database behind our back is found and named.

The damage is done with plain SQL, on SQLite and on PostgreSQL.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

import perdure
from perdure.runs.journal.blobs import BLOB_MIN_BYTES
from perdure.storage.program import Batch, Program, Sql, Transaction


@perdure.step(name="verify-search")
def search(word: str) -> str:
    return word * 3


@perdure.step(name="verify-large")
def large(number: int) -> str:
    return random.Random(number).randbytes(2 * BLOB_MIN_BYTES).hex()  # nothing that compresses


@perdure.effect(name="verify-book", timeout_s=5)
def book(item: str, key: perdure.IdempotencyKey) -> str:
    return f"{item}-1"


@perdure.durable(name="verify-child")
def child(word: str) -> str:
    return search(word)


@perdure.durable(name="verify-agent")
def agent(word: str) -> str:
    found = search(word)
    large(1)
    booked = book(found)
    kid = perdure.spawn(child, word, id=f"child of {word}").result()
    flight = perdure.ask("Which?", options=["LH", "AF"])
    return f"{booked} {kid} {flight}"


@perdure.durable(name="verify-fails")
def fails() -> None:
    raise ValueError("no")


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[perdure.Store]:
    """A run that is done, one that waits for an answer, a fork, a child of each, one that failed, and an import."""
    url = str(tmp_path / "a.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))
    with perdure.open(url, durability="normal") as opened:
        opened.run(agent, "done", id="done")
        opened.answer("done", "LH", who="maria")
        assert opened.run(agent, "done", id="done").result() == "donedonedone-1 donedonedone LH"
        opened.run(agent, "waits", id="waits")
        opened.fork("done", at="2", id="fork", keys="new")
        opened.run(fails, id="failed")
        yield opened


def run_sql(store: perdure.Store, *statements: str, **params: Any) -> list[Any]:
    def program() -> Program[list[Any]]:
        answers = yield Batch(*(Sql(text)(**params) for text in statements), last=True)
        return answers[-1]

    found: list[Any] = store._context.driver.run(Transaction(program, write=True))
    return found


def problems(store: perdure.Store) -> list[str]:
    report = store.ops.verify()
    assert report.ok == (not report.problems)
    return [str(problem) for problem in report.problems]


NUMBER = "(SELECT run FROM run WHERE id = 'done')"


def test_sound_runs_are_counted_and_nothing_is_found(store: perdure.Store) -> None:
    report = store.ops.verify()
    assert (report.ok, report.runs) == (True, 6)
    stats = store.ops.stats()
    assert stats.runs == 6
    assert stats.run_bytes > 1000
    assert store.tenant("nobody").ops.verify().runs == 0
    assert store.tenant("nobody").ops.stats().runs == 0


async def test_the_same_awaited(store: perdure.Store) -> None:
    assert (await asyncio.to_thread(store.ops.verify)).runs == 6
    assert (await asyncio.to_thread(store.ops.stats)).runs == 6


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (f"DELETE FROM journal WHERE run = {NUMBER} AND seq = 2", "does not add up"),
        (f"UPDATE journal SET kind = 3 WHERE run = {NUMBER} AND seq = 2", "was changed or cannot be read"),
        (f"UPDATE journal SET body = :body WHERE run = {NUMBER} AND seq = 2", "cannot be read"),
        ("UPDATE run SET entries = entries + 1 WHERE id = 'done'", "does not add up"),
        ("UPDATE run SET digest = 5 WHERE id = 'done'", "does not add up"),
        ("UPDATE run SET status = 'odd' WHERE id = 'done'", "its status 'odd' is none"),
        ("UPDATE run SET waiting = '{' WHERE id = 'done'", "its row is damaged: waiting"),
        ("UPDATE run SET input = :body WHERE id = 'done'", "its row is damaged: input"),
        (f"UPDATE run_value SET value = :body WHERE run = {NUMBER} AND kind = 'args'", "its arguments cannot be read"),
        (f"DELETE FROM run_value WHERE run = {NUMBER} AND kind = 'args'", "its arguments are missing"),
        (f"DELETE FROM run_value WHERE run = {NUMBER} AND kind = 'outcome'", "it is done, and its result is missing"),
        (f"UPDATE run_value SET value = :body WHERE run = {NUMBER} AND kind = 'outcome'", "its outcome cannot be read"),
        (f"UPDATE ask SET terms = '[' WHERE run = {NUMBER}", "question 6 cannot be read"),
        (f"UPDATE answer SET value = :body WHERE run = {NUMBER}", "an answer to question 6 cannot be read"),
        (f"DELETE FROM run_blob WHERE run = {NUMBER}", "nothing keeps its large result"),
    ],
)
def test_damage_to_a_run_is_found_and_named(store: perdure.Store, damage: str, what: str) -> None:
    run_sql(store, damage, body=b"\xc1")
    found = problems(store)
    assert [line for line in found if line.startswith("(run done): ") and what in line], found
    assert {problem.run for problem in store.ops.verify().problems} <= {"done", "fork"}  # a fork shares what it has


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ("UPDATE journal SET run = -1 WHERE seq = 1", "(store): rows of journal belong to 1 runs that are not there"),
        ("UPDATE ask SET run = -1 WHERE status = 'open'", "(store): rows of ask belong to 1 runs that are not there"),
    ],
)
def test_what_belongs_to_nobody_is_found(store: perdure.Store, damage: str, what: str) -> None:
    if "journal" in damage:
        damage += f" AND run = {NUMBER}"
    run_sql(store, damage)
    assert what in problems(store)


def test_a_large_result_that_is_damaged_or_gone_is_found(store: perdure.Store) -> None:
    run_sql(store, "UPDATE blob SET body = :body WHERE length(body) > 60000", body=b"x")
    [problem] = store.ops.verify().problems
    assert (problem.run, problem.what.endswith("is damaged")) == ("done", True)
    run_sql(store, "DELETE FROM run_blob", "DELETE FROM blob")
    found = [line for line in problems(store) if "nothing keeps its large result" in line]
    assert {line.partition(":")[0] for line in found} == {"(run done)", "(run waits)"}


def test_a_fork_whose_origin_is_gone_is_found(store: perdure.Store) -> None:
    run_sql(store, f"DELETE FROM journal WHERE run = {NUMBER}", "DELETE FROM run WHERE id = 'done'")
    assert any(line.startswith("(run fork): ") and "does not add up" in line for line in problems(store))


def test_a_row_that_holds_something_else_does_not_stop_the_rest(tmp_path: Any) -> None:
    """SQLite lets a column hold anything."""
    with perdure.open(str(tmp_path / "a.db")) as store:
        for name in ("a", "b", "c"):
            store.run(child, name, id=name)
        damage = "UPDATE run SET entries = 'many', owner = x'07' WHERE id = 'a'"
        run_sql(store, damage, "DELETE FROM journal WHERE seq = 1")
        found = problems(store)
        assert found[0] == "(run a): its row is damaged: owner, entries"
        assert len(found) == 3
        assert store.ops.verify().runs == 3


def test_pages_are_walked_to_their_end(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.runs.maintenance.verify._PAGE", 2)
    monkeypatch.setattr("perdure.runs.maintenance.verify._BLOB_PAGE", 1)
    seen: list[tuple[int, int]] = []
    with perdure.open(str(tmp_path / "a.db"), durability="normal") as store:
        for number in range(5):
            store.run(stored, number, id=f"run {number}")
        assert store.ops.verify(progress=lambda done, total: seen.append((done, total))).runs == 5
        assert seen[-1] == (5, 5)
        run_sql(store, "UPDATE blob SET body = :body", body=b"x")
        assert len(problems(store)) == 3


@perdure.durable(name="verify-stored")
def stored(number: int) -> str:
    return large(number // 2)[:1]  # two runs may share a large result


# --- what a run that begins anew leaves behind


@perdure.durable(name="verify-rounds")
def rounds(number: int) -> Any:
    large(number)
    said = perdure.ask("Again?", quorum=2)
    if said == "again":
        perdure.continue_as_new(number + 1)
    return said


def test_a_run_that_begins_anew_keeps_neither_answers_nor_large_results(store: perdure.Store) -> None:
    """An answer of the last round does not count for the question at the same place in the next one."""
    store.run(rounds, 1, id="rounds")
    for who in ("maria", "noor"):
        store.answer("rounds", "again", who=who)
    assert store.run(rounds, 1, id="rounds").status == "waiting"
    assert store.answer("rounds", "again", who="omar").missing == 1
    store.ops.sweep_runs()
    number = "(SELECT run FROM run WHERE id = 'rounds')"
    assert run_sql(store, f"SELECT count(*) FROM run_blob WHERE run = {number}") == [(1,)]
    assert store.ops.verify().ok
