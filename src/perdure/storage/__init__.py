"""The bottom layer: programs (generators of SQL) and the drivers that run them in one transaction each."""
