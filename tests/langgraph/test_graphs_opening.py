"""The ways to open a saver, what a second saver and a second process find, and what a list of messages costs that a
graph shares with its subgraphs.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from graph_kit import MODES, AnyGraph, Runner, asking, at, counting, echo, human, inner, outer, reply, texts
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

import perdure
from perdure.errors import StoreClosed
from perdure.langgraph import PerdureSaver

SOME = {"total": 0, "log": []}
DONE = {"total": 2, "log": ["a", "b"]}


# --- opening


def test_a_conn_string_gives_a_saver_or_a_context(saver_url: str) -> None:
    saver = PerdureSaver.from_conn_string(saver_url)
    assert counting(saver).invoke(SOME, at("t1")) == DONE
    saver.close()
    with PerdureSaver.from_conn_string(saver_url, durability="normal", tenant="other") as saver:
        assert isinstance(saver, PerdureSaver)
        assert saver.get_tuple(at("t1")) is None
    with PerdureSaver.from_conn_string(saver_url) as saver:
        assert counting(saver).get_state(at("t1")).values == DONE
    with pytest.raises(StoreClosed):
        saver.get_tuple(at("t1"))


async def test_a_conn_string_gives_an_async_context_too(saver_url: str) -> None:
    async with PerdureSaver.from_conn_string(saver_url) as saver:
        assert isinstance(saver, PerdureSaver)
        assert await counting(saver).ainvoke(SOME, at("t")) == DONE
    with pytest.raises(StoreClosed):
        await saver.aget_tuple(at("t"))
    saver = PerdureSaver.from_conn_string(saver_url)
    assert (await counting(saver).aget_state(at("t"))).values == DONE
    await saver.aclose()
    await saver.aclose()  # twice is once
    saver.close()


async def test_setup_may_be_called_and_awaited(saver: PerdureSaver) -> None:
    saver.setup()  # as PostgresSaver's
    await saver.setup()  # as AsyncPostgresSaver's
    assert counting(saver).invoke(SOME, at("t")) == DONE
    saver.setup()
    await saver.setup()
    assert counting(saver).get_state(at("t")).values == DONE


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
def test_a_path_and_a_url_are_the_same_file(tmp_path: Path, form: str) -> None:
    path = tmp_path / "a.db"
    with PerdureSaver(form.format(path)) as saver:
        counting(saver).invoke(SOME, at("t"))
    assert path.exists()
    with perdure.open(str(path)) as store:
        assert store.thread("t").load().state["total"] == 2


@pytest.mark.parametrize("mode", MODES)
async def test_a_store_in_memory_will_do(mode: str) -> None:
    with PerdureSaver(":memory:") as saver:
        graph = Runner(counting(saver), mode)
        assert await graph.invoke(SOME, at("t")) == DONE
        assert len(await graph.history(at("t"))) == 4
        assert saver.store.ops.verify().ok


def test_without_arguments_both_are_in_memory_and_a_program_is_warned_once() -> None:
    program = """
import sys
from perdure.langgraph import PerdureSaver, PerdureStore

store = PerdureStore()
store.put(("users",), "a", {"fact": "tea"})
assert [item.value for item in store.search(("users",))] == [{"fact": "tea"}]
print("a store says nothing", file=sys.stderr)
assert [*PerdureSaver().list(None), *PerdureSaver(":memory:").list(None)] == []
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, warning = done.stderr.splitlines()
    assert first == "a store says nothing"
    assert "in memory" in warning
    assert 'PerdureSaver("agent.db")' in warning
    PerdureSaver().close()  # not in pytest: a warning would be an error


@pytest.mark.parametrize("mode", MODES)
async def test_a_saver_takes_an_open_store(saver_url: str, mode: str) -> None:
    with perdure.open(saver_url) as store:
        store.thread("plain").save({"not": "a graph's"})
        one, other = PerdureSaver(store), PerdureSaver(store)
        await Runner(counting(one), mode).invoke(SOME, at("t"))
        assert (await Runner(counting(other), mode).state(at("t"))).values == DONE
        assert store.thread("t").load().state["total"] == 2
        # A thread that no graph wrote is none of LangGraph's, and does no harm.
        assert {found.config["configurable"]["thread_id"] for found in other.list(None)} == {"t"}
        assert store.thread("plain").load().state == {"not": "a graph's"}
        assert store.ops.verify().ok


# --- a second saver, a second process


@pytest.mark.parametrize("mode", MODES)
async def test_a_saver_opened_later_goes_on(saver_url: str, mode: str) -> None:
    with PerdureSaver(saver_url) as saver:
        graph = Runner(outer(saver, inner(ask=True)), mode)
        await graph.invoke({"topic": "tea"}, at("t"))
        waiting = await graph.state(at("t"), subgraphs=True)
        history = await graph.history(at("t"))
    with PerdureSaver(saver_url) as saver:
        graph = Runner(outer(saver, inner(ask=True)), mode)
        assert await graph.state(at("t"), subgraphs=True) == waiting
        assert await graph.history(at("t")) == history
        assert (await graph.invoke(Command(resume="now"), at("t")))["results"][-1] == "tea: 1 notes, now"
        assert saver.store.ops.verify().ok


CHILD = """
import sys
from graph_kit import asking, at
from langgraph.types import Command
from perdure.langgraph import PerdureSaver

with PerdureSaver(sys.argv[1]) as saver:
    graph = asking(saver)
    print(graph.get_state(at("t")).interrupts[0].value)
    graph.invoke(Command(resume="Ada"), at("t"))
    print(graph.invoke(Command(resume="red"), at("t"))["answer"])
    print(saver.store.ops.verify().ok)
"""


def test_another_process_answers_while_this_one_has_it_open_and_sees_it(saver_url: str) -> None:
    with PerdureSaver(saver_url) as saver:
        graph = asking(saver)
        graph.invoke({"found": []}, at("t"))
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", CHILD, saver_url],
            cwd=Path(__file__).parents[1] / "support",
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.stdout.splitlines(), done.stderr) == (["{'question': 'name?'}", "Ada likes red", "True"], "")
        state = graph.get_state(at("t"))
        assert state.next == ()
        assert (state.values["answer"], state.values["found"]) == ("Ada likes red", ["Ada", "done: Ada likes red"])
        assert graph.invoke({"found": ["next"]}, at("t"))["found"][-1] == "next"
        assert saver.store.ops.verify().ok


# --- what it costs


def long_messages(count: int, size: int) -> list[HumanMessage]:
    """Text that does not compress well: half a byte of chance in each character."""
    chance = random.Random(7)
    return [HumanMessage(chance.randbytes(size // 2).hex(), id=f"m{number}") for number in range(count)]


def sharing(saver: PerdureSaver, *, levels: int) -> AnyGraph:
    """Subgraphs in a row, all with the parent's list of messages; each has `levels` graphs around its node."""

    def wrapped(level: int) -> AnyGraph:
        builder = StateGraph(MessagesState)
        builder.add_node("node", echo if level == 0 else wrapped(level - 1))
        builder.add_edge(START, "node")
        return builder.compile()

    builder = StateGraph(MessagesState)
    builder.add_node("before", lambda state: reply(state, "thinking"))
    builder.add_node("one", wrapped(levels))
    builder.add_node("two", wrapped(levels))
    builder.add_edge(START, "before")
    builder.add_edge("before", "one")
    builder.add_edge("one", "two")
    return builder.compile(checkpointer=saver)


def disk_bytes(url: str) -> int:
    """What a closed database takes: the size of the file, or of all rows on the server."""
    if not url.startswith("postgres"):
        return sum(path.stat().st_size for path in Path(url).parent.glob(Path(url).name + "*"))
    with psycopg.connect(url) as connection:
        tables = connection.execute(
            "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables "
            "WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        ).fetchall()
        sizes = [connection.execute(f"SELECT sum(pg_column_size(t.*)) FROM {name} t").fetchone() for (name,) in tables]
    return sum(int(size[0]) for size in sizes if size and size[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("levels", [0, 1])
async def test_subgraphs_do_not_store_the_messages_again(saver_url: str, mode: str, levels: int) -> None:
    """Neither as states of their own nor as what they return, which is the whole list each time."""

    async def turn(given: list[HumanMessage]) -> tuple[int, int]:
        with PerdureSaver(saver_url) as saver:
            graph = Runner(sharing(saver, levels=levels), mode)
            result = await graph.invoke({"messages": given}, at("t"))
            assert texts((await graph.state(at("t"))).values) == texts(result)
            assert saver.store.ops.verify().ok
            counted = saver.store.ops.stats().stored_bytes
        return disk_bytes(saver_url), counted

    first, first_counted = await turn(long_messages(100, 2000))
    assert min(first, first_counted) > 90_000
    second, second_counted = await turn([human("short")])
    assert second_counted - first_counted < 20_000
    assert second - first < 40_000, f"one turn with two subgraphs took {second - first} bytes"
