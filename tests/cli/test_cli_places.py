"""What cannot be a store (a FIFO, a device, a folder, a path that is too long) is one clear error; nothing hangs."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from every_command import lines

import perdure
from perdure.cli import main

PLACES = {
    "fifo": "is not a regular file",
    "folder": "is a directory",
    "socket": "is not a regular file",
    "/dev/zero": "is not a regular file",
    "loop": "symbolic links",
    "x" * 300: "too long",
    "y/" * 300 + "a.db": "does not exist",
    "file/agent.db": "does not exist",
    "nul\0.db": "NUL",
    "\udcff.db": "UTF-8",
}


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name in ("PERDURE_STORE", "PERDURE_SCHEMA", "PERDURE_KEYS"):
        monkeypatch.delenv(name, raising=False)
    os.mkfifo("fifo")
    Path("folder").mkdir()
    Path("file").touch()
    Path("loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        yield tmp_path


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def fail(number: int, frame: FrameType | None) -> None:
        pytest.fail("it waits for the other end of a FIFO")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("place", "said"), PLACES.items(), ids=[ascii(place)[:20] for place in PLACES])
def test_what_cannot_be_a_store_is_refused(where: Path, place: str, said: str) -> None:
    with pytest.raises((perdure.errors.OpenError, perdure.UsageError), match=said):
        perdure.open(place)


_NO_STORE = ("drill", "keys", "restore", "snapshot check")  # they open none


@pytest.mark.parametrize("place", ["fifo", "/dev/zero", "nul\0.db"])
def test_every_command_refuses_it_in_one_line(where: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    tried = [[*line, "--store", place] for name, line in lines({}).items() if name not in _NO_STORE]
    for line in tried:
        code = main(line)
        out, err = capsys.readouterr()
        assert code in (1, 2, 4), line
        assert "Traceback" not in err
        if line[0] != "doctor":
            assert (out, err.count("\n")) == ("", 1), line


@pytest.mark.parametrize("place", ["fifo", "/dev/zero", "folder", "socket"])
def test_a_file_to_read_that_is_none_is_refused(where: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    perdure.open("agent.db").close()
    files = [
        ["import-langgraph", place],
        ["restore", place, "b.db"],
    ]
    files += [["store", "restore", place, "--test"], ["keys", "--keys", place]]
    for line in files:
        assert main(line) in (2, 4), line
        assert capsys.readouterr().err.count("\n") == 1, line


def test_a_place_to_write_to_that_is_no_file_is_refused(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with perdure.open("agent.db") as store:
        store.thread("x").save({"n": 1})
        store.ops.backup("whole.backup")
    for place in ("fifo", "folder", "socket", "loop", "x" * 300):
        for line in (
            ["store", "backup", place],
            ["thread", "transfer", "x", place],
            ["restore", "whole.backup", place],
        ):
            assert main(line) in (2, 4), line
            assert capsys.readouterr().err.count("\n") == 1, line
