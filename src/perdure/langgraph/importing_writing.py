"""Putting imported checkpoints into the store: the saver's own flows, many of them in one transaction.

A flow is transactions with work between them. Here all of that runs inside one, so that a disk is waited for once and
not for each checkpoint. What the flows remember of a run that was rolled back is forgotten with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from perdure.langgraph import flows
from perdure.langgraph.checkpoints import Encoded
from perdure.langgraph.flows import Keeper
from perdure.langgraph.importing_rows import Item
from perdure.langgraph.saver import PerdureSaver
from perdure.log.cache import BaseCache
from perdure.storage.base import ConstraintFailed
from perdure.storage.program import Batch, Flow, Program, drive, write
from perdure.threads.store import CACHE_BYTES

_ITEMS_MAX = 128
_BYTES_MAX = 4 * 1024 * 1024
_ATTEMPTS = 3


class Writing:
    """Collects items and writes them. Counts what was written."""

    def __init__(self, saver: PerdureSaver) -> None:
        self._context = saver.store._context
        self._items: list[Item] = []
        self._bytes = 0
        self._at_us = 0
        self._under_way = False
        self._keeper = self._new_keeper()
        self.checkpoints = self.writes = 0

    def _new_keeper(self) -> Keeper:
        cache = BaseCache(CACHE_BYTES)
        return Keeper(replace(self._context, cache=cache, clock_us=lambda: self._at_us))

    def add(self, item: Item) -> bool:
        """Take an item. Whether it is time to flush."""
        self._items.append(item)
        self._bytes += len(item.put.text) if item.put is not None else 0
        self._bytes += sum(len(pending.text) for pending in item.writes)
        return len(self._items) >= _ITEMS_MAX or self._bytes >= _BYTES_MAX

    def flush(self) -> int:
        """Write what was collected, all or nothing. How many checkpoints that were."""
        items, self._items, self._bytes = self._items, [], 0
        if not items:
            return 0
        for attempt in range(_ATTEMPTS):
            try:
                drive(self._context.driver, self._written(items))
                break
            except ConstraintFailed as error:
                # A record's id was taken, one chance in a million: the next attempt draws others.
                if error.kind != "unique" or attempt + 1 == _ATTEMPTS:
                    raise
        put = sum(1 for item in items if item.put is not None)
        self.checkpoints += put
        self.writes += sum(len(item.writes) for item in items)
        return put

    def _written(self, items: Sequence[Item]) -> Flow[None]:
        yield from self._keeper.ctx.ensure_tenant()
        yield from write(partial(self._program, items), solo=True)
        self._under_way = False

    def _program(self, items: Sequence[Item]) -> Program[None]:
        if self._under_way:  # a run before this one was rolled back
            tenant = self._keeper.ctx._tenant
            self._keeper = self._new_keeper()
            self._keeper.ctx._tenant = tenant
        self._under_way = True
        keeper = self._keeper
        for item in items:
            if item.put is not None:
                text, mark, note, tags, self._at_us = item.put
                yield from _inside(flows.put(keeper, item.thread, Encoded(text, {}), mark, note, tags))
            if item.writes:
                yield from _inside(flows.put_pending(keeper, item.thread, item.space, item.id, item.writes))


def _inside(flow: Flow[Any]) -> Program[Any]:
    """All transactions of a flow, inside the one that is open."""
    try:
        transaction = next(flow)
        while True:
            try:
                answer = yield from _statements(transaction.op())
            except Exception as error:
                transaction = flow.throw(error)
            else:
                transaction = flow.send(answer)
    except StopIteration as stop:
        return stop.value


def _statements(program: Program[Any]) -> Program[Any]:
    """A program whose last batch is not the last one of the transaction."""
    try:
        batch = next(program)
        while True:
            batch = program.send((yield Batch(*batch.statements)))
    except StopIteration as stop:
        return stop.value
