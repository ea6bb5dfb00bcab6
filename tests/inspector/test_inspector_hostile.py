"""Hostile values wherever users put values: every page of the inspector shows them as text, and stays whole."""

from __future__ import annotations

import html
import itertools
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest
from inspector_agents import lost
from inspector_fixtures import Client
from playwright.sync_api import Page
from soak import SOAK

import perdure
from perdure.inspector.pages import PAGES
from perdure.inspector.view import quoted

_RUNS = "window.ran = 1"
TEXTS = (
    f"<script>{_RUNS}</script>",
    f"</script><script>{_RUNS}</script>",
    f"</title><script>{_RUNS}</script>",
    f"</textarea><img src=x onerror='{_RUNS}'>",
    f"<img src=x onerror={_RUNS.replace(' ', '')}>",
    f"<svg onload='{_RUNS}'>",
    f"<svg><animate onbegin='{_RUNS}' attributeName=x dur=1s>",
    f"<details open ontoggle='{_RUNS}'>",
    f"<iframe src='javascript:{_RUNS}'></iframe>",
    "<base href='https://evil.example/'>",
    "<meta http-equiv=refresh content='0; url=https://evil.example/'>",
    "<link rel=stylesheet href=https://evil.example/a.css>",
    "<style>*{display:none}</style>",
    "<form action=https://evil.example/><button>Approve</button></form>",
    "<!--",
    "-->",
    "]]>",
    "<![CDATA[",
    "<plaintext>",
    "</main></body></html>",
    f'" onmouseover="{_RUNS}" autofocus onfocus="{_RUNS}',
    f"' onmouseover='{_RUNS}' autofocus onfocus='{_RUNS}",
    f"` onmouseover=`{_RUNS}",
    f"javascript:{_RUNS}",
    f"java\tscript:{_RUNS}",
    f"JaVaScRiPt:{_RUNS}//",
    f"data:text/html,<script>{_RUNS}</script>",
    "//evil.example/",
    "https://evil.example/\\@127.0.0.1",
    "{{ 7 * 7 }}",
    "{% raw %}{{ config }}{% endraw %}",
    "{{ ''.__class__.__mro__ }}",
    "${7*7} #{7*7} <%= 7*7 %>",
    "%s %(a)s {0} {a.__class__}",
    "\u202egnp.exe\u202c",
    "\u2066a\u2069 \u200b\u200d\ufeff",
    "a\x1b[31mred\x07",
    "line\nend\r\nand\ttab",
    "Z\u0351\u036b\u0343\u036a\u0302\u036b" * 40,
    "../../etc/passwd",
    "..",
    ".",
    "~",
    "a/b//c/",
    "a?b=c&d=e#f",
    "%2e%2e%2f%00",
    "'\"\\`;--",
    "'; DROP TABLE run; --",
    "-rf --who root",
    "x" * 400,
)
assert len(TEXTS) == 50


@dataclass
class Strange:
    """A class that the inspector's process does not know."""

    text: str


@perdure.effect(timeout_s=0.01, approve="Pay for {text}?")
def pays(text: str) -> str:
    return text


@perdure.effect(timeout_s=0.01)
def posts(text: str) -> str:
    if lost:
        raise lost.pop()
    return text


@perdure.step
def reads(value: Any) -> Any:
    return {"<b>": value}


@perdure.durable(name="<b onclick='window.ran = 1'>asks</b>")
def asks(text: str, value: Any) -> Any:
    reads(value)
    perdure.state()[text] = text
    return perdure.ask(text, options=[text, "<i>other</i>"])


@perdure.durable
def fails(text: str, value: Any) -> None:
    raise ValueError(text)


@perdure.durable
def approves(text: str, value: Any) -> str:
    return pays(text)


@perdure.durable
def doubts(text: str, value: Any) -> str:
    lost.append(TimeoutError(text))
    return posts(text)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with each text in every place that takes it. Its runs and threads have the texts as names."""
    path = str(tmp_path_factory.mktemp("hostile") / "agent.db")
    with perdure.open(path, durability="normal") as store:
        _fill(store)
    _tear(path)
    return path


def _fill(store: perdure.Store) -> None:
    deep: Any = "bottom"
    for _ in range(10_000):
        deep = [deep]
    perdure.register(Strange)
    for number, text in enumerate(TEXTS):
        value = [text, {text: text}, Strange(text), b"\xff\x00", float("inf")]
        function = (asks, fails, approves, doubts)[number % 4]
        store.run(function, text, value, id=text, tags={"<u>tag</u>": text[:60]})
        store.start(asks, text, 1, id=f"later {text}", queue=text)
        thread = store.thread(text, metadata={text: text})
        thread.save({text: value, "messages": [{"role": text, "content": text}]}, note=text)
        store.memory(text, "<b>").put(text, {text: text}, source=text)
        store.ops.deploy(text, text[:60], who=text)
        with suppress(perdure.UsageError):
            store.schedule(text, fails, "0 7 * * *", args=[text, 1], queue=text).pause(who=text)
    _fill_team(store)
    store.thread("large").save({"text": "<b>" * 350_000})
    with pytest.raises(perdure.Unstorable):  # deeper than may be stored
        store.thread("deep").save({"deep": deep})
    store.thread("nested").save({"deep": _nested(100)})
    store.run(asks, "<b>" * 300_000, 1, id="long question")
    store.thread("torn").save({"n": 1})
    for text in TEXTS:
        with suppress(perdure.UsageError):
            store.snapshot(text, note=text, who=text)
    for text in TEXTS[:8]:
        store.thread(text).save({text: "<b>new</b>", "messages": text})
        store.memory(text, "<b>").put(text, {text: "<b>new</b>"})


TEAM = f"team {TEXTS[4]}"  # without a slash


def _fill_team(store: perdure.Store) -> None:
    """A team whose members, messages, errors and dead letters are hostile texts."""
    team = store.team(TEAM)

    def fail(state: Any, message: Any) -> None:
        perdure.send(names[0], message)
        raise ValueError(message)

    names = [text for text in TEXTS if "/" not in text][:8]
    for name in names:
        team.agent(fail, name=name, policy="dead_letter")
        team.send(name, name, key=name)
    team.work(until_idle=True)
    team.snapshot("team cut")


def _nested(levels: int) -> Any:
    value: Any = "<b>bottom</b>"
    for _ in range(levels):
        value = {"<b>": value}
    return value


def _tear(path: str) -> None:
    """Damage what a disk may damage: a checkpoint, and the arguments of a run."""
    with sqlite3.connect(path) as connection:
        torn = "SELECT body FROM record WHERE thread = (SELECT thread FROM thread WHERE name = 'torn')"
        assert connection.execute(f"UPDATE body SET full_text = x'3c623e' WHERE id IN ({torn})").rowcount == 1
        connection.execute("UPDATE run_value SET value = x'3c623e' WHERE run = (SELECT min(run) FROM run_value)")
    connection.close()


_WHOLE = """() => ({
    ran: window.ran, title: document.querySelectorAll("h1, #confirm").length, images: document.images.length,
    foreign: document.querySelectorAll(
        "iframe, object, embed, base, meta[http-equiv], style, [style], plaintext").length,
    handlers: [...document.querySelectorAll("*")].filter(
        e => [...e.attributes].some(a => a.name.startsWith("on"))).length,
    scripts: [...document.scripts].filter(e => !e.src.startsWith(location.origin + "/static/")).length,
    links: [...document.querySelectorAll("[href], [action]")].filter(e => !e.closest("svg")
        && !(e.href || e.action).startsWith(location.origin + "/")).length,
    ended: document.querySelector("body > dialog#keys") !== null,
})"""


def _paths() -> list[str]:
    """Return a URL of every page. Lists show every text; of pages of one thing, the test below asks for all."""
    names = TEXTS if SOAK else TEXTS[::9]
    filled = [page.path for page in PAGES if "{" not in page.path]
    filled += [f"/{page}/{quoted(name)}" for page in ("runs", "threads") for name in names]
    filled += [f"/compare?a={quote(TEXTS[0], safe='')}&b={quote(TEXTS[4], safe='')}", "/snapshots?show=restore"]
    filled += ["/teams", f"/teams/{quoted(TEAM)}", f"/teams/{quoted(TEAM)}?cut=team%20cut"]
    texts = TEXTS[:30:6] if SOAK else TEXTS[:1]
    filled += [f"/{page}?{name}={quote(text, safe='')}" for text in texts for page, name in _QUERIES]
    return [*filled, "/threads/large", "/threads/nested", "/threads/torn", "/runs/long question"]


_QUERIES = (("runs", "function"), ("runs", "id"), ("health", "subject"), ("snapshots", "change"))


def test_hostile_values_are_text_on_every_page(
    hostile: str, inspect: Callable[..., str], open_page: Callable[..., Page]
) -> None:
    link = inspect(hostile)
    page = open_page(link)
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog: {dialog.message}"))
    own = "/".join(link.split("/")[:3])
    broken = []
    for path in _paths():
        answer = page.goto(own + path, wait_until="domcontentloaded")
        assert answer is not None
        state = page.evaluate(_WHOLE)
        good = {"ran": None, "title": 1, "images": 1, "ended": True} | dict.fromkeys(
            ("foreign", "handlers", "scripts", "links"), 0
        )
        if state != good or answer.status != 200 or own not in page.url:
            broken.append((path, answer.status, state))
    assert broken == []


def test_every_hostile_name_has_a_page_that_escapes_it(hostile: str, client: Callable[..., Client]) -> None:
    with perdure.open(hostile, read_only=True) as store:
        visitor = client(store, read_only=True)
        texts = [text for text in TEXTS if "%" not in text]  # the client decodes those twice
        for kind, text in itertools.product(("runs", "threads"), texts):
            page = visitor.get(f"/{kind}/{quoted(text)}")
            assert page.status_code == 200, text
            assert text not in page.text or html.escape(text) == text, text


def test_hostile_values_are_text_in_confirmations(
    hostile: str, inspect: Callable[..., str], open_page: Callable[..., Page]
) -> None:
    page = open_page(inspect(hostile))
    cards = page.locator("article.card")
    for number in range(0, cards.count(), 25):
        card = cards.nth(number)
        if card.locator("input[type=radio]").count():
            card.locator("input[type=radio]").first.check()
            card.get_by_role("button", name="Answer").click()
        else:
            card.locator("button[name=answer], button[value=not_done]").first.click()
        page.locator("dialog #confirm").wait_for()
        state = page.evaluate(_WHOLE)
        assert (state.get("ran"), state["foreign"], state["handlers"], state["scripts"]) == (None, 0, 0, 0)
        page.keyboard.press("Escape")
