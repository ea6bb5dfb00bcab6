"""Use every command where nothing but Perdure is installed: `python bare_commands.py`, in an empty folder.

First the help of each command, then plain uses of it. Every line of `USES` must succeed, those of `NEED` must say which
extra is missing, and each command must be in one of them, so that a new command is tried here by itself.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from pathlib import Path

APP = """
import perdure


@perdure.effect(undo=lambda seat: None)
def book(seat):
    return seat


@perdure.durable
def travel(city):
    return book(perdure.ask("Which seat?", options=["1A", "2B"]))


@perdure.durable
def quick(city):
    return book(city)


@perdure.durable
def broken():
    raise KeyError("a defect")
"""
USES = """
start app.py:travel --args Lisbon --id trip
start app.py:quick --args Lisbon --id quick
worker app.py --once
questions
runs
steps quick
run show trip
run tail quick
check app.py
run pause trip
run resume trip
answer trip 1A
worker app.py --once
run replay app.py trip
start app.py:broken --id broken
worker app.py --once
run retry broken
run fork quick --name again
run send again hello
schedule create nightly app.py:quick '0 7 * * *' --args Lisbon
schedules
schedule pause nightly
schedule resume nightly
schedule trigger nightly
schedule backfill nightly 2d
schedule delete nightly --yes
actions
run cancel again
deploy quick 1
deployments
audit quick
export-dataset
drill app.py:quick --args Lisbon --kills 0
threads
log alice
show alice
diff alice head~1
thread show alice
thread fork alice --name bob
thread rollback alice head~1
thread edit alice n 5
thread pin alice --name kept
thread pins alice
thread unpin alice --name kept
thread prune bob --keep 1 --yes
thread transfer bob bob.db
thread archive bob archived.db
thread unarchive bob
thread erase bob --yes
thread delete alice --yes
memory put users/alice hobby hiking
memory get users/alice hobby
memory namespaces
memory items users/alice
memory stats
memory export users/alice
memory import users/bob items.jsonl
memory migrate app.py
memory reindex
memory pin users/alice hobby
memory unpin users/alice hobby
memory forget users/alice hobby --yes
memory erase users/alice --yes
teams
team show research
team send research writer hello
team dead research
team snapshot research cut
team explain research
team diagram research --at cut
team recover research writer --turn 0
team rewind research writer --turn 0
team restore research cut
snapshot take now
snapshots
snapshot diff now
snapshot good now
snapshot export now bundle.db
snapshot check bundle.db
snapshot restore now
snapshot release now --yes
key new --keys keys.json
run transfer quick other.db
run delete again --yes
run archive quick runs.db
run unarchive quick
run undo quick
run cancel quick
worker app.py --once
run erase quick --yes
store create new.db
store settle agent.db
store archives
store health
store stats
store verify
store compact
retention
store backup monday.backup
store restore monday.backup restored.db
store transfer copied.db
doctor
"""
NEED = """
memory search users/alice hiking: search
memory reembed --embedder local: search
mcp --namespace users/alice: mcp
inspect --port 0: inspect
store sql SELECT: sql
store parquet tables: sql
"""
# Of other databases and services, or for what went wrong; their pages and tests use them.
ELSEWHERE = {
    *(
        "memory merge",
        "run progress",
        "run resolve",
        "snapshot incident",
        "team move",
        "thread undo",
        "store promote",
        "store repair",
        "store replicate",
    ),
    *("store role", "store import-langgraph", "key forget", "key remove", "key rotate", "keys"),
}


def said(line: list[str]) -> tuple[int, str]:
    """Run a command here. Its exit code and what it printed."""
    from perdure.cli import main

    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(line)
    printed.seek(0)
    return code, printed.read()


def commands() -> set[str]:
    from perdure.cli.base import command_names, root

    return set(command_names(root))


def of(line: str, known: set[str]) -> str:
    """The command of a line: `run show`, not its arguments."""
    words = line.split()
    return next(name for name in (" ".join(words[:2]), words[0]) if name in known)


def run() -> None:
    import perdure

    uses = USES.strip().splitlines()
    need = [line.rpartition(": ") for line in NEED.strip().splitlines()]
    known = commands()
    untried = known - ELSEWHERE - {of(line, known) for line in (*uses, *(line for line, _, _ in need))}
    assert not untried, f"not tried on a bare install: {sorted(untried)}"
    for name in sorted(known):
        code, text = said([*name.split(), "--help"])
        assert code == 0, (name, text)
        assert "Examples" in text, (name, text)
    Path("app.py").write_text(APP)
    Path("items.jsonl").write_text('{"namespace": [], "key": "k", "value": "hello"}\n')
    with perdure.open("agent.db") as store:
        for n in range(3):
            store.thread("alice").save({"n": n})
        team = store.team("research")

        @team.agent
        def writer(state: dict[str, object], message: object) -> None:
            state["last"] = message

        team.send(writer, "first")
        team.work(until_idle=True)
    for line in uses:
        code, text = said(shlex.split(line))
        # 1 is an answer too: a difference, a warning of the doctor.
        assert code in ((0, 1) if of(line, known) in ("doctor", "diff") else (0,)), f"{line}: {code} {text}"
    for line, _, extra in need:
        code, text = said(shlex.split(line))
        assert code == 2, f"{line}: {code} {text}"
        assert f"pip install '.[{extra}]'" in text, f"{line}: {text}"


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())
    run()
