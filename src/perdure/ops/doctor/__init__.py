"""The checks of `store.ops.doctor()`, each with a hint of what to do."""
