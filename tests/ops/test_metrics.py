"""Metrics and traces: with the real OpenTelemetry SDK, and over HTTP as Prometheus scrapes them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import apsw
import pytest
from doctor_kit import raw
from metrics_kit import SECRET, Telemetry, scrape
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from tcp_proxy import WireProxy

import perdure
from perdure.storage import metrics
from perdure.testing.postgres_server import PostgresServer


@pytest.fixture(autouse=True)
def _nobody_measures() -> Iterator[None]:
    assert metrics.sink is None
    yield
    assert metrics.sink is None


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry()
    yield made
    made.meters.shutdown()
    made.tracers.shutdown()


def test_saves_and_loads_are_counted_timed_and_sized(url: str, telemetry: Telemetry) -> None:
    system = "sqlite" if "://" not in url else "postgresql"
    installed = perdure.ops.metrics.otel(meter_provider=telemetry.meters, tracer_provider=telemetry.tracers)
    with perdure.open(url) as store:
        thread = store.thread("alice")
        for number in range(3):
            thread.save({"step": number, "secret": SECRET, "text": "x" * 2000})
        thread.load()
        with pytest.raises(perdure.NotFound):
            store.thread("nobody").load()
    installed.close()
    installed.close()
    found = {
        (dict(point.attributes)["operation"], dict(point.attributes).get("error.type")): point.count
        for point in telemetry.points("perdure.operation.duration")
    }
    assert found == {("save", None): 3, ("load", None): 1, ("load", "NotFound"): 1}
    [sizes] = telemetry.points("perdure.save.state_size")
    assert (sizes.count, dict(sizes.attributes)) == (3, {"db.system.name": system})
    assert sizes.sum > 6000
    [stored] = telemetry.points("perdure.save.stored_size")
    assert 0 < stored.sum < sizes.sum
    [commits] = telemetry.points("perdure.commit.duration")
    assert commits.count >= 3
    with perdure.open(url) as store:  # nobody measures any more
        store.thread("alice").save({})
    [sizes] = telemetry.points("perdure.save.state_size")
    assert sizes.count == 3


def test_units_and_names_follow_opentelemetrys_conventions() -> None:
    for what in metrics.INSTRUMENTS:
        assert re.fullmatch(r"perdure(\.[a-z][a-z_]*)+", what.name)
        assert what.unit in ("s", "By", "1") or re.fullmatch(r"\{[a-z]+\}", what.unit)
        assert not what.name.endswith(("_total", "_seconds", "_bytes"))  # the unit says that
    assert len({what.name for what in metrics.INSTRUMENTS}) == len(metrics.INSTRUMENTS)


@perdure.step(name="metrics_look")
def look(what: str) -> str:
    with trace.get_tracer("app", tracer_provider=_tracers[0] if _tracers else None).start_as_current_span(
        "the users own"
    ):
        return what.upper()


@perdure.step(name="metrics_alook")
async def alook(what: str) -> str:
    with trace.get_tracer("app", tracer_provider=_tracers[0] if _tracers else None).start_as_current_span(
        "the users own"
    ):
        return what.upper()


@perdure.effect(name="metrics_send")
def send(what: str) -> str:
    return what


@perdure.durable(name="metrics_agent")
def agent(what: str) -> str:
    return send(look(what))


@perdure.durable(name="metrics_aagent")
async def aagent(what: str) -> list[str]:
    return list(await asyncio.gather(alook(what), alook(what + what)))


@perdure.durable(name="metrics_fails")
def fails(what: str) -> str:
    raise RuntimeError(f"this holds {what}")


_tracers: list[TracerProvider] = []  # empty: nobody traces


@pytest.fixture
def installed(telemetry: Telemetry) -> Iterator[Any]:
    _tracers[:] = [telemetry.tracers]
    made = perdure.ops.metrics.otel(meter_provider=telemetry.meters, tracer_provider=telemetry.tracers)
    yield made
    made.close()


def test_a_run_its_steps_and_what_user_code_traces_inside_are_one_trace(
    url: str, telemetry: Telemetry, installed: Any
) -> None:
    with perdure.open(url) as store:
        assert store.run(agent, SECRET, id="alices-run").result() == SECRET.upper()
    [run] = telemetry.spans("perdure.run")
    [step] = telemetry.spans("perdure.step")
    [effect] = telemetry.spans("perdure.effect")
    [own] = telemetry.spans("the users own")
    assert (step.parent.span_id, effect.parent.span_id) == (run.context.span_id, run.context.span_id)
    assert own.parent.span_id == step.context.span_id
    assert dict(run.attributes) == {"perdure.function": "metrics_agent", "perdure.status": "done"}
    assert dict(step.attributes) == {"perdure.step": "metrics_look", "perdure.step.kind": "step"}
    events = {dict(point.attributes)["event"]: point.value for point in telemetry.points("perdure.run.events")}
    assert events == {"started": 1, "done": 1}
    everything = repr([(span.name, dict(span.attributes or {}), span.events) for span in telemetry.spans()])
    assert SECRET not in everything.lower()
    assert "alices-run" not in everything


async def test_an_async_runs_parallel_steps_are_under_it(url: str, telemetry: Telemetry, installed: Any) -> None:
    async with perdure.open(url) as store:
        run = await store.arun(aagent, "x", id="a")
        assert await run.aresult() == ["X", "XX"]
        await store.thread("t").asave({"n": 1})
        assert (await store.thread("t").aload()).state == {"n": 1}
    [run_span] = telemetry.spans("perdure.run")
    steps = telemetry.spans("perdure.step")
    owns = telemetry.spans("the users own")
    assert [step.parent.span_id for step in steps] == [run_span.context.span_id] * 2
    assert {own.parent.span_id for own in owns} == {step.context.span_id for step in steps}
    assert len(telemetry.spans("perdure.save")) == len(telemetry.spans("perdure.load")) == 1
    assert telemetry.spans("perdure.save")[0].parent is None  # the run's span has been left


def test_an_error_leaves_its_class_and_not_its_text(url: str, telemetry: Telemetry, installed: Any) -> None:
    with perdure.open(url) as store:
        with pytest.raises(perdure.RunFailed):
            store.run(fails, SECRET, id="f").result()
        with pytest.raises(perdure.NotFound):
            store.thread("nobody").load()
    [run] = telemetry.spans("perdure.run")
    assert run.attributes["perdure.status"] == "failed"
    [load] = telemetry.spans("perdure.load")
    assert (load.status.status_code, load.status.description) == (trace.StatusCode.ERROR, None)
    assert load.attributes["error.type"] == "NotFound"
    assert not load.events
    events = {dict(point.attributes)["event"] for point in telemetry.points("perdure.run.events")}
    assert "failed" in events


def test_ids_are_in_spans_only_if_they_are_asked_for(url: str, telemetry: Telemetry) -> None:
    _tracers[:] = [telemetry.tracers]
    made = perdure.ops.metrics.otel(meter_provider=telemetry.meters, tracer_provider=telemetry.tracers, ids=True)
    with perdure.open(url) as store:
        store.thread("alice").save({})
        store.run(agent, "x", id="trip-1").result()
    made.close()
    assert telemetry.spans("perdure.save")[0].attributes["perdure.thread"] == "alice"
    assert telemetry.spans("perdure.step")[0].attributes["perdure.run"] == "trip-1"
    for what in metrics.INSTRUMENTS:  # never in metrics: each id would be a series of its own
        assert "trip-1" not in repr([dict(point.attributes) for point in telemetry.points(what.name)])


def test_an_exporter_that_fails_fails_no_save(tmp_path: Path) -> None:
    class Broken:
        def get_tracer(self, *_: Any, **__: Any) -> Any:
            return self

        def get_meter(self, *_: Any, **__: Any) -> Any:
            return self

        def create_counter(self, *_: Any, **__: Any) -> Any:
            return self

        create_histogram = create_counter

        def start_span(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError

        def add(self, *_: Any, **__: Any) -> None:
            raise RuntimeError

        record = add

    made = perdure.ops.metrics.otel(meter_provider=Broken(), tracer_provider=Broken())
    with perdure.open(str(tmp_path / "b.db")) as store:
        store.thread("t").save({"n": 1})
        assert store.thread("t").load().state == {"n": 1}
    made.close()


# --- Prometheus


def test_prometheus_can_scrape_a_process(url: str) -> None:
    system = "sqlite" if "://" not in url else "postgresql"
    with perdure.ops.metrics.serve() as endpoint:
        assert endpoint.url == f"http://127.0.0.1:{endpoint.port}/metrics"
        before, _ = scrape(endpoint.url)
        assert before["perdure_compactions_total"] == 0
        with perdure.open(url) as store:
            for number in range(5):
                store.thread("alice").save({"number": number, "secret": SECRET})
            store.run(agent, SECRET, id="r").result()
        samples, text = scrape(endpoint.url)
        assert SECRET not in text
        assert "alice" not in text
        labels = f'db_system_name="{system}",error_type="",operation="save"'
        assert samples[f"perdure_operation_duration_seconds_count{{{labels}}}"] == 5
        buckets = [
            value
            for name, value in samples.items()
            if name.startswith("perdure_operation_duration_seconds_bucket") and 'operation="save"' in name
        ]
        assert buckets == sorted(buckets)
        assert buckets[-1] == 5
        assert samples[f'perdure_save_state_bytes_sum{{db_system_name="{system}"}}'] > 100
        assert samples['perdure_run_events_total{event="done"}'] == 1
        port = endpoint.port
        with pytest.raises(perdure.UsageError, match="choose another port"):
            perdure.ops.metrics.serve(port)
    endpoint.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_several_can_measure_at_once(tmp_path: Path, telemetry: Telemetry) -> None:
    installed = perdure.ops.metrics.otel(meter_provider=telemetry.meters, tracer_provider=telemetry.tracers)
    with perdure.ops.metrics.collect() as registry, perdure.open(str(tmp_path / "s.db")) as store:
        store.thread("t").save({"n": 1})
        installed.close()
        store.thread("t").save({"n": 2})
    assert 'perdure_save_state_bytes_count{db_system_name="sqlite"} 2' in registry.text()
    [sizes] = telemetry.points("perdure.save.state_size")
    assert sizes.count == 1


def test_waits_for_the_file_lock_and_for_the_queue_are_measured(tmp_path: Path) -> None:
    path = str(tmp_path / "w.db")
    with perdure.ops.metrics.collect() as registry, perdure.open(path) as one, perdure.open(path) as other:
        one.thread("t").save({})
        text = ""
        for _ in range(50):  # until two of them have met at the lock
            threads = [
                threading.Thread(target=lambda s=store, n=number: [s.thread(f"t{n}").save({"i": i}) for i in range(30)])
                for number, store in enumerate([one, other, one, other])
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            text = registry.text()
            if 'lock="file"' in text and 'lock="queue"' in text:
                break
    assert 'lock="file"' in text
    assert 'lock="queue"' in text
    assert "perdure_commit_jobs_count" in text


def test_a_pool_that_is_too_small_is_seen(postgres_url: str) -> None:
    with perdure.ops.metrics.collect() as registry, perdure.open(postgres_url, pool_size=1) as store:
        threads = [
            threading.Thread(target=lambda n=number: [store.thread(f"t{n}").save({"i": i}) for i in range(20)])
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 'perdure_lock_wait_duration_seconds_count{db_system_name="postgresql",lock="pool"}' in registry.text()


def test_a_timeout_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    with perdure.ops.metrics.collect() as registry, perdure.open(str(path), timeout_s=0.05) as store:
        store.thread("t").save({})
        holder = apsw.Connection(str(path))  # not sqlite3: two SQLites in one process do not see each other's locks
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(perdure.errors.Busy):
            store.thread("t").save({"n": 1})
        holder.execute("ROLLBACK")
        holder.close()
    assert 'perdure_lock_timeouts_total{db_system_name="sqlite"} 1' in registry.text()
    assert 'error_type="Busy"' in registry.text()


def test_a_transaction_that_is_run_again_is_counted(postgres_url: str) -> None:
    """Somebody else's session, as behind a pooler: the prepared statements are gone."""
    with perdure.ops.metrics.collect() as registry, perdure.open(postgres_url, pool_size=1) as store:
        for number in range(8):
            store.thread("t").save({"n": number})
        raw(store, "DEALLOCATE ALL")
        store.thread("t").save({"n": 9})
        assert 'perdure_retries_total{db_system_name="postgresql",reason="plan"}' in registry.text()


def test_a_lost_connection_is_counted(postgres_server: PostgresServer, postgres_url: str) -> None:
    with WireProxy(postgres_server.port) as proxy, perdure.open(proxy.url(postgres_url.rsplit("/", 1)[1])) as store:
        store.thread("t").save({"n": 0})
        with perdure.ops.metrics.collect() as registry:
            proxy.lose(b"t", delivered=False)
            assert store.thread("t").load().state == {"n": 0}
            assert 'perdure_retries_total{db_system_name="postgresql",reason="lost"} 1' in registry.text()


@perdure.effect(name="metrics_doubtful", on_doubt="fail")
def doubtful() -> None:
    raise TimeoutError


@perdure.step(name="metrics_flaky", retries=1, backoff_s=0.001)
def flaky() -> None:
    raise RuntimeError


@perdure.durable(name="metrics_trouble")
def trouble() -> None:
    with contextlib.suppress(RuntimeError):
        flaky()
    doubtful()


@perdure.durable(name="metrics_left")
def left() -> str:
    return "done"


def test_doubts_retries_and_takeovers_are_counted(url: str) -> None:
    with perdure.ops.metrics.collect() as registry, perdure.open(url) as store:
        store.run(trouble, id="t")
        store.start(left, id="l")
        raw(store, "UPDATE run SET status = 'running', owner = 'x', lease_until = 1 WHERE id = 'l'")
        perdure.Worker(store, [left]).run(until_idle=True)
        text = registry.text()
    assert 'perdure_run_events_total{event="in_doubt"} 1' in text
    assert 'perdure_run_events_total{event="taken_over"} 1' in text
    assert "perdure_step_retries_total 1" in text
    assert 'perdure_step_duration_seconds_count{error_type="RuntimeError",kind="step"} 2' in text
    assert 'perdure_step_duration_seconds_count{error_type="TimeoutError",kind="effect"} 1' in text


def test_compactions_are_counted(url: str) -> None:
    with perdure.ops.metrics.collect() as registry, perdure.open(url) as store:
        store.thread("t").save({"n": 1})
        store.ops.compact()
        assert "perdure_compactions_total 1" in registry.text()


class Counted(TypedDict):
    n: int


def test_a_graphs_checkpoints_are_saves(url: str) -> None:
    from langgraph.graph import StateGraph

    from perdure.langgraph import PerdureSaver

    builder = StateGraph(Counted)
    builder.add_node("one", lambda state: {"n": 1})
    builder.set_entry_point("one")
    with perdure.ops.metrics.collect() as registry, PerdureSaver(url) as saver:
        graph = builder.compile(checkpointer=saver)
        graph.invoke({"n": 0}, {"configurable": {"thread_id": "a"}})
        text = registry.text()
    assert re.search(r'perdure_operation_duration_seconds_count\{.*operation="save"\} [1-9]', text)
    assert "perdure_save_state_bytes_count" in text


APP = """
import perdure

@perdure.durable(name="metrics_hello")
def hello() -> str:
    return "hi"
"""


@perdure.durable(name="metrics_hello")
def hello() -> str:
    return "hi"


def test_a_worker_shows_its_metrics(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with perdure.open(str(tmp_path / "w.db")) as store:
        store.start(hello, id="h")
    line = [sys.executable, "-m", "perdure", "worker", "app.py", "--store", "w.db", "--metrics", "0"]
    worker = subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert worker.stderr is not None
    try:
        found = next(match for said in worker.stderr if (match := re.search(r"metrics at (http://\S+)", said)))
        until = time.monotonic() + 60
        while 'perdure_run_events_total{event="done"}' not in scrape(found[1])[0]:
            assert time.monotonic() < until
    finally:
        worker.terminate()
        code = worker.wait(60)
        worker.stderr.close()
    assert code == 0


def test_damage_that_was_worked_around_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "d.db"
    with perdure.open(str(path)) as store:
        for number in range(4):
            store.thread("t").save({"n": number, "text": "x" * 100})
    raw = sqlite3.connect(path)
    raw.execute("UPDATE body SET diff = zeroblob(20), full_text = NULL WHERE id = (SELECT max(id) FROM body)")
    raw.commit()
    raw.close()
    with perdure.ops.metrics.collect() as registry, perdure.open(str(path)) as store:
        assert store.thread("t").load().skipped
        text = registry.text()
    assert 'perdure_recoveries_total{kind="ancestor"} 1' in text
    assert 'perdure_corruptions_total{kind="checkpoint"}' in text


def test_a_keyframe_that_was_rebuilt_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with perdure.open(str(path)) as store:
        thread = store.thread("t")
        for number in range(60):  # random enough that keyframes come, each with the difference that it kept
            thread.save({"n": number, "text": [str(number * k * 7919 % 10007) for k in range(300)]})
    raw = sqlite3.connect(path)
    [(newest,)] = raw.execute("SELECT max(body) FROM record WHERE keyframe = 1 AND base IS NOT NULL")
    raw.execute("UPDATE body SET full_text = zeroblob(40) WHERE id = ?", (newest,))
    raw.commit()
    raw.close()
    with perdure.ops.metrics.collect() as registry, perdure.open(str(path)) as store:
        loaded = store.thread("t").load()
        assert (loaded.state["n"], loaded.skipped) == (59, ())
        assert 'perdure_recoveries_total{kind="keyframe"} 1' in registry.text()
