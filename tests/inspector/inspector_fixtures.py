"""Fixtures of the tests of the inspector: the application in this process, the real server, a real browser."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import chromium
import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright
from starlette.testclient import TestClient

import perdure
from perdure.inspector.live import Live
from perdure.inspector.security import Access
from perdure.inspector.server import Inspector
from perdure.inspector.view import Settings

HOST = "127.0.0.1:8765"
OURS = {"origin": f"http://{HOST}"}


class Client(TestClient):
    """A browser without a screen: it has followed the link, and sends forms as pages do."""

    access: Access

    def post_form(self, action: str, /, *, confirmed: bool = True, **fields: Any) -> Any:
        """Send a form to an action; by default the one of its confirmation."""
        sure = {"confirmed": "yes"} if confirmed else {}
        data = {"form_token": self.access.form_token, **sure, **fields}
        return self.post(f"/do/{action}", data=data, headers=OURS)

    def notice(self, action: str, /, **fields: Any) -> str:
        """Send a form, and return the notice that the page then shows."""
        answer = self.post_form(action, **fields)
        assert answer.status_code == 303, answer.text
        shown = re.search(r'<p class="note [^"]*">(.*?)</p>', self.get(answer.headers["location"]).text)
        assert shown is not None
        return shown[1]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "agent.db")


@pytest.fixture
def store(path: str) -> Iterator[perdure.Store]:
    with perdure.open(path, durability="normal") as opened:
        yield opened


@pytest.fixture
def client(store: perdure.Store) -> Iterator[Callable[..., Client]]:
    """Make a client of the application in this process. Options are those of `Settings`."""
    with ExitStack() as stack:

        def make(shown: perdure.Store | None = None, *, logged_in: bool = True, **options: Any) -> Client:
            settings = Settings(**{"name": "agent.db", **options})
            access = Access({HOST}, 8765, settings.read_only, settings.root_path)
            app = Inspector(shown or store, settings, access).app()
            made = Client(app, base_url=f"http://{HOST}", follow_redirects=False, raise_server_exceptions=False)
            made.access = access
            if logged_in:
                made.cookies.set(access.cookie, access.session)
            return stack.enter_context(made)

        yield make


@pytest.fixture
def inspect(path: str) -> Iterator[Callable[..., str]]:
    """Serve a store over HTTP from a thread, as `perdure inspect` does, and return the link. Options: of `Settings`.

    It opens the store itself, so that it sees the commits of the test as those of another process. The command is
    tested in test_inspector_command.py: a process for each test would take most of their time.
    """
    with ExitStack() as stack:

        def start(url: str = path, **options: Any) -> str:
            settings = Settings(**{"name": Path(url).name, "store_options": ("--store", url), **options})
            shown = stack.enter_context(perdure.open(url, read_only=settings.read_only))
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            port = listener.getsockname()[1]
            access = Access({f"127.0.0.1:{port}"}, port, settings.read_only)
            live = Live(shown, lambda: server.should_exit)
            app = Inspector(shown, settings, access, live).app()
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            stack.callback(thread.join, 30)
            stack.callback(setattr, server, "should_exit", True)
            return f"http://127.0.0.1:{port}/?token={access.token}"

        yield start


@pytest.fixture
def command(path: str) -> Iterator[Callable[..., str]]:
    """Run `perdure inspect` as a process on a free port, and return its link. It is interrupted after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str, url: str = path) -> str:
        line = [sys.executable, "-m", "perdure", "inspect", url, "--port", "0", *arguments]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        link = process.stdout.readline().strip()
        assert link, process.communicate()[1]
        return link

    yield start
    for process in processes:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors, errors


# Playwright marks its loop as running in this thread as long as the browser lives. Other tests run loops of their own
# here, so the mark is set only while a test uses the browser.
_loops: list[asyncio.AbstractEventLoop] = []


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(**chromium.options())
        _loops[:] = [asyncio.get_running_loop()]
        asyncio._set_running_loop(None)
        yield started
        asyncio._set_running_loop(_loops[0])
        started.close()


expect.set_options(timeout=20_000)  # a browser beside three other workers is slow

# The scripts of the page have run, also the one that imports another first.
_READY = """document.readyState === "complete"
    && (!document.querySelector('script[src*="/steps.js"]') || document.body.dataset.steps === "ready")"""


def _press_when_ready(page: Page) -> None:
    """Let keys wait until the page listens to them: a person is slower than a test."""
    press = page.keyboard.press

    def press_when_ready(key: str, **options: Any) -> None:
        page.wait_for_function(_READY)
        press(key, **options)

    setattr(page.keyboard, "press", press_when_ready)  # noqa: B010


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page in a browser of its own (cookies, theme). Fails on script errors, policy violations, foreign URLs.

    Options are those of Playwright's contexts: `java_script_enabled=False`, `color_scheme="dark"`, `viewport=…`.
    """
    problems: list[str] = []
    contexts = []
    asyncio._set_running_loop(_loops[0])

    def start(url: str, **options: Any) -> Page:
        context = browser.new_context(**options)
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        own = "/".join(url.split("/")[:3])
        page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith(own) else problems.append(f"asked {sent.url}"))
        if options.get("java_script_enabled", True):
            _press_when_ready(page)
        page.goto(url)
        return page

    yield start
    for context in contexts:
        context.close()
    asyncio._set_running_loop(None)
    assert problems == [], problems
