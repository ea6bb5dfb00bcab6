"""Parallel branches of a run, which replay in their recorded order.

`calls` has what users call (`gather`, `map`, `first`), `threads` runs the branches of sync runs, `tasks` those of async
runs, and `branches` holds what both share.
"""
