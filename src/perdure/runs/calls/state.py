"""`perdure.state()`: the state of a run, a mapping that its code changes and that can be read step by step.

What the durable function changes is computed again on replay. What a step's body changes comes back from the step's
entry, as a patch. With each entry that finds the state changed go its hash, which replay checks, and a checkpoint of
the whole state: a record of the thread `run:<id>`, in the same commit.

Every branch has a state of its own, a copy made when the branch was made: so what a branch sees does not depend on who
runs first. When a branch has ended, what it changed is put into the state of the code that made it: with the result of
perdure.gather and others, and for a plain task the next time that code looks at its state, which is stored, so that
a replay does it at the same place. Two branches that changed the same path are an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from perdure.errors import Conflict, NotFound, NotInRun, PerdureError, RunStuck, UsageError
from perdure.runs.calls.patching import Ops, apply, difference, meeting, show_path
from perdure.runs.journal.entries import CHANGE, VALUE, Entry, Recorded, squeeze, unsqueeze
from perdure.runs.session.scope import Scope, current, need_scope
from perdure.storage.program import drive
from perdure.threads import flows as thread_flows
from perdure.threads.beside import Moved, Saving, prepare_saving
from perdure.threads.compare import compare
from perdure.threads.context import Cursor
from perdure.values.codec import decode, encode
from perdure.values.showing import shown

if TYPE_CHECKING:
    from perdure.runs.session.acting import Act
    from perdure.runs.session.session import Beside, Session

Draft = tuple[int, Entry]
RUN_KEY = "perdure_run"  # in the thread's metadata: whose states it keeps
_HASH_BYTES = 8
_ATTEMPTS = 64


def thread_name(run_id: str) -> str:
    """The thread that keeps a run's states."""
    return f"run:{run_id}"


def state(initial: Mapping[str, Any] | None = None) -> State:
    """The run's state: a mapping that starts as `initial` and is changed freely, in the function and in step bodies.

    `run.state_at(step)` shows it as it was, `run.diff(a, b)` what changed. Call it in the durable function before it
    branches; later calls, and those in step bodies, give the same state and need no `initial`.
    """
    scope = current.get()
    if scope is not None and scope.session.state is not None:
        found: State = scope.session.state.face
        return found
    scope = need_scope("perdure.state()")
    session = scope.session
    if scope.prefix or not session.can_park:
        raise UsageError(
            "the first perdure.state() of a run is called in the durable function itself, before it branches"
        )
    if initial is not None and not isinstance(initial, Mapping):
        raise UsageError(f"perdure.state(initial) takes a mapping, not {type(initial).__name__}")
    session.state = keeper = Keeper(session, dict(initial or {}))
    return keeper.face


class State(MutableMapping[str, Any]):
    """A run's state as the running branch sees it. What lies in it are plain values: dicts, lists and what can be
    stored. Do not carry them from one branch to another: ask the state for them there."""

    __slots__ = ("_keeper",)

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def __getitem__(self, key: str) -> Any:
        return self._keeper.here()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._keeper.here()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._keeper.here()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keeper.here())

    def __len__(self) -> int:
        return len(self._keeper.here())

    def __repr__(self) -> str:
        return f"State({self._keeper.here()!r})"


class View:
    """The state of one branch."""

    __slots__ = ("base", "data", "is_joined", "line", "looks", "pending", "ready", "saved")

    def __init__(self, line: Cursor, *, data: dict[str, Any] | None = None, base: bytes = b"{}") -> None:
        self.line = line  # where its next checkpoint goes
        self.data = data  # None: nobody looked yet, it is `base`
        self.base = base  # as it was when the branch was made
        self.saved: bytes | None = None  # as it is recorded
        self.pending: Ops = []  # what a body changed, for its entry
        self.ready: list[tuple[Scope, Ops]] = []  # of tasks that have ended, not put in yet
        self.looks = 0  # how often the code of the branch has looked: places between two calls
        self.is_joined = False


class Keeper:
    """The states of a run's branches, while this process has it."""

    def __init__(self, session: Session, initial: dict[str, Any]) -> None:
        self._session = session
        self._codec = session.ctx.codec
        self._lock = threading.RLock()
        self.face = State(self)
        line = Cursor(thread_name(session.row.id), merge={RUN_KEY: session.row.id})
        # A copy: what the caller does with `initial` later is no change of the state. Also says now what is unstorable.
        session.root.view = View(line, data=decode(encode(initial, self._codec), self._codec))
        entries = session.index.rows()
        self._loaded = max((recorded.seq for recorded in entries), default=0)
        self._joins: dict[tuple[str, int], dict[str, Any]] = {}  # by branch and look: what was put in there
        self._last: dict[str, int] = {}  # by branch: its last recorded call
        for recorded in entries:
            prefix, number = _place(recorded.entry.path)
            self._last[prefix] = max(number, self._last.get(prefix, 0))
            if "j" in (info := _info(recorded)):
                self._joins[prefix, int(info["n"])] = info
        self._recorded_joins = {prefix for info in self._joins.values() for prefix in info["j"]}
        # A fork that gave kept steps other results computes another state than the shared entries have.
        self._is_changed = any(
            recorded.kind == CHANGE and recorded.entry.name != "perdure.fork" for recorded in entries
        )

    # --- who sees what

    def here(self) -> dict[str, Any]:
        """The state of the running branch."""
        scope = current.get()
        if scope is None or scope.session is not self._session:
            raise NotInRun("the state of a run was used outside of it: in another run, or in a thread of your own")
        return self._look(scope) if scope.body is None else self._data(scope.body.scope)

    def _look(self, scope: Scope) -> dict[str, Any]:
        """The code of a branch looks at its state: put in what tasks that have ended left, or what was put in here."""
        data, view = self._data(scope), scope.view
        view.looks += 1
        info = self._joins.get((scope.prefix, view.looks))
        if info is not None:
            apply(data, decode(unsqueeze(info["d"]), self._codec))
        # As long as there is something recorded ahead, it was not put in here.
        elif view.ready and scope.count >= self._last.get(scope.prefix, 0):
            with self._lock:
                ready, view.ready = sorted(view.ready, key=_order), []
            for branch, ops in ready:
                self._join(view, branch, ops)
            self._note_joins(scope, ready)
        return data

    def _note_joins(self, scope: Scope, joined: list[tuple[Scope, Ops]]) -> None:
        session = self._session
        if session.replay:
            return
        ops = squeeze(encode([op for _, ops in joined for op in ops], self._codec))
        info = {"n": scope.view.looks, "j": [branch.prefix for branch, _ in joined], "d": ops}
        path = f"{scope.prefix}{scope.count}~joined"
        session.later(VALUE, Entry(path, "perdure.state", session.ctx.clock_us(), more={"state": info}))

    def _view(self, scope: Scope) -> View:
        view: View | None = scope.view
        if view is None:
            raise UsageError(
                "perdure.state() was called after this branch was made: call it before the function branches"
            )
        return view

    def _data(self, scope: Scope) -> dict[str, Any]:
        view = self._view(scope)
        if view.data is None:
            view.data = decode(view.base, self._codec)
        return view.data

    def text(self, scope: Scope) -> bytes | None:
        """The state of a branch as text; None if it has none."""
        if scope.view is None:
            return None
        if scope.view.data is None:
            return bytes(scope.view.base)
        return encode(scope.view.data, self._codec)

    # --- branches

    def branched(self, maker: Scope, branch: Scope) -> None:
        """A branch begins: with a copy of its maker's state."""
        if maker.view is None:
            return
        self._look(maker)
        text, line = self.text(maker), maker.view.line
        assert text is not None
        branch.view = View(Cursor(line.name, line.merge, line.thread, line.tree, line.cursor), base=text)
        branch.view.saved = maker.view.saved

    def ended(self, branch: Scope, *, awaited: bool) -> None:
        """A branch has ended. `awaited`: its maker takes its result here and now; else it may be doing anything."""
        view, maker = branch.view, branch.parent
        if view is None or maker is None or maker.view is None or branch.prefix in self._recorded_joins:
            return
        with self._lock:
            if view.is_joined:
                return
            view.is_joined = True
            if view.data is not None:
                self._look(branch)  # what its own tasks left
            text = self.text(branch)
            assert text is not None
            ops = difference(view.base, view.data, text, self._codec)
            if ops and not awaited:
                maker.view.ready.append((branch, ops))
        if ops and awaited:
            self._data(maker)
            self._join(maker.view, branch, ops)

    def _join(self, view: View, branch: Scope, ops: Ops) -> None:
        data = view.data
        assert data is not None
        ours = difference(branch.view.base, data, encode(data, self._codec), self._codec)
        where = meeting(ours, ops)
        if where is not None:
            error = RunStuck(
                f"run {self._session.row.id!r}: two branches that ran at the same time changed {show_path(where)} (one "
                f"of them is branch {branch.prefix.rstrip('.')}); which one counts would be chance. Let each change a "
                "path of its own, or return what it found and change the state when all have ended"
            )
            self._session.stop = self._session.stop or error
            raise error
        apply(data, decode(encode(ops, self._codec), self._codec))

    # --- what bodies change

    def before_body(self, scope: Scope) -> bytes | None:
        return self.text(scope)

    def after_body(self, scope: Scope, before: bytes | None) -> None:
        """Note what a body has changed, for its entry."""
        if before is None:
            return
        data = self._data(scope)
        scope.view.pending += difference(before, data, encode(data, self._codec), self._codec)

    # --- what is written

    def delta_into(self, entry: Entry) -> Entry:
        """An entry that is written later: what its body changed goes with it."""
        scope = _owner()
        if scope is None or scope.view is None or not scope.view.pending:
            return entry
        pending, scope.view.pending = scope.view.pending, []
        return _with(entry, {"d": squeeze(encode(pending, self._codec))})

    def recording(
        self,
        drafts: tuple[Draft, ...],
        beside: Beside | None,
        write: Callable[..., Act[None]],
        scope: Scope | None = None,
    ) -> Act[None]:
        """Write entries, with the state if it has changed."""
        scope = scope or _owner()
        if scope is None or scope.view is None:
            yield from write(*drafts, beside=beside)
            return
        view, text = scope.view, self.text(scope)
        pending = list(view.pending)
        assert text is not None
        if text == view.saved and not pending:
            yield from write(*drafts, beside=beside)
            return
        info: dict[str, Any] = {"h": _hash(text)}
        if pending:
            info["d"] = squeeze(encode(pending, self._codec))
        yield from self._write(view, text, info, drafts, beside, write)
        view.saved = text
        del view.pending[: len(pending)]

    def _write(
        self,
        view: View,
        text: bytes,
        info: dict[str, Any],
        drafts: tuple[Draft, ...],
        beside: Beside | None,
        write: Callable[..., Act[None]],
    ) -> Act[None]:
        """Entry and checkpoint in one transaction; both again if somebody has pruned the thread meanwhile."""
        ctx = self._session.ctx
        kind, entry = drafts[-1]
        after = 0
        for _ in range(_ATTEMPTS):
            saving = yield from prepare_saving(ctx, view.line, text, kind="state", after=after)
            last = (kind, _with(entry, {**info, "c": saving.record}))
            try:
                yield from write(*drafts[:-1], last, beside=_both(beside, saving))
            except Moved as moved:
                saving.drop(moved)
                after = moved.after
                continue
            except _Gone:  # somebody has deleted the thread: it begins anew
                saving.drop()
                view.line = Cursor(view.line.name, merge={RUN_KEY: self._session.row.id})
                continue
            except BaseException:
                saving.drop()
                raise
            if saving.done is not None:  # else a COMMIT whose answer was lost: the next save looks for itself
                saving.settle()
            else:
                view.line.cursor = saving.record
            return
        raise Conflict(f"thread {view.line.name!r} is being rearranged without pause; run the same line again")

    def finish(self) -> Act[None]:
        """Record the last changes of the function, which no call came after."""
        root, session = self._session.root, self._session
        self._look(root)
        if self.text(root) != root.view.saved:
            entry = Entry("state", "perdure.state", session.ctx.clock_us())
            yield from self.recording(((VALUE, entry),), None, partial(session.record, stateless=True), root)

    # --- what was recorded

    def replayed(self, found: Sequence[Recorded]) -> None:
        """A call is answered from the journal: bring back what its body changed, and check that the rest is the
        same."""
        scope = _owner()
        if scope is None or scope.view is None:
            return
        entries: list[Entry] = []
        for recorded in found:
            info = _info(recorded)
            if not info or recorded.seq > self._loaded or recorded.entry in entries:  # what is written twice is one
                continue
            entries.append(recorded.entry)
            if "d" in info:
                apply(self._data(scope), decode(unsqueeze(info["d"]), self._codec))
            text = self.text(scope)
            if "h" not in info or text is None:
                continue
            if _hash(text) != info["h"] and not (self._is_changed and not recorded.own):
                raise self._differs(recorded.entry, info)
            scope.view.saved = text
            scope.view.line.cursor = info["c"]

    def _differs(self, entry: Entry, info: dict[str, Any]) -> PerdureError:
        scope = _owner()
        assert scope is not None
        ctx, line = self._session.ctx, scope.view.line
        where, expected, actual = "state", "another value", "this one"
        try:
            at = Cursor(line.name)
            _, loaded, _ = drive(ctx.driver, thread_flows.load(ctx, at, info["c"], strict=True))
            change = compare(
                decode(loaded.data, ctx.codec, raw=True), decode(self.text(scope) or b"", ctx.codec, raw=True)
            )[0]
            where, expected, actual = show_path(change.path), shown(change.before), shown(change.after)
        except (PerdureError, IndexError):
            pass  # the checkpoint is gone, or tells the same: the hash must do
        return self._session._differs(entry.path, f"{where} = {expected}", f"{where} = {actual}")


def _owner() -> Scope | None:
    scope = current.get()
    return scope if scope is None or scope.body is None else scope.body.scope


def _info(recorded: Recorded) -> dict[str, Any]:
    more = recorded.entry.more
    return more.get("state") or {} if more else {}


def _with(entry: Entry, info: dict[str, Any]) -> Entry:
    more = {**(entry.more or {}), "state": {**(entry.more or {}).get("state", {}), **info}}
    return msgspec.structs.replace(entry, more=more)


def _both(beside: Beside | None, saving: Saving) -> Beside:
    def program() -> Any:
        if beside is not None:
            yield from beside()
        try:
            yield from saving.program()
        except NotFound as error:
            raise _Gone from error

    return program


class _Gone(Exception):
    """The thread that keeps the states is not there any more, or not the checkpoint that this one goes on from."""


def _hash(text: bytes) -> bytes:
    return blake3(text).digest(_HASH_BYTES)


def _place(path: str) -> tuple[str, int]:
    """The branch of a call, and its number there."""
    prefix, _, number = path.partition("~")[0].partition("#")[0].rpartition(".")
    return f"{prefix}." if prefix else "", int(number) if number.isdigit() else 0


def _order(joined: tuple[Scope, Ops]) -> list[tuple[int, str]]:
    """Branches in the order they were made, whichever ended first."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in joined[0].prefix.split(".")]
