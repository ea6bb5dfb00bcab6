"""Durable runs: functions that resume where they were, steps that are recorded once, effects that are not repeated."""
