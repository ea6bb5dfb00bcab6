"""Arguments in any order: `perdure pin alice --name good @5` is `perdure pin alice @5 --name good`.

argparse gives an optional argument its default as soon as an option comes before it, and refuses what follows. So the
arguments of a command are sorted before it sees them: what stands alone first, then the options with their values.
Nothing is interpreted here; what an option takes is asked of the parser.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from perdure.errors import UsageError

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
Options = Mapping[str, argparse.Action]


def ordered(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The same arguments, sorted. Raises UsageError for an option that there is not."""
    at, options = 0, parser._option_string_actions
    while at < len(argv) and (taken := _taken(argv, at, options)):
        if argv[at].partition("=")[0] not in options:
            _refuse(argv[at], {}, f"options of a command stand behind it; see `{parser.prog} --help`")
        at += taken
    commands = next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})
    if at >= len(argv) or argv[at] not in commands:  # beyond it: the value of the last option is missing
        return list(argv)
    command = commands[argv[at]]
    return [*argv[: at + 1], *_sorted(argv[at + 1 :], command)]


def _sorted(given: Sequence[str], command: argparse.ArgumentParser) -> list[str]:
    options = command._option_string_actions
    alone: list[str] = []
    others: list[str] = []
    at = 0
    while at < len(given):
        if given[at] == "--":
            alone += given[at + 1 :]
            break
        taken = _taken(given, at, options)
        if taken and given[at].partition("=")[0] not in options:
            _refuse(given[at], options, f"see `{command.prog} --help`")
        if taken:
            others += given[at : at + taken]
        else:
            alone.append(given[at])
        at += taken or 1
    if any(text.startswith("-") for text in alone):
        return [*others, "--", *alone]
    return [*alone, *others]


def _taken(given: Sequence[str], at: int, options: Options) -> int:
    """How many arguments belong to the option that stands here, itself included. 0: it is none."""
    text = given[at]
    if not text.startswith("-") or text == "-" or _NUMBER.fullmatch(text):
        return 0
    if text not in options:
        name, equals, _ = text.partition("=")
        if equals and name in options:
            return 1
        return 0 if " " in text or text == "--" else 1  # with a blank it is text, as argparse has it
    wanted = options[text].nargs
    if isinstance(wanted, int):
        return 1 + wanted
    if wanted is None:
        return 2
    end = at + 1
    while end < len(given) and not _taken(given, end, options) and given[end] != "--":
        end += 1
    return end - at


def _refuse(text: str, options: Options, hint: str) -> NoReturn:
    name = text.partition("=")[0]
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.7)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise UsageError(f"unrecognized arguments: {name}{meant}; {hint}")
