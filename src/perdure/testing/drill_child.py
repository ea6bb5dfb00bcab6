"""What runs in the processes that a drill kills: the user's agent on its stage, gone on with until it ends."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import time
from typing import Any

from perdure.errors import PerdureError
from perdure.ops.store import Store, open_store
from perdure.runs.calls.decorators import durable_spec
from perdure.runs.engine import flows
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.hooks import Point
from perdure.runs.journal.rows import FINISHED, NEVER, RunRow
from perdure.runs.workers.loading import load_app, load_script
from perdure.storage.program import drive
from perdure.testing.drill_stage import Ledger, Stage
from perdure.values.codec import encode
from perdure.values.showing import shown

_ROUNDS_MAX = 1000


def play(say: Any, plan: dict[str, Any]) -> None:
    """Run the agent, or go on with it; say its points and its end. May be killed anywhere, by itself too."""
    begun = time.monotonic()
    try:
        load = load_script if plan.get("as_script") else load_app
        function = durable_spec(getattr(load(plan["app"]), plan["function"])).fn
    except (AttributeError, PerdureError) as error:
        say({"end": "refused", "why": str(error)})
        return
    ledger = Ledger(plan["ledger"])
    pins = json.loads(_read(plan["pins"]) or "{}")
    stage = Stage(ledger, pins, real=plan["real"], results=plan["results"], rehearsal=bool(plan.get("rehearsal")))
    stage.install()
    live: list[float] = []

    def watch(point: Point) -> None:
        if plan.get("rehearsal"):
            say({"point": list(point)})
        if point.kind in ("body", "intent") and not live:
            live.append(time.monotonic())
            say({"live": live[0] - begun})
        if plan.get("kill") is not None and list(point) == plan["kill"]:
            ledger.note(kill=str(point))
            os.kill(os.getpid(), signal.SIGKILL)

    stage.listeners.append(watch)
    if plan.get("kill_after_s") is not None:
        threading.Thread(target=_later, args=(plan["kill_after_s"], ledger), daemon=True).start()
    # A tenant for each trial: ids that the agent chooses are free again.
    with open_store(plan["store"], tenant=plan["run"], lease_s=plan.get("lease_s", 5.0)) as store:
        if plan.get("worker"):
            _work(store, plan)
            return
        ready = time.monotonic()
        end = _to_the_end(store, function, plan, stage)
        say({**end, "took": time.monotonic() - ready})
    if plan.get("rehearsal"):
        _write(plan["pins"], json.dumps(pins))
        say({"unmarked": stage.found, "notes": stage.notes})


def _later(seconds: float, ledger: Ledger) -> None:
    time.sleep(seconds)
    ledger.note(kill=f"after {seconds:.4f} s")
    os.kill(os.getpid(), signal.SIGKILL)


def _work(store: Store, plan: dict[str, Any]) -> None:
    from perdure.runs.workers.worker import Worker

    Worker(store, poll_s=0.05, concurrency=2).run()


def _to_the_end(store: Store, function: Any, plan: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """Go on with the run, answering what it asks, until it has ended or cannot go on."""
    for _ in range(_ROUNDS_MAX):
        run = store.run(function, *plan["args"], id=plan["run"], **plan["kwargs"])
        info = run.info()
        if info.status in FINISHED:
            break
        family = family_of(store, plan["run"])
        stuck = [row.id for row in family if row.status == "stuck"]
        if stuck:
            return {"end": "stuck", "why": (store.get_run(stuck[0]).info().waiting_for or {}).get("error")}
        if not help_on(store, plan["run"], plan["answers"], stage):
            sleeping = [row for row in family if row.status == "waiting" and row.wake_at < NEVER]
            if not sleeping:
                return {"end": info.status, "why": str(info.waiting_for)}
            first = min(sleeping, key=lambda row: row.wake_at)
            now_us = store._context.clock_us() + Execution.ahead_us
            Execution.ahead_us += max(0, first.wake_at - now_us) + 1000
            store.get_run(first.id).resume()
    return outcome(store, plan["run"])


def family_of(store: Store, run_id: str) -> list[RunRow]:
    """A run with its children and theirs."""
    return drive(store._context.driver, flows.family(store._context, run_id))


def outcome(store: Store, run_id: str) -> dict[str, Any]:
    """How a run ended, comparable between runs."""
    run = store.get_run(run_id)
    status = run.status
    try:
        result = run._raw_result()
        text = base64.b64encode(encode(result, store._context.codec)).decode()
        return {"end": status, "result": text, "shown": shown(result, 200)}
    except PerdureError as error:
        return {"end": status, "result": type(error).__name__, "shown": str(error).replace(run_id, "RUN")[:300]}


def help_on(store: Store, run_id: str, answers: dict[str, Any], stage: Stage) -> bool:
    """Do what people would do: answer the open questions, settle doubts by looking at the ledger. Those of children
    too."""
    helped = False
    for ask in [ask for row in family_of(store, run_id) if row.status not in FINISHED for ask in store.asks(row.id)]:
        if ask.kind == "doubt":
            store.get_run(ask.run).resolve(str(ask.step), **stage.verdict(str(ask.key)))
        else:
            who = (ask.approvers or ["drill"])[: ask.quorum]
            for name in who:
                store.answer(ask.run, _answer(ask, answers), step=ask.path, who=name)
        helped = True
    return helped


def _answer(ask: Any, answers: dict[str, Any]) -> Any:
    if ask.path in answers:
        return answers[ask.path]
    if ask.question in answers:
        return answers[ask.question]
    if ask.options:
        return ask.options[0]
    kind = (ask.schema or {}).get("type", "string")
    if "enum" in (ask.schema or {}):
        return ask.schema["enum"][0]
    return {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}.get(str(kind), "drill")


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _write(path: str, text: str) -> None:
    with open(f"{path}.new", "w") as file:
        file.write(text)
    os.replace(f"{path}.new", path)
