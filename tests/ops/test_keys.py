"""Key files, what `open(keys=…)` takes, and `perdure key`."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from sealed_kit import CANARY, NEW, OLD, Raw, fill

import perdure
from perdure import UsageError
from perdure.cli.app import main
from perdure.encryption import KeyFile, Keys, StaticKeys
from perdure.encryption.keys import key_id, provider_of
from perdure.errors import KeyMissing


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


# --- key files


def test_a_key_file_is_its_owners_alone(file: KeyFile) -> None:
    made = file.new("default")
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
    assert file.keys_for("default").current.hex() == made
    os.chmod(file.path, 0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        KeyFile(file.path).keys_for("default")


def test_a_new_key_comes_first_and_the_older_ones_stay(file: KeyFile) -> None:
    first, second = file.new("acme"), file.new("acme")
    other = file.new("globex")
    keys = file.keys_for("acme")
    assert [number.hex() for number in keys.by_id] == [second, first]
    assert keys.current.hex() == second
    assert {tenant: [key for key, _ in found] for tenant, found in file.tenants().items()} == {
        "acme": [second, first],
        "globex": [other],
    }


def test_keys_are_removed_and_forgotten(file: KeyFile) -> None:
    first, second = file.new("acme"), file.new("acme")
    file.new("globex")
    with pytest.raises(UsageError, match="in use"):
        file.remove("acme", second)
    with pytest.raises(KeyMissing, match="no key"):
        file.remove("acme", "0011223344556677")
    file.remove("acme", first)
    assert [number.hex() for number in file.keys_for("acme").by_id] == [second]
    assert file.forget("acme") == [second]
    with pytest.raises(KeyMissing, match="acme"):
        file.keys_for("acme")
    assert file.keys_for("globex")


def test_two_that_change_a_key_file_do_not_lose_each_others_keys(file: KeyFile) -> None:
    file.new("acme")
    fresh = file.path.with_name("keys.json.new")
    fresh.touch()  # as if another process were at it
    with pytest.raises(UsageError, match="another process"):
        file.new("acme")
    fresh.unlink()
    file.new("acme")
    assert len(file.keys_for("acme").by_id) == 2
    assert not fresh.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"perdure_keys": 2, "tenants": {}}', '{"perdure_keys": 1, "tenants": {"default": 7}}'],
)
def test_what_is_no_key_file_is_refused_without_a_word_of_it(file: KeyFile, text: str) -> None:
    file.path.write_text(text)
    os.chmod(file.path, 0o600)
    with pytest.raises(UsageError, match=r"is not a key file|are damaged"):
        file.keys_for("default")


@pytest.mark.parametrize("key", ["AAAA", "?", 7, None])
def test_a_damaged_key_is_named_by_its_tenant_only(file: KeyFile, key: Any) -> None:
    file.path.write_text(json.dumps({"perdure_keys": 1, "tenants": {"default": [{"key": key}]}}))
    os.chmod(file.path, 0o600)
    with pytest.raises(UsageError, match="default"):
        file.keys_for("default")


def test_a_missing_key_file_says_how_to_make_one(file: KeyFile) -> None:
    with pytest.raises(KeyMissing, match="perdure key new"):
        file.keys_for("default")


# --- what open takes


def keys_of(given: Any) -> Keys:
    keys = provider_of(given).keys_for("default")
    assert isinstance(keys, Keys)
    return keys


@pytest.mark.parametrize("keys", [b"short", "a string", 7, [], {"default": b"short"}, [b"x" * 31], os.urandom])
def test_what_are_no_keys_is_refused_before_a_store_is_made(tmp_path: Path, keys: Any) -> None:
    path = tmp_path / "a.db"
    with pytest.raises(UsageError):
        perdure.open(str(path), keys=keys)
    assert not path.exists()


@pytest.mark.parametrize("keys", [OLD, bytearray(OLD), {"default": OLD}, [OLD, NEW], StaticKeys(OLD)])
def test_keys_in_every_form(keys: Any) -> None:
    assert keys_of(keys).current == key_id(OLD)


def test_keys_from_the_environment(file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERDURE_KEYS", raising=False)
    with pytest.raises(UsageError, match="PERDURE_KEYS"):
        provider_of("env")
    made = file.new("default")
    monkeypatch.setenv("PERDURE_KEYS", str(file.path))
    assert keys_of("env").current.hex() == made


def test_no_repr_shows_a_key(file: KeyFile) -> None:
    file.new("default")
    key = file.keys_for("default").by_id.popitem()[1]
    shown = repr([file, file.keys_for("default"), Keys(key), StaticKeys(key), StaticKeys({"a": key})])
    assert key.hex() not in shown
    assert repr(key) not in shown


def test_a_provider_of_ones_own(tmp_path: Path) -> None:
    asked: list[str] = []

    class Mine:
        def keys_for(self, tenant: str) -> Keys:
            asked.append(tenant)
            return Keys(OLD)

    with perdure.open(str(tmp_path / "a.db"), keys=Mine()) as store:
        for number in range(20):
            store.thread("a").save({"n": number})
    assert len(asked) <= 5, "not for every save"


# --- the command


@pytest.fixture
def store_file(tmp_path: Path, file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_KEYS", str(file.path))
    return str(tmp_path / "a.db")


def said(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_rotation_re_wraps_one_row(store_file: str, file: KeyFile, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "--json"]) == 0
    first = said(capsys)["key"]
    with perdure.open(store_file, keys="env") as store:
        fill(store)
    stored = Raw(store_file)("SELECT id, diff, full_text FROM body ORDER BY id")
    assert main(["key", "rotate", "--new", "--store", store_file, "--json"]) == 0
    assert said(capsys)["previous"] == first
    assert Raw(store_file)("SELECT id, diff, full_text FROM body ORDER BY id") == stored
    assert main(["key", "rotate", "--store", store_file]) == 0
    assert "in use already" in capsys.readouterr().out
    assert main(["key", "remove", first, "--store", store_file, "--json"]) == 0
    assert said(capsys)["removed"] == first
    with perdure.open(store_file, keys="env") as store:
        assert CANARY in str(store.thread("alice").load().state)
        assert store.ops.verify().ok


def test_forgetting_asks_first_and_makes_the_tenant_unreadable(
    store_file: str, file: KeyFile, capsys: pytest.CaptureFixture[str]
) -> None:
    for tenant in ("acme", "globex"):
        assert main(["key", "new", "--tenant", tenant]) == 0
        with perdure.open(store_file, keys="env", tenant=tenant) as store:
            store.thread("t").save({"of": tenant})
    capsys.readouterr()
    assert main(["key", "forget", "--tenant", "acme"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert main(["key", "forget", "--tenant", "acme", "--yes", "--json"]) == 0
    assert len(said(capsys)["forgotten"]) == 1
    assert main(["threads", "--store", store_file, "--tenant", "acme"]) == 4
    assert main(["threads", "--store", store_file, "--tenant", "globex"]) == 0
    assert main(["key", "forget", "--tenant", "acme", "--yes"]) == 3


def test_a_key_that_the_store_uses_is_removed_by_force_only(
    store_file: str, file: KeyFile, capsys: pytest.CaptureFixture[str]
) -> None:
    used = file.new("default")
    with perdure.open(store_file, keys="env") as store:
        store.thread("t").save({"n": 1})
    file.new("default")  # and no rotation: everything is encrypted with the older one
    assert main(["key", "remove", used, "--store", store_file]) == 2
    assert "perdure key rotate" in capsys.readouterr().err
    assert main(["show", "t", "--store", store_file]) == 0
    assert main(["key", "remove", used]) == 2  # no store to ask
    assert main(["key", "remove", used, "--force"]) == 0
    assert main(["show", "t", "--store", store_file]) == 4


def test_a_key_or_a_tenant_that_is_not_there(store_file: str, file: KeyFile) -> None:
    file.new("default")
    assert main(["key", "remove", "0011223344556677", "--force"]) == 3
    assert main(["key", "remove", "0011223344556677", "--tenant", "acme"]) == 3
    assert main(["key", "forget", "--tenant", "acme", "--yes"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["keys", "name"],
        ["key", "new", "--new"],
        ["key", "forget", "--force", "--yes"],
        ["key", "new", "acme", "--tenant", "globex"],
        ["key", "remove"],
        ["key", "turn"],
    ],
)
def test_a_wrong_call_says_what_is_wrong(store_file: str, arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_without_a_key_file_named_it_says_how(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("PERDURE_KEYS", raising=False)
    assert main(["key", "new"]) == 2
    assert "--keys FILE" in capsys.readouterr().err


def test_no_command_prints_a_key(store_file: str, file: KeyFile, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new"]) == 0
    assert main(["key", "new", "--json"]) == 0
    assert main(["keys"]) == 0
    assert main(["keys", "--json"]) == 0
    printed = "".join(capsys.readouterr())
    text = file.path.read_text()
    for entry in json.loads(text)["tenants"]["default"]:
        assert entry["key"] not in printed
