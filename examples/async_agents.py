"""Run fifty agents at once on one store: every operation has an async twin whose name begins with `a`.

    python examples/async_agents.py

Saves that wait at the same moment share one commit, and so one flush to the disk.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import perdure

AGENTS = 50
TURNS = 10


async def agent(store: perdure.Store, name: str) -> int:
    """Talk for some turns, save after each, and return the number of stored turns."""
    thread = store.thread(name, metadata={"team": "demo"})
    messages: list[str] = []
    for turn in range(TURNS):
        await asyncio.sleep(0)  # stands for waiting for a model
        messages.append(f"{name} says {turn}")
        await thread.asave({"messages": messages})
    return len((await thread.aload()).state["messages"])


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with perdure.open(str(Path(folder, "agents.db"))) as store:
            turns = await asyncio.gather(*(agent(store, f"agent-{number}") for number in range(AGENTS)))
            threads = await store.athreads(where={"team": "demo"})
            report = await store.ops.averify()
    print(f"{len(threads)} agents saved {sum(turns)} turns; {report.checkpoints} checkpoints verified: ok={report.ok}")


if __name__ == "__main__":
    asyncio.run(main())
