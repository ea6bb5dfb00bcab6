"""Hand work over with a progress file: the initializer sets the goal, and each session of the worker continues.

A session begins without memory. It first reads the progress: the goal, the finished steps, the obstacles and the next
step. Perdure keeps the record with the run, and as a Markdown file that people can read and change. Here every change
is a git commit too.

python examples/progress_handoff.py
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import perdure

GIT = shutil.which("git") is not None


@perdure.step
def plan(task: str) -> list[str]:
    """Stand in for a model that splits a task."""
    return ["Analyse the requirements", "Write the parser", "Write the tests", "Release it"]


@perdure.step
def work_on(action: str) -> str | None:
    """Stand in for a model and its tools. Return an obstacle, or None."""
    return "The release key is with Ann, who is back tomorrow" if action == "Release it" else None


@perdure.durable
def initialize(task: str, file: str) -> None:
    """Set the goal and the plan. The initializer runs once."""
    actions = plan(task)
    perdure.progress(goal=task, next=actions[0], context={"language": "Python", "plan": actions}, file=file, git=GIT)


@perdure.durable
def session(file: str) -> str:
    """Read the progress, do the next step, and record it for the next session."""
    before = perdure.progress.read(file)
    if before.next is None:
        return "nothing is left to do"
    problem = work_on(before.next)
    if problem is not None:
        perdure.progress(blocked=problem, file=file, git=GIT)
        return f"blocked: {problem}"
    later = [action for action in before.context["plan"] if action not in (*before.done, before.next)]
    perdure.progress(done=before.next, blocked=None, next=later[0] if later else None, file=file, git=GIT)
    return f"did: {before.next}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "PROGRESS.md"
        if GIT:
            subprocess.run(["git", "init", "--quiet", folder], check=True)
            subprocess.run(["git", "-C", folder, "config", "commit.gpgsign", "false"], check=True)
        with perdure.open(f"{folder}/agent.db") as store:
            store.run(initialize, "A parser for airline codes", str(file), id="initialize").result()
        for number in range(1, 5):  # each opens the store anew, as a process of its own would
            with perdure.open(f"{folder}/agent.db") as store:
                print(f"session {number}:", store.run(session, str(file), id=f"session-{number}").result())
        print(f"\n{file.name}:\n")
        print("".join(f"  {line}\n" for line in file.read_text().splitlines()))
        if GIT:
            log = subprocess.run(
                ["git", "-C", folder, "log", "--format=%s"], capture_output=True, text=True, check=True
            )
            print("commits, newest first:", *log.stdout.splitlines(), sep="\n  ")


if __name__ == "__main__":
    main()
