"""A COMMIT whose answer was lost: the save is looked up, done once, and never called unwritten by mistake.

The driver under the store is the real one; between them stands one that loses answers when told to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from driver_proxy import WriteProxy

import perdure
from perdure.errors import OutcomeUnknown, Unavailable
from perdure.log.cache import BaseCache
from perdure.storage.program import Append, Call, Driver, Flow
from perdure.storage.urls import open_driver
from perdure.threads.context import StoreContext
from perdure.threads.save_engine import save
from perdure.threads.saves import Save
from perdure.threads.store import CACHE_BYTES
from perdure.values.codec import encode
from perdure.values.registry import Codec

# What becomes of a write: it works; it is done and the answer lost; it is not done and the answer lost; refused.
Fate = Literal["works", "done", "not done", "refused"]


class LossyDriver(WriteProxy):
    """Writes meet the fates listed, in their order; after those everything works."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.fates: list[Fate] = []

    def write(self, do: Callable[[], Any]) -> Any:
        fate: Fate = self.fates.pop(0) if self.fates else "works"
        if fate == "refused":
            raise Unavailable("the server is away. Nothing was written.")
        answer = do() if fate != "not done" else None
        if fate != "works":
            raise OutcomeUnknown("the connection broke during COMMIT.")
        return answer


@pytest.fixture
def lossy() -> Iterator[LossyDriver]:
    driver = LossyDriver(open_driver(":memory:", durability="full", timeout_s=5, create=True))
    yield driver
    driver.close()


@pytest.fixture
def store(lossy: LossyDriver) -> perdure.Store:
    made = perdure.Store(StoreContext(lossy, Codec(), BaseCache(CACHE_BYTES), "default"))
    made.thread("other").save({})  # the tenant exists
    return made


FATES: list[list[Fate]] = [["done"], ["not done"], ["done", "done"], ["not done", "done"], ["not done", "not done"]]


@pytest.mark.parametrize("fates", FATES)
@pytest.mark.parametrize("before", [0, 1])
def test_a_lost_answer_is_looked_up_and_the_save_is_there_once(
    store: perdure.Store, lossy: LossyDriver, fates: list[Fate], before: int
) -> None:
    """Both the first save of a thread and later ones, which take another path."""
    thread = store.thread("a")
    for number in range(before):
        thread.save({"number": number})
    lossy.fates = list(fates)
    try:
        saved = thread.save({"number": before})
    except OutcomeUnknown:
        assert before == 0  # only two looks: it says that it does not know
        assert len(fates) == 2
        return
    assert saved.is_head
    assert [c.state["number"] for c in thread.history()] == list(range(before, -1, -1))
    assert thread.load(strict=True).id == saved.id
    assert thread.save({"number": before + 1}).parent == saved.id
    assert store.ops.verify().ok


@pytest.mark.parametrize("fates", [["done", "refused"], ["not done", "refused"]])
@pytest.mark.parametrize("before", [0, 1])
def test_a_lost_answer_that_cannot_be_looked_up_is_never_called_unwritten(
    store: perdure.Store, lossy: LossyDriver, fates: list[Fate], before: int
) -> None:
    """`Unavailable` says that nothing was written; after a COMMIT was sent nobody knows that."""
    thread = store.thread("a")
    for number in range(before):
        thread.save({"number": number})
    lossy.fates = list(fates)
    with pytest.raises(OutcomeUnknown, match="Looking for checkpoint"):
        thread.save({"number": before})
    again = thread.save({"number": "again"})  # by the same handle: no race, whatever became of the first
    assert again.is_head
    numbers = [c.state["number"] for c in thread.history()]
    written = [before] if fates[0] == "done" else []
    assert numbers == ["again", *written, *range(before - 1, -1, -1)]
    assert len(thread.branches()) == 1


def test_a_refused_save_is_not_there(store: perdure.Store, lossy: LossyDriver) -> None:
    thread = store.thread("a")
    thread.save({"number": 0})
    lossy.fates = ["refused"]
    with pytest.raises(Unavailable):
        thread.save({"number": 1})
    thread.save({"number": 2})
    assert [c.state["number"] for c in thread.history()] == [2, 0]


def test_a_lost_answer_and_a_prune_meanwhile(tmp_path: Path) -> None:
    """The record was written, and then moved to a chain of its own: nothing may be built on how it was drafted."""
    with perdure.open(str(tmp_path / "a.db")) as store, perdure.open(str(tmp_path / "a.db")) as other:
        thread = store.thread("a")
        state = {"words": [f"{number * 7919 % 10_007:05d}" for number in range(3_000)], "number": 0}
        for number in range(6):
            thread.save(state | {"number": number})
        text = encode(state | {"number": 6}, store._context.codec)
        where = (store._context, thread._cursor)
        _lose_first_answer(store, save(Save(*where, text=text)), other)
        for number in range(7, 10):
            thread.save(state | {"number": number, "new": str(number) * 200})
        assert [checkpoint.state["number"] for checkpoint in thread.history(limit=4)] == [9, 8, 7, 6]
        assert other.ops.verify().ok


def _lose_first_answer(store: perdure.Store, flow: Flow[Any], other: perdure.Store) -> None:
    """Drive a save whose first commit is done but not answered, and prune before it is looked up."""
    lost = False
    answer: Any = None
    transaction = next(flow)
    try:
        while True:
            answer = transaction.perform(store._context.driver)
            if (isinstance(transaction, Call | Append) or transaction.write) and not lost:
                lost = True
                other.thread("a").prune(keep=2)
                transaction = flow.throw(OutcomeUnknown("the answer was lost"))
            else:
                transaction = flow.send(answer)
    except StopIteration:
        assert lost
