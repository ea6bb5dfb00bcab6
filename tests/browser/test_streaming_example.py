"""examples/streaming in a real browser: the page shows every token once, whatever is killed or cut off."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import chromium
import pytest
from playwright.sync_api import Page, sync_playwright
from tcp_proxy import TcpProxy, hang_up

from perdure.testing.ports import free_port, free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "streaming"
ANSWER = (
    "About Lisbon: " + ("Lisbon lies on seven hills above the Tagus, and its trams climb them slowly. " * 4).strip()
)
WAIT_MS = 60_000


@pytest.fixture
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**chromium.options())
        yield browser.new_page()
        browser.close()


@contextmanager
def process(*arguments: str, store: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python module until the end of the block, then kill it."""
    environment = {**os.environ, "PERDURE_STORE": str(store)}
    child = subprocess.Popen([sys.executable, "-m", *arguments], cwd=EXAMPLE, env=environment)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def call(url: str, method: str, **headers: str) -> tuple[int, str]:
    """The status of an answer and its text. Tried again until the server listens."""
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers)) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (urllib.error.URLError, ConnectionError):
            continue


class Balancer(TcpProxy):
    """Brings connections to the server at `port`, which may change."""

    def __init__(self, port: str) -> None:
        super().__init__()
        self.port = port
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.spawn(self.accept, self._serve)

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", int(self.port)))
        except ConnectionRefusedError:
            client.close()
            return
        self._sockets += [client, server]
        self.spawn(self._pump, client, server)
        self.spawn(self._pump, server, client)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)
        hang_up(target)


def serving(port: str) -> tuple[str, ...]:
    return ("uvicorn", "app:app", "--port", port, "--log-level", "warning")


def test_tokens_are_shown_once_though_a_worker_and_then_the_server_are_killed(page: Page, tmp_path: Path) -> None:
    store = tmp_path / "agent.db"
    ports = [str(port) for port in free_ports(2)]
    worker = ("perdure", "worker", "agent.py")
    connections: list[str] = []
    page.on("request", lambda request: connections.append(request.url) if "/events" in request.url else None)
    with Balancer(ports[0]) as balancer, ExitStack() as first, ExitStack() as last:
        first.enter_context(process(*serving(ports[0]), store=store))
        last.enter_context(process(*serving(ports[1]), store=store))
        assert call(f"http://127.0.0.1:{ports[1]}/", "GET")[0] == 200  # it listens
        url = balancer.address
        assert json.loads(call(f"{url}/chats/c-1?topic=Lisbon&pause_s=0.12", "POST")[1]) == {"status": "queued"}
        page.add_init_script("window.texts = []")
        page.goto(f"{url}/?chat=c-1")
        page.evaluate(
            """() => new MutationObserver(() => window.texts.push(document.getElementById("text").textContent))
            .observe(document.getElementById("text"), {childList: true})"""
        )
        with process(*worker, store=store):
            page.wait_for_function("window.texts.some(text => text.length > 40)", timeout=WAIT_MS)
        killed_at = page.evaluate("window.texts.length")
        last.enter_context(process(*worker, store=store))
        page.wait_for_function(f"window.texts.slice({killed_at}).some(text => text.length > 60)", timeout=WAIT_MS)
        balancer.port = ports[1]
        first.close()  # the server is killed, and the browser connects to the other one
        cut_at = page.evaluate("window.texts.length")
        page.wait_for_function("document.getElementById('status').textContent == 'done'", timeout=WAIT_MS)
        texts: list[str] = page.evaluate("window.texts")
    assert texts[-1] == ANSWER
    assert [text for text in texts if not ANSWER.startswith(text)] == []  # none lost, none repeated
    assert texts.count("") == 1  # the step began again, with the second worker
    assert texts.index("") in range(killed_at, cut_at)
    assert len(connections) >= 2
    after = [len(text) for text in texts[cut_at:-1]]  # what `done` replaces
    assert after == sorted(after)
    assert len(set(after)) > 3


def test_a_bad_cursor_and_an_unknown_run_are_refused_with_a_status(tmp_path: Path) -> None:
    port = str(free_port())
    url = f"http://127.0.0.1:{port}/chats"
    with process(*serving(port), store=tmp_path / "agent.db"):
        assert call(f"{url}/c-1?topic=Lisbon", "POST")[0] == 200
        assert call(f"{url}/none/events", "GET")[0] == 404
        assert call(f"{url}/c-1/events", "GET", **{"Last-Event-ID": "no cursor"})[0] == 400
