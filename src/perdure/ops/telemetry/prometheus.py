"""Collect metrics for Prometheus, with `prometheus_client` (extra `metrics`).

OpenTelemetry's names are written by Prometheus's conventions: `perdure.commit.duration` in seconds becomes
`perdure_commit_duration_seconds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perdure.errors import ExtraMissing, UsageError
from perdure.storage import metrics
from perdure.storage.closing import Closing
from perdure.storage.metrics import NO_LINKS, Instrument, Token

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_UNITS = {"s": "seconds", "By": "bytes"}


class PrometheusMeter(Closing):
    """The metrics measured since it was created. `close` stops measuring, and the figures stay."""

    traces = False

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Histogram
        except ImportError as missing:
            raise ExtraMissing("Prometheus", "metrics") from missing
        self.registry: CollectorRegistry = CollectorRegistry()
        self._families: dict[Instrument, Any] = {}
        for instrument in metrics.INSTRUMENTS:
            labels = [label.replace(".", "_") for label in instrument.labels]
            family: type[Any] = Histogram if instrument.bounds else Counter
            buckets = {"buckets": instrument.bounds} if instrument.bounds else {}
            self._families[instrument] = family(
                prometheus_name(instrument), instrument.description, labels, registry=self.registry, **buckets
            )

    def record(self, instrument: Instrument, value: float, *labels: str) -> None:
        family = self._families[instrument]
        child = family.labels(*labels) if labels else family
        (child.observe if instrument.bounds else child.inc)(value)

    def begin(
        self, name: str, attributes: dict[str, str], ids: dict[str, str], links: Mapping[str, str] = NO_LINKS
    ) -> Token:
        return None  # Prometheus has no spans

    def end(self, token: Token, attributes: Mapping[str, str | int], error: BaseException | None) -> None:
        return None

    def span_of(self, token: Token) -> str:
        return ""

    def text(self) -> str:
        """Return all metrics in Prometheus's format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    def close(self) -> None:
        """Stop measuring. May be called twice."""
        metrics.remove(self)


def prometheus_name(instrument: Instrument) -> str:
    """Return an instrument's name in Prometheus, with its unit at the end. The client adds `_total` to counters."""
    name = instrument.name.replace(".", "_")
    return f"{name.removesuffix('_size')}_{_UNITS[instrument.unit]}" if instrument.unit in _UNITS else name


class Endpoint(Closing):
    """A server of a meter's metrics at `/metrics`. `close` stops the server and the measuring."""

    def __init__(self, meter: PrometheusMeter, host: str, port: int) -> None:
        from prometheus_client import start_http_server

        self.meter = meter
        if type(port) is not int:
            raise UsageError(f"serve(port={port!r}): a port is a number, 0 (any free one) to 65535")
        try:
            self._server, self._thread = start_http_server(port, host, meter.registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"no metrics on {host}:{port}: {reason}; choose another port (0: any)") from error
        self.host, self.port = host, int(self._server.server_port)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def __repr__(self) -> str:
        return f"<Endpoint {self.url}>"

    def close(self) -> None:
        """Stop serving and measuring. May be called twice."""
        self.meter.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
