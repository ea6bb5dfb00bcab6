"""The log: records chained by hash, stored as differences between keyframes, read back and checked.

`records` has the row and its hash, `append` writes it, `reading` rebuilds a state, `gc` removes records, and `verify`
checks them. The programs here take the numbers of tenants and threads; `threads` has the handles that users see.
"""
