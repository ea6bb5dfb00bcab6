"""A fake airline in its own process, for tests and examples: it counts how often a flight was really booked.

It records every request and booking in an SQLite file. By default it honours the header `Idempotency-Key`. It can act
late, hold or lose its answers, and be sold out (`Behaviour`).

    with AirlineProcess(folder / "airline.db") as airline:
        Airline(airline.url).book("flight", "LIS-0715", key="…")

or `python -m perdure.testing.fake_airline`. It ends when its standard input is closed, so it ends with its parent.
"""

from __future__ import annotations

import argparse
import http.server
import json
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS request (
    number INTEGER PRIMARY KEY, at REAL, path TEXT, key TEXT, body TEXT, outcome TEXT, acted_at REAL, booking TEXT);
CREATE TABLE IF NOT EXISTS booking (
    booking TEXT PRIMARY KEY, what TEXT, item TEXT, key TEXT, at REAL, cancelled_at REAL);
CREATE INDEX IF NOT EXISTS booking_key ON booking (key);
"""


@dataclass
class Behaviour:
    """How the airline treats requests that change bookings (/book and /cancel)."""

    ignore_keys: bool = False  # every request acts again (the key can still be looked up)
    sold_out: list[str] = field(default_factory=list)  # items
    delay_s: float = 0.0  # before it acts: it will act even if the client has gone
    hold: str = ""  # "before" or "after": wait before it acts, or before it answers, until this changes
    lose_answers: int = 0  # the number of next requests that act and get no answer


@dataclass(frozen=True)
class Request:
    """A request that arrived, and its outcome."""

    number: int
    at: float
    path: str
    key: str | None
    body: dict[str, Any]
    outcome: str  # received (not acted on yet), booked, cancelled, replayed, sold out, refused, looked
    acted_at: float | None
    booking: str | None


@dataclass(frozen=True)
class Booking:
    """A booking that the airline made."""

    booking: str
    what: str
    item: str
    key: str | None
    at: float
    cancelled_at: float | None


class SoldOut(Exception):
    """The item is sold out. This is a definite answer: nothing was booked."""

    status = 409


class Refused(Exception):
    """The airline refused the request. This is a definite answer: nothing was done."""

    status = 400


class _Books:
    """The airline's file. One request acts at a time, in one transaction."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.executescript(_SCHEMA)

    def close(self) -> None:
        self._database.close()

    def run(self, sql: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._database.execute(sql, values).fetchall()

    def received(self, path: str, key: str | None, body: dict[str, Any]) -> int:
        insert = "INSERT INTO request (at, path, key, body, outcome) VALUES (?, ?, ?, ?, 'received') RETURNING number"
        return int(self.run(insert, time.time(), path, key, json.dumps(body))[0][0])

    def act(self, number: int, path: str, key: str | None, body: dict[str, Any], how: Behaviour) -> tuple[int, Any]:
        """Book or cancel, record the outcome, and return the status and body of the answer."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            outcome, booking = self._book(body, key, how) if path == "/book" else self._cancel(body, how)
            self._database.execute(
                "UPDATE request SET outcome = ?, acted_at = ?, booking = ? WHERE number = ?",
                (outcome, time.time(), booking, number),
            )
            self._database.execute("COMMIT")
        if booking is None:
            return (409 if outcome == "sold out" else 422), {"error": f"{outcome}: {body.get('item', body)}"}
        return 200, {"booking": booking, "replayed": outcome == "replayed"}

    def _book(self, body: dict[str, Any], key: str | None, how: Behaviour) -> tuple[str, str | None]:
        asked = (body["what"], body["item"])
        booked = self._database.execute("SELECT booking, what, item FROM booking WHERE key = ?", (key,)).fetchone()
        if booked and not how.ignore_keys:
            return ("replayed", booked[0]) if booked[1:] == asked else ("refused", None)
        if body["item"] in how.sold_out:
            return "sold out", None
        [count] = self._database.execute("SELECT count(*) FROM booking WHERE what = ?", asked[:1]).fetchone()
        name = f"{body['what']}-{count + 1}"
        values = (name, *asked, key, time.time())
        self._database.execute("INSERT INTO booking VALUES (?, ?, ?, ?, ?, NULL)", values)
        return "booked", name

    def _cancel(self, body: dict[str, Any], how: Behaviour) -> tuple[str, str | None]:
        name = body["booking"]
        booking = self._database.execute("SELECT cancelled_at FROM booking WHERE booking = ?", (name,)).fetchone()
        if not booking:
            return "refused", None
        if booking[0] is not None and not how.ignore_keys:
            return "replayed", name
        self._database.execute("UPDATE booking SET cancelled_at = ? WHERE booking = ?", (time.time(), name))
        return "cancelled", name

    def bookings(self, key: str | None = None) -> list[Booking]:
        rows = self.run("SELECT * FROM booking WHERE ? IS NULL OR key = ? ORDER BY at, booking", key, key)
        return [Booking(*row) for row in rows]

    def requests(self) -> list[Request]:
        rows = self.run("SELECT * FROM request ORDER BY number")
        return [Request(number, at, path, key, json.loads(body), *end) for number, at, path, key, body, *end in rows]


def _offers(dest: str) -> dict[str, Any]:
    """Return three flights and a hotel for a destination, always the same ones."""
    code, price = dest[:3].upper(), 90 + zlib.crc32(dest.encode()) % 80
    times = [("07:15", 0), ("12:40", 35), ("18:55", 12)]
    flights = [f"{code}-{at.replace(':', '')} at {at}, {price + more} EUR" for at, more in times]
    return {"flights": flights, "hotel": f"Grand Hotel {dest}"}


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, books: _Books, behaviour: Behaviour) -> None:
        self.books, self.behaviour, self.changed = books, behaviour, threading.Condition()
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:  # HTTPServer's own method queries DNS
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that died is expected
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        books = self.server.books
        number = books.received(url.path, query.get("key"), query)
        books.run("UPDATE request SET outcome = 'looked' WHERE number = ?", number)
        if url.path == "/search":
            self.answer(200, _offers(query["dest"]))
        else:
            self.answer(200, [asdict(one) for one in books.bookings(query.get("key"))])

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if self.path == "/behave":
            with server.changed:
                server.behaviour = Behaviour(**{**asdict(server.behaviour), **body})
                server.changed.notify_all()
            self.answer(200, asdict(server.behaviour))
            return
        key = self.headers.get("Idempotency-Key")
        number = server.books.received(self.path, key, body)
        if not {"/book": {"what", "item"}, "/cancel": {"booking"}}.get(self.path, {""}) <= body.keys():
            self.answer(400, {"error": f"not understood: {self.path} {body}"})
            return
        time.sleep(body.get("delay_s", server.behaviour.delay_s))
        self.wait("before")
        answer = server.books.act(number, self.path, key, body, server.behaviour)
        self.wait("after")
        with server.changed:
            lost = server.behaviour.lose_answers > 0
            server.behaviour.lose_answers -= lost
        if not lost:
            self.answer(*answer)

    def wait(self, when: str) -> None:
        with self.server.changed:
            self.server.changed.wait_for(lambda: self.server.behaviour.hold != when)

    def answer(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class Airline:
    """The airline's client. After a ConnectionError or a TimeoutError it is unknown whether the airline acted."""

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # never through a proxy

    def search(self, dest: str) -> dict[str, Any]:
        """Return a dict of `flights`, a list of texts, and `hotel`, a text."""
        offers: dict[str, Any] = self._call("/search?" + urllib.parse.urlencode({"dest": dest}))
        return offers

    def book(self, what: str, item: str, *, key: str | None = None, **extra: float) -> str:
        """Book an item and return the booking's name. Raises SoldOut. `extra` may have `delay_s` for this request."""
        return str(self._call("/book", {"what": what, "item": item, **extra}, key)["booking"])

    def cancel(self, booking: str, *, key: str | None = None) -> None:
        self._call("/cancel", {"booking": booking}, key)

    def bookings(self, key: str | None = None) -> list[Booking]:
        """Return the bookings with this key, or all of them."""
        query = "?" + urllib.parse.urlencode({"key": key}) if key is not None else ""
        return [Booking(**one) for one in self._call("/bookings" + query)]

    def behave(self, **changes: Any) -> None:
        """Change the fields of its Behaviour from now on."""
        self._call("/behave", changes)

    def _call(self, path: str, body: dict[str, Any] | None = None, key: str | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Idempotency-Key": key} if key is not None else {}
        try:
            with self._open(urllib.request.Request(self.url + path, data, headers), timeout=self.timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                why = json.load(error)["error"]
            raise (SoldOut if error.code == 409 else Refused)(why) from None
        except urllib.error.URLError as error:
            raise error.reason if isinstance(error.reason, OSError) else ConnectionError(str(error)) from error


class AirlineProcess:
    """The airline in its own process, for `with`. The next one on the same file gets the same URL if it is free."""

    def __init__(self, path: str | Path, **behaviour: Any) -> None:
        self.path = Path(path)
        self._behave = f"--behave={json.dumps(behaviour)}"

    def __enter__(self) -> AirlineProcess:
        command = [sys.executable, "-m", "perdure.testing.fake_airline", self._behave, f"--ledger={self.path}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url: str = json.loads(self._process.stdout.readline())["url"]
        self.client, self._books = Airline(self.url), _Books(self.path)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # requests that have not acted yet are lost
        self._process.communicate()
        self._books.close()

    def requests(self) -> list[Request]:
        return self._books.requests()

    def bookings(self) -> list[Booking]:
        return self._books.bookings()

    def wait_for(self, outcome: str, *, path: str = "", count: int = 1, timeout_s: float = 30.0) -> None:
        """Wait until `count` requests have this outcome ("booked", "received", …). Raises TimeoutError."""
        until = time.monotonic() + timeout_s
        while sum(one.outcome == outcome and path in ("", one.path) for one in self.requests()) < count:
            if time.monotonic() > until:
                raise TimeoutError(f"not {count} requests {outcome} after {timeout_s} s")
            time.sleep(0.005)


def main(arguments: list[str] | None = None) -> None:
    """Print the airline's URL, and serve until standard input is closed: `python -m perdure.testing.fake_airline`."""
    parser = argparse.ArgumentParser(description="A pretend airline. Ends when standard input is closed.")
    parser.add_argument("--ledger", type=Path, default=Path("airline.db"), help="its file (default: airline.db)")
    parser.add_argument("--port", type=int, default=0, help="default: the one this file had before, or any")
    parser.add_argument("--behave", metavar="JSON", type=json.loads, default={}, help='{"ignore_keys": true, …}')
    parser.add_argument("--stay", action="store_true", help="do not end when standard input is closed")
    options = parser.parse_args(arguments)
    books = _Books(options.ledger)
    [[before]] = books.run("PRAGMA user_version")
    try:
        server = _Server(options.port or before, books, Behaviour(**options.behave))
    except OSError:
        server = _Server(0, books, Behaviour(**options.behave))
    books.run(f"PRAGMA user_version = {server.server_port}")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    print(json.dumps({"url": f"http://{HOST}:{server.server_port}", "ledger": str(options.ledger)}), flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait() if options.stay else sys.stdin.read()


if __name__ == "__main__":
    main()
