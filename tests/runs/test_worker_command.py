"""`perdure worker`, and the loading of apps: what a user types, what comes out, and what a mistake teaches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.cli import main
from perdure.errors import UsageError
from perdure.runs.functions import specs
from perdure.runs.workers import loading
from perdure.runs.workers.loading import load_app, load_named, split_app

APP = """
import perdure

@perdure.step
def double(number: int) -> int:
    return number * 2

@perdure.durable
def doubled(number: int) -> int:
    return double(number)

@perdure.durable
async def anticipated(number: int) -> int:
    return double(number) + 1

def plain() -> None: ...
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of one's own, with an app and a store; what is imported there is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(specs, "_durables", {})
    monkeypatch.setattr(loading, "_loaded", set())
    monkeypatch.delenv("PERDURE_STORE", raising=False)
    before = set(sys.modules)
    (tmp_path / "jobs_app.py").write_text(APP)
    perdure.open("agent.db").close()
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def start(name: str, number: int, **options: Any) -> None:
    with perdure.open("agent.db") as store:
        store.start(getattr(load_app("jobs_app.py"), name), number, id=f"{name}-{number}", **options)


def test_once_runs_what_is_due_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    start("doubled", 3)
    start("anticipated", 3)
    assert main(["worker", "jobs_app.py", "--once"]) == 0
    said = capsys.readouterr()
    assert said.out == "2 done\n"
    assert "serving 2 functions (anticipated, doubled) of queue default" in said.err
    with perdure.open("agent.db") as store:
        assert store.get_run("doubled-3").result() == 6
        assert store.get_run("anticipated-3").result() == 7


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    start("doubled", 3)
    assert main(["worker", "jobs_app.py", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"done": 1}


def test_one_function_and_some_queues(capsys: pytest.CaptureFixture[str]) -> None:
    start("doubled", 1, queue="mail")
    start("doubled", 2, queue="other")
    start("anticipated", 1, queue="mail")
    command = ["worker", "jobs_app:doubled", "--queue", "mail", "--queue", "search", "--once", "--concurrency", "2"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out == "1 done\n"
    assert "no queue 'search' is declared, and no run or schedule uses it" in said.err
    assert "no queue 'mail'" not in said.err
    with perdure.open("agent.db") as store:
        assert {info.id: info.status for info in store.runs()} == {
            "doubled-1": "done",
            "doubled-2": "queued",
            "anticipated-1": "queued",
        }


def test_all_tenants(capsys: pytest.CaptureFixture[str]) -> None:
    with perdure.open("agent.db") as store:
        store.tenant("acme").start(load_app("jobs_app.py").doubled, 1)
    assert main(["worker", "jobs_app.py", "--once"]) == 0
    assert capsys.readouterr().out == "nothing was due\n"
    assert main(["worker", "jobs_app.py", "--once", "--all-tenants"]) == 0
    assert capsys.readouterr().out == "1 done\n"
    with perdure.open("agent.db") as store:
        [info] = store.tenant("acme").runs()
        assert info.status == "done"


def test_a_worker_process_runs_until_it_is_told_to_stop(place: Path) -> None:
    command = [sys.executable, "-m", "perdure", "worker", "jobs_app.py", "--store", "agent.db"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        with perdure.open("agent.db") as store:
            run = store.start(load_app("jobs_app.py").doubled, 21, id="a")
            assert run.result(timeout_s=60) == 42
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == "1 done\n"
    assert "Ctrl-C ends it" in err
    assert not [name for name in os.listdir(place) if "-owner-" in name]


def test_what_it_logs_is_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    start("doubled", 3)
    Path("jobs_app.py").write_text(
        APP.replace("@perdure.durable\ndef doubled", '@perdure.durable(version="2")\ndef doubled')
    )
    sys.modules.pop("jobs_app")
    assert main(["worker", "jobs_app.py", "--once"]) == 0
    said = capsys.readouterr()
    assert said.out == "nothing was due\n"
    assert "this worker has version 2 of doubled and leaves 1 due run of no version" in said.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["nowhere.py"], "there is no file 'nowhere.py'; give a file (app.py) or a module (myapp.agents)"),
        (["nowhere.agents"], "there is no module 'nowhere.agents'"),
        (["jobs_app.py:nothing"], "jobs_app.py has no 'nothing'; it has the durable functions anticipated, doubled"),
        (
            ["jobs_app.py:plain"],
            "jobs_app.py:plain is neither a durable function (@perdure.durable) nor a graph with a PerdureSaver",
        ),
        (["empty.py"], "empty.py has no durable function: put @perdure.durable above the function that is to run"),
        (["jobs_app.py", "--all-tenants", "--tenant", "a"], "--all-tenants and --tenant exclude each other"),
        (["jobs_app.py", "--concurrency", "0"], "0 is not in the range"),
        (["jobs_app.py", "--drain", "soon"], "'soon' is not a duration: write 45s, 30m, 2h, 30d or 8w"),
    ],
)
def test_a_mistake_is_one_line_that_helps(capsys: pytest.CaptureFixture[str], command: list[str], said: str) -> None:
    Path("empty.py").write_text("")
    assert main(["worker", *command, "--once"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_a_store_that_is_not_there_is_not_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "jobs_app.py", "--store", "other.db"]) == 4
    assert "there is no store at other.db" in capsys.readouterr().err
    assert not Path("other.db").exists()


# --- loading


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("app.py", ("app.py", None)),
        ("app.py:travel", ("app.py", "travel")),
        ("some/app.py:Agent.book", ("some/app.py", "Agent.book")),
        ("myapp.agents:travel", ("myapp.agents", "travel")),
        ("myapp", ("myapp", None)),
    ],
)
def test_what_a_user_types_has_two_parts(text: str, parts: tuple[str, str | None]) -> None:
    assert split_app(text) == parts


@pytest.mark.parametrize("text", ["app.py:", ":travel", "app.py:a-b"])
def test_what_has_no_two_parts_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        load_app(text)


def test_a_file_is_loaded_under_its_own_name_and_once() -> None:
    module = load_app("jobs_app.py")
    assert module.__name__ == "jobs_app"
    assert sys.modules["jobs_app"] is module
    assert load_app("./jobs_app.py:doubled") is module
    assert load_app("jobs_app") is module
    assert load_named("jobs_app.py:doubled") is module.doubled
    assert specs.find_durable("doubled") is not None


def test_a_file_of_a_package_is_loaded_under_its_full_name(place: Path) -> None:
    folder = place / "shop" / "agents"
    folder.mkdir(parents=True)
    (place / "shop" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "prices.py").write_text("PRICE = 7")
    (folder / "buying.py").write_text("from .prices import PRICE")
    module = load_app("shop/agents/buying.py")
    assert module.__name__ == "shop.agents.buying"
    assert module.PRICE == 7
    assert load_app("shop.agents.buying") is module


def test_what_stands_beside_a_file_can_be_imported(place: Path) -> None:
    (place / "deep").mkdir()
    (place / "deep" / "helper_of_app.py").write_text("WORD = 'found'")
    (place / "deep" / "app_with_helper.py").write_text("from helper_of_app import WORD")
    assert load_app("deep/app_with_helper.py").WORD == "found"


def test_another_file_of_the_same_name_replaces_the_first(place: Path) -> None:
    """As new code does, when `check` compares it with what is stored."""
    (place / "new").mkdir()
    (place / "new" / "jobs_app.py").write_text(APP.replace("number * 2", "number * 3"))
    old, new = load_app("jobs_app.py"), load_app("new/jobs_app.py")
    assert old.doubled(2) == 4
    assert new.doubled(2) == 6
    assert specs.find_durable("doubled") is new.doubled.perdure_durable


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("broken_app.py", "def (", "broken_app.py is not Python that this version understands: SyntaxError"),
        ("lacking_app.py", "\nimport no_such_thing_here", "lacking_app.py could not be loaded: ModuleNotFoundError"),
        ("lacking_app.py", "\nimport no_such_thing_here", "(lacking_app.py, line 2)"),
        ("ending_app.py", "import sys\nsys.exit(3)", 'put what starts the program under if __name__ == "__main__":'),
        ("json.py", "", "'json.py' has the name of another module, 'json'"),
        ("my-app.py", "", "'my-app' is no Python name; rename the file"),
    ],
)
def test_what_cannot_be_loaded_says_why(place: Path, name: str, text: str, said: str) -> None:
    (place / name).write_text(text)
    with pytest.raises(UsageError) as caught:
        load_app(name)
    assert said in str(caught.value)
    assert name.removesuffix(".py") not in sys.modules or name == "json.py"
