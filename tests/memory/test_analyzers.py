"""What each analyzer finds, as the documentation says; and stores whose words another analyzer has cut."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.errors import ExtraMissing, UsageError
from perdure.langgraph import PerdureStore
from perdure.memory import stored_indexes
from perdure.memory.analyzers import analyzer_of
from perdure.memory.words import IndexText

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "how-search-ranks.md"
NAMED = ("english", "simple", "ngrams")


def documented(words: str) -> list[tuple[str, str, bool]]:
    """Return item, query, and whether the page says that the query finds the item."""
    table = PAGE.read_text().split("is searched for by")[1].split("\n\n")[0]
    rows = [line[2:-2].replace("`", "").split(" | ") for line in table.splitlines()[2:]]
    said = []
    for item, query, *cells in rows:
        verdict, _, language = cells[NAMED.index(words) if words in NAMED else -1].partition(", ")
        assert verdict in ("yes", "no")
        if language in ("", words):  # of another language of Snowball it says nothing
            said.append((item, query, verdict == "yes"))
    return said


@pytest.mark.parametrize("words", [*NAMED, "german", "spanish", "french", "russian", "finnish"])
def test_the_table_of_the_documentation_is_true(words: str) -> None:
    with perdure.open(":memory:", words=words) as store:
        memory, answers = store.memory("m"), []
        for item, query, _ in documented(words):
            memory.put("item", json.loads(item) if item.startswith("{") else item)
            answers.append((item, query, bool(memory.search(query))))
    assert answers == documented(words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("english", "409fd7cf31131517"), ("simple", "fc4dc2a956f0cd91"), ("ngrams", "6d3a6af7253e65cd")],
)
def test_what_an_analyzer_makes_of_a_text_changes_only_with_its_version(words: str, expected: str) -> None:
    """If this fails, raise `words._VERSION`: stored words are then cut again. Then set the new digests here."""
    text = IndexText("Will hiked 富士山 with бабушкой 🎸 zu den Häusern", "Nobody knows", "favoriteColor 4711")
    packed = analyzer_of(words).pack(text)
    assert blake2b(packed, digest_size=8).hexdigest() == expected


def keys(hits: list[Any]) -> list[str]:
    return [item.key for item in hits]


class Cut:
    """An analyzer that counts the texts of items that it has cut."""

    id = "test cut"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> list[str]:
        self.texts += [text] if "Haus" in text or "Häuser" in text else []
        return [word[:4].lower().replace("ä", "a") for word in text.split()]


@pytest.mark.parametrize("options", [{}, {"keys": bytes(range(32))}], ids=["plain", "encrypted"])
@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_a_store_is_searched_by_the_words_of_the_process_whoever_has_cut_them(url: str, options: Any) -> None:
    with perdure.open(url, **options) as english, perdure.open(url, words="german", **options) as german:
        old = english.memory("m").put("home", {"fact": "Drei Häuser"})
        english.memory("m").put("home", {"fact": "Zwei Häuser am Hang"})
        english.snapshot("before")
        assert keys(english.memory("m").search("Haus")) == []
        assert keys(german.memory("m").search("Haus")) == ["home"]
        english.memory("m", "n").put("work", {"fact": "Hochhäuser", "was": "Häuser"})
        english.memory("m").pin("home")
        assert {*keys(german.memory("m").search("Haus"))} == {"home", "work"}
        assert keys(german.memory("m").as_of(old.at).search("drei Haus")) == ["home"]
        german.memory("m").put("hikes", "she hikes")
        assert keys(english.memory("m").search("hiking")) == ["hikes"]
        assert english.ops.verify().ok
        assert german.ops.verify().ok
        assert german.memory("m").reindex() == 4
        assert german.memory("m").reindex() == 0
        assert keys(english.memory("m").search("hiking")) == ["hikes"]
        assert english.ops.verify().ok
        for store in (german, german.get_snapshot("before").store, german.at(old.at)):
            assert "home" in keys(store.memory("m").search("Haus"))
        changes = german.get_snapshot("before").diff()
        assert [change.kind for change in changes if change.what == "item" and change.name == "home"] == ["changed"]
    cut = Cut()
    with perdure.open(url, words=cut, **options) as store:
        assert "home" in keys(store.memory("m").search("Haus"))
        assert cut.texts.count("Zwei Häuser am Hang") == 1, "each version that is there is cut once"
        assert store.memory().reindex() == 5
    cut.texts.clear()
    with perdure.open(url, words=cut, **options) as store:
        assert "home" in keys(store.memory("m").search("Haus"))
        assert cut.texts == ["Haus"], "stored words are not cut again"


def test_a_stored_index_serves_the_analyzer_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_indexes, "ITEMS_MIN", 10)
    path = tmp_path / "a.db"
    with perdure.open(path) as store:
        store.memory("m").put_many({f"k{n}": f"Haus {n}" for n in range(20)} | {"more": "Häuser"})
        assert len(store.memory("m").search("Haus", limit=50)) == 20
    for words, count in (("german", 21), ("english", 20), ("german", 21)):
        with perdure.open(path, words=words) as store:
            assert len(store.memory("m").search("Haus", limit=50)) == count


def test_copies_and_adapters_have_the_words_of_their_store(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        store.memory("m").put("home", {"fact": "Zwei Häuser"})
        store.ops.transfer(tmp_path / "b.db")
        store.ops.backup(tmp_path / "a.backup")
    with perdure.open(tmp_path / "a.db", words="german", read_only=True) as store:
        assert keys(store.memory("m").search("Haus")) == ["home"]
    perdure.ops.restore_backup(tmp_path / "a.backup", tmp_path / "c.db")
    for name in ("b.db", "c.db"):
        with PerdureStore(str(tmp_path / name), words="german") as adapter:
            adapter.put(("m",), "other", {"fact": "Ein Haus"})
            assert {each.key for each in adapter.search(("m",), query="Häusern") if each.score} == {"home", "other"}
            assert adapter.store.ops.verify().ok


def test_values_that_merge_and_facts_that_say_the_same_are_cut_by_the_store(tmp_path: Path) -> None:
    with perdure.open(tmp_path / "a.db", words="german") as store:
        memory = store.memory("m")
        memory.put("places", perdure.memory.ORSet().add("Zwei Häuser"))
        assert keys(memory.search("Haus")) == ["places"]
        save = memory.tools()[1]
        save("home", "Alice mietet zwei Häuser")
        save("house", "Alice mietet zwei Haus")
        assert {*keys(memory.list())} == {"places", "home"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("engish", "'engish': english, simple, ngrams, arabic, .*turkish, yiddish, or a function"),
        ("porter", "'porter': english"),
        (None, "None is no analyzer"),
        (["english"], "is no analyzer"),
        (lambda text: text.split(), "a name of its own, or an `id`"),
        (object(), "is no analyzer"),
        (re.compile("[a-z]+").findall, "a name of its own"),
    ],
)
def test_words_that_are_no_analyzer_are_refused_before_there_is_a_store(words: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        perdure.open(tmp_path / "a.db", words=words)
    assert [*tmp_path.iterdir()] == []


def test_a_language_of_snowball_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "Stemmer", None)
    with pytest.raises(ExtraMissing, match=r"words='danish' needs the extra `search`.*pip install '\.\[search\]'"):
        perdure.open(":memory:", words="danish")


def _no_list(text: str) -> Any:
    return text


def _no_words(text: str) -> Any:
    return [text.encode()]


@pytest.mark.parametrize("words", [_no_list, _no_words])
def test_a_function_returns_a_list_of_terms(words: Callable[[str], Any]) -> None:
    with perdure.open(":memory:", words=words) as store, pytest.raises(UsageError, match="as a list of str, not"):
        store.memory("m").put("a", "fish")
