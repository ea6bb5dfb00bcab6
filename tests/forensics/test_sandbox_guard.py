"""Ways out of a sandbox: those that its guard promises to refuse, and those that it leaves as they are.

What docs/how-to/incidents.md says of the others is that they work as outside: nothing in the process is patched."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import multiprocessing.util
import os
import pty
import socket
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.errors import UsageError
from perdure.forensics import sandbox
from perdure.langgraph import PerdureSaver


@perdure.effect
def leave_a_mark(path: str) -> None:
    Path(path).touch()


@perdure.durable
def leaves_a_mark(path: str) -> None:
    leave_a_mark(path)


class World:
    """A store with snapshots, and what there is outside of it: a folder, and sockets that would hear of anything."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "mark"
        self.store = perdure.open(folder / "a.db", durability="normal")
        self.store.thread("t").save({"x": 1})
        self.store.memory("u").put("k", {"v": 1})
        self.snapshot, self.other = self.store.snapshot("s"), self.store.snapshot("other")
        self.store.thread("t").save({"x": 2})
        self.tcp, self.udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "unix"))
        self.unix.listen()
        self.udp.bind(("127.0.0.1", 0))
        self.mine, self.theirs = socket.socketpair()
        for heard in (self.tcp, self.udp, self.unix, self.theirs):
            heard.setblocking(False)
        self.folder = folder

    @property
    def address(self) -> Any:
        return self.tcp.getsockname()

    def heard(self) -> list[str]:
        """What came out."""
        ours = ("a.db", "unix")
        found = [f"a file {path.name}" for path in self.folder.iterdir() if not path.name.startswith(ours)]
        for name, wait in (("tcp", self.tcp.accept), ("unix", self.unix.accept), ("udp", lambda: self.udp.recv(9))):
            try:
                wait()
                found.append(name)
            except BlockingIOError:
                pass
        return found

    def close(self) -> None:
        self.store.close()
        for one in (self.tcp, self.udp, self.unix, self.mine, self.theirs):
            one.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def touch(world: World) -> list[str]:
    return ["touch", str(world.mark)]


async def _connect(world: World) -> None:
    await asyncio.open_connection(*world.address)


async def _subprocess(world: World) -> None:
    await asyncio.create_subprocess_exec(*touch(world))


def _in_pool(world: World) -> None:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(print).result()


def _with_socket(kind: int, family: int, name: str, *args: Any) -> None:
    with socket.socket(family, kind) as one:
        getattr(one, name)(*args)


def _stream(name: str, *args: Any) -> None:
    _with_socket(socket.SOCK_STREAM, socket.AF_INET, name, *args)


REFUSED: dict[str, Callable[[World], Any]] = {
    "os.system": lambda world: os.system(" ".join(touch(world))),
    "os.popen": lambda world: os.popen(" ".join(touch(world))),
    "subprocess": lambda world: subprocess.run(touch(world), check=False),
    "fork": lambda world: os.fork() or os._exit(0),
    "forkpty": lambda world: pty.fork()[0] or os._exit(0),
    "posix_spawn": lambda world: os.posix_spawn("/usr/bin/touch", touch(world), {}),
    "spawnv": lambda world: os.spawnv(os.P_WAIT, "/usr/bin/touch", touch(world)),
    "execv": lambda world: os.execv("/nothing/there", ["there"]),
    "multiprocessing": lambda world: multiprocessing.get_context("fork").Process(target=world.mark.touch).start(),
    "a process pool": _in_pool,
    "an asyncio subprocess": lambda world: asyncio.run(_subprocess(world)),
    "connect": lambda world: socket.create_connection(world.address),
    "connect_ex": lambda world: _stream("connect_ex", world.address),
    "bind": lambda world: _stream("bind", ("127.0.0.1", 0)),
    "a name": lambda world: socket.getaddrinfo("localhost", 80),
    "an asyncio connection": lambda world: asyncio.run(_connect(world)),
    "a URL": lambda world: urllib.request.urlopen(f"http://127.0.0.1:{world.address[1]}/"),
    "a UNIX socket": lambda world: _with_socket(
        socket.SOCK_STREAM, socket.AF_UNIX, "connect", str(world.folder / "unix")
    ),
    "a datagram": lambda world: _with_socket(
        socket.SOCK_DGRAM, socket.AF_INET, "sendto", b"x", world.udp.getsockname()
    ),
    "a job of to_thread": lambda world: asyncio.run(asyncio.to_thread(subprocess.run, touch(world), check=False)),
    "save": lambda world: world.store.thread("t").save({"x": 99}),
    "asave": lambda world: asyncio.run(world.store.thread("t").asave({"x": 99})),
    "delete": lambda world: world.store.delete_thread("t"),
    "memory": lambda world: world.store.memory("u").put("k", {"v": 99}),
    "run": lambda world: world.store.run(leaves_a_mark, str(world.mark), id="r"),
    "start": lambda world: world.store.start(leaves_a_mark, str(world.mark), id="r"),
    "snapshot": lambda world: world.store.snapshot("in the sandbox"),
    "release": lambda world: world.other.release(),
    "restore": lambda world: world.store.restore(world.snapshot),
    "erase": lambda world: world.store.ops.erase("t"),
    "compact": lambda world: world.store.ops.compact(),
    "backup": lambda world: world.store.ops.backup(world.mark),
    "a bundle": lambda world: world.snapshot.export(world.mark),
    "a new store": lambda world: perdure.open(world.mark),
    "a saver's new store": lambda world: PerdureSaver(str(world.mark)),
    "a transfer": lambda world: world.store.ops.transfer(world.mark),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_the_code_of_a_block_must_not_do_is_refused(world: World, way: str) -> None:
    before = (world.store.thread("t").load().state, [one.name for one in world.store.snapshots()])
    with sandbox(world.snapshot) as box:
        assert box.thread("t").load().state == {"x": 1}
        with pytest.raises(UsageError, match="a sandbox opens no connection, starts no process and writes to no other"):
            REFUSED[way](world)
    assert world.heard() == []
    assert world.store.memory("u").get("k").value == {"v": 1}  # type: ignore[union-attr]
    assert (world.store.thread("t").load().state, [one.name for one in world.store.snapshots()]) == before
    assert world.store.runs() == []


def test_an_effect_is_not_executed_from_any_thread(world: World) -> None:
    """This does not hang on the guard: it is the store of the sandbox that refuses."""
    with sandbox(world.snapshot) as box:
        thread = threading.Thread(target=lambda: box.store.run(leaves_a_mark, str(world.mark), id="r"))
        thread.start()
        thread.join()
        assert box.get_run("r").status == "stuck"
    assert world.heard() == []


PATCHABLE = [
    *((threading.Thread, name) for name in ("start", "run")),
    (concurrent.futures.ThreadPoolExecutor, "submit"),
    *((socket.socket, name) for name in ("send", "sendall", "sendfile", "connect")),
    *((ssl.SSLSocket, name) for name in ("send", "write")),
    (multiprocessing.util, "spawnv_passfds"),
    (os, "write"),
]


def test_nothing_in_the_process_is_changed(world: World) -> None:
    before = [getattr(owner, name) for owner, name in PATCHABLE]
    sent: list[int] = []
    with sandbox(world.snapshot), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert [getattr(owner, name) for owner, name in PATCHABLE] == before
        # What the guard does not see works as outside.
        world.mine.sendall(b"open before")
        os.write(world.mine.fileno(), b", by its number")
        thread = threading.Thread(target=lambda: sent.append(world.mine.send(b", in a thread")))
        thread.start()
        thread.join()
        pool.submit(world.mine.send, b", in a pool").result()
    assert [getattr(owner, name) for owner, name in PATCHABLE] == before
    assert world.theirs.recv(99) == b"open before, by its number, in a thread, in a pool"
