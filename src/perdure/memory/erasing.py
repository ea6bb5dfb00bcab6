"""Erasure of memory: of an item, of a namespace with all below it, or of every namespace that has a label.

It removes every version with its words and vectors, also from snapshots, and with a whole namespace its labels and
policy. Short transactions remove the rows and mark the files for scrubbing (`log/erase.py`). If the process is killed,
repeat the call, or let `compact` finish the scrubbing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from perdure.log import erase
from perdure.memory import stored_indexes
from perdure.memory.labels import above, below, labels_of, subject_of
from perdure.memory.maintenance import removal, remove
from perdure.memory.rows import SEQUENCE_BITS
from perdure.memory.scopes import searcher_of
from perdure.storage.program import Batch, Flow, Program, Sql, read, write
from perdure.storage.versions import forget, installed
from perdure.threads.actions import forget_actions
from perdure.threads.context import StoreContext
from perdure.threads.models import moment
from perdure.threads.retention import Erased, remains
from perdure.values.registry import register

PAGE = 5000  # versions in one transaction
_OTHERS = (
    "journals of runs that have read or put it: erase those runs (`perdure run erase`)",
    "threads in which it was said, such as conversations: erase those threads (`perdure thread erase`)",
)
_IN_SCOPE = "tenant = :tenant AND path >= :path AND path < :below"
_SPACES = Sql(f"SELECT space, path FROM memory_space WHERE {_IN_SCOPE}")
_PAST_SPACES = Sql(f"SELECT DISTINCT space, path FROM memory_space_past WHERE {_IN_SCOPE}")
_LOCK = Sql("SELECT 1 FROM memory_space WHERE tenant = :tenant AND space = :space {for_update}")
_DROP_SPACE = Sql("DELETE FROM memory_space WHERE tenant = :tenant AND space = :space")
_UNTIL = Sql(
    "SELECT id FROM memory_item WHERE tenant = :tenant AND space = :space ORDER BY id LIMIT 1 OFFSET :offset",
)
_KEY = "key = :key"
_ERASE_KEY, _ERASE_PAGE = removal(_KEY), removal("id < :until")
# For the tables that snapshots keep. A version's number begins with that of its namespace.
_VERSIONS = "tenant = :tenant AND id > :first AND id < :last"
register(Erased, name="perdure.Erased")  # a durable function may return it


def erase_item(ctx: StoreContext, path: str, key: str, full: bool) -> Flow[Erased]:
    erased, _ = yield from _erase(ctx, path, lambda each: each == path, partial(_wipe_key, key), full)
    return erased


def erase_namespace(ctx: StoreContext, path: str, full: bool) -> Flow[Erased]:
    erased, namespaces = yield from _erase(ctx, path, lambda _: True, _wipe_page, full)
    return replace(erased, namespaces=namespaces)


def erase_label(ctx: StoreContext, path: str, label: str, full: bool) -> Flow[Erased]:
    """Erase every namespace at or below a path that has a label, with all below it."""
    erased, namespaces = yield from _erase(ctx, path, lambda each: label in labels_of(each), _wipe_page, full)
    return replace(erased, namespaces=namespaces)


def _erase(
    ctx: StoreContext,
    path: str,
    is_meant: Callable[[str], bool],
    wipe: Callable[[int, int, int], Program[tuple[set[int], bool]]],
    full: bool,
) -> Flow[tuple[Erased, int]]:
    """Erase with `wipe` in each namespace for which `is_meant` is true. Return the result and their number."""
    at, tenant = ctx.clock_us(), (yield from ctx.tenant())
    if tenant is None:
        return Erased(0, moment(at), ()), 0
    searcher, ids = searcher_of(ctx), set[int]()
    spaces = [(space, each) for space, each in (yield from read(partial(_spaces, tenant, path))) if is_meant(each)]
    for space, each in spaces:
        is_done = False
        while not is_done:
            page, is_done = yield from write(partial(wipe, tenant, space, at))
            ids |= page
        for scope in ("", *above(each)):  # every scope whose index holds its items
            searcher.scopes.forget(tenant, scope)
    yield from stored_indexes.drop(tenant, [space for space, _ in spaces])
    yield from forget_actions(tenant, [subject_of(each) for _, each in spaces])
    copies = [*_OTHERS, *(yield from remains(ctx, tenant, full))]
    if (yield from read(partial(erase.marked, tenant))) is not None:
        copies = [*(yield from erase.finish(tenant, ctx.driver.dialect, full=full)), *copies]
    if searcher.index is not None and ids:
        copies += yield from searcher.index.forget(tenant, sorted(ids))
    return Erased(0, moment(at), tuple(copies), versions=len(ids)), len(spaces)


def _spaces(tenant: int, path: str) -> Program[list[tuple[int, str]]]:
    """Return the namespaces at and below a path, including those that only snapshots hold."""
    scope: dict[str, Any] = {"tenant": tenant, "path": path, "below": below(path)}
    reads = [_SPACES(**scope), *([_PAST_SPACES(**scope)] if (yield from installed()) else [])]
    return sorted({(space, each) for answer in (yield Batch(*reads)) for space, each in answer})


def _wipe_key(key: str, tenant: int, space: int, at: int) -> Program[tuple[set[int], bool]]:
    item = {"tenant": tenant, "space": space, "key": key}
    yield Batch(_LOCK(tenant=tenant, space=space))
    removed = yield from remove(_ERASE_KEY, item)
    ids = {id for id, *_ in removed} | (yield from _past_ids(_KEY, item))
    if ids:
        yield from _note(tenant, space, ids, at)
        for id in sorted(ids):
            yield from _forget(tenant, id - 1, id + 1)
    return ids, True


def _wipe_page(tenant: int, space: int, at: int) -> Program[tuple[set[int], bool]]:
    """Remove the first versions of a namespace, and with the last ones the namespace itself.

    Return the numbers of the versions, and whether the namespace is gone.
    """
    namespace, first = {"tenant": tenant, "space": space}, space << SEQUENCE_BITS
    _, behind = yield Batch(_LOCK(**namespace), _UNTIL(**namespace, offset=PAGE))
    until = behind[0][0] if behind else first + (1 << SEQUENCE_BITS)
    yield from erase.mark(tenant, at)
    ids = {id for id, *_ in (yield from remove(_ERASE_PAGE, {**namespace, "until": until}))}
    if not behind:
        yield Batch(_DROP_SPACE(**namespace))
        ids |= yield from _past_ids("1 = 1", namespace)
        yield from forget(("memory_space", "tenant = :tenant AND space = :space"), **namespace)
    yield from _note(tenant, space, ids or {first}, at)
    yield from _forget(tenant, first, until)
    return ids, not behind


def _past_ids(which: str, params: dict[str, Any]) -> Program[set[int]]:
    if not (yield from installed()):
        return set()
    where = f"tenant = :tenant AND space = :space AND {which}"
    [rows] = yield Batch(Sql(f"SELECT DISTINCT id FROM memory_item_past WHERE {where}")(**params))
    return {id for (id,) in rows}


def _note(tenant: int, space: int, ids: Iterable[int], at: int) -> Program[None]:
    numbers = set(ids)
    yield from erase.mark(tenant, at)
    yield from erase.note(tenant, space, max(numbers), len(numbers), None, at)


def _forget(tenant: int, first: int, last: int) -> Program[None]:
    """Remove the versions between two numbers from what snapshots keep."""
    tables = ((name, _VERSIONS) for name in ("memory_item", "memory_vector"))
    yield from forget(*tables, tenant=tenant, first=first, last=last)
