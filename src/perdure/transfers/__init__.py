"""Transfer: every copy of a store's data is itself a store, and one mechanism makes all copies.

Backup, restore, export, import, moving a run and SQLite to PostgreSQL are transfers between two stores, each
SQLite or PostgreSQL. There are two kinds, because numbers (tenant, thread, tree, run, body) belong to one store:

    whole.py      everything, into an empty store. Numbers stay, so every row is copied as it is: hashes stay valid and
                  encrypted columns stay encrypted, with the tenant's key rows beside them. No key is needed to copy.
                  The tables and their keys are read from the database's catalogue: a domain that adds a table has
                  nothing to register. A whole SQLite file to a file is SQLite's online backup instead (`backup.py`).
    threads.py    threads into any store, under new numbers. A thread takes along the records that it needs and nothing
                  of its forks. Record ids and hashes stay, because a hash covers no number.
    runs.py       a run and the runs it started, into any store. Their journals' sums are made anew, because they cover
                  the run's number. A run that is not finished moves: it is fenced in the source before it can be
                  claimed in the target, so it continues in one place only.

Threads and runs are read and written through both stores' own drivers: the target encrypts with its own keys. So a
tenant whose key leaked is transferred into a new store.

Each of them (everything, the threads of one tree, a run) is read from one snapshot of the source (`snapshot.py`) and
arrives, verified, in one transaction of the target: a kill leaves nothing of it, and the same call copies the rest.

`fencing.py` is for copies that continue an earlier point in time: processes of the original must not fit in.
`catalogue.py` remembers which copies exist, because erasing cannot reach them. `files.py` makes a copy appear under its
name, on a disk or in an object store, only when it is whole.
"""
