"""Threads of LangGraph's that an earlier version wrote are read as they were, and a graph goes on with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from langchain_core.messages import HumanMessage
from langgraph.types import Command
from make_langgraph_store import graph_of, read

from holdfast.langgraph import HoldfastSaver

FOLDERS = sorted((Path(__file__).parent.parent / "data").glob("langgraph-v*"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of an old store's folder."""
    return Path(shutil.copytree(request.param, tmp_path / "old"))


def test_there_is_a_store_of_the_first_format() -> None:
    assert FOLDERS


def test_what_was_put_is_read(old: Path) -> None:
    with HoldfastSaver(str(old / "store.db")) as saver:
        assert read(saver) == json.loads((old / "expected.json").read_text())
        assert saver.store.verify().ok


def test_a_graph_goes_on(old: Path) -> None:
    with HoldfastSaver(str(old / "store.db")) as saver:
        graph = graph_of(saver)
        config = {"configurable": {"thread_id": "waiting"}}
        assert graph.get_state(config).next == ("inner",)
        graph.invoke(Command(resume="yes at last"), config)
        assert graph.get_state(config).next == ()
        for thread in ("answered", "forked", "copied"):
            config = {"configurable": {"thread_id": thread}}
            before = len(graph.get_state(config).values["messages"])
            graph.invoke({"messages": [HumanMessage("new", id="new")]}, config)
            assert len(graph.get_state(config).values["messages"]) > before
        saver.compact()
        assert saver.store.verify().ok
