"""Two agents, one progress file: the initializer sets the goal, and each session of the worker goes on from it.

A session begins without any memory. It reads the progress first: what is wanted, what is done, what is in the way,
what is next. The record is kept with the run, exactly once, and as a Markdown file that people can read; here every
change is a commit too.

python examples/progress_handoff.py
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import holdfast as hf

PLAN = ["Analyse the requirements", "Write the parser", "Write the tests", "Release it"]


@hf.durable
def initialize(task: str, file: str) -> None:
    """The initializer agent, run once: it only prepares the ground."""
    hf.progress(goal=task, next=PLAN[0], context={"language": "Python", "plan": PLAN}, file=file, git=True)


@hf.step
def work_on(action: str) -> str:
    """Stands for a model and its tools."""
    return f"{action}: finished"


@hf.durable
def session(number: int, file: str) -> str:
    """The worker: reads, does the next thing, and leaves the progress for whoever comes next."""
    before = hf.progress.read(file)
    action = before.next
    if action is None:
        return "nothing is left to do"
    if action == "Release it" and before.blocked is None:
        hf.progress(blocked="The release key is with Ann, who is back tomorrow", file=file, git=True)
        return "blocked"
    work_on(action)
    upcoming = PLAN[PLAN.index(action) + 1 :]
    hf.progress(done=action, blocked=None, next=upcoming[0] if upcoming else None, file=file, git=True)
    return f"did: {action}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "PROGRESS.md"
        subprocess.run(["git", "init", "--quiet", folder], check=True, env={**os.environ, "HOME": folder})
        with hf.open(f"{folder}/agent.db") as store:
            store.run(initialize, "A parser for airline codes", str(file), id="init").result()
        for number in range(1, 5):  # each with a store of its own, as each would be a process of its own
            with hf.open(f"{folder}/agent.db") as store:
                run = store.run(session, number, str(file), id=f"session-{number}")
                print(f"session {number}: {run.result()}")
        print(f"\n{file.name}:\n")
        print("".join(f"  {line}\n" for line in file.read_text().splitlines()))
        log = subprocess.run(["git", "log", "--format=%s"], cwd=folder, capture_output=True, text=True, check=True)
        print("commits, newest first:", *log.stdout.splitlines(), sep="\n  ")


if __name__ == "__main__":
    main()
