"""Types of parameters, and parameters that several commands share."""

from __future__ import annotations

import functools
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, unquote

import click

from perdure.values.durations import parse_duration

Labels = tuple[str, ...]


class _Number(click.IntRange):
    """A number that is lowered to the largest one a database can hold."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return min(super().convert(value, param, ctx), 10**18)


COUNT, POSITIVE = _Number(0), _Number(1)


def duration(text: str) -> timedelta:
    """Parse a duration: `45s`, `30m`, `2h`, `3d`, `1w`."""
    span = parse_duration(text)
    if not span:
        raise click.BadParameter(f"{text!r} is not a duration: write 45s, 30m, 2h, 30d or 8w")
    return span


def share(text: str) -> float:
    """Parse a share: `5%` or `0.05`."""
    try:
        fraction = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction < 1:
        raise click.BadParameter(f"{text!r} is not a share: write 5%")
    return fraction


def since(text: str) -> datetime:
    """Parse a time: how long ago it was, or an ISO date."""
    try:
        return datetime.now(UTC) - duration(text)
    except (click.BadParameter, OverflowError):
        pass
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{text!r} is not a time: write 45s, 30m, 2h, 3d, 1w or 2026-01-31") from None


def until(text: str) -> datetime:
    """Parse a time to come: how long from now, or an ISO date."""
    try:
        return datetime.now(UTC) + duration(text)
    except (click.BadParameter, OverflowError):
        return since(text)


as_of_option = click.option(
    "--as-of", metavar="TIME", type=since, help="As it was then: 30m, 2h, 3d, 1w ago or an ISO time."
)


def parse_value(text: str) -> Any:
    """Parse a value as JSON; return the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def pair(text: str) -> tuple[str, Any]:
    """Parse `NAME=VALUE`."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return key, parse_value(value)


def namespace(text: str) -> Labels:
    """Parse a namespace such as `users/alice`. In a label %2F stands for a slash and %25 for a percent sign."""
    try:
        labels = tuple(unquote(label, errors="strict") for label in text.split("/")) if text != "/" else ()
        if all(labels):
            return labels
    except UnicodeDecodeError:
        pass
    raise click.BadParameter(
        f"{text!r} is not a namespace: write users/alice, or / for all; in a label write %2F for a slash"
    )


def namespace_text(labels: Labels) -> str:
    """Return a namespace as text that `namespace` can parse."""
    return "/".join("".join(_quoted(char) for char in label) for label in labels) or "/"


def _quoted(char: str) -> str:
    return char if char.isprintable() and char not in "/%" else quote(char, safe="")


def tag(text: str) -> tuple[str, str]:
    """KEY=VALUE, both texts."""
    key, separator, value = text.partition("=")
    if not separator or not key or not value:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE")
    return key, value


STATUSES = (
    "queued", "running", "waiting", "paused", "stuck", "done", "failed", "cancelled", "undone", "exported"
)  # fmt: skip
_CONDITIONS = (
    click.option(
        "--status", "statuses", type=click.Choice(STATUSES), metavar="STATUS", multiple=True,
        help=f"Only these (may be repeated): {', '.join(STATUSES)}.",
    ),
    click.option("--function", metavar="NAME", help="Only runs of this function."),
    click.option("--version", metavar="NAME", help="Only runs of this version of the code."),
    click.option("--queue", metavar="NAME", help="Only runs of this queue."),
    click.option(
        "--tag", "tags", metavar="KEY=VALUE", type=tag, multiple=True,
        help="Only runs with this tag (may be repeated: all must match).",
    ),
    click.option("--since", metavar="TIME", type=since, help="Only runs created since: 30m, 2h, 3d or an ISO date."),
    click.option("--until", metavar="TIME", type=since, help="Only runs created before that."),
    click.option("--prefix", "id_prefix", metavar="TEXT", help="Only runs whose id begins with TEXT."),
    click.option("--parent", metavar="RUN", help="Only runs that this run started."),
)  # fmt: skip


def run_conditions(function: Any) -> Any:
    """Add the options that select runs. The command gets those that are used as keywords of `store.runs`."""

    @functools.wraps(function)
    def call(*args: Any, tags: tuple[tuple[str, str], ...], **options: Any) -> Any:
        names = ("statuses", "function", "version", "queue", "since", "until", "id_prefix", "parent")
        where = {name: value for name in names if (value := options.pop(name))}
        return function(*args, where=where | ({"tags": dict(tags)} if tags else {}), **options)

    for option in reversed(_CONDITIONS):
        call = option(call)
    return call


limit_option = click.option("--limit", metavar="N", type=COUNT, default=50, help="At most N (default 50; 0: all).")
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
threads_option = click.option(
    "--thread", "threads", metavar="PATTERN", multiple=True, help="Only these threads (may be repeated)."
)
namespaces_option = click.option(
    "--namespace",
    "namespaces",
    metavar="NAMESPACE",
    type=namespace,
    multiple=True,
    help="Only memory of this namespace and those below it (may be repeated).",
)
trust_option = click.option(
    "--trust",
    metavar="PREFIX",
    multiple=True,
    help="Modules whose data classes may be loaded, such as myapp. (may be repeated).",
)


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "operator"


who_option = click.option(
    "--who",
    metavar="NAME",
    callback=lambda _ctx, _param, value: value or _user(),
    help="Who decided (default: the user of this machine).",
)
args_option = click.option(
    "--args",
    "arguments",
    metavar="JSON",
    default="[]",
    help="The arguments: a JSON list, or one value as JSON or text.",
)
full_option = click.option("--full", is_flag=True, help="PostgreSQL: also rewrite the tables; this locks them.")
retain_option = click.option(
    "--retain-until", type=until, metavar="TIME", help="S3: lock the object until then: 90d, 2027-11-18."
)
sign_option = click.option("--sign", metavar="FILE", help="Sign it with this private Ed25519 key (PEM).")
public_key_option = click.option("--key", metavar="FILE", help="The public key (PEM) that must have signed it.")
