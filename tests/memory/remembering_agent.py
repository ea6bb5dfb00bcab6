"""A run that puts, reads and updates memory, and kills itself at the write whose number it is given."""

from __future__ import annotations

import os
import signal
import sys

import perdure
from perdure.runs.execution import hooks


@perdure.durable(name="remembering.agent")
def agent() -> list[object]:
    memory = perdure.open(sys.argv[1]).memory("users", "alice") if MEMORY is None else MEMORY
    memory.put("theme", {"fact": "dark"})
    memory.update("count", lambda value: (value or 0) + 1)
    found = memory.get("theme")
    memory.put_many({"a": 1, "b": 2})
    memory.delete("a")
    assert found is not None
    return [found.value, [item.key for item in memory.list()], len(memory.search("dark")), memory.get("a")]


MEMORY: perdure.memory.Memory | None = None


def main() -> None:
    global MEMORY
    path, kill_at = sys.argv[1], int(sys.argv[2])
    seen = 0

    def strike(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    store = perdure.open(path)
    MEMORY = store.memory("users", "alice")
    hooks.hook = strike
    print(store.run(agent, id="one").result())


if __name__ == "__main__":
    main()
