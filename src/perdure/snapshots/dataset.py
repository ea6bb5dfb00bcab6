"""Threads and runs as chat data: one document each, with messages, tool calls and the outcome, for JSON Lines.

Messages have OpenAI's shape, whatever stored them: a `Conversation`, a LangGraph thread, a plain thread with a list of
messages, or a run, whose steps are read as the tool calls that they were. One tenant's only; every text is redacted
before it leaves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.agents.formats import ToolCall, arguments_of, label, parse, text_of
from perdure.errors import RunError, UsageError
from perdure.log.envelopes import ENVELOPE
from perdure.runs.engine import flows
from perdure.runs.journal.entries import INTENT, WAIT, decompress
from perdure.runs.journal.journal import read_journal
from perdure.runs.journal.rows import FINISHED, value_of
from perdure.storage.program import drive, read
from perdure.values.codec import decode
from perdure.values.langchain_messages import NAMES

if TYPE_CHECKING:
    from perdure.runs.engine.models import RunInfo, Step
    from perdure.snapshots.handle import Snapshot
    from perdure.snapshots.store import SnapshotStore

Redactions = Callable[[str], str] | Iterable[str | re.Pattern[str]]
REDACTED = "[redacted]"
_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
_KINDS = {name: tag.removeprefix("^msg.").removesuffix("_chunk") for tag, name in NAMES.items()}
_CONVERSATION = {"turns", "summary", "first", "session", "manifest"}
Message = dict[str, Any]


def export_dataset(
    store: SnapshotStore | Snapshot, *, redact: Redactions = (), threads: bool = True, runs: bool = True
) -> Iterator[dict[str, Any]]:
    """The conversations and runs of this tenant, of a store or a snapshot, as documents for JSON Lines: `id`, `tenant`,
    `messages` (OpenAI's chat format) and `outcome`. Threads without messages are passed over.

    `redact` is a function from text to text, or regular expressions whose matches become "[redacted]". It is applied to
    every text: contents, arguments, results, names, ids.
    """
    source: Any = getattr(store, "store", store)
    redacted = _redactor(redact)
    tenant = source._context.tenant_name
    for info in source.threads(limit=None) if threads else ():
        if not info.name.startswith("run:") and info.head is not None:
            point = source.thread(info.name).load(raw=True)
            if messages := _of_state(point.state):
                outcome = {"checkpoint": point.id, "at": point.at.isoformat(), "metadata": info.metadata}
                yield _finished(f"thread:{info.name}", tenant, messages, outcome, redacted)
    for run in source.runs(limit=None) if runs else ():
        yield _finished(f"run:{run.id}", tenant, *_of_run(source, run), redacted)


def _redactor(given: Redactions) -> Callable[[str], str]:
    if callable(given):
        return given
    if isinstance(given, str):
        raise UsageError("redact= is a function or a list of regular expressions, not one text")
    patterns = [re.compile(pattern) for pattern in given]

    def redact(text: str) -> str:
        for pattern in patterns:
            text = pattern.sub(REDACTED, text)
        return text

    return redact


def _finished(
    id: str, tenant: str, messages: list[Message], outcome: dict[str, Any], redacted: Callable[[str], str]
) -> dict[str, Any]:
    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return redacted(value)
        if isinstance(value, Mapping):
            return {redacted(str(key)): clean(item) for key, item in value.items()}
        return [clean(item) for item in value] if isinstance(value, list | tuple) else value

    for message in messages:
        message |= {name: clean(message[name]) for name in ("content", "name", "tool_call_id") if name in message}
        for call in message.get("tool_calls", ()):
            function = call["function"]
            call["id"] = redacted(call["id"])
            function["name"], arguments = redacted(function["name"]), clean(function["arguments"])
            function["arguments"] = arguments if isinstance(arguments, str) else text_of(arguments)
    return {"id": redacted(id), "tenant": redacted(tenant), "messages": messages, "outcome": clean(outcome)}


# --- threads


def _of_state(state: Any) -> list[Message]:
    """The messages in a raw state: a conversation's turns, else the first list that holds messages and nothing else."""
    if not isinstance(state, dict):
        return []
    if set(state) == _CONVERSATION:
        summary = [{"role": "system", "content": state["summary"]}] if state["summary"] else []
        return summary + [{"role": turn["role"], "content": turn["text"]} for turn in state["turns"]]
    for value in (state.get("messages"), *(value for name, value in state.items() if name != ENVELOPE)):
        if isinstance(value, list) and value:
            found = [_messages(item) for item in value]
            if all(found):
                return [message for some in found for message in some]
    return []


def _messages(item: Any) -> list[Message]:
    """A message of LangChain, OpenAI or Anthropic in OpenAI's shape, where each tool result is a message of its own;
    none, if it is no message."""
    if not isinstance(item, dict):
        return []
    kind = _KINDS.get(str(item.get("<type>")))
    role = item.get("role") if kind in (None, "chat") else _ROLES.get(kind or "")
    if role not in ("user", "assistant", "system", "developer", "tool"):
        return []
    content = item.get("content")
    results = [block for block in content if _is(block, "tool_result")] if isinstance(content, list) else []
    if results:
        return [
            {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": _text(block.get("content"))}
            for block in results
        ]
    made: Message = {"role": role, "content": _text(content)}
    if calls := _calls(item):
        made["tool_calls"] = [_call(call.id or f"_{at}", call.name, _arguments(call)) for at, call in calls.items()]
    for name in ("tool_call_id", "name"):
        if item.get(name):
            made[name] = str(item[name])
    return [made]


def _calls(item: Mapping[str, Any]) -> dict[int, ToolCall]:
    """The tool calls of a message by their positions, from 1 on."""
    content = item.get("content")
    try:
        return dict(enumerate(parse(item.get("tool_calls") or (content if isinstance(content, list) else ())), 1))
    except UsageError:  # of no known form
        return {}


def _is(block: Any, kind: str) -> bool:
    return isinstance(block, dict) and block.get("type") == kind


def _text(content: Any) -> str:
    if isinstance(content, list):
        texts = [block.get("text") if _is(block, "text") else block for block in content]
        return "\n".join(text for text in texts if isinstance(text, str))
    return "" if content is None else text_of(content)


def _arguments(call: ToolCall) -> Any:
    try:
        return arguments_of(call)
    except ValueError:  # as the model wrote them
        return call.arguments


def _call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# --- runs


def _of_run(store: Any, info: RunInfo) -> tuple[list[Message], dict[str, Any]]:
    handle = store.get_run(info.id)
    given, opened = _recorded(store._context, info.id)
    single = next(iter(given.values())) if isinstance(given, dict) and len(given) == 1 else given
    messages: list[Message] = [] if given is None else [{"role": "user", "content": text_of(single)}]
    messages += _of_steps(handle.steps(), opened)
    outcome: dict[str, Any] = {"status": info.status, "function": info.function, "version": info.version}
    if info.status in FINISHED and info.status != "exported":
        try:
            result = text_of(handle._raw_result())
            if not messages or messages[-1] != {"role": "assistant", "content": result}:
                messages.append({"role": "assistant", "content": result})
        except RunError as error:
            outcome["error"] = str(error)
    return messages, outcome


def _recorded(ctx: Any, id: str) -> tuple[Any, dict[str, Any]]:
    """The arguments of a run; by path, those of its effects and the texts of its questions."""
    tenant, row = drive(ctx.driver, flows.locate(ctx, id))
    text = drive(ctx.driver, read(partial(value_of, tenant, row.run, "args")))
    entries = drive(ctx.driver, read(partial(read_journal, tenant, row)))

    def value(stored: bytes | None) -> Any:
        return None if stored is None else decode(decompress(stored), ctx.codec, raw=True)

    asked = {one.entry.path: (one.entry.extra or {}).get("question") for one in entries if one.kind == WAIT}
    return value(text), asked | {one.entry.path: value(one.entry.value) for one in entries if one.kind == INTENT}


def _of_steps(steps: list[Step], opened: Mapping[str, Any]) -> list[Message]:
    """Steps in order. What answers a model's tool call (its id is in the step's path) becomes the answer of that call,
    a question of the run a turn of each side, any other step a call of its own."""
    messages: list[Message] = []
    answers: dict[str, Message] = {}  # of the tool calls that a model made, by their part of a path
    for step in steps:
        said = _messages(step.result)
        if said and said[0]["role"] == "assistant":
            messages += said
            for at, call in _calls(step.result).items():
                answer = answers[label(call, at)] = {"role": "tool", "tool_call_id": call.id or f"_{at}", "content": ""}
                messages.append(answer)
            continue
        told = step.error if step.error is not None else text_of(step.result)
        parts = step.path.split(".")
        if called := next((answers[part] for part in parts if part in answers), None):
            called["content"] = told
        elif step.kind == "ask":
            messages.append({"role": "assistant", "content": str(opened.get(step.path))})
            if step.status == "done":
                messages.append({"role": "user", "content": told})
        elif step.kind in ("step", "effect", "undo"):
            call_id = f"step-{step.path}"
            calls = [_call(call_id, step.name, opened.get(step.path, {}))]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": call_id, "content": told})
    return messages
