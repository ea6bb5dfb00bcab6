"""Spans of runs: linked to what started them and to the execution before, and what they say of models and tools."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metrics_kit import Telemetry

import perdure


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry()
    installed = perdure.ops.metrics.otel(meter_provider=made.meters, tracer_provider=made.tracers)
    yield made
    installed.close()
    made.meters.shutdown()
    made.tracers.shutdown()


@perdure.durable(name="traces.child")
def child() -> str:
    return "child"


@perdure.durable(name="traces.agent")
def agent() -> str:
    answer = perdure.ask("Go on?")
    perdure.spawn(child, id="child")
    return str(answer)


def links(span: Any) -> dict[str, int]:
    """The spans to which a span is linked, by what they are to it."""
    return {link.attributes["perdure.link"]: link.context.span_id for link in span.links}


@pytest.mark.parametrize("how", ["start", "run"])
def test_a_run_links_to_the_span_that_started_it_and_to_its_execution_before(
    url: str, telemetry: Telemetry, how: str
) -> None:
    tracer = telemetry.tracers.get_tracer("app")
    with perdure.open(url) as store:
        with tracer.start_as_current_span("request") as request:
            (store.start if how == "start" else store.run)(agent, id="r")
        asked = request.get_span_context()
        worker = perdure.Worker(store)
        worker.run(until_idle=True)
        store.answer("r", "yes")
        worker.run(until_idle=True)
        assert store.get_run("r").result() == "yes"
        assert store.ops.verify().ok
    runs = telemetry.spans("perdure.run")
    first, second = [span for span in runs if span.attributes["perdure.function"] == "traces.agent"]
    assert links(first) == {"started": asked.span_id}
    assert first.links[0].context.trace_id == asked.trace_id
    assert links(second) == {"started": asked.span_id, "resumed": first.context.span_id}
    [born] = [span for span in runs if span.attributes["perdure.function"] == "traces.child"]
    assert links(born) == {"started": second.context.span_id}


async def test_async_runs_link_too_and_moves_and_backups_keep_the_links(
    url: str, telemetry: Telemetry, tmp_path: Path
) -> None:
    with telemetry.tracers.get_tracer("app").start_as_current_span("request") as request:
        async with perdure.open(url) as store:
            await store.astart(agent, id="r")
            await store.ops.atransfer(tmp_path / "other.db")
    with perdure.open(tmp_path / "other.db") as other:
        perdure.Worker(other).run(until_idle=True)
    [span] = telemetry.spans("perdure.run")
    assert links(span) == {"started": request.get_span_context().span_id}


def test_without_a_span_or_without_tracing_nothing_is_stored(url: str, telemetry: Telemetry) -> None:
    with perdure.open(url) as store:
        store.start(agent, id="r")
        perdure.Worker(store).run(until_idle=True)
    [span] = telemetry.spans("perdure.run")
    assert links(span) == {}


def test_spans_are_stored_encrypted(tmp_path: Path, telemetry: Telemetry) -> None:
    with (
        telemetry.tracers.get_tracer("app").start_as_current_span("request") as request,
        perdure.open(tmp_path / "a.db", keys=os.urandom(32)) as store,
    ):
        store.start(agent, id="r")
        perdure.Worker(store).run(until_idle=True)
        trace_id = f"{request.get_span_context().trace_id:032x}".encode()
        assert trace_id not in (tmp_path / "a.db").read_bytes() + (tmp_path / "a.db-wal").read_bytes()
        assert store.ops.verify().ok
    assert links(telemetry.spans("perdure.run")[0])["started"] == request.get_span_context().span_id


# --- models and tools


ANSWERS: dict[str, Any] = {
    "openai": {"model": "gpt-5-2026-10-01", "usage": {"prompt_tokens": 12, "completion_tokens": 7}},
    "anthropic": {"model": "claude-sonnet-5", "usage": {"input_tokens": 12, "output_tokens": 7}},
    "langchain": {
        "usage_metadata": {"input_tokens": 12, "output_tokens": 7},
        "response_metadata": {"model_name": "gpt-5"},
    },
}


@perdure.step(name="traces.think")
def think(provider: str, model: str) -> Any:
    return ANSWERS[provider]


@perdure.effect(name="traces.book")
def book(flight: str, key: perdure.IdempotencyKey) -> str:
    return f"booked {flight}"


@perdure.durable(name="traces.with_tools")
def with_tools(provider: str) -> Any:
    think(provider, model="asked-for")
    return perdure.tools({"book": book}).call([{"id": "call-1", "name": "book", "arguments": {"flight": "LIS"}}])


@pytest.mark.parametrize("provider", ANSWERS)
def test_a_step_that_returns_a_models_answer_has_the_attributes_of_generative_ai(
    tmp_path: Path, telemetry: Telemetry, provider: str
) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        store.run(with_tools, provider).result()
    [step] = telemetry.spans("perdure.step")
    ours = {name: value for name, value in step.attributes.items() if name.startswith("gen_ai.")}
    assert ours.pop("gen_ai.response.model").startswith(("gpt-5", "claude"))
    assert ours == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "asked-for",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 7,
    }


def test_a_tool_call_names_its_tool_and_no_argument(tmp_path: Path, telemetry: Telemetry) -> None:
    with perdure.open(tmp_path / "a.db") as store:
        store.run(with_tools, "openai").result()
    [effect] = telemetry.spans("perdure.effect")
    assert dict(effect.attributes) == {
        "perdure.step": "traces.book",
        "perdure.step.kind": "effect",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "book",
    }
