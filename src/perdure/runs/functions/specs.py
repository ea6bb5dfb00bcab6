"""What the decorators know of a function: how it is named, bound, retried, settled and undone.

Functions are found again by name: a worker must know which function a stored run wants, and an undo which function an
effect has. Names are those of the code (`travel`, `Agent.book`) or given; two functions cannot have the same.
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
    """A step or an effect."""

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
        """What to call: a generator is run to its end, and its chunks are the result."""
        from perdure.runs.calls.bodies import acollected, collected  # late: the layer above

        if self.flavour == "generator":
            return collected(self.fn)
        return acollected(self.fn) if self.flavour == "async generator" else self.fn

    @cached_property
    def is_plain(self) -> bool:
        """Whether a first call of it is its body and its commits, and nothing else (`calls/bodies.usual_path`)."""
        return not self.is_async and self.timeout_s is None and self.approve is None

    @property
    def is_async(self) -> bool:
        return self.flavour in ("async", "async generator")


@dataclass
class DurableSpec:
    """A durable function."""

    fn: Callable[..., Any]
    name: str
    version: str = ""  # as given; only code that gives the same one runs its runs
    undo_on: tuple[type[BaseException], ...] = ()  # the errors that its effects are undone for

    @cached_property
    def binder(self) -> Binder:
        return Binder(self.fn, name=self.name)

    @cached_property
    def is_async(self) -> bool:
        return flavour_of(self.fn) == "async"


def flavour_of(fn: Callable[..., Any]) -> Literal["sync", "async", "generator", "async generator"]:
    given = getattr(fn, "perdure", None)
    if isinstance(given, StepSpec) and given.is_async:  # decorated: a plain function that returns a coroutine
        return "async"
    flags = getattr(getattr(fn, "__code__", None), "co_flags", 0)
    if flags & _CO_ASYNC_GENERATOR:
        return "async generator"
    if flags & CO_COROUTINE:
        return "async"
    return "generator" if flags & _CO_GENERATOR else "sync"


def said_version(version: str) -> str:
    """A version, for people."""
    return f"version {version}" if version else "no version"


def plain_name(fn: Callable[..., Any]) -> str:
    """The name of a function as the code says it, without the function that it was defined in."""
    name = str(getattr(fn, "__qualname__", None) or getattr(fn, "__name__", ""))
    return name.rpartition("<locals>.")[2]


_durables: dict[str, DurableSpec] = {}
_steps: dict[str, StepSpec] = {}
_every_step: WeakSet[StepSpec] = WeakSet()


def add_durable(spec: DurableSpec) -> None:
    _refuse_double(_durables.get(spec.name), spec)
    _durables[spec.name] = spec


def add_step(spec: StepSpec) -> None:
    # Two steps may share a name: a step is found through the code that calls it. An effect's undo is found by name.
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
    """All that were ever decorated in this process: for the drill."""
    return list(_every_step)


def find_step(name: str) -> StepSpec | None:
    return _steps.get(name)


def _refuse_double(known: DurableSpec | StepSpec | None, new: DurableSpec | StepSpec) -> None:
    """The same function defined again (a reloaded module, a test) is fine; another one with its name is not."""
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
