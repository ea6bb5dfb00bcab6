"""Regular expressions in time that grows with the text, whatever the pattern and the text are.

Python's `re` tries one way after another, and a short text can have more ways than there is time: `(a+)+$` on thirty
letters. The answer to a question comes from outside, and its schema may too, so here all ways are followed at once
(Thompson's construction), from the tree that Python's own parser makes. What needs memory of the way (a
back-reference, looking ahead) is refused with UsageError.

Only one question is answered: does the pattern occur in the text. `$` is the very end, as in JSON Schema.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn

from perdure.errors import UsageError

PATTERN_LENGTH_MAX: Final = 1_000
TEXT_LENGTH_MAX: Final = 10_000
_OPS_MAX: Final = 1_000

Test = Callable[[str], bool]

_CATEGORIES: Final[dict[str, Test]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
}


class Op(NamedTuple):
    """One instruction: take a character that passes the test, go to one of the targets, be at a place, or end."""

    test: Test | None = None
    targets: tuple[int, ...] = ()
    place: str = ""
    ends: bool = False


class Pattern:
    """A compiled pattern."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._ops: list[Op] = []
        try:
            self._sequence(_parsed(text))
        except RecursionError:
            self._refuse("is nested too deeply")
        self._add(Op(ends=True))

    def occurs_in(self, text: str) -> bool:
        """Whether the pattern occurs somewhere in the text, which has at most TEXT_LENGTH_MAX characters."""
        if len(text) > TEXT_LENGTH_MAX:
            raise ValueError(f"a pattern is looked for in at most {TEXT_LENGTH_MAX:,} characters, not {len(text):,}")
        ops, reached = self._ops, [0]
        for at in range(len(text) + 1):
            waiting: list[int] = []
            if self._follow(reached, waiting, text, at):
                return True
            if at < len(text):
                char = text[at]
                # 0: it may begin at every character.
                reached = [0, *(number + 1 for number in waiting if ops[number].test(char))]  # type: ignore[misc]
        return False

    def _follow(self, reached: list[int], waiting: list[int], text: str, at: int) -> bool:
        """Go on from all instructions that were reached without taking a character. True: one of them is the end."""
        seen: set[int] = set()
        while reached:
            number = reached.pop()
            if number in seen:
                continue
            seen.add(number)
            op = self._ops[number]
            if op.test is not None:
                waiting.append(number)
            elif op.targets:
                reached.extend(op.targets)
            elif op.ends:
                return True
            elif _is_at(op.place, text, at):
                reached.append(number + 1)
        return False

    def _add(self, op: Op) -> int:
        if len(self._ops) >= _OPS_MAX:
            self._refuse("is too large; make its repetitions smaller")
        self._ops.append(op)
        return len(self._ops) - 1

    def _refuse(self, reason: str) -> NoReturn:
        raise UsageError(f"the pattern {self.text[:100]!r} {reason}")

    def _sequence(self, items: Any) -> None:
        for kind, value in items:
            name = str(kind)
            if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
                self._add(Op(test=_test(name, value)))
            elif name == "AT":
                self._add(Op(place=str(value)))
            elif name == "SUBPATTERN" and not value[1] and not value[2]:
                self._sequence(value[3])
            elif name == "BRANCH":
                self._branch(value[1])
            elif name in ("MAX_REPEAT", "MIN_REPEAT"):
                self._repeat(*value)
            else:
                self._refuse("looks around, refers back, or has flags; such patterns are not supported: simplify it")

    def _branch(self, ways: list[Any]) -> None:
        split = self._add(Op())
        starts, ends = [], []
        for way in ways:
            starts.append(len(self._ops))
            self._sequence(way)
            ends.append(self._add(Op()))
        self._ops[split] = Op(targets=tuple(starts))
        for end in ends:
            self._ops[end] = Op(targets=(len(self._ops),))

    def _repeat(self, least: int, most: int, body: Any) -> None:
        for _ in range(least):
            self._sequence(body)
        if most >= _OPS_MAX:
            if str(most) != "MAXREPEAT":
                self._refuse(f"repeats up to {most} times, and the limit is {_OPS_MAX - 1}")
            split = self._add(Op())
            self._sequence(body)
            self._add(Op(targets=(split,)))
            self._ops[split] = Op(targets=(split + 1, len(self._ops)))
            return
        splits = []
        for _ in range(most - least):
            splits.append(self._add(Op()))
            self._sequence(body)
        for split in splits:
            self._ops[split] = Op(targets=(split + 1, len(self._ops)))


@lru_cache(maxsize=128)
def compiled(text: str) -> Pattern:
    """The pattern, compiled. UsageError if it is none, or needs what is not supported."""
    return Pattern(text)


def _parsed(text: str) -> Any:
    import importlib
    import re

    if len(text) > PATTERN_LENGTH_MAX:
        raise UsageError(f"a pattern has at most {PATTERN_LENGTH_MAX:,} characters, not {len(text):,}")
    try:
        # Not public, but what it gives has been the same for as long as `re` is written in Python.
        tree = importlib.import_module("re._parser").parse(text)
    except (re.error, OverflowError) as error:
        raise UsageError(f"the pattern {text[:100]!r} is not a regular expression: {error}") from error
    if tree.state.flags & ~re.UNICODE:
        raise UsageError(f"the pattern {text[:100]!r} has flags; such patterns are not supported: simplify it")
    return tree


def _test(name: str, value: Any) -> Test:
    if name == "LITERAL":
        return chr(value).__eq__
    if name == "NOT_LITERAL":
        return chr(value).__ne__
    if name == "ANY":
        return "\n".__ne__
    return _set_test(value)


def _set_test(items: list[tuple[Any, Any]]) -> Test:
    negated = str(items[0][0]) == "NEGATE"
    characters: set[str] = set()
    ranges: list[tuple[str, str]] = []
    categories: list[tuple[Test, bool]] = []
    for kind, value in items[negated:]:
        if str(kind) == "LITERAL":
            characters.add(chr(value))
        elif str(kind) == "RANGE":
            ranges.append((chr(value[0]), chr(value[1])))
        else:
            plain = str(value).replace("_NOT_", "_")
            categories.append((_CATEGORIES[plain], plain == str(value)))

    def test(char: str) -> bool:
        inside = (
            char in characters
            or any(low <= char <= high for low, high in ranges)
            or any(category(char) is wanted for category, wanted in categories)
        )
        return inside is not negated

    return test


def _is_at(place: str, text: str, at: int) -> bool:
    if place in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return at == 0
    if place in ("AT_END", "AT_END_STRING"):
        return at == len(text)
    word = _CATEGORIES["CATEGORY_WORD"]
    at_boundary = (at > 0 and word(text[at - 1])) is not (at < len(text) and word(text[at]))
    return at_boundary is (place == "AT_BOUNDARY")
