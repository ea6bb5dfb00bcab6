"""A run that fills a scratchpad, in the function and in a step, and kills itself at the write it is told."""

from __future__ import annotations

import os
import signal
import sys

import perdure
from perdure.memory import Scratchpad
from perdure.runs.execution import hooks


def summarize(text: str) -> str:
    print("summarized", flush=True)
    return f"{len(text.splitlines())} lines"


@perdure.step(name="padding.look", ignore=("pad",))
def look(pad: Scratchpad, n: int) -> str:
    pad.add("observation", f"seen in step {n} " + "word " * 20, source="look")
    return f"looked {n}"


@perdure.durable(name="padding.agent")
def agent() -> str:
    pad = Scratchpad(300, summarize, tokens=lambda text: len(text.split()))
    pad.add("decision", "use the train")
    for n in range(14):
        pad.add("thought", look(pad, n) + " and think " * 4)
    return pad.render()


def main() -> None:
    path, kill_at = sys.argv[1], int(sys.argv[2])
    seen = 0

    def strike(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    store = perdure.open(path)
    hooks.hook = strike
    print(store.run(agent, id="one").result())


if __name__ == "__main__":
    main()
