"""Long-term memory: items in namespaces, found by their words and their meaning. Working memory: what a model reads.

The database stores and the process ranks: `words` computes the terms of an item, `segments` ranks the items of a scope.
"""

from perdure.late import late_names

__getattr__, __dir__, __all__ = late_names(__name__)
