"""Journeys through threads and memory in a real browser: scrub, compare, roll back, fork, pin, edit; search, forget."""

from __future__ import annotations

import re
from collections.abc import Callable

from inspector_threads import chat, fill_threads, plan, remembered
from playwright.sync_api import Page, expect

import perdure

Inspect = Callable[..., str]
OpenPage = Callable[..., Page]


def go(page: Page, path: str) -> None:
    page.goto("/".join(page.url.split("/")[:3]) + path)


def confirm(page: Page, button: str) -> None:
    page.get_by_role("dialog").get_by_role("button", name=button, exact=True).click()


def test_scrub_compare_and_roll_back(store: perdure.Store, inspect: Inspect, open_page: OpenPage) -> None:
    thread = plan(store)
    page = open_page(inspect())
    page.get_by_role("link", name="Threads").click()
    page.get_by_role("link", name="plans/launch").click()
    expect(page.locator(".big")).to_have_text("Step 8 of 8")
    expect(page.locator("#live")).to_have_text("live")
    page.get_by_role("slider", name="Step").fill("3")
    expect(page.locator(".big")).to_have_text("Step 3 of 8")
    expect(page).to_have_url(re.compile(r"\?at=3$"))
    expect(page.locator(".diff")).to_contain_text("turn")
    page.locator("h1").click()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    expect(page.locator(".big")).to_have_text("Step 0 of 8")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".big")).to_have_text("Step 1 of 8")
    assert page.get_by_role("slider", name="Step").input_value() == "1"
    page.reload()
    expect(page.locator(".big")).to_have_text("Step 1 of 8")
    page.get_by_role("link", name="Here to head").click()
    expect(page.get_by_role("heading", name=re.compile("changes since step 1"))).to_be_visible()
    page.get_by_label("Since step").fill("5")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", name=re.compile("since step 5"))).to_be_visible()
    page.get_by_role("slider", name="Step").fill("2")
    expect(page.locator(".big")).to_have_text("Step 2 of 8")
    page.get_by_label("Roll back, because").fill("a wrong turn")
    page.get_by_role("button", name="Roll back to here").click()
    expect(page.get_by_role("dialog")).to_contain_text("perdure thread rollback")
    page.keyboard.press("Escape")
    assert thread.load().state["turn"] == 9
    page.get_by_role("button", name="Roll back to here").click()
    confirm(page, "Roll back")
    expect(page.locator(".note")).to_contain_text("Rolled back to")
    expect(page.locator(".big")).to_have_text("Step 9 of 9")
    expect(page.locator("#at")).to_contain_text("a wrong turn")
    assert store.thread("plans/launch").load().state["turn"] == 3


def test_fork_pin_and_edit_a_value(store: perdure.Store, inspect: Inspect, open_page: OpenPage) -> None:
    thread = plan(store)
    page = open_page(inspect())
    go(page, "/threads/plans%2Flaunch?at=4")
    page.get_by_label("Pin as").fill("agreed")
    page.get_by_role("button", name="Pin", exact=True).click()
    confirm(page, "Pin")
    expect(page.locator("#places")).to_contain_text("agreed")
    assert [one.checkpoint for one in thread.pins()] == [thread.at_step(4).id]
    page.get_by_label("Fork as").fill("plans/other")
    page.get_by_role("button", name="Fork here").click()
    confirm(page, "Fork")
    expect(page.locator(".note")).to_have_text("Forked as plans/other.")
    assert store.thread("plans/other").load().state["turn"] == 5
    page.get_by_role("link", name="Edit goal").click()
    box = page.get_by_label(re.compile("New value of goal"))
    expect(box).to_have_value('"Launch review"')
    box.fill('"Launch on Monday"')
    page.get_by_label("Note").fill("agreed by phone")
    page.get_by_role("button", name="Save a new checkpoint").click()
    confirm(page, "Save")
    expect(page.locator(".note")).to_contain_text("goal is changed")
    expect(page.locator("#checkpoint ins")).to_contain_text("Monday")
    head = store.thread("plans/launch").load()
    assert (head.state["goal"], head.note, head.step) == ("Launch on Monday", "agreed by phone", 9)


def test_a_save_appears_by_itself_and_the_scrubber_grows(
    store: perdure.Store, inspect: Inspect, open_page: OpenPage
) -> None:
    thread = plan(store)
    page = open_page(inspect())
    go(page, "/threads/plans%2Flaunch")
    expect(page.locator("#live")).to_have_text("live")
    thread.update({"turn": 10})
    expect(page.locator(".big")).to_have_text("Step 9 of 9")
    expect(page.get_by_role("slider", name="Step")).to_have_attribute("max", "9")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".big")).to_have_text("Step 8 of 9")
    thread.update({"turn": 11})
    expect(page.get_by_role("slider", name="Step")).to_have_attribute("max", "10")
    expect(page.locator(".big")).to_have_text("Step 8 of 10")


def test_the_chat_of_a_langgraph_thread_is_scrubbed(
    store: perdure.Store, inspect: Inspect, open_page: OpenPage
) -> None:
    chat(store)
    page = open_page(inspect())
    go(page, "/threads/support%2Fchat-1042")
    expect(page.locator(".chat li")).to_have_count(8)
    expect(page.get_by_text("Pay back 1,240.00 EUR?", exact=True)).to_be_visible()
    expect(page.locator(".chat .new")).to_contain_text("Most likely")
    page.locator("h1").click()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    expect(page.locator(".big")).to_have_text("Step 5 of 8")
    expect(page.locator(".chat li")).to_have_count(6)
    expect(page.get_by_text("Pay back 1,240.00 EUR?", exact=True)).to_have_count(0)


def test_memory_is_searched_pinned_and_forgotten_by_keyboard(
    store: perdure.Store, inspect: Inspect, open_page: OpenPage
) -> None:
    remembered(store)
    page = open_page(inspect())
    page.keyboard.press("g")
    page.keyboard.press("m")
    expect(page.get_by_role("heading", name="Memory", exact=True)).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("hiking in the mountains")
    page.keyboard.press("Enter")
    expect(page.locator("#items tbody tr").first).to_contain_text("words")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("#item h2")).to_have_text("hobby")
    page.locator("#item").get_by_role("button", name="Pin").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("perdure memory pin")
    page.keyboard.press("Enter")
    expect(page.locator(".note")).to_have_text("hobby is pinned.")
    page.locator("#item").get_by_role("button", name="Forget").focus()
    page.keyboard.press("Enter")
    confirm(page, "Forget")
    expect(page.locator("#item")).to_contain_text("It is gone: deleted")
    assert store.memory("users", "alice", "facts").get("hobby") is None


def test_threads_are_read_and_changed_without_script(
    store: perdure.Store, inspect: Inspect, open_page: OpenPage
) -> None:
    fill_threads(store)
    page = open_page(inspect(), java_script_enabled=False)
    go(page, "/threads?name=plans/")
    page.get_by_role("link", name="plans/launch", exact=True).click()
    page.get_by_role("link", name="The one before").click()
    expect(page.locator(".big")).to_have_text("Step 7 of 8")
    page.get_by_role("link", name="JSON").last.click()
    expect(page.locator("pre.json")).to_contain_text('"turn": 8')
    page.get_by_role("button", name="Roll back to here").click()
    expect(page.locator("#confirm")).to_contain_text("perdure thread rollback")
    page.get_by_role("button", name="Roll back").click()
    expect(page.locator(".note")).to_contain_text("Rolled back to")
    assert store.thread("plans/launch").load().state["turn"] == 8


def test_threads_and_memory_fit_a_narrow_screen_in_the_dark(
    store: perdure.Store, inspect: Inspect, open_page: OpenPage
) -> None:
    fill_threads(store)
    page = open_page(inspect(), viewport={"width": 390, "height": 844}, color_scheme="dark")
    for path in (
        "/threads",
        "/threads/plans%2Flaunch?base=first",
        "/threads/support%2Fchat-1042",
        "/threads/users%2Falice?view=prompt",
        "/memory?ns=users/alice&key=theme&in=users/alice/facts",
        "/memory?q=hiking",
    ):
        go(page, path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
    go(page, "/threads/plans%2Flaunch")
    page.get_by_role("link", name="The one before").click()
    expect(page.locator(".big")).to_have_text("Step 7 of 8")
