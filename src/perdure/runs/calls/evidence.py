"""The evidence of a failure: its traceback, and the environment of the process. On request, all runs record the latter.

The traceback is part of the recorded error. The environment is a blob, stored once for all runs that failed in it and
named by their outcome. A user's value must never be recorded: a frame has only file, line, function and source line.
"""

from __future__ import annotations

import linecache
import platform
import sysconfig
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import orjson
from blake3 import blake3

from perdure.errors import UsageError
from perdure.runs.journal.entries import compress, decompress
from perdure.values.safe_repr import shown
from perdure.values.secrets import masked, redacted

TRACEBACK_MAX_BYTES = 8192
_FRAMES_MAX = 50  # of one error, the innermost
_ERRORS_MAX = 8  # causes, and members of groups
_LINE_MAX = 200
_OURS = str(Path(__file__).parents[2])


class _Recording:
    """The configuration, as JSON, that is recorded with runs that fail in this process, or with all runs."""

    configuration = b"{}"
    every_run = False


def record_failures(configuration: Mapping[str, Any], *, every_run: bool = False) -> None:
    """Record a configuration (versions of prompts and models, settings) with every run that fails in this process.

    With `every_run`, also with runs that succeed. It is part of the run's environment. Values whose name or form marks
    them as a password, a token or a key are masked, but no filter knows every secret.
    """
    try:
        text = orjson.dumps(masked(dict(configuration)), default=shown)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"configuration is a dictionary of what JSON can hold: {error}") from None
    _Recording.configuration, _Recording.every_run = text, every_run


def records_every_run() -> bool:
    """Return whether runs that succeed record their environment too."""
    return _Recording.every_run


def traceback_of(error: BaseException) -> bytes | None:
    """Return the traceback of an error and its causes, outermost frame first, as stored: at most 8 KB of text.

    None if it is empty. Never raises.
    """
    try:
        text = redacted("\n".join(_traceback(error, set()))).encode("utf-8", "replace")
        return compress(text[-TRACEBACK_MAX_BYTES:]) or None
    except Exception:  # a defective error class must not hide the failure
        return None


def traceback_text(described: Mapping[str, Any]) -> str | None:
    """Return the traceback of a recorded error; None if it has none."""
    stored = described.get("traceback")
    return decompress(stored).decode("utf-8", "ignore") if isinstance(stored, bytes) else None


def _traceback(error: BaseException | None, seen: set[int]) -> list[str]:
    """Return the traceback lines of an error, after those of its cause and its members. Each error appears once."""
    if error is None or id(error) in seen or len(seen) == _ERRORS_MAX:
        return []
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    members = error.exceptions[:_ERRORS_MAX] if isinstance(error, BaseExceptionGroup) else ()
    lines = [line for one in (before, *members) for line in _traceback(one, seen)]
    frames = (step for step in walk_tb(error.__traceback__) if not step[0].f_code.co_filename.startswith(_OURS))
    lines += [line for frame, number in deque(frames, _FRAMES_MAX) for line in _frame(frame, number)]
    return [*lines, type(error).__qualname__] if lines else []


def _frame(frame: FrameType, line: int) -> list[str]:
    code = frame.f_code
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()[:_LINE_MAX]
    return [f'  File "{code.co_filename}", line {line}, in {code.co_qualname}', f"    {source}"]


def environment(fn: Callable[..., Any] | None) -> bytes:
    """Return the environment of this process for runs of a function, in its stored form."""
    return _environment(str(getattr(getattr(fn, "__code__", None), "co_filename", "")), _Recording.configuration)


def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out where a folder is; None if it is in no git repository.

    It reads git's files: no program runs, and no configuration of the repository counts.
    """
    try:
        top = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), None)
        if top is None:
            return None
        git = top / ".git"
        if git.is_file():  # a worktree or a submodule
            git = top / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name, shared = head.removeprefix("ref: "), git / "commondir"
        common = git / shared.read_text().strip() if shared.exists() else git
        if (common / name).is_file():
            return (common / name).read_text().strip()
        packed = (line.split() for line in (common / "packed-refs").read_text().splitlines())
        return next((parts[0] for parts in packed if parts[1:] == [name]), None)
    except (OSError, UnicodeDecodeError):  # no commit yet, or none of our business
        return None


@cache
def _packages() -> dict[str, str]:
    from importlib.metadata import distributions  # imported late: only failures need it

    versions: dict[str, str] = {}
    for one in distributions():
        try:
            versions[str(one.name)] = str(one.version)
        except Exception:  # left behind by an aborted installation
            continue
    return dict(sorted(versions.items()))


@cache
def _environment(file: str, configuration: bytes) -> bytes:
    try:
        code = {"file": file, "hash": blake3(Path(file).read_bytes()).hexdigest()[:16]}
    except OSError:  # no file of its own: a notebook, a zip
        code = {"file": file}
    if file and (commit := git_commit(Path(file).absolute().parent)) is not None:
        code["commit"] = commit
    environment = {
        "code": code,
        "python": platform.python_version(),
        "platform": sysconfig.get_platform(),
        "packages": _packages(),
        "configuration": orjson.loads(configuration),
    }
    return compress(orjson.dumps(environment))
