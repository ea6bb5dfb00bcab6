"""Changes of many rows of memory: policies, indexing again, the daily sweep. Each uses short transactions.

Erasure is in `erasing.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from perdure.errors import Unavailable, UsageError
from perdure.memory import policies, rows, stored_indexes
from perdure.memory.flows import write_versions
from perdure.memory.labels import below
from perdure.memory.models import indexed
from perdure.memory.policies import MemoryPolicy
from perdure.memory.rows import EXPIRED, IN_SCOPE, LIVE, OF_ITEM, ItemRow, NewVersion
from perdure.memory.scopes import searcher_of
from perdure.memory.tables import ITEM_WORDS
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, Statement, aside, fetch, read, write
from perdure.threads.context import StoreContext

_PAGE = 500
_SPACES = Sql(
    "SELECT space, path FROM memory_space WHERE tenant = :tenant AND path >= :path AND path < :below ORDER BY path"
)
_SET = Sql("UPDATE memory_space SET policy = :policy WHERE tenant = :tenant AND path = :path")
_EXPIRED = Sql(
    f"""SELECT i.key, s.path FROM memory_item i JOIN memory_space s ON s.tenant = i.tenant AND s.space = i.space
    WHERE i.tenant = :tenant AND i.expires <= :now AND {LIVE} LIMIT :limit"""
)
_AGE_OUT = Sql(
    """UPDATE memory_item SET expires = :now WHERE tenant = :tenant AND space = :space AND ended_at IS NULL
    AND gone IS NULL AND pinned = 0 AND at <= :before AND (expires IS NULL OR expires > :now)"""
)
_AGE = Sql(
    """UPDATE memory_item SET expires = at + :age WHERE tenant = :tenant AND space = :space AND ended_at IS NULL
    AND gone IS NULL AND pinned = 0 AND (expires IS NULL OR expires > at + :age)"""
)
_LOCK = Sql("SELECT space FROM memory_space WHERE tenant = :tenant AND path = :path {for_update}")
_REINDEX = Sql("UPDATE memory_space SET generation = generation + 1 WHERE tenant = :tenant AND space = :space")
_COUNT = Sql(
    """UPDATE memory_space SET generation = generation + 1, items = items - :items, bytes = bytes - :bytes
    WHERE tenant = :tenant AND space = :space"""
)
_WITHOUT_VECTOR = f"""FROM {IN_SCOPE} AND {LIVE} AND i.id > :after AND NOT EXISTS (
    SELECT 1 FROM memory_vector v WHERE v.tenant = i.tenant AND v.id = i.id AND v.model = :model)"""
_UNEMBEDDED = Sql(f"SELECT {OF_ITEM}, s.path {_WITHOUT_VECTOR} ORDER BY i.id LIMIT :limit", opens=rows.OPENS)
_COUNT_UNEMBEDDED = Sql(f"SELECT count(*) {_WITHOUT_VECTOR}")
_DROP_VECTOR = Sql("DELETE FROM memory_vector WHERE tenant = :tenant AND id = :id")
_PACKED = Sql(
    f"""SELECT {OF_ITEM}, s.path, i.words FROM {IN_SCOPE} AND i.gone IS NULL AND i.id > :after
    ORDER BY i.id LIMIT :limit""",
    opens=rows.OPENS | {15: ITEM_WORDS.at(0)},
    tolerant=True,
)
_COUNT_VERSIONS = Sql(f"SELECT count(*) FROM {IN_SCOPE} AND i.gone IS NULL")
_SET_WORDS = Sql(
    "UPDATE memory_item SET words = :words WHERE tenant = :tenant AND id = :id", seals={"words": ITEM_WORDS}
)
_IS_LIVE = Sql(f"SELECT 1 FROM memory_item i WHERE i.tenant = :tenant AND i.id = :id AND {LIVE}")


def removal(which: str) -> tuple[Sql, Sql]:
    """Return the statements that remove versions of a namespace: first their vectors, then the versions."""
    which = f"tenant = :tenant AND space = :space AND {which}"
    vectors = f"DELETE FROM memory_vector WHERE tenant = :tenant AND id IN (SELECT id FROM memory_item WHERE {which})"
    counted = "CASE WHEN gone IS NULL AND ended_at IS NULL AND pinned = 0 THEN 1 ELSE 0 END"
    return Sql(vectors), Sql(f"DELETE FROM memory_item WHERE {which} RETURNING id, bytes, {counted}")


_OLD = "(ended_at < :before OR (ended_at IS NULL AND gone IS NOT NULL AND at < :before))"
_DROP_OLD = removal(_OLD)
_COUNT_OLD = Sql(f"SELECT count(*) FROM memory_item WHERE tenant = :tenant AND space = :space AND {_OLD}")


def policy(ctx: StoreContext, path: str, said: dict[str, Any]) -> Flow[MemoryPolicy]:
    """Set the caps in `said`, and return the policy of a namespace.

    New caps are enforced at once in all namespaces at and below it. If `said` is empty, nothing is written.
    """
    if not said:
        tenant = yield from ctx.tenant()
        return policies.DEFAULT if tenant is None else (yield from read(partial(_policy_of, tenant, path)))
    tenant = yield from ctx.ensure_tenant()
    new: MemoryPolicy = yield from write(partial(_set_policy, tenant, path, said))
    for space, each in (yield from fetch(_SPACES, tenant=tenant, path=path, below=below(path))):
        yield from write(partial(_enforce_age, tenant, space, each))
        yield from write_versions(ctx, each, [], ctx.clock_us())
    return new


def _set_policy(tenant: int, path: str, said: dict[str, Any]) -> Program[MemoryPolicy]:
    yield from rows.lock_space(tenant, path)
    policy = (yield from _policy_of(tenant, path)).changed(said)
    yield Batch(_SET(tenant=tenant, path=path, policy=policies.dump(policy)), last=True)
    return policy


def _policy_of(tenant: int, path: str) -> Program[MemoryPolicy]:
    """Return the policy of a namespace, or of the nearest one above, or that of the store's retention."""
    own = yield from rows.policy_of(tenant, path)
    return own if own is not policies.DEFAULT else (yield from policies.store_policy(tenant))


def _enforce_age(tenant: int, space: int, path: str) -> Program[None]:
    held = yield from rows.policy_of(tenant, path)
    if held.max_age is not None:
        yield Batch(_LOCK(tenant=tenant, path=path))
        yield Batch(_AGE(tenant=tenant, space=space, age=policies.in_us(held.max_age)), last=True)


def reembed(ctx: StoreContext, path: str, progress: Progress | None) -> Flow[int]:
    """Embed the items of a scope that have no vector of the store's embedder. Return how many."""
    embedding = searcher_of(ctx).embedding
    if embedding is None:
        raise UsageError("reembed() needs an embedder: perdure.open(url, embedder=…)")
    count, done, after = 0, 0, 0
    scope: dict[str, Any] = {
        "tenant": (yield from ctx.tenant()) or 0,
        "path": path,
        "below": below(path),
        "model": embedding.id,
    }
    [(total,)] = yield from fetch(_COUNT_UNEMBEDDED, **scope, after=0)
    while unembedded := (yield from fetch(_UNEMBEDDED, **scope, after=after, limit=_PAGE)):
        page = [ItemRow(*row) for row in unembedded]
        texts = [indexed(row.content(), row.key, ctx.codec).embedded for row in page]
        embedded = yield from embedding.embed(texts)
        if embedded.problem:
            raise Unavailable(f"{embedded.problem}; {count} items were embedded: repeat the call")
        pairs = list(zip(page, embedded.vectors, strict=True))
        for space in dict.fromkeys(row.path for row in page):
            mine = [(row.id, vec) for row, vec in pairs if vec is not None and row.path == space]
            count += yield from write(partial(_set_vectors, scope["tenant"], space, embedding.id, mine))
        after, done = page[-1].id, done + len(page)
        if progress is not None:
            progress(done, max(done, total))
    return count


def _set_vectors(tenant: int, path: str, model: str, vectors: list[tuple[int, bytes]]) -> Program[int]:
    """Replace the vectors of versions that are still live. Return how many."""
    [locked] = yield Batch(_LOCK(tenant=tenant, path=path))
    live = yield Batch(*(_IS_LIVE(tenant=tenant, id=id) for id, _ in vectors))
    replaced = [pair for pair, there in zip(vectors, live, strict=True) if there]
    for id, vec in replaced:
        yield Batch(_DROP_VECTOR(tenant=tenant, id=id), rows.ADD_VECTOR(tenant=tenant, id=id, model=model, vec=vec))
    if replaced:
        yield Batch(_REINDEX(tenant=tenant, space=locked[0][0]))
    return len(replaced)


def reindex(ctx: StoreContext, path: str, progress: Progress | None) -> Flow[int]:
    """Cut the versions of a scope again that another analyzer has cut. Return how many.

    The indexes in memory stay: each process cuts such words for itself when it reads them.
    """
    words, count, done, after = searcher_of(ctx).words, 0, 0, 0
    scope: dict[str, Any] = {"tenant": (yield from ctx.tenant()) or 0, "path": path, "below": below(path)}
    [(total,)] = yield from fetch(_COUNT_VERSIONS, **scope)

    def cut(page: Rows) -> list[Statement]:
        stale = [ItemRow(*row) for *row, packed in page if not (type(packed) is bytes and words.has_packed(packed))]
        texts = {row.id: indexed(row.content(), row.key, ctx.codec) for row in stale if type(row.body) is bytes}
        return [_SET_WORDS(tenant=scope["tenant"], id=id, words=words.pack(text)) for id, text in texts.items()]

    while page := (yield from fetch(_PACKED, **scope, after=after, limit=_PAGE)):
        if statements := (yield from aside(partial(cut, page))):
            yield from write(partial(_set_words, statements))
        count, done, after = count + len(statements), done + len(page), page[-1][0]
        if progress is not None:
            progress(done, max(done, total))
    return count


def _set_words(statements: list[Statement]) -> Program[None]:
    yield Batch(*statements, last=True)


def sweep(ctx: StoreContext, tenant: int) -> Flow[int]:
    """End expired items, and remove versions that ended longer ago than history is kept. Return how many were removed.

    In namespaces without a policy the store's retention says how old items may be.
    """
    spaces = yield from fetch(_SPACES, tenant=tenant, path="", below=below(""))
    for space, path in spaces:
        yield from write(partial(_age_out, tenant, space, path, ctx.clock_us()))
    yield from end_expired(ctx, tenant)
    removed = 0
    for space, path in spaces:
        removed += yield from write(partial(_drop_old, tenant, space, path, ctx.clock_us()))
    yield from stored_indexes.drop(tenant)
    return removed


def end_expired(ctx: StoreContext, tenant: int) -> Flow[int]:
    """End expired items, and return how many."""
    count = 0
    while expired := (yield from fetch(_EXPIRED, tenant=tenant, now=ctx.clock_us(), limit=_PAGE)):
        for path in dict.fromkeys(path for _, path in expired):
            gone = [NewVersion(key, gone=EXPIRED) for key, of in expired if of == path]
            if tenant == ctx.known_tenant:  # the store's `summarize` hooks belong to its own tenant
                ended = yield from write_versions(ctx, path, gone, ctx.clock_us())
            else:
                ended = yield from write(partial(rows.write_versions, tenant, path, gone, ctx.clock_us()))
            count += sum(row is not None for row in ended)
    return count


def would_sweep(tenant: int, now: int) -> Flow[int]:
    """Return how many versions `sweep` would remove."""
    count = 0
    for space, path in (yield from fetch(_SPACES, tenant=tenant, path="", below=below(""))):
        history = (yield from read(partial(_policy_of, tenant, path))).history
        if history is not None:
            before = now - policies.in_us(history)
            [(old,)] = yield from fetch(_COUNT_OLD, tenant=tenant, space=space, before=before)
            count += old
    return count


def _age_out(tenant: int, space: int, path: str, now: int) -> Program[None]:
    """Set items older than the store's retention to expire now. Under a policy they carry their own date."""
    held = yield from _policy_of(tenant, path)
    if held.max_age is not None:
        yield Batch(_LOCK(tenant=tenant, path=path))
        before = now - policies.in_us(held.max_age)
        yield Batch(_AGE_OUT(tenant=tenant, space=space, now=now, before=before), last=True)


def _drop_old(tenant: int, space: int, path: str, now: int) -> Program[int]:
    history = (yield from _policy_of(tenant, path)).history
    if history is None:
        return 0
    yield Batch(_LOCK(tenant=tenant, path=path))
    before = now - policies.in_us(history)
    return len((yield from remove(_DROP_OLD, {"tenant": tenant, "space": space, "before": before})))


def remove(removal: tuple[Sql, Sql], params: dict[str, Any]) -> Program[Rows]:
    """Remove versions under the lock of their namespace. The indexes in memory are then built anew."""
    _, removed = yield Batch(*(sql(**params) for sql in removal))
    if removed:
        counted = [size for _, size, is_counted in removed if is_counted]
        scope = {"tenant": params["tenant"], "space": params["space"]}
        yield Batch(_COUNT(**scope, items=len(counted), bytes=sum(counted)))
    return removed
