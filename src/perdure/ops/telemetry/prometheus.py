"""Counts and times kept in memory, as Prometheus's text format 0.0.4, and a small server that shows them.

No dependency: the format is a line per figure. Names are OpenTelemetry's, written as Prometheus wants them:
`perdure.commit.duration` in seconds is `perdure_commit_duration_seconds`.
"""

from __future__ import annotations

import platform
import socket
from bisect import bisect_left
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Self

from perdure.errors import UsageError
from perdure.storage import meters
from perdure.storage.meters import Instrument, Token

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UNITS = {"s": "seconds", "By": "bytes"}
_SILENT_S = 5.0  # a client that says nothing is hung up on


class _Histogram:
    """How many were up to each bound, and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self, bounds: int) -> None:
        self.counts = [0] * (bounds + 1)
        self.total = 0.0


class Registry:
    """What has been measured since it was made. `close` ends the measuring; the figures stay."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counters: dict[tuple[Instrument, tuple[str, ...]], float] = {}
        self._histograms: dict[tuple[Instrument, tuple[str, ...]], _Histogram] = {}

    def record(self, what: Instrument, value: float, *labels: str) -> None:
        key = (what, labels)
        with self._lock:
            if not what.bounds:
                self._counters[key] = self._counters.get(key, 0) + value
                return
            found = self._histograms.get(key)
            if found is None:
                found = self._histograms[key] = _Histogram(len(what.bounds))
            found.counts[bisect_left(what.bounds, value)] += 1
            found.total += value

    def begin(self, name: str, attributes: dict[str, str], ids: dict[str, str]) -> Token:
        return None  # Prometheus has no spans

    def end(self, token: Token, attributes: dict[str, str], error: BaseException | None) -> None:
        return None

    def text(self) -> str:
        """All of it in Prometheus's format."""
        with self._lock:
            counters = dict(self._counters)
            histograms = {key: (list(found.counts), found.total) for key, found in self._histograms.items()}
        lines = [
            "# HELP perdure_build_info The Python that this process runs.",
            "# TYPE perdure_build_info gauge",
            f"perdure_build_info{_labels(('python',), (platform.python_version(),))} 1",
        ]
        for what in meters.INSTRUMENTS:
            name = prometheus_name(what)
            lines += [f"# HELP {name} {_escaped(what.says)}", f"# TYPE {name} {_kind(what)}"]
            if not what.bounds and not what.labels:  # a count without labels is there from the start
                counters.setdefault((what, ()), 0)
            for (_, labels), value in sorted(_of(what, counters).items()):
                lines.append(f"{name}{_labels(what.labels, labels)} {_number(value)}")
            for (_, labels), (counts, total) in sorted(_of(what, histograms).items()):
                lines += _histogram_lines(what, name, labels, counts, total)
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Measure no more. May be called twice."""
        meters.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prometheus_name(what: Instrument) -> str:
    """An instrument's name there: its unit at the end, and a count says that it is one."""
    name = what.name.replace(".", "_")
    if what.unit in _UNITS:
        name = f"{name.removesuffix('_size')}_{_UNITS[what.unit]}"
    return name if what.bounds else f"{name}_total"


def _kind(what: Instrument) -> str:
    return "histogram" if what.bounds else "counter"


def _of(what: Instrument, found: dict[tuple[Instrument, tuple[str, ...]], Any]) -> dict[Any, Any]:
    return {key: value for key, value in found.items() if key[0] is what}


def _histogram_lines(
    what: Instrument, name: str, labels: tuple[str, ...], counts: list[int], total: float
) -> list[str]:
    lines, sofar = [], 0
    for bound, count in zip([*what.bounds, None], counts, strict=True):
        sofar += count
        edge = "+Inf" if bound is None else _number(bound)
        lines.append(f"{name}_bucket{_labels((*what.labels, 'le'), (*labels, edge))} {sofar}")
    own = _labels(what.labels, labels)
    return [*lines, f"{name}_sum{own} {_number(total)}", f"{name}_count{own} {sofar}"]


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = [
        f'{name.replace(".", "_")}="{_escaped(value, quotes=True)}"' for name, value in zip(names, values, strict=True)
    ]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


class Endpoint:
    """A server that shows a registry at `/metrics`. `close` stops it and the measuring."""

    def __init__(self, registry: Registry, host: str, port: int) -> None:
        self.registry = registry
        if type(port) is not int:
            raise UsageError(f"serve(port={port!r}): a port is a number, 0 (any free one) to 65535")
        try:
            self._server = (_Server6 if ":" in host else _Server)((host, port), _handler(registry))
        except (OSError, OverflowError) as error:
            said = getattr(error, "strerror", None) or error
            raise UsageError(f"no metrics on {host}:{port}: {said}; choose another port (0: any)") from error
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = Thread(target=self._server.serve_forever, name="perdure-metrics", daemon=True)
        self._thread.start()
        self._closed = False

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def __repr__(self) -> str:
        return f"<Endpoint {self.url}>"

    def close(self) -> None:
        """Stop serving and measuring. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.registry.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that hangs must not keep the process

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # not HTTPServer's: that asks the DNS for our name
        self.server_name, self.server_port = "", int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; the server goes on."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler(registry: Registry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _SILENT_S
        server_version, sys_version = "perdure", ""

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            if self.path.partition("?")[0] not in ("/", "/metrics"):
                self.send_error(404, "the metrics are at /metrics")
                return
            body = registry.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a scrape every few seconds is no news."""

    return Handler
