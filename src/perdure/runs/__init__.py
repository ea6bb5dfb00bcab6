"""Durable runs: functions that go on where they were, steps that are recorded once, effects that are not repeated."""
