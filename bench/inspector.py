"""The web inspector beside a store of 100,000 runs and 1,000,000 checkpoints, on SQLite and PostgreSQL.

A real server process and a real browser. `PAGES` names the pages that are timed; one that the inspector does not have is
left out. Runs, threads and checkpoints are rows made by SQL (`bench/listings.py`); the long run, the long thread and the
large state are real. The cost for writers is the CPU time of saves in two stores in turns, of which one has an open page:
on a machine with few cores their duration would mostly say how busy the server and the browser are.
"""

from __future__ import annotations

import gzip
import http.client
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import apsw
import psycopg
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

import perdure
from bench.listings import START_US, fill_postgres, fill_sqlite, p95
from bench.measure import Row, Run, compare, milliseconds, seconds
from bench.steps import many
from perdure.testing.postgres_server import PostgresServer

RUNS, CHECKPOINTS, LONG = 100_000, 1_000_000, 10_000
# What is timed: a page, its path, and its bar in milliseconds. `{step}` is anywhere in the long thread.
PAGES = (
    ("inbox", "/", 100),
    ("runs", "/runs", 100),
    ("runs: a status", "/runs?status=failed", 100),
    ("threads", "/threads", 100),
    ("run of 10,000 steps", "/runs/long", 100),
    ("run of 10,000 steps, one of them chosen", "/runs/long?step={step}", 100),
    ("100 steps of it, while scrolling", "/api/runs/long?part=steps&from={step}", 100),
    ("scrubber move in 10,000 checkpoints", "/threads/long?at={step}", 100),
    ("state of 1 MB, as a chat", "/threads/large", 300),
    ("state of 1 MB, as a tree", "/threads/large?view=tree", 300),
    ("teams", "/teams", 100),
    ("memory", "/memory", 100),
    ("snapshots", "/snapshots", 100),
    ("schedules", "/schedules", 100),
    ("deployments", "/deployments", None),
    ("workers", "/workers", 100),
    ("health", "/health", None),
)
_RECORDS = """INSERT INTO record (tenant, tree, id, thread, parent, base, keyframe, key, kind, at, step, note, metadata,
    size, cost, hash, skip, body) {numbers} SELECT 1, k, k - j, k, NULL, NULL, 1, k - j, 'save', {start} + k * 1000000,
    {last} - j, NULL, NULL, 100, 0, {hash}, NULL, NULL FROM made, ({counted}) AS parts"""  # thread k has its head at k


def inspector(run: Run) -> list[Row]:
    rows: list[Row] = []
    with PostgresServer(fsync=False) as server, _browser() as browser:
        for name, url in (("SQLite", str(run.folder / "a.db")), ("PostgreSQL", server.create_database("inspected"))):
            perdure.open(url, durability="normal").close()
            _fill(url, run.count(RUNS, 300), run.count(CHECKPOINTS, 3000), run.count(LONG, 300))
            rows += [_named(row, name) for row in _measure(url, browser, run)]
        pair = [str(run.folder / f"writer-{letter}.db") for letter in "ab"]
        rows.append(_cost(pair, browser, run.count(2000, 40)))
    return rows


def _named(row: Row, database: str) -> Row:
    return Row(f"{database}: {row.name}", row.ours, row.unit, bar=row.bar, judged="ours", note=row.note)


# --- the store


def _fill(url: str, runs: int, checkpoints: int, long: int) -> None:
    is_postgres = url.startswith("postgresql")
    (fill_postgres if is_postgres else fill_sqlite)(url, runs)
    each = checkpoints // runs
    if is_postgres:
        numbers, counted = (
            f"WITH made AS (SELECT generate_series(1, {runs}::bigint) AS k)",
            "SELECT generate_series(0, {each} - 1) AS j",
        )
        counted = counted.format(each=each)
        text = _RECORDS.format(numbers=numbers, start=START_US, hash="'h'::bytea", counted=counted, last=each)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET search_path = perdure; SET synchronous_commit = off")
            connection.execute(text.encode())
            connection.execute("VACUUM ANALYZE record")
    else:
        numbers = f"WITH RECURSIVE made (k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM made WHERE k < {runs})"
        counted = " UNION ALL ".join(f"SELECT {number} AS j" for number in range(each))
        connection_ = apsw.Connection(url)
        connection_.execute("PRAGMA synchronous = OFF")
        connection_.execute(_RECORDS.format(numbers=numbers, start=START_US, hash="x'68'", counted=counted, last=each))
        connection_.close()
    with perdure.open(url, durability="normal") as store:
        store.run(many, long, id="long")
        thread = store.thread("long")
        for number in range(long):
            thread.save({"n": number, "text": "x" * 100})
        store.thread("large").save({"messages": [{"role": "user", "content": f"{n} " * 60} for n in range(4000)]})
        store.snapshot("before")
        thread.save({"n": -1})


# --- a server and a browser


@contextmanager
def _served(url: str) -> Iterator[tuple[str, int]]:
    """Serve a store, and return the link and the process."""
    line = [sys.executable, "-m", "perdure", "inspect", url, "--port", "0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.send_signal(signal.SIGINT)


@contextmanager
def _browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise RuntimeError("this benchmark needs a browser: sudo apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class _Client:
    """Asks for pages over one connection, after the link was followed."""

    def __init__(self, link: str) -> None:
        parts = urlsplit(link)
        self.connection = http.client.HTTPConnection(parts.netloc)
        self.connection.request("GET", f"/?{parts.query}")
        answer = self.connection.getresponse()
        answer.read()
        self.headers = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            self.connection.request("GET", path, headers=self.headers)
            answer = self.connection.getresponse()
        except http.client.RemoteDisconnected:  # the server ended a connection that was idle
            return self.get(path)
        return answer.status, answer.read()


def _cpu_s(process: int) -> float:
    """Return the CPU time that a process took so far: it says more than a duration on a busy machine."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _measure(url: str, browser: Browser, run: Run) -> Iterator[Row]:
    long, rounds, chance = run.count(LONG, 300), run.count(100, 5), random.Random(1)
    with _served(url) as (link, process), perdure.open(url) as store:
        client = _Client(link)
        cold = milliseconds([seconds(lambda: client.get("/runs/long"))])
        yield Row("run of 10,000 steps, the first request of a server", cold, "ms", note="once")

        def ask(path: str) -> Callable[[], object]:
            return lambda: client.get(path.format(step=chance.randrange(long)))

        for name, path, bar in PAGES:
            status, page = client.get(path.format(step=0))
            if status != 200:
                if b"There is no such page" in page:
                    continue
                raise RuntimeError(f"{path}: {status}")
            before = _cpu_s(process)
            took = p95(ask(path), rounds)
            cpu = (_cpu_s(process) - before) * 1000 / rounds
            yield Row(f"{name}, server", took, "ms", bar=bar, note=f"p95; {cpu:.0f} ms of CPU each")
        context = browser.new_context()
        context.new_page().goto(link)
        own = link.partition("/?")[0]
        if client.get("/runs/long")[0] == 200:
            yield from _long_run(context, f"{own}/runs/long", run.count(5, 1))
        seen = _seen(context, own, store, run.count(40, 2))
        median = f"p95; median {seen[len(seen) // 2]:.0f}"
        yield Row("commit to browser", seen[int(len(seen) * 0.95)], "ms", bar=600, note=median)
        yield Row(
            "page, style, scripts, icons: gzip", _bytes(client) / 1000, "KB", bar=60, note="the run page, or the inbox"
        )
        context.close()


def _long_run(context: BrowserContext, url: str, rounds: int) -> Iterator[Row]:
    paints, frames = [], []
    for _ in range(rounds):
        page = context.new_page()
        page.goto(url)
        page.locator("#live.on").wait_for(state="attached")
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        paints.append(page.evaluate(f"{paint} - performance.getEntriesByType('navigation')[0].requestStart"))
        frames.append(page.evaluate(_SCROLL))
        page.close()
    yield Row("run of 10,000 steps, first paint", sorted(paints)[rounds // 2], "ms", bar=500, note="median")
    yield Row(
        "run of 10,000 steps, slowest frame", sorted(frames)[rounds // 2], "ms", bar=50, note="while scrolling; median"
    )


_SCROLL = """() => new Promise(done => {
    const part = document.querySelector(".steps") || document.scrollingElement;
    let last = performance.now(), slowest = 0, count = 0;
    const frame = now => {
        if (count > 2) slowest = Math.max(slowest, now - last);
        last = now;
        part.scrollTop += 400;
        if (++count < 120) requestAnimationFrame(frame); else done(slowest);
    };
    requestAnimationFrame(frame);
})"""


def _seen(context: BrowserContext, own: str, store: perdure.Store, rounds: int) -> list[float]:
    """Return the times from a commit until an open page shows it, in milliseconds, the shortest first."""
    page: Page = context.new_page()
    page.goto(f"{own}/workers")
    page.locator("#live.on").wait_for(state="attached")
    times = []
    for number in range(rounds):
        page.evaluate(
            """text => { window.seen = new Promise(done => {
                const look = () => document.body.textContent.includes(text) && done(Date.now());
                new MutationObserver(look).observe(document.body, {childList: true, subtree: true}); look(); }); }""",
            f"queue-{number:04}",
        )
        store.start(many, 0, queue=f"queue-{number:04}")
        committed = time.time() * 1000
        times.append(page.evaluate("window.seen") - committed)
        time.sleep(random.random() / 4)  # the poller must not be met at the same moment each time
    page.close()
    return sorted(times)


def _bytes(client: _Client) -> int:
    status, html = client.get("/runs/long")
    html = html if status == 200 else client.get("/")[1]
    assets = {*re.findall(r'(?:href|src)="(/static/[^"#]+)', html.decode())}
    return sum(len(gzip.compress(part)) for part in (html, *(client.get(path)[1] for path in sorted(assets))))


def _cost(urls: list[str], browser: Browser, rounds: int) -> Row:
    """Compare saves in a store that has an open page with saves in one that has none."""
    with perdure.open(urls[0]) as watched, perdure.open(urls[1]) as alone, _served(urls[0]) as (link, _):
        states = iter(range(10**9))
        page = browser.new_page()
        page.goto(link)
        page.locator("#live.on").wait_for(state="attached")

        def save(store: perdure.Store) -> Callable[[], object]:
            thread = store.thread("t")
            return lambda: thread.save({"n": next(states)})

        cpu = compare(rounds, save(watched), save(alone), time.process_time)
        wall = compare(rounds, save(watched), save(alone))
        page.close()
    return Row(
        "a save beside an open page: CPU of the writer", cpu.ours, "ms", floor=cpu.floor, ratio=cpu.ratio, bar=1.01,
        note=f"95 % interval {cpu.interval}; its duration: {wall.interval}",
    )  # fmt: skip
