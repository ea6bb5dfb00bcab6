"""Compaction by retention rules, and erasure."""
