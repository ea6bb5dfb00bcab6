"""What a failure leaves for those who look into it: where it was raised, and the environment that it happened in.

Only failures pay for it. A traceback is a part of the recorded error; an environment is a blob, stored once for all the
runs that failed in it, and named by their outcome.

Must never be recorded unasked: a value of the user's. Of a frame there is its file, line, function and source line.
"""

from __future__ import annotations

import linecache
import platform
import re
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import orjson
from blake3 import blake3

from perdure.runs.journal.entries import compress, decompress
from perdure.values.safe_repr import shown

TRACEBACK_MAX_BYTES = 8192
_FRAMES_MAX = 50  # the innermost
_CAUSES_MAX = 4
_OURS = str(Path(__file__).parents[2])
_NAME = r"\w*(?:passw(?:or)?d|secret|api_?key|credential|authorization)\w*|\w*token"
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_SECRETS = re.compile(
    rf"""(?ix) (?P<kept> \b(?:{_NAME}) ['"]?\s*[:=]\s* | ://[^\s:/@]*: (?=[^\s/@]+@) | \bbearer\s+ )
    (?: '[^'\n]*' | "[^"\n]*" | [^\s'",;)}}@]+ )
    | \b(?:sk|pk|ghp|xox[abp])[-_][\w-]{{8,}}"""
)


class _Recording:
    """What `record_failures` said for this process."""

    locals = False
    configuration: Mapping[str, Any] = {}


def record_failures(configuration: Mapping[str, Any] | None = None, *, locals: bool = False) -> None:
    """Say what the runs that fail in this process record: `configuration` (versions of prompts and models, settings) is
    a part of their environment; with `locals`, tracebacks have the variables of each frame, which may be personal data.
    What looks like a password, a token or a key is masked in both."""
    _Recording.configuration, _Recording.locals = dict(configuration or {}), locals


def redacted(text: str) -> str:
    """A text without what looks like a secret."""
    return _SECRETS.sub(lambda found: (found["kept"] or "") + "***", text)


def traceback_of(error: BaseException) -> bytes | None:
    """Where an error and its causes were raised, outermost first, in at most 8 KB, as it is stored. Never raises."""
    try:
        return compress(redacted(_traceback(error)).encode("utf-8", "replace")[-TRACEBACK_MAX_BYTES:]) or None
    except Exception:  # whatever a foreign class does, its failure is kept
        return None


def traceback_text(described: Mapping[str, Any]) -> str | None:
    """The traceback of a recorded error."""
    stored = described.get("traceback")
    return decompress(stored).decode("utf-8", "ignore") if isinstance(stored, bytes) else None


def _traceback(error: BaseException | None) -> str:
    lines: list[str] = []
    for _ in range(_CAUSES_MAX):
        if error is None:
            break
        frames = [(frame, line) for frame, line in walk_tb(error.__traceback__) if not _is_ours(frame)]
        shown_frames = [text for frame, line in deque(frames, _FRAMES_MAX) for text in _frame(frame, line)]
        lines = [*shown_frames, type(error).__qualname__, *lines]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(lines) if len(lines) > 1 else ""


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _frame(frame: FrameType, line: int) -> list[str]:
    code = frame.f_code
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    found = [f'  File "{code.co_filename}", line {line}, in {code.co_qualname}', f"    {source}"]
    if _Recording.locals:
        found += [f"      {name} = {shown(value, 200)}" for name, value in frame.f_locals.items()]
    return found


def environment(fn: Callable[..., Any] | None) -> bytes:
    """The environment of this process, for runs of a function, as it is stored."""
    file = str(getattr(getattr(fn, "__code__", None), "co_filename", ""))
    return _environment(file, orjson.dumps(_masked(_Recording.configuration), default=shown))


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): "***" if _SECRET_NAME.fullmatch(str(k)) else _masked(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(one) for one in value]
    return redacted(value) if isinstance(value, str) else value


@cache
def _packages() -> dict[str, str]:
    return dict(sorted({one.name: one.version for one in distributions()}.items()))


@cache
def _environment(file: str, configuration: bytes) -> bytes:
    try:
        code = {"file": file, "hash": blake3(Path(file).read_bytes()).hexdigest()[:16]}
    except OSError:  # a notebook, a zip
        code = {"file": file}
    found = {
        "code": code,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "configuration": orjson.loads(configuration),
    }
    return compress(orjson.dumps(found))
