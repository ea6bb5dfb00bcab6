"""`make demo`: what Holdfast does, shown on real processes and a real file, in under 20 seconds.

Everything happens in a temporary directory that is removed at the end. Colours only on a terminal, not with NO_COLOR.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import holdfast

TASKS = ["read the brief", "search flights", "compare prices", "check the visa", "pick a hotel", "draft the plan"]
TASKS += ["ask for approval", "book the flight", "book the hotel", "write the summary"]
KILL_AFTER = 4
TURNS = 300

_COLOURED = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if _COLOURED else text


def part(number: int, what: str) -> None:
    print(f"\n{paint(f'{number}. {what}', '1;36')}", flush=True)


def say(text: str, code: str = "0") -> None:
    print(f"   {paint(text, code) if code != '0' else text}", flush=True)


def kilobytes(count: int) -> str:
    return f"{count / 1000:,.1f} kB"


# --- the agent: a process of its own, started as `demo.py --agent PATH`


def agent(path: str) -> None:
    """Work through the tasks, saving after each. It knows nothing about being killed."""
    with holdfast.open(path) as store:
        thread = store.thread("trip-42")
        state: dict[str, Any] = {"done": [], "spent_eur": 0} if thread.head() is None else thread.load().state
        print(f"start {len(state['done'])}", flush=True)
        for task in TASKS[len(state["done"]) :]:
            time.sleep(0.15)  # stands for a call of a model
            state["done"].append(task)
            state["spent_eur"] += 10 * len(task)
            thread.save(state, note=task)
            print(f"saved {task}", flush=True)


def run_agent(path: str, *, kill_after: int | None) -> tuple[int, int, int]:
    """Run the agent, and kill it with SIGKILL after so many saves. Its exit code; how many tasks it found and saved."""
    found = saved = 0
    with subprocess.Popen([sys.executable, __file__, "--agent", path], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                kind, _, rest = line.rstrip().partition(" ")
                if kind == "start":
                    found = int(rest)
                    say(f"process {child.pid} starts and finds {rest} finished tasks", "2")
                    continue
                saved += 1
                say(f"saved: {rest}", "32")
                if saved == kill_after:
                    time.sleep(0.05)  # in the middle of the next task
                    child.send_signal(signal.SIGKILL)
        finally:
            child.kill()
    return child.returncode, found, saved


def killed(path: str) -> None:
    part(1, "An agent is killed (SIGKILL) in the middle of its work, and started again with the same line.")
    code, _, first = run_agent(path, kill_after=KILL_AFTER)
    say(f"killed, exit code {code}", "1;31")
    _, found, second = run_agent(path, kill_after=None)
    with holdfast.open(path) as store:
        done = store.thread("trip-42").load().state["done"]
    assert code == -signal.SIGKILL, code
    assert found >= first, "a save that was reported is missing"
    assert done == TASKS, done
    say(
        f"all {len(done)} tasks are done: {first} reported before the kill, {found} found after it, {second} more",
        "1;32",
    )


# --- on what the agent left


def time_travel(thread: holdfast.Thread) -> holdfast.Checkpoint:
    part(2, "Time travel: every save is a checkpoint, and any of them can be loaded.")
    for checkpoint in thread.history(limit=3):
        say(f"{checkpoint.id}  step {checkpoint.step}  {checkpoint.note}", "2")
    early = list(thread.history())[-3]
    say(f"at step {early.step} it had done {early.state['done']} and spent {early.state['spent_eur']} EUR")
    return early


def differences(thread: holdfast.Thread, early: holdfast.Checkpoint) -> None:
    part(3, f"A diff: what changed from step {early.step} until now.")
    changes = thread.diff(early)
    for change in [*changes[:3], changes[-1]]:
        say(str(change), "32" if change.kind == "added" else "33")
    say(f"{len(changes)} changes in all; 4 are shown", "2")


def fork(store: holdfast.Store, thread: holdfast.Thread, early: holdfast.Checkpoint) -> None:
    part(4, "A fork: a second thread that goes on from the past and copies nothing.")
    before = store.stats().stored_bytes
    other = thread.fork(early, name="trip-42-cheaper")
    after = store.stats().stored_bytes
    say(f"stored before: {before} bytes; after: {after} bytes")
    assert before == after
    other.update({"spent_eur": 0}, note="by train instead")
    say(f"the fork spent {other.load().state['spent_eur']} EUR, the original {thread.load().state['spent_eur']} EUR")


def small(store: holdfast.Store) -> None:
    part(5, f"Small: a chat of {TURNS} turns, saved after each. Only what changed is stored.")
    chance = random.Random(42)
    letters = "eeeeetttaaaooiinnsshhrrddlucmfwygp"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(2000)]
    thread = store.thread("chat")
    messages: list[dict[str, str]] = []
    in_full = compressed = 0
    for turn in range(TURNS):
        text = " ".join(chance.choices(words, k=60))
        messages.append({"role": "assistant" if turn % 2 else "user", "content": text})
        thread.save({"messages": messages, "turn": turn})
        whole = json.dumps({"messages": messages, "turn": turn}, separators=(",", ":")).encode()
        in_full += len(whole)
        compressed += len(zlib.compress(whole, 6))
    assert len(thread.load().state["messages"]) == TURNS
    stored = store.stats().stored_bytes
    say(f"every state as JSON             {kilobytes(in_full):>12}")
    say(f"every state as JSON, compressed {kilobytes(compressed):>12}")
    say(f"stored here                     {kilobytes(stored):>12}", "1;32")


def verify(*stores: holdfast.Store) -> None:
    part(6, "Verify: every hash, checksum and keyframe of both files is checked.")
    reports = [store.verify() for store in stores]
    checkpoints, threads = sum(report.checkpoints for report in reports), sum(report.threads for report in reports)
    problems = [problem for report in reports for problem in report.problems]
    say(f"{checkpoints} checkpoints of {threads} threads: {len(problems)} problems", "1;32")
    assert not problems


def main() -> None:
    started = time.monotonic()
    print(paint("Holdfast keeps the state of AI agents.", "1"))
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        path = str(Path(folder, "agent.db"))
        killed(path)
        with holdfast.open(path) as store, holdfast.open(str(Path(folder, "chat.db"))) as chat:
            thread = store.thread("trip-42")
            early = time_travel(thread)
            differences(thread, early)
            fork(store, thread, early)
            small(chat)
            verify(store, chat)
    here = Path(sys.prefix).name + "/bin/" if sys.prefix != sys.base_prefix else ""
    print(f"\n{paint('Done', '1')} in {time.monotonic() - started:.1f} s. Try next:")
    say(f"{here}python examples/survives_a_kill.py   run it twice: it dies, then goes on")
    say(f"{here}holdfast log trip-42                 what it left in agent.db")
    say(f"{here}python examples/two_writers.py       branch, refuse or merge")
    say(f"{here}python examples/async_agents.py      fifty agents on one file")
    say("docs/tutorial/first-thread.md                   ten minutes, step by step")
    say("docs/how-to/langgraph.md                        LangGraph: change one line")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--agent"]:
        agent(sys.argv[2])
    else:
        try:
            main()
        except KeyboardInterrupt:
            sys.exit(130)
