"""A proxy between a client and PostgreSQL that counts round trips: requests that follow an answer.

It passes bytes through and looks only at who speaks: however many messages or packets a request has, it is one
turn until the server has answered. A thread for each direction of each connection; for counting, not for speed.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class CountingProxy:
    """`with CountingProxy(port) as proxy: … proxy.turns`. Counts all connections together."""

    def __init__(self, server_port: int) -> None:
        self.turns = 0
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected, or gone already
            each.close()
        for thread in self._threads:
            thread.join()

    def url(self, database: str) -> str:
        port = self._listener.getsockname()[1]
        # Encryption would be negotiated in turns of its own.
        return f"postgresql://postgres@127.0.0.1:{port}/{database}?sslmode=disable&gssencmode=disable"

    def _spawn(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._sockets += [client, server]
            answered = threading.Event()
            self._spawn(lambda client=client, server=server, heard=answered: self._requests(client, server, heard))  # type: ignore[misc]
            self._spawn(lambda client=client, server=server, heard=answered: self._answers(client, server, heard))  # type: ignore[misc]

    def _requests(self, client: socket.socket, server: socket.socket, answered: threading.Event) -> None:
        def count() -> None:
            if answered.is_set():
                answered.clear()
                self.turns += 1

        _pass_on(client, server, count)

    def _answers(self, client: socket.socket, server: socket.socket, answered: threading.Event) -> None:
        _pass_on(server, client, answered.set)


def _pass_on(source: socket.socket, target: socket.socket, notice: Callable[[], None]) -> None:
    """Copy until one of them hangs up; then hang up on the other."""
    try:
        while data := source.recv(65536):
            notice()
            target.sendall(data)
    except OSError:
        pass
    try:
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
