"""Operating a store: what goes and when, copies of it, its health, its repair. Above threads and runs."""
