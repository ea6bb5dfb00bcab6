"""Schedules: rows that name a durable function and its instants. Workers start a run for each instant, once."""
