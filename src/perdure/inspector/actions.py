"""What an action is: it asks first, then acts under the name of the person who asked, then returns to its page.

A form posts to `/do/NAME`. The answer is a page that says what will happen, shows the command that does the same, and
has the same fields again (the script of a page shows it as a dialog). Confirmed, the action is done, and the browser is
sent back with a notice. Reads of the form's fields go through `Fields`, so that a missing one is a clear error.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from perdure.errors import UsageError
from perdure.inspector.view import PageView

_NOTICES_MAX = 100


class Fields:
    """The fields of a form that was sent."""

    def __init__(self, fields: Mapping[str, list[str]]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> str:
        """Return a field. Raises UsageError if the form has none."""
        if not self._fields.get(name):
            raise UsageError(f"the form has no field {name!r}: reload the page")
        return self._fields[name][0]

    def get(self, name: str, default: str = "") -> str:
        """Return a field, or the default."""
        return self._fields.get(name, [default])[0]

    def all(self, name: str) -> list[str]:
        """Return every value of a field, such as the boxes that are ticked."""
        return list(self._fields.get(name, ()))

    def pairs(self) -> list[tuple[str, str]]:
        """Return everything that was sent, to be sent again."""
        return [(name, value) for name, every in self._fields.items() for value in every]


@dataclass(frozen=True)
class Confirmation:
    """What a person reads before an action: `title` is a question, `button` the verb that does it."""

    title: str
    text: str
    button: str
    commands: tuple[str, ...]
    """those that do the same"""
    is_danger: bool = False


@dataclass(frozen=True)
class Action:
    """An action: `ask` checks the form and changes nothing; `do` acts and returns what it did, in a sentence."""

    name: str
    ask: Callable[[PageView, Fields], Awaitable[Confirmation]]
    do: Callable[[PageView, Fields], Awaitable[str]]


class Notices:
    """What the last actions did, each shown by the page that has its id in the URL."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, tuple[Literal["good", "bad"], str]] = OrderedDict()

    def add(self, kind: Literal["good", "bad"], text: str) -> str:
        """Keep a notice and return its id."""
        notice = secrets.token_urlsafe(9)
        self._texts[notice] = (kind, text)
        if len(self._texts) > _NOTICES_MAX:
            self._texts.popitem(last=False)
        return notice

    def get(self, notice: str) -> tuple[Literal["good", "bad"], str] | None:
        """Return the kind and the text of a notice; None if there is none."""
        return self._texts.get(notice)


def value_in(text: str) -> Any:
    """Return what a person typed: the value if it is JSON, else the text, as commands read it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
