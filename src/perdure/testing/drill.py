"""The drill: kill an agent at every named point of its life and at random times between, resume it, and compare.

    report = drill("app.py:travel", ["NYC"])
    print(report.text()); assert report.ok

Each trial is a run of its own: killed (SIGKILL) once, resumed, and compared with an undisturbed rehearsal. It is
resumed by another entry point than it began with: one imports the app, as a worker does, the other has it as its
script. A process that is killed has told the operating system everything it wrote, so that SIGKILL cannot prove that
the disk was told too (a missing fsync): the engine's power-loss tests prove that.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.errors import UsageError
from perdure.ops.store import Store, open_store
from perdure.runs.journal.rows import FINISHED
from perdure.testing.drill_stage import life_of, read_ledger
from perdure.testing.processes import ForkServer

CAVEAT = (
    "SIGKILL cannot prove that a write reached the disk (a missing fsync): the engine's power-loss tests do, "
    "tests/crash/test_power_loss.py."
)
Tell = Callable[[int, int], None]


@dataclass
class Failure:
    """A trial in which something that must hold did not."""

    run: str
    killed: str
    problems: list[str]
    timeline: list[str]


@dataclass
class Report:
    """What a drill found."""

    function: str
    points: int = 0
    kills: int = 0
    steps_again: int = 0
    effects_twice: int = 0
    same_result: int = 0
    trials: int = 0
    recover_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    unmarked: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    restarts: int = 0
    notes: list[str] = field(default_factory=list)  # what may be an effect that nobody marked: a person must look

    @property
    def ok(self) -> bool:
        return not self.failures and not self.unmarked and self.kills > 0

    def rows(self) -> list[tuple[str, str, bool]]:
        """Label, figure, and whether it is as it must be."""
        return [
            ("kills", f"{self.kills} (at {self.points} named points and between)", self.kills > 0),
            ("finished steps run again", f"{self.steps_again}", self.steps_again == 0),
            ("effects done twice", f"{self.effects_twice}", self.effects_twice == 0),
            ("effects nobody marked", f"{len(self.unmarked)}", not self.unmarked),
            (
                "result equal to the undisturbed run",
                f"{self.same_result} of {self.trials}",
                self.same_result == self.trials,
            ),
            ("time to recover", _times(self.recover_s), True),
            ("work lost", _times(self.lost_s), True),
            *([("to be looked at", f"{len(self.notes)}", True)] if self.notes else []),
            *([("database restarts", f"{self.restarts}", True)] if self.restarts else []),
        ]

    def text(self) -> str:
        lines = [f"drill of {self.function}: {'passed' if self.ok else 'FAILED'}"]
        lines += [f"  {'ok ' if good else 'BAD'} {label:<36} {figure}" for label, figure, good in self.rows()]
        lines += [f"  not marked as an effect: {what}" for what in self.unmarked]
        lines += [f"  to be looked at: {what}" for what in self.notes]
        for failure in self.failures[:3]:
            lines += [f"  run {failure.run}, killed {failure.killed}:"]
            lines += [f"    {problem}" for problem in failure.problems]
            lines += [f"      {line}" for line in failure.timeline]
        lines.append(f"  {CAVEAT}")
        return "\n".join(lines)


def _times(seconds: list[float]) -> str:
    if not seconds:
        return "none measured"
    return f"median {statistics.median(seconds) * 1000:.1f} ms, worst {max(seconds) * 1000:.1f} ms"


def drill(
    target: str,
    args: list[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    random_kills: int = 20,
    real: bool = False,
    answers: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
    postgres: bool = False,
    workers: int = 0,
    seed: int = 0,
    progress: Tell | None = None,
) -> Report:
    """Drill `app.py:function`. `answers` by question or step, `results` of effects by name, `real` runs real effects.

    `postgres` drills on a PostgreSQL server of its own that is restarted now and then; with `workers` so many worker
    processes run it, and are killed and stopped.
    """
    app, _, function = target.rpartition(":")
    if not app or not function:
        raise UsageError(f"which function? Give it as app.py:travel, not {target!r}")
    with tempfile.TemporaryDirectory(prefix="perdure-drill-") as folder:
        server = _server() if postgres else None
        try:
            url = server.url("postgres") if server is not None else str(Path(folder, "drill.db"))
            plan: dict[str, Any] = {
                "app": app,
                "function": function,
                "args": args or [],
                "kwargs": kwargs or {},
                "store": url,
                "pins": str(Path(folder, "pins.json")),
                "real": real,
                "answers": answers or {},
                "results": results or {},
            }
            one = _Drill(Path(folder), plan, Report(function), random.Random(seed), server, progress)
            return one.with_workers(workers, random_kills) if workers else one.run(random_kills)
        finally:
            if server is not None:
                server.close()


def _server() -> Any:
    from perdure.testing.postgres import PostgresServer

    try:
        server = PostgresServer(fsync=False)
    except RuntimeError as error:  # its package is not installed
        raise UsageError(str(error)) from error
    server.start()
    return server


class _Drill:
    def __init__(
        self, folder: Path, plan: dict[str, Any], report: Report, chance: random.Random, server: Any, tell: Tell | None
    ) -> None:
        self._folder, self._plan, self._report = folder, plan, report
        self._chance, self._server, self._tell = chance, server, tell
        self._wanted: dict[str, Any] = {}
        self._acts: Counter[str] = Counter()
        self._took_s = 0.0

    def run(self, random_kills: int) -> Report:
        """The rehearsal, then a trial for each named point, then as many at random times."""
        with ForkServer("perdure.testing.drill_child:play") as fork_server:
            found = self._rehearse(fork_server)
            trials: list[dict[str, Any]] = [{"kill": point} for point in found]
            longest = max(0.002, self._took_s * 1.1)
            trials += [{"kill_after_s": self._chance.uniform(0, longest)} for _ in range(random_kills)]
            self._report.points = len(found)
            for number, how in enumerate(trials):
                if self._tell is not None:
                    self._tell(number, len(trials))
                if self._server is not None and number % 7 == 3:
                    self._restart()
                self._trial(fork_server, f"drill-{number}", how, as_script=number % 2 == 0)
        return self._report

    def _restart(self) -> None:
        self._server.kill()
        self._server.start()
        self._report.restarts += 1

    def _rehearse(self, fork_server: ForkServer) -> list[list[Any]]:
        """An undisturbed run: its points, its result, what it does to the world."""
        said = self._play(fork_server, "rehearsal", {"rehearsal": True})
        ends = [line for line in said if "end" in line]
        if not ends or ends[0]["end"] not in FINISHED:
            why = ends[0].get("why") or ends[0] if ends else "it did not end"
            raise UsageError(f"the undisturbed run does not end, so there is nothing to compare with: {why}")
        self._wanted, self._took_s = ends[0], ends[0]["took"]
        for line in said:
            self._report.unmarked += line.get("unmarked", [])
            self._report.notes += line.get("notes", [])
        self._acts = _acts(read_ledger(self._ledger("rehearsal")))
        found: list[list[Any]] = []
        for line in said:
            if "point" in line and line["point"] not in found:
                found.append(line["point"])
        return found

    def _ledger(self, run: str) -> str:
        return str(self._folder / f"{run}.jsonl")

    def _play(self, fork_server: ForkServer, run: str, how: dict[str, Any]) -> list[dict[str, Any]]:
        child = fork_server.start({**self._plan, "run": run, "ledger": self._ledger(run), **how})
        try:
            return list(child.lines())
        except RuntimeError as error:
            return [{"end": "crashed", "why": str(error)[-800:], "result": "", "shown": str(error)[-300:]}]

    def _trial(self, fork_server: ForkServer, run: str, how: dict[str, Any], *, as_script: bool) -> None:
        said = self._play(fork_server, run, {**how, "as_script": as_script})
        ledger = read_ledger(self._ledger(run))
        problems: list[str] = []
        kills = [line for line in ledger if "kill" in line]
        finished_before = 0
        if kills:
            self._report.kills += 1
            self._report.lost_s.append(_lost_s(ledger))
            finished_before = len(ledger)
            done = self._completed(run)
            said = self._play(fork_server, run, {"as_script": not as_script})
            self._report.recover_s += [line["live"] for line in said if "live" in line][:1]
            after = [line for line in read_ledger(self._ledger(run))[finished_before:] if "body" in line]
            again = [line for line in after if (line["life"], line["body"]) in done]
            self._report.steps_again += len(again)
            problems += [
                f"{line['name']} at step {line['body']} ran again, though its end was recorded" for line in again
            ]
        self._report.trials += 1
        self._judge(run, said, problems, kills)

    def _judge(self, run: str, said: list[dict[str, Any]], problems: list[str], kills: list[dict[str, Any]]) -> None:
        ends = [line for line in said if "end" in line]
        end = ends[-1] if ends else {"end": "killed again", "result": ""}
        ledger = read_ledger(self._ledger(run))
        twice = _acts(ledger) - self._acts
        self._report.effects_twice += sum(twice.values())
        problems += [
            f"{name.partition('@')[0]} was done {count + self._acts[name]} times" for name, count in twice.items()
        ]
        raised = [f"reconcile of {line['reconcile']} raised {line['raised']}" for line in ledger if "reconcile" in line]
        problems += dict.fromkeys(raised)
        # Real receivers give other numbers every time: then only how it ended can be compared.
        parts = ("end",) if self._plan["real"] else ("end", "result")
        if all(end.get(part) == self._wanted.get(part) for part in parts):
            self._report.same_result += 1
        else:
            now = end.get("shown") or end.get("why") or ""
            problems.append(
                f"it ended {end['end']}: {now}; undisturbed: {self._wanted['end']}: {self._wanted['shown']}"
            )
        if problems:
            killed = kills[-1]["kill"] if kills else "not at all"
            self._report.failures.append(Failure(run, killed, problems, _timeline(ledger)))

    def _completed(self, run: str) -> set[tuple[str, str]]:
        """What had ended, of the run and its children."""
        from perdure.testing.drill_child import family_of

        with self._open(run) as store:
            try:
                return {
                    (life_of(row), step.path)
                    for row in family_of(store, run)
                    for step in store.get_run(row.id).steps()
                    if step.status in ("done", "failed")
                }
            except LookupError:
                return set()

    def _open(self, run: str) -> Store:
        return open_store(self._plan["store"], tenant=run)

    # --- with workers

    def with_workers(self, count: int, random_kills: int) -> Report:
        """Let workers run it while they are killed and stopped; a run per kill."""
        with ForkServer("perdure.testing.drill_child:play") as fork_server:
            self._report.points = len(self._rehearse(fork_server))
        from perdure.runs.calls.decorators import durable_spec
        from perdure.runs.workers.loading import load_app

        function = durable_spec(getattr(load_app(self._plan["app"]), self._plan["function"])).fn
        with ExitStack() as stack:
            nurseries = [stack.enter_context(ForkServer("perdure.testing.drill_child:play")) for _ in range(count)]
            store = stack.enter_context(self._open("rehearsal"))
            for number in range(max(1, random_kills)):
                if self._tell is not None:
                    self._tell(number, random_kills)
                run = f"drill-{number}"
                self._workers_trial(store.tenant(run), function, nurseries, run)
        return self._report

    def _workers_trial(self, store: Store, function: Any, nurseries: list[ForkServer], run: str) -> None:
        from perdure.testing.drill_child import help_on, outcome
        from perdure.testing.drill_stage import Ledger, Stage

        plan = {**self._plan, "run": run, "ledger": self._ledger(run), "worker": True, "lease_s": 1.0}
        plans = [{**plan, "as_script": number % 2 == 0} for number in range(len(nurseries))]
        children = [fork_server.start(own) for fork_server, own in zip(nurseries, plans, strict=True)]
        ledger = Ledger(self._ledger(run))
        stage = Stage(ledger, {}, real=False, results=self._plan["results"], rehearsal=False)
        handle = store.start(function, *self._plan["args"], id=run, **self._plan["kwargs"])
        deadline = time.monotonic() + 60
        killed = stopped = False
        try:
            while handle.status not in FINISHED and time.monotonic() < deadline:
                time.sleep(self._chance.uniform(0.005, 0.05))
                help_on(store, run, self._plan["answers"], stage)
                victim = self._chance.randrange(len(children))
                if not killed:
                    ledger.note(kill=f"worker {victim}")
                    children[victim].kill()
                    children[victim] = nurseries[victim].start(plans[victim])
                    killed = True
                    self._report.kills += 1
                elif not stopped and len(children) > 1:
                    os.kill(children[victim].pid, signal.SIGSTOP)
                    time.sleep(1.2)  # longer than its lease: another takes over, and this one comes back late
                    os.kill(children[victim].pid, signal.SIGCONT)
                    stopped = True
            self._report.trials += 1
            end = (
                outcome(store, run) if handle.status in FINISHED else {"end": handle.status, "result": "", "shown": ""}
            )
            self._judge(run, [end], [], [line for line in read_ledger(self._ledger(run)) if "kill" in line])
        finally:
            for child in children:
                child.kill()


def _acts(ledger: list[dict[str, Any]]) -> Counter[str]:
    """What was done to the world, by effect and input, and undone, by path: repeats that a receiver recognises by their
    key do not count."""
    found: Counter[str] = Counter()
    seen: set[str] = set()
    for line in ledger:
        if ("effect" not in line and "undo" not in line) or line.get("repeat"):
            continue
        if line.get("protected") and line["key"] in seen:
            continue
        seen.add(line["key"])
        undone = "undo" in line
        found[f"undo of {line['undo']}@{line['path']}" if undone else f"{line['effect']}@{line['input']}"] += 1
    return found


def _lost_s(ledger: list[dict[str, Any]]) -> float:
    """How long before the kill something was last recorded: what must be done again."""
    killed = next(line["t"] for line in reversed(ledger) if "kill" in line)
    before = [line["t"] for line in ledger if line["t"] <= killed and "recorded" in line]
    first = ledger[0]["t"]
    return float(killed - (before[-1] if before else first))


def _timeline(ledger: list[dict[str, Any]]) -> list[str]:
    begun = ledger[0]["t"] if ledger else 0.0
    found = []
    for line in ledger[-40:]:
        what = {key: value for key, value in line.items() if key not in ("t", "pid", "input", "protected", "life")}
        said = " ".join(f"{key}={value}" for key, value in what.items())
        found.append(f"{(line['t'] - begun) * 1000:9.1f} ms  process {line['pid']}  {said}")
    return found
