"""SQLite: the driver, its writer and commit queue, the file lock between processes, opening, salvage of pages."""
