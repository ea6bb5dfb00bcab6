"""The types of parameters, and the options that several commands share."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from perdure.cli.base import argument

REF_HELP = "an id, a unique beginning of one, head, head~3 (3 back), @12 (step 12) or LangGraph's checkpoint_id"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_duration(text: str) -> timedelta:
    """`45s`, `30m`, `2h`, `3d`, `1w`. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a duration: write 45s, 30m, 2h, 30d or 8w")
    try:
        return timedelta(seconds=float(found[1]) * _SECONDS[found[2]])
    except OverflowError:
        raise ValueError(f"{text!r} is too long") from None


def parse_value(text: str) -> Any:
    """JSON if it can be, else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A length of time, more than none."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        try:
            if made := parse_duration(value):
                return made
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return self.fail("a duration is more than none", param, ctx)


class Since(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A point in time: so long ago, or an ISO date or time, local if it names no zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            return datetime.now(UTC) - parse_duration(value)
        except (ValueError, OverflowError):
            pass
        try:
            return datetime.fromisoformat(value.strip()).astimezone()
        except (ValueError, OverflowError):
            return self.fail(f"{value!r} is no time: write 45s, 30m, 2h, 3d, 1w or 2026-01-31", param, ctx)


class Count(click.ParamType):  # type: ignore[type-arg]
    """How many of something. Bounded, because databases know no larger numbers."""

    name = "count"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not value.isdecimal() or len(value) > 18 or int(value) < self.least:
            self.fail(f"{value!r} is not a count of at least {self.least}", param, ctx)
        return int(value)


class Pair(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """NAME=VALUE, the value as JSON if it can be, else text. `last`: the name may hold an =."""

    name = "pair"

    def __init__(self, *, last: bool = False) -> None:
        self.last = last

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        key, separator, text = value.rpartition("=") if self.last else value.partition("=")
        if not separator or not key:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return key, parse_value(text)


COUNT, POSITIVE = Count(0), Count(1)

thread_argument = argument("thread", "THREAD", "The thread's name.")
run_argument = argument("run", "RUN", "The run's id.")
app_argument = argument("app", "APP", "Where the functions are: app.py, or a module such as myapp.agents.")
function_argument = argument("target", "APP:FUNCTION", "The durable function: app.py:travel or myapp.agents:travel.")
ref_argument = argument("ref", "[REF]", f"Which checkpoint: {REF_HELP} (default: head).", required=False)
limit_option = click.option("--limit", metavar="N", type=COUNT, default=50, help="At most N (default 50; 0: all).")
yes_option = click.option("--yes", is_flag=True, help="Do not ask; needed where there is no terminal.")
trust_option = click.option(
    "--trust",
    metavar="PREFIX",
    multiple=True,
    help="Modules whose data classes may be loaded, such as myapp. (may be repeated).",
)
text_option = click.option("--text", is_flag=True, help="Take VALUE as text, whatever it looks like.")
who_option = click.option("--who", metavar="NAME", help="Who decides (default: the user of this machine).")
args_option = click.option(
    "--args",
    "arguments",
    metavar="JSON",
    default="[]",
    help="Its arguments: a JSON list, or one value as JSON or text.",
)
no_verify_option = click.option("--no-verify", is_flag=True, help="Skip the check of what was written.")
