"""`perdure.tools`: offer functions to a model as tools, and run the tool calls that it returns.

Every call has its own scope, named by the tool call's id. So parallel calls replay in whatever order they come. Errors
that the model can fix are returned to it as text; others (doubt, parking, a lost store or lease, a mistake in the code)
are raised in the run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from perdure.agents.formats import (
    ToolCall,
    ToolResult,
    arguments_of,
    error_text,
    label,
    messages,
    parse,
    schema,
    text_of,
)
from perdure.errors import StepFailed, UsageError, ValueProblem
from perdure.runs.calls.decorators import step
from perdure.runs.calls.effects import effect_operation
from perdure.runs.calls.failures import describe_error
from perdure.runs.calls.steps import step_operation
from perdure.runs.calls.timeouts import TimedOut
from perdure.runs.execution.operation import Operation, arun_operation
from perdure.runs.execution.scope import OF_THE_RUN, Scope, ToolName, need_scope
from perdure.runs.functions.schemas import coerce_arguments, parameters_schema
from perdure.runs.functions.specs import DurableSpec, StepSpec, plain_name
from perdure.runs.journal.entries import VALUE, Entry, decompress
from perdure.runs.parallel.branches import Branch
from perdure.runs.parallel.calls import run_branches

NAME: Final = "perdure.tools"
_TOOL_NAME: Final = r"[A-Za-z0-9_-]{1,64}"
# Errors of the run itself. They are raised, never returned to a model.
_NOT_FOR_MODELS: Final = (*OF_THE_RUN, TimedOut)  # TimedOut: of a perdure.timeout around tools.call()


class Tool(NamedTuple):
    """A function that a model may call."""

    name: str
    call: Callable[..., Any]
    spec: StepSpec | DurableSpec

    @property
    def hidden(self) -> tuple[str, ...]:
        """The ignored parameters, such as clients. A model does not see them."""
        return self.spec.ignore if isinstance(self.spec, StepSpec) else ()

    @property
    def parameters(self) -> dict[str, Any]:
        return parameters_schema(self.spec.fn, self.hidden)

    def bound(self, raw: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert a model's arguments to those of the function. Raise ValueError, for the model, if they do not fit."""
        return self.spec.binder.restore(coerce_arguments(self.spec.fn, raw, self.hidden))

    def act(self, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation[Any]:
        """Return the journaled call of a step or an effect."""
        assert isinstance(self.spec, StepSpec)
        receiver = getattr(self.call, "__self__", None)
        whole = args if receiver is None else (receiver, *args)
        return (effect_operation if self.spec.kind == "effect" else step_operation)(scope, self.spec, whole, kwargs)


def tools(functions: Iterable[Callable[..., Any]] | Mapping[str, Callable[..., Any]]) -> Tools:
    """Offer functions to a model as tools.

    Each is a `@perdure.step`, a `@perdure.effect`, a `@perdure.durable` or a plain function, which runs as a step. A
    durable function may ask, sleep and have its own steps; it runs as a part of this run. A mapping renames tools."""
    return Tools(functions)


class Tools:
    """The tools of a model: `schemas()` describes them to its API, `call()` runs the calls that it returns."""

    def __init__(self, functions: Iterable[Callable[..., Any]] | Mapping[str, Callable[..., Any]]) -> None:
        if isinstance(functions, Mapping):
            offered = [_tool(function, name) for name, function in functions.items()]
        elif isinstance(functions, Iterable):
            offered = [_tool(function, None) for function in functions]
        else:
            raise UsageError(f"perdure.tools() takes a list of functions, not {functions!r}")
        self._tools: dict[str, Tool] = {}
        for tool in offered:
            if tool.name in self._tools:
                raise UsageError(
                    f"two tools have the name {tool.name!r}: give one another name, "
                    f'perdure.tools({{"{tool.name}": …, "another_name": …}})'
                )
            self._tools[tool.name] = tool

    def __repr__(self) -> str:
        return f"<Tools {', '.join(self._tools)}>"

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    def schemas(self, style: str = "openai") -> list[dict[str, Any]]:
        """Return the tools in a provider's format: "openai" (chat), "responses", "anthropic" or "plain".

        "responses" is the format of OpenAI's Responses API. The description is the docstring. The idempotency key is
        not a parameter."""
        return [
            schema(style, tool.name, inspect.getdoc(tool.spec.fn) or "", tool.parameters)
            for tool in self._tools.values()
        ]

    def call(self, tool_calls: Any, *, concurrency: int | None = None) -> Any:
        """Run the tools that a model asked for, and return the messages for it, in the same style and order.

        Tool calls are in the format of OpenAI (chat or Responses) or Anthropic, or plain ones:
        `{"id", "name", "arguments"}`. At most `concurrency` of them run at the same time, sync tools on threads. Await
        it in an async run.
        """
        if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
            raise UsageError(f"tools.call(concurrency={concurrency!r}): how many at once, at least 1")
        scope = need_scope("tools.call()")
        if scope.is_async:
            return self._acall(tool_calls, concurrency)
        calls = parse(tool_calls)
        branches = self._branches(scope, calls, self._run)
        answers = run_branches(scope, branches, concurrency)
        return messages(zip(calls, answers, strict=True))

    async def _acall(self, tool_calls: Any, concurrency: int | None) -> list[dict[str, Any]]:
        scope, calls = need_scope("tools.call()"), parse(tool_calls)
        branches = self._branches(scope, calls, self._arun)
        answers = await run_branches(scope, branches, concurrency)
        return messages(zip(calls, answers, strict=True))

    def _branches(self, scope: Scope, calls: list[ToolCall], run: Callable[..., Any]) -> list[Branch]:
        """Make each tool call a branch with its own scope: `<path of this call>.<id of the tool call>.`"""
        scope.check()
        if not calls:
            return []
        path = scope.take()
        scope.execution.check_branch(path)
        labels = [label(call, position) for position, call in enumerate(calls, 1)]
        # If a model gives two calls the same id, the later one is named by its position.
        places = [name if name not in labels[:at] else f"_{at + 1}" for at, name in enumerate(labels)]
        scopes = [scope.inside(f"{path}.{place}.") for place in places]
        return [Branch(at, own, partial(run, own, calls[at])) for at, own in enumerate(scopes)]

    # --- one call, in the context of its own scope

    def _run(self, scope: Scope, call: ToolCall) -> ToolResult:
        ready = self._ready(scope, call)
        if isinstance(ready, ToolResult):
            return ready
        tool, args, kwargs = ready
        try:
            result = tool.call(*args, **kwargs)
            scope.check()
        except Exception as error:
            return _failed(scope, error)
        return _done(scope, tool, result)

    async def _arun(self, scope: Scope, call: ToolCall) -> ToolResult:
        ready = self._ready(scope, call)
        if isinstance(ready, ToolResult):
            return ready
        tool, args, kwargs = ready
        try:
            if isinstance(tool.spec, DurableSpec):
                if not tool.spec.is_async:
                    raise UsageError(f"the durable tool {tool.name!r} is sync, and its run is async: make it async too")
                result = await tool.call(*args, **kwargs)
            else:
                result = await arun_operation(scope, tool.act(scope, args, kwargs))
            scope.check()
        except Exception as error:
            return _failed(scope, error)
        return _done(scope, tool, result)

    def _ready(self, scope: Scope, call: ToolCall) -> tuple[Tool, tuple[Any, ...], dict[str, Any]] | ToolResult:
        """Return the tool and its arguments, or a refusal. A recorded refusal is repeated, even if the code changed."""
        if scope.execution.index.at(f"{scope.prefix}refused"):
            return _recorded_error(scope, "refused", "")
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return _recorded_error(
                scope, "refused", error_text(f"there is no tool {call.name!r}", f"the tools are {known}")
            )
        try:
            raw = arguments_of(call)
            scope.execution.encoded(raw)  # the model can also fix what the journal cannot store
            args, kwargs = tool.bound(raw)
        except UsageError:
            raise
        except (ValueError, ValueProblem) as error:
            return _recorded_error(scope, "refused", error_text(f"the arguments of {call.name} do not fit", str(error)))
        scope.tool = ToolName(tool.name, call.id)
        scope.by_name = isinstance(tool.spec, StepSpec)  # a durable tool's code catches errors by their classes
        return tool, args, kwargs


def _tool(fn: Any, name: str | None) -> Tool:
    spec = getattr(fn, "perdure_durable", None) or getattr(fn, "perdure", None)
    if not isinstance(spec, StepSpec | DurableSpec):
        if not callable(fn) or isinstance(fn, type) or not hasattr(fn, "__code__"):
            raise UsageError(f"perdure.tools() takes functions, and {fn!r} is none; wrap it in one")
        fn = step(fn)
        spec = fn.perdure
    own = spec.fn.__name__ if spec.name == plain_name(spec.fn) else spec.name.replace(".", "_")
    chosen = own if name is None else name
    if not isinstance(chosen, str) or not re.fullmatch(_TOOL_NAME, chosen):
        raise UsageError(f"{chosen!r} cannot be a tool's name: letters, digits, _ and -, at most 64 of them")
    tool = Tool(chosen, fn, spec)
    plan = spec.binder.plan
    if plan.receiver is not None and getattr(fn, "__self__", None) is None:
        raise UsageError(f"the tool {chosen!r} is a method of no object: give it as object.{spec.fn.__name__}")
    missing = [hidden for hidden in tool.hidden if hidden in plan.required]
    if missing:
        raise UsageError(
            f"the tool {chosen!r} needs {missing[0]!r}, which is ignored as an input, so a model cannot give it: "
            "give it a default, or get it in the body"
        )
    tool.parameters  # noqa: B018  # raises now if a type has no JSON Schema
    return tool


def _done(scope: Scope, tool: Tool, result: Any) -> ToolResult:
    """Return the result of a tool for the model. The journal has that of a step; that of a durable tool is added."""
    text = text_of(result)
    return _recorded(scope, "result", text) if isinstance(tool.spec, DurableSpec) else ToolResult(text)


def _failed(scope: Scope, error: Exception) -> ToolResult:
    """Return the error of a tool as a result for the model. Raise it if it is an error of the run itself."""
    scope.check()
    if isinstance(error, _NOT_FOR_MODELS):
        raise error
    name = error.type_name if isinstance(error, StepFailed) else type(error).__name__
    return _recorded_error(scope, "error", error_text(name, describe_error(error, scope.execution.ctx.codec)["text"]))


def _recorded_error(scope: Scope, mark: str, text: str) -> ToolResult:
    return _recorded(scope, mark, text)._replace(is_error=True)


def _recorded(scope: Scope, mark: str, text: str) -> ToolResult:
    """Record a text for the model, or return the recorded one.

    The model's next call has the text among its arguments, so a replay must give the same."""
    execution, path = scope.execution, f"{scope.prefix}{mark}"
    rows = execution.recorded(path, NAME, None)
    if rows:
        recorded = rows[-1].entry.value
        return ToolResult(str(execution.decoded(decompress(recorded or b'""'))))
    execution.journal.buffer(VALUE, Entry(path, NAME, execution.ctx.clock_us(), value=execution.encoded(text)))
    return ToolResult(text)
