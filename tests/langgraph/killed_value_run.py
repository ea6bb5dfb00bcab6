"""A graph whose process is killed before or after an object of its second node is written: URL, folder, point."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, TypedDict

from langgraph.graph import START, StateGraph

import perdure
from perdure.langgraph import PerdureSaver


class State(TypedDict, total=False):
    one: perdure.External[bytes]
    two: perdure.External[bytes]


def first(state: State) -> State:
    return {"one": perdure.External(b"1" * 1000)}


def second(state: State) -> State:
    armed.append(True)
    return {"two": perdure.External(b"2" * len(state["one"].get()))}


armed: list[bool] = []
url, folder, point = sys.argv[1:]


class Killing:
    def __init__(self, objects: Any) -> None:
        self.objects, self.get, self.delete = objects, objects.get, objects.delete

    def put(self, name: str, data: bytes) -> None:
        if point != "before" or not armed:
            self.objects.put(name, data)
        if point and armed:
            os.kill(os.getpid(), signal.SIGKILL)


with perdure.open(url, objects=folder) as store:
    store._context.objects = Killing(store._context.objects)
    builder = StateGraph(State).add_node("first", first).add_node("second", second)
    app = builder.add_edge(START, "first").add_edge("first", "second").compile(checkpointer=PerdureSaver(store))
    config: Any = {"configurable": {"thread_id": "t"}}
    state = app.invoke(None if app.get_state(config).values or app.get_state(config).next else {}, config)
    print(len(state["one"].get()) + len(state["two"].get()))
