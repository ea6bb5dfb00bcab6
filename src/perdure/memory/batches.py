"""Operations on items of several namespaces: read in one transaction, written in one that also refreshes expiries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from perdure.errors import UsageError
from perdure.memory import flows, rows
from perdure.memory.embed import PARTS, embedding_of
from perdure.memory.labels import Labels, check_key, labels_of, path_of
from perdure.memory.models import Item, item_of, microseconds
from perdure.memory.reading import ItemReader
from perdure.memory.rows import DELETED, ItemQuery, NewVersion
from perdure.memory.scopes import searcher_of
from perdure.memory.search import search, unranked
from perdure.storage.program import Batch, Flow, Program, Sql
from perdure.threads.checks import check_limit
from perdure.threads.context import StoreContext

# An expired item stays expired. A locked row is being refreshed or replaced. It is skipped, because the writer that
# holds the lock may wait for this transaction.
_REFRESH = Sql(
    """UPDATE memory_item SET expires = :expires WHERE tenant = :tenant AND id IN (
        SELECT id FROM memory_item WHERE tenant = :tenant AND key = :key AND version = :version
            AND space = (SELECT space FROM memory_space WHERE tenant = :tenant AND path = :path)
            AND ended_at IS NULL AND gone IS NULL AND expires > :now AND expires < :expires {skip_locked})"""
)
_Changes = dict[str, list[NewVersion]]  # by the path of their namespace


class ItemChange(NamedTuple):
    """A value to put under a key of a namespace, with its options. A value of None deletes the item."""

    namespace: Labels
    key: str
    value: Any
    texts: Sequence[str] | None = None  # that it is found by, with a vector each; None: all texts of the value
    ttl_s: float | None = None


def use_embedder(ctx: StoreContext, embedder: object, dimension: int | None) -> None:
    """Set the embedder of an open store. Raises UsageError if it has another one, or if the dimensions differ."""
    embedding, searcher = embedding_of(embedder), searcher_of(ctx)
    if embedding is None:
        raise UsageError("an embedder is needed here, not None")
    if searcher.embedding is not None and searcher.embedding.id != embedding.id:
        raise UsageError(
            f"this store is open with the embedder {searcher.embedding.id}: it cannot have {embedding.id} too"
        )
    if dimension is not None and embedding.dimension not in (None, dimension):
        raise UsageError(
            f"the embedder {embedding.id} makes vectors of {embedding.dimension} numbers, not of {dimension}"
        )
    embedding.dimension = dimension or embedding.dimension
    searcher.embedding = embedding


def get(ctx: StoreContext, places: Iterable[tuple[Labels, str]]) -> Flow[list[Item | None]]:
    """Return the items at pairs of namespace and key, with None where there is no item."""
    asked = [(tuple(labels), check_key(key)) for labels, key in places]
    paths = {labels: path_of(labels) for labels, _ in asked}
    keys = [(paths[labels], key) for labels, key in asked]
    stored = yield from flows.query(ctx, rows.read_keys, keys, ctx.clock_us())
    return [None if row is None else item_of(row, ctx.codec) for row in stored]


def find(
    ctx: StoreContext,
    labels: Labels,
    query: str | None,
    matches: Callable[[Any], bool] | None,
    limit: int,
    offset: int,
) -> Flow[list[Item]]:
    """Return the items at and below a namespace that hold now and whose value matches, the best for a query first.

    Without a query the newest are first. With an embedder the score of an item is its cosine, without one that of its
    words. Items without a score follow, the newest first: an empty answer would say that nothing is stored.
    """
    now, limit, offset = ctx.clock_us(), check_limit(limit) or 0, check_limit(offset) or 0
    scope = ItemQuery(path_of(labels), now, valid_at=now)
    reader = ItemReader(ctx.codec, matches=matches)
    if query is None:
        return reader.items((yield from flows.listing(ctx, scope, limit, offset, reader)))
    ranked = yield from search(ctx, scope, query, 0, offset + limit, False, reader, by_meaning=True)
    shown = ranked[offset:]
    scored = zip(reader.items(row for row, _ in shown), shown, strict=True)
    items = [replace(item, score=hit.score) for item, (_, hit) in scored]
    if len(items) < limit:
        seen, skipped, missing = {hit.id for _, hit in ranked}, max(0, offset - len(ranked)), limit - len(items)
        others = yield from unranked(ctx, scope, seen, reader, skipped, skipped + missing)
        if others is None:
            others = yield from flows.listing(
                ctx, scope, missing, skipped, lambda row: row.id not in seen and reader(row)
            )
        items += reader.items(others)
    return items


def namespaces(ctx: StoreContext, labels: Labels) -> Flow[list[Labels]]:
    """Return the namespaces at and below one that hold items."""
    spaces = yield from flows.query(ctx, rows.read_spaces, ItemQuery(path_of(labels), ctx.clock_us()))
    return [labels_of(path) for path, _, _ in spaces]


def write_items(ctx: StoreContext, changes: Sequence[ItemChange], refreshed: Sequence[Item]) -> Flow[None]:
    """Make all changes or none. Of several changes of one key the last one counts.

    `refreshed` are items that were read: those with a `ttl_s` expire that long after now.
    """
    refreshed = [item for item in refreshed if item.ttl_s is not None]
    if not changes and not refreshed:
        return
    now = ctx.clock_us()
    paths = {labels: path_of(labels) for labels in {tuple(one.namespace) for one in changes}}
    newest = {(paths[tuple(one.namespace)], one.key): one for one in changes}
    drafts: list[NewVersion] = []
    by_path: _Changes = {}
    for (path, key), one in newest.items():
        if one.value is None:
            version = NewVersion(check_key(key), gone=DELETED)
        elif not path:
            raise UsageError("an item needs a namespace of at least one label")
        else:
            version = flows.draft_version(ctx, now, key, one.value, text=_text(one), ttl_s=one.ttl_s)
            drafts.append(version)
        by_path.setdefault(path, []).append(version)
    yield from flows.with_vectors(ctx, (yield from flows.new_versions(ctx, drafts)))
    ordered = dict(sorted(by_path.items()))  # every writer locks namespaces in this order, against deadlocks
    tenant = yield from ctx.ensure_tenant()

    def attempt(summary_of: flows.SummaryOf) -> Flow[bool]:
        op = partial(_write, tenant, ordered, refreshed, now, summary_of)
        return flows.committed(op, partial(_landed, tenant, ordered, now))

    yield from flows.with_summaries(ctx, attempt)


def _text(change: ItemChange) -> str | None:
    return None if change.texts is None else PARTS.join(text.replace(PARTS, " ") for text in change.texts)


def _write(
    tenant: int, changes: _Changes, refreshed: Sequence[Item], now: int, summary_of: flows.SummaryOf
) -> Program[bool]:
    for number, (path, versions) in enumerate(changes.items(), 1):
        is_last = number == len(changes) and not refreshed
        summary, seen = summary_of(path)
        yield from rows.write_versions(tenant, path, [*summary, *versions], now, last=is_last, seen=seen)
    if refreshed:
        yield from _refresh(tenant, refreshed, now)
    return True


def _landed(tenant: int, changes: _Changes, now: int) -> Program[bool | None]:
    for path, versions in changes.items():
        if (yield from flows.landed(tenant, path, versions, now)) is not None:
            return True
    return None


def _refresh(tenant: int, items: Sequence[Item], now: int) -> Program[None]:
    held = {}
    for path in {path_of(item.namespace) for item in items}:
        held[path] = yield from rows.policy_of(tenant, path)
    statements = []
    for item in items:
        path, at = path_of(item.namespace), microseconds(item.at, "at") or 0
        expires = held[path].expires(at, now + int((item.ttl_s or 0) * 1e6), item.pinned)
        where = {"path": path, "key": check_key(item.key), "version": item.version, "now": now}
        statements.append(_REFRESH(tenant=tenant, expires=expires, **where))
    yield Batch(*statements, last=True)
