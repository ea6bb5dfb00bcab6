"""The chat that every LangGraph benchmark holds: one graph, one node that answers, a saver underneath.

A turn is one `invoke` with a question of 40 to 60 words, answered by as many; the words are drawn as in `Prose`, so
no sentence ever comes again. LangGraph gives the messages their ids, keeps three checkpoints and two lots of writes
for each turn, and writes as it does when no durability is set. Rivals hold the same chat in blocks, in turns, and
at the end they must all know the same messages. Closing counts: what a saver has put off is part of its time.

What must never happen here: a rival that does less than the others. The saver that stores nothing still hands out its
latest checkpoint and pending writes, so that the graph does the same work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    PendingWrite,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import _messages_delta_reducer
from langgraph.graph.state import CompiledStateGraph

from bench.measure import Prose, in_turns, milliseconds, pack, seconds
from perdure.langgraph import PerdureSaver, columns
from perdure.values import accelerator

WORDS = (40, 60)
TURNS_PER_BLOCK = 20
THREADS_PER_BLOCK = 10
CHECKPOINTS_PER_TURN = 3

Graph = CompiledStateGraph[Any, Any, Any, Any]
Saver = BaseCheckpointSaver[Any]
Answers = Mapping[str, str]


class DeltaState(TypedDict):
    """LangGraph's own way of not storing every message again with every checkpoint (beta)."""

    messages: Annotated[list[AnyMessage], DeltaChannel(_messages_delta_reducer)]


class NothingSaver(BaseCheckpointSaver[int]):
    """Stores nothing: it hands back, by reference, the latest checkpoint it was given for each thread."""

    def __init__(self) -> None:
        super().__init__()
        self._latest: dict[tuple[str, str], CheckpointTuple] = {}

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return self._latest.get(_place(config))

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        thread, namespace = place = _place(config)
        at: RunnableConfig = {
            "configurable": {"thread_id": thread, "checkpoint_ns": namespace, "checkpoint_id": checkpoint["id"]}
        }
        parent = config if get_checkpoint_id(config) else None
        metadata = get_checkpoint_metadata(config, metadata)
        self._latest[place] = CheckpointTuple(at, checkpoint, metadata, parent, [])
        return at

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        latest = self._latest.get(_place(config))
        if latest is not None and latest.checkpoint["id"] == get_checkpoint_id(config):
            pending: list[PendingWrite] = latest.pending_writes or []
            pending += ((task_id, channel, value) for channel, value in writes)


def _place(config: RunnableConfig) -> tuple[str, str]:
    settings = config["configurable"]
    return str(settings["thread_id"]), settings.get("checkpoint_ns", "")


@contextmanager
def _stock_postgres(url: str) -> Iterator[Saver]:
    with PostgresSaver.from_conn_string(url) as saver:
        saver.setup()
        yield saver


@contextmanager
def _nothing(location: str) -> Iterator[Saver]:
    yield NothingSaver()


SAVERS: dict[str, Callable[[str], AbstractContextManager[Saver]]] = {
    "sqlite": SqliteSaver.from_conn_string,
    "postgres": _stock_postgres,
    "perdure": PerdureSaver,
    "perdure-python": PerdureSaver,  # without the accelerator
    "nothing": _nothing,
}


def choose_columns(kind: str) -> bool:
    """From here on the accelerator is used as this kind of saver does. Returns whether it is used."""
    has_speed = columns.speed is not None and kind != "perdure-python"
    columns.columns_class = columns.SpeedColumns if has_speed else columns.PlainColumns
    accelerator.speed = columns.speed if has_speed else None
    return has_speed


def graph_of(saver: Saver, answers: Answers, state: type = MessagesState, *, in_place: bool = False) -> Graph:
    """The chat graph. Its model looks the answer up. `in_place`: and it changes old messages."""

    def answer(state: Any) -> dict[str, list[AnyMessage]]:
        if in_place:
            for at in (0, len(state["messages"]) // 2):
                state["messages"][at].additional_kwargs["messages"] = len(state["messages"])
        return {"messages": [AIMessage(answers[state["messages"][-1].content])]}

    builder: Any = StateGraph(state)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    compiled: Graph = builder.compile(checkpointer=saver)
    return compiled


def thread(name: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


def texts(turns: int, *, seed: int = 20_260_101) -> dict[str, str]:
    """Questions and their answers."""
    prose = Prose(seed)

    def text() -> str:
        return prose.words_of(prose.random.randint(*WORDS))

    return {text(): text() for _ in range(turns)}


def warm_up() -> None:
    """What the first chat of a process pays for LangGraph itself must not be put down to one of the rivals."""
    answers = texts(3)
    graph = graph_of(NothingSaver(), answers)
    for question in answers:
        graph.invoke({"messages": [HumanMessage(question)]}, thread("warm"))
    graph.get_state(thread("warm"))


def floor_bytes(answers: Answers) -> int:
    """What the texts take, each once and all compressed together by zstd level 3."""
    return len(pack(list(answers.items())))


@dataclass
class Rival:
    """A saver, where it stores, and how long the chat took with it."""

    kind: str
    location: str = ""
    state: type = MessagesState
    in_place: bool = False
    took_s: float = 0.0
    cpu_s: float = 0.0
    get_state_ms: float = 0.0
    _open: ExitStack = field(default_factory=ExitStack)

    def open(self, answers: Answers) -> Graph:
        saver = self._open.enter_context(SAVERS[self.kind](self.location))
        return graph_of(saver, answers, self.state, in_place=self.in_place)

    def close(self) -> None:
        self.took_s += seconds(self._open.close)


def long_chat(rivals: Sequence[Rival], turns: int, *, get_states: int) -> Answers:
    """One thread, many turns. At the end each rival says `get_states` times what the state is."""
    warm_up()
    answers = texts(turns)
    questions = list(answers)
    graphs = [rival.open(answers) for rival in rivals]
    config = thread("chat")
    blocks = [questions[start : start + TURNS_PER_BLOCK] for start in range(0, turns, TURNS_PER_BLOCK)]
    for number, block in enumerate(blocks):
        _in_turns(number, rivals, graphs, [(config, question) for question in block])
    _check(graphs, config, answers)
    times = in_turns(get_states, *(partial(graph.get_state, config) for graph in graphs))
    for rival, took in zip(rivals, times, strict=True):
        rival.get_state_ms = milliseconds(took)
        rival.close()
    return answers


def short_chats(rivals: Sequence[Rival], threads: int, turns: int) -> Answers:
    """Many threads of a few turns, one after the other."""
    warm_up()
    answers = texts(threads * turns)
    questions = iter(answers)
    graphs = [rival.open(answers) for rival in rivals]
    work = [(thread(f"chat-{number}"), next(questions)) for number in range(threads) for _ in range(turns)]
    size = THREADS_PER_BLOCK * turns
    for number, start in enumerate(range(0, len(work), size)):
        _in_turns(number, rivals, graphs, work[start : start + size])
    of_last = dict(list(answers.items())[-turns:])
    _check(graphs, work[-1][0], of_last)
    for rival in rivals:
        rival.close()
    return answers


def _in_turns(
    number: int, rivals: Sequence[Rival], graphs: Sequence[Graph], work: Sequence[tuple[RunnableConfig, str]]
) -> None:
    """A block of turns, with one rival after the other. Who is first changes with each block."""

    def talk(graph: Graph) -> None:
        for config, question in work:
            graph.invoke({"messages": [HumanMessage(question)]}, config)

    for turn in range(len(rivals)):
        which = (turn + number) % len(rivals)
        choose_columns(rivals[which].kind)
        began_s = time.process_time()
        rivals[which].took_s += seconds(partial(talk, graphs[which]))
        rivals[which].cpu_s += time.process_time() - began_s


def _check(graphs: Sequence[Graph], config: RunnableConfig, answers: Answers) -> None:
    """All rivals know the same messages, each with its type and what was changed in it."""
    changes: list[list[Any]] = []
    expected = [pair for question, answer in answers.items() for pair in (("human", question), ("ai", answer))]
    for graph in graphs:
        messages = graph.get_state(config).values["messages"]
        found = [(message.type, message.content) for message in messages]
        changes.append([message.additional_kwargs for message in messages])
        if found != expected:
            raise RuntimeError(f"{type(graph.checkpointer).__name__} has {len(found)} messages, and not what was said")
    if any(change != changes[0] for change in changes):
        raise RuntimeError("what was changed in place is known to one rival and not to another")
