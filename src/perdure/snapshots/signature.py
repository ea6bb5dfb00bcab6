"""Statements that show any change: a text with a hash over it and, on request, an Ed25519 signature.

Keys are PEM files, as `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
from blake3 import blake3

from perdure.errors import Damaged, UsageError

KeyPath = str | os.PathLike[str]
_CONTEXT = b"perdure statement\n"  # a signature of ours is none of another protocol
_FIELDS = {"statement", "key", "signature", "sum"}


def signed(statement: dict[str, Any], private: KeyPath | None) -> dict[str, Any]:
    """A statement as it is written to a file: its text, the public key, the signature, and a sum of all of them."""
    text = orjson.dumps(statement, option=orjson.OPT_SORT_KEYS).decode()
    made: dict[str, Any] = {"statement": text, "key": None, "signature": None}
    if private is not None:
        signature = _load(private, private=True).sign(_message(text))
        made |= {"key": public_key(private), "signature": signature.hex()}
    return made | {"sum": _sum(made)}


def public_key(private: KeyPath | None) -> str | None:
    """The public key of a private one, as hex."""
    return None if private is None else _load(private, private=True).public_key().public_bytes_raw().hex()


def check(document: Any, public: KeyPath | None) -> dict[str, Any]:
    """The statement of such a document, with `key`: the signer's public key as hex, None if it is not signed. Raises
    Damaged if anything of it was changed, or another key than `public` signed it."""
    if not isinstance(document, dict) or set(document) != _FIELDS or document["sum"] != _sum(document):
        raise Damaged("the statement was changed after it was made, or is cut off")
    key, text = document["key"], document["statement"]
    if public is not None and key != _load(public, private=False).public_bytes_raw().hex():
        raise Damaged("it is not signed" if key is None else f"another key signed it: {key}")
    if key is not None:
        from cryptography.exceptions import InvalidSignature

        try:
            _ed25519().Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(
                bytes.fromhex(document["signature"]), _message(text)
            )
        except (InvalidSignature, ValueError, TypeError):
            raise Damaged(f"its signature is not valid for the key {key}") from None
    return {**orjson.loads(text), "key": key}


def _sum(document: dict[str, Any]) -> str:
    return blake3(orjson.dumps([document[name] for name in ("statement", "key", "signature")])).hexdigest()


def _message(text: str) -> bytes:
    return _CONTEXT + text.encode()


def _load(path: KeyPath, *, private: bool) -> Any:
    ed25519 = _ed25519()
    from cryptography.hazmat.primitives import serialization

    text = Path(path).read_bytes()
    try:
        found: Any = (
            serialization.load_pem_private_key(text, None) if private else serialization.load_pem_public_key(text)
        )
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} holds no {'private' if private else 'public'} key as PEM: {error}") from error
    if not isinstance(found, ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey):
        raise UsageError(f"{path} is no Ed25519 key: `openssl genpkey -algorithm ed25519` makes one")
    return found


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise UsageError("signatures need the extra: pip install 'perdure[crypto]'") from error
    return ed25519
