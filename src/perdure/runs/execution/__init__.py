"""One run while a process has it: its journal in memory, where the code is, what stops it."""
