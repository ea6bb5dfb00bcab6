"""Cold data in an object store: moving it there and back, and removing what nothing names."""
