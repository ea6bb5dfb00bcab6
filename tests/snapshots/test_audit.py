"""A signed head shows later that no history was rewritten, and which entry was."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from snapshot_kit import asks, count, key_pair

import perdure
from perdure.errors import Damaged
from perdure.runs.domain import TABLES
from perdure.runs.engine import flows
from perdure.runs.journal.entries import DIGEST_MASK, entry_digest
from perdure.snapshots import audit_run, audit_thread
from perdure.storage.program import Batch, Program, Sql, drive, write
from perdure.transfers.tables import table_copy


def test_history_that_only_grew(store: perdure.Store, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "audit")
    store.run(asks, id="waits")
    before = audit_run(store, "waits")
    head = before.head(private)
    snap = store.snapshot("s")
    store.answer("waits", "aisle")
    store.run(asks, id="waits")
    after = audit_run(store, "waits")
    assert after.check(head, public) == []
    assert after.entries[: len(before.entries)] == before.entries
    assert len(after.entries) > len(before.entries)
    assert audit_run(snap, "waits") == before
    assert before.check(after.head()) == [f"entry {after.entries[-1].place} was removed"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with perdure.open(tmp_path / "store.db") as store:
        store.run(count, 4, id="run")
        for number in range(3):
            store.thread("t").save({"n": number})
    return tmp_path / "store.db"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "UPDATE journal SET body = (SELECT body FROM journal WHERE seq = 1) WHERE seq = 2",
            ["entry 2 was changed: done (cannot be read)"],
        ),
        ("DELETE FROM journal WHERE seq = 3", ["entry 3 was removed"]),
        ("UPDATE journal SET seq = 9 WHERE seq = 1", ["entry 1 was removed"]),
    ],
)
def test_the_entry_that_was_rewritten(file: Path, change: str, said: list[str]) -> None:
    with perdure.open(file) as store:
        head = audit_run(store, "run").head()
    connection = apsw.Connection(str(file))
    connection.execute(change)
    connection.close()
    with perdure.open(file) as store:
        found = audit_run(store, "run")
    assert found.problem is not None  # the run's own sum shows it too
    assert found.check(head) == said


def test_a_forger_who_computes_every_sum_anew(file: Path) -> None:
    """The store itself finds nothing; the head does."""
    copy = table_copy(next(table for table in TABLES if table.name == "journal"), "run")
    total = Sql("UPDATE run SET digest = :digest WHERE tenant = :tenant AND run = :run")
    with perdure.open(file) as store:
        head = audit_run(store, "run").head()
        tenant, row = drive(store._context.driver, flows.locate(store._context, "run"))

        def forge() -> Program[None]:
            [rows] = yield Batch(copy.rows(tenant, row.run))
            forged = [(run, seq, kind, body.replace(b"look_up", b"took_up")) for run, seq, kind, body in rows]
            digest = sum(entry_digest(*one) for one in forged) & DIGEST_MASK
            yield Batch(copy.drop(tenant=tenant, number=row.run), *copy.inserts(tenant, forged))
            yield Batch(total(tenant=tenant, run=row.run, digest=digest))

        drive(store._context.driver, write(forge))
    with perdure.open(file) as store:
        assert store.ops.verify().ok
        found = audit_run(store, "run")
    assert found.problem is None
    assert found.check(head)[0] == "entry 1 was changed: done 1 took_up"


def test_an_entry_that_was_slipped_in(file: Path) -> None:
    """Before the end of a finished run nothing can be added."""
    with perdure.open(file) as store:
        whole = audit_run(store, "run")
        part = type(whole)("run", "run", whole.origin, True, (*whole.entries[:1], *whole.entries[2:]))
        assert whole.check(part.head()) == [f"entry 2 was added: {whole.entries[1].kind} {whole.entries[1].name}"]


def test_the_checkpoints_of_a_thread(file: Path) -> None:
    with perdure.open(file) as store:
        head = audit_thread(store, "t").head()
        store.thread("t").save({"n": 3})
        assert audit_thread(store, "t").check(head) == []
        store.delete_thread("t")
        store.thread("t").save({"n": 0})
        assert len(audit_thread(store, "t").check(head)) == 3


def test_a_later_run_of_the_same_id_is_another(file: Path) -> None:
    with perdure.open(file) as store:
        head = audit_run(store, "run").head()
        store.delete_run("run")
        store.run(count, 4, id="run")
        assert audit_run(store, "run").check(head) == ["the head is of another run: run"]


def test_a_head_that_was_changed(file: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "audit")
    _, other = key_pair(tmp_path, "other")
    with perdure.open(file) as store:
        found = audit_run(store, "run")
    head = found.head(private)
    for changed in (head[:-1], head.replace(b"run", b"ran", 1), b"", b"[]", found.head()):
        with pytest.raises(Damaged, match="cannot be trusted"):
            found.check(changed, public)
    with pytest.raises(Damaged, match="another key"):
        found.check(head, other)
