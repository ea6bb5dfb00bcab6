"""The operations behind the `Memory` handle. Values are encoded before a transaction and decoded after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from perdure.errors import Conflict, NotFound, OutcomeUnknown, UsageError
from perdure.memory import rows
from perdure.memory.hooks import ask_outside
from perdure.memory.labels import above, check_key, check_str, labels_of
from perdure.memory.merging import Merge
from perdure.memory.models import Item, MemoryStats, Namespace, indexed, item_of, microseconds
from perdure.memory.policies import SECONDS_MAX, check_number
from perdure.memory.reading import ItemReader
from perdure.memory.rows import FORGOTTEN, Content, ItemQuery, ItemRow, NewVersion
from perdure.memory.schemas import check_schema, is_old, steps_from
from perdure.memory.scopes import searcher_of
from perdure.memory.search import Matches
from perdure.storage.events import event
from perdure.storage.program import Flow, Program, Progress, aside, read, write
from perdure.threads.checks import check_limit, check_name
from perdure.threads.context import StoreContext
from perdure.values.codec import encode
from perdure.values.crdts import Mergeable

KIND = "semantic"
SUMMARY = "summary"  # key and kind of the item that a `summarize` hook returns
_log = logging.getLogger("perdure")
_ATTEMPTS = 3
_UPDATES_MAX = 100
_SUMMARIES_MAX = 10
_PAGE = 100
_PAGE_MAX = 10_000
_ASIDE_ITEMS, _ASIDE_BYTES = 100, 32_000  # above this, an async flow indexes or decodes on a thread

T = TypeVar("T")
Written = list[ItemRow | None]
Commit = Callable[[StoreContext, str, Sequence[NewVersion], int], Flow[Written]]
_Summary = tuple[Sequence[NewVersion], rows.Seen | None]  # the hook's result, and the versions that it has seen
SummaryOf = Callable[[str], _Summary]


def query(ctx: StoreContext, program: Callable[..., Program[T]], *args: Any) -> Flow[T]:
    """Run a read program for the store's tenant. A tenant without data has no number yet, and 0 matches no rows."""
    tenant = yield from ctx.tenant()
    return (yield from read(partial(program, 0 if tenant is None else tenant, *args)))


def draft_version(
    ctx: StoreContext,
    now: int,
    key: str,
    value: Any,
    *,
    text: str | None = None,
    context: str | None = None,
    kind: str = KIND,
    pinned: bool = False,
    ttl_s: float | None = None,
    valid_from: datetime | None = None,
    valid_to: datetime | None = None,
    expect: int | None = None,
    source: str | None = None,
    schema: str | None = None,
) -> NewVersion:
    """Check and encode the arguments of a put, for `new_versions`. Raises Unstorable and UsageError.

    Encoding happens during the call, so that later changes of the value are not stored.
    """
    for name, option in (("text", text), ("context", context), ("source", source)):
        if option is not None and option != "":
            check_str(option, f"put({name}=…)")
    if type(pinned) is not bool:
        raise UsageError(f"put(pinned={pinned!r}): True or False")
    ttl_s = None if ttl_s is None else check_number("put(ttl_s=…)", ttl_s, SECONDS_MAX)
    check_expected(expect)
    start, end = microseconds(valid_from, "valid_from"), microseconds(valid_to, "valid_to")
    if start is not None and end is not None and start >= end:
        raise UsageError("put(valid_from=…, valid_to=…): it must begin before it ends")
    if schema is not None:
        if isinstance(value, Mergeable):
            raise UsageError("put(schema=…): a value that merges has no schema; leave it out")
        steps_from(check_schema(schema))  # refuse to write what this process could not read
    return NewVersion(
        check_key(key),
        kind=check_name(kind, "kind"),
        pinned=pinned,
        valid_from=start,
        valid_to=end,
        expires=None if ttl_s is None else now + int(ttl_s * 1e6),
        expect=expect,
        **_content(ctx, value, Content(encode(value, ctx.codec), schema, text, context, source, ttl_s)),
    )


def _content(ctx: StoreContext, value: Any, content: Content) -> dict[str, Any]:
    merge = Merge(value, content, ctx.codec, searcher_of(ctx).words) if isinstance(value, Mergeable) else None
    return {"content": content, "merge": merge}


def new_version(ctx: StoreContext, now: int, key: str, value: Any, **options: Any) -> NewVersion:
    """Return the version that a put writes. `options` are those of `draft_version`."""
    return _versions(ctx, [draft_version(ctx, now, key, value, **options)])[0]


def new_versions(ctx: StoreContext, drafts: list[NewVersion]) -> Flow[list[NewVersion]]:
    """Complete the versions of `draft_version`. An async flow indexes large ones on a thread."""
    size = sum(len(draft.content.value) + len(draft.content.text or "") for draft in drafts)
    make = partial(_versions, ctx, drafts)
    return make() if len(drafts) <= _ASIDE_ITEMS and size <= _ASIDE_BYTES else (yield from aside(make))


def decoded(show: Callable[[Written], T], stored: Written) -> Flow[T]:
    """Return what `show` makes of rows by decoding them. An async flow decodes many rows on a thread."""
    return show(stored) if len(stored) <= _ASIDE_ITEMS else (yield from aside(partial(show, stored)))


def check_expected(version: object) -> None:
    if version is not None and (type(version) is not int or version < 0):
        raise UsageError(f"expect={version!r}: the version that must be there; 0: none")


def _next_version(ctx: StoreContext, old: ItemRow, value: Any, schema: str | None, text: str | None) -> NewVersion:
    """Return a version of the same item with another value. Raises Unstorable."""
    content = old.content()._replace(value=encode(value, ctx.codec), schema=schema, text=text)
    kept = {name: getattr(old, name) for name in ("key", "kind", "valid_from", "valid_to", "expires")}
    kept |= _content(ctx, value, content)
    return _versions(ctx, [NewVersion(**kept, pinned=bool(old.pinned), expect=old.version)])[0]


def _versions(ctx: StoreContext, drafts: list[NewVersion]) -> list[NewVersion]:
    searcher = searcher_of(ctx)
    for version in drafts:
        found_by = indexed(version.content, version.key, ctx.codec)
        version.body, version.words = rows.pack(version.content), searcher.words.pack(found_by)
        # Of a value that merges only a text of its own is known before the write.
        if searcher.embedding is not None and (version.merge is None or version.content.text is not None):
            version.embedded = found_by.embedded
    return drafts


def put(ctx: StoreContext, path: str, versions: Sequence[NewVersion], now: int, commit: Commit) -> Flow[Written]:
    """Embed versions and write them, all or none."""
    return (yield from commit(ctx, path, (yield from with_vectors(ctx, versions)), now))


def with_vectors(ctx: StoreContext, versions: Sequence[NewVersion]) -> Flow[Sequence[NewVersion]]:
    """Complete versions with vectors of the store's embedder. One that cannot be embedded gets no vector."""
    embedding = searcher_of(ctx).embedding
    if embedding is None:
        return versions
    embedded = yield from embedding.embed([version.embedded for version in versions])
    if embedded.problem:
        _log.warning("stored without vectors: %s", embedded.problem, extra=event("memory.not_embedded"))
    for version, vec in zip(versions, embedded.vectors, strict=True):
        version.model, version.vec = (None, None) if vec is None else (embedding.id, vec)
    return versions


def update(ctx: StoreContext, path: str, key: str, change: Callable[[Any], Any], commit: Commit) -> Flow[Written]:
    """Put what `change` returns for the current value. Repeat it if another writer was faster."""
    attempt, stored = 0, check_key(key)
    while True:
        now = ctx.clock_us()
        [old] = yield from query(ctx, rows.read_keys, [(path, stored)], now)
        if old is None:
            version = new_version(ctx, now, key, change(None), expect=0)
        else:
            item = item_of(old, ctx.codec)
            version = _next_version(ctx, old, change(item.value), item.schema, None)
        try:
            return (yield from put(ctx, path, [version], now, commit))
        except Conflict:
            attempt += 1
            if attempt == _UPDATES_MAX:
                raise


def pin(ctx: StoreContext, path: str, key: str, pinned: bool, commit: Commit) -> Flow[Written]:
    """Write an item again, pinned or not. Repeat it if another writer was faster. Raises NotFound."""
    stored = check_key(key)
    for attempt in range(_UPDATES_MAX):
        now = ctx.clock_us()
        version = yield from query(ctx, partial(rows.repeated, pinned=pinned), path, stored, now)
        if version is None:
            raise NotFound(f"there is no item {key!r}: nothing was written")
        try:
            return (yield from commit(ctx, path, [version], now))
        except Conflict:
            if attempt == _UPDATES_MAX - 1:
                raise
    raise AssertionError("not reached")


def migrate(ctx: StoreContext, scope: ItemQuery, progress: Progress | None) -> Flow[int]:
    """Rewrite the items of a scope whose schema has a newer version. Items that are put meanwhile stay."""
    count = 0
    old = yield from listing(ctx, scope, None, 0, lambda row: is_old(row.content().schema))
    for done, row in enumerate(old, 1):
        item = item_of(row, ctx.codec)
        version = _next_version(ctx, row, item.value, item.schema, item.text)
        try:
            yield from put(ctx, row.path, [version], ctx.clock_us(), write_versions)
            count += 1
        except Conflict:
            pass
        if progress is not None:
            progress(done, len(old))
    return count


def forget(ctx: StoreContext, scope: ItemQuery, matches: Matches) -> Flow[int]:
    """Delete the items of a scope that match. Items that are put meanwhile stay."""
    by_path: dict[str, list[NewVersion]] = {}
    for row in (yield from listing(ctx, scope, None, 0, matches)):
        by_path.setdefault(row.path, []).append(NewVersion(row.key, gone=FORGOTTEN, only=row.version))
    count = 0
    for path, gone in by_path.items():
        for start in range(0, len(gone), _PAGE):
            done = yield from write_versions(ctx, path, gone[start : start + _PAGE], ctx.clock_us())
            count += sum(row is not None for row in done)
    return count


def write_versions(ctx: StoreContext, path: str, versions: Sequence[NewVersion], now: int) -> Flow[Written]:
    tenant = yield from ctx.ensure_tenant()

    def attempt(summary_of: SummaryOf) -> Flow[Written]:
        summary, seen = summary_of(path)
        op = partial(rows.write_versions, tenant, path, [*summary, *versions], now, seen=seen)
        return committed(op, partial(landed, tenant, path, versions, now))

    return (yield from with_summaries(ctx, attempt))


def with_summaries(ctx: StoreContext, attempt: Callable[[SummaryOf], Flow[T]]) -> Flow[T]:
    """Commit by `attempt`, with the summaries of the items that caps remove.

    If caps remove items of a namespace that has a `summarize` hook, the transaction is undone. The hook gets the items
    outside of it, and the next attempt commits its result with their removal. If another writer was faster, this is
    repeated.
    """
    hooks, summaries = searcher_of(ctx).summarizers, dict[str, _Summary]()

    def hook_of(path: str) -> Any:
        return next((hooks[place] for one in above(path) if (place := (ctx.tenant_name, one)) in hooks), None)

    def summary_of(path: str) -> _Summary:
        return ([], None) if not hooks or hook_of(path) is None else summaries.get(path, ([], frozenset()))

    for _ in range(_SUMMARIES_MAX):
        try:
            return (yield from attempt(summary_of))
        except rows.CapReached as reached:
            summaries[reached.path] = yield from _summarized(ctx, hook_of(reached.path), reached)
        except Conflict:
            if not summaries:
                raise
            summaries.clear()  # the summary may be stale; if the caller's `expect` failed, the next attempt raises
    raise Conflict("other writers changed this namespace during every attempt to summarize it: try again")


def _summarized(ctx: StoreContext, hook: Callable[..., Any], reached: rows.CapReached) -> Flow[_Summary]:
    """Return the version that summarizes the items that caps remove, and which items the hook has seen."""
    if not reached.rows:
        return [], frozenset()
    now, seen = ctx.clock_us(), frozenset((row.key, row.version) for row in reached.rows)
    [old] = yield from query(ctx, rows.read_keys, [(reached.path, SUMMARY)], now)
    items = ItemReader(ctx.codec).items(reached.rows)
    if not items:
        return [], seen
    before = None if old is None else item_of(old, ctx.codec).value
    value = yield from ask_outside(hook, items, before)
    if value is None:
        return [], seen
    expect = 0 if old is None else old.version
    version = new_version(ctx, now, SUMMARY, value, kind=SUMMARY, pinned=True, expect=expect)
    return (yield from with_vectors(ctx, [replace(version, is_summary=True)])), seen


def committed(op: Callable[[], Program[T]], is_landed: Callable[[], Program[T | None]]) -> Flow[T]:
    """Run a write transaction. If the answer to COMMIT was lost, check `is_landed` before running it again."""
    for _ in range(_ATTEMPTS):
        try:
            return (yield from write(op))
        except OutcomeUnknown:
            result = yield from read(is_landed)
            if result is not None:
                return result
    return (yield from write(op))


def landed(tenant: int, path: str, versions: Sequence[NewVersion], now: int) -> Program[Written | None]:
    """Return the versions of a transaction whose outcome is unknown if they were committed, else None."""
    written: Written = []
    for one in (version for version in versions if version.closes_at is None):
        history = yield from rows.read_history(tenant, path, one.key, last=False)
        body = (one.body or b"") if one.merge is None else one.merge.body
        like = [row for row in history if row.at >= now and row.body == body and row.gone == one.gone]
        written.append(like[0] if like else None)
    return written if any(written) else None


def listing(
    ctx: StoreContext, scope: ItemQuery, limit: int | None, offset: int, matches: Matches | None
) -> Flow[list[ItemRow]]:
    """Return items of a namespace and of all below it, the newest first.

    `limit` and `offset` count only items that match.
    """
    most, skip = check_limit(limit), check_limit(offset)
    return query(ctx, _list, scope, most, skip or 0, matches)


def _list(
    tenant: int, scope: ItemQuery, limit: int | None, offset: int, matches: Matches | None
) -> Program[list[ItemRow]]:
    end = None if limit is None else offset + limit
    size = _PAGE_MAX if end is None else max(1, min(end, _PAGE_MAX))
    items: list[ItemRow] = []
    after: ItemRow | None = None
    while end is None or len(items) < end:
        page = yield from rows.read_page(tenant, scope, after, size)
        items += page if matches is None else filter(matches, page)
        if len(page) < size:
            break
        after, size = page[-1], min(4 * max(size, _PAGE), _PAGE_MAX)
    return items[offset:end]


def namespaces(ctx: StoreContext, scope: ItemQuery) -> Flow[list[Namespace]]:
    """Return the namespaces of a scope that hold items."""
    spaces = yield from query(ctx, rows.read_spaces, scope)
    return [Namespace(labels_of(path), items, size) for path, items, size in spaces]


def stats(ctx: StoreContext, scope: ItemQuery) -> Flow[MemoryStats]:
    """Return how much the namespaces of a scope hold."""
    spaces, model = (yield from namespaces(ctx, scope)), searcher_of(ctx).model
    counted = yield from query(ctx, rows.read_stats, scope, model)
    items, size = sum(space.items for space in spaces), sum(space.size_bytes for space in spaces)
    return MemoryStats(len(spaces), items, size, *counted)


def unreadable(ctx: StoreContext, scope: ItemQuery, reader: ItemReader) -> Flow[list[Item]]:
    """Return the items of a scope that a reader cannot read, with dicts for instances of classes."""
    stored = yield from listing(ctx, scope, None, 0, lambda row: not reader(row))
    return ItemReader(ctx.codec, raw=True).items(stored)
