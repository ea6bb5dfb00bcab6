"""Values for people: masks, limits, hostile content; the JSON twins; colours that can be read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspector_agents import fill
from inspector_fixtures import Client

import perdure
from perdure.inspector import values
from perdure.inspector.pages import PAGES

HERE = Path(values.__file__).parent


@perdure.durable
def echo(text: str) -> Any:
    return perdure.ask(text, options=[text, {"note": text}])


def test_every_page_without_parameters_has_a_twin_with_the_same_data(
    store: perdure.Store, client: Callable[..., Client]
) -> None:
    fill(store)
    visitor = client()
    for page in PAGES:
        if "{" not in page.path:
            twin = visitor.get(f"/api{page.path}")
            assert twin.headers["content-type"] == "application/json"
            assert isinstance(twin.json(), dict)
            assert visitor.get(page.path).status_code == 200
    cards = visitor.get("/api/").json()["cards"]
    assert [card["run"] for card in cards][:2] == ["trip-oslo", "refund-8841"]
    assert "attachment" in visitor.get("/api/?download=1").headers["content-disposition"]
    assert visitor.get("/api/nowhere").json() == {"error": "There is no such page."}


def test_values_under_secret_keys_are_masked_unless_revealed() -> None:
    state = {"user": "ann", "api_key": "k-1", "deep": [{"password": {"a": 1}, "tokens": 12}], "token": None}
    shown = values.plain(state)
    assert shown == {"user": "ann", "api_key": "***", "deep": [{"password": "***", "tokens": 12}], "token": None}
    assert values.plain(state, reveal=True) == state


def test_a_tree_has_limits_and_says_what_is_left_out() -> None:
    deep: Any = "end"
    for _ in range(10_000):
        deep = [deep]
    node = values.tree(values.plain(deep))
    for _ in range(values.LEVELS_MAX):
        [node] = node.children
    assert (node.children, node.more) == ([], 1)
    wide = values.tree(values.plain({str(n): n for n in range(250)}))
    assert (len(wide.children), wide.more, wide.is_cut) == (100, 150, True)
    long = values.tree("x" * 1_000_000)
    assert (len(long.text), long.more) == (2_000, 998_000)


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "{{ 7 * 7 }}",
        "javascript:alert(1)",
        "‮evil",
        "a\x00b",
    ],
)
def test_hostile_content_is_text(store: perdure.Store, client: Callable[..., Client], text: str) -> None:
    run = text.replace("\x00", "")
    store.run(echo, text.replace("\x00", "\x01"), id=run)
    page = client().get("/").text
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert not re.search("[\x01\u202e]", re.sub(r'(value|data-copy)="[^"]*"', "", page))
    assert json.loads(client().get("/api/").text)["cards"][0]["run"] == run


def test_nothing_in_a_page_needs_what_the_policy_forbids() -> None:
    for path in (HERE / "templates").iterdir():
        text = path.read_text()
        assert not re.search(r"\sstyle=|\son\w+=|<style|javascript:|\| *safe\b", text), path
        assert not re.search(r"<script(?! type=\"module\" src=)", text), path
    assert not re.search("innerHTML|insertAdjacentHTML|eval\\(", (HERE / "static/inspector.js").read_text())


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_a_contrast_of_4_5_in_both_themes(theme: int) -> None:
    text = (HERE / "static/style.css").read_text()
    colours = {
        name: (light, dark)[theme]
        for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", text)
    }
    hues = ("green", "blue", "amber", "rose", "red", "violet", "grey")
    pairs = [(hue, f"{hue}-soft") for hue in hues] + [("accent-text", "accent"), ("panel", "red")]
    pairs += [(front, back) for front in ("text", "soft", "accent", *hues) for back in ("bg", "panel", "sunk")]
    pairs += [("text", "accent-soft"), ("text", "added"), ("text", "removed"), ("text", "added-strong")]
    for front, back in pairs:
        light, dark = sorted((luminance(colours[front]), luminance(colours[back])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (front, back)
