"""`AgentMemory`: the four kinds of memory of an agent and its user in one object.

Working memory is the prompt that `recall` builds. Episodic memory is the conversation, semantic memory the user's
facts, procedural memory the instructions and what `promote` learned from runs. Items lie below
`store.memory("users", user)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from perdure.agents.progress_file import Progress
from perdure.errors import NotFound, UsageError
from perdure.memory import flows, journal, maintenance, rows
from perdure.memory.context import PROCEDURAL, Context, Prompt, assemble
from perdure.memory.conversation import RECENT, Conversation, Strategy, Transcript
from perdure.memory.hooks import as_step, call
from perdure.memory.labels import check_key, path_of
from perdure.memory.models import Item, item_of
from perdure.memory.policies import DEFAULT
from perdure.memory.rows import DELETED, NewVersion
from perdure.memory.search import ranked, search
from perdure.runs.engine import flows as runs
from perdure.runs.engine import reading
from perdure.runs.handle import Run, run_id_of
from perdure.storage.program import Flow, aside
from perdure.storage.twins import awaited, blocking
from perdure.threads.context import Handle
from perdure.values.safe_repr import shown
from perdure.values.secrets import masked

if TYPE_CHECKING:
    from perdure.memory.scratchpad import Scratchpad
    from perdure.ops.store import Store

BUDGET_TOKENS: Final = 8000
CAPS: Final = {"max_bytes": 8192, "max_age": "90d"}  # the default policy of a user's facts
_FOUND_MAX: Final = 50
_OURS: Final = ("memory.", "conversation.", "perdure.")  # prefixes of step names that are no part of a task


class AgentMemory(Handle):
    """The memory of an agent with one user.

    `instructions` begin every prompt. `extract(turn)` returns what to learn from a turn ({"user": …, "assistant": …}):
    facts by key, with None for a fact to forget. `should_memorize(turn)` decides whether `extract` is called.
    `summarize(summary, turns)`, `strategy` and `recent` are those of `Conversation`. These functions may be async, and
    in a durable function they are steps.

    Facts are capped at 8 KB and 90 days, unless their namespace has a policy. Pinned facts stay. The conversation is
    the thread `thread`, by default "users/" and the user. The attribute `memory` is the user's namespace, `facts` and
    `procedures` are namespaces below it, `conversation` holds the turns.
    """

    def __init__(
        self,
        store: Store,
        user: str,
        *,
        instructions: str = "",
        context: Context | int = BUDGET_TOKENS,
        extract: Callable[[dict[str, str]], Any] | None = None,
        should_memorize: Callable[[dict[str, str]], Any] | None = None,
        summarize: Callable[[str, list[dict[str, str]]], Any] | None = None,
        strategy: Strategy = "hybrid",
        recent: int | None = RECENT,
        thread: str | None = None,
    ) -> None:
        self._context = store._context
        self.memory = store.memory("users", user)
        self.facts, self.procedures = store.memory("users", user, "facts"), store.memory("users", user, "procedures")
        episodes = store.memory("users", user, "episodes")
        self.conversation = Conversation(
            store.thread(thread or f"users/{user}"), strategy, memory=episodes, summarize=summarize, recent=recent
        )
        self._prompts = context if isinstance(context, Context) else Context(context)
        self._instructions = instructions
        self._extract = as_step("memory.extract", extract)
        self._should_memorize = as_step("memory.should_memorize", should_memorize)

    @blocking
    def recall(
        self,
        query: str,
        *,
        k: int | None = None,
        progress: Progress | str = "",
        scratchpad: Scratchpad | str = "",
    ) -> Flow[Prompt]:
        """Return the prompt for a query. In a durable function it is recorded.

        It holds the instructions, the conversation so far, pinned items and items that are about the query. The user's
        other facts follow as far as there is room. With `k`, only the best `k` items are taken, and no other facts.
        Needs the extra `search`.
        """
        if k is not None and (type(k) is not int or not 0 <= k <= _FOUND_MAX):
            raise UsageError(
                f"recall(k={k!r}): how many items about the query, 0 to {_FOUND_MAX}; None takes what fits"
            )
        pad = scratchpad if isinstance(scratchpad, str) else scratchpad.render()
        said = [self.memory.namespace, query, self._prompts.budget_tokens, *([] if k is None else [k])]
        return journal.read(self._context, "memory.recall", said, self._recall(query, k, progress, pad))

    arecall = awaited(recall)

    @blocking
    def record(self, prompt: Prompt | str, answer: str, *, facts: Mapping[str, Any] | None = None) -> Flow[str]:
        """Save a turn and the facts learned from it in one transaction. Return the conversation's checkpoint.

        `prompt` is what `recall` returned, whose manifest is saved too, or the user's words. The facts are those that
        `extract` returns, overridden by `facts`. The turn is durable when the method returns.
        """
        query, manifest = (prompt.manifest["query"], prompt.manifest) if isinstance(prompt, Prompt) else (prompt, None)
        turn, learned = {"user": query, "assistant": answer}, dict(facts or {})
        asks = self._extract is not None
        if asks and self._should_memorize is not None:
            asks = yield from call(self._should_memorize, object, turn)
        if asks:
            extracted = yield from call(self._extract, dict | None, turn)
            learned = {**(extracted or {}), **learned}
        turns = [{"role": role, "text": text} for role, text in turn.items()]
        return (
            yield from self.conversation._record(
                "memory.record",
                turns,
                said=[learned],
                manifest=manifest,
                learn=partial(self._learn, learned),
            )
        )

    arecord = awaited(record)

    @blocking
    def end_session(self) -> Flow[str]:
        """End the session and return the conversation's checkpoint.

        Its turns are folded into the summary and put into memory as episodes.
        """
        return self.conversation._record("conversation.end_session", [], end=True)

    aend_session = awaited(end_session)

    @blocking
    def promote(self, run: Run | str, *, task: str | None = None, when: str = "") -> Flow[Item]:
        """Save how a run succeeded as a procedure, and return its item.

        It holds the run's arguments and its steps, with the arguments of effects; steps record none. Secrets that can
        be recognised are masked. `when` says under which conditions it applies. `recall` finds it when a query is about
        the `task`, by default the name of the run's function, or about `when`; `procedures.get(task)` returns it.
        Promoting another run of the same task replaces it.
        """
        run_id = run_id_of(self._context, run)
        _, row = yield from runs.locate(self._context, run_id)
        if row.status != "done":
            raise UsageError(f"run {run_id!r} is {row.status}: only a run that succeeded is worth repeating")
        steps = yield from reading.steps(self._context, run_id, "small")
        name = task or row.function.replace("_", " ")
        done = [step for step in steps if step.status == "done" and not step.name.startswith(_OURS)]
        calls = [_call(step.name, step.arguments) for step in done if step.kind in ("step", "effect", "spawn")]
        called_with = masked((yield from reading.arguments(self._context, run_id, True)))
        value = {"task": name, "when": when, "arguments": called_with, "steps": calls}
        procedure = {"kind": PROCEDURAL, "text": f"{name} {when}".strip(), "source": f"run {run_id}"}
        [item] = yield from self.procedures._put("memory.promote", {name: value}, procedure)
        return item

    apromote = awaited(promote)

    @blocking
    def rebuild(self, manifest: Mapping[str, Any]) -> Flow[Prompt]:
        """Return the prompt that a manifest describes, byte for byte. Raises NotFound if a part of it was erased."""
        return journal.read(self._context, "memory.rebuild", [dict(manifest)], self._rebuild(manifest))

    arebuild = awaited(rebuild)

    # --- flows

    def _recall(self, query: str, k: int | None, progress: Progress | str, scratchpad: str) -> Flow[Prompt]:
        now = self._context.clock_us()
        scope = rows.ItemQuery(self.memory._path, now, valid_at=now)
        reader = self.memory._reader()  # one for the three reads: unreadable items are reported once
        listed = partial(flows.listing, self._context, offset=0, matches=reader)
        items = yield from reader.shown(listed(scope._replace(pinned=1), None))
        most = _FOUND_MAX if k is None else k
        if most:
            hits = search(self._context, scope, query, 0, most, True, lambda row: not row.pinned and reader(row))
            items += yield from ranked(hits, reader)
        if k is None:
            known = {(item.namespace, item.key) for item in items}
            facts = yield from reader.shown(listed(scope._replace(path=self.facts._path), _FOUND_MAX))
            items += [item for item in facts if (item.namespace, item.key) not in known]
        build = partial(self._prompts.build, query, instructions=self._instructions, items=items)
        said = yield from self.conversation._read()
        return (yield from aside(partial(build, conversation=said, progress=progress, scratchpad=scratchpad)))

    def _learn(self, learned: Mapping[str, Any]) -> Flow[dict[str, Sequence[NewVersion]]]:
        """Return the versions of the learned facts, by path. A pinned fact stays pinned."""
        if not learned:
            return {}
        ctx, path = self._context, self.facts._path
        now = ctx.clock_us()
        if (yield from flows.query(ctx, rows.policy_of, path)) is DEFAULT:
            yield from maintenance.policy(ctx, path, dict(CAPS))
        there = yield from flows.query(ctx, rows.read_keys, [(path, check_key(key)) for key in learned], now)
        puts = [
            flows.new_version(ctx, now, key, value, pinned=old is not None and bool(old.pinned))
            for (key, value), old in zip(learned.items(), there, strict=True)
            if value is not None
        ]
        gone = [NewVersion(check_key(key), gone=DELETED) for key, value in learned.items() if value is None]
        return {path: [*(yield from flows.with_vectors(ctx, puts)), *gone]}

    def _rebuild(self, manifest: Mapping[str, Any]) -> Flow[Prompt]:
        said = Transcript(manifest["thread"])
        if manifest["checkpoint"] is not None:
            try:
                said = yield from self.conversation._read(manifest["checkpoint"])
            except NotFound as error:
                raise _erased(f"checkpoint {manifest['checkpoint']} of thread {manifest['thread']!r}") from error
        items: dict[str, list[Item]] = {}
        for part in ("pinned", "procedures", "memories"):
            items[part] = []
            for ref in manifest[part]:
                place = path_of(ref["namespace"]), check_key(ref["key"])
                versions = yield from flows.query(self._context, rows.read_history, *place)
                row = next((one for one in versions if one.version == ref["version"]), None)
                if row is None:
                    raise _erased(f"version {ref['version']} of item {ref['key']!r} of {'/'.join(ref['namespace'])}")
                items[part].append(item_of(row, self._context.codec))
        return assemble(manifest, said, items)


def _call(name: str, arguments: Mapping[str, Any] | None) -> str:
    """Return a call in one line: "book(flight='LH 400')"."""
    inside = ", ".join(f"{key}={shown(value, 40)}" for key, value in masked(arguments or {}).items())
    return f"{name}({inside})" if inside else name


def _erased(part: str) -> NotFound:
    return NotFound(f"the prompt cannot be rebuilt: {part} was erased, or is kept no longer")
