"""`CosmosSaver`: what is stored, how writers meet, what is refused, and what no error shows."""

from __future__ import annotations

import logging
import random
import threading
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from azure.core.exceptions import ServiceRequestError, ServiceResponseError
from azure.core.pipeline.transport import RequestsTransport
from azure.cosmos import CosmosClient
from azure.cosmos.exceptions import CosmosHttpResponseError
from bench.cosmos_server import KEY, new_database
from checkpoints import (
    checkpoint_of,
    config_of,
    everything,
    ids_in,
    metadata_of,
    numbered_id,
    put,
    values_at,
    writes_at,
)
from langchain_core.runnables import RunnableConfig

from perdure.cosmos import CosmosSaver, container
from perdure.cosmos.container import Item
from perdure.errors import (
    Busy,
    Conflict,
    Damaged,
    OpenError,
    OutcomeUnknown,
    Unavailable,
    UnknownType,
    Unstorable,
    UsageError,
)

TEXT = "All that was said in a turn of this conversation, as long as such a turn is on most days. "


def another(saver: CosmosSaver, **options: Any) -> CosmosSaver:
    """A saver of another process: it knows nothing of what the first has in memory."""
    of = saver._lines.context.container
    return CosmosSaver(of._client, of._database, **options)


def stored(saver: CosmosSaver) -> list[Item]:
    """All items of the container."""
    return sorted(saver._lines.context.container.query("SELECT * FROM c", None), key=lambda item: str(item["id"]))


def put_many(saver: CosmosSaver, count: int, thread: str = "t", first: int = 0) -> None:
    parent = config_of(thread, id=numbered_id(first - 1)) if first else None
    for number in range(first, first + count):
        log = [f"{TEXT}{n}" for n in range(number + 1)]
        parent = put(saver, thread, {"log": log}, id=numbered_id(number), parent=parent)


def test_a_checkpoint_is_an_item_whose_id_is_its_number_and_every_32nd_is_whole(cosmos_saver: CosmosSaver) -> None:
    put_many(cosmos_saver, 34)
    put_many(another(cosmos_saver), 2, first=34)
    rows = stored(cosmos_saver)
    assert [row["id"] for row in rows] == [f"{number:012}" for number in range(36)]
    assert {row["pk"] for row in rows} == {"default/t"}
    assert [row["n"] for row in rows if row["key"] == row["n"]] == [0, 32]
    assert sum(len(row["body"]) for row in rows) < 36 * 18 * len(TEXT) / 5
    reader = another(cosmos_saver)
    found = {found.checkpoint["id"]: found.checkpoint["channel_values"]["log"] for found in reader.list(config_of("t"))}
    assert list(found) == [numbered_id(number) for number in range(35, -1, -1)]
    for number in (0, 31, 33, 35):
        expected = [f"{TEXT}{n}" for n in range(number + 1)]
        assert found[numbered_id(number)] == expected
        assert values_at(reader, config_of("t", id=numbered_id(number)))["log"] == expected
    assert values_at(reader, config_of("t")) == values_at(cosmos_saver, config_of("t"))


def test_three_writers_keep_all_appends(cosmos_saver: CosmosSaver) -> None:
    """Of two that continue the same checkpoint one is refused, and reads again."""
    refused: list[str] = []

    def write(name: str) -> None:
        saver = another(cosmos_saver, single_writer=True)
        for number in range(5):
            while True:
                newest = saver.get_tuple(config_of("t"))
                items = newest.checkpoint["channel_values"]["items"] if newest is not None else []
                try:
                    put(saver, "t", {"items": [*items, f"{name}{number}"]}, parent=newest and newest.config)
                    break
                except Conflict as conflict:
                    refused.append(str(conflict))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    items = values_at(cosmos_saver, config_of("t"))["items"]
    assert sorted(items) == sorted(f"{name}{number}" for name in "abc" for number in range(5))
    assert all("has moved on" in text for text in refused)


def test_a_state_above_the_limit_is_stored_in_parts_before_its_item(
    cosmos_saver: CosmosSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "PART_CHARACTERS_MAX", 500)
    noise = [random.Random(number).random() for number in range(150)]
    config = put(cosmos_saver, "t", {"noise": noise})
    cosmos_saver.put_writes(config, [("noise", noise)], "task")
    rows = stored(cosmos_saver)
    assert {len(row["body"]) <= 500 for row in rows if "part_of" in row} == {True}
    assert len([row for row in rows if "part_of" in row]) > 4
    reader = another(cosmos_saver)
    assert values_at(reader, config_of("t")) == {"noise": noise}
    assert writes_at(reader, config) == [("task", "noise", noise)]
    part = next(row for row in rows if "part_of" in row)
    cosmos_saver._lines.context.container.delete(part["id"], part["pk"])
    with pytest.raises(Damaged):
        everything(another(cosmos_saver))
    cosmos_saver.delete_thread("t")
    assert [row for row in stored(cosmos_saver) if row.get("body")] == []


def test_the_writes_of_a_task_are_one_item_the_first_stays_and_special_ones_are_replaced(
    cosmos_saver: CosmosSaver,
) -> None:
    config = put(cosmos_saver, "t", {"n": 1})
    cosmos_saver.put_writes(config, [("a", 1), ("b", 2)], "task", "~path")
    assert len(stored(cosmos_saver)) == 2
    cosmos_saver.put_writes(config, [("a", "late"), ("b", "late"), ("c", 3)], "task", "~path")
    for answer in ("old", "new"):
        cosmos_saver.put_writes(config, [("__interrupt__", answer)], "task", "~path")
    expected = [("task", "__interrupt__", "new"), ("task", "a", 1), ("task", "b", 2), ("task", "c", 3)]
    assert writes_at(another(cosmos_saver), config) == expected


def test_a_checkpoint_lives_at_least_its_ttl_whenever_its_chain_began(cosmos_saver: CosmosSaver) -> None:
    """The emulator expires nothing: the test deletes what would have expired by then."""
    saver, hour_us = another(cosmos_saver, ttl="10h"), 3_600_000_000
    context, times = saver._lines.context, dict[str, int]()
    for number in range(16):
        times[f"{number:012}"] = number * hour_us
        context.clock_us = partial(int, number * hour_us)
        put_many(saver, 1, first=number)
    rows = stored(saver)
    assert [row["n"] for row in rows if row["n"] == row["key"]] == [0, 6, 12]
    dies = {row["id"]: times[row["id"]] + row["ttl"] * 1_000_000 for row in rows}
    for hour in (15, 18, 24):
        for row in rows:
            if dies[row["id"]] <= hour * hour_us:
                context.container.delete(row["id"], row["pk"])
        left = [int(one[-3:]) for one in ids_in(another(cosmos_saver), config_of("t"))]
        assert set(left) >= {number for number in range(16) if number + 10 > hour}
    for number, ttl in enumerate(("10h", "10h", None, None, "20h"), 16):  # a chain lives as long as its last checkpoint
        put_many(another(cosmos_saver, ttl=ttl), 1, first=number)
    assert [(row["n"], "ttl" in row) for row in stored(saver) if row["n"] >= 16 and row["n"] == row["key"]] == [
        (16, True),
        (18, False),
        (20, True),
    ]
    with pytest.raises(UsageError, match="a duration"):
        another(cosmos_saver, ttl=30)


def test_a_changed_item_is_noticed(cosmos_saver: CosmosSaver) -> None:
    put_many(cosmos_saver, 3)
    _, second, third = stored(cosmos_saver)
    container = cosmos_saver._lines.context.container._container
    container.delete_item(second["id"], second["pk"])
    with pytest.raises(Damaged, match="items are missing between 0 and 2"):
        another(cosmos_saver).get_tuple(config_of("t"))
    container.upsert_item(second)
    container.upsert_item({**third, "body": second["body"]})
    with pytest.raises(Damaged, match=numbered_id(2)):
        another(cosmos_saver).get_tuple(config_of("t"))
    put_many(another(cosmos_saver), 1, first=3)  # it is whole, so that the thread goes on
    assert len(values_at(another(cosmos_saver), config_of("t"))["log"]) == 4


@dataclass
class Unregistered:
    """No saver of these tests trusts this class."""

    text: str


def test_only_known_classes_are_stored_and_built(cosmos_saver: CosmosSaver) -> None:
    with pytest.raises(Unstorable, match="Unregistered"):
        put(cosmos_saver, "t", {"one": Unregistered("x")})
    trusting = another(cosmos_saver, trust=[__name__])
    put(trusting, "t", {"one": Unregistered("x")})
    assert values_at(trusting, config_of("t")) == {"one": Unregistered("x")}
    with pytest.raises(UnknownType):
        another(cosmos_saver).get_tuple(config_of("t"))


def test_tenants_see_only_their_own_threads_whatever_their_names(cosmos_saver: CosmosSaver) -> None:
    names = {"a": "b/c", "a/b": "c", "a%2Fb": "c", "' OR 1=1": "c"}
    for tenant, thread in names.items():
        put(another(cosmos_saver, tenant=tenant), thread, {"of": tenant})
    for tenant, thread in names.items():
        saver = another(cosmos_saver, tenant=tenant)
        rows = [(row[0], row[4]) for row in everything(saver)]
        assert rows == [(thread, {"of": tenant})]
        assert values_at(saver, config_of(thread)) == {"of": tenant}


def test_a_writer_that_comes_after_a_deletion_begins_anew(cosmos_saver: CosmosSaver) -> None:
    late = another(cosmos_saver)
    put_many(late, 2)
    inner = config_of("t", ns="inner", id=numbered_id(0))
    for number in range(3):
        put(late, "t", {"n": number}, ns="inner", id=numbered_id(number))
    late.put_writes(inner, [("n", 1)], "task")
    cosmos_saver.delete_thread("t")
    assert [(row["n"], row["body"]) for row in stored(cosmos_saver)] == [(2, "")]
    assert cosmos_saver.get_tuple(config_of("t")) is None
    assert late.get_tuple(config_of("t")) is None
    put_many(late, 1, first=2)
    assert ids_in(cosmos_saver, config_of("t")) == [numbered_id(2)]
    assert len(values_at(another(cosmos_saver), config_of("t"))["log"]) == 3


def test_pruning_keeps_what_a_delta_channel_is_rebuilt_from(cosmos_saver: CosmosSaver) -> None:
    """The newest checkpoint lacks the channel: its value is in one ancestor, and in the writes since."""
    parent: RunnableConfig | None = None
    for number in range(5):
        values = {"n": number} | ({"log": ["start"]} if number == 2 else {})
        checkpoint = checkpoint_of(values, id=numbered_id(number))
        checkpoint["channel_versions"]["log"] = 1
        metadata: Any = metadata_of(counters_since_delta_snapshot={"log": [number - 2, 0]})
        config = parent or config_of("t")
        parent = cosmos_saver.put(config, checkpoint, metadata, checkpoint["channel_versions"])
        cosmos_saver.put_writes(parent, [("log", f"write {number}")], "task")
    cosmos_saver.prune(["t"])
    reader = another(cosmos_saver)
    assert ids_in(reader, config_of("t")) == [numbered_id(number) for number in (4, 3, 2)]
    history = reader.get_delta_channel_history(config=config_of("t", id=numbered_id(4)), channels=["log"])
    assert history["log"]["seed"] == ["start"]
    assert [value for _, _, value in history["log"]["writes"]] == ["write 2", "write 3"]


def test_an_answer_that_was_lost_is_no_conflict(cosmos_saver: CosmosSaver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends a request again, and the item that is there is its own."""
    put_many(cosmos_saver, 1)
    send = RequestsTransport.send

    def twice(self: RequestsTransport, request: Any, **options: Any) -> Any:
        if request.method == "POST" and "query" not in request.headers.get("Content-Type", ""):
            send(self, request, **options)
        return send(self, request, **options)

    monkeypatch.setattr(RequestsTransport, "send", twice)
    put_many(cosmos_saver, 1, first=1)
    assert len(stored(cosmos_saver)) == 2


@pytest.mark.parametrize(
    ("error", "reading", "writing"),
    [
        (403, OpenError, OpenError),
        (429, Busy, Busy),
        (400, UsageError, UsageError),
        (503, Unavailable, OutcomeUnknown),
        (ServiceRequestError("not sent"), Unavailable, Unavailable),
        (ServiceResponseError("cut off"), Unavailable, OutcomeUnknown),
    ],
)
def test_an_error_says_whether_something_may_be_written(
    cosmos_saver: CosmosSaver, error: Any, reading: type[Exception], writing: type[Exception]
) -> None:
    for expected, writes in ((reading, False), (writing, True)):
        with pytest.raises(expected), cosmos_saver._lines.context.container._translated(writes=writes):
            raise CosmosHttpResponseError(error) if type(error) is int else error  # type: ignore[no-untyped-call]


def test_no_error_and_no_log_shows_the_key(cosmos_client: CosmosClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    saver = CosmosSaver(cosmos_client, new_database())
    with pytest.raises(OpenError, match=r"there is no container .*: call setup\(\)") as refused:
        put(saver, "t", {"n": 1})
    with pytest.raises(UsageError, match=r"an azure\.cosmos\.CosmosClient, not str"):
        CosmosSaver(KEY)  # type: ignore[arg-type]
    assert "azure" in caplog.text
    assert KEY not in repr(saver) + "".join(traceback.format_exception(refused.value)) + caplog.text
