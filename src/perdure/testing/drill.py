"""The drill: kill an agent at every named point of a run and at random times between, resume it, and compare.

    report = drill("app.py:travel", ["NYC"])
    print(report.text()); assert report.ok

Each trial is a new run. It is killed (SIGKILL) once, resumed, and compared with an undisturbed rehearsal. A trial
starts and resumes through different entry points: one imports the app, as a worker does, the other runs it as a script.
SIGKILL cannot prove that a write reached the disk (a missing fsync): tests/crash/test_power_loss.py does.
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
from perdure.runs.calls.decorators import durable_spec
from perdure.runs.journal.rows import FINISHED
from perdure.runs.workers.loading import load_app
from perdure.testing.drill_stage import Ledger, Stage, family_of, help_on, life_of, outcome, read_ledger
from perdure.testing.processes import ForkServer

PLAY = "perdure.testing.drill_stage:play"
Progress = Callable[[int, int], None]


@dataclass
class Failure:
    """A trial that broke a guarantee."""

    run: str
    killed: str
    problems: list[str]
    timeline: list[str]


@dataclass
class DrillReport:
    """The result of a drill."""

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
    undisturbed_error: str = ""
    """the error of the run without kills, if it failed: every trial is then expected to fail in the same way"""

    @property
    def ok(self) -> bool:
        return not self.failures and not self.unmarked and self.kills > 0

    def rows(self) -> list[tuple[str, str, bool]]:
        """Return the figures: a name, the figure, and whether it passes."""
        return [
            ("kills", f"{self.kills} (at {self.points} named points and between)", self.kills > 0),
            ("finished steps run again", f"{self.steps_again}", self.steps_again == 0),
            *self.held(),
            ("time to recover", _times(self.recover_s), True),
            ("work lost", _times(self.lost_s), True),
        ]

    def held(self) -> list[tuple[str, str, bool]]:
        """Return the figures of the guarantees that must hold after any kill."""
        same = self.same_result == self.trials
        return [
            ("effects done twice", f"{self.effects_twice}", self.effects_twice == 0),
            ("effects without @perdure.effect", f"{len(self.unmarked)}", not self.unmarked),
            ("result equal to the undisturbed run", f"{self.same_result} of {self.trials}", same),
        ]

    def text(self) -> str:
        rows = self.rows()
        lines = [f"drill of {self.function}: {'passed' if self.ok else 'FAILED'}"]
        lines += [f"  {'ok ' if good else 'BAD'} {label:<36} {figure}" for label, figure, good in rows]
        lines += [f"  without @perdure.effect: {effect}" for effect in self.unmarked]
        if self.undisturbed_error:
            lines += [f"  the undisturbed run failed, and so must every trial: {self.undisturbed_error}"]
        for failure in self.failures[:3]:
            lines += [f"  run {failure.run}, killed {failure.killed}:"]
            lines += [f"    {problem}" for problem in failure.problems]
            lines += [f"      {line}" for line in failure.timeline]
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
    workers: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> DrillReport:
    """Drill the agent `app.py:function` and return the report.

    `answers` are by question or step, `results` of effects by name. `real` runs real effects. With `workers`, that many
    worker processes run the agent, and are killed and stopped.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-drill-")))
        plan = plan_of(target, folder, args=args, kwargs=kwargs, answers=answers, results=results)
        plan |= {"store": str(folder / "drill.db"), "real": real}
        one = RunDrill(folder, plan, DrillReport(plan["function"]), random.Random(seed), progress)
        fork_servers = [stack.enter_context(ForkServer(PLAY)) for _ in range(max(1, workers))]
        trials = one.rehearse(fork_servers[0], random_kills)
        if workers:
            store = stack.enter_context(open_store(plan["store"]))
            one.with_workers(store, fork_servers, random_kills)
        else:
            one.killed_at(fork_servers[0], trials)
    return one.report


def plan_of(target: str, folder: Path, **values: Any) -> dict[str, Any]:
    """Return the plan that the processes of a drill follow, without its store. Raises UsageError."""
    app, _, function = target.rpartition(":")
    if not app or not function:
        raise UsageError(f"which function? Give it as app.py:travel, not {target!r}")
    empty: dict[str, Any] = {"args": [], "kwargs": {}, "answers": {}, "results": {}}
    chosen = {name: value for name, value in values.items() if value}
    return {"app": app, "function": function, "pins": str(folder / "pins.json"), **empty, **chosen}


class RunDrill:
    """The trials of one drill."""

    def __init__(
        self,
        folder: Path,
        plan: dict[str, Any],
        report: DrillReport,
        chance: random.Random,
        progress: Progress | None,
    ) -> None:
        self._folder, self._plan, self.report = folder, plan, report
        self._chance = chance
        self._progress = progress or (lambda done, of: None)
        self._expected: dict[str, Any] = {}
        self._acts: Counter[str] = Counter()

    def rehearse(self, fork_server: ForkServer, random_kills: int) -> list[dict[str, Any]]:
        """Run once undisturbed, record the result and the effects, and return when to kill each trial."""
        said = self._play(fork_server, "rehearsal", {"rehearsal": True})
        [end, *_] = [*(line for line in said if "end" in line), {"end": "", "why": "it did not end"}]
        if end["end"] not in FINISHED:
            raise UsageError(
                f"the undisturbed run does not end, so there is nothing to compare with: {end.get('why') or end['end']}"
            )
        self._expected = end
        self.report.undisturbed_error = end["shown"] if end["end"] == "failed" else ""
        self._acts = _acts(read_ledger(self._ledger("rehearsal")))
        self.report.unmarked = [effect for line in said for effect in line.get("unmarked", [])]
        points: list[list[Any]] = []
        for line in said:
            if "point" in line and line["point"] not in points:
                points.append(line["point"])
        self.report.points = len(points)
        longest = max(0.002, end["took"] * 1.1)
        random_times = [{"kill_after_s": self._chance.uniform(0, longest)} for _ in range(random_kills)]
        return [*({"kill": point} for point in points), *random_times]

    def killed_at(self, fork_server: ForkServer, trials: list[dict[str, Any]]) -> None:
        for number, how in enumerate(trials):
            self._progress(number, len(trials))
            self._trial(fork_server, f"drill-{number}", how, as_script=number % 2 == 0)

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
        if any("kill" in line for line in ledger):
            self.report.kills += 1
            self.report.lost_s.append(_lost_s(ledger))
            done = self._completed(run)
            said = self._play(fork_server, run, {"as_script": not as_script})
            self.report.recover_s += [line["live"] for line in said if "live" in line][:1]
            after = [line for line in read_ledger(self._ledger(run))[len(ledger) :] if "body" in line]
            again = [line for line in after if (line["life"], line["body"]) in done]
            self.report.steps_again += len(again)
            problems = [f"{line['name']} at step {line['body']} ran again, but its end is recorded" for line in again]
        self._judge(run, said, problems)

    def _judge(self, run: str, said: list[dict[str, Any]], problems: list[str]) -> None:
        self.report.trials += 1
        [*_, end] = [{"end": "killed again", "result": ""}, *(line for line in said if "end" in line)]
        ledger = read_ledger(self._ledger(run))
        twice = _acts(ledger) - self._acts
        self.report.effects_twice += sum(twice.values())
        problems += [f"{name.partition('@')[0]} was done {n + self._acts[name]} times" for name, n in twice.items()]
        raised = [f"reconcile of {line['reconcile']} raised {line['raised']}" for line in ledger if "reconcile" in line]
        problems += dict.fromkeys(raised)
        # Results of real receivers differ every time, so only the status can be compared.
        parts = ("end",) if self._plan["real"] else ("end", "result")
        if all(end.get(part) == self._expected.get(part) for part in parts):
            self.report.same_result += 1
        else:
            now = end.get("shown") or end.get("why") or ""
            expected = f"{self._expected['end']}: {self._expected['shown']}"
            problems.append(f"it ended {end['end']}: {now}; undisturbed: {expected}")
        if problems:
            [*_, killed] = ["not at all", *(line["kill"] for line in ledger if "kill" in line)]
            self.report.failures.append(Failure(run, killed, problems, _timeline(ledger)))

    def _completed(self, run: str) -> set[tuple[str, str]]:
        """Return the steps of the run and its children that had ended."""
        with open_store(self._plan["store"], tenant=run) as store:
            try:
                return {
                    (life_of(row), step.path)
                    for row in family_of(store, run)
                    for step in store.get_run(row.id).steps()
                    if step.status in ("done", "failed")
                }
            except LookupError:
                return set()

    def with_workers(self, store: Store, fork_servers: list[ForkServer], kills: int) -> None:
        """Let workers run the agent, one run per kill, while one worker is killed and one is stopped for a while."""
        function = durable_spec(getattr(load_app(self._plan["app"]), self._plan["function"])).fn
        for number in range(max(1, kills)):
            self._progress(number, kills)
            self._workers_trial(store.tenant(f"drill-{number}"), function, fork_servers, f"drill-{number}")

    def _workers_trial(self, store: Store, function: Any, fork_servers: list[ForkServer], run: str) -> None:
        plan = {**self._plan, "run": run, "ledger": self._ledger(run), "worker": True, "lease_s": 1.0}
        plans = [{**plan, "as_script": number % 2 == 0} for number in range(len(fork_servers))]
        children = [server.start(own) for server, own in zip(fork_servers, plans, strict=True)]
        ledger = Ledger(self._ledger(run))
        stage = Stage(ledger, {}, real=False, results=self._plan["results"], rehearsal=False)
        handle = store.start(function, *self._plan["args"], id=run, **self._plan["kwargs"])
        deadline = time.monotonic() + 60
        killed = stopped = False
        try:
            while handle.refresh().status not in FINISHED and time.monotonic() < deadline:
                time.sleep(self._chance.uniform(0.005, 0.05))
                help_on(store, run, self._plan["answers"], stage)
                victim = self._chance.randrange(len(children))
                if not killed:
                    ledger.note(kill=f"worker {victim}")
                    children[victim].kill()
                    children[victim] = fork_servers[victim].start(plans[victim])
                    killed = True
                    self.report.kills += 1
                elif not stopped and len(children) > 1:
                    os.kill(children[victim].pid, signal.SIGSTOP)
                    time.sleep(1.2)  # longer than its lease: another worker takes over, and this one continues late
                    os.kill(children[victim].pid, signal.SIGCONT)
                    stopped = True
            status = handle.refresh().status
            end = outcome(store, run) if status in FINISHED else {"end": status, "result": "", "shown": ""}
            self._judge(run, [end], [])
        finally:
            for child in children:
                child.kill()


def _acts(ledger: list[dict[str, Any]]) -> Counter[str]:
    """Count the effects by name and input, and the undos by path.

    Repeats that a receiver recognises by their key do not count.
    """
    acts: Counter[str] = Counter()
    seen: set[str] = set()
    for line in ledger:
        if ("effect" not in line and "undo" not in line) or line.get("repeat"):
            continue
        if line.get("protected") and line["key"] in seen:
            continue
        seen.add(line["key"])
        undone = "undo" in line
        acts[f"undo of {line['undo']}@{line['path']}" if undone else f"{line['effect']}@{line['input']}"] += 1
    return acts


def _lost_s(ledger: list[dict[str, Any]]) -> float:
    """Return the seconds from the last record to the kill: the work that must be done again."""
    killed = next(line["t"] for line in reversed(ledger) if "kill" in line)
    before = [line["t"] for line in ledger if line["t"] <= killed and "recorded" in line]
    first = ledger[0]["t"]
    return float(killed - (before[-1] if before else first))


def _timeline(ledger: list[dict[str, Any]]) -> list[str]:
    begun = ledger[0]["t"] if ledger else 0.0
    lines = []
    for line in ledger[-40:]:
        facts = {key: value for key, value in line.items() if key not in ("t", "pid", "input", "protected", "life")}
        said = " ".join(f"{key}={value}" for key, value in facts.items())
        lines.append(f"{(line['t'] - begun) * 1000:9.1f} ms  process {line['pid']}  {said}")
    return lines
