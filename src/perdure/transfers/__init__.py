"""Transfers: copy data between two stores. Every copy of a store's data is itself a store.

Backup, restore, export, import, moving a run, and SQLite to PostgreSQL are all transfers. Each store may be SQLite or
PostgreSQL. Numbers (tenant, thread, tree, run, body) belong to one store, so there are two kinds of transfer:

    whole.py      everything, into an empty store. Numbers stay, so every row is copied as it is: hashes stay valid, and
                  encrypted columns stay encrypted, with the tenant's key rows beside them. Copying needs no key.
                  The tables and their keys are read from the database's catalogue, so a domain that adds a table
                  registers nothing. A SQLite file is copied to a file by SQLite's online backup (`backup.py`).
    threads.py    threads, into any store, under new numbers. A thread is copied with the records that it needs, and
                  without its forks. Record ids and hashes stay, because a hash covers no number.
    runs.py       a run and the runs it started, into any store. Their journals' checksums are recomputed, because they
                  cover the run's number. An unfinished run moves: it is fenced in the source before it can be claimed
                  in the target, so it continues in one place only.

Threads and runs are read and written through the drivers of both stores, so the target encrypts with its own keys.
That is how a tenant whose key leaked gets a new one: by a transfer into a new store.

Each unit (everything, the threads of one tree, a finished run) is read from one snapshot of the source
(`read_ahead.py`), and written and verified in one transaction of the target. A killed transfer leaves no partial unit,
and the same call copies the remaining ones.

`fencing.py` invalidates the leases and fences of the original's processes in a copy that continues an earlier point in
time. `catalogue.py` records which copies exist, because erasing cannot reach them. `files.py` gives a copy its name, on
a disk or in an object store, only when it is complete.
"""
