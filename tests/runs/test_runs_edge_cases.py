"""What an attacker found in durable runs: each test is the smallest case of one finding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from attack_kit import asks_once
from lab import Interrupt, Lab, Once

import perdure

# --- locks are taken in one order


class Held:
    """A row of a run that somebody else has locked, and an operation that waits for it on a thread."""

    def __init__(self, url: str, run: str) -> None:
        self._url = url
        self._holder = psycopg.connect(url, options="-c search_path=perdure")
        self._holder.execute("SELECT run FROM run WHERE id = %s FOR UPDATE", (run,))

    def meanwhile(self, operation: Callable[[], object], look: str) -> None:
        """Start the operation, and see that what `look` selects is free while it waits for the row."""
        failed: list[BaseException] = []

        def run() -> None:
            try:
                operation()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            with psycopg.connect(self._url, options="-c search_path=perdure", autocommit=True) as watcher:
                waiting = b"SELECT count(*) FROM pg_locks WHERE NOT granted"
                for _ in range(2000):
                    if watcher.execute(waiting).fetchone() != (0,):
                        break
                    watcher.execute(b"SELECT pg_sleep(0.005)")
                else:
                    raise AssertionError("nobody waits for the row")
                watcher.execute(f"{look} FOR UPDATE NOWAIT".encode())
        finally:
            self._holder.close()
            thread.join(30)
        assert not failed


@perdure.durable
def sends(to: str) -> Any:
    perdure.ask("Send?")
    perdure.send(to, "hello")
    return "sent"


@perdure.durable
def has_child() -> Any:
    return perdure.spawn(asks_once, id="child").result()


def test_an_answer_waits_for_the_run_before_it_takes_the_question(postgres_url: str) -> None:
    with perdure.open(postgres_url) as store:
        store.run(asks_once, id="r")
        Held(postgres_url, "r").meanwhile(lambda: store.answer("r", 1), "SELECT 1 FROM ask")
        assert store.run(asks_once, id="r").result() == 1


def test_a_message_waits_for_the_older_run_before_it_takes_the_sender(postgres_url: str) -> None:
    with perdure.open(postgres_url) as store:
        store.run(asks_once, id="old")
        store.run(sends, "old", id="new")
        store.answer("new", 1)
        Held(postgres_url, "old").meanwhile(
            lambda: store.run(sends, "old", id="new"), "SELECT 1 FROM run WHERE id = 'new'"
        )
        assert store.get_run("new").result() == "sent"


@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_a_child_that_ends_waits_for_its_parent_before_it_takes_itself(postgres_url: str, end: str) -> None:
    with perdure.open(postgres_url) as store:
        store.run(has_child, id="parent")
        if end == "finish":
            store.answer("child", 1)
        child = store.get_run("child")
        ends: Callable[[], object] = child.cancel if end == "cancel" else lambda: store.run(asks_once, id="child")
        Held(postgres_url, "parent").meanwhile(ends, "SELECT 1 FROM run WHERE id = 'child'")
        assert child.refresh().status == ("done" if end == "finish" else "cancelled")


MESSAGES = 40


@perdure.durable
def chatters(other: str) -> bool:
    for number in range(MESSAGES):
        perdure.send(other, number)
    return [perdure.receive() for _ in range(MESSAGES)] == list(range(MESSAGES))


def test_two_runs_that_send_to_each_other_go_on_without_a_deadlock(postgres_url: str) -> None:
    with perdure.open(postgres_url) as store:
        store.start(chatters, "b", id="a")
        store.start(chatters, "a", id="b")
        threads = [
            threading.Thread(target=lambda own, other: store.run(chatters, other, id=own), args=pair)
            for pair in (("a", "b"), ("b", "a"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        results = [store.run(chatters, other, id=own).result(timeout_s=30) for own, other in (("a", "b"), ("b", "a"))]
        assert results == [True, True]


# --- errors come back as they were


class Group(ExceptionGroup[Exception]):
    pass


class FileTrouble(OSError):
    def __init__(self, number: int, text: str, name: str, *, hint: str) -> None:
        super().__init__(number, text, name)
        self.hint = hint


def groups() -> None:
    raise Group("many", [ValueError(1), ExceptionGroup("inner", [KeyError("k"), FileNotFoundError(2, "gone", "f")])])


def opens() -> None:
    Path("/nonexistent/file").read_text()


def own_os_error() -> None:
    raise FileTrouble(13, "no", "name", hint="ask")


def decodes() -> None:
    b"\xff".decode()


def encodes() -> None:
    "\ud800".encode()


def stops() -> None:
    raise StopAsyncIteration("stop")


def renames() -> None:
    raise OSError(18, "cross-device", "from", None, "to")


def said(error: BaseException) -> list[Any]:
    """All that code may look at."""
    names = ("filename", "filename2", "errno", "strerror", "reason", "start", "end", "object", "encoding", "hint")
    own = [type(error), str(error), repr(error), *(getattr(error, name, None) for name in names)]
    return [*own, *(said(inner) for inner in getattr(error, "exceptions", ()))]


@pytest.mark.parametrize("fails", [groups, opens, own_os_error, decodes, encodes, stops, renames])
def test_an_error_is_the_same_when_it_is_replayed(sync_lab: Lab, fails: Callable[[], None]) -> None:
    seen: list[Any] = []
    once = Once()
    step = perdure.step(fails)

    @perdure.durable
    def agent() -> None:
        try:
            step()
        except Exception as error:
            seen.append(said(error))
        perdure.step(lambda: None)()
        once.interrupt()

    with pytest.raises(Interrupt):
        sync_lab.run(agent, id="r")
    assert sync_lab.run(agent, id="r").status == "done"
    assert len(seen) == 2
    assert seen[0] == seen[1]


class BrokenRepr(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class BrokenText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class BrokenArgs(Exception):
    args = property(lambda self: 1 / 0)


class BrokenDict(Exception):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no attributes")


def deep() -> Exception:
    inside: list[Any] = []
    for _ in range(50_000):
        inside = [inside]
    return ValueError(inside)


def in_a_circle() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


@pytest.mark.parametrize("make", [BrokenRepr, BrokenText, BrokenArgs, BrokenDict, deep, in_a_circle])
@pytest.mark.parametrize("where", ["function", "effect"])
def test_a_run_fails_with_an_error_that_cannot_be_shown(
    sync_lab: Lab, make: Callable[[], Exception], where: str
) -> None:
    undone: list[int] = []

    @perdure.effect(undo=lambda result: undone.append(result))
    def books() -> int:
        return 7

    @perdure.effect(definite=(Exception,))
    def fails() -> None:
        raise make()

    @perdure.durable(undo_on=Exception)
    def agent() -> None:
        books()
        if where == "effect":
            fails()
        raise make()

    run = sync_lab.run(agent, id="r")
    assert (run.refresh().status, undone) == ("failed", [7])
    with pytest.raises(perdure.RunFailed):
        run.result()


def test_an_error_that_cannot_even_be_looked_at_leaves_an_effect_in_doubt(sync_lab: Lab) -> None:
    class Closed(Exception):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("no")

    @perdure.effect
    def fails() -> None:
        raise Closed

    @perdure.durable
    def agent() -> None:
        fails()

    run = sync_lab.run(agent, id="r")
    assert getattr(run.refresh().waiting_for, "kind", None) == "doubt"
    sync_lab.store.get_run("r").resolve("1", done=None)
    assert sync_lab.run(agent, id="r").status == "done"
