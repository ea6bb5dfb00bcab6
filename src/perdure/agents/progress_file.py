"""`Progress` as a Markdown file with five fixed sections, and the commit of that file to git.

The file is for people and for the next session of an agent. Only the record in the store is exact: in the file, blanks
and line breaks within a step become one blank. Lines and sections that a person added are kept as notes.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from perdure.storage.files import replacing

_GOAL, _DONE, _BLOCKED = "Current Goal", "Completed Steps", "Current Blocker"
_NEXT, CONTEXT = "Next Action", "Context"
_SECTIONS: Final = (_GOAL, _DONE, _BLOCKED, _NEXT, CONTEXT)
_NONE: Final = "_None_"
_ITEM = re.compile(r"([-*+]|\d+[.)])[ \t]+(.*)")
_BOX = re.compile(r"\[([ xX])\] *(.*)")
_NAMED = re.compile(r"\*\*(.+?):\*\* ?(.*)")
_GIT_TIMEOUT_S: Final = 30.0


@dataclass
class Progress:
    """The record of how far a run has come."""

    goal: str = ""
    done: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    next: str | None = None
    context: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """What the file says besides, by the heading of its section ("": before the first one). Reports keep it."""


class FileContent(NamedTuple):
    """The progress in a file, and those of its completed steps that a person added."""

    progress: Progress
    done_by_hand: list[str]


def to_markdown(progress: Progress) -> str:
    done = "\n".join(f"{number}. [x] {one_line(text)}" for number, text in enumerate(progress.done, 1))
    context = "\n".join(f"- **{one_line(key)}:** {_value(value)}" for key, value in progress.context.items())
    ours = {
        _GOAL: progress.goal,
        _DONE: done,
        _BLOCKED: _listed(progress.blocked),
        _NEXT: progress.next,
        CONTEXT: context,
    }
    notes = dict(progress.notes)
    parts = [f"# Progress: {one_line(progress.goal)[:120]}".rstrip(": "), notes.pop("", "")]
    for heading, text in ours.items():
        parts.append(f"## {heading}\n\n" + ("\n".join(filter(None, (text, notes.pop(heading, "")))) or _NONE))
    parts += [f"## {heading}\n\n{text}".rstrip() for heading, text in notes.items()]
    return "\n\n".join(filter(None, parts)) + "\n"


def from_markdown(text: str) -> FileContent:
    """Parse the five sections of a file. All other text becomes notes."""
    before, *parts = re.split(r"^## +(.+?) *$", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    sections: dict[str, str] = {}
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        sections[heading] = f"{sections.get(heading, '')}\n{body}".strip()
    said = {heading: "" if sections.get(heading) == _NONE else sections.get(heading, "") for heading in _SECTIONS}
    progress, by_hand = Progress(said[_GOAL], blocked=_read_list(said[_BLOCKED]), next=said[_NEXT] or None), []
    notes: dict[str, list[str]] = {
        "": [re.sub(r"^# Progress\b.*\n*", "", before, flags=re.MULTILINE).strip()],
        _DONE: [],
        CONTEXT: [],
    }
    for marker, item, lines in _items(said[_DONE]):
        box = _BOX.fullmatch(item)
        if not marker or (box is not None and box[1] == " "):
            notes[_DONE].append(lines)
        else:
            progress.done.append(item if box is None else box[2])
            if box is None or not marker[0].isdigit():
                by_hand.append(progress.done[-1])
    for marker, item, lines in _items(said[CONTEXT]):
        if marker and (named := _NAMED.fullmatch(item)) is not None:
            progress.context[named[1]] = _read_value(named[2])
        else:
            notes[CONTEXT].append(lines)
    notes |= {heading: [body] for heading, body in sections.items() if heading not in _SECTIONS}
    progress.notes = {
        heading: "\n".join(lines) for heading, lines in notes.items() if any(lines) or heading not in ("", *_SECTIONS)
    }
    return FileContent(progress, by_hand)


def _listed(texts: list[str]) -> str:
    """Format texts: one alone as it is, several as bullets. One that would be read as bullets becomes one."""
    return texts[0] if len(texts) == 1 and _read_list(texts[0].strip()) == texts else bullets(texts)


def bullets(texts: Iterable[str]) -> str:
    return "\n".join(f"- {one_line(text)}" for text in texts)


def _read_list(body: str) -> list[str]:
    """Return the texts of a section: of each bullet if it has only bullets, otherwise the whole as one."""
    items = list(_items(body))
    return [item for _, item, _ in items] if all(marker for marker, _, _ in items) else [body]


def _items(body: str) -> Iterator[tuple[str, str, str]]:
    """Yield the items of a section: marker ("" for a line of text), the item in one line, its original lines.

    Indented lines belong to the item before."""
    items: list[list[str]] = []
    for line in body.splitlines():
        if line[:1].isspace() and line.strip() and items:
            items[-1].append(line)
        elif line.strip() and line.strip() != _NONE:
            items.append([line])
    for lines in items:
        match = _ITEM.fullmatch(lines[0].rstrip())
        text = one_line(" ".join([lines[0] if match is None else match[2], *lines[1:]]))
        yield "" if match is None else match[1], text, "\n".join(lines)


def one_line(text: str) -> str:
    """Join the lines of a text by blanks, as the file shows a step."""
    return " ".join(text.split())


def _value(value: Any) -> str:
    """Format a context value: text of one line unchanged, other values as JSON in a code span."""
    if isinstance(value, str) and value == one_line(value) and not value.startswith("`"):
        return value
    return f"`{json.dumps(value, ensure_ascii=False, default=str)}`"


def _read_value(text: str) -> Any:
    if len(text) > 1 and text[0] == text[-1] == "`":
        try:
            return json.loads(text[1:-1])
        except ValueError:
            pass  # a person's own code span
    return text


def read(path: str | os.PathLike[str]) -> Progress | None:
    """Return the progress in a file, or None if the file does not exist."""
    content = read_content(path)
    return None if content is None else content.progress


def read_content(path: str | os.PathLike[str]) -> FileContent | None:
    """Return the content of a file, or None if the file does not exist. Raises OSError."""
    try:
        return from_markdown(Path(path).read_text("utf-8-sig", "replace"))
    except FileNotFoundError:
        return None


def write(path: str | os.PathLike[str], progress: Progress) -> None:
    """Replace the file atomically and durably. Create missing folders. A symbolic link stays one."""
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name[:100]}.{os.getpid()}-{threading.get_ident()}.tmp"
    with replacing(target, draft, open(draft, "wb")) as file:
        file.write(to_markdown(progress).encode("utf-8", "replace"))


def git_status(path: Path, *, all_files: bool = False) -> str | None:
    """Return what git says of uncommitted changes of a file, or of all files of its repository: "" for none.

    None if it is in no repository.
    """
    import subprocess

    # A repository's own configuration must not run a program here.
    asked = ["git", "--no-optional-locks", "--literal-pathspecs", "-c", "core.fsmonitor=false", "status", "--porcelain"]
    asked += [] if all_files else ["--ignored", "--", path.name]
    try:
        done = subprocess.run(
            asked,
            cwd=path.resolve().parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit(path: str | os.PathLike[str], message: str) -> bool:
    """Commit this file alone, whatever else is staged, and return whether git has it now. Never raises OSError."""
    import subprocess

    target = Path(path).resolve()

    def git(*arguments: str) -> int:
        return subprocess.run(
            ["git", "--literal-pathspecs", *arguments, "--", target.name],
            cwd=target.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            env={"EMAIL": "perdure@localhost", **os.environ},  # used if git has no user configured
        ).returncode

    try:
        if git("add"):
            return False
        return not git("diff", "--cached", "--quiet") or not git("commit", "--quiet", "--only", "-m", message)
    except (OSError, subprocess.TimeoutExpired):
        return False
