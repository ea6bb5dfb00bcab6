"""A statement as SQLite takes it fastest: parameters by number, no spare white space.

By name, each parameter costs a string, its hash and a look into a dictionary; and the cache of prepared statements
reads every character of a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from perdure.storage.program import Sql

Params = Mapping[str, Any]
_PIECES = re.compile(r"""('(?:[^']|'')*'|"[^"]*")|--[^\n]*|\s+|:([A-Za-z_]\w*)""")


class Text(NamedTuple):
    """A text to run, and its parameters, in the order in which it wants them."""

    sql: str
    take: Callable[[Params], tuple[Any, ...]]


def prepare(sql: Sql) -> tuple[Text, ...]:
    """The texts of a statement, made when it is first run and kept with it."""
    sql.prepared = made = tuple([_numbered(text) for text in sql.sqlite])
    return made


def _numbered(text: str) -> Text:
    names: list[str] = []

    def piece(found: re.Match[str]) -> str:
        quoted, name = found.groups()
        if quoted is not None:
            return quoted
        if name is None:
            return " "  # white space, or a comment
        if name not in names:
            names.append(name)
        return f"?{names.index(name) + 1}"

    numbered = _PIECES.sub(piece, text).strip()
    return Text(numbered, _taker(names))


def _taker(names: list[str]) -> Callable[[Params], tuple[Any, ...]]:
    if not names:
        return lambda _: ()
    if len(names) == 1:
        [name] = names
        return lambda params: (params[name],)
    return itemgetter(*names)
