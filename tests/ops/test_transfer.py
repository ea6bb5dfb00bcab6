"""A transfer copies threads, a tenant or everything between any two stores: whole and verified, or nothing of it is in
the target, also after a fault or a kill at any statement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from backup_kit import asking, fill, run_of
from copy_kit import everything, grown, make_thread, query, tables
from databases import new_database
from soak import of_each_kind

import perdure
from perdure import Store, UsageError
from perdure.errors import Damaged, KeyMissing
from perdure.storage.columns import MARK
from perdure.testing.processes import ForkServer

Urls = tuple[str, str]
WAYS = ["sqlite-sqlite", "sqlite-postgres", "postgres-sqlite", "postgres-postgres"]


@pytest.fixture
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Urls]:
    """The URLs of a source and a target."""
    made = []
    server: Any = request.getfixturevalue("postgres_server") if "postgres" in request.param else None
    databases = []
    for name, place in zip(("source", "target"), request.param.split("-"), strict=True):
        if place == "sqlite":
            made.append(str(tmp_path / f"{name}.db"))
        else:
            databases.append(new_database(server))
            made.append(server.url(databases[-1]))
    yield made[0], made[1]
    for database in databases:
        server.drop_database(database)


def ways(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("urls", names or WAYS, indirect=True)


# --- threads


@ways()
def test_a_thread_is_the_same_in_the_target_and_goes_on_there(urls: Urls) -> None:
    with perdure.open(urls[0]) as store, perdure.open(urls[1]) as target:
        make_thread(store)
        store.thread("rich").pin(name="kept")
        target.thread("other").save({"n": 1})
        done = store.ops.transfer(urls[1], threads=["rich", "rich fork"])
        assert (done.threads, done.already) == (2, ())
        for name in ("rich", "rich fork"):
            assert everything(target, name) == everything(store, name)
        assert [pin.name for pin in target.thread("rich").pins()] == ["kept"]
        assert target.threads(where={"user": "alice"})
        again = store.ops.transfer(urls[1], threads=["rich", "rich fork"])
        assert (again.threads, again.already) == (0, ("rich", "rich fork"))
        for number in range(30):
            target.thread("rich").save(grown(number))
        assert target.ops.verify().ok
        with pytest.raises(UsageError, match="another thread 'rich'"):
            store.ops.transfer(urls[1], threads=["rich"])


@ways("sqlite-sqlite")
def test_a_thread_takes_nothing_of_its_forks_along(urls: Urls) -> None:
    with perdure.open(urls[0]) as store, perdure.open(urls[1]) as target:
        thread = store.thread("template")
        saved = [thread.save(grown(number)) for number in range(80)]
        middle = saved[40]
        for name in ("alice", "bob"):
            fork = thread.fork(middle, name=name)
            for number in range(60):
                fork.save({"secret of": name, **grown(number)})
        store.ops.transfer(urls[1], threads=["alice"])
        assert [info.name for info in target.threads()] == ["alice"]
        assert everything(target, "alice") == everything(store, "alice")
        assert query(target, "SELECT count(*) FROM record") == [(41 + 60,)]
        assert target.ops.verify().ok


def test_ids_of_callers_and_pending_writes_go_along(tmp_path: Path) -> None:
    from perdure.langgraph import PerdureSaver

    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    with PerdureSaver(str(tmp_path / "a.db")) as saver:
        from langgraph.checkpoint.base import empty_checkpoint

        stored = saver.put(config, empty_checkpoint(), {"source": "input", "step": 0}, {})
        saver.put_writes(stored, [("channel", {"n": 1})], "task")
        saver.store.ops.transfer(tmp_path / "b.db", threads=["t"])
        before = saver.get_tuple(config)
    with PerdureSaver(str(tmp_path / "b.db")) as saver:
        after = saver.get_tuple(config)
        assert after == before
        assert after is not None
        assert after.pending_writes


@ways("sqlite-sqlite", "postgres-postgres")
def test_a_damaged_source_is_refused_and_nothing_of_it_is_seen(urls: Urls) -> None:
    with perdure.open(urls[0]) as store, perdure.open(urls[1]) as target:
        make_thread(store)
        _execute(store, "UPDATE record SET at = at + 1 WHERE step = 5")
        with pytest.raises(Damaged):
            store.ops.transfer(urls[1], threads=["rich"])
        assert target.threads() == []


@pytest.mark.parametrize("named", [{"threads": ["\ud800"]}, {"runs": ["\ud800"]}], ids=["threads", "runs"])
def test_a_name_that_no_store_can_hold_is_refused(tmp_path: Path, named: dict[str, Any]) -> None:
    with perdure.open(tmp_path / "source.db") as source:
        source.thread("t").save({})
        with pytest.raises(UsageError, match="not valid Unicode"):
            source.ops.transfer(tmp_path / "target.db", **named)


# --- a tenant, everything


@ways("sqlite-postgres", "postgres-sqlite")
def test_a_tenant_is_taken_into_a_store_that_has_others(urls: Urls) -> None:
    with perdure.open(urls[0]) as store, perdure.open(urls[1]) as target:
        fill(store)
        target.thread("other").save({"n": 1})
        with pytest.raises(UsageError, match="two places"):
            store.ops.transfer(urls[1], tenant="default")
        store.ops.transfer(urls[1], tenant="default", move=True)
        assert {info.name for info in target.threads()} >= {"other", "rich"}
        assert everything(target, "rich") == everything(store, "rich")
        assert target.get_run("done").result() == store.get_run("done").result()
        target.answer("asks", "yes")
        assert target.run(asking, id="asks").result() == "yes"
        assert target.ops.verify().ok
        assert store.get_run("asks").status == "exported"


@ways("sqlite-postgres", "postgres-sqlite")
def test_everything_is_transferred_into_an_empty_store(urls: Urls) -> None:
    with perdure.open(urls[0]) as store:
        fill(store)
        before = tables(store)
        told: list[tuple[int, int]] = []
        store.ops.transfer(urls[1], progress=lambda done, total: told.append((done, total)))
        assert told[-1][0] == told[-1][1]
        with pytest.raises(UsageError, match="not empty"):
            store.ops.transfer(urls[1])
        assert store.ops.transfer(urls[0], threads=["rich"]).already == ("rich",)
    with perdure.open(urls[1]) as target:
        after = tables(target)
        for name in ("record", "body", "journal", "run_value", "tag", "tenant", "ask", "blob"):
            assert after[name] == before[name], name
        assert target.ops.verify().ok


@ways("sqlite-sqlite", "postgres-postgres")
def test_a_plain_store_is_encrypted_by_its_transfer_into_one_with_keys(urls: Urls, tmp_path: Path) -> None:
    key = bytes(range(32))
    with perdure.open(urls[0]) as store:
        fill(store)
        store.tenant("acme").thread("a").save({"word": "hush-hush"})
        expected = everything(store, "rich")
        done = store.ops.transfer(urls[1], keys=key)
        assert done.runs
    with perdure.open(urls[1], keys=key) as target:
        assert everything(target, "rich") == expected
        assert target.tenant("acme").thread("a").load().state == {"word": "hush-hush"}
        assert target.get_run("done").result() is not None
        assert target.ops.verify().ok
        for column in ("salt FROM body", "body FROM journal"):
            assert all(bytes(value).startswith(MARK) for (value,) in query(target, f"SELECT {column}"))
    with perdure.open(urls[1]) as plain, pytest.raises(KeyMissing):
        plain.thread("rich").load()


# --- faults and kills


class Fault(Exception):
    """What the hook raises."""


class Hook:
    """Raises at the n-th step."""

    def __init__(self, at: int | None = None) -> None:
        self.points: list[str] = []
        self.at = at

    def __call__(self, point: str) -> None:
        self.points.append(point)
        if len(self.points) == self.at:
            raise Fault(point)


GIVEN: dict[str, dict[str, Any]] = {"threads": {"threads": ["rich", "rich fork"]}, "everything": {}}


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("what", GIVEN)
@ways("sqlite-sqlite", "postgres-postgres")
def test_a_fault_at_any_step_shows_all_or_nothing_and_the_next_call_finishes(
    urls: Urls, what: str, side: str, tmp_path: Path
) -> None:
    hook = Hook()
    hooks: dict[str, dict[str, Any]] = {side: {"hook": hook}}
    with perdure.open(urls[0], **hooks.get("source", {})) as store:
        fill(store)
        points: list[int] = [0]
        for number in itertools.count():
            target = str(tmp_path / f"t{number}.db") if "postgres" not in urls[1] else urls[1]
            options: dict[str, Any] = {"schema": f"t{number}"} if "postgres" in urls[1] else {}
            perdure.open(target, **options).close()  # making a store is no part of this
            hook.points, hook.at = [], points.pop(0)
            struck = hooks.get("target", {})
            if number == 0:
                store.ops.transfer(target, **GIVEN[what], **options, **struck)
                points = of_each_kind(hook.points)
            else:
                with pytest.raises(Fault):
                    store.ops.transfer(target, **GIVEN[what], **options, **struck)
                hook.at = None
                with perdure.open(target, **options) as there:
                    arrived = [info.name for info in there.threads()]
                    assert there.ops.verify().ok
                    assert query(there, "SELECT count(*) FROM record") == [(0,)] or "rich" in arrived
                if what == "threads" or not arrived:
                    store.ops.transfer(target, **GIVEN[what], **options)
            with perdure.open(target, **options) as there:
                assert everything(there, "rich") == everything(store, "rich")
                assert there.ops.verify().ok
            if not points:
                break


@pytest.mark.parametrize("side", ["source", "target"])
@ways("sqlite-postgres", "postgres-sqlite")
def test_a_transfer_that_is_killed_leaves_all_or_nothing(urls: Urls, side: str) -> None:
    with perdure.open(urls[0]) as store:
        make_thread(store, count=200)
        expected = everything(store, "rich")
    perdure.open(urls[1]).close()
    given = orjson.dumps({"threads": ["rich"]}).decode()
    with ForkServer("copy_kit:transfer_and_die") as nursery:
        for at in (4 * 2**number for number in itertools.count()):
            if list(nursery.start(*urls, "default", given, side, at).lines()) == ["done"]:
                break
            with perdure.open(urls[1]) as target:
                arrived = [info.name for info in target.threads()]
                assert target.ops.verify().ok
                assert query(target, "SELECT count(*) FROM record") == [(0,)] or arrived == ["rich"]
    with perdure.open(urls[1]) as target:
        assert everything(target, "rich") == expected
        assert target.ops.verify().ok


def test_a_tenants_move_that_was_killed_before_a_run_was_published_is_finished_by_the_same_call(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "source.db") as store:
        store.start(run_of, 3, id="queued")
        store.start(run_of, 4, id="elsewhere")
        store.ops.transfer(tmp_path / "third.db", runs=["elsewhere"], move=True)

        def hook(point: str) -> None:
            if store.get_run("queued").status == "exported":
                raise Fault(point)

        move: dict[str, Any] = {"tenant": "default", "move": True}
        with pytest.raises(Fault):
            store.ops.transfer(tmp_path / "target.db", **move, hook=hook)
        assert [store.ops.transfer(tmp_path / "target.db", **move).runs for _ in range(2)] == [1, 0]
    with perdure.open(tmp_path / "target.db") as target:
        assert target.run(run_of, 3, id="queued").result() == 3
        assert [run.id for run in target.runs()] == ["queued"]


def _execute(store: Store, text: str) -> None:
    from perdure.storage.program import Batch, Program, Sql, drive, write

    def change() -> Program[None]:
        yield Batch(Sql(text)(), last=True)

    drive(store._context.driver, write(change))
