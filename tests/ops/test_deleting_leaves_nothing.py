"""A deleted thread leaves no row of its own in any table: not its pins, not its metadata."""

from __future__ import annotations

from keeping_kit import rows

import perdure


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
