"""Plain data that memory returns: items, namespaces and statistics. Also the text by which an item is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from perdure.memory.labels import Labels, labels_of, unescaped
from perdure.memory.rows import Content, ItemRow, unpack
from perdure.memory.schemas import is_old, migrated
from perdure.memory.words import IndexText
from perdure.threads import checks
from perdure.threads.models import moment
from perdure.values.builtin_types import EncodedText
from perdure.values.codec import decode, encode
from perdure.values.plain import may_hold_tags
from perdure.values.registry import Codec, register


@dataclass(frozen=True, slots=True)
class Item:
    """One version of an item. In a deletion `value` is None, and `gone` is the reason: "deleted", "cap" …"""

    namespace: Labels
    key: str
    value: Any
    version: int
    kind: str
    pinned: bool
    created_at: datetime
    at: datetime
    """When this version was learned."""
    ended_at: datetime | None
    """When it was replaced or deleted."""
    valid_from: datetime | None
    valid_to: datetime | None
    expires_at: datetime | None
    gone: str | None
    size_bytes: int
    schema: str | None = None
    text: str | None = None
    context: str | None = None
    source: str | None = None
    ttl_s: float | None = None
    score: float | None = None
    explain: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace that holds items, with their number and the bytes of their bodies."""

    labels: Labels
    items: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """How much a namespace and all below it hold.

    `versions` counts all stored versions, `embedded` those with a vector of the store's embedder.
    """

    namespaces: int
    items: int
    size_bytes: int
    versions: int
    embedded: int


_TIMES = ("created_at", "at", "ended_at", "valid_from", "valid_to", "expires_at")


def _dump(item: Item) -> dict[str, Any]:
    """Return an item's fields that are not None, with times as text, so that they encode as plain values."""
    fields = {name: value for name in Item.__slots__ if (value := getattr(item, name)) is not None}
    fields["namespace"] = [*item.namespace]
    for name in _TIMES:
        if name in fields:
            fields[name] = fields[name].isoformat()
    return fields


def _load(fields: dict[str, Any]) -> Item:
    times = {name: datetime.fromisoformat(fields[name]) if name in fields else None for name in _TIMES}
    return Item(**{**_ABSENT, **fields, **times, "namespace": tuple(fields["namespace"])})


_ABSENT = {"value": None, "gone": None}
register(Item, name="perdure.memory.Item", dump=_dump, load=_load)  # a durable function may return it
for _class in (Namespace, MemoryStats):  # these too
    register(_class, name=f"perdure.memory.{_class.__name__}")


def item_of(row: ItemRow, codec: Codec, *, raw: bool = False) -> Item:
    """Return the item of a row. Raises Damaged and UnknownType.

    With `raw`, instances of classes are dicts, and the value is not migrated.
    """
    said: dict[str, Any] = {"value": None}
    if row.gone is None:
        content = row.content()
        said = content._asdict()
        try:
            said["schema"], said["value"] = _read(content, codec, raw)
        except Exception as error:  # also those of migrations: the note says which item it was
            error.add_note(f"while reading the item {unescaped(row.key)!r} of memory {'/'.join(labels_of(row.path))}")
            raise
    return _item(row, said)


def value_of(row: ItemRow, codec: Codec, *, raw: bool = False) -> Any:
    """Return the value of a row, as `item_of` does."""
    return _read(row.content(), codec, raw)[1]


def _read(content: Content, codec: Codec, raw: bool) -> tuple[str | None, Any]:
    """Return the schema and the value of a content, both migrated unless `raw`."""
    value = decode(content.value, codec, raw=raw)
    return (content.schema, value) if content.schema is None or raw else migrated(content.schema, value)


def encoded_content(body: bytes, codec: Codec) -> dict[str, Any]:
    """Return the fields of a body in the newest version of its schema. A value that is not plain stays text."""
    said = unpack(body)._asdict()
    if is_old(said["schema"]):
        said["schema"], value = migrated(said["schema"], decode(said["value"], codec))
        said["value"] = encode(value, codec)
    text = said["value"]
    return {**said, "value": EncodedText(text) if may_hold_tags(text) else decode(text, codec)}


def encoded_items(written: Sequence[ItemRow | None], contents: Mapping[str, dict[str, Any]], codec: Codec) -> bytes:
    """Return the encoded items of the written rows. `contents` has the result of `encoded_content` by key.

    The content of a value that has merged is known only now. It runs no code of the user's, so that a transaction can
    call it.
    """

    def content_of(row: ItemRow) -> dict[str, Any]:
        if row.gone is not None:
            return {"value": None}
        return contents[row.key] if row.key in contents else encoded_content(row.body, codec)

    return encode([_item(row, content_of(row)) for row in written if row is not None], codec)


def _item(row: ItemRow, said: dict[str, Any]) -> Item:
    return Item(
        namespace=labels_of(row.path),
        key=unescaped(row.key),
        version=row.version,
        kind=row.kind,
        pinned=bool(row.pinned),
        created_at=moment(row.created_at),
        at=moment(row.at),
        ended_at=_moment(row.ended_at),
        valid_from=_moment(row.valid_from),
        valid_to=_moment(row.valid_to),
        expires_at=_moment(row.expires),
        gone=row.gone,
        size_bytes=row.bytes,
        **said,
    )


def _moment(at_us: int | None) -> datetime | None:
    return None if at_us is None else moment(at_us)


def microseconds(when: datetime | None, option: str) -> int | None:
    """Return a time as it is stored, or None for None. A naive datetime is local time. Raises UsageError."""
    return None if when is None else checks.microseconds(when, option)


def indexed(content: Content, key: str, codec: Codec) -> IndexText:
    """Return what an item is found by: its own text, or what its value and its key (escaped) say."""
    if content.text is not None:
        return IndexText(content.text, content.context)
    texts: list[str] = []
    labels: list[str] = []
    _collect(decode(content.value, codec, raw=True), texts, labels)
    return IndexText(" ".join(texts), content.context, " ".join(dict.fromkeys(labels)), unescaped(key))


def _collect(value: object, texts: list[str], labels: list[str]) -> None:
    """Add the texts of a value, and its labels: names of fields, and numbers."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        labels.append(str(value))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            _collect(inner, texts, labels)
    elif isinstance(value, (dict, Mapping)):
        for name, inner in value.items():
            if name != "<type>":
                labels.append(str(name))
                _collect(inner, texts, labels)
