"""The commands about snapshots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs_kit import Run, lines
from snapshot_kit import asks, moment_between

import perdure


@pytest.fixture
def filled(where: Path) -> Path:
    with perdure.open("agent.db", durability="normal") as store:
        store.thread("a").save({"n": 1})
        store.memory("users", "al/ice").put("drink", {"fact": "tea"})
    return where


def change() -> None:
    with perdure.open("agent.db", durability="normal") as store:
        store.thread("a").save({"n": 2})
        store.thread("b").save({"n": 1})
        store.memory("users", "al/ice").put("drink", {"fact": "coffee"})


def test_take_list_diff_good_release(run: Run, filled: Path) -> None:
    code, out, _ = run("snapshot", "take", "s", "--note", "v42", "--keep", "2d", "--json")
    made = json.loads(out)
    assert (code, made["name"], made["note"], made["good"]) == (0, "s", "v42", False)
    assert made["keep_until"] > made["taken_at"]
    code, out, err = run("snapshot", "diff", "s")
    assert (code, out) == (0, "")
    assert "nothing has changed" in err
    change()
    expected = ["+ thread b", "~ item users/al%2Fice/drink", "~ thread a"]
    assert sorted(run("snapshot", "diff", "s")[1].splitlines()) == expected
    assert "    ~ ['n']: 1 -> 2" in run("snapshot", "diff", "s", "--paths")[1].splitlines()
    [item] = [one for one in lines(run("snapshot", "diff", "s", "--paths", "--json")[1]) if one["what"] == "item"]
    assert (item["namespace"], item["name"], item["paths"][0]["after"]) == (["users", "al/ice"], "drink", "coffee")
    assert run("snapshot", "good", "s")[:2] == (0, "s is marked good\n")
    head, row = run("snapshots")[1].splitlines()
    assert head.split() == ["name", "taken", "good", "keep", "until", "held", "note"]
    assert (row.split()[0], row.split()[-1]) == ("s", "v42")
    [found] = lines(run("snapshots", "--json")[1])
    assert found["good"]
    assert found["held_bytes"] > 0
    run("snapshot", "take", "t")
    assert len(run("snapshot", "diff", "s", "t")[1].splitlines()) == 3
    assert run("snapshot", "diff", "t", "s")[0] == 2
    assert run("snapshot", "release", "s")[0] == 2, "it asks first"
    assert run("snapshot", "release", "s", "--yes")[0] == 0
    assert [one["name"] for one in lines(run("snapshots", "--json")[1])] == ["t"]


def test_a_name_that_is_not_there_or_taken(run: Run, filled: Path) -> None:
    for line in (["good", "x"], ["diff", "x"], ["release", "x", "--yes"]):
        code, out, err = run("snapshot", *line)
        assert (code, out) == (3, "")
        assert "there is no snapshot 'x'; `perdure snapshots` names those that are kept" in err
    assert "there are no snapshots" in run("snapshots")[2]
    run("snapshot", "take", "s")
    code, _, err = run("snapshot", "take", "s")
    assert code == 2
    assert "there is a snapshot 's' already" in err


def test_restore_and_undo(run: Run, filled: Path) -> None:
    run("snapshot", "take", "s")
    change()
    code, out, err = run("snapshot", "restore", "s", "--dry-run")
    changes = ["delete thread b", "set back item users/al%2Fice/drink", "set back thread a"]
    assert (code, sorted(out.splitlines())) == (0, changes)
    assert "dry run: nothing was restored" in err
    found = json.loads(run("snapshot", "restore", "s", "--dry-run", "--thread", "b*", "--json")[1])
    assert [one["name"] for one in found["changes"]] == ["b"]
    found = json.loads(run("snapshot", "restore", "s", "--dry-run", "--namespace", "users/al%2Fice", "--json")[1])
    assert [one["name"] for one in found["changes"]] == ["drink"]
    code, out, err = run("snapshot", "restore", "s")
    assert (code, sorted(out.splitlines())) == (0, changes)
    assert "restored; to undo it: perdure snapshot restore undo-1" in err
    assert "nothing has changed since" in run("snapshot", "restore", "s")[2]
    done = json.loads(run("snapshot", "restore", "undo-1", "--json")[1])
    assert done["undo"] == "undo-2"
    assert run("snapshot", "restore", "s", "--keys", "same")[0] == 2
    assert run("snapshot", "restore", "x")[0] == 3


def test_restore_runs_to_an_instant(run: Run, filled: Path) -> None:
    with perdure.open("agent.db", durability="normal") as store:
        store.run(asks, id="r")
        at = moment_between(store).isoformat()
        store.answer("r", "aisle")
        store.run(asks, id="r")
    code, out, err = run("snapshot", "restore", "--as-of", at, "--runs", "rewind")
    assert (code, out) == (0, "set back run r\n")
    assert "perdure snapshot restore undo-1 --runs rewind" in err
    assert "Which seat?" in run("questions")[1]
    code, _, err = run("snapshot", "restore", "--as-of", at, "--runs", "rewind", "--keys", "new")
    assert "nothing has changed since" in err


def test_replicate_and_promote(run: Run, filled: Path) -> None:
    code, out, _ = run("store", "replicate", "agent.db", "b.db", "--once")
    assert code == 0
    assert out.startswith("the target holds the source as of ")
    change()
    [done] = lines(run("store", "replicate", "agent.db", "b.db", "--once", "--json")[1])
    assert done["written"] > 0
    assert run("store", "promote", "b.db")[0] == 2, "it asks first"
    code, out, _ = run("store", "promote", "b.db", "--yes", "--json")
    assert json.loads(out)["era"] == 1
    with perdure.open("b.db") as store:
        store.thread("a").save({"n": 3})
    code, _, err = run("store", "replicate", "agent.db", "b.db", "--once")
    assert (code, "the target is not empty, and is no replica" in err) == (2, True)
    for line in (["store", "replicate", "agent.db", "c.db", "--once"], ["snapshot", "check", "c.db"]):
        assert run(*line, "--store", "agent.db")[0] == run("--tenant", "t", *line)[0] == 2
        assert "--tenant" not in run(*line[:2], "--help")[1]
    assert run("store", "replicate", "nothing.db", "c.db", "--once")[0] == 4
    assert not Path("c.db").exists()


@perdure.step
def cost(item: str) -> int:
    if item == "yacht":
        raise ValueError("no price")
    return len(item)


@perdure.durable
def shopping(items: list[str]) -> None:
    state = perdure.state({"total": 0})
    for item in items:
        state["total"] += cost(item)


def test_incident(run: Run, filled: Path) -> None:
    with perdure.open("agent.db", durability="normal") as store:
        store.run(shopping, ["ab", "yacht"], id="trip")
        store.run(shopping, ["abc", "ab"], id="good")
    run("snapshot", "take", "s")
    code, out, _ = run("snapshot", "incident", "s", "trip", "--states")
    assert code == 0
    assert out.startswith("trip: failed: ValueError: no price\n")
    for part in (
        "    packages: ",
        "2  step  cost  failed: ValueError",
        "    ~ ['total']: 0 -> 2",
        "raise ValueError",
        "state: {'total': 2}",
    ):
        assert part in out
    head, first, second = lines(run("snapshot", "incident", "s", "trip", "--json")[1])
    assert (head["run"]["status"], head["error"]) == ("failed", "ValueError: no price")
    assert head["environment"]["packages"]
    assert (first["step"]["result"], second["step"]["error"], second["state"]) == (
        2,
        "ValueError: no price",
        {"total": 2},
    )
    assert "in cost" in second["traceback"]
    blamed = lines(run("snapshot", "incident", "s", "trip", "--blame", "total", "--good", "good", "--json")[1])
    assert [frame["step"]["path"] for frame in blamed[1:]] == ["2"]
    assert "no step changed cart.0" in run("snapshot", "incident", "s", "trip", "--blame", "cart.0")[2]
    assert run("snapshot", "incident", "s", "trip", "--good", "good")[0] == 2
    assert run("snapshot", "incident", "s", "never")[0] == 3
