"""Run an agent that learns over three sessions, and is killed in the second one.

    python examples/learning_agent.py        # needs the extra `search`; no network

Each session is a process of its own, which leaves only the store. In the third session the agent knows what the store
holds: facts that it learned, a summary of the earlier sessions, and a procedure from a successful run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from typing import Any

import perdure
from perdure.memory import AgentMemory

SESSIONS = {
    "1": ["I live in Graz.", "I love hiking in the mountains.", "Which mountains are near where I live?"],
    "2": ["I moved, I live in Oslo now."],
    "3": ["Which mountains are near where I live?", "Please plan a hike."],
}
MOUNTAINS = {"Graz": "the Schöckl", "Oslo": "Vettakollen"}


# --- The model. Rules stand in for it, so that this runs anywhere; each function names the call of a real one.


@perdure.step
def think(messages: list[dict[str, str]]) -> str:
    """client.chat.completions.create(model=…, messages=messages).choices[0].message.content"""
    print("    (the model is called)", flush=True)
    known, question = messages[0]["content"], messages[-1]["content"]
    if "Which mountains" in question:
        cities = re.findall(r"lives in (\w+)", known)
        return f"Near {cities[-1]}: {MOUNTAINS[cities[-1]]}." if cities else "Where do you live?"
    if "plan a hike" in question:
        plan = re.search(r"plan a hike: (.*)", known)
        return f"As it worked before: {plan[1]}." if plan else "I have never done that."
    return "I will remember that."


def extract(turn: dict[str, str]) -> dict[str, Any]:
    """Return the facts of a turn by key; a real model would extract them. A fact replaces the old one with its key."""
    rules = {"home": r"I live in (\w+)", "likes": r"I love (.+)\."}
    sentences = {"home": "The user lives in {}", "likes": "The user loves {}"}
    matches = {key: re.search(rule, turn["user"]) for key, rule in rules.items()}
    return {key: {"fact": sentences[key].format(match[1])} for key, match in matches.items() if match}


def summarize(summary: str, turns: list[dict[str, str]]) -> str:
    """Return a shorter text; a real model would write it."""
    return " ".join([summary or "The user said:", *(turn["text"] for turn in turns if turn["role"] == "user")])


# --- The agent


@perdure.step
def check_weather(city: str) -> str:
    return "sunny"


@perdure.step
def choose_trail(city: str, weather: str) -> str:
    return MOUNTAINS[city]


@perdure.durable
def plan_a_hike(city: str) -> str:
    return choose_trail(city, check_weather(city))


def work(session: str, *, kill: bool) -> None:
    """Run one session in one process."""
    with perdure.open("agent.db", embedder="local") as store:
        memory = AgentMemory(
            store, "alice", instructions="You know the mountains.", extract=extract, summarize=summarize, context=2000
        )

        @perdure.durable
        def talk(lines: list[str]) -> None:
            """Run the turns. A durable function records each turn once, and calls no model twice."""
            for line in lines:
                prompt = memory.recall(line)
                answer = think(prompt.openai())
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)  # the model has answered, but the turn is not recorded yet
                memory.record(prompt, answer)
                print(f"    alice: {line}\n    agent: {answer}", flush=True)
            memory.end_session()

        store.run(talk, SESSIONS[session], id=f"session-{session}").result()
        if session == "2":
            memory.promote(store.run(plan_a_hike, "Oslo", id="hike"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__)]
        print("Session 1", flush=True)
        subprocess.run([*command, "1"], cwd=folder, check=True)
        print("Session 2", flush=True)
        killed = subprocess.run([*command, "2", "--kill"], cwd=folder)
        print(f"    killed, exit code {killed.returncode}", flush=True)
        print("Session 2, the same line again", flush=True)
        subprocess.run([*command, "2"], cwd=folder, check=True)
        print("Session 3", flush=True)
        subprocess.run([*command, "3"], cwd=folder, check=True)

        with perdure.open(f"{folder}/agent.db") as store:
            memory = AgentMemory(store, "alice")
            said = memory.conversation.load()
            print(f"Episodic: {said.first} turns in {said.session - 1} sessions. {said.summary}")
            print("Semantic:", [item.value["fact"] for item in memory.facts.history("home")])
            print("Procedural:", [item.value for item in memory.procedures.list()])


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else work(sys.argv[1], kill="--kill" in sys.argv)
