"""`perdure.state()`: the state of a run, a mapping that its code changes and that can be read step by step.

Replay computes the changes of the durable function again, and takes those of a step's body from its entry, as a patch.
An entry written after a change carries the state's hash, which replay checks, and commits with a checkpoint in the
thread `run:<id>`. A parallel branch reads a copy taken when it begins; changing the copy is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from perdure.errors import Conflict, NotFound, NotInRun, PerdureError, UsageError
from perdure.runs.execution.keeping import keep
from perdure.runs.execution.scope import Scope, current, need_scope
from perdure.runs.journal.entries import CHANGE, VALUE, Entry, Recorded, compress, decompress
from perdure.runs.journal.kinds import CallKind, declare
from perdure.storage.program import Batch, Rows, drive
from perdure.threads import flows as thread_flows
from perdure.threads.compare import compare
from perdure.threads.context import Cursor
from perdure.threads.save_engine import Moved, PreparedSave
from perdure.threads.saves import Save
from perdure.values.codec import decode
from perdure.values.external import External, encode_noting, sharing
from perdure.values.registry import Codec
from perdure.values.safe_repr import shown

if TYPE_CHECKING:
    from perdure.runs.execution.journal_writer import EntryOf, Part
    from perdure.runs.execution.operation import Operation

    Write = Callable[[tuple["Draft", ...], Part | None, EntryOf | None], Operation[Any]]
from perdure.runs.execution.execution import Execution

Draft = tuple[int, Entry]
Patch = list[list[Any]]  # the changes of a body, as `compare` names them: [kind, path, value]
RUN_KEY = "perdure_run"  # in the thread's metadata: the run whose states it keeps
_HASH_BYTES = 8
STATE = declare(CallKind("perdure.state"))
_ATTEMPTS = 64


def thread_name(run_id: str) -> str:
    return f"run:{run_id}"


def state(initial: Mapping[str, Any] | None = None) -> State:
    """Return the run's state: a mapping, first equal to `initial`, that the function and step bodies may change.

    `run.state_at(step)` returns an earlier state, `run.diff(a, b)` what changed. Call it in the durable function before
    it branches. Later calls, and calls in step bodies, return the same state and need no `initial`. Parallel branches
    read a copy and cannot change it: return a branch's results, and change the state when all branches have ended.
    """
    scope = current.get()
    if scope is not None and scope.execution.state is not None:
        proxy: State = scope.execution.state.proxy
        return proxy
    scope = need_scope("perdure.state()")
    execution = scope.execution
    if execution.turn is not None:
        raise UsageError("the state of a team's member is the first argument of its handler: change that")
    if scope.prefix:
        raise UsageError(
            "the first perdure.state() of a run is called in the durable function itself, before it branches"
        )
    if initial is not None and not isinstance(initial, Mapping):
        raise UsageError(f"perdure.state(initial) takes a mapping, not {type(initial).__name__}")
    execution.state = manager = StateManager(execution, dict(initial or {}))
    return manager.proxy


class State(MutableMapping[str, Any]):
    """A run's state as the running branch sees it.

    Its values are plain dicts, lists and other storable values. Do not pass them from one branch to another: read them
    from the state in each branch.
    """

    __slots__ = ("_manager",)

    def __init__(self, manager: StateManager) -> None:
        self._manager = manager

    def __getitem__(self, key: str) -> Any:
        return self._manager.read()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._manager.write()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._manager.write()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._manager.read())

    def __len__(self) -> int:
        return len(self._manager.read())

    def __repr__(self) -> str:
        return f"State({self._manager.read()!r})"


class BranchState:
    """The copy of the state that a parallel branch reads, taken when the branch begins."""

    __slots__ = ("data", "text")

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.data: dict[str, Any] | None = None  # decoded when the branch first reads it


class StateManager:
    def __init__(self, execution: Execution, initial: dict[str, Any]) -> None:
        self._execution = execution
        self._codec = execution.ctx.codec
        self.proxy = State(self)
        self._cursor = self._beginning()  # the next checkpoint follows it
        self._values: dict[str, External[Any]] = {}  # large values that may not be stored yet, by their hashes
        # A copy, because the caller may change `initial` later. Encoding also raises Unstorable now.
        self._data: dict[str, Any] = self._copy_of(self._text_of(initial))
        self._saved: bytes | None = None  # the state that was last recorded
        self._pending: Patch = []  # the changes of bodies, for the next entry
        entries = execution.index.rows()
        self._loaded = max((recorded.seq for recorded in entries), default=0)
        # A fork that changed the results of kept steps computes another state than the shared entries record.
        self._is_changed = any(
            recorded.kind == CHANGE and recorded.entry.name != "perdure.fork" for recorded in entries
        )

    def _beginning(self) -> Cursor:
        return Cursor(thread_name(self._execution.row.id), merge={RUN_KEY: self._execution.row.id})

    def _text_of(self, value: Any) -> bytes:
        text, values = encode_noting(value, self._codec)
        self._values.update((one.hash, one) for one in values)
        return text

    def _copy_of(self, text: bytes) -> Any:
        with sharing(self._values):
            return decode(text, self._codec)

    # --- reading and writing

    def read(self) -> dict[str, Any]:
        """Return the state as the running branch sees it."""
        scope = _owner()
        if scope is None or scope.execution is not self._execution:
            raise NotInRun("the state of a run was used outside of it: in another run, or in a thread of your own")
        if scope.parent is None:
            return self._data
        view: BranchState | None = scope.view
        if view is None:
            raise UsageError(
                "perdure.state() was called after this branch was made: call it before the function branches"
            )
        if view.data is None:
            view.data = self._copy_of(view.text)
        return view.data

    def write(self) -> dict[str, Any]:
        """Return the state for a change. Raises UsageError in a parallel branch."""
        data, scope = self.read(), _owner()
        if scope is not None and scope.parent is not None:
            raise self._refused(scope)
        return data

    def branched(self, maker: Scope, branch: Scope) -> None:
        """Give a new branch a copy of the state that its maker sees."""
        if maker.parent is None:
            branch.view = BranchState(self._text_of(self._data))
        elif maker.view is not None:
            branch.view = BranchState(maker.view.text)

    def check(self, branch: Scope) -> None:
        """Raise UsageError if a branch has changed its copy."""
        view: BranchState | None = branch.view
        if view is not None and view.data is not None and self._text_of(view.data) != view.text:
            raise self._refused(branch)

    def _refused(self, branch: Scope) -> UsageError:
        return UsageError(
            f"branch {branch.prefix.rstrip('.')} of run {self._execution.row.id!r} changed perdure.state(): parallel "
            "branches only read it. Return what the branch found, and change the state when all branches have ended"
        )

    # --- changes made by bodies

    def before_body(self, scope: Scope) -> bytes | None:
        return self._text_of(self._data) if scope.parent is None else None

    def after_body(self, before: bytes | None) -> None:
        """Keep the changes of a body for its entry."""
        if before is not None:
            with sharing(self._values):
                self._pending += _difference(before, self._data, self._codec)

    # --- recording

    def recording(
        self, drafts: tuple[Draft, ...], program: Part | None, entry_of: EntryOf | None, write: Write
    ) -> Operation[Any]:
        """Write entries as `JournalWriter.commit` does, with the state if it has changed."""
        scope = _owner()
        if scope is not None and scope.parent is not None:
            self.check(scope)
        if scope is None or scope.parent is not None:
            return (yield from write(drafts, program, entry_of))
        return (yield from self._record(drafts, program, entry_of, write))

    def _record(
        self, drafts: tuple[Draft, ...], program: Part | None, entry_of: EntryOf | None, write: Write
    ) -> Operation[Any]:
        text, pending = self._text_of(self._data), list(self._pending)
        if text == self._saved and not pending:
            return (yield from write(drafts, program, entry_of))
        info: dict[str, Any] = {"h": _hash(text)}
        if pending:
            patch, values = encode_noting(pending, self._codec)
            yield from keep(self._execution, values)
            info["d"] = compress(patch)
        result = yield from self._write(text, info, drafts, program, entry_of, write)
        self._saved = text
        self._values.clear()
        del self._pending[: len(pending)]
        return result

    def _write(
        self,
        text: bytes,
        info: dict[str, Any],
        drafts: tuple[Draft, ...],
        program: Part | None,
        entry_of: EntryOf | None,
        write: Write,
    ) -> Operation[Any]:
        """Write entry and checkpoint in one transaction; repeat it if the thread has changed meanwhile."""
        entry = drafts[-1][1]
        after = 0
        for _ in range(_ATTEMPTS):
            values = list(self._values.values())
            saving = yield from Save(self._execution.ctx, self._cursor, text=text, values=values).prepare(after)
            about = {**info, "c": saving.record}

            def with_state(result: Any, about: dict[str, Any] = about) -> Entry:
                base = entry if entry_of is None else entry_of(result)
                extra = base.extra or {}
                return msgspec.structs.replace(base, extra={**extra, "state": {**extra.get("state", {}), **about}})

            try:
                result = yield from write(drafts, partial(_both, program, saving), with_state)
            except Moved as moved:
                saving.drop(moved)
                after = moved.after
                continue
            except _Gone:  # the thread was deleted: create it again
                saving.drop()
                self._cursor = self._beginning()
                continue
            except BaseException:
                saving.drop()
                raise
            if saving.done is not None:  # None: the answer to COMMIT was lost, and the next save looks it up
                saving.settle()
            else:
                self._cursor.record = saving.record
            return result
        raise Conflict(f"thread {self._cursor.name!r} keeps being changed by others; run the same line again")

    def finish(self) -> Operation[None]:
        """Record the changes that the function made after its last call."""
        execution = self._execution
        if self._text_of(self._data) != self._saved:
            entry = Entry("state", STATE.name, execution.ctx.clock_us())
            yield from self._record(((VALUE, entry),), None, None, partial(execution.journal.write, stateless=True))

    # --- replay

    def replayed(self, rows: Sequence[Recorded]) -> None:
        """Apply the recorded changes of a call's body, and check the hash of the state. Raises if the state differs."""
        scope = _owner()
        if scope is None or scope.parent is not None:
            return
        entries: list[Entry] = []
        for recorded in rows:
            info = (recorded.entry.extra or {}).get("state") or {}
            if not info or recorded.seq > self._loaded or recorded.entry in entries:  # an entry may be written twice
                continue
            entries.append(recorded.entry)
            if "d" in info:
                _apply(self._data, self._copy_of(decompress(info["d"])))
            if "h" not in info:
                continue
            text = self._text_of(self._data)
            if _hash(text) != info["h"] and not (self._is_changed and not recorded.own):
                raise self._differs(recorded.entry, info)
            self._saved = text
            self._cursor.record = info["c"]

    def _differs(self, entry: Entry, info: dict[str, Any]) -> PerdureError:
        ctx = self._execution.ctx
        where, expected, actual = "state", "another value", "this one"
        try:
            at = Cursor(self._cursor.name)
            _, loaded, _ = drive(ctx.driver, thread_flows.load(ctx, at, info["c"], strict=True))
            now = decode(self._text_of(self._data), ctx.codec, raw=True)
            change = compare(decode(loaded.data, ctx.codec, raw=True), now)[0]
            where = "state" + "".join(f"[{shown(part)}]" for part in change.path)
            expected, actual = shown(change.before), shown(change.after)
        except (PerdureError, IndexError):
            pass  # the checkpoint is gone or equal: only the hash shows the difference
        return self._execution._differs(entry.path, f"{where} = {expected}", f"{where} = {actual}")


def _difference(before: bytes, after: dict[str, Any], codec: Codec) -> Patch:
    """Return the patch from an encoded state to another. Applying it gives exactly that state, so hashes match."""
    text, _ = encode_noting(after, codec)
    if text == before:
        return []
    state = decode(before, codec)
    patch = [[change.kind, list(change.path), change.after] for change in compare(state, after)]
    _apply(state, patch)
    # A patch cannot express a changed order of keys or a change inside a tuple: then it holds the whole state.
    return patch if encode_noting(state, codec)[0] == text else [["changed", [], after]]


def _apply(state: dict[str, Any], patch: Patch) -> None:
    """Apply a patch to a state in place. Paths that are missing, as in a fork with other results, are skipped."""
    removed = [change for change in patch if change[0] == "removed"]
    for kind, path, value in [*(change for change in patch if change[0] != "removed"), *reversed(removed)]:
        if not path:
            state.clear()
            state.update(value)
            continue
        holder: Any = state
        try:
            for part in path[:-1]:
                holder = holder[part]
            if kind == "removed":
                del holder[path[-1]]
            elif kind == "added" and isinstance(holder, list):
                holder.insert(path[-1], value)
            else:
                holder[path[-1]] = value
        except (LookupError, TypeError):
            continue


def _owner() -> Scope | None:
    scope = current.get()
    return scope if scope is None or scope.body is None else scope.body.caller


def _both(program: Part | None, saving: PreparedSave) -> Generator[Batch, list[Rows], Any]:
    result = None if program is None else (yield from program())
    try:
        yield from saving.program()
    except NotFound as error:
        raise _Gone from error
    return result


class _Gone(Exception):
    """The thread that keeps the states was deleted, or the checkpoint that the next one follows."""


def _hash(text: bytes) -> bytes:
    return blake3(text).digest(_HASH_BYTES)
