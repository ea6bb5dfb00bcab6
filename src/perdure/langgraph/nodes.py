"""Steps and effects inside a LangGraph node: finds the task that is running, and says where nothing could be recorded.

A node's code is LangGraph's to run again, also after an error, so a failure is no end here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

import langgraph.types
from langgraph.checkpoint.serde.types import RESUME
from langgraph.errors import GraphBubbleUp, GraphInterrupt

from perdure.adapters import Flow, Scope, StepSpec, add_provider
from perdure.errors import NotInRun, UsageError
from perdure.langgraph.configs import Address
from perdure.langgraph.saver import PerdureSaver

_ID_MAX = 400


class Interrupts:
    """Questions of effects that want approval, as LangGraph asks: by `interrupt`, whose answer is given with
    `Command(resume=…)`. It is true or false, or a dict of `answer` and `who`.

    `interrupt` itself gives an answer to the call that comes first: tools that run in parallel would mix them up.
    """

    def __init__(self, saver: PerdureSaver, configurable: Mapping[str, Any]) -> None:
        self._saver = saver
        self._task, self._pad = configurable, configurable["__pregel_scratchpad"]
        self._newest: Any = None  # of the answers, taken and not accepted yet

    @property
    def answered(self) -> int:
        return len(self._pad.resume)

    def answer(self, number: int) -> tuple[Any, str] | None:
        given: list[Any] = self._pad.resume
        if number == len(given) and self._newest is None:
            self._newest = self._pad.get_null_resume(True)
        value = given[number] if number < len(given) else self._newest
        if value is None:
            return None
        if isinstance(value, dict) and value.keys() == {"answer", "who"}:
            return value["answer"], str(value["who"])
        return value, "resume"

    def accept(self, number: int) -> None:
        given: list[Any] = self._pad.resume
        if number == len(given):
            given.append(self._newest)
            self._newest = None
        self._task["__pregel_send"]([(RESUME, list(given))])  # stored if the task stops again
        self.passed(1)

    def forget(self) -> Flow[None]:
        namespace, id_ = _checkpoints(self._task)[0]
        return self._saver._forget_answer(Address(str(self._task.get("thread_id")), namespace, id_))

    def passed(self, count: int) -> None:
        for _ in range(count):
            self._pad.interrupt_counter()

    def ask(self, question: dict[str, str]) -> GraphInterrupt:
        namespace = str(self._task["checkpoint_ns"])
        made = langgraph.types.Interrupt.from_ns(question, namespace)
        if hasattr(langgraph.types, "_interrupt_id"):  # each of a task's has an id of its own since 1.2.20
            made.id = langgraph.types._interrupt_id(namespace, self.answered)
        return GraphInterrupt((made,))


def scope_of_node(spec: StepSpec) -> Scope | None:
    """The scope of the node that is running, if it is a node of a graph with a Perdure saver. Raises where an effect
    would not be found again after a crash; a step is a plain call there."""
    from langgraph.config import get_config

    try:
        config = get_config()
    except RuntimeError:  # not inside a graph
        return None
    configurable: Mapping[str, Any] = config.get("configurable", {})
    scratchpad = configurable.get("__pregel_scratchpad")
    if configurable.get("__pregel_task_id") is None or scratchpad is None:
        return None
    problem = _problem(configurable, blocks=not spec.is_async and _is_on_its_loop(config.get("callbacks")))
    if problem is not None:
        if spec.kind != "effect":
            return None
        raise type(problem)(f"effect {spec.name!r}: {problem}; or say {spec.name}.direct(…) if you mean it")
    # The scratchpad is the task's; an attempt of LangGraph's own retries counts its calls anew.
    info = getattr(configurable.get("__pregel_runtime"), "execution_info", None)
    execution = (id(scratchpad), int(getattr(info, "node_attempt", 1)))
    saver: PerdureSaver = configurable["__pregel_checkpointer"]
    return saver._tasks.scope(execution, scratchpad, partial(_task, saver, configurable))


def _problem(configurable: Mapping[str, Any], *, blocks: bool) -> Exception | None:
    """Why what is recorded here would not be found again. `blocks`: it is a blocking call on the graph's loop."""
    saver = configurable.get("__pregel_checkpointer")
    if not isinstance(saver, PerdureSaver):
        kept = "no checkpointer" if saver is None else f"a {type(saver).__name__} as its checkpointer"
        return NotInRun(
            f"this graph has {kept}, so nothing would be recorded: compile it with checkpointer=PerdureSaver(…)"
        )
    if configurable.get("__pregel_durability") == "exit":
        return UsageError(
            'with durability="exit" LangGraph stores no checkpoint before the graph ends, so that after a crash '
            'nothing could tell that this is the same call: use durability="async" (its default) or "sync"'
        )
    if blocks and configurable.get("__pregel_durability") != "sync":
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
    """The checkpoints that a task's id follows from: of the graphs around it, the outermost first."""
    known: Mapping[str, str] = configurable.get("checkpoint_map") or {}
    parts = str(configurable.get("checkpoint_ns") or "").split("|")
    found: dict[str, str] = {}
    for count in range(len(parts)):
        namespace = "|".join(parts[:count])
        if namespace in known:
            found.setdefault(known[namespace], namespace)  # a task that a task calls stands on the same checkpoint
    return tuple((namespace, id_) for id_, namespace in found.items())


def _task(saver: PerdureSaver, configurable: Mapping[str, Any]) -> dict[str, Any]:
    thread, checkpoints = str(configurable.get("thread_id")), _checkpoints(configurable)
    namespace = str(configurable.get("checkpoint_ns"))  # the task's: its graph's, its node and its id
    run_id = f"langgraph/{thread}/{namespace}"
    if len(run_id) > _ID_MAX:
        run_id = f"langgraph/{blake2b(run_id.encode(), digest_size=32).hexdigest()}"
    free = (id_ for namespace, _ in checkpoints for id_ in saver._requested.allowed(thread, namespace))
    return {
        "thread": thread,
        "id": str(configurable["__pregel_task_id"]),
        "name": namespace.rpartition("|")[2].partition(":")[0],
        "run_id": run_id,
        "checkpoints": checkpoints,
        "free": frozenset(free),
        "refusal": saver._requested.current().refusal,
        "questions": Interrupts(saver, configurable),
        "definite": (GraphBubbleUp,),  # interrupt(): the body runs again from its top when the graph is resumed
    }


def _is_on_its_loop(callbacks: Any) -> bool:
    """Whether this thread runs the event loop that an async graph lives on. A blocking graph may be run on one too, in
    a notebook, and stores its checkpoints elsewhere."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return bool(getattr(callbacks, "is_async", True))


add_provider(scope_of_node)
