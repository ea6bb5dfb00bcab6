"""Every stored value is covered by a hash: a changed byte, or two rows that changed places, is an error and no value.

Each column of the schema is named here. One that is not fails the first test: say what covers it, and damage it below.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint
from sealed_kit import Raw, encrypted_columns

import perdure
from perdure.errors import Damaged, JournalDamaged
from perdure.langgraph import PerdureSaver
from perdure.runs.tables import RUN_COUNT

# Payloads with a hash elsewhere: where it is checked when they are read.
ELSEWHERE = {
    **dict.fromkeys(
        ("record.note", "record.metadata", "record.kind", "record.at", "record.step", "record.size", "record.parent"),
        "the record's hash",
    ),
    "thread.metadata": "verify: it is what the thread is found by",
    **dict.fromkeys(("body.salt", "body.diff", "body.full_text"), "the record's hash"),
    **dict.fromkeys(("thread.head", "thread.head_hash"), "the hash of the record that it names"),
    **dict.fromkeys(("journal.kind", "journal.body"), "the sum in the run's row"),
    "blob.body": "the hash that it is stored under",
    "write.key": "the hash of write.value",
    "write.path": "the hash of write.value",
    "write.base": "the hash of write.value",
    "run.id": "the hash of run.input",
    "run.function": "the hash of run.input",
    "run.incarnation": "the hash of the arguments",
    "tag.value": "verify: it is the metadata of the thread, to search by",
    "run_tag.value": "verify: it is a tag of the run, to search by",
    **dict.fromkeys((f"run_count.{name}" for name in ("tenant", *RUN_COUNT.names)), "verify: they count the runs"),
    **dict.fromkeys(
        [
            f"memory_item.{name}"
            for name in ("key", "version", "kind", "pinned", "created_at", "at", "valid_from", "valid_to", "gone")
        ],
        "the hash of memory_item.body",
    ),
    "memory_item.words": "verify: they are those of the item's text",
    "memory_vector.vec": "verify",
    "tenant_key.wrapped": "AES-GCM",
    **dict.fromkeys(("outbox.body", "outbox.link"), "the link, which the receiver of the batch computes again"),
    **dict.fromkeys(("peer.sent_link", "peer.received_link"), "the next batch: its links go on from them"),
    "peer_key.secret": "the signature of each batch",
    "prepared.redo": "the hashes of the rows that it writes",
    "memory_index.body": "its digest; it is built from the items again",
    "emitted.body": "nothing: shown while its step runs, and then gone; no result is made from it",
}
# What the engine moves or counts, and what only a report shows: numbers, flags, times, names.
NO_PAYLOAD = {
    "meta": "key value",
    "migration": "version applied_at",
    "counter": "one number",
    "tenant": "tenant name",
    "thread": """tenant thread tree name origin source generation created_at updated_at active retention owner
        autosave asked_at asked_id""",
    "tag": "tenant key thread",
    "record": "tenant tree id thread base keyframe key cost hash skip body",
    "body": "id tenant",
    "space": "tenant thread name space head",
    "label": "tenant thread space id record run",
    "write": "tenant thread space id task idx",
    "run": """tenant run version parent root origin origin_seq
        status queue priority owner fence starts lease_until wake_at wakeup_pending request entries digest seq since
        created_at changed_at keep_until cut bucket key turn crashes reopened_at""",
    "run_tag": "tenant key at run",
    "run_value": "tenant run kind",
    "journal": "tenant run seq",
    "ask": "tenant run path kind asked_at deadline status",
    "answer": "tenant run path who at",
    "mail": "tenant run seq topic key sender sent_turn taken_turn record state at",
    "queue": "queue concurrency tenant_concurrency rate tokens filled_at",
    "blob": "tenant hash",
    "run_blob": "tenant run hash",
    "memory_index": "tenant space model number until at generation digest",
    "emitted": "tenant run fence upto path name attempt first at",
    "pin": "tenant thread name tree record at",
    "erased": "tenant thread record records head_hash at",
    "operator_action": "tenant id at who action subject details",
    "tenant_key": "tenant wrapped_by since",
    "copy": "id kind place tenant at bytes restored_at",
    "size_sample": "at bytes free_bytes",
    "far_loose": "tenant name state at",
    "tenant_role": "role tenant",
    "archived": "tenant name kind place at",
    "deployment": "tenant function version canary share since run_after reverted",
    "schedule": """tenant name function version cron every_us timezone queue priority overlap catch_up jitter_us paused
        last_at next_at last_run skipped""",
    "memory_space": "tenant space path last generation items bytes policy merged",
    "peer": "tenant team peer sent acked received",
    "outbox": "tenant team peer seq",
    "team_store": "tenant team store era cut restoring",
    "peer_key": "tenant team peer",
    "team_view": "tenant team revision view",
    "removal": "tenant kind until_at",
    # A state has the hash of its value, and the value is checked against it.
    "external": "tenant name hash bytes at is_written gone_at",
    "external_use": "tenant tree hash first last",
    "run_external": "tenant run kind hash",
    "prepared": "gid decider deadline",
    "decision": "gid outcome at",
    "memory_item": "id tenant space bytes ended_at expires",
    "memory_vector": "id tenant model",
    # How far a transfer is. What a wrong cursor leaves out is found before the copy is used: by the number of rows,
    # the hashes of the records, or the sum of the journal.
}


def test_every_column_has_a_hash_or_is_no_payload(url: str) -> None:
    with perdure.open(url) as store:
        store.thread("a").save({})
    raw = Raw(url)
    if raw.is_postgres:
        columns = raw(
            "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'perdure'"
            " AND table_name IN (SELECT tablename FROM pg_tables WHERE schemaname = 'perdure')"
        )
    else:
        columns = raw("SELECT m.name, c.name FROM sqlite_schema m, pragma_table_info(m.name) c WHERE m.type = 'table'")
    hashed = {column.label for column in encrypted_columns() if column.hashed}
    unknown = (
        {
            f"{table}.{column}"
            for table, column in columns
            if not table.startswith("sqlite_") and column not in NO_PAYLOAD.get(table, "").split()
        }
        - hashed
        - ELSEWHERE.keys()
    )
    assert not unknown, "give these columns a hash (storage/domains.py), or say what covers them"


@perdure.step(name="damaged.large")
def large(seed: int) -> bytes:
    import random

    return random.Random(seed).randbytes(200_000)


@perdure.durable(name="damaged.pay")
def pay(amount: int, much: bool = False) -> Any:
    return len(large(amount)) if much else {"paid": amount}


@perdure.durable(name="damaged.asks")
def asks(what: str, quorum: int = 1) -> Any:
    return perdure.ask(
        f"{what}?", options=["yes", "no"], approvers=["ann", "bob"] if quorum > 1 else None, quorum=quorum
    )


@perdure.durable(name="damaged.receives")
def receives() -> Any:
    return perdure.receive(topic="pay")


def fill(store: perdure.Store) -> None:
    for n in (1, 2):
        store.thread(f"thread{n}", metadata={"user": n}).save({"state": n}, note=f"note {n}")
        store.run(pay, n * 100, id=f"done{n}", tags={"customer": f"c-{n}"}).result()
        store.run(pay, n, True, id=f"large{n}").result()
        store.start(pay, n * 100, id=f"queued{n}")
        store.run(asks, f"open{n}", id=f"open{n}")
        store.run(asks, f"answered{n}", id=f"answered{n}")
        store.answer(f"answered{n}", ["yes", "no"][n - 1])
        store.run(asks, f"quorum{n}", 2, id=f"quorum{n}")
        store.answer(f"quorum{n}", ["yes", "no"][n - 1], who="ann")
        store.run(receives, id=f"waits{n}")
        store.send(f"waits{n}", {"amount": n * 100}, topic="pay")
    saver = PerdureSaver(store)
    for n in (1, 2):
        config = saver.put(
            {"configurable": {"thread_id": f"graph{n}", "checkpoint_ns": ""}},
            empty_checkpoint(),
            {"source": "loop"},
            {},
        )
        saver.put_writes(config, [("channel", {"amount": n * 100})], f"task{n}")


RUN = "run = (SELECT run FROM run WHERE id = '{}{}')"
Reader = Callable[[perdure.Store], Any]
# A column: what its row is found by (of two rows), and what reads the first of them.
COLUMNS: dict[str, tuple[str, Reader]] = {
    "run.input": ("id = 'done{1}'", lambda store: store.get_run("done1").result(timeout_s=60)),
    "run.tags": ("id = 'done{1}'", lambda store: store.runs()),
    "run.waiting": ("id = 'open{1}'", lambda store: store.get_run("open1").refresh()),
    "run.incarnation": ("id = 'queued{1}'", lambda store: work(store, "queued1")),
    "run_value.value": (
        RUN.format("done", "{1}") + " AND kind = 'outcome'",
        lambda store: store.get_run("done1").result(),
    ),
    "run_value.value of arguments": (
        RUN.format("queued", "{1}") + " AND kind = 'args'",
        lambda store: work(store, "queued1"),
    ),
    "journal.body": (RUN.format("large", "{1}"), lambda store: store.get_run("large1").steps()),
    "blob.body": (
        "hash = (SELECT {0}(hash) FROM blob)",
        lambda store: [store.get_run(f"large{n}").steps() for n in (1, 2)],
    ),
    "ask.question": (RUN.format("open", "{1}"), lambda store: store.questions()),
    "ask.terms": (RUN.format("open", "{1}"), lambda store: store.questions()),
    "ask.answer": (RUN.format("answered", "{1}"), lambda store: work(store, "answered1")),
    "answer.value": (RUN.format("quorum", "{1}"), lambda store: store.answer("quorum1", "yes", who="bob")),
    "mail.value": (RUN.format("waits", "{1}"), lambda store: work(store, "waits1")),
    "write.value": ("thread = (SELECT thread FROM thread WHERE name = 'graph{1}')", lambda store: writes_of(store, 1)),
}
SAME = ("ask.terms",)  # of both rows
CHANGES_NOTHING = [name for name in COLUMNS if name.split(".")[0] in ("journal", "blob", "write")]
CHANGES_NOTHING += ["run.input", "run.waiting", "run_value.value", "ask.question", "ask.terms"]


def work(store: perdure.Store, run: str) -> Any:
    perdure.Worker(store, [pay, asks, receives]).run(until_idle=True)
    return store.get_run(run).result(timeout_s=60)


def writes_of(store: perdure.Store, n: int) -> Any:
    return PerdureSaver(store).get_tuple({"configurable": {"thread_id": f"graph{n}"}})


def changed(value: Any) -> Any:
    middle = len(value) // 2
    if isinstance(value, str):
        return value[:middle] + chr(ord(value[middle]) ^ 1) + value[middle + 1 :]
    return value[:middle] + bytes((value[middle] ^ 1,)) + value[middle + 1 :]


def damage(raw: Raw, name: str, how: str) -> Callable[[], None]:
    """Change a byte of a value, or give two rows each other's. What puts it back."""
    table, column = name.split()[0].split(".")
    first, second = (COLUMNS[name][0].format(word, number) for word, number in (("min", 1), ("max", 2)))
    [(one,)], [(two,)] = (raw(f"SELECT {column} FROM {table} WHERE {row}") for row in (first, second))
    assert one != two or how == "changed"

    def put(*values: Any) -> None:
        for row, value in zip((first, second), values, strict=True):
            raw(f"UPDATE {table} SET {column} = ? WHERE {row}", (value,))

    put(*((changed(one), two) if how == "changed" else (two, one)))
    return lambda: put(one, two)


def check_damage(store: perdure.Store, name: str) -> None:
    assert not store.ops.verify().ok
    with pytest.raises((Damaged, JournalDamaged, perdure.RunStuck)):
        COLUMNS[name][1](store)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "a.db"
    with perdure.open(str(path), durability="normal") as store:
        fill(store)
        assert store.ops.verify().ok
    return path


@pytest.mark.parametrize("how", ["changed", "swapped"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_damaged_value_is_an_error_when_it_is_read_and_found_by_verify(
    filled: Path, tmp_path: Path, name: str, how: str
) -> None:
    path = shutil.copy(filled, tmp_path / "a.db")
    if not (how == "swapped" and name in SAME):
        damage(Raw(str(path)), name, how)
        with perdure.open(str(path), durability="normal") as store:
            check_damage(store, name)


@pytest.mark.parametrize(("column", "value"), [("note", "note 3"), ("metadata", '{"why": 2}')])
def test_a_changed_note_or_metadata_of_a_checkpoint_is_noticed_by_loading_it_and_by_verify(
    filled: Path, tmp_path: Path, column: str, value: str
) -> None:
    path = str(shutil.copy(filled, tmp_path / "a.db"))
    where = "thread = (SELECT thread FROM thread WHERE name = 'thread1')"
    raw = Raw(path)
    assert raw(f"SELECT note FROM record WHERE {where}") == [("note 1",)], "SQL shows what was saved, and nothing else"
    raw(f"UPDATE record SET {column} = ? WHERE {where}", (value,))
    with perdure.open(path) as store:
        assert len(list(store.thread("thread1").history())) == 1
        with pytest.raises(Damaged):
            store.thread("thread1").load(strict=True)
        assert not store.ops.verify().ok


@pytest.mark.parametrize("how", ["changed", "swapped"])
def test_changed_metadata_of_a_thread_is_noticed_by_verify(filled: Path, tmp_path: Path, how: str) -> None:
    path = str(shutil.copy(filled, tmp_path / "a.db"))
    raw = Raw(path)
    [(metadata,)] = raw("SELECT metadata FROM thread WHERE name = 'thread1'")
    assert json.loads(metadata) == {"user": 1}
    if how == "changed":
        raw("UPDATE thread SET metadata = ? WHERE name = 'thread1'", (changed(metadata),))
    else:
        raw.swap("thread", "metadata", "name", "thread1", "thread2")
    with perdure.open(path) as store:
        assert not store.ops.verify().ok


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE run_tag SET value = 'c-9' WHERE value = 'c-1'",
        "DELETE FROM run_tag",
        "UPDATE run_count SET n = n + 1 WHERE status = 'done'",
        "UPDATE run_count SET status = 'failed' WHERE status = 'done'",
    ],
)
def test_tags_and_counts_that_lists_are_read_by_are_checked_by_verify(
    filled: Path, tmp_path: Path, damage: str
) -> None:
    path = str(shutil.copy(filled, tmp_path / "a.db"))
    Raw(path)(damage)
    with perdure.open(path) as store:
        assert not store.ops.verify().ok
    if "run_count" in damage:
        assert perdure.ops.repair_store(path, to=tmp_path / "repaired.db").ok
        with perdure.open(tmp_path / "repaired.db") as store:
            assert store.ops.verify().ok


def test_metadata_that_is_no_json_is_an_error_when_it_is_read(filled: Path, tmp_path: Path) -> None:
    path = str(shutil.copy(filled, tmp_path / "a.db"))
    Raw(path)("UPDATE thread SET metadata = '{' WHERE name = 'thread1'")
    Raw(path)("UPDATE record SET metadata = '{' WHERE note = 'note 2'")
    with perdure.open(path) as store:
        with pytest.raises(Damaged, match="thread1"):
            store.threads(where={"user": 1})
        [checkpoint] = store.thread("thread2").history()
        with pytest.raises(Damaged, match=checkpoint.id):
            _ = checkpoint.metadata


def test_a_damaged_value_is_an_error_on_postgresql_too(postgres_url: str) -> None:
    raw = Raw(postgres_url)
    with perdure.open(postgres_url) as store:
        fill(store)
        assert store.ops.verify().ok
        for name in CHANGES_NOTHING:
            put_back = damage(raw, name, "changed")
            check_damage(store, name)
            put_back()
        assert store.ops.verify().ok


def test_a_backup_with_a_changed_value_is_not_restored_as_a_good_one(filled: Path, tmp_path: Path) -> None:
    with perdure.open(str(filled)) as store:
        backup = store.ops.backup(str(tmp_path / "backup.db"))
    damage(Raw(str(tmp_path / "backup.db")), "run_value.value", "changed")
    assert backup is not None
    restored = perdure.ops.restore_backup(tmp_path / "backup.db", str(tmp_path / "restored.db"))
    assert not restored.ok
    assert [(problem.run, problem.what) for problem in restored.report.problems] == [
        ("done1", "its outcome cannot be read")
    ]


def test_a_result_whose_row_is_gone_is_not_none(url: str) -> None:
    with perdure.open(url) as store:
        store.run(pay, 100, id="r").result()
    Raw(url)("DELETE FROM run_value WHERE kind = 'outcome'")
    with perdure.open(url) as store, pytest.raises(Damaged, match="missing"):
        store.get_run("r").result()
