"""Long-term memory: items in namespaces, found by their words and their meaning.

The database stores and the process ranks: `words` computes the terms of an item, `segments` ranks the items of a scope.
The public names of `working_memory` are offered here too.
"""

from perdure.late import late_names

__getattr__, __dir__, __all__ = late_names(__name__)
