"""Paths into a state: `plan.steps[3].title`, keys with dots quoted: `limits."gpt-4.1"`.

The one grammar that `show --path` reads and `diff` writes, so that what `diff` prints can be given to `show`. Pure
functions over readable values (see `readable`); a path never reaches an attribute, only keys and positions.
"""

from __future__ import annotations

import json
import re
from typing import Any

from perdure.cli.text import readable, shorten
from perdure.errors import NotFound, UsageError

_PLAIN = re.compile(r'[^.\[\]"\s]+')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_POSITION = re.compile(r"\[(-?\d+)\]")
_BRACKETED = re.compile(r'\[("(?:[^"\\]|\\.)*")\]')


def parse(text: str) -> list[str | int]:
    """The parts of a path: text for keys, numbers for positions in brackets."""
    parts: list[str | int] = []
    at = 0
    while at < len(text):
        found = _POSITION.match(text, at)
        if found:
            parts.append(int(found[1]))
        elif found := _BRACKETED.match(text, at):
            parts.append(_unquote(found[1], text))
        else:
            start = at + 1 if parts and text[at] == "." else at
            found = _QUOTED.match(text, start) or _PLAIN.match(text, start)
            if not found or (parts and start == at):
                raise _malformed(text, at)
            parts.append(_unquote(found[0], text) if found[0].startswith('"') else found[0])
        at = found.end()
    if not parts:
        raise _malformed(text, 0)
    return parts


def _unquote(quoted: str, text: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError as error:
        raise _malformed(text, text.find(quoted)) from error


def _malformed(text: str, at: int) -> UsageError:
    return UsageError(
        f"the path {text!r} makes no sense at character {at + 1}: "
        'write plan.steps[3].title, and quote keys with dots: limits."gpt-4.1"'
    )


def show(path: tuple[Any, ...]) -> str:
    """A path as `parse` reads it."""
    shown = ""
    for part in path:
        seen = readable(part)
        if type(seen) is int:
            shown += f"[{seen}]"
            continue
        key = str(seen)
        shown += ("." if shown else "") + (key if _PLAIN.fullmatch(key) else json.dumps(key, ensure_ascii=False))
    return shown or "(the whole state)"


def pick(value: Any, text: str) -> Any:
    """The part of a readable value that a path leads to. Raises NotFound with what is there instead."""
    walked: tuple[Any, ...] = ()
    for part in parse(text):
        try:
            value = _child(value, part)
        except LookupError:
            where = show(walked) if walked else "the state"
            raise NotFound(f"{where} has no {show((part,))}: {_offer(value)}") from None
        walked = (*walked, part)
    return value


def _child(value: Any, part: str | int) -> Any:
    if isinstance(value, dict):
        return value[str(part)]  # keys that are numbers are text in a readable value
    if isinstance(value, list) and (type(part) is int or str(part).isdecimal()):
        return value[int(part)]
    raise LookupError


def _offer(value: Any) -> str:
    if isinstance(value, dict):
        return "it is empty" if not value else "it has " + shorten(", ".join(show((key,)) for key in value), 200)
    if isinstance(value, list):
        return f"it is a list of {len(value)}"
    return f"it is {shorten(json.dumps(value, ensure_ascii=False), 60)}"
