"""What people do in the browser, from the link to the end of a run."""

from __future__ import annotations

import re
from collections.abc import Callable

from inspector_agents import fill, flight, in_doubt, onboard
from playwright.sync_api import Page, expect

import perdure


def test_the_link_opens_the_inbox_and_the_token_leaves_the_url(
    store: perdure.Store, command: Callable[..., str], open_page: Callable[..., Page]
) -> None:
    fill(store)
    page = open_page(command())
    assert "token" not in page.url
    expect(page.get_by_role("heading", level=1)).to_have_text("Inbox")
    expect(page.locator("article.card")).to_have_count(5)
    expect(page.locator("article.card .kind").first).to_have_text("In doubt")
    expect(page.locator("#live")).to_have_text("live")


def test_an_answer_by_option_ends_the_run(
    store: perdure.Store, inspect: Callable[..., str], open_page: Callable[..., Page]
) -> None:
    run = store.run(flight, "Rome", id="trip")
    page = open_page(inspect())
    page.get_by_label("Rome-2").check()
    page.get_by_role("button", name="Answer").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("code")).to_contain_text("perdure answer trip 1 Rome-2 --who")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert len(store.questions()) == 1
    page.get_by_role("button", name="Answer").click()
    page.get_by_role("dialog").get_by_role("button", name="Answer").click()
    expect(page.locator(".note")).to_have_text("Answered. A worker resumes trip, or the line that started it.")
    assert run.result(timeout_s=10) == "Rome-2"


def test_an_answer_by_form_without_script_ends_the_run(
    store: perdure.Store, inspect: Callable[..., str], open_page: Callable[..., Page]
) -> None:
    run = store.run(onboard, "acme", id="onboard")
    page = open_page(inspect(), java_script_enabled=False)
    page.get_by_label("plan").select_option("company")
    page.get_by_label("seats").fill("12")
    page.get_by_label("sso").check()
    page.get_by_role("button", name="Answer").click()
    expect(page.locator("#confirm code")).to_contain_text('"seats": 12')
    page.get_by_role("button", name="Answer").click()
    expect(page.locator(".note")).to_have_text("Answered. A worker resumes onboard, or the line that started it.")
    assert run.result(timeout_s=10) == {"plan": "company", "seats": 12, "sso": True}


def test_a_doubt_is_settled_both_ways_until_the_run_ends(
    store: perdure.Store, inspect: Callable[..., str], open_page: Callable[..., Page]
) -> None:
    happened, lost = in_doubt(store, "happened"), in_doubt(store, "lost")
    page = open_page(inspect())
    card = page.locator("article", has_text="happened").filter(has=page.get_by_role("link", name="happened"))
    card.get_by_label(re.compile("What did it return")).fill('{"booking": "H-1"}')
    card.get_by_role("button", name="It happened", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="It happened").click()
    expect(page.locator(".note")).to_contain_text("counts as done")
    assert happened.result(timeout_s=10) == {"booking": "H-1"}
    expect(page.locator("article.card")).to_have_count(1)
    page.get_by_role("button", name="It did not happen", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="It did not happen").click()
    expect(page.locator(".note")).to_contain_text("a worker will perform it")
    assert lost.result(timeout_s=10) == {"booking": "H-Oslo"}


def test_a_question_appears_by_itself_and_input_is_kept(
    store: perdure.Store, inspect: Callable[..., str], open_page: Callable[..., Page]
) -> None:
    store.run(flight, "Rome", id="first")
    page = open_page(inspect())
    expect(page.locator("#live")).to_have_text("live")
    page.get_by_label("Rome-1").check()
    page.locator("h1").click()
    store.run(flight, "Oslo", id="second")
    expect(page.locator("#inbox-badge")).to_have_text("2")
    expect(page.get_by_label("Rome-1")).to_be_checked()
    page.get_by_role("button", name="Answer").click()
    page.get_by_role("dialog").get_by_role("button", name="Answer").click()
    expect(page.locator("article.card")).to_have_count(1)
    expect(page.get_by_role("link", name="second")).to_be_visible()
