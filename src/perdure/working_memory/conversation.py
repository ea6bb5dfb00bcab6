"""`Conversation`: the turns of a dialogue in a thread, the recent ones verbatim, older ones folded into a summary.

One transaction saves the checkpoint with the turn and the new summary, the items put into memory and, in a durable
function, the journal entry. `summarize` is called before that transaction, in a run as a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, get_args

from perdure.errors import Conflict, NotFound, UsageError
from perdure.log.append import Appended
from perdure.log.ids import parse_id, show_id
from perdure.log.reading import read_live
from perdure.log.thread_table import try_thread
from perdure.memory import flows, journal, rows
from perdure.memory.handle import Memory
from perdure.memory.hooks import as_step, call
from perdure.memory.journal import CommitTogether
from perdure.memory.policies import check_number
from perdure.memory.rows import NewVersion
from perdure.storage.program import Flow, Program, as_subprogram
from perdure.storage.twins import awaited, blocking
from perdure.threads.context import Cursor, Handle, StoreContext
from perdure.threads.flows import load
from perdure.threads.retention import checkpoint_id
from perdure.threads.save_engine import PreparedSave, commit, save
from perdure.threads.saves import Save
from perdure.threads.thread import Thread
from perdure.values.codec import decode, encode
from perdure.values.registry import register

Strategy = Literal["verbatim", "summary", "hybrid"]
EPISODIC: Final = "episodic"
ROLES: Final = ("user", "assistant")
RECENT: Final = 20


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation at a checkpoint.

    `turns` are verbatim, and `first` is the number of the first of them. `summary` covers the turns before. `manifest`
    describes the prompt of the newest turn.
    """

    thread: str
    checkpoint: str | None = None
    turns: tuple[dict[str, str], ...] = ()
    summary: str = ""
    first: int = 0
    session: int = 1
    manifest: dict[str, Any] | None = None


register(Transcript, name="perdure.memory.Transcript")  # a durable function may return it
_EMPTY: Final[dict[str, Any]] = {"turns": [], "summary": "", "first": 0, "session": 1, "manifest": None}


class Conversation(Handle):
    """The turns of a dialogue, kept in a thread of their own.

    `strategy` says what becomes of old turns. "verbatim" keeps all of them. "summary" has `summarize(summary, turns)`
    fold them into a text. "hybrid" does so too, if it has `summarize`, and puts each of them into `memory`, where a
    search finds it. The thread and `memory` belong to one store and tenant. Turns are old at the end of their session,
    and within it when there are more than twice `recent`; with `recent=None` a session stays verbatim until it ends.
    """

    def __init__(
        self,
        thread: Thread,
        strategy: Strategy = "hybrid",
        *,
        memory: Memory | None = None,
        summarize: Callable[[str, list[dict[str, str]]], Any] | None = None,
        recent: int | None = RECENT,
    ) -> None:
        if strategy not in get_args(Strategy):
            raise UsageError(f"strategy={strategy!r}: one of {', '.join(get_args(Strategy))}")
        if strategy == "hybrid" and memory is None:
            needed = 'needs memory=store.memory("users", "alice", "episodes"); strategy="verbatim" needs none'
            raise UsageError(f"a hybrid conversation (the default) {needed}")
        if strategy == "summary" and summarize is None:
            raise UsageError("a conversation that is kept as a summary needs summarize=")
        if memory is not None:
            if not thread._context.is_same_tenant(memory._context):
                raise UsageError(
                    f"memory={memory!r} belongs to another store or tenant than thread {thread.name!r}, and a turn is "
                    "one transaction: take both from one store"
                )
            memory._writable()
        self._context = thread._context
        self.thread = thread.name
        self._strategy = strategy
        self._recent = None if recent is None else check_number("recent=", recent)
        self._memory = memory if strategy == "hybrid" else None
        self._summarize = as_step("memory.summarize", summarize)

    def __repr__(self) -> str:
        return f"<Conversation {self.thread!r}, {self._strategy}>"

    @blocking
    def load(self, at: str | None = None) -> Flow[Transcript]:
        """Return the conversation as it stands, or at the checkpoint `at`."""
        return journal.read(self._context, "conversation.load", [self.thread, at], self._read(at))

    aload = awaited(load)

    @blocking
    def add(self, role: str, text: str) -> Flow[str]:
        """Add a turn of the "user" or the "assistant", and return its checkpoint. Durable when it returns."""
        return self._record("conversation.add", [{"role": role, "text": text}])

    aadd = awaited(add)

    @blocking
    def end_session(self) -> Flow[str]:
        """End the session and return its checkpoint.

        The turns of the session are folded, and the next one begins with the summary.
        """
        return self._record("conversation.end_session", [], end=True)

    aend_session = awaited(end_session)

    # --- flows

    def _read(self, at: str | None = None) -> Flow[Transcript]:
        """Return what `load` returns, without recording it in a run."""
        try:
            _, loaded, _ = yield from load(
                self._context, Cursor(self.thread), checkpoint_id(at), strict=at is not None, look=True
            )
        except NotFound:
            if at is not None:
                raise
            return Transcript(self.thread)
        state = self._state(loaded.data)
        return Transcript(self.thread, show_id(loaded.record.id), **{**state, "turns": tuple(state["turns"])})

    def _record(
        self,
        name: str,
        turns: list[dict[str, str]],
        *,
        said: Sequence[Any] = (),
        manifest: Mapping[str, Any] | None = None,
        learn: Callable[[], Flow[dict[str, Sequence[NewVersion]]]] | None = None,
        end: bool = False,
    ) -> Flow[str]:
        """Save turns, and the versions that `learn` returns by path, in one transaction. Return the checkpoint."""
        for turn in turns:
            if turn["role"] not in ROLES or not isinstance(turn["text"], str):
                raise UsageError(f"a turn is a text of {' or '.join(ROLES)}; an observation goes into the scratchpad")
        folded = yield from self._fold(len(turns), end)

        def merge(data: bytes) -> bytes:
            state = self._state(data)
            kept, done = state["turns"], 0 if folded is None else folded.first + len(folded.turns) - state["first"]
            if folded is not None and done > 0:  # else another process has folded them
                state = {**state, "summary": folded.summary, "first": state["first"] + done}
                kept = kept[done:]
            recorded = {"manifest": None if manifest is None else dict(manifest)} if turns else {}
            state |= {"turns": [*kept, *turns], "session": state["session"] + end, **recorded}
            return encode(state, self._context.codec)

        make = partial(self._written, merge, folded, learn)
        args = [self.thread, turns, *said]
        return (yield from journal.together(self._context, name, args, make, lambda op, at: commit(parse_id(at), op)))

    def _fold(self, added: int, end: bool) -> Flow[Transcript | None]:
        """Return the turns that are old now, with the summary that replaces them, or None if none are old."""
        if self._strategy == "verbatim":
            return None
        due = yield from journal.read(
            self._context, "conversation.old", [self.thread, added, end], self._old(added, end)
        )
        if due is None or self._summarize is None:
            return due
        summary = yield from call(self._summarize, str, due.summary, [dict(turn) for turn in due.turns])
        return replace(due, summary=summary)

    def _old(self, added: int, end: bool) -> Flow[Transcript | None]:
        now = yield from self._read()
        count = len(now.turns)
        if not end:
            recent = self._recent
            count = count - recent if recent is not None and count + added > 2 * recent else 0
        if count <= 0:
            return None
        return Transcript(self.thread, None, now.turns[:count], now.summary, now.first, now.session)

    def _written(
        self,
        merge: Callable[[bytes], bytes],
        folded: Transcript | None,
        learn: Callable[[], Flow[dict[str, Sequence[NewVersion]]]] | None,
        commit_with: CommitTogether,
    ) -> Flow[str]:
        ctx, cursor = self._context, Cursor(self.thread)
        versions = {} if learn is None else (yield from learn())
        if folded is not None and self._memory is not None:
            into = self._memory._context  # its embedder counts, not that of the thread's handle
            versions[self._memory._path] = yield from flows.with_vectors(into, _episodes(into, folded))

        def write(saving: PreparedSave) -> Flow[None]:
            def attempt(summary_of: flows.SummaryOf) -> Flow[None]:
                program = partial(_program, saving, versions, ctx.clock_us(), summary_of)
                return commit_with(program, show_id(saving.record))

            return flows.with_summaries(ctx, attempt)

        request = Save(ctx, cursor, merge=merge, text=encode(_EMPTY, ctx.codec))
        done = yield from save(request, write)
        assert done.record is not None
        return show_id(done.record.id)

    def _state(self, data: bytes) -> dict[str, Any]:
        state = decode(data, self._context.codec)
        if not isinstance(state, dict) or state.keys() != _EMPTY.keys():
            raise UsageError(f"thread {self.thread!r} holds no conversation: give it a thread of its own")
        return state


def _program(
    saving: PreparedSave, versions: Mapping[str, Sequence[NewVersion]], now: int, summary_of: flows.SummaryOf
) -> Program[Appended | None]:
    thread = yield from as_subprogram(try_thread(saving.tenant, saving.name))
    if thread is not None and (yield from read_live(saving.tenant, thread.tree, saving.record)) is not None:
        return saving.done  # an earlier COMMIT succeeded, and its answer was lost
    done = yield from saving.program()
    if not done.on_head:
        raise Conflict(f"another process has begun the conversation {saving.name!r}")
    for path in sorted(versions):
        summary, seen = summary_of(path)
        yield from rows.write_versions(saving.tenant, path, [*summary, *versions[path]], now, last=False, seen=seen)
    return done


def _episodes(ctx: StoreContext, folded: Transcript) -> list[NewVersion]:
    """Return folded turns as items. A search finds each by its text, and with less weight by the turn before."""
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
