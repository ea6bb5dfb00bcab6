"""A signed head shows later that no history was rewritten, and which entry was."""

from __future__ import annotations

import random
from pathlib import Path

import apsw
import pytest
from snapshot_kit import asks, count, key_pair

import perdure
from perdure.errors import Damaged
from perdure.forensics import Audit, audit_run, audit_thread
from perdure.runs.engine import flows
from perdure.runs.journal.entries import DIGEST_MASK, entry_digest
from perdure.runs.journal.rows import ADD_VALUE
from perdure.runs.tables import JOURNAL
from perdure.snapshots.signature import signed
from perdure.storage.program import Batch, Program, Sql, drive, write
from perdure.transfers.tables import table_copy


@perdure.step
def large_text() -> str:
    return random.Random(1).randbytes(100_000).hex()


@perdure.durable
def large() -> int:
    return len(large_text())


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
    assert before.check(after.head()) == ["entry 2 was removed", "entry outcome was removed"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with perdure.open(tmp_path / "store.db") as store:
        store.run(count, 4, id="run")
        store.run(count, 3, id="other")
        store.run(large, id="large")
        for number in range(3):
            store.thread("t").save({"n": number})
    return tmp_path / "store.db"


OF_RUN = "run = (SELECT run FROM run WHERE id = 'run')"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            f"UPDATE journal SET body = (SELECT body FROM journal WHERE seq = 1) WHERE seq = 2 AND {OF_RUN}",
            ["entry 2 was changed: done (cannot be read)"],
        ),
        (f"DELETE FROM journal WHERE seq = 3 AND {OF_RUN}", ["entry 3 was removed"]),
        (f"UPDATE journal SET seq = 9 WHERE seq = 1 AND {OF_RUN}", ["entry 1 was removed"]),
        (
            f"UPDATE run_value SET value = x'00' WHERE kind = 'outcome' AND {OF_RUN}",
            ["entry outcome was changed: outcome done"],
        ),
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
    assert found.check(head) == [found.problem, *said]  # the store's own hashes show it too


@pytest.mark.parametrize("change", ["UPDATE body SET salt = zeroblob(16)", "UPDATE blob SET body = x'00'"])
def test_what_a_hash_stands_for_was_rewritten(file: Path, change: str) -> None:
    def audits() -> list[Audit]:
        with perdure.open(file) as store:
            return [audit_run(store, "large"), audit_thread(store, "t")]

    heads = [audit.head() for audit in audits()]
    connection = apsw.Connection(str(file))
    connection.execute(change)
    connection.close()
    found = [audit.check(head) for audit, head in zip(audits(), heads, strict=True)]
    assert [len(problems) for problems in found] == ([1, 0] if "blob SET" in change else [0, 1])


def test_what_rewrites_no_history(store: perdure.Store, tmp_path: Path) -> None:
    """Compaction, copies, restoring a thread, and undoing a run's effects, which is history itself."""
    store.run(count, 3, id="run")
    for number in range(40):
        store.thread("t").save({"n": number, "text": "x" * 200})
    run, thread = audit_run(store, "run").head(), audit_thread(store, "t").head()
    snap = store.snapshot("s")
    store.thread("t").save({"n": 99})
    store.ops.compact()
    store.restore(snap)
    keys = {} if (cache := store._context.driver.capabilities.keys) is None else {"keys": cache.provider}
    store.snapshot("later").export(tmp_path / "bundle.db")
    with perdure.ops.open_bundle(tmp_path / "bundle.db", **keys) as found:
        for source in (store, snap, found):
            assert audit_run(source, "run").check(run) == []
            assert audit_thread(source, "t").check(thread) == []
    store.thread("t").prune(keep=1)
    assert len(audit_thread(store, "t").check(thread)) == 40


def test_a_forger_who_computes_every_sum_anew(file: Path) -> None:
    """The store itself finds nothing; the head does."""
    copy = table_copy(JOURNAL)
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
            yield Batch(ADD_VALUE(tenant=tenant, run=row.run, kind="outcome", value=b"13"))

        drive(store._context.driver, write(forge))
    with perdure.open(file) as store:
        assert store.ops.verify().ok
        found = audit_run(store, "run")
    assert found.problem is None
    changed = [f"entry {number} was changed: done {number} took_up" for number in range(1, 5)]
    assert found.check(head) == [*changed, "entry outcome was changed: outcome done"]


def test_an_entry_that_was_slipped_in(file: Path) -> None:
    """Before the end of a finished run nothing can be added."""
    with perdure.open(file) as store:
        whole = audit_run(store, "run")
        part = Audit("run", "run", whole.origin, True, (*whole.entries[:2], *whole.entries[3:]))
        assert whole.check(part.head()) == ["entry 2 was added: done 2 look_up"]


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
    for changed in (
        head[:-1],
        head.replace(b"run", b"ran", 1),
        b"",
        b"[]",
        found.head(),
        signed({"snapshot": "s"}, private),
    ):
        with pytest.raises(Damaged, match="cannot be trusted"):
            found.check(changed, public)
    with pytest.raises(Damaged, match="another key"):
        found.check(head, other)
