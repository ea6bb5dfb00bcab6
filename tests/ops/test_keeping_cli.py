"""The commands about what stays: compact, retention, pin, unpin, pins, erase, delete --force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from keeping_kit import fill, seen, steps

import perdure
from perdure.cli import main


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "a.db")


@pytest.fixture
def call(path: str, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*args: str, code: int = 0) -> str:
        assert main([*args, "--store", path]) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    return call


@pytest.fixture
def store(path: str) -> Any:
    with perdure.open(path) as made:
        fill(made.thread("alice"), 6)
        yield made


def test_retention_is_shown_and_set_field_by_field(store: perdure.Store, call: Any) -> None:
    assert "threads         forever  delete a thread this long after its last write\n" in call("retention")
    call("retention", "threads=30d")
    shown = [line.split()[:2] for line in call("retention", "checkpoints=5", "runs=90m").splitlines()]
    shown = [line for line in shown if line[1] != "forever"]
    assert shown[:3] == [["threads", "30d"], ["checkpoints", "5"], ["runs", "90m"]]
    rules = {"threads": "30d", "checkpoints": 5, "runs": "90m", "checkpoint_age": None}
    others = {"memory": None, "memory_history": "30d", "snapshots": None}
    assert json.loads(call("retention", "--json")) == rules | others
    call("retention", *(f"{name}=forever" for name in rules))
    assert store.ops.retention() == perdure.ops.Retention()


@pytest.mark.parametrize(
    "wrong",
    [
        ("retention", "threads=soon"),
        ("retention", "threads=0d"),
        ("retention", "threads=30"),
        ("retention", "checkpoints=0"),
        ("retention", "thread=3d"),
        ("retention", "threads"),
        ("thread", "erase"),
        ("thread", "erase", "alice"),
        ("thread", "pin", "alice"),
    ],
)
def test_a_usage_error_says_what_to_do(store: perdure.Store, call: Any, wrong: tuple[str, ...]) -> None:
    call(*wrong, code=2)
    assert len(steps(store.thread("alice"))) == 6


def test_compact_and_its_dry_run(store: perdure.Store, call: Any) -> None:
    call("retention", "checkpoints=2")
    assert "a compaction would remove this" in call("store", "compact", "--dry-run")
    assert json.loads(call("store", "compact", "--dry-run", "--json"))["checkpoints"] == 4
    assert len(steps(store.thread("alice"))) == 6
    found = json.loads(call("store", "compact", "--vacuum", "--json"))
    assert (found["checkpoints"], found["dry_run"], found["expired"]) == (4, False, [])
    assert len(steps(store.thread("alice"))) == 2
    assert "bytes after" in call("store", "compact")


def test_pins(store: perdure.Store, call: Any) -> None:
    assert "has no pins" in call("thread", "pins", "alice")
    call("thread", "pin", "alice", "@2", "--name", "good")
    assert "good" in call("thread", "pins", "alice")
    assert json.loads(call("thread", "pin", "alice", "--name", "head", "--json"))["name"] == "head"
    assert [json.loads(line)["name"] for line in call("thread", "pins", "alice", "--json").splitlines()] == [
        "good",
        "head",
    ]
    assert "--force" in call("thread", "delete", "alice", "--yes", code=2)
    call("thread", "unpin", "alice", "--name", "head")
    call("thread", "unpin", "alice", "--name", "head", code=3)
    call("thread", "delete", "alice", "--yes", "--force")
    assert seen(store) == {}


@perdure.durable(name="cli.erased")
def work(text: str) -> str:
    return text


def test_erase(store: perdure.Store, call: Any) -> None:
    told = call("thread", "erase", "alice", "--checkpoint", "@3", "--yes")
    assert "erased 1 checkpoint" in told
    assert "copies that may remain" in told
    assert steps(store.thread("alice")) == [5, 4, 2, 1, 0]
    store.thread("alice").fork(name="fork")
    assert "'fork'" in call("thread", "erase", "alice", "--yes", code=2)
    found = json.loads(call("thread", "erase", "alice", "--forks", "--yes", "--json"))
    assert (found["threads"], found["checkpoints"]) == (["alice", "fork"], 5)
    store.run(work, "a", id="r").result()
    assert "run r" in call("run", "erase", "r", "--yes")
    call("run", "erase", "r", "--yes", code=3)
    call("thread", "erase", "nobody", "--yes", code=3)


def test_a_thread_is_shown_with_its_rules_and_its_autosave(store: perdure.Store, call: Any) -> None:
    thread = store.thread("watched")
    with thread.autosave(perdure.autosave.adaptive(mtbf_s=600, min_s=2, max_s=2)) as state:
        state["n"] = 1
    thread.pin(name="good")
    thread.retention(checkpoint_age="30d")
    shown = call("thread", "show", "watched")
    assert "retention checkpoint_age  30d  its own\n" in shown
    assert "pins  good\n" in shown
    assert "autosave  every 2.0 s: a save costs " in shown
    assert "0 failures in 0 s, one in 600 s" in shown
    fields = json.loads(call("thread", "show", "watched", "--json"))
    assert (fields["autosave"]["failures"], fields["pins"], fields["own"]) == (0, ["good"], ["checkpoint_age"])
