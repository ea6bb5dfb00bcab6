"""What every command is built from: lazy groups, commands with examples, the options common to all of them.

A command is a function with click's decorators, `@command(examples)` on top, and an exit code as its result (None is
0). It gets the `Invocation`: what the common options say, where output goes, and `open`. Modules of commands must stay
cheap to import, because `perdure --help` imports them all: they import the library inside their functions.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import click

from perdure.errors import OpenError, UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.cli.output import Output

P = ParamSpec("P")
OK, NO = 0, 1
DEFAULT_FILE = "agent.db"
COMMON = "Options of all commands"


class CommonOption(click.Option):
    """An option of all commands, listed apart from a command's own."""


def common_options() -> list[click.Parameter]:
    return [
        CommonOption(["--store"], metavar="URL", help="The store (or $PERDURE_STORE, or ./agent.db)."),
        CommonOption(["--schema"], metavar="NAME", help="PostgreSQL: its schema (or $PERDURE_SCHEMA, or perdure)."),
        CommonOption(["--tenant"], metavar="NAME", help="Whose threads and runs (default: default)."),
        CommonOption(["--json"], is_flag=True, help="Print JSON, and nothing else, to stdout."),
        CommonOption(["--no-color"], is_flag=True, help="No colours (or set $NO_COLOR)."),
    ]


@dataclass(frozen=True)
class Settings:
    """What the common options say. Those behind a command go before those in front of it."""

    store: str | None = None
    schema: str | None = None
    tenant: str | None = None
    json: bool = False
    no_color: bool = False

    def merged(self, given: Mapping[str, Any]) -> Settings:
        return Settings(**{name: given.get(name) or getattr(self, name) for name in self.__dataclass_fields__})


class Invocation:
    """One call of a command: its settings and its output."""

    def __init__(self, settings: Settings, out: Output) -> None:
        self.settings = settings
        self.out = out

    @property
    def url(self) -> str:
        """Which store the command is about. Raises UsageError."""
        if self.settings.store is not None:
            return self.settings.store
        if named := os.environ.get("PERDURE_STORE"):
            return named
        if os.path.exists(DEFAULT_FILE):
            return DEFAULT_FILE
        raise UsageError(
            f"which store? Give --store URL, or set PERDURE_STORE, or go where there is a file {DEFAULT_FILE}"
        )

    def options(self, url: str) -> dict[str, Any]:
        """What a store at this URL is opened with: its keys and its schema. Not the tenant."""
        keys: dict[str, Any] = {"keys": "env"} if os.environ.get("PERDURE_KEYS") else {}
        return {**keys, **self.schema(url)}

    def schema(self, url: str) -> dict[str, str]:
        """The schema of PostgreSQL that the store is in: --schema, else $PERDURE_SCHEMA. A file has none."""
        from perdure.storage.urls import is_postgres

        if self.settings.schema is not None and not is_postgres(url):
            raise UsageError("--schema is for PostgreSQL, and this store is a file: leave it out")
        name = self.settings.schema or os.environ.get("PERDURE_SCHEMA")
        return {"schema": name} if name and is_postgres(url) else {}

    def open(self, **more: Any) -> Store:
        """Open the store. Never makes one, unless `create=True` says so: a typo must not make a file."""
        import perdure

        url = self.url
        path = sqlite_file(url)
        if path is not None and not os.path.exists(path) and not more.get("create"):
            raise OpenError(f"there is no store at {path}; check --store or PERDURE_STORE")
        tenant = {} if self.settings.tenant is None else {"tenant": self.settings.tenant}
        return perdure.open(url, **{"create": False, **self.options(url), **tenant, **more})

    def confirmed(self, question: str, *, yes: bool) -> bool:
        """Ask before something is removed for good. Without a terminal `--yes` must say so."""
        if yes:
            return True
        if not sys.stdin.isatty():
            raise UsageError("this cannot be undone: give --yes when there is no terminal to ask on")
        if self.out.confirm(f"{question} This cannot be undone."):
            return True
        self.out.message("nothing was changed")
        return False


def sqlite_file(url: str) -> str | None:
    """The file behind a store's URL, if it is one."""
    from urllib.parse import unquote

    from perdure.storage.urls import is_postgres

    if url.startswith("sqlite:///"):
        return unquote(url.removeprefix("sqlite:///"))
    return None if is_postgres(url) or "://" in url or url == ":memory:" or not url.strip() else url


class Command(click.Command):
    """A command with examples, which takes the common options too."""

    def __init__(self, *args: Any, examples: str = "", **more: Any) -> None:
        super().__init__(*args, **more)
        self.params += common_options()
        self.examples = [line for line in examples.splitlines() if line]

    def invoke(self, ctx: click.Context) -> Any:
        from perdure.cli.output import Output

        given = {name: ctx.params.pop(name) for name in Settings.__dataclass_fields__}
        settings = (ctx.obj or Settings()).merged(given)
        ctx.obj = Invocation(settings, Output(json=settings.json, color=not settings.no_color))
        # With --json nothing else may come out on stdout: what an app prints goes to stderr.
        with redirect_stdout(sys.stderr) if settings.json else nullcontext():
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = [param for param in self.get_params(ctx) if not isinstance(param, CommonOption)]
        _section(ctx, formatter, "Options", own)
        _section(ctx, formatter, COMMON, common_options())

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for line in self.examples:
                formatter.write(f"  {line}\n")


class Argument(click.Argument):
    """An argument that says what it is in the help."""

    def __init__(self, *args: Any, explained: str, **more: Any) -> None:
        super().__init__(*args, **more)
        self.explained = explained

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.explained


def _section(ctx: click.Context, formatter: click.HelpFormatter, title: str, params: list[click.Parameter]) -> None:
    records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def argument(name: str, metavar: str, help: str, **more: Any) -> Callable[[Any], Any]:
    """An argument; required unless `required=False`."""
    return click.argument(name, metavar=metavar, cls=Argument, explained=help, **more)


def command(examples: str, name: str | None = None) -> Callable[[Callable[..., Any]], Command]:
    """Make a command of a function; its docstring is the help."""

    def decorate(function: Callable[..., Any]) -> Command:
        made = (name or function.__name__).strip("_").replace("_", "-")
        return click.command(made, cls=Command, examples=examples)(function)

    return decorate


def with_store(
    function: Callable[Concatenate[Invocation, Store, P], int | None],
) -> Callable[P, int | None]:
    """Give a command its `Invocation` and the open store."""

    @click.pass_obj
    @functools.wraps(function)
    def call(cli: Invocation, /, *args: P.args, **kwargs: P.kwargs) -> int | None:
        with cli.open() as store:
            return function(cli, store, *args, **kwargs)

    return call


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for. `sections`: title to name to `module:attribute`."""

    def __init__(self, name: str, help: str, sections: Mapping[str, Mapping[str, str]], **more: Any) -> None:
        super().__init__(name, help=help, invoke_without_command=True, **more)
        self.sections = sections
        self.places = {name: place for section in sections.values() for name, place in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self.places.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        found: click.Command = getattr(importlib.import_module(f"perdure.cli.{module}"), attribute)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        given = {name: ctx.params.pop(name) for name in Settings.__dataclass_fields__ if name in ctx.params}
        ctx.obj = (ctx.obj or Settings()).merged(given)
        result = super().invoke(ctx)
        if ctx.invoked_subcommand is None:
            click.echo(ctx.get_help())
            return OK
        return result

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.places and not args[0].startswith("-"):
            raise UsageError(f"there is no command {args[0]!r}; {self._meant(ctx, args[0])}")
        return super().resolve_command(ctx, args)

    def _meant(self, ctx: click.Context, text: str) -> str:
        root = ctx.find_root().command
        assert isinstance(root, LazyGroup)
        known = {"perdure " + name: name.split()[-1] for name in command_names(root)}
        same = [full for full, last in known.items() if last == text]
        near = difflib.get_close_matches(text, known.values(), n=1, cutoff=0.6)
        same = same or [full for full, last in known.items() if last in near]
        return f"did you mean `{'` or `'.join(same)}`?" if same else f"`{ctx.command_path} --help` lists them"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self.sections.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, made.get_short_help_str(100)) for name, made in commands if made])
        _section(ctx, formatter, COMMON, self.get_params(ctx))


def command_names(group: LazyGroup) -> dict[str, Command]:
    """Every command below a group by its full name: `runs`, `run show`."""
    found: dict[str, Command] = {}
    with click.Context(group) as ctx:
        for name in group.list_commands(ctx):
            made = group.get_command(ctx, name)
            if isinstance(made, LazyGroup):
                found |= {f"{name} {below}": one for below, one in command_names(made).items()}
            elif isinstance(made, Command):
                found[name] = made
    return found
