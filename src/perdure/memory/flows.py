"""What the handle of memory does: values are encoded before a transaction, and decoded after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from perdure.errors import Conflict, OutcomeUnknown, UsageError
from perdure.memory import rows, words
from perdure.memory.labels import check_key, unescaped
from perdure.memory.models import item_of, microseconds
from perdure.memory.rows import FORGOTTEN, Content, ItemQuery, ItemRow, NewVersion
from perdure.memory.schemas import check_schema, is_old, migrated
from perdure.memory.search import searcher_of
from perdure.storage.events import event
from perdure.storage.program import Flow, Program, Progress, read, write
from perdure.threads.checks import check_limit, check_name
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.values.codec import decode, encode
from perdure.values.registry import Codec

T = TypeVar("T")
KIND = "semantic"
_log = logging.getLogger("perdure")
_ATTEMPTS = 3
_UPDATES_MAX = 100
_PAGE = 100
_PAGE_MAX = 10_000


Commit = Callable[[StoreContext, str, Sequence[NewVersion], int], Flow[list[ItemRow | None]]]


@dataclass(frozen=True, slots=True)
class Put:
    """What a caller says of an item beside its value."""

    text: str | None = None
    context: str | None = None
    kind: str = KIND
    pinned: bool = False
    ttl_s: float | None = None
    valid_from: datetime | None = None
    valid_to: datetime | None = None
    expect: int | None = None
    source: str | None = None
    supersedes: str | None = None
    expires_at: datetime | None = None
    schema: str | None = None
    links: tuple[tuple[str, str], ...] = ()


def put(
    ctx: StoreContext, path: str, items: Sequence[tuple[str, Any]], said: Put, commit: Commit
) -> Flow[list[ItemRow | None]]:
    """Put values by key, all or none; their versions come last. What the embedder cannot embed is stored without a
    vector."""
    now = ctx.clock_us()
    versions = yield from with_vectors(ctx, [version_of(ctx, key, value, said, now) for key, value in items])
    if said.supersedes is not None:
        start = microseconds(said.valid_from, "valid_from")
        closed = NewVersion(check_key(said.supersedes), None, closes_at=now if start is None else start)
        if any(version.key == closed.key for version in versions):
            raise UsageError("put(supersedes=…) names another item; a put of the same key overwrites it")
        versions = [closed, *versions]
    return (yield from commit(ctx, path, versions, now))


def with_vectors(ctx: StoreContext, versions: list[NewVersion]) -> Flow[list[NewVersion]]:
    """Versions with what the store's embedder makes of their texts."""
    embedding = searcher_of(ctx).embedding
    if embedding is None:
        return versions
    embedded = yield from embedding.embed([_embedded_text(ctx, version) for version in versions])
    if embedded.problem:
        _log.warning("stored without vectors: %s", embedded.problem, extra=event("memory.not_embedded"))
    return [
        version if vec is None else replace(version, model=embedding.id, vec=vec)
        for version, vec in zip(versions, embedded.vectors, strict=True)
    ]


def _embedded_text(ctx: StoreContext, version: NewVersion) -> str:
    content = rows.unpack(version.body or b"")
    return words.embedded_text(
        text_of(content.value, ctx.codec) if content.text is None else content.text, content.context
    )


def update(
    ctx: StoreContext, path: str, key: str, change: Callable[[Any], Any], commit: Commit
) -> Flow[list[ItemRow | None]]:
    """Put what a function makes of the value; again if another writer was faster."""
    for attempt in range(_UPDATES_MAX):
        [old] = yield from get(ctx, path, [key], None)
        item = None if old is None else item_of(old, ctx.codec)
        value = change(None if item is None else item.value)
        said = Put(expect=0) if old is None or item is None else replace(_said(old), schema=item.schema)
        try:
            return (yield from put(ctx, path, [(key, value)], said, commit))
        except Conflict:
            if attempt == _UPDATES_MAX - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _said(old: ItemRow) -> Put:
    """What was said of an item, but for its text: the next version is found by its value."""
    content = old.content()
    valid_from, valid_to, expires = (
        None if at is None else moment(at) for at in (old.valid_from, old.valid_to, old.expires)
    )
    return Put(
        context=content.context,
        kind=old.kind,
        pinned=bool(old.pinned),
        valid_from=valid_from,
        valid_to=valid_to,
        expect=old.version,
        source=content.source,
        expires_at=expires,
        ttl_s=content.ttl_s,
        schema=content.schema,
        links=content.links,
    )


def forget(ctx: StoreContext, query: ItemQuery, matches: Callable[[ItemRow], bool]) -> Flow[int]:
    """Delete the items of a scope that match. What is put meanwhile stays."""
    count = 0
    found = yield from listing(ctx, query, None, 0, matches)
    by_path: dict[str, list[ItemRow]] = {}
    for row in found:
        by_path.setdefault(row.path, []).append(row)
    for path, rows_ in by_path.items():
        for start in range(0, len(rows_), _PAGE):
            page = rows_[start : start + _PAGE]
            gone = [NewVersion(row.key, None, gone=FORGOTTEN, only=row.version) for row in page]
            done = yield from write_versions(ctx, path, gone, ctx.clock_us())
            count += sum(row is not None for row in done)
    return count


def version_of(ctx: StoreContext, key: str, value: Any, put: Put, now: int) -> NewVersion:
    """The version that a put makes. Raises Unstorable, UsageError."""
    for name in ("text", "context", "source"):
        if (found := getattr(put, name)) is not None and not isinstance(found, str):
            raise UsageError(f"put({name}=…) wants a str, not {type(found).__name__}")
    if put.ttl_s is not None and not put.ttl_s > 0:
        raise UsageError(f"put(ttl_s={put.ttl_s!r}): a number of seconds above 0")
    if put.expect is not None and (type(put.expect) is not int or put.expect < 0):
        raise UsageError(f"put(expect={put.expect!r}): the version that must be there; 0: none")
    valid_from = microseconds(put.valid_from, "valid_from")
    valid_to = microseconds(put.valid_to, "valid_to")
    if valid_from is not None and valid_to is not None and valid_from >= valid_to:
        raise UsageError("put(valid_from=…, valid_to=…): it must begin before it ends")
    encoded = encode(value, ctx.codec)
    schema = None if put.schema is None else check_schema(put.schema)
    content = Content(encoded, schema, put.text, put.context, _links(put.links), put.source, put.ttl_s)
    expires = microseconds(put.expires_at, "expires_at")
    if expires is None and put.ttl_s is not None:
        expires = now + int(put.ttl_s * 1e6)
    return NewVersion(
        check_key(key),
        rows.pack(content),
        check_name(put.kind, "kind"),
        words.pack(text_of(encoded, ctx.codec) if put.text is None else put.text, put.context),
        put.pinned,
        valid_from,
        valid_to,
        expires,
        expect=put.expect,
    )


def _links(links: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    try:
        return tuple((check_name(how, "link"), unescaped(check_key(key))) for how, key in links)
    except (TypeError, ValueError) as error:
        raise UsageError(f'put(links=…) wants pairs of a name and a key, [("works_at", "acme")]: {error}') from error


def neighbours(ctx: StoreContext, path: str, key: str, depth: int, as_of: int | None) -> Flow[list[ItemRow]]:
    """The items that a link leads to or comes from, in up to `depth` steps, the nearest first."""
    start = check_key(key)
    query = ItemQuery(path, ctx.clock_us() if as_of is None else as_of, as_of is not None)
    found = yield from listing(ctx, query, None, 0, lambda row: row.path == path)
    here = {row.key: row for row in found}
    near: dict[str, set[str]] = {}
    for row in found:
        for other in (check_key(linked) for _, linked in row.content().links):
            near.setdefault(row.key, set()).add(other)
            near.setdefault(other, set()).add(row.key)
    seen, last = {start}, [start]
    order: list[str] = []
    for _ in range(depth):
        last = sorted({other for one in last for other in near.get(one, ())} - seen)
        seen.update(last)
        order += last
    return [here[one] for one in order if one in here]


def migrate(ctx: StoreContext, query: ItemQuery, progress: Progress | None) -> Flow[int]:
    """Write the items whose schema has a newer version anew. What is put meanwhile stays."""
    count = 0
    old = yield from listing(ctx, query, None, 0, lambda row: is_old(row.content().schema))
    for done, row in enumerate(old, 1):
        content, said = row.content(), _said(row)
        assert content.schema is not None
        schema, value = migrated(content.schema, decode(content.value, ctx.codec))
        try:
            said = replace(said, schema=schema, text=content.text)
            yield from put(ctx, row.path, [(unescaped(row.key), value)], said, write_versions)
            count += 1
        except Conflict:
            pass
        if progress is not None:
            progress(done, len(old))
    return count


def text_of(encoded: bytes, codec: Codec) -> str:
    """The text that a value is found by: every text in it."""
    return " ".join(_texts(decode(encoded, codec, raw=True)))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name != "<type>":
                yield from _texts(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _texts(inner)


def write_versions(
    ctx: StoreContext, path: str, versions: Sequence[NewVersion], now: int
) -> Flow[list[ItemRow | None]]:
    """Write versions into a namespace in one transaction."""
    tenant = yield from ctx.ensure_tenant()
    op = partial(rows.write_versions, tenant, path, versions, now)
    return (yield from committed(op, partial(landed, tenant, path, versions, now)))


def committed(op: Callable[[], Program[T]], is_landed: Callable[[], Program[T | None]]) -> Flow[T]:
    """Run a write transaction. If the answer to COMMIT was lost, look first what is there."""
    for _ in range(_ATTEMPTS):
        try:
            return (yield from write(op))
        except OutcomeUnknown:
            found = yield from read(is_landed)
            if found is not None:
                return found
    return (yield from write(op))


def landed(tenant: int, path: str, versions: Sequence[NewVersion], now: int) -> Program[list[ItemRow | None] | None]:
    """The versions of a transaction whose outcome is not known, if they are there."""
    found: list[ItemRow | None] = []
    for one in versions:
        history = yield from rows.read_history(tenant, path, one.key, 2**62, last=False)
        like = [row for row in history if row.at >= now and row.body == (one.body or b"") and row.gone == one.gone]
        found.append(like[0] if like else None)
    return found if any(found) else None


def get(ctx: StoreContext, path: str, keys: Sequence[str], as_of: int | None) -> Flow[list[ItemRow | None]]:
    """The items of some keys; None where there is none."""
    places = [(path, check_key(key)) for key in keys]
    tenant = yield from ctx.tenant()
    if tenant is None or not places:
        return [None] * len(places)
    now = ctx.clock_us() if as_of is None else as_of
    return (yield from read(partial(rows.read_keys, tenant, places, now, then=as_of is not None)))


def history(ctx: StoreContext, path: str, key: str, as_of: int | None) -> Flow[list[ItemRow]]:
    """All versions of a key, the oldest first."""
    stored = check_key(key)
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    return (yield from read(partial(rows.read_history, tenant, path, stored, 2**62 if as_of is None else as_of)))


def listing(
    ctx: StoreContext, wanted: ItemQuery, limit: int | None, offset: int, matches: Callable[[ItemRow], bool] | None
) -> Flow[list[ItemRow]]:
    """Items of a namespace and of all below it, the newest first; what does not match is counted by no page."""
    most, skip = check_limit(limit), check_limit(offset)
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    return (yield from read(partial(_list, tenant, wanted, most, skip or 0, matches)))


def _list(
    tenant: int, wanted: ItemQuery, limit: int | None, offset: int, matches: Callable[[ItemRow], bool] | None
) -> Program[list[ItemRow]]:
    end = None if limit is None else offset + limit
    size = _PAGE_MAX if end is None else max(1, min(end, _PAGE_MAX))
    found: list[ItemRow] = []
    after: ItemRow | None = None
    while end is None or len(found) < end:
        page = yield from rows.read_page(tenant, wanted, after, size)
        found += page if matches is None else filter(matches, page)
        if len(page) < size:
            break
        after, size = page[-1], min(4 * max(size, _PAGE), _PAGE_MAX)
    return found[offset:end]


def namespaces(ctx: StoreContext, path: str, as_of: int | None) -> Flow[list[tuple[str, int, int]]]:
    """The namespaces at and below a path that hold items."""
    tenant = yield from ctx.tenant()
    if tenant is None:
        return []
    return (yield from read(partial(rows.read_spaces, tenant, path, ctx.clock_us() if as_of is None else as_of)))
