"""What a page is (`Page`), and what its data function gets (`PageView`): the store, the request, who asks."""

from __future__ import annotations

import getpass
import shlex
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

import perdure
import perdure.views
from perdure.errors import UsageError
from perdure.inspector import values


@dataclass(frozen=True)
class Settings:
    """How a store is shown."""

    name: str
    """of the store, without a password"""
    store_options: tuple[str, ...] = ()
    """of the commands that pages show, such as `--store agent.db`"""
    read_only: bool = False
    all_tenants: bool = False
    reveal: bool = False
    root_path: str = ""
    who_header: str | None = None


class Kept(OrderedDict[Any, Any]):
    """The values that a server used last, at most so many."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: Any, value: Any) -> None:
        """Keep a value, and drop the oldest one if there are too many."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)


@dataclass(frozen=True)
class PageView:
    """One request for a page or an action. `store` is the tenant's."""

    store: perdure.Store
    settings: Settings
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    """the variable parts of the path, such as the id of a run"""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    kept: Kept = field(default_factory=lambda: Kept(16))
    """between requests"""

    @property
    def part(self) -> str:
        """What the script of an open page reads again: its live parts ("live"), or one part; "" for the whole page."""
        return self.headers.get("x-part", "")

    @property
    def tenant(self) -> str | None:
        """The tenant in the URL; None if it is the one that the inspector was started with."""
        return self.query.get("tenant")

    @property
    def who(self) -> str:
        """The name that actions are recorded under; "" if the proxy sent none."""
        if self.settings.who_header is not None:
            return self.headers.get(self.settings.who_header.lower(), "").strip()[:200]
        try:
            return getpass.getuser()
        except (KeyError, OSError):
            return "operator"

    def value(self, value: Any) -> Any:
        """Return a value of the store for a page: plain data, secrets masked. Every value of users passes here."""
        return values.plain(value, reveal=self.settings.reveal)

    def changes(self, changes: Sequence[perdure.Change], most: int) -> dict[str, Any]:
        """Return changes of a state for a page, at most so many. Values are masked by the keys that lead to them."""
        rows = []
        for change in changes[:most]:
            before, after = (_line(self.value_at(change.path, value)) for value in (change.before, change.after))
            path = ".".join(map(str, change.path)) or "(all of it)"
            rows.append({"path": path, "kind": change.kind, "before": before, "after": after})
        return {"rows": rows, "more": len(changes) - len(rows), "count": len(changes)}

    def value_at(self, path: Sequence[Any], value: Any) -> Any:
        """Return the value at a path of a state for a page, masked also by the keys that lead to it."""
        for key in reversed(path):
            value = {key: value}
        value = self.value(value)
        for _ in path:
            if not isinstance(value, dict):
                break
            [value] = value.values()
        return value

    def link(self, /, *parts: str, **query: object) -> str:
        """Return the URL of a page: `link("runs", id, step=4)`. Keeps the tenant. A None in `query` is left out."""
        asked = {"tenant": self.tenant, **query}
        text = urlencode({name: str(value) for name, value in asked.items() if value is not None})
        return f"{self.settings.root_path}/{'/'.join(map(quoted, parts))}" + (f"?{text}" if text else "")

    def here(self, /, **changed: object) -> str:
        """Return the URL of this page with some of its query changed. A None removes a parameter."""
        asked = {name: value for name, value in {**self.query, **changed}.items() if name != "notice"}
        text = urlencode({name: str(value) for name, value in asked.items() if value is not None})
        return f"{self.settings.root_path}{quote(self.path)}" + (f"?{text}" if text else "")

    def number(self, name: str, default: int, *, least: int = 0, most: int = 10**9) -> int:
        """Return a number of the query. Raises UsageError if it is none."""
        text = self.query.get(name) or str(default)
        if not text.isdecimal() or not least <= int(text[:12]) <= most:
            raise UsageError(f"?{name}={text[:40]}: a number from {least} to {most}")
        return int(text)

    def signed(self, name: str, /, *arguments: str, **options: Any) -> str:
        """Return the command that does the same in the name of the person who asks."""
        return self.command(name, *arguments, **options, who=self.who)

    def command(self, name: str, /, *arguments: str, **options: str | bool | list[str] | None) -> str:
        """Return the command that does the same: `command("run resolve", id, step, not_done=True)`.

        An option with a list is repeated for each of its items."""
        words: list[str] = []
        every = (
            (name, one) for name, value in options.items() for one in (value if isinstance(value, list) else [value])
        )
        for option, value in every:
            flag = f"--{option.replace('_', '-')}"
            if value is True:
                words.append(flag)
            elif value not in (None, False):
                words += [f"{flag}={value}"] if str(value).startswith("-") else [flag, str(value)]
        words += [*self.settings.store_options, *(("--tenant", self.tenant) if self.tenant else ())]
        has_dash = any(argument.startswith("-") for argument in arguments)
        return shlex.join(
            ["perdure", *name.split(), *((*words, "--", *arguments) if has_dash else (*arguments, *words))]
        )


@dataclass(frozen=True)
class Page:
    """A page: its path, the function that reads its data, its template. Its JSON twin is `/api` + path."""

    path: str
    data: Callable[[PageView], Awaitable[dict[str, Any]]]
    template: str


def _line(value: Any) -> Any:
    return perdure.views.as_line(value) if perdure.views.role_of(value) else value


def quoted(part: str) -> str:
    """Return a name as one segment of a path. Browsers resolve `.` and `..`, even escaped, so those get a tilde."""
    return quote(f"~{part}" if part in (".", "..") or part.startswith("~") else part, safe="")


def unquoted(part: str) -> str:
    """Return the name in a segment that `quoted` made, after the server has decoded it."""
    return part.removeprefix("~")
