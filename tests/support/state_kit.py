"""What the tests of `perdure.state()` share: an agent that keeps one."""

from __future__ import annotations

from typing import Any

from lab import Lab, Once

import perdure


class Stop(BaseException):
    """Ends the process's part where a test wants it."""


def agent_of(lab: Lab, once: Once | None = None) -> Any:
    """Changes its state in the function and in a step's body."""

    @lab.step(name="research")
    def research(topic: str) -> int:
        lab.ran.append(topic)
        state = perdure.state()
        state["notes"].append({"topic": topic, "found": len(topic)})
        state["count"] = state.get("count", 0) + 1
        return len(topic)

    @lab.durable(name=f"agent-{id(lab)}")
    async def agent(topics: list[str]) -> dict[str, Any]:
        state = perdure.state({"plan": [], "notes": []})
        state["plan"] += topics
        for topic in topics:
            state["now"] = topic
            await lab(research(topic))
        del state["now"]
        if once is not None:
            once.interrupt()
        return dict(state)

    return agent


EXPECTED = {
    "plan": ["a", "bb"],
    "notes": [{"topic": "a", "found": 1}, {"topic": "bb", "found": 2}],
    "count": 2,
}
