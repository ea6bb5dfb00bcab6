"""Calls where there is no run, ids and functions that do not fit, a journal that was changed: told so."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from bad_use_kit import stuck_reason
from lab import PLACES, Lab

import perdure

# --- where there is no run


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("perdure.ask()", lambda: perdure.ask("?")),
        ("perdure.sleep()", lambda: perdure.sleep(1)),
        ("perdure.receive()", lambda: perdure.receive()),
        ("perdure.send()", lambda: perdure.send("r", 1)),
        ("perdure.now()", lambda: perdure.now()),
        ("perdure.random()", lambda: perdure.random()),
        ("perdure.uuid()", lambda: perdure.uuid()),
        ("perdure.patched()", lambda: perdure.patched("x")),
        ("perdure.undo()", lambda: perdure.undo()),
        ("perdure.continue_as_new()", lambda: perdure.continue_as_new(1)),
        ("perdure.emit()", lambda: perdure.emit(1)),
        ("perdure.timeout()", lambda: perdure.timeout(1).__enter__()),
    ],
)
def test_a_call_that_needs_a_run(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(perdure.NotInRun, match=r"store\.run") as caught:
        call()
    assert name in str(caught.value)
    assert "perdure.gather" in str(caught.value)


def test_a_call_that_needs_a_run_inside_a_step(lab: Lab) -> None:
    said: dict[str, str] = {}

    @lab.step()
    def work() -> None:
        for name, call in (
            ("ask", lambda: perdure.ask("?")),
            ("sleep", lambda: perdure.sleep(1)),
            ("now", perdure.now),
        ):
            with pytest.raises(perdure.UsageError) as caught:
                call()
            said[name] = str(caught.value)

    @lab.durable
    async def agent() -> None:
        await lab(work())

    lab.run(agent, id="r").result()
    for name, text in said.items():
        assert f"perdure.{name}()" in text
        assert "step 'work'" in text
        assert "durable function" in text  # where to call it


def test_an_effect_without_a_run(lab: Lab) -> None:
    @lab.effect()
    def book() -> None:
        lab.ran.append("book")

    with pytest.raises(perdure.NotInRun, match=r"book\.direct") as caught:
        asyncio.run(book()) if lab.is_async else book()
    assert "durable" in str(caught.value)
    assert lab.ran == []


def test_an_effect_and_a_step_in_a_raw_thread(store: perdure.Store, caplog: pytest.LogCaptureFixture) -> None:
    """The effect raises. The step may be of no run at all: it is a plain call, and the log warns, once."""
    lab = Lab(store, "sync")
    errors: list[BaseException] = []

    @perdure.effect
    def book() -> None:
        lab.ran.append("book")

    @perdure.step
    def work() -> None:
        lab.ran.append("work")

    def in_thread(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    @perdure.durable
    def agent() -> None:
        for call in (book, work, work):
            thread = threading.Thread(target=in_thread, args=(call,))
            thread.start()
            thread.join()

    lab.run(agent, id="r").result()
    assert lab.ran == ["work", "work"]
    [error] = errors
    assert isinstance(error, perdure.NotInRun)
    assert "perdure.gather" in str(error)
    assert "thread" in str(error)


def test_a_step_is_a_plain_call_while_an_unrelated_run_is_active(sync_lab: Lab) -> None:
    begun, ended = threading.Event(), threading.Event()

    @perdure.step
    def work() -> str:
        return "plain"

    @perdure.durable(name="unrelated")
    def unrelated() -> None:
        begun.set()
        ended.wait(60)

    other = threading.Thread(target=lambda: sync_lab.run(unrelated, id="r"))
    other.start()
    begun.wait(60)
    try:
        assert work() == "plain"
    finally:
        ended.set()
        other.join()


def test_an_effect_inside_a_step(lab: Lab) -> None:
    @lab.effect()
    def book() -> None:
        lab.ran.append("book")

    def outer_body() -> None:
        book()

    async def aouter_body() -> None:
        await book()

    outer = perdure.step(name="outer")(aouter_body if lab.is_async else outer_body)

    @lab.durable
    async def agent() -> None:
        await lab(outer())

    run = lab.run(agent, id="r")
    with pytest.raises(perdure.RunStuck, match="make the step an effect"):
        run.result()
    assert lab.ran == []


def test_the_key_outside_of_an_effect(lab: Lab) -> None:
    with pytest.raises(perdure.NotInRun, match="effect"):
        perdure.idempotency_key()

    @lab.step()
    def work() -> str:
        with pytest.raises(perdure.NotInRun, match="effect"):
            perdure.idempotency_key()
        with pytest.raises(perdure.UsageError, match="step"):
            perdure.continue_as_new()
        return "ok"

    @lab.durable
    async def agent() -> Any:
        return await lab(work())

    assert lab.run(agent, id="r").result() == "ok"


# --- ids and functions


def test_an_unknown_run(lab: Lab) -> None:
    for call in (
        lambda: lab.store.get_run("nope"),
        lambda: lab.store.answer("nope", 1),
        lambda: lab.store.answer("nope", 1, step="1"),
        lambda: lab.store.send("nope", 1),
    ):
        with pytest.raises(perdure.NotFound, match="nope"):
            call()
    with pytest.raises(perdure.NotFound, match="perdure runs"):
        lab.store.get_run("nope")


def test_other_arguments_or_another_function_for_the_same_id(lab: Lab) -> None:
    @lab.durable(name="one")
    async def one(number: int, more: int = 0) -> int:
        return number

    @lab.durable(name="two")
    async def two(number: int) -> int:
        return number

    lab.run(one, 1, id="r")
    with pytest.raises(perdure.errors.RunMismatch, match="other arguments") as caught:
        lab.run(one, 2, id="r")
    assert "another id" in str(caught.value)
    with pytest.raises(perdure.errors.RunMismatch, match="run of one"):
        lab.run(two, 1, id="r")
    with pytest.raises(perdure.errors.RunMismatch):
        lab.store.start(one, 2, id="r")
    assert lab.run(one, number=1, id="r").result() == 1  # however they are passed


def test_a_function_that_is_not_durable(lab: Lab) -> None:
    def plain() -> None: ...

    with pytest.raises(perdure.UsageError, match=r"@perdure\.durable"):
        lab.run(plain, id="r")

    @lab.step()
    def work() -> None: ...

    with pytest.raises(perdure.UsageError, match=r"@perdure\.durable"):
        lab.run(work, id="r")


@pytest.mark.parametrize(
    ("decorate", "said"),
    [
        (lambda: perdure.step(retries=-1)(lambda: None), "retries"),
        (lambda: perdure.step(timeout_s=0)(lambda: None), "timeout_s"),
        (lambda: perdure.step(ignore="client")(lambda client: None), "tuple"),  # type: ignore[call-overload]
        (lambda: perdure.step(ignore=("nobody",))(lambda client: None).perdure.binder, "no parameter"),
        (lambda: perdure.step(retry_on=(KeyboardInterrupt,))(lambda: None), "retry_on"),
        (lambda: perdure.effect(on_doubt="guess")(lambda: None), "on_doubt"),  # type: ignore[call-overload]
        (lambda: perdure.effect(definite="all")(lambda: None), "definite"),  # type: ignore[call-overload]
        (lambda: perdure.step(int), "functions"),
        (lambda: perdure.durable("agent"), "functions"),  # type: ignore[call-overload]
        (lambda: perdure.step(staticmethod(lambda: None)), "staticmethod"),
    ],
)
def test_a_wrong_option_is_refused_where_it_is_given(decorate: Callable[[], Any], said: str) -> None:
    with pytest.raises((perdure.UsageError, TypeError), match=said):
        decorate()


# --- a journal that somebody changed


class Tampered:
    """A store with one parked run, and raw SQL on it."""

    def __init__(self, url: str, place: str) -> None:
        self.url, self.place = url, place

        @perdure.step
        def work(number: int) -> int:
            return number

        @perdure.durable(name="tampered")
        def agent() -> Any:
            return [work(1), work(2), perdure.ask("?")]

        self.agent = agent
        with perdure.open(url) as store:
            assert store.run(agent, id="r").status == "waiting"

    def execute(self, sql: str) -> None:
        if self.place == "sqlite":
            with apsw.Connection(self.url) as connection:
                connection.execute(sql)
            connection.close()
        else:
            with psycopg.connect(self.url, options="-c search_path=perdure") as raw:
                raw.execute(sql.encode())


@pytest.fixture(params=PLACES)
def tampered(request: pytest.FixtureRequest, tmp_path: Path) -> Tampered:
    url = str(tmp_path / "t.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    return Tampered(url, request.param)


@pytest.mark.parametrize("how", ["changed", "deleted", "added", "moved", "last deleted"])
def test_a_journal_that_somebody_changed_is_not_run(tampered: Tampered, how: str) -> None:
    if how == "changed":
        if tampered.place == "sqlite":
            with apsw.Connection(tampered.url) as connection:
                [(body,)] = connection.execute("SELECT body FROM journal WHERE seq = 2")
                changed = bytes([*body[:9], body[9] ^ 1, *body[10:]])
                connection.execute("UPDATE journal SET body = ? WHERE seq = 2", (changed,))
            connection.close()
        else:
            tampered.execute("UPDATE journal SET body = set_byte(body, 9, get_byte(body, 9) # 1) WHERE seq = 2")
    elif how == "deleted":
        tampered.execute("DELETE FROM journal WHERE seq = 1")
    elif how == "last deleted":
        tampered.execute("DELETE FROM journal WHERE seq = 3")
    elif how == "added":
        tampered.execute("INSERT INTO journal SELECT tenant, run, 99, kind, body FROM journal WHERE seq = 1")
    else:
        tampered.execute("UPDATE journal SET seq = 77 WHERE seq = 2")
    with perdure.open(tampered.url) as store:
        store.answer("r", "yes")
        run = store.run(tampered.agent, id="r")
        said = stuck_reason(run)
        assert "JournalDamaged" in said
        assert "backup" in said
        with pytest.raises(perdure.errors.JournalDamaged, match="'r'"):
            run.steps()
        assert run.refresh().status == "stuck"


def test_rows_of_another_run_do_not_pass_for_its_own(tampered: Tampered) -> None:
    with perdure.open(tampered.url) as store:
        store.run(tampered.agent, id="s")
    tampered.execute("DELETE FROM journal WHERE run = (SELECT run FROM run WHERE id = 'r') AND seq = 2")
    tampered.execute(
        """INSERT INTO journal SELECT tenant, (SELECT run FROM run WHERE id = 'r'), seq, kind, body FROM journal
        WHERE run = (SELECT run FROM run WHERE id = 's') AND seq = 2"""
    )
    with perdure.open(tampered.url) as store, pytest.raises(perdure.errors.JournalDamaged, match="changed"):
        store.get_run("r").steps()


def test_arguments_that_are_gone(tampered: Tampered) -> None:
    tampered.execute("DELETE FROM run_value")
    with perdure.open(tampered.url) as store:
        store.answer("r", "yes")
        assert "backup" in stuck_reason(store.run(tampered.agent, id="r"))


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_large_result_that_is_gone_or_damaged(tampered: Tampered, how: str) -> None:
    large = random.Random(1).randbytes(150_000).hex()

    @perdure.step
    def page() -> str:
        return large

    @perdure.durable
    def agent() -> list[Any]:
        return [len(page()), perdure.ask("?")]

    with perdure.open(tampered.url) as store:
        store.run(agent, id="large")
        store.answer("large", "yes")
    if how == "gone":
        tampered.execute("DELETE FROM run_blob")
        tampered.execute("DELETE FROM blob")
    else:
        tampered.execute("UPDATE blob SET body = run_value.value FROM run_value")
    with perdure.open(tampered.url) as store:
        said = stuck_reason(store.run(agent, id="large"))
        assert how in said
        assert "backup" in said


def test_a_run_of_another_tenant_is_refused_though_its_id_is_used_here_too(tmp_path: Path) -> None:
    @perdure.durable
    def order() -> str:
        return "done"

    with perdure.open(tmp_path / "store.db") as store:
        own, other = store.run(order, id="order-1"), store.tenant("acme").run(order, id="order-1")
        for call in (
            lambda: store.questions(other),
            lambda: store.answer(other, True),
            lambda: store.send(other, 1),
            lambda: store.fork(other),
            lambda: store.replay(other),
            lambda: store.delete_run(other),
            lambda: store.ops.erase_run(other),
            lambda: store.ops.archive_run(other, tmp_path / "order.db"),
            lambda: perdure.progress.latest(store, other),
        ):
            with pytest.raises(perdure.UsageError, match="another store or tenant"):
                call()
        assert (own.result(), other.result()) == ("done", "done")
