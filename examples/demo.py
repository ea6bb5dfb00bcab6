"""Show an agent that survives kills, with real processes and files, in under a minute (`make demo`).

The agent (examples/travel.py) and the airline (perdure.testing.fake_airline) are two processes. Everything happens in a
temporary directory, which is removed at the end; a copy of the store stays for the inspector. Output has colours only
on a terminal, and not with NO_COLOR.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import perdure
from perdure.testing.fake_airline import AirlineProcess

AGENT = Path(__file__).with_name("travel.py")
TURNS = 300
DRILL_KILLS = 4  # random kills, in addition to about thirty named points

_numbers = itertools.count(1)
_COLOURED = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if _COLOURED else text


def part(title: str) -> None:
    print(f"\n{paint(f'{next(_numbers)}. {title}', '1;36')}", flush=True)


def say(text: str, code: str = "0") -> None:
    print(f"   {paint(text, code) if code != '0' else text}", flush=True)


class Scene:
    """The folder, the airline, and the line that starts the agent."""

    def __init__(self, folder: Path, airline: AirlineProcess) -> None:
        self.airline = airline
        self.store = str(folder / "agent.db")

    def start(self, dest: str) -> subprocess.Popen[str]:
        say(f"$ python examples/travel.py {dest}", "1")
        line = [sys.executable, str(AGENT), dest, "--store", self.store, "--airline", self.airline.url]
        return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)

    def run(self, dest: str) -> str:
        """Run the agent until it ends, and return its output."""
        with self.start(dest) as agent:
            assert agent.stdout is not None
            said = agent.stdout.read().strip()
        assert agent.returncode == 0, agent.returncode
        for line in said.splitlines():
            say(line, "32")
        return said

    def kill(self, dest: str, *, when: str, outcome: str, count: int) -> None:
        """Run the agent, hold its request before or after the airline acts, and kill the agent meanwhile."""
        self.airline.client.behave(hold=when)
        with self.start(dest) as agent:
            try:
                self.airline.wait_for(outcome, path="/book", count=count)
            finally:
                agent.kill()
        self.airline.client.behave(hold="")
        say(f"killed, exit code {agent.returncode} (SIGKILL)", "1;31")
        assert agent.returncode == -signal.SIGKILL, agent.returncode

    def command(self, *arguments: str) -> None:
        """Run a command, which must succeed, and show it with its output."""
        say(f"$ perdure {shlex.join(arguments)}", "1")
        line = [sys.executable, "-m", "perdure", *arguments]
        env = {**os.environ, "PERDURE_STORE": self.store}
        done = subprocess.run(line, cwd=AGENT.parents[1], env=env, capture_output=True, text=True, check=False)
        for text in (*done.stdout.splitlines(), *done.stderr.splitlines()):
            say(text, "2")
        assert done.returncode == 0, done.returncode

    def answer(self, dest: str) -> None:
        """Answer the question. This needs only the store: no process of the agent is running."""
        with perdure.open(self.store) as store:
            [question] = store.questions(f"trip-{dest}")
        assert question.options
        self.command("answer", question.run, question.options[0], "--who", "ann")

    def step(self, store: perdure.Store, dest: str, name: str) -> perdure.Step:
        return next(one for one in store.get_run(f"trip-{dest}").steps() if one.name == name)


# --- the story


def asked(scene: Scene) -> None:
    part("A travel agent searches flights, and asks a person. Nothing has to run while it waits.")
    scene.run("Lisbon")
    scene.answer("Lisbon")


def killed(scene: Scene, store: perdure.Store) -> None:
    part("It books the flight, and is killed: the airline has booked, and the agent does not know.")
    scene.kill("Lisbon", when="after", outcome="booked", count=1)
    say(f"the agent's own record of book_flight: {scene.step(store, 'Lisbon', 'book_flight').status}", "33")

    part("The same line again. It finds the booking by its key, resumes, and is killed booking the hotel.")
    scene.kill("Lisbon", when="before", outcome="received", count=1)
    scene.airline.wait_for("booked", path="/book", count=2)
    say("its request was still on the way: the airline books the hotel for an agent that is dead", "33")

    part("The same line again.")
    said = scene.run("Lisbon")
    assert "(flight-1)" in said, said
    assert "(hotel-1)" in said, said


def undone(scene: Scene, store: perdure.Store) -> None:
    part("A second trip: the hotel is sold out, so the flight is cancelled again.")
    scene.airline.client.behave(sold_out=["Grand Hotel Oslo"])
    scene.run("Oslo")
    scene.answer("Oslo")
    scene.run("Oslo")
    assert store.get_run("trip-Oslo").status == "failed"


def shown_ledger(scene: Scene) -> None:
    part("The airline's ledger: what it was asked, and what it did.")
    requests, bookings = scene.airline.requests(), scene.airline.bookings()
    for one in requests:
        key = f"key {one.key[:9]}…" if one.key else ""
        done = "32" if one.outcome in ("booked", "cancelled") else "31" if one.outcome == "sold out" else "2"
        say(f"{one.number:>2}  {one.path:<9} {key:<15} {one.outcome:<9} {one.booking or ''}".rstrip(), done)
    acted = Counter((one.outcome, one.key) for one in requests if one.outcome in ("booked", "cancelled"))
    assert set(acted.values()) == {1}, f"something was done twice: {acted}"
    assert [one.booking for one in bookings] == ["flight-1", "hotel-1", "flight-2"], bookings
    assert [one.booking for one in bookings if one.cancelled_at] == ["flight-2"], bookings
    say("3 bookings under 3 keys, 1 cancellation: each was done exactly once", "1;32")


def timeline(store: perdure.Store, dest: str) -> None:
    part(f"The run's own timeline, trip-{dest}.")
    run = store.get_run(f"trip-{dest}")
    for one in run.steps():
        result = one.error or (one.result if isinstance(one.result, str) else "")
        settled = f"({one.note['settled']})" if one.note and "settled" in one.note else ""
        say(
            f"{one.started_at:%H:%M:%S.%f}"[:-3]
            + f"  {one.path:<2} {one.kind:<7} {one.name:<12} {one.status:<5}"
            f" {result if len(result) <= 50 else result[:49] + '…'} {settled}".rstrip(),
            "33" if settled else "2",
        )
    say(f"taken up {run.refresh().attempts} times", "2")


def drill(scene: Scene) -> None:
    part("The drill: the same agent, killed at every point of its life and at random times, and resumed.")
    arguments = json.dumps(["Lisbon", scene.airline.url])
    scene.command("drill", "examples/travel.py:travel", "--args", arguments, "--kills", str(DRILL_KILLS))


def states(store: perdure.Store) -> None:
    part("Beneath it: states of your own, any of them loaded, compared and forked, stored as what changed.")
    chance = random.Random(42)
    words = ["".join(chance.choices("eeeeetttaaaooiinnsshhrrddlucmfwygp", k=chance.randint(2, 9))) for _ in range(2000)]
    thread = store.thread("chat")
    messages: list[str] = []
    in_full = 0
    for turn in range(TURNS):
        messages.append(" ".join(chance.choices(words, k=60)))
        thread.save({"messages": messages, "turn": turn})
        in_full += len(json.dumps(messages))
    stored = store.ops.stats().stored_bytes
    say(f"{TURNS} saves of a growing chat: {in_full / 1e6:,.1f} MB as JSON, {stored / 1e6:,.2f} MB stored")
    early = next(one for one in thread.history() if one.step == TURNS // 2)
    thread.fork(early, name="chat-again")
    assert store.ops.stats().stored_bytes == stored
    say(f"from step {early.step} until now: {len(thread.diff(early))} changes; a fork from there took 0 bytes")
    report = store.ops.verify()
    assert not report.problems, report.problems
    say(f"verified: {report.checkpoints} checkpoints, {len(report.problems)} problems", "1;32")


def kept_copy(store: perdure.Store) -> Path:
    """Back the store up to a file that stays, and return its path. It replaces the one of the demo before."""
    path = Path(tempfile.gettempdir(), "perdure-demo.db")
    path.unlink(missing_ok=True)
    store.ops.backup(path)
    return path


def main() -> None:
    started = time.monotonic()
    print(paint("Perdure: kill the agent anywhere, run the line again, nothing is done twice.", "1"))
    with tempfile.TemporaryDirectory(prefix="perdure-demo-") as name:
        folder = Path(name)
        with AirlineProcess(folder / "airline.db") as airline, perdure.open(str(folder / "agent.db")) as store:
            scene = Scene(folder, airline)
            say(f"the airline: a process of its own, {airline.url}", "2")
            asked(scene)
            killed(scene, store)
            undone(scene, store)
            shown_ledger(scene)
            timeline(store, "Lisbon")
            drill(scene)
            states(store)
            kept = kept_copy(store)
    here = Path(sys.prefix).name + "/bin/" if sys.prefix != sys.base_prefix else ""
    print(f"\n{paint('Done', '1')} in {time.monotonic() - started:.1f} s. Try next:")
    say(f"{here}python examples/travel.py            the same agent, and you answer it; kill it where you like")
    say(f"{here}python examples/survives_a_kill.py   states of your own: it dies, then resumes")
    say(f"{here}python examples/two_writers.py       branch, refuse or merge")
    say(f"{here}python examples/snapshots.py         a bad deployment, looked into and undone")
    say(f"{here}python examples/async_agents.py      fifty agents on one file")
    say("docs/tutorial/an-agent-that-survives.md         this agent, built step by step")
    say("docs/tutorial/first-thread.md                   states without runs, in ten minutes")
    say("docs/how-to/langgraph.md                        LangGraph: change one line")
    print("\nSee these runs in the browser (docs/how-to/inspector.md says what it needs):")
    say(f"{here}perdure inspect {shlex.quote(str(kept))}", "1")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
