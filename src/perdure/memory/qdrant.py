"""Vectors of memory in Qdrant, for scopes that are too large for the process: `open(url, search_index=QdrantIndex(…))`.

Puts do not write to Qdrant; a search first brings it up to date. Versions are numbered within their namespace, and
Qdrant holds for each namespace the last number that it has. So a crash loses nothing: the next search of any process
sends what is missing. Every request may be sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from perdure.errors import ExtraMissing, PerdureError
from perdure.memory.labels import below
from perdure.memory.large import Near, NearestQuery
from perdure.memory.rows import SEQUENCE_BITS
from perdure.memory.tables import ITEM_VECTOR
from perdure.storage.events import event
from perdure.storage.program import Flow, Sql, aside, fetch

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

_log = logging.getLogger("perdure")
_PAGE = 500
_SPACES = Sql(
    """SELECT space, last, generation FROM memory_space
    WHERE tenant = :tenant AND path >= :path AND path < :below ORDER BY space"""
)
_LIVE = Sql(
    """SELECT v.id, v.vec FROM memory_vector v JOIN memory_item i ON i.tenant = v.tenant AND i.id = v.id
    WHERE v.tenant = :tenant AND v.id > :after AND v.id <= :until AND v.model = :model AND i.ended_at IS NULL
    ORDER BY v.id LIMIT :limit""",
    opens={1: ITEM_VECTOR.at(0)},
)
# The versions that were replaced by those in a range of numbers.
_REPLACED = Sql(
    """SELECT p.id FROM memory_item n JOIN memory_item p
        ON p.tenant = n.tenant AND p.space = n.space AND p.key = n.key AND p.version = n.version - 1
    WHERE n.tenant = :tenant AND n.id > :after AND n.id <= :until"""
)


class _State(NamedTuple):
    """The number and the generation of a namespace up to which Qdrant has its vectors."""

    last: int
    generation: int


class QdrantIndex:
    """An index with one Qdrant collection for each model.

    `collection` is the prefix of their names. It must belong to one store.
    """

    def __init__(self, client: QdrantClient, collection: str = "perdure") -> None:
        try:
            from qdrant_client import models
        except ImportError as error:
            raise ExtraMissing("QdrantIndex", "qdrant") from error
        self._client, self._prefix, self._models = client, collection, models

    def nearest(self, query: NearestQuery) -> Flow[list[Near]]:
        """Return the nearest items, or none if Qdrant fails: items are then found by their words."""
        spaces = yield from fetch(_SPACES, tenant=query.tenant, path=query.path, below=below(query.path))
        try:
            states = yield from aside(partial(self._states, query, [space for space, _, _ in spaces]))
            for space, last, generation in spaces:
                now = _State(last, generation)
                if states.get(space) != now:
                    yield from self._catch_up(query, space, states.get(space), now)
            return (yield from aside(partial(self._query, query, [space for space, _, _ in spaces])))
        except PerdureError:
            raise
        except Exception as error:
            _log.warning("Qdrant failed, searched by words: %s", error, extra=event("memory.index_failed"))
            return []

    def forget(self, tenant: int, ids: Sequence[int]) -> Flow[list[str]]:
        try:
            yield from aside(partial(self._forget, tenant, ids))
        except Exception as error:
            return [f"the index in Qdrant, which failed ({error}): repeat the call"]
        return ["snapshots of Qdrant"]

    # --- bringing Qdrant up to date

    def _catch_up(self, query: NearestQuery, space: int, before: _State | None, now: _State) -> Flow[None]:
        """Send the new vectors of a namespace to Qdrant, and remove those of versions that have ended."""
        first, until = space << SEQUENCE_BITS, space << SEQUENCE_BITS | now.last
        known: set[int] = set()
        if before is not None and before.generation == now.generation:
            after = first | before.last
            replaced = yield from fetch(_REPLACED, tenant=query.tenant, after=after, until=until)
            ended = {id for (id,) in replaced}
        else:  # rows were removed or embedded again: compare all
            after = first
            known = yield from aside(partial(self._ids, query, space))
            ended = set(known)
        while page := (
            yield from fetch(_LIVE, tenant=query.tenant, model=query.model, after=after, until=until, limit=_PAGE)
        ):
            ended.difference_update(id for id, _ in page)
            yield from aside(partial(self._add, query, space, [(id, vec) for id, vec in page if id not in known]))
            after = page[-1][0]
        yield from aside(partial(self._end, query, space, ended, now))

    # --- calls of Qdrant, outside of transactions

    def _collection(self, query: NearestQuery) -> str:
        return f"{self._prefix}-{blake2b(query.model.encode(), digest_size=8).hexdigest()}-{len(query.vector) // 2}"

    def _states(self, query: NearestQuery, spaces: Sequence[int]) -> dict[int, _State]:
        name, models = self._collection(query), self._models
        if not self._client.collection_exists(name):
            config = models.VectorParams(size=len(query.vector) // 2, distance=models.Distance.DOT)
            self._client.create_collection(name, vectors_config=config)
            for field in ("tenant", "space"):
                self._client.create_payload_index(name, field, models.PayloadSchemaType.INTEGER)
            return {}
        points = self._client.retrieve(name, [_point(query.tenant, space << SEQUENCE_BITS) for space in spaces])
        payloads = [point.payload or {} for point in points]
        return {one["state_of"]: _State(one["last"], one["generation"]) for one in payloads}

    def _add(self, query: NearestQuery, space: int, vectors: Sequence[tuple[int, bytes]]) -> None:
        payload = {"tenant": query.tenant, "space": space}
        points = [self._point(query.tenant, id, _numbers(vec[: len(query.vector)]), payload) for id, vec in vectors]
        if points:
            self._client.upsert(self._collection(query), points, wait=True)

    def _end(self, query: NearestQuery, space: int, ended: Iterable[int], now: _State) -> None:
        name = self._collection(query)
        if points := [_point(query.tenant, id) for id in ended]:
            self._client.delete(name, self._models.PointIdsList(points=points), wait=True)
        state = {"state_of": space, **now._asdict()}
        self._client.upsert(
            name,
            [self._point(query.tenant, space << SEQUENCE_BITS, [0.0] * (len(query.vector) // 2), state)],
            wait=True,
        )

    def _ids(self, query: NearestQuery, space: int) -> set[int]:
        ids: set[int] = set()
        start: Any = None
        while True:
            points, start = self._client.scroll(
                self._collection(query), self._filter(query.tenant, [space]), limit=10_000, offset=start,
                with_payload=False,
            )  # fmt: skip
            ids.update(_id(point.id) for point in points)
            if start is None:
                return ids

    def _query(self, query: NearestQuery, spaces: list[int]) -> list[Near]:
        for params in (None, self._models.SearchParams(exact=True)):
            answer = self._client.query_points(
                self._collection(query),
                _numbers(query.vector),
                query_filter=self._filter(query.tenant, spaces),
                search_params=params,
                limit=query.limit,
                with_payload=False,
            ).points
            if len(answer) >= query.limit:
                break
        return [Near(_id(point.id), point.score) for point in answer]

    def _forget(self, tenant: int, ids: Sequence[int]) -> None:
        points = self._models.PointIdsList(points=[_point(tenant, id) for id in ids])
        for one in self._client.get_collections().collections:
            if one.name.startswith(f"{self._prefix}-"):
                self._client.delete(one.name, points, wait=True)

    def _filter(self, tenant: int, spaces: list[int]) -> Any:
        models = self._models
        return models.Filter(
            must=[
                models.FieldCondition(key="tenant", match=models.MatchValue(value=tenant)),
                models.FieldCondition(key="space", match=models.MatchAny(any=spaces)),
            ]
        )

    def _point(self, tenant: int, id: int, vector: list[float], payload: dict[str, Any]) -> Any:
        return self._models.PointStruct(id=_point(tenant, id), vector=vector, payload=payload)


def _point(tenant: int, id: int) -> Any:
    """Return the id of a version in Qdrant, made of tenant and number."""
    return str(UUID(int=tenant << 64 | id))


def _id(point: Any) -> int:
    return UUID(str(point)).int & (1 << 64) - 1


def _numbers(vector: bytes) -> list[float]:
    import numpy

    numbers: list[float] = numpy.frombuffer(vector, "<f2").astype("f4").tolist()
    return numbers
