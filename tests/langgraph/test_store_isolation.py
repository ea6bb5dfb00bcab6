"""No namespace reaches another; many threads and loops share a store; a batch is made as one, or not at all."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
from langgraph.store.base import GetOp, Op, PutOp, SearchOp
from store_kit import letters

import perdure
from perdure.errors import OutcomeUnknown
from perdure.langgraph import PerdureStore

LABELS = [
    *("acme", "acme-corp", "Acme", "a\u217dme", "acme/", "acme/x", "\x01", "\x01\x01", "\x02", "\x1f", "\x7f", "\r\n"),
    *("%", "_", "*", "?", "[a]", "\\", "'", '"', "/", ":", "|", "-", "--", ";", " ", "\u2028", "\ufeff", "\U0010ffff"),
    *("\u00e9", "e\u0301", "\U0001f600"),
]
_copies = itertools.count()


def test_no_label_reaches_into_another(saver_url: str) -> None:
    namespaces = [(label,) for label in LABELS] + [("acme", label) for label in LABELS]
    with PerdureStore(saver_url, durability="normal", index={"embed": letters, "dims": 26}) as store:
        store.batch([PutOp(labels, "key", {"of": [*labels], "text": "acme"}) for labels in namespaces])
        for labels in namespaces:
            expected = {other for other in namespaces if other[: len(labels)] == labels}
            item = store.get(labels, "key")
            assert item is not None
            assert tuple(item.value["of"]) == item.namespace == labels
            for options in ({}, {"query": "acme"}, {"filter": {"text": "acme"}}):
                found = store.search(labels, limit=1000, **options)
                assert {one.namespace for one in found} == expected, (labels, options)
            if "*" not in labels:
                assert set(store.list_namespaces(prefix=labels, limit=1000)) == expected
        assert store.list_namespaces(limit=1000) == sorted(namespaces)
        store.delete(("acme",), "key")
        assert store.get(("acme-corp",), "key") is not None
        assert len(store.search((), limit=1000)) == len(namespaces) - 1


def test_threads_and_loops_share_a_store(saver_url: str) -> None:
    with PerdureStore(saver_url, durability="normal", index={"embed": letters, "dims": 26}) as store:

        async def write(name: str) -> None:
            puts = (store.aput(("all", name), str(number), {"fact": f"fact {name}"}) for number in range(10))
            await asyncio.gather(*puts)
            assert len(await store.asearch(("all", name), query="fact", limit=100)) == 10

        def run(name: str) -> None:
            if name in "abc":
                asyncio.run(write(name))
            else:
                for number in range(10):
                    store.put(("all", name), str(number), {"fact": f"fact {name}"})

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(run, "abcdef"))
        assert len(store.search(("all",), limit=1000)) == 60
        assert store.store.ops.verify().ok


def test_reads_that_refresh_and_batches_that_cross_wait_for_each_other_in_no_circle(saver_url: str) -> None:
    """Each of them locks rows of two namespaces, and gets them in another order."""
    spaces = [("a",), ("b",)]
    with PerdureStore(saver_url, durability="normal", ttl={"default_ttl": 5}) as store:
        store.batch([PutOp(space, key, {"n": 0}, ttl=5) for space in spaces for key in "xyz"])
        start = threading.Barrier(6)

        def work(number: int) -> None:
            order = spaces[:: 1 if number % 2 else -1]
            start.wait()
            for turn in range(20):
                puts: list[Op] = [PutOp(space, "xyz"[turn % 3], {"n": number}, ttl=5) for space in order]
                reads: list[Op] = [SearchOp(()), *(GetOp(space, key) for space in order for key in "zyx")]
                store.batch([*puts, *reads] if number % 3 else reads)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert len(store.search((), limit=100)) == 6
    if saver_url.startswith("postgresql"):
        with psycopg.connect(saver_url) as connection:
            sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
            assert connection.execute(sql).fetchone() == (0,)


class Hook:
    """Counts the points it is called at, and raises at one of them."""

    def __init__(self) -> None:
        self.points: list[str] = []
        self.strike_at = 0
        self.error: Exception = ConnectionError("injected")

    def __call__(self, point: str) -> None:
        self.points.append(point)
        if len(self.points) == self.strike_at:
            raise self.error


def test_a_batch_is_made_as_one_or_not_at_all(saver_url: str) -> None:
    hook = Hook()
    with (
        perdure.open(saver_url, durability="normal") as plain,
        perdure.open(saver_url, durability="normal", hook=hook) as struck,
    ):
        fresh, armed = PerdureStore(plain), PerdureStore(struck)

        def copy() -> str:
            name = str(next(_copies))
            fresh.batch([PutOp((name, space), key, {"n": 1}, ttl=5) for space in "ab" for key in ("old", "gone")])
            armed.get((name, "a"), "old", refresh_ttl=False)
            return name

        def change(name: str) -> None:
            armed.batch(
                [
                    PutOp((name, "b"), "old", {"n": 2}),
                    PutOp((name, "c"), "new", {"n": 3}),
                    PutOp((name, "a"), "gone", None),
                    GetOp((name, "a"), "old"),
                ]
            )

        def dump(name: str) -> list[Any]:
            items = plain.memory(name).list()
            return sorted((item.namespace[1:], item.key, item.value["n"], item.version) for item in items)

        name = copy()
        before = dump(name)
        hook.points = []
        change(name)
        points, after = [*hook.points], dump(name)
        assert before != after
        assert len(points) > 5
        lost = [place for place, point in enumerate(points, 1) if point in ("commit", "committed")]
        for error, strikes in (ConnectionError("injected"), range(1, len(points) + 1)), (OutcomeUnknown("lost"), lost):
            hook.error = error
            for strike_at in strikes:
                name = copy()
                hook.points, hook.strike_at = [], strike_at
                try:
                    change(name)
                except (ConnectionError, OutcomeUnknown):
                    assert dump(name) in (before, after), strike_at
                    hook.strike_at = 0
                    change(name)
                hook.strike_at = 0
                assert [one[:3] for one in dump(name)] == [one[:3] for one in after], strike_at
        assert plain.ops.verify().ok
