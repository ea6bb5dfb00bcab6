"""Does a search for a question find the items that answer it? No language model is asked.

The score is the part of a question's evidence among the first ten hits (R@10). Each conversation is a scope. The sets:
turns of LoCoMo (the turn before is the context), the facts that its authors wrote down of each session, and messages of
BEAM, which are long. The recipe is the one that `perdure.memory` uses for everything. Beside it, on the same items and
questions: `bm25s` (which gets the context as text where that helps it), and the plain cosine of the same model.

None of the data may be passed on. `--locomo FILE` names LoCoMo's JSON, `--beam FOLDER` the git directory of a copy of
the repository of BEAM (Tavakoli et al.). `--beam-size` names one of its sizes, 100K by default.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from bench.measure import Row, Run, mean
from perdure.memory.embed import Embedding, embedding_of
from perdure.memory.segments import IndexRow, IndexScope
from perdure.memory.words import ENGLISH, IndexText
from perdure.storage.program import drive

FIRST = 10
LEAD = 0.02  # of the local model over words, and over the better peer
NO_DRIVER: Any = None  # an embedder touches no database


class Text(NamedTuple):
    names: frozenset[str]  # the evidence that it holds
    text: str
    context: str = ""


class Question(NamedTuple):
    text: str
    evidence: set[str]


Corpus = list[tuple[list[Text], list[Question]]]  # of each scope, its items and what is asked
Rank = Callable[[str], Iterator[int]]  # the best items for a question


def retrieval(run: Run) -> list[Row]:
    locomo, beam = "not measured: --locomo FILE names the data", "not measured: --beam FOLDER names the data"
    rows = []
    for name, path, missing, corpus in (
        ("LoCoMo", run.locomo, locomo, turns),
        ("facts of LoCoMo", run.locomo, locomo, facts),
        (f"BEAM-{run.beam_size}", run.beam, beam, partial(messages, size=run.beam_size)),
    ):
        rows += [Row(f"R@10, {name}", 0, "", note=missing)] if path is None else compared(name, corpus(path))
    return rows


def compared(name: str, corpus: Corpus) -> list[Row]:
    local = embedding_of("local")
    words = recall(corpus, partial(ours, embedding=None))
    both = recall(corpus, partial(ours, embedding=local))
    peer = max(recall(corpus, partial(by_bm25s, context=context)) for context in (False, True))
    cosine = recall(corpus, partial(by_cosine, embedding=local))
    bar = round(max(words, peer, cosine) + LEAD, 3)
    options: dict[str, Any] = {"sense": "at least", "judged": "ours"}
    return [
        Row(f"R@10, {name}: words", words, "", peer=peer, bar=round(peer, 3), note="peer: bm25s", **options),
        Row(
            f"R@10, {name}: local model",
            both,
            "",
            peer=cosine,
            bar=bar,
            note="peer: cosine of the same model",
            **options,
        ),
    ]


def recall(corpus: Corpus, ranker: Callable[[list[Text], list[str]], Rank]) -> float:
    parts = []
    for items, asked in corpus:
        rank = ranker(items, [question.text for question in asked])
        for question in asked:
            best: list[frozenset[str]] = [items[place].names for place in islice(rank(question.text), FIRST)]
            parts.append(len(question.evidence.intersection(*[frozenset().union(*best)])) / len(question.evidence))
    return mean(parts)


# --- who ranks


def ours(items: list[Text], questions: list[str], embedding: Embedding | None) -> Rank:
    meanings = vectors(embedding, [IndexText(item.text, item.context).embedded for item in items])
    scope = IndexScope(embedding.dimension or 0 if embedding else 0).refresh(
        IndexRow(number, number, ENGLISH.pack(IndexText(item.text, item.context)), meaning)
        for number, (item, meaning) in enumerate(zip(items, meanings, strict=True))
    )
    known = dict(zip(questions, vectors(embedding, questions), strict=True))
    return lambda question: (hit.id for hit in scope.rank(ENGLISH.query_terms(question), known[question]))


def by_cosine(items: list[Text], questions: list[str], embedding: Embedding | None) -> Rank:
    texts = [IndexText(item.text, item.context).embedded for item in items]
    empty = bytes(2 * (embedding.dimension or 0)) if embedding else b""
    matrix, asked = (
        numpy.frombuffer(b"".join(vector or empty for vector in vectors(embedding, each)), "<f2")
        .reshape(len(each), -1)
        .astype("f4")
        for each in (texts, questions)
    )
    known = dict(zip(questions, asked, strict=True))
    return lambda question: iter(numpy.argsort(-(matrix @ known[question]), kind="stable").tolist())


def by_bm25s(items: list[Text], questions: list[str], context: bool) -> Rank:
    import bm25s  # of the extra `dev`: the tests import this module without it

    tokens = partial(bm25s.tokenize, stopwords="en", show_progress=False)
    index = bm25s.BM25()
    texts = [f"{item.text} {item.context}" if context else item.text for item in items]
    index.index(tokens(texts), show_progress=False)

    def rank(question: str) -> Iterator[int]:
        words = tokens([question], return_ids=False)
        return iter(index.retrieve(words, k=min(FIRST, len(items)), show_progress=False)[0][0].tolist())

    return rank


def vectors(embedding: Embedding | None, texts: list[str]) -> list[bytes | None]:
    return drive(NO_DRIVER, embedding.embed(texts)).vectors if embedding else [None] * len(texts)


# --- what is ranked


def turns(path: Path) -> Corpus:
    """LoCoMo: an item says date, speaker and what was said. Categories 1 to 4: 5 has no answer in the conversation."""
    corpus = []
    for talk in json.loads(path.read_text()):
        items = []
        for number, date in sessions(talk):
            before = ""
            for turn in talk["conversation"].get(f"session_{number}", []):
                image = f" [image: {turn['blip_caption']}]" if turn.get("blip_caption") else ""
                said = turn["text"] + image
                items.append(Text(frozenset([turn["dia_id"]]), f"{date} {turn['speaker']}: {said}", before))
                before = said
        corpus.append((items, [*questions_of(talk, items)]))
    return corpus


def facts(path: Path) -> Corpus:
    """What LoCoMo's authors noted of each session: a sentence, and the turns that it is from."""
    corpus = []
    for talk in json.loads(path.read_text()):
        noted = [pair for session in talk["observation"].values() for pairs in session.values() for pair in pairs]
        items = [Text(evidence(ids if isinstance(ids, list) else [ids]), fact) for fact, ids in noted]
        corpus.append((items, [*questions_of(talk, items)]))
    return corpus


def sessions(talk: dict[str, Any]) -> Iterator[tuple[int, str]]:
    times = {name: time for name, time in talk["conversation"].items() if name.endswith("_date_time")}
    for number in range(1, 1 + len(times)):
        yield number, times[f"session_{number}_date_time"].split(" on ")[-1].replace(",", "")


def questions_of(talk: dict[str, Any], items: list[Text]) -> Iterator[Question]:
    known = frozenset().union(*(item.names for item in items))
    for asked in talk["qa"]:
        if asked["category"] != 5 and (names := evidence(asked.get("evidence", [])) & known):
            yield Question(asked["question"], set(names))


def evidence(ids: list[str]) -> frozenset[str]:
    """The turns of ids, some of which are written "D8:6; D9:17" or "D30:05"."""
    numbers = re.findall(r"D:?(\d+):(\d+)", " ".join(map(str, ids)))
    return frozenset(f"D{session}:{int(turn)}" for session, turn in numbers)


def messages(folder: Path, size: str) -> Corpus:
    """BEAM: an item says date, role and the message."""
    corpus: Corpus = []
    for name in git(folder, "ls-tree", "--name-only", "HEAD", f"chats/{size}/").split():
        chat, probes = (
            json.loads(git(folder, "show", f"HEAD:{name}/{file}") or "[]")
            for file in ("chat.json", "probing_questions/probing_questions.json")
        )
        items, date, before = [], "", ""
        for message in (message for batch in chat for group in batch["turns"] for message in group):
            date = message.get("time_anchor") or date
            said = re.sub(r"\s*->->.*$", "", message["content"])
            named = frozenset([str(message["id"])])
            items.append(Text(named, f"{date.replace('-', ' ')} {message['role']}: {said}", before))
            before = said
        known = frozenset().union(*(item.names for item in items))
        asked = [
            Question(probe["question"], names)
            for probe in (probe for several in dict(probes).values() for probe in several)
            if (names := set(map(str, numbers(probe.get("source_chat_ids", [])))) & known)
        ]
        corpus += [(items, asked)] if asked else []
    if not corpus:
        raise SystemExit(f"--beam {folder}: no chats/{size}/ in this repository")
    return corpus


def numbers(value: object) -> list[int]:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int) else []


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "--git-dir", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
