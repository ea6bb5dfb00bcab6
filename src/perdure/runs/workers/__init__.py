"""Workers: they claim due runs and execute them."""
