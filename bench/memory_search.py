"""Does `memory_search`, the tool of a model, answer what is known, and say so where nothing is?

One namespace holds 100 facts in five languages, 20 of each. 200 plain questions ask for them, two for each fact, and 50
for what no fact mentions. The threshold of evidence (`ranking.BY_CHANCE`) was chosen on one half: the first question of
each fact, and every other one without an answer. The bars judge the other half.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import perdure
from bench.measure import Row, Run, mean

DATA = Path(__file__).parent / "memory_search.json"
FIRST = 3
BAR = 0.95
NOTHING = "nothing is remembered"


class Asked(NamedTuple):
    language: str
    question: str
    key: str | None  # of the fact that answers it
    tuned: bool  # whether it is of the half that the threshold was chosen on


def memory_search(run: Run) -> list[Row]:
    rows = []
    for name, embedder in (("words", None), ("local model", "local")):
        with perdure.open(run.folder / f"{name}.db", embedder=embedder) as store:
            memory = store.memory("user")
            memory.put_many(facts())
            rows += judged(name, memory.tools(read_only=True)[0])
    return rows


def facts() -> dict[str, dict[str, str]]:
    languages = json.loads(DATA.read_text()).values()
    every = [fact for language in languages for fact, *_ in language["facts"]]
    return {f"fact {number}": {"fact": fact} for number, fact in enumerate(every)}


def questions() -> Iterator[Asked]:
    number = 0
    for name, language in json.loads(DATA.read_text()).items():
        for _, first, second in language["facts"]:
            yield Asked(name, first, f"fact {number}", True)
            yield Asked(name, second, f"fact {number}", False)
            number += 1
        for place, question in enumerate(language["unanswered"]):
            yield Asked(name, question, None, place % 2 == 0)


def judged(name: str, search: Callable[[str], str]) -> list[Row]:
    answers = [(asked, search(asked.question)) for asked in questions()]
    known = [(asked, is_first(asked, said)) for asked, said in answers if asked.key]
    unknown = [(asked, said.startswith(NOTHING)) for asked, said in answers if not asked.key]
    denied = [(asked, said.startswith(NOTHING)) for asked, said in answers if asked.key]
    return [
        row(f"{name}: the right fact among the first {FIRST}", known, BAR),
        row("  nothing is remembered, where nothing is", unknown, BAR),
        row("  nothing is remembered, where a fact is", denied, None),
    ]


def is_first(asked: Asked, said: str) -> bool:
    lines = [] if said.startswith(NOTHING) else said.splitlines()[:FIRST]
    return asked.key in [json.loads(line)["key"] for line in lines]


def row(name: str, answers: list[tuple[Asked, bool]], bar: float | None) -> Row:
    tuned, others = (mean([right for asked, right in answers if asked.tuned == half]) for half in (True, False))
    languages = dict.fromkeys(asked.language for asked, _ in answers)
    each = {one: sum(right for asked, right in answers if asked.language == one) for one in languages}
    note = f"tuning half {tuned:.3g}; of {len(answers) // len(each)} each: " + ", ".join(
        f"{one} {count}" for one, count in each.items()
    )
    return Row(name, others, "", bar=bar, sense="at least", judged="ours", note=note)
