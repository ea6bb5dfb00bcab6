"""A process that reads a LangGraph thread that another process wrote: its state, then all its history.

The history is taken as a list, as LangGraph itself does before it gives out the first snapshot, and the newest message
of each is read; then every message of every snapshot, because a saver may defer what is not read. Each
snapshot's messages must be its own: changing them must change no other. That is checked afterwards.
Run as a module it is such a process: `python -m bench.langgraph_history KIND LOCATION`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from langgraph.types import StateSnapshot

from bench.langgraph_chat import CHECKPOINTS_PER_TURN, SAVERS, Graph, Rival, choose_columns, graph_of, thread, warm_up
from bench.measure import answer_of, in_child, seconds

TIMEOUT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What it took a new process to read a thread: its state, the list of its history, every message in that too."""

    first_s: float
    history_s: float
    all_s: float
    states: int
    characters: int
    peak_bytes: int


def readings(rivals: list[Rival], turns: int) -> list[Reading]:
    """Each rival's, in processes of their own, one after the other; the first, which is slow, once, the rest twice."""
    found: dict[str, list[Reading]] = {}
    for rival in [*rivals[1:], *rivals]:
        reading = Reading(**answer_of(in_child("bench.langgraph_history", rival.kind, rival.location), TIMEOUT_S))
        if reading.states != turns * CHECKPOINTS_PER_TURN:
            raise RuntimeError(f"{rival.kind} has {reading.states} checkpoints of {turns} turns")
        found.setdefault(rival.location, []).append(reading)
    if len({reading.characters for read in found.values() for reading in read}) != 1:
        raise RuntimeError("one history, as rivals know it, has different messages")
    return [_middle(found[rival.location]) for rival in rivals]


def _middle(read: list[Reading]) -> Reading:
    first, history, everything = (
        median(getattr(reading, name) for reading in read) for name in ("first_s", "history_s", "all_s")
    )
    return Reading(
        first, history, everything, read[0].states, read[0].characters, max(reading.peak_bytes for reading in read)
    )


def _read(kind: str, location: str) -> Reading:
    warm_up()
    choose_columns(kind)
    snapshots: list[StateSnapshot] = []
    characters = 0
    with SAVERS[kind](location) as saver:
        graph = graph_of(saver, {})

        def history() -> None:
            snapshots.extend(graph.get_state_history(thread("chat")))
            for snapshot in snapshots:
                for newest in snapshot.values.get("messages", ())[-1:]:
                    len(newest.content)

        def all_messages() -> None:
            nonlocal characters
            for snapshot in snapshots:
                for message in snapshot.values.get("messages", ()):
                    characters += len(message.content)

        first_s = seconds(lambda: graph.get_state(thread("chat")))
        history_s = seconds(history)
        all_s = history_s + seconds(all_messages)
        _check_isolation(graph, snapshots[0], snapshots[1])
    return Reading(first_s, history_s, all_s, len(snapshots), characters, _peak())


def _check_isolation(graph: Graph, newest: StateSnapshot, older: StateSnapshot) -> None:
    """A change of a message in one snapshot must not change another, nor in what is read later."""
    before = older.values["messages"][0].content
    newest.values["messages"][0].content = "changed"
    newest.values["messages"].append("more")
    again = graph.get_state(thread("chat"))
    seen = [older.values["messages"][0].content, again.values["messages"][0].content]
    if seen != [before, before] or again.values["messages"][-1] == "more":
        raise RuntimeError("snapshots share messages")


def _peak() -> int:
    """The largest resident size of this program, 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(asdict(_read(sys.argv[1], sys.argv[2]))))
