"""A pooler in transaction mode, in small: many clients, one session of the server, handed on after each transaction.

As PgBouncer does: it answers the startup itself, refuses the parameter `options`, resets nothing between clients, and
does not know prepared statements. A client has the session from its first message until the server says that no
transaction is open. For tests: one thread for each client, and a client sends a whole pipeline before it is answered.
"""

from __future__ import annotations

import socket
import struct
import threading

from tcp_proxy import TcpProxy, refused_options

_NO_ENCRYPTION = {80877103, 80877104}  # a client asks for TLS, or for GSSAPI


class TransactionPooler(TcpProxy):
    """`with TransactionPooler(port, "app", "database") as pooler: perdure.open(pooler.address, prepare=False)`."""

    def __init__(self, port: int, user: str, database: str) -> None:
        self.served = 0  # transactions
        self._turn = threading.Lock()
        self._server = socket.create_connection(("127.0.0.1", port))
        startup = struct.pack("!I", 196608) + f"user\0{user}\0database\0{database}\0\0".encode()
        self._server.sendall(struct.pack("!I", len(startup) + 4) + startup)
        self._greeting = self._until_ready()[0]
        super().__init__()
        self._sockets.append(self._server)
        self.address = self.url(database, user)
        self.spawn(self.accept, self._begin)

    def _begin(self, client: socket.socket) -> None:
        self._sockets.append(client)
        self.spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        holds = False
        try:
            if not self._greet(client):
                return
            while (request := _request(client)) is not None:
                if not holds:
                    self._turn.acquire()
                    holds = True
                self._server.sendall(request)
                answer, state = self._until_ready()
                if state == b"I":
                    self.served += 1
                    self._turn.release()
                    holds = False
                client.sendall(answer)
        except OSError:
            pass  # the test closes everything at its end
        finally:
            if holds:  # gone in the middle of a transaction: PgBouncer rolls it back
                self._server.sendall(b"Q" + struct.pack("!I", 13) + b"ROLLBACK\0")
                self._until_ready()
                self._turn.release()
            client.close()

    def _greet(self, client: socket.socket) -> bool:
        while True:
            [length] = struct.unpack("!I", _exactly(client, 4))
            message = _exactly(client, length - 4)
            if struct.unpack_from("!I", message)[0] not in _NO_ENCRYPTION:
                break
            client.sendall(b"N")
        if refused_options(client, message):
            return False
        client.sendall(self._greeting)
        return True

    def _until_ready(self) -> tuple[bytes, bytes]:
        """What the server says until it is ready for more, and whether a transaction is open."""
        answer = b""
        while True:
            head = _exactly(self._server, 5)
            body = _exactly(self._server, struct.unpack("!I", head[1:])[0] - 4)
            answer += head + body
            if head[:1] == b"Z":
                return answer, body


def _request(client: socket.socket) -> bytes | None:
    """All messages up to the one that wants an answer. None: the client says goodbye."""
    request = b""
    while True:
        head = _exactly(client, 5)
        request += head + _exactly(client, struct.unpack("!I", head[1:])[0] - 4)
        if head[:1] == b"X":
            return None
        if head[:1] in (b"S", b"Q"):
            return request


def _exactly(source: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        part = source.recv(size - len(got))
        if not part:
            raise OSError("closed")
        got += part
    return got
