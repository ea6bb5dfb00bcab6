"""Memory of several stores: what a read may show (`reading`), tokens of sessions, and merging of namespaces.

A namespace numbers its versions, so the pair of its identity (store, era, number) and its newest number says what it
holds. Of other stores it records how far they were merged: together this is a version vector. A token is the vectors of
some namespaces. PostgreSQL's standbys and the replicas of `perdure store replicate` hold the rows of their source, so
the same comparison tells how far they are.
"""

from __future__ import annotations

from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import orjson

from perdure.errors import Stale, UsageError
from perdure.memory import flows, rows
from perdure.memory.labels import labels_of
from perdure.memory.merging import Merge, merging_value
from perdure.memory.rows import LIVE, OF_ITEM, OPENS, ItemRow, NewVersion, identity_of
from perdure.memory.scopes import searcher_of
from perdure.storage.program import Batch, Flow, Program, Row, Sql, Transaction, adrive, drive, either, read, write
from perdure.storage.store_tables import STORE
from perdure.storage.wrapping import SnapshotDriver
from perdure.threads.context import StoreContext
from perdure.values.crdts import Vector, covers, join

T = TypeVar("T")
Consistency = Literal["strong", "causal", "eventual"]
_Vectors = Mapping[str, Vector]  # by the path of their namespace
_TOKEN_MAX = 100_000
_PAGE = 1000
_SPACE = Sql("SELECT space, last, merged FROM memory_space WHERE tenant = :tenant AND path = :path")
_SET_MERGED = Sql("UPDATE memory_space SET merged = :merged WHERE tenant = :tenant AND path = :path")
# Which store this is a replica of, and whether the server is a standby.
_PLACE = Sql(
    sqlite="SELECT (SELECT value FROM meta WHERE key = 'replica'), 0",
    postgres="SELECT (SELECT value FROM meta WHERE key = 'replica'), CASE WHEN pg_is_in_recovery() THEN 1 ELSE 0 END",
)
_ITEMS = Sql(
    f"""SELECT {OF_ITEM} FROM memory_item i WHERE i.tenant = :tenant AND i.space = :space AND i.id > :after
    AND {LIVE} AND (i.expires IS NULL OR i.expires > :now) ORDER BY i.id LIMIT :limit""",
    opens=OPENS,
)


class Reading(NamedTuple):
    """What a read asks of the store that answers it."""

    consistency: Consistency
    after: str | None
    vectors: _Vectors

    @classmethod
    def of(cls, consistency: Consistency, after: str | None) -> Reading:
        """Check the arguments of `memory.reading`. Raises UsageError."""
        if consistency not in ("strong", "causal", "eventual"):
            raise UsageError(f'reading({consistency!r:.50}): "strong", "causal" or "eventual"')
        if (after is not None) != (consistency == "causal"):
            raise UsageError('reading("causal", after=token): a token goes with "causal", and with it alone')
        return cls(consistency, after, {} if after is None else vectors_of(after))


def vectors_of(token: str) -> dict[str, dict[str, int]]:
    """Return what a token says. Raises UsageError."""
    try:
        if len(token) > _TOKEN_MAX:
            raise ValueError
        vectors = orjson.loads(a2b_base64(token.replace("-", "+").replace("_", "/"), strict_mode=True))
        for path, vector in vectors.items():
            if not labels_of(path) or not all(type(number) is int for number in vector.values()):
                raise ValueError
        return vectors  # type: ignore[no-any-return]
    except (Base64Error, ValueError, TypeError, AttributeError):
        raise UsageError(f"{token!r:.50} is no token: memory.token() returns one") from None


def token_of(vectors: _Vectors) -> str:
    text = b2a_base64(orjson.dumps(vectors, option=orjson.OPT_SORT_KEYS), newline=False)
    return text.decode().replace("+", "-").replace("/", "_")


def token(ctx: StoreContext, path: str, after: str | None) -> Flow[str]:
    """Return a token of what a namespace holds now, and of what another token says."""
    before = {} if after is None else vectors_of(after)
    [(vector, _)] = (yield from flows.query(ctx, _held, [path])).held
    return token_of({**before, path: join(before.get(path, {}), vector)})


class _SpacesHeld(NamedTuple):
    is_replica: bool
    held: list[tuple[dict[str, int], Row | None]]  # the vector and the row of each namespace


def _held(tenant: int, paths: list[str]) -> Program[_SpacesHeld]:
    spaces = [_SPACE(tenant=tenant, path=path) for path in paths]
    stores, [(source, is_standby)], *answers = yield Batch(STORE(tenant=tenant), _PLACE(tenant=tenant), *spaces)
    if source is not None:  # its rows have the numbers of its source
        stores = [tuple(orjson.loads(source).get("source", ("", "")))]
    held: list[tuple[dict[str, int], Row | None]] = []
    for answer in answers:
        row = answer[0] if answer else None
        vector = {} if row is None else join(_merged(row), {identity_of(stores, row[0]): row[1]})
        held.append((vector, row))
    return _SpacesHeld(source is not None or bool(is_standby), held)


def _merged(row: Row) -> dict[str, int]:
    return orjson.loads(row[2]) if row[2] else {}


def checked(ctx: StoreContext, reading: Reading, flow: Flow[T]) -> Flow[T]:
    """Check in each reading transaction of a flow that the store can answer it. Raises Stale."""
    if isinstance(ctx.driver.capabilities.base, SnapshotDriver):
        raise UsageError("a snapshot shows the time that it was taken at: read it without reading()")
    if reading.consistency == "eventual":
        return (yield from flow)
    tenant = (yield from ctx.tenant()) or 0
    check = partial(_check, tenant, reading.consistency, reading.vectors)
    request, answer = next(flow), None
    while True:
        if type(request) is Transaction and not request.write:
            request = replace(request, op=partial(_after, check, request.op))
        try:
            answer = yield request
        except BaseException as error:
            step = partial(flow.throw, error)
        else:
            step = partial(flow.send, answer)
        try:
            request = step()
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


def _after(check: Callable[[], Program[None]], op: Callable[[], Program[T]]) -> Program[T]:
    yield from check()
    return (yield from op())


def _check(tenant: int, consistency: Consistency, vectors: _Vectors) -> Program[None]:
    is_replica, held = yield from _held(tenant, [*vectors])
    if consistency == "strong" and is_replica:
        raise Stale('this store is a replica: read("strong") from its primary, or read "causal" or "eventual" here')
    for (path, vector), (here, _) in zip(vectors.items(), held, strict=True):
        if not covers(here, vector):
            raise Stale(
                f"this store does not hold yet what the token says of memory {'/'.join(labels_of(path))!r}: try again, "
                "or read from the store that the token is from"
            )


# --- merging


def merge(ctx: StoreContext, path: str, source: StoreContext, source_path: str) -> Flow[int]:
    """Bring the items that merge from a namespace of another store, in one transaction. Return how many changed."""
    now = ctx.clock_us()
    there = (yield from _at(source, source.tenant())) or 0
    vector, offered = yield from _at(source, read(partial(_offered, there, source_path, now)))
    versions: list[NewVersion] = []
    for row in offered:
        content = row.content()
        if (value := merging_value(content, source.codec)) is not None:
            columns = {name: getattr(row, name) for name in ("key", "kind", "valid_from", "valid_to", "expires")}
            together = Merge(value, content, ctx.codec, searcher_of(ctx).words, keeps=True)
            versions.append(NewVersion(body=row.body, pinned=bool(row.pinned), merge=together, **columns))
    tenant = yield from ctx.ensure_tenant()

    def attempt(summary_of: flows.SummaryOf) -> Flow[int]:
        summary, seen = summary_of(path)
        return write(partial(_write, tenant, path, [*summary, *versions], now, seen, vector))

    return (yield from flows.with_summaries(ctx, attempt))


def _at(ctx: StoreContext, flow: Flow[T]) -> Flow[T]:
    """Run a flow in another store."""
    return either(lambda: drive(ctx.driver, flow), lambda: adrive(ctx.driver, flow))


def _offered(tenant: int, path: str, now: int) -> Program[tuple[dict[str, int], list[ItemRow]]]:
    """Return the vector of a namespace, and its items."""
    _, [(vector, space)] = yield from _held(tenant, [path])
    items: list[ItemRow] = []
    after = 0
    while space is not None:
        place = {"tenant": tenant, "space": space[0], "after": after, "now": now, "limit": _PAGE}
        [page] = yield Batch(_ITEMS(**place))
        items += [rows.item_row(row, path) for row in page]
        if len(page) < _PAGE:
            break
        after = page[-1][0]
    return vector, items


def _write(
    tenant: int, path: str, versions: list[NewVersion], now: int, seen: rows.Seen | None, vector: Vector
) -> Program[int]:
    yield from rows.lock_space(tenant, path)
    _, [(before, row)] = yield from _held(tenant, [path])
    assert row is not None
    written = yield from rows.write_versions(tenant, path, versions, now, last=False, seen=seen)
    own = {name: number for name, number in before.items() if name not in _merged(row)}
    merged = {name: number for name, number in join(_merged(row), vector).items() if name not in own}
    if merged != _merged(row):
        yield Batch(_SET_MERGED(tenant=tenant, path=path, merged=orjson.dumps(merged).decode()))
    first = row[0] << rows.SEQUENCE_BITS | row[1]
    return sum(one is not None and one.id > first for one in written)
