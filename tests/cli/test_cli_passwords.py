"""A password in a store's URL or connection string is in no output: no error, no log line, no repr, no traceback."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import pytest
from every_command import lines

import perdure
from perdure.cli import main
from perdure.storage.urls import is_postgres, redacted

SECRET = "hunter2-XyZ"
AWAY = "127.0.0.1"  # nothing listens on port 1
STORES = {
    "url": f"postgresql://app:{SECRET}@{AWAY}:1/agents",
    "short-url": f"postgres://app:{SECRET}@{AWAY}:1/agents",
    "query": f"postgresql://{AWAY}:1/agents?user=app&password={SECRET}",
    "string": f"host={AWAY} port=1 dbname=agents user=app password={SECRET}",
    "quoted": f"dbname=agents host={AWAY} port=1 password='it\\'s {SECRET}'",
    "typo": f"hots={AWAY} dbname=agents password={SECRET}",
    "slash": f"postgresql:/app:{SECRET}@{AWAY}/agents",
    "no-scheme": f"app:{SECRET}@{AWAY}/agents",
    "at-sign": f"postgresql://app:p@{SECRET}@{AWAY}:1/agents",
    "blank": f"postgresql://app:a {SECRET}@{AWAY}:1/agents",
    "behind-a-blank": f" postgresql://app:{SECRET}@{AWAY}:1/agents",
    "behind-a-tab": f"\tpostgresql:/app:{SECRET}@{AWAY}:1/agents",
    "in-quotes": f"'postgresql://app:{SECRET}@{AWAY}:1/agents'",
    "in-brackets": f"<postgres://app:{SECRET}@{AWAY}:1/agents>",
    "behind-a-name": f"DATABASE_URL=postgresql://app:{SECRET}@{AWAY}:1/agents",
    "port": f"postgresql://app:12/{SECRET}@{AWAY}:1/agents",
}
APP = "import perdure\n\n@perdure.durable(name='hushed')\ndef go():\n    return 1\n"


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("PERDURE_SCHEMA", "PERDURE_KEYS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PERDURE_STORE", "real.db")  # of the lines that name another store in the wrong place
    (tmp_path / "hushed.py").write_text(APP)
    with perdure.open("real.db") as store:
        store.thread("alice").save({"n": 1})
        store.ops.transfer("alice.thread", threads=["alice"])
        store.ops.backup("real.backup")
    return tmp_path


VALUES = {"APP": "hushed.py", "APP:FUNCTION": "hushed.py:go", "THREAD": "alice"}
FILES = {"store restore": "real.backup"}


@pytest.mark.parametrize("store", [STORES["url"], STORES["string"]], ids=["url", "string"])
def test_no_command_repeats_the_password_of_a_server_that_is_away(
    where: Path, store: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    tried = []
    for name, line in lines(VALUES).items():
        line = [FILES[name] if word == "x" and name in FILES else word for word in line]
        tried += [
            [*line, "--store", store],
            [*line, store],  # one argument too many, or the store in place of a file
            [*name.split(), store, store],
        ]
    tried += [
        ["store", "restore", "real.backup", store],
        [store],
        ["import-langgraph", store, "--store", "new.db"],
    ]
    before = sorted(where.iterdir())
    for line in tried:
        code = main(line)
        out, err = capfd.readouterr()
        shown = f"{out}\n{err}\n{caplog.text}"
        assert SECRET not in shown
        assert code in (0, 1, 2, 3, 4), line
        assert "Traceback" not in shown
    made = {path.name for path in where.iterdir()} - {path.name for path in before}
    assert not [name for name in made if "agents" in name or "host" in name], made


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_a_server_that_is_away_is_told_of_without_the_password(where: Path, store: str) -> None:
    assert is_postgres(store)
    with pytest.raises(perdure.errors.OpenError) as caught:
        perdure.open(store)
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert SECRET not in told
    assert "agents" in str(caught.value) or "postgresql://user:password@host:5432/database" in str(caught.value)
    assert not list(where.glob("*agents*"))


@pytest.mark.parametrize("store", [*STORES.values(), f" mysql://app:{SECRET}@h/agents", f"x y://app:{SECRET}@h/agents"])
def test_the_doctor_does_not_repeat_a_password(where: Path, store: str, capfd: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--json"]):
        assert main(["doctor", "--store", store, *more]) != 0
        assert SECRET not in "".join(capfd.readouterr())
    assert not list(where.glob("*agents*"))


def test_a_connection_string_opens_the_store_that_the_url_opens(postgres_url: str) -> None:
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    with perdure.open(postgres_url) as store:
        store.thread("alice").save({"n": 1})
    string = make_conninfo("", **conninfo_to_dict(postgres_url))
    assert "://" not in string
    with perdure.open(f" {postgres_url}\n", create=False) as store:
        assert store.thread("alice").load().state == {"n": 1}
    with perdure.open(string, create=False) as store:
        assert store.thread("alice").load().state == {"n": 1}
        assert "password" not in repr(store)


@pytest.mark.parametrize("path", ["agent.db", "./host=a", "/srv/a b/agent.db", "sqlite:///host=a", "c:\\a@b\\c.db"])
def test_a_path_is_a_path(path: str) -> None:
    assert not is_postgres(path)
    assert redacted(path) == path


@pytest.mark.parametrize("store", [STORES[name] for name in STORES if name != "no-scheme"])
def test_what_is_shown_of_a_store_keeps_all_but_the_password(store: str) -> None:
    shown = redacted(f"not found: {store!r}")
    assert SECRET not in shown
    assert "***" in shown
    assert "agents" in shown
