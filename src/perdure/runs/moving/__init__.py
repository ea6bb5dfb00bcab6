"""Taking a run out of one store and into another."""
