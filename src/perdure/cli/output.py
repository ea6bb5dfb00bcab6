"""What the commands print: tables, states, JSON, questions and progress; with rich on a terminal, plain text elsewhere.

Results go to stdout, everything else to stderr. rich is imported here only, only for a terminal, and only if it is
installed; it renders into text that is then written, so that a closed pipe is met in one place. Text from a store never
reaches a terminal with its control characters, and never as markup.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Any

from perdure.cli.text import printable, to_json
from perdure.storage.urls import redacted

Cell = tuple[str, str]  # the text, and a style that plain output ignores
HIGHLIGHTED_MAX = 1_000_000
LAST_COLUMN_MIN = 20


class Output:
    """Where the answer of one command goes, and how it looks there."""

    def __init__(self, *, json: bool, color: bool) -> None:
        self.json = json
        self._stdout = sys.stdout  # as it is now: with --json an app's own output is led elsewhere
        dumb = os.environ.get("TERM") == "dumb"
        self.rich = sys.stdout.isatty() and not dumb and importlib.util.find_spec("rich") is not None
        self.color = self.rich and color and not os.environ.get("NO_COLOR")
        self._ascii = not (sys.stdout.encoding or "ascii").lower().startswith("utf")

    # --- stdout

    def document(self, value: Any) -> None:
        """The one JSON document of a command."""
        self._write(to_json(value, indent=2, ascii_only=self._ascii))

    def result(self, value: Any, text: str) -> None:
        """What a command has done: the document with --json, else one line."""
        if self.json:
            self.document(value)
        else:
            self.line((text, "green"))

    def json_line(self, value: Any) -> None:
        """One of many, a line each."""
        self._write(to_json(value, ascii_only=self._ascii))

    def line(self, *cells: Cell) -> None:
        """Cells side by side, two blanks between them."""
        shown = [(printable(text), style) for text, style in cells if text]
        if not self.rich:
            self._write("  ".join(text for text, _ in shown))
            return
        from rich.text import Text

        self._render(Text("  ").join([Text(text, style) for text, style in shown]), wrap=False)

    def state(self, value: Any) -> None:
        """A state or a part of one, pretty printed."""
        text = to_json(value, indent=2, ascii_only=self._ascii)
        if not self.color or len(text) > HIGHLIGHTED_MAX:
            self._write(text)
            return
        from rich.highlighter import JSONHighlighter

        self._render(JSONHighlighter()(text), wrap=False)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Cell]], *, right: Sequence[int] = ()) -> None:
        """Columns; those numbered in `right` are numbers. The last one takes what room is left."""
        shown = [[(printable(text), style) for text, style in row] for row in rows]
        if self.rich:
            self._rich_table(headers, shown, right)
            return
        lines = [list(headers)] + [[text for text, _ in row] for row in shown]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = [
                text.rjust(width) if at in right else text.ljust(width)
                for at, (text, width) in enumerate(zip(line, widths, strict=True))
            ]
            self._write("  ".join(cells).rstrip())

    def _rich_table(self, headers: Sequence[str], rows: Sequence[Sequence[Cell]], right: Sequence[int]) -> None:
        from rich.cells import cell_len
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for at, header in enumerate(headers):
            last = at == len(headers) - 1
            table.add_column(header, justify="right" if at in right else "left", no_wrap=not last, overflow="fold")
        for row in rows:
            table.add_row(*[Text(text, style) for text, style in row])
        lines = [headers, *([text for text, _ in row] for row in rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        self._render(table, width_min=sum(widths[:-1]) + 2 * len(headers) + min(widths[-1], LAST_COLUMN_MIN))

    def _render(self, what: Any, *, wrap: bool = True, width_min: int = 0) -> None:
        from rich.console import Console

        # Into text first: rich has an exit of its own when a pipe is closed.
        page = StringIO()
        console = Console(
            file=page,
            force_terminal=True,
            color_system="auto" if self.color else None,
            # Where a table does not fit, the terminal breaks its lines: an id that is cut short is of no use.
            width=max(shutil.get_terminal_size().columns, width_min),
            highlight=False,
            markup=False,
            emoji=False,
        )
        console.print(what, soft_wrap=not wrap)  # what people copy is wrapped by the terminal, not by us
        self._write(page.getvalue().removesuffix("\n"))

    def flush(self) -> None:
        self._stdout.flush()

    def _write(self, text: str) -> None:
        if self._ascii:
            encoding = self._stdout.encoding or "ascii"
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        self._stdout.write(text + "\n")

    # --- stderr

    def message(self, text: str) -> None:
        complain(text)

    def confirm(self, question: str) -> bool:
        """Ask on the terminal; anything but y or yes is no."""
        said = ""
        try:
            sys.stderr.write(printable(question) + " [y/N] ")
            sys.stderr.flush()
            said = sys.stdin.readline()
        finally:
            if not said.endswith("\n"):  # Ctrl-C, Ctrl-D: what comes next stands on a line of its own
                sys.stderr.write("\n")
        return said.strip().lower() in ("y", "yes")

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[[int, int], None] | None]:
        """A bar on stderr, if that is a terminal; gives what the operation calls with (done, of how many)."""
        if not sys.stderr.isatty():
            yield None
        elif importlib.util.find_spec("rich") is None or os.environ.get("TERM") == "dumb":
            try:
                yield lambda done, total: _plain_progress(label, done, total)
            finally:
                sys.stderr.write("\n")
        else:
            from rich.console import Console
            from rich.progress import Progress

            console = Console(stderr=True, color_system="auto" if self.color else None)
            with Progress(console=console, transient=True) as bar:
                task = bar.add_task(label, total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total)


def _plain_progress(label: str, done: int, total: int) -> None:
    sys.stderr.write(f"\r{label} {done}/{total}")
    sys.stderr.flush()


def complain(text: str) -> None:
    """One line on stderr, with our name in front. An argument that a message quotes may hold a password."""
    line = printable(redacted(" ".join(text.split())))
    encoding = sys.stderr.encoding or "ascii"
    sys.stderr.write("perdure: " + line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
