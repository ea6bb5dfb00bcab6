"""The commands that answer, settle, steer, fork and replay runs."""

from __future__ import annotations

import getpass
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cli_runs_kit import APP, APP_FILE, Run, lines

import perdure


def with_changed_code(*argv: str) -> tuple[int, str, str]:
    """The same in a process of its own, which knows only a newer version of the app."""
    Path("changed.py").write_text(APP.replace("flights = search(dest)", "flights = [perdure.uuid()]"))
    done = subprocess.run([sys.executable, "-m", "perdure", *argv], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


# --- asks and answers


def test_asks_lists_what_is_allowed_and_who_has_answered(run: Run, store: perdure.Store, app: ModuleType) -> None:
    assert run("questions") == (0, "", "perdure: no open questions\n")
    store.run(app.quorum, id="pay")
    store.run(app.travel, "NYC", id="trip")
    assert run("answer", "pay", "7", "--who", "ann") == (0, "Noted. 1 more answer of the same kind needed.\n", "")
    _, out, _ = run("questions")
    pay, trip = out.splitlines()[1:]
    assert pay.split()[:3] == ["pay", "1", "question"]
    assert pay.endswith("Pay?  [ann: 7]")
    assert '"NYC 1" | "NYC 2"' in trip
    [found] = lines(run("questions", "pay", "--json")[1])
    assert [(given["who"], given["value"]) for given in found["answers"]] == [("ann", 7)]
    assert (found["quorum"], found["approvers"]) == (2, ["ann", "bob", "eve"])
    assert json.loads(run("answer", "pay", "7", "--who", "bob", "--json")[1])["settled"] is True
    assert run("questions", "pay")[2] == "perdure: no open questions\n"
    assert [line["status"] for line in lines(run("questions", "pay", "--all", "--json")[1])] == ["answered"]
    assert store.run(app.quorum, id="pay").result() == 7


def test_a_question_about_an_effect_shows_the_call(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.refunds, id="refund")
    call = 'refund(cents=900, api_token="***")'
    assert run("questions")[1].rstrip().endswith(f"Refund 900?  {call}")
    assert f"call        {call}" in run("run", "show", "refund")[1]
    [found] = lines(run("questions", "--json")[1])
    assert (found["effect"], found["arguments"]) == ("refund", {"cents": 900, "api_token": "***"})
    assert (
        run("answer", "refund", "true")[1]
        == f"{call}: true. Answered. A worker resumes refund, or the line that started it.\n"
    )


@pytest.mark.parametrize(
    ("run_id", "options", "why"),
    [
        ("trip", ["Paris"], 'must be one of ["NYC 1","NYC 2"]'),
        ("pay", ["much", "--who", "ann"], "integer"),
        ("pay", ['"7"', "--who", "ann"], "integer"),
        ("pay", ["7", "--who", "mallory"], "'mallory' may not answer this; it is for ann, bob, eve"),
    ],
)
def test_an_answer_that_is_not_allowed_is_refused_with_the_reason(
    run: Run, store: perdure.Store, app: ModuleType, run_id: str, options: list[str], why: str
) -> None:
    store.run(app.travel, "NYC", id="trip")
    store.run(app.quorum, id="pay")
    code, out, err = run("answer", run_id, *options)
    assert (code, out) == (2, "")
    assert why in err
    assert not store.questions(run_id)[0].answers


def test_who_answers_is_the_user_unless_told(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    assert run("answer", "trip", "NYC 2")[0] == 0
    [ask] = store.questions("trip", all=True)
    assert [who for who, _, _ in ask.answers] == [getpass.getuser()]
    assert store.run(app.travel, "NYC", id="trip").result() == "B-NYC 2"


def test_with_several_questions_one_must_be_named_and_a_number_may_be_text(
    run: Run, store: perdure.Store, app: ModuleType
) -> None:
    """`2` is a number, and the question wants one of two texts: it is taken as that."""
    store.run(app.both, id="both")
    code, _, err = run("answer", "both", "x")
    assert code == 2
    steps = "(1.1, 2.1|2.1, 1.1)"  # branches ask at the same time
    assert re.search(f"has 2 open questions, at steps {steps}: name one; `perdure run show both`", err)
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


def test_a_doubt_is_settled_as_done(run: Run, doubt: perdure.Run, store: perdure.Store, app: ModuleType) -> None:
    code, _, err = run("answer", "doubt", "yes")
    assert code == 2
    assert "has no open question; `perdure run show doubt`" in err
    assert run("run", "resolve", "doubt", "7", "--not-done")[0] == 3
    assert run("run", "resolve", "doubt", "1")[0] == 2
    assert run("run", "resolve", "doubt", "1", "--done", "B-7", "--who", "maria") == (
        0,
        "step 1 of doubt counts as done; a worker continues it, or the line that started it\n",
        "",
    )
    assert store.run(app.doubtful, "NYC", id="doubt").result() == "B-7"
    [ask] = store.questions("doubt", all=True)
    assert [who for who, _, _ in ask.answers] == ["maria"]
    code, _, err = run("run", "resolve", "doubt", "1", "--not-done")
    assert (code, "is not in doubt" in err) == (3, True)


@pytest.mark.parametrize(
    ("options", "result"),
    [
        (["--not-done"], "B-NYC"),
        (["--done", "1001"], 1001),
        (["--done", '"1001"'], "1001"),
        (["--done", '{"id": 1}'], {"id": 1}),
    ],
)
def test_the_value_of_a_verdict_is_json_or_text(
    run: Run, doubt: perdure.Run, store: perdure.Store, app: ModuleType, options: list[str], result: Any
) -> None:
    code, out, _ = run("run", "resolve", "doubt", "1", *options, "--json")
    said = "not done" if options == ["--not-done"] else "done"
    assert (code, json.loads(out)) == (0, {"run": "doubt", "step": "1", "resolved": said})
    assert store.run(app.doubtful, "NYC", id="doubt").result() == result


@pytest.mark.parametrize(
    "words", [("run", "resolve", "doubt", "1", "--done", "<result as JSON>"), ("answer", "doubt", "<answer>")]
)
def test_the_placeholder_of_a_printed_command_is_no_value(run: Run, doubt: perdure.Run, words: tuple[str, ...]) -> None:
    code, _, err = run(*words)
    assert (code, "is a placeholder" in err) == (2, True)
    assert doubt.steps()[0].status == "in doubt"


# --- steering


def test_a_run_is_paused_resumed_and_cancelled(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    assert run("run", "pause", "trip")[1] == "trip is paused now\n"
    assert "perdure run resume" in run("runs")[1]
    assert json.loads(run("run", "resume", "trip", "--json")[1]) == {
        "run": "trip",
        "before": "paused",
        "status": "queued",
    }
    assert run("run", "resume", "trip")[:2] == (1, "trip is queued: there is nothing to resume\n")
    assert run("run", "cancel", "trip")[1] == "trip is cancelled now\n"
    for command in ("cancel", "pause", "resume"):
        assert run("run", command, "trip")[:2] == (
            1,
            f"trip had ended before (cancelled): there is nothing to {command}\n",
        )
    with pytest.raises(perdure.RunCancelled):
        store.get_run("trip").result()


def test_a_run_that_is_running_is_told(run: Run, store: perdure.Store, app: ModuleType) -> None:
    """To resume takes a pause back that it has not followed yet; an end stays."""
    said: list[str] = []

    @perdure.step(name="cli-told")
    def told() -> None:
        said.extend(run("run", command, "told")[1] for command in ("resume", "pause", "resume"))

    @perdure.durable(name="cli-tells", version="1")
    def tells() -> Any:
        told()
        return perdure.ask("Go on?")

    assert store.run(tells, id="told").status == "waiting"
    assert said == [
        f"told is running: its process will {command} it, or the worker that takes it over\n"
        for command in ("resume", "pause", "resume")
    ]
    assert store.get_run("told").refresh().request is None


def test_a_message_is_sent_once_per_key(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.listener, id="ears")
    for _ in range(2):
        assert run("run", "send", "ears", '{"gate": 7}', "--topic", "news", "--key", "k1") == (0, "sent to ears\n", "")
    assert json.loads(run("run", "send", "ears", "plain", "--topic", "news", "--json")[1])["sent"] is True
    assert store.run(app.listener, id="ears").result() == [{"gate": 7}, "plain"]
    code, _, err = run("run", "send", "ears", "x")
    assert (code, err) == (2, "perdure: run 'ears' is done: it receives nothing any more\n")


def test_undo_undoes_the_effects_of_a_run(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.doubtful, "NYC", id="trip")
    for _ in range(2):
        said = run("run", "undo", "trip")[1]
        assert said.startswith(
            "trip will be undone, newest effect first, by a worker (`perdure worker`) or by the line"
        )
    with pytest.raises(perdure.RunUndone):
        store.run(app.doubtful, "NYC", id="trip").result()
    assert run("run", "undo", "trip")[1] == "trip had ended before (undone): there is nothing to undo\n"


def test_undoing_a_run_without_an_undo_says_that_its_effects_stand(run: Run, store: perdure.Store) -> None:
    @perdure.effect(name="cli-mailed")
    def mail() -> None:
        pass

    @perdure.durable(name="cli-mails", version="1")
    def mails() -> None:
        mail()

    store.run(mails, id="news")
    said = "news will end as undone, but none of its effects has an undo: what they did stands\n"
    assert run("run", "undo", "news") == (0, said, "")


def test_a_retried_run_says_who_continues_it(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.sold_out, "NYC", id="trip")
    said = "trip is queued now: a worker continues it, or the line that started it\n"
    assert run("run", "retry", "trip") == (0, said, "")


def test_cancelling_a_run_says_who_undoes_it(run: Run, store: perdure.Store, app: ModuleType) -> None:
    @perdure.effect(name="cli-booked", undo=lambda: None)
    def book() -> None:
        pass

    @perdure.durable(name="cli-books", version="1")
    def books() -> None:
        book()
        perdure.ask("Go on?")

    for name in ("trip", "tour"):
        store.run(books, id=name)
    assert run("run", "cancel", "trip")[1].startswith(
        "trip will be undone before it is cancelled, newest effect first, by"
    )
    with pytest.raises(perdure.RunCancelled):
        store.run(books, id="trip").result()
    assert run("run", "cancel", "tour", "--no-undo")[1] == "tour is cancelled now\n"


# --- fork, replay, check


def test_a_run_is_forked_at_a_step_with_another_result(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    store.answer("trip", "NYC 1")
    store.run(app.travel, "NYC", id="trip")
    code, _, err = run("run", "fork", "trip", "2", "--name", "new")
    assert code == 2
    assert "keys" in err
    code, out, _ = run("run", "fork", "trip", "3", "--name", "new", "--keys", "new", "--set", '3="NYC 2"')
    assert (code, out) == (0, "forked run trip at step 3 as new; a worker will resume it\n")
    assert store.run(app.travel, "NYC", id="new").result() == "B-NYC 2"
    assert json.loads(run("run", "show", "new", "--json")[1])["is_fork"] is True
    for bad in ("3", "=x"):
        code, _, err = run("run", "fork", "trip", "3", "--name", "other", "--keys", "new", "--set", bad)
        assert (code, "is not NAME=VALUE" in err) == (2, True)
    assert run("run", "fork", "trip", "99", "--name", "other", "--keys", "new")[0] in (2, 3)


def test_replay_of_a_failed_run_prints_its_error(run: Run, store: perdure.Store, app: ModuleType) -> None:
    assert store.run(app.sold_out, "NYC", id="sold").status == "failed"
    code, out, _ = run("run", "replay", APP_FILE, "sold")
    assert (code, out.endswith("no body run; it fails with ValueError: no seats to NYC\n")) == (0, True)
    assert json.loads(run("run", "replay", APP_FILE, "sold", "--json")[1])["error"] == "ValueError: no seats to NYC"


def test_replay_answers_from_the_journal_and_sees_changed_code(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    code, out, _ = run("run", "replay", APP_FILE, "trip")
    where = "stops before perdure.ask at step 3, which is not recorded"
    assert (code, out) == (0, f"trip: 2 steps answered from the journal, no body run; {where}\n")
    store.run(app.doubtful, "NYC", id="short")
    found = json.loads(run("run", "replay", APP_FILE, "short", "--json")[1])
    assert found == {"run": "short", "complete": True, "steps": 1, "result": "B-NYC"}
    store.snapshot("s")
    store.delete_run("short")
    assert json.loads(run("run", "replay", APP_FILE, "short", "--snapshot", "s", "--json")[1]) == found
    assert run("run", "replay", "nowhere.py", "trip")[0] == 2
    code, out, err = with_changed_code("run", "replay", "changed.py", "trip")
    assert (code, out) == (1, "")
    assert "diverged from its journal at step 1" in err


def test_check_says_which_open_runs_new_code_would_break(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.run(app.travel, "NYC", id="trip")
    store.run(app.listener, id="ears")
    code, out, err = run("check", APP_FILE)
    assert code == 0, (out, err)
    assert sorted(line.split()[:2] for line in out.splitlines()) == [["ok", "ears"], ["ok", "trip"]]
    assert "2 open runs replayed" in err
    code, out, err = with_changed_code("check", "changed.py", "--json")
    assert code == 1, err
    assert {line["run"]: line["ok"] for line in lines(out)} == {"trip": False, "ears": True}


# --- many at once


def test_many_runs_are_selected_counted_and_changed(run: Run, store: perdure.Store, app: ModuleType) -> None:
    for number in range(3):
        store.run(app.travel, "NYC", id=f"trip-{number}", tags={"customer": f"c-{number % 2}"})
    store.run(app.sold_out, "NYC", id="out")
    code, _, err = run("run", "cancel", "--tag", "customer=c-0")
    assert code == 2
    assert "Cancel 2 runs (2 waiting)?" in err
    assert "--yes" in err
    assert run("run", "cancel", "--tag", "customer=c-0", "--yes")[:2] == (0, "2 cancelled now\n")
    code, out, err = run("run", "pause", "trip-0", "trip-1", "nowhere", "--json")
    assert code == 1
    assert json.loads(out)["statuses"] == {"paused": 1}
    assert "trip-0: it is cancelled: there is nothing to pause" in err
    assert "nowhere: there is no run" in err
    assert run("run", "cancel")[0] == 2
    assert run("run", "resume", "--function", "nothing")[2] == "perdure: no runs match\n"
    none = {"action": "resume", "statuses": {}, "refused": {}}
    assert json.loads(run("run", "resume", "--function", "nothing", "--json")[1]) == none
    counts = [(line["status"], line["runs"]) for line in lines(run("runs", "--count", "status", "--json")[1])]
    assert counts == [("paused", 1), ("failed", 1), ("cancelled", 2)]
    assert run("run", "fork", "out", "0", "--name", "again", "--keys", "new")[0] == 0
    assert store.get_run("again").steps() == []


def test_commands_record_who_gave_them(run: Run, store: perdure.Store, app: ModuleType) -> None:
    store.start(app.travel, "NYC", id="trip")
    assert "nothing yet" in run("actions")[2]
    run("run", "pause", "trip")
    run("run", "resume", "trip", "--who", "maria")
    newest, oldest = lines(run("actions", "--subject", "run trip", "--json")[1])
    assert (newest["who"], newest["action"], newest["subject"]) == ("maria", "resume", "run trip")
    assert (oldest["who"], oldest["action"]) == (getpass.getuser(), "pause")
    head, row = run("actions", "--limit", "1")[1].splitlines()[:2]
    assert head.split() == ["time", "who", "action", "subject", "details"]
    assert "maria  resume  run trip" in row
