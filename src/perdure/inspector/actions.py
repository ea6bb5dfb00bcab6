"""What an action is: it asks first, then acts under the name of the person who asked, then returns to its page.

A form posts to `/do/NAME`. The answer is a page that says what will happen, shows the command that does the same, and
has the same fields again (the script of a page shows it as a dialog). Confirmed, the proposal is made again and done,
and the browser is sent back with a notice.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.errors import UsageError
from perdure.inspector.view import PageView


class Fields:
    """The fields of a form that was sent. A missing one is a clear error."""

    def __init__(self, fields: Mapping[str, list[str]]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> str:
        """Return a field. Raises UsageError if the form has none."""
        if not self._fields.get(name):
            raise UsageError(f"the form has no field {name!r}: reload the page")
        return self._fields[name][0]

    def get(self, name: str, default: str = "") -> str:
        """Return a field without the spaces around it, or the default."""
        return self._fields.get(name, [default])[0].strip()

    def all(self, name: str) -> list[str]:
        """Return every value of a field, such as the boxes that are ticked."""
        return list(self._fields.get(name, ()))

    def one_of(self, name: str, choices: Mapping[str, Any], what: str) -> str:
        """Return a field that must be one of the choices. Raises UsageError."""
        if self[name] not in choices:
            raise UsageError(f"{self[name]!r} is nothing that can be asked of a {what}")
        return self[name]

    def pairs(self) -> list[tuple[str, str]]:
        """Return everything that was sent, to be sent again."""
        return [(name, value) for name, every in self._fields.items() for value in every]


@dataclass(frozen=True)
class Confirmation:
    """What an action is about to do. `title` is a question, `button` the verb; `do` returns what it did."""

    title: str
    text: str
    button: str
    commands: tuple[str, ...]
    """those that do the same"""
    do: Callable[[], Awaitable[str]]
    is_danger: bool = False


# An action checks the form and changes nothing: `do` of its proposal does. Its path is `/do/` and its name.
Action = Callable[[PageView, Fields], Awaitable[Confirmation]]


def value_in(text: str) -> Any:
    """Return what a person typed: the value if it is JSON, else the text, as commands read it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def count(number: int, noun: str) -> str:
    """Return `1 run`, `1,200 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
