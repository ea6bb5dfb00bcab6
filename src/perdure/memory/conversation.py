"""`Conversation`: the turns of a dialogue in a thread, the recent ones verbatim, older ones folded into a summary.

What a turn brings is one transaction: the checkpoint with the turn and the new summary, the items that it puts into
memory, and in a durable function the journal's entry. Models (`summarize`) are asked before, as steps of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from perdure.errors import Conflict, NotFound, OutcomeUnknown, UsageError
from perdure.log.append import as_subprogram
from perdure.log.ids import show_id
from perdure.log.reading import read_live
from perdure.log.thread_table import try_thread
from perdure.memory import flows, rows
from perdure.memory.handle import RUNS, Memory, recorded
from perdure.memory.hooks import as_step, call
from perdure.memory.rows import NewVersion
from perdure.storage.program import Flow, Program, write
from perdure.storage.twins import awaited, blocking
from perdure.threads.context import Cursor, Handle, StoreContext
from perdure.threads.flows import load
from perdure.threads.retention import checkpoint_id
from perdure.threads.saves import ATTEMPTS, Moved, Save, Saving
from perdure.threads.thread import Thread
from perdure.values.codec import decode, encode
from perdure.values.registry import register

if TYPE_CHECKING:  # imported late: most calls are none of a run
    from perdure.memory.journal import CommitTogether

Strategy = Literal["verbatim", "summary", "hybrid"]
EPISODIC: Final = "episodic"
ROLES: Final = ("user", "assistant")
_COMMITS: Final = 3


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation at a checkpoint. `turns` are verbatim, `first` is the number of the first of them; what was said
    before is in `summary`. `manifest` says what the prompt of the newest turn was made of."""

    thread: str
    checkpoint: str | None = None
    turns: tuple[dict[str, str], ...] = ()
    summary: str = ""
    first: int = 0
    session: int = 1
    manifest: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """What was saved: the checkpoint of the conversation, and the keys of the facts that were put with it."""

    checkpoint: str
    keys: tuple[str, ...] = ()


for _class in (Transcript, RecordedTurn):  # a durable function may return them
    register(_class, name=f"perdure.memory.{_class.__name__}")


class Conversation(Handle):
    """The turns of a dialogue, kept in a thread of their own.

    `strategy` says what becomes of old turns: "verbatim" keeps all; "summary" has `summarize(summary, turns)` fold them
    into a text; "hybrid" does so too (without `summarize` there is no text), and puts each into `memory`, where a
    search finds it. Turns are old at the end of their session, and within it when there are more than twice `recent`.
    """

    def __init__(
        self,
        thread: Thread,
        strategy: Strategy = "hybrid",
        *,
        memory: Memory | None = None,
        summarize: Callable[[str, list[dict[str, str]]], Any] | None = None,
        recent: int = 20,
    ) -> None:
        if strategy not in get_args(Strategy):
            raise UsageError(f"strategy={strategy!r}: one of {', '.join(get_args(Strategy))}")
        if strategy == "hybrid" and memory is None:
            raise UsageError('a hybrid conversation needs memory=store.memory("users", "alice", "episodes")')
        if strategy == "summary" and summarize is None:
            raise UsageError("a conversation that is kept as a summary needs summarize=")
        if type(recent) is not int or recent < 1:
            raise UsageError(f"recent={recent!r}: a number of turns from 1 on")
        self._context = thread._context
        self.thread = thread.name
        self._strategy, self._memory, self._recent = strategy, memory, recent
        self._summarize = as_step("memory.summarize", summarize)

    def __repr__(self) -> str:
        return f"<Conversation {self.thread!r}, {self._strategy}>"

    @blocking
    def load(self, at: str | None = None) -> Flow[Transcript]:
        """The conversation as it stands, or at a checkpoint."""
        return recorded(self._context, "conversation.load", [self.thread, at], self._read(at))

    aload = awaited(load)

    @blocking
    def add(self, role: str, text: str) -> Flow[RecordedTurn]:
        """Add a turn of the "user" or the "assistant". Durable when it returns."""
        return self._record("conversation.add", [{"role": role, "text": text}])

    aadd = awaited(add)

    @blocking
    def end_session(self) -> Flow[RecordedTurn]:
        """End the session: its turns are folded, and the next session begins with the summary."""
        return self._record("conversation.end_session", [], end=True)

    aend_session = awaited(end_session)

    # --- flows

    def _read(self, at: str | None = None) -> Flow[Transcript]:
        """`load`, not recorded in a run."""
        try:
            _, loaded, _ = yield from load(
                self._context, Cursor(self.thread), checkpoint_id(at), strict=at is not None, look=True
            )
        except NotFound:
            if at is not None:
                raise
            return Transcript(self.thread)
        state = _checked(decode(loaded.data, self._context.codec), self.thread)
        return Transcript(self.thread, show_id(loaded.record.id), **{**state, "turns": tuple(state["turns"])})

    def _record(
        self,
        name: str,
        turns: list[dict[str, str]],
        *,
        said: Sequence[Any] = (),
        manifest: Mapping[str, Any] | None = None,
        learn: Callable[[], Flow[dict[str, Sequence[NewVersion]]]] | None = None,
        keys: tuple[str, ...] = (),
        end: bool = False,
    ) -> Flow[RecordedTurn]:
        """Save turns with what `learn` puts into memory (versions by path), in one transaction."""
        for turn in turns:
            if turn["role"] not in ROLES or not isinstance(turn["text"], str):
                raise UsageError(f"a turn is a text of {' or '.join(ROLES)}; an observation goes into the scratchpad")
        folded = yield from self._fold(len(turns), end)

        def change(state: dict[str, Any]) -> dict[str, Any]:
            kept, done = state["turns"], 0 if folded is None else folded.first + len(folded.turns) - state["first"]
            if folded is not None and done > 0:  # else another process has folded them
                state = {**state, "summary": folded.summary, "first": state["first"] + done}
                kept = kept[done:]
            told = {"manifest": None if manifest is None else dict(manifest)} if turns else {}
            return {**state, "turns": [*kept, *turns], "session": state["session"] + end, **told}

        make = partial(self._written, change, folded, learn, keys)
        if not RUNS.wants(self._context):
            return (yield from make(_commit))
        from perdure.memory import journal

        return (yield from journal.together(self._context, name, [self.thread, turns, *said], make))

    def _fold(self, added: int, end: bool) -> Flow[Transcript | None]:
        """The turns that are old now, with the summary that takes their place. None: there are none."""
        if self._strategy == "verbatim":
            return None
        due = yield from recorded(self._context, "conversation.old", [self.thread, added, end], self._old(added, end))
        if due is None or self._summarize is None:
            return due
        summary = yield from call(self._summarize, str, due.summary, [dict(turn) for turn in due.turns])
        return Transcript(due.thread, None, due.turns, summary, due.first, due.session)

    def _old(self, added: int, end: bool) -> Flow[Transcript | None]:
        now = yield from self._read()
        count = len(now.turns)
        if not end:
            count = count - self._recent if count + added > 2 * self._recent else 0
        if count <= 0:
            return None
        return Transcript(self.thread, None, now.turns[:count], now.summary, now.first, now.session)

    def _written(
        self,
        change: Callable[[dict[str, Any]], dict[str, Any]],
        folded: Transcript | None,
        learn: Callable[[], Flow[dict[str, Sequence[NewVersion]]]] | None,
        keys: tuple[str, ...],
        commit: CommitTogether,
    ) -> Flow[RecordedTurn]:
        ctx = self._context
        versions = {} if learn is None else (yield from learn())
        if folded is not None and self._memory is not None and self._strategy == "hybrid":
            versions[self._memory._writable()] = yield from flows.with_vectors(ctx, _episodes(ctx, folded))

        def attempt(summary_of: flows.SummaryOf) -> Flow[RecordedTurn]:
            after = 0
            for _ in range(ATTEMPTS):
                saving = yield from self._prepared(change, after)
                made = RecordedTurn(show_id(saving.record), keys)
                try:
                    yield from commit(partial(_program, saving, versions, ctx.clock_us(), summary_of), made)
                except Moved as moved:
                    saving.drop(moved)
                    after = moved.after
                except _Overtaken:
                    saving.drop()
                else:
                    saving.settle()
                    return made
            raise Conflict(f"thread {self.thread!r} is saved to without pause: nothing was written; record it again")

        return (yield from flows.with_summaries(ctx, attempt))

    def _prepared(self, change: Callable[[dict[str, Any]], dict[str, Any]], after: int) -> Flow[Saving]:
        codec, cursor = self._context.codec, Cursor(self.thread)

        def merge(data: bytes) -> bytes:
            return encode(change(_checked(decode(data, codec), self.thread)), codec)

        try:
            return (yield from Save(self._context, cursor, merge=merge).prepare(after))
        except NotFound:  # the first turn
            empty = {"turns": [], "summary": "", "first": 0, "session": 1, "manifest": None}
            return (yield from Save(self._context, cursor, text=encode(change(empty), codec)).prepare(after))


class _Overtaken(Exception):
    """Another process has saved a turn meanwhile: this one is added to it."""


def _program(
    saving: Saving, versions: Mapping[str, Sequence[NewVersion]], now: int, summary_of: flows.SummaryOf
) -> Program[None]:
    thread = yield from as_subprogram(try_thread(saving.tenant, saving.cursor.name))
    if thread is not None and (yield from read_live(saving.tenant, thread.tree, saving.record)) is not None:
        return  # by a COMMIT whose answer was lost
    try:
        done = yield from saving.program()
    except Conflict as error:
        raise _Overtaken from error
    if not done.on_head:
        raise _Overtaken
    for path in sorted(versions):
        summary, seen = summary_of(path)
        yield from rows.write_versions(saving.tenant, path, [*summary, *versions[path]], now, last=False, seen=seen)


def _commit(op: Callable[[], Program[None]], _: RecordedTurn) -> Flow[None]:
    for _attempt in range(_COMMITS - 1):
        try:
            return (yield from write(op))
        except OutcomeUnknown:
            continue  # it looks for the checkpoint first
    return (yield from write(op))


def _checked(state: Any, thread: str) -> dict[str, Any]:
    if not isinstance(state, dict) or not {"turns", "summary", "first", "session", "manifest"} == set(state):
        raise UsageError(f"thread {thread!r} holds no conversation: give it a thread of its own")
    return state


def _episodes(ctx: StoreContext, folded: Transcript) -> list[NewVersion]:
    """Turns as items that a search finds: by what was said, and a little by what was said before."""
    said, now = [f"{turn['role']}: {turn['text']}" for turn in folded.turns], ctx.clock_us()
    return [
        flows.new_version(
            ctx,
            now,
            f"{folded.thread}:{folded.first + n}",
            {**turn, "session": folded.session},
            text=said[n],
            context=said[n - 1] if n else None,
            kind=EPISODIC,
            source=folded.thread,
        )
        for n, turn in enumerate(folded.turns)
    ]
