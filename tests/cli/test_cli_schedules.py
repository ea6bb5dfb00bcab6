"""`perdure schedules` and `perdure schedule …`."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
from cli_runs_kit import APP_FILE, Run, lines

import perdure


@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
def test_a_schedule_from_its_declaration_to_its_end(run: Run, store: perdure.Store, app: ModuleType) -> None:
    assert "no schedules" in run("schedules")[2]
    target = f"{APP_FILE}:travel"
    create = ("schedule", "create", "nightly", target, "0 7 * * MON-FRI", "--args", '["NYC"]')
    code, out, err = run(*create, "--timezone", "Europe/Lisbon", "--priority", "3")
    assert (code, err) == (0, "")
    assert out.startswith("nightly starts travel 0 7 * * MON-FRI Europe/Lisbon; next 20")
    assert store.get_schedule("nightly").priority == 3
    assert run(*create)[0] == 2  # another time zone
    assert run(*create, "--replace")[0] == 0
    [found] = lines(run("schedules", "--json")[1])
    assert (found["name"], found["timezone"], len(found["upcoming"])) == ("nightly", "UTC", 5)
    head, row = run("schedules")[1].splitlines()
    assert head.split() == ["name", "function", "when", "next", "last", "run", "skipped"]
    assert row.startswith("nightly  travel    0 7 * * MON-FRI  20")
    assert run("schedule", "pause", "nightly")[1] == "nightly is paused\n"
    assert "paused" in run("schedules")[1]
    assert run("schedule", "resume", "nightly")[1].startswith("nightly continues; next 20")
    triggered = json.loads(run("schedule", "trigger", "nightly", "--json")[1])
    assert store.get_run(triggered["run"]).status == "queued"
    assert run("schedule", "backfill", "nightly", "7d")[1] == "5 runs queued\n"
    assert run("schedule", "backfill", "nightly", "7d")[1] == "0 runs queued\n"
    assert run("schedule", "pause", "nigtly")[::2] == (
        3,
        "perdure: there is no schedule 'nigtly'; did you mean 'nightly'?\n",
    )
    assert run("schedule", "delete", "nightly", "--yes")[1] == "deleted nightly\n"
    assert (store.schedules(), len(store.runs())) == ([], 6)
