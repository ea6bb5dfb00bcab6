"""Namespaces that are too large for the process: Qdrant proposes, the database decides."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from search_index_contract import Indexed, SearchIndexContract

import perdure
from perdure.memory.qdrant import QdrantIndex

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

LOCAL_MODE = (
    "ignore:Payload indexes have no effect",
    "ignore:Local mode performs exact",
    "ignore:.*sqlite3.Connection:pytest.PytestUnraisableExceptionWarning",  # qdrant-client leaves one open
    "ignore:unclosed database:ResourceWarning",
)
KEY = bytes(range(32))
FACTS = {f"k{n}": {"fact": f"word{n % 7} word{n % 11}"} for n in range(100)}


def qdrant(place: str | None = None, **options: Any) -> QdrantClient:
    from qdrant_client import QdrantClient  # slow to import: not in each process that collects

    return QdrantClient(place, **options)


@pytest.mark.filterwarnings(*LOCAL_MODE)
class TestQdrant(SearchIndexContract):
    @pytest.fixture
    def indexed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Indexed]:
        index = QdrantIndex(qdrant(":memory:"))
        opener = partial(perdure.open, tmp_path / "a.db", durability="normal", search_index=index)
        made = Indexed(opener, monkeypatch)
        yield made
        made.store.close()


def test_an_encrypted_store_has_no_index_in_the_clear(tmp_path: Path) -> None:
    index = QdrantIndex(qdrant(":memory:"))
    with pytest.raises(perdure.UsageError, match="this store is encrypted"):
        perdure.open(tmp_path / "a.db", keys=KEY, search_index=index)


class Failing:
    """A client of Qdrant whose call of a number fails, before it does anything or after."""

    def __init__(self, client: QdrantClient) -> None:
        self.client, self.calls, self.fails_at, self.after = client, 0, 0, False

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.fails_at and not self.after:
                raise ConnectionError("Qdrant is away")
            found = getattr(self.client, name)(*args, **kwargs)
            if self.calls == self.fails_at:
                raise ConnectionError("Qdrant is away")
            return found

        return call


@pytest.mark.filterwarnings(*LOCAL_MODE)
@pytest.mark.parametrize("after", [False, True])
def test_whatever_call_of_qdrant_fails_the_next_search_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    def change(store: perdure.Store) -> None:
        store.memory("users").put_many(FACTS)
        store.memory("users").put("k1", {"fact": "word1 word2"})
        store.memory("users").delete("k2")

    at = 0
    while True:
        at += 1
        client = Failing(qdrant(":memory:"))
        client.after = after
        opener = partial(perdure.open, tmp_path / f"{at}.db", durability="normal", search_index=QdrantIndex(client))  # type: ignore[arg-type]
        made = Indexed(opener, monkeypatch)
        made.store.memory("users").put_many({f"k{n}": {"fact": "word3"} for n in range(5)})
        made.both(made.store.memory("users"), "word1")
        change(made.store)
        client.calls, client.fails_at = 0, at
        with made.large():
            made.store.memory("users").search("word1")  # found by words where Qdrant fails
        failed, client.fails_at = client.calls >= at, 0
        made.both(made.store.memory("users"), "word1 word2", limit=50)
        assert len(made.nearest("word1", 1000, "users")) == 99
        made.store.close()
        if not failed:
            break
    assert at > 4


SEARCHES = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = sys.argv[3:]
import perdure
from perdure.memory import search
from perdure.memory.qdrant import QdrantIndex
from qdrant_client import QdrantClient
from search_index_contract import embed

search.LARGE_ITEMS = 0
index = QdrantIndex(QdrantClient(path=sys.argv[2]))
users = perdure.open(sys.argv[1], embedder=embed, search_index=index).memory("users")
for n in range(100000):
    users.put(f"k{n % 40}", {"fact": f"word{n % 7} word{n % 11}"})
    if n % 3 == 0:
        users.search("word1")
    print(n, flush=True)
"""


@pytest.mark.filterwarnings(*LOCAL_MODE)
def test_a_process_killed_between_database_and_index_leaves_them_to_the_next_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [str(tmp_path / "a.db"), str(tmp_path / "qdrant")]
    command = [sys.executable, "-c", SEARCHES, *places, *sys.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(31):
            assert child.stdout.readline()
        child.kill()
    client = qdrant(path=places[1])
    made = Indexed(partial(perdure.open, places[0], search_index=QdrantIndex(client)), monkeypatch)
    made.both(made.store.memory("users"), "word1 word2", limit=50)
    assert len(made.nearest("word1", 1000, "users")) == made.store.memory("users").stats().items
    made.store.close()
    client.close()
