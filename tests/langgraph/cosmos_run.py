"""What the tests of kills on Cosmos DB run: a graph whose process dies, and operations that stop, at a request."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from azure.cosmos import CosmosClient
from bench.cosmos_server import client_of, new_database
from crash_run import TASKS, application

from perdure.cosmos import CosmosSaver
from perdure.cosmos.container import Container, Item
from perdure.testing.processes import Say


class DyingContainer(Container):
    """Kills its process at a request that writes: before it is sent, or after it was answered."""

    die_at = 0  # the number of that request; 0: none
    is_after = False

    def __init__(self, client: CosmosClient, database: str) -> None:
        super().__init__(client, database, "threads")
        self.requests = itertools.count(1)  # of all threads

    def create(self, item: Item, data: bytes = b"", *, replaces: bool = False) -> bool:
        is_last = next(self.requests) == self.die_at
        if is_last and not self.is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        done = super().create(item, data, replaces=replaces)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return done


class StruckContainer(Container):
    """Raises `Struck` instead of a request that writes, and at all after it, as a process that died would send none."""

    left = 0

    class Struck(BaseException):
        """The process has died."""

    @classmethod
    def saver(cls, client: CosmosClient, of: StruckContainer | None = None) -> tuple[CosmosSaver, StruckContainer]:
        """A saver on a new container, or on that of another one."""
        items = cls(client, of._database if of is not None else new_database(), "threads")
        if of is None:
            items.setup()
        saver = CosmosSaver(client)
        saver._lines.context.container = items
        return saver, items

    def create(self, item: Item, data: bytes = b"", *, replaces: bool = False) -> bool:
        self._strike()
        return super().create(item, data, replaces=replaces)

    def delete(self, id: str, partition: str) -> None:
        self._strike()
        super().delete(id, partition)

    def _strike(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.Struck


def child(say: Say, url: str, database: str, thread: str, log: str, die_at: int, is_after: bool) -> None:
    """Begin the run, or go on with it; say its result, and how many requests it took."""
    container = DyingContainer(client_of(url), database)
    container.die_at, container.is_after = die_at, is_after
    saver = CosmosSaver(client_of(url), database)
    saver._lines.context.container = container
    config: Any = {"configurable": {"thread_id": thread}, "max_concurrency": 4 * TASKS}
    begun = saver.get_tuple(config) is not None
    run = application(saver, log, 0, False)
    say([run.invoke(None if begun else TASKS, config, durability="sync"), next(container.requests) - 1])
