"""The commands that give history away, or prove it: snapshot bundle, snapshot check, audit, export-dataset."""

from __future__ import annotations

from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import NO, OK, Invocation, command, root, snapshot_group, with_store
from perdure.cli.parameters import namespaces_option, threads_option
from perdure.cli.runs import existing_run
from perdure.cli.text import local, plural, readable, size
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store

_SHOWN = 16  # characters of a hash
_key = click.option("--key", metavar="FILE", help="The public key (PEM) that must have signed it.")
_sign = click.option("--sign", metavar="FILE", help="Sign it with this private Ed25519 key (PEM).")


@command(
    snapshot_group,
    "Commands",
    "perdure snapshot bundle before-deploy incident.db\n"
    "perdure snapshot bundle before-deploy s3://bucket/incident.db --thread 'support-*' --sign audit.pem\n"
    "perdure snapshot bundle tuesday tuesday.db --since monday",
)
@click.argument("name")
@click.argument("file")
@threads_option
@click.option("--run", "runs", metavar="PATTERN", multiple=True, help="Only these runs (may be repeated).")
@namespaces_option
@click.option("--since", metavar="NAME", help="Of that, only what has changed since this older snapshot.")
@_sign
@with_store
def bundle(cli: Invocation, store: Store, /, name: str, file: str, **parts: Any) -> None:
    """Copy a snapshot into a file that can be given away: what this tenant had, or a part of it.

    FILE is a path or an object (s3://bucket/NAME), and is not there yet.
    """
    from perdure import transfer

    chosen = {option: given or None for option, given in parts.items()}
    made = transfer(store.get_snapshot(name), file, **chosen)
    cli.result(f"bundled {name}: {made.place}, {size(made.bytes)}, BLAKE3 {made.blake3}", readable(made))


@command(
    snapshot_group, "Commands", "perdure snapshot check incident.db --key audit.pub", name="check", names_stores=True
)
@click.argument("file")
@_key
@click.pass_obj
def check_(cli: Invocation, file: str, key: str | None) -> None:
    """Check a bundle: no byte of it has changed, and who signed it. Opens no store.

    Exit code 4 if it was changed, or another key signed it.
    """
    from perdure.snapshots import check_bundle

    found = check_bundle(file, key)
    signer = "not signed" if found.key is None else f"signed by {found.key}"
    cli.result(f"unchanged: snapshot {found.snapshot} of tenant {found.tenant}, {signer}", readable(found))


@command(
    root,
    "Runs",
    "perdure audit trip-42\nperdure audit trip-42 --write trip-42.head --sign audit.pem\n"
    "perdure audit trip-42 --check trip-42.head --key audit.pub",
)
@click.argument("run")
@click.option("--thread", is_flag=True, help="RUN is a thread: its chain of checkpoints.")
@click.option("--write", metavar="HEAD", help="Write the head of the chain to this file.")
@_sign
@click.option("--check", metavar="HEAD", help="Compare with a head that was written earlier.")
@_key
@with_store
def audit(
    cli: Invocation,
    store: Store,
    run: str,
    thread: bool,
    write: str | None,
    sign: str | None,
    check: str | None,
    key: str | None,
) -> int:
    """Print the history of a run as a chain of hashes, or check that it was not rewritten.

    Each hash covers the one before it and the entry. --check names the entries that were changed, removed or added
    since, with exit code 1. --json prints a line per entry.
    """
    from perdure.snapshots import audit_run, audit_thread

    if sign and not write:
        raise UsageError("--sign signs the head that --write writes: give both")
    if not thread:
        existing_run(store, run)
    found = audit_thread(store, run) if thread else audit_run(store, run)
    count = plural(len(found.entries), "entry", "entries")
    if check is not None:
        problems = found.check(Path(check).read_bytes(), key)
        text = "; ".join(problems) or f"no history was rewritten: {count}"
        cli.result(text, name=run, rewritten=problems)
        return NO if problems else OK
    if write is not None:
        Path(write).write_bytes(found.head(sign))
        head = found.entries[-1].hash if found.entries else ""
        cli.result(f"wrote {write}: {count}", name=run, head=head, file=write)
        return OK
    cli.listing(
        found.entries,
        ("entry", "kind", "time", "hash", "name"),
        lambda one: [one.place, one.kind, local(one.at), one.hash[:_SHOWN], one.name],
        empty=f"{run} has no history yet",
    )
    if found.problem is not None:
        cli.message(found.problem)
    return OK if found.problem is None else NO


@command(
    root,
    "Stores",
    "perdure export-dataset > chats.jsonl\n"
    "perdure export-dataset --snapshot nightly --redact '[\\w.]+@[\\w.]+' --redact '\\+\\d{6,}' > chats.jsonl",
)
@click.option("--snapshot", metavar="NAME", help="As it was at this snapshot.")
@click.option("--redact", metavar="REGEX", multiple=True, help="Replace its matches by [redacted] (may be repeated).")
@with_store
def export_dataset(cli: Invocation, store: Store, snapshot: str | None, redact: tuple[str, ...]) -> None:
    """Print the conversations and runs of a tenant as chat data, a JSON document per line.

    Each has its messages in OpenAI's format, with tool calls and their results, and its outcome. Threads without
    messages are passed over.
    """
    import re

    from perdure.snapshots import export_dataset

    try:
        patterns = [re.compile(pattern) for pattern in redact]
    except re.error as error:
        raise UsageError(f"--redact {error.pattern!r} is no regular expression: {error}") from error
    source = store if snapshot is None else store.get_snapshot(snapshot)
    redacted = partial(reduce, lambda text, pattern: pattern.sub("[redacted]", text), patterns)
    for document in export_dataset(source, redact=redacted):
        cli.json_line(document)
