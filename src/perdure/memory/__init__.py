"""Long-term memory: items in namespaces, found by their words and their meaning.

The database stores, the process ranks: `words` makes the terms of an item, `segments` ranks the items of a scope.
"""
