"""The arguments of a journaled call: bound to the signature, as text, as a digest, and back to a call.

What counts as input is what the caller passed, by the names of the parameters: no defaults (so that a new default
does not make old runs look different), no `self`, nothing that is ignored, no idempotency key.
Arguments by position and by keyword give the same text, in the order of the signature; the extra ones of `**kwargs`
follow in the order of their names. Inside a value nothing is rearranged: two dicts that are equal but ordered
differently are different inputs, as they are to a body that goes through them.

Must never happen here: a digest of a `repr`, which changes with addresses and versions; a call that Python would
refuse and this accepts, or the other way round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, ForwardRef

import msgspec
from blake3 import blake3

from perdure.errors import Unstorable, UsageError
from perdure.runs.functions.keys import IdempotencyKey
from perdure.values.codec import encode
from perdure.values.registry import Codec

if TYPE_CHECKING:
    from inspect import Signature

DIGEST_BYTES: Final = 8

_KEY_TEXTS: Final = frozenset({"IdempotencyKey", "perdure.IdempotencyKey"})


class SignaturePlan(msgspec.Struct, frozen=True):
    """A signature, taken apart once so that binding is a few lookups."""

    positional: tuple[str, ...]  # those that may be given by position, in order
    by_keyword: tuple[str, ...]  # those that may be given by keyword, in order
    required: frozenset[str]  # the key is not: it is filled in
    rest: str | None  # the name of *args
    extra: str | None  # the name of **kwargs
    defaults: dict[str, Any]
    receiver: str | None  # self or cls
    key: str | None
    key_at: int  # the key's position; beyond all of them if it goes by keyword only
    dropped: frozenset[str]  # what is no input: self, the key, the ignored ones
    enough: int  # with so many positional arguments nothing is missing
    most: int  # more positional arguments need the general way


class Binder:
    """Binds calls of one function. Annotations are looked at when it is first used: by then all names are defined."""

    def __init__(self, fn: Callable[..., Any], ignore: Collection[str] = (), *, name: str | None = None) -> None:
        self.fn = fn
        self.name = name or str(getattr(fn, "__name__", type(fn).__name__))
        self.signature = signature_of(fn)
        self.ignore = _checked_ignore(self.name, self.signature, ignore)
        self._known: SignaturePlan | None = None

    @property
    def plan(self) -> SignaturePlan:
        if self._known is None:
            self._known = _plan(self)
        return self._known

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, in the order of the signature. TypeError if they do not fit."""
        plan = self._known or self.plan
        if kwargs or not plan.enough <= len(args) <= plan.most:
            arguments = self._general(plan, args, kwargs)
        else:
            arguments = dict(zip(plan.positional, args, strict=False))
        for name in plan.dropped:
            arguments.pop(name, None)
        return arguments

    def call_with(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: str
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the key in its parameter, unless the caller gave one (None is none)."""
        plan = self._known or self.plan
        if plan.key is None:
            return args, kwargs
        at = plan.key_at
        if at < len(args):
            return (args, kwargs) if args[at] is not None else ((*args[:at], key, *args[at + 1 :]), kwargs)
        if kwargs.get(plan.key) is not None:
            return args, kwargs
        return args, {**kwargs, plan.key: key}

    def restore(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the function with, so that it gets these arguments again.

        A `self` is left out: call the method of an object. So is what was ignored.
        """
        plan = self.plan
        kwargs = {name: value for name, value in arguments.items() if name not in (plan.receiver, plan.rest)}
        rest = arguments.get(plan.rest, ()) if plan.rest is not None else ()
        only_by_position = [name for name in plan.positional if name not in plan.by_keyword]
        named = plan.positional if rest else tuple(only_by_position)
        args: list[Any] = []
        for at, name in enumerate(named):
            if name == plan.receiver:
                continue
            if name not in kwargs and not rest and not any(later in kwargs for later in named[at:]):
                break
            if name in kwargs:
                args.append(kwargs.pop(name))
            elif name in plan.defaults:
                args.append(plan.defaults[name])
            else:
                raise UsageError(f"{self.name} cannot be called again: its argument {name!r} was not recorded")
        return (*args, *rest), kwargs

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that a call gives the function, by name: a `self`, what is ignored, and defaults too."""
        return {**self.plan.defaults, **self._general(self.plan, args, kwargs)}

    def text(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], codec: Codec) -> bytes:
        """The canonical text of the arguments. Unstorable names step, argument and path: `book(flight=…)["x"]`."""
        arguments = self.bind(args, kwargs)
        try:
            return encode(arguments, codec)
        except Unstorable as error:
            raise self._named(error, arguments, codec) from error

    def _general(self, plan: SignaturePlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Binding with keywords, with *args and **kwargs, and of calls that do not fit."""
        given = kwargs
        if plan.key is not None and plan.key_at >= len(args) and plan.key not in kwargs:
            given = {**kwargs, plan.key: None}  # it is filled in later
        try:
            arguments = self.signature.bind(*args, **given).arguments
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None
        missing = sorted(plan.required - arguments.keys() - {plan.receiver})
        if missing:  # 3.13.0 takes `def f(a, /, **more)` as called by f(a=1)
            raise TypeError(f"{self.name}() is missing a required argument: {missing[0]!r}")
        if plan.rest in arguments:
            arguments[plan.rest] = list(arguments[plan.rest])
        extra: dict[str, Any] = arguments.pop(plan.extra, {}) if plan.extra is not None else {}
        for name in sorted(extra):
            # `def f(a, /, *rest, **more)` may be called with a= and rest=, and a record has one place for each name.
            if name in plan.positional or name == plan.rest:
                raise UsageError(
                    f"{self.name}: a keyword argument cannot have the name {name!r}, which a parameter has that is "
                    f"given by position; rename one of them"
                )
            if plan.extra not in plan.dropped:
                arguments[name] = extra[name]
        return arguments

    def _named(self, error: Unstorable, arguments: dict[str, Any], codec: Codec) -> Unstorable:
        """The error, with step and argument in its path. Each argument is tried alone to find the one it is about."""
        path, hint = f"{self.name}(…)", ""
        for name, value in arguments.items():
            try:
                encode(value, codec)
            except Unstorable as alone:
                error = alone
                path = f"{self.name}({name}=…){alone.path.removeprefix('state')}"
                if alone.path == "state" and name != self.plan.receiver:
                    hint = f'; if it is a means and no input, such as a client, leave it out: ignore=("{name}",)'
                break
        reason = str(error).removeprefix(error.path).removeprefix(" cannot be saved: ")
        return Unstorable(f"{path} cannot be saved: {reason}{hint}", path=path)


def digest(text: bytes) -> bytes:
    """The digest of a text of arguments, as journal entries have it."""
    return blake3(text).digest(length=DIGEST_BYTES)


def receiver_of(fn: Callable[..., Any], signature: Signature) -> str | None:
    """`self` or `cls`, if the function is a method that has it."""
    *outer, _ = getattr(fn, "__qualname__", "").split(".")
    first = next(iter(signature.parameters), None)
    in_class = bool(outer) and outer[-1] != "<locals>"
    return first if in_class and first in ("self", "cls") else None


def signature_of(fn: Callable[..., Any]) -> Signature:
    """The signature. Names in annotations need not be defined yet. UsageError if it has none."""
    import inspect

    try:
        if sys.version_info >= (3, 14):
            from annotationlib import Format

            return inspect.signature(fn, annotation_format=Format.FORWARDREF)
        return inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the parameters of {fn!r} are not known ({error}); wrap it in a function of yours") from error


def annotations_of(fn: Callable[..., Any], signature: Signature | None = None) -> dict[str, Any]:
    """The annotation of each parameter that has one, resolved; as text where a name in it is not defined."""
    import inspect
    import typing

    signature = signature or signature_of(fn)
    raw = {name: p.annotation for name, p in signature.parameters.items() if p.annotation is not p.empty}
    scope = getattr(inspect.unwrap(fn), "__globals__", {})
    resolved: dict[str, Any] = {}
    for name, annotation in raw.items():
        # One by one, so that a name which is imported for type checkers only spoils no other parameter.
        holder = type("Holder", (), {"__annotations__": {name: annotation}})
        try:
            resolved[name] = typing.get_type_hints(holder, scope, scope, include_extras=True)[name]
        except Exception:  # whatever the evaluation of an annotation raises
            resolved[name] = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation
    return resolved


def is_key(annotation: Any) -> bool:
    """Whether a parameter with this annotation takes the idempotency key, also as text or with `| None`."""
    import typing

    if isinstance(annotation, str):
        text = annotation.replace(" ", "").removesuffix("]")
        for opening in ("Optional[", "typing.Optional[", "t.Optional["):
            text = text.removeprefix(opening)
        return not _KEY_TEXTS.isdisjoint(text.split("|"))
    if isinstance(annotation, type):
        return issubclass(annotation, IdempotencyKey)
    return any(map(is_key, typing.get_args(annotation))) if _is_choice(annotation) else False


def _is_choice(annotation: Any) -> bool:
    import types
    import typing

    return typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated)


def _checked_ignore(name: str, signature: Signature, ignore: Collection[str]) -> frozenset[str]:
    if isinstance(ignore, str):
        raise UsageError(f"{name}: ignore takes a list of names: ignore=({ignore!r},)")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    unknown = [item for item in ignore if item not in signature.parameters]
    if unknown and not takes_any:
        raise UsageError(
            f"{name} has no parameter {unknown[0]!r} to ignore; it has {', '.join(signature.parameters) or 'none'}"
        )
    return frozenset(ignore)


def _plan(binder: Binder) -> SignaturePlan:
    parameters = binder.signature.parameters
    kinds: dict[str, list[str]] = {}
    for parameter in parameters.values():
        kinds.setdefault(parameter.kind.name, []).append(parameter.name)
    either = kinds.get("POSITIONAL_OR_KEYWORD", [])
    positional = kinds.get("POSITIONAL_ONLY", []) + either
    [rest] = kinds.get("VAR_POSITIONAL", [None])
    [extra] = kinds.get("VAR_KEYWORD", [None])
    key, receiver = _key_parameter(binder, kinds), receiver_of(binder.fn, binder.signature)
    required = {
        p.name for p in parameters.values() if p.default is p.empty and p.name not in (rest, extra) and p.name != key
    }
    by_position = [at for at, name in enumerate(positional, 1) if name in required]
    return SignaturePlan(
        positional=tuple(positional),
        by_keyword=(*either, *kinds.get("KEYWORD_ONLY", [])),
        required=frozenset(required),
        rest=rest,
        extra=extra,
        defaults={p.name: p.default for p in parameters.values() if p.default is not p.empty},
        receiver=receiver,
        key=key,
        key_at=positional.index(key) if key in positional else sys.maxsize,
        dropped=frozenset({*binder.ignore, *(name for name in (receiver, key) if name is not None)}),
        # A parameter that must be given by keyword is never there by position alone.
        enough=max(by_position, default=0) if required <= set(positional) else sys.maxsize,
        most=len(positional),
    )


def _key_parameter(binder: Binder, kinds: dict[str, list[str]]) -> str | None:
    annotations = annotations_of(binder.fn, binder.signature)
    keys = [name for name, annotation in annotations.items() if is_key(annotation)]
    if not keys:
        return None
    if len(keys) > 1:
        raise UsageError(f"{binder.name} has several idempotency keys: {', '.join(keys)}; an effect has one key")
    [key] = keys
    by_keyword = [*kinds.get("KEYWORD_ONLY", ()), *kinds.get("POSITIONAL_OR_KEYWORD", ())]
    before_rest = "VAR_POSITIONAL" in kinds and key not in kinds.get("KEYWORD_ONLY", ())
    if key not in by_keyword or before_rest:
        raise UsageError(f"{binder.name}: the parameter {key!r} is filled in by keyword; put it behind a * or last")
    return key
