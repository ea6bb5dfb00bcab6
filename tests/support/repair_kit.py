"""A store with something of everything, ways to damage it behind its back, and what must hold after a repair."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

import perdure
from perdure.log import keyframes as policy
from perdure.testing.postgres_server import PostgresServer

MENDED = "mended"  # the schema that copies go to


@perdure.step(name="repair_kit.step")
def one_step(number: int) -> str:
    return "x" * number


@perdure.durable(name="repair_kit.run")
def one_run(count: int) -> int:
    return sum(len(one_step(number)) for number in range(count))


@perdure.durable(name="repair_kit.asks")
def asking() -> str:
    one_step(3)
    return str(perdure.ask("Go on?", options=["yes", "no"]))


@dataclass
class Scene:
    """A store, and every state that was saved in it, by thread and checkpoint."""

    url: str
    states: dict[tuple[str, str], Any] = field(default_factory=dict)
    notes: dict[str, str | None] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_file(self) -> bool:
        return not self.url.startswith("postgresql")

    def at(self, url: str) -> Scene:
        """The same in a copy of the file."""
        return Scene(url, self.states, self.notes, self.heads, self.options)

    def execute(self, text: str, params: Sequence[Any] = (), schema: str = "perdure") -> list[Any]:
        """Plain SQL, past the store; parameters are written as ?."""
        if self.is_file:
            connection = apsw.Connection(self.url)
            try:
                return connection.execute(text, tuple(params)).fetchall()
            finally:
                connection.close()
        with psycopg.connect(self.url, options=f"-c search_path={schema}", autocommit=True) as other:
            cursor = other.execute(text.replace("?", "%s"), params)
            return cursor.fetchall() if cursor.description else []

    def repair(self, **options: Any) -> perdure.ops.Repaired:
        """Repair a copy."""
        to = options.pop("to", None) or (f"{self.url}-mended.db" if self.is_file else MENDED)
        return perdure.ops.repair_store(self.url, to=to, **{**self.options, **options})

    def open(self, done: perdure.ops.Repaired | None = None) -> perdure.Store:
        """The store, or the copy that a repair made of it."""
        if done is None or not done.changed:
            return perdure.open(self.url, **self.options)
        if self.is_file:
            return perdure.open(done.place, **self.options)
        return perdure.open(self.url, **{**self.options, "schema": done.place.split('"')[1]})

    def loadable(self, done: perdure.ops.Repaired | None = None) -> set[tuple[str, str]]:
        """Which checkpoints can be loaded; each is compared with what was saved."""
        good = set()
        try:
            with self.open(done) as store:
                for name, at in self.states:
                    try:
                        loaded = store.thread(name).load(at, strict=True)
                    except perdure.PerdureError:
                        continue
                    assert loaded.state == self.states[name, at], f"{name} {at} is not what was saved"
                    assert loaded.note == self.notes[at]
                    good.add((name, at))
        except perdure.PerdureError:
            pass  # it cannot even be opened
        return good

    def check(self, done: perdure.ops.Repaired, before: set[tuple[str, str]]) -> set[tuple[str, str]]:
        """What must hold after every repair. Which checkpoints can be loaded."""
        after = self.loadable(done)
        assert before <= after, f"lost by the repair: {sorted(before - after)}\n{done}"
        assert done.report.ok, done.report.problems
        with self.open(done) as store:
            assert store.ops.verify().ok
            for name in self.heads:
                self._check_thread(store, name, done)
        missing = self.states.keys() - after
        named = {note.checkpoint for note in done.lost}
        wholesale = [note for note in (*done.lost, *done.repaired) if note.checkpoint is None]
        for name, at in missing:
            assert at in named or wholesale, f"{name} {at} is gone, and nobody says so\n{done}"
        return after

    def _check_thread(self, store: perdure.Store, name: str, done: perdure.ops.Repaired) -> None:
        thread = store.thread(name)
        try:
            loaded = thread.load(strict=True)
        except perdure.NotFound:
            assert any(note.checkpoint is None or note.thread == name for note in (*done.repaired, *done.lost))
            return
        assert loaded.state == self.states[name, loaded.id]
        assert [checkpoint.id for checkpoint in thread.history(limit=None)]


def build(url: str, *, saves: int = 24, runs: bool = True, **options: Any) -> Scene:
    """Small states, so that keyframes come often; text that does not compress away."""
    chance = random.Random(7)
    scene = Scene(url, options=options)
    with pytest.MonkeyPatch.context() as patch, perdure.open(url, durability="normal", **options) as store:
        patch.setattr(policy, "SMALL_BYTES", 0)
        patch.setattr(policy, "RECORD_COST_BYTES", 700)
        state: dict[str, Any] = {"messages": [], "plan": {"step": 0}, "blob": chance.randbytes(600)}

        def save(on: perdure.Thread, note: str | None = None, **how: Any) -> str:
            state["messages"].append({"role": "user", "content": chance.randbytes(20).hex()})
            state["plan"]["step"] += 1
            saved = on.save(state, note=note, metadata={"cost": 0.5} if note else None, **how)
            scene.states[on.name, saved.id] = json_copy(state)
            scene.notes[saved.id] = note
            return saved.id

        thread = store.thread("a", metadata={"user": "ada", "n": 1})
        line = [save(thread, f"turn {number}" if number % 3 == 0 else None) for number in range(saves)]
        fork = thread.fork(line[saves // 2], name="b")
        forked = [save(fork, "on the fork") for _ in range(5)]
        save(store.thread("a"), "a branch", parent=line[-3])
        scene.heads |= {"a": line[-1], "b": forked[-1]}
        patch.setattr(policy, "RECORD_COST_BYTES", 20)
        long = store.thread("long")
        scene.heads["long"] = [save(long, f"number {number}") for number in range(saves)][-1]
        pruned = store.thread("c")
        last = [save(pruned) for _ in range(6)]
        pruned.prune(keep=2)
        for gone in last[:-2]:
            del scene.states["c", gone]
        scene.heads["c"] = last[-1]
        pruned.pin(last[-2], name="kept")
        if runs:
            store.run(one_run, 4, id="done")
            store.start(asking, id="asks")
        assert store.ops.verify().ok
    return scene


def clone(scene: Scene, server: PostgresServer, folder: Path, number: int) -> Scene:
    """The same store again, in a file or a database of its own."""
    if scene.is_file:
        path = folder / f"{number}.db"
        shutil.copy(scene.url, path)
        return scene.at(str(path))
    name = scene.url.rsplit("/", 1)[1]
    return scene.at(server.create_database(f"{name}_{number}", template=name))


class Scenes:
    """Stores to damage, each a copy of one that is built once."""

    def __init__(self, folder: Path, server: PostgresServer, **options: Any) -> None:
        self._folder, self._server, self._options = folder, server, options
        self._built: dict[str, Scene] = {}
        self._made: list[str] = []

    def new(self, database: str) -> Scene:
        if database not in self._built:
            name = f"scenes_{os.getpid()}_{id(self)}"
            url = str(self._folder / "a.db") if database == "sqlite" else self._server.create_database(name)
            self._built[database] = build(url, **self._options)
        made = clone(self._built[database], self._server, self._folder, len(self._made))
        self._made.append(made.url)
        return made

    def close(self) -> None:
        urls = [*self._made, *(scene.url for scene in self._built.values())]
        for url in urls:
            if url.startswith("postgresql"):
                self._server.drop_database(url.rsplit("/", 1)[1])


def json_copy(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "messages": list(state["messages"]), "plan": dict(state["plan"])}
