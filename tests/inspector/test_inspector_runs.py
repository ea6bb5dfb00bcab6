"""The pages of runs: what the lists and the details say, and what each action asks, does and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from urllib.parse import quote

import pytest
from inspector_agents import choose, fail, fill, flight, prepare, research, travel, waits
from inspector_fixtures import Client

import perdure
from perdure.inspector.timeline import Timeline

PASSENGER = {"name": "Nadia", "api_key": "k-7"}


@pytest.fixture(params=["sqlite", "postgres"])
def both(request: pytest.FixtureRequest, path: str) -> Iterator[perdure.Store]:
    url = path if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with perdure.open(url) as store:
        yield store


def ids(visitor: Client, query: str = "") -> list[str]:
    answer = visitor.get(f"/api/runs?{query}")
    assert answer.status_code == 200, answer.text
    assert visitor.get(f"/runs?{query}").status_code == 200
    return [run["id"] for run in answer.json()["runs"]]


# --- the list


def test_runs_are_found_by_every_filter(both: perdure.Store, client: Callable[..., Client]) -> None:
    fill(both)
    both.run(travel, "Rome", PASSENGER, id="trip-rome", tags={"customer": "c 42"})
    both.start(flight, "Bern", id="trip-bern", queue="night")
    visitor = client(both)
    assert len(ids(visitor)) == 9
    assert ids(visitor, "status=failed") == ["index-40"]
    assert set(ids(visitor, "status=failed,queued")) == {"index-40", "trip-bern"}
    assert ids(visitor, "function=travel") == ["trip-rome"]
    assert ids(visitor, "queue=night") == ["trip-bern"]
    assert ids(visitor, "tag=" + quote("'customer=c 42'")) == ["trip-rome"]
    assert set(ids(visitor, "id=trip-")) == {"trip-oslo", "trip-lisbon", "trip-rome", "trip-bern"}
    assert ids(visitor, "parent=trip-rome") == ["Rome-seat"]
    assert ids(visitor, "since=1h&until=" + quote("2020-01-01")) == []
    assert len(ids(visitor, "since=1h")) == 9
    for wrong in ("since=soon", "tag=customer", "tag=%27", "status=lost", "before=here"):
        assert visitor.get(f"/runs?{wrong}").status_code == 400
    assert visitor.get("/api/runs?id=trip-").json()["counts"] == {"waiting": 3, "queued": 1}


def test_pages_of_runs_go_on_after_a_cursor_and_children_follow_their_parents(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    store.run(travel, "Rome", PASSENGER, id="trip-rome")
    for number in range(120):
        store.start(waits, number, id=f"w-{number:03}")
    visitor = client()
    first = visitor.get("/api/runs").json()
    assert [run["id"] for run in first["runs"]] == [f"w-{number:03}" for number in range(119, 19, -1)]
    second = visitor.get(f"/api/runs?before={quote(first['next'])}").json()
    assert second["next"] is None
    assert [(run["id"], run["level"]) for run in second["runs"][-2:]] == [("trip-rome", 0), ("Rome-seat", 1)]
    assert f"before={quote(first['next'])}" in visitor.get("/runs").text


# --- actions on runs


def test_an_action_on_one_run_asks_says_who_and_is_recorded(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    run = store.run(waits, 1, id="w-1")
    visitor = client(who_header="X-User")
    visitor.headers["x-user"] = "maria"
    asked = visitor.post_form("change_runs", confirmed=False, run="w-1", verb="cancel")
    assert "Cancel w-1?" in asked.text
    assert "perdure run cancel w-1 --who maria" in asked.text
    assert run.refresh().status == "waiting"
    assert visitor.notice("change_runs", run="w-1", verb="pause") == "Pause: w-1 is paused now."
    assert visitor.notice("change_runs", run="w-1", verb="resume") == "Resume: w-1 is queued now."
    assert visitor.notice("change_runs", run="w-1", verb="cancel") == "Cancel: w-1 is cancelled now."
    assert [(one.action, one.who) for one in store.ops.actions()] == [
        ("cancel", "maria"),
        ("resume", "maria"),
        ("pause", "maria"),
    ]
    assert "choose runs first" in visitor.notice("change_runs", verb="cancel")
    assert "nothing that can be asked" in visitor.notice("change_runs", run="w-1", verb="delete")
    assert "there is no run" in visitor.notice("change_runs", run="gone", verb="cancel")


def test_a_failed_run_is_retried(store: perdure.Store, client: Callable[..., Client]) -> None:
    store.run(fail, "no index", id="f")
    assert client().notice("change_runs", run="f", verb="retry") == "Retry: f is queued now."


def test_chosen_runs_are_changed_together_and_those_refused_are_named(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    for number in range(3):
        store.run(waits, number, id=f"w-{number}")
    store.run(prepare, "x", id="done")
    visitor = client()
    asked = visitor.post_form("change_runs", confirmed=False, run=["w-0", "w-1", "done"], verb="cancel")
    assert "Cancel 3 runs?" in asked.text
    text = visitor.notice("change_runs", run=["w-0", "w-1", "done"], verb="cancel")
    assert text.startswith("Cancel: 2 runs changed (2 cancelled). 1 refused. done: ")
    assert {run.id: run.status for run in store.runs()} == {
        "w-0": "cancelled", "w-1": "cancelled", "w-2": "waiting", "done": "done",
    }  # fmt: skip


def test_all_that_match_are_changed_after_a_count(both: perdure.Store, client: Callable[..., Client]) -> None:
    for number in range(5):
        both.run(waits, number, id=f"w-{number}", tags={"batch": "a b"})
    both.run(flight, "Rome", id="other")
    visitor = client(both)
    form = {"scope": "all", "verb": "cancel", "function": "waits", "tag": "'batch=a b'", "run": "other"}
    asked = visitor.post_form("change_runs", confirmed=False, **form)
    assert "Cancel 5 runs?" in asked.text
    assert "perdure run cancel --tag &#39;batch=a b&#39; --yes" in asked.text
    assert "--function waits" in asked.text
    assert visitor.notice("change_runs", **form) == "Cancel: 5 runs changed (5 cancelled)."
    assert both.get_run("other").status == "waiting"
    assert (
        "no run matches"
        in visitor.get(visitor.post_form("change_runs", confirmed=False, **form).headers["location"]).text
    )
    everything = visitor.post_form("change_runs", confirmed=False, scope="all", verb="cancel")
    assert "Cancel 1 run?" in everything.text
    assert "--status queued --status running" in everything.text


# --- one run


def test_a_run_has_its_steps_values_state_family_and_messages(
    both: perdure.Store, client: Callable[..., Client]
) -> None:
    run = both.run(travel, "Rome", PASSENGER, id="trip", tags={"customer": "c-42"})
    visitor = client(both)
    assert visitor.get("/api/runs/trip").json()["run"]["waits_for"] == "a message on 'gate'"
    both.send(run, {"gate": "B12", "token": "t-1"}, topic="other")
    data = visitor.get("/api/runs/trip").json()
    assert (data["run"]["status"], data["run"]["waits_for"]) == ("waiting", "a worker")
    assert data["arguments"] == {"city": "Rome", "passenger": {"name": "Nadia", "api_key": "***"}}
    assert data["state"] == {"city": "Rome", "password": "***", "stage": "chosen"}
    assert [child["id"] for child in data["children"]] == ["Rome-seat"]
    assert data["messages"][0]["value"] == {"gate": "B12", "token": "***"}
    assert [(row["kind"], row["status"]) for row in data["rows"]] == [(step.kind, step.status) for step in run.steps()]
    assert data["total"] == len(run.steps())
    assert data["verbs"] == [["pause", "Pause"], ["cancel", "Cancel"]]
    for url in ("/runs/trip", "/runs/trip?step=1", "/runs/trip?time=scale", "/runs/Rome-seat", "/runs/trip?from=999"):
        assert visitor.get(url).status_code == 200
    for url in ("/runs/nothing", "/runs/trip?step=99", "/api/runs/nothing?part=steps"):
        assert visitor.get(url).status_code == 404
    assert visitor.get("/runs/trip?step=x").status_code == 400


def test_the_chosen_step_has_its_arguments_key_and_what_it_changed(
    both: perdure.Store, client: Callable[..., Client]
) -> None:
    run = both.run(travel, "Rome", PASSENGER, id="trip")
    visitor = client(both)
    by_name = {step.name: step.number for step in run.steps()}
    hotel = visitor.get(f"/api/runs/trip?step={by_name['book_hotel']}").json()["chosen"]
    assert hotel["arguments"] == {"hotel": "Rome", "api_token": "***"}
    assert (hotel["kind"], hotel["result"], hotel["key"][:3]) == ("effect", {"booking": "H-Rome"}, "pd_")
    first = visitor.get(f"/api/runs/trip?step={by_name['choose']}").json()["chosen"]
    assert {(one["path"], one["kind"], one["after"]) for one in first["changes"]["rows"]} >= {
        ("city", "added", "Rome"),
        ("password", "added", "***"),
        ("stage", "added", "chosen"),
    }
    spawned = visitor.get("/api/runs/trip?step=2").json()["chosen"]
    assert spawned["changes"]["rows"] == [{"path": "password", "kind": "changed", "before": "***", "after": "***"}]


def test_a_failure_shows_its_error_and_traceback(store: perdure.Store, client: Callable[..., Client]) -> None:
    store.run(fail, "the <b>index</b> is gone", id="f")
    data = client().get("/api/runs/f").json()
    assert data["error"] == "ValueError: the <b>index</b> is gone"
    assert "raise ValueError" in data["traceback"]
    assert "the &lt;b&gt;index&lt;/b&gt; is gone" in client().get("/runs/f").text


def test_a_run_that_asks_shows_the_form_that_answers(store: perdure.Store, client: Callable[..., Client]) -> None:
    store.run(flight, "Rome", id="trip")
    page = client().get("/runs/trip").text
    assert "Which flight to Rome?" in page
    assert 'action="/do/answer"' in page


@pytest.fixture(scope="module")
def long_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path_factory.mktemp("long") / "long.db"), durability="normal") as store:
        store.run(research, 1_000, id="long")
        yield store


def test_a_long_run_comes_in_windows_that_links_lead_to(
    long_store: perdure.Store, client: Callable[..., Client]
) -> None:
    visitor = client(long_store)
    data = visitor.get("/api/runs/long").json()
    assert (data["total"], len(data["rows"]), data["is_long"]) == (2_000, 100, True)
    chosen = visitor.get("/api/runs/long?step=1234").json()
    assert (chosen["this_from"], chosen["chosen"]["number"], chosen["rows"][0]["number"]) == (1_200, 1_234, 1_201)
    rows = visitor.get("/api/runs/long?part=steps&from=1900").json()["rows"]
    assert [row["number"] for row in rows] == [*range(1_901, 2_001)]
    assert rows[0]["text"] == '{"url": "https://papers.example/950", "api_key": "***"}'
    assert 'href="/runs/long?from=100"' in visitor.get("/runs/long").text
    assert 'href="/runs/long?from=1100"' in visitor.get("/runs/long?from=1200").text


def test_the_map_of_a_long_run_is_few_bars(long_store: perdure.Store, client: Callable[..., Client]) -> None:
    data = client(long_store).get("/api/runs/long").json()
    assert len(data["map"]) == 48
    assert {(one["kind"], one["status"]) for one in data["map"]} == {("step", "done")}
    assert all(0 <= one["x"] < one["x"] + one["width"] <= 1002 for one in data["map"])


def test_steps_are_found_by_text(long_store: perdure.Store, client: Callable[..., Client]) -> None:
    visitor = client(long_store)
    hits = visitor.get("/api/runs/long?part=find&find=SUMMARISE").json()["hits"]
    assert [hit["number"] for hit in hits[:2]] == [2, 4]
    assert len(hits) == 100
    assert 'href="/runs/long?step=4"' in visitor.get("/runs/long?find=summarise").text
    assert visitor.get("/api/runs/long?part=find&find=nothing").json()["hits"] == []


def test_a_fork_after_a_step(store: perdure.Store, client: Callable[..., Client]) -> None:
    store.run(travel, "Rome", PASSENGER, id="trip")
    visitor = client()
    form = {"run": "trip", "step": "1", "id": "trip-2", "keys": "same"}
    asked = visitor.post_form("fork", confirmed=False, **form)
    assert "perdure run fork trip 1 --name trip-2 --keys same --who" in asked.text
    assert visitor.notice("fork", **form) == "Forked as trip-2. A worker continues it."
    assert store.get_run("trip-2").refresh().origin == "trip"
    assert "choose the keys" in visitor.notice("fork", **{**form, "keys": "none"})
    page = visitor.get("/runs/trip-2").text
    assert "/compare?a=trip&amp;b=trip-2" in page
    assert "shared with the origin" in visitor.get("/runs/trip-2?step=1").text


@perdure.step(retries=3, backoff_s=300)
def unlucky() -> None:
    raise ConnectionError("refused")


@perdure.durable
def tries() -> None:
    prepare("x")
    unlucky()


def test_a_run_says_what_failed_when_it_tries_again_and_what_was_forked_and_can_be_undone(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    store.run(tries, id="tries")
    store.run(prepare, "x", id="done")
    store.fork("tries", at="1", id="again", keys="new")
    visitor = client()
    data = visitor.get("/api/runs/tries").json()
    [retry] = data["retries"]
    assert (retry["name"], retry["attempts"], retry["error"]) == ("unlucky", 1, "ConnectionError: refused")
    assert "Attempt 1 of" in visitor.get("/runs/tries").text
    assert [one["id"] for one in data["forks"]] == ["again"]
    assert visitor.get("/api/runs/again").json()["total"] == 1  # the marker of the fork is no step
    assert visitor.get("/api/runs/done").json()["verbs"] == []  # nothing to undo
    unfinished = visitor.get("/api/compare?a=tries&b=done").json()["changes"]["Result"]["rows"]
    assert unfinished == [{"path": "(all of it)", "kind": "changed", "before": "(no result yet)", "after": "x"}]


def test_a_message_is_sent(store: perdure.Store, client: Callable[..., Client]) -> None:
    run = store.run(travel, "Rome", PASSENGER, id="trip")
    visitor = client()
    asked = visitor.post_form("send", confirmed=False, run="trip", topic="gate", value='{"gate": 7}')
    assert "perdure run send trip" in asked.text
    assert visitor.notice("send", run="trip", topic="gate", value='{"gate": 7}') == "Sent to trip."
    assert run.result(timeout_s=10)[3] == {"gate": 7}
    assert "reload the page" in visitor.notice("send", run="trip")


def test_ids_with_any_character_have_pages(store: perdure.Store, client: Callable[..., Client]) -> None:
    visitor = client()
    for name in ("a/b?c=1#d", "..", "~x", "a b", '"><script>', "日本"):
        store.run(prepare, "x", id=name)
        [url] = [part for part in visitor.get("/runs").text.split('"') if part == f"/runs/{_quoted(name)}"]
        assert visitor.get(f"/api{url}").json()["run"]["id"] == name
        page = visitor.get(url)
        assert page.status_code == 200
        assert "<script>" not in page.text


def _quoted(name: str) -> str:
    return quote(f"~{name}" if name in ("..", "~x") else name, safe="")


# --- compare


def test_two_runs_are_compared_from_where_they_part(both: perdure.Store, client: Callable[..., Client]) -> None:
    both.run(travel, "Rome", PASSENGER, id="a")
    both.fork("a", at="1", id="b", changes={"1": "Rome-2"}, keys="new")
    both.run(choose_twice, "Rome", id="c")
    continued = both.fork("a", at="1", id="d", keys="new")
    with pytest.raises(TimeoutError):
        continued.result(timeout_s=1)
    visitor = client(both)
    data = visitor.get("/api/compare?a=a&b=b").json()
    assert data["kind"] == "run"
    assert data["parted_at"] == 0
    assert data["rows"][0]["a"]["text"] == "Rome-1"
    assert data["rows"][0]["b"]["text"] == "Rome-2"
    assert data["changes"]["Arguments"] is None
    same = visitor.get("/api/compare?a=a&b=a").json()
    assert (same["parted_at"], same["rows"], same["changes"]) == (
        len(both.get_run("a").steps()), [], {"Arguments": None, "Result": None, "State": None},
    )  # fmt: skip
    later = visitor.get("/api/compare?a=a&b=d").json()  # both have the same calls, and the fork's entry is none
    assert all(row["a"] and row["b"] and row["a"]["name"] == row["b"]["name"] for row in later["rows"])
    other = visitor.get("/api/compare?a=a&b=c").json()
    assert other["parted_at"] == 1
    assert {"path": "password", "kind": "removed", "before": "***", "after": None} in other["changes"]["State"]["rows"]
    for url in ("/compare", "/compare?a=a&b=b", "/compare?a=a&b=a", "/compare?a=a&b=c"):
        assert visitor.get(url).status_code == 200
    assert visitor.get("/compare?a=a&b=nothing").status_code == 404


@perdure.durable
def choose_twice(city: str) -> str:
    perdure.state({"city": city})
    return choose(city) + choose(city)


def test_two_threads_are_compared_from_where_they_part(both: perdure.Store, client: Callable[..., Client]) -> None:
    thread = both.thread("main")
    for number in range(5):
        thread.save({"n": number})
    other = thread.fork(name="other")
    thread.save({"n": 5, "token": "t-1"})
    other.save({"n": 6})
    data = client(both).get("/api/compare?a=main&b=other").json()
    assert (data["kind"], data["parted_at"]) == ("thread", 4)
    assert {one["path"] for one in data["changes"]["Between the two"]["rows"]} == {"n", "token"}
    assert data["changes"]["main since they parted"]["rows"][1]["after"] == "***"
    assert client(both).get("/compare?a=main&b=other").status_code == 200
    both.thread("apart").save({})
    assert client(both).get("/api/compare?a=main&b=apart").json()["parted_at"] is None


# --- where steps lie in time


def test_pauses_are_drawn_short_and_work_to_scale() -> None:
    marks = [("step", 0.0, 2.0), ("sleep", 2.0, 3602.0), ("step", 3602.0, 3604.0)]
    line = Timeline(marks, 3604.0)
    assert line.labels() == [(480.0, "1 h")]
    assert [line.bar(begin, end) for _, begin, end in marks] == [(0.0, 48.0), (48.0, 4.0), (52.0, 48.0)]
    scaled = Timeline(marks, 3604.0, to_scale=True)
    assert scaled.labels() == []
    assert scaled.bar(0.0, 2.0) == (0.0, 1.2)
    assert Timeline([], 5.0).bar(5.0, None) == (0.0, 100.0)


def test_the_tail_of_a_run_that_has_ended_says_so(store: perdure.Store, client: Callable[..., Client]) -> None:
    store.run(prepare, "x", id="done")
    text = client().get("/tail/done").text
    assert "event: status" in text
    assert json.loads(text.split("data: ")[1].split("\n")[0])["text"] == "done"
    assert client().get("/tail/nothing").text == ""
