"""Text of the command line: times, names that do not exist, complaints. Values as text: `perdure.views`."""

from __future__ import annotations

import difflib
import sys
from datetime import datetime

from perdure.values.amounts import plural as plural
from perdure.values.amounts import size as size
from perdure.values.readable import printable as printable
from perdure.values.readable import readable as readable
from perdure.values.readable import to_json as to_json


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def local(at: datetime) -> str:
    """Return a stored time as local time, to the second."""
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def ago(at: datetime, now: datetime) -> str:
    """Return how long ago a time was: `just now`, `5 min ago`, `12 days ago`; after 30 days, the date."""
    seconds = (now - at).total_seconds()
    if seconds < 10:  # negative if the other clock is ahead
        return "just now"
    if seconds < 60:
        return f"{seconds:.0f} s ago"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min ago"
    if seconds < 86_400:
        return f"{seconds // 3600:.0f} h ago"
    days = int(seconds // 86_400)
    if days <= 30:
        return f"{plural(days, 'day')} ago"
    return at.astimezone().strftime("%Y-%m-%d")


def nearest(kind: str, name: str, known: list[str], command: str) -> str:
    """Return the message for a name that does not exist, with a similar name if there is one."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"`{command}` lists them"
    return f"there is no {kind} {name!r}; {hint}"


def complain(text: str) -> None:
    """Print one line on stderr after `perdure:`. Passwords are redacted: a message may quote an argument."""
    from perdure.storage.urls import redacted

    sys.stderr.write(f"perdure: {printable(redacted(' '.join(text.split())))}\n")
