"""Keys stay where they are: not in a text, a log, a repr, nor in what a traceback shows; and no nonce comes twice."""

from __future__ import annotations

import base64
import logging
import multiprocessing
import os
import stat
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from sealed_kit import NEW, OLD, OTHER, Raw

import perdure
from perdure import Store, UsageError
from perdure.encryption import KeyFile, Keys, StaticKeys
from perdure.encryption.cipher import Cipher, unwrap_data_key
from perdure.errors import KeyMissing
from perdure.log.tables import RECORD, SALT
from perdure.storage.columns import MARK


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "a.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")


def opened(url: str, keys: Any = OLD, **options: Any) -> Store:
    return perdure.open(url, durability="normal", keys=keys, **options)


def shapes_of(key: bytes) -> list[str]:
    """How a key might be shown."""
    return [repr(key), key.hex(), base64.b64encode(key).decode(), repr(bytearray(key)), repr(list(key))]


def frames(error: BaseException | None) -> Iterator[dict[str, Any]]:
    """The variables of all frames that a traceback holds, with those of its causes: a reporter of errors shows them."""
    while error is not None:
        place: TracebackType | None = error.__traceback__
        while place is not None:
            if "perdure" in place.tb_frame.f_code.co_filename and "/tests/" not in place.tb_frame.f_code.co_filename:
                yield place.tb_frame.f_locals
            place = place.tb_next
        error = error.__cause__ or error.__context__


def shown(error: BaseException) -> str:
    """What a reporter of errors shows: the text, and each variable, of containers what is in them."""
    parts = ["".join(traceback.format_exception(error))]
    for variables in frames(error):
        parts += [repr(value) for value in variables.values()]
    return "\n".join(parts)


def broken_data_key(url: str) -> None:
    Raw(url)("UPDATE tenant_key SET wrapped = ?", (bytes(60),))


def broken_cell(url: str) -> None:
    Raw(url)("UPDATE thread SET metadata = substr(metadata, 1, length(metadata) - 4)")


def nothing(url: str) -> None:
    pass


@pytest.mark.parametrize(
    ("keys", "damage"),
    [([OTHER], nothing), (OLD, broken_data_key), (OLD, broken_cell), ({"another": OLD}, nothing)],
    ids=["others", "data key", "cell", "no-key"],
)
def test_no_error_shows_a_key_not_even_to_who_looks_at_its_frames(
    url: str, keys: Any, damage: Callable[[str], None]
) -> None:
    with opened(url) as store:
        store.thread("a", metadata={"user": "alice"}).save({"n": 1}, note="a note")
    damage(url)
    with opened(url, keys) as store:
        calls: list[Callable[[], Any]] = [store.threads, store.thread("a").load, lambda: store.thread("b").save({})]
        caught = 0
        for call in calls:
            try:
                call()
            except perdure.PerdureError as error:
                caught += 1
                text = shown(error)
                assert not [shape for key in (OLD, OTHER) for shape in shapes_of(key) if shape in text]
        assert caught


def test_a_rotated_away_key_is_not_shown_either(url: str) -> None:
    with opened(url) as store:
        store.thread("a").save({"n": 1})
    with opened(url, [NEW, OLD]) as store:
        store.ops.rotate_keys()
    with opened(url, OLD) as store:
        with pytest.raises(KeyMissing) as caught:
            store.thread("a").load()
        text = shown(caught.value)
        [(tenant, wrapped)] = Raw(url)("SELECT tenant, wrapped FROM tenant_key")
        data_key = unwrap_data_key(tenant, Keys(NEW), Keys(NEW).current, bytes(wrapped))
        assert data_key is not None
        assert not [shape for key in (OLD, NEW, data_key) for shape in shapes_of(key) if shape in text]


@pytest.mark.parametrize("wrong", [OLD[:31], OLD + b"x", OLD.hex()])
def test_what_is_no_key_is_not_shown(wrong: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: Keys(wrong),
        lambda: StaticKeys({"a": wrong}),
        lambda: Keys(OLD, [wrong]),
    ]
    for call in calls:
        with pytest.raises(UsageError) as caught:
            call()
        text = shown(caught.value)
        assert OLD.hex() not in text
        assert repr(OLD)[2:-1] not in text
        assert repr(OLD[:31])[2:-1] not in text


@pytest.mark.parametrize("given", [OLD, [OLD], OLD.hex()])
def test_what_a_provider_gives_instead_of_keys_is_not_shown(tmp_path: Path, given: Any) -> None:
    class Wrong:
        def keys_for(self, tenant: str) -> Any:
            return given

    with opened(str(tmp_path / "a.db"), Wrong()) as store, pytest.raises(UsageError) as caught:
        store.thread("t").save({})
    assert not [shape for shape in shapes_of(OLD) if shape in shown(caught.value)]


def test_an_error_while_a_store_is_opened_shows_no_key(tmp_path: Path) -> None:
    with pytest.raises(perdure.errors.OpenError) as caught:
        opened(str(tmp_path / "nowhere" / "a.db"), OLD)
    assert not [shape for shape in shapes_of(OLD) if shape in shown(caught.value)]


def test_a_damaged_key_file_is_not_quoted(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.new("default")
    text = file.path.read_text()
    for damaged in (text[:-10], text.replace('"key": "', '"key": "?'), text.replace('"tenants"', '"tenant"')):
        file.path.write_text(damaged)
        with pytest.raises(UsageError) as caught:
            KeyFile(file.path).keys_for("default")
        key = text.partition('"key": "')[2].partition('"')[0]
        assert key[:20] not in shown(caught.value)


def test_no_line_of_the_log_shows_a_key(url: str, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        refresh_s = 0.001

        def __init__(self) -> None:
            self.calls = 0

        def keys_for(self, tenant: str) -> Keys:
            self.calls += 1
            if self.calls % 2 == 0:
                raise ConnectionError(OLD.hex())
            return Keys(OLD)

    with caplog.at_level(logging.DEBUG), opened(url, Failing()) as store:
        for number in range(5):
            try:
                store.thread("a").save({"n": number})
            except perdure.errors.Unavailable:
                pass
    assert not [shape for shape in shapes_of(OLD) if shape in caplog.text]


# --- files


def test_a_key_file_is_made_for_its_owner_alone_whatever_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = KeyFile(tmp_path / "keys.json")
        file.new("default")
        file.new("default")
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_key_file_that_is_a_link_stays_one(tmp_path: Path) -> None:
    """Mounted secrets and dotfiles are links: what is changed is what they point at."""
    (tmp_path / "real").mkdir()
    KeyFile(tmp_path / "real" / "keys.json").new("default")
    link = tmp_path / "keys.json"
    link.symlink_to(tmp_path / "real" / "keys.json")
    made = KeyFile(link).new("default")
    assert link.is_symlink()
    assert KeyFile(tmp_path / "real" / "keys.json").keys_for("default").current.hex() == made
    assert KeyFile(link).forget("default")
    with pytest.raises(KeyMissing):
        KeyFile(tmp_path / "real" / "keys.json").keys_for("default")


# --- nonces


def encrypted_by_child(queue: Any, key: bytes, count: int) -> None:
    cipher = Cipher(1, "t", key)
    queue.put([cipher.encrypt(SALT, b"", ()) for _ in range(count)])


def test_forked_processes_draw_other_nonces() -> None:
    """The parent has encrypted before: what it keeps in memory must not make the children draw the same."""
    parent = Cipher(1, "t", OLD)
    values = [parent.encrypt(SALT, b"", ()) for _ in range(100)]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=encrypted_by_child, args=(queue, OLD, 100)) for _ in range(3)]
    for child in children:
        child.start()
    for _ in children:
        values += queue.get()
    for child in children:
        child.join(30)
    nonces = {value[len(MARK) :][:12] for value in values}
    assert len(nonces) == len(values) == 400


def test_the_same_text_is_never_the_same_value_and_columns_and_tenants_have_keys_of_their_own() -> None:
    cipher = Cipher(1, "t", OLD)
    assert cipher.encrypt(SALT, b"x", ()) != cipher.encrypt(SALT, b"x", ())
    stored = cipher.encrypt(SALT, b"x", ())
    column = RECORD.encrypted("note")
    note = cipher.encrypt(column, "x", (1, 2))
    with pytest.raises(perdure.errors.Damaged):
        cipher.decrypt(column, note, (1, 3))
    assert cipher.decrypt(SALT, stored, ()) == b"x"
    nonce, text, bound = stored[len(MARK) :][:12], stored[len(MARK) + 12 :], cipher._aad(SALT, ())
    assert cipher._cipher(SALT.label).decrypt(nonce, text, bound) == b"x"
    for other in (cipher._cipher(column.label), Cipher(2, "t", OLD)._cipher(SALT.label)):  # also if told the same place
        with pytest.raises(InvalidTag):
            other.decrypt(nonce, text, bound)
