"""What goes over the wire, as a proxy that reads the protocol sees it: round trips, and a pooler's no."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from tcp_proxy import WireProxy

from perdure.errors import OpenError, UsageError
from perdure.storage.postgres.connection import Compiled, encode
from perdure.storage.postgres.driver import PostgresDriver
from perdure.storage.program import Batch, Program, Sql, Transaction
from perdure.testing.postgres_server import PostgresServer

PUT = Sql("INSERT INTO note (id) VALUES (:id)")
COUNT = Sql("SELECT count(*) FROM note")


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[WireProxy]:
    proxy = WireProxy(postgres_server.port)
    yield proxy
    proxy.close()


def database(url: str) -> str:
    return url.rsplit("/", 1)[1]


def program(*batches: Batch) -> Callable[[], Program[None]]:
    def op() -> Program[None]:
        for batch in batches:
            _ = yield batch

    return op


CASES = {
    "one statement": (True, [Batch(PUT(id=1), last=True)], 1),
    "two statements": (True, [Batch(PUT(id=2), PUT(id=3), last=True)], 1),
    "two batches": (True, [Batch(PUT(id=4)), Batch(PUT(id=5), last=True)], 2),
    "not flagged": (True, [Batch(PUT(id=6))], 2),
    "one read": (False, [Batch(COUNT(), last=True)], 1),
    "two reads": (False, [Batch(COUNT(), COUNT(), last=True)], 1),
    "no statement": (True, [], 0),
}


@pytest.mark.parametrize("mode", ["blocking", "async", "unprepared"])
def test_round_trips(proxy: WireProxy, postgres_url: str, mode: str) -> None:
    """A single last batch is one round trip, the first time (with its preparation) and ever after."""
    driver = PostgresDriver(proxy.url(database(postgres_url)), prepare=mode != "unprepared")
    with psycopg.connect(postgres_url, options="-c search_path=perdure") as connection:
        connection.execute("CREATE TABLE note (id bigint)")

    async def each() -> None:
        await driver.arun(Transaction(program(Batch(COUNT(), last=True))))  # connects
        for name, (write, batches, expected) in CASES.items():
            for turn in range(2):
                proxy.reset()
                transaction = Transaction(program(*batches), write=write)
                if mode == "async":
                    await driver.arun(transaction)
                else:
                    driver.run(transaction)
                assert (proxy.syncs, proxy.turns) == (expected, expected), (name, turn, proxy.kinds)
                if name == "one statement" and turn == 1:
                    # Bind, Describe, Execute, Sync; parsed again only if it must not be prepared.
                    assert "".join(proxy.kinds) == ("PBDES" if mode == "unprepared" else "BDES")

    asyncio.run(each())
    driver.close()


def test_names_become_numbers_and_casts_and_literals_stay() -> None:
    text = """SELECT :a::bigint, ':b', "x:c", a[1], :d, :a -- :e
    /* :f */ FROM t WHERE note LIKE '%it''s :g%' AND $$ :h $$ <> :d"""
    compiled = Compiled(text, None)
    assert compiled.names == ("a", "d")
    assert compiled.text.decode() == text.replace(":a::", "$1::").replace(":a ", "$1 ").replace(":d", "$2")


def test_text_that_postgres_would_cut_short_is_refused() -> None:
    with pytest.raises(UsageError, match="NUL"):
        encode(("name",), {"name": "a\0b"})
    with pytest.raises(UsageError, match="Unicode"):
        encode(("name",), {"name": "\ud800"})
    with pytest.raises(UsageError, match="object"):
        encode(("name",), {"name": object()})


def test_a_pooler_that_refuses_settings_needs_the_role_to_have_them(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    proxy = WireProxy(postgres_server.port, refuse_options=True)
    name = database(postgres_url)
    with pytest.raises(OpenError, match="ALTER ROLE postgres SET search_path = perdure"):
        PostgresDriver(proxy.url(name), prepare=False)
    postgres_server.execute(f"ALTER ROLE postgres IN DATABASE {name} SET search_path = perdure")
    driver = PostgresDriver(proxy.url(name), prepare=False)
    meta = Sql("SELECT value FROM meta WHERE key = 'store'")
    seen: list[Any] = []

    def op() -> Program[None]:
        seen.append((yield Batch(meta(), last=True)))

    driver.run(Transaction(op))
    asyncio.run(driver.arun(Transaction(op)))
    assert seen == [[[(driver.store_id,)]]] * 2
    driver.close()
    proxy.close()
