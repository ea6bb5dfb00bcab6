"""Forks of one thread do not concern each other: what one of many costs, and whose records are changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from keeping_kit import PLACES, Clock, opened, place, query, sound

import perdure
from perdure.storage.sqlite import driver as driver_module
from perdure.storage.sqlite.opening import connect

TEXT = "x" * 500
# What each fork is made of, however it is stored.
ROWS = """SELECT r.id, r.base, r.keyframe, r.key, r.cost, r.body, t.generation
    FROM record r JOIN thread t ON t.tenant = r.tenant AND t.thread = r.thread WHERE t.name <> 'u3' ORDER BY r.id"""


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, clock: Clock) -> Iterator[perdure.Store]:
    with opened(place(request, request.param), clock) as made:
        yield made


def fill(store: perdure.Store, forks: int, *, apart: bool = False) -> None:
    """A template and its forks; or threads that have nothing to do with it."""
    template = store.thread("template")
    for number in range(3):
        template.save({"text": TEXT, "n": number})
    for number in range(forks):
        fork = store.thread(f"u{number}") if apart else template.fork(name=f"u{number}")
        for step in range(5):
            fork.save({"text": TEXT, "fork": number, "n": step})


ACTS: dict[str, Callable[[perdure.Store], object]] = {
    "load": lambda store: store.thread("u3").load(),
    "save": lambda store: store.thread("u3").save({"text": TEXT, "n": 6}),
    "history": lambda store: list(store.thread("u3").history()),
    "verify": lambda store: store.thread("u3").verify(),
    "pin": lambda store: store.thread("u3").pin(list(store.thread("u3").history())[-1], name="shared"),
    "unpin": lambda store: store.thread("u3").unpin("shared"),
    "rollback": lambda store: store.thread("u3").rollback(list(store.thread("u3").history())[-2]),
    "prune": lambda store: store.thread("u3").prune(keep=2),
    "save after": lambda store: store.thread("u4").save({"text": TEXT, "n": 7}),
    "delete": lambda store: store.delete_thread("u3"),
}


@pytest.mark.parametrize("apart", [False, True], ids=["forks", "threads"])
def test_one_of_many_costs_what_one_of_few_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """Counted in instructions of SQLite's machine: time would depend on this one."""
    count = 0

    def step() -> bool:
        nonlocal count
        count += 1
        return False

    def counting(*args: Any) -> apsw.Connection:
        connection = connect(*args)
        connection.set_progress_handler(step, 20)
        return connection

    monkeypatch.setattr(driver_module, "connect", counting)
    costs: list[dict[str, int]] = []
    for forks in (10, 300):
        with perdure.open(str(tmp_path / f"{forks}.db"), durability="normal") as store:
            fill(store, forks, apart=apart)
            costs.append({})
            for name, act in ACTS.items():
                before = count
                act(store)
                costs[-1][name] = count - before
            sound(store)
    few, many = costs
    assert {name: (few[name], many[name]) for name in ACTS if many[name] > 2 * few[name] + 5} == {}
    assert few["prune"] > 5


def test_nothing_of_a_sibling_is_changed(store: perdure.Store) -> None:
    fill(store, 5)
    for name in ("rollback", "prune", "delete"):
        before = query(store, ROWS)
        ACTS[name](store)
        assert query(store, ROWS) == before, name
    sound(store)


def test_the_first_save_of_a_fork_is_a_difference_and_the_second_a_keyframe(store: perdure.Store) -> None:
    fill(store, 2)
    for fork in ("u0", "u1"):
        rows = query(
            store,
            """SELECT r.keyframe, k.thread = r.thread FROM record r
            JOIN thread t ON t.tenant = r.tenant AND t.thread = r.thread
            JOIN record k ON k.tenant = r.tenant AND k.tree = r.tree AND k.id = r.key
            WHERE t.name = :name ORDER BY r.id""".replace(":name", repr(fork)),
        )
        assert [(keyframe, bool(own)) for keyframe, own in rows] == [(0, False), (1, True), *[(0, True)] * 3]


def test_what_only_forks_hold_goes_with_the_last_of_them(store: perdure.Store) -> None:
    fill(store, 3)
    store.delete_thread("template")
    assert len(list(store.thread("u0").history())) == 8
    store.delete_thread("u1")
    assert store.thread("u0").prune(keep=2).removed == 3
    sound(store)
    assert store.thread("u2").prune(keep=2).removed == 3 + 3
    sound(store)
    assert query(store, "SELECT count(*) FROM record WHERE body IS NOT NULL") == [(4,)]


def test_a_fork_of_a_fork_that_was_deleted_keeps_what_it_shares_with_the_first(store: perdure.Store) -> None:
    fill(store, 1)
    middle = store.thread("u0").fork(name="middle")
    middle.save({"text": TEXT, "middle": 1})
    last = middle.fork(name="last")
    store.delete_thread("middle")
    assert store.thread("u0").prune(keep=1).removed == 0
    assert [checkpoint.state.get("n") for checkpoint in last.history()] == [None, 4, 3, 2, 1, 0, 2, 1, 0]
    store.delete_thread("u0")
    sound(store)
    assert len(list(last.history())) == 9
    store.delete_thread("last")
    assert query(store, "SELECT count(*) FROM record") == [(3,)]


def test_a_thread_takes_no_checkpoint_of_a_sibling(store: perdure.Store) -> None:
    fill(store, 2)
    other = store.thread("u1").load()
    thread = store.thread("u0")
    thread.load()
    for act in (
        lambda: thread.fork(other, name="new"),
        lambda: thread.save({}, parent=other),
        lambda: thread.rollback(other),
        lambda: thread.pin(other, name="p"),
    ):
        with pytest.raises(perdure.NotFound, match="another thread"):
            act()
    shared = list(thread.history())[-1]
    assert thread.save({"n": 0}, parent=shared).parent == shared.id
    assert thread.fork(shared, name="new").load().state == shared.state
    sound(store)


def test_verify_of_a_thread_sees_its_own_damage_and_what_it_shares(store: perdure.Store) -> None:
    fill(store, 2)
    damage = """UPDATE record SET hash = {} WHERE id = (SELECT head FROM thread WHERE name = '{}')"""
    zeros = "zeroblob(32)" if "sqlite" in repr(store).lower() else "decode(repeat('00', 32), 'hex')"
    _execute(store, damage.format(zeros, "u1"))
    assert store.thread("u0").verify().problems == ()
    assert {problem.thread for problem in store.thread("u1").verify().problems} == {"u1"}
    _execute(store, damage.format(zeros, "template"))
    assert {problem.thread for problem in store.thread("u0").verify().problems} >= {"template"}
    assert not store.ops.verify().ok


def _execute(store: perdure.Store, text: str) -> None:
    from perdure.storage.program import Batch, Sql, drive, write

    def program() -> Any:
        yield Batch(Sql(text)(), last=True)

    drive(store._context.driver, write(program))
