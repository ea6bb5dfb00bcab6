"""The store with everything it offers: threads, runs, and what somebody who operates it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from holdfast.errors import UsageError
from holdfast.log.cache import BaseCache
from holdfast.runs.session import LEASE_US
from holdfast.runs.store import RunStore
from holdfast.storage.urls import open_driver
from holdfast.threads.checks import check_name
from holdfast.threads.context import Context
from holdfast.threads.store import CACHE_BYTES, DEFAULT_TENANT
from holdfast.values.registry import Codec


def open_store(
    url: str,
    *,
    trust: Sequence[str] = (),
    durability: Literal["full", "normal"] = "full",
    tenant: str = DEFAULT_TENANT,
    timeout_s: float = 30.0,
    create: bool = True,
    cache_bytes: int = CACHE_BYTES,
    lease_s: float = LEASE_US / 1e6,
    keep_runs_s: float | None = None,
    **options: Any,
) -> Store:
    """Open a store: a path or `sqlite:///path` (made if it is not there), `:memory:`, or `postgresql://…`.

    `trust` names module prefixes whose data classes may be saved and loaded without being registered one by one.
    `durability="normal"` may lose the last commits at a power loss, never more, and never corrupts. `timeout_s` is how
    long to wait for other writers. `create=False` refuses to make a new store. `lease_s` is how long a run stays with a
    process that says nothing; `keep_runs_s` how long finished runs keep their journals (None: until they are deleted).
    Further options go to the driver.
    """
    check_name(tenant, "tenant")
    if not lease_s > 0:
        raise UsageError(f"lease_s={lease_s!r}: a number of seconds above 0")
    driver = open_driver(url, durability=durability, timeout_s=timeout_s, create=create, **options)
    context = Context(driver, Codec(trust=trust), BaseCache(cache_bytes), tenant)
    keep_us = None if keep_runs_s is None else int(keep_runs_s * 1e6)
    return Store(context, lease_us=int(lease_s * 1e6), keep_us=keep_us)


class Store(RunStore):
    """One database, as one tenant sees it."""
