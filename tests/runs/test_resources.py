"""A resource is opened where an execution first needs it, closed when the run parks or ends, and never stored."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from lab import Lab, finished

import perdure
from perdure.errors import NotInRun, UsageError


class Client:
    """What a run cannot store."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.is_open = log, name, True
        log.append(f"open {name}")

    def get(self, what: str) -> str:
        assert self.is_open
        self.log.append(what)
        return f"{self.name}: {what}"

    def close(self) -> None:
        self.is_open = False
        self.log.append(f"close {self.name}")


def clients(lab: Lab) -> Any:
    """A resource of the lab's kind."""

    def client(name: str) -> Iterator[Client]:
        opened = Client(lab.ran, name)
        yield opened
        opened.close()

    async def aclient(name: str) -> AsyncIterator[Client]:
        await asyncio.sleep(0)
        opened = Client(lab.ran, name)
        yield opened
        await asyncio.sleep(0)
        opened.close()

    return perdure.resource(client) if not lab.is_async else perdure.resource(aclient)


def body(lab: Lab, fn: Callable[..., Any]) -> Any:
    """The body of a step, written as an async function, for the lab's kind."""

    @functools.wraps(fn)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return finished(fn(*args, **kwargs))

    return fn if lab.is_async else plain


def test_a_run_that_resumes_opens_its_resources_again(lab: Lab) -> None:
    client = clients(lab)

    async def fetching(what: str) -> str:
        return str((await lab(client("api"))).get(what))

    fetch = perdure.step(body(lab, fetching))

    @lab.durable
    async def agent() -> list[str]:
        before = [await lab(fetch("a")), await lab(fetch("b"))]
        answer = await lab(perdure.ask("Go on?"))
        return [*before, await lab(fetch(answer))]

    run = lab.run(agent, id="r")
    assert lab.ran == ["open api", "a", "b", "close api"]
    assert run.refresh().status == "waiting"
    lab.store.answer("r", "c")
    assert run.result() == ["api: a", "api: b", "api: c"]
    assert lab.ran == ["open api", "a", "b", "close api", "open api", "c", "close api"]
    assert lab.store.replay(run, agent).is_complete
    assert len(lab.ran) == 7, "recorded steps need no client"


def test_branches_share_one_object_and_arguments_name_others(lab: Lab) -> None:
    client = clients(lab)

    async def fetching(name: str) -> str:
        return str((await lab(client(name))).get("x"))

    fetch = perdure.step(body(lab, fetching))

    @lab.durable
    async def agent() -> None:
        await lab(perdure.map(fetch, ["api", "api", "api"]))
        await lab(fetch("other"))

    lab.run(agent, id="r").result()
    assert lab.ran == ["open api", "x", "x", "x", "open other", "x", "close other", "close api"]


def test_it_is_closed_after_an_error_and_for_an_undo_it_is_opened_again(lab: Lab) -> None:
    client = clients(lab)

    async def cancelling(what: str) -> None:
        (await lab(client("api"))).get(f"undo {what}")

    async def booking(what: str) -> None:
        (await lab(client("api"))).get(what)

    book: Any = perdure.effect(undo=body(lab, cancelling))(body(lab, booking))

    @lab.durable(undo_on=ValueError)
    async def agent() -> None:
        await lab(book("seat"))
        raise ValueError("too late")

    with pytest.raises(perdure.RunFailed, match="too late"):
        lab.run(agent, id="r").result()
    assert lab.ran == ["open api", "seat", "close api", "open api", "undo seat", "close api"]


def test_one_that_does_not_close_fails_no_run(sync_lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    @perdure.resource
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("secret")

    @perdure.durable(name="resources.broken")
    def agent() -> int:
        return broken()

    assert sync_lab.store.run(agent, id="b").result() == 1
    [record] = [record for record in caplog.records if "could not be closed" in record.message]
    assert "OSError" in record.message
    assert "secret" not in record.message


async def test_wrong_uses_say_what_to_do(sync_lab: Lab) -> None:
    @perdure.resource
    def client() -> Iterator[dict[str, int]]:
        yield {}

    @perdure.resource
    async def aclient() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(NotInRun, match=r"with client\.direct\(\)"):
        client()
    with client.direct() as opened:
        assert opened == {}
    async with aclient.direct() as number:
        assert number == 1
    with pytest.raises(UsageError, match="yields the object once"):
        perdure.resource(lambda: 1)  # type: ignore[arg-type,return-value]

    @perdure.durable(name="resources.wrong")
    def agent() -> Any:
        return aclient()

    with pytest.raises(perdure.RunStuck, match="is async"):
        sync_lab.store.run(agent, id="w").result()
