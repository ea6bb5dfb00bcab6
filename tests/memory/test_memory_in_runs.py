"""Memory in a durable function: a put commits with its journal entry, so exactly once; what was read is read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Conflict, UsageError
from perdure.testing.processes import ForkServer

AGENT = Path(__file__).parent / "remembering_agent.py"


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_a_replay_neither_writes_nor_reads_again(url: str) -> None:
    with perdure.open(url, embedder=lambda texts: [[float(len(text)), 1.0] for text in texts]) as store:
        alice = store.memory("users", "alice")

        @perdure.durable(name="in_runs.once")
        def once() -> Any:
            first = alice.put("theme", {"fact": "dark"}, ttl_s=3600)
            seen = alice.get("theme")
            try:
                alice.put("theme", "other", expect=0)
            except Conflict as error:
                conflict = error.actual
            found = [item.key for item in alice.search("dark")]
            alice.update("n", lambda value: (value or 0) + 1)
            perdure.ask("Well?")
            second = alice.put("theme", {"fact": "light"})
            return first == seen, conflict, found, second.version, alice.delete("n"), alice.namespaces()[0].items

        run = store.run(once, id="one")
        alice.put("theme", {"fact": "from outside"})
        alice.put("dark", {"fact": "dark from outside"})
        alice.delete("n")
        store.answer(run, "well")
        assert run.result() == (True, "1", ["theme"], 3, False, 2)
        assert [item.value for item in alice.history("theme")] == [
            {"fact": "dark"},
            {"fact": "from outside"},
            {"fact": "light"},
        ]
        assert [item.value for item in alice.history("n")] == [1, None]
        assert store.ops.verify().ok
        names = [step.name for step in run.steps()]
        assert names[:5] == ["memory.put", "memory.get", "memory.put", "memory.search", "memory.update"]


def test_changes_of_many_items_belong_into_a_step_and_are_not_repeated_by_a_replay(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db", embedder="local") as store:
        alice = store.memory("users", "alice")
        alice.put("theme", "dark")
        calls: list[Callable[[], Any]] = [
            lambda: alice.forget({}),
            lambda: alice.policy(max_items=1),
            lambda: alice.erase("theme"),
            lambda: alice.erase_all(),
            lambda: alice.erase_label("alice"),
            lambda: alice.migrate(),
            lambda: alice.reembed(),
            lambda: alice.reindex(),
        ]

        @perdure.step
        def erase() -> Any:
            return alice.get("theme"), alice.erase("theme")

        @perdure.durable(name="in_runs.erase")
        def once() -> Any:
            for call in calls:
                with pytest.raises(UsageError, match=r"perdure\.step"):
                    call()
            (found, erased), count = erase(), alice.stats().items
            perdure.ask("Well?")
            return found, erased.versions, count, alice.policy().max_items

        run = store.run(once, id="one")
        alice.put("theme", "light")
        store.answer(run, "well")
        found, *counts = run.result()
        assert (found.value, found.namespace, counts) == ("dark", ("users", "alice"), [1, 0, None])
        assert [item.value for item in alice.list()] == ["light"]


async def test_async_functions_too(tmp_path: Path) -> None:
    async with perdure.open(tmp_path / "a.db", embedder="local") as store:
        alice = store.memory("users", "alice")

        @perdure.durable(name="in_runs.async")
        async def once() -> Any:
            await alice.aput("theme", {"fact": "dark"})
            await perdure.ask("Well?")
            found = await alice.asearch("dark")
            return [item.value for item in found], (await alice.aupdate("n", lambda value: 1)).version

        run = await store.arun(once, id="one")
        await store.aanswer(run, "well")
        assert await run.aresult() == ([{"fact": "dark"}], 1)
        assert len(await alice.ahistory("theme")) == 1


def test_killed_at_any_write_everything_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with ForkServer("scripts:script") as fork_server:
        for kill_at in (1, 2, 3, 2, 4, 3, 5, 4, 6, 0):
            said = list(fork_server.start(str(AGENT), str(path), str(kill_at)).lines())
    assert said == ["[{'fact': 'dark'}, ['b', 'count', 'theme'], 1, None]"]
    with perdure.open(path) as store:
        alice = store.memory("users", "alice")
        versions = {key: len(alice.history(key)) for key in ("theme", "count", "a", "b")}
        assert versions == {"theme": 1, "count": 1, "a": 2, "b": 1}
        assert store.ops.verify().ok


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_memory_through_another_handle_of_the_same_database_is_written_once(url: str) -> None:
    """As in a worker, whose store is not the one that the module with the function has opened."""
    with perdure.open(url) as store, perdure.open(url) as opened_by_the_module:
        alice = opened_by_the_module.memory("users", "alice")

        @perdure.durable(name="in_runs.other_handle")
        def agent() -> Any:
            first = alice.update("n", lambda value: (value or 0) + 1).value
            opened_by_the_module.thread("notes").save(first)
            perdure.ask("Well?")
            return first, len(alice.list())

        run = store.run(agent, id="one")
        store.answer(run, "well")
        assert run.result() == (1, 1)
        assert [item.value for item in alice.history("n")] == [1]
        assert len(list(store.thread("notes").history())) == 1
        assert [step.name for step in run.steps()][:2] == ["memory.update", "thread.save"]


def test_memory_of_another_database_is_refused_and_used_by_a_step(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store, perdure.open(tmp_path / "b.db") as other:
        elsewhere, is_right = other.memory("users", "alice"), False

        @perdure.step(name="in_runs.put")
        def put() -> int:
            return elsewhere.put("theme", "dark").version

        @perdure.durable(name="in_runs.elsewhere")
        def agent() -> Any:
            return put() if is_right else elsewhere.put("theme", "dark").version

        @perdure.durable(name="in_runs.reads_elsewhere")
        def reads() -> Any:
            return elsewhere.get("theme")

        run = store.run(agent, id="one")
        assert run.refresh().status == "stuck"
        assert "another database" in str(run.refresh().waiting_for)
        assert elsewhere.list() == []
        assert store.run(reads, id="two").status == "stuck"
        is_right = True
        assert store.run(agent, id="one").result() == 1
        assert [item.value for item in elsewhere.history("theme")] == ["dark"]
