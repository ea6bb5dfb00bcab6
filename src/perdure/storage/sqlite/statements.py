"""A statement as SQLite takes it fastest: parameters by number, no spare white space, one step for several texts.

A parameter by name costs a string, its hash and a dictionary lookup, and the cache of prepared statements reads every
character of a text. Several texts run in one step, without a transaction around them, as the trigger of a temporary
view whose columns are the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from perdure.storage.program import Params, Sql, values_of

NOTHING_CHANGED = "the last text of a step changed nothing"
_PIECES = re.compile(r"""('(?:[^']|'')*'|"[^"]*")|--[^\n]*|\s+|:([A-Za-z_]\w*)""")


class Text(NamedTuple):
    """A text to run, and its parameters in the order of their numbers."""

    sql: str
    take: Callable[[Params], tuple[Any, ...]]


def prepare(sql: Sql) -> tuple[Text, ...]:
    """Return the texts of a statement. They are made at its first run and kept with it."""
    sql.prepared = prepared = tuple([_numbered(text) for text in sql.sqlite])
    return prepared


class OneStep(NamedTuple):
    """A statement of several texts in one step. If the last text changes no row, it fails with NOTHING_CHANGED."""

    create: str  # makes the view, once for each connection
    insert: Text


def step_of(sql: Sql) -> OneStep:
    matches = (match for text in sql.sqlite for match in _PIECES.finditer(text))
    names = list(dict.fromkeys(match[2] for match in matches if match[2] is not None))
    columns = ", ".join(f"NULL AS {name}" for name in names)
    body = "; ".join(_PIECES.sub(_as_column, text) for text in sql.sqlite)
    return OneStep(
        f"CREATE TEMP VIEW {sql.step} AS SELECT {columns}; "
        f"CREATE TEMP TRIGGER {sql.step}_insert INSTEAD OF INSERT ON {sql.step} BEGIN {body}; "
        f"SELECT RAISE(ABORT, '{NOTHING_CHANGED}') WHERE changes() = 0; END",
        _numbered(f"INSERT INTO temp.{sql.step} ({', '.join(names)}) VALUES (:{', :'.join(names)})"),
    )


def _as_column(match: re.Match[str]) -> str:
    quoted, name = match.groups()
    return quoted or (f"NEW.{name}" if name else " ")


def _numbered(text: str) -> Text:
    names: list[str] = []

    def piece(match: re.Match[str]) -> str:
        quoted, name = match.groups()
        if quoted is not None:
            return quoted
        if name is None:
            return " "  # white space, or a comment
        if name not in names:
            names.append(name)
        return f"?{names.index(name) + 1}"

    numbered = _PIECES.sub(piece, text).strip()
    return Text(numbered, values_of(names))
