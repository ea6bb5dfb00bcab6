"""Recording the errors of a run's own code, and raising them again.

An error is rebuilt without running any code of its class, which is looked up by name. A part that could not be recorded
is `Lost`: its use leaves the run stuck. If the class is missing, `Unresolved` says why: an `except` would not match a
substitute. Errors that an error refers to are in one flat list, `others`; 0 is the error itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from enum import Enum
from types import MemberDescriptorType
from typing import Any, cast

from perdure.errors import StepFailed
from perdure.runs.calls.error_parts import KINDS, Lost, kind_of, make
from perdure.runs.calls.evidence import traceback_of
from perdure.runs.execution.scope import StepCall, current
from perdure.storage.events import event
from perdure.values.codec import decode, encode
from perdure.values.names import class_name, find_class
from perdure.values.registry import Codec, default_name

_log = logging.getLogger("perdure")
_RECORDED = "__perdure_recorded__"
_TEXT = "__perdure_text__"  # the recorded text of a rebuilt error, whose __str__ may need parts that are lost
TEXT_MAX = 10_000
_ERRORS_MAX = 10_000  # of one recorded error: itself, its causes, contexts, members and parts
_LEVELS_MAX = 6  # of containers in a part
# The members that built-in classes keep beside the arguments. Not AttributeError.obj, which can be any object.
_MEMBERS: dict[type[Exception], tuple[str, ...]] = {
    AttributeError: ("name",),
    BlockingIOError: ("characters_written",),
    ImportError: ("name", "path", "name_from"),
    NameError: ("name",),
    SyntaxError: ("msg", "filename", "lineno", "offset", "text", "end_lineno", "end_offset"),
    UnicodeError: ("start", "end", "reason"),
}


class _ErrorPlaces:
    """The errors that a description refers to, in the order of their places."""

    def __init__(self, error: BaseException, codec: Codec) -> None:
        self.codec = codec
        self.errors = [error]
        self._places = {id(error): 0}  # by id, which stays valid because `errors` keeps the objects alive

    def place(self, error: BaseException) -> int:
        place = self._places.setdefault(id(error), len(self.errors))
        if place == len(self.errors):
            self.errors.append(error)
        return place

    def at(self, place: int) -> BaseException:
        return self.errors[place]


def describe_error(error: BaseException, codec: Codec) -> dict[str, Any]:
    """Describe an error as plain data. Never raises: a defective error class must not hide the failure."""
    scope = current.set(None)  # reading a lost part only to describe it must not leave the run stuck
    try:
        return _described(error, codec)
    finally:
        current.reset(scope)


def _described(error: BaseException, codec: Codec) -> dict[str, Any]:
    errors = _ErrorPlaces(error, codec)
    described = _describe_one(error, errors)
    others: list[dict[str, Any]] = []
    while len(others) + 1 < len(errors.errors) <= _ERRORS_MAX:
        others.append(_describe_one(errors.errors[len(others) + 1], errors))
    if len(errors.errors) > _ERRORS_MAX:
        described["lost"] = f"it has more than {_ERRORS_MAX:,} causes, contexts and members"
    elif others:
        described["others"] = others
    if (traceback := traceback_of(error)) is not None:
        described["traceback"] = traceback
    return described


def _describe_one(error: BaseException, errors: _ErrorPlaces) -> dict[str, Any]:
    """Describe one error, and give a place to each error that it refers to."""
    module, name = _name_of(type(error))
    described: dict[str, Any] = {"type": f"{module}:{name}", "text": safe_text(error)}
    if "<locals>" not in name and find_class(module, name) is not type(error):
        described["base"] = _importable_base(type(error))
    attributes = _attributes(error)
    if (kind := kind_of(error)) is not None and (kind_part := _kind_part(kind, error, errors)) is not None:
        described["made"] = kind_part
        attributes = [name for name in attributes if name not in _names_of_kind(kind_part, errors)]
    else:
        described["args"] = _part(_arguments(error), errors)
    if isinstance(error, OSError):
        members = (OSError.errno, OSError.strerror, OSError.filename, OSError.filename2)
        described["os"] = [_part(_own(member, error), errors) for member in members]
    if kept := {name: _attribute(error, name, errors) for name in attributes}:
        described["attributes"] = {name: part for name, part in kept.items() if part is not None}
    if isinstance(error, BaseExceptionGroup):
        described["errors"] = [errors.place(member) for member in _own(BaseExceptionGroup.exceptions, error)]
    for key, member in (("cause", BaseException.__cause__), ("context", BaseException.__context__)):
        if (other := _own(member, error)) is not None:
            described[key] = errors.place(other)
    if _own(BaseException.__suppress_context__, error):
        described["suppress"] = True
    return described


def _name_of(cls: type) -> tuple[str, str]:
    module, name = (text.encode("utf-8", "replace").decode() for text in class_name(cls))
    return module, name


def _importable_base(cls: type) -> str:
    """Return the name of the nearest importable base of a class that cannot be imported.

    For example, botocore creates `client.exceptions.NoSuchKey` anew for each client.
    """
    bases = ((*class_name(base), base) for base in cls.__mro__[1:])
    return next(f"{module}:{name}" for module, name, base in bases if find_class(module, name) is base)


# --- the parts of an error: plain data encoded as bytes, or a dict whose key is the kind of part


def _part(value: Any, errors: _ErrorPlaces, level: int = 0) -> Any:
    """Describe a part of an error. Never raises."""
    if type(value) is Lost:
        return {"lost": value.what, "by_rule": value.by_rule, "repr": value.text}
    try:
        return encode(value, errors.codec)
    except Exception:  # not plain data, or defective
        pass
    if (
        not isinstance(value, BaseException)
        and (kind := kind_of(value)) is not None
        and (part := _kind_part(kind, value, errors, level)) is not None
    ):
        return part
    if isinstance(value, BaseException):
        return {"error": errors.place(value)}
    if isinstance(value, type):
        name = _findable(value, errors)
        return {"class": name} if name else {"lost": f"a {default_name(value)}", "repr": type.__repr__(value)}
    if isinstance(value, Enum) and value.name in type(value).__members__ and (name := _findable(type(value), errors)):
        return {"class": name, "member": value.name}
    if level < _LEVELS_MAX:
        if type(value) in (list, tuple):
            return {type(value).__name__: [_part(item, errors, level + 1) for item in list(value)]}
        if type(value) is dict and all(type(key) is str for key in value):
            return {"dict": {key: _part(item, errors, level + 1) for key, item in list(value.items())}}
    return {"lost": f"a {default_name(type(value))}"}


def _findable(cls: type, errors: _ErrorPlaces) -> str | None:
    """Return the name of a class, or None if the class cannot be looked up by it."""
    module, name = _name_of(cls)
    return f"{module}:{name}" if find_class(module, name, errors.codec.home) is cls else None


def _kind_part(kind: str, value: Any, errors: _ErrorPlaces, level: int = 0) -> dict[str, Any] | None:
    try:
        return {"kind": kind, "of": _part(KINDS[kind].keep(value), errors, level + 1)}
    except Exception:  # a defective response, or another version of its library
        return None


def _made_part(part: Any, where: str, errors: _ErrorPlaces | _Again) -> Any:
    """Rebuild a part of an error. Return Lost if this process cannot. `where` names the part in messages."""
    try:
        if isinstance(part, bytes):
            return decode(part, errors.codec)
        if "error" in part:
            return errors.at(part["error"])
        if "class" in part:
            module, _, name = part["class"].partition(":")
            if (cls := find_class(module, name, errors.codec.home)) is None:
                raise LookupError(f"there is no class {module}:{name}")
            return cast("type[Enum]", cls).__members__[part["member"]] if "member" in part else cls
        if "kind" in part:
            return make(part["kind"], _made_part(part["of"], where, errors))
        if "dict" in part:
            return {key: _made_part(item, f"{where}.{key}", errors) for key, item in part["dict"].items()}
        for sequence in (list, tuple):
            if (items := part.get(sequence.__name__)) is not None:
                return sequence(_made_part(item, f"{where}[{at}]", errors) for at, item in enumerate(items))
    except Exception as error:  # a missing class, or another version of a client: reported when the part is used
        return Lost(f"{where} ({type(error).__name__} when it was made again)")
    return Lost(f"{where} ({part.get('lost')})", by_rule=bool(part.get("by_rule")), text=part.get("repr"))


def _names_of_kind(part: dict[str, Any], errors: _ErrorPlaces) -> set[str]:
    """Return the names of the attributes that an error of a kind has after it is rebuilt."""
    return set(getattr(_made_part(part, "", errors), "__dict__", ()))


def _lost_in(part: Any, where: str) -> Iterator[str]:
    """Yield the names of a part's lost parts, except those that are never recorded. Skips errors inside the part."""
    if not isinstance(part, dict):
        return
    if "lost" in part and not part.get("by_rule"):
        yield f"{where} ({part['lost']})"
    inside = part.get("dict") or dict(enumerate(part.get("list") or part.get("tuple") or ()))
    for name, item in inside.items():
        yield from _lost_in(item, f"{where}.{name}" if isinstance(name, str) else f"{where}[{name}]")
    yield from _lost_in(part.get("of"), where)


def describe_end(call: StepCall, error: BaseException) -> dict[str, Any]:
    """Describe the error that a call ends with. Log a warning that names the parts that cannot be recorded."""
    described = describe_error(error, call.execution.ctx.codec)
    name = error_name(described)
    lost = [*_lost_in(described, name)]
    lost += [*_lost_in(described.get("args"), f"{name}.args"), *_lost_in(described.get("made"), name)]
    for attribute, part in described.get("attributes", {}).items():
        lost += _lost_in(part, f"{name}.{attribute}")
    if lost:
        run, names = call.execution.row.id, "; ".join(lost)[:500]
        message = (
            "run %s: step %s (%s) failed, and of its error the journal cannot keep %s. Read it inside the step: code "
            "that reads it after a restart leaves the run stuck"
        )
        fields = event("error.incomplete", run=run, step=call.path, function=call.name, error=name)
        _log.warning(message, run, call.path, call.name, names, extra=fields)
    return described


def _own(descriptor: Any, error: BaseException) -> Any:
    """Read a member of the built-in class, even if the error's own class overrides it."""
    return descriptor.__get__(error)


def _set_own(descriptor: Any, error: BaseException, value: Any) -> None:
    """Set a member of the built-in class, even if the error's own class accepts no attributes."""
    descriptor.__set__(error, value)


def _arguments(error: BaseException) -> list[Any]:
    """Return the arguments of the built-in class; of a group, its message."""
    if isinstance(error, BaseExceptionGroup):
        return [_own(BaseExceptionGroup.message, error)]  # its members are described one by one
    return list(_own(BaseException.args, error))


def _attributes(error: BaseException) -> list[str]:
    """Return the names of the attributes that an error has beyond its arguments; slots by their mangled names."""
    try:
        own = list(vars(error))
    except Exception:  # a class that hides them
        own = []
    classes = [vars(base) for base in type(error).__mro__ if base.__module__ != "builtins"]
    own += [name for names in classes for name, member in names.items() if type(member) is MemberDescriptorType]
    own += [name for cls, members in _MEMBERS.items() if isinstance(error, cls) for name in members]
    return [name for name in own if name not in (_RECORDED, _TEXT)]


def _attribute(error: BaseException, name: str, errors: _ErrorPlaces) -> Any:
    """Describe an attribute; return None if it is not set."""
    try:
        value = getattr(error, name)
    except AttributeError:  # a slot that is empty
        return None
    except Exception as broken:
        return {"lost": f"{type(broken).__name__} when it was read"}
    return _part(value, errors)


def safe_text(error: object) -> str:
    """Return the text of an error or another value, truncated and storable in both databases. Never raises."""
    scope = current.set(None)  # reading a lost part only to describe it must not leave the run stuck
    try:
        text = str(error)[:TEXT_MAX]
    except Exception:  # a defective __str__ must not hide the failure
        text = str(getattr(error, _TEXT, None) or object.__repr__(error))
    finally:
        current.reset(scope)
    return text.encode("utf-8", "replace").decode().replace("\0", "�")


def line_of(error: BaseException) -> str:
    """Return an error's class and text for messages. Never raises."""
    text = safe_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def recorded(error: BaseException) -> bool:
    """Return whether an error is recorded as the end of a call. Then it belongs to the run, whatever its class."""
    return recorded_at(error) is not None


def recorded_at(error: BaseException) -> str | None:
    """Return the path of the call that recorded an error as its end; None if none did."""
    try:
        path = getattr(error, _RECORDED, None)
    except Exception:
        return None
    return path if isinstance(path, str) else None


def mark_recorded(error: BaseException, path: str) -> None:
    """Mark an error as recorded by the call at a path."""
    _set_hidden(error, _RECORDED, path)


def _set_hidden(error: BaseException, name: str, value: object) -> None:
    try:
        object.__setattr__(error, name, value)
    except Exception:  # an error that accepts no attributes stays unmarked
        pass


def error_name(described: dict[str, Any]) -> str:
    """Return the class name of a recorded error, without its module."""
    return str(described.get("type", "?")).rpartition(":")[2]


def error_text(described: dict[str, Any]) -> str:
    """Return the class name and the text of a recorded error."""
    text = described.get("text") or ""
    return f"{error_name(described)}: {text}" if text else error_name(described)


class Unresolved(Exception):
    """A recorded error cannot be rebuilt in this process. The text says why, and what to do."""


def rebuild(described: dict[str, Any], codec: Codec) -> Exception:
    """Rebuild a recorded error, to be raised. Raises Unresolved."""
    if "lost" in described:
        raise Unresolved(f"{described['lost']}. Raise an error of your own instead of it in the step")
    again = _Again(described, codec)
    error = again.at(0)
    if not isinstance(error, Exception):
        raise Unresolved(f"{described['type']} is no Exception")
    again.add_causes()
    return error


class _Again:
    """The rebuilt errors of a description."""

    def __init__(self, described: dict[str, Any], codec: Codec) -> None:
        self.codec = codec
        self.described: list[dict[str, Any]] = [described, *described.get("others", ())]
        self.errors: dict[int, BaseException] = {}
        self._refused: dict[int, Unresolved] = {}
        for place in reversed(range(len(self.described))):  # members before their groups: no deep recursion
            try:
                self.at(place)
            except Unresolved:  # raised again where the error is used
                pass

    def at(self, place: int) -> BaseException:
        """Return the error at a place. Raises Unresolved."""
        if place in self.errors:
            return self.errors[place]
        if place in self._refused:
            raise self._refused[place]
        self._refused[place] = Unresolved("it is an argument of itself")  # until it is made
        try:
            self._make(place, self.described[place])
        except Unresolved as why:
            self._refused[place] = why
            raise
        return self.errors[place]

    def _make(self, place: int, described: dict[str, Any]) -> None:
        module, _, qualname = str(described.get("type", "")).partition(":")
        cls = find_class(module, qualname, self.codec.home) or _made_class(described, module, qualname, self.codec)
        if cls is None or not issubclass(cls, BaseException):
            raise Unresolved(
                f"there is no class {module}:{qualname} in this process. If it was renamed or moved, keep its old name "
                "as an alias; if it is defined inside a function, define it outside; else import its module before the "
                "run"
            )
        try:
            error = self.errors[place] = _rebuilt_alone(cls, described, self)
        except Unresolved:
            raise
        except Exception as why:
            raise Unresolved(
                f"{module}:{qualname} cannot be made without its own constructor ({line_of(why)}). Raise an error of "
                "your own from it in the step"
            ) from why
        for name, part in (described.get("attributes") or {}).items():
            try:
                object.__setattr__(error, name, _made_part(part, f"{qualname}.{name}", self))
            except (AttributeError, TypeError):  # the class has changed and no longer has the attribute
                continue
        _set_hidden(error, _TEXT, described.get("text"))

    def add_causes(self) -> None:
        """Set causes and contexts. A stand-in replaces one that cannot be rebuilt: no `except` matches by a cause."""
        errors = [
            self.errors[place] if place in self.errors else _stand_in(described)
            for place, described in enumerate(self.described)
        ]
        for error, described in zip(errors, self.described, strict=True):
            if (cause := described.get("cause")) is not None:
                _set_own(BaseException.__cause__, error, errors[cause])
            if (context := described.get("context")) is not None:
                _set_own(BaseException.__context__, error, errors[context])
            _set_own(BaseException.__suppress_context__, error, bool(described.get("suppress")))


def _made_class(described: dict[str, Any], module: str, qualname: str, codec: Codec) -> type | None:
    """Return the only class of this name below its importable base; else None, as an `except` matches by identity."""
    base_module, _, base_name = str(described.get("base", "")).partition(":")
    left = [find_class(base_module, base_name, codec.home)]
    named: set[type] = set()
    while left:
        below: list[type] = [] if (cls := left.pop()) is None else type.__subclasses__(cls)
        named.update(cls for cls in below if class_name(cls) == (module, qualname))
        left += below
    return named.pop() if len(named) == 1 else None


def _rebuilt_alone(cls: type[BaseException], described: dict[str, Any], again: _Again) -> BaseException:
    """Rebuild an error without its attributes and causes."""
    name = cls.__qualname__
    if "made" in described:
        error = _made_part(described["made"], name, again)
        if not isinstance(error, cls):
            raise TypeError(f"it became {error!r}")
        return error
    arguments = _made_part(described.get("args") or {"list": []}, f"{name}.args", again)
    arguments = (arguments,) if type(arguments) is Lost else tuple(arguments)
    if issubclass(cls, BaseExceptionGroup):
        return _constructed(cls, (*arguments[:1], [again.at(member) for member in described["errors"]]))
    if not issubclass(cls, OSError) or "os" not in described:
        return _constructed(cls, arguments)
    errno, strerror, filename, filename2 = (_made_part(part, name, again) for part in described["os"])
    fields = (errno, strerror, filename, None, filename2)
    used = 5 if filename2 is not None else 3 if filename is not None else 2 if errno is not None else 0
    error = _constructed(cls, fields[:used])
    _set_own(BaseException.args, error, arguments)
    return error


def rebuilt(described: dict[str, Any], codec: Codec) -> Exception:
    """Return a recorded error for display. If it cannot be rebuilt, return a `StepFailed` that names its class."""
    try:
        return rebuild(described, codec)
    except Unresolved:
        failed = _stand_in(described)
        if "lost" not in described:
            again = _Again(described, codec)
            again.errors[0] = failed
            again.add_causes()
        return failed


def _stand_in(described: dict[str, Any]) -> StepFailed:
    text = f"a step had failed with {error_text(described)} (its class is not known here)"
    return StepFailed(text, type_name=error_name(described))


def _constructed(cls: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    """Build an error with the constructor of its built-in base, so no code of its own class runs."""
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    error: BaseException = builtin.__new__(cls, *arguments)
    try:
        builtin.__init__(error, *arguments)  # type: ignore[misc]  # sets the filename of an OSError
    except Exception:  # the class calls this constructor with other arguments
        _set_own(BaseException.args, error, arguments)
    return error
