"""Values: how a state becomes text, and how two texts differ. Pure functions; nothing here does I/O."""
