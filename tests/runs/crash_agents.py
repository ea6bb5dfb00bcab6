"""Agents of the crash matrix, and the child process that runs them and kills itself at a named point.

What bodies do to the outside world is a line in a file, written with one `write`: it survives whoever wrote it. Each
line says which run, process and step it was, so that a step that ran again can be told from one that ran once.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import httpx
from lab import Code

# Everything that a child needs is imported before it is forked.
import perdure
import perdure.storage.postgres.driver
import perdure.storage.sqlite.driver
from perdure import outcome
from perdure.runs.execution import hooks
from perdure.runs.execution.hooks import Point
from perdure.runs.execution.scope import current
from perdure.testing.processes import Say

DEADLINE_S = 0.3  # of effects: how long a request may be under way
ENDED_S_MAX = 20.0
THREADS = 8


# --- the outside world


class Line(NamedTuple):
    """Something that a body did."""

    run: str
    pid: int
    path: str
    name: str
    key: str
    value: Any


class World:
    """The file that bodies write to."""

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, line: Line) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)

    def lines(self, run: str | None = None) -> list[Line]:
        """What was done, of one run and its children."""
        if not os.path.exists(self._path):
            return []
        with open(self._path) as file:
            found = [Line(*json.loads(text)) for text in file]
        return [line for line in found if run is None or line.run.partition("/")[0] == run]

    def count(self, run: str, name: str, key: str | None = None) -> int:
        return sum(line.name == name and key in (None, line.key) for line in self.lines(run.partition("/")[0]))


world = World("")


def act(name: str, key: str = "", value: Any = None) -> None:
    """Do something to the outside world, in the body of a step."""
    scope = current.get()
    assert scope is not None
    assert scope.body is not None
    hooks.fault_point("act", scope.body.path, name, 0, "before")
    world.write(Line(scope.execution.row.id, os.getpid(), scope.body.path, name, key, value))
    hooks.fault_point("act", scope.body.path, name, 0, "after")


def here() -> str:
    scope = current.get()
    assert scope is not None
    return scope.execution.row.id


# --- the agents


def agents(mode: str) -> dict[str, Callable[[], Any]]:
    """One for each row of the matrix, to be made. Most do something before and after, which must not be done again."""
    code = Code(mode)

    @code.step()
    def first() -> str:
        act("first")
        return "first"

    @code.step()
    def last() -> str:
        act("last")
        return "last"

    def around(fn: Callable[[], Any]) -> Any:
        """A durable function that does `fn` between two steps."""

        async def agent() -> Any:
            return [await code(first()), await fn(), await code(last())]

        return code.durable(name=f"{fn.__name__}_agent")(agent)

    made = [*steps_of(code), *errors_of(code), *effects_of(code), *waits_of(code), *others_of(code)]
    found: dict[str, Callable[[], Any]] = {fn.__name__: partial(around, fn) for fn in made}
    # Made last, and one of them only: an undo finds the undo of an effect by the effect's name.
    found["undo"], found["undo_asked"] = partial(undone_of, code, asked=False), partial(undone_of, code, asked=True)
    found["cancelled"] = partial(undone_of, code, asked=False, waits=True)
    found["rounds"] = partial(rounds_of, code)
    return found


Agent = Callable[[], Any]


def steps_of(code: Code) -> list[Agent]:
    @code.step()
    def work() -> str:
        act("work")
        return "worked"

    @code.step(retries=2, backoff_s=0.001)
    def flaky() -> str:
        act("flaky")
        if world.count(here(), "flaky") < 3:
            raise ValueError("not yet")
        return "flaky, but done"

    @code.step()
    def seen(chance: float) -> float:
        act("seen", value=chance)
        return chance

    async def plain() -> Any:
        return await code(work())

    async def retried() -> Any:
        return await code(flaky())

    async def values() -> Any:
        return await code(seen(perdure.random())) is not None

    return [plain, retried, values]


def refuse(status: int, code: str) -> None:
    """Raise what a client of HTTP raises when its receiver refuses."""
    request = httpx.Request("POST", "http://receiver/", headers={"authorization": "secret"})
    httpx.Response(status, json={"code": code}, request=request).raise_for_status()


def errors_of(code: Code) -> list[Agent]:
    @code.step()
    def look_up() -> None:
        act("look_up")
        refuse(404, "unknown")

    def found(key: str, card: str) -> outcome.Done | outcome.NotDone:
        done = card == "amex" and any(line.key == key for line in world.lines())
        return outcome.Done(f"charged {card}") if done else outcome.NotDone()

    @code.effect(name="charge", timeout_s=DEADLINE_S, reconcile=found)
    def charge(card: str, key: perdure.IdempotencyKey) -> str:
        act(f"charge {card}", key)
        if card == "visa":
            refuse(402, "declined")
        return f"charged {card}"

    async def caught() -> Any:
        """Goes on by what it reads from errors that it caught."""
        try:
            await code(look_up())
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
        try:
            return await code(charge("visa"))
        except httpx.HTTPStatusError as error:
            if error.response.json() != {"code": "declined"}:
                raise
        return [status, await code(charge("amex"))]

    return [caught]


def find(key: str, item: str) -> outcome.Done | outcome.NotDone:
    """A reconcile that looks."""
    done = [line for line in world.lines() if line.name == "book" and line.key == key]
    return outcome.Done(f"booked {item}") if done else outcome.NotDone()


def not_sure(key: str, item: str) -> outcome.Unknown:
    return outcome.Unknown("the receiver is closed today")


def effects_of(code: Code) -> list[Agent]:
    def book(item: str, key: perdure.IdempotencyKey) -> str:
        act("book", key)
        return f"booked {item}"

    def unsure(item: str, key: perdure.IdempotencyKey) -> str:
        act("try", key)
        if world.count(here(), "try", key) < 3:
            raise ValueError("no free line")  # a definite answer: nothing was booked
        return book(item, key)

    def effect(name: str, body: Callable[..., Any] = book, **options: Any) -> Agent:
        made = code.effect(name="book", timeout_s=DEADLINE_S, **options)(body)

        async def agent() -> Any:
            try:
                return await code(made("LH400"))
            except perdure.InDoubt as error:
                return f"in doubt at {error.step}"

        agent.__name__ = name
        return agent

    return [
        effect("asked"),
        effect("reconciled", reconcile=find),
        effect("not_sure", reconcile=not_sure),
        effect("repeated", on_doubt="retry"),
        effect("given_up", on_doubt="fail"),
        effect("retried_effect", unsure, reconcile=find, retries=5, backoff_s=0.001, definite=ValueError),
        effect("approved", reconcile=find, approve=True),
    ]


def waits_of(code: Code) -> list[Agent]:
    async def ask() -> Any:
        return await code(perdure.ask("How many?", schema=int))

    async def sleep() -> Any:
        return await code(perdure.sleep(0.05))

    async def receive() -> Any:
        # The second one proves that the message is not there twice.
        return [await code(perdure.receive("in")), await code(perdure.receive("in", timeout_s=0, default="nothing"))]

    return [ask, sleep, receive]


def others_of(code: Code) -> list[Agent]:
    def booked(item: str, key: perdure.IdempotencyKey) -> str:
        act(f"book {item}", key)
        return f"booked {item}"

    def found(key: str, item: str) -> outcome.Done | outcome.NotDone:
        return outcome.Done(f"booked {item}") if any(line.key == key for line in world.lines()) else outcome.NotDone()

    book = code.effect(name="book", timeout_s=DEADLINE_S, reconcile=found)(booked)

    @code.step()
    def middle() -> str:
        act("middle")
        return "middle"

    @code.durable(name="below")
    async def below(item: str) -> list[Any]:
        return [await code(book(item)), await code(middle())]

    async def parallel() -> Any:
        if code.is_async:
            return await perdure.gather(book("left"), middle(), book("right"))
        return perdure.gather(lambda: book("left"), middle, lambda: book("right"))

    async def tasks_of_its_own() -> Any:
        """Plain asyncio; a sync run has no such thing."""
        if not code.is_async:
            return await parallel()
        import asyncio

        return list(await asyncio.gather(book("left"), middle(), book("right")))

    async def child() -> Any:
        started = await code(perdure.spawn(below, "below", id=f"{here()}/child"))
        return await code(started.result())

    async def send() -> Any:
        return await code(perdure.send(f"{here()}-listener", "hello"))

    return [parallel, tasks_of_its_own, child, send]


def undone_of(code: Code, *, asked: bool, waits: bool = False) -> Any:
    """Books two things, then fails: both are taken back. With `asked`, an undo in doubt needs a person. With `waits` it
    asks instead of failing, and is cancelled."""
    name = "cancel_asked" if asked else "cancel"

    def find_cancelled(key: str, item: str) -> outcome.Done | outcome.NotDone:
        return outcome.Done(None) if any(line.key == key for line in world.lines()) else outcome.NotDone()

    def cancel(item: str, key: perdure.IdempotencyKey) -> None:
        act(f"cancel {item}", key)

    options: dict[str, Any] = {} if asked else {"reconcile": find_cancelled}
    undo = code.effect(name=name, timeout_s=DEADLINE_S, **options)(cancel)

    def book(item: str, key: perdure.IdempotencyKey) -> str:
        act(f"book {item}", key)
        return f"booked {item}"

    def find_booked(key: str, item: str) -> outcome.Done | outcome.NotDone:
        return outcome.Done(f"booked {item}") if any(line.key == key for line in world.lines()) else outcome.NotDone()

    book_undoable = code.effect(name="book", undo=undo, timeout_s=DEADLINE_S, reconcile=find_booked)(book)

    @code.durable(name="cancelled_agent" if waits else f"undo_{name}_agent", undo_on=ValueError)
    async def agent() -> None:
        await code(book_undoable("flight"))
        await code(book_undoable("hotel"))
        if waits:
            await code(perdure.ask("Go on?"))
        raise ValueError("sold out")

    return agent


def rounds_of(code: Code) -> Any:
    """An agent that never ends, three times."""

    def found(key: str, number: int) -> outcome.Done | outcome.NotDone:
        return outcome.Done(number) if any(line.key == key for line in world.lines()) else outcome.NotDone()

    def pay(number: int, key: perdure.IdempotencyKey) -> int:
        act(f"pay {number}", key)
        return number

    paid = code.effect(name="pay", timeout_s=DEADLINE_S, reconcile=found)(pay)

    @code.durable(name="rounds_agent")
    async def agent(number: int = 1, total: int = 0) -> int:
        total += await code(paid(number))
        if number < 3:
            perdure.continue_as_new(number + 1, total)
        return total

    return agent


@perdure.durable
def listener() -> list[Any]:
    return [perdure.receive(), perdure.receive(timeout_s=0, default="nothing")]


# --- the child process


class Killer:
    """A hook that kills the process when a point is reached for the n-th time: "before done of perdure.ask #1"."""

    def __init__(self, at: str | None) -> None:
        self._at = at
        self._counts: Counter[str] = Counter()
        self.reached: list[str] = []

    def __call__(self, point: Point) -> None:
        name = f"{point.when} {point.kind} of {point.name}"
        self._counts[name] += 1
        found = f"{name} #{self._counts[name]}"
        self.reached.append(found)
        if found == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def live(say: Say, url: str, outside: str, mode: str, scenario: str, run_id: str, at: str | None) -> None:
    """Run one agent to its end, and die on the way. Says which points it has come to."""
    killer = Killer(at)
    hooks.hook = killer
    drive = _prepared(outside, mode, scenario)
    with perdure.open(url, durability="normal", lease_s=0.1) as store:
        end = drive(store, run_id)
    say({"reached": killer.reached, **end})


def resume(say: Say, url: str, outside: str, mode: str, scenario: str, run_ids: list[str]) -> None:
    """The same line again, for runs whose processes have died. Says how each of them ended."""
    drive = _prepared(outside, mode, scenario)
    with perdure.open(url, durability="normal") as store, ThreadPoolExecutor(THREADS) as pool:
        for end in pool.map(lambda run_id: drive(store, run_id), run_ids):
            say(end)


def child(say: Say, what: str, *arguments: Any) -> None:
    (live if what == "live" else resume)(say, *arguments)


def _prepared(outside: str, mode: str, scenario: str) -> Callable[[perdure.Store, str], dict[str, Any]]:
    global world
    world = World(outside)
    agent = agents(mode)[scenario.removesuffix("_short")]()

    def prepared(store: perdure.Store, run_id: str) -> dict[str, Any]:
        if scenario == "sleep":  # a short sleep parks as well, so that no test waits for a long one
            store._context.linger_s = 1e-9
        return drive(store, agent, run_id)

    return prepared


def drive(store: perdure.Store, agent: Callable[..., Any], run_id: str) -> dict[str, Any]:
    """The line, again and again until the run has ended; answers what it asks meanwhile, after looking outside."""
    recorded = _recorded(store, run_id)
    if run_id.startswith("send"):
        store.start(listener, id=f"{run_id}-listener")
    until = time.monotonic() + ENDED_S_MAX
    while time.monotonic() < until:
        run = store.run(agent, id=run_id)
        status = run.refresh().status
        if status in ("done", "failed", "undone", "cancelled", "stuck"):
            return {"run": run_id, "pid": os.getpid(), "recorded": recorded, **_end(store, run, status)}
        _answer(store, run)
    raise AssertionError(f"{run_id} does not end: {run.refresh()}")


def _answer(store: perdure.Store, run: perdure.Run) -> None:
    """What a person does who is asked, or sees what a run waits for."""
    asks = store.questions(run.id)
    for ask in asks:
        if ask.kind == "doubt":
            assert ask.step is not None
            # Whoever looks too early may miss what is on its way.
            time.sleep(max(0.0, ask.asked_at.timestamp() + DEADLINE_S - time.time()))
            [step] = [step for step in run.steps() if step.path == ask.step]
            done = any(line.key == ask.key for line in world.lines(run.id))
            if done:
                run.resolve(ask.step, done=None if step.kind == "undo" else "booked LH400", who="ann")
            else:
                run.resolve(ask.step, not_done=True, who="ann")
        elif run.id.startswith("cancelled"):
            run.cancel()
        else:
            store.answer(run.id, True if ask.kind == "approval" else 7, step=ask.path, who="bob")
    if not asks and (waiting := run.refresh().waiting_for) is not None and waiting.kind == "message":
        store.send(run.id, "a message", topic="in", key="the only one")
    elif not asks:
        time.sleep(0.005)  # it is due at a time of its own


def _recorded(store: perdure.Store, run_id: str) -> list[list[str]]:
    """Which steps have their ends on record, in a run and its children."""
    found = []
    for name in (run_id, f"{run_id}/child"):
        try:
            run = store.get_run(name)
        except perdure.NotFound:
            continue
        found += [[name, step.path] for step in run.steps() if step.status in ("done", "failed")]
    return found


def _end(store: perdure.Store, run: perdure.Run, status: str) -> dict[str, Any]:
    try:
        outcome = run.result()
    except perdure.errors.RunError as error:
        outcome = f"{type(error).__name__}: {error.__cause__ or error}".replace(f" {run.id!r}", "")
    ends: Counter[str] = Counter(event.path for event in run.stream() if event.kind == "done")
    return {
        "status": status,
        "outcome": outcome,
        "steps": [[step.path, step.name, step.kind, step.status, step.attempts, step.key] for step in run.steps()],
        "ended_twice": [path for path, times in ends.items() if times > 1],
        "asks": sorted(ask.kind for ask in store.questions(run.id, all=True)),
        "heard": _heard(store, run.id),
    }


def _heard(store: perdure.Store, run_id: str) -> Any:
    try:
        store.get_run(f"{run_id}-listener")
    except perdure.NotFound:
        return None
    return store.run(listener, id=f"{run_id}-listener").result(timeout_s=60)
