"""What saving and loading tell the metrics and the log. Nothing of a state: sizes, and ids of checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from perdure.log.append import Draft
from perdure.storage import metrics
from perdure.storage.events import event
from perdure.threads.context import StoreContext

_WARNED_MAX = 10_000  # threads that are remembered; beyond that some are warned about again
_log = logging.getLogger("perdure")


def record_size(ctx: StoreContext, draft: Draft, sink: metrics.Sink) -> None:
    """How large a saved state is, and what storing it took."""
    system, size = metrics.system_of(ctx.driver), len(draft.text)
    stored = len(draft.diff or b"") + len(draft.full or b"")
    sink.record(metrics.STATE_BYTES, size, system)
    sink.record(metrics.STORED_BYTES, stored, system)


def warn_skipped(thread: str, skipped: Mapping[str, Any], loaded: str) -> None:
    """A load gave an older checkpoint, because newer ones are damaged."""
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
    """A COMMIT was not acknowledged: the record is looked for."""
    _log.warning(
        "a commit's answer was lost; looking for record %s",
        checkpoint,
        extra=event("commit.unknown", checkpoint=checkpoint),
    )


def warn_if_large(ctx: StoreContext, thread: str, text: bytes) -> None:
    """A text is longer than `ctx.warn_bytes`: name the path that makes it so, once, and again when it has doubled. Only
    the path and the size are logged, never a value."""
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
