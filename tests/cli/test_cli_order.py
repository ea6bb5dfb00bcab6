"""Arguments may stand in any order, whatever this Python's argparse makes of it; and options that are none are told."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import permutations

import pytest

from perdure.cli import main
from perdure.cli.ordering import ordered
from perdure.cli.parser import COMMANDS, build


def _commands() -> dict[str, argparse.ArgumentParser]:
    [found] = [action for action in build()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


def _with_optional() -> list[str]:
    """The commands that have an argument which may be left out."""
    return [
        name
        for name, made in _commands().items()
        if any(a.nargs == "?" and not a.option_strings for a in made._actions)
    ]


# What stands alone, and options with their values, for each of them.
LINES: dict[str, tuple[list[str], list[list[str]]]] = {
    "show": (["alice", "@5"], [["--path", "n"], ["--all"]]),
    "diff": (["alice", "@1", "@5"], [["--exit-code"], ["--json"]]),
    "fork": (["alice", "@5"], [["--name", "n"], ["--keys=new"], ["--set", "4=x"]]),
    "rollback": (["alice", "@5"], [["--note", "why not"], ["--thread"]]),
    "verify": (["alice"], [["--store", "x.db"], ["--json"]]),
    "retention": (["alice"], [["--ttl", "30d"], ["--keep-last", "5"]]),
    "pin": (["alice", "@5"], [["--name", "n"], ["--json"]]),
    "erase": (["alice"], [["--checkpoint", "@5"], ["--yes"]]),
    "asks": (["trip"], [["--all"], ["--json"]]),
    "answer": (["trip", "4", "-5"], [["--who", "maria"], ["--text"]]),
    "keys": (["new", "acme"], [["--keys", "k.json"], ["--json"]]),
    "objects": (["out"], [["--cold", "30d"], ["--objects", "file:///x"]]),
    "roles": (["app", "agents"], [["--apply"], ["--password-from-env", "VAR"]]),
}


def test_all_of_them_are_here() -> None:
    assert sorted(LINES) == sorted(_with_optional())


def _orders(alone: list[str], options: list[list[str]]) -> Iterator[list[str]]:
    """Every order in which what stands alone keeps its own."""
    for places in set(permutations([0] * len(alone) + list(range(1, len(options) + 1)))):
        rest = iter(alone)
        yield [word for place in places for word in (options[place - 1] if place else [next(rest)])]


@pytest.mark.parametrize("name", LINES)
def test_every_order_means_the_same(name: str) -> None:
    parser = build()
    alone, options = LINES[name]
    first, *others = (vars(parser.parse_args(ordered([name, *line], parser))) for line in _orders(alone, options))
    assert others
    assert all(line == first for line in others)


def test_after_two_dashes_nothing_is_an_option() -> None:
    parser = build()
    made = parser.parse_args(ordered(["--json", "show", "--path", "n", "--", "--all", "@5"], parser))
    assert (made.thread, made.ref, made.path, made.all, made.json) == ("--all", "@5", "n", False, True)


def test_a_text_that_only_begins_like_an_option_is_text() -> None:
    parser = build()
    made = parser.parse_args(ordered(["send", "--topic", "t", "trip", "- see below"], parser))
    assert (made.value, made.topic) == ("- see below", "t")
    made = parser.parse_args(ordered(["threads", "--where", "a=1", "b=2", "--limit", "3"], parser))
    assert (made.where, made.limit) == ([("a", 1), ("b", 2)], 3)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["log", "a", "--branch"],
            "unrecognized arguments: --branch (did you mean --branches?); see `perdure log --help`",
        ),
        (["log", "a", "-x"], "unrecognized arguments: -x; see `perdure log --help`"),
        (["--limit", "3", "log", "a"], "unrecognized arguments: --limit; options of a command stand behind it"),
        (["pin", "a", "--name"], "--name: expected one argument; see `perdure pin --help`"),
        (["log", "a", "b"], "unrecognized arguments: b; see `perdure log --help`"),
    ],
)
def test_a_mistake_says_what_would_be_right(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_every_command_is_known_to_the_sorting() -> None:
    parser = build()
    for name in COMMANDS:
        assert ordered([name, "--json", "x"], parser) == [name, "x", "--json"]


@pytest.mark.parametrize(
    "option", sorted(name for name, a in build()._option_string_actions.items() if a.nargs is None and name[:2] == "--")
)
def test_an_option_without_its_value_is_told(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 2
    assert "expected one argument" in capsys.readouterr().err
