"""The commands that examine what is stored: snapshot incident, audit, export-dataset, store sql, store parquet."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import NO, OK, Invocation, command, root, snapshot_group, store_group, with_store
from perdure.cli.parameters import public_key_option, retain_option, sign_option
from perdure.cli.runs import existing_run
from perdure.cli.text import local, plural, readable
from perdure.errors import UsageError
from perdure.values.safe_repr import shown

if TYPE_CHECKING:
    from perdure import Store
    from perdure.forensics import Frame

_SHOWN = 16  # characters of a hash
_WIDTH = 1000


@command(
    snapshot_group,
    "Commands",
    "perdure snapshot incident friday trip-42\nperdure snapshot incident friday trip-42 --blame cart.total",
)
@click.argument("name")
@click.argument("run")
@click.option("--blame", metavar="PATH", help="Show only steps that changed this path of the state: cart.0.price.")
@click.option("--good", metavar="RUN", help="With --blame: only steps after which the path differs from this good run.")
@click.option("--states", is_flag=True, help="Also show the whole state after each step.")
@with_store
def incident(
    cli: Invocation, store: Store, name: str, run: str, blame: str | None, good: str | None, states: bool
) -> None:
    """Show, step by step, what led to the failure of a run in a snapshot.

    Shows for each step its result, the arguments of an effect, the changes of the state since the step before, the
    sources of the prompt if they were recorded, and the traceback of a failure. --json prints the run, then a line per
    step with its state.
    """
    from perdure.forensics import incident as incident_of

    if good is not None and blame is None:
        raise UsageError("--good needs --blame PATH: name the path of the state that is wrong")
    snapshot = store.get_snapshot(name)
    report = incident_of(snapshot, run)
    if cli.json:
        cli.json_line(readable(report))
    else:
        cli.line(f"{run}: {report.run.status}{': ' + report.error if report.error else ''}")
    if blame is None and not cli.json:
        parts = (report.environment or {}).items()
        environment = {name: len(value) if name == "packages" else value for name, value in parts}
        cli.lines_below(*(report.traceback or "").splitlines(), *_named(environment))
    frames = report if blame is None else report.blame(blame, incident_of(snapshot, good) if good else None)
    for frame in frames:
        _print_frame(cli, frame, states)
    if not frames and blame is not None:
        changed = "changed" if good is None else "made a difference at"
        cli.message(f"no step {changed} {blame}; --states shows the state")


def _print_frame(cli: Invocation, frame: Frame, states: bool) -> None:
    if cli.json:
        return cli.json_line(readable(frame))
    step = frame.step
    path = "" if step.path == str(step.number) else f" ({step.path})"
    cli.line(f"{step.number}{path}  {step.kind}  {step.name}  {step.status}: {step.error or shown(step.result, 100)}")
    parts = {"arguments": frame.arguments, "context": frame.context, "state": frame.state if states else None}
    return cli.lines_below(*frame.changes, *_named(parts), *(frame.traceback or "").splitlines())


def _named(parts: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {shown(value, _WIDTH)}" for name, value in parts.items() if value is not None]


@command(
    root,
    "Runs",
    "perdure audit trip-42\nperdure audit trip-42 --write trip-42.head --sign audit.pem\n"
    "perdure audit trip-42 --check trip-42.head --key audit.pub",
)
@click.argument("run")
@click.option("--thread", is_flag=True, help="RUN is the name of a thread: audit its checkpoints.")
@click.option("--write", metavar="HEAD", help="Write the head of the chain to this file or object.")
@retain_option
@sign_option
@click.option("--check", metavar="HEAD", help="Compare with a head that was written earlier.")
@public_key_option
@with_store
def audit(
    cli: Invocation,
    store: Store,
    run: str,
    thread: bool,
    write: str | None,
    retain_until: datetime | None,
    sign: str | None,
    check: str | None,
    key: str | None,
) -> int:
    """Print the history of a run as a chain of hashes, or check that it was not rewritten.

    Each hash covers its entry and the hash before it. --check lists the entries that were changed, removed or added
    since --write, and exits with 1 if there are any. --json prints a line per entry.
    """
    from perdure.forensics import audit_run, audit_thread
    from perdure.transfers.files import local_file

    if sign and not write:
        raise UsageError("--sign signs the head that --write writes: give both")
    if retain_until and not write:
        raise UsageError("--retain-until locks the head that --write writes: give both")
    if not thread:
        existing_run(store, run)
    chain = audit_thread(store, run) if thread else audit_run(store, run)
    count = plural(len(chain.entries), "entry", "entries")
    if check is not None:
        with local_file(check) as path:
            problems = chain.check(path.read_bytes(), key)
        text = "; ".join(problems) or f"no history was rewritten: {count}"
        cli.result(text, name=run, rewritten=problems)
        return NO if problems else OK
    if write is not None:
        _write_head(write, chain.head(sign), retain_until)
        head = chain.entries[-1].hash if chain.entries else ""
        cli.result(f"wrote {write}: {count}", name=run, head=head, file=write)
        return OK
    cli.listing(
        chain.entries,
        ("entry", "kind", "time", "hash", "name"),
        lambda one: [one.place, one.kind, local(one.at), one.hash[:_SHOWN], one.name],
        empty=f"{run} has no history yet",
    )
    if chain.problem is not None:
        cli.message(chain.problem)
    return OK if chain.problem is None else NO


def _write_head(place: str, data: bytes, retain_until: datetime | None) -> None:
    """Write a head to a file, which may exist, or to a new object."""
    from perdure.storage.objects import is_object_url
    from perdure.transfers.files import AtomicFile

    if retain_until is None and not is_object_url(place):
        Path(place).write_bytes(data)
        return
    with AtomicFile(place, retain_until=retain_until) as file:
        file.part.write_bytes(data)
        file.commit()


@command(
    root,
    "Stores",
    "perdure export-dataset > chats.jsonl\n"
    "perdure export-dataset --snapshot nightly --redact '[\\w.]+@[\\w.]+' --redact '\\+\\d{6,}' > chats.jsonl",
)
@click.option("--snapshot", metavar="NAME", help="Export the data as it was at this snapshot.")
@click.option("--redact", metavar="REGEX", multiple=True, help="Replace matches by [redacted] (may be repeated).")
@with_store
def export_dataset(cli: Invocation, store: Store, snapshot: str | None, redact: tuple[str, ...]) -> None:
    """Print the conversations and runs of a tenant as chat data, a JSON document per line.

    Each document has the messages in OpenAI's format, with tool calls and their results, and the outcome. Threads
    without messages are skipped.
    """
    import re

    from perdure.forensics import export_dataset

    try:
        patterns = [re.compile(pattern) for pattern in redact]
    except re.error as error:
        raise UsageError(f"--redact {error.pattern!r} is not a regular expression: {error}") from error
    source = store if snapshot is None else store.get_snapshot(snapshot)
    redacted = partial(reduce, lambda text, pattern: pattern.sub("[redacted]", text), patterns)
    for document in export_dataset(source, redact=redacted):
        cli.json_line(document)


_snapshot_option = click.option("--snapshot", metavar="NAME", help="Use the data as it was at this snapshot.")
_reveal_option = click.option("--reveal", is_flag=True, help="Show secrets, which are masked otherwise.")


@command(
    store_group,
    "Inspect",
    'perdure store sql "SELECT status, count(*) FROM runs GROUP BY status"\n'
    "perdure store sql \"SELECT thread, state->>'city' AS city FROM states\" --parquet cities.parquet\n"
    "perdure store sql",
    name="sql",
)
@click.argument("query", required=False)
@click.option("--parquet", metavar="FILE", help="Write the result to this file, as Parquet.")
@_snapshot_option
@_reveal_option
@click.option("--files", is_flag=True, help="Let the query read files too: read_parquet('…').")
@click.pass_obj
def store_sql(
    cli: Invocation, query: str | None, parquet: str | None, snapshot: str | None, reveal: bool, files: bool
) -> None:
    """Query threads, checkpoints, states, runs, steps and memory of a tenant with SQL.

    QUERY is one SELECT of DuckDB's SQL. Without it, prints the tables and their columns. States, arguments, results
    and items are JSON. DuckDB works on copies in memory: the store is opened read-only, and the query reaches neither
    files nor the network unless --files lets it read files.
    """
    from perdure.forensics import export_parquet, sql, sql_tables

    if query is None:
        with cli.open(read_only=True):  # a wrong store is refused, as by a query
            pass
        rows = [(table, name, kind) for table, columns in sql_tables().items() for name, kind in columns.items()]
        return cli.listing(
            rows,
            ("table", "column", "type"),
            lambda row: row,
            empty="",
            document=lambda row: dict(zip(("table", "column", "type"), row, strict=True)),
        )
    with cli.open(read_only=True) as store:
        source = store if snapshot is None else store.get_snapshot(snapshot)
        if parquet is not None:
            [count] = export_parquet(source, parquet, query=query, reveal=reveal, files=files).values()
            return cli.result(f"wrote {parquet}: {plural(count, 'row')}", file=parquet, rows=count)
        answer = sql(source, query, reveal=reveal, files=files)
    return cli.listing(
        answer.rows,
        answer.columns,
        lambda row: ["" if value is None else str(value) for value in row],
        empty="no rows",
        document=lambda row: readable(dict(zip(answer.columns, row, strict=True))),
    )


@command(
    store_group,
    "Inspect",
    "perdure store parquet tables/\nperdure store parquet tables/ --snapshot nightly --tenant acme",
    name="parquet",
)
@click.argument("folder")
@_snapshot_option
@_reveal_option
@click.pass_obj
def store_parquet(cli: Invocation, folder: str, snapshot: str | None, reveal: bool) -> None:
    """Write threads, checkpoints, states, runs, steps and memory of a tenant as Parquet files.

    Writes a file per table into FOLDER, and replaces files of the same names. `perdure store sql` prints the columns.
    """
    from perdure.forensics import export_parquet

    with cli.open(read_only=True) as store:
        source = store if snapshot is None else store.get_snapshot(snapshot)
        counts = export_parquet(source, folder, reveal=reveal)
    text = ", ".join(f"{name} ({plural(count, 'row')})" for name, count in counts.items())
    cli.result(f"wrote {folder}: {text}", folder=folder, rows=counts)
