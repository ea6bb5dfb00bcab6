"""Sessions of other frameworks: 1,000 items are appended as an agent adds them, beside the frameworks' SQL sessions.

The stock session on SQLAlchemy is judged, because it is the one for servers. The floor is one bare commit. Sessions
that are plain SQLite make one commit too, so they are printed beside ours without a bar.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import orjson

import perdure
from bench.measure import KB, BareTable, Row, file_bytes, seconds
from bench.workload import Writer

APPEND_BAR, FLAT_BAR, SIZE_BAR = 3.0, 1.5, 1.0
Append = Callable[[list[Any]], Coroutine[Any, Any, object]]


def openai_session(folder: Path, count: int) -> list[Row]:
    """Append to a session of the OpenAI Agents SDK, beside the two SQL sessions that ship with it."""
    from agents import SQLiteSession
    from agents.extensions.memory import SQLAlchemySession

    from perdure.openai_agents import PerdureSession

    folder = _folder(folder, "openai")
    items = _items(count)
    sqlite = SQLiteSession("chat", folder / "sqlite.db")
    url = f"sqlite+aiosqlite:///{folder / 'alchemy.db'}"
    alchemy = SQLAlchemySession.from_url("chat", url=url, create_tables=True)

    async def check(session: PerdureSession) -> None:
        assert await session.get_items() == await alchemy.get_items() == await sqlite.get_items() == items

    with asyncio.Runner() as loop, perdure.open(str(folder / "ours.db")) as store:
        session = PerdureSession("chat", store)
        for each in (alchemy, sqlite):
            loop.run(each.get_items())  # makes the tables
        appends: dict[str, Append] = {
            "ours": session.add_items,
            "alchemy": alchemy.add_items,
            "sqlite": sqlite.add_items,
        }
        empty, times = _timed(loop, folder, appends, _batches(items))
        loop.run(check(session))
        loop.run(alchemy.engine.dispose())
        sqlite.close()
    peers = {"alchemy": "SQLAlchemySession", "sqlite": "SQLiteSession"}
    return _rows("OpenAI Agents", folder, empty, times, peers)


def adk_session(folder: Path, count: int) -> list[Row]:
    """Append events to a session of ADK, beside its two SQL services."""
    from google.adk.events.event import Event
    from google.adk.sessions.base_session_service import BaseSessionService
    from google.adk.sessions.database_session_service import DatabaseSessionService
    from google.adk.sessions.sqlite_session_service import SqliteSessionService
    from google.genai import types

    from perdure.adk import PerdureSessionService

    folder = _folder(folder, "adk")
    writer = Writer(8)
    texts = [writer.prose(200) for _ in range(count)]
    alchemy = DatabaseSessionService(f"sqlite+aiosqlite:///{folder / 'alchemy.db'}")
    sqlite = SqliteSessionService(str(folder / "sqlite.db"))
    place: dict[str, Any] = {"app_name": "bench", "user_id": "ann", "session_id": "chat"}

    async def appending(service: BaseSessionService) -> Append:
        session = await service.create_session(**place)

        async def append(batch: list[str]) -> None:
            for text in batch:
                await service.append_event(session, Event(author="bench", content=types.ModelContent(text)))

        return append

    async def check(*services: BaseSessionService) -> None:
        for service in services:
            stored = await service.get_session(**place)
            contents = [event.content for event in stored.events] if stored is not None else []
            parts = [part for content in contents for part in (content and content.parts) or ()]
            assert [part.text for part in parts] == texts

    with asyncio.Runner() as loop, perdure.open(str(folder / "ours.db")) as store:
        services = {"ours": PerdureSessionService(store), "alchemy": alchemy, "sqlite": sqlite}
        appends = {name: loop.run(appending(service)) for name, service in services.items()}
        empty, times = _timed(loop, folder, appends, [[text] for text in texts])
        loop.run(check(*services.values()))
        loop.run(alchemy.close())
    peers = {"alchemy": "DatabaseSessionService", "sqlite": "SqliteSessionService"}
    return _rows("Google ADK", folder, empty, times, peers)


def llama_index_chat(folder: Path, count: int) -> list[Row]:
    """Add messages to a chat store of LlamaIndex, beside its SQL store."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore

    from perdure.llama_index import PerdureChatStore

    folder = _folder(folder, "llama_index")
    writer = Writer(9)
    texts = [writer.prose(200) for _ in range(count)]
    alchemy = SQLAlchemyChatStore("chats", f"sqlite+aiosqlite:///{folder / 'alchemy.db'}")

    with asyncio.Runner() as loop, perdure.open(str(folder / "ours.db")) as store:
        ours = PerdureChatStore(store)
        loop.run(alchemy.get_messages("chat"))  # makes the tables

        async def append(batch: list[str]) -> None:
            for text in batch:
                await ours.async_add_message("chat", ChatMessage(text))

        async def append_stock(batch: list[str]) -> None:
            for text in batch:
                await alchemy.add_message("chat", ChatMessage(text))

        appends: dict[str, Append] = {"ours": append, "alchemy": append_stock}
        empty, times = _timed(loop, folder, appends, [[text] for text in texts])
        for stored in (loop.run(ours.aget_messages("chat")), loop.run(alchemy.get_messages("chat"))):
            assert [message.content for message in stored] == texts
        assert alchemy._async_engine is not None
        loop.run(alchemy._async_engine.dispose())
    return _rows("LlamaIndex", folder, empty, times, {"alchemy": "SQLAlchemyChatStore"})


def burr_application(folder: Path, count: int) -> list[Row]:
    """Save the growing state of an application of Burr, beside its SQLite persister, which stores each state whole."""
    from burr.core.persistence import SQLitePersister
    from burr.core.state import State

    from perdure.burr import AsyncPerdurePersister

    folder = _folder(folder, "burr")
    writer = Writer(10)
    texts = [writer.prose(200) for _ in range(count)]
    stock: Any = SQLitePersister(str(folder / "sqlite.db"))
    stock.initialize()
    said: dict[str, list[str]] = {"ours": [], "sqlite": []}

    with asyncio.Runner() as loop, perdure.open(str(folder / "ours.db")) as store:
        ours = AsyncPerdurePersister(store)

        async def append(batch: list[str]) -> None:
            said["ours"] += batch
            await ours.save("", "app", len(said["ours"]), "say", State({"said": said["ours"]}), "completed")

        async def append_stock(batch: list[str]) -> None:
            said["sqlite"] += batch
            stock.save("", "app", len(said["sqlite"]), "say", State({"said": said["sqlite"]}), "completed")

        appends: dict[str, Append] = {"ours": append, "sqlite": append_stock}
        empty, times = _timed(loop, folder, appends, [[text] for text in texts])
        loaded = loop.run(ours.load("", "app"))
        assert loaded is not None
        assert loaded["state"]["said"] == stock.load("", "app")["state"]["said"] == texts
        stock.cleanup()
    return _rows("Burr", folder, empty, times, {"sqlite": "SQLitePersister"}, is_whole=True)


def _folder(folder: Path, name: str) -> Path:
    own = folder / name
    own.mkdir()
    return own


def _timed(
    loop: asyncio.Runner, folder: Path, appends: dict[str, Append], batches: list[list[Any]]
) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Append each batch to each session in turn, and once as it is. Return the sizes before, and the times."""
    empty = {name: _used(folder / f"{name}.db") for name in appends}
    bare = BareTable(folder / "bare.db")
    times: dict[str, list[float]] = {name: [] for name in (*appends, "bare")}
    names = list(times)
    for number, batch in enumerate(batches):
        text = orjson.dumps(batch)
        for name in names[number % len(names) :] + names[: number % len(names)]:  # none is always in another's wake
            work = partial(bare.insert, text) if name == "bare" else partial(_append, loop, appends[name], batch)
            times[name].append(seconds(work))
    bare.close()
    return empty, times


def _append(loop: asyncio.Runner, append: Append, batch: list[Any]) -> None:
    loop.run(append(batch))


def _rows(
    framework: str,
    folder: Path,
    empty: dict[str, int],
    times: dict[str, list[float]],
    peers: dict[str, str],
    *,
    is_whole: bool = False,
) -> list[Row]:
    """Return the rows of a framework. `is_whole`: it hands over its whole state each time, so no append is flat."""
    took = {name: median(each) * 1000 for name, each in times.items()}
    ours, floor = took["ours"], took["bare"]
    name = f"{framework}: append to a session"
    rows = [
        Row(
            name,
            ours,
            "ms",
            peer=took[peer],
            floor=floor,
            ratio=took[peer] / ours,
            bar=APPEND_BAR if peer == "alchemy" else None,
            sense="at least",
            note=f"peer: {label}; floor: a bare commit",
        )
        for peer, label in peers.items()
    ]
    tenth = max(1, len(times["ours"]) // 10)
    first, last = (median(part) for part in (times["ours"][:tenth], times["ours"][-tenth:]))
    disk = median(times["bare"][-tenth:]) / median(times["bare"][:tenth])
    bytes_ = {each: file_bytes(folder / f"{each}.db") - before for each, before in empty.items()}
    smallest = min(bytes_[peer] for peer in peers)
    return [
        *rows,
        Row(
            "  the last tenth beside the first",
            last * 1000,
            "ms",
            floor=first * 1000,
            ratio=last / first,
            bar=None if is_whole else FLAT_BAR,
            note=f"the bare commits meanwhile: {disk:.2f}",
        ),
        Row(
            "  its size",
            bytes_["ours"] / KB,
            "KB",
            peer=smallest / KB,
            ratio=smallest / bytes_["ours"],
            bar=SIZE_BAR,
            sense="at least",
            note="in the file, beside an empty one; the smaller peer; ours has every state",
        ),
    ]


def _used(path: Path) -> int:
    """The bytes of a store that is open."""
    with closing(sqlite3.connect(path)) as connection:
        [[pages], [size]] = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    return int(pages * size)


def _batches(items: list[Any]) -> list[list[Any]]:
    """Split items into what an agent adds at once: the question; a tool call and its result; the answer."""
    sizes = itertools.cycle((1, 2, 1))
    left, made = list(items), []
    while left:
        size = next(sizes)
        made.append(left[:size])
        del left[:size]
    return made


def _items(count: int) -> list[Any]:
    """Return items as the SDK adds them: a question, a tool call, its result, an answer, and so on."""
    writer = Writer(7)
    made: list[Any] = []
    for turn in range(0, count, 4):
        call = f"call_{writer.random.getrandbits(96):024x}"
        text = {"type": "output_text", "text": writer.prose(400), "annotations": [], "logprobs": []}
        made += [
            {"role": "user", "content": writer.prose(120)},
            {"type": "function_call", "name": "look", "call_id": call, "arguments": f'{{"number": {turn}}}',
             "id": f"fc_{writer.random.getrandbits(96):024x}", "status": "completed"},
            {"type": "function_call_output", "call_id": call, "output": writer.prose(200)},
            {"type": "message", "id": f"msg_{writer.random.getrandbits(96):024x}", "role": "assistant",
             "status": "completed", "content": [text]},
        ]  # fmt: skip
    return made[:count]


SESSIONS = (openai_session, adk_session, llama_index_chat, burr_application)
