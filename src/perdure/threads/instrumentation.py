"""The metrics and log messages of saving and loading. They have sizes, paths and ids, but no value of a state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from perdure.log.append import Draft
from perdure.storage import metrics
from perdure.storage.events import event
from perdure.threads.context import StoreContext

_WARNED_MAX = 10_000  # threads whose warning is remembered; beyond that some are warned about again
_log = logging.getLogger("perdure")


def record_size(ctx: StoreContext, draft: Draft, sink: metrics.Sink) -> None:
    """Record the size of a saved state, and the bytes that are stored for it."""
    system, size = metrics.system_of(ctx.driver), len(draft.text)
    stored = len(draft.diff or b"") + len(draft.full or b"")
    sink.record(metrics.STATE_BYTES, size, system)
    sink.record(metrics.STORED_BYTES, stored, system)


def warn_skipped(thread: str, skipped: Mapping[str, Any], loaded: str) -> None:
    """Warn that a load returned an older checkpoint because newer ones are damaged."""
    if (sink := metrics.sink) is not None:
        sink.record(metrics.RECOVERIES, 1, "ancestor")
    first, count = next(iter(skipped)), len(skipped)
    _log.warning(
        "thread %r: damaged checkpoints were skipped (%d, from %s on); loaded %s instead",
        thread,
        count,
        first,
        loaded,
        extra=event("load.skipped", thread=thread, skipped=count, first=first, loaded=loaded),
    )


def warn_unknown(checkpoint: str) -> None:
    """Warn that a COMMIT was not acknowledged and its record is looked for."""
    _log.warning(
        "a commit's answer was lost; looking for record %s",
        checkpoint,
        extra=event("commit.unknown", checkpoint=checkpoint),
    )


def warn_if_large(ctx: StoreContext, thread: str, text: bytes) -> None:
    """Warn about a text longer than `ctx.warn_bytes`, and name the path that takes most of it.

    Warn once, and again when the size has doubled. Only the path and the size are logged, never a value.
    """
    key, size = (ctx.tenant_name, thread), len(text)
    if size < ctx.large_warned.get(key, 0):
        return
    from perdure.values.largest_parts import culprit  # most programs never need it

    if len(ctx.large_warned) >= _WARNED_MAX:
        ctx.large_warned.clear()
    ctx.large_warned[key] = 2 * size
    try:
        path, part = culprit(text)
    except (ValueError, TypeError, LookupError, RecursionError):  # a warning must never cost a save
        path, part = "state", size
    _log.warning(
        "thread %r: its state is %s; %s is %s of it. Keep large values elsewhere, and their name in the state",
        thread,
        _shown(size),
        path,
        _shown(part),
        extra=event("state.large", thread=thread, bytes=size, path=path, path_bytes=part),
    )


def _shown(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} KB"
