"""The parts of every command: groups, commands with examples, common options, output, and opening the store.

A command is a function with `@command(group, section, examples)` on top and click's decorators below. Its docstring is
the help; its result is the exit code (None means 0). It receives the `Invocation`. Because `perdure --help` imports
every module of commands, they import the library inside their functions.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from shlex import quote
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import click

from perdure.cli.text import complain, printable, readable, to_json
from perdure.errors import OpenError, UsageError

if TYPE_CHECKING:
    from perdure import Store

P = ParamSpec("P")
T = TypeVar("T")
OK, NO = 0, 1
DEFAULT_FILE = "agent.db"
SECTIONS = (  # the order of the sections in the help
    *("Runs", "Code", "Threads", "Memory", "Stores", "Inspect", "Control", "State of the store", "Commands", "History"),
    *("Retention", "Remove and move", "Backup", "Access", "Migration"),
)


def _words() -> dict[str, Any]:
    """Return $PERDURE_WORDS as an option: a name, or a function of an app."""
    words = os.environ.get("PERDURE_WORDS")
    if not words:
        return {}
    from perdure.runs.workers.loading import load_named

    return {"words": load_named(words) if ":" in words else words}


class Invocation:
    """One call of a command: its common options and its output.

    Results go to stdout, everything else to stderr. Control characters in stored text are escaped before they reach a
    terminal.
    """

    def __init__(self) -> None:
        self.store: str | None = None
        self.schema: str | None = None
        self.tenant: str | None = None
        self.target = ""  # a second store that the command names: --schema may be meant for it
        self.json = False
        self._stdout = sys.stdout  # kept, because --json redirects sys.stdout while an app runs
        self._ascii = not (sys.stdout.encoding or "ascii").lower().startswith("utf")

    # --- the store

    @property
    def url(self) -> str:
        """The URL of the store: --store, $PERDURE_STORE or ./agent.db. Raises UsageError if there is none."""
        if url := self.store or os.environ.get("PERDURE_STORE"):
            return url
        if os.path.exists(DEFAULT_FILE):
            return DEFAULT_FILE
        raise UsageError(
            f"which store? Give --store URL, or set PERDURE_STORE, or run it in a folder that has a file {DEFAULT_FILE}"
            f" (`perdure store create {DEFAULT_FILE}` creates it)"
        )

    def options(self, url: str) -> dict[str, Any]:
        """Return the options that open the store at this URL: keys and schema."""
        keys: dict[str, Any] = {"keys": "env"} if os.environ.get("PERDURE_KEYS") else {}
        return {**keys, **self.schema_of(url)}

    def schema_of(self, url: str) -> dict[str, str]:
        """Return the PostgreSQL schema as an option: --schema, else $PERDURE_SCHEMA. A file has none."""
        from perdure.storage.urls import is_postgres

        if self.schema is not None and not is_postgres(url) and not is_postgres(self.target):
            raise UsageError("--schema is for PostgreSQL, and this store is a file: leave it out")
        name = self.schema or os.environ.get("PERDURE_SCHEMA")
        return {"schema": name} if name and is_postgres(url) else {}

    def open(self, url: str | None = None, *, create: bool = False, **more: Any) -> Store:
        """Open the store, or the one at `url`. Without `create` a missing file is an error: a typo must not make it."""
        import perdure

        where = self.url if url is None else url
        path = sqlite_file(where)
        if not create and path is not None and not os.path.exists(path):
            hint = "check --store or PERDURE_STORE" if url is None else "check the path"
            raise OpenError(f"there is no store at {path}; {hint}, or create it: `perdure store create {quote(path)}`")
        tenant = {} if self.tenant is None else {"tenant": self.tenant}
        return perdure.open(where, **{"create": create, **self.options(where), **_words(), **tenant, **more})

    # --- stdout

    def document(self, *parts: Any, **more: Any) -> None:
        """Print one JSON document with the fields of all parts."""
        merged: dict[str, Any] = {}
        for part in (*parts, more):
            merged |= readable(part)
        self._write(to_json(merged, indent=2, ascii_only=self._ascii))

    def result(self, text: str, *parts: Any, **more: Any) -> None:
        """Print what a command did: a line of text without passwords, or with --json a document."""
        from perdure.storage.urls import redacted

        if self.json:
            self.document(*parts, **more)
        else:
            self.line(redacted(text))

    def listing(
        self,
        items: Iterable[T],
        headers: Sequence[str],
        row: Callable[[T], Sequence[str]],
        *,
        empty: str,
        right: Sequence[int] = (),
        document: Callable[[T], Any] = readable,
    ) -> None:
        """Print many results: a table, or with --json a document per line."""
        if self.json:
            for one in items:
                self.json_line(document(one))
        elif rows := [row(one) for one in items]:
            self.table(headers, rows, right=right)
        else:
            self.message(empty)

    def json_line(self, document: Any) -> None:
        """Print one JSON document on one line and flush it: the reader of a pipe must not wait."""
        self._write(to_json(document, ascii_only=self._ascii))
        self._stdout.flush()

    def line(self, *cells: str) -> None:
        """Print cells side by side, separated by two blanks."""
        self._write("  ".join(printable(cell) for cell in cells if cell))

    def lines_below(self, *lines: object) -> None:
        """Print lines indented, below the line that they belong to."""
        for line in lines:
            self.line(f"    {line}")

    def state(self, value: Any) -> None:
        """Print a readable value as indented JSON."""
        self._write(to_json(value, indent=2, ascii_only=self._ascii))

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> None:
        """Print a table; align the columns whose indexes are in `right` to the right."""
        lines = [list(headers)] + [[printable(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = [
                cell.rjust(width) if at in right else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            self._write("  ".join(cells).rstrip())

    def _write(self, text: str) -> None:
        self._stdout.write(text + "\n")

    # --- stderr

    def message(self, text: str) -> None:
        complain(text)

    def confirm(self, question: str, *, yes: bool, after: str = "This cannot be undone.") -> None:
        """Ask before something is removed. "No" ends the command. Without a terminal, require --yes."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise UsageError(f"{question} {after} There is no terminal to ask on: give --yes")
        if not click.confirm(f"{printable(question)} {after}", err=True):
            self.message("nothing was changed")
            raise click.exceptions.Exit(NO)

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[[int, int], None] | None]:
        """Yield a callback (done, total) that shows a counter on stderr; None if stderr is no terminal."""
        if not sys.stderr.isatty():
            yield None
            return

        def show(done: int, total: int) -> None:
            sys.stderr.write(f"\r{label} {done}/{total}")
            sys.stderr.flush()

        try:
            yield show
        finally:
            sys.stderr.write("\n")


def sqlite_file(url: str) -> str | None:
    """Return the path of an SQLite store; None for any other URL."""
    from urllib.parse import unquote

    from perdure.storage.urls import is_postgres

    if url.startswith("sqlite:///"):
        return unquote(url.removeprefix("sqlite:///"))
    return None if is_postgres(url) or "://" in url or url == ":memory:" or not url.strip() else url


# --- click


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Set a common option on the Invocation. All contexts share it: options may stand before or after the command."""
    invocation = ctx.ensure_object(Invocation)
    if value:
        setattr(invocation, str(param.name), value)


def common_options() -> list[click.Parameter]:
    shared: dict[str, Any] = {"expose_value": False, "callback": _remember}
    return [
        click.Option(["--store"], metavar="URL", help="The store (or $PERDURE_STORE, or ./agent.db).", **shared),
        click.Option(["--schema"], metavar="NAME", help="PostgreSQL: its schema (or $PERDURE_SCHEMA).", **shared),
        click.Option(["--tenant"], metavar="NAME", help="The tenant whose data is meant (default: default).", **shared),
        click.Option(["--json"], is_flag=True, help="Print JSON, and nothing else, to stdout.", **shared),
    ]


class Command(click.Command):
    """A command with examples and the common options."""

    def __init__(self, *args: Any, section: str, examples: str, names_stores: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        self.own_params = list(self.params)
        self.names_stores = names_stores  # its arguments name stores, so --store and --tenant are refused
        self.params += [one for one in common_options() if not names_stores or one.name not in ("store", "tenant")]
        self.section = section
        self.examples = examples.splitlines()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:  # some of click's errors do not name their command
            error.ctx = error.ctx or ctx
            raise

    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj.target = ctx.params.get("target") or ""
        if self.names_stores and (ctx.obj.store or ctx.obj.tenant):
            raise UsageError(f"`{ctx.command_path}` takes its stores as arguments: leave out --store and --tenant")
        # With --json only JSON may reach stdout: what an app prints goes to stderr.
        with redirect_stdout(sys.stderr) if ctx.obj.json else nullcontext():
            return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for line in self.examples:
                formatter.write(f"  {line}\n")


class CommandGroup(click.Group):
    """A group that lists its commands in sections and suggests a name for a misspelt command."""

    section = ""

    def __init__(self, name: str, help: str, **more: Any) -> None:
        super().__init__(name, help=help, invoke_without_command=True, **more)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.commands, key=lambda name: (SECTIONS.index(self.commands[name].section), name))  # type: ignore[attr-defined]

    def invoke(self, ctx: click.Context) -> Any:
        if not ctx._protected_args and not ctx.args:
            click.echo(ctx.get_help())
            return OK
        return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise UsageError(f"there is no command {args[0]!r}; {self._hint(ctx, args[0])}")
        return super().resolve_command(ctx, args)

    def _hint(self, ctx: click.Context, word: str) -> str:
        """Return what may have been meant by a word that is no command of this group."""
        path = ctx.command_path
        if meant := self._similar(word):
            return f"did you mean {' or '.join(f'`perdure {name}`' for name in meant)}? `{path} --help` lists all"
        if self is not root and "show" in self.commands:  # a run is named without a verb
            return f"`{path} show {quote(word)}` shows a {self.name}, and `{path} --help` lists all commands"
        return f"`{path} --help` lists all"

    def _similar(self, word: str) -> list[str]:
        """Return the full names of the commands that a word is most like."""
        if word in ("list", "ls") and f"{self.name}s" in root.commands:
            return [f"{self.name}s"]
        known = {name: name.split()[-1] for name in command_names(root)}
        own = {name: last for name, last in known.items() if " " not in name or name.startswith(f"{self.name} ")}
        # In a group, other groups are not searched: `key create` has nothing to do with `store create`.
        every = own if self is not root else known
        meant = [word] if word in every.values() else difflib.get_close_matches(word, every.values(), n=1, cutoff=0.8)
        meant = meant or difflib.get_close_matches(word, own.values(), n=1, cutoff=0.65)
        return [name for name, last in every.items() if last in meant]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            listed = self.commands[name]
            sections.setdefault(listed.section, []).append((name, listed.get_short_help_str(100)))  # type: ignore[attr-defined]
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def command_names(group: CommandGroup) -> dict[str, Command]:
    """Return every command below a group by its full name: `runs`, `run show`."""
    commands: dict[str, Command] = {}
    for name in group.list_commands(click.Context(group)):
        member = group.commands[name]
        if isinstance(member, CommandGroup):
            commands |= {f"{name} {below}": one for below, one in command_names(member).items()}
        elif isinstance(member, Command):
            commands[name] = member
    return commands


def command(
    group: CommandGroup, section: str, examples: str, name: str | None = None, **more: Any
) -> Callable[[Any], Command]:
    """Add a command to a group."""

    def decorate(function: Callable[..., Any]) -> Command:
        command_name = (name or function.__name__).strip("_").replace("_", "-")
        added: Command = click.command(command_name, cls=Command, section=section, examples=examples, **more)(function)
        group.add_command(added)
        return added

    return decorate


def with_store(function: Callable[Concatenate[Invocation, Store, P], int | None]) -> Callable[P, int | None]:
    """Open the store and pass it to a command, after the `Invocation`."""

    @click.pass_obj
    @functools.wraps(function)
    def call(cli: Invocation, /, *args: P.args, **kwargs: P.kwargs) -> int | None:
        with cli.open() as store:
            return function(cli, store, *args, **kwargs)

    return call


REF_HELP = "an id, head, head~3 (3 back), @12 (step 12) or LangGraph's checkpoint_id"

root = CommandGroup(
    "perdure",
    f"""Inspect and operate the state of AI agents, in any Perdure store.

    Commands use the store of --store URL (a path, sqlite:///path, postgresql://user@host/database), else
    $PERDURE_STORE, else ./agent.db. Every command has --help with examples, and --json.

    REF names a checkpoint: {REF_HELP}. A VALUE is read as JSON if it is valid JSON, else as text; put -- before one
    that begins with a dash. APP is a file (app.py) or a module (myapp.agents) with durable functions.""",
    params=common_options(),
    context_settings={"help_option_names": ["--help"], "max_content_width": 110},
)
run_group = CommandGroup("run", "Inspect and control one run.")
schedule_group = CommandGroup("schedule", "Start runs at fixed times, and control when.")
thread_group = CommandGroup("thread", "Change one thread.")
store_group = CommandGroup("store", "Operate a whole store.")
memory_group = CommandGroup(
    "memory",
    """Inspect and change long-term memory.

    Write a NAMESPACE as labels with slashes between them: users/alice. / means everything. In a label, write %2F for a
    slash and %25 for a percent sign.""",
)
snapshot_group = CommandGroup(
    "snapshot",
    """Freeze a whole store at one instant, compare with it, go back to it.

    A snapshot shows the threads, runs, questions and memory of all tenants as they were. The store keeps the old form
    of what changes afterwards until you release the snapshot.""",
)
team_group = CommandGroup(
    "team",
    """Look at teams of agents, send them messages, take them back.

    The agents of a team send each other messages. Each message is one turn of its receiver, exactly once. A member is
    the run TEAM/MEMBER, so `perdure run` pauses, resumes and shows it too.""",
)
key_group = CommandGroup(
    "key",
    """Create, rotate and remove encryption keys.

    A key file holds the keys of each tenant; only its owner may read it. Name it with --keys or $PERDURE_KEYS. If the
    variable is set, every command can open encrypted stores.""",
)
team_group.section = "Runs"
root.add_command(team_group)
_GROUPS = {"Runs": run_group, "Threads": thread_group, "Memory": memory_group, "Stores": store_group}
for _section, _group in _GROUPS.items():
    _group.section = _section
    root.add_command(_group)
schedule_group.section = "Code"
root.add_command(schedule_group)
for _group in (snapshot_group, key_group):
    _group.section = "Stores"
    root.add_command(_group)
click.version_option(package_name="perdure", message="%(prog)s %(version)s")(root)
