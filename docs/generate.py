"""Writes docs/reference/api.md from public names, signatures and docstrings: `python docs/generate.py`."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import perdure
import perdure.agents
import perdure.cosmos
import perdure.encryption
import perdure.forensics
import perdure.langchain
import perdure.langgraph
import perdure.memory
import perdure.ops
import perdure.regions
import perdure.snapshots
import perdure.teams
import perdure.testing
from perdure.ops.operations import Operations

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
    if not any(hasattr(cls, mark) for mark in ("__dataclass_fields__", "__struct_fields__", "_field_defaults")):
        return {}
    kinds = {name: kind for base in reversed(cls.__mro__) for name, kind in inspect.get_annotations(base).items()}
    texts = {name: str(getattr(kind, "__forward_arg__", kind)) for name, kind in kinds.items()}  # of a named tuple
    return {name: text for name, text in texts.items() if not name.startswith("_") and "ClassVar" not in text}


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
| `perdure.langchain_history` | `PerdureChatMessageHistory` | [Chat histories](../how-to/chat-histories.md) |
| `perdure.openai_agents` | `durable`, `run`, `PerdureSession` | [OpenAI Agents SDK](../how-to/openai-agents.md) |
| `perdure.pydantic_ai` | `PerdureDurability`, `emit_events` | [Pydantic AI](../how-to/pydantic-ai.md) |
| `perdure.strands` | `durability`, `PerdureSessionManager` | [Strands](../how-to/strands.md) |
"""


def sections() -> list[tuple[Any, list[str]]]:
    """The public modules with their names, in the order of the page."""
    parts = (
        perdure.ops,
        perdure.encryption,
        perdure.agents,
        perdure.memory,
        perdure.snapshots,
        perdure.teams,
        perdure.forensics,
        perdure.regions,
        perdure.testing,
    )
    own = [name for name in perdure.__all__ if not name.startswith("_")]
    listed = [(perdure, own), *((part, list(part.__all__)) for part in parts)]
    return [
        *listed,
        (perdure.errors, errors()),
        (perdure.langchain, ["mask_observations"]),
        (perdure.langgraph, list(perdure.langgraph.__all__)),
        (perdure.cosmos, list(perdure.cosmos.__all__)),
    ]


def public_classes() -> list[type]:
    """The classes that have a place on the page because they are public names."""
    values = (getattr(module, name) for module, names in sections() for name in names)
    return [Operations, *(value for value in values if inspect.isclass(value))]


def results() -> list[type]:
    """The other classes whose objects public calls return: one gets them without naming them."""
    known = public_classes()
    values = [getattr(module, name) for module, names in sections() for name in names]
    calls = [value for value in values if inspect.isroutine(value)]
    for cls in known:
        calls += [value.fget if isinstance(value, property) else value for _, value in methods(cls)]
    found = {cls for call in calls for cls in returned(call)} - set(known)
    return sorted(found, key=lambda cls: cls.__name__.lower())


def returned(call: Any) -> list[type]:
    """The classes of Perdure that the annotation of a call's result names."""
    module = sys.modules[inspect.unwrap(call).__module__]
    said = Plain(inspect.signature(call).return_annotation).text
    named = [class_named(word, module) for word in re.findall(r"[A-Za-z_][\w.]*", said)]
    return [cls for cls in named if cls is not None and cls.__name__[0] != "_"]


def class_named(word: str, module: ModuleType) -> type | None:
    """The class of Perdure that an annotation in a module names, also if only type checkers import it."""
    first, *others = word.split(".")
    value = vars(module).get(first)
    if value is None and module.__name__.startswith("perdure"):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.ImportFrom) and node.module and first in {alias.name for alias in node.names}:
                value = getattr(import_module(node.module), first)
    for part in others:
        value = getattr(value, part, None)
    return value if inspect.isclass(value) and value.__module__.startswith("perdure") else None


def page() -> str:
    lines = [HEAD]
    for module, names in sections():
        lines += section(module.__name__, module, names)
        if module is perdure:
            lines += of_class("store.ops", Operations)
    lines.append(FRAMEWORKS)
    lines += ["# Results", "", "Calls return objects of these classes. You need not import them.", ""]
    for cls in results():
        lines += of_class(cls.__name__, cls)
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(PAGE.write_text(page()) and None)
