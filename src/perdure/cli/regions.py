"""`perdure store replicate` and `perdure store promote`: a second region."""

from __future__ import annotations

import time
from datetime import timedelta

import click

from perdure.cli.base import Invocation, command, store_group
from perdure.cli.parameters import duration, yes_option
from perdure.cli.text import complain, local, plural, readable
from perdure.errors import Busy, DiskFull, OutcomeUnknown, Unavailable


@command(
    store_group,
    "Backup",
    "perdure store replicate postgresql://app@eu/app postgresql://app@us/app\n"
    "perdure store replicate agent.db /mnt/b/agent.db --every 1m\n"
    "perdure store replicate postgresql://app@eu/app postgresql://app@us/app --once",
    names_stores=True,
)
@click.argument("source")
@click.argument("target")
@click.option("--every", metavar="TIME", type=duration, default="10s", help="Start a round this often (default 10s).")
@click.option("--once", is_flag=True, help="Exit after one round.")
@click.pass_obj
def replicate(cli: Invocation, source: str, target: str, every: timedelta, once: bool) -> None:
    """Replicate a store into another, round after round.

    Each round takes a snapshot of SOURCE and copies the changes to TARGET in one transaction. If a round is killed, the
    next one continues. TARGET must be empty before the first round. It can be read, and refuses other writes. --schema
    applies to both.
    """
    from perdure.regions import replicate as one_round

    with cli.open(source) as here, cli.open(target, create=True) as there:
        while True:
            start = time.monotonic()
            try:
                done = one_round(here, there)
            except (Busy, DiskFull, OutcomeUnknown, Unavailable) as error:
                if once:
                    raise
                complain(f"{error} The next round tries again.")
            else:
                if cli.json:
                    cli.json_line(readable(done))
                else:
                    text = f"{plural(done.written, 'row')} written in {time.monotonic() - start:.1f} s"
                    cli.line(f"the target holds the source as of {local(done.taken_at)}", text)
            if once:
                return
            time.sleep(max(0.0, every.total_seconds() - (time.monotonic() - start)))


@command(store_group, "Backup", "perdure store promote postgresql://app@us/app --yes", names_stores=True)
@click.argument("target")
@yes_option
@click.pass_obj
def promote(cli: Invocation, target: str, yes: bool) -> None:
    """Promote a replica: it takes writes from now on and replaces the lost source.

    The replica holds the source as of its last round. Promotion starts a new era: processes that worked with the source
    cannot write to the replica. Runs that were running are queued; what they did after that round is in doubt. Stop the
    source's workers first: promotion does not stop a source that still runs.
    """
    from perdure.regions import promote as make_primary

    cli.confirm(f"Promote {target!r}?", yes=yes)
    with cli.open(target) as store:
        done = make_primary(store)
    cli.result(
        f"promoted: the store as of {local(done.taken_at)}, era {done.era}; "
        f"{plural(done.requeued, 'run')} queued again: start workers",
        done,
    )
