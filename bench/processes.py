"""Eight processes that save to one file as fast as they can: how even their shares are, how long one may wait.

Each saves 1 KB states to a thread of its own, with full durability, for the same three seconds. The peer is plain
SQLite: eight processes that insert the same bytes with a busy timeout, whose retries sleep and starve each other.
Run as a module it is one of the processes: `python -m bench.processes ours|peer PATH NAME SECONDS`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson

import perdure
from bench.measure import BareTable, Row, Run, answer_of, in_child, small_states

PROCESSES = 8
SHARE_BAR = 0.25
WAIT_BAR_S = 1.0


def processes(run: Run) -> list[Row]:
    length_s = 0.5 if run.quick else 3.0
    ours, ours_wait = _contend("ours", run.folder / "ours.db", length_s)
    peer, peer_wait = _contend("peer", run.folder / "peer.db", length_s)
    share, peer_share = min(ours) / max(ours), min(peer) / max(max(peer), 1)
    total, peer_total = sum(ours) / length_s, sum(peer) / length_s
    return [
        Row("8 processes: slowest / fastest", share, "of 1", peer=peer_share, ratio=share, bar=SHARE_BAR,
            sense="at least", note=f"{total:.0f} saves/s in all, peer {peer_total:.0f}; peer: SQLite's busy timeout"),
        Row("8 processes: longest wait", ours_wait, "s", peer=peer_wait, bar=WAIT_BAR_S, judged="ours",
            ratio=ours_wait / peer_wait, note="one save, from call to return; ratio: to the peer"),
    ]  # fmt: skip


def _contend(kind: str, path: Path, length_s: float) -> tuple[list[int], float]:
    """How many saves each process made, and the longest that any took."""
    if kind == "ours":
        perdure.open(str(path)).close()
    else:
        BareTable(path).close()
    names = [f"agent-{number}" for number in range(PROCESSES)]
    children = [in_child("bench.processes", kind, path, name, length_s) for name in names]
    for child in children:  # all are up before any begins
        assert child.stdout is not None
        child.stdout.readline()
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"go\n")
        child.stdin.flush()
    answers = [answer_of(child) for child in children]
    return [answer["saves"] for answer in answers], max(answer["longest_s"] for answer in answers)


def _one_process(kind: str, path: str, name: str, length_s: float) -> None:
    states = small_states(64)
    save: Callable[[dict[str, object]], object]
    if kind == "ours":
        store = perdure.open(path)
        save = store.thread(name).save
    else:
        bare = BareTable(Path(path))

        def save(state: dict[str, object]) -> None:
            bare.insert(orjson.dumps(state))

    save(states[0])
    print("ready", flush=True)
    sys.stdin.readline()
    saves, longest_s = 0, 0.0
    end = time.perf_counter() + length_s
    while (now := time.perf_counter()) < end:
        save(states[saves % 64])
        longest_s = max(longest_s, time.perf_counter() - now)
        saves += 1
    print(json.dumps({"saves": saves, "longest_s": longest_s}))


if __name__ == "__main__":
    _one_process(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
