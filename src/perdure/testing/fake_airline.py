"""A pretend airline with a ledger: an outside world for agents that remembers what it was asked, and what it did.

Crash tests and examples need somebody else who counts: how often was this flight really booked? The server keeps every
request and every booking in its own SQLite file, so that what it did outlives any process, its own too. It honours the
header `Idempotency-Key` (the same key again is the same booking), or not, as it is told; it can be slow before it
acts (the request arrives after its sender died), slow to answer, lose answers, and be sold out.

    POST /book    {"what": "flight", "item": "…"}   200 {"booking", "replayed"}; 409 sold out; 422 key used otherwise
    POST /cancel  {"booking": "flight-1"}           200 {"booking", "replayed"}; 404 no such booking
    GET  /search?dest=Lisbon                        200 {"flights": […], "hotel": "…"}
    GET  /bookings?key=…                            200 [Booking …]: how `reconcile` finds out
    GET  /ledger                                    200 [Request …]: all but /ledger and /behave, in order of arrival
    POST /behave  {"hold": "after", …}              200: fields of Behaviour, from now on

Where it runs: `with AirlineProcess(folder / "airline.db") as airline: Airline(airline.url).book("flight", "…")`, or
`python -m perdure.testing.fake_airline`. It ends when its standard input is closed, and so with whoever started it.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

HOST = "127.0.0.1"
ENDED_S_MAX = 10.0


@dataclass
class Behaviour:
    """How the airline treats requests that act (/book and /cancel)."""

    ignore_keys: bool = False  # a bad receiver: every request acts again (the key can still be looked up)
    sold_out: list[str] = field(default_factory=list)  # items
    delay_s: float = 0.0  # before it acts: it will act even if the client has gone
    slow_s: float = 0.0  # after it acted, before it answers
    hold: str = ""  # "before" or "after": as those two, but until it is told otherwise
    lose_answers: int = 0  # so many of the next requests act and get no answer


@dataclass(frozen=True)
class Request:
    """A line of the ledger: what arrived, and what was done about it."""

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
    """What the airline sold."""

    booking: str
    what: str
    item: str
    key: str | None
    at: float
    cancelled_at: float | None


class SoldOut(Exception):
    """The airline has none left: a definite answer, nothing was booked."""

    status = 409


class Refused(Exception):
    """The airline did not understand the request: a definite answer, nothing was done."""

    status = 400


# --- the ledger: what is kept

_SCHEMA = """
CREATE TABLE IF NOT EXISTS setting (name TEXT PRIMARY KEY, value);
CREATE TABLE IF NOT EXISTS request (
    number INTEGER PRIMARY KEY, at REAL, path TEXT, key TEXT, body TEXT, outcome TEXT, acted_at REAL, booking TEXT);
CREATE TABLE IF NOT EXISTS booking (
    booking TEXT PRIMARY KEY, what TEXT, item TEXT, key TEXT, at REAL, cancelled_at REAL);
CREATE INDEX IF NOT EXISTS booking_key ON booking (key);
CREATE INDEX IF NOT EXISTS request_key ON request (key);
"""
Answer = tuple[int, Any]


class Ledger:
    """The airline's books. One request acts at a time, in one transaction."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        # A killed process loses nothing in WAL mode without fsync, and the machine is not under test here.
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.executescript(_SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def setting(self, name: str) -> Any:
        found = self._run("SELECT value FROM setting WHERE name = ?", name)
        return found[0][0] if found else None

    def set(self, name: str, value: Any) -> None:
        self._run("INSERT OR REPLACE INTO setting VALUES (?, ?)", name, value)

    def received(self, path: str, key: str | None, body: dict[str, Any]) -> int:
        """Write down that a request arrived. Its number."""
        insert = "INSERT INTO request (at, path, key, body, outcome) VALUES (?, ?, ?, ?, 'received') RETURNING number"
        return int(self._run(insert, time.time(), path, key, json.dumps(body))[0][0])

    def act(self, number: int, do: Callable[[sqlite3.Connection], tuple[str, str | None, Answer]]) -> Answer:
        """Do something, and write down what it was, in one transaction."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                outcome, booking, answer = do(self._database)
                self._database.execute(
                    "UPDATE request SET outcome = ?, acted_at = ?, booking = ? WHERE number = ?",
                    (outcome, time.time(), booking, number),
                )
                self._database.execute("COMMIT")
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            return answer

    def bookings(self, key: str | None = None) -> list[Booking]:
        rows = self._run("SELECT * FROM booking WHERE ? IS NULL OR key = ? ORDER BY at, booking", key, key)
        return [Booking(*row) for row in rows]

    def requests(self) -> list[Request]:
        rows = self._run("SELECT * FROM request ORDER BY number")
        return [Request(number, at, path, key, json.loads(body), *rest) for number, at, path, key, body, *rest in rows]

    def _run(self, sql: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._database.execute(sql, values).fetchall()


def booked(
    database: sqlite3.Connection, body: dict[str, Any], key: str | None, behaviour: Behaviour
) -> tuple[str, str | None, Answer]:
    """Book, unless this key was booked already or nothing is left. Outcome, booking, and the answer."""
    what, item = body["what"], body["item"]
    if key is not None and not behaviour.ignore_keys:
        found = database.execute("SELECT booking, what, item FROM booking WHERE key = ?", (key,)).fetchone()
        if found and found[1:] != (what, item):
            return "refused", None, (422, {"error": f"the key {key} was used for another request"})
        if found:
            return "replayed", found[0], (200, {"booking": found[0], "replayed": True})
    if item in behaviour.sold_out:
        return "sold out", None, (409, {"error": f"sold out: {item}"})
    [count] = database.execute("SELECT count(*) FROM booking WHERE what = ?", (what,)).fetchone()
    name = f"{what}-{count + 1}"
    database.execute("INSERT INTO booking VALUES (?, ?, ?, ?, ?, NULL)", (name, what, item, key, time.time()))
    return "booked", name, (200, {"booking": name, "replayed": False})


def cancelled(
    database: sqlite3.Connection, body: dict[str, Any], key: str | None, behaviour: Behaviour
) -> tuple[str, str | None, Answer]:
    """Cancel a booking. A second time is a replay, but a bad receiver pays the money back twice."""
    name = body["booking"]
    found = database.execute("SELECT cancelled_at FROM booking WHERE booking = ?", (name,)).fetchone()
    if not found:
        return "refused", None, (404, {"error": f"there is no booking {name}"})
    if found[0] is not None and not behaviour.ignore_keys:
        return "replayed", name, (200, {"booking": name, "replayed": True})
    database.execute("UPDATE booking SET cancelled_at = ? WHERE booking = ?", (time.time(), name))
    return "cancelled", name, (200, {"booking": name, "replayed": False})


def offers(dest: str) -> dict[str, Any]:
    """Three flights and a hotel for any destination, always the same."""
    seed = zlib.crc32(dest.encode())
    code, price = dest[:3].upper(), 90 + seed % 80
    times = [("07:15", 0), ("12:40", 35), ("18:55", 12)]
    return {
        "flights": [f"{code}-{at.replace(':', '')} at {at}, {price + more} EUR" for at, more in times],
        "hotel": f"Grand Hotel {dest}",
    }


# --- the server


class Server(http.server.ThreadingHTTPServer):
    """The airline's server: a thread per request, so that a slow one holds up nobody."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, ledger: Ledger, behaviour: Behaviour) -> None:
        self.ledger, self.behaviour = ledger, behaviour
        self.changed = threading.Condition()
        super().__init__((HOST, port), Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's: it asks the name service for a name that nobody needs.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that died is nothing to report, nor is a request that was on its way when the ledger was closed.
        if not isinstance(sys.exc_info()[1], ConnectionError | sqlite3.ProgrammingError):
            super().handle_error(request, client_address)

    def behave(self, changes: dict[str, Any]) -> Answer:
        known = {one.name for one in dataclasses.fields(Behaviour)}
        if not changes.keys() <= known:
            return 400, {"error": f"unknown: {sorted(changes.keys() - known)}"}
        with self.changed:
            for name, value in changes.items():
                setattr(self.behaviour, name, value)
            self.changed.notify_all()
        return 200, dataclasses.asdict(self.behaviour)

    def wait(self, when: str, seconds: float) -> None:
        """The slow network, and the hold."""
        time.sleep(seconds)
        with self.changed:
            self.changed.wait_for(lambda: self.behaviour.hold != when)

    def loses_this_answer(self) -> bool:
        with self.changed:
            lost = self.behaviour.lose_answers > 0
            self.behaviour.lose_answers -= int(lost)
            return lost


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the ledger is the log."""

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        ledger = self.server.ledger
        if url.path == "/ledger":
            self.answer(200, [dataclasses.asdict(one) for one in ledger.requests()])
        elif url.path == "/bookings":
            number = ledger.received(url.path, query.get("key"), query)
            found = [dataclasses.asdict(one) for one in ledger.bookings(query.get("key"))]
            self.answer(*ledger.act(number, lambda _: ("looked", None, (200, found))))
        elif url.path == "/search" and query.get("dest"):
            number = ledger.received(url.path, None, query)
            self.answer(*ledger.act(number, lambda _: ("looked", None, (200, offers(query["dest"])))))
        else:
            self.answer(404, {"error": f"nothing here: {self.path}"})

    def do_POST(self) -> None:
        actions = {"/book": (booked, {"what", "item"}), "/cancel": (cancelled, {"booking"})}
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        except ValueError:
            body = None
        if self.path == "/behave" and isinstance(body, dict):
            self.answer(*self.server.behave(body))
            return
        do, needed = actions.get(self.path, (None, set()))
        if do is None or not isinstance(body, dict) or not needed <= body.keys():
            self.answer(400, {"error": f"not understood: {self.path} needs {sorted(needed)}"})
            return
        server, key = self.server, self.headers.get("Idempotency-Key")
        number = server.ledger.received(self.path, key, body)
        server.wait("before", float(body.get("delay_s", server.behaviour.delay_s)))
        answer = server.ledger.act(number, lambda database: do(database, body, key, server.behaviour))
        server.wait("after", float(body.get("slow_s", server.behaviour.slow_s)))
        if not server.loses_this_answer():
            self.answer(*answer)

    def answer(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


# --- the client, which agents use


class Airline:
    """The airline as a program sees it. A lost answer is a ConnectionError or a TimeoutError: nobody knows then."""

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # never through a proxy

    def search(self, dest: str) -> dict[str, Any]:
        """`flights`, a list of texts, and `hotel`, a text."""
        found: dict[str, Any] = self._call("GET", "/search?" + urllib.parse.urlencode({"dest": dest}))
        return found

    def book(self, what: str, item: str, *, key: str | None = None, **extra: float) -> str:
        """Book it. The number of the booking; SoldOut. `extra`: `delay_s`, `slow_s` for this request."""
        return str(self._call("POST", "/book", {"what": what, "item": item, **extra}, key)["booking"])

    def cancel(self, booking: str, *, key: str | None = None) -> None:
        self._call("POST", "/cancel", {"booking": booking}, key)

    def bookings(self, key: str | None = None) -> list[Booking]:
        """What was booked with this key, or everything."""
        query = "?" + urllib.parse.urlencode({"key": key}) if key is not None else ""
        return [Booking(**one) for one in self._call("GET", "/bookings" + query)]

    def ledger(self) -> list[Request]:
        return [Request(**one) for one in self._call("GET", "/ledger")]

    def behave(self, **changes: Any) -> None:
        """Change its Behaviour from now on."""
        self._call("POST", "/behave", changes)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None, key: str | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, method=method)
        if key is not None:
            request.add_header("Idempotency-Key", key)
        try:
            with self._open(request, timeout=self.timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")
            if error.code >= 500:  # whether it acted is unknown
                raise ConnectionError(f"the airline answered {error.code}: {said}") from None
            why = json.loads(said)["error"]
            raise (SoldOut if error.code == 409 else Refused)(why) from None
        except urllib.error.URLError as error:
            raise error.reason if isinstance(error.reason, OSError) else ConnectionError(str(error)) from error


# --- the process


class AirlineProcess:
    """The airline in a process of its own, for `with`. Its url stays the same when it is killed and started again."""

    def __init__(self, path: str | Path, **behaviour: Any) -> None:
        self.path = Path(path)
        self.behaviour = Behaviour(**behaviour)
        self.url = ""
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> AirlineProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def client(self) -> Airline:
        return Airline(self.url)

    def start(self) -> None:
        options = [f"--behave={json.dumps(dataclasses.asdict(self.behaviour))}", f"--ledger={self.path}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "perdure.testing.fake_airline", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError("the airline did not start; what it said is on standard error")
        self.url = json.loads(line)["url"]

    def close(self) -> None:
        """End it: what is on its way and has not acted yet is lost."""
        process, self.process = self.process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(ENDED_S_MAX)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def kill(self) -> None:
        """`kill -9`."""
        if self.process is not None:
            self.process.kill()
        self.close()

    def requests(self) -> list[Request]:
        """The ledger, read from its file: also when the airline is not running, and without asking it."""
        with closing(Ledger(self.path)) as ledger:
            return ledger.requests()

    def bookings(self, key: str | None = None) -> list[Booking]:
        with closing(Ledger(self.path)) as ledger:
            return ledger.bookings(key)

    def wait_for(self, outcome: str, *, path: str = "", count: int = 1, timeout_s: float = 30.0) -> list[Request]:
        """Wait until so many requests have come to this outcome ("booked", "received", …). They."""
        until = time.monotonic() + timeout_s
        with closing(Ledger(self.path)) as ledger:
            while True:
                found = [one for one in ledger.requests() if one.outcome == outcome and path in ("", one.path)]
                if len(found) >= count:
                    return found
                if time.monotonic() > until:
                    raise TimeoutError(f"{len(found)} of {count} requests {outcome} after {timeout_s} s")
                time.sleep(0.005)


def serve(path: Path, port: int, behaviour: Behaviour, *, stay: bool) -> None:
    """Serve until standard input is closed. Prints one line of JSON when it is ready."""
    with closing(Ledger(path)) as ledger:
        before = int(ledger.setting("port") or 0)
        try:
            server = Server(port or before, ledger, behaviour)  # the url of the last time, for agents that know it
        except OSError:
            if port:
                raise
            server = Server(0, ledger, behaviour)
        ledger.set("port", server.server_port)
        with server:
            serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            serving.start()
            print(json.dumps({"url": f"http://{HOST}:{server.server_port}", "ledger": str(path)}), flush=True)
            try:
                serving.join() if stay else sys.stdin.read()
            except KeyboardInterrupt:
                pass
            server.shutdown()


def main(arguments: list[str] | None = None) -> None:
    """`python -m perdure.testing.fake_airline`, and examples/airline.py."""
    parser = argparse.ArgumentParser(description="A pretend airline with a ledger. Ends when standard input is closed.")
    parser.add_argument("--ledger", type=Path, default=Path("airline.db"), help="its file (default: airline.db)")
    parser.add_argument("--port", type=int, default=0, help="default: the one this ledger had before, or any")
    parser.add_argument("--ignore-keys", action="store_true", help="a bad receiver: the same key books again")
    parser.add_argument("--sold-out", metavar="ITEM", action="append", default=[], help="may be given again")
    parser.add_argument("--delay-s", type=float, default=0.0, help="acts so much later, even if the client has gone")
    parser.add_argument("--slow-s", type=float, default=0.0, help="acts, and answers so much later")
    parser.add_argument("--behave", metavar="JSON", type=json.loads, help="all of this, and more, as one object")
    parser.add_argument("--stay", action="store_true", help="do not end when standard input is closed")
    options = parser.parse_args(arguments)
    behaviour = Behaviour(options.ignore_keys, options.sold_out, options.delay_s, options.slow_s)
    serve(options.ledger, options.port, Behaviour(**options.behave) if options.behave else behaviour, stay=options.stay)


if __name__ == "__main__":
    main()
