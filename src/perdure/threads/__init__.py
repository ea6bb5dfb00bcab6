"""Threads: named histories of states that are saved, loaded, forked, compared and pruned."""
