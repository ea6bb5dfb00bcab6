"""Keep the transcripts of the Claude Agent SDK in a store: killed while it mirrors a turn, nothing is lost or doubled.

    python examples/claude_agent_session.py    twice; needs, in a clone: pip install '.[claude-agent]'

It needs no network: this script adds entries as the SDK does. With the SDK, `ClaudeAgentOptions(session_store=…)` does,
and `resume=` continues the session on any machine. The first time the process kills itself after the second entry.
"""

from __future__ import annotations

import asyncio
import os
import signal

from claude_agent_sdk import SessionKey, SessionStoreEntry, list_sessions_from_store, project_key_for_directory

import perdure
from perdure.claude_agent import PerdureSessionStore

SESSION = "6f0c9a52-3a1e-4b8e-9a53-0d6a8a5e4c11"
KEY: SessionKey = {"project_key": project_key_for_directory(), "session_id": SESSION}
TURN: list[SessionStoreEntry] = [
    {"type": kind, "uuid": f"entry-{number}", "timestamp": f"2026-01-01T00:00:0{number}Z", "message": message}  # type: ignore[typeddict-unknown-key]
    for number, (kind, message) in enumerate(
        [
            ("user", {"role": "user", "content": "A night in Lisbon, please"}),
            ("assistant", {"role": "assistant", "content": [{"type": "text", "text": "I found Pension Sol."}]}),
            ("assistant", {"role": "assistant", "content": [{"type": "text", "text": "Your room is booked."}]}),
        ]
    )
]


async def mirror(sessions: PerdureSessionStore) -> None:
    known = len(await sessions.load(KEY) or ())
    print("entries before:", known, flush=True)
    for number, entry in enumerate(TURN, 1):
        await sessions.append(KEY, [entry])
        if number == 2 and not known:
            os.kill(os.getpid(), signal.SIGKILL)
    print("entries after:", len(await sessions.load(KEY) or ()))
    print("sessions:", [session.summary for session in await list_sessions_from_store(sessions)])


if __name__ == "__main__":
    with perdure.open("claude_agent.db") as store:
        asyncio.run(mirror(PerdureSessionStore(store)))
