"""A second region: replicate a store, promote the replica, drill the loss of the first.

Nothing below imports this package: it can be removed as a folder, with `cli/regions.py`.
"""

from perdure.late import late_names

__getattr__, __dir__, __all__ = late_names(__name__)
