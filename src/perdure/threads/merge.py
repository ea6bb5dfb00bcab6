"""Change a state: merge a patch into it for `thread.update`, replace a value in its text for `thread.edit`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from perdure.errors import UsageError
from perdure.log.envelopes import ENVELOPE


def merged(state: Any, patch: Mapping[str, Any], remove: Iterable[tuple[Any, ...]] = ()) -> Any:
    """Merge nested mappings into a state, replace other values, and delete the paths in `remove`. Return the state.

    The state is changed in place: pass one that was just decoded.
    """
    if not isinstance(patch, Mapping):
        raise UsageError(f"update() wants a mapping of what changes, not {type(patch).__name__}")
    if not isinstance(state, dict):
        raise UsageError(
            f"update() merges into a state that is a mapping; this one is a {type(state).__name__}: save() a new one"
        )
    for path in remove:
        _take_out(state, path)
    _merge(state, patch)
    return state


def _merge(into: dict[Any, Any], patch: Mapping[Any, Any]) -> None:
    for key, value in patch.items():
        if isinstance(value, Mapping) and type(into.get(key)) is dict:
            _merge(into[key], value)
        else:
            into[key] = value


def _take_out(state: Any, path: tuple[Any, ...]) -> None:
    if not path:
        raise UsageError("update(remove=…): an empty path would remove the whole state")
    at = state
    try:
        for part in path[:-1]:
            at = at[part]
        del at[path[-1]]
    except (KeyError, IndexError, TypeError) as error:
        where = "".join(f"[{part!r}]" for part in path)
        raise UsageError(f"update(remove=…): state{where} is not there") from error


def edited(text: bytes, path: tuple[Any, ...], value: bytes) -> bytes:
    """Return the text of a state with the text of one value replaced. No class of the state is needed."""
    if not path:
        raise UsageError("edit(path, value): an empty path is the whole state; save() replaces it")
    state = at = orjson.loads(text)
    if type(state) is dict and ENVELOPE in state:
        raise UsageError("a framework keeps this thread: edit its state there, such as with graph.update_state()")
    for number, part in enumerate(path):
        where = "".join(f"[{one!r}]" for one in path[: number + 1])
        if type(at) is dict and len(at) == 1 and next(iter(at)).startswith("^"):
            inside = "".join(f"[{one!r}]" for one in path[:number])
            raise UsageError(f"edit(path, value): state{inside} is no dict or list, so its parts cannot be replaced")
        is_there = part in at if type(at) is dict else type(at) is list and type(part) is int and 0 <= part < len(at)
        if not is_there:
            raise UsageError(f"edit(path, value): state{where} is not there")
        if number < len(path) - 1:
            at = at[part]
    at[path[-1]] = orjson.loads(value)
    return orjson.dumps(state)
