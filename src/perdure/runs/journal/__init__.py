"""Programs on the tables of runs: rows, journal entries, large results, queues and claims."""
