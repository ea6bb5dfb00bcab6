"""How values, paths, sizes and times are shown, and how help and usage errors read."""

from __future__ import annotations

import json
from collections import deque
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import numpy
import pytest
from every_command import commands

from perdure.cli import main
from perdure.cli.parameters import duration, since
from perdure.cli.text import ago, size
from perdure.views import readable, to_json

NOW = datetime(2026, 5, 20, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"\x01" * 40, "<40 bytes: " + "01" * 32 + "…>"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05Z"),
        (date(2026, 1, 2), "2026-01-02"),
        (timedelta(hours=2), "2:00:00"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (2**100, 2**100),
        ((1, (2,)), [1, [2]]),
        ({3, 1}, [1, 3]),
        (frozenset({"b", 1}), [1, "b"]),
        (deque([1]), [1]),
        ({1: "a", "1": "b", (1, 2): "c"}, {"1 (int)": "a", "1": "b", "[1, 2]": "c"}),
        (Decimal("1.50"), "1.50"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (PurePosixPath("/a"), "/a"),
        (
            numpy.array([[1.0, float("inf")]]),
            {"<type>": "ndarray", "dtype": "float64", "shape": [1, 2], "items": [[1.0, "inf"]]},
        ),
        (numpy.float32(1.5), 1.5),
    ],
)
def test_what_json_cannot_hold_has_a_readable_form(value: Any, shown: Any) -> None:
    assert readable(value) == shown
    assert json.loads(to_json(readable(value))) == shown


def test_json_escapes_what_could_steer_a_terminal_and_reads_back_the_same() -> None:
    nasty = {"\x1b\x7f\x9b\u202e\ud800": "é漢🙂\u2066"}
    text = to_json(nasty)
    assert not {"\x1b", "\x7f", "\x9b", "\u202e", "\u2066", "\ud800"} & set(text)
    assert "é漢🙂" in text
    assert json.loads(text) == nasty


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (35_400_000, "35 MB"), (999_600, "1.0 MB")]
)
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-5, "just now"),
        (30, "30 s ago"),
        (90, "1 min ago"),
        (7300, "2 h ago"),
        (90_000, "1 day ago"),
        (260_000, "3 days ago"),
    ],
)
def test_how_long_ago(seconds: int, shown: str) -> None:
    assert ago(NOW - timedelta(seconds=seconds), NOW) == shown


def test_durations_and_times() -> None:
    assert duration("1.5d") == timedelta(hours=36)
    assert duration("8w") == timedelta(weeks=8)
    assert abs(datetime.now(UTC) - timedelta(hours=2) - since("2h")) < timedelta(minutes=1)
    assert since("2026-05-01T00:00:00Z") == datetime(2026, 5, 1, tzinfo=UTC)
    assert since("2026-05-01") == datetime(2026, 5, 1).astimezone()


# --- help and usage


def test_every_command_teaches_by_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for name in commands():
        assert main([*name.split(), "--help"]) == 0
        out = capsys.readouterr().out
        examples = out.partition("Examples:\n")[2].splitlines()
        assert 1 <= len(examples) <= 3, name
        assert all(example.startswith(f"  perdure {name}") for example in examples), name
        assert max(map(len, out.splitlines())) <= 120, name


def test_a_wrong_option_names_the_help_of_its_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in commands():
        assert main([*name.split(), "--schema"]) == 2
        said = f"perdure: Option '--schema' requires an argument; see `perdure {name} --help`\n"
        assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["lgo"], "did you mean `perdure log`?"),
        (["xyzzy"], "`perdure --help` lists all"),
        (["log"], "Missing argument 'THREAD'; see `perdure log --help`"),
        (["log", "a", "--branch"], "--branches"),
        (["log", "a", "--limit", "x"], "'x' is not a valid integer"),
        (["threads", "--where", "user"], "'user' is not NAME=VALUE"),
        (["threads", "--since", "soon"], "'soon' is not a time"),
        (["threads", "--since", "999999999w"], "is not a time"),
        (["thread", "fork", "a"], "--name"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("perdure: ")
    assert err.count("\n") == 1
    assert words in err
