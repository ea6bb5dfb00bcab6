"""`perdure.ops.metrics`: what the library does, as figures: for OpenTelemetry, Prometheus, or a page of your own.

    perdure.ops.metrics.otel()                  # metrics and spans, through the application's OpenTelemetry SDK
    perdure.ops.metrics.serve(port=9464)        # http://127.0.0.1:9464/metrics, for Prometheus
    perdure.ops.metrics.collect().text()        # the same text, for a page of your own

Process-wide: all stores of the process are measured. Until one of these is called, nothing is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.storage import metrics

if TYPE_CHECKING:
    from perdure.ops.telemetry.otel import OtelMeter
    from perdure.ops.telemetry.prometheus import Endpoint, PrometheusMeter

__all__ = ["collect", "otel", "serve"]


def otel(*, meter_provider: Any = None, tracer_provider: Any = None, ids: bool = False) -> OtelMeter:
    """Send metrics and spans to OpenTelemetry (extra `otel`): to its global providers, or to those given.

    `ids=True` names threads and runs in spans. Their names may be personal, so it is off by default; functions and
    steps are named always. No state, argument or result is ever sent. `close()` of what is returned ends it.
    """
    from perdure.ops.telemetry.otel import OtelMeter

    made = OtelMeter(meter_provider, tracer_provider, ids=ids)
    metrics.install(made)
    return made


def collect() -> PrometheusMeter:
    """Measure from now on, in memory (extra `metrics`). `text()` gives Prometheus's format, `close()` ends it."""
    from perdure.ops.telemetry.prometheus import PrometheusMeter

    made = PrometheusMeter()
    metrics.install(made)
    return made


def serve(port: int = 0, *, host: str = "127.0.0.1") -> Endpoint:
    """Measure from now on (extra `metrics`), and show it at `http://host:port/metrics` (0: any free port; see `url`).

    Every client that reaches the port may read it: it is bound to this machine unless `host` says otherwise. A thread
    serves it until `close()`, or the process, ends it.
    """
    from perdure.ops.telemetry.prometheus import Endpoint, PrometheusMeter

    meter = PrometheusMeter()
    endpoint = Endpoint(meter, host, port)
    metrics.install(meter)
    return endpoint
