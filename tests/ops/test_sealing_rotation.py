"""Changing keys, and encrypting what was stored without: under writers, killed anywhere, done twice."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import striking
from sealed_kit import CANARY, NEW, OLD, OTHER, Raw, assert_sealed, fill, fill_langgraph

import perdure
from perdure import KeyFile, Keys, StaticKeys, Store, UsageError
from perdure.errors import KeyMissing, NotEncrypted
from perdure.ops import Rotated
from perdure.ops.keys import rotate
from perdure.storage import vault
from perdure.storage.keyring import key_id
from perdure.storage.program import drive
from perdure.testing.processes import ForkServer, Say

_copies = itertools.count()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process looks at the keys again after a moment, not after a second."""
    monkeypatch.setattr(vault, "FRESH_S", 0.01)


def opened(url: str, keys: Any = OLD, **options: Any) -> Store:
    return perdure.open(url, durability="normal", keys=keys, **options)


def rotated(store: Store, *, plain: bool = False) -> Rotated:
    """A rotation that waits for nobody: the test knows that no writer is left behind."""
    return drive(store._context.driver, rotate(store._context, plain=plain, grace_s=0))


def all_of(store: Store) -> list[Any]:
    """Everything that can be read."""
    found: list[Any] = []
    for info in sorted(store.threads(limit=None), key=lambda info: info.name):
        points = store.thread(info.name).history()
        found.append((info.name, info.metadata, [(p.id, p.note, p.metadata, p.state) for p in points]))
    runs = [(run.id, run.status, str(run.waiting_for)) for run in store.runs()]
    steps = [[(step.name, step.status, step.result) for step in store.get_run(run[0]).steps()] for run in runs]
    return [*found, sorted(runs), steps, sorted(map(str, store.asks(all=True)))]


def test_rotation_encrypts_everything_anew_and_changes_nothing(url: str) -> None:
    with opened(url) as store:
        fill(store)
        fill_langgraph(store)
        before = all_of(store)
    with opened(url, [NEW, OLD]) as store:
        calls: list[tuple[int, int]] = []
        done = store.ops.rotate_keys(progress=lambda *call: calls.append(call))
        assert done.key == key_id(NEW).hex()
        assert done.rows == calls[-1][0] == calls[-1][1] > 40
        assert done.waiting == (key_id(OLD).hex(),), "a writer may not have heard of it yet"
        assert_sealed(Raw(url), key_id(NEW))
        again = rotated(store)
        assert again.rows == 0
        assert again.retired == (key_id(OLD).hex(),)
        assert rotated(store).retired == ()
        assert [(i.current, i.retired_at is None) for i in store.ops.list_keys()] == [
            (False, False),
            (True, True),
        ]
    with opened(url, NEW) as store:
        assert all_of(store) == before
        assert store.ops.verify().ok
        assert [info.given for info in store.ops.list_keys()] == [False, True]
        user = before[0][1]["user"]
        assert [info.name for info in store.threads(where={"user": user})] == [before[0][0]], "the index stays"
    with opened(url, OLD) as store, pytest.raises(KeyMissing):
        store.thread("alice").load()


async def test_rotation_in_async_code(url: str) -> None:
    async with opened(url) as store:
        await store.thread("a").asave({"n": 1})
    async with opened(url, [NEW, OLD]) as store:
        assert (await asyncio.to_thread(store.ops.rotate_keys)).rows > 0
        assert len(await asyncio.to_thread(store.ops.list_keys)) == 2
    async with opened(url, NEW) as store:
        assert (await store.thread("a").aload()).state == {"n": 1}


def test_what_was_stored_without_keys_is_encrypted(url: str) -> None:
    with opened(url, None) as store:
        fill(store)
        fill_langgraph(store)
        before = all_of(store)
        with pytest.raises(UsageError, match="without keys"):
            store.ops.encrypt()
    with opened(url) as store:
        with pytest.raises(NotEncrypted):
            store.ops.rotate_keys()
        assert store.ops.encrypt().rows > 40
        assert store.ops.encrypt().rows == 0
        assert all_of(store) == before
        assert store.ops.verify().ok
        assert [info.name for info in store.threads(where={"user": before[0][1]["user"]})] == [before[0][0]]
        store.thread("alice").save({"n": "more"}, note=CANARY)
    raw = Raw(url)
    assert_sealed(raw, key_id(OLD))
    assert not [part for part in raw.everything() if CANARY.encode() in part], "not in free pages either"
    with opened(url, None) as store, pytest.raises(KeyMissing):
        store.thread("alice").load()


def test_a_note_that_looks_encrypted_is_encrypted_all_the_same(url: str) -> None:
    note = f"\x02hf1.{key_id(NEW).hex()}AAAA"
    with opened(url, None) as store:
        store.thread("a").save({"n": 1}, note=note)
    with opened(url) as store:
        store.ops.encrypt()
        assert store.thread("a").load().note == note
        assert store.ops.verify().ok


# --- under writers and readers


class Switching:
    """Keys that somebody changes while the store is in use."""

    def __init__(self, *keys: bytes) -> None:
        self.keys = keys

    def keys_for(self, tenant: str) -> Keys:
        return Keys(self.keys[0], self.keys[1:])


def test_rotation_under_writers_and_readers_loses_nothing(url: str, soon: None) -> None:
    keys = Switching(OLD)
    ended = threading.Event()
    saved: dict[str, list[int]] = {}
    problems: list[BaseException] = []

    def write(store: Store, name: str) -> None:
        thread = store.thread(name, metadata={"of": name})
        for number in itertools.count():
            if ended.is_set():
                return
            thread.save({"n": number, "list": list(range(number % 7))}, note=f"{name} {number}")
            saved.setdefault(name, []).append(number)

    def read(store: Store) -> None:
        while not ended.is_set():
            for name in list(saved):
                assert store.thread(name).load().note.startswith(name)  # type: ignore[union-attr]

    def guarded(work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            problems.append(error)

    with opened(url, keys) as one, opened(url, keys) as two, opened(url, keys) as three:
        one.thread("first").save({})
        work = [(write, one, "a"), (write, one, "b"), (write, two, "c"), (read, three)]
        threads = [threading.Thread(target=guarded, args=part) for part in work]
        for thread in threads:
            thread.start()
        for newer in (NEW, OTHER):
            while any(len(saved.get(name, ())) < 20 for name in "abc") and not problems:
                ended.wait(0.01)
            keys.keys = (newer, *keys.keys)
            with opened(url, keys) as rotator:
                rotator.ops.rotate_keys()
            saved_before = {name: len(numbers) for name, numbers in saved.items()}
            while any(len(saved[name]) < saved_before[name] + 5 for name in saved_before) and not problems:
                ended.wait(0.01)
        ended.set()
        for thread in threads:
            thread.join(60)
    assert not problems
    with opened(url, keys) as store:
        final = rotated(store)
        assert final.waiting == ()
        assert len(final.retired) == 2
    assert_sealed(Raw(url), key_id(OTHER))
    with opened(url, OTHER) as store:
        for name, numbers in saved.items():
            states = [point.state["n"] for point in store.thread(name).history()]
            assert states[::-1] == numbers
        assert store.ops.verify().ok


def test_who_has_only_the_old_key_stops_writing_with_it(url: str, soon: None) -> None:
    with opened(url) as stale:
        thread = stale.thread("a")
        thread.save({"n": 1})
        with opened(url, [NEW, OLD]) as store:
            store.ops.rotate_keys()
        saved = [1]

        def go_on() -> None:
            for number in itertools.count(2):  # for a moment it may
                thread.save({"n": number})
                saved.append(number)

        with pytest.raises(KeyMissing, match=key_id(NEW).hex()):
            go_on()
    with opened(url, [NEW, OLD]) as store:
        rotated(store)
    with opened(url, NEW) as store:
        assert store.thread("a").load().state == {"n": saved[-1]}


def test_a_reader_meets_a_key_that_came_into_use_a_moment_ago(url: str) -> None:
    keys = Switching(OLD)
    with opened(url, keys) as reader, opened(url, keys) as other:
        other.thread("a").save({"n": 1}, note="one")
        assert reader.thread("a").load().state == {"n": 1}
        assert reader.threads()
        keys.keys = (NEW, OLD)
        with opened(url, keys) as store:
            store.ops.rotate_keys()
            store.thread("a").save({"n": 2}, note="two")
        # It relies on what it knew for a second; every statement finds the new key by itself.
        assert [info.name for info in reader.threads()] == ["a"]
        assert [point.note for point in reader.thread("a").history()] == ["two", "one"]
        assert reader.thread("a").load().state == {"n": 2}


async def test_an_async_reader_meets_a_key_that_came_into_use_a_moment_ago(url: str) -> None:
    keys = Switching(OLD)
    async with opened(url, keys) as reader:
        await reader.thread("a").asave({"n": 1})
        keys.keys = (NEW, OLD)
        async with opened(url, keys) as store:
            await asyncio.to_thread(store.ops.rotate_keys)
        assert [info.name for info in await reader.athreads()] == ["a"]
        assert (await reader.thread("a").aload()).state == {"n": 1}


def test_a_key_is_not_retired_while_a_row_that_needs_it_is_locked(postgres_url: str) -> None:
    with opened(postgres_url) as store:
        store.thread("a", metadata={"of": "a"}).save({"n": 1})
    with opened(postgres_url, [NEW, OLD]) as store:
        with psycopg.connect(postgres_url) as holder:
            holder.execute("SELECT 1 FROM perdure.thread FOR UPDATE")
            assert rotated(store).retired == ()
            assert rotated(store).waiting == (key_id(OLD).hex(),), "what is locked was passed over"
        assert rotated(store).retired == (key_id(OLD).hex(),)
    with opened(postgres_url, NEW) as store:
        assert [info.metadata for info in store.threads()] == [{"of": "a"}]


def test_a_rotation_that_is_overtaken_by_another_stops(url: str) -> None:
    with opened(url) as store:
        store.thread("a").save({"n": 1})
    with opened(url, [NEW, OLD]) as store:
        flow = rotate(store._context)
        transaction = next(flow)
        for _ in range(6):  # it has begun
            transaction = flow.send(store._context.driver.run(transaction))
        with opened(url, [OTHER, NEW, OLD]) as newer:
            newer.ops.rotate_keys()
            newer.thread("a").save({"n": 2})

        def go_on() -> None:
            wanted = transaction
            while True:
                wanted = flow.send(store._context.driver.run(wanted))

        with pytest.raises(UsageError, match="rotate again"):
            go_on()
    with opened(url, OTHER) as store:
        assert store.thread("a").load().state == {"n": 2}


# --- killed


class Fault(Exception):
    """What the hook raises."""


class Hook:
    """Counts the points it is called at, and raises at one of them."""

    def __init__(self) -> None:
        self.count = 0
        self.strike_at: int | None = None

    def __call__(self, point: str) -> None:
        self.count += 1
        if self.count == self.strike_at:
            raise Fault(point)

    def arm(self, at: int | None) -> None:
        self.count, self.strike_at = 0, at


def scene(store: Store) -> None:
    thread = store.thread("a", metadata={"user": "alice"})
    for number in range(3):
        thread.save({"n": number}, note=f"note {number}", metadata={"n": number})
    store.run(one_step, "word", id="run")


@perdure.step(name="sealing_rotation.step")
def step(word: str) -> str:
    return word * 2


@perdure.durable(name="sealing_rotation.one_step")
def one_step(word: str) -> str:
    return step(word)


@pytest.mark.parametrize("plain", [False, True], ids=["rotate", "encrypt"])
def test_killed_at_every_statement_it_is_gone_on_with(url: str, plain: bool) -> None:
    hook = Hook()
    with (
        opened(url, None if plain else OLD) as before,
        opened(url, [NEW, OLD], hook=hook) as struck,
        opened(url, NEW) as alone,
    ):
        for at in striking.points("rotation"):
            name = f"copy {at}"
            scene(before.tenant(name))
            expected = all_of(before.tenant(name))
            store = struck.tenant(name)
            store.threads() if not plain else None  # who the tenant is, is not part of it
            hook.arm(at)
            try:
                rotated(store, plain=plain)
                finished = True
            except Fault:
                finished = False
            hook.arm(None)
            if not plain:  # nothing is lost in between
                assert all_of(store) == expected
                assert store.ops.verify().ok
            rotated(store, plain=plain)
            assert all_of(store) == expected
            assert store.ops.verify().ok
            assert all_of(alone.tenant(name)) == expected
            if finished:
                break
    assert at > 60


def rotator(say: Say, url: str) -> None:
    """In a child: says how far it has come, until it is killed."""
    with opened(url, [NEW, OLD]) as store:
        drive(store._context.driver, rotate(store._context, lambda done, total: say(done), grace_s=0))
        say("done")


def test_sigkill_in_the_middle_loses_nothing(url: str) -> None:
    with ForkServer("test_sealing_rotation:rotator") as fork_server:
        with opened(url) as store:
            fill(store)
            before = all_of(store)
        for _ in range(8):
            child = fork_server.start(url)
            next(child.lines())  # it has done one page, and is somewhere in the next
            child.kill()
            with opened(url, [NEW, OLD]) as store:
                assert all_of(store) == before
        with opened(url, [NEW, OLD]) as store:
            rotated(store)
            assert store.ops.verify().ok
    with opened(url, NEW) as store:
        assert all_of(store) == before
    assert_sealed(Raw(url), key_id(NEW))


# --- with a key file


def test_a_key_file_is_read_again_when_it_has_changed(url: str, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    first = file.new("default")
    with opened(url, KeyFile(file.path)) as store:
        store.thread("a").save({"n": 1})
        second = file.new("default")
        assert store.ops.rotate_keys().key == second
        assert [info.id for info in store.ops.list_keys()] == [first, second]
        assert rotated(store).retired == (first,)
        file.remove("default", first)
        assert store.thread("a").load().state == {"n": 1}
    with opened(url, KeyFile(file.path)) as store:
        assert store.thread("a").load().state == {"n": 1}
        file.forget("default")
    with opened(url, KeyFile(file.path)) as store, pytest.raises(KeyMissing, match="never be read again"):
        store.thread("a").load()


def test_static_keys_are_of_all_tenants_or_of_each(url: str) -> None:
    with opened(url, StaticKeys({"acme": [NEW, OLD]})) as store:
        assert store.tenant("acme").thread("a").save({})
