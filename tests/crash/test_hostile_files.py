"""Bundles, backups, archives and stores of a hostile giver: refused, or read without harm.

Whatever is in the file, another store beside it stays as it was, and no file appears."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from hostile_files import HEADERS, STRANGE, WRONG, changed, closed_bundle, header_changed, make_store, opened_bundle

import perdure
from perdure.errors import Damaged, PerdureError


class Place:
    """A good file of each kind, and a store that none of them is about."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.victim, self.good, archived = folder / "victim.db", folder / "good.db", folder / "archived.db"
        with perdure.open(self.victim) as store:
            store.thread("precious").save({"a": 1})
        make_store(self.good)
        with perdure.open(self.good) as store:
            store.get_snapshot("one").export(folder / "good.bundle")
            store.ops.backup(folder / "good.backup")
        make_store(archived)
        self.archived = folder / "stub.db"  # a store whose thread is in an archive
        with perdure.open(archived) as store:
            store.ops.archive("x", folder / "good.archive")
        with perdure.open(folder / "good.archive") as store:
            store.snapshot("one")
        archived.rename(self.archived)
        self.facts = opened_bundle(folder / "good.bundle", folder / "bundle.db")
        self.stores = {
            "bundle": folder / "bundle.db",
            "backup": folder / "good.backup",
            "archive": folder / "good.archive",
            "store": self.good,
        }
        self.before = self.look()

    def look(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("hostile"))


@pytest.fixture
def use(place: Place, tmp_path: Path) -> Iterator[Callable[[str, Path], None]]:
    """Use a file as what it claims to be, and see that nothing else has changed."""

    def call(kind: str, path: Path) -> None:
        if kind == "bundle":
            bundle = closed_bundle(path, place.facts, tmp_path / "evil.bundle")
            with perdure.ops.open_bundle(bundle) as snapshot:
                read(snapshot)
        elif kind == "backup":
            perdure.ops.restore_backup(path, tmp_path / "restored.db")
            with perdure.open(tmp_path / "restored.db") as store:
                read(store)
        elif kind == "archive":
            (tmp_path / "store.db").write_bytes(place.archived.read_bytes())
            with perdure.open(tmp_path / "store.db") as store:
                store.ops.unarchive("x", path)
                read(store)
        else:
            with perdure.open(path, create=False) as store:
                read(store)
                read(store.get_snapshot("one"))

    yield call
    assert place.look() == place.before


def read(store: Any) -> None:
    """What anyone who was given a file would look at."""
    for info in store.threads():
        store.thread(info.name).load()
    store.memory("facts").list()
    store.runs()


def everything(store: perdure.Store, folder: Path) -> None:
    """Every way in which names of a file could come into SQL."""
    for operation in (
        lambda: read(store),
        lambda: read(store.get_snapshot("one")),
        lambda: store.get_snapshot("one").held_bytes(),
        lambda: store.get_snapshot("one").diff(),
        lambda: store.ops.verify(),
        lambda: store.ops.backup(folder / "copy.backup"),
        lambda: perdure.ops.restore_backup(folder / "copy.backup", folder / "copy.db"),
        lambda: copy_rows(store, folder),
        lambda: store.snapshot("two"),
        lambda: store.thread("x").save({"a": 3}),
        lambda: store.ops.compact(),
        lambda: store.get_snapshot("one").release(),
    ):
        with suppress(PerdureError):
            operation()


def copy_rows(store: perdure.Store, folder: Path) -> None:
    from perdure.transfers.whole import copy_store

    with perdure.open(folder / "rows.db") as target:
        copy_store(store._context.driver, target._context.driver)


@pytest.mark.parametrize("kind", ["bundle", "backup", "archive", "store"])
def test_a_good_file_is_read_by_hardened_connections_only(
    place: Place, use: Callable[[str, Path], None], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first statement on, each is defensive, trusts no schema, knows no views and attaches no file."""
    seen: set[tuple[int, ...]] = set()

    def look(cursor: apsw.Cursor, sql: str, bindings: object) -> bool:
        connection = cursor.connection
        if connection.filename:  # else it is in memory
            switches = (
                apsw.SQLITE_DBCONFIG_DEFENSIVE,
                apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA,
                apsw.SQLITE_DBCONFIG_ENABLE_VIEW,
            )
            seen.add(
                (*(connection.config(switch, -1) for switch in switches), connection.limit(apsw.SQLITE_LIMIT_ATTACHED))
            )
        return True

    def follow(connection: apsw.Connection) -> None:
        connection.exec_trace = look

    monkeypatch.setattr(apsw, "connection_hooks", [*apsw.connection_hooks, follow])
    path = tmp_path / "good"
    path.write_bytes(place.stores[kind].read_bytes())
    use(kind, path)
    assert seen == {(1, 0, 0, 0)}


@pytest.mark.parametrize("change", STRANGE)
@pytest.mark.parametrize("kind", ["bundle", "backup", "archive"])
def test_a_schema_that_no_store_has_is_refused(
    place: Place, use: Callable[[str, Path], None], tmp_path: Path, kind: str, change: str
) -> None:
    """Before anything in it is used: a schema is code."""
    path = changed(place.stores[kind], tmp_path / "evil", STRANGE[change], place.victim)
    with pytest.raises(Damaged, match=r"was not made by Perdure: it has the|is damaged"):
        use(kind, path)
    if kind == "bundle":
        with pytest.raises(Damaged, match=r"evil\.bundle was not made by Perdure"):
            perdure.snapshots.check_bundle(tmp_path / "evil.bundle")


@pytest.mark.parametrize("change", STRANGE)
def test_a_store_from_elsewhere_reaches_no_other(place: Place, tmp_path: Path, change: str) -> None:
    """A store that is opened by its path may have tables of other programs: it is opened, and harms itself only."""
    path = changed(place.good, tmp_path / "evil.db", STRANGE[change], place.victim)
    with suppress(PerdureError), perdure.open(path, create=False) as store:
        everything(store, tmp_path)
    assert place.look() == place.before


@pytest.mark.parametrize("change", WRONG)
@pytest.mark.parametrize("kind", ["bundle", "backup", "archive", "store"])
def test_contents_of_any_kind_are_refused_or_read(
    place: Place, use: Callable[[str, Path], None], tmp_path: Path, kind: str, change: str
) -> None:
    path = changed(place.stores[kind], tmp_path / "evil", WRONG[change], place.victim)
    with suppress(PerdureError):
        use(kind, path)


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("kind", ["bundle", "backup", "archive", "store"])
def test_a_header_of_any_kind_is_refused_or_read(
    place: Place, use: Callable[[str, Path], None], tmp_path: Path, kind: str, header: str
) -> None:
    path = header_changed(place.stores[kind], tmp_path / "evil", *HEADERS[header])
    with suppress(PerdureError):
        use(kind, path)


FACTS: dict[str, Any] = {
    "snapshot": ["x", 5, None, "x'; --"],
    "tenant": [5, None, "", "x" * 10_000, "../x", ["default"]],
    "taken_at": ["x", 2**63 - 1, -(2**63), 1e300, None, []],
    "manifest": [5, "x", None, [[]]],
    "since": [5, []],
    "more": [1],
}


@pytest.mark.parametrize("field", FACTS)
def test_a_bundles_statement_of_any_kind_is_refused_or_read(place: Place, tmp_path: Path, field: str) -> None:
    for number, value in enumerate(FACTS[field]):
        bundle = closed_bundle(place.stores["bundle"], place.facts | {field: value}, tmp_path / f"{number}.bundle")
        with suppress(PerdureError):
            perdure.snapshots.check_bundle(bundle)
        with suppress(PerdureError), perdure.ops.open_bundle(bundle) as snapshot:
            read(snapshot)
    assert place.look() == place.before
