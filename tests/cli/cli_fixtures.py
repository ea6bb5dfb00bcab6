"""Fixtures of the tests of commands: one is called in this process, in a folder of its own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from cli_runs_kit import APP, APP_FILE, Run

import perdure
from perdure.cli import main
from perdure.runs.functions import specs


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Call a command: its exit code, what it wrote, what it complained about."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERDURE_STORE", raising=False)
    return tmp_path


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The agents, imported from an app.py in the current directory, in a process that knows no others."""
    monkeypatch.setattr(specs, "_steps", {})
    monkeypatch.setattr(specs, "_durables", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PERDURE_STORE", raising=False)
    path = tmp_path / APP_FILE
    name = path.stem
    path.write_text(APP)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def store(request: pytest.FixtureRequest, app: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[perdure.Store]:
    """A store that the commands find by themselves: ./agent.db, or, for tests that ask for it, $PERDURE_STORE."""
    url = "agent.db"
    if getattr(request, "param", None) == "postgres":
        url = str(request.getfixturevalue("postgres_url"))
        monkeypatch.setenv("PERDURE_STORE", url)
    with perdure.open(url, durability="normal") as opened:
        yield opened


@pytest.fixture
def doubt(store: perdure.Store, app: ModuleType) -> perdure.Run:
    """A run whose booking is in doubt."""
    app.lose.append(TimeoutError("no answer"))
    return store.run(app.doubtful, "NYC", id="doubt")
