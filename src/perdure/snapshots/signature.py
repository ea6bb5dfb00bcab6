"""Statements that show any change: JSON with a hash over it and, on request, an Ed25519 signature.

Keys are PEM files, as `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
from blake3 import blake3

from perdure.errors import Damaged, ExtraMissing, UsageError

KeyPath = str | os.PathLike[str]
_CONTEXT = b"perdure statement\n"  # a signature of ours is none of another protocol


def signed(statement: dict[str, Any], private: KeyPath | None) -> bytes:
    """Return a statement as a line of a file: its text, the public key, the signature, and a hash of all of them."""
    text = orjson.dumps(statement, option=orjson.OPT_SORT_KEYS).decode()
    signature = None if private is None else _load(private, "private").sign(_CONTEXT + text.encode()).hex()
    return _written(text, public_key(private), signature)


def public_key(private: KeyPath | None) -> str | None:
    """Return the public key of a private one, as hex."""
    return None if private is None else _load(private, "private").public_key().public_bytes_raw().hex()


def check(line: bytes, public: KeyPath | None) -> dict[str, Any]:
    """Return the statement of such a line. Its `key` is the signer's public key as hex, None if it is not signed.

    Raises Damaged if the line was changed, or if another key than `public` signed it.
    """
    try:
        statement = orjson.loads(line)
        text, key, signature = statement["statement"], statement["key"], statement["signature"]
        if _written(text, key, signature) != line:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise Damaged("the statement was changed after it was made, or is cut off") from None
    if public is not None and key != _load(public, "public").public_bytes_raw().hex():
        raise Damaged("it is not signed" if key is None else f"another key signed it: {key}")
    if key is not None:
        ed25519, _, invalid = _cryptography()
        try:
            signer = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
            signer.verify(bytes.fromhex(signature), _CONTEXT + text.encode())
        except (invalid, ValueError, TypeError):
            raise Damaged(f"its signature is not valid for the key {key}") from None
    return {**orjson.loads(text), "key": key}


def _written(text: Any, key: Any, signature: Any) -> bytes:
    parts = {"statement": text, "key": key, "signature": signature}
    return orjson.dumps(parts | {"blake3": blake3(orjson.dumps(parts)).hexdigest()})


def _load(path: KeyPath, kind: str) -> Any:
    ed25519, serialization, _ = _cryptography()
    pem = Path(path).read_bytes()
    try:
        if kind == "private":
            key, expected = serialization.load_pem_private_key(pem, None), ed25519.Ed25519PrivateKey
        else:
            key, expected = serialization.load_pem_public_key(pem), ed25519.Ed25519PublicKey
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} holds no {kind} key as PEM: {error}") from error
    if not isinstance(key, expected):
        raise UsageError(f"{path} is no Ed25519 key: `openssl genpkey -algorithm ed25519` makes one")
    return key


def _cryptography() -> tuple[Any, Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ExtraMissing("a signature", "crypto") from error
    return ed25519, serialization, InvalidSignature
