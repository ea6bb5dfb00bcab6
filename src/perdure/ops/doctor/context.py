"""The doctor's checks of agents' context: states larger than a model's window, old journals, unbounded memory.

They read only counters and the newest rows of the largest namespaces, so they stay cheap however much is stored.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from perdure.log.retention import read_policy
from perdure.memory.labels import above, below, labels_of
from perdure.memory.large import LARGE_ITEMS
from perdure.memory.policies import DEFAULT, MemoryPolicy, load
from perdure.memory.rows import SEQUENCE_BITS
from perdure.memory.scopes import searcher_of
from perdure.ops.doctor.findings import DAY_S, Finding
from perdure.runs.journal.rows import FINISHED
from perdure.storage.program import Flow, Sql, fetch, read
from perdure.threads.context import StoreContext
from perdure.values.amounts import plural, size

WINDOW_TOKENS, _BYTES_PER_TOKEN = 200_000, 4
_OLD_DAYS = 30
_LARGEST, _NEWEST = 20, 500  # namespaces, and versions of each
_NEAR = 0.9
_GROWING_ITEMS = 1_000
_REEMBED = "run `perdure memory reembed --embedder local`, or with your own: app.py:embed"

_LARGE_STATES = Sql(
    """SELECT t.name, r.size FROM thread t CROSS JOIN record r
    WHERE r.tenant = t.tenant AND r.tree = t.tree AND r.id = t.head AND r.size > :large
    ORDER BY r.size DESC LIMIT 100"""
)
_FINISHED = ", ".join(f"'{status}'" for status in FINISHED)
_LEFT_BY_RUNS = Sql(
    f"""SELECT count(*) FROM run WHERE status IN ({_FINISHED}) AND entries > 0 AND keep_until IS NULL
    AND changed_at < :before"""
)
_SPACES = Sql("SELECT tenant, space, path, last, items, bytes FROM memory_space ORDER BY items DESC LIMIT :limit")
_POLICIES = Sql("SELECT tenant, path, policy FROM memory_space WHERE policy IS NOT NULL LIMIT 1000")
_NEAR_CAPS = Sql(
    """SELECT tenant, space, path, last, items, bytes FROM memory_space WHERE tenant = :tenant AND path >= :path
    AND path < :below AND (items >= :items OR bytes >= :bytes) ORDER BY items DESC LIMIT 100"""
)
_SAMPLE = Sql(
    """SELECT count(*), count(v.id), count(i.expires), sum(i.pinned), min(v.model), max(v.model) FROM memory_item i
    LEFT JOIN memory_vector v ON v.tenant = i.tenant AND v.id = i.id
    WHERE i.tenant = :tenant AND i.id > :after AND i.id <= :until AND i.ended_at IS NULL AND i.gone IS NULL"""
)


class _Counted(NamedTuple):
    tenant: int
    space: int
    path: str
    last: int
    items: int
    bytes: int

    def __str__(self) -> str:
        return f"{'/'.join(labels_of(self.path))} ({plural(self.items, 'item')} not pinned, {size(self.bytes)})"


def context(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check for states larger than a model's window, and for old journals of finished runs."""
    large = yield from fetch(_LARGE_STATES, large=WINDOW_TOKENS * _BYTES_PER_TOKEN)
    before = ctx.clock_us() - _OLD_DAYS * DAY_S * 1_000_000
    [(left,)] = yield from fetch(_LEFT_BY_RUNS, before=before)
    findings = []
    if large:
        message = f"{plural(len(large), 'thread')} with a state larger than {WINDOW_TOKENS:,} tokens, as a text"
        hint = "if a model reads it, mask old observations and summarise: compact_history, Scratchpad, Conversation"
        findings.append(
            Finding("context", "note", f"{message}; the largest: {large[0][0]} ({size(large[0][1])})", hint)
        )
    if left:
        message = f"journals and states of {plural(left, 'run')} that finished over {_OLD_DAYS} days ago stay for ever"
        findings.append(Finding("context", "note", message, "`perdure retention runs=30d`; workers apply it daily"))
    return findings or [Finding("context", "ok", "no state is too large for a model, and no old journal is kept")]


def memory(ctx: StoreContext) -> Flow[list[Finding]]:
    """Check long-term memory: namespaces near their cap or without one, and items without a vector."""
    spaces = [_Counted(*row) for row in (yield from fetch(_SPACES, limit=_LARGEST))]
    if not spaces:
        return [Finding("memory", "ok", "no long-term memory is stored")]
    policies = {(tenant, path): load(text) for tenant, path, text in (yield from fetch(_POLICIES))}
    findings = (yield from _caps(policies)) + (yield from _samples(ctx, spaces, policies))
    return findings or [Finding("memory", "ok", f"no large namespace without a cap; the largest: {spaces[0]}")]


def _caps(policies: dict[tuple[int, str], MemoryPolicy]) -> Flow[list[Finding]]:
    near: list[_Counted] = []
    for (tenant, path), policy in policies.items():
        items, most = policy.max_items or 2**62, policy.max_bytes or 2**62
        where = {"items": int(_NEAR * items), "bytes": int(_NEAR * most)}
        rows = yield from fetch(_NEAR_CAPS, tenant=tenant, path=path, below=below(path), **where)
        near += [space for space in map(_Counted._make, rows) if _policy(policies, space) is policy]
    if not near:
        return []
    message = (
        f"{plural(len(near), 'namespace')} within 10 % of the cap, such as {near[0]}: the oldest items will be removed"
    )
    return [Finding("memory", "note", message, "pin what must stay; see docs/how-to/memory-caps.md")]


def _samples(
    ctx: StoreContext, spaces: list[_Counted], policies: dict[tuple[int, str], MemoryPolicy]
) -> Flow[list[Finding]]:
    """Check the newest items of the largest namespaces."""
    models: set[str] = set()
    growing: list[_Counted] = []
    without, looked_at = 0, 0
    for space in spaces:
        first = space.space << SEQUENCE_BITS
        where = {"after": first + max(0, space.last - _NEWEST), "until": first + space.last}
        [(count, embedded, expiring, pinned, low, high)] = yield from fetch(_SAMPLE, tenant=space.tenant, **where)
        models.update(model for model in (low, high) if model is not None)
        without, looked_at = without + count - embedded, looked_at + count
        policy = _policy(policies, space)
        bounded = any((policy.max_items, policy.max_bytes, policy.max_age, policy.ttl))
        if space.items >= _GROWING_ITEMS and not bounded and expiring + (pinned or 0) < count:
            if (yield from read(partial(read_policy, space.tenant))).get("memory") is not None:
                continue
            growing.append(space)
    findings = []
    if growing:
        message = f"{plural(len(growing), 'large namespace')} without a cap or an expiry, such as {growing[0]}"
        hint = 'if it may not grow for ever: store.memory("…").policy(max_items=…), see docs/how-to/memory-caps.md'
        findings.append(Finding("memory", "note", message, hint))
    if models and without:
        message = f"{without:,} of the newest {looked_at:,} items have no vector: a search finds them by words only"
        findings.append(Finding("memory", "warning", message, _REEMBED))
    if len(models) > 1:
        message = f"vectors of {len(models)} models ({', '.join(sorted(models))}): only the embedder's own are compared"
        findings.append(Finding("memory", "warning", message, _REEMBED))
    large = [space for space in spaces if space.items > LARGE_ITEMS]
    if large and models and searcher_of(ctx).index is None:
        hint = "if that takes too much memory, open with search_index=QdrantIndex(…); see docs/how-to/embedders.md"
        findings.append(Finding("memory", "note", f"each process that searches {large[0]} keeps its vectors", hint))
    return findings


def _policy(policies: dict[tuple[int, str], MemoryPolicy], space: _Counted) -> MemoryPolicy:
    """Return the policy of a namespace: its own, or that of the nearest namespace above it."""
    return next(
        (policies[space.tenant, path] for path in above(space.path) if (space.tenant, path) in policies), DEFAULT
    )
