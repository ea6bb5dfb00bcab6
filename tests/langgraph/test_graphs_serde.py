"""Serializers and graphs: an encrypting one shows neither values nor metadata; LangGraph's strict mode."""

from __future__ import annotations

import hashlib
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from graph_kit import AnyGraph, AnySaver, Count, at
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from perdure.langgraph import PerdureSaver


class Cipher:
    """A stream cipher with a check: enough to see what is encrypted and what is not."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        nonce = secrets.token_bytes(16)
        return "mine", nonce + self._mix(nonce, plaintext) + self._check(plaintext)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        assert ciphername == "mine"
        plaintext = self._mix(ciphertext[:16], ciphertext[16:-16])
        if self._check(plaintext) != ciphertext[-16:]:
            raise ValueError("wrong key")
        return plaintext

    def _mix(self, nonce: bytes, text: bytes) -> bytes:
        stream = hashlib.shake_256(self.key + nonce).digest(len(text))
        return bytes(one ^ other for one, other in zip(text, stream, strict=True))

    def _check(self, text: bytes) -> bytes:
        return hashlib.blake2b(text, key=self.key, digest_size=16).digest()


MARKERS = ("SecretValue", "SecretWrite", "SecretUser", "SecretQuestion", "SecretError")


def secretive(saver: AnySaver, *, fails: bool) -> AnyGraph:
    """Stops at a question, beside a branch that is done and one that failed."""

    def fail(state: Count) -> dict[str, Any]:
        if fails:
            raise RuntimeError("SecretError")
        return {}

    builder = StateGraph(Count)
    builder.add_node("done", lambda state: {"log": ["SecretWrite"]})
    builder.add_node("ask", lambda state: {"log": [interrupt("SecretQuestion")]})
    builder.add_node("fail", fail)
    for name in ("done", "ask", "fail"):
        builder.add_edge(START, name)
    return builder.compile(checkpointer=saver)


def seen_in(saver: PerdureSaver) -> str:
    """All that one sees of a store without the saver's serializer: threads, metadata, states, readable."""
    shown: list[Any] = [saver.store.threads()]
    for info in saver.store.threads():
        thread = saver.store.thread(info.name)
        shown += [(it.note, it.metadata, thread.load(it, raw=True).state) for it in thread.history()]
    return repr(shown)


def bytes_of(url: str) -> bytes:
    """Everything that the database holds."""
    if not url.startswith("postgres"):
        return b"".join(path.read_bytes() for path in Path(url).parent.glob(Path(url).name + "*"))
    with psycopg.connect(url) as connection:
        tables = connection.execute(
            "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables "
            "WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        ).fetchall()
        rows = [connection.execute(f"SELECT * FROM {name}").fetchall() for (name,) in tables]
    assert any(rows)
    return repr(rows).encode()


def run_secretive(saver: PerdureSaver) -> None:
    graph = secretive(saver, fails=True)
    with pytest.raises(RuntimeError, match="SecretError"):
        graph.invoke({"log": ["SecretValue"], "total": 7}, {**at("t", user="SecretUser"), "max_concurrency": 1})


@pytest.mark.parametrize("assigned", [True, False])
def test_an_encrypted_saver_shows_no_value_and_no_metadata(saver_url: str, assigned: bool) -> None:
    serde = EncryptedSerializer(Cipher(b"k" * 32))
    with PerdureSaver(saver_url) if assigned else PerdureSaver(saver_url, serde=serde) as saver:
        if assigned:
            saver.serde = serde
        run_secretive(saver)
        shown = seen_in(saver)
        assert [marker for marker in MARKERS if marker in shown] == []
        assert saver.store.ops.verify().ok
    stored = bytes_of(saver_url)
    assert [marker for marker in MARKERS if marker.encode() in stored] == []
    with PerdureSaver(saver_url, serde=EncryptedSerializer(Cipher(b"k" * 32))) as saver:
        graph = secretive(saver, fails=False)
        waiting = graph.get_state(at("t"))
        assert waiting.values == {"total": 7, "log": ["SecretValue", "SecretWrite"]}  # with what is pending
        assert (waiting.metadata or {})["user"] == "SecretUser"  # type: ignore[typeddict-item]
        assert [item.value for item in waiting.interrupts] == ["SecretQuestion"]
        assert graph.invoke(Command(resume="said"), at("t"))["log"] == ["SecretValue", "said", "SecretWrite"]
    with (
        PerdureSaver(saver_url, serde=EncryptedSerializer(Cipher(b"x" * 32))) as saver,
        pytest.raises(ValueError, match="wrong key"),
    ):
        secretive(saver, fails=False).get_state(at("t"))


def test_without_encryption_the_same_look_shows_it(saver_url: str) -> None:
    """So the test above looks where the values are."""
    with PerdureSaver(saver_url) as saver:
        run_secretive(saver)
        shown = seen_in(saver)
    assert "SecretValue" in shown
    assert "SecretUser" in shown


STRICT = """
import dataclasses, sys, typing
import perdure
from perdure.langgraph import PerdureSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, StateGraph

@dataclasses.dataclass
class Plan:
    goal: str

class State(typing.TypedDict):
    plan: Plan
    text: str

def make(saver):
    builder = StateGraph(State)
    builder.add_node("node", lambda state: {"text": f"{type(state['plan']).__name__} {state['plan'].goal}"})
    builder.add_edge(START, "node")
    return builder.compile(checkpointer=saver, interrupt_before=["node"])

def run(kind):
    config = {"configurable": {"thread_id": kind}}
    serde = JsonPlusSerializer() if kind == "stock" else None
    path = f"{sys.argv[1]}/{kind}.db"
    with PerdureSaver(path, serde=serde) as saver:
        graph = make(saver)
        graph.invoke({"plan": Plan("travel")}, config)
        assert [info.name for info in saver.store.threads()] == [kind]  # the graph's copy has the same store
    with PerdureSaver(path, serde=serde) as saver:
        graph = make(saver)
        assert graph.get_state(config).values["plan"] == Plan("travel"), graph.get_state(config)
        print(kind, graph.invoke(None, config)["text"])
        assert saver.store.ops.verify().ok

run("in the schema")
run("stock")
perdure.register(Plan, name="strict.Plan")
run("registered")
"""


def test_strict_mode_runs_in_a_process_that_asks_for_it(tmp_path: Path) -> None:
    script = tmp_path / "strict.py"
    script.write_text(STRICT)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(tmp_path)],
        env={**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    kinds = ("in the schema", "stock", "registered")
    assert (done.stdout.splitlines(), done.stderr) == ([f"{kind} Plan travel" for kind in kinds], "")
