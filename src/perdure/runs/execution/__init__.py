"""The execution of one run in this process: its journal in memory, the position of its code, and what stops it."""
