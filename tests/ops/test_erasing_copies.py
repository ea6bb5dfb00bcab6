"""Erasing where LangGraph's threads were copied or forked: what was copied goes too, or is named; nothing breaks."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from keeping_kit import PLACES, Clock, place, query, sound, stored_rows, text
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

import perdure
from perdure.errors import NotFound, UsageError
from perdure.langgraph import PerdureSaver


class Talk(TypedDict):
    said: Annotated[list[str], operator.add]


def at(thread: str, **more: Any) -> Any:
    return {"configurable": {"thread_id": thread, **more}}


def inner(state: Talk) -> Talk:
    return {"said": [f"inner {state['said'][-1]}"]}


def asks(state: Talk) -> Talk:
    return {"said": [str(interrupt("what else?"))]}


def graph_of(saver: PerdureSaver) -> Any:
    """A subgraph with checkpoints of its own, then a question."""
    sub = StateGraph(Talk)
    sub.add_node("inner", inner)
    sub.add_edge(START, "inner")
    builder = StateGraph(Talk)
    builder.add_node("sub", sub.compile(checkpointer=True))
    builder.add_node("asks", asks)
    builder.add_edge(START, "sub")
    builder.add_edge("sub", "asks")
    return builder.compile(checkpointer=saver)


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest) -> str:
    return place(request, request.param)


@pytest.fixture
def saver(url: str) -> Iterator[PerdureSaver]:
    with PerdureSaver(url) as made:
        made.store._context.clock_us = Clock()
        yield made


def left_in(saver: PerdureSaver, url: str, *secrets: str) -> set[str]:
    """Which secrets anything of the store still says: every thread, and on SQLite every byte of its files."""
    said = ""
    for info in saver.store.threads(limit=None):
        said += repr(info.metadata)
        for found in saver.list(at(info.name)):
            said += repr(found)
    if "://" not in url:
        said += "".join(file.read_bytes().decode("latin-1") for file in Path(url).parent.glob(Path(url).name + "*"))
    return {secret for secret in secrets if secret in said}


def newest(saver: PerdureSaver, thread: str) -> Any:
    found = saver.get_tuple(at(thread))
    assert found is not None
    return found.config


def talk(graph: Any, thread: str, secret: str) -> None:
    graph.invoke({"said": [secret]}, at(thread))


def test_a_thread_goes_with_its_copies_only_if_that_is_said(saver: PerdureSaver, url: str) -> None:
    graph, secret = graph_of(saver), text("main")
    talk(graph, "main", secret)
    saver.copy_thread("main", "copy")
    graph.invoke(Command(resume="more"), at("copy"))
    with pytest.raises(UsageError, match="'copy'"):
        saver.store.ops.erase("main")
    assert left_in(saver, url, secret) == {secret}
    assert set(saver.store.ops.erase("main", forks=True).threads) == {"main", "copy"}
    assert left_in(saver, url, secret) == set()
    for table in ("label", "write", "space", "tag", "record", "run", "journal"):
        assert query(saver.store, f"SELECT count(*) FROM {table}") == [(0,)], table
    sound(saver.store)
    talk(graph, "main", "anew")
    assert graph.get_state(at("main")).values["said"][-1] == "inner anew"


def test_a_copy_is_erased_and_its_source_is_as_it_was(saver: PerdureSaver, url: str) -> None:
    graph, shared, own = graph_of(saver), text("shared"), text("own")
    talk(graph, "main", shared)
    before = list(saver.list(at("main")))
    saver.copy_thread("main", "copy")
    graph.invoke(Command(resume=own), at("copy"))
    talk(graph, "copy", own)
    told = saver.store.ops.erase("copy").may_remain
    assert any("thread 'main', which shares the history before the fork" in one for one in told)
    assert left_in(saver, url, shared, own) == {shared}
    assert list(saver.list(at("main"))) == before
    sound(saver.store)
    assert graph.invoke(Command(resume="on"), at("main"))["said"][-1] == "on"


def test_what_a_copy_can_reach_by_an_id_alone_is_the_threads_too(saver: PerdureSaver, url: str) -> None:
    """A copy's head may be older than what it has ids for: checkpoints of subgraphs, or of a head that was removed."""
    graph, shared, own = graph_of(saver), text("shared"), text("own")
    talk(graph, "root", shared)
    saver.copy_thread("root", "middle")
    talk(graph, "middle", own)
    _remove_main_line(saver, "middle", newest(saver, "root"))
    saver.copy_thread("middle", "copy")
    assert left_in(saver, url, own) == {own}
    with pytest.raises(UsageError, match="'copy'"):
        saver.store.ops.erase("middle")
    assert set(saver.store.ops.erase("middle", forks=True).threads) == {"middle", "copy"}
    assert left_in(saver, url, shared, own) == {shared}
    sound(saver.store)


def _remove_main_line(saver: PerdureSaver, thread: str, head: Any) -> None:
    """Erase the thread's own checkpoints of its main line: those of the subgraph stay, and its head is its source's."""
    store, wanted = saver.store, head["configurable"]["checkpoint_id"]
    while newest(saver, thread)["configurable"]["checkpoint_id"] != wanted:
        store.thread(thread).erase(store.thread(thread).load())


def test_pending_writes_and_metadata_that_were_copied_are_named(saver: PerdureSaver, url: str) -> None:
    """What a fork wrote on a checkpoint that it shares is in its copies too: they share no record of its own."""
    graph, shared, own, tag = graph_of(saver), text("shared"), text("own"), text("tag")
    talk(graph, "root", shared)
    saver.copy_thread("root", "middle")
    saver.store.thread("middle").annotate({"about": tag})
    saver.put_writes(newest(saver, "middle"), [("said", [own])], "a task")
    saver.copy_thread("middle", "copy")
    told = saver.store.ops.erase("middle").may_remain
    assert any("thread 'root', which shares the history before the fork" in one for one in told)
    [named] = [one for one in told if "'copy'" in one]
    assert "pending" in named
    assert "metadata" in named
    assert left_in(saver, url, own, tag) == {own, tag}
    sound(saver.store)
    saver.store.ops.erase("copy")
    assert left_in(saver, url, own, tag) == set()
    assert left_in(saver, url, shared) == {shared}
    sound(saver.store)


def test_a_checkpoint_is_erased_in_every_copy(saver: PerdureSaver, url: str) -> None:
    graph, secret = graph_of(saver), text("secret")
    talk(graph, "main", "first")
    talk(graph, "main", "second")
    saver.copy_thread("main", "copy")
    graph.update_state(at("copy"), {"said": [secret]}, as_node="asks")
    saver.copy_thread("copy", "deeper")
    gone = newest(saver, "deeper")["configurable"]["checkpoint_id"]
    store = saver.store
    erased = store.thread("deeper").erase(store.thread("deeper").load())
    assert any("what is pending on them" in told for told in erased.may_remain)
    assert left_in(saver, url, secret) == set()  # also what the step wrote, on the checkpoint before it
    for name in ("main", "copy", "deeper"):
        assert saver.get_tuple(at(name, checkpoint_id=gone)) is None
        assert graph.get_state(at(name)).values["said"][-1] == "inner second"
    sound(store)


def test_a_pin_on_a_subgraphs_checkpoint_of_a_copy_is_the_copys(saver: PerdureSaver) -> None:
    graph = graph_of(saver)
    talk(graph, "main", "first")
    saver.copy_thread("main", "copy")
    talk(graph, "main", "second")
    store = saver.store
    main, copy = (_subgraphs(store, name) for name in ("main", "copy"))
    assert copy < main
    for record in copy:
        store.thread("copy").pin(record, name=record)
    with pytest.raises(NotFound):
        store.thread("copy").pin(max(main), name="foreign")


def _subgraphs(store: perdure.Store, thread: str) -> set[str]:
    from perdure.log.ids import show_id

    found = query(
        store,
        "SELECT l.record FROM label l JOIN thread t ON t.tenant = l.tenant AND t.thread = l.thread"
        " WHERE t.name = :name AND l.space > 0",
        name=thread,
    )
    return {show_id(record) for (record,) in found}


def test_what_a_deleted_source_left_goes_with_its_last_copy(saver: PerdureSaver, url: str) -> None:
    graph, secret = graph_of(saver), text("secret")
    talk(graph, "main", secret)
    saver.copy_thread("main", "one")
    saver.copy_thread("main", "two")
    saver.delete_thread("main")
    [told] = [one for one in saver.store.ops.erase("one").may_remain if "'two'" in one]
    assert "shares the history" in told
    assert graph.get_state(at("two")).values["said"][0] == secret
    sound(saver.store)
    saver.store.ops.erase("two")
    assert left_in(saver, url, secret) == set()
    assert query(saver.store, "SELECT count(*) FROM record") == [(0,)]


# --- copies that a repair and a restoration leave


def test_what_a_repair_left_is_named(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of rows that could not be used, and the store that the mended copy was made of."""
    monkeypatch.chdir(tmp_path)
    with perdure.open(url) as store:
        thread = store.thread("alice")
        for number in range(6):
            thread.save({"n": number, "secret": text(number)})
        stored_rows(store, "UPDATE body SET full_text = NULL, diff = :junk RETURNING 1", junk=b"junk")
    to = str(tmp_path / "mended.db") if "://" not in url else "mended"
    done = perdure.ops.repair_store(url, to=to)
    assert done.lost
    options: dict[str, Any] = {} if "://" not in url else {"schema": to}
    with perdure.open(to if "://" not in url else url, **options) as store:
        store.thread("alice").save({"n": 7})
        told = store.ops.erase("alice").may_remain
    assert any("damaged store" in one for one in told)


# --- history that a prune left to a fork


def test_a_fork_that_history_was_left_to_goes_alone(url: str) -> None:
    """What it had when it was forked is not its own, whoever it is kept for: its siblings keep it, and their pins."""
    with perdure.open(url) as store:
        main = store.thread("main")
        saved = [main.save({"n": number}) for number in range(8)]
        for name in ("one", "two"):
            main.fork(saved[3], name=name).save({"of": name})
        main.prune(keep=2)
        store.thread("two").pin(saved[1], name="kept")
        before = [(one.id, one.state) for one in store.thread("two").history()]
        erased = store.ops.erase("one")
        assert (erased.threads, erased.checkpoints) == (("one",), 1)
        assert sum("shares the history" in told for told in erased.may_remain) == 2
        assert [(one.id, one.state) for one in store.thread("two").history()] == before
        assert [pin.name for pin in store.thread("two").pins()] == ["kept"]
        assert [one.state["n"] for one in main.history()] == [7, 6]
        sound(store)


def test_a_fork_that_keeps_more_than_its_source_goes_alone(url: str) -> None:
    with perdure.open(url) as store:
        main = store.thread("main")
        for number in range(8):
            main.save({"n": number})
        fork = main.fork(name="fork")
        main.retention(checkpoints=2)
        fork.retention(checkpoints=4)
        assert store.ops.compact().checkpoints == 4
        assert store.ops.erase("fork").threads == ("fork",)
        assert [one.state["n"] for one in main.history()] == [7, 6, 5, 4]
        assert store.ops.compact().checkpoints == 2
        sound(store)
