"""The contract, part four: what a state may hold, and what is refused before anything is written."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime
from typing import Any

import pytest
from harness import Harness
from samples import every_type, same

from perdure.errors import Unstorable, UsageError


class Foreign:
    """A class nobody registered."""


class ValuesContract:
    """Values, through a real store."""

    async def test_every_type_comes_back_as_it_was(self, harness: Harness) -> None:
        thread = harness.thread()
        first = await harness.save(thread, every_type())
        assert same(await harness.state(thread), every_type())
        changed = every_type()
        changed["plan"].steps.append("rest")
        changed["tuple"] = (*changed["tuple"], "more")
        await harness.save(thread, changed)
        assert same(await harness.state(thread), changed)
        assert same(await harness.state(thread, first), every_type())
        await harness.reopen()
        assert same(await harness.state(harness.thread()), changed)

    async def test_each_type_alone_in_turn(self, harness: Harness) -> None:
        """A difference from any type to any other."""
        thread = harness.thread()
        states = [{"value": value} for value in every_type().values()]
        saved = await harness.save_all(thread, states)
        for checkpoint, state in zip(saved, states, strict=True):
            assert same(await harness.state(thread, checkpoint), state)

    async def test_a_state_need_not_be_a_mapping(self, harness: Harness) -> None:
        states = [
            None,
            True,
            0,
            2**70,
            1.5,
            "text",
            "",
            b"bytes",
            [],
            [1, [2]],
            (),
            (1, 2),
            {1, 2},
            datetime(2024, 1, 1),
        ]
        for number, state in enumerate(states):
            thread = harness.thread(f"t{number}")
            first = await harness.save(thread, state)
            await harness.save(thread, {"now": "a mapping"})
            await harness.save(thread, state)
            assert same(await harness.state(thread), state)
            assert same(await harness.state(thread, first), state)
            with pytest.raises(UsageError):
                await harness.update(thread, {"a": 1})

    async def test_empty_states(self, harness: Harness) -> None:
        thread = harness.thread()
        states: list[Any] = [{}, {"": ""}, {}, {"a": {}}, {"a": {"": {}}}, {}]
        saved = await harness.save_all(thread, states)
        for checkpoint, state in zip(saved, states, strict=True):
            assert same(await harness.state(thread, checkpoint), state)

    async def test_a_huge_state_and_a_small_change_of_it(self, harness: Harness) -> None:
        chance = random.Random(7)
        words = ["".join(chance.choices("abcdefghijklmnop ", k=100)) for _ in range(50_000)]
        state = {"words": words, "blob": chance.randbytes(100_000), "n": 0}
        thread = harness.thread()
        first = await harness.save(thread, state)
        assert first.size_bytes > 5_000_000
        before = await harness.stats()
        words[25_000] = "changed"
        state["n"] = 1
        await harness.save(thread, state)
        after = await harness.stats()
        assert after.stored_bytes - before.stored_bytes < 2_000
        assert await harness.state(thread) == state
        assert (await harness.state(thread, first))["words"][25_000] != "changed"

    async def test_deep_states(self, harness: Harness) -> None:
        state: dict[str, Any] = {}
        at = state
        for level in range(150):
            at["down"] = {"level": level, "list": [[level]]}
            at = at["down"]
        thread = harness.thread()
        await harness.save(thread, state)
        at["bottom"] = "changed"
        await harness.save(thread, state)
        assert await harness.state(thread) == state

    async def test_wide_states(self, harness: Harness) -> None:
        thread = harness.thread()
        state: dict[str, Any] = {f"key {n}": {"n": n} for n in range(1_000)}
        await harness.save(thread, state)
        state["key 500"]["n"] = -1
        del state["key 10"]
        await harness.save(thread, state)
        assert same(await harness.state(thread), state)

    async def test_text_of_all_sorts(self, harness: Harness) -> None:
        thread = harness.thread()
        texts = ["\x00", "\ud800", "\udfff\ud800", "😀" * 500, "\u2028\u2029", "é vs e\u0301", "\r\n", "\\u0000", '"']
        states = [{text: text, "nested": {text: [text]}} for text in texts]
        saved = await harness.save_all(thread, states)
        for checkpoint, state in zip(saved, states, strict=True):
            assert same(await harness.state(thread, checkpoint), state)

    async def test_the_order_of_keys_is_part_of_the_state(self, harness: Harness) -> None:
        thread = harness.thread()
        await harness.save(thread, {"a": 1, "b": 2})
        await harness.save(thread, {"b": 2, "a": 1})
        assert list(await harness.state(thread)) == ["b", "a"]

    async def test_raw_needs_no_classes(self, harness: Harness) -> None:
        thread = harness.thread()
        await harness.save(thread, every_type())
        raw = (await harness.load(thread, raw=True)).state
        assert raw["order"] == {"z": 1, "a": 2, "m": 3}
        assert type(raw["plan"]).__module__ == "builtins"

    async def test_an_unstorable_value_names_its_path_and_writes_nothing(self, harness: Harness) -> None:
        thread = harness.thread()
        with pytest.raises(Unstorable):
            await harness.save(thread, {"callback": print})
        assert await harness.threads() == []
        await harness.save(thread, {"n": 0})
        before = await harness.stats()
        with pytest.raises(Unstorable, match=r'state\["plan"\]\[1\]\["x"\]') as refused:
            await harness.save(thread, {"plan": [1, {"x": Foreign()}]})
        assert refused.value.path == 'state["plan"][1]["x"]'
        with pytest.raises(Unstorable):
            await harness.update(thread, {"n": Foreign})
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(Unstorable):
            await harness.save(thread, {"loop": loop})
        assert await harness.stats() == before
        assert await harness.state(thread) == {"n": 0}
        assert (await harness.save(thread, {"n": 1})).is_head


class LimitsContract:
    """Names, notes and metadata at their limits, and beyond."""

    async def test_names_of_all_sorts(self, harness: Harness) -> None:
        names = ["a", " ", "a/b?c=d&e#f", "'; DROP TABLE thread; --", "名前", "😀" * 512, "x" * 512]
        again = harness.open()
        for number, name in enumerate(names, 1):
            thread = harness.thread(name)
            await harness.save(thread, {"n": 1})
            assert await harness.names() == names[:number][::-1]
            assert await harness.state(again.thread(name)) == {"n": 1}
            tenant = harness.tenant(name)
            await harness.save(tenant.thread(name), {"n": 2})
            assert await harness.state(thread) == {"n": 1}

    async def test_bad_names_are_refused(self, harness: Harness) -> None:
        await harness.save(harness.thread(), {})
        bad: list[Any] = ["", "x" * 513, "nul\0", "\ud800", 7, None, b"bytes"]
        for name in bad:
            with pytest.raises(UsageError):
                harness.thread(name)
            with pytest.raises(UsageError):
                harness.store.tenant(name)
            with pytest.raises(UsageError):
                harness.open(tenant=name)
            if isinstance(name, str):
                with pytest.raises(UsageError):
                    await harness.fork(harness.thread(), name=name)
                with pytest.raises(UsageError):
                    await harness.delete(name)

    async def test_names_differ_by_every_character(self, harness: Harness) -> None:
        names = ["a", "A", "a ", "ä", "a\u0308", "\uff41"]
        for name in names:
            await harness.save(harness.thread(name), {"name": name})
        for name in names:
            assert await harness.state(harness.thread(name)) == {"name": name}

    async def test_bad_notes_are_refused(self, harness: Harness) -> None:
        thread = harness.thread()
        bad: list[Any] = ["x" * 10_001, "nul\0", "\ud800", 7]
        for note in bad:
            with pytest.raises(UsageError):
                await harness.save(thread, {}, note=note)
        assert await harness.threads() == []
        first = await harness.save(thread, {}, note="x" * 10_000)
        for note in bad:
            for refused in ("update", "rollback"):
                with pytest.raises(UsageError):
                    await harness.run((thread, refused, ({} if refused == "update" else first,), {"note": note}))
        assert len(await harness.history(thread)) == 1

    async def test_bad_metadata_is_refused(self, harness: Harness) -> None:
        """What JSON cannot hold is refused, never changed in silence."""
        thread = harness.thread()
        refused = (UsageError, Unstorable)
        bad: list[Any] = [
            {"a": object()},
            {"a": {1, 2}},
            {"a": math.nan},
            {"a": [math.inf]},
            {"a": datetime(2024, 1, 1, tzinfo=UTC)},
            {"a": b"bytes"},
            {"a": 2**70},
            {"a": "\ud800"},
            {"a": {1: 2}},
            {1: 2},
            {"": 1},
            {"nul\0": 1},
            {"x" * 513: 1},
            {"big": "x" * 70_000},
            "text",
            [("a", 1)],
        ]
        for metadata in bad:
            with pytest.raises(refused):
                await harness.save(thread, {}, metadata=metadata)
            with pytest.raises(refused):
                harness.thread(metadata=metadata)
        assert await harness.threads() == []
        await harness.save(thread, {})
        for metadata in bad:
            with pytest.raises(refused):
                await harness.annotate(thread, metadata)
            with pytest.raises(refused):
                await harness.fork(thread, name="fork", metadata=metadata)
        assert (await harness.info(thread)).metadata == {}

    async def test_metadata_at_its_limits(self, harness: Harness) -> None:
        """Keys and values whose index entries are as long as they can get, and do not compress."""
        chance = random.Random(1)
        key = "".join(chr(chance.randrange(0x10000, 0x10FFFF)) for _ in range(512))
        value = "".join(chr(chance.randrange(0x10000, 0x10FFFF)) for _ in range(198))
        metadata = {key: value, "list": list(range(5_000)), "nul": "\0"}
        await harness.save(harness.thread(metadata=metadata), {}, metadata=metadata)
        for wanted, found in metadata.items():
            assert await harness.names(where={wanted: found}) == ["t"]
        assert (await harness.info(harness.thread())).metadata == metadata
        assert (await harness.load(harness.thread())).metadata == metadata
