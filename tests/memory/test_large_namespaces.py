"""Namespaces that are too large for the process: pgvector and Qdrant propose, the database decides."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from role_kit import Roles, roles_of
from search_index_contract import Indexed, SearchIndexContract, embed

import perdure
from perdure.memory import search
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


class TestPgvector(SearchIndexContract):
    @pytest.fixture
    def indexed(self, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Indexed]:
        made = Indexed(partial(perdure.open, postgres_url, durability="normal"), monkeypatch)
        made.store.memory("users", "alice").put("first", {"fact": "word1"})  # there before the index
        made.store.ops.index_memory()
        made.store.memory("users", "alice").erase("first")
        yield made
        assert made.store.ops.verify().ok
        made.store.close()


@pytest.mark.filterwarnings(*LOCAL_MODE)
class TestQdrant(SearchIndexContract):
    @pytest.fixture
    def indexed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Indexed]:
        index = QdrantIndex(qdrant(":memory:"))
        opener = partial(perdure.open, tmp_path / "a.db", durability="normal", search_index=index)
        made = Indexed(opener, monkeypatch)
        yield made
        made.store.close()


# --- pgvector


@pytest.fixture
def roles(postgres_url: str) -> Iterator[Roles]:
    yield from roles_of(postgres_url)


def test_a_role_sees_the_vectors_of_its_tenant_only(
    postgres_url: str, roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roles from before the index and after it, also by SQL of their own."""
    monkeypatch.setattr(search, "LARGE_ITEMS", 0)
    urls = {"acme": roles.tenant("acme")}
    with perdure.open(postgres_url, embedder=embed) as owner:
        owner.tenant("acme").memory("users").put("old", {"fact": "word1"})
        owner.ops.index_memory()
    urls["other"] = roles.tenant("other")
    for tenant, url in urls.items():
        with perdure.open(url, embedder=embed, tenant=tenant) as store:
            store.memory("users").put(tenant, {"fact": "word1"})
            assert tenant in [item.key for item in store.memory("users").search("word1")]
    for url, count in zip(urls.values(), (2, 1), strict=True):
        with roles.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM memory_ann").fetchone() == (count,)
    with perdure.open(urls["acme"], tenant="acme") as store, pytest.raises(perdure.UsageError, match="owner"):
        store.ops.index_memory()


def test_functions_of_others_beside_the_extension_are_not_called(postgres_url: str, roles: Roles) -> None:
    """The extension is in `public`, where PostgreSQL 14 lets every role make functions. One that fits better than the
    server's own would be called by the owner's put."""
    url = roles.tenant("acme")
    roles.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    with roles.connect(url) as connection:
        body = "LANGUAGE plpgsql AS $$ BEGIN RAISE 'called as %', current_user; END $$"
        connection.execute(f"CREATE FUNCTION public.power(integer, integer) RETURNS float8 {body}".encode())
        connection.execute(f"CREATE FUNCTION public.times(integer, float8) RETURNS float8 {body}".encode())
        connection.execute("CREATE OPERATOR public.* (LEFTARG = integer, RIGHTARG = float8, FUNCTION = public.times)")
    with perdure.open(postgres_url, embedder=embed) as owner:
        owner.memory("users").put("first", {"fact": "word1"})
        owner.ops.index_memory()
        owner.memory("users").put("second", {"fact": "word1"})
    with roles.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM memory_ann").fetchone() == (2,)


def test_an_encrypted_store_has_no_index_in_the_clear(postgres_url: str, tmp_path: Path) -> None:
    with perdure.open(postgres_url, embedder=embed, keys=KEY) as store:
        store.memory("users").put("secret", {"fact": "word1"})
        with pytest.raises(perdure.UsageError, match="this store is encrypted: nothing was made"):
            store.ops.index_memory()
    index = QdrantIndex(qdrant(":memory:"))
    with pytest.raises(perdure.UsageError, match="this store is encrypted"):
        perdure.open(tmp_path / "a.db", keys=KEY, search_index=index)
    with perdure.open(tmp_path / "b.db") as store, pytest.raises(perdure.UsageError, match="PostgreSQL"):
        store.ops.index_memory()


def test_a_tenant_that_is_encrypted_later_has_no_vectors_in_it(postgres_url: str, roles: Roles) -> None:
    with perdure.open(postgres_url, embedder=embed) as store:
        store.ops.index_memory()
    with perdure.open(postgres_url, embedder=embed, keys=KEY, tenant="safe") as store:
        store.memory("users").put("secret", {"fact": "word1"})
    with roles.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM memory_ann").fetchone() == (0,)


def test_the_index_is_written_in_the_transaction_of_the_put(postgres_url: str, roles: Roles) -> None:
    with perdure.open(postgres_url, embedder=embed) as store:
        store.ops.index_memory()
        users = store.memory("users")
        users.put("here", {"fact": "word1"})
        with pytest.raises(perdure.Conflict):
            users.put("here", {"fact": "word2"}, expect=0)
        with roles.connect(postgres_url) as connection:
            assert connection.execute("SELECT count(*) FROM memory_ann").fetchone() == (1,)
            connection.execute("ALTER TABLE memory_ann ADD CHECK (model = '') NOT VALID")
            with pytest.raises(perdure.errors.StoreError):
                users.put("there", {"fact": "word2"})
        assert users.get("there") is None


def test_copies_leave_the_index_and_what_is_copied_into_one_is_indexed(
    postgres_url: str, roles: Roles, tmp_path: Path
) -> None:
    with perdure.open(tmp_path / "a.db", embedder=embed) as source:
        source.memory("users").put_many(FACTS)
        source.memory("users").put("k1", {"fact": "word1"})
        with perdure.open(postgres_url) as store:
            store.ops.index_memory()
        source.ops.transfer(postgres_url, tenant="default")
    with roles.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM memory_ann").fetchone() == (100,)
    with perdure.open(postgres_url) as store:
        store.ops.backup(tmp_path / "b.backup")
    assert perdure.ops.restore_backup(tmp_path / "b.backup", tmp_path / "c.db").report.ok
    with perdure.open(tmp_path / "c.db") as store:
        assert store.memory("users").stats().items == 100


# --- Qdrant


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
