"""Repair of a damaged store: data that its hash proves is kept, and all other data is reported."""
