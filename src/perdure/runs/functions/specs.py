"""What the decorators record about a function, and the registry that finds functions by name.

A worker looks up the function of a stored run by name, and an undo the function of an effect. A name comes from the
code (`travel`, `Agent.book`) or from `name=`. Two durable functions, or two effects, cannot have the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal
from weakref import WeakSet

from perdure.errors import UsageError
from perdure.runs.functions.inputs import Binder
from perdure.runs.functions.retry import Retry
from perdure.values.names import module_name

_CO_GENERATOR, CO_COROUTINE, _CO_ASYNC_GENERATOR = 0x20, 0x80, 0x200


@dataclass(eq=False)
class StepSpec:
    """The options of a step or an effect."""

    fn: Callable[..., Any]
    name: str
    kind: Literal["step", "effect"]
    ignore: tuple[str, ...] = ()
    retry: Retry = field(default_factory=Retry)
    timeout_s: float | None = None
    reconcile: Callable[..., Any] | None = None
    undo: Callable[..., Any] | None = None
    on_doubt: Literal["ask", "retry", "fail"] = "ask"
    deadline_s: float = 60.0
    definite: tuple[type[BaseException], ...] = ()
    approve: Any = None

    @cached_property
    def binder(self) -> Binder:
        return Binder(self.fn, self.ignore, name=self.name)

    @cached_property
    def flavour(self) -> Literal["sync", "async", "generator", "async generator"]:
        return flavour_of(self.fn)

    @cached_property
    def body(self) -> Callable[..., Any]:
        """The function to call. A generator is run to its end, and its chunks are the result."""
        from perdure.runs.calls.bodies import acollected, collected  # imported here, because it is a layer above

        if self.flavour == "generator":
            return collected(self.fn)
        return acollected(self.fn) if self.flavour == "async generator" else self.fn

    @cached_property
    def is_plain(self) -> bool:
        """Whether its first call needs only its body and its commits (`calls/bodies.usual_path`)."""
        return not self.is_async and self.timeout_s is None and self.approve is None

    @property
    def is_async(self) -> bool:
        return self.flavour in ("async", "async generator")


@dataclass
class DurableSpec:
    """The options of a durable function."""

    fn: Callable[..., Any]
    name: str
    version: str = ""  # a run is executed only by code with the same version
    undo_on: tuple[type[BaseException], ...] = ()  # exceptions for which its effects are undone
    timeout_s: float | None = None  # of the whole run, from its creation
    agent: Any = None  # AgentOptions of a team's member, whose function handles one message

    @cached_property
    def binder(self) -> Binder:
        return Binder(self.fn, name=self.name, is_durable=True)

    @cached_property
    def is_async(self) -> bool:
        return flavour_of(self.fn) == "async"


def flavour_of(fn: Callable[..., Any]) -> Literal["sync", "async", "generator", "async generator"]:
    spec = getattr(fn, "perdure", None)
    if (
        isinstance(spec, StepSpec) and spec.is_async
    ):  # a decorated async function is a plain one that returns a coroutine
        return "async"
    flags = getattr(getattr(fn, "__code__", None), "co_flags", 0)
    if flags & _CO_ASYNC_GENERATOR:
        return "async generator"
    if flags & CO_COROUTINE:
        return "async"
    return "generator" if flags & _CO_GENERATOR else "sync"


def said_version(version: str) -> str:
    return f"version {version}" if version else "no version"


def plain_name(fn: Callable[..., Any]) -> str:
    """Return the qualified name of a function, without the function that it was defined in."""
    name = str(getattr(fn, "__qualname__", None) or getattr(fn, "__name__", ""))
    return name.rpartition("<locals>.")[2]


_durables: dict[str, DurableSpec] = {}
_steps: dict[str, StepSpec] = {}
_every_step: WeakSet[StepSpec] = WeakSet()


def add_durable(spec: DurableSpec) -> None:
    _refuse_double(_durables.get(spec.name), spec)
    _durables[spec.name] = spec


def add_step(spec: StepSpec) -> None:
    # Steps may share a name, because the code calls them directly. An effect is looked up by name for its undo.
    if spec.kind == "effect":
        _refuse_double(_steps.get(spec.name), spec)
    _every_step.add(spec)
    _steps.setdefault(spec.name, spec)
    if spec.kind == "effect" or _steps[spec.name].kind == "step":
        _steps[spec.name] = spec


def find_durable(name: str) -> DurableSpec | None:
    return _durables.get(name)


def known_durables() -> dict[str, DurableSpec]:
    return dict(_durables)


def every_step() -> list[StepSpec]:
    """Return all steps and effects decorated in this process, for the drill."""
    return list(_every_step)


def find_step(name: str) -> StepSpec | None:
    return _steps.get(name)


def _refuse_double(known: DurableSpec | StepSpec | None, new: DurableSpec | StepSpec) -> None:
    """Raise UsageError for another function with the same name. A redefinition (reloaded module, test) is allowed."""
    if known is None or "<locals>" in known.fn.__qualname__ or "<locals>" in new.fn.__qualname__:
        return
    old_place, new_place = module_name(known.fn.__module__), module_name(new.fn.__module__)
    same_file = known.fn.__code__.co_filename == new.fn.__code__.co_filename
    if old_place == new_place or same_file or "__main__" in (old_place, new_place):
        return
    raise UsageError(
        f"{new.name!r} is defined in {old_place} and in {new_place}: stored runs could not tell them apart. "
        f"Give one of them a name of its own: name={new_place + '.' + new.name!r}"
    )
