"""`perdure.ops.metrics`: the library's metrics, for OpenTelemetry, Prometheus, or a page of your own.

    perdure.ops.metrics.otel()                  # metrics and spans, through the application's OpenTelemetry SDK
    perdure.ops.metrics.serve(port=9464)        # http://127.0.0.1:9464/metrics, for Prometheus
    perdure.ops.metrics.collect().text()        # the same text, for a page of your own

They measure all stores of the process. Until one of these functions is called, nothing is measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.storage import metrics

if TYPE_CHECKING:
    from perdure.ops.telemetry.otel import OtelMeter
    from perdure.ops.telemetry.prometheus import Endpoint, PrometheusMeter

__all__ = ["collect", "otel", "serve"]


def otel(*, meter_provider: Any = None, tracer_provider: Any = None, ids: bool = False) -> OtelMeter:
    """Send metrics and spans to OpenTelemetry (extra `otel`). The default providers are its global ones.

    `ids=True` names threads and runs in spans. Their names may be personal data, so it is off by default. Functions and
    steps are always named. No state, argument or result is ever sent. Call `close()` of the result to stop it.
    """
    from perdure.ops.telemetry.otel import OtelMeter

    meter = OtelMeter(meter_provider, tracer_provider, ids=ids)
    metrics.install(meter)
    return meter


def collect() -> PrometheusMeter:
    """Start measuring, in memory (extra `metrics`). `text()` returns Prometheus's format, `close()` stops it."""
    from perdure.ops.telemetry.prometheus import PrometheusMeter

    meter = PrometheusMeter()
    metrics.install(meter)
    return meter


def serve(port: int = 0, *, host: str = "127.0.0.1") -> Endpoint:
    """Start measuring (extra `metrics`), and serve the metrics at `http://host:port/metrics`.

    Port 0 means any free port; `url` has it. Every client that reaches the port can read the metrics, so the default
    `host` is reachable from this machine only. A thread serves them until `close()` or the end of the process.
    """
    from perdure.ops.telemetry.prometheus import Endpoint, PrometheusMeter

    meter = PrometheusMeter()
    endpoint = Endpoint(meter, host, port)
    metrics.install(meter)
    return endpoint
