"""A process that records turns until it is killed; or a run that does, and kills itself at a numbered point."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from striking import die_at

import perdure
from perdure.memory import AgentMemory
from perdure.runs.execution import hooks


def agent_of(store: perdure.Store, log: Path | None = None, user: str = "alice") -> AgentMemory:
    def called(name: str) -> None:
        if log is not None:
            with log.open("a") as file:
                file.write(f"{name}\n")

    def extract(turn: dict[str, str]) -> dict[str, Any]:
        called(f"extract {turn['user']}")
        return {"last": turn["user"], f"turn {turn['user']}": "known"}

    def summarize(summary: str, turns: list[dict[str, str]]) -> str:
        called(f"summarize {len(turns)}")
        return f"{summary}{len(turns)} "

    agent = AgentMemory(store, user, extract=extract, summarize=summarize)
    agent.conversation._recent = 3
    return agent


def main() -> None:
    store = perdure.open(sys.argv[1])
    if len(sys.argv) == 2:
        agent = agent_of(store)
        for n in range(len(agent.facts.history("last")), 100_000):
            agent.record(str(n), "answer")
            print(n, flush=True)
    kill_at, log = int(sys.argv[2]), Path(sys.argv[3])
    learner = agent_of(store, log)

    @perdure.durable(name="learning.agent")
    def run() -> list[Any]:
        for n in range(5):
            learner.record(learner.recall(str(n)), "answer")
        learner.end_session()
        return [learner.conversation.load().summary, len(learner.facts.list())]

    hooks.hook = die_at(kill_at)
    print(store.run(run, id="one").result())


if __name__ == "__main__":
    main()
