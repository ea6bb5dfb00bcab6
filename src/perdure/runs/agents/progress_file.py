"""Progress for whoever comes next: what is wanted, done, in the way, next, and good to know, as a Markdown file.

The next session of an agent, or a person, reads the file first and need not find out again what is known.

    # Progress: Book flight to NYC

    ## Current Goal

    Book a morning flight to NYC for tomorrow

    ## Completed Steps

    1. [x] Searched flights: 47 options found

    ## Current Blocker

    _None_

    ## Next Action

    Present the 9am alternative

    ## Context

    - **airport:** SFO
    - **limit:** `500`

What `to_markdown` writes, `from_markdown` reads back exactly: a text that Markdown would not keep (blanks at its
ends, a line that looks like a heading) stands as JSON in a code span, and so does a value of the context that is
no text. The reader takes what a person makes of the file: other numbering, other headings, sections of their own.

No database here. The file is replaced as a whole, so that a reader finds the old one or the new one, never half.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perdure.errors import UsageError
from perdure.storage.files import sync_file, sync_folder

if TYPE_CHECKING:
    import subprocess

__all__ = [
    "UNCHANGED",
    "Committed",
    "Progress",
    "commit",
    "from_markdown",
    "merge",
    "read",
    "to_markdown",
    "write",
]

Context = dict[str, Any] | list[str]


class _Unchanged:
    """The default of what `None` would clear."""

    def __repr__(self) -> str:
        return "unchanged"


UNCHANGED: Final = _Unchanged()

#: Where notes go that have no name, if the context has names.
NOTES: Final = "notes"
#: Where steps go that a person unchecked: they are no longer done.
UNCHECKED: Final = "unchecked steps"

_GIT_TIMEOUT_S: Final = 30.0


@dataclass
class Progress:
    """How far a run has come, in words."""

    goal: str = ""
    done: list[str] = field(default_factory=list)
    blocked: str | None = None
    next: str | None = None
    context: Context = field(default_factory=dict)


class Committed(NamedTuple):
    """Whether git has the file as it is, and if not, why not."""

    ok: bool
    reason: str


# -- changing it


def merge(
    old: Progress | None,
    *,
    goal: str | None = None,
    done: str | Iterable[str] | None = None,
    blocked: str | _Unchanged | None = UNCHANGED,
    next: str | _Unchanged | None = UNCHANGED,
    context: Mapping[str, Any] | Iterable[str] | str | None = None,
) -> Progress:
    """The progress after a change; `old` stays as it is.

    `done` is added to what is done, once each; a next action that is done now is no longer next. `blocked` and
    `next` are replaced, and cleared by None. The context is added to: a dict by its keys, notes once each.
    """
    old = Progress() if old is None else old
    added = _texts("done", done)
    upcoming = old.next if isinstance(next, _Unchanged) else _text("next", next)
    if isinstance(next, _Unchanged) and upcoming in added:
        upcoming = None
    return Progress(
        goal=old.goal if goal is None else _text("goal", goal) or "",
        done=list(dict.fromkeys([*old.done, *added])),
        blocked=old.blocked if isinstance(blocked, _Unchanged) else _text("blocked", blocked),
        next=upcoming,
        context=_merged_context(old.context, context),
    )


def _text(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"progress: {name} is a text, not a {type(value).__qualname__}")
    return value or None


def _texts(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise UsageError(f"progress: {name} is a text or a list of texts, not a {type(value).__qualname__}")
    texts = list(value)
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"progress: {name} is a text or a list of texts, and one is a {type(text).__qualname__}")
    return texts


def _merged_context(old: Context, new: Mapping[str, Any] | Iterable[str] | str | None) -> Context:
    if isinstance(new, Mapping):
        named = dict(old) if isinstance(old, dict) else ({NOTES: list(old)} if old else {})
        for key, value in new.items():
            if not isinstance(key, str):
                raise UsageError(f"progress: the context's keys are texts, and one is a {type(key).__qualname__}")
            named[key] = value
        return named
    notes = _texts("context", new)
    if isinstance(old, dict) and (old or not notes):
        return _noted(old, notes) if notes else dict(old)
    return list(dict.fromkeys([*old, *notes]))


def _noted(context: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """A context with names, and notes that have none put under one."""
    before = context.get(NOTES, [])
    kept = before if isinstance(before, list) else [before]
    return {**context, NOTES: [*kept, *(note for note in notes if note not in kept)]}


# -- as Markdown

# Patterns are compiled when they are first used: `import perdure` has to be fast.
_NONE: Final = "_None_"
_NONE_WORDS: Final = frozenset({"", "-", "none", "no", "n/a", "nothing", "null"})
_HEADING: Final = r"##(?!#)\s*(.*?)[\s#:]*$"
_TITLE: Final = r"#(?!#)"
# A line of text that looks like a heading, with or without backslashes before it; it gets one more.
_LIKE_A_HEADING: Final = r"\\*##(?!#)"
_ITEM: Final = r" ?(?:\d+[.)]|[-*+])(?:[ \t]+|$)(?:\[([ xX])\](?:[ \t]+|$))?(.*)$"
_NAMED: Final = r"(?s)\*\*((?:[^*\\]|\\.)+?):\*\* ?(.*)$"
_LOOSELY_NAMED: Final = r"(?s)([^:\n]{1,40}):[ \t]+(\S.*)$"
_CODE: Final = r"`([^`]*)`$"
_NOT_CLEAN: Final = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
_SECTIONS: Final = {
    "goal": ("goal", "current goal", "objective"),
    "done": ("completed steps", "completed", "completed tasks", "done", "steps done"),
    "blocked": ("current blocker", "current blockers", "blocker", "blockers", "blocked"),
    "next": ("next action", "next actions", "next", "next step", "next steps"),
    "context": ("context", NOTES),
}
_SECTION_OF: Final = {name: section for section, names in _SECTIONS.items() for name in names}
_MISSING: Final = object()


def to_markdown(progress: Progress, title: str | None = None) -> str:
    """The file's text. Without a title, the goal's first line is it."""
    heading = " ".join((progress.goal.partition("\n")[0][:120] if title is None else title).split())
    parts = [
        f"# Progress: {heading}" if heading else "# Progress",
        f"## Current Goal\n\n{_block(progress.goal, '')}",
        f"## Completed Steps\n\n{_steps(progress.done)}",
        f"## Current Blocker\n\n{_block(progress.blocked, None)}",
        f"## Next Action\n\n{_block(progress.next, None)}",
        f"## Context\n\n{_context(progress.context)}",
    ]
    # Only a title can still hold halves of characters, which no file can.
    return ("\n\n".join(parts) + "\n").encode("utf-8", "replace").decode()


def from_markdown(text: str) -> Progress:
    """The progress that a file tells of. What a person added in sections of their own is in the context."""
    sections, others = _sections(text)
    done, unchecked = _read_steps(sections.get("done", []))
    context = _read_context(sections.get("context", []))
    if unchecked:
        others.append((UNCHECKED, unchecked))
    for name, value in others:
        named = context if isinstance(context, dict) else ({NOTES: context} if context else {})
        context = _noted(named, [value]) if name == NOTES or name in named else {**named, name: value}
    return Progress(
        goal=_read_block(sections.get("goal", [])) or "",
        done=done,
        blocked=_read_block(sections.get("blocked", [])),
        next=_read_block(sections.get("next", [])),
        context=context,
    )


def _sections(text: str) -> tuple[dict[str, list[str]], list[tuple[str, Any]]]:
    """The lines of each section that is known, and the others with their headings."""
    known: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {NOTES: []}
    lines = others[NOTES]
    for line in text.replace("\r\n", "\n").split("\n"):
        heading = re.match(_HEADING, line)
        if heading is not None:
            name = " ".join(heading[1].split()) or NOTES
            section = _SECTION_OF.get(name.lower())
            lines = known.setdefault(section, []) if section else others.setdefault(name, [])
        elif known or not re.match(_TITLE, line):
            lines.append(line)
    texts = [(name, "\n".join(lines).strip()) for name, lines in others.items()]
    if "goal" not in known:  # a file without headings is a goal
        known["goal"] = others[NOTES]
        del texts[0]
    return known, [(name, text) for name, text in texts if text]


def _block(text: str | None, empty: str | None) -> str:
    """A text as a paragraph, if it is read back as it is; else as JSON."""
    if text is None or text == empty:
        return _NONE
    plain = "\n".join(f"\\{line}" if re.match(_LIKE_A_HEADING, line) else line for line in text.split("\n"))
    return plain if _is_clean(text) and _read_block(plain.split("\n")) == text else _code(text)


def _read_block(lines: list[str]) -> str | None:
    plain = (line[1:] if line.startswith("\\") and re.match(_LIKE_A_HEADING, line) else line for line in lines)
    text = "\n".join(plain).strip()
    return None if _is_none(text) else _decoded_text(text)


def _steps(done: list[str]) -> str:
    return "\n".join(_item(f"{at}. [x] ", text) for at, text in enumerate(done, 1)) or _NONE


def _item(mark: str, text: str) -> str:
    """An item of a list, as text if it is read back as it is; else as JSON."""
    plain = re.sub(r"\n +(?=\n)", "\n", (mark + text).replace("\n", "\n    "))
    found = _items(plain.split("\n"))
    return plain if _is_clean(text) and [item for _, item in found] == [text] else mark + _code(text)


def _items(lines: Iterable[str]) -> list[tuple[str, str]]:
    """The items of a list, each as its checkbox and its text. Lines that follow an item belong to it."""
    items: list[tuple[str, list[str]]] = []
    for line in lines:
        found = re.match(_ITEM, line)
        if found is not None:
            items.append((found[1] or "", [found[2]]))
        elif items:
            items[-1][1].append(line[4:] if line.startswith("    ") else line.lstrip())
        elif not _is_none(line):
            items.append(("", [line.strip()]))
    return [(box, _decoded_text("\n".join(parts).rstrip())) for box, parts in items]


def _read_steps(lines: list[str]) -> tuple[list[str], list[str]]:
    """The steps that are done, and those that a person unchecked."""
    items = [(box, text) for box, text in _items(lines) if text or box]
    return [text for box, text in items if box != " "], [text for box, text in items if box == " "]


def _context(context: Context) -> str:
    plain: Context = context
    if isinstance(context, dict):
        plain = {key: json.loads(_json(value)) for key, value in context.items()}
        text = "\n".join(_named(key, value) for key, value in plain.items()) or _NONE
    else:
        text = "\n".join(_item("- ", note) for note in context) or _code([])
    # A key that is odd, or notes that look like keys: then all of it as JSON.
    odd = not _is_clean(text) or any("\n" in key for key in plain if isinstance(plain, dict))
    return _code(plain) if odd or _read_context(text.split("\n")) != plain else text


def _named(key: str, value: Any) -> str:
    mark = "- **" + re.sub(r"([*\\])", r"\\\1", key) + ":** "
    if isinstance(value, str) and _is_clean(value):
        plain = re.sub(r"\n +(?=\n)", "\n", (mark + value).replace("\n", "\n    "))
        if _read_context(plain.split("\n")) == {key: value}:
            return plain
    return mark + _code(value)


def _read_context(lines: list[str]) -> Context:
    whole = _decoded("\n".join(lines).strip())
    if isinstance(whole, dict) or (isinstance(whole, list) and all(isinstance(note, str) for note in whole)):
        return whole
    items = [text for _, text in _items(lines) if text]
    found = [re.match(_NAMED, text) for text in items]
    if not any(found):
        return items if items else {}
    context: dict[str, Any] = {}
    notes: list[str] = []
    for text, named in zip(items, found, strict=True):
        loosely = re.match(_LOOSELY_NAMED, text)
        if named is not None:
            value = _decoded(named[2])
            context[re.sub(r"\\(.)", r"\1", named[1])] = named[2] if value is _MISSING else value
        elif loosely is not None:
            context[loosely[1]] = loosely[2]
        else:
            notes.append(text)
    return _noted(context, notes) if notes else context


def _is_none(text: str) -> bool:
    return text.strip().strip("_*.()").lower() in _NONE_WORDS


def _is_clean(text: str) -> bool:
    return re.search(_NOT_CLEAN, text) is None


def _json(value: Any) -> str:
    """JSON, with what it has no form for as its text."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # odd keys in the depth of it, or a value that holds itself
        return json.dumps(repr(value), ensure_ascii=False)


def _code(value: Any) -> str:
    """A value as JSON in a code span."""
    text = re.sub(_NOT_CLEAN, lambda found: f"\\u{ord(found[0]):04x}", _json(value))
    return "`" + text.replace("`", "\\u0060") + "`"


def _decoded(text: str) -> Any:
    """The value in a code span; _MISSING if there is none."""
    found = re.match(_CODE, text)
    try:
        return _MISSING if found is None else json.loads(found[1])
    except (ValueError, RecursionError):
        return _MISSING


def _decoded_text(text: str) -> str:
    value = _decoded(text)
    return value if isinstance(value, str) else text


# -- as a file


def read(path: str | os.PathLike[str]) -> Progress | None:
    """The progress in a file; None if there is no such file."""
    try:
        return from_markdown(Path(path).read_bytes().decode("utf-8-sig", "replace"))
    except FileNotFoundError:
        return None


def write(path: str | os.PathLike[str], progress: Progress, title: str | None = None) -> None:
    """Replace the file as a whole, durably; folders above it are made. A link stays a link."""
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name[:100]}.{os.getpid()}-{threading.get_ident()}.tmp"
    draft.unlink(missing_ok=True)  # of a process with our number that died here
    try:
        with open(draft, "xb") as file:
            if target.exists():
                os.fchmod(file.fileno(), target.stat().st_mode & 0o7777)
            file.write(to_markdown(progress, title).encode())
            sync_file(file)
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(target)


# -- in git


def commit(path: str | os.PathLike[str], message: str) -> Committed:
    """Commit this one file, whatever else is staged, if it lies in a git work tree. Never raises.

    Nothing to commit is fine. What git says otherwise (a hook that refuses, a merge under way, a lock) is the
    reason; the run goes on, and the next commit takes the file as it is then.
    """
    try:
        target = Path(path).resolve()
        if not target.is_file():
            return Committed(False, f"there is no file {target}")
        return _commit(target, message)
    except FileNotFoundError:
        return Committed(False, "git is not installed")
    except (OSError, ValueError, RuntimeError) as problem:
        return Committed(False, f"{problem}")


def _commit(target: Path, message: str) -> Committed:
    folder, name = target.parent, target.name
    code, said = _git(folder, "rev-parse", "--is-inside-work-tree")
    if code != 0 or said != "true":
        return Committed(False, f"{target} is in no git work tree" + (f": {said}" if code != 0 and said else ""))
    code, said = _git(folder, "add", "--", name)
    if code != 0:
        return Committed(False, said or "git add failed")
    code, said = _git(folder, "diff", "--cached", "--quiet", "--", name)
    if code == 0:
        return Committed(True, "nothing to commit")
    who: list[str] = []
    for option, instead in (("user.name", "Perdure"), ("user.email", "perdure@localhost")):
        code, said = _git(folder, "config", "--get", option)
        if code != 0 or not said:
            who += ["-c", f"{option}={instead}"]
    text = message.replace("\0", "").encode("utf-8", "replace").decode().strip() or "Progress"
    code, said = _git(folder, *who, "commit", "--quiet", "--only", "-m", text, "--", name)
    return Committed(code == 0, "committed" if code == 0 else said or "git commit failed")


def _git(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run git without a shell, a terminal or a question; its exit code and what it said."""
    import signal
    import subprocess

    # Set by a hook that started us, these would lead git to another work tree than the file's.
    environment = {key: value for key, value in os.environ.items() if key not in _MISLEADING}
    environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true"}
    process = subprocess.Popen(
        ["git", "--literal-pathspecs", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=_GIT_TIMEOUT_S)
    except BaseException as problem:
        # Asked to end, git removes its lock; killed, it would leave it, and no git works there any more.
        _end(process, signal.SIGTERM)
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            _end(process, signal.SIGKILL)
            process.communicate()
        if isinstance(problem, subprocess.TimeoutExpired):
            raise TimeoutError(f"git {arguments[0]} took longer than {_GIT_TIMEOUT_S:.0f} s and was stopped") from None
        raise
    return process.returncode, said.decode("utf-8", "replace").strip()


def _end(process: subprocess.Popen[bytes], signal_number: int) -> None:
    try:
        os.killpg(process.pid, signal_number)
    except ProcessLookupError:
        pass


_MISLEADING: Final = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR"}
)
