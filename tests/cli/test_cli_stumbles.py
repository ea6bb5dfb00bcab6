"""What a new user runs into: extras that are not installed, folders that are not there, closed streams, wrong calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import perdure
from perdure.cli import main
from perdure.cli.base import root

MODULE = [sys.executable, "-m", "perdure"]
APP = """
import perdure


@perdure.durable(name="stumble-greet")
def greet(who):
    return f"hello {who}"
"""


@perdure.durable
def hello() -> str:
    return "hello"


def without(*modules: str) -> list[str]:
    """The command line of an installation that lacks these modules."""
    gone = "; ".join(f"sys.modules[{name!r}] = None" for name in modules)
    return [sys.executable, "-c", f"import sys; {gone}; from perdure.cli import main; sys.exit(main())"]


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("PERDURE_STORE", "PERDURE_SCHEMA", "PERDURE_KEYS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "stumble_app.py").write_text(APP)
    with perdure.open("agent.db") as store:
        store.thread("alice").save({"n": 1})
        store.run(hello, id="hello")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["store", "restore", "agent.db"],
        ["store", "repair"],
        ["store", "role", "app", "agents", "--apply"],
    ],
)
def test_without_psycopg_it_says_what_to_install(where: Path, arguments: list[str]) -> None:
    store = [] if "restore" in arguments else ["--store"]
    line = [*without("psycopg"), *arguments, *store, "postgresql://app@localhost/agents"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "perdure: PostgreSQL needs the extra `postgres`, which is not installed: "
        "run pip install '.[postgres]' in your clone of Perdure\n"
    )


def test_roles_of_a_file_are_refused_before_anything_is_imported(
    where: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "role", "app", "agents"]) == 2
    assert "roles are PostgreSQL's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["stumble_app.py"], 2, "which function? Write app.py:travel"),
        (["none.py:greet"], 2, "there is no file 'none.py'"),
        (["stumble_app.py:nope"], 2, "stumble_app.py has no 'nope'; it has the durable functions greet"),
        (["json:dumps"], 2, "json:dumps is not a durable function"),
        (["stumble_app.py:greet"], 2, "missing a required argument: 'who': pass its arguments"),
        (["stumble_app.py:greet", "--args", "[1, 2]"], 2, "too many positional arguments"),
        (["stumble_app.py:greet", "--kills", "-1"], 2, "-1 is not in the range"),
    ],
)
def test_a_drill_that_cannot_begin_is_one_line(
    where: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drill", *arguments]) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["thread", "rollback", "zoe", "head"], 3, "there is no thread 'zoe'"),
        (["fork"], 2, "did you mean `perdure run fork` or `perdure thread fork`?"),
        (["run", "list"], 2, "did you mean `perdure runs`?"),
        (["thread", "pni"], 2, "there is no command 'pni'; did you mean `perdure thread pin`"),
        (["init"], 2, "there is no command 'init'; `perdure --help` lists all"),
        (["key", "make"], 2, "there is no command 'make'; `perdure key --help` lists all"),
        (["run", "trip-42"], 2, "`perdure run show trip-42` shows a run"),
        (["run", "steps", "trip-42"], 2, "did you mean `perdure steps`?"),
        (["run", "show", "alice"], 3, "there is no run 'alice', but a thread: `perdure log alice`"),
        (["log", "hello"], 3, "there is no thread 'hello', but a run: `perdure run show hello`"),
        (["log", "alice", "b"], 2, "unexpected extra argument (b); see `perdure log --help`"),
        (["--limit", "3", "log", "alice"], 2, "--limit"),
        (["thread", "unpin", "alice", "--name", "x"], 3, "no pin 'x'"),
        (["store", "backup", "."], 2, "is a folder; name a file in it"),
        (["store", "transfer", "other.db", "--move"], 2, "--move needs --one-tenant"),
        (["key", "new", "--keys", "none/keys.json"], 4, "the key file none/keys.json cannot be written: No such"),
    ],
)
def test_a_mistake_names_what_is_wrong(
    where: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert words in err
    assert "the output cannot be written" not in err
    assert err.count("\n") == 1


def test_the_id_of_a_fork_that_is_taken_is_a_usage_error(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from perdure.runs.workers.loading import load_app

    with perdure.open("agent.db") as store:
        for name in ("a", "b"):
            store.run(load_app("stumble_app.py").greet, name, id=f"greet-{name}")
    assert main(["run", "fork", "greet-a", "--name", "greet-b"]) == 2
    assert "choose another id" in capsys.readouterr().err


@pytest.mark.parametrize("stream", [1, 2])
def test_a_stream_that_is_closed_changes_no_exit_code(where: Path, stream: int) -> None:
    for arguments, code in ((["threads"], 0), (["bogus"], 2)):
        with open(os.devnull, "w") as nothing:
            done = subprocess.run(
                ["sh", "-c", f'"$@" {stream}>&-', "sh", *MODULE, *arguments], stdout=nothing, stderr=nothing, timeout=60
            )
        assert done.returncode == code


@pytest.mark.parametrize("command", [["check", "loud.py"], ["worker", "loud.py", "--once"]])
def test_what_an_app_prints_is_not_among_the_json(where: Path, command: list[str]) -> None:
    (where / "loud.py").write_text(
        APP.replace("stumble-", "stumble-loud-").replace("    return", "    print('at work')\n    return")
        + "\nprint('loading')\n"
    )
    start = "import perdure, loud; perdure.open('agent.db').start(loud.greet, 'ann', id='loud-1')"
    subprocess.run([sys.executable, "-c", start], check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run([*MODULE, *command, "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert "loading" in done.stderr


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"\n{title}:\n" in out for title in ("Runs", "Code", "Threads", "Stores"))
    assert all(f"\n  {name} " in out for name in root.commands)


# --- no store yet


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an app that no other test has, in a folder without a store."""
    monkeypatch.chdir(tmp_path)
    for variable in ("PERDURE_STORE", "PERDURE_SCHEMA", "PERDURE_KEYS"):
        monkeypatch.delenv(variable, raising=False)
    name = f"{tmp_path.name}.py"
    Path(name).write_text(APP.replace("stumble-greet", tmp_path.name))
    return name


@pytest.mark.parametrize("command", ["worker", "start"])
def test_without_a_store_it_says_how_to_make_one_and_then_works(
    app: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    line = ["worker", app, "--once"] if command == "worker" else ["start", f"{app}:greet", "--args", "ann"]
    assert main(line) == 2
    assert "`perdure store create agent.db` creates it" in capsys.readouterr().err
    assert main([*line, "--store", "my agent.db"]) == 4
    assert "there is no store at my agent.db" in (err := capsys.readouterr().err)
    assert err.endswith("or create it: `perdure store create 'my agent.db'`\n")
    assert [path.name for path in Path().glob("*.db*")] == []
    assert main(["store", "create", "agent.db"]) == 0
    assert capsys.readouterr().out == "the store at agent.db is ready\n"
    assert main(line) == 0


def test_creating_a_store_again_changes_nothing_in_it(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "create", "agent.db", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"url": "agent.db"}
    with perdure.open("agent.db") as store:
        assert store.thread("alice").load().state == {"n": 1}


def test_the_store_to_create_may_be_named_as_for_other_commands(
    app: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["store", "create"]) == 2
    assert main(["--store", "a.db", "store", "create", "b.db"]) == 2
    assert "name the store once" in capsys.readouterr().err
    assert [path.name for path in Path().glob("*.db*")] == []
    assert main(["--store", "a.db", "store", "create"]) == 0
    assert capsys.readouterr().out == "the store at a.db is ready\n"
    monkeypatch.setenv("PERDURE_STORE", "c.db")
    assert main(["store", "create"]) == main(["store", "create", "d.db"]) == 0
    assert {path.name for path in Path().glob("*.db")} == {"a.db", "c.db", "d.db"}


def test_a_store_in_postgresql_is_made_by_a_command_too(
    app: str, empty_postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["worker", app, "--once", "--store", empty_postgres_url]
    assert main(line) == 4
    assert "`perdure store create URL`" in capsys.readouterr().err
    assert main(["store", "create", empty_postgres_url]) == 0
    assert main(line) == 0
