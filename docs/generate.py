"""Writes docs/reference/api.md from public names, signatures and docstrings: `python docs/generate.py`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import perdure
import perdure.agents
import perdure.encryption
import perdure.forensics
import perdure.langgraph
import perdure.memory
import perdure.ops
import perdure.regions
import perdure.snapshots
import perdure.testing

PAGE = Path(__file__).parent / "reference" / "api.md"
HEAD = """# The Python API

This page lists every public name of `import perdure`. It is generated from the docstrings (`python docs/generate.py`).
Names that are not listed may change.

Every method of a store, `store.ops`, a run, a thread and a memory that does I/O has an async twin with the same
arguments, whose name begins with `a` (`save`, `asave`). The twins of `history` and `stream` are async iterators. You
may pass the id of a checkpoint or a run instead of the object, and the path or the number of a step instead of a
`Step`.

If two names differ only in case, you call the lower one, and the upper one is its result: `step` and `Step`, `state`
and `State`.
"""


def signature(name: str, function: Any) -> str:
    """The call as it is written, without `self`."""
    found = inspect.signature(function)
    parameters = [one for one in found.parameters.values() if one.name not in ("self", "cls")]
    plain = [one.replace(annotation=Plain(one.annotation), default=default(one.default)) for one in parameters]
    return name + str(found.replace(parameters=plain, return_annotation=Plain(found.return_annotation)))


class Plain:
    """An annotation or a default that prints as its source does."""

    def __init__(self, value: Any) -> None:
        self.text = value if isinstance(value, str) else getattr(value, "__name__", str(value))

    def __repr__(self) -> str:
        return "Any" if self.text == "_empty" else self.text


def default(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return value
    if type(value) is object:  # stands for "not given"
        return Plain("…")
    return Plain(value) if inspect.isclass(value) else value


def described(value: Any) -> str:
    return inspect.getdoc(value) or ""


def methods(cls: type) -> list[tuple[str, Any]]:
    """Public functions and properties of a class, in the order they are written; async twins are left out."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("perdure"):
            found.update({name: value for name, value in vars(base).items() if not name.startswith("_")})
    kept = {name: value for name, value in found.items() if inspect.isfunction(value) or isinstance(value, property)}
    return [(name, value) for name, value in kept.items() if not (name[0] == "a" and name[1:] in kept)]


def of_class(name: str, cls: type) -> list[str]:
    lines = [f"## {name}", "", described(cls), ""]
    if fields := [f"`{field}: {kind}`" for field, kind in fields_of(cls).items()]:
        lines += ["Fields: " + ", ".join(fields) + ".", ""]
    for method, value in methods(cls):
        if isinstance(value, property):
            lines += [f"### `{method}`", "", described(value), ""]
        else:
            lines += [f"### `{method}()`", "", *called(method, value), described(value), ""]
    return lines


def called(name: str, value: Any) -> list[str]:
    """The signature as a block of code, one parameter a line where it is long."""
    if not callable(value) or inspect.isclass(value):
        return []
    text = signature(name, value)
    if len(text) > 110:
        text = text.replace("(", "(\n    ", 1).replace(", *, ", ",\n    *, ").replace(") -> ", "\n) -> ")
    return ["```text", text, "```", ""]


def fields_of(cls: type) -> dict[str, str]:
    if not (hasattr(cls, "__dataclass_fields__") or hasattr(cls, "__struct_fields__")):
        return {}
    kinds = {name: kind for base in reversed(cls.__mro__) for name, kind in inspect.get_annotations(base).items()}
    return {name: str(kind) for name, kind in kinds.items() if not name.startswith("_") and "ClassVar" not in str(kind)}


def section(title: str, module: Any, names: list[str]) -> list[str]:
    """Functions first, then classes, then errors, each in alphabetical order."""
    values = {name: getattr(module, name) for name in sorted(names, key=str.lower)}
    errors = {name: value for name, value in values.items() if inspect.isclass(value) and issubclass(value, Exception)}
    classes = {name: value for name, value in values.items() if inspect.isclass(value) and name not in errors}
    lines = [f"# {title}", ""]
    for name, value in values.items():
        if inspect.ismodule(value) or (not callable(value) and hasattr(value, "__all__")):
            lines += [f"## {name}", "", described(value), ""]
            for part in value.__all__:
                one = getattr(value, part)
                lines += [
                    f"### {name}.{part}",
                    "",
                    *called(f"{module.__name__}.{name}.{part}", one),
                    described(one),
                    "",
                ]
        elif callable(value) and name not in classes and name not in errors:
            lines += [f"## {name}", "", *called(f"{module.__name__}.{name}", value), described(value), ""]
    for name, value in classes.items():
        lines += of_class(name, value)
    if errors:
        lines += ["## Errors", "", "| error | is a | |", "|---|---|---|"]
        for name, value in errors.items():
            lines.append(f"| `{name}` | `{value.__bases__[0].__name__}` | {' '.join(described(value).split())} |")
        lines.append("")
    return lines


def errors() -> list[str]:
    """The errors that are not at the top level too."""
    found = {name for name, value in vars(perdure.errors).items() if inspect.isclass(value) and name[0] != "_"}
    own = {name for name in found if getattr(perdure.errors, name).__module__ == "perdure.errors"}
    return sorted(own - set(perdure.__all__))


# Their modules are not imported here: each imports its whole framework.
FRAMEWORKS = """
## Agent frameworks

| module | names | page |
|---|---|---|
| `perdure.adk` | `durable`, `PerdureSessionService`, `PerdureMemoryService` | [Google ADK](../how-to/adk.md) |
| `perdure.agent_framework` | `durability`, `PerdureHistoryProvider` | [Agent Framework](../how-to/agent-framework.md) |
| `perdure.claude_agent` | `PerdureSessionStore` | [Claude Agent SDK](../how-to/claude-agent.md) |
| `perdure.langchain_history` | `PerdureChatMessageHistory` | [LangGraph](../how-to/langgraph.md#chat-histories) |
| `perdure.openai_agents` | `durable`, `run`, `PerdureSession` | [OpenAI Agents SDK](../how-to/openai-agents.md) |
| `perdure.pydantic_ai` | `PerdureDurability`, `emit_events` | [Pydantic AI](../how-to/pydantic-ai.md) |
"""


def page() -> str:
    from perdure.ops.operations import Operations

    lines = [HEAD]
    lines += section("perdure", perdure, [name for name in perdure.__all__ if not name.startswith("_")])
    lines += of_class("store.ops", Operations)
    lines += section("perdure.ops", perdure.ops, list(perdure.ops.__all__))
    lines += section("perdure.encryption", perdure.encryption, list(perdure.encryption.__all__))
    lines += section("perdure.agents", perdure.agents, list(perdure.agents.__all__))
    lines += section("perdure.memory", perdure.memory, list(perdure.memory.__all__))
    lines += section("perdure.snapshots", perdure.snapshots, list(perdure.snapshots.__all__))
    lines += section("perdure.forensics", perdure.forensics, list(perdure.forensics.__all__))
    lines += section("perdure.regions", perdure.regions, list(perdure.regions.__all__))
    lines += section("perdure.testing", perdure.testing, list(perdure.testing.__all__))
    lines += section("perdure.errors", perdure.errors, errors())
    lines += section("perdure.langgraph", perdure.langgraph, list(perdure.langgraph.__all__))
    lines.append(FRAMEWORKS)
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(PAGE.write_text(page()) and None)
