"""Parallel branches of a run, which replay in their recorded order."""
