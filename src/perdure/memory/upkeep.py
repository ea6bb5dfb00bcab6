"""What removes rows of memory: policies of namespaces, the daily sweep, erasing. Each in short transactions."""

from __future__ import annotations

from functools import partial
from typing import Any

from perdure.errors import Unavailable, UsageError
from perdure.log import erase
from perdure.memory import policies, rows, words
from perdure.memory.flows import text_of
from perdure.memory.labels import above, below, check_key
from perdure.memory.policies import MemoryPolicy
from perdure.memory.rows import ItemRow
from perdure.memory.search import searcher_of
from perdure.storage.program import Batch, Flow, Program, Progress, Sql, read, write
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.threads.retention import Erased, remains

_PAGE = 500
_SPACES = Sql(
    "SELECT space, path FROM memory_space WHERE tenant = :tenant AND path >= :path AND path < :below ORDER BY path"
)
_SET = Sql("UPDATE memory_space SET policy = :policy WHERE tenant = :tenant AND path = :path")
_EXPIRED = Sql(
    """SELECT i.key, s.path FROM memory_item i JOIN memory_space s ON s.tenant = i.tenant AND s.space = i.space
    WHERE i.tenant = :tenant AND i.expires <= :now AND i.ended_at IS NULL AND i.gone IS NULL LIMIT :limit"""
)
_AGE = Sql(
    """UPDATE memory_item SET expires = at + :age WHERE tenant = :tenant AND space = :space AND ended_at IS NULL
    AND gone IS NULL AND pinned = 0 AND (expires IS NULL OR expires > at + :age)"""
)
_OLD = """tenant = :tenant AND space = :space
    AND (ended_at < :before OR (ended_at IS NULL AND gone IS NOT NULL AND at < :before))"""
_DROP_OLD = Sql(f"DELETE FROM memory_item WHERE {_OLD} RETURNING id")
_DROP_VECTORS = Sql(
    f"DELETE FROM memory_vector WHERE tenant = :tenant AND id IN (SELECT id FROM memory_item WHERE {_OLD})"
)
_NEXT_GENERATION = Sql("UPDATE memory_space SET generation = generation + 1 WHERE tenant = :tenant AND space = :space")
_LOCK = Sql("SELECT space FROM memory_space WHERE tenant = :tenant AND path = :path {for_update}")
_KEY = "tenant = :tenant AND space = :space AND key = :key"
_IDS = Sql(f"SELECT id, gone, ended_at, bytes FROM memory_item WHERE {_KEY} ORDER BY id")
_ERASE_VECTORS = Sql(
    f"DELETE FROM memory_vector WHERE tenant = :tenant AND id IN (SELECT id FROM memory_item WHERE {_KEY})"
)
_ERASE = Sql(f"DELETE FROM memory_item WHERE {_KEY}")
_COUNT = Sql(
    """UPDATE memory_space SET generation = generation + 1, items = items - :items, bytes = bytes - :bytes
    WHERE tenant = :tenant AND space = :space"""
)


_WITHOUT_VECTOR = """FROM memory_space s JOIN memory_item i ON i.tenant = s.tenant AND i.space = s.space
    WHERE s.tenant = :tenant AND s.path >= :path AND s.path < :below AND i.ended_at IS NULL AND i.gone IS NULL
        AND i.id > :after AND NOT EXISTS (
            SELECT 1 FROM memory_vector v WHERE v.tenant = i.tenant AND v.id = i.id AND v.model = :model)"""
_UNEMBEDDED = Sql(
    f"""SELECT {", ".join(f"i.{name}" for name in rows.ROW_COLUMNS.split(", "))}, s.path {_WITHOUT_VECTOR}
    ORDER BY i.id LIMIT :limit""",
    opens=rows.OPENS,
)
_COUNT_UNEMBEDDED = Sql(f"SELECT count(*) {_WITHOUT_VECTOR}")
_DROP_VECTOR = Sql("DELETE FROM memory_vector WHERE tenant = :tenant AND id = :id")
_IS_NEWEST = Sql("SELECT 1 FROM memory_item WHERE tenant = :tenant AND id = :id AND ended_at IS NULL AND gone IS NULL")


def policy(ctx: StoreContext, path: str, said: dict[str, Any]) -> Flow[MemoryPolicy]:
    """What holds for a namespace. What is said is set, and acted on at once in all namespaces at and below it."""
    if not said:
        tenant = yield from ctx.tenant()
        return policies.DEFAULT if tenant is None else (yield from read(partial(rows.policy_of, tenant, above(path))))
    tenant = yield from ctx.ensure_tenant()
    made: MemoryPolicy = yield from write(partial(_set_policy, tenant, path, said))
    for space, below_it in (yield from read(partial(_spaces, tenant, path))):
        yield from write(partial(_enforce, tenant, space, below_it, ctx.clock_us()))
    return made


def _set_policy(tenant: int, path: str, said: dict[str, Any]) -> Program[MemoryPolicy]:
    yield from rows.lock_space(tenant, path)
    made = (yield from rows.policy_of(tenant, above(path))).changed(said)
    yield Batch(_SET(tenant=tenant, path=path, policy=policies.dump(made)), last=True)
    return made


def _spaces(tenant: int, path: str) -> Program[list[tuple[int, str]]]:
    [found] = yield Batch(_SPACES(tenant=tenant, path=path, below=below(path)), last=True)
    return [(space, path) for space, path in found]


def _enforce(tenant: int, space: int, path: str, now: int) -> Program[None]:
    held = yield from rows.policy_of(tenant, above(path))
    if held.max_age_days is not None:
        yield Batch(_LOCK(tenant=tenant, path=path))
        age = int(held.max_age_days * policies.DAY_US)
        yield Batch(_AGE(tenant=tenant, space=space, age=age))
    yield from rows.write_versions(tenant, path, [], now)


def reembed(ctx: StoreContext, path: str, progress: Progress | None) -> Flow[int]:
    """Embed the items of a scope that have no vector of the store's embedder. How many."""
    embedding = searcher_of(ctx).embedding
    if embedding is None:
        raise UsageError("reembed() needs an embedder: perdure.open(url, embedder=…)")
    tenant = yield from ctx.tenant()
    count, done, after, total = 0, 0, 0, 0
    if progress is not None and tenant is not None:
        total = yield from read(partial(_count_without_vector, tenant, path, embedding.id))
    while tenant is not None:
        page: list[ItemRow] = yield from read(partial(_without_vector, tenant, path, embedding.id, after))
        if not page:
            break
        contents = [row.content() for row in page]
        texts = [
            words.embedded_text(one.text if one.text is not None else text_of(one.value, ctx.codec), one.context)
            for one in contents
        ]
        embedded = yield from embedding.embed(texts)
        if embedded.problem:
            raise Unavailable(f"{embedded.problem}; {count} items were embedded: repeat the call")
        pairs = list(zip(page, embedded.vectors, strict=True))
        for space in sorted({row.id >> rows.SEQUENCE_BITS for row in page}):
            mine = [(row, vec) for row, vec in pairs if vec is not None and row.id >> rows.SEQUENCE_BITS == space]
            count += yield from write(partial(_set_vectors, tenant, space, embedding.id, mine))
        after, done = page[-1].id, done + len(page)
        if progress is not None:
            progress(done, max(done, total))
    return count


def _count_without_vector(tenant: int, path: str, model: str) -> Program[int]:
    where = {"path": path, "below": below(path), "model": model, "after": 0}
    [[(count,)]] = yield Batch(_COUNT_UNEMBEDDED(tenant=tenant, **where), last=True)
    return int(count)


def _without_vector(tenant: int, path: str, model: str, after: int) -> Program[list[ItemRow]]:
    where = {"path": path, "below": below(path), "model": model, "after": after, "limit": _PAGE}
    [found] = yield Batch(_UNEMBEDDED(tenant=tenant, **where), last=True)
    return [ItemRow(*row) for row in found]


def _set_vectors(tenant: int, space: int, model: str, vectors: list[tuple[ItemRow, bytes]]) -> Program[int]:
    if not vectors:
        return 0
    done = 0
    yield Batch(_LOCK(tenant=tenant, path=vectors[0][0].path))
    for row, vec in vectors:
        _, there = yield Batch(_DROP_VECTOR(tenant=tenant, id=row.id), _IS_NEWEST(tenant=tenant, id=row.id))
        if there:
            yield Batch(rows.ADD_VECTOR(tenant=tenant, id=row.id, model=model, vec=vec))
            done += 1
    yield Batch(_NEXT_GENERATION(tenant=tenant, space=space))
    return done


def sweep(ctx: StoreContext, tenant: int) -> Flow[int]:
    """Let expired items go, and what was replaced or deleted longer ago than history is kept. How many versions."""
    while expired := (yield from read(partial(_expired, tenant, ctx.clock_us()))):
        by_path: dict[str, list[rows.NewVersion]] = {}
        for key, path in expired:
            by_path.setdefault(path, []).append(rows.NewVersion(key, None, gone=rows.EXPIRED))
        for path, gone in by_path.items():
            yield from write(partial(rows.write_versions, tenant, path, gone, ctx.clock_us()))
    removed = 0
    for space, path in (yield from read(partial(_spaces, tenant, ""))):
        removed += yield from write(partial(_drop_old, tenant, space, path, ctx.clock_us()))
    return removed


def _expired(tenant: int, now: int) -> Program[list[tuple[str, str]]]:
    [found] = yield Batch(_EXPIRED(tenant=tenant, now=now, limit=_PAGE), last=True)
    return [(key, path) for key, path in found]


def _drop_old(tenant: int, space: int, path: str, now: int) -> Program[int]:
    history = (yield from rows.policy_of(tenant, above(path))).history_us()
    if history is None:
        return 0
    this = {"tenant": tenant, "space": space}
    yield Batch(_LOCK(tenant=tenant, path=path), _DROP_VECTORS(**this, before=now - history))
    [gone] = yield Batch(_DROP_OLD(**this, before=now - history))
    if gone:
        yield Batch(_NEXT_GENERATION(**this))
    return len(gone)


def erase_item(ctx: StoreContext, path: str, key: str, full: bool) -> Flow[Erased]:
    """Erase all versions of a key, from the store's own files too."""
    stored, at = check_key(key), ctx.clock_us()
    tenant = yield from ctx.tenant()
    if tenant is None:
        return Erased(0, moment(at), ())
    versions = yield from write(partial(_wipe, tenant, path, stored, at))
    searcher_of(ctx).forget_tenant(tenant)
    told = ["journals of runs that have read or put it: erase those runs", *(yield from remains(ctx, tenant, full))]
    if (yield from read(partial(erase.marked, tenant))) is not None:
        told = [*(yield from erase.finish(tenant, ctx.driver.dialect, full=full)), *told]
    return Erased(0, moment(at), tuple(told), versions=versions)


def _wipe(tenant: int, path: str, key: str, at: int) -> Program[int]:
    [found] = yield Batch(_LOCK(tenant=tenant, path=path))
    if not found:
        return 0
    this = {"tenant": tenant, "space": found[0][0]}
    [versions] = yield Batch(_IDS(**this, key=key))
    if not versions:
        return 0
    there = [size for _, gone, ended_at, size in versions if gone is None and ended_at is None]
    yield from erase.mark(tenant, at)
    yield from erase.note(tenant, this["space"], versions[-1][0], len(versions), None, at)
    yield Batch(_ERASE_VECTORS(**this, key=key))
    yield Batch(_ERASE(**this, key=key), _COUNT(**this, items=len(there), bytes=sum(there)))
    return len(versions)
