"""Parallel branches of a run, which replay the way they went."""
