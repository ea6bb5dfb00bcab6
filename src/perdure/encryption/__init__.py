"""Encryption of a store: keys and their cache, the cipher of columns, the driver that encrypts."""

from perdure.encryption.keys import KeyFile, KeyProvider, Keys, StaticKeys

__all__ = ["KeyFile", "KeyProvider", "Keys", "StaticKeys"]
