"""Copies: threads to files and back, backups of a store in use, restoring them."""
