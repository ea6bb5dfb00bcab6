"""An incident shows, step by step, what led to a failure: states, changes, context, environment, tracebacks."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.forensics import incident, record_failures
from perdure.memory import AgentMemory
from perdure.runs.calls.evidence import environment, git_commit, traceback_of
from perdure.runs.journal.entries import decompress
from perdure.values.secrets import redacted

LARGE = "x" * 100_000


@perdure.step(retries=1, backoff_s=0.0)
def incident_price(item: str) -> int:
    api_key = "hunter2"
    if item == "yacht":
        raise ValueError(f"no incident_price for {item}, {len(api_key)}")
    return len(item)


@perdure.effect
def incident_pay(amount: int) -> str:
    return LARGE if amount == 0 else f"paid {amount}"


@perdure.durable
def incident_buy(items: list[str], discount: int = 0) -> int:
    state = perdure.state({"cart": [], "total": 0})
    for item in items:
        perdure.emit({"context": {"model": "m-1", "prompt": "v7", "items": [item]}})
        cost = incident_price(item)
        state["cart"].append(item)
        state["total"] += cost - discount
        incident_pay(state["total"])
    return int(state["total"])


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    record_failures({})


def test_frames_lead_to_the_failure(store: perdure.Store) -> None:
    record_failures({"model": "m-1", "nested": {"api_key": "hunter2"}, "url": "https://me:hunter2@host/"})
    store.run(incident_buy, ["ab", "cde", "yacht"], id="trip")
    snapshot = store.snapshot("s")
    store.delete_run("trip")
    found = incident(snapshot, "trip")
    assert (found.run.status, found.error) == ("failed", "ValueError: no incident_price for yacht, 7")
    assert 'raise ValueError(f"no incident_price' in str(found.traceback)
    assert "in incident_buy\n    cost = incident_price(item)" in str(found.traceback)
    frames = list(found)
    assert [frame.step.name for frame in frames] == [
        *["perdure.emit", "incident_price", "incident_pay"] * 2,
        "perdure.emit",
        "incident_price",
    ]
    assert len(found) == len(frames)
    paid = frames[5]
    assert (paid.arguments, paid.step.result) == ({"amount": 5}, "paid 5")
    assert paid.state == {"cart": ["ab", "cde"], "total": 5}
    assert [str(change) for change in paid.changes] == ["+ ['cart'][1] = 'cde'", "~ ['total']: 2 -> 5"]
    assert frames[3].context == {"model": "m-1", "prompt": "v7", "items": ["cde"]}
    assert frames[7].traceback is not None
    assert "in incident_price" in frames[7].traceback
    assert "in incident_buy" not in frames[7].traceback, "a step's own frames"
    run = snapshot.get_run("trip")
    assert [frame.state for frame in frames] == [run.state_at(frame.step) for frame in frames]
    assert found.environment is not None
    assert found.environment["code"]["file"] == __file__
    assert "blake3" in found.environment["packages"]
    expected = {"model": "m-1", "nested": {"api_key": "***"}, "url": "https://me:***@host/"}
    assert found.environment["configuration"] == expected


def test_blame(store: perdure.Store) -> None:
    store.run(incident_buy, ["ab", "cde", "fghi"], id="good")
    store.run(incident_buy, ["ab", "cde", "fghi"], 1, id="bad")
    snapshot = store.snapshot("s")
    bad, good = incident(snapshot, "bad"), incident(snapshot, "good")
    assert [frame.step.path for frame in bad.blame("total")] == ["2", "3", "6", "9"]
    assert [frame.step.path for frame in bad.blame("cart.1")][-1] == "6"
    assert bad.blame("nothing") == []
    first = bad.blame("total", good)[0]
    assert (first.step.path, first.state["total"]) == ("3", 1)
    assert bad.blame("cart", good) == []


def test_the_context_of_a_recalled_prompt(store: perdure.Store) -> None:
    memory = AgentMemory(store, "alice")

    @perdure.durable(name="recalls")
    def recalls() -> str:
        return memory.recall("which seat?").text()

    store.run(recalls, id="r")
    [frame] = incident(store.snapshot("s"), "r")
    assert frame.context is not None
    assert frame.context["query"] == "which seat?"


@perdure.durable
def incident_deep(levels: int) -> None:
    if levels:
        nested(levels)


def nested(levels: int) -> None:
    password, text = "hunter2 two", "ü" * 500
    if not levels:
        raise KeyError(password == text)
    nested(levels - 1)


def test_a_traceback_is_bounded_and_keeps_the_innermost(store: perdure.Store) -> None:
    store.run(incident_deep, 400, id="deep")
    found = incident(store.snapshot("s"), "deep").traceback
    assert found is not None
    assert len(found.encode()) <= 8192
    assert found.endswith("KeyError")
    assert "raise KeyError" in found
    assert "hunter2" not in found


def test_runs_that_failed_in_one_environment_share_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with perdure.open(path) as store:
        for number in range(3):
            store.run(incident_buy, ["yacht"], id=f"r{number}")
        record_failures({"prompt": "v8"})
        store.run(incident_buy, ["yacht"], id="other")
        snapshot = store.snapshot("s")
        hashes = [(incident(snapshot, id).environment or {})["hash"] for id in ("r0", "r1", "r2", "other")]
        assert len(set(hashes)) == 2
        store.ops.transfer(tmp_path / "b.db", runs=["other"])
        for number in range(3):
            store.delete_run(f"r{number}")
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("SELECT count(*) FROM run_blob").fetchall() == [(1,)]
    with perdure.open(tmp_path / "b.db") as copy:
        assert (incident(copy.snapshot("s"), "other").environment or {})["hash"] == hashes[-1]


def test_a_run_that_is_stuck_or_under_way(store: perdure.Store) -> None:
    @perdure.durable(name="wrong_call")
    def wrong_call() -> Any:
        perdure.random()
        return perdure.ask("")

    @perdure.durable(name="waiting")
    def waiting() -> Any:
        return perdure.ask("Which seat?")

    store.run(wrong_call, id="stuck")
    store.run(waiting, id="waits")
    snapshot = store.snapshot("s")
    found = incident(snapshot, "stuck")
    assert str(found.error).startswith("UsageError: ")
    assert 'return perdure.ask("")' in str(found.traceback)
    assert found.environment is not None
    assert found.environment["code"]["file"] == __file__
    found = incident(snapshot, "waits")
    assert (found.error, found.environment, [frame.step.status for frame in found]) == (None, None, ["waiting"])
    with pytest.raises(perdure.NotFound):
        incident(snapshot, "never")


def test_a_group_shows_where_its_members_were_raised_and_a_cycle_ends() -> None:
    async def first_task() -> None:
        raise KeyError("a")

    async def second_task() -> None:
        raise OSError("b")

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(first_task())
            group.create_task(second_task())

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(both())
    raised.value.exceptions[0].__context__ = raised.value
    found = decompress(traceback_of(raised.value) or b"").decode()
    assert found.endswith("ExceptionGroup")
    assert 'raise KeyError("a")\nKeyError' in found
    assert 'raise OSError("b")\nOSError' in found


@perdure.step
def incident_step(number: int) -> None:
    if number == 4:
        raise OSError("no connection to postgresql://me:hunter2@host/db")


@perdure.durable
def incident_keys() -> None:
    state = perdure.state({"a.b": {"c": 0}, "x": 0, "list": [{"price": 0}]})
    for number in range(5):
        if number == 2:
            state["a.b"]["c"] = 1
        if number in (1, 3):
            state["list"].append({"price": number})
        state["x"] = number
        incident_step(number)


def test_keys_with_dots_errors_with_passwords_and_states_that_are_pruned(store: perdure.Store) -> None:
    store.run(incident_keys, id="r")
    found = incident(store.snapshot("s"), "r")
    assert [frame.step.path for frame in found.blame("a.b.c")] == ["1", "3"]
    assert [frame.step.path for frame in found.blame("list.2.price")] == ["4"], "not those that made the list"
    shown = "OSError: no connection to postgresql://me:***@host/db"
    assert (found.error, list(found)[4].step.error) == (shown, shown)
    store.thread("run:r").prune(keep=2)
    pruned = incident(store.snapshot("t"), "r")
    assert [(frame.state is None, len(frame.changes)) for frame in pruned][-3:] == [(True, 0), (False, 0), (False, 1)]
    assert [frame.step.path for frame in pruned.blame("a.b.c")] == [], "what is not known is not blamed"
    assert pruned.blame("x", found) == []


SECRETS = """
    password=hunter2 | {"password": "hunter2"} | password = b'hunter2' | password: SecretStr('hunter2')
    PGPASSWORD=hunter2 | client_secret='it\\'s hunter2' | postgresql://me:hunter2@x@host/db | redis://:hunter2@host
    Authorization: Bearer hunter2 | Authorization: Basic hunter2 | x-api-key: hunter2 | Cookie: session=hunter2
    https://x/?access_token=hunter2&b=1 | https://x/?key=hunter2 | ?X-Amz-Signature=hunter2 | AccountKey=hunter2==;
    --api-key hunter2 | ['--password', 'hunter2'] | --token=hunter2 | sk-ant-api03-hunter2hunter2 | ghp_hunter2hunter2
    pass=hunter2 | db_pass: 'hunter2' | auth=('me', 'hunter2') | auth=Basic('me', 'a)hunter2') | tokens=['a', "hunter2"]
    credentials = {'a': ['b'], 'c': 'hunter2'} | credentials = {'a': [['b']], 'c': 'hunter2'} | auth = ("hunter2",
    pw=hunter2 | db_pw: 'hunter2' | cred=('me', 'hunter2') | creds: "hunter2" | pin=hunter2 | signing_key='hunter2'
    login with password hunter2x failed | the token hunter2-a1 has expired | secret hunter2hunter2 | otp: hunter2
    ASIAIOSFODNNHUNTER22 | AKIAIOSFODNNHUNTER22 | eyJhbGciOiJIUzI1.eyJzdWIi.hunter2
    -----BEGIN PRIVATE KEY-----\\nhunter2\\n-----END
"""
HARMLESS = """a token of 12 words, the password is missing, no secret at all, credit=5, spin=1, opus=2, max_tokens=4096,
bypass=True, author='me', tokenizer='o', f(key=item), https://host:8080/a@b, sorted(key=len)"""


def test_texts_with_secrets() -> None:
    texts = [text.strip() for line in SECRETS.splitlines() for text in line.split(" | ")]
    assert [text for text in texts if "hunter2" in redacted(text).lower()] == []
    assert redacted(HARMLESS) == HARMLESS
    assert redacted("get(auth=('me', 'hunter2'), timeout=5)") == "get(auth=(***), timeout=5)"


def test_names_of_secrets_in_configurations(store: perdure.Store) -> None:
    record_failures({"key": "hunter2", "db": {"pw": "hunter2", "cred": "hunter2", "encryption_key": "hunter2"}})
    store.run(incident_buy, ["yacht"], id="r")
    found = incident(store.snapshot("s"), "r")
    assert (found.environment or {})["configuration"] == {
        "key": "***",
        "db": {"pw": "***", "cred": "***", "encryption_key": "***"},
    }


def test_no_text_takes_long_to_mask() -> None:
    """What a pattern tries again at each place, or in many ways, takes minutes for some of these."""
    parts = [
        "password",
        "token ",
        "auth=(",
        "auth=(''",
        "tokens=[",
        "'",
        '"',
        "\\",
        "@",
        "://a:",
        "-",
        "a",
        " ",
        "KEY-----",
        "sk-",
    ]
    parts += ["bearer ", "--", "eyJaaaaaaaa.", "(", "[", ")", "=", ";", "1", "\n"]
    chance = random.Random(20261117)
    for unit in (*parts, *("".join(chance.choices(parts, k=3)) for _ in range(100))):
        began = time.process_time()
        redacted(unit * (10_000 // len(unit)))
        assert time.process_time() - began < 2, unit


def test_a_configuration_is_checked_when_it_is_given() -> None:
    cycle: dict[str, Any] = {}
    cycle["a"] = cycle
    for wrong in ({"n": 2**70}, {"text": "\ud800"}, cycle, "text"):
        with pytest.raises(perdure.UsageError, match="what JSON can hold"):
            record_failures(wrong)  # type: ignore[arg-type]
    record_failures({"argv": ["--api-key", "hunter2"], "seats": {1, 2}, "tokens": ["hunter2"], "max_tokens": 4096})
    found = decompress(environment(None))
    assert b"hunter2" not in found
    assert b"4096" in found


def test_on_request_every_run_records_its_environment_with_the_commit_of_its_code(store: perdure.Store) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    store.run(incident_buy, ["ab"], id="before").result()
    record_failures({"model": "m-2"}, every_run=True)
    store.run(incident_buy, ["ab"], id="after").result()
    snapshot = store.snapshot("all")
    assert incident(snapshot, "before").environment is None
    known: Any = incident(snapshot, "after").environment
    assert known["configuration"] == {"model": "m-2"}
    assert known["code"].get("commit", "") == commit.stdout.strip()
    assert store.ops.verify().ok


async def test_a_snapshot_says_what_made_it_and_which_versions_its_runs_recorded(
    store: perdure.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @perdure.durable(name="incident.tagged", version="v3")
    def tagged(model: str) -> None:
        perdure.tag(model=model, prompt="quote-7")

    for model in ("m-1", "m-2"):
        store.run(tagged, model).result()
    monkeypatch.chdir(tmp_path)
    snapshot = store.snapshot("plain")
    made_by = snapshot.manifest["made_by"]
    assert set(made_by) == {"perdure", "schema", "python"}
    assert made_by["perdure"] == perdure.__version__
    store.run(tagged, "m-3").result()
    assert await snapshot.aversions() == {"code": ["v3"], "model": ["m-1", "m-2"], "prompt": ["quote-7"]}
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "1", "--allow-empty"],
    ):
        subprocess.run(["git", *command], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert store.snapshot("committed").manifest["made_by"]["commit"] == commit
    subprocess.run(["git", "pack-refs", "--all"], check=True)
    assert git_commit(tmp_path) == commit
    subprocess.run(["git", "checkout", "-q", "--detach"], check=True)
    assert git_commit(tmp_path / "nowhere" / "yet") == commit
    assert git_commit(tmp_path.parent) is None
