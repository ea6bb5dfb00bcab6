"""Questions to a journal about undoing a run: its effects that happened or are in doubt, and its children.

No user code runs here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from perdure.runs.journal.entries import DONE, FAILED, INTENT, SPAWN, Recorded, completion
from perdure.runs.journal.journal import paths_in, read_whole
from perdure.runs.journal.rows import FINISHED, look_up
from perdure.runs.run_table import RunRow
from perdure.storage.program import Batch, Rows

END = "end"  # the path of the entry that says how a run is ending
UNDO = "undo:"  # prefix of the path of an undo, before the path of the effect that it undoes
_NAMED_MAX = 4  # effects that a text names, and steps of each
Calls = Iterable[tuple[str, Sequence[Recorded]]]


def undoable(calls: Calls) -> list[tuple[int, Recorded]]:
    """Return the intents of a run's own effects that happened and have an undo, with the numbers of their ends."""
    return [(at, intent) for at, intent in _happened(calls) if _has_undo(intent)]


def undone_keys(calls: Calls) -> list[str]:
    """Return the idempotency keys of a run's own effects that were undone, and those of their undos."""
    intents = {path: [one for one in entries if one.kind == INTENT and one.own] for path, entries in calls}
    undos = {path: own for path, own in intents.items() if path.startswith(UNDO)}
    both = [*undos.values(), *(intents.get(path.removeprefix(UNDO), []) for path in undos)]
    return sorted({str((one.entry.extra or {})["key"]) for own in both for one in own})


def lasting(calls: Calls) -> str:
    """Return a text that names a run's own effects that happened and have no undo; "" if there are none."""
    steps: dict[str, list[str]] = {}
    for _, intent in _happened(calls):
        if not _has_undo(intent):
            steps.setdefault(intent.entry.name, []).append(intent.entry.path)
    if not steps:
        return ""
    names = [f"{name} ({'step' if len(at) == 1 else 'steps'} {_first(at)})" for name, at in steps.items()]
    count = sum(map(len, steps.values()))
    sentence = "1 effect has no undo and stands" if count == 1 else f"{count:,} effects have no undo and stand"
    return f"{sentence}: {_first(names)}"


def _first(texts: list[str]) -> str:
    """Join the first few texts, and say how many more there are."""
    more = len(texts) - _NAMED_MAX
    return ", ".join(texts[:_NAMED_MAX]) + (f" and {more:,} more" if more > 0 else "")


def _has_undo(intent: Recorded) -> bool:
    return bool((intent.entry.extra or {}).get("undo"))


def _happened(calls: Calls) -> list[tuple[int, Recorded]]:
    """Return the intents of a run's own effects that happened, with the numbers of their ends."""
    happened = []
    for path, entries in calls:
        intents = [recorded for recorded in entries if recorded.kind == INTENT and recorded.own]
        if not intents or path.startswith(UNDO):
            continue
        ends = [recorded for recorded in entries if recorded.kind == DONE]
        if ends and "error" not in (ends[-1].entry.extra or {}):
            happened.append((ends[-1].seq, intents[-1]))
    return happened


def open_calls(calls: Calls) -> list[Recorded]:
    """Return the intents of a run's own effects that have no recorded end."""
    open_ones = []
    for _, entries in calls:
        last = entries[-1]
        if completion(entries) is not None or last.kind == FAILED:
            continue
        intents = [recorded for recorded in entries if recorded.kind == INTENT and recorded.own]
        open_ones += [intent for intent in intents[-1:] if not intent.entry.path.startswith(UNDO)]
    return open_ones


def spawned(calls: Calls) -> list[tuple[int, Recorded]]:
    """Return the spawns of a run's own children, each with the number of its recorded end, or else of its start."""
    everything = [recorded for _, entries in calls for recorded in entries if recorded.own]
    ends = {(one.entry.extra or {}).get("child"): one.seq for one in everything if one.kind == DONE}
    return [
        (ends.get((recorded.entry.extra or {})["child"], recorded.seq), recorded)
        for recorded in everything
        if recorded.kind == SPAWN
    ]


def needs_undo(tenant: int, row: RunRow, *, children: bool = True) -> Generator[Batch, list[Rows], bool]:
    """Return whether cancelling a run must undo or settle an effect of its own or of a child.

    With `children=False` no child's journal is read, and a run with a child gives True. Raises JournalDamaged.
    """
    calls = paths_in((yield from read_whole(tenant, row)).entries)
    if END in calls:
        return row.status not in FINISHED
    if undoable(calls.items()) or open_calls(calls.items()):
        return True
    for _, spawn in spawned(calls.items()):
        if not children:
            return True
        child = yield from look_up(tenant, (spawn.entry.extra or {})["child"])
        if child is None or child.parent != row.run or child.status in ("cancelled", "undone", "exported"):
            continue
        if (yield from needs_undo(tenant, child)):
            return True
    return False


def lasting_of(tenant: int, row: RunRow) -> Generator[Batch, list[Rows], str]:
    """Read a run's journal and return `lasting` of its calls. Raises JournalDamaged."""
    return lasting(paths_in((yield from read_whole(tenant, row)).entries).items())
