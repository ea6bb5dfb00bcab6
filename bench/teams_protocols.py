"""The protocols of teams: how long the recovery line takes, and what the loss of the leader of an agreement costs.

The recovery line: 50 members, 100,000 messages, one goes back to the middle. Beside it, what reading the same messages
once in Python takes: a floor. The agreement: three NATS servers on this machine, the leader is killed, and the time
until the next change of the register is known; beside it, a change with all servers up.
"""

from __future__ import annotations

import random
import time
from statistics import median

import perdure
from bench.measure import Row, Run, in_turns, milliseconds
from perdure.storage.program import drive
from perdure.teams.recovery import SentMessage, recovery_line
from perdure.teams.register import NatsRegister, change
from perdure.teams.views import TeamView
from perdure.testing.nats_cluster import NatsCluster

LINE_BAR_MS = 200
LEADER_BAR_S = 10


def teams_protocols(run: Run) -> list[Row]:
    return [_recovery(run), _leader(run)]


def _history(members: int, count: int) -> tuple[dict[str, int], list[SentMessage]]:
    rng = random.Random(7)
    names = [f"member {number}" for number in range(members)]
    turns, messages, flying = dict.fromkeys(names, 0), list[SentMessage](), dict[str, list[tuple[str, int]]]()
    while len(messages) < count:
        name = rng.choice(names)
        turns[name] += 1
        if flying.get(name):
            messages.append(SentMessage(*flying[name].pop(0), name, turns[name]))
        flying.setdefault(rng.choice(names), []).append((name, turns[name]))
    return turns, messages


def _recovery(run: Run) -> Row:
    turns, messages = _history(50, run.count(100_000, 1_000))
    name = "member 0"
    ours, floor = in_turns(
        run.count(15, 2),
        lambda: recovery_line(turns, messages, {name: turns[name] // 2}),
        lambda: [message.sent_turn for message in messages if message.member in turns],
    )
    fallen = len(recovery_line(turns, messages, {name: turns[name] // 2}).falls)
    note = f"50 members, {fallen} fall; floor: reading them once"
    return Row(f"recovery line, {len(messages):,} messages", milliseconds(ours), "ms", floor=milliseconds(floor),
               bar=LINE_BAR_MS, judged="ours", note=note)  # fmt: skip


def _leader(run: Run) -> Row:
    with perdure.open(":memory:") as store:
        driver = store._context.driver
        with NatsCluster(run.folder) as cluster:
            register = NatsRegister(cluster.urls, "bench", timeout_s=60)
            drive(driver, change(register, lambda view: view.join("a").join("b")))
            calm = []
            for _ in range(run.count(50, 3)):
                start = time.perf_counter()
                drive(driver, change(register, TeamView.start))
                calm.append(time.perf_counter() - start)
            leader = cluster.leader(register)
            start = time.perf_counter()
            cluster.kill(leader)
            drive(driver, change(register, TeamView.start))
            lost = time.perf_counter() - start
            register.close()
    return Row("agreement: loss of the leader", lost, "s", floor=median(calm), bar=LEADER_BAR_S, judged="ours",
               note="three NATS servers; floor: a change with all of them")  # fmt: skip
