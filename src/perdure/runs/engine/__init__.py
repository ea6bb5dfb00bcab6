"""Beginning, claiming and executing a run in this process."""
