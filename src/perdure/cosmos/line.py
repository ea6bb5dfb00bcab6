"""One line of a thread as items of a Cosmos DB container: what `threads.lines` is on SQL, for a checkpointer.

A checkpoint is an item whose id is its number in the line, and whose body is a link of a chain (`log.chains`). Creating
the item is the compare-and-swap: of two writers of one number one is refused, reads the new end, and continues there.
Deletions remove the oldest items first. So a chain without its start was deleted or has expired, and counts as gone.
"""

from __future__ import annotations

import os
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import ceil

import msgspec
from blake3 import blake3

from perdure.cosmos.container import Container, Item
from perdure.errors import Busy, Conflict, Damaged, Undecodable
from perdure.log.cache import Base, TenantCache
from perdure.log.chains import ChainLink, extend, pack, read_tip, unpack
from perdure.log.pending import Write
from perdure.log.records import SALT_BYTES
from perdure.threads.line_reads import LineCheckpoint
from perdure.threads.line_saves import Encoded
from perdure.values.codec import Codec
from perdure.values.dictionary import compress_alone, decompress_alone

_CACHE_BYTES = 64 << 20
_TRIES = 100  # of a save beside other writers: each time one of them was faster
_READS = 3  # of a load beside a deletion
_END_TTL_S = 86_400  # how long a deleted thread refuses late writers
# Links live half as long again as their checkpoints must: a chain ends before its start expires.
_TTL_ROOM = 1.5
OF_LINE = "FROM c WHERE c.pk = @pk AND c.ns = @ns AND"
_END = f"SELECT TOP 1 c.n, c.key, c.checkpoint, c.newest {OF_LINE} c.n >= 0 ORDER BY c.n DESC"
_CHAIN = f"SELECT * {OF_LINE} (c.n >= @key OR c.target >= @newest)"
_NEWS = f"SELECT * {OF_LINE} (c.n > @number OR c.target >= @newest)"
_ONE = f"SELECT * {OF_LINE} (c.checkpoint = @id OR c.target = @id)"
_LINKS = f"SELECT * {OF_LINE} c.n >= @key AND c.n < @number"
_BY_ID = f"SELECT * {OF_LINE} c.id = @id"
_pack_writes = msgspec.msgpack.Encoder().encode
_unpack_writes = msgspec.msgpack.Decoder(list[Write]).decode


class Gone(Exception):
    """A checkpoint whose chain has no start: it was deleted or has expired, perhaps a moment ago."""


@dataclass(slots=True, eq=False)
class Tail:
    """The end of a line as this process last saw it."""

    number: int = -1
    base: Base | None = None  # of the next link; None: there is no checkpoint
    newest: str = ""  # the greatest id of the line
    expires_at: float | None = None  # when its chain expires, in microseconds; None: never

    @property
    def label(self) -> str | None:
        return None if self.base is None else self.base.record.note

    @property
    def weight_bytes(self) -> int:
        return 1024 if self.base is None else self.base.weight_bytes


def _now_us() -> int:
    return time.time_ns() // 1000


@dataclass(slots=True, eq=False)
class CosmosContext:
    """What all lines of a saver share."""

    container: Container
    codec: Codec
    ttl_s: float | None = None
    clock_us: Callable[[], int] = _now_us
    tails: TenantCache[tuple[str, str], Tail] = field(default_factory=lambda: TenantCache(_CACHE_BYTES))


class CosmosLine:
    """One line of a thread: checkpoints under the caller's ids."""

    def __init__(self, context: CosmosContext, partition: str, thread: str, namespace: str) -> None:
        self._context, self._container = context, context.container
        self.partition, self.thread, self.namespace = partition, thread, namespace
        self._key = partition, namespace
        self._prefix = _short(namespace) + "." if namespace else ""

    # --- saving

    def save(
        self,
        state: Encoded,
        *,
        id: str,
        parent: str | None = None,
        run: str | None = None,
        exclusive: bool = False,
        allowed: Collection[str] = (),
        forks: bool = False,
        note: str | None = None,
    ) -> None:
        """Save a state under an id, as `threads.lines` does. `note` is for stores that show one.

        With `exclusive`, raise Conflict unless the parent is the newest or `allowed`, or the save `forks`. Lines of
        subgraphs are written by the run of the thread's own line.
        """
        exclusive = exclusive and not forks and not self.namespace
        for _ in range(_TRIES):
            tail = self._context.tails.get(self._key) or self.read_tail()
            if exclusive and (parent or "") not in (tail.newest, *allowed):
                tail = self.read_tail()  # the cached one may be old
                if (parent or "") != tail.newest:
                    raise Conflict(
                        f"thread {self.thread!r} has moved on: its newest checkpoint is {tail.newest or None}, not "
                        f"{parent}. Nothing was written: load it, and run again",
                        expected=parent,
                        actual=tail.newest or None,
                    )
            after = self.append(tail, id, state.text, run)
            if after is not None:
                if after.base is not None:
                    after.base.know(state.parts, state.weight_bytes)
                self._context.tails.put(self._key, after)
                return
        raise Busy(f"thread {self.thread!r}: other writers were faster {_TRIES} times; nothing was written, try again")

    def append(self, tail: Tail, id: str, text: bytes, run: str | None = None, *, anew: str = "") -> Tail | None:
        """Create the item after the tail. Return the new tail, or None if another writer was faster.

        `anew` begins a chain that nothing before it is part of; it is the greatest id of the line from then on.
        """
        context, number, at = self._context, tail.number + 1, self._context.clock_us()
        whole = bool(anew) or not self._lives_on(tail, at)
        context.tails.drop(self._key)  # its encoder is used up, whatever the outcome
        link, base = extend(tail.base, text, id, number, at, os.urandom(SALT_BYTES), whole=whole)
        expires_at = tail.expires_at
        if link.key == number:
            expires_at = None if context.ttl_s is None else at + _TTL_ROOM * context.ttl_s * 1e6
        after = Tail(number, base, anew or max(tail.newest, id), expires_at)
        item = self._item(number, link.key) | {"checkpoint": id}
        if after.newest != id:
            item["newest"] = after.newest
        if run is not None:
            item["run"] = run
        if expires_at is not None:  # the whole chain expires together
            item["ttl"] = max(1, ceil((expires_at - at) / 1e6))
        if self._container.create(item, pack(link)):
            return after
        # An answer may be lost, and the request sent again: then it is our own item that is there.
        return after if self._stored(item) == item else None

    def _lives_on(self, tail: Tail, at: int) -> bool:
        """Return whether the chain lives as long as a checkpoint that is saved now must."""
        if tail.expires_at is None or self._context.ttl_s is None:
            return tail.expires_at is self._context.ttl_s  # both never
        return tail.expires_at >= at + self._context.ttl_s * 1e6

    def end(self, tail: Tail) -> bool:
        """Create an item without a checkpoint after the tail, so that no writer builds on what is before it."""
        self._context.tails.drop(self._key)
        return self._container.create(self._item(tail.number + 1, tail.number + 1) | {"ttl": _END_TTL_S})

    def encoded(self, id: str) -> Encoded | None:
        """Return the text of the line's end if it has this id and is in memory, else None."""
        tail = self._context.tails.get(self._key)
        if tail is None or tail.base is None or tail.label != id or not tail.base.parts:
            return None
        return Encoded(tail.base.data, tail.base.parts)

    def _item(self, number: int, key: int) -> Item:
        return {
            "id": f"{self._prefix}{number:012}",
            "pk": self.partition,
            "ns": self.namespace,
            "n": number,
            "key": key,
        }

    def _stored(self, item: Item) -> Item | None:
        """Return what is stored under an item's id, of the fields that it has."""
        rows = self._container.query(_BY_ID, self.partition, ns=self.namespace, id=item["id"])
        return {name: rows[0].get(name) for name in item} if rows else None

    # --- loading

    def load(self, id: str | None = None) -> LineCheckpoint | None:
        """Load a checkpoint by its id, or the newest. Return None if there is none, or it has expired."""
        for _ in range(_READS):
            try:
                return self._load_newest() if id is None else self._load_one(id)
            except Gone:
                self._context.tails.drop(self._key)
        return None

    def _load_newest(self) -> LineCheckpoint | None:
        tail = self._context.tails.get(self._key)
        if tail is None:
            tail, rows = self._read_end(self._query(_END))
        else:
            rows = self._query(_NEWS, number=tail.number, newest=tail.newest)
            if news := [row for row in rows if "n" in row]:
                tail, rows = self._read_end(news)
        if not tail.newest:
            return None
        if tail.base is None or tail.label != tail.newest:
            return self._load_one(tail.newest)
        return self.checkpoint(tail.newest, tail.base.data, rows, tail.base)

    def _load_one(self, id: str) -> LineCheckpoint | None:
        rows = self._query(_ONE, id=id)
        entries = [row for row in rows if "n" in row]
        if not entries:
            return None
        entry, tail = max(entries, key=_number), self._context.tails.get(self._key)
        if tail is not None and tail.base is not None and tail.number == entry["n"] and tail.label == id:
            return self.checkpoint(id, tail.base.data, rows, tail.base)
        earlier: list[Item] = []
        if entry["key"] != entry["n"]:
            earlier = self._query(_LINKS, key=entry["key"], number=entry["n"])
        base = read_tip(self.links([*earlier, entry], entry["key"], entry["n"]))
        return self.checkpoint(id, base.data, rows)

    def read_tail(self) -> Tail:
        """Read the end of the line. If it cannot be read, the next link begins a new chain."""
        for _ in range(_READS):
            try:
                return self._read_end(self._query(_END))[0]
            except Gone:
                continue
            except Damaged:
                break
        ends = self._query(_END)
        return Tail(ends[0]["n"], None, ends[0].get("newest") or ends[0].get("checkpoint", "")) if ends else Tail()

    def _read_end(self, ends: Sequence[Item]) -> tuple[Tail, list[Item]]:
        """Return the tail, and the items of its chain and of the writes on the newest checkpoint."""
        tail, rows = Tail(), list[Item]()
        if ends:
            end = max(ends, key=_number)
            tail = Tail(end["n"])
            if "checkpoint" in end:
                rows = self._query(_CHAIN, key=end["key"], newest=end.get("newest", end["checkpoint"]))
                end = max((row for row in rows if "checkpoint" in row), key=_number, default=end)
                links = self.links(rows, end["key"], end["n"])
                # Its seconds were rounded up.
                expires_at = links[-1].at + (end["ttl"] - 1) * 1e6 if "ttl" in end else None
                tail = Tail(end["n"], read_tip(links), str(end.get("newest", end["checkpoint"])), expires_at)
        self._context.tails.put(self._key, tail)
        return tail, rows

    def links(self, rows: Sequence[Item], key: int, number: int) -> list[ChainLink]:
        """Return the links of a chain, from its start to a number. Raises Gone if the start is not among them."""
        entries = sorted((row for row in rows if "checkpoint" in row and key <= row["n"] <= number), key=_number)
        if not entries or entries[0]["n"] != key:
            raise Gone
        links = [_link(self._container, entry) for entry in entries]
        if len(links) != number - key + 1:
            raise Damaged(f"thread {self.thread!r}: items are missing between {key} and {number}")
        return links

    def checkpoint(self, id: str, text: bytes, rows: Sequence[Item], base: Base | None = None) -> LineCheckpoint:
        """Return a checkpoint with the writes on it that are among the items."""
        writes = self._writes([row for row in rows if row.get("target") == id])
        parts = {} if base is None else base.parts
        return LineCheckpoint(self.thread, self.namespace, id, text, writes, self._context.codec, False, parts)

    def _query(self, text: str, **parameters: object) -> list[Item]:
        return self._container.query(text, self.partition, ns=self.namespace, **parameters)

    # --- pending writes

    def attach_all(self, id: str, writes: Sequence[Write]) -> None:
        """Attach values to a checkpoint, even before its save. The first value of a task's index stays.

        A negative index replaces. The values of one call are one item, in one request.
        """
        first = [write for write in writes if write.idx >= 0]
        for write in writes:
            if write.idx < 0:
                self._attach(id, [write], str(write.idx), replaces=True)
        if first and not self._attach(id, first, ""):
            stored = self._writes([row for row in self._query(_ONE, id=id) if row.get("target") == id])
            known = {write[:2] for write in stored}
            for write in first:
                if write[:2] not in known:
                    self._attach(id, [write], str(write.idx))

    def _attach(self, id: str, writes: Sequence[Write], part: str, *, replaces: bool = False) -> bool:
        name = _short("\0".join((self.namespace, id, writes[0].task, part)))
        item: Item = {"id": f"w.{name}", "pk": self.partition, "ns": self.namespace, "target": id}
        if self._context.ttl_s is not None:
            item["ttl"] = ceil(_TTL_ROOM * self._context.ttl_s)
        return self._container.create(item, compress_alone(_pack_writes(writes)), replaces=replaces)

    def _writes(self, rows: Sequence[Item]) -> list[Write]:
        """Return the writes of items, in the order in which a run applies them. Raises Damaged."""
        try:
            writes = [one for row in rows for one in _unpack_writes(decompress_alone(self._container.data(row)))]
        except (msgspec.MsgspecError, Undecodable) as error:
            raise Damaged(f"thread {self.thread!r}: a pending write is damaged") from error
        return sorted({(one.task, one.idx): one for one in writes}.values(), key=lambda one: (one.path, *one[:2]))


def _link(container: Container, entry: Item) -> ChainLink:
    try:
        link = unpack(container.data(entry))
    except Undecodable as error:
        raise Damaged(f"checkpoint {entry['checkpoint']} is damaged: {error}") from error
    if (link.number, link.key, link.label) != (entry["n"], entry["key"], entry["checkpoint"]):
        raise Damaged(f"checkpoint {entry['checkpoint']} is damaged: its item holds another one")
    return link


def _number(row: Item) -> int:
    return int(row["n"])


def _short(text: str) -> str:
    """Return a name that an item's id may hold, whatever the text is."""
    return urlsafe_b64encode(blake3(text.encode("utf-8", "surrogatepass")).digest(16)).decode().rstrip("=")
