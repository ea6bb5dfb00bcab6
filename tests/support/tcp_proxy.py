"""A proxy that reads PostgreSQL's protocol on its way: counts round trips, says no like a pooler, fails like a network.

A round trip is a request that follows an answer: however many messages or packets it has, it is one turn until the
server has spoken. A thread for each direction of each connection, on loopback only; for counting, not for speed.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

_COMMITTED = b"Z\0\0\0\5I"  # ready for the next query, and in no transaction: the end of what was sent


class TcpProxy:
    """What stands between clients and a server on this machine: it listens, and serves each client on threads."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def url(self, database: str, user: str = "postgres") -> str:
        port = self._listener.getsockname()[1]
        # Encryption would be negotiated in turns of its own.
        return f"postgresql://{user}@127.0.0.1:{port}/{database}?sslmode=disable&gssencmode=disable"

    def close(self) -> None:
        for each in self._sockets:
            hang_up(each)
            each.close()
        for thread in self._threads:
            thread.join()

    def spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def accept(self, serve: Callable[[socket.socket], None]) -> None:
        """Until it is closed."""
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            serve(client)


class WireProxy(TcpProxy):
    """Stands between a driver and a server on this machine: `with WireProxy(port) as proxy: … proxy.turns`.

    `turns` counts requests that follow an answer, over all connections together; `syncs` and `kinds` what they held.
    `refuse_options` says no to startup parameters, as some poolers do. `lose` and `lose_turn` lose one exchange, `cut`
    and `freeze` all of them, until `mend`.
    """

    def __init__(self, port: int, *, refuse_options: bool = False) -> None:
        self.syncs = self.turns = 0
        self.kinds: list[str] = []
        self.lost = 0
        self._to_lose: tuple[bytes, bool] | None = None
        self._turn_to_lose = 0
        self._flowing = threading.Event()
        self._flowing.set()
        self._is_cut = False
        self._refuse_options = refuse_options
        self._server_port = port
        super().__init__()
        self.spawn(self.accept, self._serve)

    def reset(self) -> None:
        self.syncs = self.turns = 0
        self.kinds = []

    def lose(self, containing: bytes, *, delivered: bool = True) -> None:
        """Break the connection of the next transaction that sends these bytes: after the server has committed it and
        before its answer comes through, or (not `delivered`) before the server has seen them."""
        self._to_lose = (containing, delivered)

    def lose_turn(self, number: int) -> None:
        """Break the connection of a turn before the server has seen it; they are counted from now on, from 1."""
        self.reset()
        self._turn_to_lose = number

    def cut(self) -> None:
        """Break every connection, and refuse new ones, until `mend`."""
        self._is_cut = True
        for each in self._sockets[1:]:
            hang_up(each)

    def freeze(self) -> None:
        """Let nothing through in either direction until `mend`, and break nothing: a network that swallows packets.
        What was sent meanwhile arrives late."""
        self._flowing.clear()

    def mend(self) -> None:
        self._is_cut = False
        self._flowing.set()

    def close(self) -> None:
        self.mend()
        super().close()

    def _serve(self, client: socket.socket) -> None:
        if self._is_cut:
            client.close()
            return
        server = socket.create_connection(("127.0.0.1", self._server_port))
        self._sockets += [client, server]
        # Set by whoever speaks: a request counts as a turn if the server spoke last.
        server_spoke, doomed = threading.Event(), threading.Event()
        self.spawn(self._requests, client, server, server_spoke, doomed)
        self.spawn(self._answers, server, client, server_spoke, doomed)

    def _requests(
        self, client: socket.socket, server: socket.socket, server_spoke: threading.Event, doomed: threading.Event
    ) -> None:
        started, buffer, recent = False, b"", b""
        while data := _receive(client):
            buffer += data
            recent = data if server_spoke.is_set() else recent + data  # all of this turn
            if self._to_lose is not None and self._to_lose[0] in recent:
                (_, delivered), self._to_lose = self._to_lose, None
                self.lost += 1
                if not delivered:
                    break
                doomed.set()
            if server_spoke.is_set():
                server_spoke.clear()
                self.turns += 1
                if self.turns == self._turn_to_lose:
                    self.lost += 1
                    break
            while len(buffer) >= (5 if started else 4):
                length = struct.unpack_from("!I", buffer, 1 if started else 0)[0] + (1 if started else 0)
                if len(buffer) < length:
                    break
                message, buffer = buffer[:length], buffer[length:]
                if started:
                    self.kinds.append(chr(message[0]))
                    self.syncs += message[:1] == b"S"
                elif self._refuse_options and refused_options(client, message):
                    hang_up(client)
                    hang_up(server)
                    return
                started = True
            self._flowing.wait()
            try:
                server.sendall(data)
            except OSError:  # closed meanwhile
                break
        hang_up(server)
        hang_up(client)

    def _answers(
        self, server: socket.socket, client: socket.socket, server_spoke: threading.Event, doomed: threading.Event
    ) -> None:
        recent = b""
        while data := _receive(server):
            server_spoke.set()
            recent = (recent + data)[-len(_COMMITTED) :]
            if doomed.is_set() and recent == _COMMITTED:
                break
            self._flowing.wait()
            try:
                client.sendall(data)
            except OSError:
                break
        hang_up(client)
        hang_up(server)


def refused_options(client: socket.socket, startup: bytes) -> bool:
    """Say no to a startup message with the parameter `options`, as some poolers do. Whether it had it."""
    if b"\0options\0" not in startup:
        return False
    text = b"SFATAL\0C08P01\0Munsupported startup parameter: options\0\0"
    client.sendall(b"E" + struct.pack("!I", len(text) + 4) + text)
    return True


def _receive(source: socket.socket) -> bytes:
    try:
        return source.recv(65536)
    except OSError:
        return b""


def hang_up(target: socket.socket) -> None:
    try:
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
