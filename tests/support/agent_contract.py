"""What every adapter of an agent framework must prove, with one shop: a model, two parallel tools, a payment.

A framework's module has `agent(task)`: it asks the framework's agent, whose model is `decide` and whose tools are the
functions below, and `member()`, which returns such an agent. One with sessions has `append(store, session, text)` and
`texts(store, session)`. It also exports `work` of this module. A test module makes a class of `AgentContract` or
`SessionContract`, or both, that names the framework's module. What the shop did is in a file, so it survives the kills.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from soak import SOAK
from striking import die_at

import perdure
from perdure.runs.execution import hooks
from perdure.testing.processes import ForkServer, Say

POINTS_MAX = 200
APPENDED = 20  # by each of three processes
STRIDE = 1 if SOAK else 8
BOUGHT = '["hotel in Lisbon", "sunny in Lisbon", "paid 900"]'
_place: list[Path] = []
_stores: list[perdure.Store] = []


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]
    id: str


def decide(task: str, results: Sequence[str]) -> list[ToolCall] | str:
    """The model: its next tool calls, or its answer. `results` are those of all tools so far, in the order of calls."""
    note("model")
    if task == "buy" and not results:
        return [ToolCall("search", {"city": "Lisbon"}, "c1"), ToolCall("weather", {"city": "Lisbon"}, "c2")]
    if task == "buy" and len(results) == 2:
        return [ToolCall("pay", {"cents": 900}, "c3")]
    if task == "refund" and not results:
        return [ToolCall("refund", {"order": "7"}, "c1"), ToolCall("weather", {"city": "Lisbon"}, "c2")]
    if task.startswith("member") and len(results) < len(task.split()):
        return [ToolCall("pay", {"cents": 900}, f"c{len(results) + 1}")]
    if task in ("wire", "lose") and not results:
        return [ToolCall(task, {"cents": 900}, "c1")]
    return json.dumps(list(results))


async def search(city: str) -> str:
    """Find a hotel."""
    note("search")
    await asyncio.sleep(0.001)
    return f"hotel in {city}"


def weather(city: str) -> str:
    """Say how the weather is."""
    note("weather")
    return f"sunny in {city}"


def find(key: str) -> perdure.outcome.Done | perdure.outcome.NotDone:
    return perdure.outcome.Done("paid 900") if f"paid {key}" in notes(_place[0]) else perdure.outcome.NotDone()


@perdure.effect(reconcile=find, timeout_s=0.3, name="contract.pay")
async def pay(cents: int, key: perdure.IdempotencyKey) -> str:
    """Pay."""
    note(f"paid {key}")
    return f"paid {cents}"


@perdure.effect(timeout_s=0.3, name="contract.wire")
async def wire(cents: int) -> str:
    """Send money. The answer is lost."""
    note("wired")
    raise ConnectionError("the line is dead")


@perdure.effect(timeout_s=0.3, on_doubt="fail", name="contract.lose")
async def lose(cents: int) -> str:
    """Send money. The answer is lost, and nobody is asked."""
    note("wired")
    raise ConnectionError("the line is dead")


@perdure.effect(approve=True, name="contract.refund")
async def refund(order: str) -> str:
    """Give the money back."""
    note("refunded")
    return f"refunded {order}"


def place() -> tuple[perdure.Store, str]:
    """The store, and the id of the run that an agent is in."""
    return _stores[0], _place[0].name


def note(line: str) -> None:
    with (_place[0] / "notes.txt").open("a") as file:
        file.write(f"{line}\n")


def notes(folder: Path) -> list[str]:
    path = folder / "notes.txt"
    return path.read_text().splitlines() if path.exists() else []


def kinds(folder: Path) -> Counter[str]:
    return Counter(line.partition(" ")[0] for line in notes(folder))


# --- in a process of its own


@perdure.durable(name="contract.agent")
async def shop(module: str, task: str) -> str:
    return str(await importlib.import_module(module).agent(task))


def work(say: Say, module: str, url: str, folder: str, task: str, deadly: int) -> None:
    """Start or resume the run of this folder, and die at the point of that number. Say how it ended."""
    _place[:] = [Path(folder)]
    if task == "append":
        say(append(module, url, APPENDED))
        return
    hooks.hook = die_at(deadly)
    if task == "member":
        say(teamwork(importlib.import_module(module).member(), url, deadly))
        return
    with perdure.open(url, durability="normal", lease_s=0.1 if deadly else 30) as store:
        _stores[:] = [store]
        run = store.run(shop, module, task, id=Path(folder).name)
        status = run.refresh().status
        say([status, run.result() if status == "done" else None])


def teamwork(agent: Any, url: str, deadly: int) -> Any:
    """Let an agent answer two messages of another member. Return the answers."""
    with perdure.open(url, durability="normal", lease_s=0.1 if deadly else 30) as store:
        team = store.team("shop")
        team.agent(agent, name="clerk")

        @team.agent
        async def desk(state: dict[str, Any], message: str) -> None:
            state[message] = await perdure.call("clerk", "member")

        for number in ("one", "two"):
            team.send("desk", number, key=number)
        while [each for each in team.members() if each.waiting]:
            team.work(until_idle=True)
        return store.thread("run:shop/desk").load().state


def append(module: str, url: str, count: int) -> list[int]:
    """Let three processes append to a session at the same time. Return their exit codes."""
    pids = []
    for process in range(3):
        if (pid := os.fork()) == 0:
            with perdure.open(url, durability="normal") as store:
                for number in range(count):
                    importlib.import_module(module).append(store, "chat", f"{process}-{number}")
            os._exit(0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


# --- the tests


class Contract:
    """A process that has imported the framework, and starts others for the tests of a class."""

    module: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[ForkServer]:
        with ForkServer(f"{cls.module}:work") as started:
            yield started

    def run(self, server: ForkServer, url: str, folder: Path, task: str, deadly: int = 0) -> Any:
        """How the run ended, or None if it was killed."""
        folder.mkdir(exist_ok=True)
        said = list(server.start(self.module, url, str(folder), task, deadly).lines())
        return said[0] if said else None


class AgentContract(Contract):
    """The tests of an agent."""

    def test_killed_at_any_point_it_pays_once_and_repeats_nothing_that_was_recorded(
        self, server: ForkServer, tmp_path: Path
    ) -> None:
        url, kills = str(tmp_path / "store.db"), 0
        for deadly in range(1, POINTS_MAX, STRIDE):
            folder = tmp_path / f"run-{deadly}"
            if self.run(server, url, folder, "buy", deadly) is not None:
                break
            kills += 1
            before, known = kinds(folder), self.recorded(url, folder.name)
            assert self.run(server, url, folder, "buy") == ["done", BOUGHT], f"killed at point {deadly}"
            again = kinds(folder) - before
            assert again["model"] == 3 - known["model"]
            assert [again[tool] for tool in ("search", "weather")] == [1 - known["search"], 1 - known["weather"]]
            assert kinds(folder)["paid"] == 1
        assert kills > 20 // STRIDE

    @staticmethod
    def recorded(url: str, run: str) -> Counter[str]:
        """How many ends of calls are recorded, by the last part of their names."""
        with perdure.open(url) as store:
            steps = store.get_run(run).steps() if any(each.id == run for each in store.runs()) else []
            return Counter(step.name.rpartition(".")[2] for step in steps if step.status == "done")

    def test_a_doubt_parks_is_answered_and_never_reaches_the_model(self, server: ForkServer, tmp_path: Path) -> None:
        url = str(tmp_path / "store.db")
        assert self.run(server, url, tmp_path / "run", "wire") == ["waiting", None]
        with perdure.open(url) as store:
            [question] = store.questions("run")
            assert "Did contract.wire(cents=900) happen?" in question.text
            store.get_run("run").resolve(str(question.step), done="wired 900")
        assert self.run(server, url, tmp_path / "run", "wire") == ["done", '["wired 900"]']
        assert kinds(tmp_path / "run") == {"model": 2, "wired": 1}

    @pytest.mark.parametrize("agreed", [True, False])
    def test_an_approval_parks_the_run_and_the_answer_decides(
        self, server: ForkServer, tmp_path: Path, agreed: bool
    ) -> None:
        url = str(tmp_path / "store.db")
        assert self.run(server, url, tmp_path / "run", "refund") == ["waiting", None]
        with perdure.open(url) as store:
            store.answer("run", agreed, who="ann")
        status, said = self.run(server, url, tmp_path / "run", "refund")
        told, seen = json.loads(said)
        assert (status, seen) == ("done", "sunny in Lisbon")
        assert told == "refunded 7" if agreed else "was not approved; it did not run" in told
        assert kinds(tmp_path / "run") == {"model": 2, "weather": 1} | ({"refunded": 1} if agreed else {})

    def test_a_doubt_that_nobody_is_asked_about_fails_the_run_and_never_reaches_the_model(
        self, server: ForkServer, tmp_path: Path
    ) -> None:
        url = str(tmp_path / "store.db")
        assert self.run(server, url, tmp_path / "run", "lose") == ["failed", None]
        assert kinds(tmp_path / "run") == {"model": 1, "wired": 1}
        with perdure.open(url) as store, pytest.raises(perdure.RunFailed, match="it is unknown whether"):
            store.get_run("run").result()

    def test_a_member_of_a_team_that_is_killed_remembers_and_pays_once_for_each_message(
        self, server: ForkServer, tmp_path: Path
    ) -> None:
        answers = {"one": '["paid 900"]', "two": '["paid 900", "paid 900"]'}
        kills = 0
        for deadly in range(1, POINTS_MAX) if SOAK else [30]:
            folder, url = tmp_path / str(deadly), str(tmp_path / f"{deadly}.db")
            if self.run(server, url, folder, "member", deadly) is not None:
                break
            kills += 1
            assert self.run(server, url, folder, "member") == answers, f"killed at point {deadly}"
            assert kinds(folder)["paid"] == 2
        assert kills >= (30 if SOAK else 1)


class SessionContract(Contract):
    """The tests of a session store."""

    def test_three_processes_append_and_nothing_is_lost(self, server: ForkServer, tmp_path: Path) -> None:
        url = str(tmp_path / "store.db")
        assert self.run(server, url, tmp_path / "run", "append") == [0, 0, 0]
        with perdure.open(url) as store:
            texts = importlib.import_module(self.module).texts(store, "chat")
        expected = [[f"{process}-{number}" for number in range(APPENDED)] for process in range(3)]
        assert [[text for text in texts if text[0] == str(process)] for process in range(3)] == expected
