"""Whatever is typed: a documented exit code, and never a traceback."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from every_command import arguments, commands, options

import perdure
from perdure.cli import main
from perdure.cli.app import EXIT_CODES
from perdure.cli.base import Command

LINES = 250
LEFT_OUT = {"drill", "inspect", "mcp", "worker"}  # they start processes, or serve until they are ended
DOCUMENTED = {0, 1, 2, 3, 4}
WORDS = [
    *("alice", "trip", "none", "", " ", "-", "--", "-1", "0", "1", "99999999999999999999999", "1.5", "1e400", "nan"),
    *("head", "head~1", "head~99999999999999999999", "@0", "@-1", "@99999999999999999999", "^", "~", "0s852p2dtw2en"),
    *("n", "messages[-1].content", "messages[99999999999999999999]", "a[", "a]", "..", '"', "[0]", "\\", "%s", "{}"),
    *("null", "true", "{", '{"a": 1}', '"x"', "[" * 2000, "9" * 5000, "a" * 5000, "é", "\u202e", "\ud800", "a\0b"),
    *("2h", "-2h", "1w", "9" * 30 + "d", "2026-01-31", "9999-12-31", "0001-01-01", "key=value", "=", "a=", "=b"),
    *(
        "app.py",
        "app.py:go",
        "nothing.py",
        ":",
        "a:b:c",
        ".",
        "/",
        "~",
        "/dev/null",
        "file.out",
        "alice.thread",
        "a.backup",
    ),
    *(
        "done",
        "waiting",
        "app",
        "check",
        "list",
        "new",
        "out",
        "default",
        "sqlite://",
        "ftp://x",
        "host=127.0.0.1 port=1",
    ),
]
APP = "import perdure\n\n@perdure.durable(name='fuzzed')\ndef go():\n    return perdure.ask('Go?', options=['yes'])\n"


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("PERDURE_STORE", "PERDURE_SCHEMA", "PERDURE_KEYS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def fill(where: Path) -> None:
    """A thread, a run that asks, and a copy of each sort."""

    @perdure.durable(name="fuzzed")
    def go() -> Any:
        return perdure.ask("Go?", options=["yes", "no"])

    with perdure.open(where / "agent.db") as store:
        for n in range(3):
            store.thread("alice").save({"n": n, "messages": [{"role": "user", "content": "hi"}] * n})
        store.run(go, id="trip")
        store.ops.transfer(where / "alice.thread", threads=["alice"])
        store.ops.backup(where / "a.backup")


def typed(chance: random.Random, name: str, command: Command) -> list[str]:
    """A line that is right here and there."""
    line = name.split()
    line += [chance.choice(WORDS) for _ in arguments(command) if chance.random() < 0.9]
    for option in options(command):
        if chance.random() < 0.15:
            line.append(option.opts[-1])
            if not option.is_flag and chance.random() < 0.95:
                line.append(chance.choice([*getattr(option.type, "choices", ()), *WORDS]))
    if chance.random() < 0.1:
        line.insert(chance.randrange(len(line) + 1), chance.choice(WORDS))
    return line


def test_every_line_ends_with_a_documented_code(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(EXIT_CODES) >= DOCUMENTED
    chance = random.Random(20260131)
    known = {name: command for name, command in commands().items() if name not in LEFT_OUT}
    for number in range(LINES):
        if number % 80 == 0:  # some of what is typed deletes
            for path in [*where.glob("agent.db*"), *where.glob("a*.*"), *where.glob("*.out")]:
                if path.is_file() and path.name != "app.py":
                    path.unlink()
            fill(where)
        name = chance.choice(sorted(known))
        line = [*typed(chance, name, known[name]), *(["--once"] if name == "store replicate" else ())]
        if name == "run tail" or "--help" in line:
            continue
        try:
            code = main(line)
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__} for {line!r}") from error
        err = capsys.readouterr().err
        assert code in DOCUMENTED, (code, line, err)
        assert "Traceback" not in err, line
