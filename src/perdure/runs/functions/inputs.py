"""The arguments of a journaled call: bind them to the signature, encode them, digest them, restore a call from them.

The input is what the caller passed, by the names of the parameters, without ignored parameters, the key and defaults: a
new default must not make old runs look different. `self` is an input of durable methods only. Two equal dicts with
different orders are different inputs. Never digest a `repr`. Accept exactly the calls that Python accepts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, ForwardRef

import msgspec
from blake3 import blake3

from perdure.errors import Unstorable, UsageError
from perdure.runs.functions.keys import IdempotencyKey
from perdure.values.codec import encode
from perdure.values.external import External, encode_noting
from perdure.values.registry import Codec

if TYPE_CHECKING:
    from inspect import Signature

DIGEST_BYTES: Final = 8

_KEY_TEXTS: Final = frozenset({"IdempotencyKey", "perdure.IdempotencyKey"})


class SignaturePlan(msgspec.Struct, frozen=True):
    """A signature, analysed once so that binding is a few lookups."""

    positional: tuple[str, ...]  # parameters that may be passed by position, in order
    by_keyword: tuple[str, ...]  # parameters that may be passed by keyword, in order
    required: frozenset[str]  # without the key, which Perdure fills in
    star_args: str | None  # the name of *args
    extra: str | None  # the name of **kwargs
    defaults: dict[str, Any]
    receiver: str | None  # self or cls
    key: str | None
    key_at: int  # the key's position; sys.maxsize if it is keyword-only or there is none
    dropped: frozenset[str]  # not part of the input: self of a step, the key, ignored parameters
    enough: int  # with this many positional arguments no required one is missing
    most: int  # with more positional arguments, binding takes the general path


class Binder:
    """Binds calls of one function. It resolves annotations at its first use, when all names are defined."""

    def __init__(
        self,
        fn: Callable[..., Any],
        ignore: Collection[str] = (),
        *,
        name: str | None = None,
        is_durable: bool = False,
    ) -> None:
        self.fn, self.is_durable = fn, is_durable
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
        """Return the input by name, in the order of the signature. Raise TypeError if the arguments do not fit."""
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
        """Return the arguments with the key filled in, unless the caller passed one that is not None."""
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
        """Return the positional and keyword arguments for a call with this recorded input.

        They do not include ignored parameters, nor `self` if it was no input (call a bound method).
        """
        plan = self.plan
        apart = (plan.star_args, None if self.is_durable else plan.receiver)
        kwargs = {name: value for name, value in arguments.items() if name not in apart}
        positional = arguments.get(plan.star_args, ()) if plan.star_args is not None else ()
        only_by_position = [name for name in plan.positional if name not in plan.by_keyword]
        named = plan.positional if positional else tuple(only_by_position)
        args: list[Any] = []
        for at, name in enumerate(named):
            if name == plan.receiver and name not in kwargs:
                continue
            if name not in kwargs and not positional and not any(later in kwargs for later in named[at:]):
                break
            if name in kwargs:
                args.append(kwargs.pop(name))
            elif name in plan.defaults:
                args.append(plan.defaults[name])
            else:
                raise UsageError(f"{self.name} cannot be called again: its argument {name!r} was not recorded")
        return (*args, *positional), kwargs

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by name, including `self`, ignored parameters and defaults."""
        return {**self.plan.defaults, **self._general(self.plan, args, kwargs)}

    def text(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], codec: Codec) -> bytes:
        """Encode the input as canonical text. Unstorable names step, argument and path: `book(flight=…)["x"]`."""
        arguments = self.bind(args, kwargs)
        try:
            return encode(arguments, codec)
        except Unstorable as error:
            raise self._named(error, arguments, codec) from error

    def encoded(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], codec: Codec
    ) -> tuple[bytes, Sequence[External[Any]]]:
        """`text`, and the large values that it refers to. A caller that stores the text must keep them."""
        arguments = self.bind(args, kwargs)
        try:
            return (encode(arguments, codec), ()) if codec.values is None else encode_noting(arguments, codec)
        except Unstorable as error:
            raise self._named(error, arguments, codec) from error

    def _general(self, plan: SignaturePlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Bind a call with keywords, *args or **kwargs, or raise TypeError if it does not fit."""
        named = kwargs
        if plan.key is not None and plan.key_at >= len(args) and plan.key not in kwargs:
            named = {**kwargs, plan.key: None}  # call_with fills it in later
        try:
            arguments = self.signature.bind(*args, **named).arguments
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None
        missing = sorted(plan.required - arguments.keys() - {plan.receiver})
        if missing:  # Python 3.13.0 binds f(a=1) to `def f(a, /, **more)`
            raise TypeError(f"{self.name}() is missing a required argument: {missing[0]!r}")
        if plan.star_args in arguments:
            arguments[plan.star_args] = list(arguments[plan.star_args])
        extra: dict[str, Any] = arguments.pop(plan.extra, {}) if plan.extra is not None else {}
        for name in sorted(extra):
            # Python allows a= and rest= in a call of `def f(a, /, *rest, **more)`, but a record has each name once.
            if name in plan.positional or name == plan.star_args:
                raise UsageError(
                    f"{self.name}: a keyword argument cannot have the name {name!r}, which a parameter has that is "
                    f"given by position; rename one of them"
                )
            if plan.extra not in plan.dropped:
                arguments[name] = extra[name]
        return arguments

    def _named(self, error: Unstorable, arguments: dict[str, Any], codec: Codec) -> Unstorable:
        """Return the error with step and argument in its path. Encode each argument alone to find which one failed."""
        path, hint = f"{self.name}(…)", ""
        for name, value in arguments.items():
            try:
                encode(value, codec)
            except Unstorable as alone:
                error = alone
                path = f"{self.name}({name}=…){alone.path.removeprefix('state')}"
                if alone.path == "state" and not self.is_durable:
                    hint = f'; if it is a means and no input, such as a client, leave it out: ignore=("{name}",)'
                break
        reason = str(error).removeprefix(error.path).removeprefix(" cannot be saved: ")
        return Unstorable(f"{path} cannot be saved: {reason}{hint}", path=path)


def digest(text: bytes) -> bytes:
    """Return the digest of encoded arguments, as stored in journal entries."""
    return blake3(text).digest(length=DIGEST_BYTES)


def receiver_of(fn: Callable[..., Any], signature: Signature) -> str | None:
    """Return "self" or "cls" if the function is a method with that first parameter, else None."""
    *outer, _ = getattr(fn, "__qualname__", "").split(".")
    first = next(iter(signature.parameters), None)
    in_class = bool(outer) and outer[-1] != "<locals>"
    return first if in_class and first in ("self", "cls") else None


def signature_of(fn: Callable[..., Any]) -> Signature:
    """Return the signature, or raise UsageError if there is none. Names in annotations may still be undefined."""
    import inspect

    try:
        if sys.version_info >= (3, 14):
            from annotationlib import Format

            return inspect.signature(fn, annotation_format=Format.FORWARDREF)
        return inspect.signature(fn)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the parameters of {fn!r} are not known ({error}); wrap it in a function of yours") from error


def annotations_of(fn: Callable[..., Any], signature: Signature | None = None) -> dict[str, Any]:
    """Return the resolved annotation of each annotated parameter, or its text if a name in it is not defined."""
    import inspect
    import typing

    signature = signature or signature_of(fn)
    raw = {name: p.annotation for name, p in signature.parameters.items() if p.annotation is not p.empty}
    scope = getattr(inspect.unwrap(fn), "__globals__", {})
    resolved: dict[str, Any] = {}
    for name, annotation in raw.items():
        # One by one: a name imported only for type checkers must not affect other parameters.
        holder = type("Holder", (), {"__annotations__": {name: annotation}})
        try:
            resolved[name] = typing.get_type_hints(holder, scope, scope, include_extras=True)[name]
        except Exception:  # whatever the evaluation of an annotation raises
            resolved[name] = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation
    return resolved


def is_key(annotation: Any) -> bool:
    """Return whether the annotation is IdempotencyKey, also as text or with `| None`."""
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
    [star_args] = kinds.get("VAR_POSITIONAL", [None])
    [extra] = kinds.get("VAR_KEYWORD", [None])
    key, receiver = _key_parameter(binder, kinds), receiver_of(binder.fn, binder.signature)
    dropped = {*binder.ignore, key, None if binder.is_durable else receiver}
    required = {
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.name not in (star_args, extra) and p.name != key
    }
    by_position = [at for at, name in enumerate(positional, 1) if name in required]
    return SignaturePlan(
        positional=tuple(positional),
        by_keyword=(*either, *kinds.get("KEYWORD_ONLY", [])),
        required=frozenset(required),
        star_args=star_args,
        extra=extra,
        defaults={p.name: p.default for p in parameters.values() if p.default is not p.empty},
        receiver=receiver,
        key=key,
        key_at=positional.index(key) if key in positional else sys.maxsize,
        dropped=frozenset(name for name in dropped if name is not None),
        # A required keyword-only parameter is never bound by position.
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
