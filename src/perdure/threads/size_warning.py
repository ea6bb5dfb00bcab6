"""The warning about a large state: it names the path that makes it so, once, and again when it has doubled.

A save compares one integer with a limit; only beyond it is the state looked into. Never a value in the log: the size,
and a path, whose keys are cut to 40 characters.
"""

from __future__ import annotations

import logging

from perdure.storage.events import event
from perdure.threads.context import Context

_WARNED_MAX = 10_000  # threads that are remembered; beyond that some are warned about again
_log = logging.getLogger("perdure")


def warn_if_large(ctx: Context, thread: str, text: bytes) -> None:
    """Called with a text that is longer than `ctx.warn_bytes`."""
    key, size = (ctx.tenant_name, thread), len(text)
    if size < ctx.large_warned.get(key, 0):
        return
    from perdure.values.sizing import culprit  # most programs never need it

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
        megabytes(size),
        path,
        megabytes(part),
        extra=event("state.large", thread=thread, bytes=size, path=path, path_bytes=part),
    )


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} KB"
