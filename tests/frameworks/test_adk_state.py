"""State of users and apps in ADK: it changes with the event that changes it, or not at all."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from google.adk.errors._stale_session_error import StaleSessionError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions.session import Session
from google.genai import types

import perdure
from perdure.adk import PerdureSessionService

SESSIONS, EVENTS = 4, 6


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("postgres_url")) if request.param == "postgres" else str(tmp_path / "store.db")


def setting(name: str) -> Event:
    """An event that changes state of the session, the user and the app."""
    delta = {name: 1, f"user:{name}": 1, f"app:{name}": 1}
    return Event(author="ann", content=types.UserContent(name), actions=EventActions(state_delta=delta))


def prefixed(*names: str) -> set[str]:
    return {prefix + name for name in names for prefix in ("", "user:", "app:")}


def place(session: str = "s") -> Any:
    return {"app_name": "app", "user_id": "ann", "session_id": session}


async def read(store: perdure.Store, session: str = "s") -> Session:
    loaded = await PerdureSessionService(store).get_session(**place(session))
    assert loaded is not None
    return loaded


async def test_writers_in_several_sessions_of_a_user_lose_no_state(url: str) -> None:
    async def write(store: perdure.Store, session: str) -> None:
        sessions = PerdureSessionService(store)
        mine = await sessions.create_session(**place(session))
        for number in range(EVENTS):
            await sessions.append_event(mine, setting(f"{session}-{number}"))

    with perdure.open(url, durability="normal") as one, perdure.open(url, durability="normal") as two:
        stores = itertools.cycle((one, two))
        await asyncio.gather(*(write(next(stores), f"s{number}") for number in range(SESSIONS)))
        names = [f"s{session}-{number}" for session in range(SESSIONS) for number in range(EVENTS)]
        shared = {name for name in prefixed(*names) if ":" in name}
        assert set((await read(one, "s0")).state) == shared | {f"s0-{number}" for number in range(EVENTS)}
        assert one.ops.verify().ok


async def test_the_event_of_a_stale_writer_changes_no_state(url: str) -> None:
    with perdure.open(url, durability="normal") as store:
        sessions = PerdureSessionService(store)
        stale = await sessions.create_session(**place(), state={"user:first": 1})
        await sessions.append_event(await read(store), setting("a"))
        with pytest.raises(StaleSessionError):
            await sessions.append_event(stale, setting("late"))
        assert set((await read(store)).state) == prefixed("a") | {"user:first"}


class Strike:
    """Counts the points of the driver, and raises at one of them."""

    def __init__(self) -> None:
        self.points, self.at = 0, 0

    def __call__(self, point: str) -> None:
        self.points += 1
        if self.points == self.at:
            raise ConnectionError(point)


async def test_a_fault_at_any_statement_leaves_the_event_and_its_state_or_neither(url: str) -> None:
    strike = Strike()
    with perdure.open(url, durability="normal", hook=strike) as struck, perdure.open(url) as store:
        await PerdureSessionService(store).create_session(**place())
        names: list[str] = []
        for at in itertools.count(1):
            sessions, session = PerdureSessionService(struck), await read(struck)
            strike.points, strike.at = 0, at
            try:
                await sessions.append_event(session, setting(f"e{at}"))
            except Exception:
                strike.at = 0
                before = await read(store)
                happened = len(before.events) > len(names)
                assert set(before.state) == prefixed(*names, *([f"e{at}"] if happened else []))
                if not happened:
                    await PerdureSessionService(struck).append_event(await read(struck), setting(f"e{at}"))
            finally:
                is_over, strike.at = strike.points < at, 0
            names.append(f"e{at}")
            assert set((await read(store)).state) == prefixed(*names)
            if is_over:
                break
        assert at > 8
        assert store.ops.verify().ok
