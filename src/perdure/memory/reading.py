"""Reading of many items: those that this code cannot read, because newer code wrote them, are left out and reported.

A single item that is read by its key raises instead (`models.item_of`). A damaged item always raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from perdure.errors import UnknownType
from perdure.memory.filters import UNREAD, Condition, Filter
from perdure.memory.models import Item, indexed, item_of, value_of
from perdure.memory.rows import ItemRow
from perdure.memory.schemas import migrations
from perdure.memory.words import IndexText
from perdure.storage.events import event
from perdure.storage.program import Flow
from perdure.values.registry import Codec

T = TypeVar("T")
_log = logging.getLogger("perdure")


class ItemReader:
    """Decides which rows of a listing or search match, and keeps the items that it decoded for that."""

    def __init__(self, codec: Codec, *, raw: bool = False, matches: Callable[[Any], bool] | None = None) -> None:
        self._codec, self._raw, self._matches = codec, raw, matches
        self.filter = matches if isinstance(matches, Filter) else None
        self.conditions = () if self.filter is None else tuple(self.filter.conditions())
        self._items: dict[int, Item] = {}
        self._unreadable: dict[int, str] = {}  # by the number of the version: its schema, or the name of a type
        self._reported = 0

    def __call__(self, row: ItemRow) -> bool:
        """Return whether the item can be read and matches."""
        try:
            item = item_of(row, self._codec, raw=self._raw)
        except UnknownType as error:
            self._unreadable[row.id] = error.type_name
            return False
        if self._matches is not None and not self._matches(item.value):
            return False
        self._items[row.id] = item
        return True

    def column(self, condition: Condition) -> Hashable:
        """Return the key of the column of the field that a condition tests, as this reader reads values."""
        return condition.names, self._raw, migrations()

    def value(self, row: ItemRow) -> Any:
        """Return the value of an item, or UNREAD."""
        try:
            return value_of(row, self._codec, raw=self._raw)
        except Exception:  # if the item is a hit, reading it raises
            return UNREAD

    def indexed(self, row: ItemRow) -> IndexText:
        """Return what an item is found by."""
        return indexed(row.content(), row.key, self._codec)

    def items(self, rows: Iterable[ItemRow]) -> list[Item]:
        """Return the items of the rows that can be read and match. Warn of those that cannot be read."""
        items = [self._items[row.id] for row in rows if row.id in self._items or self(row)]
        self.report()
        return items

    def shown(self, flow: Flow[list[ItemRow]]) -> Flow[list[Item]]:
        """Return the items of the rows that a flow returns."""
        return self.items((yield from flow))

    def reported(self, flow: Flow[T]) -> Flow[T]:
        """Run a flow, and warn of items that it left out."""
        result = yield from flow
        self.report()
        return result

    def report(self) -> None:
        """Warn of items that were left out since the last report. The text holds no value, key or label."""
        if (count := len(self._unreadable)) > self._reported:
            self._reported, names = count, sorted(set(self._unreadable.values()))
            _log.warning(
                "%d items of memory were left out, because this code cannot read them (%s): deploy the code that wrote "
                "them, or register its types and migrations; memory.unreadable() lists them",
                count,
                ", ".join(names[:5]),
                extra=event("memory.unreadable", count=count, types=names[:5]),
            )
