"""What every search index of memory promises: the contract of `SearchIndex`, for any that a store can be opened with.

`Indexed` is a store with an index; what it finds is compared with what ranking everything in the process finds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest

import perdure
from perdure.log.cache import TenantCache
from perdure.memory import search
from perdure.memory.handle import Memory
from perdure.memory.large import Near, NearestQuery, SearchIndex
from perdure.memory.scopes import searcher_of
from perdure.storage.program import drive

DIMENSION = 24
WORDS = [f"word{n}" for n in range(60)]


def embed(texts: list[str]) -> list[list[float]]:
    """A vector from the letters of a text: texts that share words are near."""
    made = []
    for text in texts:
        vector = numpy.zeros(DIMENSION)
        for word in text.split():
            vector += numpy.random.default_rng(sum(map(ord, word))).normal(size=DIMENSION)
        made.append(vector.tolist())
    return made


def embed_otherwise(texts: list[str]) -> list[list[float]]:
    return [[*vector[1:], vector[0] + 0.1] for vector in embed(texts)]


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=4))


class Indexed:
    """A store with an index, and the threshold above which it is asked."""

    def __init__(self, open_store: Callable[..., perdure.Store], monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self._patch = open_store, monkeypatch
        self.store = open_store(embedder=embed)

    @contextmanager
    def large(self, items: int = 0) -> Iterator[None]:
        with self._patch.context() as patch:
            patch.setattr(search, "LARGE_ITEMS", items)
            patch.setattr(searcher_of(self.store._context), "scopes", TenantCache(1 << 20))
            patch.setattr(search, "PROPOSED", 16)
            yield

    def both(self, memory: Memory, query: str, **options: Any) -> list[str]:
        """The keys that are found, after the check that the index gives what ranking everything gives."""
        plain = memory.search(query, explain=True, **options)
        with self.large():
            proposed = memory.search(query, explain=True, **options)
        assert [item.key for item in proposed] == [item.key for item in plain]
        assert [item.score for item in proposed] == pytest.approx([item.score for item in plain], abs=1e-5)
        return [item.key for item in proposed]

    def nearest(self, query: str, limit: int, *labels: str, tenant: str = "default") -> list[Near]:
        """What the index proposes."""
        store = self.store.tenant(tenant)
        searcher = searcher_of(store._context)
        number, index = drive(store._context.driver, store._context.tenant()), self.index
        assert number is not None
        assert searcher.embedding is not None
        [vector] = drive(store._context.driver, searcher.embedding.embed([query])).vectors
        assert vector is not None
        wanted = NearestQuery(number, store.memory(*labels)._path, searcher.model, vector, limit)
        return drive(store._context.driver, index.nearest(wanted))

    @property
    def index(self) -> SearchIndex:
        found = searcher_of(self.store._context).index
        assert found is not None
        return found


class SearchIndexContract:
    """Subclasses have a fixture `indexed`."""

    @pytest.fixture(autouse=True)
    def it_never_fails(self, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
        yield  # without it, items are found by words, and a warning is logged
        assert not caplog.records

    @pytest.fixture
    def filled(self, indexed: Indexed) -> Indexed:
        rng = random.Random(7)
        for name in ("alice", "bob"):
            items = {f"{name}-{n}": {"fact": text(rng), "even": n % 2 == 0} for n in range(150)}
            indexed.store.memory("users", name).put_many(items)
        return indexed

    def test_it_finds_what_ranking_everything_finds(self, filled: Indexed) -> None:
        rng = random.Random(1)
        for scope in (("users", "alice"), ("users",), ()):
            for _ in range(4):
                filled.both(filled.store.memory(*scope), text(rng), limit=10)
        alice = filled.store.memory("users", "alice")
        filled.both(alice, "word1", limit=7, offset=30)
        filled.both(alice, "word1 word2", limit=20, where={"even": True})
        filled.both(alice, "word1 word2", limit=20, relevant=True)
        assert len(filled.both(alice, "word1", limit=1000)) == 150  # never fewer than exist

    async def test_async_searches_find_the_same(self, filled: Indexed) -> None:
        alice = filled.store.memory("users", "alice")
        plain = [item.key for item in alice.search("word1 word2")]
        with filled.large():
            assert [item.key for item in await alice.asearch("word1 word2")] == plain

    def test_a_filter_that_few_items_pass_loses_none(self, filled: Indexed) -> None:
        alice = filled.store.memory("users", "alice")
        alice.put("rare", {"fact": "word59 word58", "rare": True})
        assert filled.both(alice, "word1 word2", where={"rare": True}) == ["rare"]

    def test_what_was_written_is_found_at_once(self, filled: Indexed) -> None:
        alice = filled.store.memory("users", "alice")
        assert "new" not in filled.both(alice, "word7 word8")
        alice.put("new", {"fact": "word7 word8"})
        assert filled.both(alice, "word7 word8")[0] == "new"
        alice.put("new", {"fact": "word9"})
        assert filled.both(alice, "word9")[0] == "new"
        alice.delete("new")
        alice.forget({"even": True})
        assert "new" not in filled.both(alice, "word9", limit=200)

    def test_it_keeps_no_versions_that_have_ended(self, filled: Indexed) -> None:
        alice = filled.store.memory("users", "alice")
        for n in range(20):
            alice.put("again", {"fact": f"word1 {n}"})
            filled.both(alice, "word1", limit=3)
        alice.delete("again")
        with filled.large():
            alice.search("word1")
        found = filled.nearest("word1", 1000, "users", "alice")
        assert len(found) == 150
        assert [one.cosine for one in found] == sorted((one.cosine for one in found), reverse=True)

    def test_no_other_tenant_or_namespace_is_proposed(self, filled: Indexed) -> None:
        filled.store.tenant("other").memory("users", "alice").put("secret", {"fact": "word1 word2"})
        before = filled.both(filled.store.memory("users", "alice"), "word1 word2")
        assert len(filled.nearest("word1 word2", 1000, "users", "alice")) == 150
        assert len(filled.nearest("word1 word2", 1000, "users", "alice", tenant="other")) == 1
        with filled.large():
            other = filled.store.tenant("other").memory()
            assert [item.key for item in other.search("word1 word2")] == ["secret"]
        assert "secret" not in before

    def test_expired_items_are_proposed_and_not_returned(self, filled: Indexed) -> None:
        alice = filled.store.memory("users", "alice")
        alice.put("brief", {"fact": "word1 word2"}, ttl_s=60)
        assert filled.both(alice, "word1 word2")[0] == "brief"
        clock = filled.store._context.clock_us
        filled.store._context.clock_us = lambda: clock() + 61_000_000
        assert "brief" not in filled.both(alice, "word1 word2", limit=200)

    def test_another_embedder_needs_reembed_only(self, filled: Indexed) -> None:
        filled.store.close()
        filled.store = filled.open(embedder=embed_otherwise)
        alice = filled.store.memory("users", "alice")
        by_words = filled.both(alice, "word3", limit=200)
        assert 0 < len(by_words) < 150
        alice.reembed()
        assert len(filled.both(alice, "word3", limit=200)) == 150

    def test_what_is_erased_is_not_in_it_any_more(self, filled: Indexed) -> None:
        alice = filled.store.memory("users", "alice")
        alice.put("secret", {"fact": "word1 word2"})
        assert filled.both(alice, "word1 word2")[0] == "secret"
        alice.erase("secret")
        assert len(filled.nearest("word1 word2", 1000, "users", "alice")) == 150
        filled.both(alice, "word1 word2")

    def test_only_large_scopes_ask_it(self, filled: Indexed, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(search, "NearestQuery", None)
        with filled.large(150):
            assert len(filled.store.memory("users", "alice").search("word1")) == 10
        with filled.large(149), pytest.raises(TypeError):
            filled.store.memory("users", "alice").search("word1")
