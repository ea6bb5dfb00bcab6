"""Mending a damaged store."""
