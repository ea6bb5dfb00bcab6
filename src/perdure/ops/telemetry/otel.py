"""Send metrics to OpenTelemetry, and spans for saves, loads, runs and steps.

Only its API is used: without an SDK that the application sets up, this does nothing. A span has an operation and its
duration, and the class of an error, never its text. Threads and runs are named only with `ids=True`; functions and
steps, whose names are in the code, always. An error of an exporter never fails a save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perdure.errors import ExtraMissing
from perdure.storage import metrics
from perdure.storage.metrics import INSTRUMENTS, NO_LINKS, Instrument, Token

SCOPE = "perdure"


class OtelMeter:
    """The meter that `perdure.ops.metrics.otel` installs. `close` removes it."""

    traces = True

    def __init__(self, meter_provider: Any, tracer_provider: Any, *, ids: bool) -> None:
        try:
            from opentelemetry import context, metrics, trace
        except ImportError as missing:
            raise ExtraMissing("OpenTelemetry", "otel") from missing
        self._context, self._trace, self._ids = context, trace, ids
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
        meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
        self._add = {instrument: _adder(meter, instrument) for instrument in INSTRUMENTS}

    def record(self, instrument: Instrument, value: float, *labels: str) -> None:
        attributes = {name: label for name, label in zip(instrument.labels, labels, strict=True) if label}
        try:
            self._add[instrument](value, attributes)
        except Exception:  # an exporter's error must not fail a save
            return

    def begin(
        self, name: str, attributes: dict[str, str], ids: dict[str, str], links: Mapping[str, str] = NO_LINKS
    ) -> Token:
        try:
            shown = {**attributes, **ids} if self._ids else attributes
            linked = [self._link(relation, span) for relation, span in links.items()]
            span = self._tracer.start_span(name, attributes=shown, links=linked)
            return span, self._context.attach(self._trace.set_span_in_context(span))
        except Exception:
            return None

    def _link(self, relation: str, span: str) -> Any:
        _, trace_id, span_id, flags = span.split("-")
        context = self._trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=self._trace.TraceFlags(int(flags, 16))
        )
        return self._trace.Link(context, {"perdure.link": relation})

    def span_of(self, token: Token) -> str:
        try:
            context = (self._trace.get_current_span() if token is None else token[0]).get_span_context()
            if not context.is_valid:
                return ""
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        except Exception:
            return ""

    def end(self, token: Token, attributes: Mapping[str, str | int], error: BaseException | None) -> None:
        if token is None:
            return
        span, attached = token
        try:
            self._context.detach(attached)
            span.set_attributes(attributes)
            if isinstance(error, Exception):  # a BaseException is no failure: a run that parks raises one
                span.set_attribute("error.type", metrics.error_type(error))
                span.set_status(self._trace.StatusCode.ERROR)
            span.end()
        except Exception:
            return

    def close(self) -> None:
        """Stop sending to OpenTelemetry. May be called twice."""
        metrics.remove(self)


def _adder(meter: Any, instrument: Instrument) -> Callable[[float, dict[str, str]], None]:
    if not instrument.bounds:
        add: Callable[[float, dict[str, str]], None] = meter.create_counter(
            instrument.name, unit=instrument.unit, description=instrument.description
        ).add
        return add
    histogram = meter.create_histogram(
        instrument.name,
        unit=instrument.unit,
        description=instrument.description,
        explicit_bucket_boundaries_advisory=list(instrument.bounds),
    )
    observe: Callable[[float, dict[str, str]], None] = histogram.record
    return observe
