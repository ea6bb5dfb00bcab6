"""The commands about schedules: schedules; schedule create, pause, resume, trigger, backfill, delete."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import Invocation, command, root, schedule_group, with_store
from perdure.cli.code import callable_with, function_argument, parse_arguments
from perdure.cli.parameters import args_option, since, who_option, yes_option
from perdure.cli.text import local, nearest, plural, readable
from perdure.errors import NotFound
from perdure.values.durations import show_duration

if TYPE_CHECKING:
    from perdure import Schedule, Store

_name = click.argument("name")


@command(root, "Code", "perdure schedules\nperdure schedules --json | jq .upcoming")
@with_store
def schedules(cli: Invocation, store: Store) -> None:
    """List the schedules with their next instants, in local time.

    --json prints a line per schedule, with the next five instants.
    """

    def row(one: Schedule) -> list[str]:
        upcoming = "paused" if one.paused else local(one.upcoming[0]) if one.upcoming else "never"
        return [one.name, one.function, _when(one), upcoming, one.last_run or "", str(one.skipped)]

    names = ("name", "function", "when", "next", "last run", "skipped")
    empty = "no schedules; `perdure schedule create` makes one"
    cli.listing(store.schedules(limit=None), names, row, empty=empty, right=(5,), document=_document)


def _when(one: Schedule) -> str:
    if one.every is not None:
        return f"every {show_duration(one.every)}"
    return f"{one.cron} {one.timezone}" if one.timezone != "UTC" else str(one.cron)


def _document(one: Schedule) -> dict[str, Any]:
    every = None if one.every is None else show_duration(one.every)
    document: dict[str, Any] = readable(one)
    return document | {"every": every}


@command(
    schedule_group,
    "Commands",
    "perdure schedule create nightly app.py:report '0 7 * * MON-FRI' --timezone Europe/Lisbon\n"
    "perdure schedule create sync app.py:sync --every 15m --args '[\"c-42\"]' --overlap queue --catch-up all",
)
@_name
@function_argument
@click.argument("cron", required=False)
@click.option("--every", metavar="TIME", help="Instead of CRON: the interval, such as 15m.")
@args_option
@click.option(
    "--timezone", metavar="ZONE", default="UTC", help="The time zone of CRON, such as Europe/Lisbon (default: UTC)."
)
@click.option("--queue", metavar="NAME", default="default", help="The queue of the runs (default: default).")
@click.option("--priority", metavar="N", type=int, default=0, help="Runs with a higher one are claimed first (0).")
@click.option(
    "--overlap",
    type=click.Choice(("skip", "queue", "cancel")),
    default="skip",
    help="If a run is still open: skip the instant, queue the new run, or cancel the open one (skip).",
)
@click.option(
    "--catch-up",
    type=click.Choice(("none", "last", "all")),
    default="none",
    help="Which instants start late if no worker was there (none).",
)
@click.option(
    "--jitter", metavar="SECONDS", type=float, default=0.0, help="Delay each run by a random time up to this."
)
@click.option("--replace", is_flag=True, help="Change the schedule of this name, if there is one.")
@with_store
def create(
    cli: Invocation,
    store: Store,
    /,
    name: str,
    target: str,
    cron: str | None,
    arguments: str,
    jitter: float,
    **options: Any,
) -> None:
    """Start a function at the times of a cron expression (CRON: minute hour day month weekday), or at an interval.

    Any worker starts the runs, each once. A run's id is NAME@INSTANT.
    """
    args = parse_arguments(arguments)
    schedule = store.schedule(name, callable_with(target, args), cron, args=args, jitter_s=jitter, **options)
    _say(cli, f"{name} starts {schedule.function} {_when(schedule)}", schedule)


def _say(cli: Invocation, text: str, one: Schedule) -> None:
    upcoming = f"; next {', '.join(map(local, one.upcoming))}" if one.upcoming else ""
    cli.result(text + upcoming, _document(one))


def _existing(store: Store, name: str) -> Schedule:
    """Return the schedule of a name. Raises NotFound with the nearest name."""
    try:
        return store.get_schedule(name)
    except NotFound:
        known = [one.name for one in store.schedules(limit=None)]
        raise NotFound(nearest("schedule", name, known, "perdure schedules")) from None


@command(schedule_group, "Commands", "perdure schedule pause nightly")
@_name
@who_option
@with_store
def pause(cli: Invocation, store: Store, name: str, who: str) -> None:
    """Start no more runs until the schedule is resumed. Open runs continue."""
    _say(cli, f"{name} is paused", _existing(store, name).pause(who=who))


@command(schedule_group, "Commands", "perdure schedule resume nightly")
@_name
@who_option
@with_store
def resume(cli: Invocation, store: Store, name: str, who: str) -> None:
    """Continue a paused schedule with its next instant. Instants that passed meanwhile start nothing."""
    _say(cli, f"{name} continues", _existing(store, name).resume(who=who))


@command(schedule_group, "Commands", "perdure schedule trigger nightly")
@_name
@who_option
@with_store
def trigger(cli: Invocation, store: Store, name: str, who: str) -> None:
    """Start a run now, also if the schedule is paused."""
    run = _existing(store, name).trigger(who=who)
    cli.result(f"{run.id} is queued: a worker will run it", run=run.id, status=run.status)


@command(
    schedule_group,
    "Commands",
    "perdure schedule backfill nightly 7d\nperdure schedule backfill nightly 2026-01-01 2026-02-01",
)
@_name
@click.argument("first", type=since, metavar="SINCE")
@click.argument("last", type=since, metavar="[UNTIL]", required=False)
@who_option
@with_store
def backfill(cli: Invocation, store: Store, name: str, first: datetime, last: datetime | None, who: str) -> None:
    """Start the runs of past instants that have none, from SINCE on and before UNTIL (default: now).

    Write a time as an ISO date, or as how long ago it was: 2h, 7d.
    """
    from datetime import UTC

    runs = _existing(store, name).backfill(first, last or datetime.now(UTC), who=who)
    cli.result(f"{plural(len(runs), 'run')} queued", schedule=name, runs=runs)


@command(schedule_group, "Commands", "perdure schedule delete nightly --yes")
@_name
@who_option
@yes_option
@with_store
def delete(cli: Invocation, store: Store, name: str, who: str, yes: bool) -> None:
    """Delete a schedule; its runs stay."""
    schedule = _existing(store, name)
    cli.confirm(f"Delete schedule {name!r}?", yes=yes)
    schedule.delete(who=who)
    cli.result(f"deleted {name}", schedule=name, deleted=True)
