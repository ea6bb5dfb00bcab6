"""The drill of a region: agents work on one PostgreSQL server, which is replicated to another, and then it is killed.

Everything of the first region is killed with SIGKILL, the server and the processes that work with it; the second is
promoted, and the runs that it has are resumed there. Each is compared with an undisturbed run.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.ops.store import Store, open_store
from perdure.regions.promotion import promote
from perdure.regions.replication import replicate
from perdure.storage.program import Sql, drive, fetch
from perdure.testing.drill import PLAY, DrillReport, RunDrill, plan_of
from perdure.testing.drill_stage import read_ledger
from perdure.testing.postgres_server import PostgresServer
from perdure.testing.processes import ChildProcess, ForkServer
from perdure.values.amounts import plural

_PROCESSES = 4
_DRILL_MAX_S = 60.0
_COUNT_RUNS = Sql("SELECT count(*) AS drilled FROM run")


@dataclass
class RegionReport(DrillReport):
    """What a drill of a region found."""

    rounds: int = 0  # of replication, before the kill
    runs_lost: int = 0  # begun after the last of them
    commits_lost: int = 0  # steps that were recorded in the first region only
    promote_s: float = 0.0
    behind_s: float = 0.0  # from the last complete round to the kill

    @property
    def ok(self) -> bool:
        return super().ok and self.trials > 0

    def rows(self) -> list[tuple[str, str, bool]]:
        lost = f"{self.commits_lost}, and {plural(self.runs_lost, 'run')} that had just begun"
        return [
            ("rounds of replication", f"{self.rounds}, the last {self.behind_s:.2f} s before the kill", True),
            ("commits lost with the region", lost, True),
            ("time to promote", f"{self.promote_s * 1000:.1f} ms", True),
            *self.held(),
        ]


def drill_region(
    target: str, args: list[Any] | None = None, *, runs: int = 20, seed: int = 0, **more: Any
) -> RegionReport:
    """Drill `app.py:function` with two regions and so many runs. Further options are those of `drill`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-drill-")))
        first, second = (stack.enter_context(PostgresServer(fsync=False)) for _ in range(2))
        plan = plan_of(target, folder, args=args) | {"real": False, "store": first.url(), **more}
        one = _RegionDrill(folder, plan, RegionReport(plan["function"]), random.Random(seed), None)
        servers = [stack.enter_context(ForkServer(PLAY)) for _ in range(_PROCESSES)]
        one.rehearse(servers[0], 0)
        one.lose(first, second, servers, runs)
        one.resume(servers[0], second.url(), runs)
    return one.report


class _RegionDrill(RunDrill):
    report: RegionReport

    def lose(self, first: PostgresServer, second: PostgresServer, servers: list[ForkServer], runs: int) -> None:
        """Let runs begin in the first region, replicate it, and kill it amid the runs."""
        self._lost, self._begun = threading.Event(), 0
        self._children: dict[ForkServer, ChildProcess] = {}
        players = [
            threading.Thread(target=self._work, args=(server, range(place, runs, len(servers))), daemon=True)
            for place, server in enumerate(servers)
        ]
        with open_store(first.url()) as source, open_store(second.url()) as target:
            done, known = replicate(source, target), _runs(target)
            for player in players:
                player.start()
            give_up = time.monotonic() + _DRILL_MAX_S
            enough = self._chance.uniform(0.3, 0.7) * runs
            # A process that has begun may not have stored its run yet: without one there would be nothing to resume.
            while (self._begun < enough or _runs(target) == known) and time.monotonic() < give_up:
                done = replicate(source, target)
                self.report.rounds += 1
            time.sleep(self._chance.uniform(0, 0.2))
            self.report.behind_s = time.time() - done.taken_at.timestamp()
            self._lost.set()
            while any(player.is_alive() for player in players):
                for child in list(self._children.values()):
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)
                time.sleep(0.01)
            first.kill()
            self.report.kills = 1
        start = time.monotonic()
        with open_store(second.url()) as target:
            promote(target)
        self.report.promote_s = time.monotonic() - start

    def _work(self, server: ForkServer, numbers: range) -> None:
        """Play one run after the other, until the region is lost."""
        for number in numbers:
            if self._lost.is_set():
                return
            run = f"drill-{number}"
            child = server.start({**self._plan, "run": run, "ledger": self._ledger(run), "as_script": number % 2 == 0})
            self._children[server] = child
            self._begun += 1
            list(child.lines())
            del self._children[server]

    def resume(self, server: ForkServer, url: str, runs: int) -> None:
        """Resume the runs that the second region has, and compare them with what the first recorded."""
        self._plan["store"] = url
        for number in range(runs):
            run = f"drill-{number}"
            recorded = sum("recorded" in line for line in read_ledger(self._ledger(run)))
            with open_store(url, tenant=run) as store:
                here = bool(store.runs(limit=1))
            self.report.commits_lost += max(0, recorded - len(self._completed(run)))
            if here:
                self._judge(run, self._play(server, run, {"as_script": number % 2 == 1}), [])
            elif recorded:
                self.report.runs_lost += 1


def _runs(store: Store) -> int:
    """Return how many runs all tenants have."""
    [(count,)] = drive(store._context.driver.capabilities.base, fetch(_COUNT_RUNS))
    return int(count)
