"""Every time in the JSON of the commands is ISO 8601, in UTC: none is a number."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from cli_runs_kit import Run

import perdure

ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
TIMES = re.compile(r"(.*_)?(at|deadline|due|since|made|expires)")
NO_TIMES = {"forked_at", "is_due"}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, name)
    else:
        yield name, value


@perdure.durable(name="times.late")
def late() -> Any:
    return perdure.ask("Now?", timeout_s=3600)


@pytest.fixture
def scene(store: perdure.Store, app: ModuleType) -> None:
    """A thread, and runs that were answered, sleep, wait until a deadline, are in doubt, and have failed."""
    store.thread("chat").save({"n": 1})
    store.run(app.travel, "NYC", id="trip")
    store.answer("trip", "NYC 1")
    store.run(app.travel, "NYC", id="trip")
    store.run(app.sleeper, id="sleeper")
    app.lose.append(TimeoutError("no answer"))
    store.run(app.doubtful, "NYC", id="doubt")
    store.run(late, id="late")
    store.run(app.broken, id="broken")


COMMANDS = [
    *(["threads"], ["log", "chat"], ["show", "chat"], ["runs"], ["questions", "--all"]),
    *(["store", "health"], ["doctor"], ["store", "stats"], ["retention"], ["store", "backup", "copy.backup"]),
    *(["thread", "pin", "chat", "--name", "p"], ["thread", "pins", "chat"]),
    *([*command, run] for command in (["run", "show"], ["steps"]) for run in ("trip", "sleeper", "doubt", "late")),
    *(["run", "tail", run] for run in ("trip", "broken")),
]


@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
def test_every_time_is_iso_8601(run: Run, scene: None) -> None:
    seen: set[str] = set()
    for command in COMMANDS:
        _, out, err = run(*command, "--json")
        documents = [json.loads(out)] if out.startswith("{\n") else [json.loads(line) for line in out.splitlines()]
        assert documents, (command, err)
        for name, value in leaves(documents):
            for unit in (1, 1e3, 1e6):  # since 1970, in this or the next decade
                is_time = type(value) in (int, float) and 1.6e9 < value / unit < 2.2e9 and not name.endswith("bytes")
                assert not is_time, (command, name, value)
            if TIMES.fullmatch(name) and name not in NO_TIMES and value is not None:
                assert ISO.fullmatch(str(value)), (command, name, value)
                seen.add(name)
    assert {"at", "created_at", "started_at", "wake_at", "asked_at", "deadline", "due", "answered_at"} <= seen
