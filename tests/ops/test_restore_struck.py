"""A restore that fails or is killed at any statement, and at anything done to a file: nothing, or all of it, is there.

And the same restore succeeds when it is run again.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from blows import Blows, Struck
from copy_kit import make_thread, query, tables
from striking import SOAK, points
from tcp_proxy import WireProxy

import perdure
from perdure import PerdureError, Store, UsageError
from perdure.testing.postgres import PostgresServer
from perdure.testing.processes import ForkServer

Content = dict[str, list[Any]]


@perdure.step(name="struck restore step")
def double(n: int) -> int:
    return n * 2


@perdure.durable(name="struck restore run")
def counted(n: int) -> int:
    return sum(double(number) for number in range(n))


@perdure.durable(name="struck restore question")
def asks() -> str:
    return str(perdure.ask("Go on?"))


def fill(store: Store) -> None:
    make_thread(store, count=6)
    store.tenant("acme").thread("theirs").save({"blob": "x" * 5000})
    store.run(counted, 3, id="done")
    store.run(asks, id="asks")


def content(place: str, **options: Any) -> Content | None:
    """Every row that is data, of a store that verifies; None: there is no store, or an empty one."""
    if not place.startswith("postgres") and not Path(place).exists():
        return None
    with perdure.open(place, durability="normal", **options) as store:
        assert store.ops.verify().ok
        assert store.tenant("acme").ops.verify().ok
        found = tables(store)
        return found if any(found.values()) else None


def is_marked(place: str, **options: Any) -> bool:
    """Whether a store says that its restore has not come to its end."""
    with perdure.open(place, durability="normal", **options) as store:
        return bool(query(store, "SELECT value FROM meta WHERE key = 'restoring'"))


@dataclass
class Scene:
    """Where a backup is restored to, and what was there before."""

    place: Path
    original: Path | None
    force: bool

    def prepare(self) -> None:
        for path in self.place.parent.iterdir():
            path.unlink()
        if self.original is not None:
            shutil.copy(self.original, self.place)

    def restore(self, backup: str) -> perdure.ops.Restored:
        return perdure.restore(backup, str(self.place), force=self.force)

    def content(self) -> Content | None:
        return content(str(self.place))

    def is_marked(self) -> bool:
        return self.place.exists() and is_marked(str(self.place))


# --- a place in a file


@pytest.fixture(params=["sqlite", "postgres"])
def backup(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A backup of either database."""
    url = str(tmp_path / "source.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with perdure.open(url, durability="normal") as store:
        fill(store)
        store.ops.backup(tmp_path / "backup")
    return str(tmp_path / "backup")


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    """A place without a file; with an empty store; with a used one, which `force` replaces."""
    original: Path | None = tmp_path / "original.db"
    if request.param == "nothing":
        original = None
    else:
        with perdure.open(str(original)) as store:
            if request.param == "used":
                store.thread("old").save({"old": "y" * 3000})
    (tmp_path / "place").mkdir()
    return Scene(tmp_path / "place" / "restored.db", original, force=request.param == "used")


def again(scene: Scene, backup: str, whole: Content | None, where: str) -> None:
    """The same restore succeeds; unless the first one had come to its end, and only could not say so any more."""
    if scene.content() == whole and not scene.is_marked() and not scene.force:
        with pytest.raises(UsageError, match="not empty"):
            scene.restore(backup)
    else:
        assert scene.restore(backup).ok, where
        assert not list(scene.place.parent.glob("*.part*")), where
    assert scene.content() == whole, where
    assert not scene.is_marked(), where


# A backup of PostgreSQL is loaded another way, and placed in the same one.
PAIRS = [("sqlite", "nothing"), ("sqlite", "used"), ("sqlite", "empty"), ("postgres", "nothing")]
PAIRS += [("postgres", "used"), ("postgres", "empty")] * SOAK


@pytest.mark.parametrize(("backup", "scene"), PAIRS, indirect=True)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_file_is_whole_or_as_it_was(backup: str, scene: Scene, request: pytest.FixtureRequest) -> None:
    scene.prepare()
    was = scene.content()
    with Blows(0) as count:
        assert scene.restore(backup).ok
    whole = scene.content()
    assert whole is not None
    for at in itertools.takewhile(lambda at: at <= len(count.points), points(request.node.name)):
        where = f"point {at} of {len(count.points)}: {count.points[at - 1]}"
        scene.prepare()
        with suppress(Struck, PerdureError, OSError), Blows(at):
            scene.restore(backup)
        assert scene.content() in (was, whole), where
        again(scene, backup, whole, where)


@pytest.fixture(scope="module")
def restorers() -> Iterator[ForkServer]:
    with ForkServer("blows:restore_killed") as fork_server:
        yield fork_server


@pytest.mark.parametrize(("backup", "scene"), PAIRS if SOAK else PAIRS[:2], indirect=True)
def test_a_file_is_whole_or_as_it_was_after_a_kill(
    backup: str, scene: Scene, request: pytest.FixtureRequest, restorers: ForkServer
) -> None:
    scene.prepare()
    was = scene.content()
    assert scene.restore(backup).ok
    whole = scene.content()
    for at in itertools.islice(points(request.node.name), 3, None, 1 if SOAK else 6):
        scene.prepare()
        if list(restorers.start(backup, str(scene.place), scene.force, at).lines()):
            return  # it has fewer points
        assert scene.content() in (was, whole), f"point {at}"
        again(scene, backup, whole, f"point {at}")


@pytest.mark.parametrize("backup", ["sqlite", "postgres"] if SOAK else ["sqlite"], indirect=True)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_placed_and_not_settled_is_taken_up(backup: str, tmp_path: Path) -> None:
    """The last points, each of them: from the moment when the file gets its name. Not if somebody has used it since."""
    scene = Scene(tmp_path / "place" / "restored.db", None, force=False)
    scene.place.parent.mkdir()
    with Blows(0) as count:
        scene.restore(backup)
    whole = scene.content()
    linked = count.points.index("os.link") + 1
    taken = 0
    for at in range(linked, len(count.points) + 1):
        scene.prepare()
        with suppress(Struck, PerdureError, OSError), Blows(at):
            scene.restore(backup)
        assert scene.content() == whole  # without links it is renamed
        taken += scene.is_marked()
        again(scene, backup, whole, f"point {at}: {count.points[at - 1]}")
    assert taken
    scene.prepare()
    with pytest.raises(OSError, match="struck"), Blows(linked + 1):
        scene.restore(backup)
    with perdure.open(str(scene.place)) as store:
        store.thread("new").save({"n": 1})
    with pytest.raises(UsageError, match="not empty"):
        scene.restore(backup)


# --- a place in PostgreSQL


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[WireProxy]:
    with WireProxy(postgres_server.port) as proxy:
        yield proxy


def test_a_schema_is_whole_or_not_there(
    backup: str, postgres_url: str, proxy: WireProxy, request: pytest.FixtureRequest
) -> None:
    """The connection breaks before any of the exchanges with the server, or after the COMMIT that nobody hears of."""
    url = proxy.url(postgres_url.rpartition("/")[2].partition("?")[0])
    numbers = itertools.count(1)

    def schema() -> dict[str, Any]:
        return {"schema": f"place_{next(numbers)}"}

    proxy.reset()
    first = schema()
    assert perdure.restore(backup, url, **first).ok
    turns = proxy.turns
    whole = content(postgres_url, **first)
    assert whole is not None
    struck = itertools.takewhile(lambda at: at <= turns, points(request.node.name))
    for at in (*itertools.islice(struck, 0, None, 1 if SOAK else 2), None):
        options = schema()
        if at is None:
            proxy.lose(b"COMMIT")
        else:
            proxy.lose_turn(at)
        with suppress(PerdureError):
            perdure.restore(backup, url, **options)
        proxy.lose_turn(0)
        found = content(postgres_url, **options)
        assert found in (None, whole), at
        if found == whole and not is_marked(postgres_url, **options):
            with pytest.raises(UsageError, match="not empty"):
                perdure.restore(backup, url, **options)
        else:
            assert perdure.restore(backup, url, **options).ok, at
        assert content(postgres_url, **options) == whole, at
        assert not is_marked(postgres_url, **options)


def test_a_schema_that_was_not_checked_is_taken_up(backup: str, postgres_url: str) -> None:
    """The process is gone between the COMMIT and the end of the check."""

    def strike(_step: str) -> None:
        raise Struck

    with pytest.raises(Struck):
        perdure.restore(backup, postgres_url, schema="place", hook=strike)
    assert is_marked(postgres_url, schema="place")
    done = perdure.restore(backup, postgres_url, schema="place")
    assert done.ok
    assert done.tenants == 2
    assert not is_marked(postgres_url, schema="place")
    with pytest.raises(UsageError, match="not empty"):
        perdure.restore(backup, postgres_url, schema="place")
