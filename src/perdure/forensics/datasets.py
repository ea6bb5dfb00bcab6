"""Threads and runs as chat data: one document each, with messages, tool calls and the outcome, for JSON Lines.

Messages have OpenAI's shape, whatever stored them: a `Conversation`, a thread with a list of messages, or a run, whose
steps are read as tool calls. One tenant's only. Values are redacted before they become text, so that no quoting hides
what is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.agents.formats import ToolCall, arguments_of, label, message_kind, parse, text_of
from perdure.errors import RunError, UsageError
from perdure.log.envelopes import ENVELOPE
from perdure.runs.calls.state import thread_name
from perdure.runs.engine import flows
from perdure.runs.journal.entries import INTENT, WAIT, decompress
from perdure.runs.journal.journal import read_journal
from perdure.runs.journal.rows import FINISHED, value_of
from perdure.storage.program import drive, read
from perdure.values.codec import decode

if TYPE_CHECKING:
    from perdure.ops.store import Store
    from perdure.runs.engine.models import Step
    from perdure.runs.run_table import RunInfo
    from perdure.snapshots.handle import Snapshot

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
_CONVERSATION = {"turns", "summary", "first", "session", "manifest"}
Message = dict[str, Any]  # its content and the arguments of its calls are values until they were redacted


def export_dataset(store: Store | Snapshot, *, redact: Callable[[str], str] = str) -> Iterator[dict[str, Any]]:
    """Yield the conversations and runs of this tenant as documents for JSON Lines.

    A document has `id`, `tenant`, `messages` (OpenAI's chat format) and `outcome`. Threads without messages, and
    images, are left out.

    `redact` is a function from text to text. It is applied to every text and number: contents, arguments, results,
    names, ids.
    """
    source: Any = getattr(store, "store", store)
    runs = source.runs(limit=None)
    states = {thread_name(run.id) for run in runs}
    for info in source.threads(limit=None):
        if info.name not in states and info.head is not None:
            point = source.thread(info.name).load(raw=True)
            if messages := _messages_of_state(point.state):
                outcome = {"checkpoint": point.id, "at": point.at.isoformat(), "metadata": info.metadata}
                yield _document(source, f"thread:{info.name}", messages, outcome, redact)
    for run in runs:
        yield _document(source, f"run:{run.id}", *_messages_of_run(source, run), redact)


def _document(
    source: Any, id: str, messages: list[Message], outcome: dict[str, Any], redact: Callable[[str], str]
) -> dict[str, Any]:
    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {redact(str(key)): clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            text = redact(str(value))
            return value if text == str(value) else text
        return value

    for message in messages:
        message["content"] = text_of(clean(message["content"]))
        message |= {name: redact(message[name]) for name in ("name", "tool_call_id") if name in message}
        for call in message.get("tool_calls", ()):
            function = call["function"]
            call["id"], function["name"] = redact(call["id"]), redact(function["name"])
            function["arguments"] = text_of(clean(function["arguments"]))
    tenant = redact(source._context.tenant_name)
    return {"id": redact(id), "tenant": tenant, "messages": messages, "outcome": clean(outcome)}


# --- threads


def _messages_of_state(state: Any) -> list[Message]:
    """Return the turns of a conversation, or the first list of a raw state that holds only messages."""
    if not isinstance(state, dict):
        return []
    if set(state) == _CONVERSATION:
        summary = [{"role": "system", "content": state["summary"]}] if state["summary"] else []
        return summary + [{"role": turn["role"], "content": turn["text"]} for turn in state["turns"]]
    for value in (state.get("messages"), *(value for name, value in state.items() if name != ENVELOPE)):
        if isinstance(value, list) and value:
            converted = [_messages(item) for item in value]
            if all(converted):
                return [message for some in converted for message in some]
    return []


def _messages(item: Any) -> list[Message]:
    """Return the messages in OpenAI's shape that a stored message is; [] if it is no message.

    Each tool result is a message of its own."""
    if not isinstance(item, dict):
        return []
    kind = message_kind(str(item.get("<type>")))
    role = item.get("role") if kind in (None, "chat") else _ROLES.get(kind or "")
    if role not in ("user", "assistant", "system", "developer", "tool"):
        return []
    content = item.get("content")
    results = [block for block in content if _is_block(block, "tool_result")] if isinstance(content, list) else []
    if results:
        said = _text(content)
        return [
            {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": _text(block.get("content"))}
            for block in results
        ] + ([{"role": role, "content": said}] if said else [])
    message: Message = {"role": role, "content": _text(content)}
    if calls := _calls(item):
        message["tool_calls"] = [_call(call.id or f"_{at}", call.name, _arguments(call)) for at, call in calls.items()]
    for name in ("tool_call_id", "name"):
        if item.get(name):
            message[name] = str(item[name])
    return [message]


def _choice(result: Any) -> Any:
    """Return the message of a whole chat completion; any other result unchanged."""
    choices = result.get("choices") if isinstance(result, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return first["message"] if isinstance(first, dict) and isinstance(first.get("message"), dict) else result


def _calls(item: Mapping[str, Any]) -> dict[int, ToolCall]:
    """Return the tool calls of a message by their positions, from 1 on."""
    content = item.get("content")
    try:
        return dict(enumerate(parse(item.get("tool_calls") or (content if isinstance(content, list) else ())), 1))
    except UsageError:  # of no known form
        return {}


def _is_block(block: Any, kind: str) -> bool:
    return isinstance(block, dict) and block.get("type") == kind


def _text(content: Any) -> Any:
    """Return the text of a message. A content that is no text is returned unchanged."""
    if isinstance(content, list):
        texts = [block.get("text") if _is_block(block, "text") else block for block in content]
        return "\n".join(text for text in texts if isinstance(text, str))
    return "" if content is None else content


def _arguments(call: ToolCall) -> Any:
    try:
        return arguments_of(call)
    except ValueError:  # as the model wrote them
        return call.arguments


def _call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# --- runs


def _messages_of_run(store: Any, info: RunInfo) -> tuple[list[Message], dict[str, Any]]:
    handle = store.get_run(info.id)
    arguments, opened = _recorded(store._context, info.id)
    single = next(iter(arguments.values())) if isinstance(arguments, dict) and len(arguments) == 1 else arguments
    messages: list[Message] = [] if arguments is None else [{"role": "user", "content": single}]
    messages += _messages_of_steps(handle.steps(), opened)
    outcome: dict[str, Any] = {"status": info.status, "function": info.function, "version": info.version}
    if info.status in FINISHED and info.status != "exported":
        try:
            last = {"role": "assistant", "content": handle._raw_result()}
            messages += [last] if messages[-1:] != [last] else []
        except RunError as error:
            outcome["error"] = str(error)
    return messages, outcome


def _recorded(ctx: Any, id: str) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a run, and by path those of its effects and the texts of its questions."""
    tenant, row = drive(ctx.driver, flows.locate(ctx, id))
    text = drive(ctx.driver, read(partial(value_of, tenant, row.run, "args")))
    entries = drive(ctx.driver, read(partial(read_journal, tenant, row)))

    def value(stored: bytes | None) -> Any:
        return None if stored is None else decode(decompress(stored), ctx.codec, raw=True)

    asked = {one.entry.path: (one.entry.extra or {}).get("question") for one in entries if one.kind == WAIT}
    return value(text), asked | {one.entry.path: value(one.entry.value) for one in entries if one.kind == INTENT}


def _messages_of_steps(steps: list[Step], opened: Mapping[str, Any]) -> list[Message]:
    """Return the messages of steps, in order.

    What a step recorded inside a model's tool call becomes the answer of that call: the last of them is what the model
    saw. What undid the call later, it did not see. A question becomes a turn of each side, any other step a call with
    its answer.
    """
    messages: list[Message] = []
    answers: dict[str, Message] = {}  # of the tool calls that a model made, by their part of a path
    for step in steps:
        answer_of_model = _choice(step.result)
        said = _messages(answer_of_model)
        if said and said[0]["role"] == "assistant":
            messages += said
            for at, call in _calls(answer_of_model).items():
                answer = answers[label(call, at)] = {"role": "tool", "tool_call_id": call.id or f"_{at}", "content": ""}
                messages.append(answer)
            continue
        answered = step.error if step.error is not None else step.result
        parts = step.path.split(".")
        if called := next((answers[part] for part in parts if part in answers), None):
            if step.kind not in ("undo", "ask"):
                called["content"] = answered
        elif step.kind == "ask":
            messages.append({"role": "assistant", "content": str(opened.get(step.path))})
            if step.status == "done":
                messages.append({"role": "user", "content": answered})
        elif step.kind in ("step", "effect", "undo"):
            call_id = f"step-{step.path}"
            calls = [_call(call_id, step.name, opened.get(step.path, {}))]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": call_id, "content": answered})
    return messages
