"""The tables of runs as programs: rows, journal entries, large results, queues and who may claim what."""
