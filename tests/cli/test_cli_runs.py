"""The commands about runs, through `main(argv)`: what they show, what they do, and what they refuse.

A store with a run in each state is made once for each test; the agents are those of `app.py`, which the commands that
run code are given.
"""

from __future__ import annotations

import getpass
import importlib.util
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import holdfast as hf
from holdfast.cli import main
from holdfast.runs.functions import specs

Run = Callable[..., tuple[int, str, str]]
APP = """
import holdfast as hf

lose = []  # what happens to the next booking

@hf.step
def search(dest: str) -> list[str]:
    return [f"{dest} 1", f"{dest} 2"]

def cancelled(result: str) -> None:
    pass

@hf.effect(timeout_s=0.01, undo=cancelled)
def book(flight: str, key: hf.Key) -> str:
    if lose:
        raise lose.pop()
    return f"B-{flight}"

@hf.durable(version="1")
def travel(dest: str) -> str:
    flights = search(dest)
    hf.emit({"found": len(flights)})
    flight = hf.ask("Which flight?", options=flights)
    return book(flight)

@hf.durable(version="1")
def doubtful(dest: str) -> str:
    return book(dest)

@hf.durable(version="1")
def listener() -> list:
    return [hf.receive("news"), hf.receive("news")]

@hf.durable(version="1")
def quorum() -> str:
    return hf.ask("Pay?", schema=int, approvers=["ann", "bob", "eve"], quorum=2)

@hf.durable(version="1")
def both() -> list:
    return hf.gather(lambda: hf.ask("One?"), lambda: hf.ask("Two?", options=["1", "2"]))

@hf.durable(version="1")
def broken() -> None:
    raise ValueError("no such place")

@hf.durable(version="1")
def sleeper() -> None:
    hf.sleep(86_400)
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line: exit code, stdout, stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The agents, imported from an app.py in the current directory, in a process that knows no others."""
    monkeypatch.setattr(specs, "_steps", {})
    monkeypatch.setattr(specs, "_durables", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    name = "cli_runs_app"
    path = tmp_path / f"{name}.py"
    path.write_text(APP)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


APP_FILE = "cli_runs_app.py"


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, app: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[hf.Store]:
    """A store that the commands find by themselves: ./agent.db, or $HOLDFAST_STORE."""
    url = "agent.db"
    if request.param == "postgres":
        url = str(request.getfixturevalue("postgres_url"))
        monkeypatch.setenv("HOLDFAST_STORE", url)
    with hf.open(url, durability="normal") as opened:
        yield opened


@pytest.fixture
def doubt(store: hf.Store, app: ModuleType) -> hf.Run:
    """A run whose booking is in doubt."""
    app.lose.append(TimeoutError("no answer"))
    return store.run(app.doubtful, "NYC", id="doubt")


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def with_changed_code(*argv: str) -> tuple[int, str, str]:
    """The same in a process of its own, which knows only a newer version of the app."""
    Path("changed.py").write_text(APP.replace("flights = search(dest)", "flights = [hf.uuid()]"))
    done = subprocess.run([sys.executable, "-m", "holdfast.cli", *argv], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


# --- runs


def test_runs_lists_the_newest_first_with_what_each_waits_for(run: Run, store: hf.Store, app: ModuleType) -> None:
    assert run("runs") == (0, "", "holdfast: no runs in this store yet\n")
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


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--status", "waiting"], ["trip"]),
        (["--function", "broken"], ["broken"]),
        (["--queue", "night"], ["later"]),
        (["--status", "stuck"], []),
        (["--limit", "1"], ["later"]),
        (["--limit", "0"], ["later", "broken", "trip"]),
    ],
)
def test_runs_are_filtered(run: Run, store: hf.Store, app: ModuleType, options: list[str], ids: list[str]) -> None:
    store.run(app.travel, "NYC", id="trip")
    store.run(app.broken, id="broken")
    store.start(app.sleeper, id="later", queue="night")
    code, out, _ = run("runs", "--json", *options)
    assert (code, [line["id"] for line in lines(out)]) == (0, ids)


def test_runs_says_when_there_may_be_more_or_none_fit(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.broken, id="broken")
    assert "there may be more: --limit 0 lists all" in run("runs", "--limit", "1")[2]
    assert run("runs", "--status", "stuck") == (0, "", "holdfast: no runs fit\n")
    assert run("runs", "--tenant", "other")[2] == "holdfast: no runs in this store yet\n"
    code, _, err = run("runs", "--status", "sleepy")
    assert code == 2
    assert "'stuck'" in err


# --- run, steps


def test_run_shows_where_it_stands_and_how_to_answer(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="my trip")
    code, out, err = run("run", "my trip")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "my trip  waiting"
    assert "function    travel (version 1)" in out
    assert "question    Which flight?" in out
    assert 'answer it   holdfast answer \'my trip\' 3 VALUE  ("NYC 1" | "NYC 2")' in out
    found = json.loads(run("run", "my trip", "--json")[1])
    assert (found["status"], found["steps"], found["in_doubt"]) == ("waiting", 3, [])
    assert [(ask["step"], ask["options"]) for ask in found["asks"]] == [("3", ["NYC 1", "NYC 2"])]


def test_run_shows_results_and_errors(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.doubtful, "NYC", id="trip")
    store.run(app.broken, id="broken")
    assert 'result      "B-NYC"' in run("run", "trip")[1]
    assert json.loads(run("run", "trip", "--json")[1])["result"] == "B-NYC"
    assert "no such place" in run("run", "broken")[1]
    assert "no such place" in json.loads(run("run", "broken", "--json")[1])["error"]


def test_what_is_in_doubt_is_shown_with_its_key_and_how_to_settle_it(run: Run, doubt: hf.Run) -> None:
    [step] = doubt.steps()
    out = run("run", "doubt")[1]
    assert f"in doubt    step 1: book, key {step.key}" in out
    assert "settle it   holdfast resolve doubt 1 --done VALUE | --not-done" in out
    assert json.loads(run("run", "doubt", "--json")[1])["in_doubt"] == ["1"]
    _, out, _ = run("steps", "doubt")
    assert out.splitlines()[1].split() == ["1", "effect", "book", "in", "doubt", "key", step.key]
    assert [line["key"] for line in lines(run("steps", "doubt", "--in-doubt", "--json")[1])] == [step.key]
    [ask] = lines(run("asks", "--json")[1])
    assert (ask["kind"], ask["key"]) == ("doubt", step.key)
    assert "done, not done" in run("asks")[1]


def test_steps_are_listed_in_their_order(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    code, out, _ = run("steps", "trip")
    assert code == 0
    head, *rows = out.splitlines()
    assert head.split() == ["step", "kind", "name", "status", "seconds", "result"]
    assert [row.split()[:4] for row in rows] == [
        ["1", "step", "search", "done"],
        ["2", "emit", "hf.emit", "done"],
        ["3", "ask", "hf.ask", "waiting"],
    ]
    found = lines(run("steps", "trip", "--json")[1])
    assert found[0]["result"] == ["NYC 1", "NYC 2"]
    assert run("steps", "trip", "--in-doubt") == (0, "", "holdfast: run trip has no steps in doubt\n")


@pytest.mark.parametrize(
    "command",
    [
        ["run", "tirp"],
        ["steps", "tirp"],
        ["asks", "tirp"],
        ["answer", "tirp", "x"],
        ["resolve", "tirp", "1", "--not-done"],
        ["send", "tirp", "x"],
        ["tail", "tirp"],
        ["cancel", "tirp"],
        ["pause", "tirp"],
        ["resume", "tirp"],
        ["replay", APP_FILE, "tirp"],
        ["fork", "tirp", "--name", "x", "--run"],
        ["rollback", "tirp", "--run"],
        ["export-run", "tirp", "file"],
    ],
)
def test_an_unknown_run_is_exit_code_3_and_suggests_the_nearest(run: Run, app: ModuleType, command: list[str]) -> None:
    with hf.open("agent.db") as store:
        store.run(app.travel, "NYC", id="trip")
    assert run(*command) == (3, "", "holdfast: there is no run 'tirp'; did you mean 'trip'?\n")


def test_a_thread_is_no_run_and_a_run_no_thread_and_both_say_so(run: Run, app: ModuleType) -> None:
    with hf.open("agent.db") as store:
        store.run(app.travel, "NYC", id="a run")
        store.thread("a thread").save({})
    assert "but a thread of that name: `holdfast show 'a thread'`" in run("run", "a thread")[2]
    assert "but a run: `holdfast run 'a run'`" in run("log", "a run")[2]


# --- asks and answers


def test_asks_lists_what_is_allowed_and_who_has_answered(run: Run, store: hf.Store, app: ModuleType) -> None:
    assert run("asks") == (0, "", "holdfast: nobody is asked anything\n")
    store.run(app.quorum, id="pay")
    store.run(app.travel, "NYC", id="trip")
    assert run("answer", "pay", "7", "--who", "ann") == (0, "noted; 1 more answer of the same kind needed\n", "")
    _, out, _ = run("asks")
    pay, trip = out.splitlines()[1:]
    assert pay.split()[:3] == ["pay", "1", "question"]
    assert pay.endswith("Pay?  [ann: 7]")
    assert '"NYC 1" | "NYC 2"' in trip
    [found] = lines(run("asks", "pay", "--json")[1])
    assert [(given["who"], given["value"]) for given in found["answers"]] == [("ann", 7)]
    assert (found["quorum"], found["approvers"]) == (2, ["ann", "bob", "eve"])
    assert json.loads(run("answer", "pay", "7", "--who", "bob", "--json")[1])["settled"] is True
    assert run("asks", "pay")[2] == "holdfast: nobody is asked anything\n"
    assert [line["status"] for line in lines(run("asks", "pay", "--all", "--json")[1])] == ["answered"]
    assert store.run(app.quorum, id="pay").result() == 7


@pytest.mark.parametrize(
    ("run_id", "options", "why"),
    [
        ("trip", ["Paris"], 'must be one of ["NYC 1","NYC 2"]'),
        ("pay", ["much", "--who", "ann"], "integer"),
        ("pay", ["7", "--text", "--who", "ann"], "integer"),
        ("pay", ["7", "--who", "mallory"], "'mallory' may not answer this; it is for ann, bob, eve"),
    ],
)
def test_an_answer_that_is_not_allowed_is_refused_with_the_reason(
    run: Run, store: hf.Store, app: ModuleType, run_id: str, options: list[str], why: str
) -> None:
    store.run(app.travel, "NYC", id="trip")
    store.run(app.quorum, id="pay")
    code, out, err = run("answer", run_id, *options)
    assert (code, out) == (2, "")
    assert why in err
    assert not store.asks(run_id)[0].answers


def test_who_answers_is_the_user_unless_told(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    assert run("answer", "trip", "NYC 2")[0] == 0
    [ask] = store.asks("trip", all=True)
    assert [who for who, _, _ in ask.answers] == [getpass.getuser()]
    assert store.run(app.travel, "NYC", id="trip").result() == "B-NYC 2"


def test_with_several_questions_one_must_be_named_and_a_number_may_be_text(
    run: Run, store: hf.Store, app: ModuleType
) -> None:
    """`2` is a number, and the question wants one of two texts: it is taken as that."""
    store.run(app.both, id="both")
    code, _, err = run("answer", "both", "x")
    assert code == 2
    assert "has 2 open questions, at steps 1.1, 2.1: name one, `holdfast answer both 1.1 VALUE`" in err
    assert run("answer", "both", "1.1", '{"a": [1]}')[0] == 0
    assert run("answer", "both", "2.1", "2")[0] == 0
    assert store.run(app.both, id="both").result() == [{"a": [1]}, "2"]
    code, _, err = run("answer", "both", "x")
    assert code == 2
    assert "has no open question" in err
    code, _, err = run("answer", "both", "1.1", "x")
    assert (code, "is answered already" in err) == (2, True)
    assert run("answer", "both", "9", "x")[0] == 3


# --- doubt


def test_a_doubt_is_settled_as_done(run: Run, doubt: hf.Run, store: hf.Store, app: ModuleType) -> None:
    code, _, err = run("answer", "doubt", "yes")
    assert code == 2
    assert "asks nothing but what became of an effect: `holdfast run doubt`" in err
    assert run("resolve", "doubt", "7", "--not-done")[0] == 3
    assert run("resolve", "doubt", "1")[0] == 2
    assert run("resolve", "doubt", "1", "--done", "B-7", "--who", "maria") == (
        0,
        "step 1 of doubt counts as done; the run goes on\n",
        "",
    )
    assert store.run(app.doubtful, "NYC", id="doubt").result() == "B-7"
    [ask] = store.asks("doubt", all=True)
    assert [who for who, _, _ in ask.answers] == ["maria"]
    code, _, err = run("resolve", "doubt", "1", "--not-done")
    assert (code, "is not in doubt" in err) == (3, True)


@pytest.mark.parametrize(
    ("options", "result"),
    [
        (["--not-done"], "B-NYC"),
        (["--done", "1001"], 1001),
        (["--done", "1001", "--text"], "1001"),
        (["--done", '{"id": 1}'], {"id": 1}),
    ],
)
def test_the_value_of_a_verdict_is_json_or_text(
    run: Run, doubt: hf.Run, store: hf.Store, app: ModuleType, options: list[str], result: Any
) -> None:
    code, out, _ = run("resolve", "doubt", "1", *options, "--json")
    said = "not done" if options == ["--not-done"] else "done"
    assert (code, json.loads(out)) == (0, {"run": "doubt", "step": "1", "resolved": said})
    assert store.run(app.doubtful, "NYC", id="doubt").result() == result


# --- steering


def test_a_run_is_paused_resumed_and_cancelled(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    assert run("pause", "trip")[1] == "trip is paused now\n"
    assert "holdfast resume" in run("runs")[1]
    assert json.loads(run("resume", "trip", "--json")[1]) == {"run": "trip", "before": "paused", "status": "queued"}
    assert run("resume", "trip")[1] == "trip is queued: there is nothing to resume\n"
    assert run("cancel", "trip")[1] == "trip is cancelled now\n"
    for command in ("cancel", "pause", "resume"):
        assert run(command, "trip")[1] == f"trip is cancelled: there is nothing to {command}\n"
    with pytest.raises(hf.RunCancelled):
        store.get_run("trip").result()


def test_a_run_that_is_running_is_told(run: Run, store: hf.Store, app: ModuleType) -> None:
    """To resume takes a pause back that it has not followed yet; an end stays."""
    said: list[str] = []

    @hf.step(name="cli-told")
    def told() -> None:
        said.extend(run(command, "told")[1] for command in ("resume", "pause", "resume"))

    @hf.durable(name="cli-tells", version="1")
    def tells() -> Any:
        told()
        return hf.ask("Go on?")

    assert store.run(tells, id="told").status == "waiting"
    assert said == [
        "told is running; if its process has died, a worker takes it over\n",
        "told is running: its process was told to pause\n",
        "told is running; if its process has died, a worker takes it over\n",
    ]
    assert store.get_run("told").info().request is None


def test_a_message_is_sent_once_per_key(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.listener, id="ears")
    for _ in range(2):
        assert run("send", "ears", '{"gate": 7}', "--topic", "news", "--key", "k1") == (0, "sent to ears\n", "")
    assert json.loads(run("send", "ears", "plain", "--topic", "news", "--json")[1])["sent"] is True
    assert store.run(app.listener, id="ears").result() == [{"gate": 7}, "plain"]
    code, _, err = run("send", "ears", "x")
    assert (code, err) == (2, "holdfast: run 'ears' is done: nobody would receive it\n")


def test_rollback_of_a_run_undoes_it(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.doubtful, "NYC", id="trip")
    for options in (["head~1"], ["--note", "why"]):
        code, _, err = run("rollback", "trip", *options)
        assert (code, "undoes all its effects" in err) == (2, True)
    assert run("rollback", "trip")[1] == "trip will be undone by a worker, newest effect first\n"
    with pytest.raises(hf.RolledBack):
        store.run(app.doubtful, "NYC", id="trip").result()
    assert run("rollback", "trip")[1] == "trip is rolled_back: there is nothing to undo\n"


# --- fork, replay, check


def test_a_run_is_forked_at_a_step_with_another_result(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    store.answer("trip", "NYC 1")
    store.run(app.travel, "NYC", id="trip")
    code, _, err = run("fork", "trip", "2", "--name", "new")
    assert code == 2
    assert "keys" in err
    code, out, _ = run("fork", "trip", "3", "--name", "new", "--keys", "new", "--set", '3="NYC 2"')
    assert (code, out) == (0, "forked run trip at step 3 as new; a worker goes on with it\n")
    assert store.run(app.travel, "NYC", id="new").result() == "B-NYC 2"
    assert json.loads(run("run", "new", "--json")[1])["is_fork"] is True
    for bad in ("3", "=x"):
        code, _, err = run("fork", "trip", "3", "--name", "other", "--keys", "new", "--set", bad)
        assert (code, "write STEP=VALUE" in err) == (2, True)
    assert run("fork", "trip", "99", "--name", "other", "--keys", "new")[0] in (2, 3)


def test_a_name_that_is_a_thread_and_a_run_must_be_told_apart(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="same")
    for number in range(2):
        store.thread("same").save({"n": number})
    for command in (["fork", "same", "--name", "x"], ["rollback", "same", "head~1"]):
        assert run(*command) == (2, "", "holdfast: 'same' is a thread and a run: say which with --thread or --run\n")
    assert run("fork", "same", "--name", "thread", "--thread")[0] == 0
    assert run("fork", "same", "2", "--name", "run", "--run", "--keys", "new")[0] == 0
    assert store.thread("thread").load().state == {"n": 1}
    assert store.get_run("run").info().is_fork
    assert run("rollback", "same", "head~1", "--thread")[0] == 0
    assert run("rollback", "same", "--run")[0] == 0
    assert run("fork", "same", "--name", "x", "--thread", "--run")[0] == 2
    code, _, err = run("fork", "thread", "--name", "x", "--keys", "new")
    assert (code, "--keys and --set are for runs" in err) == (2, True)


def test_replay_answers_from_the_journal_and_sees_changed_code(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    code, out, _ = run("replay", APP_FILE, "trip")
    where = "stops before hf.ask at step 3, which is not recorded"
    assert (code, out) == (0, f"trip: 2 steps answered from the journal, no body run; {where}\n")
    store.run(app.doubtful, "NYC", id="short")
    found = json.loads(run("replay", APP_FILE, "short", "--json")[1])
    assert found == {"run": "short", "complete": True, "steps": 1, "result": "B-NYC"}
    assert run("replay", "nowhere.py", "trip")[0] == 2
    code, out, err = with_changed_code("replay", "changed.py", "trip")
    assert (code, out) == (1, "")
    assert "did not go the way that its journal says: at step 1" in err


def test_check_says_which_open_runs_new_code_would_break(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    store.run(app.listener, id="ears")
    code, out, err = run("check", APP_FILE)
    assert code == 0, (out, err)
    assert sorted(line.split()[:2] for line in out.splitlines()) == [["ok", "ears"], ["ok", "trip"]]
    assert "2 open runs replayed" in err
    code, out, err = with_changed_code("check", "changed.py", "--json")
    assert code == 1, err
    assert {line["run"]: line["ok"] for line in lines(out)} == {"trip": False, "ears": True}


# --- moving


def test_a_run_moves_to_another_store_in_a_file(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    with hf.open("other.db") as other:
        code, out, _ = run("export-run", "trip", "trip.run")
        assert (code, out) == (0, "trip is in trip.run; here it is marked as exported and will not run any more\n")
        assert json.loads(run("run", "trip", "--json")[1])["status"] == "exported"
        code, out, _ = run("import-run", "trip.run", "--store", "other.db", "--json")
        assert (code, json.loads(out)) == (0, {"run": "trip", "status": "waiting"})
        assert run("answer", "trip", "NYC 1", "--store", "other.db")[0] == 0
        assert other.run(app.travel, "NYC", id="trip").result() == "B-NYC 1"
        assert run("import-run", "trip.run", "--store", "other.db")[0] == 2
        assert run("import-run", "none.run", "--store", "other.db")[0] in (2, 3)
        store.run(app.doubtful, "NYC", id="over")
        assert run("export-run", "over", "over.run", "--keep")[1] == "over is in over.run\n"
        assert run("export-run", "over", "over.run", "--keep")[0] == 2
    assert store.get_run("over").status == "done"


# --- usage


@pytest.mark.parametrize(
    "command",
    [
        ["runs", "--limit", "-1"],
        ["tail", "trip", "--after", "x"],
        ["resolve", "trip", "1", "--done", "x", "--not-done"],
        ["fork", "trip"],
        ["drill", "app.py:travel", "--args", "[1"],
        ["answer", "trip"],
    ],
)
def test_a_command_that_makes_no_sense_is_exit_code_2(run: Run, app: ModuleType, command: list[str]) -> None:
    with hf.open("agent.db") as store:
        store.run(app.travel, "NYC", id="trip")
    code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert err.startswith("holdfast: ")
    assert err.count("\n") == 1


def test_a_damaged_journal_is_exit_code_4_and_verify_names_the_run(run: Run, app: ModuleType) -> None:
    import apsw

    with hf.open("agent.db") as store:
        store.run(app.travel, "NYC", id="trip")
    assert run("verify")[1] == "0 checkpoints of 0 threads and 1 run checked: no problems\n"
    connection = apsw.Connection("agent.db")
    connection.execute("DELETE FROM journal WHERE seq = 1")
    connection.close()
    for command in ("run", "steps"):
        code, out, err = run(command, "trip")
        assert (code, out, "does not add up" in err) == (4, "", True)
    code, out, _ = run("verify", "--json")
    [problem] = json.loads(out)["problems"]
    assert (code, problem["run"]) == (1, "trip")
    assert "(run trip)" in run("verify")[1]
    assert json.loads(run("stats", "--json")[1])["runs"] == 1


def test_what_a_run_says_cannot_steer_the_terminal(run: Run, app: ModuleType) -> None:
    with hf.open("agent.db") as store:

        @hf.durable(name="cli-evil", version="1")
        def evil() -> Any:
            hf.emit("\x1b[2J")
            return hf.ask("\x1b[2J\u202esure?\n")

        store.run(evil, id="evil\x1b[2J")
    for command in (["runs"], ["run", "evil\x1b[2J"], ["asks"], ["steps", "evil\x1b[2J"]):
        code, out, err = run(*command)
        assert code == 0
        assert not {"\x1b", "\u202e"} & set(out + err)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("runs", "run", "steps", "asks", "answer", "resolve", "send", "tail", "fork", "drill", "worker"):
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert "examples:" in out
        assert max(map(len, textwrap.dedent(out).splitlines())) <= 120


# --- tail


def test_tail_follows_a_live_run_of_another_process_until_it_ends(store: hf.Store) -> None:
    """Each line comes when it happens, also in a pipe."""
    seen, go_on = threading.Event(), threading.Event()

    @hf.step(name="cli-first")
    def first() -> str:
        return "a"

    @hf.step(name="cli-slow")
    def slow() -> str:
        seen.set()
        assert go_on.wait(60)
        return "b"

    @hf.durable(name="cli-tailed", version="1")
    def tailed() -> str:
        hf.emit({"begun": True})
        return first() + slow()

    running = threading.Thread(target=lambda: store.run(tailed, id="live"))
    running.start()
    assert seen.wait(60)
    tail = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "tail", "live", "--json"], stdout=subprocess.PIPE, text=True
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


def test_tail_goes_on_after_an_entry_and_shows_times_and_names(run: Run, store: hf.Store, app: ModuleType) -> None:
    store.run(app.doubtful, "NYC", id="trip")
    code, out, _ = run("tail", "trip")
    assert code == 0
    assert [line.split()[1:4] for line in out.splitlines()[:2]] == [["intent", "1", "book"], ["done", "1", "book"]]
    assert out.splitlines()[-1].split()[1:] == ["status", "doubtful", '"done"']
    after = lines(run("tail", "trip", "--json", "--after", "1")[1])
    assert [event["kind"] for event in after] == ["done", "status"]


@pytest.mark.parametrize(("said", "meant"), [("yes", True), ("No", False), ("true", True)])
def test_yes_and_no_answer_a_question_of_true_or_false(run: Run, store: hf.Store, said: str, meant: bool) -> None:
    @hf.durable(name="asks-yes-or-no")
    def agent() -> bool:
        return bool(hf.ask("Go?", options=[True, False]))

    handle = store.run(agent, id="go")
    assert store.asks("go")[0].step == store.asks("go")[0].path  # what `answer` takes
    assert run("answer", "go", said)[0] == 0
    assert handle.result(timeout_s=10) is meant
