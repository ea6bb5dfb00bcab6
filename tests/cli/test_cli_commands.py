"""Every command, through `main(argv)`, on real SQLite files and once on PostgreSQL."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest
from cli_runs_kit import Run

import perdure


@perdure.register("cli-test.Plan")
@dataclass
class Plan:
    title: str


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an agent.db: thread `alice` with five steps and a branch at step 2, thread `bob` with one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERDURE_STORE", raising=False)
    with perdure.open("agent.db") as store:
        fill(store)
    return tmp_path


def fill(store: perdure.Store) -> None:
    alice = store.thread("alice", metadata={"user": "alice", "level": 3})
    saved = [
        alice.save({"n": n, "messages": ["hi"] * n, "limits": {"gpt-4.1": n}, "key": b"\xff"}, note=f"turn {n}")
        for n in range(5)
    ]
    alice.save({"n": -1}, parent=saved[2], note="another idea")
    store.thread("bob", metadata={"user": "bob"}).save({"plan": Plan("fly")})


def ids(run: Run, *options: str) -> dict[str, str]:
    """The ids of alice's checkpoints by their notes."""
    _, out, _ = run("log", "alice", "--branches", "--json", *options)
    return {line["note"]: line["id"] for line in map(json.loads, out.splitlines())}


# --- the store


def test_without_a_store_the_error_says_how_to_name_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERDURE_STORE", raising=False)
    code, out, err = run("threads")
    assert (code, out) == (2, "")
    assert "--store" in err
    assert "PERDURE_STORE" in err


@pytest.mark.parametrize("name", ["typo.db", "sqlite:///typo.db"])
def test_a_typo_makes_no_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run("threads", "--store", name)
    assert code == 4
    assert "no store at typo.db" in err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_store_is_one_line_and_exit_code_4(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not a database, " * 100)
    code, out, err = run("threads", "--store", str(other))
    assert (code, out) == (4, "")
    assert err.startswith("perdure: ")
    assert err.count("\n") == 1


def test_the_environment_names_the_store(run: Run, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("PERDURE_STORE", str(where / "agent.db"))
    assert run("threads")[0] == 0


def test_common_options_before_and_after_the_command_mean_the_same(run: Run, where: Path) -> None:
    before = run("--store", "agent.db", "--tenant", "default", "--json", "store", "stats")
    after = run("store", "stats", "--store", "agent.db", "--tenant", "default", "--json")
    assert before == after
    assert before[0] == 0


def test_a_tenant_sees_only_its_own(run: Run, where: Path) -> None:
    code, out, err = run("threads", "--tenant", "acme")
    assert (code, out) == (0, "")
    assert "no threads" in err
    assert run("show", "alice", "--tenant", "acme")[0] == 3


# --- threads


def test_threads_lists_the_newest_first_with_its_metadata(run: Run, where: Path) -> None:
    code, out, err = run("threads")
    head, bob, alice = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split() == ["thread", "head", "updated", "metadata"]
    assert bob.startswith("bob ")
    assert alice.startswith("alice ")
    assert alice.endswith(("just now  level=3 user=alice", "just now  user=alice level=3"))


def test_threads_json_is_a_line_per_thread(run: Run, where: Path) -> None:
    _, out, _ = run("threads", "--json")
    found = {line["name"]: line for line in map(json.loads, out.splitlines())}
    assert found["alice"]["metadata"] == {"user": "alice", "level": 3}
    assert found["bob"]["updated_at"].endswith("Z")


def test_threads_are_filtered(run: Run, where: Path) -> None:
    for options, names in (
        (["--where", "user=alice"], ["alice"]),
        (["--where", "level=3"], ["alice"]),
        (["--where", "user=alice", "--where", "level=4"], []),
        (["--where", "user=bob", "--since", "2h"], ["bob"]),
        (["--since", "2999-01-01"], []),
        (["--limit", "1"], ["bob"]),
    ):
        _, out, _ = run("threads", "--json", *options)
        assert [json.loads(line)["name"] for line in out.splitlines()] == names


# --- log


def test_log_is_newest_first_marks_the_head_and_tells_of_other_lines(run: Run, where: Path) -> None:
    code, out, err = run("log", "alice")
    lines = out.splitlines()
    assert code == 0
    assert lines[1].startswith("head  ")
    assert [line.rsplit("  ", 1)[1] for line in lines[1:]] == [f"turn {n}" for n in (4, 3, 2, 1, 0)]
    assert "1 other branch not shown" in err


def test_log_branches_merges_all_lines_and_marks_where_they_split(run: Run, where: Path) -> None:
    _, out, _ = run("log", "alice", "--branches", "--json")
    marks = [(line["note"], line["mark"]) for line in map(json.loads, out.splitlines())]
    # Newest first. Of the same millisecond, the other line may come anywhere above the checkpoint where it parts.
    assert marks.index(("another idea", "branch")) < marks.index(("turn 2", "split"))
    assert [mark for mark in marks if mark[0] != "another idea"] == [
        ("turn 4", "head"),
        ("turn 3", None),
        ("turn 2", "split"),
        ("turn 1", None),
        ("turn 0", None),
    ]


def test_log_starts_and_stops_where_it_is_told(run: Run, where: Path) -> None:
    _, out, err = run("log", "alice", "--start", "@3", "--limit", "2")
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["3", "2"]
    assert "older" in err


def test_a_note_cannot_steer_the_terminal(run: Run, where: Path) -> None:
    with perdure.open("agent.db") as store:
        store.thread("evil").save({"\x1b[2J": "\x9b2J\u202e"}, note="a\x1b[2J\nb")
    for command in ("log", "show"):
        _, out, _ = run(command, "evil")
        assert not {"\x1b", "\x9b", "\u202e"} & set(out)
    assert "a\\x1b[2J\\nb" in run("log", "evil")[1]


# --- show, and naming checkpoints


def test_show_prints_the_checkpoint_and_its_state(run: Run, where: Path) -> None:
    code, out, _ = run("show", "alice", "@1")
    line, _, state = out.partition("\n")
    assert code == 0
    assert "step 1" in line
    assert line.endswith("turn 1")
    assert json.loads(state) == {"n": 1, "messages": ["hi"], "limits": {"gpt-4.1": 1}, "key": "<1 bytes: ff>"}


def test_show_needs_no_classes(run: Run, where: Path) -> None:
    _, out, _ = run("show", "bob", "--json")
    assert json.loads(out)["state"] == {"plan": {"<type>": "cli-test.Plan", "title": "fly"}}


@pytest.mark.parametrize(
    ("ref", "note"),
    [("head", "turn 4"), ("head~3", "turn 1"), ("HEAD~", "turn 3"), ("@0", "turn 0"), ("@2~1", "turn 1")],
)
def test_a_checkpoint_is_named_by_its_place(run: Run, where: Path, ref: str, note: str) -> None:
    assert json.loads(run("show", "alice", ref, "--json")[1])["note"] == note


def test_a_checkpoint_is_named_by_its_id_also_on_a_branch(run: Run, where: Path) -> None:
    for note, id_ in ids(run).items():
        for ref in (id_, id_.upper()):
            assert json.loads(run("show", "alice", ref, "--json")[1])["note"] == note


@pytest.mark.parametrize(
    ("ref", "code", "words"),
    [
        ("0", 2, "names no checkpoint"),
        ("0000000000001", 3, "no checkpoint 0000000000001"),
        ("head~9", 3, "has no checkpoint 9 steps before"),
        ("@99", 3, "no checkpoint at step 99"),
        ("top!", 2, "names no checkpoint"),
    ],
)
def test_a_name_that_fits_nothing_is_a_clear_error(run: Run, where: Path, ref: str, code: int, words: str) -> None:
    got, out, err = run("show", "alice", ref)
    assert (got, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


def test_an_unknown_thread_suggests_the_nearest(run: Run, where: Path) -> None:
    code, _, err = run("log", "alcie")
    assert code == 3
    assert err == "perdure: there is no thread 'alcie'; did you mean 'alice'?\n"


def test_a_thread_whose_name_looks_like_an_option_can_be_named(run: Run, where: Path) -> None:
    with perdure.open("agent.db") as store:
        store.thread("--all").save({})
    assert run("show", "--", "--all")[0] == 0


# --- diff


def test_diff_goes_path_by_path(run: Run, where: Path) -> None:
    code, out, _ = run("diff", "alice", "@3")
    assert code == 0
    assert out.splitlines() == ["~ n: 3 -> 4", '+ messages[3] = "hi"', '~ limits."gpt-4.1": 3 -> 4']
    assert run("diff", "alice", "@4", "@3")[1].splitlines()[1] == '- messages[3] = "hi"'


def test_diff_json_is_one_document(run: Run, where: Path) -> None:
    _, out, _ = run("diff", "alice", "@3", "--json")
    changes = json.loads(out)["changes"]
    assert changes[1] == {"path": "messages[3]", "parts": ["messages", 3], "kind": "added", "after": "hi"}


# --- fork, rollback


def test_fork_goes_on_from_a_checkpoint(run: Run, where: Path) -> None:
    code, out, _ = run("thread", "fork", "alice", "@1", "--name", "alice-try")
    assert code == 0
    assert "as alice-try" in out
    assert json.loads(run("show", "alice-try", "--json")[1])["note"] == "turn 1"
    code, _, err = run("thread", "fork", "alice", "--name", "alice-try")
    assert code == 2
    assert "exists already" in err


def test_rollback_makes_an_old_state_the_newest(run: Run, where: Path) -> None:
    code, out, _ = run("thread", "rollback", "alice", "head~3", "--note", "oops", "--json")
    made = json.loads(out)
    assert (code, made["kind"], made["note"], made["is_head"]) == (0, "rollback", "oops", True)
    assert json.loads(run("show", "alice", "--json")[1])["state"]["n"] == 1


def test_edit_replaces_one_value_of_the_newest_state(run: Run, where: Path) -> None:
    code, out, _ = run("thread", "edit", "alice", "n", "40", "--note", "by hand", "--expect", "head", "--json")
    made = json.loads(out)
    assert (code, made["kind"], made["note"], made["is_head"]) == (0, "update", "by hand", True)
    assert json.loads(run("show", "alice", "--json")[1])["state"]["n"] == 40
    code, _, err = run("thread", "edit", "alice", '["n", 3]', "x")
    assert (code, "is not there" in err) == (2, True)


# --- prune, delete


@pytest.mark.parametrize("command", [["thread", "prune", "alice", "--keep", "2"], ["thread", "delete", "alice"]])
def test_nothing_is_removed_without_yes_where_nobody_can_be_asked(run: Run, where: Path, command: list[str]) -> None:
    code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert "--yes" in err
    assert len(ids(run)) == 6


def test_prune_keeps_the_newest(run: Run, where: Path) -> None:
    code, out, _ = run("thread", "prune", "bob", "--keep", "1", "--yes")
    assert (code, out) == (0, "0 checkpoints of bob removed\n")
    code, out, _ = run("thread", "prune", "alice", "--keep", "2", "--yes", "--json")
    assert code == 0
    assert json.loads(out)["removed"] > 0
    assert len(run("log", "alice", "--json")[1].splitlines()) == 2


def test_delete_says_how_many_records_went(run: Run, where: Path) -> None:
    code, out, _ = run("thread", "delete", "alice", "--yes")
    assert (code, out) == (0, "deleted alice: 6 records removed\n")
    assert run("show", "alice")[0] == 3


# --- verify, stats


def test_verify_finds_nothing_in_a_sound_store(run: Run, where: Path) -> None:
    assert run("store", "verify") == (0, "7 checkpoints of 2 threads checked: no problems\n", "")
    found = json.loads(run("store", "verify", "--json")[1])
    assert found == {"ok": True, "threads": 2, "checkpoints": 7, "runs": 0, "versions": 0, "problems": []}


def test_verify_lists_problems_and_exits_with_1(run: Run, where: Path) -> None:
    connection = apsw.Connection("agent.db")
    connection.execute("UPDATE record SET hash = zeroblob(32) WHERE note LIKE 'turn 4%'")
    connection.close()
    code, out, _ = run("store", "verify")
    assert code == 1
    assert out.splitlines()[-1].endswith(("problem", "problems"))
    code, out, _ = run("store", "verify", "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["problems"][0]["thread"]) == (1, False, "alice")


def test_a_damaged_head_is_passed_over_and_said_but_never_for_one_that_was_asked_for(run: Run, where: Path) -> None:
    connection = apsw.Connection("agent.db")
    connection.execute("UPDATE record SET hash = zeroblob(32) WHERE note LIKE 'turn 4%'")
    connection.close()
    code, out, err = run("show", "alice", "--json")
    assert (code, json.loads(out)["note"]) == (0, "turn 3")
    assert "passed over" in err
    code, out, err = run("show", "alice", "head")
    assert (code, out) == (4, "")
    assert err.count("\n") == 1


def test_stats_counts(run: Run, where: Path) -> None:
    found: dict[str, Any] = json.loads(run("store", "stats", "--json")[1])
    assert (found["threads"], found["checkpoints"]) == (2, 7)
    assert found["stored_bytes"] == found["difference_bytes"] + found["keyframe_bytes"]
    assert found["file_bytes"] >= (where / "agent.db").stat().st_size
    rows = dict(line.rsplit("  ", 1) for line in run("store", "stats")[1].splitlines()[1:])
    assert {name.strip() for name in rows} >= {
        "threads",
        "checkpoints",
        "keyframes",
        "state bytes",
        "ratio",
        "file bytes",
    }


# --- PostgreSQL


def test_the_same_commands_work_on_postgresql(run: Run, postgres_url: str) -> None:
    with perdure.open(postgres_url) as store:
        fill(store)
    at = ["--store", postgres_url]
    assert len(ids(run, *at)) == 6
    assert run("diff", "alice", "@3", *at)[1].startswith("~ n: 3 -> 4\n")
    assert run("thread", "fork", "alice", "@1", "--name", "alice-try", *at)[0] == 0
    assert run("thread", "rollback", "alice", "@1", *at)[0] == 0
    assert run("store", "verify", *at)[0] == 0
    assert json.loads(run("store", "stats", "--json", *at)[1])["file_bytes"] is None
    assert run("thread", "prune", "alice", "--keep", "2", "--yes", *at)[0] == 0
    assert run("thread", "delete", "alice-try", "--yes", *at)[0] == 0
    assert run("show", "alice-try", *at)[0] == 3
