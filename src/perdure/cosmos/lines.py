"""All lines of a tenant's threads in a Cosmos DB container: listing, copying, deleting. A thread is a partition."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import gt, itemgetter
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from perdure.cosmos.container import Container, Item
from perdure.cosmos.line import OF_LINE, CosmosContext, CosmosLine, Gone
from perdure.errors import UsageError
from perdure.log.chains import walk
from perdure.log.envelopes import needs_of, parent_of
from perdure.log.label_ids import pack_id
from perdure.threads.checks import check_name, check_namespace
from perdure.threads.line_reads import LineCheckpoint
from perdure.threads.line_saves import Encoded
from perdure.values.codec import Codec

_PARTITION_BYTES_MAX = 2048
_SEGMENTS_MAX = 4  # chains that a list holds in memory
_SEGMENT = f"SELECT * {OF_LINE} ((c.n >= @key AND c.n <= @number) OR (c.target >= @low AND c.target <= @high))"
_INDEX = "SELECT c.pk, c.ns, c.n, c.key, c.checkpoint, c.run FROM c WHERE IS_DEFINED(c.checkpoint)"
_FILTERS = {
    "pk": " AND c.pk = @pk",
    "tenant": " AND STARTSWITH(c.pk, @tenant)",
    "ns": " AND c.ns = @ns",
    "id": " AND c.checkpoint = @id",
    "before": " AND c.checkpoint < @before",
    "runs": " AND ARRAY_CONTAINS(@runs, c.run)",
}
_IDS = "SELECT c.id, c.ns, c.n, c.target, c.checkpoint, c.parts, c.part_of FROM c WHERE c.pk = @pk"


class CosmosLines:
    """The lines of all threads of a tenant."""

    def __init__(self, container: Container, tenant: str, codec: Codec, ttl_s: float | None = None) -> None:
        self.context = CosmosContext(container, codec, ttl_s)
        self._tenant = quote(check_name(tenant, "tenant"), safe="") + "/"  # its own slashes must not end it

    @property
    def codec(self) -> Codec:
        """The codec of the states."""
        return self.context.codec

    def line(self, thread: str, namespace: str, tags: object = None) -> CosmosLine:
        """Return a line of a thread. `tags` are for stores that list threads by them."""
        return CosmosLine(self.context, self._partition(thread), thread, check_namespace(namespace))

    def threads(self) -> list[str]:
        """Return the names of all threads with a checkpoint."""
        return sorted({self._thread(row) for row in self._index()})

    def history(
        self, thread: str | None = None, namespace: str | None = None, id: str | None = None, before: str | None = None
    ) -> Iterator[LineCheckpoint]:
        """Iterate over checkpoints, the greatest id first. They are read a chain at a time."""
        entries = self._index(thread, ns=namespace, id=id, before=before)
        chains: dict[tuple[str, str, int], list[Item]] = defaultdict(list)
        for entry in entries:
            chains[entry["pk"], entry["ns"], entry["key"]].append(entry)
        segments: OrderedDict[tuple[str, str, int], dict[int, LineCheckpoint]] = OrderedDict()
        for entry in entries:
            chain = entry["pk"], entry["ns"], entry["key"]
            if chain not in segments:
                segments[chain] = self._segment(chains[chain])
            segments.move_to_end(chain)
            if (checkpoint := segments[chain].get(entry["n"])) is not None:
                yield checkpoint
            while len(segments) > _SEGMENTS_MAX:
                segments.popitem(last=False)

    def delete_thread(self, thread: str) -> None:
        """Delete all items of a thread. A late writer of its own line is refused, and then begins the line anew."""
        line = self.line(thread, "")
        if not any("checkpoint" in row or "target" in row for row in self._container.query(_IDS, line.partition)):
            return
        while not line.end(tail := line.read_tail()):
            pass  # another writer was faster
        items = self._container.query(_IDS, line.partition)
        rows = [row for row in items if row.get("ns") or row.get("n", -1) <= tail.number]
        for namespace in {row.get("ns", "") for row in rows}:
            self.context.tails.drop((line.partition, namespace))
        self._delete(line.partition, rows)

    def prune(self, thread: str) -> None:
        """Keep the newest checkpoint of each line, and those that it is rebuilt from."""
        for namespace in sorted({row["ns"] for row in self._index(thread)}):
            newest = self.line(thread, namespace).load()
            if newest is not None:
                self._drop(thread, namespace, partial(gt, newest.id))

    def delete_runs(self, runs: Sequence[str]) -> None:
        """Delete the checkpoints that runs saved, except those that a later one is rebuilt from."""
        doomed: dict[tuple[str, str], set[str]] = defaultdict(set)
        for row in self._index(runs=list(runs)) if runs else ():
            doomed[self._thread(row), row["ns"]].add(row["checkpoint"])
        for (thread, namespace), ids in doomed.items():
            self._drop(thread, namespace, ids.__contains__)

    def _drop(self, thread: str, namespace: str, is_doomed: Callable[[str], bool]) -> None:
        """Save the checkpoints to keep anew, as a chain of their own, then delete all items before it.

        That chain begins with the number after the end. So no writer can build on an item that is to be deleted.
        """
        line = self.line(thread, namespace)
        while True:
            tail = line.read_tail()
            rows = sorted(self._index(thread, ns=namespace), key=itemgetter("n"))
            kept_ids = kept_of(self.history(thread, namespace), is_doomed)
            kept = [row for row in rows if row["checkpoint"] in kept_ids]
            dropped = {row["checkpoint"] for row in rows} - kept_ids
            if not dropped:
                return
            states = ((row, one) for row in kept if (one := line.load(row["checkpoint"])) is not None)
            first = next(states, None)
            if first is None and line.end(tail):
                break
            newest = max((row["checkpoint"] for row in kept), default="")
            if first is not None and line.append(tail, *_state(*first), anew=newest) is not None:
                break
        for row, one in states:
            line.save(Encoded(one.text), id=one.id, run=row.get("run"))
        items = self._container.query(_IDS, line.partition)
        gone = [row for row in items if row.get("ns") == namespace and _is_gone(row, tail.number, dropped)]
        tokens = {row["parts"] for row in gone if "parts" in row}
        self._delete(line.partition, [*gone, *(row for row in items if row.get("part_of") in tokens)])

    def _delete(self, partition: str, rows: Iterable[Item]) -> None:
        """Delete items: checkpoints first, and the oldest of them first."""
        for row in sorted(rows, key=lambda row: int(row.get("n", 1 << 60))):
            self._container.delete(row["id"], partition)

    @property
    def _container(self) -> Container:
        return self.context.container

    def _partition(self, thread: str) -> str:
        partition = self._tenant + check_name(thread)
        if len(partition.encode()) > _PARTITION_BYTES_MAX:
            raise UsageError(f"tenant and thread have at most {_PARTITION_BYTES_MAX} bytes: {thread[:60]!r}…")
        return partition

    def _thread(self, row: Item) -> str:
        return str(row["pk"]).removeprefix(self._tenant)

    def _index(self, thread: str | None = None, **filters: Any) -> list[Item]:
        """Return the numbers of checkpoints, the greatest id first. If an id was saved twice, the last one counts."""
        where = {"tenant": self._tenant} if thread is None else {"pk": self._partition(thread)}
        named = where | {name: value for name, value in filters.items() if value is not None}
        text = _INDEX + "".join(_FILTERS[name] for name in named)
        rows = self._container.query(text, named.pop("pk", None), **named)
        last = {(row["pk"], row["ns"], row["checkpoint"]): row for row in sorted(rows, key=itemgetter("n"))}
        return sorted(last.values(), key=itemgetter("checkpoint", "pk", "ns"), reverse=True)

    def _segment(self, entries: Sequence[Item]) -> dict[int, LineCheckpoint]:
        """Read the checkpoints of one chain, by number. Return none of them if the chain is gone."""
        key, line = entries[0]["key"], self.line(self._thread(entries[0]), entries[0]["ns"])
        ids, number = [entry["checkpoint"] for entry in entries], max(entry["n"] for entry in entries)
        limits = {"key": key, "number": number, "low": min(ids), "high": max(ids)}
        rows = self._container.query(_SEGMENT, line.partition, ns=line.namespace, **limits)
        try:
            links = line.links(rows, key, number)
        except Gone:
            return {}
        return {link.number: line.checkpoint(link.label, text, rows) for link, text in walk(links)}


def _state(row: Item, one: LineCheckpoint) -> tuple[str, bytes, str | None]:
    return one.id, one.text, row.get("run")


def _is_gone(row: Item, last: int, dropped: set[str]) -> bool:
    return row["n"] <= last if "n" in row else row.get("target") in dropped


class _Summary(NamedTuple):
    """What decides whether a checkpoint is needed: it is rebuilt from its ancestors if it `lacks` some of its keys."""

    id: str
    parent: bytes | None
    lacks: set[str]
    keys: set[str]


def kept_of(checkpoints: Iterable[LineCheckpoint], is_doomed: Callable[[str], bool]) -> set[str]:
    """Return the ids of the checkpoints that are not doomed, and of those that they are rebuilt from."""
    known = {pack_id(one.id): _summary(one) for one in checkpoints}
    kept = {one.id for one in known.values() if not is_doomed(one.id)}
    for one in [one for one in known.values() if one.id in kept]:
        lacks, parent = one.lacks, one.parent
        for _ in known:  # at most: damaged pointers may form a circle
            if not lacks or parent not in known:
                break
            ancestor = known[parent]
            kept.add(ancestor.id)
            lacks, parent = lacks - ancestor.keys, ancestor.parent
    return kept


def _summary(one: LineCheckpoint) -> _Summary:
    state = orjson.loads(one.text)
    return _Summary(one.id, parent_of(state), set(needs_of(state)), set(state))
