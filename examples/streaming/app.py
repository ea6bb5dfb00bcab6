"""Send the tokens of a run to browsers as server-sent events. Needs `pip install fastapi uvicorn`.

cd examples/streaming
perdure store create agent.db
perdure worker agent.py --store agent.db &
uvicorn app:app

The id of each event is the cursor of the run's stream. A browser that lost its connection sends the last id that it
got (`Last-Event-ID`), and the stream continues after it. Any process of the app can answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated

from agent import chat
from fastapi import FastAPI, Header, HTTPException
from fastapi.responses import FileResponse, StreamingResponse

import perdure

store = perdure.open(os.environ.get("PERDURE_STORE", "agent.db"))
SHOWN = ("chunk", "reset", "lost", "done", "status")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await store.aclose()


app = FastAPI(lifespan=lifespan)


@contextmanager
def refusals() -> Iterator[None]:
    """Answer 404 for an unknown run, and 400 for a cursor that is none."""
    try:
        yield
    except perdure.NotFound as error:
        raise HTTPException(404, str(error)) from error
    except perdure.UsageError as error:
        raise HTTPException(400, str(error)) from error


@app.get("/")
def page() -> FileResponse:
    return FileResponse(Path(__file__).with_name("page.html"))


@app.post("/chats/{id}")
async def start(id: str, topic: str, pause_s: float = 0.05) -> dict[str, str]:
    """Start the run, or return the one that is there. A worker executes it."""
    return {"status": (await store.astart(chat, topic, pause_s, id=id)).status}


@app.get("/chats/{id}/events")
async def events(id: str, last_event_id: Annotated[str, Header()] = "") -> StreamingResponse:
    with refusals():
        stream = (await store.aget_run(id)).astream(after=last_event_id)

    async def lines() -> AsyncIterator[str]:
        yield "retry: 500\n\n"  # a browser reconnects after half a second
        async for event in stream:
            yield line(event)

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def line(event: perdure.Event) -> str:
    """Return an event as the browser reads it. Others only move the cursor: they have no data, so it ignores them."""
    if event.kind not in SHOWN:
        return f"id: {event.cursor}\n\n"
    data = json.dumps({"path": event.path, "value": event.value})
    return f"id: {event.cursor}\nevent: {event.kind}\ndata: {data}\n\n"
