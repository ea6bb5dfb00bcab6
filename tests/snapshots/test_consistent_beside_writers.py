"""Snapshots that are taken while others write: each is exactly what was committed at one instant, and stays that.

Writers move amounts between rows of several tables, in place and by removing and making rows; no transaction changes
the sum. A snapshot that cuts a transaction in two has another sum. The controls take away what prevents that, and must
be caught by the same checks.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from soak import SOAK

import perdure
from perdure.snapshots import rows
from perdure.storage.program import Batch, Driver, Program, Sql, Statement, drive, read, write

WRITERS = 3
SNAPSHOTS = 1000 if SOAK else 12
START = 1000
_PIN = Sql("INSERT INTO pin (tenant, thread, name, tree, record, at) VALUES (:tenant, 1, :name, 1, 1, :at)")
_ANSWER = Sql("INSERT INTO answer (tenant, run, path, who, value, at) VALUES (:tenant, 1, 'p', :name, :value, :at)")
_ARCHIVED = Sql(
    "INSERT INTO archived (tenant, kind, name, place, at) VALUES (:tenant, 'thread', :name, 'nowhere', :at)"
)
_LEAVE = Sql("UPDATE pin SET at = at - :amount WHERE tenant = :tenant AND name = :name")
_ARRIVE = Sql("UPDATE answer SET at = at + :amount WHERE tenant = :tenant AND who = :name")
_TAKE = Sql("DELETE FROM archived WHERE tenant = :tenant AND name = :name RETURNING at")
_COUNT = Sql("UPDATE archived SET at = :at WHERE tenant = :tenant AND name = :name")
_TOTAL = [
    Sql("SELECT coalesce(sum(at), 0) FROM pin WHERE tenant = :tenant"),
    Sql("SELECT coalesce(sum(at), 0) FROM answer WHERE tenant = :tenant"),
    Sql("SELECT coalesce(sum(at), 0) FROM archived WHERE tenant = :tenant AND name NOT LIKE 'count %'"),
]
_COUNTS = Sql("SELECT name, at FROM archived WHERE tenant = :tenant AND name LIKE 'count %' ORDER BY name")


def start(tenant: int) -> Program[None]:
    for number in range(WRITERS):
        yield Batch(_PIN(tenant=tenant, name=f"a{number}", at=START))
        yield Batch(_ANSWER(tenant=tenant, name=f"a{number}", value=b"", at=START))
        yield Batch(_ARCHIVED(tenant=tenant, name=f"a{number}", at=START))
        yield Batch(_ARCHIVED(tenant=tenant, name=f"count {number}", at=0))


def move(tenant: int, name: str, other: str, amount: int) -> Program[None]:
    yield Batch(_LEAVE(tenant=tenant, name=name, amount=amount))
    yield Batch(_ARRIVE(tenant=tenant, name=other, amount=amount))


def one(statement: Statement) -> Program[None]:
    yield Batch(statement)


def remake(tenant: int, name: str) -> Program[None]:
    [taken] = yield Batch(_TAKE(tenant=tenant, name=name))
    for (at,) in taken:
        yield Batch(_ARCHIVED(tenant=tenant, name=name, at=at))


def counted(tenant: int, writer: int, number: int, change: Callable[[], Program[None]]) -> Program[None]:
    yield from change()
    yield Batch(_COUNT(tenant=tenant, name=f"count {writer}", at=number))


def look(tenant: int) -> Program[tuple[int, list[int]]]:
    *totals, counts = yield Batch(*(sql(tenant=tenant) for sql in _TOTAL), _COUNTS(tenant=tenant))
    return sum(int(total[0][0]) for total in totals), [at for _, at in counts]


class Writer(threading.Thread):
    """Changes that keep the sum; `begun` and `done` are the numbers of its transactions."""

    def __init__(self, url: str, tenant: int, number: int, ended: threading.Event, torn: bool) -> None:
        super().__init__()
        self.url, self.tenant, self.number, self.ended, self.torn = url, tenant, number, ended, torn
        self.begun = self.done = 0
        self.error: Exception | None = None

    def run(self) -> None:
        chance = random.Random(self.number)
        try:
            with perdure.open(self.url, durability="normal") as store:
                while not self.ended.is_set():
                    self._transact(store._context.driver, chance)
        except Exception as error:
            self.error = error

    def _transact(self, driver: Driver, chance: random.Random) -> None:
        mine, other = f"a{self.number}", f"a{chance.randrange(WRITERS)}"
        self.begun += 1
        amount = chance.randint(1, 50)
        if self.torn:  # a transaction in two halves: what a snapshot must never see
            drive(driver, write(partial(one, _LEAVE(tenant=self.tenant, name=mine, amount=amount))))
            drive(driver, write(partial(one, _ARRIVE(tenant=self.tenant, name=other, amount=amount))))
        else:
            change = partial(move, self.tenant, mine, other, amount)
            if chance.random() < 0.3:
                change = partial(remake, self.tenant, mine)
            drive(driver, write(partial(counted, self.tenant, self.number, self.begun, change)))
        self.done = self.begun


@contextmanager
def writers(url: str, tenant: int, torn: bool) -> Iterator[list[Writer]]:
    ended = threading.Event()
    team = [Writer(url, tenant, number, ended, torn) for number in range(WRITERS)]
    for each in team:
        each.start()
    try:
        yield team
    finally:
        ended.set()
        for each in team:
            each.join()
        assert [each.error for each in team if each.error] == []


def violations(url: str, torn: bool = False, snapshots: int = SNAPSHOTS) -> list[str]:
    """Take snapshots beside writers and check each of them, at once and at the end."""
    found: list[str] = []
    with perdure.open(url, durability="normal") as store:
        store.thread("t").save({})
        tenant = drive(store._context.driver, store._context.ensure_tenant())
        drive(store._context.driver, write(partial(start, tenant)))
        store.snapshot("first").release()  # the store is prepared for snapshots before the writers begin
        with writers(url, tenant, torn) as team:
            taken = []
            for number in range(snapshots):
                seen = sum(each.done for each in team)
                while sum(each.done for each in team) < seen + 2 * WRITERS and all(each.is_alive() for each in team):
                    pass  # some work between two snapshots
                done = [each.done for each in team]
                snapshot = store.snapshot(f"s{number}")
                begun = [each.begun for each in team]
                total, counts = drive(snapshot.store._context.driver, read(partial(look, tenant)))
                if total != 3 * WRITERS * START:
                    found.append(f"s{number}: the sum is {total}")
                if not torn and not all(a <= b <= c for a, b, c in zip(done, counts, begun, strict=True)):
                    found.append(f"s{number}: {done} were committed, {counts} are seen, {begun} had begun")
                taken.append((snapshot, total, counts))
                if found:
                    break  # a control is caught
        for snapshot, total, counts in taken:
            if drive(snapshot.store._context.driver, read(partial(look, tenant))) != (total, counts):
                found.append(f"{snapshot.name} has changed")
        for snapshot, *_ in taken:
            snapshot.release()
        last = store.snapshot("last")
        assert last.held_bytes() == 0
    return found


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    return str(request.getfixturevalue("postgres_url"))


def test_every_snapshot_is_one_instant(url: str) -> None:
    assert violations(url) == []


def test_the_checks_find_torn_transactions(url: str) -> None:
    assert violations(url, torn=True, snapshots=200) != []


def test_the_checks_find_a_snapshot_that_does_not_wait_for_writers(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_LOCK", Sql("SELECT 1"))
    assert violations(postgres_url, snapshots=200) != []
