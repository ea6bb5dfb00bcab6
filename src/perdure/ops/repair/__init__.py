"""Repair of a damaged store: what a hash proves stays, the rest is named."""
