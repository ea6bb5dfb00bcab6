"""One test, four ways: an agent written once runs as a sync and as an async function, on SQLite and on PostgreSQL.

The durable function is written as `async def`, and what it calls goes through `await lab(…)`. In the sync variant the
steps are plain functions, `lab(value)` is the value at once, and the durable function is called like any other: nothing
is ever awaited. In the async variant everything is what it says.

    @lab.step()
    def double(number: int) -> int: ...

    @lab.durable
    async def agent(number: int) -> int:
        return await lab(double(number))

    assert lab.run(agent, 3, id="a").result() == 6
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import pytest
from databases import new_database

import perdure
from perdure.runs.execution import hooks
from perdure.runs.execution.hooks import Point

_numbers = itertools.count(1)
PLACES = ("sqlite", "postgres")
MODES = ("sync", "async")


def open_place(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    """A store for all tests of a module, at the place that `request.param` names. Each lab is a tenant of its own."""
    yield from open_at(request.param, request, factory)


def open_at(place: str, request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    """The same, at a place that is given."""
    if place == "sqlite":
        yield from _opened(str(factory.mktemp("lab") / "lab.db"))
        return
    server = request.getfixturevalue("postgres_server")
    name = new_database(server)
    yield from _opened(server.url(name))
    server.drop_database(name)


def _opened(url: str) -> Iterator[perdure.Store]:
    with perdure.open(url, durability="normal") as store:
        yield store


class Code:
    """How agents of one mode are written."""

    def __init__(self, mode: str) -> None:
        self.is_async = mode == "async"

    async def __call__(self, value: Any) -> Any:
        """What a journaled call gives: awaited in an async run, itself in a sync one."""
        if self.is_async:
            return await value
        assert not inspect.isawaitable(value)
        return value

    def step(self, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        return lambda fn: perdure.step(**options)(self.body(fn))

    def effect(self, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        return lambda fn: perdure.effect(**options)(self.body(fn))

    def body(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A plain function, as the body of a step of this mode."""
        if not self.is_async:
            return fn
        if inspect.isgeneratorfunction(fn):

            @functools.wraps(fn)
            async def chunks(*args: Any, **kwargs: Any) -> Any:
                for chunk in fn(*args, **kwargs):
                    yield chunk

            return chunks

        @functools.wraps(fn)
        async def body(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return body

    @overload
    def durable(self, fn: Callable[..., Any], /) -> Any: ...

    @overload
    def durable(self, **options: Any) -> Callable[[Callable[..., Any]], Any]: ...

    def durable(self, fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        if fn is None:
            return functools.partial(self._durable, options)
        return self._durable(options, fn)

    def _durable(self, options: dict[str, Any], fn: Callable[..., Any]) -> Any:
        if self.is_async:
            return perdure.durable(**options)(fn)

        @functools.wraps(fn)
        def agent(*args: Any, **kwargs: Any) -> Any:
            return finished(fn(*args, **kwargs))

        return perdure.durable(**options)(agent)


class Lab(Code):
    """A store, as a tenant of its own, and how its agents are written."""

    def __init__(self, store: perdure.Store, mode: str) -> None:
        super().__init__(mode)
        self.store = store.tenant(f"lab-{next(_numbers)}")
        self.ran: list[Any] = []  # for bodies: what ran, in order

    # --- running them

    def run(self, fn: Callable[..., Any], *args: Any, **options: Any) -> perdure.Run:
        return self.store.run(fn, *args, **options)

    def count(self, name: Any) -> int:
        return self.ran.count(name)

    def step_at(self, run: perdure.Run, path: str) -> perdure.Step:
        [found] = [step for step in run.steps() if step.path == path]
        return found

    def named(self, run: perdure.Run, name: str) -> list[perdure.Step]:
        return [step for step in run.steps() if step.name == name]


def finished(coroutine: Any) -> Any:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a sync agent awaited something")


class Interrupt(BaseException):
    """Ends the code of a run as Ctrl-C does: the run is given back, and the same line again goes on with it."""


class Once:
    """`once.interrupt()` in a durable function: raises Interrupt the first time it is reached."""

    def __init__(self) -> None:
        self.reached = 0

    def interrupt(self) -> None:
        self.reached += 1
        if self.reached == 1:
            raise Interrupt


@contextmanager
def hooked(hook: Callable[[Point], None]) -> Iterator[None]:
    """Hear the named points of all runs of this process."""
    before = hooks.hook
    hooks.hook = hook
    try:
        yield
    finally:
        hooks.hook = before


class Flaky(Exception):
    """Worth another attempt."""


def again(lab: Lab, agent: Callable[..., Any], *args: Any, id: str) -> perdure.Run:
    """The same line twice: the first is interrupted, the second goes on."""
    with pytest.raises(Interrupt):
        lab.run(agent, *args, id=id)
    assert lab.store.get_run(id).status == "queued"
    return lab.run(agent, *args, id=id)


def unhashed(path: str) -> str:
    """A path without the hashes in names of tasks, whose key is random: `1@book-3f….1` as `1@book.1`."""
    return re.sub(r"(@\w+)-[0-9a-f]{12}", r"\1", path)
