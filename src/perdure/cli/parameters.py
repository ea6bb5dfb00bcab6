"""The types of parameters, and the parameters that several commands share."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, unquote

import click

from perdure.values.durations import parse_duration

Labels = tuple[str, ...]


class _Number(click.IntRange):
    """A number, where larger ones than databases know mean the largest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return min(super().convert(value, param, ctx), 10**18)


COUNT, POSITIVE = _Number(0), _Number(1)


def duration(text: str) -> timedelta:
    """`45s`, `30m`, `2h`, `3d`, `1w`."""
    made = parse_duration(text)
    if not made:
        raise click.BadParameter(f"{text!r} is not a duration: write 45s, 30m, 2h, 30d or 8w")
    return made


def share(text: str) -> float:
    """`5%`, or 0.05."""
    try:
        made = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        made = 0.0
    if not 0 < made < 1:
        raise click.BadParameter(f"{text!r} is not a share: write 5%")
    return made


def since(text: str) -> datetime:
    """How long ago, or an ISO date."""
    try:
        return datetime.now(UTC) - duration(text)
    except (click.BadParameter, OverflowError):
        pass
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{text!r} is no time: write 45s, 30m, 2h, 3d, 1w or 2026-01-31") from None


def parse_value(text: str) -> Any:
    """JSON if it can be, else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def pair(text: str) -> tuple[str, Any]:
    """NAME=VALUE."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return key, parse_value(value)


def namespace(text: str) -> Labels:
    """`users/alice`: the labels of a namespace. In a label %2F stands for a slash and %25 for a percent sign."""
    try:
        labels = tuple(unquote(label, errors="strict") for label in text.split("/")) if text != "/" else ()
        if all(labels):
            return labels
    except UnicodeDecodeError:
        pass
    raise click.BadParameter(f"{text!r} is no namespace: write users/alice, or / for all; %2F is a slash in a label")


def namespace_text(labels: Labels) -> str:
    """A namespace as `namespace` reads it."""
    return "/".join("".join(_quoted(char) for char in label) for label in labels) or "/"


def _quoted(char: str) -> str:
    return char if char.isprintable() and char not in "/%" else quote(char, safe="")


limit_option = click.option("--limit", metavar="N", type=COUNT, default=50, help="At most N (default 50; 0: all).")
yes_option = click.option("--yes", is_flag=True, help="Do not ask; needed where there is no terminal.")
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
who_option = click.option("--who", metavar="NAME", help="Who decides (default: the user of this machine).")
args_option = click.option(
    "--args",
    "arguments",
    metavar="JSON",
    default="[]",
    help="Its arguments: a JSON list, or one value as JSON or text.",
)
full_option = click.option("--full", is_flag=True, help="PostgreSQL: rewrite the tables, which locks them meanwhile.")
sign_option = click.option("--sign", metavar="FILE", help="Sign it with this private Ed25519 key (PEM).")
public_key_option = click.option("--key", metavar="FILE", help="The public key (PEM) that must have signed it.")
