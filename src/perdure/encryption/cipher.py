"""The cipher of a tenant's columns: AES-256-GCM under keys derived from the tenant's data key, which is stored wrapped.

Each column has a key of its own: random nonces of 96 bits are good for 2**32 values. A value is a mark, a nonce, and
the ciphertext with its tag, which also covers the value's place (tenant, table, column, row). A searched column
(`index`) is a keyed hash. Must never happen here: a key or a plain text in an error.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from typing import Any

import msgspec
from blake3 import blake3

from perdure.encryption.keys import Keys
from perdure.errors import Damaged, ExtraMissing, NotEncrypted
from perdure.storage.columns import MARK, EncryptedColumn

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as error:
    raise ExtraMissing("encryption", "crypto") from error

TEXT_MARK = "\x02pd2."
INDEX_MARK = b"\xf5i"
INDEX_TEXT_MARK = "~pd2."
DATA_KEY_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
_NONCE_AT = len(MARK)
_TEXT_AT = _NONCE_AT + _NONCE_BYTES
_BYTES_MIN = _TEXT_AT + _TAG_BYTES
_pack = msgspec.msgpack.Encoder().encode


class Cipher:
    """Encrypts and decrypts the columns of one tenant."""

    __slots__ = ("_aads", "_columns", "_index_key", "_material", "_tenant", "name")

    def __init__(self, tenant: int, name: str, data_key: bytes) -> None:
        self._tenant = tenant
        self.name = name
        self._material = data_key + tenant.to_bytes(8, "big")
        self._index_key = blake3(self._material, derive_key_context="perdure 2026 index key").digest()
        self._columns: dict[str, AESGCM] = {}
        self._aads: dict[str, bytes] = {}

    def encrypt(self, column: EncryptedColumn, value: Any, by: tuple[Any, ...]) -> Any:
        if column.kind == "bytes":
            return self._encrypted(column, value, by)
        if column.kind == "text":
            return TEXT_MARK + b64encode(self._encrypted(column, value.encode(), by)[_NONCE_AT:]).decode()
        digest = blake3(_pack((self._tenant, column.label, *by, value)), key=self._index_key).digest(24)
        return INDEX_MARK + digest if type(value) is bytes else INDEX_TEXT_MARK + b64encode(digest).decode()

    def decrypt(self, column: EncryptedColumn, value: Any, by: tuple[Any, ...]) -> Any:
        """Return the value of its stored form. Raises NotEncrypted, Damaged."""
        if column.kind == "bytes":
            if type(value) is not bytes or value[:_NONCE_AT] != MARK:
                raise self._plain(column)
            return self._decrypted(column, value, by)
        if column.kind == "text":
            if type(value) is not str or not value.startswith(TEXT_MARK):
                raise self._plain(column)
            return self._decrypted(column, _bytes_of(value), by).decode()
        return None if column.kind == "tenant" else value

    def _encrypted(self, column: EncryptedColumn, value: bytes, by: tuple[Any, ...]) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return MARK + nonce + self._cipher(column.label).encrypt(nonce, value, self._aad(column, by))

    def _decrypted(self, column: EncryptedColumn, stored: bytes, by: tuple[Any, ...]) -> bytes:
        if len(stored) < _BYTES_MIN:
            raise self._damaged(column)
        try:
            return self._cipher(column.label).decrypt(
                stored[_NONCE_AT:_TEXT_AT], stored[_TEXT_AT:], self._aad(column, by)
            )
        except (InvalidTag, ValueError):
            raise self._damaged(column) from None

    def _cipher(self, label: str) -> AESGCM:
        cipher = self._columns.get(label)
        if cipher is None:
            subkey = blake3(self._material, derive_key_context=f"perdure 2026 column {label}").digest()
            cipher = self._columns[label] = AESGCM(subkey)
        return cipher

    def _aad(self, column: EncryptedColumn, by: tuple[Any, ...]) -> bytes:
        if by:
            return _pack((self._tenant, column.label, *by))
        known = self._aads.get(column.label)
        if known is None:
            known = self._aads[column.label] = _pack((self._tenant, column.label))
        return known

    def _damaged(self, column: EncryptedColumn) -> Damaged:
        return Damaged(
            f"a value of {column.label} does not decrypt with its key: it was changed, cut short, or moved here from "
            "another row; run `perdure store verify`"
        )

    def _plain(self, column: EncryptedColumn) -> NotEncrypted:
        return NotEncrypted(
            f"a value of {column.label} of tenant {self.name!r} is not encrypted, and the store was opened with keys: "
            "it was not used. It was written by a program other than Perdure, or the store is damaged"
        )


def wrap_data_key(tenant: int, keys: Keys, data_key: bytes) -> bytes:
    """Return a tenant's data key, encrypted with the provider's current key."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + _wrapper(keys.by_id[keys.current]).encrypt(nonce, data_key, _pack((tenant, "data key")))


def unwrap_data_key(tenant: int, keys: Keys, key: bytes, wrapped: bytes) -> bytes | None:
    """Return the data key of a tenant; None if the stored one is damaged or of another tenant."""
    try:
        return _wrapper(keys.by_id[key]).decrypt(
            wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], _pack((tenant, "data key"))
        )
    except (InvalidTag, ValueError):
        return None


def _wrapper(key: bytes) -> AESGCM:
    return AESGCM(blake3(key, derive_key_context="perdure 2026 wrapping of data keys").digest())


def _bytes_of(text: str) -> bytes:
    """Return an encrypted text as bytes. Other text becomes bytes that do not decrypt."""
    try:
        return MARK + b64decode(text[len(TEXT_MARK) :], validate=True)
    except ValueError:
        return b""
