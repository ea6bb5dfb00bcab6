"""Every writer locks a run's row before its questions: an answer that comes at the same moment waits, and never
deadlocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

import perdure

_BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


@perdure.durable(name="locks.asking")
def asking() -> str:
    return str(perdure.ask("Which?"))


def export(store: perdure.Store, folder: Path) -> None:
    store.ops.transfer(folder / "other.db", runs=["trip"], move=True)


def delete_thread(store: perdure.Store, folder: Path) -> None:
    store.delete_thread("chat")


@pytest.mark.parametrize("change", [export, delete_thread])
def test_a_writer_that_waits_for_a_run_holds_none_of_its_questions(
    change: Callable[[perdure.Store, Path], None], postgres_url: str, tmp_path: Path
) -> None:
    with perdure.open(postgres_url) as store:
        store.run(asking, id="trip")
        store.thread("chat").save({"n": 1})
        with psycopg.connect(postgres_url, options="-c search_path=perdure") as answering:
            if change is delete_thread:  # as the run of a task of the thread's graph
                answering.execute("UPDATE run SET function = 'task:node', root = (SELECT thread FROM thread)")
                answering.commit()
            answering.execute("SELECT run FROM run FOR UPDATE")  # what an answer does first
            other = threading.Thread(target=change, args=(store, tmp_path))
            other.start()
            try:
                _until_blocked(postgres_url)
                answering.execute("SELECT path FROM ask FOR UPDATE NOWAIT")  # what it does then
            finally:
                answering.rollback()
                other.join()


def _until_blocked(url: str) -> None:
    until = time.monotonic() + 30
    with psycopg.connect(url, autocommit=True) as watching:
        while not watching.execute(_BLOCKED).fetchone()[0]:  # type: ignore[index]
            assert time.monotonic() < until, "the other writer never came to wait for the run"
            time.sleep(0.01)
