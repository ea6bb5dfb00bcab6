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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import perdure
from bench.measure import Row, Run, mean

DATA = Path(__file__).parent / "precisionmembench"
UNIVERSAL = "user:universal"
QUESTION = "open_question"
PRECISION_BAR = 0.80
RECALL_BAR = 0.95
Belief = dict[str, Any]


class Recall(NamedTuple):
    prelude: list[Belief]
    pinned: list[Belief]
    questions: list[Belief]
    relevant: list[Belief]


def precision(run: Run) -> list[Row]:
    beliefs, cases = (json.loads((DATA / name).read_text()) for name in ("beliefs.seed.json", "retrieval.cases.json"))
    with perdure.open(run.folder / "beliefs.db", embedder="local") as store:
        memory = Beliefs(store, beliefs)
        found = [(case, memory.recall(case)) for case in cases]
    return rows(found)


def rows(answers: list[tuple[dict[str, Any], Recall]]) -> list[Row]:
    broken: list[str] = []
    precisions, recalls, exact = [], [], 0
    for case, found in answers:
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


class Beliefs:
    """The beliefs in a store: a user's scope is a namespace."""

    def __init__(self, store: perdure.Store, beliefs: list[Belief]) -> None:
        self.store = store
        superseded = {each["superseded_by"]: each["_id"] for each in beliefs}
        for each in sorted(beliefs, key=lambda belief: str(belief["created_at"])):
            resolved = each["resolved_at"] and datetime.fromisoformat(each["resolved_at"])
            store.memory("users", each["user_id"], *each["scope"]).put(
                each["_id"],
                each,
                text=text(each),
                kind=each["type"],
                pinned=each["pinned"],
                valid_to=resolved,
                supersedes=superseded.get(each["_id"]),
            )

    def recall(self, case: dict[str, Any]) -> Recall:
        user = self.store.memory("users", case.get("userId", "test-user"))
        now = datetime.now(UTC)
        prelude, here, relevant = [], [], []
        for space in user.namespaces():
            if space.labels[-1] == UNIVERSAL:
                prelude = self.store.memory(*space.labels).list(valid_at=now)
            elif space.labels[-1] in case["scope"]:
                memory = self.store.memory(*space.labels)
                here += memory.list(valid_at=now)
                relevant += memory.search(case["query"], relevant=True, limit=100)
        pinned = [item for item in reversed(here) if item.pinned and item.kind != QUESTION]
        questions = [item for item in here if item.pinned and item.kind == QUESTION]
        relevant.sort(key=lambda item: -(item.score or 0))
        others = [item for item in relevant if not item.pinned and item.kind != QUESTION]
        budget = case.get("budget", {}).get("maxBeliefs", 1000)
        parts = (prelude, pinned[:budget], questions, others[: max(0, budget - len(pinned))])
        return Recall(*([item.value for item in part] for part in parts))


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
