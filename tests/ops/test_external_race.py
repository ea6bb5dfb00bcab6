"""Collection of large values on PostgreSQL meets a save that refers to one. Nothing that is referred to is removed."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from external_kit import swept
from pg_session import Session

import perdure
from perdure.storage.program import Batch, Program, write
from perdure.threads import external_rows, externals
from perdure.values.external import content_hash

CONTENT = b"b" + b"new" * 99
KEY = content_hash(CONTENT)


@pytest.fixture
def store(postgres_url: str, tmp_path: Path) -> Any:
    with perdure.open(postgres_url, objects=tmp_path) as store:
        yield store


def test_a_value_that_is_stored_while_a_collection_runs_stays(
    store: perdure.Store, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value comes after the collection has locked those that are there. Its use is not committed yet when the
    collection looks for uses: it waits for the save, and goes on with what it saw."""
    ctx, writer = store._context, Session(postgres_url)
    store.thread("t").save({"v": perdure.External(b"old" * 99)})
    tenant = ctx.known_tenant or 0
    threads: list[threading.Thread] = []

    def referring() -> None:
        store._run(write(partial(externals._claim, ctx, tenant, KEY, len(CONTENT))))
        writer.run("BEGIN")
        writer.run(external_rows._LOCK, tenant=tenant, hash=KEY)
        writer.run(external_rows._USE, tenant=tenant, tree=1, hash=KEY, first=1, last=1)
        threads.append(threading.Thread(target=commit_when_it_is_waited_for, args=[Session(postgres_url)]))
        threads[0].start()

    def commit_when_it_is_waited_for(watcher: Session) -> None:
        held = "SELECT 1 FROM pg_stat_activity WHERE :pid = ANY(pg_blocking_pids(pid))"
        waits = "SELECT 1 FROM pg_stat_activity WHERE pid = :pid AND state <> 'idle'"
        while watcher.run(waits, pid=writer.connection.info.backend_pid):
            if done.is_set() or watcher.run(held, pid=writer.connection.info.backend_pid):
                writer.run("COMMIT")
        watcher.close()

    def retiring(*args: Any) -> Program[None]:
        program = retire(*args)
        batch: Batch | None = next(program)
        while batch is not None:
            if "UPDATE external SET gone_at" in batch.statements[0].sql.postgres:
                referring()
            try:
                batch = program.send((yield batch))
            except StopIteration:
                batch = None

    retire, done = externals._retire, threading.Event()
    monkeypatch.setattr(externals, "_retire", retiring)
    try:
        assert swept(store) == 0
    finally:
        done.set()
        threads[0].join()
    [[gone]] = writer.run("SELECT gone_at FROM external WHERE hash = :key", key=KEY)
    assert gone is None
    writer.close()


def test_a_value_that_another_writer_stores_and_a_collection_removes_is_stored_again(
    store: perdure.Store, postgres_url: str
) -> None:
    """The other's row comes before this writer's own, and the collection holds it when this writer wants to have it."""
    ctx, other, watcher = store._context, Session(postgres_url), Session(postgres_url)
    tenant = store._run(ctx.ensure_tenant())
    pid = other.connection.info.backend_pid
    met: list[threading.Thread] = []

    def retire_when_it_is_waited_for() -> None:
        while not watcher.run("SELECT 1 FROM pg_stat_activity WHERE :pid = ANY(pg_blocking_pids(pid))", pid=pid):
            assert threading.main_thread().is_alive()
        other.run("UPDATE external SET gone_at = 1 WHERE hash = :key", key=KEY)
        other.run("COMMIT")

    def claiming() -> Program[str]:
        program = externals._claim(ctx, tenant, KEY, len(CONTENT))
        batch = next(program)
        while True:
            if not met and "INSERT INTO external" in batch.statements[0].sql.postgres:
                other.run(externals._ADD, tenant=tenant, name="other", hash=KEY, bytes=1)
                other.run("BEGIN")
                other.run(externals._LOCK, tenant=tenant)
                met.append(threading.Thread(target=retire_when_it_is_waited_for))
                met[0].start()
            try:
                batch = program.send((yield batch))
            except StopIteration as end:
                return str(end.value)

    name = store._run(write(claiming))
    met[0].join()
    assert watcher.run("SELECT name FROM external WHERE gone_at IS NULL") == [(name,)]
    other.close()
    watcher.close()
