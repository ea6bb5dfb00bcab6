"""Looking into what happened: incidents, sandboxes, audits, datasets. Built on snapshots and journals.

Nothing below imports this package: it can be removed as a folder, with `cli/forensics.py`. What a failed run records
is `runs/calls/evidence.py`.
"""

from perdure.late import late_names

__getattr__, __dir__, __all__ = late_names(__name__)
