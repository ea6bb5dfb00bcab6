"""What marks a value as a secret: its name, or the form of a text. The one rule for questions, evidence and pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

# The names of secrets. Every repetition is bounded or possessive, so that no text takes long to search.
_NAME = r"""[\w-]{0,40}(?:passw(?:or)?d|passphrase|pwd|secret|credential|authorization|cookie|signature
        |(?:api|access|account|private|secret|signing|encryption|master|license)[_-]?key)[\w-]{0,40}
    | (?:[\w-]{0,40}[_-])?(?:pass|auth|pw|pin|otp|creds?) | [\w-]{0,40}token"""
_QUOTED = r"""(?> '(?:[^'\\\n]|\\.)*+'? | "(?:[^"\\\n]|\\.)*+"? )"""
_PART = rf"""{_QUOTED} | [^'"\n()\[\]{{}}]"""
_INSIDE = rf"(?: {_PART} | [(\[{{] (?:{_PART})*+ [)\]}}] )*+"  # the inside of brackets, with one nested level
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE | re.VERBOSE)
_NAME_MAX = 200  # of names that are remembered
_KEY_NAME = re.compile(r"(?:[\w-]{0,80}[_-])?key", re.IGNORECASE)  # not in texts: there it has other meanings
_SECRETS = re.compile(
    rf"""(?ix) (?P<name>
        (?<![\w-]) (?: {_NAME} | [\w-]{{0,40}}tokens (?=['"]?\s{{0,9}}[:=]{{1,2}}\s{{0,9}}[('"\[{{]) )  # no count
            ['"]? \s{{0,9}} [:=]{{1,2}} \s{{0,9}} (?:(?:basic|bearer)\s{{1,9}})?
            (?: (?P<open>\w{{0,40}}[(\[{{]) | b(?=['"]) )?  # password = SecretStr('…'), b'…'
        | (?<![\w-])--(?:{_NAME}) ['"]? [\s,]{{1,9}}  # '--password', '…'
        | [?&](?:key|sig)= | \b bearer \s{{1,9}}
        | \b (?:password|passphrase|secret|token) \s{{1,9}} (?=[\w+/=.-]{{0,60}}\d) (?=[\w+/=.-]{{8}}) )  # a sentence
    (?(open) {_INSIDE} (?: (?=[)\]}}]) | [^\n]* ) | (?: {_QUOTED} | [^\s'",;&(){{}}\[\]]+ ) )
    | (?P<user> :// [^\s:/@'"]{{0,99}} : ) [^\s/'"]{{1,200}} (?=@)
    | \b(?:sk|pk|rk|gh[a-z]|github_pat|hf|glpat|xox[a-z])[-_](?=[\w-]{{0,60}}\d)[\w-]{{8,}}
    | \bA[KS]IA\w{{12,}} | \bAIza[\w-]{{30,}} | (?<![\w-])eyJ[\w-]{{8,}}\.[\w-]+\.[\w-]+ | (?<=KEY-----)[\w+/=\\\s]+"""
)


def redacted(text: str) -> str:
    """Return the text with every secret masked that can be recognised by its name or form."""
    return _SECRETS.sub(lambda secret: (secret["name"] or secret["user"] or "") + "***", text)


def is_secret(name: str, value: Any) -> bool:
    """Return whether the name of a value marks it as a secret."""
    always, are_tokens, is_key = _marks(name) if len(name) <= _NAME_MAX else _marks.__wrapped__(name)
    return always or (are_tokens and not isinstance(value, int | float)) or (is_key and isinstance(value, str | bytes))


@lru_cache(maxsize=10_000)
def _marks(name: str) -> tuple[bool, bool, bool]:
    """Return whether a name is that of a secret, of tokens, of a key. A state repeats its names very often."""
    is_secret, is_key = (pattern.fullmatch(name) is not None for pattern in (_SECRET_NAME, _KEY_NAME))
    return is_secret, name.lower().endswith("tokens"), is_key


def masked(value: Any) -> Any:
    """Return a copy of plain data with every secret masked that can be recognised by its name or form."""
    if isinstance(value, Mapping):
        return {str(k): "***" if is_secret(str(k), v) else masked(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        flags = [str(one).startswith("--") and bool(_SECRET_NAME.fullmatch(str(one)[2:])) for one in value]
        return ["***" if flag else masked(one) for flag, one in zip((False, *flags), value, strict=False)]
    return redacted(value) if isinstance(value, str) else value
