"""Branches of a run that go on at the same time and replay the way they went."""
