"""Workers: processes that run what is due."""
