"""The pages of threads and of memory: what they show, and that actions ask first and are recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from inspector_fixtures import Client
from inspector_threads import chat, fill_threads, plan, remembered
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt

import perdure
from perdure.langgraph import PerdureSaver

PLAN = "/api/threads/plans%2Flaunch"


def test_threads_are_found_by_name_metadata_and_time_in_pages(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    plan(store)
    for number in range(60):
        store.thread(f"t/{number:02}", metadata={"n": number}).save({"n": number}, note="first")
    visitor = client()
    first = visitor.get("/api/threads?name=t/").json()
    assert (len(first["threads"]), first["count"]) == (50, 60)
    second = visitor.get(f"/api/threads?name=t/&before={first['next']}").json()
    names = [one["name"] for page in (first, second) for one in page["threads"]]
    assert names == [f"t/{number:02}" for number in reversed(range(60))]
    assert second["next"] is None
    [one] = visitor.get("/api/threads?tag=team%3Dgrowth").json()["threads"]
    assert (one["name"], one["steps"], one["metadata"]["owner"]) == ("plans/launch", 9, "chen")
    assert one["size_bytes"] == store.thread("plans/launch").load().size_bytes
    assert [one["name"] for one in visitor.get("/api/threads?tag=n%3D7").json()["threads"]] == ["t/07"]
    assert visitor.get("/api/threads?until=1d").json()["threads"] == []
    assert visitor.get("/api/threads?since=yesterday-ish").status_code == 400
    assert "Show all" in visitor.get("/threads?name=nothing").text


def test_a_checkpoint_is_shown_by_step_with_what_changed_since_another(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    thread = plan(store)
    visitor = client()
    head = visitor.get(PLAN).json()
    assert (head["checkpoint"]["step"], head["head"]["step"], head["form"]) == (8, 8, "tree")
    assert head["state"]["api_key"] == "***"
    assert [(one["path"], one["before"], one["after"]) for one in head["changes"]["rows"]] == [("turn", 8, 9)]
    assert [one["step"] for one in head["history"]["sizes"]] == list(range(9))
    assert [one["note"] for one in head["history"]["sizes"]][4] == "weekly sync"
    older = visitor.get(f"{PLAN}?at=2").json()
    assert older["checkpoint"]["id"] == thread.at_step(2).id
    assert [one["kind"] for one in older["changes"]["rows"]] == ["changed", "added"]
    assert visitor.get(f"{PLAN}?at=6&base=2").json()["since"]["step"] == 2
    begun = visitor.get(f"{PLAN}?at=6&base=first").json()
    assert (begun["since"]["step"], begun["changes"]["count"]) == (0, 4)
    backwards = visitor.get(f"{PLAN}?at=0&base=8").json()
    assert {one["kind"] for one in backwards["changes"]["rows"]} == {"changed", "removed"}
    assert visitor.get(f"{PLAN}?at=0").json()["changes"]["rows"] == []
    for path in ("?at=99", "?at=x", "?base=99", "?cp=0000000000001", "?cp=!"):
        assert visitor.get(PLAN + path).status_code in (400, 404), path
    assert visitor.get("/threads/nothing").status_code == 404


def test_a_pruned_history_begins_where_it_begins(store: perdure.Store, client: Callable[..., Client]) -> None:
    plan(store).prune(keep=4)
    begun = client().get(f"{PLAN}?base=first").json()
    assert (begun["history"]["first"], begun["since"]["step"]) == (5, 5)
    assert client().get(f"{PLAN}?at=5").json()["changes"]["rows"] == []


def test_a_move_of_the_scrubber_reads_the_checkpoint_alone(store: perdure.Store, client: Callable[..., Client]) -> None:
    plan(store)
    visitor = client()
    moved = visitor.get("/threads/plans%2Flaunch?at=3", headers={"x-part": "checkpoint"}).text
    assert 'id="at"' in moved
    assert 'id="checkpoint"' in moved
    assert 'id="track"' not in moved


def test_branches_pins_and_what_was_done_by_hand_are_shown(store: perdure.Store, client: Callable[..., Client]) -> None:
    fill_threads(store)
    visitor = client()
    thread = store.thread("plans/launch")
    thread.pin(thread.at_step(4), name="good", who="ann")
    history = visitor.get(PLAN).json()["history"]
    [branch] = [one for one in history["branches"] if not one["is_head"]]
    assert [one["name"] for one in history["pins"]] == ["good"]
    assert [(one["who"], one["action"]) for one in history["actions"]] == [("ann", "pin")]
    shown = visitor.get(f"{PLAN}?cp={branch['id']}").json()
    assert (shown["state"], shown["checkpoint"]["step"]) == ({"goal": "another way"}, 6)
    assert shown["since"]["step"] == 5
    assert visitor.get("/api/threads/plans%2Flaunch-cheaper").json()["history"]["forked_at"] == thread.at_step(3).id


def test_a_thread_of_langgraph_is_a_chat_with_its_interrupt_and_next_node(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    chat(store)
    visitor = client()
    shown = visitor.get("/api/threads/support%2Fchat-1042").json()
    messages = shown["chats"]["messages"]["messages"]
    assert [one["role"] for one in messages] == ["human", "ai", "human", "ai", "tool", "ai", "human", "ai"]
    assert messages[3]["calls"] == [{"name": "find_order", "arguments": '{"order": "8841"}'}]
    assert [one["is_new"] for one in messages] == [False] * 7 + [True]
    assert (shown["graph"]["next"], shown["may_edit"]) == (["approve"], False)
    [interrupt] = shown["graph"]["interrupts"]
    assert interrupt["value"] == {"question": "Pay back 1,240.00 EUR?", "order": "8841"}
    assert shown["changes"]["rows"][0]["after"] == "ai: Most likely. After 14 days we count a parcel as lost."
    assert visitor.get("/api/threads/support%2Fchat-1042?at=3").json()["graph"]["interrupts"] == []
    few = visitor.get("/api/threads/support%2Fchat-1042?last=2").json()["chats"]["messages"]
    assert (few["earlier"], len(few["messages"])) == (6, 2)
    refused = visitor.notice(
        "edit_thread",
        thread="support/chat-1042",
        path='["messages"]',
        value="[]",
        expect=shown["head"]["id"],
        back="/threads",
    )
    assert "update_state" in refused


def test_a_namespace_of_a_subgraph_is_shown(store: perdure.Store, client: Callable[..., Client]) -> None:
    inner, outer = StateGraph(MessagesState), StateGraph(MessagesState)
    inner.add_node("approve", lambda state: {"messages": [interrupt("sure?")]})
    inner.add_edge(START, "approve")
    outer.add_node("team", inner.compile())
    outer.add_edge(START, "team")
    graph = outer.compile(checkpointer=PerdureSaver(store))
    graph.invoke({"messages": [HumanMessage("go")]}, {"configurable": {"thread_id": "t"}})
    visitor = client()
    about = visitor.get("/api/threads/t").json()["graph"]
    [(name, newest)] = about["namespaces"].items()
    assert (about["next"], name.partition(":")[0]) == (["team"], "team")
    shown = visitor.get(f"/api/threads/t?cp={newest}").json()["graph"]
    assert (shown["namespace"], shown["next"]) == (name, ["approve"])
    assert visitor.get(f"/threads/t?cp={newest}&base=first").status_code == 200


ACTIONS: list[tuple[str, dict[str, str], str, str]] = [
    ("fork_thread", {"name": "plans/b"}, "Forked as plans/b.", "perdure thread fork plans/launch {id} --name plans/b"),
    ("pin_thread", {"name": "good"}, "as good.", "perdure thread pin plans/launch {id} --name good"),
    ("rollback_thread", {"note": "wrong turn"}, "Rolled back to", "perdure thread rollback plans/launch {id} --note"),
]


@pytest.mark.parametrize(("name", "fields", "done", "command"), ACTIONS, ids=[one[0] for one in ACTIONS])
def test_actions_ask_first_and_say_who(
    store: perdure.Store, client: Callable[..., Client], name: str, fields: dict[str, str], done: str, command: str
) -> None:
    thread = plan(store)
    at = thread.at_step(3)
    visitor = client(who_header="X-User")
    visitor.headers["x-user"] = "maria"
    form = {"thread": thread.name, "checkpoint": at.id, "back": "/threads", **fields}
    asked = visitor.post_form(name, confirmed=False, **form)
    assert command.format(id=at.id) in asked.text
    assert store.ops.actions() == []
    assert done in visitor.notice(name, **form)
    [action] = store.ops.actions()
    assert (action.who, action.subject, action.action) == ("maria", "thread plans/launch", name.removesuffix("_thread"))


def test_a_rollback_keeps_what_came_after_and_a_pin_is_removed_again(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    thread = plan(store)
    visitor = client()
    form = {"thread": thread.name, "checkpoint": thread.at_step(3).id, "back": "/threads"}
    visitor.notice("rollback_thread", **form)
    assert (thread.load().state["turn"], thread.at_step(8).state["turn"]) == (4, 9)
    visitor.notice("pin_thread", name="good", **form)
    assert "perdure thread unpin" in visitor.post_form("unpin_thread", confirmed=False, name="good", **form).text
    visitor.notice("unpin_thread", name="good", **form)
    assert thread.pins() == []
    assert "has no pin" in visitor.notice("unpin_thread", name="good", **form)


def test_a_value_is_edited_as_a_new_checkpoint_if_the_head_is_still_the_one_seen(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    thread = plan(store)
    visitor = client()
    shown = visitor.get(PLAN + '?edit=["tasks",1,"owner"]').json()
    assert (shown["may_edit"], shown["editing"]["text"], shown["editing"]["label"]) == (True, '"ann"', "tasks[1].owner")
    form = {
        "thread": thread.name,
        "path": shown["editing"]["path"],
        "expect": shown["checkpoint"]["id"],
        "note": "away",
    }
    asked = visitor.post_form("edit_thread", confirmed=False, value='"chen"', **form, back="/threads")
    assert "perdure thread edit plans/launch" in asked.text
    assert "Saved as" in visitor.notice("edit_thread", value='"chen"', **form, back="/threads")
    head = thread.load()
    assert (head.state["tasks"][1]["owner"], head.note, head.state["api_key"]) == ("chen", "away", "sk-live-5d1f0c")
    assert "as expected" in visitor.notice("edit_thread", value='"dora"', **form, back="/threads")
    assert "must be JSON" in visitor.notice("edit_thread", value="dora", **form, back="/threads")
    assert thread.load() == head


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ('["api_key"]', "holds a secret"),
        ('["gone"]', "not there"),
        ('["when"]', "no JSON value"),
        ('["deep"]', "secret"),
    ],
)
def test_what_cannot_be_edited_by_hand_says_why(
    store: perdure.Store, client: Callable[..., Client], place: str, problem: str
) -> None:
    state: dict[str, Any] = {"api_key": "sk-1", "when": (1, 2), "deep": [{"password": "x"}]}
    store.thread("t").save(state)
    assert problem in client().get(f"/api/threads/t?edit={place}").json()["editing"]["problem"]
    assert "sk-1" not in client().get(f"/threads/t?edit={place}").text
    assert client().get("/threads/t?edit=x").status_code == 400
    revealed = client(reveal=True).get("/api/threads/t?edit=[%22api_key%22]").json()
    assert revealed["editing"]["text"] == '"sk-1"'


def test_read_only_shows_no_way_to_change_a_thread(
    store: perdure.Store, path: str, client: Callable[..., Client]
) -> None:
    thread = plan(store)
    remembered(store)
    with perdure.open(path, read_only=True) as shown:
        visitor = client(shown, read_only=True)
        page = visitor.get("/threads/plans%2Flaunch").text
        assert "Edit turn" not in page
        assert "<button disabled>Fork here</button>" in page
        form: dict[str, Any] = {"thread": thread.name, "checkpoint": thread.at_step(3).id, "name": "x", "back": "/"}
        assert visitor.post_form("pin_thread", **form).status_code == 403
        assert visitor.get("/memory?q=hiking").status_code == 200
    assert thread.pins() == []


@pytest.mark.parametrize("name", ["a/../b", "..", "~", "<script>alert(1)</script>", "‮evil", 'q"uote', "100%?#", "é ü"])
def test_a_thread_of_any_name_has_a_page(store: perdure.Store, client: Callable[..., Client], name: str) -> None:
    state = {name: name, "messages": [{"role": "user", "content": name, "name": name}]}
    store.thread(name, metadata={"tag": name}).save(state, note=name)
    visitor = client()
    listed = visitor.get("/threads").text
    link = listed.split('class="mono" href="', 1)[1].split('"', 1)[0]
    for view in ("chat", "tree", "json"):
        page = visitor.get(f"{link}?view={view}")
        assert page.status_code == 200
        assert "<script>alert" not in page.text
    assert visitor.get(f"/api{link}").json()["name"] == name


# --- memory


def test_memory_shows_namespaces_caps_items_and_history(store: perdure.Store, client: Callable[..., Client]) -> None:
    remembered(store)
    store.memory("users", "alice", "facts").policy(max_items=10, max_age="90d")
    visitor = client()
    shown = visitor.get("/api/memory").json()
    assert [(one["name"], one["count"]) for one in shown["namespaces"]] == [("orgs/acme", 1), ("users/alice/facts", 3)]
    assert (shown["stats"]["count"], shown["policy"]) == (4, None)
    facts = visitor.get("/api/memory?ns=users/alice/facts&key=theme&in=users/alice/facts").json()
    assert (facts["policy"]["max_items"], facts["policy"]["max_age"]) == (10, 90 * 86_400.0)
    assert [one["value"]["fact"] for one in facts["item"]["versions"]] == [
        "Alice prefers dark mode",
        "Alice prefers light mode",
    ]
    assert {one["key"]: one["pinned"] for one in facts["items"]} == {"allergy": True, "hobby": False, "theme": False}
    assert "k-77" not in visitor.get("/memory").text
    assert visitor.get("/memory?key=nothing&in=users/alice").status_code == 404
    assert visitor.get("/memory?ns=users//x").status_code == 400


def test_a_search_explains_its_scores(store: perdure.Store, client: Callable[..., Client]) -> None:
    remembered(store)
    visitor = client()
    found = visitor.get("/api/memory?q=hiking+mountains").json()["items"]
    assert found[0]["key"] == "hobby"
    assert 0 < found[0]["score"] < 1
    assert (found[0]["words"] > 0, found[0]["matched"]) == (True, ["hiking", "mountains"])
    assert found[0]["cosine"] is None
    assert "how much the words" in visitor.get("/memory?q=hiking").text


def test_the_prompt_of_the_last_turn_is_shown_by_part(store: perdure.Store, client: Callable[..., Client]) -> None:
    remembered(store)
    visitor = client()
    for url in ("/api/memory?ns=users/alice", "/api/threads/users%2Falice?view=prompt"):
        said = visitor.get(url).json()["prompt"]
        parts = {part["name"]: [one["key"] for one in part["entries"]] for part in said["parts"] if part["entries"]}
        assert parts == {"pinned": ["allergy"], "memories": ["hobby", "theme"]}
        assert (said["query"], said["budget_tokens"]) == ("Plan a hike for Saturday", 300)
    assert ">allergy</a>" in visitor.get("/threads/users%2Falice?view=prompt").text


def test_an_item_is_pinned_unpinned_and_forgotten_by_a_person(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    remembered(store)
    facts = store.memory("users", "alice", "facts")
    visitor = client()
    form = {"namespace": "users/alice/facts", "key": "hobby", "back": "/memory"}
    assert "perdure memory pin users/alice/facts hobby" in visitor.post_form("pin_item", confirmed=False, **form).text
    assert visitor.notice("pin_item", **form) == "hobby is pinned."
    pinned = facts.get("hobby")
    assert pinned is not None
    assert (pinned.pinned, pinned.version) == (True, 2)
    assert "Conflict" not in visitor.notice("forget_item", version="1", **form)
    assert facts.get("hobby") == pinned
    visitor.notice("unpin_item", **form)
    assert visitor.notice("forget_item", version="3", **form) == "hobby is forgotten. Its history stays."
    assert facts.get("hobby") is None
    shown = visitor.get("/api/memory?key=hobby&in=users/alice/facts").json()["item"]
    assert (shown["is_there"], shown["versions"][0]["gone"]) == (False, "deleted")
    assert [one.action for one in store.ops.actions()] == ["forget", "unpin", "pin"]


def test_a_label_may_have_any_characters(store: perdure.Store, client: Callable[..., Client]) -> None:
    labels = ("a/b", "100%", "<b>", "é ü")
    store.memory(*labels).put("k", "v")
    visitor = client()
    [one] = visitor.get("/api/memory").json()["namespaces"]
    found = visitor.get("/api/memory", params={"ns": one["name"], "in": one["name"], "key": "k"}).json()
    assert (found["labels"], found["item"]["value"]) == (list(labels), "v")
    assert json.loads(visitor.get("/api/memory?ns=/").text)["namespace"] == "/"
