"""Moving to an object store and back, struck everywhere: nothing is lost, nothing dangles, nothing is left for good."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import far_mover
import pytest
import striking
from far_kit import at, blob, cells, check, fetch, fill, grow, loose, named, pack, prose, rows, scene, stored

import perdure
from perdure.storage.program import drive
from perdure.testing.processes import Nursery
from perdure.threads.far_loose import collect

TWO_DAYS_US = 2 * 86_400_000_000
_numbers = itertools.count()


class Fault(Exception):
    pass


class Hook:
    """Counts the points it is called at, and raises at one of them."""

    def __init__(self) -> None:
        self.count, self.strike_at = 0, 0

    def __call__(self, point: str) -> None:
        self.count += 1
        if self.count == self.strike_at:
            raise Fault(point)

    def arm(self, at: int) -> None:
        self.count, self.strike_at = 0, at


@dataclass
class Stage:
    """One database and one folder, with a plain store and one that can be struck."""

    url: str
    folder: Path
    plain: perdure.Store
    struck: perdure.Store
    hook: Hook

    def copy(self) -> tuple[perdure.Store, perdure.Store]:
        name = f"copy {next(_numbers)}"
        made = self.plain.tenant(name)
        grow(made.thread("a"), 14, words=1500)
        made.run(fetch, 1, id="big").result(timeout_s=30)
        pack(made)
        return made, self.struck.tenant(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def stage(url: str, folder: Path) -> Iterator[Stage]:
    hook = Hook()
    with perdure.open(url, objects=at(folder)) as plain, perdure.open(url, objects=at(folder), hook=hook) as struck:
        yield Stage(url, folder, plain, struck, hook)


def nothing_dangles(store: perdure.Store, folder: Path) -> None:
    there = stored(folder)
    assert named(store) <= there
    assert there <= named(store) | set(loose(store))
    assert not named(store) & set(loose(store))


def tidy(store: perdure.Store) -> None:
    """What a compaction does days later."""
    tenant = store._context.known_tenant
    assert tenant is not None
    drive(store._context.driver, collect(store._context, tenant, now_us=store._context.clock_us() + TWO_DAYS_US))


def _move_out(store: perdure.Store) -> None:
    store.move_out()


def _bring_back(store: perdure.Store) -> None:
    store.bring_back()


def _move_everything(store: perdure.Store) -> None:
    store.move_out()
    store.bring_back()
    store.move_out()


OPERATIONS: dict[str, tuple[Callable[[perdure.Store], Any], Callable[[perdure.Store], Any]]] = {
    "out": (lambda store: None, _move_out),
    "back": (_move_out, _bring_back),
    "collect": (_move_everything, _move_out),
    "prune": (_move_out, lambda store: store.thread("a").prune(keep=3)),
    "compact": (lambda store: None, lambda store: store.compact()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fault_at_every_point_loses_nothing(stage: Stage, name: str) -> None:
    prepare, operate = OPERATIONS[name]
    for point in striking.points(name):
        plain, struck = stage.copy()
        prepare(plain)
        before = scene(plain)
        stage.hook.arm(point)
        try:
            operate(struck)
        except Fault:
            pass
        else:
            assert stage.hook.count < point
            break
        nothing_dangles(stage.plain, stage.folder)
        seen = scene(plain)
        assert all(seen[key] == before[key] for key in seen)
        assert name == "prune" or seen == before
        check(plain)
        stage.hook.arm(0)
        operate(struck)
        tidy(plain)
        assert not loose(plain)
        assert stored(stage.folder) == named(stage.plain)
        check(plain)
    assert point > 5


def test_a_fault_while_objects_are_put_or_removed_loses_nothing(stage: Stage) -> None:
    plain, struck = stage.copy()
    before = scene(plain)
    place = struck._context.driver.place  # type: ignore[attr-defined]
    put, remove = place.put, place.remove

    def half(objects: Mapping[str, bytes]) -> None:
        put(dict(list(objects.items())[: len(objects) // 2]))
        raise perdure.Unavailable("the network is gone")

    place.put = half
    with pytest.raises(perdure.Unavailable):
        struck.move_out()
    nothing_dangles(stage.plain, stage.folder)
    assert not cells(plain)
    assert scene(plain) == before
    place.put = put
    struck.move_out()
    struck.bring_back()

    def late(names: list[str]) -> None:
        remove(names[:1])
        raise perdure.Unavailable("the network is gone")

    place.remove = late
    with pytest.raises(perdure.Unavailable):
        struck.move_out(cold_s=10**6)
    nothing_dangles(stage.plain, stage.folder)
    place.remove = remove
    tidy(struck)
    assert stored(stage.folder) == set()
    assert scene(plain) == before


@pytest.mark.parametrize("what", ["out", "back"])
def test_a_process_that_is_killed_loses_nothing(url: str, folder: Path, what: str) -> None:
    with perdure.open(url, objects=at(folder)) as store:
        fill(store, 70)
        before = scene(store)
        if what == "back":
            store.move_out()
    with Nursery(f"{far_mover.__name__}:move") as nursery:
        for point in range(1, 30, 4 if striking.SOAK else 12):
            child = nursery.start(url, str(folder), what, point)
            said = list(child.lines())
            with perdure.open(url, objects=at(folder)) as store:
                nothing_dangles(store, folder)
                assert scene(store) == before
            if said:  # it came to its end
                break
    with perdure.open(url, objects=at(folder)) as store:
        (store.move_out if what == "out" else store.bring_back)()
        tidy(store)
        assert stored(folder) == named(store)
        check(store)


def test_a_move_that_was_given_up_names_nothing(stage: Stage) -> None:
    """Somebody removes what a slow move has put there, just before the move comes to an end."""
    plain, struck = stage.copy()
    before = scene(plain)
    place = struck._context.driver.place  # type: ignore[attr-defined]
    put = place.put

    def slow(objects: Mapping[str, bytes]) -> None:
        put(objects)
        tidy(plain)

    place.put = slow
    assert struck.move_out().objects == 0
    assert not cells(plain)
    assert stored(stage.folder) == set()
    assert scene(plain) == before
    check(plain)


def test_rows_that_change_during_a_move_stay_as_they_are(stage: Stage) -> None:
    plain, struck = stage.copy()
    place = struck._context.driver.place  # type: ignore[attr-defined]
    put = place.put

    def slow(objects: Mapping[str, bytes]) -> None:
        put(objects)
        if plain.threads():
            plain.delete("a")
            plain.delete_run("big")
            plain.compact()

    place.put = slow
    struck.move_out()
    place.put = put
    nothing_dangles(stage.plain, stage.folder)
    assert not cells(plain)
    tidy(plain)
    assert stored(stage.folder) == set()


@pytest.mark.parametrize("how", ["load", "prune", "verify"])
def test_an_object_that_goes_while_somebody_wants_it_is_looked_for_again(stage: Stage, how: str) -> None:
    """The row was read, the cell was brought back, the object removed: then the row is read again."""
    plain, struck = stage.copy()
    plain.move_out()
    before = scene(plain)
    place = struck._context.driver.place  # type: ignore[attr-defined]
    fetch_ = place.fetch
    calls = itertools.count()

    def slow(wanted: Any) -> Any:
        if next(calls) == 0:
            plain.bring_back()
            tidy(plain)
            assert stored(stage.folder) == set()
        return fetch_(wanted)

    place.fetch = slow
    thread = struck.thread("a")
    if how == "load":
        assert thread.load(strict=True).state == before[f"a {thread.info().head}"][0]
    elif how == "prune":
        thread.prune(keep=5)
    else:
        check(struck)
    assert next(calls) > 0
    check(plain)


def test_a_large_tree_is_not_read_again_for_each_object(stage: Stage) -> None:
    """A prune that takes many packs apart, a verification that reads all: each in a few attempts."""
    made = stage.plain.tenant("large")
    chance, thread = random.Random(5), made.thread("a")
    text = prose(chance, 3000)
    ids = [thread.save({"text": text, "turn": prose(chance, 300)}).id for _ in range(120)]
    for number, one in enumerate(ids[3::4]):
        thread.pin(one, name=f"pin {number}")
    pack(made)
    made.move_out()
    assert len(cells(made)) > 8
    driver: Any = stage.struck._context.driver
    struck = stage.struck.tenant("large")
    runs = itertools.count()
    inner = driver.inner.run

    def counted(transaction: Any) -> Any:
        if transaction.write:
            next(runs)
        return inner(transaction)

    driver.inner.run = counted
    struck.thread("a").prune(keep=2)
    assert next(runs) < 8
    assert not cells(made)
    check(struck)


def test_readers_and_writers_notice_nothing(url: str, folder: Path) -> None:
    """Saves, loads, prunes, equal large results that come and go, while everything is moved out and back."""
    with perdure.open(url, objects=at(folder)) as store:
        grow(store.thread("a"), 60)
        until = time.monotonic() + 4.0
        problems: list[BaseException] = []

        def again(work: Callable[[int], Any]) -> threading.Thread:
            def loop() -> None:
                try:
                    for number in itertools.count():
                        if time.monotonic() > until:
                            return
                        work(number)
                except BaseException as error:
                    problems.append(error)

            return threading.Thread(target=loop)

        def write(number: int) -> None:
            thread = store.thread("a")
            thread.save({**thread.load().state, "n": number})
            if number % 20 == 19:
                thread.prune(keep=40)

        def large_result(number: int) -> None:
            store.run(fetch, 7, id=f"run {number}").result(timeout_s=30)
            if number:
                store.delete_run(f"run {number - 1}")

        def move(number: int) -> None:
            pack(store)
            rows(store, "DELETE FROM meta WHERE key LIKE 'packed %' RETURNING 1")
            (store.bring_back if number % 3 == 2 else store.move_out)()

        def read(_: int) -> None:
            thread = store.thread("a")
            for checkpoint in thread.history(limit=20):
                try:
                    thread.load(checkpoint.id, strict=True)
                except perdure.NotFound:
                    continue

        threads = [again(work) for work in (write, large_result, move, read)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert not problems, problems
        check(store)
        nothing_dangles(store, folder)
        store.move_out()
        assert len(blob(store)) > 0
        tidy(store)
        assert stored(folder) == named(store)
