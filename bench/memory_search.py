"""Does `memory_search`, the tool of a model, answer what is known, and say so where nothing is?

One namespace holds 100 facts in five languages, 20 of each. 300 plain questions ask for them, three for each fact, and 75
ask what no fact mentions. The threshold of evidence (`ranking.BY_CHANCE`) and what is known of languages
(`perdure.memory.languages`) were chosen with 200 and 50 of them. The bars judge the others, which were written afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import perdure
from bench.measure import Row, Run, mean

DATA = Path(__file__).parent / "memory_search.json"
FIRST = 3
BAR = 0.95
DENIED_BAR = 0.05
TUNED = 10  # of the questions without an answer in each language
NOTHING = "nothing is remembered"
Sense = Literal["at most", "at least"]


class Asked(NamedTuple):
    language: str
    question: str
    key: str | None  # of the fact that answers it
    tuned: bool  # whether the threshold was chosen with it


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
        for _, *tuned, other in language["facts"]:
            yield from (Asked(name, question, f"fact {number}", True) for question in tuned)
            yield Asked(name, other, f"fact {number}", False)
            number += 1
        for place, question in enumerate(language["unanswered"]):
            yield Asked(name, question, None, place < TUNED)


def judged(name: str, search: Callable[[str], str]) -> list[Row]:
    answers = [(asked, search(asked.question)) for asked in questions()]
    known = [(asked, is_first(asked, said)) for asked, said in answers if asked.key]
    unknown = [(asked, said.startswith(NOTHING)) for asked, said in answers if not asked.key]
    denied = [(asked, said.startswith(NOTHING)) for asked, said in answers if asked.key]
    return [
        row(f"{name}: the right fact among the first {FIRST}", known, BAR),
        row("  nothing is remembered, where nothing is", unknown, BAR),
        row("  nothing is remembered, where a fact is", denied, DENIED_BAR, "at most"),
    ]


def is_first(asked: Asked, said: str) -> bool:
    lines = [] if said.startswith(NOTHING) else said.splitlines()[:FIRST]
    return asked.key in [json.loads(line)["key"] for line in lines]


def row(name: str, answers: list[tuple[Asked, bool]], bar: float, sense: Sense = "at least") -> Row:
    tuned, others = (mean([right for asked, right in answers if asked.tuned == which]) for which in (True, False))
    languages = dict.fromkeys(asked.language for asked, _ in answers)
    each = {one: sum(right for asked, right in answers if asked.language == one) for one in languages}
    note = f"of those it was tuned with {tuned:.3g}; of all, of {len(answers) // len(each)} each: " + ", ".join(
        f"{one} {count}" for one, count in each.items()
    )
    return Row(name, others, "", bar=bar, sense=sense, judged="ours", note=note)
