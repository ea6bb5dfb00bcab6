"""What changed in a run's state, by path: found after a step's body has run, applied again when the step is replayed.

    ["=", path, value]                  set what lies there
    ["-", path]                         take it out
    ["~", path, start, count, items]    replace so many items of a list

A patch that does not lead exactly to what the body left (it put a key back in another place, or `1` for `True`) is
replaced by one that says it all. So applying it gives the same text, and its hash can be checked.
"""

from __future__ import annotations

from typing import Any

from perdure.threads.compare import _same as same
from perdure.values.codec import decode, encode
from perdure.values.registry import Codec
from perdure.values.showing import shown

Ops = list[list[Any]]
Path = tuple[Any, ...]
_DEPTH_MAX = 100


def difference(before: bytes, after: Any, after_text: bytes, codec: Codec) -> Ops:
    """What leads from one state to another; the first is given as text."""
    if before == after_text:
        return []
    ops = _find(decode(before, codec), after, ())
    state = decode(before, codec)
    apply(state, ops)
    if encode(state, codec) != after_text:
        return [["=", [], after]]
    return ops


def _find(before: Any, after: Any, path: Path) -> Ops:
    if type(before) is dict and type(after) is dict and len(path) < _DEPTH_MAX:
        ops: Ops = [["-", [*path, key]] for key in before if key not in after]
        for key, value in after.items():
            if key in before:
                ops += _find(before[key], value, (*path, key))
            else:
                ops.append(["=", [*path, key], value])
        return ops
    if type(before) is list and type(after) is list and len(path) < _DEPTH_MAX:
        return _find_in_list(before, after, path)
    return [] if same(before, after) else [["=", [*path], after]]


def _find_in_list(before: list[Any], after: list[Any], path: Path) -> Ops:
    head, shorter = 0, min(len(before), len(after))
    while head < shorter and same(before[head], after[head]):
        head += 1
    tail = 0
    while tail < shorter - head and same(before[-1 - tail], after[-1 - tail]):
        tail += 1
    old, new = before[head : len(before) - tail], after[head : len(after) - tail]
    if len(old) == len(new):
        return [
            op
            for at, (one, other) in enumerate(zip(old, new, strict=True))
            for op in _find(one, other, (*path, head + at))
        ]
    return [["~", [*path], head, len(old), new]]


def apply(state: dict[Any, Any], ops: Ops) -> None:
    """Change a state as a patch says, in place. Lenient: a fork may have changed what the patch was made for."""
    for op in ops:
        kind, path = op[0], op[1]
        if not path:
            state.clear()
            state.update(op[2])
            continue
        holder = _walk(state, path[:-1], make=kind == "=")
        if holder is None:
            continue
        key = path[-1]
        if kind == "=":
            _set(holder, key, op[2])
        elif kind == "-" and isinstance(holder, dict):
            holder.pop(key, None)
        elif kind == "~":
            target = _walk(holder, [key], make=False)
            if isinstance(target, list):
                target[op[2] : op[2] + op[3]] = op[4]


def _walk(state: Any, path: list[Any], *, make: bool) -> Any:
    at = state
    for part in path:
        if isinstance(at, dict):
            if part not in at and make:
                at[part] = {}
            at = at.get(part)
        elif isinstance(at, list) and isinstance(part, int) and 0 <= part < len(at):
            at = at[part]
        else:
            return None
    return at


def _set(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict):
        holder[key] = value
    elif isinstance(holder, list) and isinstance(key, int):
        if 0 <= key < len(holder):
            holder[key] = value
        else:
            holder.append(value)


def show_path(path: Path) -> str:
    """A path as code would say it."""
    return "state" + "".join(f"[{shown(part)}]" for part in path)
