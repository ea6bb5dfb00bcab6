"""Threads: named lines of work whose states are saved, loaded, forked, compared and pruned."""
