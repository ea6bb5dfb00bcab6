"""PrecisionMemBench: does a recall bring what is about the question, and never what must not be there?

35 beliefs of two users, among them pinned, superseded and resolved ones, and 77 questions within scopes. A belief's
scope is a namespace below its user, its type a kind. A recall is: what holds for every scope (prelude), then the pinned
facts and open questions of the scopes asked for, then relevant beliefs by the local model, as far as the budget goes.
Rules count assertions that a right store cannot miss: another user, another scope, what was superseded or resolved,
pins, kinds, the budget. Relevance is the mean precision and recall of the relevant beliefs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import Row, Run, mean
from perdure.memory.embed import embedding_of
from perdure.memory.segments import IndexRow, IndexScope
from perdure.memory.words import pack
from perdure.storage.program import drive

DATA = Path(__file__).parent / "precisionmembench"
UNIVERSAL = "user:universal"
QUESTION = "open_question"
PRECISION_BAR = 0.80
RECALL_BAR = 0.88
NO_DRIVER: Any = None
Belief = dict[str, Any]


class Recall(NamedTuple):
    prelude: list[Belief]
    pinned: list[Belief]
    questions: list[Belief]
    relevant: list[Belief]


def precision(run: Run) -> list[Row]:
    memory = RankedBeliefs(json.loads((DATA / "beliefs.seed.json").read_text()))
    cases = json.loads((DATA / "retrieval.cases.json").read_text())
    broken: list[str] = []
    precisions, recalls, exact = [], [], 0
    for case in cases:
        found = memory.recall(case)
        broken += broken_rules(case, found)
        wanted = case["expect"].get("relevantBeliefs", {}).get("shouldOnlyInclude")
        if wanted is not None:
            got = {belief["_id"] for belief in found.relevant}
            right = len(got & set(wanted))
            precisions.append(right / len(got) if got else float(not wanted))
            recalls.append(right / len(wanted) if wanted else 1.0)
            exact += got == set(wanted)
    note = f"{exact} of {len(precisions)} exactly"
    return [
        Row("PrecisionMemBench: rules broken", len(broken), "", bar=0, judged="ours", note="; ".join(broken)),
        Row("  precision", mean(precisions), "", bar=PRECISION_BAR, sense="at least", judged="ours", note=note),
        Row("  recall", mean(recalls), "", bar=RECALL_BAR, sense="at least", judged="ours"),
    ]


class RankedBeliefs:
    """The beliefs of each user and scope, ranked."""

    def __init__(self, beliefs: list[Belief]) -> None:
        self.beliefs = beliefs
        self.embedding = embedding_of("local")
        self.vectors = self.embed([text(belief) for belief in beliefs])

    def embed(self, texts: list[str]) -> list[bytes | None]:
        assert self.embedding is not None
        return drive(NO_DRIVER, self.embedding.embed(texts)).vectors

    def recall(self, case: dict[str, Any]) -> Recall:
        user, scopes = case.get("userId", "test-user"), case["scope"]
        held = [each for each in self.beliefs if each["user_id"] == user and holds(each)]
        prelude = [each for each in held if UNIVERSAL in each["scope"]]
        here = [each for each in held if set(each["scope"]) & set(scopes) - {UNIVERSAL}]
        pinned = [each for each in here if each["pinned"] and each["type"] != QUESTION]
        pinned.sort(key=lambda each: str(each["created_at"]))
        questions = [each for each in here if each["pinned"] and each["type"] == QUESTION]
        others = [each for each in here if not each["pinned"] and each["type"] != QUESTION]
        budget = case.get("budget", {}).get("maxBeliefs", len(here))
        relevant = list(self.relevant(user, set(scopes) - {UNIVERSAL}, others, case["query"]))
        return Recall(prelude, pinned[:budget], questions, relevant[: max(0, budget - len(pinned))])

    def relevant(self, user: str, scopes: set[str], others: list[Belief], query: str) -> Iterator[Belief]:
        """Superseded and pinned beliefs are ranked too, as in a store, and then passed over."""
        assert self.embedding is not None
        scope = IndexScope(self.embedding.dimension or 0).refresh(
            IndexRow(number, number, pack(text(each)), self.vectors[number])
            for number, each in enumerate(self.beliefs)
            if each["user_id"] == user and set(each["scope"]) & scopes
        )
        [vector] = self.embed([query])
        for hit in scope.rank(query, vector).relevant(self.embedding.floor):
            if self.beliefs[hit.id] in others:
                yield self.beliefs[hit.id]


def text(belief: Belief) -> str:
    return " ".join([belief["canonical_name"].replace("_", " "), *belief["aliases"], belief["content"]])


def holds(belief: Belief) -> bool:
    return not belief["superseded_by"] and not belief["resolved_at"] and belief["epistemic_status"] != "superseded"


def broken_rules(case: dict[str, Any], found: Recall) -> Iterator[str]:
    """What a recall must not do, whatever it thinks is relevant."""
    expect, scopes = case["expect"], set(case["scope"])
    for each in (*found.pinned, *found.questions, *found.relevant):
        inside = each["user_id"] == case.get("userId", "test-user") and set(each["scope"]) & scopes
        if not inside or not holds(each):
            yield f"{case['caseId']}: {each['_id']} is from elsewhere or no longer holds"
    for each in found.relevant:
        if each["pinned"] or each["type"] == QUESTION:
            yield f"{case['caseId']}: {each['_id']} belongs to another part"
    for part, beliefs in (("pinnedFacts", found.pinned), ("openQuestions", found.questions)):
        got = {each["_id"] for each in beliefs}
        rules = expect.get(part, {})
        if not got >= set(rules.get("mustInclude", [])) or got & set(rules.get("mustExclude", [])):
            yield f"{case['caseId']}: {part} are {sorted(got)}"
    if {each["_id"] for each in found.relevant} & set(expect.get("relevantBeliefs", {}).get("mustExclude", [])):
        yield f"{case['caseId']}: relevant beliefs have one that must not be there"
    if len(found.pinned) + len(found.relevant) > case.get("budget", {}).get("maxBeliefs", 1000):
        yield f"{case['caseId']}: over budget"
    prelude, rules = " ".join(each["content"] for each in found.prelude), expect.get("personaPrelude", {})
    wanted = all(word.lower() in prelude.lower() for word in rules.get("contains", []))
    unwanted = any(word in prelude for word in rules.get("mustNotContain", []))
    if not wanted or unwanted or (rules.get("nonEmpty") and not prelude) or (rules.get("isNull") and prelude):
        yield f"{case['caseId']}: the prelude is {prelude!r}"
