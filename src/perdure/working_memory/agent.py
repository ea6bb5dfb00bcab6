"""`AgentMemory`: the four kinds of memory of an agent and its user in one object.

Working memory is the prompt that `recall` builds. Episodic memory is the conversation, semantic memory the user's
facts, procedural memory the instructions and what `promote` learned from runs. Items lie below
`store.memory("users", user)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from perdure.agents.progress_file import Progress
from perdure.errors import NotFound, UsageError
from perdure.memory import flows, journal, maintenance, rows
from perdure.memory.facts import Duplicates, FactChange, changes_of, check_duplicates, known_facts, versions_of
from perdure.memory.hooks import as_step, call, takes
from perdure.memory.labels import check_key, path_of
from perdure.memory.models import Item, item_of
from perdure.memory.policies import DEFAULT
from perdure.memory.reading import ItemReader
from perdure.memory.reranking import Rerank, candidates, ranked
from perdure.memory.rows import NewVersion
from perdure.memory.search import Found, search
from perdure.runs.engine import flows as runs
from perdure.runs.engine import reading
from perdure.runs.handle import Run, run_id_of
from perdure.storage.program import Flow, aside
from perdure.storage.twins import awaited, blocking
from perdure.threads.context import Handle
from perdure.values.safe_repr import shown
from perdure.values.secrets import masked
from perdure.working_memory.context import PROCEDURAL, Context, Prompt, assemble
from perdure.working_memory.conversation import RECENT, Conversation, Strategy, Transcript

if TYPE_CHECKING:
    from perdure.ops.store import Store
    from perdure.working_memory.scratchpad import Scratchpad

BUDGET_TOKENS: Final = 8000
CAPS: Final = {"max_bytes": 8192, "max_age": "90d"}  # the default policy of a user's facts
_FOUND_MAX: Final = 50
_OURS: Final = ("memory.", "conversation.", "perdure.")  # prefixes of step names that are no part of a task


class AgentMemory(Handle):
    """The memory of an agent with one user.

    `instructions` begin every prompt. `extract(turn, known)` returns what to learn from a turn ({"user": …,
    "assistant": …}). `known` has known facts by key, the nearest first. A function of one parameter gets the turn
    alone. The answer is facts by key, with None for a fact to forget, or a list of changes:
    `{"do": "supersede", "key": "home", "value": {…}, "supersedes": "first home", "valid_from": "2026-05-01"}`. `do` is
    add, update, supersede, forget or nothing. A superseded fact stays, and is valid until the other one begins.
    `duplicates` is for a new fact that says what a known one says: "merge" makes it a version of that one, "link" lets
    it supersede that one, "keep" keeps both. `should_memorize(turn)` decides whether `extract` is called.
    `summarize(summary, turns)`, `strategy` and `recent` are those of `Conversation`. These functions may be async, and
    in a durable function they are steps. `rerank(query, items)` orders the items about a query, as in `Memory.search`.

    `agent`, `run` and `shared` add scopes: `recall` also reads the namespaces ("agents", agent), ("runs", run) and
    ("shared",), which hold what an agent, a run or everyone knows. The attribute `scopes` has them by name.

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
        agent: str | None = None,
        run: str | None = None,
        shared: bool = False,
        extract: Callable[..., Any] | None = None,
        duplicates: Duplicates = "merge",
        should_memorize: Callable[[dict[str, str]], Any] | None = None,
        summarize: Callable[[str, list[dict[str, str]]], Any] | None = None,
        strategy: Strategy = "hybrid",
        recent: int | None = RECENT,
        rerank: Rerank | None = None,
        thread: str | None = None,
    ) -> None:
        self._context = store._context
        self.memory = store.memory("users", user)
        self.facts, self.procedures = store.memory("users", user, "facts"), store.memory("users", user, "procedures")
        named = {"user": ("users", user), "agent": ("agents", agent), "run": ("runs", run), "shared": ("shared",)}
        chosen = {"user": True, "agent": agent is not None, "run": run is not None, "shared": shared}
        self.scopes = {name: store.memory(*map(str, named[name])) for name, is_chosen in chosen.items() if is_chosen}
        episodes = store.memory("users", user, "episodes")
        self.conversation = Conversation(
            store.thread(thread or f"users/{user}"), strategy, memory=episodes, summarize=summarize, recent=recent
        )
        self._rerank = rerank
        self._prompts = context if isinstance(context, Context) else Context(context)
        self._instructions = instructions
        check_duplicates(duplicates)
        self._duplicates: Duplicates = duplicates
        self._extract, self._tells_known = as_step("memory.extract", extract), takes(extract, "known", 1)
        self._should_memorize = as_step("memory.should_memorize", should_memorize)

    @blocking
    def recall(
        self,
        query: str,
        *,
        k: int | None = None,
        progress: Progress | str = "",
        scratchpad: Scratchpad | str = "",
        scopes: Iterable[str] | None = None,
    ) -> Flow[Prompt]:
        """Return the prompt for a query. In a durable function it is recorded.

        It holds the instructions, the conversation so far, pinned items and items that are about the query. The user's
        other facts follow as far as there is room. With `k`, only `k` items are taken: those about the query, and if
        there are fewer, the facts nearest to it.
        `scopes` chooses among those of this object (default: all). Needs the extra `search`.
        """
        if k is not None and (type(k) is not int or not 0 <= k <= _FOUND_MAX):
            raise UsageError(
                f"recall(k={k!r}): how many items about the query, 0 to {_FOUND_MAX}; None takes what fits"
            )
        pad = scratchpad if isinstance(scratchpad, str) else scratchpad.render()
        names = [*self.scopes] if scopes is None else [*scopes]
        if unknown := [name for name in names if name not in self.scopes]:
            raise UsageError(f"recall(scopes=…): {unknown[0]!r} is not among {', '.join(self.scopes)}")
        said = [self.memory.namespace, query, self._prompts.budget_tokens, *([] if k is None else [k])]
        said += [] if names == ["user"] else [names]
        return journal.read(self._context, "memory.recall", said, self._recall(query, k, progress, pad, names))

    arecall = awaited(recall)

    @blocking
    def record(self, prompt: Prompt | str, answer: str, *, facts: Mapping[str, Any] | None = None) -> Flow[str]:
        """Save a turn and the facts learned from it in one transaction. Return the conversation's checkpoint.

        `prompt` is what `recall` returned, whose manifest is saved too, or the user's words. The facts are those that
        `extract` returns, overridden by `facts`. The turn is durable when the method returns.
        """
        query, manifest = (prompt.manifest["query"], prompt.manifest) if isinstance(prompt, Prompt) else (prompt, None)
        turn, learned = {"user": query, "assistant": answer}, changes_of(facts)
        asks = self._extract is not None
        if asks and self._should_memorize is not None:
            asks = yield from call(self._should_memorize, object, turn)
        if asks:
            known = [(yield from self._known(turn))] if self._tells_known else []
            extracted = yield from call(self._extract, dict | list | None, turn, *known)
            learned = {**changes_of(extracted), **learned}
        turns = [{"role": role, "text": text} for role, text in turn.items()]
        return (
            yield from self.conversation._record(
                "memory.record",
                turns,
                said=[{key: _compared(change) for key, change in learned.items()}],
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

    def _recall(
        self, query: str, k: int | None, progress: Progress | str, scratchpad: str, names: Sequence[str]
    ) -> Flow[Prompt]:
        now = self._context.clock_us()
        reader = self.memory._reader()  # one for all reads: unreadable items are reported once
        listed = partial(flows.listing, self._context, offset=0, matches=reader)
        most, items = _FOUND_MAX if k is None else k, list[Item]()
        for name in names:
            scope = rows.ItemQuery(self.scopes[name]._path, now, valid_at=now)
            items += yield from reader.shown(listed(scope._replace(pinned=1), None))
        pinned = len(items)
        if most:
            about = self._about(query, now, names, reader, most if self._rerank is None else candidates(most))
            items += yield from ranked(about, reader, query, most, rerank=self._rerank)
        left = _FOUND_MAX if k is None else k - (len(items) - pinned)
        if left and "user" in names:
            known = {(item.namespace, item.key) for item in items}
            scope = rows.ItemQuery(self.facts._path, now, valid_at=now)
            if k is None:
                facts = yield from reader.shown(listed(scope, _FOUND_MAX))
            else:  # too few are about the query: the nearest follow
                nearest = search(self._context, scope, query, 0, k, False, lambda row: not row.pinned and reader(row))
                facts = yield from ranked(nearest, reader, query, k)
            items += [item for item in facts if (item.namespace, item.key) not in known][:left]
        build = partial(self._prompts.build, query, instructions=self._instructions, items=items)
        said = yield from self.conversation._read()
        return (yield from aside(partial(build, conversation=said, progress=progress, scratchpad=scratchpad)))

    def _about(self, query: str, now: int, names: Sequence[str], reader: ItemReader, most: int | None) -> Flow[Found]:
        """Return the items about a query that are not pinned, those of all scopes in one order."""
        hits: Found = []
        for name in names:
            scope = rows.ItemQuery(self.scopes[name]._path, now, valid_at=now)
            hits += yield from search(
                self._context, scope, query, 0, most, True, lambda row: not row.pinned and reader(row)
            )
        return sorted(hits, key=lambda hit: -hit[1].score)[:most]

    def _known(self, turn: Mapping[str, str]) -> Flow[dict[str, Any]]:
        """Return the known facts for `extract`, by key. In a run they are recorded."""
        known = known_facts(self._context, self.facts._path, f"{turn['user']} {turn['assistant']}")
        return journal.read(self._context, "memory.known", [self.facts.namespace, dict(turn)], known)

    def _learn(self, learned: Mapping[str, FactChange]) -> Flow[dict[str, Sequence[NewVersion]]]:
        """Return the versions of the learned facts, by path."""
        if not learned:
            return {}
        ctx, path = self._context, self.facts._path
        if (yield from flows.query(ctx, rows.policy_of, path)) is DEFAULT:
            yield from maintenance.policy(ctx, path, dict(CAPS))
        return {path: (yield from versions_of(ctx, path, learned, self._duplicates))}

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


def _compared(change: FactChange) -> Any:
    """Return what a run compares of a change."""
    return change.value if change[2:] == (None, None, None) else [*change[1:]]


def _call(name: str, arguments: Mapping[str, Any] | None) -> str:
    """Return a call in one line: "book(flight='LH 400')"."""
    inside = ", ".join(f"{key}={shown(value, 40)}" for key, value in masked(arguments or {}).items())
    return f"{name}({inside})" if inside else name


def _erased(part: str) -> NotFound:
    return NotFound(f"the prompt cannot be rebuilt: {part} was erased, or is kept no longer")
