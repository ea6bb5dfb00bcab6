"""The commands about runs, through `main(argv)`: what they show, what they do, and what they refuse.

A store with a run in each state is made once for each test; the agents are those of `app.py`, which the commands that
run code are given.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
from cli_runs_kit import APP_FILE, Run, lines

import perdure

# --- runs


@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
def test_runs_lists_the_newest_first_with_what_each_waits_for(run: Run, store: perdure.Store, app: ModuleType) -> None:
    assert run("runs") == (0, "", "perdure: no runs in this store yet\n")
    store.run(app.travel, "NYC", id="trip")
    store.run(app.broken, id="broken")
    store.start(app.sleeper, id="later", queue="night")
    code, out, err = run("runs")
    assert (code, err) == (0, "")
    head, *rows = out.splitlines()
    assert head.split() == ["run", "status", "function", "changed", "waits", "for"]
    assert [row.split()[:3] for row in rows] == [
        ["later", "queued", "sleeper"],
        ["broken", "failed", "broken"],
        ["trip", "waiting", "travel"],
    ]
    assert rows[2].endswith("Which flight? (step 3)")


def test_runs_are_filtered(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    store.run(app.broken, id="broken")
    store.start(app.sleeper, id="later", queue="night")
    for options, ids in (
        (["--status", "waiting"], ["trip"]),
        (["--function", "broken"], ["broken"]),
        (["--queue", "night"], ["later"]),
        (["--status", "stuck"], []),
        (["--limit", "1"], ["later"]),
        (["--limit", "0"], ["later", "broken", "trip"]),
    ):
        code, out, _ = run("runs", "--json", *options)
        assert (code, [line["id"] for line in lines(out)]) == (0, ids)


def test_runs_says_when_there_may_be_more_or_none_fit(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.broken, id="broken")
    assert "there may be more: --before" in run("runs", "--limit", "1")[2]
    assert run("runs", "--status", "stuck") == (0, "", "perdure: no runs match\n")
    assert run("runs", "--tenant", "other")[2] == "perdure: no runs in this store yet\n"
    code, _, err = run("runs", "--status", "sleepy")
    assert code == 2
    assert "'stuck'" in err


# --- run, steps


def test_run_shows_where_it_stands_and_how_to_answer(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="my trip")
    code, out, err = run("run", "show", "my trip")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "my trip  waiting"
    assert "function    travel (version 1)" in out
    assert "question    Which flight?" in out
    assert "answer it   perdure answer 'my trip' 3 '<answer>'  (\"NYC 1\" | \"NYC 2\")" in out
    found = json.loads(run("run", "show", "my trip", "--json")[1])
    assert (found["status"], found["steps"], found["in_doubt"]) == ("waiting", 3, [])
    assert [(ask["step"], ask["options"]) for ask in found["questions"]] == [("3", ["NYC 1", "NYC 2"])]


def test_run_shows_results_and_errors(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.doubtful, "NYC", id="trip")
    store.run(app.broken, id="broken")
    assert 'result      "B-NYC"' in run("run", "show", "trip")[1]
    assert json.loads(run("run", "show", "trip", "--json")[1])["result"] == "B-NYC"
    assert "no such place" in run("run", "show", "broken")[1]
    assert "no such place" in json.loads(run("run", "show", "broken", "--json")[1])["error"]


def test_what_is_in_doubt_is_shown_with_its_key_and_how_to_settle_it(run: Run, doubt: perdure.Run) -> None:
    [step] = doubt.steps()
    out = run("run", "show", "doubt")[1]
    assert f"in doubt    step 1: book, key {step.key}" in out
    assert (
        "settle it   perdure run resolve doubt 1 --done '<result as JSON>' or perdure run resolve doubt 1 --not-done"
        in out
    )
    assert json.loads(run("run", "show", "doubt", "--json")[1])["in_doubt"] == ["1"]
    _, out, _ = run("steps", "doubt")
    shown = " ".join(out.splitlines()[1].split())
    assert shown == f"1 effect book in doubt key {step.key}: it raised TimeoutError: no answer"
    assert [line["key"] for line in lines(run("steps", "doubt", "--json")[1])] == [step.key]
    [ask] = lines(run("questions", "--json")[1])
    assert (ask["kind"], ask["key"]) == ("doubt", step.key)
    assert "done, not done" in run("questions")[1]


def test_steps_are_listed_in_their_order(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    code, out, _ = run("steps", "trip")
    assert code == 0
    head, *rows = out.splitlines()
    assert head.split() == ["step", "kind", "name", "status", "seconds", "result"]
    assert [row.split()[:4] for row in rows] == [
        ["1", "step", "search", "done"],
        ["2", "emit", "perdure.emit", "done"],
        ["3", "ask", "perdure.ask", "waiting"],
    ]
    found = lines(run("steps", "trip", "--json")[1])
    assert found[0]["result"] == ["NYC 1", "NYC 2"]


@pytest.mark.parametrize(
    "command",
    [
        ["run", "show", "tirp"],
        ["steps", "tirp"],
        ["questions", "tirp"],
        ["answer", "tirp", "x"],
        ["run", "resolve", "tirp", "1", "--not-done"],
        ["run", "send", "tirp", "x"],
        ["run", "tail", "tirp"],
        ["run", "cancel", "tirp"],
        ["run", "pause", "tirp"],
        ["run", "resume", "tirp"],
        ["run", "replay", APP_FILE, "tirp"],
        ["run", "fork", "tirp", "--name", "x"],
        ["run", "undo", "tirp"],
        ["run", "transfer", "tirp", "file"],
    ],
)
def test_an_unknown_run_is_exit_code_3_and_suggests_the_nearest(run: Run, app: ModuleType, command: list[str]) -> None:
    with perdure.open("agent.db") as store:
        store.run(app.travel, "NYC", id="trip")
    assert run(*command) == (3, "", "perdure: there is no run 'tirp'; did you mean 'trip'?\n")


# --- moving


def test_a_run_moves_to_another_store(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    assert run("run", "transfer", "trip", "other.db")[0] == 2
    code, out, _ = run("run", "transfer", "trip", "other.db", "--move")
    assert (code, out) == (0, "transferred to other.db: 0 threads with 0 checkpoints, 1 run\n")
    assert json.loads(run("run", "show", "trip", "--json")[1])["status"] == "exported"
    assert run("answer", "trip", "NYC 1", "--store", "other.db")[0] == 0
    with perdure.open("other.db") as other:
        assert other.run(app.travel, "NYC", id="trip").result() == "B-NYC 1"
    store.run(app.doubtful, "NYC", id="over")
    assert json.loads(run("run", "transfer", "over", "other.db", "--json")[1])["runs"] == 1
    assert store.get_run("over").status == "done"


# --- usage


@pytest.mark.parametrize(
    "command",
    [
        ["runs", "--limit", "-1"],
        ["run", "resolve", "trip", "1", "--done", "x", "--not-done"],
        ["run", "fork", "trip"],
        ["drill", "app.py:travel", "--args", "[1"],
        ["answer", "trip"],
    ],
)
def test_a_command_that_makes_no_sense_is_exit_code_2(run: Run, app: ModuleType, command: list[str]) -> None:
    with perdure.open("agent.db") as store:
        store.run(app.travel, "NYC", id="trip")
    code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert err.startswith("perdure: ")
    assert err.count("\n") == 1


def test_a_damaged_journal_is_exit_code_4_and_verify_names_the_run(run: Run, app: ModuleType) -> None:
    import apsw

    with perdure.open("agent.db") as store:
        store.run(app.travel, "NYC", id="trip")
    assert run("store", "verify")[1] == "0 checkpoints of 0 threads and 1 run checked: no problems\n"
    connection = apsw.Connection("agent.db")
    connection.execute("DELETE FROM journal WHERE seq = 1")
    connection.close()
    for command in (["run", "show"], ["steps"]):
        code, out, err = run(*command, "trip")
        assert (code, out, "does not add up" in err) == (4, "", True)
    code, out, _ = run("store", "verify", "--json")
    [problem] = json.loads(out)["problems"]
    assert (code, problem["run"]) == (1, "trip")
    assert "\ntrip " in run("store", "verify")[1]
    assert json.loads(run("store", "stats", "--json")[1])["runs"] == 1


def test_what_a_run_says_cannot_steer_the_terminal(run: Run, app: ModuleType) -> None:
    with perdure.open("agent.db") as store:

        @perdure.durable(name="cli-evil", version="1")
        def evil() -> Any:
            perdure.emit("\x1b[2J")
            return perdure.ask("\x1b[2J\u202esure?\n")

        store.run(evil, id="evil\x1b[2J")
    for command in (["runs"], ["run", "show", "evil\x1b[2J"], ["questions"], ["steps", "evil\x1b[2J"]):
        code, out, err = run(*command)
        assert code == 0
        assert not {"\x1b", "\u202e"} & set(out + err)


# --- tail


@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
def test_tail_follows_a_live_run_of_another_process_until_it_ends(store: perdure.Store) -> None:
    """Each line comes when it happens, also in a pipe."""
    seen, go_on = threading.Event(), threading.Event()

    @perdure.step(name="cli-first")
    def first() -> str:
        return "a"

    @perdure.step(name="cli-slow")
    def slow() -> str:
        seen.set()
        assert go_on.wait(60)
        return "b"

    @perdure.durable(name="cli-tailed", version="1")
    def tailed() -> str:
        perdure.emit({"begun": True})
        return first() + slow()

    running = threading.Thread(target=lambda: store.run(tailed, id="live"))
    running.start()
    assert seen.wait(60)
    tail = subprocess.Popen(
        [sys.executable, "-m", "perdure", "run", "tail", "live", "--json"], stdout=subprocess.PIPE, text=True
    )
    assert tail.stdout is not None
    begun = [json.loads(tail.stdout.readline()) for _ in range(2)]  # while the run is in the middle of its second step
    assert [(event["kind"], event["value"]) for event in begun] == [("emit", {"begun": True}), ("done", "a")]
    go_on.set()
    running.join(60)
    rest = [json.loads(line) for line in tail.stdout]
    tail.stdout.close()
    assert tail.wait(60) == 0
    assert [(event["kind"], event["value"]) for event in rest] == [("done", "b"), ("status", "done")]


def test_tail_shows_times_and_names(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.doubtful, "NYC", id="trip")
    code, out, _ = run("run", "tail", "trip")
    assert code == 0
    assert [line.split()[1:4] for line in out.splitlines()[:2]] == [["intent", "1", "book"], ["done", "1", "book"]]
    assert out.splitlines()[-1].split()[1:] == ["status", "doubtful", '"done"']


def test_progress_shows_the_last_record_of_a_run(run: Run, store: perdure.Store, app: ModuleType) -> None:
    @perdure.durable(name="cli.reports")
    def reports() -> None:
        perdure.progress(goal="Fly", done="Search", blocked=["sold out", "no answer"], next="Ask")

    store.run(reports, id="reports").result()
    store.run(app.travel, "NYC", id="trip")
    code, out, _ = run("run", "progress", "reports")
    assert code == 0
    assert "1. [x] Search" in out
    assert "- sold out\n- no answer" in out
    assert json.loads(run("run", "progress", "reports", "--json")[1])["blocked"] == ["sold out", "no answer"]
    code, _, err = run("run", "progress", "trip")
    assert code == 3
    assert "has reported no progress" in err
