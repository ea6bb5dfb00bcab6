"""Items as lines of JSON: what a namespace holds now, for other programs, and items that come from these.

A line of ours holds an item with all its options. Items of other stores (namespace, key, value) and of mem0 are read
too. Importing the same lines again changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from perdure.errors import UsageError
from perdure.memory import flows, rows
from perdure.memory.labels import Labels, labels_of, path_of, unescaped
from perdure.memory.models import microseconds
from perdure.memory.rows import ItemQuery, ItemRow, NewVersion
from perdure.storage.program import Flow
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.values.codec import decode

Form = Literal["perdure", "items", "mem0"]
_PAGE: Final = 100
_TIMES: Final = ("valid_from", "valid_to")
_TEXTS: Final = ("schema", "text", "context", "source")
_SCOPES: Final = {"user_id": "users", "agent_id": "agents", "run_id": "runs"}


class ItemLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    namespace: list[str]  # below the one that was exported
    key: str
    value: msgspec.Raw  # as it is stored
    kind: str = flows.KIND
    pinned: bool = False
    at: str | None = None  # for readers: an import learns the item anew
    valid_from: datetime | None = None
    valid_to: datetime | None = None
    expires_at: datetime | None = None
    schema: str | None = None
    text: str | None = None
    context: str | None = None
    source: str | None = None
    ttl_s: float | None = None


class _Incoming(NamedTuple):
    labels: Labels
    key: str
    value: Any
    options: dict[str, Any]
    expires: int | None = None


def export_lines(ctx: StoreContext, scope: ItemQuery, labels: Labels) -> Flow[list[str]]:
    """Return a line for each item of a scope, the oldest first."""
    stored = yield from flows.listing(ctx, scope, None, 0, None)
    return [_line(row, len(labels)) for row in reversed(stored)]


def _line(row: ItemRow, depth: int) -> str:
    content = row.content()
    more: dict[str, Any] = {name: None if (at := getattr(row, name)) is None else moment(at) for name in _TIMES}
    more |= {name: getattr(content, name) for name in _TEXTS}
    line = ItemLine(
        namespace=[*labels_of(row.path)[depth:]],
        key=unescaped(row.key),
        value=msgspec.Raw(content.value),
        kind=row.kind,
        pinned=bool(row.pinned),
        at=moment(row.at).isoformat(),
        expires_at=None if row.expires is None else moment(row.expires),
        ttl_s=content.ttl_s,
        **more,
    )
    return msgspec.json.encode(line).decode()


def import_lines(ctx: StoreContext, labels: Labels, lines: Iterable[Any], form: Form) -> Flow[int]:
    """Put the items of lines below a namespace, and return how many are new or changed. Raises UsageError.

    All lines are read before the first item is put. Items that are there with the same content stay as they are.
    """
    if form not in get_args(Form):
        raise UsageError(f"import_lines(form={form!r}): {', '.join(get_args(Form))}")
    if isinstance(lines, Mapping):  # what `get_all` of mem0 returns is one mapping
        lines = [lines]
    now, count = ctx.clock_us(), 0
    by_path: dict[str, dict[str, NewVersion]] = {}
    for number, line in enumerate(lines, 1):
        for item in _read(ctx, line, form, number):
            if item.expires is None or item.expires > now:
                draft = flows.draft_version(ctx, now, item.key, item.value, **item.options)
                draft.expires = item.expires
                by_path.setdefault(path_of((*labels, *item.labels)), {})[item.key] = draft
    if "" in by_path:
        raise UsageError("an item needs a namespace: import into one, such as users/alice")
    for path, of_path in by_path.items():
        drafts = [*of_path.values()]
        for start in range(0, len(drafts), _PAGE):
            count += yield from _put(ctx, path, drafts[start : start + _PAGE], now)
    return count


def _put(ctx: StoreContext, path: str, drafts: list[NewVersion], now: int) -> Flow[int]:
    versions = yield from flows.new_versions(ctx, drafts)
    there = yield from flows.query(ctx, rows.read_keys, [(path, version.key) for version in versions], now)
    new = [version for version, old in zip(versions, there, strict=True) if not _is_same(version, old)]
    if new:
        yield from flows.put(ctx, path, new, now, flows.write_versions)
    return len(new)


def _is_same(version: NewVersion, old: ItemRow | None) -> bool:
    if old is None:
        return False
    times = (version.valid_from, version.valid_to) == (old.valid_from, old.valid_to)
    return times and (version.body, version.kind, version.pinned) == (old.body, old.kind, bool(old.pinned))


def _read(ctx: StoreContext, line: Any, form: Form, number: int) -> list[_Incoming]:
    """Return the items of a line: a text, or what a parser or another store made of one."""
    if isinstance(line, str | bytes) and not line.strip():
        return []
    try:
        if form == "perdure":
            return [_ours(ctx, line if isinstance(line, str | bytes) else json.dumps(line))]
        said = json.loads(line) if isinstance(line, str | bytes) else line
        if form == "items":
            return [_item(said.dict() if hasattr(said, "dict") else said)]
        memories = said.get("results", said) if isinstance(said, Mapping) else said
        return [_mem0(one) for one in (memories if isinstance(memories, list) else [memories])]
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"line {number} is no item of {form} ({why:.200}): nothing was imported") from error


def _ours(ctx: StoreContext, line: str | bytes) -> _Incoming:
    said = msgspec.json.decode(line, type=ItemLine)
    options = {name: getattr(said, name) for name in ("kind", "pinned", "ttl_s", *_TIMES, *_TEXTS)}
    value = decode(bytes(said.value), ctx.codec)
    return _Incoming(tuple(said.namespace), said.key, value, options, microseconds(said.expires_at, "expires_at"))


def _item(said: Mapping[str, Any]) -> _Incoming:
    namespace = said["namespace"]
    labels = tuple(namespace.split(".")) if isinstance(namespace, str) else tuple(namespace)
    return _Incoming(labels, said["key"], dict(said["value"]), {})


def _mem0(said: Mapping[str, Any]) -> _Incoming:
    """Return a memory of mem0 as a fact of its user, its agent or its run, else of everyone."""
    text = said["memory"]
    if not isinstance(text, str):
        raise TypeError("memory is not a text")
    labels = next(((label, str(said[name])) for name, label in _SCOPES.items() if said.get(name)), ("shared",))
    more = {"metadata": dict(said["metadata"])} if said.get("metadata") else {}
    created = said.get("created_at")
    options: dict[str, Any] = {"source": "mem0", "text": text}
    if created is not None:
        when = datetime.fromisoformat(str(created))
        options["valid_from"] = when
    return _Incoming(labels, str(said["id"]), {"fact": text, **more}, options)
