"""Descriptions of a user's functions: name, arguments, schemas, retries, callbacks. No I/O, and no run is needed."""
