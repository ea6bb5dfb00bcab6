"""The agent whose state every benchmark of Perdure saves: 1500 steps, 1.39 MB of JSON at the end.

Each step appends a message of about 0.9 KB and moves two counters; every 5th writes to a scratch map, every
11th rewrites the todo list; 48 KB of files never change. The words are made up, drawn by a seeded generator,
and compress as the text of agents does: the whole JSON, by zstd level 3, to 187 KB on average over the
steps.

What must never happen here: a change of the numbers above, because results are compared with earlier ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate

SEED = 20_251_115
STEPS = 1500
FILES = 12
FILE_BYTES = 4096
MESSAGE_BYTES = 775
STOCK = 0.39

_LETTERS = "eeeeetttaaaooiinnsshhrrddlucmfwygpbvk"
_ROLES = ("user", "assistant", "tool", "assistant")


class Writer:
    """Made-up prose: some words are frequent, and stock phrases come again and again, as in agents' texts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.words = ["".join(self.random.choices(_LETTERS, k=self.random.randint(2, 9))) for _ in range(2500)]
        self.weights = list(accumulate(1 / (rank + 4) for rank in range(len(self.words))))
        self.phrases = [self.phrase() for _ in range(400)]
        self.habits = list(accumulate(1 / (rank + 10) for rank in range(len(self.phrases))))

    def phrase(self) -> str:
        return " ".join(self.random.choices(self.words, cum_weights=self.weights, k=6))

    def prose(self, size: int) -> str:
        parts: list[str] = []
        length = 0
        while length < size:
            if self.random.random() < STOCK:
                [part] = self.random.choices(self.phrases, cum_weights=self.habits)
            else:
                part = self.phrase()
            parts.append(part)
            length += len(part) + 1
        return ". ".join(parts)


def steps(n: int = STEPS, *, seed: int = SEED) -> Iterator[dict[str, object]]:
    """The state after each of `n` steps. It is one dict that keeps changing: encode it before the next."""
    writer = Writer(seed)
    messages: list[dict[str, object]] = []
    scratch: dict[str, str] = {}
    counters = {"step": 0, "tokens": 0}
    state: dict[str, object] = {
        "agent": "researcher",
        "counters": counters,
        "messages": messages,
        "todo": [],
        "scratch": scratch,
        "files": {f"src/module_{number}.py": writer.prose(FILE_BYTES) for number in range(FILES)},
    }
    for step in range(1, n + 1):
        text = writer.prose(writer.random.randint(MESSAGE_BYTES * 2 // 3, MESSAGE_BYTES * 4 // 3))
        counters["step"] = step
        counters["tokens"] += len(text) // 4
        messages.append(
            {
                "id": f"msg_{writer.random.getrandbits(48):012x}",
                "role": _ROLES[step % 4],
                "content": text,
                "at": 1_760_000_000 + step * 17,
            }
        )
        if step % 5 == 0:
            scratch[f"note_{step // 5 % 20}"] = writer.prose(120)
        if step % 11 == 0:
            state["todo"] = [{"task": writer.prose(40), "done": done < 3} for done in range(6)]
        yield state
