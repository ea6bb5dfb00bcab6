"""LoCoMo: does a search for a question find the turns that answer it? No language model is asked.

Each conversation is a scope, each turn an item: its text says date, speaker and what was said; the turn before is its
context. The recipe is the one that `perdure.memory` uses for everything. The score is the part of a question's evidence
among the first ten hits (R@10), over the questions of categories 1 to 4 (5 has no answer in the conversation).
The data may not be passed on (CC BY-NC 4.0): `--locomo FILE` names a copy of its JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import Row, Run, mean
from perdure.memory.embed import Embedding, embedding_of
from perdure.memory.segments import IndexRow, IndexScope
from perdure.memory.words import embedded_text, pack
from perdure.storage.program import drive

FIRST = 10
WORDS_BAR = 0.70
LOCAL_BAR = 0.72
NO_DRIVER: Any = None  # an embedder touches no database


class Turn(NamedTuple):
    name: str
    text: str
    context: str


class Question(NamedTuple):
    text: str
    evidence: set[str]


def locomo(run: Run) -> list[Row]:
    if run.locomo is None:
        return [Row("LoCoMo R@10", 0, "", note="not measured: --locomo FILE names the data")]
    conversations = [(turns, list(questions(talk, turns))) for talk, turns in read(run.locomo)]
    rows = []
    for name, bar, embedder in (("words", WORDS_BAR, None), ("local model", LOCAL_BAR, "local")):
        embedding = embedding_of(embedder)
        found = [part for turns, asked in conversations for part in recalls(turns, asked, embedding)]
        rows.append(Row(f"LoCoMo R@10, {name}", mean(found), "", bar=bar, sense="at least", judged="ours"))
    return rows


def read(path: Path) -> Iterator[tuple[dict[str, Any], list[Turn]]]:
    for talk in json.loads(path.read_text()):
        sessions = talk["conversation"]
        turns: list[Turn] = []
        for number in range(1, 1 + sum(name.endswith("_date_time") for name in sessions)):
            date = sessions[f"session_{number}_date_time"].split(" on ")[-1].replace(",", "")
            before = ""
            for turn in sessions.get(f"session_{number}", []):
                image = f" [image: {turn['blip_caption']}]" if turn.get("blip_caption") else ""
                said = turn["text"] + image
                turns.append(Turn(turn["dia_id"], f"{date} {turn['speaker']}: {said}", before))
                before = said
        yield talk, turns


def questions(talk: dict[str, Any], turns: list[Turn]) -> Iterator[Question]:
    known = {turn.name for turn in turns}
    for asked in talk["qa"]:
        # Some ids are written "D8:6; D9:17" or "D30:05".
        numbers = re.findall(r"D:?(\d+):(\d+)", " ".join(asked.get("evidence", [])))
        evidence = {f"D{session}:{int(turn)}" for session, turn in numbers} & known
        if evidence and asked["category"] != 5:
            yield Question(asked["question"], evidence)


def recalls(turns: list[Turn], asked: list[Question], embedding: Embedding | None) -> Iterator[float]:
    """For each question, the part of its evidence among the first hits."""
    meanings = vectors(embedding, [embedded_text(turn.text, turn.context) for turn in turns])
    scope = IndexScope(embedding.dimension or 0 if embedding else 0).refresh(
        IndexRow(number, number, pack(turn.text, turn.context), meaning)
        for number, (turn, meaning) in enumerate(zip(turns, meanings, strict=True))
    )
    wanted = vectors(embedding, [question.text for question in asked])
    for question, vector in zip(asked, wanted, strict=True):
        hits = islice(scope.rank(question.text, vector), FIRST)
        yield len(question.evidence & {turns[hit.id].name for hit in hits}) / len(question.evidence)


def vectors(embedding: Embedding | None, texts: list[str]) -> list[bytes | None]:
    return drive(NO_DRIVER, embedding.embed(texts)).vectors if embedding else [None] * len(texts)
