"""Durable runs: functions that resume after a crash, steps recorded once, effects that are never repeated blindly."""
