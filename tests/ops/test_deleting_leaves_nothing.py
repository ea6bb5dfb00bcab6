"""A deleted thread or run leaves no row of its own in any table: not its pins, not its metadata, not its tags."""

from __future__ import annotations

from copy_kit import query
from keeping_kit import rows

import perdure
from perdure.runs.run_table import RUN
from perdure.runs.tables import PARTS


def test_no_table_has_a_row_of_a_deleted_thread(store: perdure.Store) -> None:
    store.thread("other", metadata={"kind": "other"}).save({"n": 0})
    before = rows(store)
    for erase in (False, True):
        thread = store.thread("t", metadata={"kind": "booking"})
        saved = [thread.save({"n": number}) for number in range(3)]
        thread.pin(saved[1], name="kept")
        assert rows(store)["pin"] == 1
        assert rows(store)["tag"] == 2
        store.ops.erase("t") if erase else store.delete_thread("t", force=True)
        after = rows(store)
        left = {table: after[table] - before[table] for table in after if after[table] != before[table]}
        assert left.keys() <= {"erased"}  # that something was erased stays known


def test_no_table_has_a_row_of_a_deleted_run(store: perdure.Store) -> None:
    @perdure.durable
    def deleted() -> str:
        perdure.tag(stage="asked")
        perdure.receive()
        return str(perdure.ask("go?")) * 100_000

    for erase in (False, True):
        store.run(deleted, id="r", tags={"customer": "c-1"})
        store.send("r", "news")
        store.run(deleted, id="r")
        store.answer("r", "yes")
        store.run(deleted, id="r")
        assert len(query(store, "SELECT 1 FROM run_tag")) == 2
        store.ops.erase_run("r") if erase else store.delete_run("r")
        left = {table.name: query(store, f"SELECT * FROM {table.name}") for table in (RUN, *PARTS)}
        assert not any(left.values()), left
        assert store.ops.verify().ok
