"""The store: LangGraph's long-term memory on Perdure's, blocking and async in one class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    InvalidNamespaceError,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    ensure_embeddings,
    get_text_at_path,
    validate_op_namespace,
)
from langgraph.store.base import Item as StoreItem

from perdure import Store
from perdure.adapters import (
    Condition,
    Filter,
    Flow,
    Item,
    ItemChange,
    Items,
    Labels,
    checked_filter,
    field_condition,
)
from perdure.errors import UsageError
from perdure.langgraph.opening import IN_MEMORY
from perdure.langgraph.store_batches import MergedBatches
from perdure.langgraph.store_sweeper import SweepsItems

_WHOLE = "$"  # the field that is the whole value
# The score of an item by its cosine. Vectors have length 1, and 16 bits per number: a cosine has four digits.
_SCORES: dict[str, Callable[[float], float]] = {
    "cosine": lambda cosine: cosine,
    "inner_product": lambda cosine: cosine,
    "l2": lambda cosine: -math.sqrt(max(0.0, 2 - 2 * round(cosine, 4))),
}


class PerdureStore(SweepsItems, BaseStore):
    """LangGraph's store on `store.memory(…)`: the same namespaces, items and search, blocking and async in one class.

    `store` is a path or URL as for `perdure.open`, or an open store, which the caller closes. Without it, items are in
    memory and end with the process. `index` configures search: "embed" is the store's embedder (a function, an async
    function, a LangChain embeddings object, "provider:model", or "local"), "dims" the length of its vectors, "fields"
    the fields to index (default: all texts), with a vector each. The nearest vector of an item counts. "distance_type"
    chooses its score, "cosine", "inner_product" or "l2", between vectors of length 1. `ttl` has "default_ttl" in
    minutes and "refresh_on_read", whether a read restarts it. An expired item is never returned, and is removed by
    `sweep_ttl` or when the store is compacted.
    """

    supports_ttl = True

    def __init__(
        self,
        store: str | Store = IN_MEMORY,
        *,
        index: IndexConfig | None = None,
        ttl: TTLConfig | None = None,
        tenant: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(store, tenant, **options)
        self.ttl_config = ttl
        self._items = Items(self.store)
        self.index_config = index
        config: dict[str, Any] = {**(index or {})}
        fields = config.get("fields", config.get("text_fields"))  # SqliteStore calls them text_fields
        self._fields: list[str] | None = [fields] if isinstance(fields, str) else fields
        distance = config.get("distance_type") or "cosine"
        if distance not in _SCORES:
            raise UsageError(f'index={{"distance_type": {distance!r}}}: one of {", ".join(_SCORES)}')
        self._score_of = _SCORES[distance]
        #: the embeddings object of `index`, or None
        self.embeddings: Any = None
        if (embed := config.get("embed")) is not None:
            self.embeddings = embed if embed == "local" else ensure_embeddings(embed)
            self._items.use_embedder(self.embeddings if isinstance(embed, str) else embed, config.get("dims"))
        self._merged = MergedBatches(lambda ops: self._items.arun(self._batch(ops)))

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Run operations: first the reads, then the puts, all or none. Of two puts to one key, the last counts."""
        return self._items.run(self._batch(_checked(ops)))

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """`batch`, awaited, on any event loop. Batches that wait at the same time are run as one."""
        return await self._merged.run(_checked(ops))

    # --- flows

    def _batch(self, ops: Sequence[Op]) -> Flow[list[Result]]:
        changes = [self._change(op) for op in ops if isinstance(op, PutOp)]
        gets = [op for op in ops if isinstance(op, GetOp)]
        got = iter((yield from self._items.get((op.namespace, op.key) for op in gets)))
        results: list[Result] = []
        refreshed: list[Item] = []
        for op in ops:
            if isinstance(op, PutOp):
                results.append(None)
            elif isinstance(op, GetOp):
                item = next(got)
                refreshed += [item] if op.refresh_ttl and item is not None else []
                results.append(None if item is None else _item(item))
            elif isinstance(op, SearchOp):
                matches = yield from self._search(op)
                refreshed += matches if op.refresh_ttl else []
                results.append([self._search_item(item) for item in matches])
            else:
                results.append((yield from self._namespaces(op)))
        yield from self._items.write(changes, refreshed)
        return results

    def _search(self, op: SearchOp) -> Flow[list[Item]]:
        matches = checked_filter(_filter(op.filter)) if op.filter else None
        return self._items.find(
            op.namespace_prefix, op.query or None, matches=matches, limit=op.limit, offset=op.offset
        )

    def _namespaces(self, op: ListNamespacesOp) -> Flow[list[Labels]]:
        conditions = op.match_conditions or ()
        known = yield from self._items.namespaces(_common(conditions))
        matching = (labels for labels in known if all(_fits(labels, condition) for condition in conditions))
        # Shorten before paging: namespaces that become equal are listed once.
        listed = sorted({labels if op.max_depth is None else labels[: op.max_depth] for labels in matching})
        return listed[op.offset : op.offset + op.limit]

    def _change(self, op: PutOp) -> ItemChange:
        if op.value is None:
            return ItemChange(op.namespace, op.key, None)
        ttl_s = None if op.ttl is None else op.ttl * 60
        return ItemChange(op.namespace, op.key, {**op.value}, self._texts(op), ttl_s)

    def _texts(self, op: PutOp) -> list[str] | None:
        """Return the texts that an item is found by, or None for every text in its value."""
        fields = self._fields if op.index is None else op.index or []
        if fields is None or _WHOLE in fields:
            return None
        return [text for field in fields for text in get_text_at_path(op.value, field)]

    def _search_item(self, item: Item) -> SearchItem:
        score = item.score
        if score is not None and self.embeddings is not None:
            score = self._score_of(score)
        return SearchItem(item.namespace, item.key, item.value, item.created_at, item.at, score)


_OPS = (PutOp, GetOp, SearchOp, ListNamespacesOp)


def _checked(ops: Iterable[Op]) -> list[Op]:
    checked = [*ops]
    for op in checked:
        _check(op)
    return checked


def _check(op: Op) -> None:
    """Raise for operations that LangGraph's own methods refuse: those of a batch have not passed through them."""
    if not isinstance(op, _OPS):
        raise UsageError(f"an operation of a batch is a GetOp, SearchOp, ListNamespacesOp or PutOp, not {op!r:.100}")
    named: Any = getattr(op, "namespace_prefix" if isinstance(op, SearchOp) else "namespace", ())
    if isinstance(named, str):  # would be taken for labels of one letter each
        raise InvalidNamespaceError(f"a namespace is a tuple of labels, ({named!r},), not the text {named!r:.100}")
    validate_op_namespace(op)
    if isinstance(op, PutOp) and op.value is not None:
        if not op.namespace:
            raise InvalidNamespaceError("Namespace cannot be empty.")
        if not isinstance(op.value, Mapping):
            raise UsageError(f"the value of an item is a mapping, not {op.value!r:.100}")
        if op.ttl is not None and not op.ttl > 0:
            raise UsageError(f"put(ttl={op.ttl!r}): a number of minutes above 0, or None")
    elif isinstance(op, ListNamespacesOp):
        for condition in op.match_conditions or ():
            if condition.match_type not in ("prefix", "suffix"):
                raise UsageError(f'a namespace is matched by "prefix" or "suffix", not {condition.match_type!r:.100}')


def _item(item: Item) -> StoreItem:
    return StoreItem(
        value=item.value,
        key=item.key,
        namespace=item.namespace,
        created_at=item.created_at,
        updated_at=item.at,
    )


# --- namespaces


def _common(conditions: Iterable[MatchCondition]) -> Labels:
    """Return the longest prefix without a wildcard. Every namespace that matches is at or below it."""
    starts = [_fixed(condition.path) for condition in conditions if condition.match_type == "prefix"]
    return max(starts, key=len, default=())


def _fixed(path: Labels) -> Labels:
    return path[: path.index("*")] if "*" in path else path


def _fits(labels: Labels, condition: MatchCondition) -> bool:
    count = len(condition.path)
    part = labels[:count] if condition.match_type == "prefix" else labels[max(0, len(labels) - count) :]
    return len(part) == count and all(
        pattern in ("*", label) for pattern, label in zip(condition.path, part, strict=True)
    )


# --- filters


def _filter(condition: Any, names: tuple[Any, ...] = ()) -> Filter:
    """Return a test for a filter: a value, or a mapping of operators, or a mapping of fields to filters."""
    if not isinstance(condition, Mapping):
        return Filter("and", (field_condition(names, "eq", condition),))
    if any(isinstance(name, str) and name.startswith("$") for name in condition):
        return Filter("and", tuple(_operator(names, name, operand) for name, operand in condition.items()))
    return Filter("and", tuple(_filter(inner, (*names, name)) for name, inner in condition.items()))


def _operator(names: tuple[Any, ...], name: str, operand: Any) -> Condition:
    if name not in ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte"):
        raise UsageError(f"Unsupported operator: {name!r}. A filter knows $eq, $ne, $gt, $gte, $lt, $lte")
    return field_condition(names, name[1:], operand)
