"""Steps and effects inside a LangGraph node: find the running task, and refuse effects that could not be recorded.

Only public names of LangGraph are used, except two keys of a config: `checkpoint_map` and DURABILITY.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

from langgraph.config import get_config
from langgraph.constants import CONFIG_KEY_CHECKPOINTER
from langgraph.errors import GraphBubbleUp
from langgraph.runtime import get_runtime
from langgraph.types import interrupt

from perdure.adapters import Flow, Scope, StepSpec, add_provider
from perdure.errors import NotApproved, NotInRun, UsageError
from perdure.langgraph.configs import DURABILITY, Address
from perdure.langgraph.saver import PerdureSaver

_ID_MAX = 400


class Interrupts:
    """Asks for approval with `interrupt`. `Command(resume=…)` answers with a bool, or a dict of `answer` and `who`."""

    def __init__(self, saver: PerdureSaver, configurable: Mapping[str, Any]) -> None:
        self._saver = saver
        namespace, id_ = _checkpoints(configurable)[0]
        self._address = Address(str(configurable.get("thread_id")), namespace, id_)

    def ask(self, question: dict[str, Any]) -> tuple[Any, str]:
        value = interrupt(question)
        if isinstance(value, dict) and value.keys() == {"answer", "who"}:
            return value["answer"], str(value["who"])
        return value, "resume"

    def forget(self) -> Flow[None]:
        return self._saver._forget_answer(self._address)


def scope_of_node(spec: StepSpec) -> Scope | None:
    """Return the scope of the running node, or None outside of a graph.

    If nothing could be recorded, an effect raises, and a step becomes a plain call (None).
    """
    try:
        config = get_config()
    except RuntimeError:  # not inside a graph
        return None
    configurable: Mapping[str, Any] = config.get("configurable", {})
    info = getattr(get_runtime(), "execution_info", None)
    if info is None:
        return None
    problem = _problem(configurable, blocks=not spec.is_async and _is_on_its_loop(config.get("callbacks")))
    if problem is not None:
        if spec.kind != "effect":
            return None
        raise type(problem)(f"effect {spec.name!r}: {problem}; or say {spec.name}.direct(…) if you mean it")
    saver: PerdureSaver = configurable[CONFIG_KEY_CHECKPOINTER]
    # LangGraph makes one `info` for each attempt of a task, so it identifies the execution.
    return saver._tasks.scope(info, partial(_task, saver, configurable, info.task_id))


def _problem(configurable: Mapping[str, Any], *, blocks: bool) -> Exception | None:
    """Return why a record of this call could not be found again, or None. `blocks`: it blocks the graph's loop."""
    saver = configurable.get(CONFIG_KEY_CHECKPOINTER)
    if not isinstance(saver, PerdureSaver):
        kept = "no checkpointer" if saver is None else f"a {type(saver).__name__} as its checkpointer"
        return NotInRun(
            f"this graph has {kept}, so nothing would be recorded: compile it with checkpointer=PerdureSaver(…)"
        )
    if configurable.get(DURABILITY) == "exit":
        return UsageError(
            'with durability="exit" LangGraph stores no checkpoint before the graph ends, so that after a crash '
            'nothing could tell that this is the same call: use durability="async" (its default) or "sync"'
        )
    if blocks and configurable.get(DURABILITY) != "sync":
        return UsageError(
            "a blocking call in an async node keeps LangGraph from storing the checkpoint that this call belongs to: "
            'make it an async function, or call it in a thread (await asyncio.to_thread(…)), or use durability="sync"'
        )
    thread = str(configurable.get("thread_id"))
    for namespace, _ in _checkpoints(configurable):
        if not saver._checkpointed.has(thread, namespace):
            name = namespace.rpartition("|")[2].partition(":")[0]
            return UsageError(
                f"subgraph {name!r} stores no checkpoints (checkpointer=False), "
                "so that after a crash nothing could tell that this is the same call: leave checkpointer= out there"
            )
    return None


def _checkpoints(configurable: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the checkpoints, of all graphs around a task, that its id is derived from, the outermost first."""
    known: Mapping[str, str] = configurable.get("checkpoint_map") or {}
    parts = str(configurable.get("checkpoint_ns") or "").split("|")
    namespaces: dict[str, str] = {}
    for count in range(len(parts)):
        namespace = "|".join(parts[:count])
        if namespace in known:
            namespaces.setdefault(known[namespace], namespace)  # a task called by a task has the same checkpoint
    return tuple((namespace, id_) for id_, namespace in namespaces.items())


def _task(saver: PerdureSaver, configurable: Mapping[str, Any], id_: str) -> dict[str, Any]:
    thread, checkpoints = str(configurable.get("thread_id")), _checkpoints(configurable)
    namespace = str(configurable.get("checkpoint_ns"))  # the task's: its graph's, its node and its id
    run_id = f"langgraph/{thread}/{namespace}"
    if len(run_id) > _ID_MAX:
        run_id = f"langgraph/{blake2b(run_id.encode(), digest_size=32).hexdigest()}"
    free = (one for outer, _ in checkpoints for one in saver._requested.allowed(thread, outer))
    return {
        "thread": thread,
        "id": id_,
        "name": namespace.rpartition("|")[2].partition(":")[0],
        "run_id": run_id,
        "checkpoints": checkpoints,
        "free": frozenset(free),
        "refusal": saver._requested.current().refusal,
        "questions": Interrupts(saver, configurable),
        "declined": _declined,
        "definite": (GraphBubbleUp,),  # interrupt(): the body runs again from its top when the graph is resumed
    }


def _declined(text: str) -> NotApproved:
    from perdure.langgraph.declined import Declined  # imported late: LangGraph's tools take long to import

    return Declined(text)


def _is_on_its_loop(callbacks: Any) -> bool:
    """Return whether this thread runs the event loop of an async graph.

    In a notebook a blocking graph may run on such a thread too, but it stores its checkpoints on other threads.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return bool(getattr(callbacks, "is_async", True))


add_provider(scope_of_node)
