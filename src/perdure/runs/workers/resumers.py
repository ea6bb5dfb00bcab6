"""Graphs of frameworks that a worker resumes, when a question of one of their threads is answered.

A worker knows no framework: an adapter makes a `Resumer` of a graph (`perdure.adapters.add_resumer`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from perdure.errors import UsageError
from perdure.runs.engine.runtime import runtime_of
from perdure.storage.events import event, said

if TYPE_CHECKING:
    from perdure.ops.store import Store

_log = logging.getLogger("perdure")
Await = Callable[[Coroutine[Any, Any, None]], None]  # runs a coroutine on the worker's event loop, blocking
Ended = Callable[[str], None]  # is told how a resumption ended: resumed, failed, or "" if there was none


class Resumer(Protocol):
    """A graph of a framework, with the store that its threads are in."""

    name: str
    store: Store

    def due(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the threads that are to be resumed, by name, each with its metadata."""

    def resume(self, thread: str, await_: Await) -> bool:
        """Resume a thread, blocking. Return False if it is another graph's, or not due, or another process has it."""


_makers: list[Callable[[object], Resumer | None]] = []


def add_resumer(make: Callable[[object], Resumer | None]) -> None:
    """Let workers resume the graphs of a framework. `make` returns None for an object that is no such graph."""
    _makers.append(make)


def resumer_of(graph: object) -> Resumer | None:
    """Return the resumer of a graph, or None if no adapter knows the object."""
    return next((resumer for make in _makers if (resumer := make(graph)) is not None), None)


class Resuming:
    """The graphs of a worker, and the threads that it resumes just now.

    Threads are resumed whose metadata has all pairs of `where`. `call` runs a function on a thread of the worker.
    """

    def __init__(self, store: Store, graphs: Sequence[object], where: Mapping[str, Any]) -> None:
        self._where = dict(where)
        self._resumers = [_known(store, graph) for graph in graphs]
        self._others: set[tuple[int, str]] = set()  # by resumer and thread: threads of other graphs
        self._lock = threading.Lock()
        self.active: set[str] = set()
        if self._where and not graphs:
            raise UsageError("where= selects the threads of graphs: give graphs=[…] too")

    @property
    def names(self) -> list[str]:
        return [resumer.name for resumer in self._resumers]

    def start(self, most: int, call: Callable[[Callable[[], None]], None], await_: Await, ended: Ended) -> int:
        """Begin to resume up to `most` threads that are due. Return how many."""
        started = 0
        for resumer in self._resumers:
            for thread, metadata in resumer.due().items():
                if (id(resumer), thread) in self._others or not self._where.items() <= metadata.items():
                    continue
                with self._lock:
                    if started >= most or thread in self.active:
                        continue
                    self.active.add(thread)
                started += 1
                call(partial(self._resume, resumer, thread, await_, ended))
        return started

    def _resume(self, resumer: Resumer, thread: str, await_: Await, ended: Ended) -> None:
        status = "failed"
        try:
            status = "resumed" if resumer.resume(thread, await_) else ""
        except OtherGraph as error:
            status = ""
            self._others.add((id(resumer), thread))
            _log.warning("%s", error, extra=event("thread.other_graph", thread=thread))
        except Exception as error:
            fields = event("thread.not_resumed", thread=thread, error=type(error).__name__)
            message = "the graph of thread %r raised %s; correct it, and invoke it again: its answer is kept"
            _log.warning(message, thread, said(error), extra=fields)
        finally:
            with self._lock:
                self.active.discard(thread)
            ended(status)


class OtherGraph(Exception):
    """A thread has nodes or channels that a graph does not have."""


def _known(store: Store, graph: object) -> Resumer:
    resumer = resumer_of(graph)
    if resumer is None:
        raise UsageError(f"graphs=[{graph!r:.100}]: a graph that was compiled with checkpointer=PerdureSaver(store)")
    if runtime_of(resumer.store._context) is not runtime_of(store._context):
        raise UsageError(f"graph {resumer.name!r} is in another store: Worker(saver.store, graphs=[graph])")
    return resumer
