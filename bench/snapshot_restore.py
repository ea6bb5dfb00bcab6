"""Restoring 1,000 changed threads from a snapshot, and undoing it. The floor: as many saves of the same states.

PostgreSQL is a real server with fsync on, started for this; client and server share the machine's cores.
"""

from __future__ import annotations

import time

import perdure
from bench.measure import Row, Run, small_states
from perdure.testing.postgres_server import PostgresServer

BAR_S = 5.0


def snapshot_restore(run: Run) -> list[Row]:
    with PostgresServer(fsync=True) as server:
        return [*_rows(run, "", str(run.folder / "store.db")), *_rows(run, "PostgreSQL: ", server.create_database("b"))]


def _rows(run: Run, where: str, url: str) -> list[Row]:
    count = run.count(1000, 5)
    states = small_states(50, 1000)
    with perdure.open(url) as store:
        threads = [store.thread(f"t{number}") for number in range(count)]
        for number in range(3):
            for thread in threads:
                thread.save({**states[number], "n": number})
        snapshot = store.snapshot("before")
        began = time.perf_counter()
        for thread in threads:
            thread.save({**states[3], "n": 3})
        saves_s = time.perf_counter() - began
        began = time.perf_counter()
        done = store.restore(snapshot)
        restore_s = time.perf_counter() - began
        assert len(done.changes) == count
        assert store.thread("t1").load().state["n"] == 2
        began = time.perf_counter()
        store.restore(done.undo)
        undo_s = time.perf_counter() - began
        assert store.thread("t1").load().state["n"] == 3
    return [
        Row(f"{where}restore {name}1,000 changed threads", seconds, "s", floor=saves_s, ratio=seconds / saves_s, bar=BAR_S,
            judged="ours", note="floor: a save of each")
        for name, seconds in (("", restore_s), ("(undo) ", undo_s))
    ]  # fmt: skip
