"""What seals and opens cells: AES-256-GCM, with a key for each kind of cell derived from the tenant's key.

A sealed cell is a mark that no plain cell begins with, the key's id, a random nonce, and the ciphertext with its tag.
The tag also covers where the cell stands: tenant, table, column, and what identifies the row, so that a cell that was
copied to another place does not open. What must be searched for (`index`) is hidden with a second
key of the tenant, which is kept, encrypted, with each of its keys (`seal.proof`) and does not change when they do.

Must never happen here: a key or a plain text in an error.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from typing import Any

import msgspec
from blake3 import blake3

from perdure.errors import Damaged, KeyMissing, NotEncrypted, UsageError
from perdure.storage.cells import MARK, Cell, Table
from perdure.storage.keyring import ID_BYTES, Keys

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as error:  # pragma: no cover - the extra is not installed
    raise UsageError("encryption needs the extra `crypto`: pip install 'perdure[crypto]'") from error

TEXT_MARK = "\x02hf1."
INDEX_MARK = b"\xf5i"
INDEX_TEXT_MARK = "~pd1."
_NONCE_BYTES, _TAG_BYTES = 12, 16
_ID_AT = len(MARK)
_NONCE_AT = _ID_AT + ID_BYTES
_TEXT_AT = _NONCE_AT + _NONCE_BYTES
_BYTES_MIN = _TEXT_AT + _TAG_BYTES
_TEXT_ID_AT = len(TEXT_MARK)
_TEXT_BODY_AT = _TEXT_ID_AT + 2 * ID_BYTES
_PROOF = "seal.proof"
_pack = msgspec.msgpack.Encoder().encode


class UnknownKey(Exception):
    """A cell is sealed with a key that is not known yet: perhaps another process has just begun to use it."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key.hex())
        self.key = key


class Locks:
    """A tenant's keys at work: what seals with the one in use, and opens with any that is known."""

    __slots__ = (
        "_aads",
        "_index",
        "_openers",
        "_sealers",
        "_tenant",
        "checked_at",
        "current",
        "keys",
        "name",
        "rows",
        "used",
    )

    def __init__(
        self, tenant: int, name: str, keys: Keys, current: bytes, index: bytes, rows: dict[bytes, int], at: float
    ) -> None:
        self._tenant = tenant
        self.name = name
        self.keys = keys
        self.current = current  # the id of the key that seals
        self._index = index
        self.rows = rows  # the ids that the store knows, and since when
        self.checked_at = at
        self.used = True  # since the provider was last asked
        self._sealers: dict[str, tuple[AESGCM, bytes]] = {}
        self._openers: dict[tuple[str, bytes], AESGCM] = {}
        self._aads: dict[str, bytes] = {}

    # Sealing

    def seal(self, cell: Cell, value: Any, by: tuple[Any, ...]) -> Any:
        """A cell as it is stored."""
        sort = cell.sort
        if sort == "blob":
            return self._sealed(cell, value, by)
        if sort == "text":
            sealed = self._sealed(cell, value.encode(), by)
            return f"{TEXT_MARK}{self.current.hex()}{b64encode(sealed[_NONCE_AT:]).decode()}"
        digest = self._keyed(cell, (*by, value)).digest(24)
        return INDEX_MARK + digest if type(value) is bytes else INDEX_TEXT_MARK + b64encode(digest).decode()

    def _sealed(self, cell: Cell, value: bytes, by: tuple[Any, ...]) -> bytes:
        label = cell.label
        known = self._sealers.get(label)
        if known is None:
            known = self._sealers[label] = self._cipher(label, self.current), MARK + self.current
        nonce = os.urandom(_NONCE_BYTES)
        return known[1] + nonce + known[0].encrypt(nonce, value, self._aad(cell, by))

    def _cipher(self, label: str, key: bytes) -> AESGCM:
        """For each tenant and kind of cell a key of its own, so that each has all the nonces: random ones of 96 bits
        are good for 2**32 cells."""
        derived = self._openers.get((label, key))
        if derived is None:
            material = self.keys.by_id[key] + self._tenant.to_bytes(8, "big")
            subkey = blake3(material, derive_key_context=f"perdure 2026 cells of {label}").digest()
            derived = self._openers[label, key] = AESGCM(subkey)
        return derived

    def _aad(self, cell: Cell, by: tuple[Any, ...]) -> bytes:
        label = cell.label
        if by:
            return _pack((self._tenant, label, *by))
        found = self._aads.get(label)
        if found is None:
            found = self._aads[label] = _pack((self._tenant, label))
        return found

    def _keyed(self, cell: Cell, parts: tuple[Any, ...]) -> Any:
        return blake3(_pack((self._tenant, cell.label, *parts)), key=self._index)

    def proof(self) -> bytes:
        """The index key, sealed with the key in use: shows whether a key is the right one."""
        return self._sealed(Cell(_PROOF), self._index, ())

    # Opening

    def open(self, cell: Cell, value: Any, by: tuple[Any, ...]) -> Any:
        """What a stored cell says. Raises UnknownKey, NotEncrypted, Damaged."""
        sort = cell.sort
        if sort == "blob":
            if type(value) is not bytes or value[:_ID_AT] != MARK:
                raise self._plain(cell)
            sealed = value
        elif sort == "text":
            if type(value) is not str or not value.startswith(TEXT_MARK):
                raise self._plain(cell)
            sealed = _bytes_of(value)
        elif sort == "lock":
            return None
        else:
            return value
        text = self._opened(cell, sealed, by)
        return text if sort == "blob" else text.decode()

    def _opened(self, cell: Cell, sealed: bytes, by: tuple[Any, ...]) -> bytes:
        key = sealed[_ID_AT:_NONCE_AT]
        opener = self._openers.get((cell.label, key))
        if opener is None:
            if len(sealed) < _BYTES_MIN:
                raise self._damaged(cell)
            if key not in self.keys.by_id:
                raise UnknownKey(key)
            opener = self._cipher(cell.label, key)
        try:
            return opener.decrypt(sealed[_NONCE_AT:_TEXT_AT], sealed[_TEXT_AT:], self._aad(cell, by))
        except (InvalidTag, ValueError):
            raise self._damaged(cell) from None

    def _damaged(self, cell: Cell) -> Damaged:
        return Damaged(
            f"a cell of {cell.label} does not open with its key: it was changed, cut short, or moved here from another "
            "row; run `perdure store verify`"
        )

    def _plain(self, cell: Cell) -> NotEncrypted:
        return NotEncrypted(
            f"a cell of {cell.label} of tenant {self.name!r} is not encrypted, and encryption is on: nothing of it was "
            "used. If it was written before encryption was turned on, run `perdure keys encrypt`; if not, somebody "
            "has written past Perdure"
        )

    def unknown(self, key: bytes, cell: Cell | None = None) -> KeyMissing | Damaged:
        """The error for a cell whose key nobody gave us; one that the store never heard of is damage."""
        if cell is not None and key not in self.rows:
            return self._damaged(cell)
        return KeyMissing(
            f"data of tenant {self.name!r} is encrypted with key {key.hex()}, which was not given: "
            "add it to the keys of the store (as an older key), or restore the key file from its backup",
            tenant=self.name,
            key=key.hex(),
        )

    # Encrypting anew: on cells as they are stored

    def prefixes(self, table: Table) -> dict[str, Any]:
        """What the cells of a table begin with, if they are sealed with the key in use; by column."""
        starts: dict[str, Any] = {
            "blob": MARK + self.current,
            "text": TEXT_MARK + self.current.hex(),
        }
        return {column: starts.get(cell.sort) for column, cell in zip(table.columns(), table.cells, strict=True)}

    def renewed(self, cell: Cell, value: Any, by: tuple[Any, ...], *, plain: bool) -> Any:
        """A stored cell under the key in use. `plain`: one that is not encrypted yet is encrypted."""
        if value is None:
            return None
        if cell.sort == "index":
            start = INDEX_MARK if type(value) is bytes else INDEX_TEXT_MARK
            return value if value.startswith(start) or not plain else self.seal(cell, value, by)
        try:
            return self.seal(cell, self.open(cell, value, by), by)
        except NotEncrypted:
            if not plain:
                raise
        except (UnknownKey, Damaged):
            # A text of a user's own may begin like a sealed cell, but nobody's names a key that is in use.
            if not plain or cell.sort != "text" or _bytes_of(value)[_ID_AT:_NONCE_AT] in self.rows:
                raise
        return self.seal(cell, value, by)


def _bytes_of(text: str) -> bytes:
    """A sealed text as a sealed blob; what is no sealed text gives one that does not open."""
    try:
        key = bytes.fromhex(text[_TEXT_ID_AT:_TEXT_BODY_AT])
        return MARK + key + b64decode(text[_TEXT_BODY_AT:], validate=True)
    except ValueError:
        return b""


def locks_of(
    tenant: int,
    name: str,
    keys: Keys,
    current: bytes,
    proof: tuple[bytes, bytes] | None,
    rows: dict[bytes, int],
    at: float,
) -> Locks | None:
    """A tenant's keys at work, by one that the store has the proof of. None if that is damaged. Without a proof: of a
    tenant that has none yet."""
    # Here and not where it is asked for, so that no key is in a frame that an error is raised from.
    index = _first_index_key(keys) if proof is None else open_proof(tenant, keys, *proof)
    return None if index is None else Locks(tenant, name, keys, current, index, rows, at)


def _first_index_key(keys: Keys) -> bytes:
    """The key of what is searched for, of a tenant that has none yet: made from its first key, so that
    two processes that begin at once make the same."""
    return blake3(keys.by_id[keys.current], derive_key_context="perdure 2026 index key").digest()


def open_proof(tenant: int, keys: Keys, key: bytes, proof: bytes) -> bytes | None:
    """The index key that a proof holds; None if the key is not the one that it was made with."""
    locks = Locks(tenant, "", keys, key, b"", {}, 0.0)
    try:
        return locks._opened(Cell(_PROOF), proof, ())
    except (Damaged, UnknownKey):
        return None
