"""A snapshot shows everything as it was: every read, after every change, until it is released."""

from __future__ import annotations

from typing import Any

import pytest

import perdure
from perdure.errors import ReadOnlyStore


@perdure.step
def look(number: int) -> int:
    return number * 2


@perdure.durable
def count(to: int) -> int:
    return sum(look(number) for number in range(to))


@perdure.durable
def asks() -> Any:
    return perdure.ask("Which seat?")


def fill(store: perdure.Store) -> None:
    thread = store.thread("a", metadata={"team": "one"})
    for number in range(5):
        thread.save({"n": number, "text": "x" * 500})
    store.memory("users", "alice").put("drink", {"fact": "Alice likes tea"})
    store.memory("users", "alice").put("seat", {"fact": "Alice wants an aisle seat"}, pinned=True)
    store.run(count, 3, id="done")
    store.run(asks, id="waits")


def seen(store: Any) -> dict[str, Any]:
    """What the reads of a store answer."""
    memory = store.memory("users", "alice")
    return {
        "threads": [(info.name, info.metadata) for info in store.threads()],
        "history": [
            [(point.id, point.state) for point in store.thread(info.name).history()] for info in store.threads()
        ],
        "runs": sorted((info.id, info.status) for info in store.runs()),
        "steps": [[(step.name, step.result) for step in store.get_run(info.id).steps()] for info in store.runs()],
        "asks": [(ask.run, ask.question) for ask in store.asks()],
        "items": sorted((item.key, item.value["fact"], item.version) for item in memory.list()),
        "found": [item.key for item in store.memory("users").search("seat")],
        "versions": [item.value for item in memory.history("drink")],
    }


def change_everything(store: perdure.Store) -> None:
    store.thread("a").save({"n": 99})
    store.thread("b").save({"n": 1})
    store.thread("a").pin(name="p")
    memory = store.memory("users", "alice")
    memory.put("drink", {"fact": "Alice likes coffee"})
    memory.delete("seat")
    store.memory("users", "bob").put("x", {"fact": "a seat for Bob"})
    store.answer("waits", "aisle")
    store.run(asks, id="waits")
    store.run(count, 2, id="later")
    store.delete_run("done")


def remove_everything(store: perdure.Store) -> None:
    store.thread("b").prune(keep=1)
    store.thread("a").unpin("p")
    store.thread("a").prune(keep=1)
    store.ops.compact()
    store.memory("users", "alice").forget({"fact": {"exists": True}})
    for info in store.threads():
        store.delete_thread(info.name)
    for run in store.runs():
        store.delete_run(run.id)


def test_every_read_answers_as_it_did(store: perdure.Store) -> None:
    fill(store)
    before = seen(store)
    first = store.snapshot("first")
    assert seen(first) == before
    change_everything(store)
    between = seen(store)
    assert between != before
    assert seen(first) == before
    second = store.snapshot("second", note="after the change")
    remove_everything(store)
    assert seen(store) != between
    assert (seen(first), seen(second)) == (before, between)
    assert first.verify().problems == second.verify().problems == store.ops.verify().problems == ()


def test_nothing_can_be_written_to_it(store: perdure.Store) -> None:
    fill(store)
    snapshot = store.snapshot("s")
    for attempt in (
        lambda: snapshot.thread("a").save({}),
        lambda: snapshot.store.thread("new").save({}),
        lambda: snapshot.memory("users", "alice").put("k", "v"),
        lambda: snapshot.store.run(count, 1, id="r"),
        lambda: snapshot.store.delete_thread("a"),
    ):
        with pytest.raises(ReadOnlyStore, match="snapshot"):
            attempt()


def test_releasing_frees_what_only_it_could_see(store: perdure.Store) -> None:
    fill(store)
    first = store.snapshot("first")
    change_everything(store)
    second = store.snapshot("second")
    remove_everything(store)
    assert first.held_bytes() > 0
    assert second.held_bytes() > 0
    known = seen(second)
    first.release()
    assert seen(second) == known
    second.release()
    assert store.snapshots() == []
    with pytest.raises(perdure.NotFound, match="released"):
        second.thread("a").load()
    third = store.snapshot("third")
    assert third.held_bytes() == 0


def test_a_name_is_used_once_and_found_again(store: perdure.Store) -> None:
    snapshot = store.snapshot("s", note="v42")
    with pytest.raises(perdure.UsageError, match="already"):
        store.snapshot("s")
    snapshot.mark_good()
    found = store.get_snapshot("s")
    assert (found.note, found.good, found.taken_at) == ("v42", True, snapshot.taken_at)
    with pytest.raises(perdure.NotFound):
        store.get_snapshot("t")
