"""The inbox: what each form does, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from inspector_agents import fill, flight, in_doubt, onboard, pay_back, publish
from inspector_fixtures import Client
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt

import perdure
from perdure.langgraph import PerdureSaver


@pytest.fixture(params=["sqlite", "postgres"])
def both(request: pytest.FixtureRequest, path: str) -> Any:
    url = path if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with perdure.open(url) as store:
        yield store


def test_the_inbox_has_what_waits_and_what_went_wrong(both: perdure.Store, client: Callable[..., Client]) -> None:
    fill(both)
    data = client(both).get("/api/").json()
    kinds = {card["run"]: (card["kind"], card["form"]["kind"]) for card in data["cards"]}
    assert kinds == {
        "trip-oslo": ("doubt", "doubt"),
        "refund-8841": ("approval", "approval"),
        "trip-lisbon": ("question", "options"),
        "onboard-acme": ("question", "fields"),
        "news-1": ("question", "approval"),
    }
    assert data["cards"][0]["arguments"] == {"hotel": "Oslo", "api_token": "***"}
    assert data["counts"] == {"waiting": 5, "failed": 1}
    assert [run["id"] for run in data["failed"]] == ["index-40"]
    assert client(both).get("/").status_code == 200


def test_two_people_are_a_quorum_and_one_is_not(store: perdure.Store, client: Callable[..., Client]) -> None:
    run = store.run(publish, "news", id="news")
    visitor = client(who_header="X-User")
    visitor.headers["x-user"] = "ann"
    form = {"run": "news", "path": "1", "answer": "yes"}
    assert visitor.notice("answer", **form) == "Noted. 1 more of the same kind needed for news."
    assert visitor.notice("answer", **form) == "Noted. 1 more of the same kind needed for news."
    visitor.headers["x-user"] = "eve"
    assert "eve" in visitor.notice("answer", **form)
    assert "who may not answer this" in visitor.get("/").text
    visitor.headers["x-user"] = "bo"
    assert visitor.notice("answer", **form) == "Answered. A worker resumes news, or the line that started it."
    assert run.result(timeout_s=10) is True


def test_an_approval_is_declined(store: perdure.Store, client: Callable[..., Client]) -> None:
    store.run(pay_back, 900, id="refund")
    [question] = store.questions()
    client().notice("answer", run="refund", path=question.path, answer="no")
    [answered] = store.questions(all=True)
    assert [value for _, value, _ in answered.answers] == [False]


def test_a_wrong_form_is_refused_with_the_reason(store: perdure.Store, client: Callable[..., Client]) -> None:
    store.run(onboard, "acme", id="onboard")
    store.run(flight, "Rome", id="trip")
    in_doubt(store, "hotel")
    visitor = client()
    fields = {"run": "onboard", "path": "1", "field-plan": "0", "field-seats": "many"}
    assert visitor.notice("answer", **fields) == "seats: a number is needed, not &#39;many&#39;"
    assert "501" in visitor.notice("answer", **{**fields, "field-seats": "501"})
    assert visitor.notice("answer", run="trip", path="1", option="7") == "choose one of the options"
    assert "not open any more" in visitor.notice("answer", run="trip", path="9", option="0")
    assert "reload the page" in visitor.notice("answer", run="trip")
    assert "what it returned" in visitor.notice("resolve", run="hotel", step="1", verdict="done", result="")
    assert len(store.questions()) == 3


def test_several_questions_are_settled_at_once_and_those_refused_are_named(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    for number in range(3):
        store.run(pay_back, number, id=f"refund-{number}")
    store.run(flight, "Rome", id="trip")
    in_doubt(store, "hotel")
    chosen = {one.run: json.dumps([one.run, one.path]) for one in store.questions()}
    refunds = [chosen[f"refund-{number}"] for number in range(3)]
    visitor = client()
    asked = visitor.post_form("several", confirmed=False, verb="approve", question=refunds)
    assert asked.text.count("perdure answer refund-") >= 3
    assert visitor.notice("several", verb="approve", question=refunds) == "3 of 3 settled or noted."
    assert "0 of 1" in visitor.notice("several", verb="answer", value="Oslo-1", question=[chosen["trip"]])
    both = [chosen["trip"], chosen["hotel"]]
    asked = visitor.post_form("several", confirmed=False, verb="not_done", question=both)
    assert "does not fit a question" in visitor.get(asked.headers["location"]).text
    assert visitor.notice("several", verb="not_done", question=[chosen["hotel"]]) == "1 of 1 settled or noted."
    assert [one.run for one in store.questions()] == ["trip"]
    assert visitor.notice("several", verb="answer") == "choose questions first"


def test_an_interrupt_of_a_graph_is_answered_in_the_inbox(both: perdure.Store, client: Callable[..., Client]) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("ask", lambda state: {"messages": [("human", interrupt({"question": "Which flight?"}))]})
    builder.add_edge(START, "ask")
    graph = builder.compile(checkpointer=PerdureSaver(both))
    trip: Any = {"configurable": {"thread_id": "trip-1"}}
    graph.invoke({"messages": []}, trip)
    [card] = client(both).get("/api/").json()["cards"]
    assert (card["thread"], card["text"], card["form"]["kind"]) == ("trip-1", "Which flight?", "fields")
    assert "/threads/trip-1" in client(both).get("/").text
    form = {"run": "trip-1", "path": card["path"], "field-answer": "LH400"}
    assert client(both).notice("answer", **form).startswith("Answered. A worker that was given")
    assert client(both).get("/api/").json()["cards"] == []
    assert "not open any more" in client(both).notice("answer", **form)
    assert graph.invoke(None, trip)["messages"][-1].content == "LH400"
