"""Damage: whatever byte of a stored record flips, verify() says so and load() never returns a wrong state.

A store with keyframes, differences, a fork, a branch, notes, metadata and tombstones is built once. Each case
changes one thing behind its back, looks, and changes it back. A load must return exactly what was saved under
the id it names, or raise, or fall back and say what it skipped.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest
from soak import SOAK, spread

import perdure
from perdure.log import keyframes as policy
from perdure.storage.sqlite.opening import PAGE_BYTES

# Which rows are damaged: in a soak all, in four parts, and each byte of them.
PARTS, STRIDE = (range(4), 4) if SOAK else (range(1), 7)
# fmt: off
# Not thread and cost: no hash covers where a row belongs physically, and no state depends on it.
RECORD_COLUMNS = [
    "tenant", "tree", "id", "parent", "base", "keyframe", "key", "kind", "at", "step", "note", "metadata",
    "size", "hash", "body",
]
# fmt: on
BODY_COLUMNS = ["id", "tenant", "salt", "diff", "full_text"]
# A record whose key has changed is not found under it any more; nothing tells that from one that was pruned.
KEYS = {"tenant", "tree", "id"}
# Lists show these as they are stored: only the hash over the state covers them, which a list does not read.
LISTED_AS_STORED = {"note", "metadata"}


@dataclass
class Sample:
    """A store on disk, and every state that was saved in it, by checkpoint id."""

    path: Path
    states: dict[str, Any]
    notes: dict[str, str | None]
    threads: dict[str, list[str]]  # the ids of each thread's line, oldest first
    branch: str = ""  # the end of a branch that is not the head

    def raw(self) -> apsw.Connection:
        return apsw.Connection(str(self.path))


def build(path: Path, saves: int = 24) -> Sample:
    """Small states, so that keyframes come often; text that does not compress away."""
    chance = random.Random(7)
    sample = Sample(path, {}, {}, {"a": [], "b": []})
    with pytest.MonkeyPatch.context() as patch, perdure.open(str(path)) as store:
        patch.setattr(policy, "SMALL_BYTES", 0)  # keyframes also for states as small as these, and often
        patch.setattr(policy, "RECORD_COST_BYTES", 700)
        thread = store.thread("a", metadata={"user": "ada"})
        state: dict[str, Any] = {"messages": [], "plan": {"step": 0}, "blob": chance.randbytes(600)}

        def save(on: perdure.Thread, note: str | None = None, **options: Any) -> str:
            state["messages"].append({"role": "user", "content": chance.randbytes(20).hex()})
            state["plan"]["step"] += 1
            saved = on.save(state, note=note, metadata={"cost": 0.5} if note else None, **options)
            sample.states[saved.id] = _copy(state)
            sample.notes[saved.id] = note
            return saved.id

        for number in range(saves):
            sample.threads["a"].append(save(thread, f"turn {number}" if number % 3 == 0 else None))
        fork = thread.fork(sample.threads["a"][saves // 2], name="b")
        for _ in range(5):
            sample.threads["b"].append(save(fork, "on the fork"))
        sample.branch = save(store.thread("a"), "a branch", parent=sample.threads["a"][-3])
        pruned = store.thread("c")
        for number in range(6):
            saved = pruned.save({"number": number})
            sample.states[saved.id], sample.notes[saved.id] = {"number": number}, None
            sample.threads.setdefault("c", []).append(saved.id)
        pruned.prune(keep=2)
        for gone in sample.threads["c"][:-2]:
            del sample.states[gone]
        del sample.threads["c"][:-2]
        assert store.ops.verify().ok
    return sample


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "messages": list(state["messages"]), "plan": dict(state["plan"])}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return build(tmp_path_factory.mktemp("damage") / "a.db")


@pytest.fixture
def raw(sample: Sample) -> Iterator[apsw.Connection]:
    connection = sample.raw()
    yield connection
    connection.close()


@pytest.fixture
def own(tmp_path: Path, sample: Sample) -> Sample:
    """A copy to damage for good."""
    shutil.copy(sample.path, tmp_path / "a.db")
    return Sample(tmp_path / "a.db", sample.states, sample.notes, sample.threads, sample.branch)


def flips(value: Any, chance: random.Random, every: bool) -> Iterator[Any]:
    """The value with one bit or character changed, at all positions or some."""
    if isinstance(value, bytes):
        positions = range(len(value)) if every else sorted(chance.sample(range(len(value)), min(3, len(value))))
        for position in positions:
            yield (value[:position] + bytes([value[position] ^ (1 << chance.randrange(8))]) + value[position + 1 :])
    elif isinstance(value, int):
        for bit in range(63) if every else sorted(chance.sample(range(63), 4)):
            yield value ^ (1 << bit)
    elif isinstance(value, str):
        for position in range(len(value)) if every else (chance.randrange(len(value)),):
            yield value[:position] + chr(ord(value[position]) ^ 1) + value[position + 1 :]


REFUSED = (perdure.errors.Damaged,)
REFUSED_OR_MISSING = (*REFUSED, perdure.NotFound)


def examine(
    store: perdure.Store,
    sample: Sample,
    where: str,
    allowed: tuple[type[perdure.PerdureError], ...] = REFUSED,
    *,
    lists: bool = True,
) -> None:
    """Load everything, strictly and not: what comes back is what was saved under the id it carries."""
    for name, line in sample.threads.items():
        for at in [None, *line, *([sample.branch] if name == "a" else [])]:
            for strict in (True, False):
                try:
                    loaded = store.thread(name).load(at, strict=strict)
                except allowed:
                    continue  # what is refused when strict may have a stand-in
                assert loaded.id in sample.states, f"{where}: {at} gave an unknown checkpoint {loaded.id}"
                assert loaded.state == sample.states[loaded.id], f"{where}: a wrong state for {at}"
                assert loaded.note == sample.notes[loaded.id], f"{where}: a wrong note for {at}"
                if strict or not loaded.skipped:
                    assert loaded.id == (at or line[-1]), f"{where}: {at} gave {loaded.id} in silence"
                    break
                assert (at or line[-1]) in loaded.skipped or at is None
                assert loaded.id <= (at or loaded.id), f"{where}: a newer one stood in for {at}"
        if lists:
            examine_lists(store.thread(name), sample, where)


def examine_lists(thread: perdure.Thread, sample: Sample, where: str) -> None:
    """A list without loading shows no wrong note. (A changed id is listed; loading it is refused.)"""
    lists: list[Callable[[], Iterable[perdure.Checkpoint | None]]] = [
        lambda: thread.history(),
        lambda: thread.branches(),
        lambda: [thread.get_head()],
    ]
    for listed in lists:
        try:
            for checkpoint in listed():
                assert checkpoint is not None
                assert checkpoint.note == sample.notes.get(checkpoint.id, checkpoint.note), (
                    f"{where}: a wrong note in a list"
                )
        except (perdure.errors.Damaged, perdure.NotFound):
            pass


def damage_each(
    sample: Sample,
    raw: apsw.Connection,
    table: str,
    columns: list[str],
    where: str,
    params: tuple[Any, ...],
    every: bool,
) -> int:
    """Flip something in every column of one row, one change at a time: each shows, or every load is still right."""
    [before] = raw.execute(f"SELECT {', '.join(columns)} FROM {table} WHERE {where}", params).fetchall()
    row = dict(zip(columns, before, strict=True))
    key = {"record": ["tenant", "tree", "id"], "body": ["id"], "thread": ["tenant", "thread"]}[table]
    chance = random.Random(repr(before))
    cases = harmless = 0
    with perdure.open(str(sample.path)) as store:
        for column, value in row.items():
            if table == "thread" and column not in ("head", "head_hash"):
                continue
            if table == "record" and row["body"] is None and column not in ("hash", "note", "metadata"):
                continue  # of a tombstone only these are read
            for changed in flips(value, chance, every):
                now = {**row, column: changed}
                change = f"UPDATE {table} SET {column} = ? WHERE {' AND '.join(f'{name} = ?' for name in key)}"
                try:
                    raw.execute(change, (changed, *(row[name] for name in key)))
                except apsw.ConstraintError:
                    continue  # another row has that key
                what = f"{table} {params} {column}: {value!r} -> {changed!r}"
                try:
                    if store.ops.verify().ok:  # only what no load depends on: a keyframe's flag, unused bits of a frame
                        examine(store, sample, what, allowed=())
                        harmless += 1
                    elif cases % 8 == 0 or (column in ("full_text", "diff", "base", "key") and cases % 2):
                        allowed = REFUSED_OR_MISSING if table == "record" and column in KEYS else REFUSED
                        examine(store, sample, what, allowed, lists=column not in LISTED_AS_STORED)
                finally:
                    raw.execute(change, (value, *(now[name] for name in key)))
                cases += 1
    assert harmless <= 2 + cases // 50, f"verify() did not see {harmless} of {cases} changes of {table} {params}"
    return cases


def record_keys(raw: apsw.Connection) -> list[tuple[Any, ...]]:
    return raw.execute("SELECT tenant, tree, id FROM record ORDER BY tree, id").fetchall()


@pytest.mark.parametrize("part", PARTS)
def test_a_flip_in_any_column_of_any_record_shows(sample: Sample, raw: apsw.Connection, part: int) -> None:
    cases = 0
    for number, key in enumerate(record_keys(raw)):
        if number % STRIDE == part:
            cases += damage_each(sample, raw, "record", RECORD_COLUMNS, "tenant = ? AND tree = ? AND id = ?", key, SOAK)
    assert cases > (300 if SOAK else 60)


@pytest.mark.parametrize("part", PARTS)
def test_a_flip_in_any_column_of_any_body_shows(sample: Sample, raw: apsw.Connection, part: int) -> None:
    bodies = [body for (body,) in raw.execute("SELECT id FROM body ORDER BY id").fetchall()]
    keyframe = raw.execute("SELECT max(id) FROM body WHERE full_text IS NOT NULL AND diff IS NOT NULL").fetchall()
    difference = raw.execute("SELECT max(id) FROM body WHERE full_text IS NULL").fetchall()
    cases = 0
    for number, body in enumerate(bodies):
        if number % STRIDE == part or body in (keyframe[0][0], difference[0][0]):
            cases += damage_each(sample, raw, "body", BODY_COLUMNS, "id = ?", (body,), SOAK)
    assert cases > (80 if SOAK else 20)


def test_a_flip_in_a_threads_head_shows(sample: Sample, raw: apsw.Connection) -> None:
    columns = ["tenant", "thread", "head", "head_hash"]
    for key in raw.execute("SELECT tenant, thread FROM thread").fetchall():
        assert damage_each(sample, raw, "thread", columns, "tenant = ? AND thread = ?", key, every=True) > 90


# --- what is done about it


def keyframes(raw: apsw.Connection) -> list[tuple[Any, ...]]:
    """Records and bodies of the keyframes that thread a wrote, oldest first."""
    return raw.execute(
        "SELECT id, body FROM record WHERE keyframe = 1 AND base IS NOT NULL AND thread = "
        "(SELECT thread FROM thread WHERE name = 'a') ORDER BY id"
    ).fetchall()


@pytest.mark.parametrize("how_many", [1, 2, 3])
def test_damaged_keyframes_are_rebuilt_from_those_before(own: Sample, how_many: int) -> None:
    """Even several in a row: every checkpoint still loads, strictly, and a save goes on."""
    with own.raw() as raw:
        found = keyframes(raw)
        assert len(found) > 4
        for _, body in found[2 : 2 + how_many]:
            raw.execute("UPDATE body SET full_text = zeroblob(length(full_text)) WHERE id = ?", (body,))
    with perdure.open(str(own.path)) as store:
        assert not store.ops.verify().ok
        for at in own.threads["a"]:
            assert store.thread("a").load(at, strict=True).state == own.states[at]
        saved = store.thread("a").save({"goes": "on"})
        assert saved.is_head
        assert store.thread("a").load(strict=True).state == {"goes": "on"}


def test_what_cannot_be_rebuilt_falls_back_and_a_save_becomes_the_head(own: Sample) -> None:
    line = own.threads["a"]
    with own.raw() as raw:
        raw.execute(
            "UPDATE body SET salt = zeroblob(16) WHERE id IN"
            " (SELECT body FROM record WHERE id IN (SELECT head FROM thread WHERE name = 'a'))"
        )
    with perdure.open(str(own.path)) as store:
        thread = store.thread("a")
        with pytest.raises(perdure.errors.Damaged) as caught:
            thread.load(strict=True)
        assert caught.value.checkpoints == (line[-1],)
        loaded = thread.load()
        assert (loaded.id, loaded.skipped) == (line[-2], (line[-1],))
        assert loaded.state == own.states[line[-2]]
        saved = thread.save({"new": 1})
        assert saved.is_head
        assert thread.load(strict=True).state == {"new": 1}
        assert store.thread("a").load(strict=True).id == saved.id


def test_cutting_off_the_end_shows_and_the_thread_goes_on(own: Sample) -> None:
    """The last records are deleted behind the thread's back: its head's hash is missing them."""
    line = own.threads["a"]
    with own.raw() as raw:
        [(head, parent)] = raw.execute(
            "SELECT r.id, r.parent FROM record r JOIN thread t ON t.head = r.id WHERE t.name = 'a'"
        ).fetchall()
        for record in (head, parent):
            raw.execute("DELETE FROM body WHERE id = (SELECT body FROM record WHERE id = ?)", (record,))
            raw.execute("DELETE FROM record WHERE id = ?", (record,))
    with perdure.open(str(own.path)) as store:
        assert any("head" in problem.what for problem in store.ops.verify().problems)
        with pytest.raises(perdure.errors.Damaged):
            store.thread("a").load(strict=True)
        with pytest.raises(perdure.errors.Damaged, match="is missing"):
            store.thread("a").get_head()
        thread = store.thread("a")
        loaded = thread.load()
        assert loaded.state == own.states[loaded.id]
        assert line[-1] in loaded.skipped
        saved = thread.save({"new": 1})
        assert saved.is_head
        assert saved.parent == loaded.id
        assert store.thread("a").load(strict=True).state == {"new": 1}
        assert store.thread("a").save({"new": 2}).is_head


def test_an_update_goes_on_from_what_stands_in_for_a_damaged_head(own: Sample) -> None:
    with own.raw() as raw:
        raw.execute(
            "UPDATE body SET salt = zeroblob(16) WHERE id IN"
            " (SELECT body FROM record WHERE id IN (SELECT head FROM thread WHERE name = 'a'))"
        )
    with perdure.open(str(own.path)) as store:
        updated = store.thread("a").update({"more": True})
        assert updated.is_head
        before = own.states[own.threads["a"][-2]]
        assert store.thread("a").load(strict=True).state == {**before, "more": True}


def test_a_damaged_row_of_a_thread_is_an_error_of_ours(own: Sample) -> None:
    for column, value in {"metadata": "not JSON", "updated_at": 2**62}.items():
        with own.raw() as raw:
            [(before,)] = raw.execute(f"SELECT {column} FROM thread WHERE name = 'a'").fetchall()
            raw.execute(f"UPDATE thread SET {column} = ? WHERE name = 'a'", (value,))
        with perdure.open(str(own.path)) as store, pytest.raises(perdure.errors.Damaged, match="of thread 'a'"):
            store.threads()
        with own.raw() as raw:
            raw.execute(f"UPDATE thread SET {column} = ? WHERE name = 'a'", (before,))


def test_a_head_set_back_behind_the_threads_back_shows(own: Sample) -> None:
    with own.raw() as raw:
        raw.execute("UPDATE thread SET head = (SELECT parent FROM record WHERE id = head) WHERE name = 'a'")
    with perdure.open(str(own.path)) as store:
        assert not store.ops.verify().ok
        with pytest.raises(perdure.errors.Damaged):
            store.thread("a").load(strict=True)


@pytest.mark.parametrize("column", ["base", "parent", "key"])
def test_pointers_in_a_circle_end_in_an_error_not_in_a_loop(own: Sample, column: str) -> None:
    with own.raw() as raw:
        line = raw.execute("SELECT id FROM record ORDER BY id DESC").fetchall()
        for (record,) in line[:10]:
            raw.execute(f"UPDATE record SET {column} = ? WHERE id = ?", (line[0][0], record))
        raw.execute("UPDATE body SET full_text = NULL WHERE id IN (SELECT body FROM record WHERE keyframe = 1)")
    with perdure.open(str(own.path)) as store:
        assert not store.ops.verify().ok
        examine(store, own, f"{column} in a circle")


def test_a_long_stretch_of_damage_is_passed_over(tmp_path: Path) -> None:
    """The first difference of a chain of hundreds is damaged: the newest valid checkpoint is far back."""
    path = tmp_path / "a.db"
    with perdure.open(str(path)) as store:
        thread = store.thread("a")
        text = random.Random(1).randbytes(200_000).hex()
        ids = [thread.save({"text": text, "number": number}).id for number in range(150)]
    with apsw.Connection(str(path)) as raw:
        raw.execute(
            "UPDATE body SET diff = zeroblob(length(diff)) WHERE id = "
            "(SELECT body FROM record WHERE keyframe = 0 ORDER BY id LIMIT 1)"
        )
    raw.close()
    with perdure.open(str(path)) as store:
        loaded = store.thread("a").load()
        assert (loaded.id, loaded.state["number"]) == (ids[0], 0)
        assert len(loaded.skipped) == 149
        assert store.thread("a").save({"number": "new"}).is_head


def test_a_damaged_page_never_gives_a_wrong_state(sample: Sample, tmp_path: Path) -> None:
    """A page of the file zeroed, or filled with noise: an error of ours, or a valid checkpoint."""
    content = sample.path.read_bytes()
    chance = random.Random(3)
    fillings: list[Callable[[], bytes]] = [lambda: bytes(PAGE_BYTES), lambda: chance.randbytes(PAGE_BYTES)]
    outcomes = {"refused": 0, "opened": 0}
    for page in spread(range(len(content) // PAGE_BYTES), 60):
        for number, filling in enumerate(fillings):
            path = tmp_path / f"{page}-{number}.db"
            path.write_bytes(content[: page * PAGE_BYTES] + filling() + content[(page + 1) * PAGE_BYTES :])
            outcomes[look(path, sample, f"page {page}")] += 1
    print(f"\n{outcomes}")
    assert outcomes["opened"] > 3


def look(path: Path, sample: Sample, where: str) -> str:
    try:
        store = perdure.open(str(path), create=False)
    except (perdure.errors.Damaged, perdure.errors.StoreError):
        return "refused"
    with store:
        for name, line in sample.threads.items():
            for at in [None, *line]:
                try:
                    loaded = store.thread(name).load(at)
                except (perdure.errors.Damaged, perdure.errors.StoreError, perdure.NotFound):
                    continue
                assert loaded.state == sample.states[loaded.id], where
        try:
            store.ops.verify()
        except (perdure.errors.Damaged, perdure.errors.StoreError):
            pass
    return "opened"


@pytest.mark.parametrize("size", [50, 1_000, 20_000, 300_000])
def test_states_that_do_not_compress_are_not_called_damaged(size: int) -> None:
    chance = random.Random(size)
    with perdure.open(":memory:") as store:
        thread, saved = store.thread("a"), dict[str, Any]()
        for number in range(12):
            state = {"number": number, "noise": chance.randbytes(size)}
            saved[thread.save(state).id] = state
        for at, state in saved.items():
            assert thread.load(at, strict=True).state == state
        assert store.ops.verify().ok


def test_a_save_after_a_fallback_builds_on_nothing_that_is_damaged(tmp_path: Path) -> None:
    """The text of the damaged head is still in memory; a difference to it could never be read back."""
    path = tmp_path / "store.db"
    store = perdure.open(str(path))
    thread = store.thread("t")
    for number in range(6):
        thread.save({"n": number, "text": f"{number} " * 10_000})
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("UPDATE body SET diff = zeroblob(length(diff)) WHERE id = (SELECT max(id) FROM body)")
    assert thread.load().state["n"] == 4
    thread.save({"n": 6, "text": "6 " * 10_000})
    assert thread.load().state["n"] == 6
    store.close()
