"""The log: one JSON object per line with an event that does not change, and nothing in it that nobody may see."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import sqlite3
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from tcp_proxy import WireProxy

import perdure
from perdure.storage.events import event, said, where
from perdure.testing.postgres_server import PostgresServer

SOURCE = Path(perdure.__file__).parent
CANARY = "canary-9f2c"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logger = logging.getLogger("perdure")
    before = logger.level
    handler = perdure.ops.logs.json_lines(stream, level=logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)


def parsed(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


# --- the form


def test_a_line_is_an_object_with_the_same_fields_always(lines: io.StringIO) -> None:
    logger = logging.getLogger("perdure")
    logger.warning("thread %r was\nskipped", "alice", extra=event("load.skipped", thread="alice", skipped=2))
    logger.info("of somebody else's")
    first, second = parsed(lines)
    assert list(first)[:5] == ["time", "level", "logger", "event", "message"]
    assert first["message"] == "thread 'alice' was\nskipped"
    assert (first["level"], first["event"], first["thread"], first["skipped"]) == (
        "warning",
        "load.skipped",
        "alice",
        2,
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["time"])
    assert second["event"] == "log"


def test_a_field_never_hides_what_every_line_has(lines: io.StringIO) -> None:
    logging.getLogger("perdure").info("x", extra=event("a.b", level="none", message="none"))
    [found] = parsed(lines)
    assert (found["level"], found["message"]) == ("info", "x")


@pytest.fixture(scope="module", autouse=True)
def parsed_modules_are_forgotten() -> Iterator[None]:
    """A million objects would be looked at by each collection of garbage in later tests."""
    yield
    calls.cache_clear()


@cache
def calls() -> list[tuple[Path, ast.Call]]:
    """Every call in the modules of the library that log, parsed once."""
    texts = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    trees = {
        path: ast.parse(text) for path, text in texts.items() if re.search(r"\b(_log|log|logger)\.|\bevent\(", text)
    }
    return [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]


def log_calls() -> list[tuple[Path, ast.Call]]:
    return [
        (path, node)
        for path, node in calls()
        if isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("_log", "log", "logger")
        and node.func.attr in ("debug", "info", "warning", "error", "exception", "critical", "log")
    ]


def test_every_line_of_the_library_has_an_event() -> None:
    assert len(log_calls()) > 15
    for path, call in log_calls():
        assert "extra" in [keyword.arg for keyword in call.keywords], f"{path}:{call.lineno} has no extra=event(…)"
        assert call.func.attr != "exception", f"{path}:{call.lineno} logs a traceback, whose text may be anything"  # type: ignore[attr-defined]


def test_an_events_name_is_a_constant() -> None:
    names = []
    for path, node in calls():
        if isinstance(node.func, ast.Name) and node.func.id == "event" and node.args:
            assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}"
            names.append(node.args[0].value)
            assert re.fullmatch(r"[a-z]+(\.[a-z_]+)+", str(node.args[0].value)), f"{path}:{node.lineno}"
    assert len(names) > 15


def test_what_is_said_of_an_error() -> None:
    """The store's own texts, and of all others only the class."""
    assert said(perdure.errors.Busy("the file is locked")) == "Busy: the file is locked"
    assert said(ValueError(CANARY)) == "ValueError"
    assert said(perdure.RunStuck(CANARY)) == "RunStuck"
    with pytest.raises(Named) as raised:
        fail(CANARY)
    assert "test_logs.py" in where(raised.value)
    assert CANARY not in where(raised.value)


# --- nothing that nobody may see


class Named(Exception):
    pass


@perdure.step(name="logs_step", retries=1, backoff_s=0.001)
def step(argument: str) -> str:
    raise Named(f"a step's error with {argument}")


@perdure.effect(name="logs_effect", reconcile=lambda key, argument: fail(argument), on_doubt="fail")
def effect(argument: str) -> str:
    raise TimeoutError(f"an effect's error with {argument}")


def fail(argument: str) -> Any:
    raise Named(f"reconcile's error with {argument}")


@perdure.effect(name="logs_undone", undo=lambda result: fail(result))
def undone(argument: str) -> str:
    return f"a result with {argument}"


@perdure.durable(name="logs_fails")
def fails(argument: str) -> str:
    return step(argument)


@perdure.durable(name="logs_doubts")
def doubts(argument: str) -> str:
    return effect(argument)


@perdure.durable(name="logs_undoes")
def undoes(argument: str) -> str:
    undone(argument)
    raise Named(f"a run's error with {argument}")


@perdure.durable(name="logs_unstorable")
def unstorable(argument: str) -> Any:
    return {argument: object()}


@perdure.durable(name="logs_exits")
def exits(argument: str) -> None:
    raise SystemExit(f"told to go with {argument}")


@perdure.durable(name="logs_good")
def good(argument: str) -> str:
    perdure.emit({"text": argument})
    perdure.progress(done=argument, file=None)
    return argument


def everything(store: perdure.Store, argument: str) -> None:
    """As much as one process can do, right and wrong, with the argument in all of it."""
    thread = store.thread("alice", metadata={"token": argument})
    for number in range(3):
        thread.save({"number": number, "secret": argument}, note=argument, metadata={"why": argument})
    thread.update({"secret": argument + "2"})
    with pytest.raises(perdure.Unstorable):
        thread.save({"secret": object(), "why": argument})
    with pytest.raises(perdure.Conflict):
        thread.save({}, expect=next(iter(list(thread.history())[-1:])))
    thread.load()
    thread.fork(name="bob")
    for function in (fails, doubts, undoes, unstorable, good):
        store.start(function, argument, id=function.__name__)
    perdure.Worker(store, [fails, doubts, undoes, unstorable, good, exits]).run(until_idle=True)
    assert store.get_run("good").result() == argument
    for function in (fails, doubts, undoes):
        run = store.run(function, argument, id=function.__name__ + "-direct")
        assert run.refresh().status in ("failed", "stuck")
    with perdure.ops.metrics.collect() as registry:
        thread.save({"secret": argument})
        store.ops.doctor()
    assert argument not in registry.text()
    store.ops.verify()
    store.delete_thread("bob")


def check(stream: io.StringIO, caplog: pytest.LogCaptureFixture, *secrets: str) -> None:
    text = stream.getvalue()
    for record in caplog.records:  # also of other loggers, as plain text and with tracebacks
        text += logging.Formatter().format(record) + repr(record.__dict__)
    for secret in secrets:
        assert secret not in text


def test_no_secret_in_the_log_on_sqlite(tmp_path: Path, lines: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "l.db"
    with perdure.open(str(path), warn_bytes=1000) as store:
        everything(store, CANARY)
        store.thread("large").save({"deep": {"text": CANARY * 1000}})
        store.thread("torn").save({"n": 1})
        store.thread("torn").save({"n": 2, "secret": CANARY})
    raw = sqlite3.connect(path)
    raw.execute("UPDATE body SET diff = zeroblob(20), full_text = NULL WHERE id = (SELECT max(id) FROM body)")
    raw.commit()
    raw.close()
    with perdure.open(str(path)) as store:
        assert store.thread("torn").load().skipped
    found = {line["event"] for line in parsed(lines)}
    assert {"run.stuck", "reconcile.failed", "load.skipped", "state.large"} <= found
    check(lines, caplog, CANARY)


def test_no_secret_in_the_log_on_postgresql_when_the_connection_is_cut(
    postgres_url: str, lines: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    parts = urlsplit(postgres_url)
    password, token = "sesame-77aa", "token-55bb"
    url = f"postgresql://{parts.username}:{password}@{parts.hostname}:{parts.port}{parts.path}?application_name={token}"
    with perdure.open(url) as store, psycopg.connect(postgres_url, autocommit=True) as other:
        everything(store, CANARY)
        cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"
        other.execute(cut, (token,))
        store.thread("alice").save({"secret": CANARY})
        other.execute("ALTER TABLE perdure.run RENAME TO gone")
        worker = perdure.Worker(store, [good])
        with pytest.raises(perdure.errors.StoreError) as raised:
            worker.run(until_idle=True)
        assert password not in str(raised.value)
        other.execute("ALTER TABLE perdure.gone RENAME TO run")
        assert password not in repr(store)
    with pytest.raises(perdure.errors.StoreError) as raised:
        perdure.open(f"postgresql://app:{password}@127.0.0.1:1/app?sslpassword={token}")
    assert password not in str(raised.value)
    assert token not in str(raised.value)
    check(lines, caplog, CANARY, password, token)


def test_a_commit_whose_answer_was_lost_is_told_without_what_was_saved(
    postgres_server: PostgresServer, postgres_url: str, lines: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with WireProxy(postgres_server.port) as proxy, perdure.open(proxy.url(postgres_url.rsplit("/", 1)[1])) as store:
        thread = store.thread("alice")
        thread.save({"n": 0})
        proxy.lose(CANARY.encode())
        saved = thread.save({"n": 1}, note=CANARY)
        assert [checkpoint.id for checkpoint in thread.history(limit=1)] == [saved.id]
    [told] = [line for line in parsed(lines) if line["event"] == "commit.unknown"]
    assert told["checkpoint"] == saved.id
    check(lines, caplog, CANARY)
