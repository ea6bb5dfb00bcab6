"""Merge a patch into a state, for `thread.update`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perdure.errors import UsageError


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
