"""The progress of an agent as a Markdown file with five fixed sections, and that file in git.

The file is for people and for the next session of an agent. What is exact is the record in the store: here blanks and
line breaks of a step become one blank, and other sections are passed over when the file is read.
"""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from perdure.storage.files import sync_file, sync_folder

_GOAL, _DONE, _BLOCKED = "Current Goal", "Completed Steps", "Current Blocker"
_NEXT, _CONTEXT = "Next Action", "Context"
_NONE: Final = "_None_"
_GIT_TIMEOUT_S: Final = 30.0


@dataclass
class Progress:
    """How far a run has come, in words."""

    goal: str = ""
    done: list[str] = field(default_factory=list)
    blocked: str | None = None
    next: str | None = None
    context: dict[str, Any] = field(default_factory=dict)


def to_markdown(progress: Progress) -> str:
    done = "\n".join(f"{number}. [x] {_line(text)}" for number, text in enumerate(progress.done, 1))
    context = "\n".join(f"- **{_line(key)}:** {_value(value)}" for key, value in progress.context.items())
    sections = {
        _GOAL: progress.goal,
        _DONE: done,
        _BLOCKED: progress.blocked,
        _NEXT: progress.next,
        _CONTEXT: context,
    }
    parts = [f"# Progress: {_line(progress.goal)[:120]}".rstrip(": ")]
    parts += [f"## {heading}\n\n{text or _NONE}" for heading, text in sections.items()]
    return "\n\n".join(parts) + "\n"


def from_markdown(text: str) -> Progress:
    """The progress in a file: what its five sections hold."""
    parts = re.split(r"^## +(.+?) *$", text.replace("\r\n", "\n"), flags=re.MULTILINE)
    sections = {heading: body.strip() for heading, body in zip(parts[1::2], parts[2::2], strict=True)}
    found = {heading: "" if body == _NONE else body for heading, body in sections.items()}
    return Progress(
        goal=found.get(_GOAL, ""),
        done=re.findall(r"^(?:\d+\.|[-*]) (?:\[x\] )?(?!\[ \])(.+?) *$", found.get(_DONE, ""), re.MULTILINE),
        blocked=found.get(_BLOCKED) or None,
        next=found.get(_NEXT) or None,
        context={
            key: _read_value(value)
            for key, value in re.findall(r"^[-*] \*\*(.+?):\*\* ?(.*)$", found.get(_CONTEXT, ""), re.MULTILINE)
        },
    )


def _line(text: str) -> str:
    return " ".join(text.split())


def _value(value: Any) -> str:
    """A text as it is, if it is one line; everything else as JSON in a code span."""
    if isinstance(value, str) and value == _line(value) and not value.startswith("`"):
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
    """The progress in a file; None if there is no such file."""
    try:
        return from_markdown(Path(path).read_text("utf-8-sig", "replace"))
    except FileNotFoundError:
        return None


def write(path: str | os.PathLike[str], progress: Progress) -> None:
    """Replace the file as a whole, durably; folders above it are made. A link stays a link."""
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name[:100]}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        with open(draft, "wb") as file:
            file.write(to_markdown(progress).encode("utf-8", "replace"))
            sync_file(file)
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(target)


def commit(path: str | os.PathLike[str], message: str) -> bool:
    """Commit this one file, whatever else is staged; whether git has it now. Never raises OSError."""
    import subprocess

    target = Path(path).resolve()

    def git(*arguments: str) -> int:
        return subprocess.run(
            ["git", "--literal-pathspecs", *arguments, "--", target.name],
            cwd=target.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            env={"EMAIL": "perdure@localhost", **os.environ},  # for a user whom git does not know
        ).returncode

    try:
        if git("add"):
            return False
        return not git("diff", "--cached", "--quiet") or not git("commit", "--quiet", "--only", "-m", message)
    except (OSError, subprocess.TimeoutExpired):
        return False
