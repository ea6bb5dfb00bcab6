"""Encryption of a store: keys and their cache, the cipher of columns, the driver that encrypts."""
