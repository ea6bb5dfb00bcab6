"""Encryption at rest: nothing secret is stored in the clear, and what is not as it was written is an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sealed_kit import (
    CANARY,
    LARGE,
    NEW,
    OLD,
    OTHER,
    Raw,
    assert_sealed,
    encrypted_columns,
    fill,
    fill_langgraph,
    fill_team,
    secret,
    travel,
)

import perdure
from perdure import PerdureError, Store
from perdure.encryption import StaticKeys
from perdure.errors import Damaged, KeyMissing, NotEncrypted, RunError


def opened(url: str, keys: Any = OLD, **options: Any) -> Store:
    return perdure.open(url, durability="normal", keys=keys, **options)


# --- what is stored


def test_nothing_secret_is_stored_in_the_clear(url: str) -> None:
    raw = Raw(url)
    with opened(url) as store:
        fill(store)
        fill_langgraph(store)
        fill_team(store)
        found = [part for part in raw.everything() if CANARY.encode() in part]  # with the write-ahead log
        assert not found
        counts = assert_sealed(raw)
    assert not [part for part in raw.everything() if CANARY.encode() in part]
    empty = {column.label for column in encrypted_columns() if not counts.get(column.label)}
    assert not empty, "the test writes into every secret column"


def test_without_encryption_the_same_is_in_the_clear(url: str) -> None:
    """Or the test above would prove nothing."""
    with opened(url, None) as store:
        fill(store)
        fill_langgraph(store)
        raw = Raw(url)
        parts = b"\n".join(raw.everything())
        assert parts.count(CANARY.encode()) > 20
        with pytest.raises(AssertionError):
            assert_sealed(raw)


def test_everything_comes_back(url: str) -> None:
    with opened(url) as store:
        fill(store)
        thread = store.thread("alice")
        history = [(point.id, point.note, point.metadata) for point in thread.history()]
        state = thread.load().state
        assert len(history) == 12
    with opened(url) as store:
        thread = store.thread("alice")
        assert thread.load().state == state
        assert [(point.id, point.note, point.metadata) for point in thread.history()] == history
        assert store.get_run("trip").result().startswith(CANARY)
        assert store.ops.verify().ok


def test_threads_are_found_by_metadata_without_storing_it(url: str) -> None:
    with opened(url) as store:
        for name, user in (("a", "alice"), ("b", "bob"), ("c", "alice")):
            store.thread(name, metadata={"user": user, "n": 1}).save({})
        assert {info.name for info in store.threads(where={"user": "alice"})} == {"a", "c"}
        assert store.threads(where={"user": "carol"}) == []
        store.thread("a", metadata={"user": "carol"}).save({})
        assert [info.name for info in store.threads(where={"user": "carol"})] == ["a"]
        values = [value for (value,) in Raw(url)("SELECT value FROM tag WHERE key = 'n'")]
        assert len(set(values)) == 1, "equal values look equal: that is what an index is"
        assert set(values).isdisjoint(value for (value,) in Raw(url)("SELECT value FROM tag WHERE key = 'user'"))


# --- keys


@pytest.mark.parametrize("keys", [None, NEW, StaticKeys({"another": OLD})], ids=["none", "wrong", "not-its-own"])
def test_without_the_right_key_nothing_is_read_or_written(url: str, keys: Any) -> None:
    with opened(url) as store:
        fill(store)
    before = len(Raw(url)("SELECT 1 FROM record"))
    with opened(url, keys) as store:
        calls: list[Any] = [
            lambda: store.thread("alice").load(),
            lambda: store.thread("alice").save({"n": 1}),
            lambda: store.thread("new").save({"n": 1}),
            lambda: store.threads(),
            lambda: store.run(travel, "x", id="new"),
            lambda: store.get_run("trip").result(timeout_s=60),
            lambda: store.ops.verify(),
        ]
        for call in calls:
            with pytest.raises(KeyMissing) as caught:
                call()
            text = str(caught.value)
            assert CANARY not in text
            assert OLD.hex() not in text
            assert NEW.hex() not in text
    assert len(Raw(url)("SELECT 1 FROM record")) == before


async def test_without_the_right_key_nothing_is_read_by_async_code(url: str) -> None:
    async with opened(url) as store:
        await store.thread("alice").asave({"n": 1})
    async with opened(url, NEW) as store:
        with pytest.raises(KeyMissing):
            await store.thread("alice").aload()


def test_each_tenant_has_its_key_and_forgetting_one_leaves_the_others(url: str) -> None:
    with opened(url, StaticKeys({"acme": OLD, "globex": NEW})) as store:
        for name in ("acme", "globex"):
            store.tenant(name).thread("t").save({"of": name}, note=name)
        with pytest.raises(KeyMissing, match="initech"):
            store.tenant("initech").thread("t").save({})
    with opened(url, StaticKeys({"globex": NEW})) as store:
        assert store.tenant("globex").thread("t").load().state == {"of": "globex"}
        with pytest.raises(KeyMissing, match="acme"):
            store.tenant("acme").thread("t").load()
    with opened(url, StaticKeys({"acme": NEW, "globex": NEW})) as store, pytest.raises(KeyMissing):
        store.tenant("acme").thread("t").load()


def test_a_cell_of_one_tenant_does_not_open_for_another(url: str) -> None:
    raw = Raw(url)
    with opened(url) as store:  # one key for both
        for name in ("acme", "globex"):
            store.tenant(name).thread("t").save({"of": name})
        [(one,), (two,)] = raw("SELECT thread FROM thread ORDER BY thread")
        raw.swap("thread", "metadata", "thread", one, two)
    with opened(url) as store, pytest.raises(Damaged):
        store.tenant("acme").threads()


def test_data_that_is_not_encrypted_is_refused(url: str) -> None:
    with opened(url, None) as store:
        fill(store)
    with opened(url) as store:
        with pytest.raises(NotEncrypted, match="transfer it to a new store"):
            store.thread("alice").load()
        with pytest.raises(NotEncrypted, match="transfer it to a new store"):
            store.thread("new").save({"n": 1})
        assert store.tenant("another").thread("t").save({"n": 1})


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("thread", "metadata", "{}"),
        ("record", "note", "a note"),
        ("body", "salt", bytes(16)),
        ("body", "full_text", b'{"n":1}'),
    ],
)
def test_a_plain_cell_among_encrypted_ones_is_refused(url: str, table: str, column: str, value: Any) -> None:
    with opened(url) as store:
        store.thread("a").save({"n": 0}, note="zero")
    Raw(url)(f"UPDATE {table} SET {column} = ?", (value,))
    with opened(url) as store, pytest.raises(NotEncrypted, match=f"{table}.{column}") as caught:
        store.thread("a").load()
    assert str(value) not in str(caught.value)


# --- damage


def saved(url: str) -> list[perdure.Checkpoint]:
    with opened(url) as store:
        thread = store.thread("a")
        return [thread.save({"n": n, "word": secret()}, note=f"note {n}", metadata={"n": n}) for n in range(4)]


@pytest.mark.parametrize(
    ("table", "column"), [("record", "note"), ("record", "metadata"), ("body", "salt"), ("body", "diff")]
)
def test_swapped_cells_are_found(url: str, table: str, column: str) -> None:
    points = saved(url)
    raw = Raw(url)
    numbers = [row[0] for row in raw(f"SELECT id FROM {table} ORDER BY id")]
    raw.swap(table, column, "id", numbers[-1], numbers[-2])
    with opened(url) as store:
        with pytest.raises(Damaged):
            store.thread("a").load(points[-1], strict=True)
        assert store.thread("a").load(points[0]).state["n"] == 0
        assert not store.ops.verify().ok


@pytest.mark.parametrize("cut", [1, 8, 30])
@pytest.mark.parametrize(("table", "column"), [("body", "diff"), ("body", "salt"), ("record", "note")])
def test_cells_that_were_cut_short_are_found(url: str, table: str, column: str, cut: int) -> None:
    points = saved(url)
    raw = Raw(url)
    [(number,)] = raw(f"SELECT max(id) FROM {table}")
    [(cell,)] = raw(f"SELECT {column} FROM {table} WHERE id = ?", (number,))
    raw(f"UPDATE {table} SET {column} = ? WHERE id = ?", (cell[:-cut], number))
    with opened(url) as store:
        with pytest.raises(Damaged):
            store.thread("a").load(points[-1], strict=True)
        assert not store.ops.verify().ok


@pytest.mark.parametrize("at", [4, 17, -1], ids=["nonce", "text", "tag"])
def test_a_changed_byte_is_found(url: str, at: int) -> None:
    points = saved(url)
    raw = Raw(url)
    [(number, cell)] = raw("SELECT id, diff FROM body ORDER BY id DESC LIMIT 1")
    changed = bytearray(cell)
    changed[at] ^= 1
    raw("UPDATE body SET diff = ? WHERE id = ?", (bytes(changed), number))
    with opened(url) as store:
        with pytest.raises(Damaged):
            store.thread("a").load(points[-1], strict=True)
        assert not store.ops.verify().ok


def test_an_old_state_that_was_put_back_is_found(url: str) -> None:
    """A whole body of an earlier state, with its own salt, in the place of a later one."""
    points = saved(url)
    raw = Raw(url)
    rows = raw("SELECT id, salt, diff, full_text FROM body ORDER BY id")
    raw("UPDATE body SET salt = ?, diff = ?, full_text = ? WHERE id = ?", (*rows[1][1:], rows[-1][0]))
    with opened(url) as store:
        with pytest.raises(Damaged):
            store.thread("a").load(points[-1], strict=True)
        assert not store.ops.verify().ok


def test_a_head_that_was_moved_back_is_found(url: str) -> None:
    """Its hash is not the one that the thread's row says."""
    saved(url)
    raw = Raw(url)
    [(first,)] = raw("SELECT min(id) FROM record")
    raw("UPDATE thread SET head = ?", (first,))
    with opened(url) as store:
        assert not store.ops.verify().ok


def test_an_old_note_that_was_put_back_is_found(url: str) -> None:
    """Cells of a record are bound to it: one from a deleted record with the same number cannot be made."""
    points = saved(url)
    raw = Raw(url)
    [(cell,)] = raw("SELECT note FROM record ORDER BY id LIMIT 1")
    [(last,)] = raw("SELECT max(id) FROM record")
    raw("UPDATE record SET note = ? WHERE id = ?", (cell, last))
    with opened(url) as store, pytest.raises(Damaged):
        store.thread("a").load(points[-1], strict=True)


@pytest.mark.parametrize(
    ("table", "column", "where"),
    [
        ("journal", "body", "run = (SELECT run FROM run WHERE id = 'trip') AND seq = 2"),
        ("run_value", "value", "run = (SELECT run FROM run WHERE id = 'trip') AND kind = 'outcome'"),
        ("blob", "body", "1 = 1"),
    ],
)
def test_cells_of_runs_that_were_moved_are_found(url: str, table: str, column: str, where: str) -> None:
    raw = Raw(url)
    with opened(url) as store:
        fill(store)
    others = {"journal": "seq = 3", "run_value": "kind <> 'outcome'", "blob": "1 = 0"}
    moved = raw(f"SELECT {column} FROM {table} WHERE {others[table]} LIMIT 1")
    [(own,)] = raw(f"SELECT {column} FROM {table} WHERE {where} LIMIT 1")
    raw(f"UPDATE {table} SET {column} = ? WHERE {where}", (moved[0][0] if moved else own[:-1] + bytes((own[-1] ^ 1,)),))
    with opened(url) as store:
        assert not store.ops.verify().ok
        with pytest.raises((RunError, Damaged), match=r"damaged|not decrypt|cannot be read|add up"):
            looked(store)


def looked(store: Store) -> None:
    """Everything that a finished run has to say."""
    run = store.get_run("trip")
    run.steps()
    run.result(timeout_s=60)
    store.replay("trip", travel)


def test_an_answer_to_one_question_does_not_open_as_that_of_another(url: str) -> None:
    raw = Raw(url)
    with opened(url) as store:
        fill(store)
        store.run(travel, secret(), id="second")
        store.answer("second", CANARY)
        runs = [number for (number,) in raw("SELECT run FROM ask WHERE answer IS NOT NULL ORDER BY run")]
        raw.swap("ask", "answer", "run", runs[0], runs[-1])
    with opened(url) as store:
        with pytest.raises(PerdureError):
            store.questions(all=True)
        assert not store.ops.verify().ok


def test_large_results_are_encrypted_too(url: str) -> None:
    with opened(url) as store:
        fill(store)
    sizes = [len(bytes(body)) for (body,) in Raw(url)("SELECT body FROM blob")]
    assert len(sizes) == 1
    assert LARGE < sizes[0] < 2 * LARGE, "compressed, then encrypted"


# --- the rest of the driver is as it was


def test_a_wrapped_store_says_so_and_passes_the_rest_on(url: str) -> None:
    with opened(url) as store:
        assert "encrypted" in repr(store)
        assert OLD.hex() not in repr(store._context.driver)
        driver: Any = store._context.driver
        assert driver.dialect in ("sqlite", "postgres")
        assert callable(driver.listen)


@pytest.fixture
def no_key_in_text() -> Iterator[None]:
    yield
    for keys in (StaticKeys(OLD), StaticKeys({"a": [OLD, NEW]}), StaticKeys([OLD, OTHER])):
        assert OLD.hex() not in repr(keys)
        assert repr(OLD) not in repr(keys)


def test_keys_are_in_no_repr(no_key_in_text: None) -> None:
    assert "Keys" in repr(StaticKeys(OLD).keys_for("default"))


# --- workers


@perdure.durable(name="test_sealing.shout")
def shout(word: str) -> str:
    return word.upper()


def test_a_worker_of_all_tenants_passes_over_those_it_has_no_key_for(url: str) -> None:
    keys = StaticKeys({"acme": OLD, "globex": NEW, "default": OTHER})
    with opened(url, keys) as store:
        for number in range(8):  # more than a worker takes at once, and due first
            store.tenant("acme").start(shout, "a", id=f"a{number}", priority=9)
        store.tenant("globex").start(shout, "g", id="g")
    with opened(url, StaticKeys({"globex": NEW, "default": OTHER})) as store:
        perdure.Worker(store, all_tenants=True, concurrency=2).run(until_idle=True)
        assert store.tenant("globex").get_run("g").result() == "G"
    with opened(url, None) as store:  # nor does one without keys touch anything
        perdure.Worker(store, all_tenants=True).run(until_idle=True)
    with opened(url, keys) as store:
        acme = store.tenant("acme")
        assert {run.status for run in acme.runs()} == {"queued"}
        perdure.Worker(acme).run(until_idle=True)
        assert {acme.get_run(f"a{number}").result() for number in range(8)} == {"A"}
        assert acme.ops.verify().ok
    assert_sealed(Raw(url))


def test_many_begin_a_tenant_at_once(url: str) -> None:
    """The first write brings the key with it: nobody may take what another has just begun for plain data."""
    with opened(url) as store:
        for number in range(10):
            begun = [store.tenant(f"t{number}") for _ in range(6)]
            together = threading.Barrier(len(begun))
            problems: list[BaseException] = []

            def begin(tenant: Store, name: str, together: Any = together, problems: Any = problems) -> None:
                together.wait(30)
                try:
                    tenant.thread(name).save({"n": name})
                    assert tenant.threads()
                except BaseException as error:
                    problems.append(error)

            threads = [threading.Thread(target=begin, args=(one, f"a{at}")) for at, one in enumerate(begun)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not problems
            assert len(begun[0].threads()) == 6
