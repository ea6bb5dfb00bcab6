"""Transfers: copy data between two stores. Every copy of a store's data is itself a store.

`whole.py` copies everything into an empty store: numbers stay, and no key is needed. `threads.py`, `runs.py` and
`memory.py` copy into any store, under new numbers, and the target encrypts with its own keys. Each unit is read from
one snapshot of the source, and written and verified in one transaction of the target.
"""
