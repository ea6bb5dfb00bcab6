"""The commands that look at runs: runs, run, steps, asks, tail, replay, check. Nothing here changes a run."""

from __future__ import annotations

import difflib
from argparse import Namespace
from datetime import UTC, datetime
from functools import partial
from shlex import quote
from typing import Any

from perdure import Ask, Event, Run, RunInfo, Step, Store
from perdure.cli.readable import ago, local, moment, plural, readable, shorten, size, to_json
from perdure.cli.render import Cell, Output
from perdure.errors import JournalDamaged, NotFound, RunError, UsageError
from perdure.runs.engine.waiting import how_to_answer, how_to_resolve, waits_for

OK, NO = 0, 1
IDS_COMPARED = 1000
_WIDTH = 100
_COLOURS = {
    "done": "green",
    "running": "cyan",
    "queued": "cyan",
    "waiting": "yellow",
    "paused": "yellow",
    "retrying": "yellow",
    "stuck": "red",
    "failed": "red",
    "in doubt": "bold red",
}


def existing_run(store: Store, name: str) -> Run:
    """The handle of a run that is there. Raises NotFound, with the nearest id if there is one."""
    try:
        return store.get_run(name)
    except NotFound:
        pass
    if _is_thread(store, name):
        raise NotFound(f"there is no run {name!r}, but a thread of that name: `perdure show {quote(name)}`")
    near = difflib.get_close_matches(name, [info.id for info in store.runs(limit=IDS_COMPARED)], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`perdure runs` lists what is there"
    raise NotFound(f"there is no run {name!r}; {hint}")


def _is_thread(store: Store, name: str) -> bool:
    try:
        store.thread(name).info()
    except NotFound:
        return False
    return True


def is_run(args: Namespace, store: Store) -> bool:
    """Whether a command that takes threads and runs is given a run. Refuses to guess where it could be both."""
    if args.as_run or args.as_thread:
        return bool(args.as_run)
    if not has_run(store, args.thread):
        return False
    if _is_thread(store, args.thread):
        raise UsageError(f"{args.thread!r} is a thread and a run: say which with --thread or --run")
    return True


def runs(args: Namespace, store: Store, out: Output) -> int:
    limit = args.limit or None
    list_runs = partial(store.runs, status=args.status, function=args.function, queue=args.queue, limit=limit)
    found = list_runs(tasks=args.all)
    if out.json:
        for info in found:
            out.json_line(info_json(info))
        return OK
    now = datetime.now(UTC)
    rows: list[list[Cell]] = [
        [
            (info.id, "bold"),
            (info.status, _COLOURS.get(info.status, "")),
            (info.function, ""),
            (ago(info.changed_at, now), "dim"),
            (shorten(_waits_for(info), 2 * _WIDTH), ""),
        ]
        for info in found
    ]
    if rows:
        out.table(("run", "status", "function", "changed", "waits for"), rows)
    else:
        out.message("no runs" + (" fit" if args.status or args.function or args.queue else " in this store yet"))
    if limit is not None and len(found) == limit:
        out.message(f"the newest {limit}; there may be more: --limit 0 lists all")
    if hidden := 0 if args.all else len({info.id for info in list_runs(tasks=True)} - {info.id for info in found}):
        out.message(f"not listed: {plural(hidden, 'task')} of LangGraph graphs; --all lists them too")
    return OK


def run(args: Namespace, store: Store, out: Output) -> int:
    handle = existing_run(store, args.run)
    info, steps = handle.info(), handle.steps(large=False)
    doubts = [step for step in steps if step.status == "in doubt"]
    outcome = _outcome(handle, info)
    if out.json:
        asks = [ask_json(ask) for ask in store.asks(args.run)]
        counts = {"steps": len(steps), "in_doubt": [step.path for step in doubts]}
        out.document(info_json(info) | outcome | counts | {"asks": asks})
        return OK
    out.line((info.id, "bold"), (info.status, _COLOURS.get(info.status, "")))
    rows = [
        ("function", info.function + (f" (version {info.version})" if info.version else "")),
        ("queue", f"{info.queue}, priority {info.priority}"),
        ("started", local(info.created_at)),
        ("changed", local(info.changed_at)),
        ("taken up", plural(info.attempts, "time")),
        ("steps", str(len(steps))),
        ("waits for", _waits_for(info)),
        ("result", shorten(to_json(outcome["result"]), _WIDTH) if "result" in outcome else ""),
        ("error", outcome.get("error", "")),
    ]
    for name, value in rows:
        if value:
            out.line((f"{name:<10}", "dim"), (str(value), ""))
    open_asks = store.asks(args.run)
    asked = {ask.step for ask in open_asks if ask.kind == "doubt"}
    for step in doubts:
        out.line(("in doubt  ", "bold red"), (f"step {step.path}: {step.name}, {_shown(step)}", ""))
        out.line(("settle it ", "dim"), (_how_to_settle(store, info, step, asked), ""))
    for ask in open_asks:
        if ask.kind != "doubt":
            out.line((f"{ask.kind:<10}", "yellow"), (ask.question, ""))
            answer = how_to_answer(store._context.driver, info.id, ask.path)
            out.line(("answer it ", "dim"), (f"{answer}  ({_what_is_allowed(ask)})", ""))
    return OK


def _how_to_settle(store: Store, info: RunInfo, step: Step, asked: set[str | None]) -> str:
    """What a person can do about an effect that has no end: most of the time nothing yet."""
    if step.path in asked:
        return how_to_resolve(store._context.driver, info.id, step.path)
    if info.status == "running":
        return "it is under way, or its process has died: the worker that resumes the run finds out, or asks"
    if info.status == "cancelled":
        return f"the run is cancelled and will not; perdure rollback {quote(info.id)} finds out and undoes the run"
    return "the run finds out when it is resumed, or asks"


def _outcome(handle: Run, info: RunInfo) -> dict[str, Any]:
    if info.status not in ("done", "failed", "cancelled", "rolled_back"):
        return {}
    try:
        return {"result": readable(handle._raw_result())}
    except RunError as error:
        return {"error": str(error)}


def steps(args: Namespace, store: Store, out: Output) -> int:
    handle, code = existing_run(store, args.run), OK
    found = handle.steps(large=False)  # the table shows how large they are
    if out.json and any(step.large is not None for step in found):
        try:
            found = handle.steps()
        except JournalDamaged as error:
            out.message(f"large results are left out: {error}")
            code = NO
    if args.in_doubt:
        found = [step for step in found if step.status == "in doubt"]
    if out.json:
        for step in found:
            out.json_line(step_json(step))
        return code
    rows: list[list[Cell]] = []
    for step in found:
        took = "" if step.ended_at is None else f"{(step.ended_at - step.started_at).total_seconds():.3f}"
        said = step.error if step.error else _shown(step)
        rows.append(
            [
                (step.path, "bold"),
                (step.kind, "dim"),
                (step.name, ""),
                (
                    step.status + (f" ({step.attempts} attempts)" if step.attempts > 1 else ""),
                    _COLOURS.get(step.status, ""),
                ),
                (took, "dim"),
                (shorten(said, _WIDTH), "red" if step.error else ""),
            ]
        )
    if rows:
        out.table(("step", "kind", "name", "status", "seconds", "result"), rows, right=(4,))
    else:
        out.message(f"run {args.run} has no steps" + (" in doubt" if args.in_doubt else " yet"))
    return OK


def _shown(step: Step) -> str:
    if step.status == "in doubt":
        reason = (step.note or {}).get("reason")
        return f"key {step.key}" + (f": {reason}" if reason else "")
    if step.large is not None:
        return f"({size(step.large)}: --json shows it)"
    if step.result is None and step.note:
        note = {key: step.note[key] for key in ("of", "at", "keys")} if step.kind == "fork" else step.note
        return to_json(readable(note))
    return to_json(readable(step.result)) if step.ended_at is not None else ""


def asks(args: Namespace, store: Store, out: Output) -> int:
    if args.run is not None:
        existing_run(store, args.run)
    found = store.asks(args.run, all=args.all)
    if out.json:
        for ask in found:
            out.json_line(ask_json(ask))
        return OK
    now = datetime.now(UTC)
    rows: list[list[Cell]] = []
    for ask in found:
        given = ", ".join(f"{who}: {to_json(readable(value))}" for who, value, _ in ask.answers)
        rows.append(
            [
                (ask.run, "bold"),
                (_step_of(ask), "bold"),
                (ask.kind if ask.status == "open" else ask.status, "yellow" if ask.status == "open" else "dim"),
                (ago(ask.asked_at, now), "dim"),
                (_what_is_allowed(ask), ""),
                (shorten(_asked(ask) + (f"  [{given}]" if given else ""), 3 * _WIDTH), ""),
            ]
        )
    if rows:
        out.table(("run", "step", "kind", "asked", "answers", "question"), rows)
    else:
        out.message("nobody is asked anything")
    return OK


def _asked(ask: Ask) -> str:
    return f"{ask.question} ({ask.reason})" if ask.reason else ask.question


def _step_of(ask: Ask) -> str:
    """What `perdure resolve` or `perdure answer` calls it."""
    return ask.step if ask.kind == "doubt" and ask.step is not None else ask.path


def _what_is_allowed(ask: Ask) -> str:
    if ask.kind == "doubt":
        return "done, not done"
    if ask.options is not None:
        return shorten(" | ".join(to_json(readable(option)) for option in ask.options), 60)
    return shorten(to_json(ask.schema), 60) if ask.schema is not None else "anything"


def tail(args: Namespace, store: Store, out: Output) -> int:
    handle = existing_run(store, args.run)
    for event in handle.stream(args.after):
        if out.json:
            out.json_line(event_json(event))
        else:
            colour = "green" if event.kind == "done" else "yellow" if event.kind in ("wait", "failed") else ""
            at = event.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
            said = "" if event.value is None else shorten(to_json(readable(event.value)), _WIDTH)
            out.line((at, "dim"), (f"{event.kind:<6}", colour), (event.path, "bold"), (event.name, ""), (said, ""))
        out.flush()  # whoever reads a pipe wants to see it now
    return OK


def replay(args: Namespace, store: Store, out: Output) -> int:
    from perdure.runs.workers.loading import load_app

    load_app(args.app)
    found = store.replay(existing_run(store, args.run))
    if out.json:
        result = (
            {"result": readable(found.result)} if found.is_complete else {"stopped_at": found.path, "next": found.name}
        )
        out.document({"run": args.run, "complete": found.is_complete, "steps": found.answered} | result)
    elif found.is_complete:
        out.line((f"{args.run}: replayed to its end, {plural(found.answered, 'step')}, no body run", "green"))
        out.state(readable(found.result))
    else:
        where = f"stops before {found.name} at step {found.path}, which is not recorded"
        out.line(
            (f"{args.run}: {plural(found.answered, 'step')} answered from the journal, no body run; {where}", "green")
        )
    return OK


def check(args: Namespace, store: Store, out: Output) -> int:
    from perdure.runs.history.checking_code import check_code
    from perdure.runs.workers.loading import load_app

    module = load_app(args.app)
    findings = check_code(store, module)
    bad = [finding for finding in findings if not finding.is_ok]
    if out.json:
        for finding in findings:
            out.json_line(
                {
                    "run": finding.run,
                    "function": finding.function,
                    "ok": finding.is_ok,
                    "recorded_version": finding.old_version,
                    "new_version": finding.new_version,
                    "problem": finding.problem,
                }
            )
    else:
        for finding in findings:
            mark: Cell = (finding.verdict, "green" if finding.is_ok else "bold red")
            out.line(mark, (finding.run, "bold"), (finding.function, ""), (finding.problem or "", ""))
        out.message(
            f"{plural(len(findings), 'open run')} replayed against {args.app}: {len(bad)} would not go on"
            if findings
            else f"no open run of a function in {args.app}"
        )
    return NO if bad else OK


# --- the same as JSON


def _waits_for(info: RunInfo) -> str:
    until = f" until {local(info.wake_at)}" if info.wake_at is not None else ""
    return f"{waits_for(info)}{until}".strip()


def info_json(info: RunInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "function": info.function,
        "version": info.version,
        "status": info.status,
        "queue": info.queue,
        "priority": info.priority,
        "waiting_for": info.waiting_for,
        "wake_at": None if info.wake_at is None else moment(info.wake_at),
        "attempts": info.attempts,
        "created_at": moment(info.created_at),
        "changed_at": moment(info.changed_at),
        "is_fork": info.is_fork,
        "is_child": info.is_child,
        "request": info.request,
        "is_due": info.is_due,
    }


def step_json(step: Step) -> dict[str, Any]:
    return {
        "number": step.number,
        "path": step.path,
        "name": step.name,
        "kind": step.kind,
        "status": step.status,
        "attempts": step.attempts,
        "started_at": moment(step.started_at),
        "ended_at": None if step.ended_at is None else moment(step.ended_at),
        "result": readable(step.result),
        "error": step.error,
        "key": step.key,
        "shared": step.shared,
        "note": _note_json(step.note),
        "large": step.large,
    }


def _note_json(note: Any) -> Any:
    """What an entry says; of it, not of the values of user code, the times are ours."""
    if not isinstance(note, dict):
        return readable(note)
    return readable({name: moment(value) if isinstance(value, datetime) else value for name, value in note.items()})


def ask_json(ask: Ask) -> dict[str, Any]:
    return {
        "run": ask.run,
        "step": _step_of(ask),
        "kind": ask.kind,
        "question": ask.question,
        "options": readable(ask.options),
        "schema": ask.schema,
        "approvers": ask.approvers,
        "quorum": ask.quorum,
        "asked_at": moment(ask.asked_at),
        "deadline": None if ask.deadline is None else moment(ask.deadline),
        "status": ask.status,
        "answers": [{"who": who, "value": readable(value), "at": moment(at)} for who, value, at in ask.answers],
        "key": ask.key,
        "reason": ask.reason,
    }


def event_json(event: Event) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "kind": event.kind,
        "path": event.path,
        "name": event.name,
        "value": _note_json(event.value),
        "at": moment(event.at),
    }


def has_run(store: Store, name: str) -> bool:
    """Whether a name is a run's: some commands take threads and runs."""
    try:
        store.get_run(name)
    except NotFound:
        return False
    return True
