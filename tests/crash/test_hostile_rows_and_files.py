"""What a hostile reading of the code found: each of these once failed."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import apsw
import pytest

import perdure
from perdure.errors import ForkedProcess, PerdureError


def test_a_forked_child_cannot_open_the_file_that_its_parent_has_open(tmp_path: Path) -> None:
    """SQLite's locks do not survive a fork: what the child saved would be lost when the parent closes."""
    path = str(tmp_path / "a.db")
    with perdure.open(path) as store:
        store.thread("t").save({"n": 0})
        child = os.fork()
        if child == 0:
            try:
                perdure.open(path).thread("t").save({"n": 1})
            except ForkedProcess:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        store.thread("t").save({"n": 2})
    # Closed before the fork: nothing is inherited, and the child may open it.
    child = os.fork()
    if child == 0:
        with perdure.open(path) as own:
            own.thread("t").save({"n": 3})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with perdure.open(path) as store:
        assert store.thread("t").load().state == {"n": 3}
        assert store.ops.verify().ok


def test_tombstones_do_not_stop_a_later_prune(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "a.db")) as store:
        thread = store.thread("a")
        saved = [thread.save({"n": n, "text": f"{n} " * 10_000}) for n in range(4)]
        fork = thread.fork(saved[1], name="f")
        thread.prune(keep=1)
        fork.prune(keep=1)
        assert (thread.load().state["n"], fork.load().state["n"]) == (3, 1)
        store.delete_thread("f")
        assert store.ops.verify().ok


COLUMNS = {
    "record": [
        "parent",
        "base",
        "key",
        "kind",
        "at",
        "step",
        "note",
        "metadata",
        "size",
        "cost",
        "hash",
        "body",
    ],
    "body": ["salt", "diff", "full_text"],
    "thread": ["name", "metadata", "head", "head_hash", "created_at", "updated_at", "generation", "tree"],
}
CASES = [(table, column) for table, columns in COLUMNS.items() for column in columns]
WRONG = ["'text'", "x'00ff'", "1.5", "-9223372036854775808", "9223372036854775807"]


@pytest.mark.parametrize(("table", "column"), CASES)
def test_columns_of_the_wrong_type_give_errors_of_ours(tmp_path: Path, table: str, column: str) -> None:
    path = tmp_path / "a.db"
    with perdure.open(str(path)) as store:
        thread = store.thread("t", metadata={"k": "v"})
        for number in range(5):
            thread.save({"n": number, "text": "word " * 5_000}, note="a note", metadata={"m": number})
    kept = path.read_bytes()
    for wrong in WRONG:
        path.write_bytes(kept)
        with closing(apsw.Connection(str(path))) as connection:
            connection.execute(f"UPDATE {table} SET {column} = {wrong}")
        with perdure.open(str(path)) as store:
            _try_everything(store)


def _try_everything(store: perdure.Store) -> None:
    thread = store.thread("t")
    for operation in (
        lambda: thread.load().state,
        lambda: thread.load(strict=True).state,
        lambda: [checkpoint.metadata for checkpoint in thread.history()],
        thread.branches,
        thread.info,
        store.threads,
        store.ops.verify,
        store.ops.stats,
        lambda: thread.fork(name="fork"),
        lambda: thread.annotate({"a": 1}),
        lambda: thread.prune(keep=2),
        lambda: thread.save({"n": 9}),
        lambda: store.delete_thread("t"),
    ):
        try:
            operation()
        except PerdureError:
            pass
