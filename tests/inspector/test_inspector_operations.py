"""Snapshots, schedules, deployments, workers and health: what each page has, what each form does and refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from inspector_agents import fail, fill, flight, waits
from inspector_fixtures import Client
from playwright.sync_api import Page, expect

import perdure

Make = Callable[..., Client]


@pytest.fixture(params=["sqlite", "postgres"])
def both(request: pytest.FixtureRequest, path: str) -> Any:
    url = path if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with perdure.open(url) as store:
        yield store


def changed_since(store: perdure.Store, name: str) -> None:
    """Take a snapshot, then change a thread and an item, and add a run."""
    store.thread("plan").save({"goal": "2 December", "api_token": "t-1"})
    store.memory("users", "ann").put("meal", {"fact": "no mushrooms"})
    store.snapshot(name, note="before v42")
    store.thread("plan").save({"goal": "9 December", "api_token": "t-2"})
    store.memory("users", "ann").put("meal", {"fact": "mushrooms"})
    store.start(waits, 1, id="later")


def test_a_snapshot_shows_what_changed_since_in_pages_without_secrets(
    both: perdure.Store, client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_since(both, "monday")
    visitor = client(both)
    data = visitor.get("/api/snapshots").json()
    assert [(one["name"], one["note"], one["held_bytes"] > 0) for one in data["snapshots"]] == [
        ("monday", "before v42", True)
    ]
    assert [(one["what"], one["namespace"], [row["kind"] for row in one["changes"]]) for one in data["groups"]] == [
        ("thread", [], ["changed"]),
        ("run", [], ["added"]),
        ("item", ["users", "ann"], ["changed"]),
    ]
    assert [(row["path"], row["before"], row["after"]) for row in data["detail"]["rows"]] == [
        ("goal", "2 December", "9 December"),
        ("api_token", "***", "***"),
    ]
    chosen = visitor.get("/api/snapshots", params={"change": "item/users/ann/meal"}).json()["detail"]
    assert [(row["before"], row["after"]) for row in chosen["rows"]] == [("no mushrooms", "mushrooms")]
    monkeypatch.setattr("perdure.inspector.pages.snapshots._PAGE", 2)
    first = visitor.get("/api/snapshots").json()
    second = visitor.get("/api/snapshots", params={"after": first["next"]}).json()
    assert [len(one["changes"]) for one in (*first["groups"], *second["groups"])] == [1, 1, 1]
    assert second["next"] is None


def test_two_snapshots_are_compared_and_the_wrong_order_is_explained(store: perdure.Store, client: Make) -> None:
    changed_since(store, "monday")
    store.snapshot("tuesday")
    store.thread("plan").save({"goal": "none"})
    visitor = client()
    until = visitor.get("/api/snapshots", params={"name": "monday", "until": "tuesday"}).json()
    assert until["detail"]["rows"][0]["after"] == "9 December"
    assert "older" in visitor.get("/snapshots", params={"name": "tuesday", "until": "monday"}).text
    assert visitor.get("/snapshots", params={"name": "sunday"}).status_code == 404
    assert visitor.get("/snapshots", params={"after": "x"}).status_code == 200


def test_a_snapshot_is_taken_restored_after_a_dry_run_and_released(both: perdure.Store, client: Make) -> None:
    changed_since(both, "monday")
    visitor = client(both)
    plan = visitor.get("/api/snapshots", params={"show": "restore"}).json()
    assert [[row["action"] for row in one["changes"]] for one in plan["groups"]] == [["set back"], ["set back"]]
    asked = visitor.post_form("restore_snapshot", confirmed=False, snapshot="monday")
    assert "set back 2" in asked.text
    assert "perdure snapshot restore monday --who" in asked.text
    assert both.thread("plan").load().state["goal"] == "9 December"
    assert "To undo it, restore" in visitor.notice("restore_snapshot", snapshot="monday")
    assert both.thread("plan").load().state["goal"] == "2 December"
    asked = visitor.post_form("restore_snapshot", confirmed=False, snapshot="monday")
    assert "nothing to restore" in visitor.get(asked.headers["location"]).text
    assert visitor.notice("take_snapshot", name="friday", note="the end") == "Took snapshot friday."
    assert "already" in visitor.notice("take_snapshot", name="friday")
    assert visitor.notice("release_snapshot", snapshot="friday") == "Released snapshot friday."
    assert "friday" not in {one.name for one in both.snapshots()}
    did = [(one.action, one.subject) for one in both.ops.actions()][::-1]
    assert did == [("restore", "snapshot monday"), ("take", "snapshot friday"), ("release", "snapshot friday")]


def test_schedules_are_paused_resumed_triggered_and_backfilled(both: perdure.Store, client: Make) -> None:
    both.schedule("nightly", waits, "0 2 * * *", args=[1], timezone="Europe/Lisbon", overlap="queue")
    both.schedule("often", waits, every="15m", args=[1])
    visitor = client(both)
    often, nightly = sorted(visitor.get("/api/schedules").json()["schedules"], key=lambda one: -len(one["when"]))
    assert (often["when"], nightly["when"], len(nightly["upcoming"])) == ("every 15 min", "0 2 * * *", 5)
    assert visitor.notice("change_schedule", schedule="nightly", verb="pause") == "nightly is paused."
    assert both.get_schedule("nightly").paused
    assert visitor.notice("change_schedule", schedule="nightly", verb="resume") == "nightly continues."
    assert "is queued" in visitor.notice("change_schedule", schedule="nightly", verb="trigger")
    asked = visitor.post_form("backfill", confirmed=False, schedule="nightly", since="3d")
    assert "perdure schedule backfill nightly 2" in asked.text
    assert visitor.notice("backfill", schedule="nightly", since="3d") == "3 runs queued."
    assert "since when" in visitor.notice("backfill", schedule="nightly", since=" ")
    assert "a date such as" in visitor.notice("backfill", schedule="nightly", since="soon")
    assert "nothing that can be asked" in visitor.notice("change_schedule", schedule="nightly", verb="delete")
    assert visitor.get("/schedules").status_code == 200
    assert [one.action for one in both.ops.actions()] == ["backfill", "trigger", "resume", "pause"]


def test_a_version_is_deployed_shared_and_reverted(both: perdure.Store, client: Make) -> None:
    both.run(fail, "no", id="f")
    visitor = client(both)
    assert visitor.notice("deploy", function="fail", version="1") == "New runs of fail get version 1."
    asked = visitor.post_form("deploy", confirmed=False, function="fail", version="2", share="5%")
    assert "perdure deploy fail 2 --canary 5%" in asked.text
    notice = visitor.notice("deploy", function="fail", version="2", share="5 %")
    assert notice == "5% of the new runs of fail get version 2."
    [row] = visitor.get("/api/deployments").json()["functions"]
    assert (row["version"], row["canary"], row["share"]) == ("1", "2", 0.05)
    failures = {one["version"]: (one["runs"]["failed"], one["failed_since"]) for one in row["versions"]}
    assert failures == {"2": (0, 0), "1": (0, 0), "": (1, None)}
    assert visitor.get("/deployments").status_code == 200
    assert visitor.notice("revert", function="fail") == "Reverted version 2: new runs of fail get version 1."
    assert "no canary any more" in visitor.notice("revert", function="fail")
    for share in ("150", "-1", "nan", "much"):
        assert "a percentage between" in visitor.notice("deploy", function="fail", version="3", share=share)
    assert [(one.version, one.canary) for one in both.ops.deployments()] == [("1", None)]


def test_queues_say_what_is_due_and_an_hour_is_counted_by_minutes(both: perdure.Store, client: Make) -> None:
    both.start(waits, 1, queue="slow")
    both.run(fail, "no")
    perdure.Worker(both, [], queues=perdure.Queue("limited", concurrency=3)).run(until_idle=True)
    data = client(both).get("/api/workers").json()
    queues = {one["name"]: (one["due"], one["concurrency"], one["oldest_due_at"] is None) for one in data["queues"]}
    assert queues == {"default": (0, None, True), "limited": (0, 3, True), "slow": (1, None, False)}
    assert len(data["minutes"]) == 60
    assert data["hour"] == {"started": 2, "done": 0, "failed": 1}
    assert sum(one["failed"] for one in data["minutes"][-2:]) == data["most"] == 1
    assert client(both).get("/workers").status_code == 200


def test_health_has_findings_figures_rules_and_what_operators_did(both: perdure.Store, client: Make) -> None:
    both.ops.retention(runs="30d", checkpoints=3)
    for number in range(3):
        both.start(waits, number, id=f"r{number}").cancel(who="ann")
    data = client(both).get("/api/health").json()
    assert {one["check"] for one in data["findings"]} >= {"backups", "retention"}
    assert (data["retention"]["runs"], data["retention"]["checkpoints"]) == ("30 d", "the newest 3")
    assert data["figures"]["bytes"] > 0
    assert [(one["who"], one["action"], one["page"]) for one in data["actions"]] == [
        ("ann", "cancel", ["runs", f"r{number}"]) for number in (2, 1, 0)
    ]
    chosen = client(both).get("/api/health", params={"subject": "run r1"}).json()
    assert [one["subject"] for one in chosen["actions"]] == ["run r1"]
    assert "Look again" in client(both).get("/health").text
    again = client(both).get("/api/health", headers={"x-part": "live"}).json()  # a page that is open
    assert (again["findings"], again["actions"]) == ([], data["actions"])


def test_a_read_only_inspector_shows_these_pages_and_refuses_their_forms(store: perdure.Store, client: Make) -> None:
    changed_since(store, "monday")
    store.schedule("nightly", waits, "0 2 * * *", args=[1])
    visitor = client(read_only=True)
    for page in ("snapshots", "schedules", "deployments", "workers", "health"):
        shown = visitor.get(f"/{page}")
        assert shown.status_code == 200
        buttons = re.findall(r"<button (?:(?!</button>).)*</button>", shown.text[shown.text.index("<main") :], re.S)
        assert all("disabled" in one or 'class="copy"' in one or "Close" in one for one in buttons), buttons
    assert visitor.post_form("release_snapshot", snapshot="monday").status_code == 403
    assert [one.name for one in store.snapshots()] == ["monday"]


def test_a_restore_in_the_browser_follows_its_dry_run(
    store: perdure.Store, inspect: Callable[..., str], open_page: Callable[..., Page]
) -> None:
    changed_since(store, "monday")
    page = open_page(inspect())
    page.keyboard.press("g")
    page.keyboard.press("s")
    expect(page.get_by_role("heading", level=1)).to_have_text("Snapshots")
    expect(page.locator("#difference ins, #difference .after").first).to_have_text("9 December")
    page.get_by_role("link", name="Dry run of a restore").click()
    expect(page.locator("#difference h2")).to_have_text("Restoring monday would do this")
    page.get_by_role("button", name="Restore").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("set back 2")
    page.keyboard.press("Escape")
    assert store.thread("plan").load().state["goal"] == "9 December"
    page.get_by_role("button", name="Restore").click()
    dialog.get_by_role("button", name="Restore").click()
    expect(page.locator(".note")).to_contain_text("To undo it, restore")
    assert store.thread("plan").load().state["goal"] == "2 December"


def test_due_runs_and_operators_appear_on_open_pages_by_themselves(
    store: perdure.Store, inspect: Callable[..., str], open_page: Callable[..., Page]
) -> None:
    fill(store)
    link = inspect()
    page = open_page(link)
    page.goto("/".join(link.split("/")[:3]) + "/workers")
    expect(page.locator("#live")).to_have_text("live")
    store.start(flight, "Rome", id="new", queue="slow")
    expect(page.get_by_role("link", name="slow", exact=True)).to_be_visible()
    page.get_by_role("link", name="Health").click()
    expect(page.locator("#live")).to_have_text("live")
    store.get_run("new").cancel(who="zoe")
    expect(page.locator("#log")).to_contain_text("zoe")


def test_a_team_shows_its_members_dead_letters_and_what_was_under_way(both: perdure.Store, client: Make) -> None:
    team = both.team("research")

    @team.agent(policy="dead_letter")
    def writer(state: Any, message: Any) -> None:
        if message == "bad":
            raise ValueError("no such topic")

    team.send(writer, "bad")
    team.work(until_idle=True)
    team.send(writer, {"topic": "tides", "token": "t-1"})
    both.snapshot("monday")
    visitor = client(both)
    [row] = visitor.get("/api/teams").json()["teams"]
    assert (row["name"], row["members"], row["waiting"], row["dead"]) == ("research", 1, 1, 1)
    shown = visitor.get("/api/teams/research", params={"cut": "monday"}).json()
    assert [(one["run"], one["waiting"], one["dead"]) for one in shown["members"]] == [("research/writer", 1, 1)]
    assert [one["message"] for one in shown["in_flight"]] == [{"topic": "tides", "token": "***"}]
    [letter] = shown["letters"]
    assert (letter["message"], "no such topic" in letter["error"]) == ("bad", True)
    form = {"team": "research", "member": "writer", "key": letter["key"]}
    asked = visitor.post_form("resend_letter", confirmed=False, **form, message="good")
    assert f"perdure team dead research --resend {letter['key']} --message good" in asked.text
    assert visitor.notice("resend_letter", **form, message="good") == "Sent again to writer."
    assert "any more" in visitor.notice("drop_letter", **form)
    assert visitor.notice("send_member", team="research", member="writer", message="bad") == "Sent to research/writer."
    team.work(until_idle=True)
    [letter] = visitor.get("/api/teams/research").json()["letters"]
    assert visitor.notice("drop_letter", **{**form, "key": letter["key"]}).startswith("Gave up")
    assert team.dead() == []
    for url in ("/teams", "/teams/research", "/teams/research?cut=monday"):
        assert visitor.get(url).status_code == 200
    drawn = visitor.get("/teams/research?cut=monday").text
    assert "<title>the cut</title>" in drawn
    assert "style=" not in drawn, "the policy of the pages forbids it"
    assert visitor.get("/teams/nobody").status_code == 404
